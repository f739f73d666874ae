"""Compares our voice with piper-tts' own training code in one run: losses, gradients, time and memory of a step.

usage: python benchmarks/vits_vs_piper.py [--peer FOLDER] [--preset high medium] [--smoke]

FOLDER is a checkout of https://github.com/OHF-Voice/piper1-gpl; default: the installed piper-tts 1.8,
whose wheel contains the same training code. Both sides train equal sizes on the same synthetic clips in fp32 on the
CPU, from equal weights. Rows are new processes, in turn: peer, ours, peer, ours, ...; a side's results are medians over
its rows. The peer runs its own training_step (vits_peer.py); ours is `StepBench`, everything between loading
and logging. CPU seconds are those of all threads, including threads that wait for others: they are not meaningful
on a machine with other work, either.

First each preset is checked, with equal noise and without dropout: every loss of both phases to 1e-4, and the
gradients. DIFFERENCES lists the known differences. Writes benchmarks/results/vits_vs_piper_DEVICE.json after every row.
`--smoke` trains a tiny voice on short clips to test the script. Exits with 1 if a check fails.
"""

import argparse
import logging
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import torch
import vits_peer
import vocoder_peer
from torch import nn
from vocoder_vs_openvpi import described, line, show, summaries, timed

from gputrain.bench import runner, step_bench
from gputrain.bench.runner import BenchResult, BenchRow, Settings
from gputrain.bench.step_bench import StepBench
from gputrain.config import assemble
from gputrain.hw.heap import keep_freed_memory
from gputrain.hw.plan import decide
from gputrain.hw.probe import probe
from gputrain.hw.runtime import Runtime, apply
from gputrain.planner.session import measured_rates
from gputrain.tts.architecture import VoiceArchitecture
from gputrain.tts.bench import synthetic_speech
from gputrain.tts.config import PlannedSpeech, TrainTts
from gputrain.tts.plan import architecture_for, size_of
from gputrain.tts.recipe import VoiceRecipe

SIDES = ("peer", "ours")
NUM_SYMBOLS = 256  # Piper's
TINY: Settings = {"hidden_channels": 16, "latent_channels": 16, "encoder_filter_channels": 32, "encoder_layers": 2,
                  "upsample_initial_channel": 32}  # fmt: skip
PLAIN = {**step_bench.PLAIN, "encoder_dropout": 0.0, "duration_dropout": 0.0}  # settings of the check
TOLERANCE = 1e-4  # relative tolerance of a loss
DIFFERENCES = (
    "Order: both sides compute the losses of generator and discriminators before either steps. The peer has four "
    "passes through the discriminators, of real and made waves twice; ours two, whose results serve both losses.",
    "The peer's generator loss is back-propagated into the weights of the discriminators too, and dropped there.",
    "Discriminators' loss: real + fake in the peer, half of it in ours.",
    "Mel: the peer cuts the target out of the mel of the whole clip, and takes sqrt(re^2 + im^2 + 1e-6); ours compares "
    "segments, by plain magnitudes. In the check the peer is handed ours; its losses_of_the_peer_with_its_own_mels are "
    "those without.",
    "AdamW: lr 2e-4 for both nets in ours; 1e-4 and other betas for the discriminators in the peer. Ours is torch's "
    "fused one, the peer's torch's default. Neither clips by default.",
    "The peer reads each discriminator's losses from the device with item(); nothing else is logged in either.",
    "Only ours, within the timed step: the moving average of the weights, the guard against gradients that are not "
    "finite, and the linear magnitudes of the clips (the peer's loader has them on disk).",
    "All clips of a batch have the same length: what buckets save in padding is not measured here.",
)
log = logging.getLogger("gputrain.benchmark")


def main() -> None:
    options = parse()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    runner.open_folder(options.output_dir)
    results: list[BenchResult] = []
    with tempfile.TemporaryDirectory() as scratch:
        child = (sys.executable, "-W", "ignore", __file__)
        for result in runner.measure_rows(rows(options, Path(scratch)), child, minutes=options.row_minutes):
            results.append(result)
            print(line(result), flush=True)
            write(options, results)
    show(summaries(results))
    if not all(result.figures.get("equal") for result in results if result.settings["side"] == "check"):
        sys.exit(1)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--peer", type=Path, help="checkout of OHF-Voice/piper1-gpl; without it, the installed piper-tts"
    )
    parser.add_argument("--preset", choices=("high", "medium"), nargs="+", default=["high", "medium"])
    parser.add_argument("--threads", type=int, nargs="+", default=[2])
    parser.add_argument("--batch-size", type=int, default=4, help="clips of a step")
    parser.add_argument("--seconds", type=float, default=5.0, help="length of a clip; at least half a second")
    parser.add_argument("--rounds", type=int, default=3, help="rows of each side")
    parser.add_argument(
        "--warmup", type=int, default=3, help="steps before the timed ones, which still allocate memory"
    )
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a row")
    parser.add_argument("--row-minutes", type=float, default=10)
    parser.add_argument("--smoke", action="store_true", help="a tiny voice on short clips")
    parser.add_argument("--output-dir", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    options.sizes = {}
    if options.smoke:
        tiny: Settings = {"threads": [1], "batch_size": 2, "seconds": 0.6, "rounds": 1, "steps": 1, "sizes": TINY}
        vars(options).update(tiny)
    if options.seconds < 0.5:
        parser.error("--seconds: at least half a second, so that a segment fits in")
    options.peer_root = vits_peer.root_of(options.peer)
    if options.peer_root is None:
        where = f"--peer {options.peer}" if options.peer else "the installed piper-tts (is there one?)"
        parser.error(f"{where}: no training code of Piper")
    return options


def rows(options: argparse.Namespace, scratch: Path) -> Iterator[BenchRow]:
    """Returns the checks, which save weights in `scratch` for the other rows, then rounds of all presets."""
    shared = {
        "peer": str(options.peer_root),
        "device": "cpu",
        "batch_size": options.batch_size,
        "seconds": options.seconds,
        "sizes": options.sizes,
        "warmup_steps": options.warmup,
        "steps": options.steps,
    }
    for preset in options.preset:
        yield make_row(f"{preset}: check", shared, preset, "check", options.threads[-1], scratch)
    for _, preset, threads, side in product(range(options.rounds), options.preset, options.threads, SIDES):
        yield make_row(f"{preset}, {threads} threads: {side}", shared, preset, side, threads, scratch)


def make_row(label: str, shared: Settings, preset: str, side: str, threads: int, scratch: Path) -> BenchRow:
    weights = str(scratch / f"{preset}.pt")
    return BenchRow(label, {**shared, "configuration": preset, "side": side, "threads": threads, "weights": weights})


# In the child ---------------------------------------------------------------------------------------------------------


def measure(settings: Settings) -> dict[str, Any]:
    """Measures a row."""
    torch.set_num_threads(settings["threads"])
    if settings["side"] == "check":
        return check(settings)
    train = training(settings, **step_bench.PLAIN)
    with tempfile.TemporaryDirectory() as folder:
        ours = begin(settings, train, apply(decide(probe(), train.hardware)), Path(folder))
        recipe: Any = ours.recipe
        weights = load_weights(settings)
        if settings["side"] == "ours":
            for name, module in vits_peer.parts_of(recipe).items():
                module.load_state_dict(weights[name])
            keep_freed_memory()  # As open_session does for a training on a CPU.
            rates = measured_rates(ours.runtime)
            figures = timed(ours.step, ours.runtime.device, settings)
            figures["predicted_seconds_per_step"] = ours.predicted_seconds(rates)
            figures["micro_batch_size"] = min(settings["batch_size"], *ours.state.micro_batch.values())
        else:
            task = peer_of(settings, recipe.architecture, weights)
            batch = vits_peer.batch_for(task, recipe.prepare(ours.loaded, 0))
            del ours, recipe  # so that the measured memory is the peer's
            figures = timed(vits_peer.stepping(task, batch), torch.device("cpu"), settings)
            figures["alignment_search"] = vits_peer.alignment_search()
    audio_seconds = settings["batch_size"] * settings["seconds"]
    return {**figures, "audio_seconds_per_second": audio_seconds / figures["seconds_per_step"]}


def training(settings: Settings, **added: Any) -> TrainTts:
    """Returns the settings of ours, with alignments by the scores alone, as the peer has them."""
    given = {"data_dir": ".", "preset": settings["configuration"], "batch_size": settings["batch_size"],
             "device": settings["device"], "alignment_prior_steps": 0}  # fmt: skip
    return assemble(TrainTts, {**given, **added})


def begin(settings: Settings, train: TrainTts, runtime: Runtime, folder: Path) -> StepBench:
    """Our training on synthetic clips."""
    speech = size_of(PlannedSpeech(num_symbols=NUM_SYMBOLS), settings["seconds"])
    sizes = replace(architecture_for(train, speech), **settings["sizes"])
    build = partial(VoiceRecipe, train, sizes, speech.clip)
    return StepBench(build, synthetic_speech(train, speech), train, runtime, folder)


def load_weights(settings: Settings) -> dict[str, Any]:
    """Loads the weights that the check saved. Raises NotMeasured if it did not get that far."""
    try:
        weights: dict[str, Any] = torch.load(settings["weights"], mmap=True, weights_only=True)
    except FileNotFoundError:
        raise runner.NotMeasured("the check of this preset has left no weights") from None
    return weights


def peer_of(settings: Settings, sizes: VoiceArchitecture, weights: Mapping[str, Any]) -> Any:
    task = vits_peer.load(Path(settings["peer"]), sizes, settings["batch_size"], torch.device("cpu"))
    vits_peer.load_weights(task, weights["generator"], weights["discriminator"])
    return task


def check(settings: Settings) -> dict[str, Any]:
    """Compares both sides, and saves the weights for the other rows."""
    train = training(settings, **PLAIN)
    runtime = apply(decide(probe(), train.hardware))
    with tempfile.TemporaryDirectory() as folder:
        ours = begin(settings, train, runtime, Path(folder))
        recipe: Any = ours.recipe
        parts = vits_peer.parts_of(recipe)
        disturb(parts["generator"])
        weights = {name: module.state_dict() for name, module in parts.items()}
        torch.save(weights, settings["weights"])
        found = vits_peer.compare(peer_of(settings, recipe.architecture, weights), ours)
    return {**found, "equal": all(loss["relative"] <= TOLERANCE for loss in found["losses"].values())}


@torch.no_grad()
def disturb(voice: nn.Module) -> None:
    """Changes the initial zeros of flows and splines, for which most gradients would be zero."""
    draws = torch.Generator().manual_seed(1)
    for parameter in voice.parameters():
        if not parameter.any():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=draws).to(parameter))


# The results ----------------------------------------------------------------------------------------------------------


def write(options: argparse.Namespace, results: Sequence[BenchResult]) -> None:
    """Writes the results so far, once a row has reported the machine."""
    machine = next((dict(result.machine) for result in results if result.machine), {})
    if not machine:
        return
    del machine["threads"]  # Each row has its own value.
    name = "vits_vs_piper_smoke" if options.smoke else "vits_vs_piper"
    path = runner.result_path(options.output_dir, name, str(machine["device"]))
    content = {
        **machine,
        "command": runner.command_line("python benchmarks/vits_vs_piper.py"),
        "peer": peer_facts(options),
        "notes": DIFFERENCES,
        "checks": {r.settings["configuration"]: described(r) for r in results if r.settings["side"] == "check"},
        "comparisons": summaries(results),
    }
    runner.write_json(path, content)


def peer_facts(options: argparse.Namespace) -> dict[str, str]:
    if options.peer is None:
        return {"package": f"piper-tts {version('piper-tts')}"}
    return {"repository": "OHF-Voice/piper1-gpl", "commit": vocoder_peer.commit(options.peer)}


if __name__ == "__main__" and not runner.answer(measure):
    main()
