"""Our vocoder against openvpi/SingingVocoders', in one run: losses, gradients, time and memory of a training step.

usage: python benchmarks/vocoder_vs_openvpi.py --peer FOLDER [--smoke]

FOLDER is a checkout of https://github.com/openvpi/SingingVocoders at 4d0889c. Both sides read the two configuration
files that come with gputrain, in openvpi's keys, as they stand: `standard` (512 channels, msd and mpd, AdamW, fp32) and
`optimised` (1024 channels, fast_mrd and fast_mpd, Muon, 16-mixed). Rows are fresh processes, in turn: peer, ours, peer,
ours, ...; a side's figures are medians over its rows. The peer makes its own training_step (vocoder_peer.py); ours is
`Trial`, all that a training does between loading and logging. Both begin with the same weights, on the same sound.

First each configuration is checked in fp32, with the same noise: every loss of both phases to 1e-4, and the gradients.
What differs by design stands in DIFFERENCES. On a GPU sizes are the files', and ours is measured compiled too; on a CPU
crops are 32 frames and batches 1, if not told otherwise. Writes benchmarks/results/vocoder_vs_openvpi_DEVICE.json after
every row. `--smoke` runs a tiny generator on short crops, to see that the script works. Ends with 1 where a check fails.

Shapes: B items, 1 channel, T samples, M mel bands, F frames, H harmonics.
"""

import argparse
import logging
import math
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
import vocoder_peer
from torch import Tensor

from gputrain import bench, timing, trial
from gputrain.bench import Result, Row, Settings
from gputrain.config import assemble, read_file
from gputrain.hw.plan import decide
from gputrain.hw.probe import probe
from gputrain.hw.runtime import Runtime, apply
from gputrain.train import Phase, accumulate
from gputrain.vocoder.bench import Trial, made_up_sound
from gputrain.vocoder.config import TrainVocoder
from gputrain.vocoder.discriminators import FastPeriodJudge
from gputrain.vocoder.generator import HARMONICS, Noise
from gputrain.vocoder.openvpi import PROFILES, translate
from gputrain.vocoder.recipe import VocoderBatch, VocoderRecipe

CONFIGURATIONS = {"standard": "base_hifi_gpu.yaml", "optimised": "base_hifi_rtx5090_optimized.yaml"}
# What each of our sides adds to the file; fp32 or fp16 is the file's.
OURS: dict[str, Settings] = {
    "ours": {"use_torch_compile": False},
    "ours-compiled": {"use_torch_compile": True},
    "ours-compiled-bf16": {"use_torch_compile": True, "mixed_precision": True, "use_bf16": True},
}
SIDES = ("peer", *OURS)
PLAIN = {**trial.PLAIN, "volume_aug": False}  # for the check
# By what the peer's gradient of the discriminators is larger: real + fake in the one task, their mean in the other.
GRADIENT_FACTORS = {"standard": 2.0, "optimised": 1.0}
TOLERANCE = 1e-4  # of a loss, relative
DIFFERENCES = (
    "Phases: the peer steps the discriminators first, so that the generator meets the stepped ones; ours steps the "
    "generator first, and the discriminators then judge the same waves. The check steps neither.",
    "Discriminators' loss: 0.5 (real + fake) in ours and in the peer's fast task, real + fake in its other task.",
    "fast_mpd: at a length that is no multiple of period and strides, the peer cuts the wave's end off, ours reflects "
    "it. In the check ours is cut too; losses_as_trained are those without the cut.",
    "Spectral norm: the peer iterates in every forward pass, ours once a step. In the check both stand still.",
    "Source noise: the peer draws the harmonics' phases once for a batch, ours for every item. In the check as the peer.",
    "Muon: the peer's five rounds have coefficients of their own, ours those of Jordan et al. 2024.",
    "Only ours, within the timed step: clipping (the peer's clip_grad_norm has no effect), the moving average of the "
    "weights, the mel that the generator is given, and the change of loudness (the peer's loader makes these two).",
)
log = logging.getLogger("gputrain.benchmark")


def main() -> None:
    options = parse()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    bench.open_folder(options.output_dir)
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as scratch:
        child = (sys.executable, __file__)
        for result in bench.measure_rows(rows(options, Path(scratch)), child, minutes=options.row_minutes):
            results.append(result)
            print(line(result), flush=True)
            path = write(options, results)
    show(summaries(results))
    print(path)
    if not all(result.figures.get("equal") for result in results if result.settings["side"] == "check"):
        sys.exit(1)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, required=True, help="checkout of openvpi/SingingVocoders")
    parser.add_argument("--configurations", choices=CONFIGURATIONS, nargs="+", default=list(CONFIGURATIONS))
    parser.add_argument("--sides", choices=SIDES, nargs="+", help="the first is the reference")
    parser.add_argument("--batch-size", type=int, help="crops of a step; on a GPU the file's, on a CPU 1")
    parser.add_argument("--crop-frames", type=int, help="a multiple of 8; on a GPU the file's, on a CPU 32")
    parser.add_argument("--channels", type=int, help="of the generator; the file's")
    parser.add_argument("--threads", type=int, nargs="+", help="on a CPU: 1 2")
    parser.add_argument("--rounds", type=int, default=3, help="rows of each side")
    parser.add_argument("--warmup", type=int, help="steps before the timed ones; on a GPU 3, on a CPU 1")
    parser.add_argument("--steps", type=int, help="timed steps of a row; on a GPU 10, on a CPU 3")
    parser.add_argument("--row-minutes", type=float, default=10)
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--smoke", action="store_true", help="a tiny generator on short crops, on the CPU")
    parser.add_argument("--output-dir", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    if not (options.peer / "training" / "nsf_HiFigan_task.py").is_file():
        parser.error(f"--peer {options.peer}: no checkout of openvpi/SingingVocoders")
    if options.crop_frames and options.crop_frames % 8:
        parser.error("--crop-frames: a multiple of 8, so that fast_mrd sees the same frames on both sides")
    settle(options)
    return options


def settle(options: argparse.Namespace) -> None:
    """What was not said, by the device."""
    tiny: Settings = {"device": "cpu", "batch_size": 1, "crop_frames": 8, "channels": 32, "threads": [1], "rounds": 1,
                      "warmup": 1, "steps": 1}  # fmt: skip
    if options.smoke:
        vars(options).update(tiny)
    on_gpu = options.device != "cpu" and torch.cuda.is_available()
    options.device = "cuda" if on_gpu else "cpu"
    cpu: Settings = {"batch_size": 1, "crop_frames": 32, "threads": [1, 2], "warmup": 1, "steps": 3,
                     "sides": ["peer", "ours"]}  # fmt: skip
    gpu: Settings = {"threads": [0], "warmup": 3, "steps": 10, "sides": ["peer", "ours", "ours-compiled"]}
    for name, value in (gpu if on_gpu else cpu).items():
        if getattr(options, name) is None:
            setattr(options, name, value)


def rows(options: argparse.Namespace, scratch: Path) -> Iterator[Row]:
    """The checks, which leave weights in `scratch` for the others; then rounds, of all configurations each."""
    changes = {"batch_size": options.batch_size, "crop_mel_frames": options.crop_frames}
    shared = {
        "peer": str(options.peer),
        "device": options.device,
        "changes": {key: value for key, value in changes.items() if value},
        "channels": options.channels or 0,
        "warmup_steps": options.warmup,
        "steps": options.steps,
    }
    for name in options.configurations:
        yield make_row(f"{name}: check", shared, name, "check", options.threads[-1], scratch)
    for _, name, threads, side in product(
        range(options.rounds), options.configurations, options.threads, options.sides
    ):
        of_threads = f", {threads} threads" if threads else ""
        yield make_row(f"{name}{of_threads}: {side}", shared, name, side, threads, scratch)


def make_row(label: str, shared: Settings, configuration: str, side: str, threads: int, scratch: Path) -> Row:
    weights = str(scratch / f"{configuration}.pt")
    return Row(label, {**shared, "configuration": configuration, "side": side, "threads": threads, "weights": weights})


# In the child ---------------------------------------------------------------------------------------------------------


def measure(settings: Settings) -> dict[str, Any]:
    """The figures of a row."""
    if settings["threads"]:
        torch.set_num_threads(settings["threads"])
    if settings["side"] == "check":
        return check(settings)
    weights = read_weights(settings)
    figures = measure_peer(settings, weights) if settings["side"] == "peer" else measure_ours(settings, weights)
    items, seconds = batch_of(settings)
    rate = items * seconds / figures["seconds_per_step"]
    return {**figures, "audio_seconds_per_second": rate}


def profile(settings: Settings) -> dict[str, Any]:
    """A configuration file in openvpi's keys, at the size of the row."""
    content: dict[str, Any] = {**read_file(profile_path(settings)), **settings["changes"]}
    if settings["channels"]:
        content["model_args"] = {**content["model_args"], "upsample_initial_channel": settings["channels"]}
    return content


def profile_path(settings: Settings) -> Path:
    return PROFILES / CONFIGURATIONS[settings["configuration"]]


def training(settings: Settings, **added: Any) -> TrainVocoder:
    """What the file becomes for us, by the same table that a user's goes through."""
    options = translate(profile(settings), profile_path(settings), of="train")
    return assemble(TrainVocoder, {**options, "data_path": ".", "device": settings["device"], **added})


def batch_of(settings: Settings) -> tuple[int, float]:
    """Crops of a step, and the seconds of each."""
    train = training(settings)
    return train.schedule.whole_batch, train.crop_seconds


def read_weights(settings: Settings) -> dict[str, dict[str, Tensor]]:
    """Raises NotMeasured where the check left none."""
    try:
        weights: dict[str, dict[str, Tensor]] = torch.load(settings["weights"], mmap=True, weights_only=True)
    except FileNotFoundError:
        raise bench.NotMeasured("no weights, because the check of this configuration did not come so far") from None
    return weights


def weights_of(recipe: VocoderRecipe) -> dict[str, dict[str, Tensor]]:
    judges = {kind: members.state_dict() for kind, members in recipe.by_kind.items()}
    return {"generator": recipe.generator.state_dict(), **judges}


def measure_ours(settings: Settings, weights: dict[str, dict[str, Tensor]]) -> dict[str, Any]:
    train = training(settings, **OURS[settings["side"]])
    switch = "compile" if train.hardware.use_torch_compile else ""
    plan = decide(probe(), train.hardware)
    trial.check_switch(plan, switch)
    with tempfile.TemporaryDirectory() as folder:
        ours = Trial(train, apply(plan), Path(folder))
        ours.recipe.generator.load_state_dict(weights["generator"])
        for kind, members in ours.recipe.by_kind.items():
            members.load_state_dict(weights[kind])
        figures = timed(ours.step, ours.runtime.device, settings)
    trial.check_switch(ours.runtime.plan, switch)  # a compiler that fails is switched off
    switches = {name: setting.value for name, setting in ours.runtime.plan.settings.items()}
    return {**figures, "micro_batch_size": min(ours.training.micro_batch.values()), "switches": switches}


def measure_peer(settings: Settings, weights: dict[str, dict[str, Tensor]]) -> dict[str, Any]:
    """With torch's own switches, as its users run it."""
    device, content = torch.device(settings["device"]), profile(settings)
    fp16 = device.type == "cuda" and content["pl_trainer_precision"] == "16-mixed"
    task = vocoder_peer.load(Path(settings["peer"]), content, weights, device)
    samples_BT, f0_BF = made_up_sound(training(settings))
    sample = vocoder_peer.make_sample(task, samples_BT / 32768, f0_BF)
    figures = timed(vocoder_peer.stepping(task, sample, device, fp16=fp16), device, settings)
    return {**figures, "switches": {"precision": "fp16" if fp16 else "fp32"}}


def timed(step: Any, device: torch.device, settings: Settings) -> dict[str, Any]:
    return dict(timing.time_steps(step, device, warmup=settings["warmup_steps"], steps=settings["steps"]))


# The check ------------------------------------------------------------------------------------------------------------


def check(settings: Settings) -> dict[str, Any]:
    """Every loss of both phases and the gradients on both sides, of the same weights, sound and noise."""
    train = training(settings, **PLAIN)
    train = replace(train, schedule=replace(train.schedule, batch_size=min(2, train.schedule.whole_batch)))
    runtime = apply(decide(probe(), train.hardware))
    with tempfile.TemporaryDirectory() as folder:
        ours = Trial(train, runtime, Path(folder))
        weights = weights_of(ours.recipe)
        torch.save(weights, settings["weights"])
        task = vocoder_peer.load(Path(settings["peer"]), profile(settings), weights, runtime.device)
        batch: VocoderBatch = ours.recipe.prepare(ours.loaded, 0)
        sample = vocoder_peer.make_sample(task, batch.real_B1T.squeeze(1), batch.f0_BF)
        noise = noise_of_the_peer(batch, runtime.device)
        batch = replace(batch, noise=noise)
        theirs, their_gradients = vocoder_peer.record(task, sample)
        as_trained, _ = losses_and_gradients(ours, batch)
        for kind in ours.recipe.by_kind.values():
            for judge in kind:
                if isinstance(judge, FastPeriodJudge):
                    cut_end(judge)
        losses, gradients = losses_and_gradients(ours, batch)
    factor = GRADIENT_FACTORS[settings["configuration"]]
    found = {
        "items": len(batch.real_B1T),
        "crop_frames": batch.f0_BF.shape[1],
        "losses": compared(losses, named_losses(theirs, ours.recipe)),
        "losses_as_trained": as_trained,
        "gradients": compared_gradients(ours.recipe, gradients, their_gradients, factor),
        "discriminator_gradient_factor": factor,
    }
    return {**found, "equal": all(loss["relative"] <= TOLERANCE for loss in found["losses"].values())}


def noise_of_the_peer(batch: VocoderBatch, device: torch.device) -> Noise:
    """What the peer's source is about to draw, by the default generator: the phases of a whole batch, then noise."""
    items, samples = len(batch.real_B1T), batch.real_B1T.shape[-1]
    torch.manual_seed(0)
    phase_BH = torch.rand(1, 1, HARMONICS, device=device)[0].repeat(items, 1)
    phase_BH[:, 0] = 0
    source_BTH = torch.randn(items, samples, HARMONICS, device=device)
    torch.manual_seed(0)
    return batch.noise._replace(phase_BH=phase_BH, source_BTH=source_BTH)


def cut_end(judge: FastPeriodJudge) -> None:
    """Have it judge what the peer's does: the longest beginning of a wave that period and strides divide."""
    tokens, multiple = judge.tokens, judge.period * math.prod(judge.strides)
    members: Any = judge
    members.tokens = lambda wave_B1T: tokens(wave_B1T[..., : wave_B1T.shape[-1] // multiple * multiple])


def losses_and_gradients(ours: Trial, batch: VocoderBatch) -> tuple[dict[str, float], dict[str, dict[str, Tensor]]]:
    """Named as the phases and terms are; the gradients of each phase. No step is made."""
    losses: dict[str, float] = {}
    gradients = {}
    for phase in ours.recipe.phases:
        terms, statistics = accumulate(ours.training, phase, batch, 0)
        for name, value in {**terms, **statistics}.items():
            losses[f"{phase.name}/{name}"] = float(value)
        gradients[phase.name] = take_gradients(phase, ours.recipe)
    for kind in ours.recipe.by_kind:  # the term holds both
        losses[f"generator/{kind}"] -= losses[f"generator/{kind}_features"]
    return losses, gradients


def take_gradients(phase: Phase, recipe: VocoderRecipe) -> dict[str, Tensor]:
    """Under the names that the peer has for its parameters."""
    modules = {"": recipe.generator}
    if phase.name == "discriminator":
        modules = {f"{vocoder_peer.NAMES[kind]}.": members for kind, members in recipe.by_kind.items()}
    return {}


def named_losses(theirs: dict[str, float], recipe: VocoderRecipe) -> dict[str, float]:
    """The peer's logged figures under our names, and with our factors."""
    named = {"generator/mel": theirs["aux_mel_loss"] / recipe.losses.lab_aux_melloss}
    for kind in recipe.by_kind:
        name = vocoder_peer.NAMES[kind]
        named[f"generator/{kind}"] = theirs[f"G{name}loss"]
        named[f"generator/{kind}_features"] = theirs[f"G{name}_feature_loss"]
        named[f"discriminator/{kind}"] = 0.5 * (theirs[f"D{name}lossF"] + theirs[f"D{name}lossT"])
    return named
