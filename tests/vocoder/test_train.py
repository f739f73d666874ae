"""train-vocoder as a whole: the configurations that come along, stopping and going on, fine-tuning, the run folder."""

import logging
import math
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch
from PIL import Image
from rich.console import Console
from torch import Tensor

from gputrain.cli.options import read_defaults
from gputrain.config import assemble, read_file
from gputrain.engine.recipe import Term
from gputrain.engine.run_folder import PlanFile
from gputrain.engine.state import TrainState
from gputrain.engine.step import update
from gputrain.errors import UserError
from gputrain.fetch.hub import cache_folder
from gputrain.hw.plan import decide
from gputrain.hw.probe import probe
from gputrain.hw.runtime import Runtime, apply
from gputrain.vocoder.config import TrainVocoder
from gputrain.vocoder.data import WARMUP_STEPS, log_training, open_training_data
from gputrain.vocoder.export import export_openvpi
from gputrain.vocoder.load import load_vocoder, read_weights
from gputrain.vocoder.openvpi import PROFILES, translate
from gputrain.vocoder.recipe import VocoderRecipe
from tests.command import gputrain_here
from tests.comparison import largest_difference
from tests.speech.trainings import assert_same_training, read_checkpoint, rows
from tests.tables import slow
from tests.toy import cpu_runtime, new_state
from tests.training import train_vocoder
from tests.vocoder.conftest import HOP, RATE_HZ, TINY, flags, hummed
from tests.vocoder.test_recipe import sounds

pytestmark = pytest.mark.usefixtures("flops_known")

CONFIGURATIONS = {"base_hifi_gpu": ("msd", "mpd"), "base_hifi_rtx5090_optimized": ("fast_mrd", "fast_mpd")}
KEPT = {"evaluate_every_steps": 10, "checkpoint_every_steps": 2, "keep_checkpoints": 0}
QUIET = {"evaluate_every_steps": 0, "checkpoint_every_steps": 0, "permanent_start": 0, "sample_every_steps": 0}
CPU = torch.device("cpu")


def train(folder: Path, config: Path | None = None, **changes: object) -> dict[str, Any]:
    """Train as the command does with a file and flags, and give what the last checkpoint holds."""
    values = read_defaults(config, TrainVocoder, partial(translate, of="train")) if config else {}
    settings = assemble(TrainVocoder, {**values, **changes, "output_dir": str(folder)})
    train_vocoder(settings, Console(quiet=True))
    return read_checkpoint(folder / "checkpoint_last.pt")


def weights(content: dict[str, Any]) -> dict[str, Tensor]:
    return {f"{name}.{key}": value for name, state in content["modules"].items() for key, value in state.items()}


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float((one[name] - other[name]).square().sum()) for name in one))


# ------------------------------------------------------------------------------- the configurations that come along


@pytest.fixture(scope="module", params=[slow("base_hifi_gpu"), "base_hifi_rtx5090_optimized"])
def undisturbed(request, notes, tmp_path_factory) -> tuple[str, Path]:
    """Runs twenty steps of a configuration; returns its name and the run."""
    folder = tmp_path_factory.mktemp("undisturbed") / request.param
    train(
        folder, PROFILES / f"{request.param}.yaml", data_path=str(notes), **TINY, **KEPT, max_steps=20, eval_first=True
    )
    return request.param, folder


@pytest.mark.slow
def test_stopped_and_resumed_a_run_is_the_undisturbed_one_bit_for_bit(undisturbed, notes, tmp_path):
    name, whole = undisturbed
    half = {"evaluate_every_steps": 10, "max_steps": 10, "eval_first": True}
    train(tmp_path, PROFILES / f"{name}.yaml", data_path=str(notes), **TINY, **half)
    halfway = read_checkpoint(tmp_path / "checkpoint_last.pt")
    assert_same_training(halfway, read_checkpoint(whole / "checkpoint_step_10.pt"))
    resumed = train(tmp_path, tmp_path / "config.yaml", resume_from="auto", max_steps=20)
    assert_same_training(resumed, read_checkpoint(whole / "checkpoint_last.pt"))
    assert {"generator", "discriminators", "ema"} == resumed["modules"].keys()
    assert largest_difference(weights(halfway), weights(resumed)) > 1e-3
    assert resumed["progress"]["step"] == 20
    assert [row["step"] for row in rows(tmp_path)] == [row["step"] for row in rows(whole)]
    at_each_evaluation = {path.name for path in tmp_path.glob("checkpoint_step_*.pt")}
    assert at_each_evaluation == {"checkpoint_step_10.pt", "checkpoint_step_20.pt"}


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_micro_batches_give_the_same_weights(undisturbed, notes, tmp_path, size):
    """Compares the weights after one step, relative to the change of the next step.

    Newton-Schulz multiplies the smallest singular values of a gradient by 3.4445 in each of its five rounds, by 485 in
    all, and their rounding with them. Sums in fp32 round to 1e-6 of the norm, or more where terms cancel, so that 5e-4
    of a step or more are expected. On an AMD EPYC 0.54 % were seen, nearly all of it in the upsampling layers; 5 % are
    allowed. One part in the place of another changes a step by a third. Further steps tell less, since each of them
    lifts what the one before has left.
    """
    name, whole = undisturbed
    changes = {**TINY, **QUIET, "max_steps": 1}
    made = [
        weights(train(tmp_path / str(parts), PROFILES / f"{name}.yaml", data_path=str(notes), **changes, **parts_of))
        for parts, parts_of in enumerate([{}, {"micro_batch_size": size}])
    ]
    assert PlanFile.read(tmp_path / "1" / "plan.json").micro_batch == {"generator": size}
    later = weights(read_checkpoint(whole / "checkpoint_step_2.pt"))
    assert 0 < distance(*made) < 0.05 * distance(made[0], later)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_command_trains_at_the_sizes_of_the_file(tmp_path, name):
    """44.1 kHz, its mel, source, stages, blocks and periods; fewer channels, crops and frames. Planned and measured."""
    store = hummed(tmp_path / "store", 44100, 512, seconds=0.6)
    changes = {
        "upsample_initial_channel": 32, "msd_channels": 16, "mpd_channels": 2, "fast_mpd_init_channel": 2,
        "fast_mrd_init_channel": 2, "batch_size": 4, "crop_mel_frames": 8, "ds_workers": 0, "log_interval": 1,
        "max_steps": 20, "device": "cpu",
    }  # fmt: skip
    words = ["train-vocoder", "--config", f"{name}.yaml", "--data-path", store, *flags(changes)]
    done = gputrain_here(*words, "--output-dir", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "GB predicted; the whole batch of 4 at once" in done.stderr
    lines = [row for row in rows(tmp_path / "run") if "learning_rate" in row]
    assert len(lines) == 20
    assert all(math.isfinite(value) for row in lines for value in row.values())
    plan = PlanFile.read(tmp_path / "run" / "plan.json")
    assert plan.prediction["predicted_peak_gb"] == pytest.approx(sum(plan.prediction["parts"].values()))
    assert plan.plan.micro_batch_size.value == 4
    assert load_vocoder(tmp_path / "run", CPU).generator.architecture.upsample_rates == (8, 8, 2, 2, 2)


@pytest.mark.parametrize(("dilations", "warned"), [("1,3,5", False), ("1,3", True)])
def test_a_shape_that_openvpis_generator_cannot_load_is_warned_of(notes, caplog, dilations, warned):
    settings = assemble(TrainVocoder, {"data_path": str(notes), **TINY, "resblock_dilation_sizes": dilations})
    with caplog.at_level(logging.WARNING, "gputrain"):
        log_training(settings, apply(decide(probe(), settings.hardware)), open_training_data(settings))
    assert ("a block of 2 dilations, and the stock ResBlock1 has three" in caplog.text) == warned


# ------------------------------------------------------------------------------------------------- the run folder


def test_the_run_folder(undisturbed):
    name, folder = undisturbed
    logged = rows(folder)
    discriminators = CONFIGURATIONS[name]
    lines = [row for row in logged if "learning_rate" in row]
    assert [row["step"] for row in lines] == [*range(1, 21)]
    for row in lines:
        losses = {name for name in row if name.startswith("loss/")}
        adversarial = {f"loss/{phase}/{kind}" for phase in ("generator", "discriminator") for kind in discriminators}
        assert losses == {"loss/generator/mel"} | adversarial
    evaluated = {row["step"]: row for row in logged if "eval/score" in row}
    assert list(evaluated) == [0, 10, 20]
    for row in evaluated.values():
        assert {"eval/m_stft", "eval/mel_distance", "eval/mcd_db"} <= row.keys()
    assert evaluated[20]["eval/mel_distance"] < evaluated[0]["eval/mel_distance"]
    best = read_checkpoint(folder / "checkpoint_best.pt")["progress"]
    assert best["best_score"] == max(row["eval/score"] for step, row in evaluated.items() if step)
    assert evaluated[best["step"]]["eval/score"] == best["best_score"]
    kept = {path.name for path in folder.glob("checkpoint_*.pt")}
    assert kept == {
        f"checkpoint_{at}.pt" for at in ("last", "previous", "best", *(f"step_{n}" for n in range(2, 21, 2)))
    }
    settings = read_file(folder / "config.yaml")
    assert (settings["discriminators"], settings["num_steps"]) == (
        list(discriminators), {"base_hifi_gpu": 150_000}.get(name, 300_000),
    )  # fmt: skip
    assert PlanFile.read(folder / "plan.json").micro_batch == {"generator": 4}


def test_sounds_and_pictures_of_a_run(undisturbed):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _, folder = undisturbed
    recording, before, sample = sorted((folder / "samples").glob("*.wav"))
    assert [path.name for path in (recording, before, sample)] == [
        "clip_1_reference.wav", "clip_1_step_00000000.wav", "clip_1_step_00000020.wav",
    ]  # fmt: skip
    assert before.read_bytes() != sample.read_bytes()
    assert soundfile.info(recording).frames == 300 * HOP
    wave_T, rate_hz = soundfile.read(sample)
    assert rate_hz == RATE_HZ
    assert len(wave_T) == 300 * HOP  # The length of the held-out clip.
    assert wave_T.std() > 1e-4
    with Image.open(folder / "samples" / "spectrograms_step_00000020.png") as picture:
        assert picture.mode == "RGB"
        assert picture.width >= 300
    board = EventAccumulator(str(folder / "logs")).Reload()
    before, played = board.Audio("samples/clip_1")
    assert before.step == 0
    assert (played.step, played.sample_rate, played.length_frames) == (20, RATE_HZ, 300 * HOP)
    assert "samples/spectrograms" in board.Tags()["images"]
    assert "samples/clip_1_reference" in board.Tags()["audio"]


# ---------------------------------------------------------------------------------------------------- fine-tuning


@pytest.mark.slow
def test_two_folders_of_which_one_counts_thrice(notes, tmp_path, caplog):
    """As typed, with a stop, from the run's own configuration."""
    other = hummed(tmp_path / "other", clips=3, seconds=1.0)
    shared = {"data_path": [str(notes), f"{other}=3"], **TINY, **QUIET, "num_epochs": 0, "num_steps": 4}
    with caplog.at_level(logging.INFO, "gputrain"):
        whole = train(tmp_path / "whole", **shared)
    (share,) = re.findall(r"other: (\d+) crops with weight 3: (\d+) of an epoch", caplog.text)
    assert int(share[1]) == 3 * int(share[0]) > 0
    crops = [int(count) for count in re.findall(r": (\d+) of an epoch", caplog.text)]
    assert whole["progress"]["items"] == sum(crops)
    train(tmp_path / "parts", **shared, max_steps=2)
    train(tmp_path / "parts", tmp_path / "parts" / "config.yaml", resume_from="auto")
    assert_same_training(read_checkpoint(tmp_path / "parts" / "checkpoint_last.pt"), whole)


@pytest.fixture(scope="module")
def taught(notes, tmp_path_factory) -> Path:
    """A run of two steps with its export for openvpi's tools."""
    folder = tmp_path_factory.mktemp("taught") / "run"
    train(folder, data_path=str(notes), **TINY, **QUIET, max_steps=2, ema_decay=0)
    export_openvpi(load_vocoder(folder, CPU), folder / "openvpi")
    return folder


def finetune(folder: Path, notes: Path, source: Path, **changes: object) -> dict[str, Any]:
    return train(folder, data_path=str(notes), **{**TINY, **QUIET, "init_from": str(source), "seed": 7, **changes})


def test_a_generator_alone_waits_for_the_discriminators(taught, notes, tmp_path, caplog):
    source = tmp_path / "model.ckpt"
    source.write_bytes((taught / "openvpi" / "model.ckpt").read_bytes())
    with caplog.at_level(logging.INFO, "gputrain"):
        begun = finetune(tmp_path / "run", notes, source, max_steps=2)
    assert f"only the discriminators are trained in the first {WARMUP_STEPS} steps" in caplog.text
    assert "reinitialised: all of fast_mrd; all of fast_mpd" in caplog.text
    assert read_file(tmp_path / "run" / "config.yaml")["discriminator_only_steps"] == WARMUP_STEPS == 1000
    given = read_weights(source).generator
    averaged = {name.removeprefix("average."): value for name, value in begun["modules"]["ema"].items()}
    for made in (begun["modules"]["generator"], averaged):
        assert largest_difference({name: made[name] for name in given}, given) == 0
    assert not any(name.startswith("loss/generator") for name in rows(tmp_path / "run")[0])

    # A resumed run goes on from its own weights, and no longer needs the file: by its own configuration or by the
    # command that began it.
    source.unlink()
    with caplog.at_level(logging.INFO, "gputrain"):
        resumed = train(tmp_path / "run", tmp_path / "run" / "config.yaml", resume_from="auto", max_steps=3)
        again = finetune(tmp_path / "run", notes, source, resume_from="auto", max_steps=4)
    assert [content["progress"]["step"] for content in (resumed, again)] == [3, 4]
    assert again["config"]["discriminator_only_steps"] == WARMUP_STEPS
    assert read_file(tmp_path / "run" / "config.yaml")["discriminator_only_steps"] == WARMUP_STEPS
    assert largest_difference(begun["modules"]["generator"], again["modules"]["generator"]) == 0
    assert largest_difference(begun["modules"]["discriminators"], again["modules"]["discriminators"]) > 0
    with pytest.raises(UserError, match=r"model\.ckpt: no such file"):
        finetune(tmp_path / "other", notes, source, max_steps=1)


@pytest.mark.parametrize(("steps", "warmup"), [(40, 4), (9, 0)])
def test_the_warm_up_is_at_most_a_tenth_of_the_training(taught, notes, tmp_path, caplog, steps, warmup):
    source = tmp_path / "model.ckpt"
    source.write_bytes((taught / "openvpi" / "model.ckpt").read_bytes())
    with caplog.at_level(logging.INFO, "gputrain"):
        finetune(tmp_path / "run", notes, source, num_epochs=0, num_steps=steps, max_steps=1)
    assert read_file(tmp_path / "run" / "config.yaml")["discriminator_only_steps"] == warmup
    assert f"start: the weights of {source} (generator)" in caplog.text
    late = "training of the generator (discriminator_only_steps) begins after step 4, and this run ends after step 1"
    assert (late in caplog.text) == (warmup > 0)


def test_a_full_checkpoint_needs_no_warm_up(taught, notes, tmp_path, caplog):
    with caplog.at_level(logging.INFO, "gputrain"):
        made = finetune(tmp_path, notes, taught / "checkpoint_last.pt", max_steps=1, learning_rate=0.0)
    assert "only the discriminators are trained" not in caplog.text
    assert "reinitialised" not in caplog.text
    assert read_file(tmp_path / "config.yaml")["discriminator_only_steps"] == 0
    before = read_checkpoint(taught / "checkpoint_last.pt")
    for name in ("generator", "discriminators"):
        assert largest_difference(before["modules"][name], made["modules"][name]) == 0
    assert "loss/generator/fast_mpd" in rows(tmp_path)[0]


def test_training_begins_from_a_name_of_the_hub(taught, notes, tmp_path, hub):
    folder = tmp_path / "repository"
    shutil.copytree(taught / "openvpi", folder / "v2")
    (folder / "v2" / "model.onnx").write_bytes(b"no weights")
    hub.add("ann/vocoders", folder, "2025.02")
    begun = finetune(tmp_path / "run", notes, "ann/vocoders:v2@2025.02", max_steps=1)
    given = read_weights(folder / "v2").generator
    assert largest_difference({name: begun["modules"]["generator"][name] for name in given}, given) == 0
    assert hub.fetched() == {"v2/model.ckpt", "v2/config.json"}
    assert read_file(tmp_path / "run" / "config.yaml")["init_from"] == "ann/vocoders:v2@2025.02"
    hub.server.files.clear()
    shutil.rmtree(cache_folder())  # A resumed run needs neither the Hub nor the cache.
    train(tmp_path / "run", tmp_path / "run" / "config.yaml", resume_from="auto", max_steps=2)


def test_other_shapes_are_listed_or_reinitialised(taught, notes, tmp_path, caplog):
    source = taught / "openvpi" / "model.ckpt"
    wider = {"resblock_kernel_sizes": [5], "max_steps": 2, "discriminator_only_steps": 1}
    with (
        caplog.at_level(logging.INFO, "gputrain"),
        pytest.raises(UserError, match=r"its generator differs in 12 tensors: resblocks\.0\.") as raised,
    ):
        finetune(tmp_path / "strict", notes, source, **wider)
    assert "runs on" not in caplog.text  # It is refused before anything is planned.
    assert "(16, 16, 3), expected (16, 16, 5)" in raised.value.message
    assert "--no-finetune-strict-shapes" in raised.value.hint
    assert not (tmp_path / "strict" / "checkpoint_last.pt").exists()
    with caplog.at_level(logging.WARNING, "gputrain"):
        begun = finetune(tmp_path / "loose", notes, source, **wider, finetune_strict_shapes=False, learning_rate=0.0)
    assert "reinitialised: resblocks.0.convs1.0.weight_v" in caplog.text
    given, made = read_weights(source).generator, begun["modules"]["generator"]
    fitting = [name for name in given if given[name].shape == made[name].shape]
    assert len(fitting) == len(given) - 12
    assert largest_difference({name: made[name] for name in fitting}, {name: given[name] for name in fitting}) == 0
    # The warm-up is that of the user, where there is one.
    assert ["loss/generator/mel" in row for row in rows(tmp_path / "loose")] == [False, True]


# -------------------------------------------------------------------------------------- 16 bits, and compiled code


def begin(folder: Path, runtime: Runtime | None = None, **changes: object) -> TrainState:
    settings = assemble(TrainVocoder, {"data_path": ".", **TINY, **changes})
    runtime = runtime or cpu_runtime()
    recipe = VocoderRecipe(settings, runtime)
    return new_state(recipe, folder, runtime)


def steps(state: TrainState, count: int, first: int = 0) -> list[dict[str, float]]:
    """Returns the losses of some steps."""
    metrics = []
    for step in range(first, first + count):
        batch = state.recipe.prepare(sounds(state.recipe.settings, step, 4), step)
        metrics.append(update(state, batch, step, 1e-3))
    return [{name: float(value) for name, value in row.items() if name.startswith("loss/")} for row in metrics]


@pytest.mark.slow
@pytest.mark.parametrize("discriminators", ["fast_mrd,fast_mpd", "msd,mpd,mrd"])
def test_bf16_learns_what_fp32_learns(tmp_path, discriminators):
    """Waves, spectra and losses stay in fp32; the rest is in 16 bits."""
    changes = {"discriminators": discriminators, "mrd_fft_sizes": [128], "mrd_hop_sizes": [16], "mrd_win_lengths": [64]}
    exact, coarse = (begin(tmp_path, cpu_runtime(precision=name), **changes) for name in ("fp32", "bf16"))
    recipe = coarse.recipe
    inside: list[torch.dtype] = []
    recipe.generator.ups[0].register_forward_hook(lambda module, given, made: inside.append(made.dtype))
    batch = recipe.prepare(sounds(recipe.settings, 0, 4), 0)
    with coarse.runtime.autocast():
        assert recipe.generate(batch).dtype == torch.float32
        for term in recipe.loss(batch, 0):
            if isinstance(term, Term):
                assert term.value.dtype == torch.float32, term.name
                torch.autograd.backward(term.value)
    assert set(inside) == {torch.bfloat16}
    for module in recipe.modules.values():
        module.zero_grad(set_to_none=True)
    for one, other in zip(steps(exact, 3), steps(coarse, 3), strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert other[name] == pytest.approx(value, rel=0.05), name


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no compiler")
def test_compiled_code_learns_the_same_and_is_compiled_once(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    plain = steps(begin(tmp_path), 3)
    state = begin(tmp_path, cpu_runtime(compiled=True))
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    compiled = steps(state, 1)
    graphs = counters["stats"]["unique_graphs"]
    assert 5 <= graphs <= 9  # the generator; each discriminator's features, with gradients or not, and its whole
    compiled += steps(state, 1, first=1) + steps(state, 1, first=2)
    assert counters["stats"]["unique_graphs"] == graphs
    assert not counters["graph_break"]
    assert state.runtime.plan.compile.value
    for one, other in zip(plain, compiled, strict=True):
        assert other == pytest.approx(one, rel=1e-4)
