"""A web server that answers as the Hugging Face Hub does.

It has the lists of repositories' files and their contents, of which the large ones are on another host. What can go
wrong with a file is set as tests/server.py says.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server import Answer, ServedFile, WebServer, serving

LARGE = 1000  # Bytes; the Hub keeps the content of a larger file elsewhere, as one of Git LFS.
# That there is no such repository is the answer to those who have no right to read it, too.
NO_REPOSITORY = Answer(401, {"X-Error-Code": "RepoNotFound"}, b"{}")
GATED = Answer(403, {"X-Error-Code": "GatedRepo"}, b"{}")
NO_REVISION = Answer(404, {"X-Error-Code": "RevisionNotFound"}, b"{}")


class Hub:
    """The repositories of models, and of data sets as datasets/org/name, that a server has."""

    def __init__(self, server: WebServer) -> None:
        self.server = server

    def add(self, repo: str, files: dict[str, bytes] | Path, revision: str = "main") -> str:
        """Serve a revision of a repository, of files by name or those of a folder. Returns its commit."""
        if isinstance(files, Path):
            found = (path for path in files.rglob("*") if path.is_file())
            files = {path.relative_to(files).as_posix(): path.read_bytes() for path in found}
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        api = f"/api/{repo if repo.startswith('datasets/') else f'models/{repo}'}"
        facts = {
            "id": repo.removeprefix("datasets/"),
            "sha": commit,
            "siblings": [sibling_of(name, content) for name, content in files.items()],
        }
        listed = json.dumps([entry_of(name, content) for name, content in files.items()])
        for name in (revision, commit):
            self.server.add(f"{api}/revision/{name}", json.dumps(facts).encode())
            self.server.add(f"{api}/tree/{name}", listed.encode())
        for name, content in files.items():
            for of in (revision, commit):
                self._add_file(repo, of, commit, name, content)
        return commit

    def _add_file(self, repo: str, revision: str, commit: str, name: str, content: bytes) -> None:
        path = f"/{repo}/resolve/{revision}/{name}"
        headers = {"X-Repo-Commit": commit, "ETag": f'"{etag_of(content)}"'}
        if len(content) <= LARGE:
            self.server.add(path, content, headers=headers)
            return
        cdn = f"/cdn/{etag_of(content)}"
        self.server.add(cdn, content)
        facts = {"X-Linked-Etag": f'"{etag_of(content)}"', "X-Linked-Size": str(len(content))}
        # A redirection to the same host is followed for the facts, too; contents are on another host.
        address = f"http://localhost:{self.server.server_port}{cdn}"
        self.server.add(path, status=302, headers={**headers, **facts, "Location": address})

    def refuse(self, path: str, answer: Answer) -> None:
        """Let every request of a path have the same answer."""
        self.server.files[path] = ServedFile(b"", always=answer)

    def content(self, content: bytes) -> ServedFile:
        """Return the large file of a content, whose answers can be set."""
        return self.server.files[f"/cdn/{etag_of(content)}"]

    def asked(self, content: bytes) -> list[str]:
        return self.server.asked(f"/cdn/{etag_of(content)}")

    def fetched(self) -> set[str]:
        """Return the files that were asked for: huggingface_hub asks for the facts of no others."""
        asked = [one.path for one in self.server.log if "/resolve/" in one.path]
        return {path.split("/resolve/")[1].partition("/")[2] for path in asked}

    def sent(self) -> int:
        """Return how many bytes of contents have been sent."""
        return sum(one.sent for one in self.server.log if not one.path.startswith("/api/"))


def etag_of(content: bytes) -> str:
    if len(content) > LARGE:
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def entry_of(name: str, content: bytes) -> dict[str, object]:
    entry: dict[str, object] = {"type": "file", "path": name, "size": len(content), "oid": etag_of(content)}
    if len(content) > LARGE:
        entry["oid"] = hashlib.sha1(content).hexdigest()
        entry["lfs"] = {"oid": etag_of(content), "size": len(content), "pointerSize": 134}
    return entry


def sibling_of(name: str, content: bytes) -> dict[str, object]:
    entry = entry_of(name, content)
    lfs = {"lfs": {"sha256": etag_of(content), "size": len(content), "pointerSize": 134}} if "lfs" in entry else {}
    return {"rfilename": name, "size": len(content), "blobId": entry["oid"], **lfs}


def use_hub(monkeypatch: pytest.MonkeyPatch, address: str, cache: Path) -> None:
    """Let huggingface_hub use a server and a cache, in this process and in those that it starts."""
    from huggingface_hub import constants, file_download, utils

    # A connection that was made while the Hub was offline stays offline. Versions before 1.0 have the first name.
    getattr(utils, "reset_sessions" if hasattr(utils, "reset_sessions") else "close_session")()
    for name, value in {"HF_ENDPOINT": address, "HF_HOME": str(cache), "NO_PROXY": "127.0.0.1,localhost"}.items():
        monkeypatch.setenv(name, value)
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "ENDPOINT", address)
    for module in (constants, file_download):  # Versions before 1.0 have it in both.
        if hasattr(module, "HUGGINGFACE_CO_URL_TEMPLATE"):
            template = address + "/{repo_id}/resolve/{revision}/{filename}"
            monkeypatch.setattr(module, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", address)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 100_000)  # Of a broken connection, whole blocks are kept.
    # It waits a second before it goes on after a broken connection.
    monkeypatch.setattr(file_download.time, "sleep", lambda seconds: None)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A server in the place of the Hub, and an empty cache."""
    with serving() as server:
        use_hub(monkeypatch, server.url(), tmp_path / "huggingface")
        yield Hub(server)
