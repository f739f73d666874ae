"""Files of other addresses than the Hub's: in the cache, in the user's folder, verified and repaired."""

import hashlib
import json
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gputrain.errors import UserError
from gputrain.fetch.addresses import Address, FetchedPlace, address_of, address_of_url, fetch_address
from gputrain.fetch.catalogue import catalogue
from gputrain.fetch.download import only_process
from tests.fetch.test_archives import files_of, write_zip
from tests.server import Answer, WebServer, serving
from tests.tables import each_row
from tests.waiting import wait_until

CONTENT = bytes(range(256)) * 40
DIGEST = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture(scope="module")
def web():
    with serving() as made:
        yield made


@pytest.fixture
def server(web: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WebServer:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    web.files.clear()
    web.log.clear()
    web.add("/v1/model.pth", CONTENT, etag='"1"')
    return web


def published(server: WebServer, **facts: object) -> Address:
    known = {"size": len(CONTENT), "sha256": DIGEST, **facts}
    return Address("a-model", server.url("/v1/model.pth"), "model.pth", **known)  # type: ignore[arg-type]


def test_a_file_is_downloaded_once_for_all_runs(server, tmp_path):
    path = fetch_address(published(server))
    assert path.read_bytes() == CONTENT
    assert path.name == "model.pth"
    assert path.is_relative_to(tmp_path / "cache" / "gputrain")
    assert fetch_address(published(server)) == path
    assert fetch_address(address_of_url(server.url("/v1/model.pth"))) == path  # Whatever its name.
    assert len(server.log) == 1


def test_what_may_be_secret_in_an_address_is_kept_nowhere(server, tmp_path, caplog):
    address = address_of_url(server.url("/v1/model.pth?token=secret").replace("://", "://ann:secret@"))
    with caplog.at_level(logging.INFO):
        assert fetch_address(address).read_bytes() == CONTENT
    assert f"from 127.0.0.1:{server.server_port}" in caplog.text
    assert "secret" not in caplog.text
    assert not any(b"secret" in path.read_bytes() for path in (tmp_path / "cache").rglob("*") if path.is_file())


@each_row(
    ({}, CONTENT[:-1] + b"?", False),  # The size is right, which a run compares.
    ({}, CONTENT[:-1], True),
    ({"size": None, "sha256": ""}, CONTENT[:-1] + b"?", False),  # As it was when it was downloaded.
    ({"size": None, "sha256": ""}, b"", True),
)
def test_damage_in_the_cache_is_repaired(server, tmp_path, known, damaged, at_once):
    address = published(server, **known)
    path = fetch_address(address)
    path.write_bytes(damaged)
    assert fetch_address(address).read_bytes() == (CONTENT if at_once else damaged)
    assert fetch_address(address, thoroughly=True).read_bytes() == CONTENT
    path.unlink()
    assert fetch_address(address).read_bytes() == CONTENT


def test_a_failed_repair_keeps_what_is_there(server):
    path = fetch_address(published(server))
    path.write_bytes(CONTENT[:-1])
    server.files["/v1/model.pth"].always = Answer(404)
    with pytest.raises(UserError, match="there is no such file"):
        fetch_address(published(server))
    assert path.read_bytes() == CONTENT[:-1]


def test_a_folder_of_the_user_gets_a_plain_file(server, tmp_path):
    """Downloaded there, or copied from the cache, without traces."""
    for number, asked in enumerate((1, 2, 2)):  # The third one is copied from the cache.
        folder = tmp_path / f"weights{number}"
        assert fetch_address(published(server), folder) == folder / "model.pth"
        assert files_of(folder) == {"model.pth": CONTENT}
        if number == 1:
            fetch_address(published(server))
            asked += 1
        assert len(server.log) == asked + (number == 2)
        assert fetch_address(published(server), folder, thoroughly=True) == folder / "model.pth"
    unknown = published(server, size=None, sha256="")
    assert fetch_address(unknown, tmp_path / "u") == fetch_address(unknown, tmp_path / "u")


@each_row({}, {"size": None, "sha256": ""})
def test_a_file_of_the_user_is_not_replaced(server, tmp_path, known):
    """Whether the published one is in the cache or not."""
    address = published(server, **known)
    (tmp_path / "mine").mkdir(exist_ok=True)
    (tmp_path / "mine" / "model.pth").write_bytes(b"mine")
    for _ in range(2):
        with pytest.raises(UserError, match=r"mine/model\.pth: ") as caught:
            fetch_address(address, tmp_path / "mine")
        assert caught.value.hint == "it is not replaced: name another --output-dir"
        assert files_of(tmp_path / "mine") == {"model.pth": b"mine"}
        fetch_address(address)


def test_archives_are_unpacked(server, tmp_path):
    files = {"voice_2024/model.ckpt": b"weights", "voice_2024/config.json": b"{}"}
    write_zip(tmp_path / "a.zip", files)
    server.add("/voice_2024.zip", (tmp_path / "a.zip").read_bytes())
    address = Address("a-voice", server.url("/voice_2024.zip"), "voice_2024.zip", unpacks=True)
    path = fetch_address(address)
    assert files_of(path) == {"model.ckpt": b"weights", "config.json": b"{}"}
    assert files_of(fetch_address(address, tmp_path / "w")) == files_of(path)
    assert fetch_address(address, tmp_path / "w") == tmp_path / "w"
    assert len(server.log) == 1  # It was copied from the cache.
    (tmp_path / "w" / "config.json").unlink()
    assert files_of(fetch_address(address, tmp_path / "w")) == files_of(path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "model.ckpt").write_bytes(b"mine")
    with pytest.raises(UserError, match=r"mine/model\.ckpt: is there already, and is another file"):
        fetch_address(address, tmp_path / "mine")
    assert files_of(tmp_path / "mine") == {"model.ckpt": b"mine"}
    (path / "model.ckpt").write_bytes(b"damaged")
    assert files_of(fetch_address(address, thoroughly=True)) == files_of(tmp_path / "w")
    assert len(server.log) == 2
    assert not list(tmp_path.rglob("*.zip"))[1:]
    assert not list(tmp_path.rglob("*.download"))


def test_damaged_archives_leave_nothing(server, tmp_path):
    server.add("/a.zip", b"PK damaged")
    with pytest.raises(UserError, match="damaged"):
        fetch_address(address_of_url(server.url("/a.zip")))
    write_zip(tmp_path / "a.zip", {"model.ckpt": b"weights"})
    server.add("/a.zip", (tmp_path / "a.zip").read_bytes())
    assert files_of(fetch_address(address_of_url(server.url("/a.zip")))) == {"model.ckpt": b"weights"}


def test_another_process_is_waited_for(server, caplog):
    file = FetchedPlace(published(server)).file
    with caplog.at_level(logging.INFO), ThreadPoolExecutor() as pool:
        with only_process(file.with_name("model.pth.lock"), "a-model"):
            path = pool.submit(fetch_address, published(server))
            wait_until(lambda: "another process downloads a-model: waiting for it" in caplog.messages, "the message")
            assert not server.log
        assert path.result().read_bytes() == CONTENT


def test_offline(server, tmp_path, monkeypatch):
    path = fetch_address(published(server))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert fetch_address(published(server)) == path
    assert fetch_address(published(server), tmp_path / "copy").read_bytes() == CONTENT
    server.add("/other.pth", CONTENT)
    with pytest.raises(UserError, match="is not in the cache, and nothing may be downloaded") as caught:
        fetch_address(address_of_url(server.url("/other.pth")))
    assert "gputrain fetch" in caught.value.hint
    assert len(server.log) == 1


def test_the_server_may_name_the_file(server):
    """Where the address has no ending. The name is known later without asking."""
    named = {"Content-Disposition": "attachment; filename*=UTF-8''vae%20v1.ckpt"}
    server.add("/api/download/7", CONTENT, headers=named)
    server.add("/go", status=302).always.headers["Location"] = "/v1/model.pth?token=1"
    for path, name in (("/api/download/7", "vae v1.ckpt"), ("/go", "model.pth")):
        assert address_of_url(server.url(path)).file_name == name
        found = fetch_address(address_of_url(server.url(path)))
        assert (found.name, found.read_bytes()) == (name, CONTENT)
        server.log.clear()
        assert fetch_address(address_of_url(server.url(path))) == found
        assert not server.log


@each_row(
    ("https://github.com/o/r/blob/main/a/vgg.pth", "https://github.com/o/r/raw/main/a/vgg.pth", "vgg.pth"),
    ("https://example.org/a/b%20c.pt#top", "https://example.org/a/b%20c.pt#top", "b c.pt"),
    ("https://example.org/..%2F..%2Fx.pt", "https://example.org/..%2F..%2Fx.pt", "x.pt"),
    ("https://example.org/a%5Cb%3Ac.pt", "https://example.org/a%5Cb%3Ac.pt", "b_c.pt"),
)
def test_names_of_files_in_addresses(url, address, name):
    made = address_of_url(url)
    assert (made.url, made.file_name) == (address, name)
    assert not made.key.startswith(".")


@each_row("http://example.org/a.pt", "ftp://example.org/a.pt")
def test_other_addresses_are_refused(url):
    with pytest.raises(UserError):
        address_of_url(url)


def test_addresses_of_the_list():
    made = address_of(catalogue()["lpips-vgg16"])
    assert (made.file_name, made.size, made.sha256[:8]) == ("vgg16-397923af.pth", 553433881, "397923af")
    assert not made.unpacks


def test_a_record_of_another_version_is_no_fault(server):
    path = fetch_address(published(server))
    record = path.parent.with_name(f"{path.parent.name}.json")
    assert json.loads(record.read_text())["files"]["model.pth"] == {"size": len(CONTENT), "sha256": DIGEST}
    record.write_text("{}")
    assert fetch_address(published(server)) == path
    assert len(server.log) == 1
