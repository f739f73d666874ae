"""Kernels, GB and TFLOP of each model's training step on an H100, on shapes. Counts the committed figures again with

python -m tests.planner.step_counts [CASE ...]

after a change that is meant to change them. Compiled parts are counted by the model of planner/time/fusion.py.
"""

import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from gputrain.asr.config import PlanAsr
from gputrain.asr.data import facts_of
from gputrain.asr.kind import AsrWork
from gputrain.cli.options import read_defaults
from gputrain.config import assemble
from gputrain.hw.gpus import find_gpu
from gputrain.hw.plan import Plan
from gputrain.hw.probe import Machine
from gputrain.planner.kind_work import KindWork
from gputrain.planner.memory.predict import MemoryEstimate, predict_step
from gputrain.planner.time.roofline import StepCost
from gputrain.tts.config import PlanTts
from gputrain.tts.data import size_of
from gputrain.tts.kind import TtsWork
from gputrain.vae import kind as vae
from gputrain.vae.config import PlanVae
from gputrain.vocoder import kind as vocoder
from gputrain.vocoder.config import PlanVocoder
from gputrain.vocoder.openvpi import PROFILES, translate
from tests.planner.predictions import StepTotals, totals_of
from tests.tts.test_train import small_presets

FILE = Path(__file__).parents[1] / "data" / "step_counts.json"


def of_vae(**options: Any) -> tuple[Any, KindWork[Any]]:
    return assemble(PlanVae, options), vae.VaeWork()


def of_vocoder(**options: Any) -> tuple[Any, KindWork[Any]]:
    return assemble(PlanVocoder, options), vocoder.VocoderWork()


def of_shipped(name: str, **options: Any) -> tuple[Any, KindWork[Any]]:
    """A vocoder by a shipped configuration."""
    values = read_defaults(PROFILES / f"{name}.yaml", PlanVocoder, partial(translate, of="train"))
    return of_vocoder(**{**values, **options})


def of_voice(**options: Any) -> tuple[Any, KindWork[Any]]:
    settings = assemble(PlanTts, options)
    return settings, TtsWork(size_of(settings.speech, settings.speech.clip_seconds))


def of_recogniser(**options: Any) -> tuple[Any, KindWork[Any]]:
    settings = assemble(PlanAsr, options)
    return settings, AsrWork(facts_of(settings, settings.speech, settings.speech.clip_seconds))


class Case(NamedTuple):
    make: Callable[..., tuple[Any, KindWork[Any]]]
    options: dict[str, Any]
    quick: bool = False  # It is counted in every run of the tests; the others are slow.
    within: Callable[[], AbstractContextManager[None]] = nullcontext


FLUX = {"preset": "flux", "image_size": 512, "batch_size": 8}
HIGH = {"preset": "high", "batch_size": 64, "clip_seconds": 4.7}
OPTIMISED = {"name": "base_hifi_rtx5090_optimized"}
XLS_R = {"preset": "xls-r-300m", "batch_size": 8, "clip_seconds": 8.0}
CASES = {
    "vae flux 512 x 8, eager": Case(of_vae, {**FLUX, "recompute_norms": True, "use_torch_compile": False}),
    "vae flux 512 x 8, compiled": Case(of_vae, {**FLUX, "use_torch_compile": True}),
    "vae flux 512 x 8, plain layers, eager": Case(
        of_vae, {**FLUX, "recompute_norms": False, "use_torch_compile": False}
    ),
    "vae fast 256 x 4, compiled": Case(of_vae, {"preset": "fast", "image_size": 256, "batch_size": 4}, True),
    "vocoder base_hifi_gpu, eager": Case(of_shipped, {"name": "base_hifi_gpu", "use_torch_compile": False}),
    "vocoder base_hifi_gpu, compiled": Case(of_shipped, {"name": "base_hifi_gpu", "use_torch_compile": True}),
    "vocoder base_hifi_rtx5090_optimized, eager": Case(of_shipped, {**OPTIMISED, "use_torch_compile": False}),
    "vocoder base_hifi_rtx5090_optimized, compiled": Case(of_shipped, {**OPTIMISED, "use_torch_compile": True}),
    "vocoder of the defaults, compiled": Case(of_vocoder, {"use_torch_compile": True}),
    "voice high 64 x 4.7 s, eager": Case(of_voice, {**HIGH, "use_torch_compile": False}),
    "voice high 64 x 4.7 s, compiled": Case(of_voice, {**HIGH, "use_torch_compile": True}),
    "voice fast 8 x 5 s": Case(of_voice, {"preset": "fast", "batch_size": 8}),
    "voice fast 8 x 5 s, few layers": Case(of_voice, {"preset": "fast", "batch_size": 8}, True, small_presets),
    "recogniser tiny 8 x 8 s": Case(of_recogniser, {"preset": "tiny", "batch_size": 8}, True),
    "recogniser XLS-R 300M 8 x 8 s": Case(of_recogniser, XLS_R),
}  # fmt: skip


def plan_of(settings: Any, work: KindWork[Any]) -> Plan:
    return work.decide(find_gpu("h100").installed_in(Machine(system="Linux", cpu_cores=8)), settings.hardware)


def whole_step(settings: Any, work: KindWork[Any]) -> MemoryEstimate:
    """Returns the prediction of a step that takes the whole batch at once."""
    items = settings.schedule.batch_size
    return predict_step(work.target(settings), plan_of(settings, work), micro_batch_size=items)


def counted(name: str) -> StepTotals:
    """Returns the totals of a step that takes the whole batch at once, with the optimizers and averages."""
    with CASES[name].within():
        settings, work = CASES[name].make(**CASES[name].options)
        found = whole_step(settings, work)
    items = settings.schedule.batch_size
    return totals_of(StepCost((), found.micro_batch, items, found.update), items)


if __name__ == "__main__":
    kept = json.loads(FILE.read_text(encoding="utf-8")) if FILE.is_file() else {}
    for name in sys.argv[1:] or CASES:
        found = counted(name)
        kept[name] = {"kernels": found.kernels, "gb": round(found.gb, 3), "tflop": round(found.tflop, 5)}
        print(name, kept[name])
    lines = [f" {json.dumps(name)}: {json.dumps(kept[name])}" for name in CASES if name in kept]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
