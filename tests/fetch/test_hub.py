"""Names of the Hugging Face Hub, and what is fetched from a server in its place; each fault of it and what is said."""

import contextlib
import errno
import importlib.util
import json
import os
from pathlib import Path

import pytest
from huggingface_hub import hf_hub_download, try_to_load_from_cache

from gputrain.errors import UserError
from gputrain.fetch import hub as fetching
from gputrain.fetch.hub import HubName, open_repository, parse_hub_name
from tests.hub_server import GATED, NO_REPOSITORY, NO_REVISION, entry_of, etag_of, use_hub
from tests.server import Answer, silent_server
from tests.tables import each_row

LARGE = bytes(range(256)) * 4_000  # 1.024 MB
COMMIT = "0123456789abcdef" * 2 + "01234567"


@each_row(
    ("org/name", HubName("org/name")), ("org/name@v1.0", HubName("org/name", revision="v1.0")),
    ("org/name:vae", HubName("org/name", path="vae")), ("org/name:a/b.ckpt", HubName("org/name", path="a/b.ckpt")),
    ("org/name:sub/file.ckpt@refs/pr/3", HubName("org/name", path="sub/file.ckpt", revision="refs/pr/3")),
    (f"org/name:epoch=12-step=3.ckpt@{COMMIT}", HubName("org/name", path="epoch=12-step=3.ckpt", revision=COMMIT)),
    ("datasets/org/name:en/en_US", HubName("org/name", "dataset", "en/en_US")),
    ("facebook/mms-1b-all/adapter.uzb-script_latin.safetensors",
     HubName("facebook/mms-1b-all", path="adapter.uzb-script_latin.safetensors")),
    ("https://huggingface.co/org/name", HubName("org/name")), ("https://huggingface.co/org/name/", HubName("org/name")),
    ("http://www.huggingface.co/org/name/tree/main", HubName("org/name", revision="main")),
    ("https://huggingface.co/org/name/tree/main/vae", HubName("org/name", path="vae", revision="main")),
    ("https://huggingface.co/org/name/blob/v2/a/b%20c.ckpt", HubName("org/name", path="a/b c.ckpt", revision="v2")),
    ("https://huggingface.co/org/name/resolve/main/a.safetensors?download=true",
     HubName("org/name", path="a.safetensors", revision="main")),
    ("https://hf.co/datasets/org/name/blob/main/a.ckpt", HubName("org/name", "dataset", "a.ckpt", "main")),
    ("hf://org/name", HubName("org/name")), ("hf://org/name@v1/vae", HubName("org/name", path="vae", revision="v1")),
    ("hf://org/name:vae@v1", HubName("org/name", path="vae", revision="v1")),
    ("hf://datasets/org/name/data/train-*.parquet", HubName("org/name", "dataset", "data/train-*.parquet")),
    ("hf:/org/name", HubName("org/name")), (" org/name ", HubName("org/name")),  # What a path has made of the name.
    *((text, None) for text in (
        "", "name", "./org/name", "../name", "/org/name", "~/name", "org\\name", "C:\\name", "C:/name", "C:/a/name",
        "a/b/c", "org/name@", "org//name", "org/na me", "org/name:../x", "https://example.com/org/name", "org/..",
        "outputs/run/checkpoint_last.pt", "https://huggingface.co/org", "hf://name",
        "https://huggingface.co/spaces/org/name", "org/-name", "s3://org/name",
    )),
)  # fmt: skip
def test_names(text, expected):
    assert parse_hub_name(text) == expected
    if expected is not None:
        assert parse_hub_name(str(expected)) == expected


def fetched(name, *paths):
    opened = open_repository(parse_hub_name(name))
    folder = opened.fetch(paths or list(opened.files))
    return {path: (folder / path).read_bytes() for path in paths or opened.files}


def test_files_come_once_and_are_those_of_the_revision(hub):
    new, old = {"config.json": b"{}", "sub/big[1].bin": LARGE}, {"config.json": b"[]"}
    commit = hub.add("ann/model", new)
    hub.add("ann/model", old, "v1")
    assert fetched("ann/model") == new
    before = hub.sent()
    assert fetched("ann/model") == fetched(f"ann/model@{commit}") == new
    assert hub.sent() == before
    assert fetched("ann/model@v1") == old
    hub.add("ann/model", {"config.json": b'{"new": 1}'})  # The main branch has moved.
    assert fetched("ann/model")["config.json"] == b'{"new": 1}'
    assert fetched(f"ann/model@{commit}") == new


def test_the_cache_is_that_of_huggingface_hub(hub):
    """It finds what was fetched here, and what it has fetched is not fetched again."""
    hub.add("ann/model", {"config.json": b"{}", "a.bin": LARGE})
    fetched("ann/model", "a.bin")
    assert Path(try_to_load_from_cache("ann/model", "a.bin")).read_bytes() == LARGE
    hf_hub_download("ann/model", "config.json")
    before = hub.sent()
    assert fetched("ann/model", "config.json") == {"config.json": b"{}"}
    assert hub.sent() == before


def test_a_connection_that_breaks_off_comes_to_the_end(hub):
    """Of versions of huggingface_hub before 1.0, by the next call, which goes on from there."""
    hub.add("ann/model", {"a.bin": LARGE})
    hub.content(LARGE).answers = [Answer(cut_after=300_000)] * 2
    for _ in range(2):
        with contextlib.suppress(UserError):
            fetched("ann/model")
    assert fetched("ann/model") == {"a.bin": LARGE}


@each_row(b"{}", LARGE)
def test_wrong_bytes_are_not_kept(hub, content):
    """Two versions that were mixed as well: a connection broke off, and another file has come since."""
    name = f"ann/model{len(content)}"
    commit = hub.add(name, {"a.bin": content})
    file = hub.content(content) if content is LARGE else hub.server.files[f"/{name}/resolve/{commit}/a.bin"]
    file.content = bytes(byte ^ 1 for byte in content)
    if content is LARGE:
        file.answers = [Answer(body=LARGE, cut_after=300_000)]
    with contextlib.suppress(UserError):
        fetched(name)
    with pytest.raises(UserError, match=r"what came for a\.bin is not the file of the Hub") as raised:
        fetched(name)
    assert "run the command again" in raised.value.hint
    kept = [path for path in fetching.cache_folder().rglob(f"*model{len(content)}/**/*") if path.is_file()]
    assert not [path for path in kept if path.name == "a.bin" or path.read_bytes() == file.content]
    file.content = content
    assert fetched(name) == {"a.bin": content}


@each_row(LARGE[:1000], LARGE[::-1])
def test_a_damaged_file_of_the_cache_comes_anew(hub, damaged):
    hub.add("ann/model", {"a.bin": LARGE, "b.json": b"{}"})
    opened = open_repository(HubName("ann/model"))
    blob = (opened.fetch(["a.bin"]) / "a.bin").resolve()
    blob.write_bytes(damaged)
    assert fetched("ann/model")["a.bin"] == LARGE
    blob.unlink()
    assert fetched("ann/model")["a.bin"] == LARGE


def test_a_branch_that_moves_meanwhile_is_no_mixture(hub):
    hub.add("ann/model", {"a.bin": LARGE, "b.json": b"{}"})
    opened = open_repository(HubName("ann/model"))
    hub.add("ann/model", {"a.bin": LARGE[::-1], "b.json": b"{}"})
    with pytest.raises(UserError, match="the Hub does not give the files that it has listed"):
        opened.fetch(["a.bin"])
    assert fetched("ann/model", "a.bin") == {"a.bin": LARGE[::-1]}


@each_row("../../../../EVIL", "a/../../../../../EVIL", "/tmp/gputrain-EVIL")
def test_no_name_of_a_file_leaves_the_cache(hub, tmp_path, path):
    hub.add("ann/model", {path: LARGE})
    with pytest.raises(UserError):
        fetched("ann/model")
    assert not list(tmp_path.rglob("EVIL"))
    assert not Path("/tmp/gputrain-EVIL").exists()


@each_row(
    ("X-Linked-Etag", "../../../../mine.bin"), ("X-Linked-Etag", "../../../../EVIL1"), ("oid", "../../../../EVIL3"),
    ("X-Linked-Etag", "/tmp/gputrain-EVIL"), ("X-Repo-Commit", "../../../../EVIL2"),
)  # fmt: skip
def test_nothing_outside_the_cache_is_written_or_removed(hub, tmp_path, fact, evil):
    """A mirror states a digest or a commit that is a path, which huggingface_hub joins to that of its cache."""
    commit = hub.add("ann/model", {"a.bin": LARGE})
    (tmp_path / "mine.bin").write_bytes(b"mine")
    for revision in ("main", commit):
        if fact == "oid":
            entry = json.dumps([{**entry_of("a.bin", LARGE), "xetHash": "0" * 64}]).replace(etag_of(LARGE), evil)
            hub.server.files[f"/api/models/ann/model/tree/{revision}"].content = entry.encode()
        else:
            hub.server.files[f"/ann/model/resolve/{revision}/a.bin"].headers[fact] = evil
    with contextlib.suppress(UserError):  # Not all versions read the tree.
        fetched("ann/model")
    assert (tmp_path / "mine.bin").read_bytes() == b"mine"
    written = [*tmp_path.rglob("*EVIL*"), *Path("/tmp").glob("gputrain-EVIL*")]
    assert not [path for path in written if not path.is_relative_to(fetching.cache_folder())]


INFO = "/api/models/ann/model/revision/main"


@each_row(
    (INFO, NO_REPOSITORY, "ann/model: not on the Hugging Face Hub, or private", "hf auth login"),
    (INFO, Answer(404, body=b"{}"), "ann/model: not on the Hugging Face Hub, or private", "which was asked: http://127.0.0.1"),
    (INFO, NO_REVISION, "the repository has no revision main", "https://huggingface.co/ann/model/tree/main"),
    (INFO, GATED, "accepted its licence", "accept it at https://huggingface.co/ann/model, then run `hf auth login`"),
    (INFO, Answer(429, body=b"{}"), "too many requests", "wait some minutes"),
    (INFO, Answer(500, body=b"{}"), "answers with error 500", "run the command again later"),
    (INFO, Answer(body=b"<html>Sign in to the network</html>"), "is not what it should be", "log in by a browser"),
    ("file", GATED, "ann/model: the Hub gives it only", "then run `hf auth login`"),
    ("file", Answer(401, {"X-Error-Code": "GatedRepo"}, b"{}"), "accepted its licence", "hf auth login"),
    ("file", Answer(404, {"X-Error-Code": "EntryNotFound"}, b"{}"), "not on the", "check the spelling"),
    ("cdn", Answer(403, body=b"{}"), "the Hub gives", "hf auth login"),
    ("cdn", Answer(429, body=b"{}"), "too many requests", "run the command again"),
    ("cdn", Answer(503, body=b"{}"), "answers with error 503", "run the command again later"),
    ("cdn", Answer(cut_after=0), "connection .*broke off", "run the command again"),
)  # fmt: skip
def test_each_fault_says_what_to_do(hub, path, answer, message, hint):
    commit = hub.add("ann/model", {"a.bin": LARGE})
    if path == "cdn":
        hub.content(LARGE).always = answer
    else:
        hub.refuse(f"/ann/model/resolve/{commit}/a.bin" if path == "file" else path, answer)
    with pytest.raises(UserError, match=message) as raised:
        fetched("ann/model")
    assert hint in raised.value.hint
    assert not list(fetching.cache_folder().rglob("a.bin"))
    assert "\n" not in raised.value.message + raised.value.hint
    assert len(raised.value.message) < 300


def test_without_a_connection_the_cache_is_used(hub, monkeypatch, caplog, tmp_path):
    hub.add("ann/model", {"a.bin": LARGE, "b.json": b"{}"})
    assert fetched("ann/model", "a.bin") == {"a.bin": LARGE}
    hub.server.files.clear()
    hub.refuse(INFO, Answer(500, body=b"{}"))
    with caplog.at_level("INFO"):
        assert fetched("ann/model", "a.bin") == {"a.bin": LARGE}
    assert "answers with error 500; the files in the cache are used" in caplog.text
    use_hub(monkeypatch, "http://127.0.0.1:9", tmp_path / "huggingface")  # Nothing listens there.
    assert fetched("ann/model", "a.bin") == {"a.bin": LARGE}
    with pytest.raises(UserError, match=r"ann/other: http://127\.0\.0\.1:9 cannot be reached") as raised:
        fetched("ann/other")
    for words in ("HTTPS_PROXY", "HF_ENDPOINT", "`gputrain fetch ann/other` on another machine and copy its /"):
        assert words in raised.value.hint


# "proxy": the server is a proxy before one that is not there.
@each_row(("http", False), ("https", True), ("https", False), ("proxy", True), ("proxy", False))
def test_silence_is_no_connection_after_two_seconds(monkeypatch, tmp_path, scheme, accepts):
    """Each attempt to connect is given up long before the request would be."""
    with silent_server(accepts=accepts) as place:
        monkeypatch.setattr(fetching, "ANSWER_SECONDS", 5.0)
        monkeypatch.setattr(fetching, "CONNECT_SECONDS", 0.2)
        use_hub(monkeypatch, f"{scheme}://{place}" if scheme != "proxy" else "https://hub.invalid", tmp_path / "hf")
        if scheme == "proxy":
            monkeypatch.setenv("https_proxy", place)
        with pytest.raises(UserError, match=r"ann/other: https?://.* cannot be reached: no connection in 0\.2 s"):
            fetched("ann/other")
        monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "0.1")
        with pytest.raises(ConnectionError, match=r"no connection in 0\.1 s"):
            fetching.refuse_silence(f"https://{place}")
    monkeypatch.delenv("HF_HUB_ETAG_TIMEOUT")


def test_a_download_that_gets_no_connection_says_how_to_do_without_it():
    """huggingface_hub downloads by one of these libraries, whose errors have their own ancestors."""
    for library in filter(importlib.util.find_spec, ("requests", "httpx", "httpx2")):
        error = fetching.explained(importlib.import_module(library).ConnectTimeout("timed out"), HubName("ann/model"))
        assert "cannot be reached: timed out" in error.message
        assert "HF_HUB_ETAG_TIMEOUT=20 waits longer" in error.hint


def test_a_slow_answer_is_waited_for(hub, monkeypatch):
    hub.add("ann/model", {"a.bin": LARGE})
    hub.server.files[INFO].always = Answer(delay=fetching.CONNECT_SECONDS + 0.1)
    assert fetched("ann/model") == {"a.bin": LARGE}
    monkeypatch.setattr(fetching, "ANSWER_SECONDS", 0.2)
    hub.refuse("/api/models/ann/other/revision/main", Answer(delay=0.6))
    with pytest.raises(UserError, match=r"ann/other: .* cannot be reached: .*timed out"):
        fetched("ann/other")


def test_offline_nothing_is_asked(hub, monkeypatch):
    commit = hub.add("ann/model", {"a.bin": LARGE, "b.json": b"{}"})
    fetched("ann/model", "a.bin")
    asked = len(hub.server.log)
    for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.setenv(variable, "1")
        for name in ("ann/model", f"ann/model@{commit}"):
            assert fetched(name, "a.bin") == {"a.bin": LARGE}
        with pytest.raises(UserError, match=r"ann/other: offline, and the cache .* does not have it") as raised:
            fetched("ann/other")
        assert "`gputrain fetch ann/other`" in raised.value.hint
        assert str(fetching.cache_folder()) in raised.value.message
        monkeypatch.delenv(variable)
    assert len(hub.server.log) == asked


@each_row(
    (errno.ENOSPC, "the disk of .* is full", "free some space and run the command again; or set HF_HOME"),
    (errno.EACCES, r"huggingface/hub cannot be written .Permission denied.", "HF_HOME"),
)
def test_a_disk_that_cannot_be_written(hub, monkeypatch, code, message, hint):
    name = f"ann/model{code}"
    hub.add(name, {"a.bin": LARGE})

    def refused(*words, **options):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as full:
        full.setattr("huggingface_hub.file_download.http_get", refused)
        with pytest.raises(UserError, match=message) as raised:
            fetched(name)
    assert hint in raised.value.hint
    assert fetched(name) == {"a.bin": LARGE}


def test_the_token_of_huggingface_hub_is_sent(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.add("ann/model", {"a.bin": LARGE, "b.json": b"{}"})
    fetched("ann/model")
    sent = {one.path.split("/")[1]: one.headers.get("authorization") for one in hub.server.log}
    assert sent == {"api": "Bearer hf_secret", "ann": "Bearer hf_secret", "cdn": None}  # Not to the other host.
