"""The table of the kinds of model: a kind of another package has every command, and a faulty one harms no other."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from PIL import Image

from gputrain.config import read_file
from gputrain.kinds import kinds, prepared_for
from gputrain.vae.dataset import open_pictures
from tests.command import gputrain_here
from tests.small_runs import interrupted, prepared
from tests.speech.speech import hum, speak
from tests.tables import each_row

ROOT = Path(__file__).parents[1]
TOY = ROOT / "tests" / "toy_kind"  # Holds the package `curve` and its entry point.


def environment(*folders: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, *folders))), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("curve")


@pytest.fixture(scope="module")
def done(folder) -> list[dict[str, Any]]:
    """Returns every command of the toy kind with its exit code and its output."""
    command = [sys.executable, "-m", "tests.toy_kind.commands", folder]
    run = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment(TOY), cwd=folder)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_a_kind_of_another_package_has_every_command(done, folder):
    for one in done:
        assert one["code"] == (2 if "max_clips" in one["err"] else 0), one["err"]
    page, validated, prepared, trained, resumed, planned, measured, evaluated, refused, exported, *_ = done
    assert "train-curve  Train a curve through points." in page["out"]
    assert "trace        Print the y of a curve at an x." in page["out"]
    for one in (validated, prepared):
        assert "points  24\n" in one["out"]
    assert prepared["out"].splitlines()[-1].strip() == (
        f"gputrain train-curve --data-path {folder / 'points'} --output-dir outputs/curve"
    )
    assert json.loads((folder / "points" / "points.json").read_text())[1] == [-0.9167, -0.9657]  # --decimals 4
    assert f"gputrain trace --model {folder / 'run'} --at 0.5" in trained["out"]
    assert read_file(folder / "run" / "config.yaml")["kind"] == "curve"
    assert "step 132/132" in resumed["err"]
    (plan,) = json.loads(planned["out"])
    assert (plan["gpu"], plan["width"], plan["fits"], plan["micro_batch_size"]) == ("t4", 16, True, 16)
    assert "16 wide, 16 points a step" in measured["out"]
    (table,) = folder.glob("bench_curve_*.json")
    (row,) = json.loads(table.read_text())["rows"]
    assert row["figures"]["items_per_second"] == pytest.approx(16 / row["figures"]["seconds_per_step"])
    assert "on 12 points" in evaluated["out"]
    assert "max_clips does nothing with" in refused["err"]
    assert "tensors  4" in exported["out"]


def test_what_its_commands_write_is_the_curve_that_was_trained(done, folder):
    """The exported weights give the printed value and the error of the evaluation, and training has lowered it."""
    weights = json.loads((folder / "export" / "sine.json").read_text())

    def curve(x: float) -> float:
        hidden = zip(weights["0.weight"], weights["0.bias"], weights["2.weight"][0], strict=True)
        return sum(last * math.tanh(first * x + bias) for (first,), bias, last in hidden) + weights["2.bias"][0]

    points = json.loads((folder / "points" / "points.json").read_text())[:12]
    error = math.sqrt(sum((curve(x) - y) ** 2 for x, y in points) / len(points))
    assert json.loads((folder / "figures.json").read_text()) == {"points": 12, "error": pytest.approx(error, rel=1e-5)}
    assert float(next(one["out"] for one in done if one["command"] == "trace")) == pytest.approx(curve(0.5), abs=2e-6)
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    errors = [row["eval/error"] for row in rows if "eval/error" in row]
    assert errors[-1] < 0.25 * errors[0]


def test_its_report_has_its_options_its_figures_and_its_commands(done, folder):
    page = (folder / "report.html").read_text()
    for words in ("Width of the hidden layer.", "gputrain train-curve --config", "gputrain trace --model"):
        assert words in page


def test_a_faulty_kind_is_left_out_with_a_warning(tmp_path):
    for name, content in (("broken", "import nothing_of_that_name"), ("wrong", "KIND = 3"), ("twice", TWICE)):
        (tmp_path / f"{name}.py").write_text(content)
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[gputrain.kinds]\n{name} = {name}:KIND\n")
    code = "from gputrain.kinds import kinds; print(list(kinds()))"
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment(tmp_path, TOY))
    assert run.stdout == "['vae', 'vocoder', 'tts', 'asr', 'curve']\n"
    broken, twice, wrong = run.stderr.splitlines()
    assert "the kind of model broken (broken:KIND) cannot be loaded: No module named" in broken
    assert "twice (twice:KIND) is left out: there is a kind vae already" in twice
    assert "wrong (wrong:KIND) is left out: it is no ModelKind" in wrong


TWICE = "from gputrain.vae.kind import KIND"


def test_the_table_imports_no_torch():
    code = "import sys; from gputrain.cli.app import app; print([m for m in ('torch', 'numba') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), timeout=120)
    assert run.stdout == "[]\n", run.stderr


def test_names_of_options_and_formats_are_those_of_one_kind_or_mean_the_same():
    table = kinds()
    assert list(table) == ["vae", "vocoder", "tts", "asr"]
    assert all(kind.train.kind == name for name, kind in table.items())
    assert all(kind.work().kind == name for name, kind in table.items())


# ---------------------------------------------------------------------------------------- data of another kind of model

SPEECH = ["tts", "asr"]  # Their preparations differ in text.json alone, whose readers tell them apart.
OTHERS = [
    (kind, data) for kind in kinds() for data in kinds() if kind != data and [kind, data] not in (SPEECH, SPEECH[::-1])
]


def content_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@each_row(*kinds())
def test_prepared_data_are_recognised(tmp_path_factory, kind):
    expected = SPEECH if kind in SPEECH else [kind]
    assert prepared_for(prepared(kind)) == expected
    folder = tmp_path_factory.mktemp("interrupted") / "data"
    shutil.copytree(prepared(kind), folder)
    assert prepared_for(interrupted(kind, folder)) == expected


def test_other_folders_are_prepared_for_nothing(tmp_path):
    assert prepared_for(tmp_path / "missing") == prepared_for(tmp_path) == []
    for text in ('{"audio_filepath": "a.wav", "text": "a"}', "[1]", "", '{"width"'):
        (tmp_path / "manifest.jsonl").write_text(text)
        assert prepared_for(tmp_path) == []


def test_a_manifest_of_another_program_is_no_preparation(tmp_path):
    """Its rows have the usual names of such files; pictures and recordings beside it are read as without it."""
    row = {"file": "a.png", "audio_filepath": "a.wav", "text": "so it is", "width": 64, "height": 64}
    (tmp_path / "pictures").mkdir()
    for side in (64, 80):
        Image.linear_gradient("L").resize((side, side)).save(tmp_path / f"pictures/{side}.png")
    for number, name in enumerate("abcd"):
        speak(tmp_path / f"recordings/{name}.wav", hum(0.5 + 0.1 * number, hz=110 + 20 * number))
    without = open_pictures(tmp_path / "pictures")
    for name in ("pictures", "recordings"):
        (tmp_path / name / "manifest.jsonl").write_text(json.dumps(row) + "\n")
    assert open_pictures(tmp_path / "pictures").train == without.train
    for kind, folder in (("vae", "pictures"), ("vocoder", "recordings"), ("tts", "recordings"), ("asr", "recordings")):
        words = ["--num-workers", 0, "--output-file", tmp_path / "report.json"]
        words += ["--language", "en"] if kind in SPEECH else []
        done = gputrain_here("validate", "--kind", kind, "--input-dir", tmp_path / folder, *words)
        assert done.returncode == 0, done.stderr
        assert not json.loads((tmp_path / "report.json").read_text()).get("prepared")
    for kind in ("vocoder", "tts", "asr"):
        done = gputrain_here(f"train-{kind}", "--data-path", tmp_path / "recordings", "--output-dir", tmp_path / "run")
        assert done.returncode == 2
        assert "recordings: not prepared for" in done.stderr
        assert "damaged" not in done.stderr


def refused_as_other(folder: Path, kind: str, *words: object) -> None:
    before = content_of(folder)
    done = gputrain_here(*words)
    assert done.returncode == 2
    assert f"{folder}: is prepared for" in done.stderr
    assert f"not for {kind}" in done.stderr
    assert content_of(folder) == before


@each_row(*OTHERS)
def test_data_of_another_kind_are_said_to_be_so(tmp_path_factory, kind, data):
    folder, run = prepared(data), tmp_path_factory.mktemp("run")
    refused_as_other(folder, kind, f"train-{kind}", "--data-path", folder, "--output-dir", run)
    refused_as_other(folder, kind, "validate", "--kind", kind, "--input-dir", folder)


@each_row(*OTHERS)
def test_a_preparation_never_replaces_one_of_another_kind(tmp_path_factory, kind, data):
    made = tmp_path_factory.mktemp("made")
    folder, recordings = made / "data", made / "recordings"
    shutil.copytree(prepared(data), folder)
    recordings.mkdir()
    soundfile.write(recordings / "a.wav", 0.5 * np.sin(np.arange(16000) / 9), 16000)
    (recordings / "metadata.csv").write_text("a.wav|Hello\n")
    language = ["--language", "en"] if kind in SPEECH else []
    refused_as_other(
        folder, kind, "prepare-data", "--kind", kind, *language, "--input-dir", recordings, "--output-dir", folder
    )


@each_row("vocoder", "tts")
def test_a_preparation_replaces_no_file_of_another_origin(tmp_path_factory, kind):
    made = tmp_path_factory.mktemp("made")
    folder = made / "data"
    for name in ("recordings", "data"):
        (made / name).mkdir()
    soundfile.write(made / "recordings" / "a.wav", 0.5 * np.sin(np.arange(16000) / 9), 16000)
    (made / "recordings" / "metadata.csv").write_text("a.wav|Hello\n")
    (folder / "manifest.jsonl").write_text('{"audio_filepath": "a.wav", "text": "a"}\n')
    before = content_of(folder)
    language = ["--language", "en"] if kind in SPEECH else []
    done = gputrain_here(
        "prepare-data", "--kind", kind, *language, "--input-dir", made / "recordings", "--output-dir", folder
    )
    assert done.returncode == 2
    assert "holds manifest.jsonl of another origin" in done.stderr
    assert content_of(folder) == before
