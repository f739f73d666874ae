"""Files of the list that are not on the Hub, from a server that is slow, cuts off, lies and refuses."""

import hashlib
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pooch
import pytest

from gputrain.errors import UserError
from gputrain.fetch import hub
from gputrain.fetch.names import CatalogueEntry, fetch_listed
from tests.fetch.test_archives import files_of, write_zip
from tests.server import Answer, WebServer, serving, silent_server
from tests.tables import each_row

CONTENT = bytes(range(256)) * 400
WRONG = CONTENT[:-1] + b"?"
DIGEST = hashlib.sha256(CONTENT).hexdigest()
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


def published(server: WebServer, path: str = PATH, content: bytes = CONTENT, *, has_digest: bool = True):
    name = path.rpartition("/")[2]
    digests = {name: hashlib.sha256(content).hexdigest()} if has_digest else {}
    return CatalogueEntry(
        "a-model", "measure", "A model.", "MIT", "https://example.org/about", "--init-from", url=server.url(path),
        bytes=len(content), sha256=digests,
    )  # fmt: skip


def fails(entry: CatalogueEntry, folder: Path) -> UserError:
    """Returns the error of a download, of which nothing may stay in the cache."""
    with pytest.raises(UserError) as caught:
        fetch_listed(entry)
    assert caught.value.hint
    assert "\n" not in caught.value.message
    assert not list((folder / "cache" / "gputrain" / "fetched").rglob("*"))
    return caught.value


def test_a_file_is_downloaded_once_for_all_runs(server, tmp_path):
    path = fetch_listed(published(server))
    assert path.read_bytes() == CONTENT
    assert path.name == "model.pth"
    assert path.is_relative_to(tmp_path / "cache" / "gputrain")
    assert fetch_listed(published(server)) == path
    assert len(server.log) == 1
    assert files_of(path.parents[1]) == {f"{path.parent.name}/model.pth": CONTENT}


@each_row(WRONG, CONTENT[:-1], b"")
def test_damage_in_the_cache_is_repaired(server, damaged):
    path = fetch_listed(published(server))
    path.write_bytes(damaged)
    server.files[PATH].always = Answer(404)
    with pytest.raises(UserError, match="there is no such file"):
        fetch_listed(published(server))
    assert path.read_bytes() == damaged  # A failed repair keeps what is there.
    server.files[PATH].always = Answer()
    assert fetch_listed(published(server)).read_bytes() == CONTENT


def test_archives_are_unpacked(server, tmp_path):
    files = {"voice_2024/model.ckpt": b"weights", "voice_2024/config.json": b"{}"}
    write_zip(tmp_path / "a.zip", files)
    content = (tmp_path / "a.zip").read_bytes()
    server.add("/voice_2024.zip", b"PK damaged")
    assert "damaged" in fails(published(server, "/voice_2024.zip", b"PK damaged"), tmp_path).message
    server.add("/voice_2024.zip", content)
    entry = published(server, "/voice_2024.zip", content)
    path = fetch_listed(entry)
    assert files_of(path) == {"model.ckpt": b"weights", "config.json": b"{}"}
    assert path.name == "voice_2024"
    server.log.clear()
    assert fetch_listed(entry) == path
    assert not server.log
    assert not list((tmp_path / "cache").rglob("*.zip"))


def test_two_processes_at_once_have_the_same_file(server):
    server.files[PATH].always = Answer(block=4096, pause=0.01)
    with ThreadPoolExecutor(3) as pool:
        paths = list(pool.map(fetch_listed, [published(server)] * 3))
    assert len(set(paths)) == 1
    assert paths[0].read_bytes() == CONTENT
    assert len(files_of(paths[0].parents[1])) == 1


def test_offline(server, monkeypatch):
    path = fetch_listed(published(server))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert fetch_listed(published(server)) == path
    path.write_bytes(WRONG)
    with pytest.raises(UserError, match="is damaged in the cache"):
        fetch_listed(published(server))
    with pytest.raises(UserError, match="is not in the cache"):
        fetch_listed(published(server, "/2.pth"))


def test_a_server_that_says_nothing(server, tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "CONNECT_SECONDS", 0.2)
    with silent_server(accepts=True) as place:
        error = fails(replace(published(server), url=f"https://{place}/model.pth"), tmp_path)
    assert error.message == f"a-model: {place} cannot be reached: no connection in 0.2 s"
    assert "`gputrain fetch a-model` on another machine" in error.hint


def test_a_cut_connection_is_tried_again(server):
    server.files[PATH].answers = [Answer(cut_after=60_000)]
    assert fetch_listed(published(server)).read_bytes() == CONTENT
    assert server.asked(PATH) == ["", ""]


@each_row(
    (Answer(cut_after=60_000), "broke off"), (Answer(status=503), "answers with error 503"),
    (Answer(401), "refuses it without a login"), (Answer(404), "there is no such file"),
    (Answer(429), "too many requests"),
)  # fmt: skip
def test_what_a_server_refuses_leaves_nothing(server, tmp_path, answer, message):
    server.files[PATH].always = answer
    assert message in fails(published(server), tmp_path).message


@each_row((WRONG, True, DIGEST), (CONTENT + b"1", False, "102,401 bytes, and 102,400 are published"))
def test_other_content_is_no_file(server, tmp_path, content, has_digest, message):
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    server.files[PATH].content = content
    error = fails(published(server, has_digest=has_digest), tmp_path)
    assert message in error.message
    assert error.hint.endswith("its page is https://example.org/about")
    server.files[PATH].content = CONTENT
    assert fetch_listed(published(server, has_digest=has_digest)).read_bytes() == CONTENT


def test_a_full_disk(server, tmp_path, monkeypatch):
    def full(*words, **named):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pooch.HTTPDownloader, "__call__", full)
    error = fails(published(server), tmp_path)
    assert f"a-model: the disk of {tmp_path / 'cache' / 'gputrain'} is full" in error.message
    assert "XDG_CACHE_HOME" in error.hint
