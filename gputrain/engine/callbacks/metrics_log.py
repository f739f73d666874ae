"""Metrics and warnings every few steps, and what a run does about unstable gradients and full memory."""

import logging

from gputrain.engine.callbacks import StepEnd, StepLoop
from gputrain.engine.health import Health
from gputrain.engine.nonfinite import Rollback
from gputrain.engine.out_of_memory import MemoryRelief
from gputrain.engine.run_folder import Run
from gputrain.engine.saving import Saver
from gputrain.engine.schedule import is_due_every
from gputrain.hw.probe import usable_cores
from gputrain.hw.runtime import memory_gb

log = logging.getLogger(__name__)


class MetricsLog:
    """Writes the metrics of the steps since the last line, warns about what is wrong, and reacts to it."""

    def __init__(self, loop: StepLoop) -> None:
        self.loop, state = loop, loop.state
        self.health = Health(state.runtime.plan, usable_cores())
        self.relief = MemoryRelief(state.micro_batch, state.shrink)

    def due(self, end: StepEnd) -> bool:
        return end.stops or is_due_every(end.step, self.loop.run.saving.log_every_steps)

    def run(self, end: StepEnd) -> None:
        self.write_and_react()

    def announce(self, end: StepEnd) -> None:
        """Say where no bar shows it that the first step is done, and when there will be metrics."""
        metrics, interval = self.loop.metrics, self.loop.run.saving.log_every_steps
        first = end.step == self.loop.steps.start.step + 1 and not end.stops
        if first and interval > 1 and not metrics.console.is_terminal:
            log.info("%s is done; metrics follow every %d steps", metrics.step_text, interval)

    def write_and_react(self) -> None:
        loop, state, run = self.loop, self.loop.state, self.loop.run
        done = state.progress.step
        rows = self.write()
        note_time(run, loop.metrics.latest["speed/seconds_per_step"])
        events = self.health.watch(rows, loop.metrics.latest, done) if run.group.leads else []
        state.events += events
        if events:
            loop.saver.write_plan()
        go_back_if_unstable(loop.saver, rows, done)
        pressure = loop.monitor.pressure()
        if pressure == "act" and state.runtime.device.type == "cpu" and not loop.saver.is_busy:
            loop.saver.host.release()
        self.relief.relieve(pressure, done - 1)

    def write(self, *, alone: bool = False) -> list[dict[str, float]]:
        """Write the line of the steps since the last one. Returns the scalars of these steps."""
        loop, done = self.loop, self.loop.state.progress.step
        further = {"learning_rate": loop.steps.learning_rate(done - 1), **memory_gb(loop.state.runtime.device)}
        further |= {**loop.monitor.figures(), **loop.saver.disk_gb}
        return loop.metrics.write(done, loop.steps.epochs_done(done), further, alone=alone)


def note_time(run: Run, seconds_per_step: float) -> None:
    """Keep the measured time of a step, and compare it once with the predicted one. The first line of metrics contains
    compilation and the search for algorithms, and does not count."""
    measured, predicted = run.status.seconds_per_step, run.prediction.get("predicted_seconds_per_step")
    measured.append(seconds_per_step)
    if len(measured) == 2 and predicted:
        log.info("a step takes %.3g s; %.3g s were predicted", seconds_per_step, predicted)


def go_back_if_unstable(saver: Saver, rows: list[dict[str, float]], done: int) -> None:
    """Load a good checkpoint if the gradients of the last steps say so (nonfinite.py). `rows` are the scalars of these
    steps, up to step number `done`.

    The data continues from the present position, so that the same batches don't cause the same failure. Raises
    UserError if there is no checkpoint, or if earlier rollbacks did not help.
    """
    state, run = saver.state, saver.run
    rollback: Rollback | None = state.nonfinite.watch(rows, done)
    if rollback is None:
        return
    saver.finish()
    content = rollback.checkpoint(run, state.recipe.kind)
    state.restore(content)
    state.nonfinite.forget()
    log.warning("%s; weights and optimizers are back at step %d", rollback.cause, content["progress"]["step"])
