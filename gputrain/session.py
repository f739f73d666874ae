"""A training from its settings to its end, the same for every kind: hardware, run folder, data, plan, model."""

import logging
import os
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic

from rich.console import Console
from torch import nn

from gputrain import config
from gputrain.engine import checkpoint
from gputrain.engine.data import SampleSource, batches
from gputrain.engine.distributed import RankGroup
from gputrain.engine.recipe import Recipe, phases_of
from gputrain.engine.run_folder import Run, discarded_if_refused, open_run
from gputrain.engine.schedule import StepSchedule, check_finish, steps_of_stage
from gputrain.engine.stop import Deadline, finish_moment, format_duration, log_start_until, seconds_until, timed_part
from gputrain.engine.train import train
from gputrain.errors import UserError, without_secrets
from gputrain.hw.doctor import LONGEST_CPU_HOURS, smaller_command
from gputrain.hw.plan import NEEDS_GPU, Plan, Setting, fit_shared_memory, workers
from gputrain.hw.probe import Machine, probe
from gputrain.hw.ranks import SINGLE, Ranks, share_of, weakest_of
from gputrain.hw.runtime import Runtime, apply
from gputrain.planner.kind_work import KindWork, S, StageData
from gputrain.planner.model_planner import STEP_RANGE, ModelPlanner, measured_rates, memory_budget
from gputrain.serialization import from_json

log = logging.getLogger(__name__)


@dataclass
class Session(Generic[S]):
    """A run that is open for training, and the device that it uses."""

    machine: Machine
    run: Run
    runtime: Runtime
    planner: ModelPlanner[S]
    smaller: str = ""  # The command of a training that suits this machine better, if it is a CPU.

    def plan(self, settings: S, data: StageData, steps: StepSchedule) -> S:
        """Returns the settings with the micro-batch and the checkpointing of the plan, if the training is planned.

        The runtime has the plan then, and the run its prediction. Raises UserError if the training does not fit.
        """
        runtime = self.runtime
        if settings.hardware.plan:
            plan = self.run.group.from_leader(lambda: self._plan(settings, data, steps).to_json())
            runtime.plan = from_json(Plan, plan)
            settings = with_plan(settings, runtime.plan)
        log_runtime(runtime, self.run.prediction)
        return settings

    def _plan(self, settings: S, data: StageData, steps: StepSchedule) -> Plan:
        """Returns the plan with the settings of the batch and of the data workers."""
        runtime, requested = self.runtime, settings.hardware
        rates = measured_rates(runtime)
        budget = memory_budget(self.machine, runtime.plan, requested, rates)
        steps_in = partial(steps_left, steps, self.run)
        plan, found, budget = self.planner.plan_steps(settings, runtime.plan, budget, steps_in)
        self.planner.check_fit(settings, plan, budget, found, self.smaller)
        rate, item_seconds = runtime.product_rate / found.item_flops, data.item_seconds()
        processes = workers(self.machine, requested.num_workers, item_seconds=item_seconds, items_per_second=rate)
        seconds = found.predicted_seconds_per_step
        left = (seconds or 0.0) * (steps.stop_step - steps.start.step)
        if self.smaller and not self.run.saving.yes and left > 3600 * LONGEST_CPU_HOURS:
            raise UserError(
                f"this training is predicted to take {format_duration(left)} on this CPU",
                hint=f"--yes starts it; what suits this machine:\n  {self.smaller}",
            )
        span = {"predicted_seconds_range": [factor * seconds for factor in STEP_RANGE]} if seconds else {}
        self.run = replace(self.run, prediction={**found.to_json(), "margin": budget.margin, **span})
        return replace(plan, num_workers=processes)

    def open_batches(
        self, dataset: SampleSource, steps: StepSchedule, *, divides_items: bool = False
    ) -> Callable[[int, int], Generator[Any, None, None]]:
        """Returns a function that opens the batches of the steps `first` to `last` - 1.

        Of several ranks, each reads its part of the items of a batch; a data set that `divides_items` itself reads a
        part of every item. The plan's workers are limited such that their batches fit into the shared memory. Raises
        UserError if there are more ranks than items in a batch.
        """
        runtime, before, ranks = self.runtime, self.runtime.plan, self.runtime.ranks
        reading = SINGLE if divides_items else ranks
        items = reading.largest_part(steps.items_per_step)
        if steps.items_per_step < reading.count:
            raise UserError(
                f"batches of {steps.items_per_step} cannot be divided among {ranks.count} ranks",
                hint=f"--batch-size {ranks.count} or more; the batch size counts the items of all ranks together",
            )
        runtime.plan = fit_shared_memory(before, self.machine, dataset.item_bytes * items)
        for name in ("num_workers", "prefetch_factor"):
            if before.settings[name] != runtime.plan.settings[name]:
                log_setting(name, runtime.plan.settings[name])

        def open_from(first: int, last: int) -> Generator[Any, None, None]:
            return batches(dataset, len(dataset), steps, runtime.plan, first, last, reading)

        return open_from


def train_model(work: KindWork[S], settings: S, console: Console) -> None:
    """Trains in the run folder that the settings name, from the beginning or from a checkpoint."""
    if settings.saving.verbose:
        logging.getLogger("gputrain").setLevel(logging.DEBUG)
    log_start_until("the end of imports")
    asked, settings = settings, work.completed(settings)
    if not settings.saving.resume_from:
        check_finish(settings.schedule)
    with timed_part("hardware and run folder"):
        session = open_session(settings, work)
        session.smaller = smaller_command(session.runtime.plan, asked)
    beating = session.run.heartbeat.beating(session.run.folder) if session.run.group.leads else nullcontext()
    with discarded_if_refused(session.run), beating:
        _train(session, work, with_finish_moment(settings, session.run), console)


def _train(session: Session[S], work: KindWork[S], settings: S, console: Console) -> None:
    """Opens the data, plans the training, makes its model, and trains it."""
    runtime, progress, beyond_end = session.runtime, session.run.progress, session.run.continues_beyond_end
    check_finish(settings.schedule, progress, beyond_end=beyond_end)
    beat = session.run.heartbeat
    with timed_part("data"), beat.doing("reading data"):
        data = work.open_data(settings)
        start = data.begin(settings, session.run, runtime)
    session.planner = ModelPlanner(replace(work, sizes=data.sizes), keeps=True)
    session.run = replace(
        session.run,
        settings=config.flatten(start.settings),
        configuration=config.to_yaml(start.settings),
        data=start.digests,
        facts=start.facts,
    )
    status = console.status("planning the training") if runtime.ranks.leads else nullcontext()
    with timed_part("planning"), beat.doing("planning the training"), status:
        of_data = data.stage(start.settings)
        steps = steps_of_stage(
            start.settings.schedule, progress, len(data), beyond_end=beyond_end, step_items=of_data.step_items
        )
        planned = session.plan(start.settings, of_data, steps)
    with timed_part("model and first weights"):
        training = data.training(planned, session.run, runtime)
    session.run = run = replace(
        session.run, facts=session.run.facts | training.facts, starts_pretrained=training.starts_pretrained
    )
    steps = replace(steps, schedule=planned.schedule)
    log_trained(training.recipe)
    log_length(steps, run)
    warn_of_late_parts(work.begins(planned), steps)
    opened = session.open_batches(training.source, steps, divides_items=data.divides_items)
    train(training.recipe, opened, steps, run, runtime, console)


def open_session(settings: S, work: KindWork[S]) -> Session[S]:
    """Opens the run folder that the settings name, and sets the hardware up as the plan says.

    Raises UserError if the hardware, the plan or the run folder cannot be used.
    """
    ranks = Ranks.launched(os.environ)
    machine = share_of(probe(ranks.local_index if settings.hardware.device != "cpu" else 0), ranks)
    group = RankGroup.join(ranks, on_gpu=bool(machine.gpu) and settings.hardware.device != "cpu")
    machine = weakest_of(group.gather(machine), machine)
    if machine.gpu_count > 1 and not ranks.under_torchrun and settings.hardware.device != "cpu":
        log.info(
            "this machine has %d GPUs, and one trains; for all of them: torchrun --nproc-per-node %d -m gputrain "
            "train-%s ..., with the same options",
            machine.gpu_count,
            machine.gpu_count,
            work.kind,
        )
    plan = work.decide(machine, settings.hardware)
    command = f"gputrain train-{work.kind}"
    run = open_run(settings, settings.saving, kind=work.kind, command=command, group=group)
    runtime = apply(plan, ranks)
    runtime.limit_memory(memory_budget(machine, plan, settings.hardware, None).budget_gb)
    return Session(machine, run, runtime, ModelPlanner(work))


def steps_left(steps: StepSchedule, run: Run, seconds_per_step: float | None, start_seconds: float) -> int | None:
    """Returns how many steps this run still makes, by its schedule and in the time that it has, of which the rest of
    the start takes a part; None: it is unknown."""
    left = [] if steps.has_open_end else [steps.stop_step - steps.start.step]
    deadline = Deadline.of(run.saving.max_time, steps.schedule.finish_by if steps.has_open_end else "")
    if deadline.is_set and seconds_per_step:
        seconds = deadline.began + deadline.last_seconds - time.monotonic() - start_seconds
        left.append(int(max(0.0, seconds) / seconds_per_step))
    return min(left, default=None)


def with_plan(settings: S, plan: Plan) -> S:
    """Returns the settings with the micro-batch and the checkpointing of the plan."""
    if not (plan.micro_batch_size and plan.gradient_checkpointing):
        return settings
    chosen: Any = settings
    changed: S = replace(
        chosen,
        model=replace(settings.model, gradient_checkpointing=bool(plan.gradient_checkpointing.value)),
        schedule=replace(settings.schedule, micro_batch_size=int(plan.micro_batch_size.value)),
    )
    return changed


def with_finish_moment(settings: S, run: Run) -> S:
    """Returns the settings with the date and the zone of finish_by: a run that is resumed from its own configuration
    has the same end, whenever that is. A checkpoint that is named begins another run."""
    text = settings.schedule.finish_by
    if not text:
        return settings
    moment = finish_moment(text, "" if run.continues_beyond_end else str(run.before.get("finish_by") or ""))
    chosen: Any = settings
    changed: S = replace(chosen, schedule=replace(settings.schedule, finish_by=moment))
    return changed


def log_setting(name: str, setting: Setting) -> None:
    value = {True: "on", False: "off"}[setting.value] if isinstance(setting.value, bool) else setting.value
    cost = f"; costs {setting.cost}" if setting.cost else ""
    log.debug("%s: %s (%s%s)", name, value, setting.reason, cost)


def log_runtime(runtime: Runtime, prediction: Mapping[str, Any]) -> None:
    """Logs how the hardware is used and the memory that is planned, in a line each, and for --verbose every setting."""
    plan = runtime.plan
    on_gpu = runtime.device.type == "cuda"
    device = plan.device.reason if on_gpu else f"CPU ({plan.device.reason})"
    used = [name for name in ("compile", "channels_last", "tf32", "cuda_graphs") if plan.settings[name].value]
    log.info("runs on: %s; %s", device, ", ".join([str(plan.precision.value), *used]))
    if off := [name for name, setting in plan.settings.items() if NEEDS_GPU in setting.reason]:
        log.info("off: %s (%s)", ", ".join(off).replace("precision", "16 bit"), NEEDS_GPU)
    if on_gpu and not plan.compile.value:
        log.info("not compiled: %s", plan.compile.reason)
    if prediction:
        log.info("memory: %s", format_memory(plan, prediction))
    for name, setting in plan.settings.items():
        log_setting(name, setting)
    if on_gpu:
        rate = runtime.product_rate / 1e12
        log.debug("peak: %.3g TFLOPS (a large matrix product in %s, measured)", rate, plan.precision.value)


def log_start(name: str | Path, parts: str = "") -> None:
    """Logs the model that a training gets its first weights from, and which parts it has. Those of a run are logged
    where they are read (`checkpoint.find_named`)."""
    source = Path(name)
    if source.suffix != ".pt" and not checkpoint.newest_first(source):
        log.info("start: the weights of %s%s", without_secrets(str(name)), f" ({parts})" if parts else "")


def log_trained(recipe: Recipe) -> None:
    """Logs the parts of the model that are trained, if others keep their values."""
    name, model = next(iter(recipe.modules.items()))
    trained = {id(parameter) for phase in phases_of(recipe) for parameter in phase.trained_parameters()}

    def millions(of: nn.Module) -> float:
        return sum(weight.numel() for weight in of.parameters() if id(weight) in trained) / 1e6

    total = sum(weight.numel() for weight in model.parameters()) / 1e6
    if millions(model) < total:
        parts = ", ".join(part for part, child in model.named_children() if millions(child))
        log.info("trains: %.3g of %.3g M parameters of the %s: %s", millions(model), total, name, parts)


def warn_of_late_parts(begins: Mapping[str, int], steps: StepSchedule) -> None:
    """Warns of what begins after the last step of this run, and of a learning rate that is never at its highest."""
    for what, before in begins.items():
        if 0 < steps.stop_step <= before:
            log.warning(
                "%s begins after step %d, and this run ends after step %d: train longer, or lower that option",
                what,
                before,
                steps.stop_step,
            )
    warmup, length = steps.schedule.warmup_steps, steps.last_step - steps.start.stage_step
    if 0 < length < warmup:
        log.warning(
            "the learning rate rises over %d steps (warmup_steps), and the training has %d: it never reaches %g; "
            "--warmup-steps %d would be a tenth",
            warmup,
            length,
            steps.schedule.learning_rate,
            length // 10,
        )


def format_memory(plan: Plan, prediction: Mapping[str, Any]) -> str:
    size, passes = prediction["micro_batch_size"], prediction["accumulation_steps"]
    budget = f" of {prediction['budget_gb']:.1f}" if prediction["budget_gb"] else ""
    how = f"the whole batch of {size} at once" if passes == 1 else f"{passes} micro-batches of {size}"
    repeats = ", with checkpointing" if prediction["checkpointing"] else ""
    return f"{prediction['predicted_peak_gb']:.2f}{budget} GB predicted; {how}{repeats}"


def log_length(steps: StepSchedule, run: Run) -> None:
    """Logs the steps that are left, and between what times they are predicted to take until the first are measured."""
    fast, slow = run.prediction.get("predicted_seconds_range") or (0.0, 0.0)
    if steps.has_open_end:
        check_finish(steps.schedule)  # Starting takes time, too.
        until = seconds_until(steps.schedule.finish_by)
        about = f", {until / slow:.0f} to {until / fast:.0f} steps predicted" if fast else ""
        log.info("time: %s until %s%s", format_duration(until), steps.schedule.length_text, about)
        return
    left = max(0, steps.stop_step - steps.start.step)
    limit = f"--max-steps {steps.schedule.max_steps} " if steps.stop_step < steps.last_step else ""
    limit += "of " if limit or steps.start.step else ""
    length = f"{left} step{'s' * (left != 1)}"
    length += f" ({limit}{steps.schedule.length_text})" if left != steps.schedule.num_steps else ""
    if fast:
        between = f"{format_duration(left * fast)} to {format_duration(left * slow)}"
        log.info("time: %s, %s predicted, %.3g to %.3g s a step", length, between, fast, slow)
    else:
        log.info("time: %s", length)
