"""Checks the voice's training on this GPU: precisions, memory formats, compiled code, alignment, memory, syncs.

usage: python benchmarks/voice_check.py [--device cuda] [--smoke]
       python benchmarks/voice_check.py --targets [--smoke]

Each check is a new process and compares both phases with the CPU in fp32, or with an uninterrupted run in fp64. Writes
benchmarks/results/voice_check_DEVICE.json; exits with 1 if a check fails. `--smoke` runs the same checks on the CPU
to test the script.

`--targets` measures T1 instead: a step of `high` on 64 clips of 4.7 s with discriminators, in bf16, compiled and with
CUDA graphs, in seconds, peak GB and launches by the processor. Each stands beside what the planner predicts and, on an
H100, beside its target; a target that is missed is reported as MISSED, and is no failure. The JSON file is
voice_targets_DEVICE.json. With `--smoke` it is a tiny step on the CPU, which has no launches.

Rounding errors can change the choice of an alignment path: except in the check of the search itself, every side has
the alignment of the reference.

Shapes: B items, S symbols, T frames.
"""

import argparse
import dataclasses
import importlib
import logging
import math
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import gpu_check
import torch
from gpu_check import PLAIN, little_memory, passed, relative, weights_after
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_map_only
from vits_vs_piper import disturb

from gputrain.audio.discriminators import vits_discriminators
from gputrain.bench import runner, step_bench
from gputrain.bench.runner import BenchReport, BenchResult, BenchRow, NotMeasured, Settings
from gputrain.bench.step_bench import StepBench
from gputrain.config import assemble
from gputrain.engine.optim import LossScale
from gputrain.engine.recipe import phases_of
from gputrain.engine.state import TrainState
from gputrain.engine.train import accumulate
from gputrain.hw.plan import decide
from gputrain.hw.probe import probe
from gputrain.hw.runtime import Runtime, apply
from gputrain.planner.roofline import StepCost
from gputrain.planner.spec import PlanTarget
from gputrain.planner.step_memory import predict_step
from gputrain.speech.buckets import ClipBatch
from gputrain.tts import align
from gputrain.tts import bench as bench_tts
from gputrain.tts.config import PlannedSpeech, TrainTts
from gputrain.tts.plan import architecture_for, size_of
from gputrain.tts.recipe import VoiceBatch, VoiceRecipe

recipes: Any = importlib.import_module("gputrain.tts.recipe")  # Its search and discriminators are replaced below.
SMALL = {
    "data_dir": ".", "preset": "medium", "batch_size": 4, "ema_decay": 0, "encoder_dropout": 0.0,
    "duration_dropout": 0.0, "discriminator_channels": 8,
}  # fmt: skip
NARROW: Settings = {
    "hidden_channels": 32, "latent_channels": 32, "encoder_filter_channels": 64, "encoder_layers": 2,
    "posterior_layers": 4, "upsample_initial_channel": 64,
}  # fmt: skip
PERIODS = (2,)  # With that of the raw wave, one discriminator of either kind, since compiling each takes time.
SECONDS = 1.0  # length of the longest clip
# Maximum relative errors of a loss, and of the whole gradient of a phase, against fp32 on the CPU.
BOUNDS = {"fp32": (1e-4, 5e-3), "tf32": (5e-3, 5e-2), "bf16": (5e-2, 3e-1), "fp16": (1e-2, 1e-1)}
Found = tuple[dict[str, float], dict[str, Tensor]]  # losses by name, and the flattened gradient of each phase
T1: Settings = {
    "preset": "high",
    "batch_size": 64,
    "mixed_precision": True,
    "use_bf16": True,
    "use_torch_compile": True,
    "use_cuda_graphs": True,
}
T1_SECONDS = 4.7  # length of a clip
T1_TINY: Settings = {**PLAIN, "preset": "fast", "batch_size": 2, "discriminator_channels": 8}
T1_TARGETS = {"seconds_per_step": 0.06, "peak_gb": 7.0, "launches": 1500.0}  # An H100 exceeds none.
LAUNCHING = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cudaMemcpy", "cudaMemset")  # These calls of CUDA start work.


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--targets", action="store_true", help="measure T1 in place of the checks")
    parser.add_argument("--smoke", action="store_true", help="on the CPU")
    parser.add_argument("--check-minutes", type=float, default=5)
    parser.add_argument("--output-dir", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    device = "cpu" if options.smoke else options.device
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if device == "cuda" and not torch.cuda.is_available():
        print("not measured: no GPU (--smoke tries the script on the CPU)")
        return
    runner.open_folder(options.output_dir)
    name = "voice_targets" if options.targets else "voice_check"
    rows = [BenchRow(check, {"check": check, "device": device}) for check in (["T1"] if options.targets else CHECKS)]
    report = BenchReport(name, "checks", runner.command_line("python benchmarks/voice_check.py"))
    for result in runner.measure_rows(rows, (sys.executable, __file__), minutes=options.check_minutes):
        report.results.append(result)
        print(target_line(result) if options.targets else gpu_check.line(result), flush=True)
        runner.write_json(runner.result_path(options.output_dir, name, report.device), report.to_json())
    if not all(passed(result) for result in report.results):
        sys.exit(1)


def measure(settings: Settings) -> dict[str, Any]:
    """Runs a check, or the target, in a child process."""
    return {**CHECKS, "T1": measure_target}[settings["check"]](settings["device"])


def runtime_on(device: str, **wishes: Any) -> tuple[TrainTts, Runtime]:
    """Returns settings and runtime with only these switches on."""
    settings = assemble(TrainTts, {**SMALL, **PLAIN, **wishes, "device": device})
    return settings, apply(decide(probe(), settings.hardware))


def begin(settings: TrainTts, runtime: Runtime, seconds: float = SECONDS) -> tuple[VoiceRecipe, list[ClipBatch]]:
    """Returns a narrow voice, equal on every device, and clips of four lengths in the form of the loader."""
    speech = size_of(PlannedSpeech(), seconds)
    sizes = dataclasses.replace(architecture_for(settings, speech), **NARROW)
    with mock.patch.object(recipes, "vits_discriminators", partial(vits_discriminators, periods=PERIODS)):
        recipe = VoiceRecipe(settings, sizes, speech.clip, runtime)
    disturb(recipe.voice)
    with torch.no_grad():  # as loud as a trained one, since log-mels of quiet audio are dominated by rounding
        recipe.voice.get_parameter("decoder.head.post.weight").mul_(20)
    (whole,) = bench_tts.synthetic_speech(settings, speech)
    shares_B = 1 - 0.1 * (torch.arange(len(whole.frames_B)) % 4)
    frames_B, symbols_B = ((shares_B * count).long() for count in (speech.clip.frames, speech.clip.symbols))
    samples_B = frames_B * sizes.mel.hop_size
    ids_BS = whole.ids_BS * (torch.arange(whole.ids_BS.shape[1]) < symbols_B[:, None])
    wave_BT = whole.wave_BT * (torch.arange(whole.wave_BT.shape[1]) < samples_B[:, None])
    return recipe, [
        whole._replace(ids_BS=ids_BS, symbols_B=symbols_B, wave_BT=wave_BT, samples_B=samples_B, frames_B=frames_B)
    ]


def found_on(settings: TrainTts, runtime: Runtime, alignment: list[Tensor]) -> Found:
    """Returns losses and gradients for equal weights, audio and noise on every device. The first side stores its
    alignment in the empty list, and the others use it."""
    recipe, loaded = begin(settings, runtime)
    start = LossScale(1024.0 if runtime.dtype == torch.float16 else 1.0).to(runtime.device)
    names = [phase.name for phase in phases_of(recipe)]
    state = TrainState(recipe, runtime, 0.0, dict.fromkeys(names, 4), dict.fromkeys(names, start))
    drawn = begin(settings, runtime_on("cpu")[1])[0].prepare(loaded, 0)
    values = {field.name: getattr(drawn, field.name) for field in dataclasses.fields(drawn)}
    batch = VoiceBatch(**tree_map_only(Tensor, lambda tensor: tensor.to(runtime.device), values))
    losses: dict[str, float] = {}
    gradients: dict[str, Tensor] = {}
    (group,) = recipe.step_groups
    with aligned_as(alignment):
        gathered = accumulate(state, group, batch, 0)
    for phase in group.phases:
        losses |= {f"{phase.name}/{name}": value.item() for name, value in gathered[phase.name].losses.items()}
        grads = [p.grad.flatten().cpu().double() / start.scale.cpu() for p in phase.parameters() if p.grad is not None]
        gradients[phase.name] = torch.cat(grads)
        phase.optimizer.zero_grad()
    return losses, gradients


@contextmanager
def aligned_as(alignment: list[Tensor]) -> Iterator[None]:
    found = recipes.search

    def search(scores_BTS: Tensor, symbols_B: Tensor, frames_B: Tensor) -> Tensor:
        if not alignment:
            alignment.append(found(scores_BTS, symbols_B, frames_B).cpu())
        return alignment[0].to(scores_BTS.device)

    recipes.search = search
    yield
    recipes.search = found


def compared(found: Found, reference: Found, bounds: tuple[float, float]) -> dict[str, Any]:
    loss_error = max(abs(found[0][term] / value - 1) for term, value in reference[0].items())
    errors = {f"{name}_gradient_error": relative(found[1][name], gradient) for name, gradient in reference[1].items()}
    within = loss_error < bounds[0] and max(errors.values()) < bounds[1]
    return {"passed": within, "loss_error": loss_error, **errors}


def check_precision(name: str, wishes: Settings, device: str) -> dict[str, Any]:
    settings, runtime = runtime_on(device, **wishes)
    setting = runtime.plan.tf32 if name == "tf32" else runtime.plan.precision
    if setting.value not in (name, True):
        raise NotMeasured(f"not on this device: {setting.reason}")
    alignment: list[Tensor] = []
    reference = found_on(*runtime_on("cpu"), alignment)
    settings, runtime = runtime_on(device, **wishes)  # again, since torch's global switches are those of the last call
    return compared(found_on(settings, runtime, alignment), reference, BOUNDS[name])


def check_layout(device: str) -> dict[str, Any]:
    """Compares channels_last with the contiguous format on the CPU, in fp32."""
    alignment: list[Tensor] = []
    reference = found_on(*runtime_on("cpu"), alignment)
    settings, runtime = runtime_on(device, channels_last=True)
    if not runtime.plan.channels_last.value:
        raise NotMeasured(f"not on this device: {runtime.plan.channels_last.reason}")
    return compared(found_on(settings, runtime, alignment), reference, BOUNDS["fp32"])


def check_compile(device: str) -> dict[str, Any]:
    """Compares compiled decoder and discriminators with eager ones, in fp32."""
    alignment: list[Tensor] = []
    settings, eager = runtime_on(device)
    reference = found_on(settings, eager, alignment)
    _, compiled = runtime_on(device, use_torch_compile=True)
    if not compiled.plan.compile.value:
        raise NotMeasured(f"not on this device: {compiled.plan.compile.reason}")
    figures = compared(found_on(settings, compiled, alignment), reference, BOUNDS["fp32"])
    on = bool(compiled.plan.compile.value)  # It is off if the compiler has failed.
    return {**figures, "passed": figures["passed"] and on, "compiled": on}


def check_search(device: str) -> dict[str, Any]:
    """Compares durations of Triton and numba, also for integer scores, for which many paths have equal sums."""
    if device != "cuda":
        raise NotMeasured("not on this device: Triton asks for a GPU")
    if align.triton_search() is None:
        return {"passed": False, "found": "Triton fails"}
    draws, cases, same = torch.Generator().manual_seed(0), 60, 0
    for case in range(cases):
        symbols, more = (int(count) for count in torch.randint(1, 200, (2,), generator=draws))
        scores_BTS = torch.randn(3, symbols + more, symbols, generator=draws)
        scores_BTS = (2 * scores_BTS).round() if case % 2 else scores_BTS
        symbols_B = torch.tensor([symbols, (symbols + 1) // 2, 1])
        frames_B = torch.tensor([symbols + more, symbols + more // 2, 1 + more])
        expected_BS = align.search(scores_BTS, symbols_B, frames_B)
        found_BS = align.search(*(tensor.cuda() for tensor in (scores_BTS, symbols_B, frames_B)))
        same += torch.equal(found_BS.cpu(), expected_BS)
    return {"passed": same == cases, "same_paths": same, "of": cases}


def check_memory(device: str) -> dict[str, Any]:
    """Runs out of memory during a run: the weights equal those without, in fp64 to exclude rounding errors."""
    settings, runtime = runtime_on(device, **({"batch_size": 16} if device == "cuda" else {}))
    steps, seconds = (3, 4.0) if device == "cuda" else (1, SECONDS)
    begun = partial(begin_step_bench, settings, runtime, seconds=seconds)
    reference, peak_bytes, _ = weights_after(begun, steps)
    with little_memory(runtime, 0.6 * peak_bytes, VoiceRecipe, "loss"):
        found, _, micro_batch = weights_after(begun, steps)
    error = relative(found, reference)
    fewer = micro_batch < settings.schedule.batch_size
    return {"passed": fewer and error < 1e-9, "weight_error": error, "micro_batch_size": micro_batch}


def begin_step_bench(settings: TrainTts, runtime: Runtime, folder: Path, seconds: float = SECONDS) -> StepBench:
    loaded = begin(settings, runtime, seconds)[1]
    if runtime.device.type == "cuda":
        loaded = [ClipBatch(*(tensor.pin_memory() for tensor in bucket)) for bucket in loaded]
    return StepBench(lambda runtime: begin(settings, runtime, seconds)[0], loaded, settings, runtime, folder)


def check_waits(device: str) -> dict[str, Any]:
    """Asserts that no step synchronises with the device, in fp32 and, on a GPU, in 16 bits with EMA and clipping."""
    if device != "cuda":
        raise NotMeasured("not on this device: only a GPU runs asynchronously")
    for wishes in ({}, {"mixed_precision": True, "ema_decay": 0.999, "gradient_clip": 1.0}):
        settings, runtime = runtime_on(device, **wishes)
        with tempfile.TemporaryDirectory() as folder:
            state = begin_step_bench(settings, runtime, Path(folder))
            for _ in range(2):
                state.step()
            torch.cuda.set_sync_debug_mode("error")  # A synchronisation raises.
            state.step()
            torch.cuda.set_sync_debug_mode("default")
    return {"passed": True}


def measure_target(device: str) -> dict[str, Any]:
    """Measures T1, with the targets where the GPU is an H100; other devices are only measured."""
    on_gpu = device == "cuda"
    train = assemble(TrainTts, {"data_dir": ".", **(T1 if on_gpu else T1_TINY), "device": device})
    plan = decide(probe(), train.hardware)
    for switch in ("precision", "compile") if on_gpu else ():
        step_bench.check_switch(plan, switch)
    with tempfile.TemporaryDirectory() as folder:
        state = bench_tts.begin_bench(train, apply(plan), Path(folder), T1_SECONDS if on_gpu else 0.6)
        assert isinstance(state, StepBench)
        figures = state.measure(warmup=10 if on_gpu else 1, steps=20 if on_gpu else 1)
        if on_gpu:
            step_bench.check_switch(state.runtime.plan, "compile")  # A failing compiler is switched off.
            figures["launches"] = launches_of(state.step)
    figures |= predicted_figures(state)
    targets = T1_TARGETS if on_gpu and "H100" in torch.cuda.get_device_name() else {}
    return {**figures, "targets": targets, "missed": missed(figures, targets), "passed": True}


def predicted_figures(state: StepBench) -> dict[str, float]:
    """Returns the predicted peak of the memory, and the launches by the processor in a step of one micro-batch."""
    items, plan = state.settings.schedule.whole_batch, state.runtime.plan
    target = PlanTarget(lambda runtime, _: state.build(runtime), lambda: state.loaded)
    found = predict_step(target, plan, micro_batch_size=items)
    cost = StepCost(found.micro_batch, found.micro_batch, items, found.update, found.graph, found.graph)
    if not plan.cuda_graphs.value:
        return {"predicted_peak_gb": found.allocated_gb, "predicted_launches": cost.totals(items).kernels}
    peak_gb = found.allocated_gb + found.graph.part_gb
    return {"predicted_peak_gb": peak_gb, "predicted_launches": cost.host_launches(items, 1)}


def launches_of(step: Callable[[], None]) -> int:
    """Returns the calls of CUDA in a step that launch a kernel, a graph, a copy or a fill."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    return launches_among((event.key, event.count) for event in profiler.key_averages())


def launches_among(calls: Iterable[tuple[str, int]]) -> int:
    return sum(count for name, count in calls if name.startswith(LAUNCHING))


def missed(figures: Mapping[str, Any], targets: Mapping[str, float]) -> list[str]:
    """Returns the names of the figures that are above their targets. One that was not measured is missed."""
    return [name for name, most in targets.items() if figures.get(name, math.inf) > most]


def target_line(result: BenchResult) -> str:
    """Returns measured, predicted and largest allowed values in words."""
    figures = result.figures
    if not figures:
        return f"FAILED  {result.label:<20} {result.reason}"
    parts = []
    for name in T1_TARGETS:
        notes = [f"predicted {figures[f'predicted_{name}']:.4g}"]
        if name in figures["targets"]:
            notes.append(f"target {figures['targets'][name]:g}: {'MISSED' if name in figures['missed'] else 'met'}")
        measured = f"{figures[name]:.4g}" if name in figures else "not measured"
        parts.append(f"{name} {measured} ({', '.join(notes)})")
    return f"{'MISSED' if figures['missed'] else 'ok    '}  {result.label:<20} {'; '.join(parts)}"


PRECISIONS: dict[str, Settings] = {
    "fp32": {},
    "tf32": {"enable_tf32": True},
    "bf16": {"mixed_precision": True, "use_bf16": True},
    "fp16": {"mixed_precision": True, "use_bf16": False},
}
CHECKS: dict[str, Callable[[str], dict[str, Any]]] = {
    **{name: partial(check_precision, name, wishes) for name, wishes in PRECISIONS.items()},
    "channels_last": check_layout,
    "alignment": check_search,
    "no waits": check_waits,
    "memory": check_memory,
    "compile": check_compile,
}

if __name__ == "__main__" and not runner.answer(measure):
    main()
