"""The list of published files, and the strict reader of such lists."""

import subprocess
import sys

import pytest
import yaml

from gputrain.asr.config import TrainAsr
from gputrain.config import leaves
from gputrain.errors import UserError
from gputrain.fetch.catalogue import KINDS, CatalogueEntry, catalogue, close_names, read_catalogue
from gputrain.fetch.hub import parse_hub_name
from gputrain.fetch.names import local_path
from gputrain.fetch.published import choose
from gputrain.kinds import kinds
from gputrain.tts.config import TrainTts
from gputrain.vae.config import PictureEvaluation, TrainVae
from gputrain.vocoder.config import TrainVocoder
from tests.tables import each_row

FILE = {
    "kind": "measure", "about": "Weights.", "licence": "MIT", "page": "https://example.org/page", "bytes": 10,
    "url": "https://example.org/a/weights%20v1.pth?download=1", "use": "--lpips-weights",
    "sha256": {"weights v1.pth": 64 * "a"},
}  # fmt: skip
REPOSITORY = {
    "kind": "vae", "about": "A VAE.", "licence": "MIT", "page": "https://huggingface.co/org/name", "bytes": 10,
    "hub": "org/name:vae@v1.0", "files": ["*.safetensors", "config.json"], "use": "--init-from", "gated": True,
    "sha256": {"model.safetensors": 64 * "0"},
}  # fmt: skip


def test_the_shipped_list_is_valid():
    entries = catalogue().values()
    assert {entry.kind for entry in entries} == set(KINDS)
    assert len({entry.hub or entry.url for entry in entries}) == len(entries)
    # These hashes are those that --lpips-weights and --rfid-weights ask for, as the publishers state them in the names.
    for name in ("lpips-vgg16", "inception-fid"):
        entry = catalogue()[name]
        assert entry.file_name[-12:-4] == entry.sha256[entry.file_name][:8]
    assert catalogue()["lpips-heads"].sha256["vgg.pth"].startswith("a78928a0af1e5f0f")
    assert catalogue()["lpips-vgg16"].bytes == 553433881


def test_listed_files_belong_to_options_that_exist():
    known = {"vae": leaves(TrainVae), "vocoder": leaves(TrainVocoder), "tts": leaves(TrainTts), "asr": leaves(TrainAsr)}
    known["measure"] = {**leaves(TrainVae), **leaves(PictureEvaluation)}
    for entry in catalogue().values():
        assert entry.use in {leaf.flag for leaf in known[entry.kind].values()}, entry.name
        assert entry.page.split("/")[2] in ("huggingface.co", "github.com"), entry.name
        assert len(entry.about) <= 92, f"{entry.name}: one line of a terminal"


def test_the_kinds_choose_the_listed_files_of_the_hub():
    """What stands beside them in the repositories is left where it is."""
    beside = ("README.md", "MODEL_CARD", "diffusion_pytorch_model.fp16.safetensors", "diffusion_pytorch_model.bin",
              "adapter.fra.safetensors", "flax_model.msgpack")  # fmt: skip
    for entry in catalogue().values():
        if not entry.hub:
            continue
        named = parse_hub_name(entry.hub)
        assert named is not None, entry.name
        folder = named.path.rpartition("/")[0] if named.path.endswith((".ckpt", ".safetensors")) else named.path
        names = [f"{folder}/{file}".lstrip("/") for file in (*entry.files, *beside)]
        choice = choose(names, named.path, kinds()[entry.kind].published)
        assert choice is not None, entry.name
        found = {name.rpartition("/")[2] for name in (*choice.weights, *choice.others)}
        assert found == set(entry.files), entry.name


@each_row("vae", "vocoder", "tts", "asr")
def test_a_name_of_another_kind_is_refused_before_anything_is_fetched(kind):
    other = next(entry for entry in catalogue().values() if entry.kind not in (kind, "measure"))
    for name in (other.name, "inception-fid"):
        with pytest.raises(
            UserError, match=f"{name}: is listed as {catalogue()[name].kind}, expected {kind}$"
        ) as caught:
            local_path(name, kinds()[kind].published)
        assert caught.value.hint == f"gputrain fetch --list --kind {kind}"


def test_entries_have_their_facts():
    made = read_catalogue(yaml.safe_dump({"a-file": FILE, "some-vae1.5": REPOSITORY}))
    assert made["a-file"].file_name == "weights v1.pth"
    assert made["some-vae1.5"] == CatalogueEntry(
        name="some-vae1.5", kind="vae", about="A VAE.", licence="MIT", page="https://huggingface.co/org/name", bytes=10,
        use="--init-from", hub="org/name:vae@v1.0", gated=True, files=("*.safetensors", "config.json"),
        sha256={"model.safetensors": 64 * "0"},
    )  # fmt: skip


@each_row(
    ("name", FILE, {"size": 3}, "name: unknown key size"),
    ("name", FILE, {"page": None}, "name: page is 'None'"),
    ("Name", FILE, {}, "'Name': a name is lower case"),
    ("name", FILE, {"bytes": "10"}, "name: bytes is '10'"),
    ("name", FILE, {"bytes": True}, "name: bytes is 'True'"),
    ("name", FILE, {"bytes": 0}, "bytes is missing"),
    ("name", REPOSITORY, {"bytes": -1}, "bytes is not positive"),
    ("name", FILE, {"kind": "image"}, "name: kind is 'image'"),
    ("name", FILE, {"licence": " "}, "licence is empty"),
    ("name", FILE, {"hub": "org/name"}, "either hub or url"),
    ("name", FILE, {"url": ""}, "either hub or url"),
    ("name", FILE, {"url": "http://example.org/file"}, "url is not https"),
    ("name", FILE, {"url": "https://example.org/"}, "names no file"),
    ("name", FILE, {"page": "example.org"}, "page is not https"),
    ("name", FILE, {"sha256": {"other.pth": 64 * "a"}}, "of a file that is not downloaded"),
    ("name", FILE, {"sha256": {"weights v1.pth": "A" * 64}}, "64 hexadecimal digits"),
    ("name", FILE, {"files": ["x"]}, "belong to hub"),
    ("name", FILE, {"use": "init-from"}, "use is no option"),
    ("name", FILE, {"options": "preset sd"}, "options does not begin with an option"),
    ("name", REPOSITORY, {"unpack": True}, "unpack belongs to url"),
    ("name", REPOSITORY, {"hub": "name"}, "expected org/name"),
    ("name", REPOSITORY, {"files": []}, "files is missing"),
    ("name", REPOSITORY, {"sha256": {"model.bin": 64 * "0"}}, "of a file that is not downloaded"),
)
def test_faulty_entries_are_refused_with_their_names(name, facts, changed, fault):
    with pytest.raises(ValueError, match="name") as caught:
        read_catalogue(yaml.safe_dump({name: {**facts, **changed}}))
    assert fault in str(caught.value)


def test_the_hub_itself_tells_sizes_and_has_repositories_of_data():
    facts = {key: value for key, value in REPOSITORY.items() if key != "bytes"}
    made = read_catalogue(yaml.safe_dump({"name": {**facts, "hub": "datasets/org/name:en/a"}}))
    assert (made["name"].bytes, made["name"].hub) == (0, "datasets/org/name:en/a")


@each_row("kind", "about", "licence", "page", "bytes", "use")
def test_every_fact_is_required(key):
    with pytest.raises(ValueError, match=f"name: {key} is missing"):
        read_catalogue(yaml.safe_dump({"name": {name: value for name, value in FILE.items() if name != key}}))


def test_a_name_that_stands_there_twice_is_refused():
    with pytest.raises(ValueError, match="twice"):
        read_catalogue("a: {}\na: {}\n")


def test_close_names():
    assert close_names("LPIPS_vgg")[0] == "lpips-vgg16"
    assert close_names("lpips") == ["lpips-vgg16", "lpips-heads"]
    assert close_names("heads lpips") == ["lpips-heads"]
    assert all("piper" in name for name in close_names("Piper"))
    assert close_names("zzz") == close_names("") == []


def test_fetching_imports_no_torch_and_the_command_line_no_list():
    """The list is read when it is needed."""
    code = (
        "import sys, gputrain.cli.app; early = [m for m in ('requests', 'huggingface_hub') if m in sys.modules]; "
        "assert not early, early; import gputrain.fetch.catalogue as c; assert not c.catalogue.cache_info().misses; "
        "assert c.catalogue(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
