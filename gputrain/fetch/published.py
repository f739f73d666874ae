"""Chooses which files of a repository make a published model.

Repositories hold the same weights in several forms and precisions, and whole pipelines. A kind of model declares by
`PublishedFiles` which of them it reads.
"""

import fnmatch
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gputrain.errors import UserError
from gputrain.fetch.hub import HubName, Repository, format_some, lacks, open_repository


@dataclass(frozen=True)
class PublishedFiles:
    """The files that make a published model of a kind, as patterns of names. Of each list, the first that is there is
    taken."""

    whole: Sequence[str] = ()  # Weights that make their folder a model, if it has all of `needed`.
    single: Sequence[str] = ()  # Weights that are named themselves, if a folder has one such file.
    needed: Sequence[str] = ()
    beside: Sequence[str] = ()  # What is read beside the weights, where it is there.
    folders: Sequence[str] = ("",)  # Where to look in what is named, such as "vae" in a pipeline.
    example: str = ""  # A name for messages.

    def others(self, names: Iterable[str], folder: str) -> list[str]:
        """Returns those of the files in a folder that are read beside the weights."""
        return _matching(names, folder, [*self.needed, *self.beside])


@dataclass(frozen=True)
class Choice:
    """The files of a repository that are fetched for a model."""

    path: str  # The folder or file in the repository that is the model.
    files: tuple[str, ...]
    weights: tuple[str, ...]  # Those of `files` that hold weights.
    rank: int = 0  # The place of the weights in the list of those that the kind prefers.


OWN = ("checkpoint_best.pt", "checkpoint_last.pt")  # A run folder of gputrain.
OWN_BESIDE = ("config.yaml", "architecture.json")
SHARDS = re.compile(r"(?P<stem>.+)\.(?P<ending>safetensors|bin)\.index\.json")
VARIANTS = re.compile(r"[._-](fp16|bf16|non_ema|fp8)\b")  # Copies of weights that are of no use for training.


def choose(names: Iterable[str], path: str, wanted: PublishedFiles) -> Choice | None:
    """Returns which of a repository's files to fetch for a model; None if there is none at the path.

    A path of a file means that file with those beside it.
    """
    names = list(names)
    if path in names:
        folder = path.rpartition("/")[0]
        weights = [path, *_shards(names, path)]
        return Choice(path, tuple(dict.fromkeys([*weights, *wanted.others(names, folder)])), tuple(weights))
    folders = [f"{path}/{folder}".strip("/") for folder in wanted.folders]
    for rank, pattern in enumerate((*OWN, *wanted.whole)):
        needed, beside = ((), OWN_BESIDE) if pattern in OWN else (wanted.needed, ())
        for folder in folders:
            weights = _matching(names, folder, [pattern])
            if weights and len(_matching(names, folder, needed)) == len(needed):
                weights += _shards(names, weights[0])
                others = _matching(names, folder, beside) if pattern in OWN else wanted.others(names, folder)
                chosen = weights[0] if pattern in OWN else folder
                return Choice(chosen, tuple(dict.fromkeys([*weights, *others])), tuple(weights), rank)
    for rank, pattern in enumerate(wanted.single, len(OWN) + len(wanted.whole)):
        for folder in folders:
            found = _matching(names, folder, [pattern])
            weights = [name for name in found if not VARIANTS.search(name)] or found
            if len(weights) == 1:
                return Choice(weights[0], (weights[0], *wanted.others(names, folder)), tuple(weights), rank)
    return None


def _matching(names: Iterable[str], folder: str, patterns: Iterable[str]) -> list[str]:
    """Returns the files directly in a folder whose names match one of the patterns, in the patterns' order."""
    start = f"{folder}/" if folder else ""
    own = sorted(name for name in names if name.startswith(start) and "/" not in name[len(start) :])
    return [name for pattern in patterns for name in own if fnmatch.fnmatchcase(name[len(start) :], pattern)]


def _shards(names: Iterable[str], index: str) -> list[str]:
    """Returns the parts of weights that were split, by the name of their index."""
    folder, _, name = index.rpartition("/")
    match = SHARDS.fullmatch(name)
    return _matching(names, folder, [f"{match['stem']}-*.{match['ending']}"]) if match else []


def find_model(name: HubName, wanted: Sequence[PublishedFiles]) -> tuple[Repository, Choice]:
    """Opens the repository of a model, and chooses its files. Of several kinds, the one whose preferred weights are
    there is taken. Raises UserError if there is no such model."""
    opened = open_repository(name)
    found = [choice for one in wanted if (choice := choose(opened.files, name.path, one))]
    if found:
        return opened, min(found, key=lambda choice: choice.rank)
    if opened.is_cached:
        raise lacks(name, name.path or wanted[0].whole[0], opened.why_cached)
    inside = [path for path in opened.files if path.startswith(f"{name.path}/" if name.path else "")]
    if not inside:
        raise UserError(f"{name}: the repository has no {name.path}", hint=format_some(opened.files))
    listed = [path for path in inside if path.endswith((".safetensors", ".ckpt", ".pt", ".pth", ".bin"))]
    raise UserError(
        f"{name}: no model that can be read here in it",
        hint=f"name one of its files: {', '.join(f'{name.repo}:{path}' for path in listed[:4])}"
        if listed
        else f"it has no weights; a name such as {wanted[0].example} can be read",
    )
