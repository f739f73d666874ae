"""Fetches data sets of the Hugging Face Hub."""

import fnmatch
import hashlib
import logging
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from gputrain.errors import UserError
from gputrain.fetch.hub import (
    PREFIXES,
    HubName,
    cache_folder,
    format_some,
    lacks,
    open_repository,
    parse_hub_name,
)

log = logging.getLogger(__name__)


NO_DATA = ("README.md", ".gitattributes", "*.py", "dataset_infos.json", "LICENSE*")
CONTAINERS = (".parquet", ".arrow", ".tar", ".tar.gz", ".tgz", ".zip")
SPLITS = {
    "train": ("train", "training"), "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
    # Words that tell a split only beside one for training.
    "other": ("other", "validated", "invalidated", "unsupervised", "extra", "holdout"),
}  # fmt: skip
SHARD = re.compile(r"\d{4,6}-of-\d{4,6}")
TRAIN, OTHER = "train", "other"


def is_dataset_name(name: str) -> bool:
    """Returns True if a text names a data set of the Hub, hf://datasets/org/name or the address of its page."""
    found = parse_hub_name(name) if PREFIXES.fullmatch(name) else None
    return found is not None and found.type == "dataset"


def download_dataset(name: str) -> Path:
    """Fetches a data set of the Hub, hf://datasets/org/name[@revision][/folder, file or pattern of files].

    Returns a folder that holds nothing but its data files, or the file that was named. If the names of files tell
    splits, the training split alone is taken, which is logged. Raises UserError if there is none, or it cannot be
    fetched.
    """
    named = parse_hub_name(name)
    if named is None or named.type != "dataset":
        raise UserError(
            f"{name}: not a name of a data set", hint="write hf://datasets/org/name, or hf://datasets/org/name/folder"
        )
    opened = open_repository(named)
    paths, note = data_files(opened.files, named)
    if not paths:
        if opened.why_cached:
            raise lacks(named, named.path or "data", opened.why_cached)
        raise UserError(f"{name}: the repository has no data there", hint=format_some(opened.files))
    if note:
        log.info("%s: %s", name, note)
    folder = opened.fetch(paths)
    if paths == [named.path]:
        return folder / named.path
    return _view(folder, paths)


def data_files(names: Iterable[str], named: HubName) -> tuple[list[str], str]:
    """Returns the data files of what is named, and what to say of the splits that were left out.

    Raises UserError if the files are of several splits, and none of them is that for training.
    """
    path, start = named.path, f"{named.path}/" if named.path else ""
    names = sorted(name for name in names if not any(fnmatch.fnmatchcase(name.rpartition("/")[2], p) for p in NO_DATA))
    if path in names or any(sign in path for sign in "*?["):
        return [name for name in names if name == path or fnmatch.fnmatchcase(name, path)], ""
    inside = [name[len(start) :] for name in names if name.startswith(start)]
    taken, note = of_one_split(inside, str(named), f"hf://datasets/{named.repo}/{start}")
    return [start + name for name in taken], note


def of_one_split(inside: Sequence[str], folder: str, start: str) -> tuple[list[str], str]:
    """Returns the files of the training split if the names of files in a folder tell splits, otherwise all of them, and
    what to say of it. `start` stands before a name in an advice.

    Raises UserError if the files are of several splits, and none of them is that for training.
    """
    split_of = {name: _split_of(name) for name in inside}
    splits = [split for split in SPLITS if split in split_of.values()]
    if TRAIN not in splits:
        splits = [split for split in splits if split != OTHER]
    if splits in ([], [TRAIN]):
        return _of_one_set(inside, folder, start), ""
    if len(splits) == 1:
        return _of_one_set(inside, folder, start), f"it has the split {splits[0]} alone, which is taken"
    examples = {split: next(name for name in inside if split_of[name] == split) for split in splits}
    others = [f"{start}{_pattern(examples[split], split)}" for split in splits if split != TRAIN]
    if TRAIN not in splits:
        raise UserError(
            f"{folder}: it has the splits {' and '.join(splits)}, and none for training",
            hint=f"name one by its files: {' or '.join(others)}",
        )
    # Beside a split, files without one belong to all; containers only if the split is nothing but tables.
    in_containers = any(split_of[name] == TRAIN and name.lower().endswith(CONTAINERS) for name in inside)
    of_all = [name for name in inside if not (split_of[name] or (in_containers and name.lower().endswith(CONTAINERS)))]
    taken = [name for name in inside if split_of[name] == TRAIN or name in of_all]
    left = ", ".join(dict.fromkeys(split_of[name] or name for name in inside if name not in set(taken)))
    return _of_one_set(
        taken, folder, start
    ), f"only the split {TRAIN} is taken, without {left}; another one by its files: {others[0]}"


def _of_one_set(names: Sequence[str], folder: str, start: str) -> list[str]:
    """Returns the names. Raises UserError if shards of one name are in several folders, as those of a repository's
    languages or sizes are."""
    places: dict[str, list[str]] = {}
    for name in names:
        inner, _, shard = name.rpartition("/")
        if SHARD.search(shard):
            places.setdefault(shard, []).append(inner)
    several = next((folders for folders in places.values() if len(folders) > 1), None)
    if several:
        listed = ", ".join(several[:8]) + (f" and {len(several) - 8} more" if len(several) > 8 else "")
        raise UserError(f"{folder}: several data sets in one: {listed}", hint=f"name one: {start}{several[0]}")
    return list(names)


def _split_of(path: str) -> str:
    """Returns the split that a path tells by a whole word in it; the folders' words come first."""
    for part in path.lower().split("/"):
        words = re.split(r"[^a-z]+", part)
        for split, spellings in SPLITS.items():
            if any(word in spellings for word in words):
                return split
    return ""


def _pattern(path: str, split: str) -> str:
    """Returns a pattern, or a folder, of all files of a split, by one of them."""
    folders = path.split("/")
    for count, folder in enumerate(folders[:-1], 1):
        if _split_of(folder) == split:
            return "/".join(folders[:count])
    name = folders[-1]
    word = next(word for word in SPLITS[split] if word in re.split(r"[^a-z]+", name.lower()))
    end = name.lower().index(word) + len(word)
    ending = name[name.index(".", end) :] if "." in name[end:] else ""
    return "/".join([*folders[:-1], f"{name[:end]}*{ending}"])


def _view(folder: Path, paths: Sequence[str]) -> Path:
    """Returns a folder with links to the given files alone. The folder of the cache has all that was ever fetched."""
    listed = "\n".join(paths)
    digest = hashlib.sha256(listed.encode()).hexdigest()[:16]
    view = cache_folder().parent / "gputrain" / folder.parents[1].name / f"{folder.name[:12]}-{digest}"
    for path in paths:
        link, target = view / path, folder / path
        if link.exists():
            continue
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)  # A link to a file that the cache has lost.
        try:
            os.symlink(target, link)
        except OSError:  # Windows allows links to few users.
            shutil.copyfile(target, link)
    return view
