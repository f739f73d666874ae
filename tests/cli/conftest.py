"""Command lines as typed, without a process for each."""

import logging
import sys

import pytest

from gputrain.cli.app import main


@pytest.fixture
def typed(monkeypatch, capsys, tmp_path):
    """Runs a command line to its end, in a folder of its own; gives its exit code and what it said, in one line."""
    log = logging.getLogger("gputrain")
    for name in ("handlers", "propagate", "level"):  # which the command line sets
        monkeypatch.setattr(log, name, getattr(log, name))
    monkeypatch.chdir(tmp_path)

    def run(*words: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["gputrain", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        told = capsys.readouterr()
        assert "Traceback" not in told.err
        return int(ended.value.code or 0), " ".join((told.out + told.err).split())

    return run
