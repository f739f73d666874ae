"""A run cannot be lost: saved, cut, damaged, resumed, taken back; with the toy recipe, in seconds."""

import json
import logging
import os
import resource
import signal
import time
from dataclasses import replace

import pytest
import torch

from gputrain.config import read_file
from gputrain.engine import checkpoint, run_folder
from gputrain.engine.callbacks.reports import Reports
from gputrain.engine.schedule import Schedule
from gputrain.engine.stop import format_duration
from gputrain.errors import Stopped, UserError
from gputrain.heartbeat import Heartbeat
from gputrain.hw.plan import Setting
from gputrain.samples import Report
from tests.children import Child
from tests.tables import each_row
from tests.toy import BATCH, ToyRecipe, batches, cpu_runtime, quiet, train_toy, weights
from tests.waiting import HANG_SECONDS, wait_until


def schedule(steps: int, **others) -> Schedule:
    return Schedule(**{"batch_size": BATCH, "num_epochs": 10, "max_steps": steps, "warmup_steps": 4, **others})


def trained(folder, steps, *, starts_pretrained=True, **saving):
    recipe = ToyRecipe(schedule(steps), adversarial_from=3)
    train_toy(recipe, quiet(folder, **{"log_every_steps": 1, **saving}), starts_pretrained=starts_pretrained)
    return weights(recipe)


@pytest.mark.parametrize(
    ("starts_pretrained", "asked", "first"),
    [(False, True, True), (True, False, False), (False, None, False), (True, None, True)],
)
def test_the_evaluation_before_the_first_step_can_be_left_out(tmp_path, caplog, starts_pretrained, asked, first):
    caplog.set_level(logging.DEBUG)
    trained(tmp_path, 2, starts_pretrained=starts_pretrained, evaluate_every_steps=2, eval_first=asked)
    assert steps_logged(tmp_path, "eval/score") == ([0, 2] if first else [2])
    assert ("start, first evaluation: " in caplog.text) is first


def assert_equal(a, b):
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def sampled(folder):
    return sorted(int(path.stem.rsplit("_", 1)[1]) for path in (folder / "samples").glob("ramp_step_*.png"))


def rows_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def steps_logged(folder, key="loss/generator/l2"):
    return [row["step"] for row in rows_of(folder) if key in row]


class CompiledRecipe(ToyRecipe):
    """A toy whose generator is compiled, and which notes what the heartbeat says whenever another part begins."""

    def __init__(self, beats, *, fails=False):
        super().__init__(schedule(2))
        self.fails = fails
        self.generator.forward = torch.compile(self.generator.forward, backend="eager")
        self.beats, self.seen = beats, []

    def generated(self, batch):
        made = super().generated(batch)
        self.seen.append(self.beats[-1].text)
        if self.fails:
            raise ValueError("the second graph cannot be compiled")
        return made


@pytest.mark.slow
def test_a_training_says_what_its_first_step_waits_for(tmp_path, monkeypatch, caplog):
    """The generator is compiled twice: without a gradient and with one. One that fails before leaves what is known."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    beats = []
    monkeypatch.setattr(run_folder, "Heartbeat", lambda kind: beats.append(Heartbeat(kind)) or beats[-1])
    planned = cpu_runtime().plan
    monkeypatch.setattr("tests.toy.decide", lambda *_: replace(planned, compile=Setting(True, "for a test")))
    for name, begins, then in (
        ("a", "compiling: 0 graphs done; compiled code is kept for the next start", "compiling: 1 graphs done"),
        ("b", "compiling: 0 of 2 graphs done", "compiling: 1 of 2 graphs done, about "),
    ):
        torch._dynamo.reset()
        caplog.clear()
        recipe = CompiledRecipe(beats)
        with caplog.at_level(logging.INFO):
            train_toy(recipe, quiet(tmp_path / name))
        assert recipe.seen[0].startswith(f"step 0/2, {then}")
        assert recipe.seen[2:] == ["step 1/2"] * 2  # In the second step nothing is compiled.
        told = [text for text in caplog.messages if "compil" in text]
        assert told[0] == begins
        assert [text[:20] for text in told[1:]] == ["compiled 2 graphs in"]
    torch._dynamo.reset()
    with pytest.raises(ValueError, match="cannot be compiled"):
        train_toy(CompiledRecipe(beats, fails=True), quiet(tmp_path / "c"))
    assert [one.read_text() for one in (tmp_path / "cache").rglob("*_graphs")] == ["2"]
    assert not torch._dynamo.callback.callback_handler.end_callbacks


def test_the_best_score_in_the_log_is_that_of_the_best_checkpoint(tmp_path, caplog):
    """Also if max_steps alone caused the evaluation, which counts for nothing else."""
    trained(tmp_path, 3, evaluate_every_steps=2)
    assert json.loads((tmp_path / "history.jsonl").read_text().splitlines()[0])["last_step"] == 3
    best = torch.load(tmp_path / checkpoint.BEST)["progress"]
    assert (best["step"], checkpoint.step_of(tmp_path / checkpoint.BEST)) == (3, 3)
    with caplog.at_level(logging.INFO):
        trained(tmp_path, 4, evaluate_every_steps=2, resume_from="auto")
    (told,) = (text for text in caplog.messages if text.startswith("held-out at step 4: "))
    assert f"(before: {best['best_score']:.4g})" in told or f"(best so far: {best['best_score']:.4g})" in told


def test_resumed_run_equals_the_undisturbed_one(tmp_path):
    straight = trained(tmp_path / "a", 12)
    trained(tmp_path / "b", 5)
    resumed = trained(tmp_path / "b", 12, resume_from="auto")
    assert_equal(straight, resumed)
    assert steps_logged(tmp_path / "b") == list(range(1, 13))


def test_auto_starts_a_run_where_there_is_none(tmp_path):
    assert_equal(trained(tmp_path / "a", 3), trained(tmp_path / "b", 3, resume_from="auto"))


def test_going_back_to_an_older_checkpoint_forgets_later_lines(tmp_path):
    """4 steps are an epoch; going back to the end of epoch 1 makes steps 5 to 10 again."""
    straight = trained(tmp_path / "a", 10, checkpoint_every_epochs=1)
    again = trained(tmp_path / "a", 10, resume_from=str(tmp_path / "a" / "checkpoint_epoch_1.pt"))
    assert_equal(straight, again)
    assert steps_logged(tmp_path / "a") == list(range(1, 11))


@pytest.mark.parametrize("share", [0.0, 0.3, 0.999])
def test_truncated_checkpoint_falls_back_to_the_one_before(tmp_path, share, caplog):
    straight = trained(tmp_path / "a", 10)
    trained(tmp_path / "b", 4)
    trained(tmp_path / "b", 6, resume_from="auto")
    last = tmp_path / "b" / "checkpoint_last.pt"
    os.truncate(last, int(last.stat().st_size * share))
    assert_equal(straight, trained(tmp_path / "b", 10, resume_from="auto"))
    assert "checkpoint_last.pt: truncated or damaged; checkpoint_previous.pt is used instead" in caplog.text


def test_kill_between_the_renames_leaves_a_whole_checkpoint(tmp_path):
    straight = trained(tmp_path / "a", 10)
    trained(tmp_path / "b", 4)
    trained(tmp_path / "b", 6, resume_from="auto")
    (tmp_path / "b" / "checkpoint_last.pt").rename(tmp_path / "b" / "checkpoint_last.pt.partial")
    assert_equal(straight, trained(tmp_path / "b", 10, resume_from="auto"))


def test_a_folder_that_holds_a_run_is_not_overwritten(tmp_path):
    trained(tmp_path, 2)
    before = (tmp_path / "checkpoint_last.pt").read_bytes()
    with pytest.raises(UserError, match="already holds a run") as caught:
        trained(tmp_path, 2)
    assert "--resume-from auto" in caught.value.hint
    assert (tmp_path / "checkpoint_last.pt").read_bytes() == before


def test_finished_stage_is_left_alone_by_auto_and_followed_by_a_new_one_by_path(tmp_path):
    """A stage of 2 epochs is 8 steps; resuming from its checkpoint by name trains 3 epochs more."""
    settings = Schedule(batch_size=BATCH, num_epochs=2, warmup_steps=0)
    train_toy(ToyRecipe(settings), quiet(tmp_path, log_every_steps=1))
    train_toy(ToyRecipe(settings), quiet(tmp_path, log_every_steps=1, resume_from="auto"))
    assert steps_logged(tmp_path)[-1] == 8
    more = Schedule(batch_size=BATCH, num_epochs=3, warmup_steps=0)
    train_toy(ToyRecipe(more), quiet(tmp_path, log_every_steps=1, resume_from=str(tmp_path / "checkpoint_epoch_2.pt")))
    assert steps_logged(tmp_path) == list(range(1, 21))
    assert (tmp_path / "checkpoint_epoch_5.pt").exists()


def test_checkpoints_kept_and_pruned(tmp_path):
    trained(tmp_path, 20, checkpoint_every_epochs=1, keep_checkpoints=2, evaluate_every_epochs=2)
    assert sorted(p.name for p in tmp_path.glob("*.pt")) == [
        "checkpoint_best.pt",
        "checkpoint_epoch_4.pt",
        "checkpoint_epoch_5.pt",
        "checkpoint_last.pt",
        "checkpoint_previous.pt",
    ]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    scores = {row["step"]: row["eval/score"] for row in rows if "eval/score" in row}
    assert list(scores) == [0, 8, 16, 20]
    best = checkpoint.read(tmp_path / "checkpoint_best.pt", "toy")["progress"]
    assert best["best_score"] == max(score for step, score in scores.items() if step)
    assert scores[best["step"]] == best["best_score"]


def test_evaluations_and_checkpoints_by_step(tmp_path):
    """Of six, at every third step, the newest two stay, and those of steps 6 and 12."""
    by_step = {"evaluate_every_steps": 3, "checkpoint_every_steps": -1, "keep_checkpoints": 2}
    trained(tmp_path, 20, **by_step, permanent_start=6, permanent_interval=6)
    assert steps_logged(tmp_path, "eval/score") == [0, 3, 6, 9, 12, 15, 18, 20]
    kept = sorted(int(path.stem.rsplit("_", 1)[1]) for path in tmp_path.glob("checkpoint_step_*.pt"))
    assert kept == [6, 9, 12, 15, 18]


def test_checkpoints_by_step_without_evaluations(tmp_path):
    trained(tmp_path, 10, checkpoint_every_steps=4)
    assert sorted(path.name for path in tmp_path.glob("checkpoint_step_*.pt")) == [
        "checkpoint_step_4.pt", "checkpoint_step_8.pt",
    ]  # fmt: skip
    assert not (tmp_path / "checkpoint_best.pt").exists()
    assert not steps_logged(tmp_path, "eval/score")


def test_run_folder_holds_what_it_should(tmp_path):
    trained(tmp_path, 4, sample_every_steps=2)
    assert read_file(tmp_path / "config.yaml")["sample_every_steps"] == 2
    assert json.loads((tmp_path / "plan.json").read_text())["micro_batch"] == {"discriminators": 8, "generator": 8}
    assert sampled(tmp_path) == [0, 2, 4]
    assert list((tmp_path / "logs").iterdir())
    row = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    for name in ("epoch", "seconds", "learning_rate", "speed/items_per_second", "data/wait_share", "memory/peak_gb"):
        assert row[name] >= 0, name


def poisoned_batches(bad_steps):
    def source(first, last):
        for step, x in zip(range(first, last), batches(first, last), strict=True):
            yield x * float("nan") if step in bad_steps else x

    return source


def test_three_nonfinite_steps_in_a_row_go_back(tmp_path, caplog):
    recipe = ToyRecipe(schedule(8), adversarial_from=3)
    train_toy(recipe, quiet(tmp_path / "a", log_every_steps=2, checkpoint_every_epochs=1), poisoned_batches({5, 6, 7}))
    assert "the gradient of the discriminators was not finite in 3 steps in a row (its discriminator_0" in caplog.text
    assert "weights and optimizers are back at step 4" in caplog.text
    assert_equal(weights(recipe), trained(tmp_path / "b", 4))


def test_an_evaluation_between_hides_no_step_from_the_guard_and_the_metrics(tmp_path, caplog):
    """Steps 6 to 8 are bad, and the evaluation after step 8 comes before the line of step 10."""
    recipe = ToyRecipe(schedule(10), adversarial_from=3)
    saving = quiet(tmp_path / "a", log_every_steps=10, evaluate_every_steps=4, checkpoint_every_epochs=1)
    train_toy(recipe, saving, poisoned_batches({5, 6, 7}))
    assert "the gradient of the discriminators was not finite in 3 steps in a row" in caplog.text
    trained(tmp_path / "each", 10)
    trained(tmp_path / "ten", 10, log_every_steps=10, evaluate_every_steps=4)
    each, ten = (
        [row["loss/generator/l2"] for row in rows_of(tmp_path / name) if "loss/generator/l2" in row]
        for name in ("each", "ten")
    )
    assert ten == [pytest.approx(sum(each) / 10, rel=1e-6)]


def test_nonfinite_without_end_stops_with_the_cause(tmp_path):
    with pytest.raises(UserError, match="no checkpoint to go back to") as caught:
        train_toy(ToyRecipe(schedule(12)), quiet(tmp_path, log_every_steps=1), poisoned_batches(range(12)))
    assert "--learning-rate" in caught.value.hint


def test_full_disk_leaves_the_old_checkpoint_whole(tmp_path):
    """A real limit on the size of a file: writing past it fails as on a full disk."""
    trained(tmp_path, 4)
    whole = (tmp_path / "checkpoint_last.pt").read_bytes()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) // 2, before[1]))
    try:
        with pytest.raises(Stopped, match=r"checkpoint_last\.pt: cannot be written") as caught:
            trained(tmp_path, 8, resume_from="auto")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert "--resume-from auto" in caught.value.hint
    assert (tmp_path / "checkpoint_last.pt").read_bytes() == whole
    assert not list(tmp_path.glob("*.partial"))
    assert_equal(trained(tmp_path / "straight", 8), trained(tmp_path, 8, resume_from="auto"))


def start(folder, **saving) -> Child:
    return Child(folder, schedule(40), last_batch=30, **saving)


def wait_for_steps(folder, count):
    path = folder / "metrics.jsonl"
    wait_until(lambda: path.exists() and path.read_text().count("\n") >= count, f"{count} steps in {folder}")


def test_a_folder_that_another_process_trains_in_is_left_alone_until_that_has_ended(tmp_path, monkeypatch):
    folder = tmp_path / "shared"
    process = start(folder)
    wait_for_steps(folder, 3)
    with monkeypatch.context() as patch:
        patch.setattr(run_folder, "LEAVING_SECONDS", 0.1)
        with pytest.raises(UserError, match="another process trains in it"):
            trained(folder, 40, resume_from="auto")
    monkeypatch.setattr(run_folder, "LEAVING_SECONDS", HANG_SECONDS)
    process.send_signal(signal.SIGTERM)
    resumed = trained(folder, 40, resume_from="auto")  # waits for the other one to save
    code, talk = process.wait()
    assert code == 75
    assert "everything is saved" in talk
    assert_equal(trained(tmp_path / "straight", 40), resumed)


def test_a_folder_that_cannot_be_locked_is_trained_in_with_a_warning(tmp_path, caplog):
    (tmp_path / ".lock").mkdir()
    trained(tmp_path, 2)
    assert "a second process in it would not be detected" in caplog.text
    assert steps_logged(tmp_path) == [1, 2]


def test_kill_at_any_moment_is_survived(tmp_path):
    """SIGKILL again and again, first before anything is saved, then while every step is; the last resume finishes with
    the undisturbed weights."""
    folder = tmp_path / "cut"
    for attempt in range(3):
        process = start(folder, resume_from="auto", checkpoint_every_minutes=1e-9 if attempt else 0)
        wait_for_steps(folder, 4 + 7 * attempt)
        time.sleep(0.013 * attempt)
        process.send_signal(signal.SIGKILL)
        assert process.wait()[0] == -signal.SIGKILL
    assert_equal(trained(tmp_path / "straight", 40), trained(folder, 40, resume_from="auto"))


@each_row(([1e-9, 1e-8], 1), ([1e-9, 1e3], 0), (None, 0))
def test_a_prediction_is_corrected_after_three_steps_if_it_was_wrong(tmp_path, caplog, predicted, lines):
    caplog.set_level("INFO")
    prediction = {"predicted_seconds_range": predicted} if predicted else {}
    folder = tmp_path / str(predicted)
    train_toy(ToyRecipe(schedule(4)), quiet(folder, log_every_steps=100), prediction=prediction)
    said = [message for message in caplog.messages if "were predicted" in message]
    assert len(said) == lines
    seconds = json.loads((folder / "plan.json").read_text())["measured"]["seconds_per_step"]
    for line in said:
        took, left = f"a step takes {seconds:.3g} s", f"{format_duration(seconds)} left"
        remedy = "beside other programs, OMP_NUM_THREADS=1 may be faster"
        assert line == f"{took}; 1e-09 to 1e-08 s were predicted: {left}; {remedy}"
    caplog.clear()


def test_plan_json_has_the_measured_time_of_a_step(tmp_path):
    """Of the last line of metrics, but not of the first one, which contains what happens once."""
    for steps, line in ((2, None), (6, 2)):
        folder = tmp_path / str(steps)
        train_toy(ToyRecipe(schedule(steps)), quiet(folder, log_every_steps=2))
        measured = json.loads((folder / "plan.json").read_text())["measured"]
        taken = [row["speed/seconds_per_step"] for row in rows_of(folder) if "speed/seconds_per_step" in row]
        assert measured.get("seconds_per_step") == (line and pytest.approx(taken[line]))


class DrawingRecipe(ToyRecipe):
    """A toy whose samples draw random numbers, as those of a voice do, and whose steps draw others, as dropout does."""

    def sample(self):
        torch.rand(1000)
        return Report(pictures={"ramp": (255 * torch.rand(4, 4, 3)).to(torch.uint8)})

    def generated(self, batch):
        return super().generated(batch) * (1 + 0.1 * torch.rand((), dtype=self.dtype))


def test_a_run_samples_before_its_first_step_once_and_goes_on_as_without_it(tmp_path, monkeypatch):
    def drawn(name, steps, **saving):
        recipe = DrawingRecipe(schedule(12, max_steps=steps))
        train_toy(recipe, quiet(tmp_path / name, log_every_steps=1, sample_every_steps=0, **saving))
        return weights(recipe)

    sampling = drawn("sampling", 12)
    assert sampled(tmp_path / "sampling") == [0, 12]  # Also with samples at no interval.
    drawn("resumed", 6)
    for path in (tmp_path / "resumed" / "samples").iterdir():
        path.unlink()
    assert_equal(drawn("resumed", 12, resume_from="auto"), sampling)
    assert sampled(tmp_path / "resumed") == [12]  # A resumed run has none before its first step.
    monkeypatch.setattr(Reports, "sample", lambda reports: None)
    assert_equal(drawn("without", 12), sampling)
