"""The command line as a user types it: its output and exit codes."""

import inspect
import json
import os
import re
import signal
import subprocess
import sys
import types
from functools import partial
from pathlib import Path
from typing import get_type_hints
from unittest import mock

import click
import pytest
import typer
from typer.testing import CliRunner

from gputrain import config
from gputrain.cli.app import app, command_line
from gputrain.cli.help_page import names
from gputrain.cli.options import command
from gputrain.cli.settings import PrepareSettings
from gputrain.config import leaves
from gputrain.errors import UserError
from gputrain.vae.config import TrainVae
from gputrain.vocoder.config import TrainVocoder
from gputrain.vocoder.openvpi import PROFILES, translate
from tests.cli import options_page
from tests.command import gputrain, gputrain_here
from tests.tables import each_row
from tests.waiting import HANG_SECONDS

# Every flag of the guide's longest command line, with its underscores.
GUIDE = """train-vae --data_path {data} --output_dir {run} --image_size 64 --batch_size 2 --mixed_precision
 --use_torch_compile --use_bf16 --enable_tf32 --channels_last --persistent_workers --accumulation_steps 2
 --num_epochs 100 --learning_rate 1e-4 --z_channels 16 --kl_weight 1e-6 --perceptual_weight 1.0 --gradient_clip 1.0
 --num_workers 1 --checkpoint_freq 5 --save_samples_freq 100 --resume_from auto"""


def test_no_callback_has_a_parameter_that_typer_takes_for_a_class():
    """On Python 3.10 `isinstance(list[Path], type)` is true, and typer then calls issubclass, which raises."""

    def commands(of: click.Command) -> list[click.Command]:
        return [of, *(inner for each in getattr(of, "commands", {}).values() for inner in commands(each))]

    callbacks = {
        inspect.unwrap(parameter.callback): f"{each.name} {parameter.name}"
        for each in commands(command_line())
        for parameter in each.params
        if parameter.callback
    }
    assert len(callbacks) > 20
    generic = [
        f"{where}: {name}"
        for callback, where in callbacks.items()
        for name, annotation in get_type_hints(callback).items()
        if isinstance(annotation, types.GenericAlias) and name != "return"
    ]
    assert generic == []


def test_help_imports_nothing_that_takes_long():
    """It takes half a second, and three with torch."""
    command = [sys.executable, "-X", "importtime", "-m", "gputrain", "--help"]
    page = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert page.returncode == 0
    imported = {line.rsplit("|", 1)[1].strip() for line in page.stderr.splitlines() if line.startswith("import time:")}
    assert "gputrain.cli.app" in imported
    heavy = {"torch", "numpy", "PIL", "scipy", "tensorboard", "transformers", "huggingface_hub", "requests", "jinja2"}
    assert not heavy & imported
    assert len(imported) < 450  # Hundreds of modules, a third of a second in all.
    names = {
        "prepare-data",
        "validate",
        "check-compatibility",
        "train-vae",
        "evaluate",
        "reconstruct",
        "export",
        "demo",
    }
    assert names <= set(page.stdout.split())


PAGE_OF_OPTIONS = options_page.PAGE.relative_to(options_page.PAGE.parents[1]).as_posix()
COMMON_OPTIONS = 40  # At most on each page of --help, --help itself included.


def test_help_has_at_most_forty_options_each_in_one_line_of_80_columns():
    """--help-all has every flag and every key, and no range with an exponent."""
    with mock.patch.dict(os.environ, {"COLUMNS": "80"}):
        for name, settings in options_page.commands(app).items():
            known = leaves(settings).values()
            page = gputrain_here(*name.split(), "--help").stdout
            whole = " ".join(gputrain_here(*name.split(), "--help-all").stdout.split())
            listed = re.findall(r"^  (--\S+|[A-Z]+)(?: [A-Z,.]+)?(?:, -\w)?  +(\S.*)$", page, flags=re.MULTILINE)
            rare = getattr(settings, "rare_panels", ())
            common = {names(leaf).split()[0] for leaf in known if leaf.level == "common" and leaf.panel not in rare}
            assert {left for left, _ in listed} - {"--config", "--help", "--help-all"} == common, name
            assert len(listed) <= COMMON_OPTIONS, name
            assert max(map(len, page.splitlines())) <= 80, name
            has_more = "--help-all" in {left for left, _ in listed}
            for text in (page, whole) if has_more else (page,):
                assert text.rstrip().endswith(PAGE_OF_OPTIONS), name
            assert ("--help-all" in page.splitlines()[-1]) == has_more, name
            lines = page[page.index("\nOptions:") :].splitlines()
            assert not [line for line in lines if line.startswith("   ")], name  # No option has a second line.
            if any(leaf.level != "common" for leaf in known) or rare:
                assert [leaf.name for leaf in known if f" {names(leaf)} " not in f"{whole} "] == [], name
            assert not re.search(r"(at least|to) [\d.]+e[+-]", whole), name
            assert "PosixPath" not in whole
    page = gputrain_here("train-vae", "--help").stdout
    for panel in ("Options", "Data", "Model", "Losses", "Training", "Run folder", "Hardware"):
        assert f"\n{panel}:\n" in page
    assert "Example: gputrain train-vae --data-path data/vae --num-epochs 100\n" in page
    assert "installed (gputrain[f0])" in " ".join(gputrain_here("prepare-data", "--help-all").stdout.split())


@each_row(
    ("train-vocoder", ["--fft-size", "1024"], "fft_size is a key", "write `fft_size: 1024` into a file"),
    (
        "train-vocoder",
        ["--no-finetune-strict-shapes", "--fmax=8000"],
        "fmax is a key",
        "write `fmax: 8000` into a file",
    ),
    ("train-vae", ["--permanent_start", "5"], "permanent_start is a key", "`permanent_start: 5`"),
    ("train-vae", ["--eq_weight", "0.5"], "there is no option eq_weight any more", "leave it out"),
    ("train-tts", ["--no-use-mrd"], "there is no option use_mrd any more", "HiFi-GAN's discriminators"),
    ("train-vae", ["--data-in-memory"], "there is no option data_in_memory any more", "prepared decode faster"),
    ("train-vae", ["--no-lean"], "lean has another name", "it is recompute_norms"),
    ("train-asr", ["--log-freq", "5"], "log_freq has another name", "it is log_every_steps"),
)
def test_a_flag_that_is_a_key_of_a_file_or_gone_is_refused_with_what_to_do(typed, command_name, words, message, hint):
    code, printed = typed(command_name, "--data-path", ".", *words)
    assert code == 2
    assert message in printed
    assert hint in printed


def test_several_files_beat_one_another_in_their_order(tmp_path):
    (tmp_path / "a.yaml").write_text("batch_size: 3\nseed: 1\ngamma: 0.5\nlearning_rate_schedule: exponential\n")
    (tmp_path / "b.yaml").write_text("seed: 2\n")
    made = invoked("train-vae", "-c", tmp_path / "a.yaml", "-c", tmp_path / "b.yaml")
    assert (made.schedule.batch_size, made.schedule.seed, made.schedule.gamma) == (3, 2, 0.5)


def test_the_shell_completes_commands_and_options():
    def completed(words: str) -> list[str]:
        asked = {"_GPUTRAIN_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        program = "import sys; sys.argv = ['gputrain']; from gputrain.cli.app import main; main()"
        command = [sys.executable, "-c", program]
        return subprocess.run(command, env={**os.environ, **asked}, capture_output=True, text=True).stdout.split()

    assert completed("gputrain train-") == ["train-vae", "train-vocoder", "train-tts", "train-asr"]
    assert completed("gputrain train-vae --image-s") == ["--image-size"]


def test_a_flag_beats_the_file_and_the_file_the_default(tmp_path):
    (tmp_path / "c.yaml").write_text("batch_size: 3\nlearning_rate: 1e-3\nchannels: [32, 64]\nuse_bf16: false\n")
    made = invoked("train-vae", "--data-path", "d", "--config", tmp_path / "c.yaml", "--batch-size", 5)
    assert made.schedule.batch_size == 5
    assert made.schedule.learning_rate == 0.001
    assert made.model.channels == (32, 64)
    assert made.hardware.precision == "fp16"
    assert made.schedule.num_epochs == 100


@each_row(
    ({}, "", "auto"),
    ({"use_bf16": True}, "", "bf16"),
    ({"mixed_precision": True}, "", "mixed"),
    ({"mixed_precision": True, "use_bf16": False}, "", "fp16"),
    ({"mixed_precision": False}, "", "tf32"),
    ({"mixed_precision": False, "enable_tf32": False}, "", "fp32"),
    ({"tf32": True}, "", "auto"),
    ({}, "--mixed-precision --use_bf16 --enable-tf32", "bf16"),
    ({}, "--no-enable-tf32", "fp32"),
    # A flag beats the file, unless it leaves what the file says.
    ({"precision": "fp16"}, "--use-bf16", "bf16"),
    ({"use_bf16": True}, "--no-mixed-precision", "tf32"),
    ({"precision": "fp16"}, "--enable-tf32", "fp16"),
    ({"use_bf16": True}, "--precision tf32 --enable-tf32", "tf32"),
)
def test_switches_of_other_programs_set_the_precision(tmp_path, in_file, flags, precision):
    (tmp_path / "c.yaml").write_text(json.dumps(in_file))
    made = invoked("train-vae", "--data-path", "d", "--config", tmp_path / "c.yaml", *flags.split())
    assert made.hardware.precision == precision


@config.config()
class Spoken:
    sentences: tuple[str, ...] = config.opt(default=(), help="Texts.", separator="")
    sizes: tuple[int, ...] = config.opt(default=(1, 2), help="Sizes.")


def test_items_of_a_list_from_a_file_keep_their_commas(tmp_path):
    (tmp_path / "c.yaml").write_text('sentences: ["Salom, dunyo.", "Yaxshimisiz?"]\nsizes: "3,4"\n')
    made = invoked("speak", "--config", tmp_path / "c.yaml")
    assert made.sentences == ("Salom, dunyo.", "Yaxshimisiz?")
    assert made.sizes == (3, 4)
    (tmp_path / "own.yaml").write_text(config.to_yaml(made))  # A run's config.yaml is read like this on resume.
    assert invoked("speak", "--config", tmp_path / "own.yaml") == made


def test_a_list_of_texts_is_the_option_several_times():
    made = invoked(
        "speak", "--sentences", "Salom, dunyo.", "--sentences", "Yaxshimisiz?", "--sizes", "3,4", "--sizes", 5
    )
    assert made.sentences == ("Salom, dunyo.", "Yaxshimisiz?")
    assert made.sizes == (3, 4, 5)
    assert invoked("speak", "--sizes", "").sizes == ()
    assert invoked("speak").sizes == (1, 2)


@each_row(
    (["--data-path", "missing"], "missing: no such folder", "name the folder"),
    (["--data-path", "."], "holds no picture", "pictures are files with one of the suffixes"),
    (["--data-path", ".", "--image-size", 100], "image_size 100 is not a multiple of 8", "use 96 or 104"),
    (["--data-path", ".", "--use-bf16", "--no-mixed-precision"], "contradict each other", "drop one"),
    (["--data-path", ".", "--channels", "64,x"], "channels is '64,x', expected a list of whole numbers", ""),
    (["--data-path", ".", "--init-from", ""], "--init-from is empty", "is a variable of the shell not set?"),
    (["--data-path", ".", "--lpips-weights", "a", "--lpips-weights", " "], "--lpips-weights is empty", "name a model"),
    (["--data-path", ".", "--batch-size", "0"], "--batch-size", ""),
    (["--data-path", ".", "--batch-sise", "4"], "--batch-sise", "--batch-size"),
    (["--data-path", ".", "--resume-from", "no.pt"], "no.pt: no such checkpoint", ""),
    (["--data-path", ".", "--config", "c.yaml"], "c.yaml: unknown key 'image_sise'", "did you mean 'image_size'?"),
    (["--data-path", ".", "--config", "null.yaml"], "null.yaml: image_size is null", "leave the key out"),
    (["--data-path", ".", "--config", "list.yaml"], "list.yaml: expected a mapping", "key: value"),
    (["--data-path", ".", "--config", "gone.yaml"], "gone.yaml: no such file", "gputrain contains draft, fast"),
    (["--data-path", ".", "--device", "cuda"], "no GPU that this torch can use", "check-compatibility"),
    ([], "data/train: no such folder", "name the folder that holds the pictures: --data-path"),
)
def test_bad_input_gets_a_sentence_and_2(typed, tmp_path, words, message, hint):
    (tmp_path / "c.yaml").write_text("image_sise: 3\n")
    (tmp_path / "null.yaml").write_text("image_size:\n")
    (tmp_path / "list.yaml").write_text("- image_size\n")
    if "cuda" in words and __import__("torch").cuda.is_available():
        pytest.skip("there is a GPU here")
    code, printed = typed("train-vae", *words)
    assert code == 2
    assert message in printed
    assert hint in printed
    assert not list(tmp_path.rglob(".lock"))  # No run folder is left.


def test_check_compatibility(tmp_path):
    result = gputrain_here("check-compatibility", "--json")
    assert result.returncode == 0
    checks = {line["name"]: line for line in json.loads(result.stdout)["checks"]}
    assert {"python", "torch", "matrix product", "convolution"} <= checks.keys()
    assert all(line["status"] != "failed" for line in checks.values())


def test_ours_is_told_from_the_users(tmp_path):
    """An internal error gives a traceback and exit code 1."""
    code = "from gputrain.cli import ui; ui.run(lambda: 1 / 0)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 1
    assert "ZeroDivisionError" in result.stderr
    assert "internal error of gputrain" in result.stderr


def test_an_early_end_of_a_connection_is_an_error_with_its_cause():
    """Click alone would print "Aborted."."""
    code = """
from gputrain.cli import app
def end():
    raise EOFError("unexpected EOF")
app.kind_commands.validate = lambda settings: end()
app.main()
"""
    command = [sys.executable, "-c", code, "validate", "--input-dir", "."]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert done.returncode == 1
    assert "unexpected EOF" in done.stderr
    assert "internal error of gputrain" in done.stderr
    assert "Aborted" not in done.stderr


WAITING = """
import atexit, sys, time
from gputrain.cli import ui

def wait():
    print("ready", flush=True)
    time.sleep(1000)

if sys.argv[1] == "after":
    atexit.register(wait)
ui.run(wait if sys.argv[1] == "before" else lambda: None)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no signals")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_signal_outside_the_steps_ends_a_command_with_its_exit_code(moment, name):
    """Before there is anything to save, it stops the command; after its work is done, it ends the process."""
    command, number = [sys.executable, "-c", WAITING, moment], getattr(signal, name)
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # nohup, for one, has SIGHUP ignored.
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        _, talk = process.communicate(timeout=HANG_SECONDS)
    finally:
        process.kill()
    assert process.returncode == {"before": 75, "after": 0}[moment], talk
    assert ("stopped: " in talk) == (moment == "before")
    assert "Traceback" not in talk


@pytest.mark.slow
def test_the_guides_command_line_runs(tmp_path, photographs):
    words = GUIDE.format(data=photographs, run=tmp_path / "run").split()
    words = [*words, "--max_steps", 2, "--preset", "fast", "--channels", "32,32", "--device", "cpu"]
    result = gputrain(*words)
    assert result.returncode == 0, result.stderr
    assert "off: 16 bit, compile (asked for, but needs a GPU)" in result.stderr
    assert (tmp_path / "run" / "checkpoint_last.pt").exists()


def invoked(*words):
    """Return the configuration of a command line, or its output."""
    app, seen = typer.Typer(rich_markup_mode=None), []

    @command(app, "Image VAE")
    def train_vae(settings: TrainVae) -> None:
        """Train."""
        seen.append(settings)

    @command(app, "Test")
    def speak(settings: Spoken) -> None:
        """Speak."""
        seen.append(settings)

    @command(app, "Vocoder", shipped=PROFILES, translate=partial(translate, of="train"))
    def train_vocoder(settings: TrainVocoder) -> None:
        """Train."""
        seen.append(settings)

    @command(app, "Data", shipped=PROFILES, translate=partial(translate, of="prepare"))
    def prepare_data(settings: PrepareSettings) -> None:
        """Prepare."""
        seen.append(settings)

    result = CliRunner().invoke(app, list(map(str, words)), env={"COLUMNS": "100", "TERM": "dumb"})
    if isinstance(result.exception, UserError):
        raise result.exception
    return seen[0] if seen else result.output


@each_row("base_hifi_rtx5090_optimized.yaml", "base_hifi_rtx5090_optimized")
def test_a_bare_name_finds_the_file_that_comes_along(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name.removesuffix(".yaml")).mkdir(exist_ok=True)  # A run's folder of that name is no file.
    flags = ("--crop-mel-frames", 64, "--max-updates", 20, "--ds_workers", 3, "--lr", 1e-4)
    made = invoked("train-vocoder", "--config", name, "--data-path", "d", "--output-dir", "o", *flags)
    assert (made.schedule.batch_size, made.model.upsample_initial_channel) == (32, 1024)
    assert (made.data.crop_mel_frames, made.schedule.num_steps, made.hardware.num_workers) == (64, 20, 3)
    assert (made.schedule.learning_rate, made.schedule.discriminator_rate) == (1e-4, 1.0)
    prepared = invoked("prepare-data", "--input-dir", "i", "--output-dir", "o", "--config", name)
    assert (prepared.kind, prepared.num_workers, prepared.sound.f0_min) == ("vocoder", 16, 65)


def test_ones_own_file_goes_before_the_one_that_comes_along(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base_hifi_gpu.yaml").write_text("ds_workers: 1\nbatch_size: 5\n")
    made = invoked("train-vocoder", "--config", "base_hifi_gpu.yaml", "--data-path", "d")
    assert (made.schedule.batch_size, made.hardware.num_workers) == (5, 1)
    with pytest.raises(UserError, match="base_hifi_cpu: no such file") as caught:
        invoked("train-vocoder", "--config", "base_hifi_cpu", "--data-path", "d")
    assert "base_hifi_gpu, base_hifi_rtx5090_optimized" in caught.value.hint
    with pytest.raises(UserError, match=r"sub.base_hifi_gpu.yaml: No such file"):
        invoked("train-vocoder", "--config", Path("sub") / "base_hifi_gpu.yaml", "--data-path", "d")


@each_row(
    ("max_updates: 5\nnum_steps: 6\n", "c.yaml: max_updates is 5 and num_steps is 6: both set num_steps"),
    ("ds_workers: many\n", "c.yaml: ds_workers is 'many', expected a whole number"),
    ("max_updates:\n", "c.yaml: max_updates is null"),
    ("- a\n", "c.yaml: expected a mapping"),
    ("batch_sise: 3\n", "c.yaml: unknown key 'batch_sise'"),
    ("generater_optimizer_args:\n  lr: -1\n", "c.yaml: generater_optimizer_args.lr is -1.0, expected at least 0"),
    ("min_lr: 1\nlearning_rate: 0.1\n", "min_learning_rate 1 is above learning_rate 0.1"),
)
def test_errors_name_the_file_and_the_key_as_written(tmp_path, monkeypatch, text, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(UserError) as caught:
        invoked("train-vocoder", "--config", "c.yaml", "--data-path", "d")
    assert message in caught.value.message


def test_help_all_has_other_names_once_and_in_the_sentence():
    page = invoked("train-vocoder", "--help-all").replace("\n", "").replace(" ", "")
    for leaf in leaves(TrainVocoder).values():
        assert all(page.count(f"{flag}.") + page.count(f"{flag},") == 1 for flag in leaf.flags[1:]), leaf.name
    assert "base_hifi_rtx5090_optimized" in page


def test_lists_on_the_command_line():
    assert invoked("train-vae", "--data-path", "d", "--channels", "64,128,256").model.channels == (64, 128, 256)
    made = invoked("train-vocoder", "--data-path", "d", "--discriminators", "msd,mpd", "--discriminator-periods", "3,5")
    assert made.discriminators.discriminators == ("msd", "mpd")
    assert made.discriminators.discriminator_periods == (3, 5)
