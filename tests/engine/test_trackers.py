"""Trackers: what a training tells them, and that one that fails or is missing costs no training.

The stand-ins have the functions of wandb and mlflow that are used, and note their calls.
"""

import shutil
import sys
from types import SimpleNamespace

import pytest

from gputrain.engine.schedule import Schedule
from gputrain.engine.trackers import Trackers
from gputrain.errors import UserError
from tests.toy import BATCH, ToyRecipe, quiet, train_toy


class Noted:
    """Notes every call of a function of any name below it."""

    def __init__(self, calls, name="", answers=None):
        self.calls, self.name, self.answers = calls, name, answers or {}

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Noted(self.calls, f"{self.name}.{name}".strip("."), self.answers)

    def __call__(self, *words, **options):
        self.calls.append((self.name, words, options))
        answer = self.answers.get(self.name)
        return answer() if callable(answer) else self


def install(monkeypatch, package, answers):
    """Puts a stand-in for a package into sys.modules, and returns the list of its calls."""
    calls = []
    monkeypatch.setitem(sys.modules, package, Noted(calls, answers=answers))
    return calls


def trained(folder, steps=4, **saving):
    recipe = ToyRecipe(Schedule(batch_size=BATCH, num_epochs=10, max_steps=steps, warmup_steps=0))
    train_toy(recipe, quiet(folder, log_every_steps=2, sample_every_steps=2, evaluate_every_steps=2, **saving))


def step_back(folder):
    """Leaves a run folder as a run that is killed does: with metrics of steps after its last checkpoint."""
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "loss/generator/l2": 0.5}\n')


def test_wandb_gets_scalars_pictures_and_the_end(tmp_path, monkeypatch, caplog):
    run = Noted([], "run")
    calls = install(monkeypatch, "wandb", {"init": lambda: run})
    run.calls, run.id = calls, "abc"
    trained(tmp_path / "run", track=("wandb",))
    ((_, _, options),) = [call for call in calls if call[0] == "init"]
    assert (options["name"], options["id"], options["resume"]) == ("run", None, "allow")
    assert options["config"]["batch_size"] == BATCH
    logged = [(set(words[0]), further["step"]) for name, words, further in calls if name == "run.log"]
    assert [step for names, step in logged if "loss/generator/l2" in names] == [2, 4]
    assert [step for names, step in logged if "eval/score" in names] == [0, 2, 4]
    assert [step for names, step in logged if names == {"samples/ramp"}] == [2, 4]
    assert calls[-1][0] == "run.finish"
    trained(tmp_path / "run", 6, track=("wandb",), resume_from="auto")
    assert [call for call in calls if call[0] == "init"][-1][2]["id"] == "abc"
    shutil.copytree(tmp_path / "run", tmp_path / "copy")  # As cp -r does for a variant: its steps are others.
    trained(tmp_path / "copy", 8, track=("wandb",), resume_from="auto")
    assert [call for call in calls if call[0] == "init"][-1][2]["id"] is None
    step_back(tmp_path / "run")
    trained(tmp_path / "run", 8, track=("wandb",), resume_from="auto")
    again = [call for call in calls if call[0] == "init"][-1][2]
    assert (again["id"], again["name"], again["group"]) == (None, "run from step 6", "run")
    assert "wandb cannot take back its steps after 6: they go to a new run, run from step 6" in caplog.text


def test_mlflow_gets_scalars_pictures_and_the_end(tmp_path, monkeypatch):
    started = lambda: SimpleNamespace(info=SimpleNamespace(run_id="xyz"))  # noqa: E731
    calls = install(monkeypatch, "mlflow", {"start_run": started})
    trained(tmp_path / "run", track=("mlflow",))
    assert calls[0] == ("start_run", (), {"run_id": None, "run_name": "run", "tags": None})
    steps = [further["step"] for name, words, further in calls if name == "log_metrics" and "eval/score" in words[0]]
    assert steps == [0, 2, 4]
    pictures = [further["artifact_file"] for name, _, further in calls if name == "log_image"]
    assert pictures == ["samples/ramp_step_00000002.png", "samples/ramp_step_00000004.png"]
    assert calls[-1][0] == "end_run"
    trained(tmp_path / "run", 6, track=("mlflow",), resume_from="auto")
    step_back(tmp_path / "run")
    trained(tmp_path / "run", 8, track=("mlflow",), resume_from="auto")
    assert [call[2] for call in calls if call[0] == "start_run"][1:] == [
        {"run_id": "xyz", "run_name": None, "tags": None},
        {"run_id": None, "run_name": "run from step 6", "tags": {"mlflow.parentRunId": "xyz"}},
    ]  # fmt: skip


def test_trackers_get_no_passwords(tmp_path, monkeypatch):
    calls = install(monkeypatch, "mlflow", {"start_run": lambda: SimpleNamespace(info=SimpleNamespace(run_id="xyz"))})
    settings = {"init_from": "https://ann:secret@a.b/c.pt?token=secret", "batch_size": 4}
    Trackers(("mlflow",), tmp_path, settings, 0, repeats_steps=False)
    assert calls[-1][1] == ({"init_from": "https://a.b/c.pt", "batch_size": "4"},)


@pytest.mark.parametrize("fails", ["init", "run.log"])
def test_a_tracker_that_fails_costs_one_warning(fails, tmp_path, monkeypatch, caplog):
    def fail():
        raise ConnectionError("no route to host")

    answers = {fails: fail}
    if fails != "init":
        answers["init"] = lambda: SimpleNamespace(id="a", log=lambda *words, **options: fail(), finish=fail)
    install(monkeypatch, "wandb", answers)
    trained(tmp_path, track=("wandb",))
    assert caplog.text.count("wandb fails (no route to host)") == 1
    assert (tmp_path / "checkpoint_last.pt").exists()


def test_a_tracker_that_is_not_installed_is_refused_before_the_first_step(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="the package wandb is not installed") as raised:
        trained(tmp_path, track=("wandb",))
    assert 'pip install "gputrain[wandb]"' in raised.value.hint
