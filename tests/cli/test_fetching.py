"""`gputrain fetch`: the list, and loading what is named."""

import dataclasses
import hashlib
import re
from pathlib import Path

import pytest

from gputrain.cli.fetching import command_of
from gputrain.fetch import names
from gputrain.fetch.names import CatalogueEntry, catalogue
from tests.command import gputrain_here
from tests.hub_server import Hub, hub  # noqa: F401
from tests.server import WebServer, serving
from tests.tables import each_row
from tests.test_docs import parsed

CONTENT = bytes(range(256)) * 40


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A server with a file that the list names, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with serving() as web:
        web.add("/v1/vgg.pth", CONTENT, etag='"1"')
        entry = CatalogueEntry(
            "lpips-test", "measure", "Weights to test.", "BSD-2-Clause", "https://example.org/page", "--lpips-weights",
            url=web.url("/v1/vgg.pth"), bytes=len(CONTENT), sha256={"vgg.pth": hashlib.sha256(CONTENT).hexdigest()},
        )  # fmt: skip
        listed = {**catalogue(), entry.name: entry}
        monkeypatch.setattr(names, "catalogue", lambda: listed)
        yield web


def test_a_model_of_the_hub(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # noqa: F811
    """It is verified by the list's SHA-256 and the Hub's digest, and repaired."""
    files = {"vae/config.json": b"{}", "vae/diffusion_pytorch_model.safetensors": CONTENT, "README.md": b"about"}
    hub.add("org/pipeline", files)
    digests = {name.removeprefix("vae/"): hashlib.sha256(files[name]).hexdigest() for name in list(files)[:2]}
    facts = {"hub": "org/pipeline:vae", "files": ("*",), "sha256": digests}
    entry = CatalogueEntry("a-vae", "vae", "A VAE.", "MIT", "https://example.org/page", "--init-from", **facts)
    listed = {entry.name: entry}
    monkeypatch.setattr(names, "catalogue", lambda: listed)
    done = gputrain_here("fetch", "a-vae")
    assert done.returncode == 0, done.stderr
    facts = dict(line.split(maxsplit=1) for line in done.stdout.splitlines()[1:])
    folder, size = Path(facts["path"]), facts["size"]
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "diffusion_pytorch_model.safetensors"]
    assert size == "10.2 kB"
    assert facts["gputrain"] == "train-vae --data-path FOLDER --output-dir RUN --init-from a-vae"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a-vae").mkdir()  # Options take it for this path, so that the command names another one.
    assert f"--init-from {folder}" in gputrain_here("fetch", "a-vae").stdout.replace("\n", "")
    (folder / "diffusion_pytorch_model.safetensors").write_bytes(CONTENT[::-1])
    assert "is damaged, and is removed from the cache" in gputrain_here("fetch", "a-vae").stderr
    assert (folder / "diffusion_pytorch_model.safetensors").read_bytes() == CONTENT
    for name in digests:  # The Hub states the SHA-256 of the weights, and a digest of git of the small file.
        listed["a-vae"] = dataclasses.replace(entry, sha256={**digests, name: 64 * "0"})
        done = gputrain_here("fetch", "a-vae")
        assert done.returncode == 2
        assert f"the SHA-256 of {name} is {digests[name]}, expected {64 * '0'}" in " ".join(done.stderr.split())
        assert "not the published file any more" in done.stderr


def test_a_data_set_of_the_hub(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # noqa: F811
    """Its files are loaded, for a preparation without a network."""
    files = {"data/train-0.parquet": CONTENT, "data/test-0.parquet": CONTENT[::-1], "README.md": b"about"}
    hub.add("datasets/ann/set", files)
    done = gputrain_here("fetch", "hf://datasets/ann/set")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].split() == ["option", "--input-dir", "hf://datasets/ann/set"]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    done = gputrain_here("fetch", "hf://datasets/ann/set")
    assert done.returncode == 0, done.stderr
    folder = Path(next(line.split()[1] for line in done.stdout.splitlines() if line.split()[0] == "path"))
    assert (folder / "data" / "train-0.parquet").read_bytes() == CONTENT


def test_the_list():
    """Every name has a line with size and licence, below the title of its kind."""
    done = gputrain_here("fetch", "--list")
    lines = done.stdout.splitlines()
    for entry in catalogue().values():
        line = next(line for line in lines if line.split()[:1] == [entry.name])
        assert line.endswith(f"{entry.licence}, with a token" if entry.gated else entry.licence)
        assert f"    {entry.about}" in lines
    assert re.search(r"^  lpips-vgg16 +553 MB  BSD-3-Clause$", done.stdout, re.MULTILINE)
    assert gputrain_here("fetch", "--list", "--kind", "tts").stdout.startswith("Voices (tts)")
    vocoders = gputrain_here("fetch", "--list", "--kind", "vocoder").stdout.splitlines()
    assert vocoders[0] == "Vocoders (vocoder)"
    assert len(vocoders) == 2 + 2 * sum(entry.kind == "vocoder" for entry in catalogue().values())


def test_the_commands_of_the_list_are_right():
    """They are parsed by the real command line. The preset is that of the weights."""
    for entry in catalogue().values():
        _, settings = parsed(command_of(entry, entry.name))
        stated = re.search(r"preset (\w+)", entry.about)
        if stated:
            assert settings.model.preset == stated[1], entry.name
    assert command_of(catalogue()["sdxl-vae"], "./w") == (
        "gputrain train-vae --data-path FOLDER --output-dir RUN --preset sd --init-from ./w"
    )


def test_a_name_is_loaded_verified_and_repaired(server: WebServer, tmp_path: Path):
    """It prints what it is, its licence and page, where it is, and the command that uses it."""
    done = gputrain_here("fetch", "lpips-test")
    assert done.returncode == 0, done.stderr
    lines = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    assert lines[0] == ["lpips-test:", "Weights to test."]
    facts = dict(lines[1:])
    assert (facts["licence"], facts["page"], facts["size"]) == ("BSD-2-Clause", "https://example.org/page", "10.2 kB")
    path = Path(facts["path"])
    assert path.read_bytes() == CONTENT
    assert facts["gputrain"].endswith("--lpips-weights lpips-vgg16,lpips-heads,lpips-test")
    assert "downloading lpips-test (10.2 kB) from 127.0.0.1" in done.stderr
    path.write_bytes(CONTENT[:-1] + b"?")
    done = gputrain_here("fetch", "lpips-test")
    assert "vgg.pth: has another SHA-256 than the published one; downloading it again" in done.stderr
    assert path.read_bytes() == CONTENT
    assert len(server.log) == 2


@each_row(
    (["lpips-vg16"], "lpips-vg16: no such file or folder", "lpips-vgg16"),
    (["piper"], "piper: no such file or folder", "piper-"),
    (["abcxyz"], "abcxyz: no such file or folder", "gputrain fetch --list"),
    ([], "nothing is named", "--list"),
    (["a", "--list"], "either names or --list", "--list"),
    (["a", "--kind", "vae"], "kind has no effect without --list", "--list"),
    (["pyproject.toml"], "pyproject.toml: is a path here", "options take the path"),
    (["https://example.org/a.pt"], "a.pt: nothing is loaded from other addresses", "curl"),
)
def test_what_cannot_be_loaded(words, message, hint):
    done = gputrain_here("fetch", *words)
    assert done.returncode == 2
    assert message in done.stderr
    assert hint in done.stderr.partition("hint:")[2]


def test_nothing_is_loaded_if_one_name_is_wrong(server: WebServer):
    assert gputrain_here("fetch", "lpips-test", "lpips-tst").returncode == 2
    assert not server.log


def test_offline(server: WebServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    done = gputrain_here("fetch", "lpips-test")
    assert done.returncode == 2
    assert "lpips-test: is not in the cache, and nothing may be downloaded" in done.stderr
    assert not server.log
