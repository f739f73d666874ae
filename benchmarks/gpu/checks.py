"""Whether a step on this GPU is right: numerics, memory that runs out, waits for the device, and the aligner.

Shapes: B items, S symbols, T frames.
"""

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import precision
import torch
from precision import Case, Cost, Step, make_step
from torch import Tensor

from gpu.runner import SUMMARY, Context, Figures
from gpu.trainings import SMALL, Training
from gputrain.asr.config import PlannedSpeech
from gputrain.asr.data import facts_of, synthetic_batch
from gputrain.asr.recipe import RecogniserRecipe
from gputrain.bench.runner import NotMeasured
from gputrain.engine.cuda_graph import ReplayedGradients
from gputrain.hw.runtime import TF32_EPS, Runtime, apply, release_memory
from gputrain.tts import align

# What is switched on beside everything that is off, and whether it is on in a plan.
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "tf32": {"precision": "tf32"},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
}
OFF = {"precision": "fp32", "use_torch_compile": False, "channels_last": False, "use_cuda_graphs": False}
# A GPU may err this many times as much as the same rounding does on the CPU: Winograd's convolutions, atomic sums and
# other orders of additions cost about two bits.
FACTOR = 4.0
# An error that is always allowed: of fp32, Winograd's larger tiles cost nine bits; of shorter formats, one rounding.
LEAST_ERRORS = {"fp32": 2**9 * torch.finfo(torch.float32).eps, "tf32": TF32_EPS,
                "bf16": torch.finfo(torch.bfloat16).eps, "fp16": torch.finfo(torch.float16).eps}  # fmt: skip
FIRST_STEPS = 3  # Steps that fill caches, choose algorithms and allocate the optimizer's state.
MOST_STEPS = 16
CHECKED_STEPS = 3


# ------------------------------------------------------------------------------------------------------------ numerics


def recogniser() -> Case:
    """A tiny recogniser without dropout and masks, which every device draws in its own way."""
    still = dict.fromkeys(("hidden_dropout", "layer_drop", "mask_time_prob"), 0.0)
    settings = Training("asr", {"preset": "tiny", "batch_size": 2, "learning_rate": 1e-4, **OFF, **still}).settings(
        "cpu"
    )
    facts = facts_of(settings, PlannedSpeech(), 1.0)
    architecture = {**facts.architecture, **dict.fromkeys(DROPOUTS, 0.0)}
    return Case(
        "2 clips of 1 s", functools.partial(RecogniserRecipe, settings, architecture, facts.clip),
        functools.cache(lambda: [synthetic_batch(settings, facts)]), steps=0,
    )  # fmt: skip


DROPOUTS = ("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout", "final_dropout")
CASES: dict[str, Callable[[], Case]] = {
    "vae": lambda: precision.vae("fast", channels=(32, 64), steps=0),
    "vocoder": lambda: precision.vocoder("optimised", "full", channels=64, steps=0, discriminator_periods="2,3"),
    "tts": lambda: precision.voice("medium", steps=0),
    "asr": recogniser,
}


def numerics(kind: str, context: Context) -> Figures:
    """Compares losses and gradients of a step with float64 on the CPU, in each precision of the device.

    The bound of an error is that of the same step on the CPU, whose tensors are rounded as a GPU rounds them.
    """
    return compared(kind, context, {name: {**OFF, **on} for name, on in PRECISIONS.items()})


def compiled_numerics(kind: str, context: Context) -> Figures:
    """Does the same for compiled code in fp32."""
    return compared(kind, context, {"fp32": {**OFF, "use_torch_compile": True}})


def compared(kind: str, context: Context, requested: dict[str, dict[str, Any]]) -> Figures:
    torch.set_float32_matmul_precision("highest")  # The CPU's products follow it too.
    case, training = CASES[kind](), SMALL[kind]
    weights = precision.train(case)
    exact = make_step(case, weights, "float64")
    on_cpu = {name: make_step(case, weights, name) for name in requested}
    figures: Figures = {}
    wrong: list[str] = []
    shares: list[str] = []  # The largest error of each precision, as a share of its bound.
    for name, switches in requested.items():
        settings = training.settings(context.device, **switches)
        plan = training.decide(settings)
        if not (plan.tf32.value if name == "tf32" else plan.precision.value == name):
            figures[name] = "not on this device"
            continue
        runtime = apply(plan)
        step = make_step(case, weights, name, runtime=runtime)
        if switches["use_torch_compile"] and not runtime.plan.compile.value:
            raise RuntimeError(f"not compiled: {runtime.plan.compile.reason}")
        errors, bounds = errors_of(step, exact), errors_of(on_cpu[name], exact)
        largest = 0.0
        for part, error in errors.items():
            bound = max(FACTOR * bounds[part], LEAST_ERRORS[name])
            figures[f"{name} {part}"], figures[f"{name} {part}, bound"] = error, bound
            largest = max(largest, error / bound)
            if not error <= bound:
                wrong.append(f"{name} {part}: {error:.2g} instead of {bound:.2g} at most")
        shares.append(f"{name} {largest:.0%}")
        context.note({**figures, SUMMARY: f"errors by their bounds: {', '.join(shares)}"})
    if wrong:
        raise AssertionError("; ".join(wrong))
    return figures


def errors_of(step: Step, exact: Step) -> dict[str, float]:
    """Returns the relative error of the losses, and of the gradient of each phase."""
    largest = max(abs(value) for value in exact.losses.values())
    losses = [abs(step.losses[name] - value) / max(abs(value), 1e-3 * largest) for name, value in exact.losses.items()]
    gradients = {
        phase: Cost.of([*step.gradients[phase].values()], [*found.values()]).error
        for phase, found in exact.gradients.items()
    }
    return {"losses": max(losses), **gradients}


# -------------------------------------------------------------------------------------------------------------- memory


LARGER: dict[str, tuple[dict[str, Any], float]] = {  # Changes of SMALL on a GPU, and seconds of a clip.
    "vae": ({"image_size": 256}, 0.0),
    "vocoder": ({"batch_size": 16, "crop_mel_frames": 64}, 0.0),
    "tts": ({"batch_size": 16}, 4.0),
}
SHARE = 0.65  # Of the memory that the whole batch takes.


def out_of_memory(kind: str, context: Context) -> Figures:
    """Lets memory run out in a step: the weights equal those without, in float64 to exclude rounding errors."""
    training = SMALL[kind]
    changes: dict[str, Any] = {**OFF, "ema_decay": 0}
    if not context.smoke:
        larger, seconds = LARGER[kind]
        training, changes = dataclasses.replace(training, clip_seconds=seconds), {**changes, **larger}
    settings = training.settings(context.device, **changes)
    runtime = apply(training.decide(settings))
    steps = 1 if context.smoke else 2
    reference, peak_bytes, _ = weights_after(training, settings, runtime, steps)
    with little_memory(runtime, SHARE * peak_bytes):
        found, _, micro_batch = weights_after(training, settings, runtime, steps)
    error = float((found - reference).norm() / reference.norm())
    batch = settings.schedule.global_batch_size
    if not (micro_batch < batch and error < 1e-9):
        raise AssertionError(f"micro-batches of {micro_batch} of {batch}, weights differ by {error:.2g}")
    return {"micro_batch": f"{micro_batch} of {batch}", "difference": error, "peak_gb": peak_bytes / 1e9}


def weights_after(training: Training, settings: Any, runtime: Runtime, steps: int) -> tuple[Tensor, float, int]:
    """Returns all weights of a training in float64, the peak of memory in bytes, and the smallest micro-batch."""
    on_gpu = runtime.device.type == "cuda"
    torch.manual_seed(0)
    with training.begun(settings, runtime) as bench:
        for module in bench.recipe.modules.values():
            module.double()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        for _ in range(steps):
            bench.step()
        modules = bench.recipe.modules.values()
        weights = torch.cat([p.detach().cpu().flatten() for module in modules for p in module.parameters()])
        micro_batch = min(bench.state.micro_batch.values())
    peak_bytes = torch.cuda.max_memory_allocated() if on_gpu else 0
    del bench, modules, module
    release_memory()
    return weights, peak_bytes, micro_batch


@contextlib.contextmanager
def little_memory(runtime: Runtime, limit_bytes: float) -> Iterator[None]:
    """Caps the card to so many bytes. A CPU cannot be capped: there, an allocation that no machine can serve fails
    whenever a loss has more than two items."""
    if runtime.device.type == "cuda":
        total = torch.cuda.get_device_properties(runtime.device).total_memory
        torch.cuda.set_per_process_memory_fraction(limit_bytes / total)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        return
    from gputrain.engine import step as engine

    whole = engine.gradients

    def failing(state: Any, group: Any, batch: Any, parts: int, step: int) -> Any:
        if max(map(state.recipe.size, state.recipe.split(batch, parts))) > 2:
            torch.empty(10**15)
        return whole(state, group, batch, parts, step)

    engine.gradients = failing
    try:
        yield
    finally:
        engine.gradients = whole


# --------------------------------------------------------------------------------------------------------------- waits


def no_waits(kind: str, graphs: bool, context: Context) -> Figures:
    """Checks that no step waits for the device. Steps that capture a graph wait, and are no failure; those that replay
    it are checked. The losses of CTC wait for the lengths of their clips."""
    settings = SMALL[kind].settings(context.device, use_torch_compile=False, use_cuda_graphs=graphs)
    runtime = apply(SMALL[kind].decide(settings))
    with SMALL[kind].begun(settings, runtime) as bench:
        waits, steps = waits_of(bench.step, bench.state.gradients, runtime.device)
        replays = count_of_graphs(bench.state.gradients)
    if graphs and not replays and not context.smoke:
        raise AssertionError(f"nothing was captured: {runtime.plan.cuda_graphs.reason}")
    places = sorted(set(waits))
    if waits and kind != "asr":
        raise AssertionError(f"{len(waits)} waits in {CHECKED_STEPS} steps: {', '.join(places)}")
    return {"graphs": replays, "steps": steps, "waits": len(waits), **({"places": places} if places else {})}


def waits_of(
    step: Callable[[], object], replayed: ReplayedGradients | None, device: torch.device
) -> tuple[list[str], int]:
    """Makes steps until several have filled no caches and captured nothing. Returns the places at which these have
    waited for the device, and the number of all steps."""
    waits: list[str] = []
    checked = 0
    for number in range(1, MOST_STEPS + 1):
        before = captures(replayed)
        with waits_for_device(device) as found:
            step()
        if number <= FIRST_STEPS or captures(replayed) != before:
            checked = 0
            waits.clear()
            continue
        waits += found
        checked += 1
        # A graph is captured after some eager steps, so the last ones may be too early.
        if checked == CHECKED_STEPS and (not waits_for_capture(replayed) or number == MOST_STEPS):
            return waits, number
        if checked == CHECKED_STEPS:
            checked -= 1
    return waits, MOST_STEPS


def captures(replayed: ReplayedGradients | None) -> tuple[object, ...]:
    """Returns what changes when a graph is captured, is forgotten, or fails."""
    return () if replayed is None else (*replayed.graphs, *replayed.eager, replayed.is_off)


def count_of_graphs(replayed: ReplayedGradients | None) -> int:
    return 0 if replayed is None else len(replayed.graphs)


def waits_for_capture(replayed: ReplayedGradients | None) -> bool:
    return replayed is not None and not replayed.is_off and not replayed.graphs


@contextlib.contextmanager
def waits_for_device(device: torch.device) -> Iterator[list[str]]:
    """Gathers the places at which the host waits for the device within."""
    found: list[str] = []
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield found
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    messages = [one for one in caught if "synchronizing CUDA operation" in str(one.message)]
    found += [f"{Path(one.filename).parent.name}/{Path(one.filename).name}:{one.lineno}" for one in messages]


# ------------------------------------------------------------------------------------------------------------- aligner


def aligner(context: Context) -> Figures:
    """Compares durations of Triton and numba, also for integer scores, for which many paths have equal sums."""
    if context.smoke:
        raise NotMeasured("Triton needs a GPU")
    if align.triton_search() is None:
        raise AssertionError("Triton's search cannot be used")
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
    if same != cases:
        raise AssertionError(f"{same} of {cases} paths are the same")
    return {"same_paths": same, "of": cases}


def allocator(context: Context) -> Figures:
    """Checks that the allocator has expandable segments if the plan says so, and reads its statistics."""
    settings = SMALL["vae"].settings(context.device)
    runtime = apply(SMALL["vae"].decide(settings))
    asked = bool(runtime.plan.expandable_segments.value)
    if context.smoke:
        return {"asked": asked}
    found = bool(torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"])
    if not (asked and found):
        raise AssertionError(f"in the plan: {runtime.plan.expandable_segments}, in the allocator: {found}")
    stats, (free, total) = torch.cuda.memory_stats(), torch.cuda.mem_get_info()
    return {"expandable_segments": found, "free_gb": free / 1e9, "total_gb": total / 1e9,
            "retries": stats["num_alloc_retries"], "out_of_memory": stats["num_ooms"]}  # fmt: skip
