"""Lines of texts in the encodings that editors and shells write, and `gputrain normalize`."""

import io
import subprocess
import sys
from types import SimpleNamespace

import pytest

from gputrain.config import assemble
from gputrain.errors import UserError
from gputrain.speech.config import Normalize
from gputrain.speech.text.lines import normalize_lines, text_lines
from tests.tables import each_row

TEXT = "Привет, 5 кг\nмир"


@each_row(
    (TEXT.encode(), TEXT.splitlines()),
    (TEXT.encode("utf-8-sig"), TEXT.splitlines()),
    (TEXT.encode("utf-16"), TEXT.splitlines()),
    (TEXT.encode("utf-32"), TEXT.splitlines()),
    (b"a\r\nb\rc\n\nd \xe2\x80\xa8 e\n", ["a", "b", "c", "", "d \u2028 e"]),
    (b"", []),
    (TEXT.encode("cp1251"), "line 1: not UTF-8"),
    (b"one\ncaf\xe9 two\n", "line 2: not UTF-8"),
    (TEXT.encode("utf-16")[:9], "line 1: not UTF-16"),
)
def test_lines_are_decoded_or_refused(tmp_path, raw, expected):
    (tmp_path / "text.txt").write_bytes(raw)
    if isinstance(expected, list):
        assert list(text_lines(tmp_path / "text.txt")) == expected
    else:
        with pytest.raises(UserError, match=expected):
            list(text_lines(tmp_path / "text.txt"))


def test_lines_of_standard_input_are_utf_8(monkeypatch):
    raw = "\ufeffПривет\r\n\nмир\n".encode() + b"caf\xe9\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(raw), encoding="cp1252"))
    lines = iter(text_lines(None))
    assert [next(lines) for _ in range(3)] == ["Привет", "", "мир"]
    with pytest.raises(UserError, match="standard input, line 4: not UTF-8"):
        next(lines)


def test_what_is_typed_is_decoded_as_the_terminal_says(monkeypatch):
    typed = SimpleNamespace(buffer=io.BytesIO("мир\n".encode("koi8-r")), isatty=lambda: True, encoding="koi8-r")
    monkeypatch.setattr("sys.stdin", typed)
    assert list(text_lines(None)) == ["мир"]


def test_a_closed_standard_input_is_an_error_of_the_user(monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(UserError, match="standard input is closed"):
        list(text_lines(None))


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


def test_texts_that_cannot_be_normalised_are_named(tmp_path):
    path = tmp_path / "latin1.txt"
    path.write_bytes(b"caf\xe9")
    with pytest.raises(UserError, match="line 1: not UTF-8"):
        said(input_file=str(path))
    with pytest.raises(UserError, match="No such file"):
        said(input_file=str(tmp_path / "none"))
    with pytest.raises(UserError, match="both given"):
        said(text="a", input_file=str(path))


def test_no_torch_is_imported():
    code = "import sys, gputrain.speech.text.lines; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
