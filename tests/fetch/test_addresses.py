"""Files of other addresses than the Hub's, from a server that is slow, cuts off, lies, redirects and refuses."""

import gzip
import hashlib
import logging
import shutil
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pooch
import pytest
from urllib3.response import HTTPResponse

from gputrain.errors import UserError
from gputrain.fetch import addresses
from gputrain.fetch.addresses import Address, address_of_url, fetch_address
from gputrain.fetch.names import address_of, catalogue
from tests.fetch.test_archives import files_of, write_zip
from tests.server import Answer, WebServer, serving
from tests.tables import each_row

CONTENT = bytes(range(256)) * 400
WRONG = CONTENT[:-1] + b"?"
DIGEST = hashlib.sha256(CONTENT).hexdigest()
KNOWN = {"size": len(CONTENT), "sha256": DIGEST}
PATH = "/v1/model.pth"


@pytest.fixture(scope="module")
def web():
    with serving() as made:
        yield made


@pytest.fixture
def server(web: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WebServer:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("pooch.core.time.sleep", lambda seconds: None)  # Between two attempts.
    web.files.clear()
    web.log.clear()
    web.add(PATH, CONTENT)
    return web


def published(server: WebServer, path: str = PATH, **facts: object) -> Address:
    facts = {**KNOWN, "page": "https://example.org/about", **facts}
    return Address("a-model", server.url(path), **facts)  # type: ignore[arg-type]


def unknown(server: WebServer, path: str = PATH) -> Address:
    return address_of_url(server.url(path))


def fails(address: Address) -> UserError:
    """Returns the error of a download, of which nothing may stay in the cache."""
    with pytest.raises(UserError) as caught:
        fetch_address(address)
    assert caught.value.hint
    assert "\n" not in caught.value.message
    assert not list(address.place.parent.rglob("*"))
    return caught.value


def test_a_file_is_downloaded_once_for_all_runs(server, tmp_path):
    path = fetch_address(published(server))
    assert path.read_bytes() == CONTENT
    assert path.name == "model.pth"
    assert path.is_relative_to(tmp_path / "cache" / "gputrain")
    assert fetch_address(published(server)) == path
    assert fetch_address(unknown(server)) == path  # Whatever its name.
    assert len(server.log) == 1
    assert files_of(path.parents[1]) == {f"{path.parent.name}/model.pth": CONTENT}


def test_what_may_be_secret_in_an_address_is_kept_and_said_nowhere(server, tmp_path, caplog, capfd, monkeypatch):
    monkeypatch.setattr(pooch.get_logger(), "handlers", [caplog.handler])
    pooch.get_logger().setLevel(logging.DEBUG)
    url = server.url(f"{PATH}?token=secret").replace("://", "://ann:secret@")
    address = address_of_url(url)
    said = []
    with caplog.at_level(logging.DEBUG, logger="gputrain"):
        for answer in (Answer(500), Answer(403), Answer(cut_after=9), Answer(302, {"Location": url}), Answer(418)):
            server.files[PATH].always = answer
            said.append(fails(address))
        said.append(fails(address_of_url(url.replace(str(server.server_port), "1"))))  # Nothing listens there.
        server.files[PATH].always = Answer()
        assert fetch_address(address).read_bytes() == CONTENT
    assert f"from 127.0.0.1:{server.server_port}" in caplog.text
    assert "secret" not in "".join([*(f"{one.message}{one.hint}" for one in said), caplog.text, *capfd.readouterr()])
    assert not any(b"secret" in path.read_bytes() for path in (tmp_path / "cache").rglob("*") if path.is_file())


@each_row(WRONG, CONTENT[:-1], b"")
def test_damage_in_the_cache_is_repaired(server, damaged):
    path = fetch_address(published(server))
    path.write_bytes(damaged)
    server.files[PATH].always = Answer(404)
    with pytest.raises(UserError, match="there is no such file"):
        fetch_address(published(server))
    assert path.read_bytes() == damaged  # A failed repair keeps what is there.
    server.files[PATH].always = Answer()
    assert fetch_address(published(server)).read_bytes() == CONTENT


def test_archives_are_unpacked(server, tmp_path):
    files = {"voice_2024/model.ckpt": b"weights", "voice_2024/config.json": b"{}"}
    write_zip(tmp_path / "a.zip", files)
    content = (tmp_path / "a.zip").read_bytes()
    server.add("/voice_2024.zip", b"PK damaged")
    address = Address("a-voice", server.url("/voice_2024.zip"))
    assert "damaged" in fails(address).message
    server.add("/voice_2024.zip", content)
    path = fetch_address(address)
    assert files_of(path) == {"model.ckpt": b"weights", "config.json": b"{}"}
    assert path.name == "voice_2024"
    server.log.clear()
    assert fetch_address(address) == path
    assert not server.log
    assert not list((tmp_path / "cache").rglob("*.zip"))


def test_two_processes_at_once_have_the_same_file(server):
    server.files[PATH].always = Answer(block=4096, pause=0.01)
    with ThreadPoolExecutor(3) as pool:
        paths = list(pool.map(fetch_address, [published(server)] * 3))
    assert len(set(paths)) == 1
    assert paths[0].read_bytes() == CONTENT
    assert len(files_of(paths[0].parents[1])) == 1


def test_offline(server, monkeypatch):
    path = fetch_address(published(server))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert fetch_address(published(server)) == path
    with pytest.raises(UserError, match="is not in the cache, and nothing may be downloaded") as caught:
        fetch_address(unknown(server, "/other.pth"))
    assert "gputrain fetch http" in caught.value.hint
    path.write_bytes(WRONG)
    with pytest.raises(UserError, match="a-model: is damaged in the cache, and nothing may be downloaded"):
        fetch_address(published(server))
    assert len(server.log) == 1


def test_the_server_may_name_the_file(server):
    """Where the address has no ending. The name is known later without asking."""
    named = {"Content-Disposition": "attachment; filename*=UTF-8''vae%20v1.ckpt"}
    server.add("/api/download/7", CONTENT, headers=named)
    server.add("/evil", CONTENT, headers={"Content-Disposition": 'attachment; filename="../../x/EVIL.pt"'})
    server.add("/go", status=302).always.headers["Location"] = f"{PATH}?token=1"
    for path, name in (("/api/download/7", "vae v1.ckpt"), ("/go", "model.pth"), ("/evil", "EVIL.pt")):
        found = fetch_address(unknown(server, path))
        assert (found.name, found.read_bytes()) == (name, CONTENT)
        assert found.parent == unknown(server, path).place
        server.log.clear()
        assert fetch_address(unknown(server, path)) == found
        assert not server.log


@each_row(
    ("https://github.com/o/r/blob/main/a/vgg.pth", "https://github.com/o/r/raw/main/a/vgg.pth", "vgg.pth"),
    ("https://example.org/a/b%20c.pt#top", "https://example.org/a/b%20c.pt#top", "b c.pt"),
    ("https://example.org/..%2F..%2Fx.pt", "https://example.org/..%2F..%2Fx.pt", "x.pt"),
    ("https://example.org/a%5Cb%3Ac.pt", "https://example.org/a%5Cb%3Ac.pt", "b_c.pt"),
    ("https://example.org/%2E%2E", "https://example.org/%2E%2E", ""),
)
def test_names_of_files_in_addresses(url, address, name):
    made = address_of_url(url)
    assert (made.url, made.file_name) == (address, name)
    assert made.place.parent.name == "fetched"
    assert not made.place.name.startswith(".")


def test_addresses_of_the_list():
    made = address_of(catalogue()["lpips-vgg16"])
    assert (made.file_name, made.size, made.sha256[:8]) == ("vgg16-397923af.pth", 553433881, "397923af")


# ---------------------------------------------------------------------------------- servers that fail, lie and redirect


def test_a_cut_connection_is_tried_again_and_never_mixes_two_versions(server):
    server.files[PATH].answers = [Answer(cut_after=60_000)]
    assert fetch_address(unknown(server)).read_bytes() == CONTENT
    assert server.asked(PATH) == ["", ""]
    server.add("/2.pth", CONTENT).answers = [Answer(body=WRONG[::-1], cut_after=60_000)]
    assert fetch_address(unknown(server, "/2.pth")).read_bytes() == CONTENT


@each_row(
    ({"cut_after": 60_000}, "broke off: IncompleteRead"), ({"cut_after": 60_000, "is_chunked": True}, "broke off"),
    ({"stated_length": len(CONTENT) + 500}, "broke off: IncompleteRead"), ({"status": 503}, "answers with error 503"),
)  # fmt: skip
def test_a_connection_that_stays_cut_leaves_nothing(server, answer, message):
    server.files[PATH].always = Answer(**answer)
    assert message in fails(unknown(server)).message


def test_a_cut_that_the_library_does_not_see(server, monkeypatch):
    """As urllib3 before 2.0 takes it."""
    init = HTTPResponse.__init__
    lenient = {"enforce_content_length": False}
    monkeypatch.setattr(HTTPResponse, "__init__", lambda *words, **facts: init(*words, **{**facts, **lenient}))
    server.files[PATH].always = Answer(cut_after=60_000)
    assert "the connection was cut" in fails(unknown(server)).message


def test_another_sha256_leaves_nothing_that_counts_as_fetched(server):
    server.files[PATH].content = WRONG
    error = fails(published(server))
    assert DIGEST in error.message
    assert hashlib.sha256(WRONG).hexdigest() in error.message
    assert error.hint.endswith("its page is https://example.org/about")
    server.files[PATH].content = CONTENT
    assert fetch_address(published(server)).read_bytes() == CONTENT


def test_another_size_is_refused_before_the_download(server):
    server.files[PATH].content = CONTENT + b"1"
    assert "sends more than the 102,400 bytes that are published" in fails(published(server)).message
    server.files[PATH].content, server.files[PATH].always = 100 * CONTENT, Answer(is_chunked=True, block=1 << 14)
    server.log.clear()
    assert "sends more than the 102,400 bytes" in fails(published(server, sha256="")).message
    assert server.sent(PATH) < 50 * len(CONTENT)


@each_row({"headers": {"Content-Encoding": "gzip"}}, {"headers": {"Content-Encoding": "gzip"}, "is_chunked": True})
def test_a_bomb_leaves_the_disk_its_reserve(server, monkeypatch, answer):
    """A file of unknown size, which says that it is compressed."""
    server.files[PATH].always = Answer(body=gzip.compress(bytes(300_000_000), 1), **answer)
    written = []
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=addresses.SPARED + 20_000_000))
    write = addresses.Download.write
    monkeypatch.setattr(addresses.Download, "write", lambda self, block: (write(self, block), written.append(block))[0])
    assert "sends more than the 20,000,000 bytes that the disk can spare" in fails(unknown(server)).message
    assert sum(map(len, written)) <= 20_000_000
    assert max(map(len, written)) < 100_000_000


def test_a_compressed_answer_is_no_larger_than_plausible(server, monkeypatch):
    monkeypatch.setattr(addresses, "SMALL", 1_000_000)
    packed = gzip.compress(bytes(30_000_000))
    server.files[PATH].always = Answer(body=packed, headers={"Content-Encoding": "gzip"})
    assert (
        f"more than the {100 * len(packed):,} bytes that the disk can spare, or its" in fails(unknown(server)).message
    )


# Without a length; and compressed, which states the compressed length.
@each_row({"is_chunked": True}, {"body": gzip.compress(CONTENT), "headers": {"Content-Encoding": "gzip"}})
def test_odd_servers_are_accepted(server, answer):
    for number, address in enumerate((unknown, published)):
        server.add(f"/{number}{len(answer)}.pth", CONTENT).always = Answer(**answer)
        assert fetch_address(address(server, f"/{number}{len(answer)}.pth")).read_bytes() == CONTENT


@each_row(
    (401, "refuses it without a login", "~/.netrc"), (404, "there is no such file", "check the address"),
    (403, "refuses it without a login", "~/.netrc"), (410, "there is no such file", "check the address"),
    (429, "too many requests", "wait some minutes"), (451, "answers with error 451", "run the command again later"),
)  # fmt: skip
def test_refusals(server, status, message, remedy):
    server.add(PATH, b"refused", status=status, headers={"Content-Type": "text/html"})
    error = fails(published(server))
    assert message in error.message
    assert remedy in error.hint
    assert "https://example.org/about" in error.hint


def test_other_content_is_no_file(server):
    server.files[PATH].always = Answer(200, {"Content-Type": "text/html; charset=utf-8"}, b"<title>Sign in</title>")
    assert "the server sent a web page instead of the file" in fails(unknown(server)).message
    server.files[PATH].always = Answer(200, {}, b"")
    assert "the connection was cut" in fails(unknown(server)).message
    server.add("/page.html", b"<html></html>", headers={"Content-Type": "text/html"})
    assert fetch_address(unknown(server, "/page.html")).read_bytes() == b"<html></html>"


def test_redirects_are_followed(server):
    server.add("/a.pth", status=302).always.headers["Location"] = "v1/../b"
    server.add("/b", status=307).always.headers["Location"] = server.url(PATH)
    assert fetch_address(published(server, "/a.pth")).read_bytes() == CONTENT


@each_row(
    ("/loop.pth", "redirects"),
    ("http://example.org/file?token=secret", "redirects to http://example.org/file, which is not encrypted"),
    ("//example.org/file", "redirects to http://example.org/file, which is not encrypted"),
    ("ftp://example.org/file", "is no web address"),
)
def test_redirects_that_lead_nowhere(server, monkeypatch, location, message):
    """No other server is asked."""
    asked, before = [], socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *more: asked.append(host) or before(host, *more))
    server.add("/loop.pth", status=302).always.headers["Location"] = location
    assert message in fails(unknown(server, "/loop.pth")).message
    assert set(asked) == {"127.0.0.1"}


@each_row(
    ("http://example.org/model.pth?token=secret", "http://example.org/model.pth: is not encrypted"),
    ("ftp://example.org/model.pth", "is no web address"),
    ("https:///model.pth", "is no web address"),
    ("https://[::1/model.pth", "is no web address"),
)
def test_addresses_that_cannot_be_used(url, message):
    with pytest.raises(UserError, match=message) as caught:
        address_of_url(url)
    assert "secret" not in caught.value.message + caught.value.hint


def test_a_full_disk(server, tmp_path, monkeypatch):
    def full(*words):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(addresses.Download, "write", full)
    error = fails(published(server))
    assert f"a-model: the disk of {tmp_path / 'cache' / 'gputrain'} is full" in error.message
    assert "XDG_CACHE_HOME" in error.hint
