"""Downloads from a server that is slow, cuts off, lies, redirects and refuses."""

import gzip
import hashlib
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gputrain.errors import UserError
from gputrain.fetch.download import PAUSES, RemoteFile, download
from tests.command import ProgressSeen
from tests.server import Answer, WebServer, serving
from tests.tables import check_rows, each_row

CONTENT = bytes(range(256)) * 400
DIGEST = hashlib.sha256(CONTENT).hexdigest()
SIZE = len(CONTENT)
WRONG = CONTENT[:-1] + b"?"
PATH = "/releases/model.pth"


@pytest.fixture(scope="module")
def server() -> Iterator[WebServer]:
    with serving() as made:
        yield made


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Pauses(list[float]):
    """Notes the seconds of pauses in place of sleeping."""

    def __call__(self, seconds: float) -> None:
        self.append(seconds)


class Case:
    """A file on the server and its place on the disk."""

    def __init__(self, server: WebServer, folder: Path, **facts: object) -> None:
        server.log.clear()
        server.files.clear()
        self.server, self.served = server, server.add(PATH, **{"content": CONTENT, "etag": '"1"', **facts})
        self.target = folder / "model.pth"
        self.part = folder / "model.pth.partial"
        self.pauses = Pauses()
        shutil.rmtree(folder, ignore_errors=True)

    def get(self, path: str = PATH, url: str = "", **known: object) -> None:
        file = RemoteFile(url or self.server.url(path), page="https://example.org/about", **known)  # type: ignore[arg-type]
        download(file, self.target, sleep=self.pauses)

    def fails(self, path: str = PATH, **known: object) -> UserError:
        with pytest.raises(UserError) as caught:
            self.get(path, **known)
        assert caught.value.hint
        assert not self.target.exists()
        return caught.value

    @property
    def names(self) -> set[str]:
        return {path.name for path in self.target.parent.iterdir()}


KNOWN = {"size": SIZE, "sha256": DIGEST}


def test_a_file_arrives_verified_and_without_traces(server, tmp_path, cache):
    case = Case(server, tmp_path / "f")
    seen = ProgressSeen()
    download(RemoteFile(server.url(PATH), SIZE, DIGEST), case.target, progress=seen)
    assert case.target.read_bytes() == CONTENT
    assert case.names == {"model.pth"}
    assert seen[-1] == (SIZE, SIZE)
    case.get(**KNOWN)  # Nothing is asked for again.
    assert len(server.log) == 1


def test_damaged_files_are_downloaded_again(server, tmp_path, cache):
    case = Case(server, tmp_path / "f")
    for there in (WRONG, CONTENT[:100], b""):
        case.target.parent.mkdir(exist_ok=True)
        case.target.write_bytes(there)
        case.get(**KNOWN)
        assert case.target.read_bytes() == CONTENT


def test_cut_connections_are_continued(server, tmp_path, cache):
    """With a mark of the version, or with a SHA-256 that verifies the whole; else the file is downloaded anew."""
    rows = [
        ({"etag": '"1"'}, {}, True), ({"etag": ""}, KNOWN, True), ({"etag": ""}, {}, False),
        ({"etag": 'W/"1"'}, {}, False),
        ({"etag": "", "headers": {"Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}}, {}, True),
    ]  # fmt: skip

    def check(facts: dict[str, object], known: dict[str, object], continues: bool) -> None:
        case = Case(server, tmp_path / "f", **facts)
        case.served.answers = [Answer(cut_after=60_000), Answer(cut_after=10_000)]
        case.get(**known)
        assert case.target.read_bytes() == CONTENT
        expected = ["", "bytes=60000-", "bytes=70000-"] if continues else ["", "", ""]
        assert server.asked(PATH) == expected
        assert case.pauses == [*PAUSES[:2]]

    check_rows(rows, check)


def test_a_second_call_goes_on_where_the_first_broke_off(server, tmp_path, cache):
    """Only the missing bytes are sent. A mark of the version is sent along."""
    case = Case(server, tmp_path / "f")
    case.served.always = Answer(cut_after=1000)
    error = case.fails()
    assert "the connection was cut" in error.message
    there = 1000 * (len(PAUSES) + 1)
    assert error.hint.startswith(f"{there / 1000:g} kB of 102 kB have arrived; run the same command again")
    assert case.part.stat().st_size == there
    server.log.clear()
    case.served.always = Answer()
    case.get()
    assert case.target.read_bytes() == CONTENT
    assert server.asked(PATH) == [f"bytes={there}-"]
    assert server.log[0].headers["if-range"] == '"1"'
    assert server.sent(PATH) == SIZE - there


def test_an_end_that_looks_regular_but_comes_too_early(server, tmp_path, cache):
    """As behind a proxy that was cut off itself."""
    case = Case(server, tmp_path / "f")
    case.served.answers = [Answer(is_chunked=True, body=CONTENT[:1000])]
    case.get(**KNOWN)
    assert case.target.read_bytes() == CONTENT
    assert server.asked(PATH) == ["", "bytes=1000-"]


def test_the_length_may_be_known_later(server, tmp_path, cache):
    case = Case(server, tmp_path / "f")
    case.served.answers = [Answer(cut_after=1000, is_chunked=True)]
    case.get()
    assert case.target.read_bytes() == CONTENT
    assert server.asked(PATH) == ["", "bytes=1000-"]


@each_row(
    # What the server has at the second call, what arrives, and which ranges are asked for.
    ({"content": WRONG, "etag": '"2"'}, WRONG, ["bytes=5000-"]),
    ({"content": CONTENT[:500], "etag": '"2"'}, CONTENT[:500], ["bytes=5000-"]),
    ({"always": Answer(ignores_range=True)}, CONTENT, ["bytes=5000-"]),
    ({"answers": [Answer(416, body=b"")]}, CONTENT, ["bytes=5000-", ""]),
    ({"answers": [Answer(206, {"Content-Range": f"bytes 7-8/{SIZE}"}, b"xx")]}, CONTENT, ["bytes=5000-", ""]),
    ({"answers": [Answer(206, {"Content-Range": "bytes 5000-5001/9000"}, b"xx")]}, CONTENT, ["bytes=5000-", ""]),
)
def test_what_cannot_be_continued_is_downloaded_anew(server, tmp_path, cache, facts, content, asked):
    case = Case(server, tmp_path / "f")
    case.served.always = Answer(cut_after=1000)
    case.fails()
    server.log.clear()
    case.served.always = Answer()
    for name, value in facts.items():
        setattr(case.served, name, value)
    case.get()
    assert case.target.read_bytes() == content
    assert server.asked(PATH) == asked
    assert case.names == {"model.pth"}


def test_the_part_of_another_address_is_not_continued(server, tmp_path, cache):
    """Even if both files have the same mark of their version."""
    case = Case(server, tmp_path / "f")
    case.served.always = Answer(cut_after=1000)
    case.fails()
    server.add("/other.pth", WRONG, etag='"1"')
    case.get("/other.pth")
    assert case.target.read_bytes() == WRONG
    assert server.asked("/other.pth") == [""]


def test_a_file_that_changed_without_its_mark_is_found_by_its_sha256(server, tmp_path, cache):
    """The parts of two versions are not one file: it is downloaded anew."""
    case = Case(server, tmp_path / "f", content=WRONG[::-1])
    case.served.always = Answer(cut_after=1000)
    case.fails(**KNOWN)
    case.served.content, case.served.always = CONTENT, Answer()
    case.get(**KNOWN)
    assert case.target.read_bytes() == CONTENT
    assert server.asked(PATH)[-2:] == ["bytes=5000-", ""]


def test_wrong_bytes_are_refused(server, tmp_path, cache):
    case = Case(server, tmp_path / "f", content=WRONG)
    error = case.fails(**KNOWN)
    assert error.message == f"model.pth: its SHA-256 is {hashlib.sha256(WRONG).hexdigest()}, expected {DIGEST}"
    assert error.hint.endswith("its page is https://example.org/about")
    assert not case.names
    assert server.asked(PATH) == [""]


def test_another_size_is_refused_before_the_download(server, tmp_path, cache):
    case = Case(server, tmp_path / "f", content=CONTENT + b"1")
    error = case.fails(size=SIZE)
    assert error.message == f"{server.url(PATH)}: has 102,401 bytes, expected 102,400"
    assert not case.names


def test_an_endless_file_is_stopped_early(server, tmp_path, cache):
    """No length is stated, so that only the bytes themselves show it."""
    case = Case(server, tmp_path / "f", content=100 * CONTENT)
    case.served.always = Answer(is_chunked=True, block=1 << 14)
    assert "sends more than the 102,400 bytes that are stated" in case.fails(size=SIZE).message
    assert not case.names
    assert server.sent(PATH) < 50 * SIZE


@each_row(
    ({"is_chunked": True}, {}, CONTENT),
    ({"is_chunked": True}, KNOWN, CONTENT),
    ({"block": 10_000, "pause": 0.01}, KNOWN, CONTENT),
    # It compresses what it sends, and states the compressed length.
    ({"body": gzip.compress(CONTENT), "headers": {"Content-Encoding": "gzip"}}, KNOWN, CONTENT),
    ({"body": gzip.compress(CONTENT), "headers": {"Content-Encoding": "gzip"}}, {}, CONTENT),
    ({"stated_length": 500}, {}, CONTENT[:500]),  # No more than stated is ever read.
)
def test_odd_servers_are_accepted(server, tmp_path, cache, answer, known, content):
    case = Case(server, tmp_path / "f")
    case.served.always = Answer(**answer)
    case.get(**known)
    assert case.target.read_bytes() == content
    assert not case.pauses


def test_a_length_that_never_arrives(server, tmp_path, cache):
    case = Case(server, tmp_path / "f")
    case.served.always = Answer(stated_length=SIZE + 500)
    error = case.fails()
    assert "the connection was cut" in error.message
    assert error.hint.startswith("102 kB of 103 kB have arrived")
    assert len(server.log) <= 2 * (len(PAUSES) + 1)


@each_row(
    (401, "refuses it without a login (status 401)", "~/.netrc"),
    (403, "refuses it without a login (status 403)", "~/.netrc"),
    (404, "there is no such file (status 404)", "check the address"),
    (410, "there is no such file (status 410)", "check the address"),
    (451, "refused with status 451", "open the address in a browser"),
)
def test_refusals_are_final(server, tmp_path, cache, status, message, remedy):
    case = Case(server, tmp_path / "f", content=b"refused")
    case.served.always = Answer(status)
    error = case.fails()
    assert message in error.message
    assert remedy in error.hint
    assert "https://example.org/about" in error.hint
    assert len(server.log) == 1
    assert not case.names


@each_row(
    ([Answer(429, {"Retry-After": "7"}), Answer(503)], [7.0, 2.0]),
    ([Answer(500), Answer(502), Answer(504), Answer(408)], [*PAUSES]),
    ([Answer(503, {"Retry-After": "Thu, 01 Jan 2015 00:00:00 GMT"})], []),
    ([Answer(429, {"Retry-After": "soon"})], [1.0]),
)
def test_busy_servers_are_asked_again(server, tmp_path, cache, answers, pauses):
    case = Case(server, tmp_path / "f")
    case.served.answers = [*answers]
    case.get(**KNOWN)
    assert case.target.read_bytes() == CONTENT
    assert case.pauses == pauses


def test_servers_that_stay_busy(server, tmp_path, cache):
    case = Case(server, tmp_path / "f")
    case.served.always = Answer(503)
    error = case.fails()
    assert error.message.endswith("the server has a fault or is busy (status 503)")
    assert "run the same command again later" in error.hint
    assert len(server.log) == len(PAUSES) + 1
    case.served.always = Answer(429, {"Retry-After": "3600"})
    assert "too many requests (status 429), and asks to wait 60 minutes" in case.fails().message
    assert case.pauses == [*PAUSES]  # Nobody waits an hour.


def test_redirects_are_followed(server, tmp_path, cache):
    """Relative and absolute ones, also while a download is continued."""
    case = Case(server, tmp_path / "f")
    server.add("/a", status=302).always.headers["Location"] = "releases/../b"
    server.add("/b", status=307).always.headers["Location"] = server.url(PATH)
    case.served.answers = [Answer(cut_after=1000)]
    case.get("/a", **KNOWN)
    assert case.target.read_bytes() == CONTENT
    assert server.asked(PATH) == ["", "bytes=1000-"]


@each_row(
    ("/loop", "redirects more than 10 times"),
    ("http://example.org/file", "redirects to http://example.org/file, which is not encrypted"),
    ("ftp://example.org/file", "is no web address"),
)
def test_redirects_that_lead_nowhere(server, tmp_path, cache, location, message):
    case = Case(server, tmp_path / "f")
    server.add("/loop", status=302).always.headers["Location"] = location
    assert message in case.fails("/loop").message
    assert not case.names


@each_row(
    ("http://example.org/model.pth?token=secret", "http://example.org/model.pth: is not encrypted"),
    ("ftp://example.org/model.pth", "is no web address"),
    ("https:///model.pth", "is no web address"),
    ("https://[::1/model.pth", "is no web address"),
    ("http://127.0.0.1:1/model.pth", "127.0.0.1:1: no connection: "),
)
def test_addresses_that_cannot_be_used(server, tmp_path, cache, url, message):
    case = Case(server, tmp_path / "f")
    error = case.fails(url=url)
    assert message in error.message
    assert "secret" not in error.message + error.hint
    assert not case.pauses


@each_row(
    (b"<!DOCTYPE html><title>Sign in</title>", {}, "a web page"),
    (b"  \n<html>", {}, "a web page"),
    (b"please wait", {"Content-Type": "text/html; charset=utf-8"}, "a web page"),
    (b'{"error": "quota"}', {"Content-Type": "application/json"}, "a message"),
    (b"", {}, "nothing"),
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:1", {}, "a pointer of Git LFS"),
)
def test_other_content_is_no_file_and_loses_nothing(server, tmp_path, cache, body, headers, what):
    case = Case(server, tmp_path / "f")
    case.served.always = Answer(cut_after=1000)
    case.fails()
    case.served.always = Answer(200, headers, body)
    assert f"the server sent {what} instead of the file" in case.fails().message
    assert case.part.stat().st_size == 5000
    case.served.always = Answer()
    case.get()
    assert case.target.read_bytes() == CONTENT


def test_a_web_page_is_a_file_too(server, tmp_path, cache):
    case = Case(server, tmp_path / "f", content=b"<html></html>", headers={"Content-Type": "text/html"})
    case.target = tmp_path / "page.html"
    case.get()
    assert case.target.read_bytes() == b"<html></html>"


def test_a_full_disk_keeps_what_has_arrived(server, tmp_path, cache, monkeypatch):
    """Where the size is stated, it is refused at once."""
    case = Case(server, tmp_path / "f")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10, 5, 5000))
    error = case.fails(**KNOWN)
    assert "has 5 kB free, model.pth needs 102 kB" in error.message
    assert "--output-dir" in error.hint
    assert not case.names


def test_two_processes_wait_for_one_another(server, tmp_path, cache):
    """The file is sent once."""
    case = Case(server, tmp_path / "f")
    case.served.always = Answer(block=4096, pause=0.01)
    threads = [threading.Thread(target=case.get, kwargs=KNOWN) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert case.target.read_bytes() == CONTENT
    assert server.asked(PATH) == [""]
