"""Chooses which files of a repository make a published model, and fetches them.

Repositories hold the same weights in several forms and precisions, and whole pipelines. A kind of model declares by
`PublishedFiles` which of them it reads.
"""

import fnmatch
import glob
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gputrain.errors import UserError
from gputrain.fetch.hub import HubName, Repository, format_some, lacks, open_repository
from gputrain.kinds import PublishedFiles


@dataclass(frozen=True)
class Choice:
    """The files of a repository that are fetched for a model."""

    path: str  # The folder or file in the repository that is the model.
    weights: tuple[str, ...]
    others: tuple[str, ...]
    rank: int = 0  # The place of the weights in the list of those that the kind prefers.

    @property
    def folder(self) -> str:
        return self.path if self.path not in (*self.weights, *self.others) else self.path.rpartition("/")[0]


RUN = ("checkpoint_best.pt", "checkpoint_last.pt")  # A run folder of gputrain that was uploaded.
BESIDE_RUN = ("config.yaml", "architecture.json")
INDEX = re.compile(r"(?P<stem>.+)\.(?P<ending>safetensors|bin)\.index\.json")
VARIANT = re.compile(r"[._-](fp16|bf16|fp8|non_ema)\b")  # A copy of weights that is not for training.


def choose(names: Iterable[str], path: str, wanted: PublishedFiles) -> Choice | None:
    """Returns which of a repository's files to fetch for a model; None if there is none at the path.

    The path of a file means that file, with those beside it; that of a file beside the weights means its folder.
    """
    names = list(names)
    folder, _, name = path.rpartition("/")
    if path in _matching(names, folder, [*wanted.needed, *wanted.beside]):
        path = folder
    if path in names:
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in wanted.parts):
            model = choose(names, folder, wanted)
            return model and replace(model, path=path, others=(path, *model.others))
        others = _matching(names, folder, [*wanted.needed, *wanted.beside])
        return Choice(path, (path, *_shards(names, path)), tuple(others))
    folders = [f"{path}/{folder}".strip("/") for folder in wanted.folders]
    for rank, pattern in enumerate((*RUN, *wanted.whole)):
        for folder in folders:
            weights = _matching(names, folder, [pattern])
            if weights and pattern in RUN:
                return Choice(folder, tuple(weights), tuple(_matching(names, folder, BESIDE_RUN)), rank)
            needed = _matching(names, folder, wanted.needed)
            if weights and len(needed) == len(wanted.needed):
                beside = _matching(names, folder, wanted.beside)
                return Choice(folder, (*weights, *_shards(names, weights[0])), (*needed, *beside), rank)
    for rank, pattern in enumerate(wanted.single, len(RUN) + len(wanted.whole)):
        for folder in reversed(folders):
            besides = _matching(names, folder, wanted.beside)
            found = [name for name in _matching(names, folder, [pattern]) if name not in besides]
            weights = [name for name in found if not VARIANT.search(name)] or found
            if len(weights) == 1:
                others = _matching(names, folder, [*wanted.needed, *wanted.beside])
                return Choice(weights[0], tuple(weights), tuple(others), rank)
    return None


def _matching(names: Iterable[str], folder: str, patterns: Iterable[str]) -> list[str]:
    """Returns the files directly in a folder whose names match one of the patterns, in the patterns' order."""
    start = f"{folder}/" if folder else ""
    own = sorted(name for name in names if name.startswith(start) and "/" not in name[len(start) :])
    return [name for pattern in patterns for name in own if fnmatch.fnmatchcase(name[len(start) :], pattern)]


def _shards(names: Iterable[str], index: str) -> list[str]:
    """Returns the parts of weights that were split, by the name of their index."""
    folder, _, name = index.rpartition("/")
    match = INDEX.fullmatch(name)
    return _matching(names, folder, [f"{glob.escape(match['stem'])}-*.{match['ending']}"]) if match else []


def fetch_model(
    name: HubName, wanted: Sequence[PublishedFiles], *, weights: bool = True, sha256: Mapping[str, str] | None = None
) -> tuple[Path, dict[str, Path]]:
    """Returns a model of the Hub in the cache, after fetching what the cache lacks of it: its folder, or the file that
    is named, and what was fetched by names below its folder.

    Of several kinds of model, the one is taken whose preferred weights are there. Without `weights`, only what
    describes the model is fetched. `sha256` has the hashes that are published elsewhere, by names of files. Raises
    UserError if there is no such model, it cannot be fetched, or has another hash.
    """
    import pooch

    opened = open_repository(name)
    found = [(choice, kind) for kind in wanted if (choice := choose(opened.files, name.path, kind))]
    if not found:
        raise _no_model(opened, wanted)
    choice, kind = min(found, key=lambda pair: pair[0].rank)
    paths = [*choice.others, *(choice.weights if weights else ())]
    start = f"{choice.folder}/" if choice.folder else ""
    folder = opened.fetch(paths)
    names = kind.further(folder / choice.folder) if choice.path not in choice.others else ()
    if further := [start + name for name in names if start + name in opened.files]:
        paths += further
        opened.fetch(further)
    files = {path.removeprefix(start): folder / path for path in paths}
    for file, expected in (sha256 or {}).items():
        if file not in files:
            continue
        stated = opened.files[start + file]  # It has been verified.
        digest = stated if len(stated) == len(expected) else pooch.file_hash(files[file])
        if digest != expected:
            raise UserError(
                f"{name}: the SHA-256 of {file} is {digest}, expected {expected}",
                hint=f"it is damaged, or not the published file any more; if you trust it, name {name} itself",
            )
    return folder / choice.path, files


def _no_model(opened: Repository, wanted: Sequence[PublishedFiles]) -> UserError:
    name = opened.name
    if opened.why_cached:
        weights = next((pattern for kind in wanted for pattern in (*kind.whole, *kind.single)), "weights")
        return lacks(name, name.path or weights, opened.why_cached)
    start = f"{name.path}/" if name.path else ""
    inside = [path for path in opened.files if path == name.path or path.startswith(start)]
    if not inside:
        return UserError(f"{name}: the repository has no {name.path}", hint=format_some(opened.files))
    listed = [path for path in inside if path.endswith((".safetensors", ".ckpt", ".pt", ".pth", ".bin"))]
    if listed:
        files = " or ".join(f"{replace(name, path=path)}" for path in listed[:3])
        return UserError(
            f"{name}: nothing tells which of its {len(listed)} files is the model", hint=f"name it: {files}"
        )
    example = next((kind.example for kind in wanted if kind.example), "")
    return UserError(f"{name}: has no weights that can be read", hint=f"another name is {example}" if example else "")
