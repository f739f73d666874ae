"""The reports: samples and evaluations on the leader, the best score among them, and early stopping."""

import logging
import math
from collections.abc import Callable, Collection
from dataclasses import replace

from gputrain.engine import checkpoint
from gputrain.engine.callbacks import StepEnd, StepLoop
from gputrain.engine.recipe import phases_of
from gputrain.engine.schedule import Saving, StepSchedule, is_due_every
from gputrain.formatting import format_number
from gputrain.hw.runtime import is_out_of_memory, random_state, release_memory, set_random_state, shapes_may_change
from gputrain.samples import Report

log = logging.getLogger(__name__)

SHOWN_FIGURES = 4  # Held-out figures that are logged; all are in metrics.jsonl.
DOING = {"samples": "sampling", "eval": "evaluating"}  # What the progress bar shows meanwhile.
SKIPPED = {"samples": "the samples", "eval": "the held-out figures"}  # What is skipped if memory or time runs out.


def reports_due(steps: StepSchedule, saving: Saving, step: int) -> list[str]:
    """Returns the reports that are due after this many steps, unless they are the last ones."""
    epoch = steps.epochs_done(step)
    samples = is_due_every(step, saving.sample_every_steps) and epoch >= saving.samples_after_epochs
    ends_epochs = steps.ends_epoch(step) and is_due_every(epoch, saving.evaluate_every_epochs)
    evaluates = saving.evaluation_is_due(step, ends_epochs=ends_epochs)
    return ["samples"] * samples + ["eval"] * evaluates


def last_reports(saving: Saving) -> list[str]:
    """Returns the reports at the end of a run."""
    return ["samples"] + ["eval"] * saving.evaluates


class Reports:
    """Samples and evaluates. The leader does it, and the other ranks wait at the end of the step."""

    def __init__(self, loop: StepLoop) -> None:
        self.loop = loop

    def due(self, end: StepEnd) -> bool:
        return bool(end.reports)

    def run(self, end: StepEnd) -> None:
        if "samples" in end.reports:
            self.sample()
        if "eval" in end.reports:
            self.evaluate_step(end)
            self.loop.set_evaluation_due(False)

    def sample(self) -> None:
        """Write samples of the last completed step, or of the weights before the first one."""
        self._report("samples", self.loop.state.recipe.sample)

    def evaluate_start(self) -> None:
        """Evaluate before the first step, so that the curves start there. This counts for nothing."""
        if report := self._report("eval", self.loop.state.recipe.evaluate):
            log_evaluation(0, report.scalars, self.loop.state.progress.best_score, report.headline)

    def prepare_for_evaluation(self) -> None:
        """Remove what an earlier process has written of the evaluation of this step, and give the optimizers the
        learning rate that the step had, as the checkpoint that is saved afterwards holds it."""
        loop, step = self.loop, self.loop.state.progress.step
        loop.metrics.forget_report(step, "eval")
        for phase in phases_of(loop.state.recipe):
            for group in phase.optimizer.param_groups if phase.optimizer.state else ():  # The others have not stepped.
                group["lr"] = loop.steps.learning_rate(step - 1) * phase.lr_scale

    def evaluate_step(self, end: StepEnd) -> None:
        """Evaluate the last completed step, and note in `end` whether it is the best so far, and whether early stopping
        ends the training, as all ranks must know."""
        run, state = self.loop.run, self.loop.state
        # An evaluation that only max_steps causes is not one of the undisturbed run, and counts for nothing.
        counts = "eval" in reports_due(self.loop.steps, run.saving, end.step) or state.progress.finished
        end.best_score = self._evaluate(counts=counts)
        end.is_best, end.ends_early = run.group.any_rank(
            end.best_score is not None, run.saving.ends_early(state.progress)
        )
        if end.ends_early:
            log.info(
                "the last %d evaluations were not better: training ends early after step %d, and %s has the best score",
                run.saving.early_stopping_patience,
                end.step,
                checkpoint.BEST,
            )

    def _evaluate(self, *, counts: bool) -> float | None:
        """Evaluate, and count it for early stopping if it `counts`. Returns the score if it is the best so far and the
        run has reached `best_after`; otherwise None."""
        report = self._report("eval", self.loop.state.recipe.evaluate)
        if report is None:
            return None
        self.loop.saver.finish()  # The best score is that of a checkpoint that has been written.
        progress, score = self.loop.state.progress, report.scalars["score"]
        if counts:
            self.loop.state.progress = replace(
                progress,
                best_evaluation=max(score, progress.best_evaluation),
                evaluations_since_best=0 if score > progress.best_evaluation else progress.evaluations_since_best + 1,
            )
        log_evaluation(progress.step, report.scalars, progress.best_score, report.headline)
        if progress.step < self.loop.run.saving.best_after:
            return None
        return score if score > progress.best_score else None

    def _report(self, kind: str, make: Callable[[], Report]) -> Report | None:
        """Make a report and log it; the random state is kept. Returns None if memory ran out, and on other ranks."""
        loop, state = self.loop, self.loop.state
        if not loop.run.group.leads:
            return None
        done, device = state.progress.step, state.runtime.device
        # Training goes on with the random numbers that it would have had without the report.
        random = random_state(device)

        def make_and_log() -> Report | None:
            try:
                loop.metrics.report(done, loop.steps.epochs_done(done), kind, report := make())
                return report
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
            release_memory()  # This is outside the except block, whose traceback keeps tensors alive.
            return None

        with loop.paused(DOING[kind], kind), shapes_may_change():
            report = make_and_log()
            if report is None and state.free_memory():
                report = make_and_log()
            if report is None:
                log.warning("out of memory: %s of step %d are skipped", SKIPPED[kind], done)
        set_random_state(random, device)
        return report


def log_evaluation(step: int, scalars: dict[str, float], best_before: float, shares: Collection[str] = ()) -> None:
    """Log the held-out figures, and the best score so far. Figures of these names are shares of 1."""
    figures = [(name, value) for name, value in scalars.items() if not name.endswith(("score", "_low", "_high"))]
    percent = {name for name, _ in figures if name in shares or name.endswith("_share")}
    text = ", ".join(
        f"{name} {format_number(100 * value)} %" if name in percent else f"{name} {format_number(value, 4)}"
        for name, value in figures[:SHOWN_FIGURES]
    )
    score = scalars["score"]
    if best_before == -math.inf:
        comparison = ""
    elif score > best_before:
        comparison = f", the best so far (before: {best_before:.4g})"
    else:
        comparison = f" (best so far: {best_before:.4g})"
    better = {"is_better": -math.inf < best_before < score}  # For a handler that sends messages.
    log.info("held-out at step %d: %s; score %.4g%s", step, text, score, comparison, extra=better)
