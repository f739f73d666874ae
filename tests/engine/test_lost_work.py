"""What a run folder must not lose: names, scores and configurations when a run is killed, rejected, or goes wrong."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gputrain.config import read_file
from gputrain.engine import checkpoint
from gputrain.engine.callbacks.metrics_log import go_back_if_unstable
from gputrain.engine.checkpoint import BEST, LAST, PREVIOUS
from gputrain.engine.nonfinite import GOOD_AFTER, ROLLBACK_LIMIT, STEADY_STEPS
from gputrain.engine.run_folder import Run
from gputrain.engine.saving import Saver
from gputrain.engine.schedule import RunProgress
from gputrain.engine.state import TrainState
from gputrain.errors import Stopped, UserError
from gputrain.files import write_text
from tests.engine.test_run import assert_equal, poisoned_batches, schedule, steps_logged, trained
from tests.toy import ToyRecipe, cpu_runtime, quiet, train_toy, weights, whole_checkpoint


def test_a_run_that_ended_before_its_first_checkpoint_is_begun_anew_by_auto(tmp_path, caplog):
    """What a kill leaves then: lines, events, and half a file."""
    evaluated = {"evaluate_every_steps": 2}
    straight = trained(tmp_path / "a", 5, **evaluated)
    trained(tmp_path / "b", 3, **evaluated)
    for path in (tmp_path / "b").glob("*.pt"):
        path.unlink()
    (tmp_path / "b" / (LAST + ".partial")).write_bytes(b"PK")
    with pytest.raises(UserError, match="already holds a run") as caught:
        trained(tmp_path / "b", 5, **evaluated)
    assert "--resume-from auto" in caught.value.hint
    caplog.set_level("INFO")
    assert_equal(straight, trained(tmp_path / "b", 5, resume_from="auto", **evaluated))
    assert "ended before its first checkpoint: starting from scratch" in caplog.text
    assert steps_logged(tmp_path / "b") == list(range(1, 6))
    assert steps_logged(tmp_path / "b", "eval/score") == [0, 2, 4, 5]
    board = EventAccumulator(str(tmp_path / "b" / "logs")).Reload()
    assert [event.step for event in board.Scalars("loss/generator/l2")] == list(range(1, 6))


def test_a_run_that_ended_before_its_first_checkpoint_begins_again_at_the_one_that_its_command_names(tmp_path):
    trained(tmp_path / "first", 3)
    begin = {"resume_from": str(tmp_path / "first"), "log_every_steps": 1}
    straight = trained(tmp_path / "a", 6, **begin)
    trained(tmp_path / "b", 5, **begin)
    for path in (tmp_path / "b").glob("*.pt"):
        path.unlink()
    assert_equal(straight, trained(tmp_path / "b", 6, **begin))
    assert steps_logged(tmp_path / "b") == steps_logged(tmp_path / "a") == [4, 5, 6]
    with pytest.raises(UserError, match="already holds a run"):
        trained(tmp_path / "b", 7, **begin)


@pytest.mark.parametrize("rejected", ["other architecture", "does not fit"])
def test_a_rejected_resume_leaves_the_configuration_with_which_the_run_goes_on(tmp_path, rejected):
    straight = trained(tmp_path / "a", 10)
    trained(tmp_path / "b", 5)
    recipe = ToyRecipe(schedule(77), adversarial_from=3)
    if rejected == "other architecture":
        recipe.modules["g"] = torch.nn.Linear(3, 3)
    else:
        recipe.fail[("generator", 5)] = 0
    with pytest.raises(UserError, match="differs in 6 tensors" if "arch" in rejected else "out of memory"):
        train_toy(recipe, quiet(tmp_path / "b", log_every_steps=1, resume_from="auto"))
    assert read_file(tmp_path / "b" / "config.yaml")["log_every_steps"] == 1
    assert_equal(straight, trained(tmp_path / "b", 10, resume_from="auto", log_every_steps=2))
    assert read_file(tmp_path / "b" / "config.yaml")["log_every_steps"] == 2


def test_a_damaged_checkpoint_never_replaces_the_intact_one_before_it(tmp_path):
    """The first save overwrites it, so that then two intact checkpoints are there again."""
    straight = trained(tmp_path / "a", 10, checkpoint_every_steps=2)
    trained(tmp_path / "b", 5, checkpoint_every_steps=2)
    last, previous = tmp_path / "b" / LAST, tmp_path / "b" / PREVIOUS
    intact, damaged = previous.read_bytes(), bytearray(last.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    last.write_bytes(damaged)
    trained(tmp_path / "b", 5, resume_from="auto")
    assert previous.read_bytes() == intact
    assert checkpoint.read(last, "toy")["progress"]["step"] == 5
    assert_equal(straight, trained(tmp_path / "b", 10, resume_from="auto", checkpoint_every_steps=2))


def test_names_that_a_killed_run_did_not_come_to_give_are_given_on_resuming(tmp_path):
    trained(tmp_path, 4, checkpoint_every_epochs=1, evaluate_every_steps=4)
    # The last step is saved before its evaluation and after it.
    for saved, names in ((PREVIOUS, ["checkpoint_epoch_1.pt"]), (LAST, ["checkpoint_epoch_1.pt", BEST])):
        assert checkpoint.read(tmp_path / saved, "toy")["names"] == names
    (tmp_path / BEST).unlink()
    (tmp_path / BEST).write_bytes(b"the best before")
    trained(tmp_path, 4, checkpoint_every_epochs=1, resume_from="auto")
    assert os.path.samefile(tmp_path / BEST, tmp_path / LAST)
    (tmp_path / LAST).unlink()
    (tmp_path / "checkpoint_epoch_1.pt").unlink()
    trained(tmp_path, 4, checkpoint_every_epochs=1, resume_from="auto")
    assert os.path.samefile(tmp_path / "checkpoint_epoch_1.pt", tmp_path / PREVIOUS)


def test_an_older_checkpoint_takes_no_name_from_what_came_after_it(tmp_path):
    checkpoint.save(tmp_path, whole_checkpoint())
    checkpoint.keep(tmp_path, "checkpoint_epoch_1.pt")
    (tmp_path / BEST).write_bytes(b"a better one")
    checkpoint.restore_names(
        tmp_path / "checkpoint_epoch_1.pt", ["checkpoint_epoch_1.pt", "checkpoint_step_4.pt", BEST]
    )
    assert (tmp_path / BEST).read_bytes() == b"a better one"
    assert os.path.samefile(tmp_path / "checkpoint_step_4.pt", tmp_path / "checkpoint_epoch_1.pt")


@pytest.mark.parametrize("in_the_way", [LAST + ".partial", BEST])
def test_the_best_score_is_raised_only_with_a_checkpoint_of_it(tmp_path, in_the_way, caplog):
    """A folder stands where a file is to be written, which the disk refuses; training goes on, and tries again."""
    state, run = begun(tmp_path)
    (tmp_path / in_the_way / "x").mkdir(parents=True)
    saver = Saver(state, run)
    state.progress = before = RunProgress(step=3, best_score=1.0)
    saver.save(waits=True, best_score=2.0)
    assert state.progress == before
    assert "Is a directory" in caplog.text
    (tmp_path / in_the_way / "x").rmdir()
    (tmp_path / in_the_way).rmdir()
    saver.save(waits=True, best_score=2.0)
    assert state.progress == RunProgress(step=3, best_score=2.0)
    assert checkpoint.read(tmp_path / BEST, "toy")["progress"]["best_score"] == 2.0


def begun(folder, **saving) -> tuple[TrainState, Run]:
    run = Run(folder, quiet(folder, **saving), {}, "")
    recipe = ToyRecipe(schedule(100))
    return TrainState.begin(recipe, recipe.schedule, cpu_runtime(), run), run


def test_an_old_checkpoint_that_cannot_be_deleted_costs_a_warning(tmp_path, caplog):
    (tmp_path / "checkpoint_epoch_1.pt").mkdir()
    os.utime(tmp_path / "checkpoint_epoch_1.pt", (1, 1))
    trained(tmp_path, 8, checkpoint_every_epochs=1, keep_checkpoints=1, resume_from=str(seed(tmp_path)))
    assert "an old checkpoint cannot be deleted" in caplog.text
    assert (tmp_path / "checkpoint_epoch_2.pt").is_file()


def seed(folder):
    """A run of 4 steps in the folder, which another one goes on from."""
    trained(folder / "seed", 4)
    os.replace(folder / "seed" / LAST, folder / LAST)
    return folder / LAST


def test_after_going_back_the_new_checkpoints_stay_and_the_abandoned_ones_go(tmp_path):
    trained(tmp_path, 20, checkpoint_every_epochs=1, keep_checkpoints=5)
    for epoch in range(1, 6):
        os.utime(tmp_path / f"checkpoint_epoch_{epoch}.pt", (epoch, epoch))
    trained(
        tmp_path, 12, checkpoint_every_epochs=1, keep_checkpoints=2, resume_from=str(tmp_path / "checkpoint_epoch_1.pt")
    )  # fmt: skip
    left = sorted(path.name for path in tmp_path.glob("checkpoint_epoch_*.pt"))
    assert left == ["checkpoint_epoch_2.pt", "checkpoint_epoch_3.pt"]
    assert checkpoint.read(tmp_path / left[0], "toy")["progress"]["step"] == 8


def test_half_files_are_deleted_when_the_folder_is_opened(tmp_path):
    trained(tmp_path, 2)
    names = [
        LAST + ".partial",
        "checkpoint_best.partial",
        "plan.json.partial",
        "config.yaml.partial",
        "metrics.partial",
    ]
    for name in names:
        (tmp_path / name).touch()
    (tmp_path / "mine.partial").touch()
    trained(tmp_path, 2, resume_from="auto")
    assert [path.name for path in tmp_path.glob("*.partial")] == ["mine.partial"]


def test_while_gradients_are_not_finite_nothing_is_saved_and_going_back_finds_a_good_checkpoint(tmp_path, caplog):
    """Every step is saved; steps 13 to 15 are bad, which is read at step 20. Ten finite steps followed step 2."""
    recipe = ToyRecipe(schedule(20), adversarial_from=3)
    saving = quiet(tmp_path / "a", log_every_steps=10, checkpoint_every_steps=1, keep_checkpoints=0)
    train_toy(recipe, saving, poisoned_batches({12, 13, 14}))
    saved = {int(path.stem.rsplit("_", 1)[1]) for path in (tmp_path / "a").glob("checkpoint_step_*.pt")}
    assert saved == set(range(1, 21)) - {13, 14, 15}
    assert f"weights and optimizers are back at step {12 - GOOD_AFTER}" in caplog.text
    assert "checkpoint_step_13.pt is not written" in caplog.text
    assert_equal(weights(recipe), trained(tmp_path / "b", 2))


def test_a_run_that_ends_while_gradients_are_not_finite_is_saved_and_its_count_goes_on(tmp_path, caplog):
    train_toy(
        ToyRecipe(schedule(16)),
        quiet(tmp_path, log_every_steps=1, checkpoint_every_steps=1),
        poisoned_batches({14, 15}),
    )
    assert checkpoint.read(tmp_path / LAST, "toy")["progress"]["step"] == 16
    again = quiet(tmp_path, log_every_steps=1, checkpoint_every_steps=1, keep_checkpoints=0, resume_from="auto")
    train_toy(ToyRecipe(schedule(17)), again, poisoned_batches({16}))
    assert "was not finite in 3 steps in a row" in caplog.text
    assert "are back at step" in caplog.text


def test_many_good_steps_make_up_for_rollbacks(tmp_path):
    state, run = begun(tmp_path)
    state.nonfinite.rollbacks = ROLLBACK_LIMIT
    good, bad = (
        {"nonfinite/discriminators": 0.0, "nonfinite/generator": 0.0},
        {"nonfinite/discriminators": 0.0, "nonfinite/generator": 1.0},
    )
    saver = Saver(state, run)
    go_back_if_unstable(saver, [good] * (STEADY_STEPS - 1), STEADY_STEPS - 1)
    go_back_if_unstable(saver, [bad, good], STEADY_STEPS + 1)
    assert state.nonfinite.rollbacks == ROLLBACK_LIMIT
    go_back_if_unstable(saver, [good] * (STEADY_STEPS - 1), 2 * STEADY_STEPS)
    assert state.nonfinite.rollbacks == 0
    state.nonfinite.rollbacks = ROLLBACK_LIMIT
    with pytest.raises(UserError, match="going back did not help"):
        go_back_if_unstable(saver, [bad] * 3, 2 * STEADY_STEPS + 3)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_second_signal_waits_for_the_save_and_interrupts_then(tmp_path, number):
    (tmp_path / "config.yaml").touch()
    run = Run(tmp_path, quiet(tmp_path), {}, "gputrain train-toy")
    reached = []

    def save() -> None:
        with run.stop.handled(lambda: run.how_to_resume):
            with run.stop.second_signal_delayed():
                signal.raise_signal(number)
                signal.raise_signal(number)
                reached.append("the end of the save")
            reached.append("what comes after it")

    with pytest.raises(Stopped, match="stopped at once") as caught:
        save()
    assert reached == ["the end of the save"]
    assert "--resume-from auto" in caught.value.hint


def test_a_second_signal_between_saves_interrupts_at_once(tmp_path):
    run = Run(tmp_path, quiet(tmp_path), {}, "gputrain train-toy")
    reached = []

    def make_steps() -> None:
        with run.stop.handled(lambda: run.how_to_resume):
            signal.raise_signal(signal.SIGTERM)
            reached.append("between two steps")
            signal.raise_signal(signal.SIGTERM)
            reached.append("the second one was not heard")

    with pytest.raises(Stopped, match="stopped at once") as caught:
        make_steps()
    assert reached == ["between two steps"]
    assert caught.value.hint == "run the same command again, with --resume-from auto"


def test_a_signal_after_a_request_by_the_clock_or_a_page_is_the_first_one(tmp_path):
    run = Run(tmp_path, quiet(tmp_path), {}, "gputrain train-toy")
    reached = []

    def make_steps() -> None:
        with run.stop.handled(lambda: run.how_to_resume):
            run.stop.request("stopped in time for --max-time 3h56m")
            signal.raise_signal(signal.SIGUSR1)
            reached.append("the end of the step")
            signal.raise_signal(signal.SIGUSR1)

    with pytest.raises(Stopped, match=r"^stopped in time for --max-time 3h56m, twice: stopped at once"):
        make_steps()
    assert reached == ["the end of the step"]


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="Linux has folders that cannot be synced")
def test_a_file_system_that_cannot_sync_folders_costs_one_warning(caplog):
    for _ in range(3):
        checkpoint._sync_folder(Path("/proc/self"))
    assert caplog.text.count("a power failure may cost") == 1


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="Linux tells the name of an open file")
def test_what_is_written_whole_is_on_the_disk_before_it_is_renamed(tmp_path, monkeypatch):
    synced, sync = [], os.fsync

    def spy(handle: int) -> None:
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{handle}")))
        assert not (tmp_path / "plan.json").exists()
        sync(handle)

    monkeypatch.setattr(os, "fsync", spy)
    write_text(tmp_path / "plan.json", json.dumps({"a": 1}))
    assert synced == ["plan.json.partial"]
    assert json.loads((tmp_path / "plan.json").read_text()) == {"a": 1}
