"""Seconds a step, peak memory and launches on this GPU, each beside its prediction: at most ten minutes.

usage: gpu.sh measure [--seconds 580] [--output-dir DIR] [--only PART...] [--smoke]

In this order: steps kernel by kernel of the voice `high`, both vocoder configurations, the VAE `flux` at 1024 pixels
and a recogniser of XLS-R's size; the same as CUDA graphs; the same compiled, first all side by side, as compiling keeps
one core busy and hardly the GPU; `flux` at 512 pixels beside diffusers' autoencoder, both compiled; depthwise
convolutions by kernel and precision; twelve cells of measured beside predicted peak memory; the rates of the card. The
batch is split as for the train command, and predictions are made on the CPU beside the measurements, by rates that are
measured first. Steps that compile, choose algorithms or capture a graph are never timed. GB is 1e9 bytes.
"""

import argparse
import dataclasses
import importlib
import itertools
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from multiprocessing import get_context
from typing import Any

from gpu.runner import SUMMARY, Context, Figures, Part, Subcommand, main, short
from gpu.trainings import SMALL, Training, vocoder
from gputrain.hw.plan import Plan
from gputrain.planner.memory.fit import MemoryBudget, budget_gb
from gputrain.planner.time.roofline import DeviceRates

STEP_SECONDS, MOST_STEPS, LEAST_STEPS = 5.0, 30, 3  # Time of the timed steps of a training, and their number.
WARM_UP_STEPS = 24  # Most of them, until nothing compiles and nothing is captured any more.
PREDICTORS = 4  # Processes that predict.
LAST_SECONDS = 3.0  # Time to end processes that still compile.
MODES: dict[str, dict[str, Any]] = {
    "eager": {"use_torch_compile": False, "use_cuda_graphs": False},
    "graphs": {"use_torch_compile": False, "use_cuda_graphs": True},
    "compiled": {"use_torch_compile": True, "use_cuda_graphs": False},
}
TRAININGS = {
    "voice high, 64 x 4.7 s": Training("tts", {"preset": "high", "batch_size": 64}, 4.7),
    "vocoder standard, 16 x 48": vocoder("base_hifi_gpu.yaml"),
    "vocoder optimised, 32 x 80": vocoder("base_hifi_rtx5090_optimized.yaml"),
    "flux 1024 px x 16": Training("vae", {"preset": "flux", "image_size": 1024, "batch_size": 16}),
    "XLS-R 300M, 8 x 8 s": Training("asr", {"preset": "xls-r-300m", "batch_size": 8}, 8.0),
}
GRAPHED = ("vocoder standard, 16 x 48", "vocoder optimised, 32 x 80", "flux 1024 px x 16")  # Batches of one shape.
COMPILED = ("voice high, 64 x 4.7 s", *GRAPHED)  # The clips of a recogniser differ in length.
# The memory that a cell may take, in GB, and its training, which runs kernel by kernel.
CELLS: dict[str, tuple[float, Training]] = {
    **{f"flux {size} px x {batch}": (32, Training("vae", {"preset": "flux", "image_size": size, "batch_size": batch}))
       for size, batch in ((512, 32), (1024, 16), (768, 24), (1536, 8), (2048, 4))},
    **{f"{preset} 1024 px x 16": (16, Training("vae", {"preset": preset, "image_size": 1024, "batch_size": 16}))
       for preset in ("fast", "lite")},
    "vocoder standard": (16, TRAININGS["vocoder standard, 16 x 48"]),
    "vocoder optimised": (16, TRAININGS["vocoder optimised, 32 x 80"]),
    "voice high": (16, TRAININGS["voice high, 64 x 4.7 s"]),
    "voice medium": (16, Training("tts", {"preset": "medium", "batch_size": 64}, 4.7)),
    "XLS-R 300M": (24, TRAININGS["XLS-R 300M, 8 x 8 s"]),
}  # fmt: skip


def smoke_size(training: Training) -> Training:
    """Returns a tiny training of the same kind, for the CPU."""
    tiny = SMALL[training.kind]
    changes = {"batch_size": 2, "image_size": 32, "channels": [32, 32]} if training.kind == "vae" else {"batch_size": 1}
    seconds = min(1.0, training.clip_seconds)
    return dataclasses.replace(tiny, values={**tiny.values, **changes}, clip_seconds=seconds)


# --------------------------------------------------------------------------------------------------------- predictions


def predict(training: Training, settings: Any, plan: Plan, budget: MemoryBudget) -> tuple[Plan, Figures]:
    """Returns the plan of a training with the settings of the batch, and what is predicted of a step. Runs in a process
    of its own, without the GPU."""
    from gputrain.planner.memory.predict import predict_step
    from gputrain.planner.model_planner import ModelPlanner
    from gputrain.session import with_plan

    began = time.perf_counter()
    model = training.model(settings)
    planner = ModelPlanner(model)
    plan, found = planner.plan(settings, plan, budget)
    items, target = found.micro_batch_size, model.target(with_plan(settings, plan))
    step = predict_step(target, plan, micro_batch_size=items, checkpointing=found.checkpointing)
    figures: Figures = {
        "micro_batch": items, "passes": found.accumulation_steps, "checkpointing": found.checkpointing,
        "predicted_seconds": found.predicted_seconds_per_step, "predicted_gb": found.predicted_peak_gb,
        "predicted_reserved_gb": step.reserved_gb, "fits": found.fits,
    }  # fmt: skip
    if found.cost:
        graphs = bool(plan.cuda_graphs.value)
        passes = found.accumulation_steps
        launches = found.cost.host_launches(items, passes) if graphs else found.cost.totals(items, passes).kernels
        figures["predicted_launches"] = launches
    return plan, {**figures, "seconds_to_predict": time.perf_counter() - began}


@cache
def predictors() -> ProcessPoolExecutor:
    """Returns the processes that predict beside the measurements."""
    processes = min(PREDICTORS, max(1, (os.cpu_count() or 2) // 2))
    return ProcessPoolExecutor(processes, get_context("spawn"), initializer=hide_gpu)


def hide_gpu() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


@cache
def rates_of_card(device: str, compiled: bool) -> DeviceRates:
    """Returns the rates by which everything is predicted, measured while the device is idle."""
    from gputrain.hw.runtime import apply
    from gputrain.session import measured_rates

    training = SMALL["vae"]
    return measured_rates(apply(training.decide(training.settings(device, use_torch_compile=compiled))))


@cache
def prediction(name: str, device: str, limit_gb: float, mode: str) -> "Future[tuple[Plan, Figures]]":
    """Begins to predict a training. The next ones of the list are begun too, so that they are ready in time."""
    from gputrain.hw.probe import probe
    from gputrain.planner.model_planner import memory_budget

    training = (CELLS[name][1] if limit_gb else TRAININGS[name]) if device == "cuda" else smoke_size(named(name))
    settings = training.settings(device, **MODES[mode])
    plan = training.decide(settings)
    rates = rates_of_card(device, bool(plan.compile.value))
    budget = memory_budget(probe(), plan, settings.hardware, rates)
    if limit_gb and device == "cuda":
        budget = dataclasses.replace(budget, budget_gb=budget_gb(limit_gb))
    return predictors().submit(predict, training, settings, plan, budget)


def named(name: str) -> Training:
    return TRAININGS.get(name) or CELLS[name][1]


def begin_predictions(device: str) -> None:
    """Begins all predictions for a GPU, in the order in which they are needed."""
    if device == "cpu":  # A smoke test has few parts, and few cores.
        return
    for mode, names in (("eager", TRAININGS), ("graphs", GRAPHED), ("compiled", COMPILED)):
        for name in names:
            prediction(name, device, 0.0, mode)
    for name, (limit_gb, _) in CELLS.items():
        prediction(name, device, limit_gb, "eager")


# ----------------------------------------------------------------------------------------------------------- compiling


def compile_side_by_side(context: Context) -> Figures:
    """Compiles all trainings, each in a process of its own, so that their code is in the compiler's cache afterwards.
    Returns the seconds of each; of one that finds too little time, what it has compiled is in the cache too."""
    from multiprocessing.connection import Connection, wait

    needed = {name: prediction(name, context.device, 0.0, "compiled") for name in COMPILED}
    spawn, compiling = get_context("spawn"), {}
    figures: Figures = {}
    try:
        for name, future in needed.items():
            plan, _ = future.result()
            reads, writes = spawn.Pipe(duplex=False)
            process = spawn.Process(target=compile_training, args=(TRAININGS[name], plan, context.device, writes))
            process.start()
            writes.close()
            compiling[reads] = name, process
        while compiling and (ready := wait(compiling, context.seconds_left() - LAST_SECONDS)):
            for end in ready:
                assert isinstance(end, Connection)
                name, process = compiling.pop(end)
                try:
                    figures[name] = end.recv()
                except EOFError:
                    figures[name] = "the process died"
                process.join()
                context.note(figures)
    finally:
        for name, process in compiling.values():
            figures[name] = "too little time"
            process.kill()
            process.join()
    return figures


def compile_training(training: Training, plan: Plan, device: str, done: Any) -> None:
    """Makes steps of a training until nothing compiles any more, and sends the seconds that they took."""
    began = time.perf_counter()
    with planned(training, plan, device) as bench:
        warm_up(bench)
    done.send(time.perf_counter() - began)


# -------------------------------------------------------------------------------------------------------------- a step


def step_of(name: str, mode: str, context: Context) -> Figures:
    """Measures a training: seconds, memory and launches of a step, beside their predictions."""
    from gpu.checks import count_of_graphs

    needed = prediction(name, context.device, 0.0, mode)  # It comes before the others.
    begin_predictions(context.device)
    plan, figures = needed.result()
    context.note(figures)
    training = named(name) if not context.smoke else smoke_size(named(name))
    with planned(training, plan, context.device, **MODES[mode]) as bench:
        began = time.perf_counter()
        warm_up(bench)
        context.note({"seconds_to_warm_up": time.perf_counter() - began})
        found = timed(bench.step, bench.runtime.device, context)
        settings = bench.runtime.plan
        found |= {"compiled": settings.compile.value, "precision": settings.precision.value,
                  "graphs": count_of_graphs(bench.state.gradients), "events": len(bench.state.events)}  # fmt: skip
        context.note({**found, **beside({**figures, **found})})  # Counting many launches takes long.
        found |= launches_of(bench.step, bench.runtime.device) | workspaces_of(bench.runtime.device)
    if mode == "graphs" and not context.smoke and not found["graphs"]:
        raise AssertionError(f"nothing was captured: {settings.cuda_graphs.reason}")
    return {**found, **beside({**figures, **found})}


def beside(figures: Figures) -> Figures:
    """Returns predicted divided by measured values, and a line with both."""
    pairs = {"seconds": "predicted_seconds", "peak_gb": "predicted_gb", "reserved_gb": "predicted_reserved_gb"}
    found = {
        f"{measured}_ratio": figures[predicted] / figures[measured]
        for measured, predicted in pairs.items()
        if figures.get(measured) and figures.get(predicted)
    }
    names = {"seconds": "s", "peak_gb": "GB", "reserved_gb": "GB reserved", "launches": "launches"}
    shown = [
        f"{figures[name]:.3g} {unit} (predicted {figures.get(pairs.get(name, 'predicted_launches')) or math.nan:.3g})"
        for name, unit in names.items() if name in figures
    ]  # fmt: skip
    return {**found, SUMMARY: ", ".join([*shown, f"{figures['micro_batch']} at once"])}


@contextmanager
def planned(training: Training, plan: Plan, device: str, **changes: Any) -> Iterator[Any]:
    from gputrain.hw.runtime import apply

    settings = training.settings(device, **changes)
    runtime = apply(plan)
    if plan.memory_budget_gb and float(plan.memory_budget_gb.value):
        runtime.limit_memory(float(plan.memory_budget_gb.value))
    with training.begun(settings, runtime) as bench:
        yield bench


def warm_up(bench: Any) -> None:
    """Makes steps until two in a row have compiled and captured nothing."""
    from gpu.checks import captures, waits_for_capture

    before, still = None, 0
    for _ in range(WARM_UP_STEPS):
        bench.step()
        synchronize(bench.runtime.device)
        now = (captures(bench.state.gradients), compiled_graphs())
        still = still + 1 if now == before else 0
        before = now
        if still >= 2 and not waits_for_capture(bench.state.gradients):
            return


def compiled_graphs() -> int:
    """Returns how many graphs torch.compile has traced in this process."""
    utils = sys.modules.get("torch._dynamo.utils")
    return int(utils.counters["stats"]["unique_graphs"]) if utils else 0


def synchronize(device: Any) -> None:
    from gputrain.hw.runtime import synchronize as wait

    wait(device)


def timed(step: Callable[[], object], device: Any, context: Context) -> Figures:
    """Returns the median time of steps, and the peak memory of them."""
    import statistics

    import torch

    from gputrain.bench.timing import Laps

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
    """Returns the calls of CUDA in a step that launch something, those that wait, and the kernels that have run."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    if device.type != "cuda":
        return {}
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiler:
        step()
        synchronize(device)
    # The profiler's own tables take minutes for the events of a long step.
    assert profiler.profiler is not None
    events = profiler.profiler.kineto_results.events()
    calls = [event.name() for event in events if event.device_type() != torch.autograd.DeviceType.CUDA]
    kernels = Counter(event.name()[:80] for event in events if event.device_type() == torch.autograd.DeviceType.CUDA)
    launches, waits = count_of(calls, LAUNCHING), count_of(calls, WAITING)
    return {"launches": launches, "waits": waits, "kernels": kernels.total(), "names": kernels.most_common(40)}


def workspaces_of(device: Any) -> Figures:
    """Returns the memory that cuBLAS's workspaces hold, which torch's allocator counts as allocated. They are freed."""
    import torch

    if device.type != "cuda":
        return {}
    synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch._C._cuda_clearCublasWorkspaces()
    return {"cublas_workspaces_gb": (before - torch.cuda.memory_allocated(device)) / 1e9}


def count_of(calls: Sequence[str], names: tuple[str, ...]) -> int:
    return sum(name.startswith(names) for name in calls)


# ------------------------------------------------------------------------------------------------- the other questions


def beside_diffusers(context: Context) -> Figures:
    """Compares `flux` at 512 pixels with diffusers' autoencoder: both compiled, ours with its memory-efficient layers
    and without checkpointing."""
    from gputrain.hw.probe import probe
    from gputrain.hw.runtime import apply
    from gputrain.vae.work import VaeWork

    versus = importlib.import_module("vae_vs_diffusers")
    size, batch, channels = (32, 1, (32, 32)) if context.smoke else (512, 8, ())
    options = argparse.Namespace(
        preset="flux", channels=channels, batch_size=batch, largest=False, sides=["stock", "ours"],
        rounds=1 if context.smoke else 7, minutes=0.2, device=context.device, precision=None, channels_last=None,
        compile=None,
    )  # fmt: skip
    runtime = apply(VaeWork().decide(probe(), versus.wishes(options, not context.smoke)))
    found: Figures = versus.compare(options, size, runtime, rates_of_card(context.device, not context.smoke))
    stock, ours = found["sides"]
    pairs = [
        f"{name} {short(ours.get(key))}, stock {short(stock.get(key))}"
        for key, name in (("seconds", "s"), ("peak_gb", "peak GB"), ("reason", "not measured:"))
        if key in ours
    ]
    ratios = {f"{key}_ours_to_stock": value for key, value in found["ratios"]["ours"].items()}
    return {SUMMARY: f"ours: {'; '.join(pairs)}", **ratios, "batch": found["batch_size"], "all": found}


# Tokens of one period of 3 in a batch of the optimised vocoder: items times period, positions, and channels.
TOKENS = ((96, 853, 128), (96, 213, 512))
FORMS = {"channels first": (False, False), "rows": (True, False), "rows, compiled": (True, True)}


def depthwise(context: Context) -> Figures:
    """Times blocks of `fast_mpd` around their depthwise convolution, forward and backward, in each precision: with
    channels before or behind positions in memory, compiled or not, and by cuDNN or by torch's own kernels."""
    import torch

    sizes = ((2, 16, 32),) if context.smoke else TOKENS
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    figures: Figures = {}
    slower: list[str] = []
    for form in FORMS:  # What compiles comes last.
        for size, name in itertools.product(sizes, list(dtypes)[: 1 if context.smoke else 3]):
            row = block_milliseconds(form, size, dtypes[name], context)
            figures[f"{' x '.join(map(str, size))} {name}, {form}"] = row
            if row["cuDNN"] > 1.1 * row["native"]:
                slower.append(f"{size[-1]} {name}, {form}: {row['cuDNN'] / row['native']:.1f}x")
            context.note({**figures, SUMMARY: f"slower by cuDNN: {'; '.join(slower) or 'none'}"})
    return figures


def block_milliseconds(form: str, size: tuple[int, int, int], dtype: Any, context: Context) -> dict[str, float]:
    """Returns the time of a block by cuDNN and by torch's own kernels."""
    import torch

    from gputrain.vocoder.discriminators import PeriodBlock

    device, (by_rows, compiled) = torch.device(context.device), FORMS[form]
    torch.manual_seed(0)
    block = PeriodBlock(size[-1], 11, size[-1]).to(device)
    block.by_rows = by_rows
    x_NLC = torch.randn(*size, device=device, requires_grad=True)
    function = torch.compile(block) if compiled and not context.smoke else block
    call = partial(forward_and_backward, function, x_NLC, dtype)
    row: dict[str, float] = {}
    for kernels in ("cuDNN", "native"):
        with torch.backends.cudnn.flags(enabled=kernels == "cuDNN", benchmark=True, allow_tf32=True):
            row[kernels] = round(milliseconds(call, device, 2 if context.smoke else 20), 4)
    return row


def forward_and_backward(function: Callable[..., Any], x: Any, dtype: Any) -> None:
    import torch

    with torch.autocast(x.device.type, dtype=dtype, enabled=dtype != torch.float32):
        made = function(x)
    made.float().sum().backward()


def milliseconds(call: Callable[[], object], device: Any, repeats: int) -> float:
    """Returns the median time of a call, in milliseconds."""
    import statistics

    from gputrain.bench.timing import Laps

    for _ in range(3):
        call()
    synchronize(device)
    laps = Laps(device)
    laps.mark()
    for _ in range(repeats):
        call()
        laps.mark()
    return 1e3 * statistics.median(laps.seconds())


@contextmanager
def watched_peak(found: Any, resident: Iterable[Any]) -> Iterator[None]:
    """Raises `found`, a MeasuredPeak, to the peak of the code within and of `resident`, by watching every storage,
    where no allocator of a GPU counts."""
    from gputrain.planner.memory.timeline import MemoryTimeline

    timeline = MemoryTimeline()
    timeline.note("parameters", resident)
    with timeline.watching():
        yield
    peak_gb = timeline.peak()[0] / 1e9
    found.include(peak_gb, peak_gb)


def memory_cell(name: str, context: Context) -> Figures:
    """Compares the predicted with the measured peak of a training that is planned for a smaller card."""
    from gputrain.engine.memory_check import MeasuredPeak, allocator_peak
    from gputrain.hw.runtime import release_memory
    from gputrain.planner.memory.predict import batch_tensors, optimizer_tensors, weights_of

    limit_gb, training = CELLS[name]
    needed = prediction(name, context.device, limit_gb, "eager")
    begin_predictions(context.device)
    plan, figures = needed.result()
    training = smoke_size(training) if context.smoke else training
    with planned(training, plan, context.device, **MODES["eager"]) as bench:
        bench.step()  # The optimizer's state is allocated, and cuDNN's search may use all memory.
        batch = bench.recipe.prepare(bench.loaded, bench.steps)
        resident = [*weights_of(bench.recipe), *optimizer_tensors(bench.recipe), *batch_tensors(batch)]
        del batch
        peak, device = MeasuredPeak(), bench.runtime.device
        release_memory()  # Of cuDNN's search and of the first step.
        with watched_peak(peak, resident) if context.smoke else allocator_peak(device, peak):
            for _ in range(2):
                bench.step()
            synchronize(device)
        events = len(bench.state.events)
    found: Figures = {"peak_gb": peak.allocated_gb, "reserved_gb": peak.reserved_gb, "retries": peak.retries}
    return {"limit_gb": limit_gb, **figures, **found, "out_of_memory": events, **beside({**figures, **found})}


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
    def stepped(mode: str, names: Sequence[str], seconds: float) -> list[Part]:
        return [Part(f"{mode}, {name}", seconds, partial(step_of, name, mode)) for name in names]

    eager, graphed = stepped("eager", list(TRAININGS), 40), stepped("graphs", GRAPHED, 40)
    compiled = [Part("compile", 240, compile_side_by_side), *stepped("compiled", COMPILED, 75)]
    cells = [Part(f"memory, {name}", 25, partial(memory_cell, name)) for name in CELLS]
    if smoke:  # One of each sort and kind.
        graphed, compiled, cells = graphed[:1], [], cells[:1]
    return [
        *eager,
        *graphed,
        *compiled,
        Part("flux 512 px x 8, diffusers", 120, beside_diffusers, ("diffusers",)),
        Part("depthwise", 60, depthwise),
        *cells,
        Part("rates", 15, rates),
    ]


if __name__ == "__main__":
    main(Subcommand("measure", __doc__, 580, parts))
