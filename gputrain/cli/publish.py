"""A model card made from a run, and the upload of an exported model to the Hugging Face Hub."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gputrain import __version__
from gputrain.errors import UserError, first_line
from gputrain.fetch.addresses import without_secrets
from gputrain.kinds import HubCard, ModelKind, TrainedModel

CARD = "README.md"


def model_card(
    repo: str, kind: ModelKind, exported: TrainedModel, written: Path, figures: Mapping[str, object],
    hints: Sequence[str],
) -> str:  # fmt: skip
    """Return the card of an exported model: what it is, its held-out figures, how it is loaded, and its settings.

    The `hints` name the folder that was `written`, in whose place readers have `repo`.
    """
    hub = kind.hub or HubCard("gputrain", "other", kind.title.split(" ", 1)[-1])
    head = ["---", f"library_name: {hub.library}", f"pipeline_tag: {hub.task}", "tags:", "- gputrain", "---", ""]
    text = [*head, f"# {repo.split('/')[-1]}", ""]
    text += [
        f"{hub.name[0].upper()}{hub.name[1:]}, trained with gputrain {__version__}. The data and their licence are "
        "not named here.",
        "",
    ]
    folder = exported.weights if exported.weights.is_dir() else exported.weights.parent
    step = step_of(exported.weights, kind)
    held_out = figures_at(folder, step) if step else {}
    if held_out:
        text += [f"## Held-out figures, step {step}", "", "| figure | value |", "|---|---|"]
        text += [f"| `{name}` | {value:.4g} |" for name, value in held_out.items()]
        text += [""]
    text += ["## Files", ""]
    text += [f"- {name}: {value}" for name, value in figures.items()]
    here = re.compile(rf"(?<![\w./\\-]){re.escape(str(written))}(?![\w.-])")
    text += ["", "## Use", "", *(f"- {here.sub(repo, hint)}" for hint in hints), ""] if hints else [""]
    configuration = folder / "config.yaml"
    if configuration.is_file():
        text += ["## Settings", "", "```yaml", configuration.read_text(encoding="utf-8").rstrip(), "```", ""]
    return without_secrets("\n".join(text))  # Everybody reads the card.


def step_of(weights: Path, kind: ModelKind) -> int | None:
    """Return the step of the checkpoint that was exported; None for a model of another program."""
    from gputrain.engine import checkpoint

    if weights.suffix != ".pt" and not checkpoint.newest_first(weights):
        return None
    return int(checkpoint.find_named(weights, kind.name, modules=[])[1]["progress"]["step"])


def figures_at(folder: Path, step: int) -> dict[str, Any]:
    """Return the figures of a run's evaluation after a step; nothing if there was none."""
    from gputrain.engine.metrics import METRICS, row_of

    path = folder / METRICS
    rows: list[dict[str, Any]] = []
    if path.is_file():
        with path.open("rb") as file:  # Evaluations are few of the lines of a long run.
            rows = [row for line in file if b'"eval/' in line and (row := row_of(line)) is not None]
    evaluated: list[dict[str, Any]] = [row for row in rows if row.get("step") == step and "eval/score" in row]
    row = evaluated[-1] if evaluated else {}
    found = {name.removeprefix("eval/"): value for name, value in row.items() if name.startswith("eval/")}
    return {name: value for name, value in found.items() if isinstance(value, (int, float)) and math.isfinite(value)}


def push_to_hub(repo: str, folder: Path, card: str, *, private: bool) -> str:
    """Write the card into the exported folder and upload the folder. Returns its address.

    Raises UserError if the upload fails; the exported files stay.
    """
    from huggingface_hub import HfApi

    (folder / CARD).write_text(card, encoding="utf-8")
    api = HfApi()
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message=f"Exported by gputrain {__version__}")
    except Exception as error:  # Names, tokens, servers and networks have an error each.
        raise UserError(
            f"{repo}: cannot be uploaded: {first_line(error)}",
            hint=f"log in with `hf auth login`, or set HF_TOKEN; the exported files are in {folder}",
        ) from None
    return f"{api.endpoint}/{repo}"
