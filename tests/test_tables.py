"""Tables of cases: every wrong row fails the test, and no row is passed over."""

import inspect

import pytest
import torch

from tests.tables import check_rows, each_row


@each_row((1, 1), (2, 3), ("a" * 999, "b"))
def wrong_in_two_rows(one, other):
    assert one == other


def test_every_wrong_row_is_listed_with_its_error():
    with pytest.raises(pytest.fail.Exception) as failed:
        wrong_in_two_rows()
    heads = [line for line in str(failed.value).splitlines() if not line.startswith(" ")]
    assert heads[:2] == ["2 of 3 rows fail", "row 2: 2, 3"]
    assert heads[2].startswith("row 3: 'aaaa")
    assert len(heads[2]) < 200
    assert "AssertionError: assert 2 == 3" in str(failed.value)
    assert isinstance(failed.value.__cause__, AssertionError)


def test_an_error_that_does_not_come_and_an_empty_table_fail():
    def check(value):
        with pytest.raises(ValueError, match="not a number"):
            float(value)

    with pytest.raises(pytest.fail.Exception, match="1 of 1 rows fail"):
        check_rows([("7",)], check)
    with pytest.raises(AssertionError, match="the table is empty"):
        check_rows([], check)


def test_fixtures_come_first_and_each_row_has_the_same_random_numbers():
    drawn = []

    @each_row("a", "b")
    def check(tmp_path, value):
        drawn.append((tmp_path, value, float(torch.rand(()))))

    assert list(inspect.signature(check).parameters) == ["tmp_path"]
    check(tmp_path="folder")
    assert [one[:2] for one in drawn] == [("folder", "a"), ("folder", "b")]
    assert drawn[0][2] == drawn[1][2]
