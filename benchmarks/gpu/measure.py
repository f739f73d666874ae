"""Seconds a step, peak memory, launches and idle time on this GPU, beside predictions and peers: at most seven minutes.

In this order: rates, and a probe of convolutions by groups; steps kernel by kernel and as CUDA graphs of the standard
vocoder, of the voice `high` and of the VAE `flux` at 512 pixels, and of a recogniser of XLS-R's size; the same work by
SingingVocoders, Piper and diffusers; the optimised vocoder and its peer. Beside all these, four trainings compile from
the beginning, and their steps are timed when they have finished, then as graphs too. If time is left, twelve cells of
measured beside predicted peak memory follow. All but these and what compiles find time by their own limits.

SINGINGVOCODERS names a checkout of openvpi/SingingVocoders at 4d0889c; Piper's training code is found on PYTHONPATH or
installed. Predictions are read from the folder that `gpu.sh prepare --card` has made on another machine. Steps that
compile, choose algorithms or capture a graph are never timed. GB is 1e9 bytes.
"""

import argparse
import dataclasses
import importlib
import itertools
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from gpu.runner import SUMMARY, Context, Figures, Part, Subcommand, main
from gpu.trainings import CELLS, MODES, TRAININGS, smoke_size
from gputrain.bench.runner import NotMeasured
from gputrain.errors import UserError
from gputrain.hw.gpus import find_gpu
from gputrain.hw.probe import probe
from gputrain.planner.memory.fit import budget_gb
from gputrain.planner.model_planner import ModelPlanner, memory_budget, published_rates

SECONDS = 400  # Of all parts together.
STEP_SECONDS, MOST_STEPS, LEAST_STEPS = 5.0, 12, 3  # Time of the timed steps of a training, and their number.
WARM_UP_STEPS = 24  # Most of them, until nothing compiles and nothing is captured any more.
PREDICTIONS = "predictions.json"  # In the folder of the prepared data: figures by card, mode and training.
MEMORY = "memory"  # The mode of a cell, whose training is planned for less memory.
LAST_SECONDS = 3.0  # With less time left, the probe of convolutions ends.
PEER_STEPS = 12  # Before those that are timed: several of the first ones in fp16 overflow and are skipped.


# --------------------------------------------------------------------------------------------------------- predictions


def predict(cards: list[str], path: Path) -> None:
    """Writes what is planned and predicted for each card, on another machine, as this would slow the measurements.
    Cards with the same arithmetic share most of the work."""
    found: dict[str, dict[str, Figures]] = {find_gpu(card).key: {} for card in cards}
    steps = [part.name.split(", ", 1) for part in parts(False)]
    steps += [["compiled graphs", name] for mode, name in filter(lambda step: step[0] == "compiled", [*steps])]
    for mode, name in [step for step in steps if step[0] in (MEMORY, *MODES)]:
        limit_gb, training = CELLS[name] if mode == MEMORY else (0.0, TRAININGS[name])
        settings = training.settings("cuda", **MODES["eager" if mode == MEMORY else mode])
        planner, began = ModelPlanner(training.model(settings)), time.perf_counter()
        for card, by_name in found.items():
            by_name[f"{mode}, {name}"] = predicted(settings, card, planner, limit_gb)
        print(f"{mode}, {name}: predicted in {time.perf_counter() - began:.1f} s", flush=True)
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def predicted(settings: Any, card: str, planner: ModelPlanner[Any], limit_gb: float) -> Figures:
    """Returns what is predicted of a step on a card, and the settings that the plan has chosen."""
    gpu = find_gpu(card)
    machine = gpu.installed_in(probe())
    plan = planner.work.decide(machine, settings.hardware)
    budget = memory_budget(machine, plan, settings.hardware, published_rates(gpu, plan))
    if limit_gb:
        budget = dataclasses.replace(budget, budget_gb=budget_gb(limit_gb))
    plan, fit = planner.plan(settings, plan, budget)
    chosen = {"micro_batch_size": fit.micro_batch_size, "gradient_checkpointing": fit.checkpointing}
    figures: Figures = {
        "settings": chosen, "budget_gb": budget.budget_gb,
        "predicted_seconds": fit.predicted_seconds_per_step, "predicted_gb": fit.predicted_peak_gb, "fits": fit.fits,
    }  # fmt: skip
    if fit.cost:
        kernels, parts = fit.cost.micro_batch(fit.micro_batch_size), fit.accumulation_steps
        # The first micro-batch adds to no gradients.
        launches = sum(kernel.launches * (parts - kernel.accumulates) for kernel in kernels)
        figures["predicted_launches"] = round(launches + sum(kernel.launches for kernel in fit.cost.update))
    return figures


def prediction(folder: Path, mode: str, name: str) -> Figures:
    """Returns what was predicted for the card of this machine, or why there is nothing."""
    if not (folder / PREDICTIONS).is_file():
        return {"no_prediction": f"{folder / PREDICTIONS} is missing (gpu.sh prepare --card)"}
    by_card = json.loads((folder / PREDICTIONS).read_text(encoding="utf-8"))
    try:
        card = find_gpu(probe().gpu or "").key
    except UserError:
        card = "this machine"
    figures: Figures | None = by_card.get(card, {}).get(f"{mode}, {name}")
    return figures or {"no_prediction": f"for {card}, only for {', '.join(by_card)}"}


# -------------------------------------------------------------------------------------------------------------- a step


def step_of(name: str, mode: str, context: Context) -> Figures:
    """Measures a training: seconds, memory, launches and idle time of a step, beside their predictions."""
    from gpu.checks import count_of_graphs

    figures = prediction(context.data, mode, name)
    context.note(figures)
    with begun(TRAININGS[name], mode, figures, context) as bench:
        figures |= warm_up(bench, context.note)
        settings = bench.runtime.plan
        graphs = count_of_graphs(bench.state.gradients)
        if "graphs" in mode and not context.smoke and not graphs:
            problem = AssertionError if settings.cuda_graphs.value else NotMeasured
            raise problem(f"nothing was captured: {settings.cuda_graphs.reason}")
        figures |= {
            "compiled": settings.compile.value, "precision": settings.precision.value, "graphs": graphs,
            "micro_batch": min(bench.state.micro_batch.values()), "events": len(bench.state.events),
        }  # fmt: skip
        return figures | measured(bench.step, figures, context)


def compile_and_step(name: str, context: Context) -> Figures:
    """Measures a training that compiles first, and then the same as CUDA graphs."""
    from gputrain.hw.runtime import release_memory

    figures = step_of(name, "compiled", context)
    context.note(figures)
    release_memory()
    try:
        graphs = step_of(name, "compiled graphs", dataclasses.replace(context, note=lambda figures: None))
    except NotMeasured as reason:
        graphs = {SUMMARY: str(reason)}
    return {**figures, "as graphs": graphs, SUMMARY: f"{figures[SUMMARY]}; as graphs: {graphs[SUMMARY]}"}


@contextmanager
def begun(training: Any, mode: str, planned: Figures, context: Context) -> Iterator[Any]:
    """Yields a training with the settings that have been planned for this card; without a plan, the batch is whole."""
    from gputrain.hw.runtime import apply

    training = smoke_size(training) if context.smoke else training
    settings = training.settings(context.device, **MODES[mode], **planned.get("settings", {}))
    with training.begun(settings, apply(training.decide(settings))) as bench:
        yield bench


def warm_up(bench: Any, note: Callable[[Figures], None]) -> Figures:
    """Makes steps until two in a row have compiled and captured nothing. Returns the time until the end of the first
    and of the last step, and notes them all the time."""
    from gpu.checks import captures, waits_for_capture

    before, still, first, began = None, 0, 0.0, time.perf_counter()
    figures: Figures = {}
    for number in range(1, WARM_UP_STEPS + 1):
        bench.step()
        synchronize(bench.runtime.device)
        now, seconds = (captures(bench.state.gradients), compiled_graphs()), time.perf_counter() - began
        first = first or seconds
        still = still + 1 if now == before else 0
        before = now
        figures = {"first_step": first, "warm_up": seconds, "warm_up_steps": number, "compiled_graphs": now[1]}
        note(figures)
        if still >= 2 and not waits_for_capture(bench.state.gradients):
            break
    return figures


def compiled_graphs() -> int:
    """Returns how many graphs torch.compile has traced in this process."""
    utils = sys.modules.get("torch._dynamo.utils")
    return int(utils.counters["stats"]["unique_graphs"]) if utils else 0


def synchronize(device: Any) -> None:
    from gputrain.hw.runtime import synchronize as wait

    wait(device)


def measured(step: Callable[[], object], known: Figures, context: Context) -> Figures:
    """Returns the figures of a step that has been warmed up, beside the predicted ones among the known."""
    import torch

    device = torch.device(context.device)
    with context.alone():
        found = timed(step, device, context)
    context.note({**found, **beside({**known, **found})})  # Counting many launches takes long.
    with context.alone():
        found |= launches_of(step, device)
    if found.get("busy_ms"):
        found["idle_share"] = max(0.0, 1 - found["busy_ms"] / 1e3 / found["seconds"])
    return {**found, **beside({**known, **found})}


def beside(figures: Figures) -> Figures:
    """Returns predicted divided by measured values, and a line with both."""
    pairs = {"seconds": "predicted_seconds", "peak_gb": "predicted_gb", "launches": "predicted_launches"}
    found = {
        f"{measured}_ratio": figures[predicted] / figures[measured]
        for measured, predicted in pairs.items()
        if figures.get(measured) and figures.get(predicted)
    }
    units = {"seconds": "s", "peak_gb": "GB", "launches": "launches", "busy_ms": "ms busy", "idle_share": "idle"}
    shown = [
        f"{figures[name]:.5g} {unit}" + (f" (predicted {figures[pairs[name]]:.5g})" if f"{name}_ratio" in found else "")
        for name, unit in units.items() if name in figures
    ]  # fmt: skip
    return {**found, SUMMARY: ", ".join([*shown, *(["no prediction"] if "no_prediction" in figures else [])])}


def timed(step: Callable[[], object], device: Any, context: Context) -> Figures:
    """Returns the median time of steps, and the peak memory of them."""
    import statistics

    import torch

    from gputrain.bench.step_bench import Laps

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    laps, began = Laps(device), time.perf_counter()
    laps.mark()
    steps = 0
    while steps < (1 if context.smoke else MOST_STEPS):
        step()
        laps.mark()
        steps += 1
        if steps % LEAST_STEPS == 0:  # The host may be far ahead of the device.
            synchronize(device)
            if time.perf_counter() - began > STEP_SECONDS:
                break
    seconds = laps.seconds()
    figures: Figures = {"seconds": statistics.median(seconds), "steps": steps, "spread": max(seconds) / min(seconds)}
    if device.type == "cuda":
        figures["peak_gb"] = torch.cuda.max_memory_allocated(device) / 1e9
        figures["reserved_gb"] = torch.cuda.max_memory_reserved(device) / 1e9
    return figures


LAUNCHING = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cudaMemcpy", "cudaMemset")  # These calls of CUDA start work.
WAITING = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def launches_of(step: Callable[[], object], device: Any) -> Figures:
    """Returns the calls of CUDA in a step that launch something and those that wait, and the kernels that have run:
    their number, the milliseconds of all, and both by name, those that take most first."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    if device.type != "cuda":
        return {}
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiler:
        step()
        synchronize(device)
    # The profiler's own tables take minutes for the events of a long step.
    assert profiler.profiler is not None
    calls: list[str] = []
    count, spent = Counter[str](), Counter[str]()
    for event in profiler.profiler.kineto_results.events():
        name = event.name()[:80]
        if event.device_type() != torch.autograd.DeviceType.CUDA:
            calls.append(name)
            continue
        count[name] += 1
        spent[name] += event.duration_ns() / 1e6
    names = [(name, count[name], round(took, 3)) for name, took in spent.most_common()]
    return {"launches": count_of(calls, LAUNCHING), "waits": count_of(calls, WAITING), "kernels": count.total(),
            "busy_ms": sum(spent.values()), "names": names}  # fmt: skip


def count_of(calls: Sequence[str], names: tuple[str, ...]) -> int:
    return sum(name.startswith(names) for name in calls)


# ---------------------------------------------------------------------------------------------------------- the peers


def peer_vocoder(configuration: str, context: Context) -> Figures:
    """Measures SingingVocoders' own step."""
    versus = importlib.import_module("vocoder_vs_openvpi")
    if not (folder := os.environ.get("SINGINGVOCODERS")):
        raise NotMeasured("SINGINGVOCODERS names no checkout of openvpi/SingingVocoders")
    small = {"batch_size": 1, "crop_mel_frames": 8} if context.smoke else {}
    settings = {"peer": folder, "device": context.device, "changes": small, "channels": 32 if context.smoke else 0,
                "configuration": configuration, "weights": ""}  # fmt: skip
    return of_peer(versus.peer_step(settings, versus.training(settings))[1], context)


def peer_voice(side: str, context: Context) -> Figures:
    """Measures Piper's own step, in fp32 with TF32 or in bf16."""
    versus, vits_peer = importlib.import_module("vits_vs_piper"), importlib.import_module("vits_peer")
    if not (root := vits_peer.root_of(None)):
        raise NotMeasured("no training code of Piper is installed or on PYTHONPATH")
    batch_size, seconds, sizes = (2, 1.0, versus.TINY) if context.smoke else (64, 4.7, {})
    settings = {"peer": str(root), "device": context.device, "checked": False, "configuration": "high",
                "side": "peer" if context.smoke else side,
                "batch_size": batch_size, "seconds": seconds, "sizes": sizes}  # fmt: skip
    return of_peer(versus.peer_step(settings, context.scratch), context)


def peer_vae(context: Context) -> Figures:
    """Measures diffusers' autoencoder `flux` at 512 pixels, and ours within the same step."""
    from gputrain.hw.runtime import apply
    from gputrain.vae.kind import VaeWork

    versus = importlib.import_module("vae_vs_diffusers")
    size, batch_size, channels = (32, 1, {"block_out_channels": (32, 32)}) if context.smoke else (512, 4, {})
    options = argparse.Namespace(device=context.device, precision=None, channels_last=None, compile=False)
    runtime = apply(VaeWork().decide(probe(), versus.requested(options, not context.smoke)))
    architecture = dataclasses.replace(versus.PRESETS["flux"], **channels)
    batch = versus.make_batch(architecture, size, batch_size, runtime)
    weights = versus.stock_autoencoder(architecture).state_dict()
    rows: Figures = {}
    for name in ("stock", "ours"):
        side = versus.make_side(name, architecture, weights, runtime)
        rows[name] = of_peer(partial(versus.step, side, batch, runtime), context)
        context.note(rows)
    return {**rows, SUMMARY: f"{rows['stock'][SUMMARY]}; ours within the same step: {rows['ours'][SUMMARY]}"}


def of_peer(step: Callable[[], object], context: Context) -> Figures:
    for _ in range(1 if context.smoke else PEER_STEPS):
        step()
    return measured(step, {}, context)


# ------------------------------------------------------------------------------------------------- the other questions


# The shape of the input, the kernel, and groups. The last three are depthwise.
CONVOLUTIONS: tuple[tuple[tuple[int, ...], tuple[int, ...], int], ...] = (
    ((16, 256, 2048), (5,), 1), *(((16, 256, 2048), (41,), groups) for groups in (4, 16, 64)),
    ((16, 256, 512, 3), (5, 1), 1), ((16, 256, 512, 3), (5, 1), 16), ((16, 256, 1, 2048), (1, 41), 16),
    ((16, 256, 2048), (41,), 256), ((96, 128, 853), (11,), 128), ((96, 512, 213), (11,), 512),
)  # fmt: skip


def convolutions(context: Context) -> Figures:
    """Measures a forward and a backward pass of convolutions by groups, precision, layout in two dimensions, and where
    they are depthwise, by cuDNN and by torch's own kernels."""
    import torch

    rows: list[Figures] = []
    for (shape, kernel, groups), dtype in itertools.product(CONVOLUTIONS, (torch.bfloat16, torch.float32)):
        for channels_last, cudnn in ((False, True), (True, True), (False, False)):
            if (channels_last and len(kernel) == 1) or (not cudnn and groups < shape[1]):
                continue
            if context.seconds_left() < LAST_SECONDS:
                return {"left_out": "the rest found no time"}
            step = convolution(shape, kernel, groups, dtype, channels_last, context)
            with torch.backends.cudnn.flags(enabled=cudnn, benchmark=True, allow_tf32=True), context.alone():
                for _ in range(3):
                    step()
                device = torch.device(context.device)
                found = timed(step, device, context) | launches_of(step, device)
            rows.append({"input": shape, "kernel": kernel, "groups": groups, "dtype": str(dtype),
                         "channels_last": channels_last, "cudnn": cudnn, **found})  # fmt: skip
            launches = [f"{row['groups']}: {row['kernels']}" for row in rows if "kernels" in row]
            context.note({"rows": rows, SUMMARY: f"kernels by groups: {', '.join(launches) or 'unknown'}"})
    return {}


def convolution(
    shape: tuple[int, ...], kernel: tuple[int, ...], groups: int, dtype: Any, channels_last: bool, context: Context
) -> Callable[[], None]:
    """Returns a forward and backward pass of a convolution with as many channels as its input has."""
    import torch

    if context.smoke:
        shape, groups = (1, 16, *(min(64, length) for length in shape[2:])), min(16, groups)
    make: Any = torch.nn.Conv2d if len(kernel) == 2 else torch.nn.Conv1d
    padding = tuple(length // 2 for length in kernel)
    module = make(shape[1], shape[1], kernel, groups=groups, padding=padding).to(context.device)
    x = torch.randn(shape, device=context.device)
    if channels_last:
        module, x = module.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    x.requires_grad_()

    def step() -> None:
        with torch.autocast(context.device, dtype=dtype, enabled=dtype != torch.float32):
            made = module(x)
        made.float().sum().backward()

    return step


def memory_cell(name: str, context: Context) -> Figures:
    """Compares the predicted with the measured peak of a training that is planned for a smaller card."""
    from gputrain.engine.first_steps import MeasuredPeak, allocator_peak
    from gputrain.hw.runtime import release_memory

    figures = prediction(context.data, MEMORY, name)
    if "budget_gb" not in figures:
        raise NotMeasured(f"no prediction: {figures['no_prediction']}")
    with context.alone(), begun(CELLS[name][1], "eager", figures, context) as bench:
        bench.runtime.limit_memory(figures["budget_gb"])
        bench.step()  # The optimizer's state is allocated, and cuDNN's search may use all memory.
        peak, device = MeasuredPeak(), bench.runtime.device
        release_memory()  # Of cuDNN's search and of the first step.
        with allocator_peak(device, peak):
            for _ in range(2):
                bench.step()
            synchronize(device)
        events = len(bench.state.events)
    figures |= {"peak_gb": peak.allocated_gb, "reserved_gb": peak.reserved_gb, "retries": peak.retries}
    return {**figures, "limit_gb": CELLS[name][0], "out_of_memory": events, **beside(figures)}


def rates(context: Context) -> Figures:
    """Returns the rates of products in each precision, and the bandwidth of a copy."""
    import torch

    from gputrain.hw.speed import copied_bytes_per_second, product_flops_per_second

    device = torch.device(context.device)
    figures: Figures = {"copy_tb_a_second": copied_bytes_per_second(device) / 1e12}
    for name, dtype, precision in (
        ("bf16", torch.bfloat16, "highest"), ("fp16", torch.float16, "highest"), ("tf32", torch.float32, "high"),
        ("fp32", torch.float32, "highest"),
    )[3 * context.smoke :]:  # fmt: skip
        torch.set_float32_matmul_precision(precision)
        figures[f"{name}_tflops"] = product_flops_per_second(device, dtype) / 1e12
    return figures


def parts(smoke: bool) -> Sequence[Part]:
    def stepped(mode: str, name: str, seconds: float) -> Part:
        in_smoke = mode == "eager" or name.startswith("vocoder standard")
        return Part(f"{mode}, {name}", seconds, partial(step_of, name, mode), in_smoke=in_smoke)

    vocoder, voice, flux, plain, recogniser, optimised = TRAININGS
    return [
        Part("rates", 8, rates),
        Part("convolutions", 22, convolutions),
        stepped("eager", vocoder, 40),
        stepped("graphs", vocoder, 20),
        stepped("eager", voice, 30),
        stepped("graphs", voice, 20),
        stepped("eager", flux, 25),
        stepped("eager", plain, 20),
        stepped("graphs", flux, 20),
        stepped("eager", recogniser, 20),
        Part("SingingVocoders standard", 30, partial(peer_vocoder, "standard")),
        Part("Piper high", 20, partial(peer_voice, "peer"), ("piper",)),
        Part("Piper high, bf16", 15, partial(peer_voice, "peer-bf16"), ("piper",), in_smoke=False),
        Part("diffusers flux 512 px x 4", 25, peer_vae, ("diffusers",)),
        stepped("eager", optimised, 25),
        stepped("graphs", optimised, 15),
        Part("SingingVocoders optimised", 25, partial(peer_vocoder, "optimised")),
        # These compile from the beginning, the last one for the longest time.
        *(
            Part(f"compiled, {name}", SECONDS, partial(compile_and_step, name), in_smoke=False, beside=True)
            for name in (flux, vocoder, optimised, voice)
        ),
        # These find time if others were fast.
        *(Part(f"memory, {name}", 25, partial(memory_cell, name), in_smoke=False) for name in CELLS),
    ]


if __name__ == "__main__":
    main(Subcommand("measure", __doc__, SECONDS, parts))
