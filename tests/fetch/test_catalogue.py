"""The list of published files."""

import re
import subprocess
import sys
from fnmatch import fnmatch

import pytest

from gputrain.asr.config import TrainAsr
from gputrain.config import leaves
from gputrain.errors import UserError
from gputrain.fetch.hub import parse_hub_name
from gputrain.fetch.names import catalogue, close_names, local_path
from gputrain.fetch.published import choose
from gputrain.kinds import kinds
from gputrain.tts.config import TrainTts
from gputrain.vae.config import PictureEvaluation, TrainVae
from gputrain.vocoder.config import TrainVocoder
from tests.tables import each_row


def test_the_shipped_list_is_valid():
    entries = catalogue().values()
    assert {entry.kind for entry in entries} == {"vae", "vocoder", "tts", "asr", "measure"}
    assert len({entry.hub or entry.url for entry in entries}) == len(entries)
    for entry in entries:
        name = entry.name
        assert re.fullmatch(r"[a-z0-9]+([-.][a-z0-9]+)*", name), name
        assert bool(entry.hub) != bool(entry.url), name
        assert all(text.strip() for text in (entry.about, entry.licence)), name
        assert bool(entry.hub) == bool(entry.files), name
        assert not (entry.url and entry.gated), name
        assert entry.bytes > 0 or entry.hub, name  # Only the Hub tells them.
        if entry.hub:
            assert str(parse_hub_name(entry.hub)) == entry.hub, name
        else:
            assert entry.url.startswith("https://"), name
            assert entry.file_name, name
        for file, digest in entry.sha256.items():
            assert re.fullmatch("[0-9a-f]{64}", digest), name
            assert any(fnmatch(file, pattern) for pattern in entry.files or (entry.file_name,)), name
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


def test_close_names():
    assert close_names("LPIPS_vgg")[0] == "lpips-vgg16"
    assert close_names("lpips") == ["lpips-vgg16", "lpips-heads"]
    assert close_names("heads lpips") == ["lpips-heads"]
    assert all("piper" in name for name in close_names("Piper"))
    assert close_names("zzz") == close_names("") == []


def test_fetching_imports_no_torch_and_the_command_line_no_list():
    """The list is read when it is needed."""
    code = (
        "import sys, gputrain.cli.app; assert not {'pooch', 'requests', 'huggingface_hub'} & set(sys.modules); "
        "import gputrain.fetch.names as c; assert not c.catalogue.cache_info().misses; "
        "assert c.catalogue(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
