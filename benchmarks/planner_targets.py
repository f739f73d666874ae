"""Compares plans with real steps on this GPU, which is also limited to emulate smaller ones: targets P1 and P2.

usage: python benchmarks/planner_targets.py [--minutes 10] [--smoke]

A cell is a GPU (16, 24, 32 or 40 GB) and a workload: the image VAE at several sizes, the vocoder in the configuration
of openvpi's users, and Wav2Vec2ForCTC at the sizes of XLS-R with random weights, if transformers is installed. It is
planned like a training: peak memory is predicted on fake tensors, and a micro-batch is chosen. Then four real steps are
made. The report has the predicted and the real peak, the used share of the budget, the number of times that memory ran
out, and the seconds until the plan was made.

Each cell is a process of its own; the most important come first, and cells that the time does not suffice for are
reported as not measured. Writes benchmarks/results/planner_DEVICE.json after every cell. `--smoke` runs the same on
any machine at a tiny size, and watches every storage instead of a GPU's allocator. GB is 1e9 bytes.

Shapes: B items, L samples of a wave, T frames, S symbols.
"""

import argparse
import dataclasses
import importlib.util
import itertools
import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gputrain.bench import runner
from gputrain.bench.runner import BenchReport, BenchResult, BenchRow, NotMeasured, Settings
from gputrain.config import assemble
from gputrain.engine.memory_check import MeasuredPeak, allocator_peak
from gputrain.engine.metrics import Report as Samples
from gputrain.engine.optim import adamw
from gputrain.engine.recipe import Phase, Recipe, StepGroup, Term
from gputrain.engine.run_dir import Run
from gputrain.engine.schedule import Saving, Schedule
from gputrain.engine.state import TrainState
from gputrain.engine.train import update
from gputrain.hw.plan import Hardware, Plan, decide
from gputrain.hw.probe import probe
from gputrain.hw.runtime import Runtime, apply, release_memory
from gputrain.planner.microbatch import Fit, MemoryBudget, MemoryModel, budget_gb
from gputrain.planner.model_planner import plan_step
from gputrain.planner.resident import tensors_of, watched_peak
from gputrain.planner.session import measured_rates
from gputrain.planner.spec import PlanTarget
from gputrain.planner.step_memory import memory_models
from gputrain.stored import from_json
from gputrain.vae import recipe as vae
from gputrain.vae.config import TrainVae
from gputrain.vocoder import recipe as vocoder
from gputrain.vocoder.config import TrainVocoder

CHILD = (sys.executable, __file__)
CONTEXT_GB = 0.6  # Memory of a GPU that the driver and its libraries take.
STEPS = 3
ROW_MINUTES = 4.0
LEAST_SECONDS = 20.0  # A cell needs at least this time.

FLUX = {
    f"flux {size} px x {batch}": {"preset": "flux", "image_size": size, "batch_size": batch}
    for size, batch in ((512, 32), (768, 24), (1024, 16), (1536, 8), (2048, 4))
}
OTHERS = {
    f"{preset} 1024 px x 16": {"preset": preset, "image_size": 1024, "batch_size": 16} for preset in ("fast", "lite")
}
# Hidden size, layers, size of the feed-forward layers. Babu et al. 2021, arXiv:2111.09296, table 2.
XLSR = {"300M": (1024, 24, 4096), "1B": (1280, 48, 5120)}
SPEECH = {
    f"XLS-R {size} {seconds} s x 32": {"speech": XLSR[size], "seconds": seconds, "batch_size": 32}
    for size in XLSR
    for seconds in (8, 30)
}
VOCODERS: dict[str, Settings] = {
    "vocoder 1024 x 32 of 80 frames": {
        "discriminators": ["fast_mrd", "fast_mpd"], "discriminator_periods": [2, 3, 5, 7, 11, 17, 23],
        "upsample_initial_channel": 1024, "batch_size": 32, "crop_mel_frames": 80, "use_bf16": False,
        "mixed_precision": True, "generator_optimizer": "muon", "discriminator_optimizer": "muon",
    },
    "vocoder 512 x 16 of 48 frames": {
        "discriminators": ["msd", "mpd"], "discriminator_periods": [3, 5, 7, 11, 17, 23, 37],
        "batch_size": 16, "crop_mel_frames": 48, "mixed_precision": False,
    },
}  # fmt: skip
WORKLOADS: dict[str, Settings] = {**FLUX, **OTHERS, **VOCODERS, **SPEECH}
FIRST = [
    *((32, name) for name in FLUX),
    (24, "flux 1024 px x 16"), (24, "XLS-R 300M 8 s x 32"), (24, "XLS-R 1B 8 s x 32"),
    *((16, name) for name in VOCODERS),
    (16, "flux 1024 px x 16"), (16, "fast 1024 px x 16"), (16, "lite 1024 px x 16"), (16, "XLS-R 300M 30 s x 32"),
    (40, "flux 1024 px x 16"), (40, "XLS-R 1B 8 s x 32"), (40, "XLS-R 1B 30 s x 32"),
]  # fmt: skip
COMPILED = {"use_torch_compile": True}

TINY_VAE = {"preset": "fast", "channels": [32, 32], "image_size": 64, "batch_size": 8}
ADVERSARY = {"adversarial_weight": 0.5, "discriminator_channels": 16}
TINY: dict[str, tuple[float, Settings]] = {  # The first value is the budget in GB.
    "(tiny) fast 64 px x 8": (0.06, TINY_VAE),
    "(tiny) fast 64 px x 8, adversary": (0.06, {**TINY_VAE, **ADVERSARY}),
    "(tiny) vocoder 32 x 8": (0.2, {"discriminators": ["fast_mpd"], "upsample_initial_channel": 32, "batch_size": 8}),
    "(tiny) XLS-R 1 s x 4": (0.05, {"speech": (64, 2, 128), "seconds": 1, "batch_size": 4}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10, help="time limit of all cells together")
    parser.add_argument("--smoke", action="store_true", help="measure tiny sizes, on any machine")
    parser.add_argument("--output-dir", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if not (torch.cuda.is_available() or options.smoke):
        print("no GPU: nothing measured (--smoke tries the script at a tiny size)")
        return
    runner.open_folder(options.output_dir)
    report = BenchReport("targets P1 and P2", "cells", runner.command_line("python benchmarks/planner_targets.py"))
    ends = time.monotonic() + 60 * options.minutes
    for result in measured(tiny_rows() if options.smoke else rows(), ends):
        report.results.append(result)
        print(line(result), flush=True)
        if report.machine:
            runner.write_json(runner.result_path(options.output_dir, "planner", report.device), report.to_json())
    print(summary(report.results))


def rows() -> list[BenchRow]:
    """Returns the most important cells, then some with compiled layers, then every other GPU and workload."""
    others = [(cap, name) for cap, name in itertools.product((32, 24, 16, 40), WORKLOADS) if (cap, name) not in FIRST]
    cells: list[tuple[int, str, Settings]] = [(cap, name, {}) for cap, name in (*FIRST, *others)]
    cells[len(FIRST) : len(FIRST)] = [(24, "flux 1024 px x 16", COMPILED), (16, "fast 1024 px x 16", COMPILED)]
    made = []
    for cap_gb, name, wishes in cells:
        label = f"{cap_gb} GB, {name}{', compiled' if wishes else ''}"
        workload = {"use_torch_compile": False, **WORKLOADS[name], **wishes, "device": "cuda"}
        budget = budget_gb(cap_gb, cap_gb - CONTEXT_GB)
        made.append(BenchRow(label, {"workload": workload, "cap_gb": cap_gb, "budget_gb": budget, "device": "cuda"}))
    return made


def tiny_rows() -> list[BenchRow]:
    return [
        BenchRow(label, {"workload": {**workload, "device": "cpu"}, "cap_gb": 0, "budget_gb": gb, "device": "cpu"})
        for label, (gb, workload) in TINY.items()
    ]


def measured(cells: list[BenchRow], ends: float) -> Iterator[BenchResult]:
    """Yields the result of each cell until the time is over. Cells of a workload share predictions."""
    predicted: dict[str, Any] = {}
    for row in cells:
        left = ends - time.monotonic()
        if reason := "no time was left" if left < LEAST_SECONDS else missing(row):
            yield BenchResult(row.label, row.settings, reason=reason)
            continue
        key = repr(row.settings["workload"])
        asked = dataclasses.replace(row, settings={**row.settings, "predicted": predicted.get(key, {})})
        result = runner.measure_row(asked, CHILD, min(ROW_MINUTES, left / 60))
        predicted[key] = result.figures.pop("predicted", {})
        yield dataclasses.replace(result, settings=row.settings)


def missing(row: BenchRow) -> str:
    """Returns what this machine lacks for a cell, in words."""
    speech_only = "speech" in row.settings["workload"]
    return "transformers is not installed" if speech_only and not importlib.util.find_spec("transformers") else ""


def line(result: BenchResult) -> str:
    if not result.figures:
        return f"{result.label:<38} not measured: {result.reason}"
    found = result.figures
    return (
        f"{result.label:<38} peak GB: predicted {found['predicted_gb']:.3g}, measured {found['measured_gb']:.3g} "
        f"(prediction {found['prediction_error']:+.1%}); "
        f"{found['share_of_budget']:.0%} of {found['budget_gb']:.3g}; {found['micro_batch_size']} at once"
        f"{', checkpointing' if found['checkpointing'] else ''}; out of memory {found['out_of_memory']} times; "
        f"decided in {found['seconds_to_decide']:.0f} s"
    )


def summary(results: list[BenchResult]) -> str:
    found = [result.figures for result in results if result.figures]
    if not found:
        return "no cell was measured"
    return (
        f"{len(found)} of {len(results)} cells measured: prediction off by at most "
        f"{max(abs(cell['prediction_error']) for cell in found):.1%}; memory ran out "
        f"{sum(cell['out_of_memory'] for cell in found)} times; least share of a budget "
        f"{min(cell['share_of_budget'] for cell in found):.0%}; decided in at most "
        f"{max(cell['seconds_to_decide'] for cell in found):.0f} s"
    )


# --------------------------------------------------------------------------------------------------- a cell


@dataclass(frozen=True)
class Workload:
    target: PlanTarget
    schedule: Schedule
    hardware: Hardware


def workload_of(settings: Settings) -> Workload:
    if "speech" in settings:
        hardware = Hardware(device=settings["device"], use_torch_compile=False)
        return Workload(speech(settings), Schedule(batch_size=settings["batch_size"]), hardware)
    if "discriminators" in settings:
        sung = assemble(TrainVocoder, {"data_path": ".", **settings})
        return Workload(vocoder.target(sung), sung.schedule, sung.hardware)
    train = assemble(TrainVae, {"data_path": ".", **settings})
    return Workload(vae.plan_target(train), train.schedule, train.hardware)


def measure(settings: Settings) -> dict[str, Any]:
    """Runs in the child: plans, then trains. Raises NotMeasured if a single item does not fit."""
    work = workload_of(settings["workload"])
    runtime = apply(decide(probe(), work.hardware))
    rates = measured_rates(runtime) if runtime.device.type == "cuda" else None
    began = time.perf_counter()
    memory_model = Recalled(work.target, runtime.plan, work.schedule.batch_size, settings["predicted"])
    budget = MemoryBudget(settings["budget_gb"], rates)
    runtime.plan, found = plan_step(runtime.plan, budget, work.schedule, memory_model, None)
    seconds = time.perf_counter() - began
    if not found.fits:
        raise NotMeasured(f"an item is predicted to take {found.predicted_peak_gb:.1f} GB of {budget.budget_gb:.1f}")
    runtime.limit_memory(budget.budget_gb)
    first, peak, events = train(work, runtime, found)
    return {
        "predicted_gb": found.predicted_peak_gb, "measured_gb": peak.allocated_gb,
        "reserved_gb": peak.reserved_gb, "first_step_gb": first.allocated_gb,
        "prediction_error": found.predicted_peak_gb / peak.allocated_gb - 1,
        "budget_gb": budget.budget_gb, "share_of_budget": peak.allocated_gb / budget.budget_gb,
        "micro_batch_size": found.micro_batch_size, "accumulation_steps": found.accumulation_steps,
        "checkpointing": found.checkpointing, "out_of_memory": events, "retries": peak.retries,
        "why": {name: setting.reason for name, setting in found.settings.items()},
        "seconds_to_decide": seconds, "prediction_shared": bool(settings["predicted"]),
        "predicted": memory_model.lines,
    }  # fmt: skip


class Recalled:
    """Memory models with and without checkpointing, from an earlier cell or predicted when first needed."""

    def __init__(self, target: PlanTarget, plan: Plan, most: int, lines: dict[str, Settings]) -> None:
        self.lines = dict(lines)  # Keys are "True" and "False", because JSON needs texts.
        self.predict: Callable[[bool], MemoryModel] = memory_models(target, plan, most)

    def __call__(self, checkpointing: bool) -> MemoryModel:
        key = str(checkpointing)
        if key not in self.lines:
            self.lines[key] = json.loads(json.dumps(dataclasses.asdict(self.predict(checkpointing))))
        return from_json(MemoryModel, self.lines[key])


def train(work: Workload, runtime: Runtime, found: Fit) -> tuple[MeasuredPeak, MeasuredPeak, int]:
    """Makes steps with every loss on. Returns the peak of the first one, in which cuDNN's search may use all memory,
    the peak of the others, and the number of times that memory ran out."""
    recipe, loaded = work.target.build(runtime, found.checkpointing), work.target.load()
    schedule = dataclasses.replace(work.schedule, micro_batch_size=found.micro_batch_size)
    first, others = MeasuredPeak(), MeasuredPeak()
    with tempfile.TemporaryDirectory() as folder:
        state = TrainState.begin(recipe, schedule, runtime, Run(Path(folder), Saving(), {}, ""))
        begin = recipe.peak_memory_step(0)
        batch = recipe.prepare(loaded, begin)
        for peak, steps in ((first, 1), (others, STEPS)):
            with metered(runtime.device, peak, recipe, batch):
                for step in range(begin, begin + steps):
                    batch = recipe.prepare(loaded, step)
                    update(state, batch, step, schedule.learning_rate)
                    recipe.average(step)
    return first, others, len(state.events)


def metered(device: torch.device, peak: MeasuredPeak, recipe: Recipe, batch: Any) -> AbstractContextManager[None]:
    """Raises `peak` to that of the code within, as the allocator of a GPU counts it; on a CPU, by watching storages."""
    if device.type != "cuda":
        return watched_peak(peak, tensors_of(recipe, batch))
    release_memory()
    return allocator_peak(device, peak)


# --------------------------------------------------------------------------------------------------- speech


@dataclass(frozen=True)
class Waves:
    waves_BL: Tensor
    whole: int


class SpeechRecipe:
    """Wav2Vec2ForCTC with its feature encoder frozen, as it is fine-tuned: one phase, all clips of one length."""

    kind, unit = "speech", "clips"

    def __init__(self, size: tuple[int, int, int], runtime: Runtime, checkpointing: bool) -> None:
        from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

        hidden, layers, wide = size
        config = Wav2Vec2Config(
            vocab_size=32, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=16,
            intermediate_size=wide, feat_extract_norm="layer", do_stable_layer_norm=True, conv_bias=True,
            hidden_dropout=0.1, attention_dropout=0.0, activation_dropout=0.0, feat_proj_dropout=0.0, final_dropout=0.0,
            layerdrop=0.0, apply_spec_augment=False, attn_implementation="sdpa",
        )  # fmt: skip
        self.runtime = runtime
        with runtime.device:
            self.model = Wav2Vec2ForCTC(config)
        self.model.freeze_feature_encoder()
        if checkpointing:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.model.train()
        self.modules: dict[str, nn.Module] = {"model": self.model}
        speech = self.model.wav2vec2
        learning = (speech.feature_projection, speech.encoder, self.model.lm_head)
        optimizer = adamw(
            [p for module in learning for p in module.parameters()],
            learning_rate=1e-4, weight_decay=0.01, betas=(0.9, 0.98),
        )  # fmt: skip
        self.step_groups = [StepGroup((Phase("model", learning, optimizer),), self.loss)]

    def loss(self, batch: Waves, step: int) -> Iterator[Term]:
        """Yields the mean log-probability of every symbol, which is as expensive as CTC."""
        logits_BTS = self.model(batch.waves_BL).logits
        yield Term("log_probability", -torch.log_softmax(logits_BTS.float(), -1).mean((1, 2)).sum() / batch.whole)

    def prepare(self, loaded: Tensor, step: int) -> Waves:
        return Waves(loaded.to(self.runtime.device), len(loaded))

    def size(self, batch: Waves) -> int:
        return len(batch.waves_BL)

    def split(self, batch: Waves, parts: int) -> list[Waves]:
        return [Waves(waves_BL, batch.whole) for waves_BL in batch.waves_BL.tensor_split(parts)]

    def flops(self, batch: Waves, step: int) -> float:
        return 0.0

    def peak_memory_step(self, step: int) -> int:
        return step

    def average(self, step: int) -> None:
        """There is no moving average."""

    def sample(self) -> Samples:
        return Samples()

    def evaluate(self) -> Samples:
        return Samples()


def speech(settings: Settings) -> PlanTarget:
    def build(runtime: Runtime, checkpointing: bool) -> Recipe:
        return SpeechRecipe(tuple(settings["speech"]), runtime, checkpointing)

    def load() -> Tensor:
        return torch.zeros(settings["batch_size"], 16000 * settings["seconds"])

    return PlanTarget(build, load)


if __name__ == "__main__" and not runner.answer(measure):
    main()
