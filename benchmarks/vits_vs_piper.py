"""Compares our voice with piper-tts' own training code in one run: losses, gradients, time and memory of a step.

usage: python benchmarks/vits_vs_piper.py [--peer FOLDER] [--preset high medium] [--device cpu] [--smoke]

FOLDER is a checkout of https://github.com/OHF-Voice/piper1-gpl; default: the installed piper-tts 1.8,
whose wheel contains the same training code. Both sides train equal sizes on the same synthetic clips from equal
weights, on the CPU in fp32. On a GPU (`--device cuda`) the peer runs as its trainer does, in fp32 with TF32, and in
Lightning's bf16-mixed; ours in fp32 with TF32, and in bf16, compiled and with CUDA graphs. Rows are new processes, in
turn: peer, ours, peer, ours, ...; a side's results are medians over its rows. The peer runs its own training_step
(vits_peer.py); ours is `StepBench`, everything between loading and logging. Beside the measured time stands the one
that the planner predicts from the shapes of a step's operators; the peer's few functions that torch.jit has fused on a
GPU are not in it. CPU seconds are those of all threads, including threads that wait for others: they are not meaningful
on a machine with other work, either.

First each preset is checked on the CPU (`--no-check`: not at all), with equal noise and without dropout: every loss of
both phases to 1e-4, and the gradients. DIFFERENCES lists the known differences. Writes
benchmarks/results/vits_vs_piper_DEVICE.json after every row.
`--smoke` trains a tiny voice on short clips to test the script. Exits with 1 if a check fails.
"""

import argparse
import logging
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import vits_peer
import vocoder_peer
from predictions import peer_seconds
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from vocoder_vs_openvpi import described, line, show, summaries, timed

from gputrain.bench import runner, step_bench
from gputrain.bench.runner import BenchResult, BenchRow, Settings
from gputrain.bench.step_bench import StepBench
from gputrain.config import assemble
from gputrain.hw.plan import Plan
from gputrain.hw.probe import probe
from gputrain.hw.runtime import Runtime, apply
from gputrain.planner.model_planner import measured_rates
from gputrain.tts.architecture import VoiceArchitecture
from gputrain.tts.config import PlannedSpeech, TrainTts
from gputrain.tts.data import architecture_for, size_of, synthetic_batch
from gputrain.tts.kind import TtsWork
from gputrain.tts.recipe import VoiceRecipe

SIDES = {"cpu": ("peer", "ours"), "cuda": ("peer", "peer-bf16", "ours", "ours-compiled")}
# Options of each of our sides by device.
OURS: dict[tuple[str, str], Settings] = {
    ("cpu", "ours"): step_bench.PLAIN,
    ("cuda", "ours"): {**step_bench.PLAIN, "precision": "tf32"},
    ("cuda", "ours-compiled"): {"precision": "bf16", "use_torch_compile": True, "use_cuda_graphs": True},
}  # fmt: skip
MOST_CHECKED = 2  # Clips that the check takes where a GPU has large batches.
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
    "On a GPU the peer's clips are on the device before the step, and ours are copied to it within the step.",
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
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="cpu")
    parser.add_argument("--sides", choices=SIDES["cuda"], nargs="+", help="the first is the reference; default: all")
    parser.add_argument("--check", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--threads", type=int, nargs="+", default=[2], help="on a CPU")
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
        tiny: Settings = {
            "device": "cpu",
            "threads": [1],
            "batch_size": 2,
            "seconds": 0.6,
            "rounds": 1,
            "steps": 1,
            "sizes": TINY,
        }
        vars(options).update(tiny)
    on_gpu = options.device != "cpu" and torch.cuda.is_available()
    if options.device == "cuda" and not on_gpu:
        parser.error("--device cuda: no GPU")
    options.device, options.threads = ("cuda", [0]) if on_gpu else ("cpu", options.threads)
    options.sides = options.sides or SIDES[options.device]
    if unknown := set(options.sides) - set(SIDES[options.device]):
        parser.error(f"--sides {' '.join(sorted(unknown))}: only on a GPU")
    if options.seconds < 0.5:
        parser.error("--seconds: at least half a second, so that a segment fits in")
    options.peer_root = vits_peer.root_of(options.peer)
    if options.peer_root is None:
        where = f"--peer {options.peer}" if options.peer else "the installed piper-tts (is there one?)"
        parser.error(f"{where}: no training code of Piper")
    return options


def rows(options: argparse.Namespace, scratch: Path) -> Iterator[BenchRow]:
    """Yields the checks, which save weights in `scratch` for the other rows, then rounds of all presets."""
    shared = {
        "peer": str(options.peer_root),
        "device": options.device,
        "checked": options.check,
        "batch_size": options.batch_size,
        "seconds": options.seconds,
        "sizes": options.sizes,
        "warmup_steps": options.warmup,
        "steps": options.steps,
    }
    for preset in options.preset if options.check else ():
        yield make_row(f"{preset}: check", shared, preset, "check", options.threads[-1], scratch)
    for _, preset, threads, side in product(range(options.rounds), options.preset, options.threads, options.sides):
        of_threads = f", {threads} threads" if threads else ""
        yield make_row(f"{preset}{of_threads}: {side}", shared, preset, side, threads, scratch)


def make_row(label: str, shared: Settings, preset: str, side: str, threads: int, scratch: Path) -> BenchRow:
    weights = str(scratch / f"{preset}.pt")
    return BenchRow(label, {**shared, "configuration": preset, "side": side, "threads": threads, "weights": weights})


# In the child ---------------------------------------------------------------------------------------------------------


def measure(settings: Settings) -> dict[str, Any]:
    """Measures a row."""
    if settings["threads"]:
        torch.set_num_threads(settings["threads"])
    side = settings["side"]
    if side == "check":
        return check(settings)
    with tempfile.TemporaryDirectory() as folder:
        measure_side = measure_ours if side in ("ours", "ours-compiled") else measure_peer
        figures = measure_side(settings, Path(folder))
    audio_seconds = settings["batch_size"] * settings["seconds"]
    return {**figures, "audio_seconds_per_second": audio_seconds / figures["seconds_per_step"]}


def measure_ours(settings: Settings, folder: Path) -> dict[str, Any]:
    train = training(settings, **OURS[settings["device"], settings["side"]])
    plan = switches_of(settings, train)
    switches = ("precision", "compile") if train.hardware.use_torch_compile else ()
    for switch in switches:
        step_bench.check_switch(plan, switch)
    ours = begin(settings, train, apply(plan), folder)
    recipe: Any = ours.recipe
    weights = weights_for(settings, recipe)
    for name, module in vits_peer.parts_of(recipe).items():
        module.load_state_dict(weights[name])
    rates = measured_rates(ours.runtime)
    figures = timed(ours.step, ours.runtime.device, settings)
    for switch in switches:
        step_bench.check_switch(ours.runtime.plan, switch)  # A failing compiler is switched off.
    figures["predicted_seconds_per_step"] = ours.predicted_seconds(rates)
    figures["micro_batch_size"] = min(settings["batch_size"], *ours.state.micro_batch.values())
    figures["switches"] = {name: setting.value for name, setting in ours.runtime.plan.settings.items()}
    return figures


def measure_peer(settings: Settings, folder: Path) -> dict[str, Any]:
    """Runs the peer with the switches of its own trainer."""
    device, bf16, step = torch.device(settings["device"]), settings["side"] == "peer-bf16", peer_step(settings, folder)
    figures = timed(step, device, settings)
    figures["alignment_search"] = vits_peer.alignment_search()
    figures["predicted_seconds_per_step"] = peer_seconds(step, device, sixteen_bit="bf16" if bf16 else "")
    return {**figures, "switches": {"precision": "bf16" if bf16 else "fp32"}}


def peer_step(settings: Settings, folder: Path) -> Callable[[], None]:
    """Returns a step of the peer. Lightning's bf16-mixed is autocast around the whole step.

    Ours makes its batch on the CPU, so that a GPU holds nothing else.
    """
    on_cpu = {**settings, "device": "cpu"}
    train = training(on_cpu, **step_bench.PLAIN)
    ours = begin(on_cpu, train, apply(switches_of(settings, train)), folder)
    recipe: Any = ours.recipe
    prepared, sizes, weights = recipe.prepare(ours.loaded, 0), recipe.architecture, weights_for(settings, recipe)
    del ours, recipe  # so that the measured memory is the peer's
    device, bf16 = torch.device(settings["device"]), settings["side"] == "peer-bf16"
    task = peer_of(settings, sizes, weights)
    batch = tree_map_only(Tensor, lambda tensor: tensor.to(device), vars(vits_peer.batch_for(task, prepared)))
    # The second one is torch's default.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    plain = vits_peer.stepping(task, SimpleNamespace(**batch))

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            plain()

    return step


def training(settings: Settings, **added: Any) -> TrainTts:
    """Returns the settings of ours, with alignments by the scores alone, as the peer has them."""
    given = {"data_path": ".", "preset": settings["configuration"], "batch_size": settings["batch_size"],
             "device": settings["device"], "alignment_prior_steps": 0}  # fmt: skip
    return assemble(TrainTts, {**given, **added})


def switches_of(settings: Settings, train: TrainTts) -> Plan:
    """Returns the plan of such a training on this machine."""
    speech = size_of(PlannedSpeech(num_symbols=NUM_SYMBOLS), settings["seconds"])
    return TtsWork(speech).decide(probe(), train.hardware)


def begin(settings: Settings, train: TrainTts, runtime: Runtime, folder: Path) -> StepBench:
    """Our training on synthetic clips."""
    speech = size_of(PlannedSpeech(num_symbols=NUM_SYMBOLS), settings["seconds"])
    sizes = replace(architecture_for(train, speech), **settings["sizes"])
    build = partial(VoiceRecipe, train, sizes, speech.clip)
    return StepBench(build, synthetic_batch(train, speech), train, runtime, folder)


def load_weights(settings: Settings) -> dict[str, Any]:
    """Loads the weights that the check saved. Raises NotMeasured if it did not get that far."""
    try:
        weights: dict[str, Any] = torch.load(settings["weights"], mmap=True, weights_only=True)
    except FileNotFoundError:
        raise runner.NotMeasured("the check of this preset has left no weights") from None
    return weights


def weights_for(settings: Settings, recipe: VoiceRecipe) -> dict[str, Any]:
    """Returns the weights of both sides: those that the check has saved or, without checks, the recipe's own."""
    return load_weights(settings) if settings["checked"] else disturbed_weights(recipe)


def disturbed_weights(recipe: VoiceRecipe) -> dict[str, Any]:
    parts = vits_peer.parts_of(recipe)
    disturb(parts["generator"])
    return {name: module.state_dict() for name, module in parts.items()}


def peer_of(settings: Settings, sizes: VoiceArchitecture, weights: Mapping[str, Any]) -> Any:
    task = vits_peer.load(Path(settings["peer"]), sizes, settings["batch_size"], torch.device(settings["device"]))
    vits_peer.load_weights(task, weights["generator"], weights["discriminator"])
    return task


def check(settings: Settings) -> dict[str, Any]:
    """Compares both sides on the CPU, and saves the weights for the other rows."""
    if settings["device"] != "cpu":
        settings = {**settings, "device": "cpu", "batch_size": min(MOST_CHECKED, settings["batch_size"])}
    train = training(settings, **PLAIN)
    runtime = apply(switches_of(settings, train))
    with tempfile.TemporaryDirectory() as folder:
        ours = begin(settings, train, runtime, Path(folder))
        recipe: Any = ours.recipe
        weights = disturbed_weights(recipe)
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
