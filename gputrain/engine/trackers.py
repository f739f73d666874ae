"""Further places that metrics and pictures go to: Weights & Biases, and MLflow.

Both are extras (gputrain[wandb], gputrain[mlflow]) and are imported only if they are asked for. Their own environment
variables say where they write to (WANDB_MODE=offline, WANDB_PROJECT, MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME). A
tracker that fails is dropped with a warning, since a training must not end because a server does not answer.
"""

import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from PIL import Image

from gputrain.engine.schedule import TrackerName
from gputrain.errors import UserError

log = logging.getLogger(__name__)


class Tracker(Protocol):
    def log_scalars(self, values: Mapping[str, float], step: int) -> None: ...

    def log_picture(self, name: str, image: Image.Image, step: int) -> None: ...

    def close(self) -> None: ...


class WandbTracker:
    """Logs to Weights & Biases, under the name of the run folder; a resumed run goes on with the same curves."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], first_step: int) -> None:
        self.wandb = imported("wandb")
        known = folder / "wandb_id.txt"
        identity = known.read_text(encoding="utf-8").strip() if known.exists() and first_step else ""
        self.run = self.wandb.init(
            name=folder.name, dir=str(folder), config=dict(settings), id=identity or None, resume="allow"
        )
        known.write_text(self.run.id, encoding="utf-8")

    def log_scalars(self, values: Mapping[str, float], step: int) -> None:
        self.run.log(dict(values), step=step)

    def log_picture(self, name: str, image: Image.Image, step: int) -> None:
        self.run.log({name: self.wandb.Image(image)}, step=step)

    def close(self) -> None:
        self.run.finish()


class MlflowTracker:
    """Logs to MLflow, under the name of the run folder; a resumed run goes on with the same curves."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], first_step: int) -> None:
        self.mlflow = imported("mlflow")
        known = folder / "mlflow_id.txt"
        identity = known.read_text(encoding="utf-8").strip() if known.exists() and first_step else ""
        run = self.mlflow.start_run(run_id=identity or None, run_name=None if identity else folder.name)
        known.write_text(run.info.run_id, encoding="utf-8")
        if not identity:
            self.mlflow.log_params({name: str(value)[:500] for name, value in settings.items()})

    def log_scalars(self, values: Mapping[str, float], step: int) -> None:
        self.mlflow.log_metrics(dict(values), step=step)

    def log_picture(self, name: str, image: Image.Image, step: int) -> None:
        self.mlflow.log_image(image, artifact_file=f"{name}_step_{step:08d}.png")

    def close(self) -> None:
        self.mlflow.end_run()


TRACKERS: Mapping[TrackerName, Callable[[Path, Mapping[str, Any], int], Tracker]] = {
    "wandb": WandbTracker, "mlflow": MlflowTracker,
}  # fmt: skip


def imported(package: str) -> Any:
    """Import a package of an extra. Raises UserError if it is not installed."""
    try:
        return importlib.import_module(package)
    except ImportError:
        raise UserError(
            f"track: {package} is not installed", hint=f'pip install "gputrain[{package}]", or leave --track out'
        ) from None


class Trackers:
    """All trackers of a run. One that fails is dropped with a warning."""

    def __init__(
        self, names: Sequence[TrackerName], folder: Path, settings: Mapping[str, Any], first_step: int
    ) -> None:
        """Open the trackers. Raises UserError if one is not installed."""
        self.open: dict[str, Tracker] = {}
        for name in names:
            try:
                self.open[name] = TRACKERS[name](folder, settings, first_step)
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
