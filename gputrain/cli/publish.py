"""A model card made from a run, and the upload of an exported model to the Hugging Face Hub."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gputrain import __version__
from gputrain.errors import UserError, first_line
from gputrain.kinds import HubCard, ModelKind

CARD = "README.md"


def model_card(repo: str, kind: ModelKind, model: Path, figures: Mapping[str, object], hints: Sequence[str]) -> str:
    """Return the card of an exported model: what it is, its held-out figures, how it is loaded, and its settings."""
    hub = kind.hub or HubCard("gputrain", "other", kind.title.split(" ", 1)[-1])
    head = ["---", f"library_name: {hub.library}", f"pipeline_tag: {hub.task}", "tags:", "- gputrain", "---", ""]
    text = [*head, f"# {repo.split('/')[-1]}", ""]
    text += [
        f"A {hub.name}, trained with gputrain {__version__}. The data and their licence are not named here.",
        "",
    ]
    held_out = best_figures(model)
    if held_out:
        text += [f"## Held-out figures, step {held_out.pop('step')}", "", "| figure | value |", "|---|---|"]
        text += [f"| `{name}` | {value:.4g} |" for name, value in held_out.items()]
        text += [""]
    text += ["## Files", ""]
    text += [f"- {name}: {value}" for name, value in figures.items()]
    text += ["", "## Use", "", *(f"- {hint}" for hint in hints), ""] if hints else [""]
    configuration = model / "config.yaml"
    if configuration.is_file():
        text += ["## Settings", "", "```yaml", configuration.read_text(encoding="utf-8").rstrip(), "```", ""]
    return "\n".join(text)


def best_figures(model: Path) -> dict[str, Any]:
    """Return the step and the figures of the evaluation with the best score of a run; nothing if there is none."""
    path = model / "metrics.jsonl"
    rows: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:  # The line of a run that was killed while it wrote.
            continue
    scored = [row for row in rows if isinstance(row.get("eval/score"), (int, float)) and row.get("step")]
    if not scored:
        return {}
    best = max(scored, key=lambda row: float(row["eval/score"]))
    found = {name.removeprefix("eval/"): value for name, value in best.items() if name.startswith("eval/")}
    known = {name: value for name, value in found.items() if isinstance(value, (int, float)) and math.isfinite(value)}
    return {"step": best["step"], **known}


def push_to_hub(repo: str, folder: Path, card: str, *, private: bool) -> str:
    """Write the card into the exported folder and upload the folder. Returns its address.

    Raises UserError if the upload fails; the exported files stay.
    """
    try:
        from huggingface_hub import HfApi
    except ImportError:
        raise UserError(
            "push_to_hub: huggingface_hub is not installed", hint='pip install "gputrain[hub]", or drop --push-to-hub'
        ) from None
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
