"""Compares our vocoder with openvpi/SingingVocoders' in one run: losses, gradients, time and memory of a training step.

usage: python benchmarks/vocoder_vs_openvpi.py [--peer FOLDER] [--smoke]

FOLDER is a checkout of https://github.com/openvpi/SingingVocoders at 4d0889c; without it, only ours is measured. Both
sides read the two configuration files that come with gputrain, in openvpi's keys, the second joined with the first, on
which it is based: `standard` (512 channels, msd and mpd, AdamW, fp32) and `optimised` (1024 channels, fast_mrd and
fast_mpd, Muon, 16-mixed). Rows are fresh processes, in turn: peer, ours, peer, ours, ...; a side's figures are medians
over its rows. The peer runs its own training_step (vocoder_peer.py); ours is `StepBench`, the part of a training
between loading and logging. Both start with the same weights and the same sound. Beside the measured time of each side
stands the one that the planner predicts from the shapes of its operators.

First each configuration is checked in fp32, with the same noise: every loss of both phases to 1e-4, and the gradients.
Differences by design are listed in DIFFERENCES. On a GPU sizes are those of the files, and ours is measured compiled
too; on a CPU the default batch is 1 crop of 32 frames. Writes benchmarks/results/vocoder_vs_openvpi_DEVICE.json after
every row. `--smoke` runs a tiny generator on short crops to test the script. Exits with 1 if a check fails.

Shapes: B items, T samples, F frames.
"""

import argparse
import logging
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
import vocoder_peer
from predictions import peer_seconds
from torch import nn

from gputrain.bench import runner, step_bench
from gputrain.bench.runner import BenchResult, BenchRow, Settings
from gputrain.bench.step_bench import StepBench
from gputrain.config import assemble, read_file
from gputrain.hw.probe import probe
from gputrain.hw.runtime import apply
from gputrain.planner.model_planner import measured_rates
from gputrain.vocoder.config import TrainVocoder
from gputrain.vocoder.data import synthetic_crops
from gputrain.vocoder.kind import VocoderWork
from gputrain.vocoder.openvpi import PROFILES, translate

CONFIGURATIONS = {"standard": "base_hifi_gpu.yaml", "optimised": "base_hifi_rtx5090_optimized.yaml"}
# Options that each of our sides adds to the file; the file sets fp32 or fp16.
OURS: dict[str, Settings] = {
    "ours": {"use_torch_compile": False},
    "ours-compiled": {"use_torch_compile": True},
    "ours-compiled-bf16": {"use_torch_compile": True, "precision": "bf16"},
}
SIDES = ("peer", *OURS)
PLAIN = {**step_bench.PLAIN, "volume_aug": False}  # For the check.
TOLERANCE = 1e-4  # Relative difference of a loss.
MEDIANS = (
    "audio_seconds_per_second", "seconds_per_step", "predicted_seconds_per_step", "cpu_seconds_per_step",
    "first_step_seconds", "peak_gb", "peak_reserved_gb",
)  # fmt: skip
DIFFERENCES = (
    "Phases: the peer steps the discriminators first, so that the generator meets the stepped ones; ours steps both "
    "from the same passes, so that the generator meets the ones before the step. The "
    "check steps neither.",
    "Discriminators' loss: 0.5 (real + fake) in ours and in the peer's fast task, real + fake in its other task.",
    "fast_mpd: at a length that is no multiple of period and strides, the peer cuts the wave's end off, ours reflects "
    "it. In the check ours is cut too; losses_as_trained are those without the cut.",
    "Spectral norm: the peer iterates in every forward pass, ours once a step. In the check both stand still.",
    "Source noise: the peer draws the harmonics' phases once for a batch, ours for every item. In the "
    "check both have the peer's.",
    "Muon: the peer's five rounds have coefficients of their own, ours those of Jordan et al. 2024.",
    "Only ours, within the timed step: clipping (the peer's clip_grad_norm has no effect), the moving average of the "
    "weights, the mel that the generator is given, and the change of loudness (the peer's loader makes these two).",
)
log = logging.getLogger("gputrain.benchmark")


def main() -> None:
    options = parse()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    runner.open_folder(options.output_dir)
    results: list[BenchResult] = []
    with tempfile.TemporaryDirectory() as scratch:
        child = (sys.executable, __file__)
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
        "--peer", type=Path, help="checkout of openvpi/SingingVocoders; without it, only ours is measured"
    )
    parser.add_argument("--configurations", choices=CONFIGURATIONS, nargs="+", default=list(CONFIGURATIONS))
    parser.add_argument("--sides", choices=SIDES, nargs="+", help="the first is the reference")
    parser.add_argument("--batch-size", type=int, help="crops of a step; on a GPU the file's, on a CPU 1")
    parser.add_argument("--crop-frames", type=int, help="a multiple of 8; on a GPU the file's, on a CPU 32")
    parser.add_argument("--channels", type=int, help="of the generator; the file's")
    parser.add_argument("--threads", type=int, nargs="+", help="on a CPU: 1 2")
    parser.add_argument("--rounds", type=int, default=3, help="rows of each side")
    parser.add_argument("--warmup", type=int, help="steps before the timed ones; on a GPU 10, on a CPU 3")
    parser.add_argument("--steps", type=int, help="timed steps of a row; on a GPU 10, on a CPU 3")
    parser.add_argument("--row-minutes", type=float, default=10)
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--smoke", action="store_true", help="a tiny generator on short crops, on the CPU")
    parser.add_argument("--output-dir", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    if options.peer and not (options.peer / "training" / "nsf_HiFigan_task.py").is_file():
        parser.error(f"--peer {options.peer}: no checkout of openvpi/SingingVocoders")
    if not options.peer and "peer" in (options.sides or ()):
        parser.error("--sides peer: needs --peer, a checkout of openvpi/SingingVocoders")
    if options.crop_frames and options.crop_frames % 8:
        parser.error("--crop-frames: a multiple of 8, so that fast_mrd sees the same frames on both sides")
    settle(options)
    return options


def settle(options: argparse.Namespace) -> None:
    """Returns the arguments with the defaults of the device."""
    tiny: Settings = {"device": "cpu", "batch_size": 1, "crop_frames": 8, "channels": 32, "threads": [1], "rounds": 1,
                      "warmup": 1, "steps": 1}  # fmt: skip
    if options.smoke:
        vars(options).update(tiny)
    on_gpu = options.device != "cpu" and torch.cuda.is_available()
    options.device = "cuda" if on_gpu else "cpu"
    cpu: Settings = {"batch_size": 1, "crop_frames": 32, "threads": [1, 2], "warmup": 3, "steps": 3,
                     "sides": ["peer", "ours"]}  # fmt: skip
    # Several of the first steps in fp16 overflow and are skipped.
    gpu: Settings = {"threads": [0], "warmup": 10, "steps": 10, "sides": ["peer", "ours", "ours-compiled"]}
    for name, value in (gpu if on_gpu else cpu).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if not options.peer:
        options.sides = [side for side in options.sides if side != "peer"]


def rows(options: argparse.Namespace, scratch: Path) -> Iterator[BenchRow]:
    """Yields the checks, which leave weights in `scratch` for the others; then rounds of all configurations.
    Without the peer there are no checks, and the sides that compile, which takes time, come after all others."""
    changes = {"batch_size": options.batch_size, "crop_mel_frames": options.crop_frames}
    shared = {
        "peer": str(options.peer or ""),
        "device": options.device,
        "changes": {key: value for key, value in changes.items() if value},
        "channels": options.channels or 0,
        "warmup_steps": options.warmup,
        "steps": options.steps,
    }
    for name in options.configurations if options.peer else ():
        yield make_row(f"{name}: check", shared, name, "check", options.threads[-1], scratch)
    turns = product(range(options.rounds), options.configurations, options.threads, options.sides)
    for _, name, threads, side in turns if options.peer else sorted(turns, key=lambda turn: turn[3] != "ours"):
        of_threads = f", {threads} threads" if threads else ""
        yield make_row(f"{name}{of_threads}: {side}", shared, name, side, threads, scratch)


def make_row(label: str, shared: Settings, configuration: str, side: str, threads: int, scratch: Path) -> BenchRow:
    weights = str(scratch / f"{configuration}.pt")
    return BenchRow(
        label, {**shared, "configuration": configuration, "side": side, "threads": threads, "weights": weights}
    )


# Child process --------------------------------------------------------------------------------------------------------


def measure(settings: Settings) -> dict[str, Any]:
    """Measures a row."""
    if settings["threads"]:
        torch.set_num_threads(settings["threads"])
    if settings["side"] == "check":
        return check(settings)
    train = training(settings, **OURS.get(settings["side"], {}))
    figures = measure_peer(settings, train) if settings["side"] == "peer" else measure_ours(settings, train)
    audio_seconds = train.schedule.global_batch_size * train.crop_seconds
    return {**figures, "audio_seconds_per_second": audio_seconds / figures["seconds_per_step"]}


def profile(settings: Settings) -> dict[str, Any]:
    """Returns a configuration in openvpi's keys, with the sizes of the row. The optimised file is based on the other,
    and is joined with it here, as the peer would look for that in its own folders."""
    content: dict[str, Any] = read_file(PROFILES / CONFIGURATIONS["standard"])
    for name, value in read_file(profile_path(settings)).items():
        content[name] = {**content.get(name, {}), **value} if isinstance(value, dict) else value
    content = {**content, **settings["changes"]}
    content.pop("base_config", None)
    if settings["channels"]:
        content["model_args"] = {**content["model_args"], "upsample_initial_channel": settings["channels"]}
    return content


def profile_path(settings: Settings) -> Path:
    return PROFILES / CONFIGURATIONS[settings["configuration"]]


def training(settings: Settings, **added: Any) -> TrainVocoder:
    """Translates the file as a user's file is translated."""
    options = translate(profile(settings), profile_path(settings), of="train")
    return assemble(TrainVocoder, {**options, "data_path": ".", "device": settings["device"], **added})


def load_weights(parts: Mapping[str, nn.Module], settings: Settings) -> None:
    """Loads the weights that the check has saved. Raises NotMeasured if there are none."""
    try:
        weights = torch.load(settings["weights"], mmap=True, weights_only=True)
    except FileNotFoundError:
        raise runner.NotMeasured("the check of this configuration has left no weights") from None
    for name, module in parts.items():
        module.load_state_dict(weights[name])


def parts_of(ours: StepBench) -> dict[str, nn.Module]:
    """Returns the generator and each kind of discriminator."""
    recipe: Any = ours.recipe
    return {"generator": recipe.generator, **recipe.by_kind}


def measure_ours(settings: Settings, train: TrainVocoder) -> dict[str, Any]:
    switch = "compile" if train.hardware.use_torch_compile else ""
    plan = VocoderWork().decide(probe(), train.hardware)
    step_bench.check_switch(plan, switch)
    with tempfile.TemporaryDirectory() as folder:
        ours: Any = step_bench.begin_bench(VocoderWork(), train, apply(plan), Path(folder))
        if settings["peer"]:
            load_weights(parts_of(ours), settings)
        rates = measured_rates(ours.runtime)
        figures = timed(ours.step, ours.runtime.device, settings)
        figures["predicted_seconds_per_step"] = ours.predicted_seconds(rates)
    step_bench.check_switch(ours.runtime.plan, switch)  # A failing compiler is switched off.
    switches = {name: setting.value for name, setting in ours.runtime.plan.settings.items()}
    return {**figures, "micro_batch_size": min(ours.state.micro_batch.values()), "switches": switches}


def measure_peer(settings: Settings, train: TrainVocoder) -> dict[str, Any]:
    """Runs the peer with torch's default switches, as its users do."""
    device = torch.device(settings["device"])
    task, step, fp16 = peer_step(settings, train)
    figures = timed(step, device, settings)
    skipped = task.made[-2 * settings["steps"] :].count(False)  # Skipped timed steps, each less work than a step.
    figures["predicted_seconds_per_step"] = peer_seconds(step, device, sixteen_bit="fp16" if fp16 else "")
    switches = {"precision": "fp16" if fp16 else "fp32"}
    return {**figures, "skipped_optimizer_steps": skipped, "switches": switches}


def peer_step(settings: Settings, train: TrainVocoder) -> tuple[Any, Callable[[], None], bool]:
    """Returns the peer's task, a step of it, and whether it computes in fp16. Without a file of weights it has its own
    random ones."""
    device, content = torch.device(settings["device"]), profile(settings)
    fp16 = device.type == "cuda" and content["pl_trainer_precision"] == "16-mixed"
    task = vocoder_peer.load(Path(settings["peer"]), content, device)
    if settings["weights"]:
        load_weights(vocoder_peer.parts_of(task, train.discriminators.discriminators), settings)
    samples_BT, f0_BF = synthetic_crops(train)
    sample = vocoder_peer.make_sample(task, samples_BT / 32768, f0_BF)
    return task, vocoder_peer.stepping(task, sample, device, fp16=fp16), fp16


def timed(step: Callable[[], object], device: torch.device, settings: Settings) -> dict[str, Any]:
    return dict(step_bench.time_steps(step, device, warmup=settings["warmup_steps"], steps=settings["steps"]))


def check(settings: Settings) -> dict[str, Any]:
    """Compares the two sides, and saves the weights for later rows."""
    train = training(settings, **PLAIN)
    train = replace(train, schedule=replace(train.schedule, batch_size=min(2, train.schedule.global_batch_size)))
    runtime = apply(VocoderWork().decide(probe(), train.hardware))
    with tempfile.TemporaryDirectory() as folder:
        ours: Any = step_bench.begin_bench(VocoderWork(), train, runtime, Path(folder))
        torch.save({name: module.state_dict() for name, module in parts_of(ours).items()}, settings["weights"])
        task = vocoder_peer.load(Path(settings["peer"]), profile(settings), runtime.device)
        load_weights(vocoder_peer.parts_of(task, train.discriminators.discriminators), settings)
        found = vocoder_peer.compare(task, ours)
    return {**found, "equal": all(loss["relative"] <= TOLERANCE for loss in found["losses"].values())}


# Results --------------------------------------------------------------------------------------------------------------


def write(options: argparse.Namespace, results: Sequence[BenchResult]) -> None:
    """Writes the results so far, once a row has reported the machine. A file without the peer has a name of its own."""
    machine = next((dict(result.machine) for result in results if result.machine), {})
    if not machine:
        return
    del machine["threads"]  # Each row has its own.
    name = ("vocoder_vs_openvpi" if options.peer else "vocoder_steps") + ("_smoke" if options.smoke else "")
    path = runner.result_path(options.output_dir, name, str(machine["device"]))
    content = {
        **machine,
        "command": runner.command_line("python benchmarks/vocoder_vs_openvpi.py"),
        **peer_facts(options.peer),
        "checks": {r.settings["configuration"]: described(r) for r in results if r.settings["side"] == "check"},
        "comparisons": summaries(results),
    }
    runner.write_json(path, content)


def peer_facts(peer: Path | None) -> dict[str, Any]:
    if not peer:
        return {}
    commit = vocoder_peer.commit(peer)
    return {"peer": {"repository": "openvpi/SingingVocoders", "commit": commit}, "differences": DIFFERENCES}


def described(result: BenchResult) -> dict[str, Any]:
    return {"reason": result.reason} if result.reason else result.figures


def summaries(results: Sequence[BenchResult]) -> list[dict[str, Any]]:
    """Returns, for each configuration and number of threads, the sides, and each relative to the first."""
    groups: dict[tuple[str, int], dict[str, list[BenchResult]]] = {}
    for result in results:
        at = result.settings
        if at["side"] != "check":
            groups.setdefault((at["configuration"], at["threads"]), {}).setdefault(at["side"], []).append(result)
    made = []
    for (configuration, threads), by_side in groups.items():
        sides = {side: summary(of_side) for side, of_side in by_side.items()}
        made.append({"configuration": configuration, "threads": threads, "sides": sides, "ratios": ratios(sides)})
    return made


def summary(results: Sequence[BenchResult]) -> dict[str, Any]:
    """Returns medians over the rows of a side, with caveats if there are any."""
    measured = [result.figures for result in results if result.figures]
    found: dict[str, Any] = {"rows": len(measured)}
    for key in MEDIANS:
        values = [figures[key] for figures in measured if key in figures]
        if values:
            found[key] = statistics.median(values)
    if measured:
        found |= {key: value for key, value in measured[-1].items() if key not in MEDIANS}
        found["seconds_of_rows"] = [figures["seconds_per_step"] for figures in measured]
    reasons = dict.fromkeys(result.reason for result in results if result.reason)
    notes = dict.fromkeys(note for result in results for note in result.notes)
    return found | {name: list(texts) for name, texts in (("reasons", reasons), ("notes", notes)) if texts}


def ratios(sides: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Returns each side relative to the first."""
    (_, first), *others = sides.items()
    return {
        side: {key: figures[key] / first[key] for key in MEDIANS if key in figures and key in first}
        for side, figures in others
    }


def line(result: BenchResult) -> str:
    figures = result.figures
    if not figures:
        return f"{result.label:<34} not measured: {result.reason}"
    if result.settings["side"] != "check":
        shown = ", ".join(f"{key} {figures[key]:.4g}" for key in MEDIANS if key in figures)
        return f"{result.label:<34} {shown}"
    worst = max(figures["losses"], key=lambda name: float(figures["losses"][name]["relative"]))
    gradients = ", ".join(f"{name} {found['relative']:.1e}" for name, found in figures["gradients"].items())
    return (
        f"{'done  ' if figures['equal'] else 'FAILED'}  {result.label}: losses differ by "
        f"{figures['losses'][worst]['relative']:.1e} at most ({worst}), gradients by {gradients}"
    )


def show(comparisons: Sequence[dict[str, Any]]) -> None:
    for comparison in comparisons:
        reference = next(iter(comparison["sides"]))
        threads = f", {comparison['threads']} threads" if comparison["threads"] else ""
        for side, by_key in comparison["ratios"].items():
            shown = ", ".join(f"{key} {ratio:.3f}" for key, ratio in by_key.items()) or "not measured"
            print(f"{comparison['configuration']}{threads}: {side} / {reference}: {shown}")


if __name__ == "__main__" and not runner.answer(measure):
    main()
