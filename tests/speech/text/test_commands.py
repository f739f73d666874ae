"""`gputrain normalize`."""

import io
import subprocess
import sys

import pytest

from gputrain.config import assemble
from gputrain.errors import UserError
from gputrain.speech.text.commands import Normalize, normalize_lines


def said(**options: object) -> list[str]:
    return list(normalize_lines(assemble(Normalize, options)))


def test_lines_of_a_text():
    assert said(text="5 ta\nolma") == ["beshta", "olma"]


def test_files_and_standard_input(tmp_path, monkeypatch):
    path = tmp_path / "lines.txt"
    path.write_bytes("\ufeff5-sinf\r\n\r\nЁш\n".encode())
    assert said(input_file=str(path)) == ["beshinchi sinf", "", "yosh"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"7-may\n\n")))
    assert said() == ["yettinchi may", ""]


def test_characters_of_a_text():
    assert said(text="Aba", language="characters") == ["aba"]


def test_digits_without_rules_are_a_warning(caplog):
    """One for all lines; none where a language writes numbers, or where rules do."""
    assert said(text="a 1\na 2", language="characters") == ["a 1", "a 2"]
    (warning,) = caplog.messages
    assert "'a 1' keeps its digits: --number-words" in warning
    caplog.clear()
    said(text="a 1", language="characters", number_words="kk")
    said(text="a 1", language="en")
    said(text="a", language="characters")
    assert not caplog.messages


def test_bad_input_is_named(tmp_path):
    path = tmp_path / "latin1.txt"
    path.write_bytes(b"caf\xe9")
    with pytest.raises(UserError, match="line 1: not UTF-8"):
        said(input_file=str(path))
    with pytest.raises(UserError, match="No such file"):
        said(input_file=str(tmp_path / "none"))
    with pytest.raises(UserError, match="both given"):
        said(text="a", input_file=str(path))


def test_no_torch_is_imported():
    code = "import sys, gputrain.speech.text.commands; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
