"""Lines of texts in the encodings that editors and shells write."""

import io
from types import SimpleNamespace

import pytest

from gputrain.errors import UserError
from gputrain.speech.text.lines import text_lines
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
