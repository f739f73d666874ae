"""Plans of trainings: how the batch of a model goes through a GPU, for the GPU of this machine or for any other; and
the machines to plan for.

GB is 1e9 bytes.
"""

import contextlib
import functools
import gzip
import hashlib
import importlib.metadata
import json
import logging
import math
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic

import numpy as np
import torch

import gputrain
from gputrain import caches
from gputrain.engine.schedule import RunProgress, Schedule, StepSchedule, check_finish
from gputrain.engine.stop import seconds_to_finish
from gputrain.errors import UserError
from gputrain.hw.driver import torch_for
from gputrain.hw.gpus import Gpu, count_gpus, find_gpu, known_gpus, smallest_gpu
from gputrain.hw.plan import MOST_GRAPHED_PARTS, Cards, Hardware, Plan, Setting
from gputrain.hw.probe import Machine, probe
from gputrain.hw.runtime import Runtime
from gputrain.hw.speed import copied_bytes_per_second, product_flops_per_second
from gputrain.planner.kind_work import KindWork, S
from gputrain.planner.memory.fit import BUDGET_SHARE, Fit, MemoryBudget, MemoryModel, budget_gb, fit
from gputrain.planner.memory.predict import least_gb, memory_models, prediction_key
from gputrain.planner.time.roofline import EAGER_LAUNCH_SECONDS, LAUNCH_SECONDS, DeviceRates, KernelCost, StepCost

log = logging.getLogger(__name__)

# Settings that a step does not depend on, besides the plan's; and those of the schedule.
WITHOUT_EFFECT = ("saving", "hardware", "cards", "schedule")
BETWEEN_STEPS = ("num_epochs", "num_steps", "max_steps", "finish_by", "learning_rate", "warmup_steps")
COMPILE_SECONDS = 60.0  # Seconds of a core to compile a step for the first time.
LONG = 10.0  # A training of so many times the seconds of compiling is compiled without a closer look.
StepsIn = Callable[[float | None, float], int | None]  # Steps by the seconds of one and those of the start.
STEP_RANGE = (0.7, 2.2)  # Multiples of its predicted time that a step takes (docs/evidence/predicted_time.md).
HOST_GB = 0.5  # Memory of a data worker, and of the process of a training on a CPU besides the tensors of a step.
NCCL_GB = 1.0  # Memory of a GPU that NCCL's buffers and the buckets of gradients take when several GPUs train together.


@dataclass
class ModelPlanner(Generic[S]):
    """Plans trainings of a model. GPUs with the same arithmetic share predictions, and with `keeps` later plans do,
    too, if the model is one of the package."""

    work: KindWork[S]
    keeps: bool = False
    doing: Callable[[str], object] = lambda what: None  # Receives which GPU is being planned.
    known: dict[object, Callable[[bool], MemoryModel]] = field(default_factory=dict)
    known_least_gb: dict[object, float] = field(default_factory=dict)  # Memory of a step of one item.

    @staticmethod
    def _key(settings: S, plan: Plan) -> tuple[object, ...]:
        kept = {name: value for name, value in vars(settings).items() if name not in WITHOUT_EFFECT}
        kept |= {name: value for name, value in vars(settings.schedule).items() if name not in BETWEEN_STEPS}
        return (repr(kept), prediction_key(plan))

    def memory_model(self, settings: S, plan: Plan) -> Callable[[bool], MemoryModel]:
        """Returns the function that gives the memory model with or without checkpointing."""
        key = self._key(settings, plan)
        if key not in self.known:
            predicted = memory_models(self.work.target(settings), plan, settings.schedule.batch_size)

            @functools.cache
            def memory_model(checkpointing: bool) -> MemoryModel:
                kind = f"{type(self.work).__module__}.{self.work!r}"
                if not (self.keeps and kind.startswith("gputrain.")):
                    return predicted(checkpointing)
                return kept_model((kind, *key, checkpointing), lambda: predicted(checkpointing))

            self.known[key] = memory_model
        return self.known[key]

    def least_gb(self, settings: S, plan: Plan, checkpointing: bool) -> float:
        """Returns the memory of a step of one item."""
        key = (*self._key(settings, plan), checkpointing)
        if key not in self.known_least_gb:
            self.known_least_gb[key] = least_gb(self.work.target(settings), plan, checkpointing)
        return self.known_least_gb[key]

    def plan_steps(
        self, settings: S, plan: Plan, budget: MemoryBudget, steps_in: StepsIn
    ) -> tuple[Plan, Fit, MemoryBudget]:
        """Returns plan, fit and budget of a training that is compiled only if its steps win back the seconds of
        compiling, unless the user has chosen. `steps_in` returns the steps that are left, given the
        seconds of one and those of compiling; None: they are unknown, and compiling is taken to pay."""
        planned, found = self.plan(settings, plan, budget)
        compiled, seconds = (planned, found, budget), found.predicted_seconds_per_step
        steps = steps_in(seconds, COMPILE_SECONDS)
        asked = settings.hardware.use_torch_compile is not None
        if asked or not (plan.compile.value and budget.rates and seconds) or steps is None:
            return compiled
        if steps * seconds > LONG * COMPILE_SECONDS:
            return compiled
        plan = replace(plan, compile=Setting(False, ""))
        budget = replace(budget, rates=replace(budget.rates, launch_seconds=EAGER_LAUNCH_SECONDS))
        planned, found = self.plan(settings, plan, budget)
        won = steps * ((found.predicted_seconds_per_step or seconds) - seconds)
        if won > COMPILE_SECONDS or found.fits < compiled[1].fits:
            return compiled
        reason = f"{steps} steps win back {won:.0f} s of the {COMPILE_SECONDS:.0f} that compiling takes"
        return replace(planned, compile=Setting(False, reason)), found, budget

    def plan(self, settings: S, plan: Plan, budget: MemoryBudget) -> tuple[Plan, Fit]:
        """Returns the plan with the settings of the batch, and the fit that they come from."""
        memory_model = self.memory_model(settings, plan)
        return plan_step(plan, budget, settings.schedule, memory_model, settings.model.gradient_checkpointing)

    def remedies(self, settings: S, plan: Plan, budget: MemoryBudget, found: Fit) -> list[str]:
        """Returns sentences on what makes a training fit that does not: changes of options, one an option, the
        smallest loss first, and the smallest GPU."""
        sentences: dict[str, str] = {}
        for flag, changed in self.work.fallbacks(settings, budget, found).items():
            option = flag.split()[0]
            if changed != settings and option not in sentences:
                checkpointing = changed.model.gradient_checkpointing is not False
                need_gb = self.least_gb(changed, plan, checkpointing)
                if need_gb * budget.margin <= budget.budget_gb:
                    sentences[option] = f"{flag} would take {need_gb:.1f} GB at least"
        card = smallest_gpu(found.predicted_peak_gb * budget.margin / BUDGET_SHARE)
        larger = [f"a card of {card.memory_gb:g} GB, such as {card.key}, would do"] if card else []
        return [*sentences.values(), *larger]

    def check_fit(self, settings: S, plan: Plan, budget: MemoryBudget, found: Fit, smaller: str) -> None:
        """Logs the fit. Raises UserError if it does not fit, unless the user asked for this micro-batch. `smaller`: a
        command that suits this machine, if there is one."""
        log.debug("%s", found.describe())
        if not found.fits:
            remedies = self.remedies(settings, plan, budget, found)
            if not settings.schedule.micro_batch_size:
                raise does_not_fit(self.work.item, found, remedies, smaller)
            log.warning("micro_batch_size %d is not predicted to fit; %s", found.micro_batch_size, "; ".join(remedies))

    def card_plans(
        self, cards: Cards, settings: S, columns: dict[str, Any], items: int | None = None
    ) -> list["CardPlan"]:
        """Returns the plan of a training for every target GPU. `columns` name the training in a table. `items` of the
        training set; None: unknown, unless `cards` says it."""
        plans, targets = [], target_machines(cards)
        check_finish(settings.schedule)
        for number, target in enumerate(targets, 1):
            self.doing(f"planning {number} of {len(targets)}: {target.name}")
            switches = self.work.decide(target.machine, settings.hardware)
            on_gpu = switches.device.value == "cuda"
            if target.gpu and not on_gpu:  # As in the configuration of a run on a CPU.
                log.warning(
                    "the device is %s, so that %s is not used; --device cuda plans for it",
                    switches.device.value,
                    target.name,
                )
            memory_gb = target.machine.gpu_memory_gb if on_gpu else target.machine.ram_gb
            rates = published_rates(target.gpu or target.machine.gpu, switches) if on_gpu else None
            budget = memory_budget(target.machine, switches, settings.hardware, rates)
            known = partial(training_steps, settings.schedule, cards.items or items)
            at_most = partial(training_steps, settings.schedule, cards.items or items, at_most=True)
            plan, found, budget = self.plan_steps(settings, switches, budget, at_most)
            remedies = [] if found.fits else self.remedies(settings, switches, budget, found)
            compiling = COMPILE_SECONDS if plan.compile.value else 0.0
            seconds, batch = found.predicted_seconds_per_step, settings.schedule.global_batch_size
            time = PredictedTime(seconds, batch, known(seconds, compiling), target.price_per_hour, compiling)
            elsewhere = target.gpu is not None
            torch_build = torch_for(target.gpu.compute_capability) if target.gpu else ""
            plans.append(CardPlan(target.name, memory_gb, columns, plan, found, remedies, time, elsewhere, torch_build))
        return plans


def plan_cards(
    work: KindWork[S], settings: Any, doing: Callable[[str], object] = lambda what: None
) -> list["CardPlan"]:
    """Returns the plans for every GPU that the options of `plan` ask for. `doing` receives which one is planned."""
    planned = work.planned(settings)
    planner = ModelPlanner(planned.work, keeps=True, doing=doing)
    return planner.card_plans(settings.cards, planned.settings, planned.columns, planned.items)


@dataclass(frozen=True)
class PredictedTime:
    """The predicted time and cost of a training."""

    seconds_per_step: float | None  # None: unknown.
    batch_size: int
    steps: int | None  # Steps of the training; None: unknown, because the size of the training set is.
    price_per_hour: float  # Of all GPUs together; 0: unknown.
    compile_seconds: float = 0.0  # Of compiling, before the first step.

    @property
    def items_per_second(self) -> float | None:
        return self.batch_size / self.seconds_per_step if self.seconds_per_step else None

    @property
    def hours(self) -> float | None:
        if not (self.steps and self.seconds_per_step):
            return None
        return (self.compile_seconds + self.steps * self.seconds_per_step) / 3600

    @property
    def cost(self) -> float | None:
        return self.hours * self.price_per_hour if self.hours and self.price_per_hour else None

    def to_json(self) -> dict[str, float | None]:
        return {
            "predicted_seconds_per_step": self.seconds_per_step,
            "predicted_items_per_second": self.items_per_second,
            "predicted_hours": self.hours,
            "predicted_cost": self.cost,
        }


@dataclass(frozen=True)
class CardPlan:
    """The plan of a training for a GPU."""

    gpu: str
    memory_gb: float
    columns: dict[str, Any]  # What names the training in a table, such as size and batch.
    plan: Plan
    fit: Fit
    remedies: list[str]  # Sentences on what helps if it does not fit.
    time: PredictedTime
    elsewhere: bool = False  # The GPU is in another machine, of whose processor nothing is known.
    torch_build: str = ""  # How to install a build of torch with code for the GPU, if the default one has none.

    def to_json(self) -> dict[str, Any]:
        figures = self.fit.to_json()
        del figures["item_flops"]
        return {
            "gpu": self.gpu,
            "memory_gb": self.memory_gb,
            **self.columns,
            **figures,
            **self.time.to_json(),
            "precision": self.plan.precision.value,
            "reasons": {name: setting.reason for name, setting in self.plan.settings.items()},
            "settings": {name: setting.value for name, setting in self.plan.settings.items()},
            "remedies": self.remedies,
            "torch_build": self.torch_build,
        }


def training_steps(
    schedule: Schedule,
    items: int | None,
    seconds_per_step: float | None,
    start_seconds: float = 0.0,
    *,
    at_most: bool = False,
) -> int | None:
    """Returns the steps of a new training on `items` items, or until the time of finish_by, of which the start takes a
    part; None if they depend on what is unknown. `at_most`: or how many there are at most."""
    if schedule.finish_by:
        seconds = max(0.0, seconds_to_finish(schedule.finish_by) - start_seconds)
        return int(seconds / seconds_per_step) if seconds_per_step else None
    if items:
        return StepSchedule(schedule, RunProgress(items=items)).stop_step
    limits = [limit for limit in (schedule.num_steps, schedule.max_steps) if limit]
    return min(limits, default=None) if at_most or not schedule.num_epochs else None


def memory_budget(
    machine: Machine, plan: Plan, requested: Hardware, rates: DeviceRates | None, share: float = BUDGET_SHARE
) -> MemoryBudget:
    """Returns the memory that training may take of the plan's device, at most a share of all."""
    if plan.device.value == "cuda":
        total_gb, free_gb = machine.gpu_memory_gb, machine.gpu_free_gb
    else:
        total_gb, free_gb = machine.ram_gb, max(0.01, machine.ram_free_gb - HOST_GB) if machine.ram_free_gb else 0.0
    if not total_gb:
        return MemoryBudget(requested.memory_budget or math.inf, rates, gpus=machine.gpus)
    budget = budget_gb(total_gb, free_gb, requested.memory_budget, share)
    if machine.gpus > 1 and plan.device.value == "cuda":
        budget -= NCCL_GB
    return MemoryBudget(budget, rates, gpus=machine.gpus)


def measured_rates(runtime: Runtime) -> DeviceRates:
    """Returns the rates of the runtime's device, measured in about a second, those that it has while nothing else uses
    it. A CPU computes each operator when Python calls it, and no launch runs ahead."""
    device, in_16_bit = runtime.device, runtime.dtype != torch.float32
    fp32 = product_flops_per_second(device, torch.float32) if in_16_bit else runtime.product_rate
    sixteen_bit = runtime.product_rate if in_16_bit else fp32
    copied = copied_bytes_per_second(device)
    if device.type != "cuda":  # Caches of a CPU are not modelled.
        return DeviceRates(sixteen_bit, fp32, copied, launch_seconds=0.0, least_seconds=EAGER_LAUNCH_SECONDS)
    card = torch.cuda.get_device_properties(device)
    count, l2_bytes = card.multi_processor_count, card.L2_cache_size
    launch_seconds = LAUNCH_SECONDS if runtime.plan.compile.value else EAGER_LAUNCH_SECONDS
    return DeviceRates(sixteen_bit, fp32, copied, count, launch_seconds=launch_seconds, l2_bytes=l2_bytes)


def plan_step(
    plan: Plan,
    budget: MemoryBudget,
    schedule: Schedule,
    memory_model: Callable[[bool], MemoryModel],
    checkpointing: bool | None,
) -> tuple[Plan, Fit]:
    """Returns the plan with the settings of the batch, and the fit that they come from."""
    gpus = budget.gpus  # A batch that cannot be divided equally is planned for the GPU with the most items.
    found = fit(
        math.ceil(schedule.global_batch_size / gpus) * gpus,
        memory_model,
        budget,
        ranks=gpus,
        largest=math.ceil(schedule.batch_size / gpus),
        micro_batch_size=schedule.micro_batch_size,
        checkpointing=checkpointing,
    )
    if plan.cuda_graphs.value and (reason := _graphs_do_not_fit(found, budget)):
        plan = replace(plan, cuda_graphs=Setting(False, f"asked for, but {reason}"))
    return replace(plan, **found.settings, memory_budget_gb=_budget_setting(budget)), found


def _graphs_do_not_fit(found: Fit, budget: MemoryBudget) -> str:
    """Returns why a step of this fit cannot be captured in CUDA graphs; "" if it can. Their pool is taken to need what
    a whole step needs besides weights and optimizer, beside such a step: another shape of batch, or an evaluation."""
    if found.accumulation_steps > MOST_GRAPHED_PARTS:
        return f"a graph of {found.accumulation_steps} micro-batches would have too many kernels"
    pool_gb = sum(gb for kind, gb in found.parts.items() if kind not in ("parameters", "optimizer"))
    if found.fits and found.predicted_peak_gb * budget.margin + pool_gb > budget.budget_gb:
        return f"beside the step, up to {pool_gb:.1f} GB for its graphs do not fit"
    return ""


def _budget_setting(budget: MemoryBudget) -> Setting:
    if math.isinf(budget.budget_gb):
        return Setting(0.0, "the memory of this machine is not known")
    return Setting(round(budget.budget_gb, 2), "training may take this much of the memory; the driver takes the rest")


def does_not_fit(item: str, found: Fit, remedies: list[str], smaller: str = "") -> UserError:
    over_gb = found.predicted_peak_gb - found.budget_gb
    beyond = f"{over_gb:.1f} GB more than" if over_gb > 0 else "too near to"
    return UserError(
        f"a single {item} is predicted to take {found.predicted_peak_gb:.1f} GB, {beyond} the "
        f"{found.budget_gb:.1f} GB that training may take",
        hint="; ".join([*remedies, "--no-plan tries it nevertheless"])
        + (f"; what suits this machine:\n  {smaller}" if smaller else ""),
    )


@dataclass(frozen=True)
class TargetMachine:
    """A machine under the name of its GPU. `gpu`: the published data of a GPU that is not in this machine."""

    name: str
    machine: Machine
    gpu: Gpu | None = None
    price_per_hour: float = 0.0  # Of all its GPUs together; 0: unknown.


def published_rates(gpu: Gpu | str, plan: Plan) -> DeviceRates | None:
    """Returns the rates that a GPU, or the one of a name, is predicted to reach; None if they are unknown."""
    try:
        found = find_gpu(gpu) if isinstance(gpu, str) else gpu
    except UserError:
        return None
    return DeviceRates.published(found, tf32=bool(plan.tf32.value), compiled=bool(plan.compile.value))


def target_machines(cards: Cards) -> list[TargetMachine]:
    """Returns the requested GPUs in their order; without any, this machine. Raises UserError for an unknown name."""
    machine, prices = probe(), cards.prices()
    named: list[tuple[Gpu | None, int]] = [(find_gpu(name), count) for name, count in map(count_gpus, cards.gpu)]
    unnamed = [(unknown_gpu(memory_gb), 1) for memory_gb in cards.vram_gb]
    known = [(gpu, 1) for gpu in known_gpus().values()] if cards.all_gpus else []
    priced = dict(zip([*named, *unnamed], prices, strict=False))
    found = []
    for gpu, count in list(dict.fromkeys([*named, *known, *unnamed])) or [(None, 1)]:
        together = replace(machine, gpus=count * cards.gpus)
        times = f"{together.gpus} x " if together.gpus > 1 else ""
        name = times + (gpu.key if gpu else machine.gpu or "this CPU")
        there, price = gpu.installed_in(together) if gpu else together, priced.get((gpu, count), prices[0])
        found.append(TargetMachine(name, there, gpu, together.gpus * price))
    return found


def unknown_gpu(memory_gb: float) -> Gpu:
    """Returns a GPU of which only the memory is known; it is assumed to support bf16, as all do since Ampere."""
    if memory_gb > 1000:
        raise UserError(f"a card of {memory_gb:g} GB", hint="--vram-gb takes gigabytes, such as 24")
    return Gpu(f"{memory_gb:g} GB", f"a card of {memory_gb:g} GB", memory_gb, (8, 0), 0.0, source="")


# ---------------------------------------------------------------------------------------------------------- kept models

FILES = 200  # The newest are kept; each has 0.1 to 0.5 MB.


def kept_model(key: object, predict: Callable[[], MemoryModel]) -> MemoryModel:
    """Returns the memory model that is kept for a key, or the predicted one, which is kept from now on."""
    text = repr((key, _surroundings(), sources_digest()))
    path = caches.plan_folder() / f"{hashlib.sha256(text.encode()).hexdigest()}.json.gz"
    with contextlib.suppress(Exception):  # What damaged files raise is not documented.
        return _read(path)
    model = predict()
    try:
        _write(path, model)
    except OSError as error:
        caches.say_once(f"{path.parent}: what was planned cannot be kept for the next start ({error.strerror})")
    return model


def _surroundings() -> tuple[str, ...]:
    """Returns the versions, and what the kernels that torch chooses for a CPU depend on."""
    installed = {
        package.metadata["Name"]: package.version for package in importlib.metadata.distributions(name="transformers")
    }
    cpu = (platform.system(), platform.machine(), torch._C._get_cpu_capability())
    return (platform.python_version(), torch.__version__, np.__version__, repr(installed), *cpu)


@functools.cache
def sources_digest(folder: Path = Path(gputrain.__file__).parent) -> str:
    """Returns a digest of the program's own sources."""
    digest = hashlib.sha256()
    for path in sorted(path for kind in ("*.py", "*.yaml") for path in folder.rglob(kind)):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder)} {len(content)} ".encode() + content)
    return digest.hexdigest()


def _read(path: Path) -> MemoryModel:
    with gzip.open(path, "rt", encoding="utf-8") as file:  # It has a checksum.
        name, model = json.load(file)
    if name != path.name:  # The file may be a copy of another.
        raise ValueError
    if cost := model["cost"]:
        del cost["_by_size"]  # What follows from the rest.
        kernels = {part: tuple(KernelCost(**row) for row in cost[part]) for part in ("one", "many", "update")}
        model["cost"] = StepCost(**{**cost, **kernels})
    return MemoryModel(**model)


def _write(path: Path, model: MemoryModel) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        with gzip.open(partial, "xt", compresslevel=1, encoding="utf-8") as file:
            json.dump([path.name, vars(model)], file, default=vars)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    newest_first = sorted(path.parent.iterdir(), key=lambda kept: kept.stat().st_mtime, reverse=True)
    for old in newest_first[FILES:]:
        old.unlink(missing_ok=True)
