"""Trackers: Weights & Biases and MLflow get the numbers and the pictures of a run, too.

They are extras (gputrain[wandb], gputrain[mlflow]), imported only if they are asked for. Their own environment
variables say where they write to (WANDB_MODE=offline, WANDB_PROJECT, MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME). A
tracker that fails is dropped with a warning, since a training must not end because a server does not answer.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from PIL import Image

from gputrain.engine.run_folder import write_text
from gputrain.engine.schedule import TrackerName
from gputrain.errors import UserError, import_package, settings_without_secrets

log = logging.getLogger(__name__)


class Tracker(Protocol):
    def log_scalars(self, values: Mapping[str, float], step: int) -> None: ...

    def log_picture(self, name: str, image: Image.Image, step: int) -> None: ...

    def close(self) -> None: ...


def _names_of(folder: Path, tracker: TrackerName, first_step: int, repeats_steps: bool) -> tuple[str, str, str]:
    """Returns the name of the new run that a tracker gets for a run folder, the identity of the run that goes on there
    instead, and that of the one before. Trackers take no steps back, so that steps which are made again go to a new run
    beside that of before."""
    known = folder / f"{tracker}_id.txt"
    before, _, place = known.read_text(encoding="utf-8").strip().partition("\n") if known.exists() else ("", "", "")
    if not first_step or _is_copy(folder, Path(place) / known.name):
        before = ""
    if not (before and repeats_steps):
        return folder.name, before, ""
    name = f"{folder.name} from step {first_step}"
    log.warning("%s cannot take back its steps after %d: they go to a new run, %s", tracker, first_step, name)
    return name, "", before


def _is_copy(folder: Path, original: Path) -> bool:
    """Returns True in a copied run folder whose original is still there: both would go on in one run of the tracker."""
    own = folder / original.name
    return original.is_file() and not original.samefile(own) and original.read_bytes() == own.read_bytes()


class WandbTracker:
    """Logs to Weights & Biases, under the name of the run folder, whose runs are a group."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], first_step: int, *, repeats_steps: bool) -> None:
        self.wandb = import_package("wandb")
        name, going_on, _ = _names_of(folder, "wandb", first_step, repeats_steps)
        self.run = self.wandb.init(
            name=name, group=folder.name, dir=str(folder), config=dict(settings), id=going_on or None, resume="allow"
        )
        write_text(folder / "wandb_id.txt", f"{self.run.id}\n{folder.resolve()}\n")

    def log_scalars(self, values: Mapping[str, float], step: int) -> None:
        self.run.log(dict(values), step=step)

    def log_picture(self, name: str, image: Image.Image, step: int) -> None:
        self.run.log({name: self.wandb.Image(image)}, step=step)

    def close(self) -> None:
        self.run.finish()


class MlflowTracker:
    """Logs to MLflow, under the name of the run folder; a run that repeats steps is a child of the one before."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], first_step: int, *, repeats_steps: bool) -> None:
        self.mlflow = import_package("mlflow")
        name, going_on, before = _names_of(folder, "mlflow", first_step, repeats_steps)
        tags = {"mlflow.parentRunId": before} if before else None
        run = self.mlflow.start_run(run_id=going_on or None, run_name=None if going_on else name, tags=tags)
        write_text(folder / "mlflow_id.txt", f"{run.info.run_id}\n{folder.resolve()}\n")
        if not going_on:
            self.mlflow.log_params({name: str(value)[:500] for name, value in settings.items()})

    def log_scalars(self, values: Mapping[str, float], step: int) -> None:
        self.mlflow.log_metrics(dict(values), step=step)

    def log_picture(self, name: str, image: Image.Image, step: int) -> None:
        self.mlflow.log_image(image, artifact_file=f"{name}_step_{step:08d}.png")

    def close(self) -> None:
        self.mlflow.end_run()


TRACKERS: Mapping[TrackerName, Callable[..., Tracker]] = {
    "wandb": WandbTracker, "mlflow": MlflowTracker,
}  # fmt: skip


class Trackers:
    """All trackers of a run. One that fails is dropped with a warning."""

    def __init__(
        self, names: Sequence[TrackerName], folder: Path, settings: Mapping[str, Any], first_step: int, *,
        repeats_steps: bool,
    ) -> None:  # fmt: skip
        """Open the trackers; `repeats_steps` says that they have later steps. Raises UserError if one is not
        installed."""
        self.open: dict[str, Tracker] = {}
        settings = settings_without_secrets(settings)
        for name in names:
            try:
                self.open[name] = TRACKERS[name](folder, settings, first_step, repeats_steps=repeats_steps)
            except UserError:
                raise
            except Exception as error:  # Every tracker has errors of its own.
                self._drop(name, error)

    def log_scalars(self, values: Mapping[str, float], step: int) -> None:
        self._each(lambda tracker: tracker.log_scalars(values, step))

    def log_picture(self, name: str, image: Image.Image, step: int) -> None:
        self._each(lambda tracker: tracker.log_picture(name, image, step))

    def close(self) -> None:
        self._each(lambda tracker: tracker.close())

    def _each(self, use: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self.open.items()):
            try:
                use(tracker)
            except Exception as error:
                self._drop(name, error)

    def _drop(self, name: str, error: Exception) -> None:
        self.open.pop(name, None)
        log.warning("%s fails (%s): it gets no further metrics; training goes on", name, str(error).split("\n")[0])
