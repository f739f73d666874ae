"""Each train command needs its own packages alone, and says which one is missing.

The commands run in a process in which the others cannot be imported, as on a machine without them.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.asr.stores import spelled_clips, write_store
from tests.command import Done
from tests.tts.test_train import spoken
from tests.vocoder import conftest as vocoder

# Packages that some commands need and others do without, by the names of their modules.
OPTIONAL = {
    "accelerate", "diffusers", "jiwer", "librosa", "numba", "onnx", "onnxruntime", "parselmouth", "pyworld",
    "rapidfuzz", "scipy", "sherpa_onnx", "skimage", "soundfile", "soxr", "swift_f0", "transformers",
}  # fmt: skip
NEEDED = {
    "vae": set[str](),
    # The store names the method of its pitches, by which evaluations measure others; scikit-image imports scipy.
    "vocoder": {"soundfile", "skimage", "scipy", "parselmouth"},
    "tts": {"soundfile", "skimage", "scipy", "numba"},
    # An export is compared on synthetic speech, which WORLD makes.
    "asr": {"soundfile", "rapidfuzz", "transformers", "pyworld", "scipy"},
}
SHARED = {"device": "cpu", "plan": False, "num_workers": 0, "log_every_steps": 1, "max_steps": 1}
TINY: dict[str, dict[str, Any]] = {
    "vae": {"preset": "fast", "channels": [32, 32], "image_size": 32, "batch_size": 2},
    "vocoder": {**vocoder.TINY, "evaluate_every_steps": 1, "sample_every_steps": 1},
    "tts": {"preset": "fast", "discriminator_channels": 8, "batch_size": 2, "max_batch_audio_ratio": 2.0},
    "asr": {"preset": "tiny", "batch_size": 2},
}
BLOCKED = """
import sys
from importlib.machinery import PathFinder

class OtherPackages(PathFinder):
    names = {names}

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in cls.names else PathFinder.find_spec(name, path, target)

    @classmethod
    def find_distributions(cls, *context):
        found = PathFinder.find_distributions(*context)
        return (one for one in found if one.metadata["Name"].lower().replace("-", "_") not in cls.names)

sys.meta_path[sys.meta_path.index(PathFinder)] = OtherPackages
from gputrain.cli.app import main
try:
    main()
finally:
    print("modules:", *sys.modules, file=sys.stderr)
"""


def without(names: set[str], *words: object) -> Done:
    """Runs a gputrain command in a process that cannot import the packages of these names."""
    command = [sys.executable, "-c", BLOCKED.format(names=names), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def of_other_kinds(kind: str, done: Done) -> set[str]:
    """Returns the modules of other kinds of model that a command has imported, without those of the help page."""
    others = tuple(f"gputrain.{name}." for name in NEEDED if name != kind)
    return {name for name in modules_of(done) - modules_of(without(set(), "--help")) if name.startswith(others)}


def modules_of(done: Done) -> set[str]:
    """Returns the modules that a process of `without` had imported at its end."""
    assert done.returncode == 0, done.stderr
    return set(done.stderr.rpartition("modules:")[2].split())


def training(kind: str, data: Path, run: Path) -> list[object]:
    return [f"train-{kind}", "--data-path", data, "--output-dir", run, *vocoder.flags({**SHARED, **TINY[kind]})]


def data_of(kind: str, folder: Path, photographs: Path) -> Path:
    if kind == "vae":
        return photographs
    if kind == "vocoder":
        return vocoder.hummed(folder)
    return spoken(folder) if kind == "tts" else write_store(folder, spelled_clips(8))


@pytest.mark.slow
@pytest.mark.parametrize("kind", NEEDED)
def test_a_training_needs_its_own_packages_alone(kind: str, photographs: Path, tmp_path: Path) -> None:
    words = training(kind, data_of(kind, tmp_path / "data", photographs), tmp_path / "run")
    done = without(OPTIONAL - NEEDED[kind], *words)
    assert f"gputrain.{kind}.recipe" in modules_of(done)
    assert of_other_kinds(kind, done) == set()
    assert "not written" not in done.stderr
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"checkpoint_last.pt", "metrics.jsonl", "report.html", "samples"} <= names
    assert any((tmp_path / "run" / "samples").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("kind", NEEDED)
def test_other_commands_need_the_packages_of_their_kind_alone(kind: str, photographs: Path, tmp_path: Path) -> None:
    """From raw data to an export. Those of the recogniser have no other format than transformers' without ONNX."""
    data, run = data_of(kind, tmp_path / "data", photographs), tmp_path / "run"
    assert without(set(), *training(kind, data, run)).returncode == 0
    commands: list[list[object]] = [
        ["plan", f"train-{kind}", "--gpu", "l4"],
        ["evaluate", "--model", run, "--data-path", data, "--held-out-share", 1, "--device", "cpu"],
        ["export", "--model", run, "--output-dir", tmp_path / "export"],
    ]
    if kind == "vae":
        commands += [["prepare-data", "--input-dir", photographs, "--output-dir", tmp_path / "new"]]
    # A voice's evaluation tracks pitches by parselmouth, or by pyworld without it; its only export is in ONNX.
    allowed = NEEDED[kind] | ({"onnx", "onnxruntime", "parselmouth"} if kind == "tts" else set())
    for words in commands:
        assert of_other_kinds(kind, without(OPTIONAL - allowed, *words)) == set(), words


@pytest.mark.parametrize(
    ("kind", "missing", "said", "remedy"),
    [
        ("vocoder", "soundfile", "the package soundfile is", "soundfile"),
        ("vocoder", "parselmouth", "f0 by parselmouth: the package praat-parselmouth is", "praat-parselmouth, or"),
        ("tts", "skimage", "the package scikit-image is", "scikit-image"),
        ("asr", "rapidfuzz transformers", "the packages rapidfuzz, transformers are", "rapidfuzz transformers"),
    ],
)
def test_a_missing_package_is_named_before_the_first_step(
    kind: str, missing: str, said: str, remedy: str, photographs: Path, tmp_path: Path
) -> None:
    data = data_of(kind, tmp_path / "data", photographs)
    done = without(set(missing.split()), *training(kind, data, tmp_path / "run"))
    assert done.returncode == 2, done.stderr
    assert f"{said} not installed" in done.stderr
    assert f"pip install {remedy}" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
