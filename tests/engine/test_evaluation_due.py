"""A run that is killed between saving a step and evaluating it makes up for the evaluation when it is resumed."""

import multiprocessing
import os
import signal
from pathlib import Path

import pytest
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter  # noqa: F401

from gputrain.engine import checkpoint
from gputrain.engine.checkpoint import BEST, LAST, PREVIOUS
from gputrain.engine.metrics import Metrics
from gputrain.errors import Stopped
from gputrain.samples import Report
from tests.comparison import differing
from tests.engine.test_run import assert_equal, rows_of, schedule
from tests.tables import slow
from tests.toy import ToyRecipe, quiet, train_toy, weights
from tests.waiting import HANG_SECONDS

STEPS = 8
SAVING = {
    "log_every_steps": 1,
    "evaluate_every_steps": 2,
    "checkpoint_every_epochs": 1,
    "checkpoint_every_steps": 2,
    "keep_checkpoints": 0,
}
PARTS = ("modules", "optimizers", "random", "progress")


def train(folder: Path, sign: int, *, resume_from: str = "", stop_in: int = -1, kill: str = "") -> ToyRecipe:
    """Trains with a score that falls or rises with the steps. SIGTERM arrives in step `stop_in`; `kill` is the moment
    after the beginning of the last evaluation at which the process is killed."""
    recipe = ToyRecipe(schedule(STEPS), adversarial_from=3)
    last = (stop_in if stop_in >= 0 else STEPS) // 2  # Number of evaluations, without the first one.
    count, write_report = 0, Metrics.report

    def evaluate() -> Report:
        nonlocal count
        count += 1
        if kill == "in the evaluation" and count == last + 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return Report({"score": sign * float(sum(p.detach().square().sum() for p in recipe.generator.parameters()))})

    def report(self: Metrics, *of: object) -> None:
        write_report(self, *of)
        if kill == "after its line" and count == last + 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def prepare(loaded: Tensor, step: int) -> object:
        if step + 1 == stop_in:
            signal.raise_signal(signal.SIGTERM)
        return ToyRecipe.prepare(recipe, loaded, step)

    recipe.evaluate, recipe.prepare, Metrics.report = evaluate, prepare, report
    try:
        train_toy(recipe, quiet(folder, resume_from=resume_from, **SAVING))
    finally:
        Metrics.report = write_report
    return recipe


def trained_until_killed(folder: Path, sign: int, stop_in: int, kill: str) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    options = {"stop_in": stop_in, "kill": kill}
    process = context.Process(target=train, args=(folder, sign), kwargs=options)
    process.start()
    process.join(HANG_SECONDS)
    assert process.exitcode == -signal.SIGKILL


def evaluations(folder: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["eval/score"]) for row in rows_of(folder) if "eval/score" in row]


def assert_same_run(one: Path, other: Path) -> None:
    """Compares everything that a run leaves, but for the time and the checkpoint before the last one."""
    names, others = ({path.name for path in folder.glob("checkpoint_*.pt")} for folder in (one, other))
    assert names == others
    for name in names - {PREVIOUS}:
        mine, theirs = (checkpoint.read(folder / name, "toy") for folder in (one, other))
        assert [place for part in PARTS for place in differing(mine[part], theirs[part], part)] == [], name
    assert evaluations(one) == evaluations(other)


@pytest.mark.parametrize("kill", [slow("in the evaluation"), "after its line"])
@pytest.mark.parametrize("sign", [1, slow(-1)])
def test_the_evaluation_of_the_last_step_is_made_up_for(tmp_path, sign, kill):
    """The score of one of the signs is the best at the last step."""
    straight = train(tmp_path / "a", sign)
    trained_until_killed(tmp_path / "b", sign, -1, kill)
    assert len(evaluations(tmp_path / "b")) == STEPS // 2 + (kill != "in the evaluation")
    assert checkpoint.read(tmp_path / "b" / LAST, "toy")["progress"]["evaluation_due"]
    assert_equal(weights(straight), weights(train(tmp_path / "b", sign, resume_from="auto")))
    assert_same_run(tmp_path / "b", tmp_path / "a")
    written = (tmp_path / "b" / LAST).stat().st_mtime_ns
    train(tmp_path / "b", sign, resume_from="auto")  # Nothing is left to do.
    assert (tmp_path / "b" / LAST).stat().st_mtime_ns == written
    assert_same_run(tmp_path / "b", tmp_path / "a")


@pytest.mark.parametrize("kill", [slow(""), "in the evaluation"])
def test_the_evaluation_of_a_stopped_step_is_made_up_for(tmp_path, kill):
    """The step is one whose checkpoint is kept, and an undisturbed run evaluates it before it saves it."""
    for sign in (1, -1):
        folder, straight = tmp_path / f"b{sign}", tmp_path / f"a{sign}"
        train(straight, sign)
        if kill:
            trained_until_killed(folder, sign, 4, kill)
        else:
            with pytest.raises(Stopped, match="after step 4"):
                train(folder, sign, stop_in=4)
        assert checkpoint.read(folder / LAST, "toy")["progress"]["step"] == 4
        train(folder, sign, resume_from="auto")
        assert best_score(folder) == best_score(straight)
        assert_same_run(folder, straight)


def best_score(folder: Path) -> float:
    best = checkpoint.read(folder / BEST, "toy")["progress"]
    found = dict(evaluations(folder))
    assert best["best_score"] == found[best["step"]] == max(found[step] for step in found if step)
    return best["best_score"]
