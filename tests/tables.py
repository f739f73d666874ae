"""One test for a table of cases: it fails once, and lists every row that is wrong."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from tests.process import seed_all

slow = functools.partial(pytest.param, marks=pytest.mark.slow)  # A case of a parametrised test that takes seconds.


def check_rows(rows: Iterable[tuple[Any, ...]], check: Callable[..., None]) -> None:
    """Call check(*row) for each row, and fail with every wrong row and the first lines of its error.

    Each row has the random numbers of a test of its own. The first error is the cause of the failure, from which the
    missing package of a skipped test is known.
    """
    failed: list[str] = []
    cause, number = None, 0
    for number, row in enumerate(rows, start=1):
        seed_all()
        try:
            check(*row)
        except (Exception, pytest.fail.Exception) as error:
            cause = cause or error
            values = ", ".join(f"{value!r:.160}" for value in row)
            lines = f"{type(error).__name__}: {error}".splitlines()[:5]
            failed.append("\n    ".join([f"row {number}: {values}", *lines]))
    assert number, "the table is empty"
    if failed:
        message = f"{len(failed)} of {number} rows fail\n" + "\n".join(failed)
        raise pytest.fail.Exception(message, pytrace=False) from cause


def each_row(*rows: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make one test of a function whose last parameters are the values of a row, and whose first ones are fixtures.

    A row that is no tuple is a single value.
    """
    tuples = [row if isinstance(row, tuple) else (row,) for row in rows]

    def test_of(check: Callable[..., None]) -> Callable[..., None]:
        parameters = list(inspect.signature(check).parameters.values())
        fixtures = parameters[: len(parameters) - len(tuples[0])]

        @functools.wraps(check)
        def test(**given: Any) -> None:
            check_rows(tuples, functools.partial(check, *(given[fixture.name] for fixture in fixtures)))

        test.__signature__ = inspect.Signature(fixtures)  # type: ignore[attr-defined]
        return test

    return test_of
