"""The command line as a user types it: real processes, their output and exit codes."""

import json
import re
import subprocess
import sys
import time

import pytest

from gputrain.cli.bridge import read_defaults
from gputrain.config import leaves
from gputrain.vae.config import TrainVae

# Every flag of the guide's longest command line, underscores as they are there.
GUIDE = """train-vae --data_path {data} --output_dir {run} --image_size 64 --batch_size 2 --mixed_precision
 --use_torch_compile --use_bf16 --enable_tf32 --channels_last --persistent_workers --accumulation_steps 2
 --num_epochs 100 --learning_rate 1e-4 --z_channels 16 --kl_weight 1e-6 --perceptual_weight 1.0 --gradient_clip 1.0
 --num_workers 1 --checkpoint_freq 5 --save_samples_freq 100 --resume_from auto"""


def gputrain(*words: object, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gputrain", *map(str, words)], capture_output=True, text=True, timeout=300, **options
    )


def test_help_is_quick_and_imports_no_torch():
    began = time.perf_counter()
    page = gputrain("--help")
    seconds = time.perf_counter() - began
    assert page.returncode == 0
    for name in (
        "prepare-data",
        "validate",
        "check-compatibility",
        "train-vae",
        "evaluate",
        "reconstruct",
        "export",
        "demo",
    ):
        assert name in page.stdout
    assert seconds < 2  # 0.2 s on an idle machine
    code = (
        "import sys, gputrain.cli.app; print([m for m in ('torch', 'numpy', 'PIL', 'tensorboard') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_help_of_a_command_has_every_knob_in_its_panel():
    page = gputrain("train-vae", "--help", env={"COLUMNS": "200", "PATH": ""}).stdout
    for leaf in leaves(TrainVae).values():
        assert leaf.flag in page
    for panel in ("Data", "Model", "Losses", "Training", "Run folder", "Hardware"):
        assert re.search(rf"╭─ {panel} ─", page)


def test_version():
    from gputrain import __version__

    assert gputrain("--version").stdout == f"gputrain {__version__}\n"


def settings_of(tmp_path, *words):
    """The configuration that a command line amounts to, seen in the run folder of a run that cannot begin."""
    (tmp_path / "empty").mkdir(exist_ok=True)
    result = gputrain("train-vae", *words, "--output-dir", tmp_path / "run")
    assert result.returncode == 2, result.stderr
    return read_defaults(tmp_path / "run" / "config.yaml", TrainVae)


def test_a_flag_beats_the_file_and_the_file_the_default(tmp_path):
    (tmp_path / "c.yaml").write_text("batch_size: 3\nlearning_rate: 1e-3\nchannels: [32, 64]\nuse_bf16: false\n")
    made = settings_of(tmp_path, "--config", tmp_path / "c.yaml", "--batch-size", 5, "--data-path", tmp_path / "empty")
    assert made["batch_size"] == 5
    assert made["learning_rate"] == 0.001
    assert made["channels"] == (32, 64)
    assert made["use_bf16"] is False
    assert made["num_epochs"] == 100
    assert "mixed_precision" not in made


def test_lists_on_the_command_line(tmp_path):
    made = settings_of(tmp_path, "--channels", "64,128,256", "--data-path", tmp_path / "empty")
    assert made["channels"] == (64, 128, 256)


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (["--data-path", "missing"], "missing: no such folder", "name the folder"),
        (["--data-path", "."], "holds no picture", "pictures are files that end in"),
        (["--data-path", ".", "--image-size", 100], "image_size 100 cannot be divided by 8", "use 96 or 104"),
        (["--data-path", ".", "--use-bf16", "--no-mixed-precision"], "contradict each other", "drop one"),
        (["--data-path", ".", "--channels", "64,x"], "channels is '64,x', expected a list of whole numbers", ""),
        (["--data-path", ".", "--batch-size", "0"], "--batch-size", ""),
        (["--data-path", ".", "--batch-sise", "4"], "--batch-sise", "--batch-size"),
        (["--data-path", ".", "--resume-from", "no.pt"], "no.pt: no such checkpoint", ""),
        (["--data-path", ".", "--config", "c.yaml"], "c.yaml: unknown key 'image_sise'", "did you mean 'image_size'?"),
        (["--data-path", ".", "--config", "null.yaml"], "null.yaml: image_size is null", "leave the key out"),
        (["--data-path", ".", "--config", "list.yaml"], "list.yaml: expected a mapping", "key: value"),
        (["--data-path", ".", "--config", "gone.yaml"], "gone.yaml: No such file", "YAML or JSON"),
        (["--data-path", ".", "--device", "cuda"], "no GPU that this torch can use", "check-compatibility"),
        ([], "Missing option '--data-path'", ""),
    ],
)
def test_bad_input_gets_a_sentence_and_2(tmp_path, words, message, hint):
    (tmp_path / "c.yaml").write_text("image_sise: 3\n")
    (tmp_path / "null.yaml").write_text("image_size:\n")
    (tmp_path / "list.yaml").write_text("- image_size\n")
    if "cuda" in words and __import__("torch").cuda.is_available():
        pytest.skip("there is a GPU here")
    result = gputrain("train-vae", *words, cwd=tmp_path)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    talk = " ".join(result.stderr.split())
    assert message in talk
    assert hint in talk


def test_check_compatibility(tmp_path):
    result = gputrain("check-compatibility", "--quick", "--json")
    assert result.returncode == 0
    checks = {line["name"]: line for line in json.loads(result.stdout)["checks"]}
    assert {"python", "torch", "matrix product", "convolution"} <= checks.keys()
    assert all(line["status"] != "failed" for line in checks.values())


def test_ours_is_told_from_the_users(tmp_path):
    """An error that nobody foresaw: a traceback and 1."""
    code = "from gputrain.cli import ui; ui.run(lambda: 1 / 0)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 1
    assert "ZeroDivisionError" in result.stderr
    assert "a defect of gputrain" in result.stderr


@pytest.mark.slow
def test_the_guides_command_line_runs(tmp_path, photographs):
    words = GUIDE.format(data=photographs, run=tmp_path / "run").split()
    # A small model, because compiling for the CPU takes minutes.
    result = gputrain(*words, "--max_steps", 2, "--preset", "fast", "--channels", "32,32")
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "run" / "checkpoint_last.pt").exists()
