"""Fetches data sets of the Hugging Face Hub, and chooses the files of one subset and one split."""

import fnmatch
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from gputrain.errors import UserError
from gputrain.fetch.hub import PREFIXES, format_some, lacks, open_repository, parse_hub_name

log = logging.getLogger(__name__)

README = "README.md"
NO_DATA = re.compile(r"(.*/)?(README\.md|\.gitattributes|[^/]*\.py|dataset_infos\.json|LICENSE[^/]*)")
CONTAINERS = re.compile(r"\.(parquet|arrow|tar|tar\.gz|tgz|zip)$", re.IGNORECASE)
# Columns that mark a row as unusable, unless they deny it.
UNUSABLE = (
    "do_not_use", "exclude", "excluded", "is_excluded", "rejected", "is_rejected", "deleted", "is_deleted", "discard",
    "skip", "ignore", "unusable",
)  # fmt: skip
NO = {"0", "false", "no", "n", "f", "none", "null", "nan"}  # Texts of cells that deny something.
SPLITS = {
    "train": ("train", "training"), "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
    # Words that tell a split only beside one for training.
    "other": ("other", "validated", "invalidated", "unsupervised", "extra", "holdout"),
}  # fmt: skip
SHARD = re.compile(r"\d{4,6}-of-\d{4,6}")


def is_dataset_name(name: str) -> bool:
    """Returns True if a text names a data set of the Hub, hf://datasets/org/name or the address of its page."""
    found = parse_hub_name(name) if PREFIXES.fullmatch(name) else None
    return found is not None and found.type == "dataset"


def download_dataset(name: str) -> tuple[Path, list[str]]:
    """Fetches a data set of the Hub, hf://datasets/org/name[@revision][/subset, folder, file or pattern of files].

    Returns the folder of the repository in the cache, and the names of the data's files in it. Of several splits, that
    for training is taken. Raises UserError if there is none, or it cannot be fetched.
    """
    from huggingface_hub import metadata_load

    named = parse_hub_name(name)
    if named is None or named.type != "dataset":
        raise UserError(f"{name}: not a name of a data set", hint="write hf://datasets/org/name, or a folder of it")
    opened = open_repository(named)
    names = [path for path in sorted(opened.files) if not NO_DATA.fullmatch(path)]
    page = metadata_load(opened.fetch([README]) / README) if README in opened.files else {}
    start = f"hf://datasets/{named.repo}/"
    subset = _subset(page or {}, named.path, start)
    if subset is not None:
        found = _of_subset(names, subset, str(named), start)
    elif named.path in names or (
        re.search(r"[*?\[]", named.path) and not any(path.startswith(f"{named.path}/") for path in names)
    ):
        found = [path for path in names if path == named.path or _matches(path, named.path)]
    else:
        start = f"{named.path}/" if named.path else ""
        found = of_one_split(
            [path for path in names if path.startswith(start)], str(named), f"hf://datasets/{named.repo}/"
        )
    if not found and opened.why_cached:
        raise lacks(named, named.path or "data", opened.why_cached)
    if not found:
        raise UserError(f"{name}: the repository has no data there", hint=format_some(opened.files))
    return opened.fetch(found), found


# ------------------------------------------------------------------------------------------------- subsets and splits


def _subset(page: Mapping[str, Any], path: str, start: str) -> Any:
    """Returns the `data_files` of the subset that is named, or of the default one; None if a page declares none, or a
    path of files is named. Raises UserError if there are several."""
    rows = {str(row.get("config_name", "default")): row for row in page.get("configs") or ()}
    rows = {name: row for name, row in rows.items() if row.get("data_files")}
    default = [*rows] if len(rows) == 1 else [name for name, row in rows.items() if row.get("default")]
    if rows and not path and not default:
        raise UserError(
            f"{start}: several subsets in one: {', '.join(rows)}", hint=f"name one: {start}{next(iter(rows))}"
        )
    chosen = path or (default[0] if default else "")
    return rows[chosen]["data_files"] if chosen in rows else None


def _of_subset(names: Sequence[str], declared: Any, shown: str, start: str) -> list[str]:
    """Returns the files of the split for training, or of the only one, as the `data_files` of a page tell it: a
    pattern, a list of patterns, or a list of splits with such."""
    splits: dict[str, list[str]] = {}
    for row in declared if isinstance(declared, list) else [declared]:
        row = row if isinstance(row, dict) else {"path": row}
        patterns = row.get("path") or ()
        splits.setdefault(str(row.get("split", "train")), []).extend(
            [patterns] if isinstance(patterns, str) else patterns
        )
    split = _chosen({name: patterns[0] for name, patterns in splits.items() if patterns}, shown, start)
    return [name for name in names if any(_matches(name, pattern) for pattern in splits[split])]


def _matches(name: str, pattern: str) -> bool:
    if "**" in pattern:
        return fnmatch.fnmatchcase(name, pattern.replace("**/", "*"))
    return PurePosixPath("/", name).match(f"/{pattern}")


def of_one_split(names: Sequence[str], shown: str, start: str) -> list[str]:
    """Returns the files of the split for training if names of files tell splits, otherwise all of them. `start` stands
    before a name in an advice.

    Raises UserError if the files are of several splits, and none of them is that for training, and if shards of one
    name are in several folders, as those of a repository's languages or sizes are.
    """
    splits = {name: split_of(name) for name in names}
    first = {split: name for name, split in reversed(splits.items())}
    examples = {split: first[split] for split in SPLITS if split in first and (split != "other" or "train" in first)}
    taken = list(names)
    split = _chosen(examples, shown, start) if examples else ""
    if split == "train" and len(examples) > 1:
        # Beside a split, files without one belong to all; containers only if the split is nothing but tables.
        packed = any(splits[name] == split and CONTAINERS.search(name) for name in names)
        taken = [
            name
            for name in names
            if splits[name] == split or not (splits[name] or (packed and CONTAINERS.search(name)))
        ]
        if unclear := [name for name in names if name not in taken and not splits[name]]:
            log.warning("%s: %d files of no split are not read, such as %s", shown, len(unclear), unclear[0])
    places: dict[str, list[str]] = {}
    for name in filter(SHARD.search, taken):
        places.setdefault(name.rpartition("/")[2], []).append(name.rpartition("/")[0])
    if several := next((folders for folders in places.values() if len(folders) > 1), None):
        listed = ", ".join(several[:8]) + (f" and {len(several) - 8} more" if len(several) > 8 else "")
        raise UserError(f"{shown}: several data sets in one: {listed}", hint=f"name one: {start}{several[0]}")
    return taken


def _chosen(examples: Mapping[str, str], shown: str, start: str) -> str:
    """Returns the split for training, or the only one. `examples` are a file or a pattern of each split."""
    others = [split for split in examples if split != "train"]
    advice = f"by its files: {start}{_pattern(examples[others[0]])}" if others else ""
    if "train" not in examples and len(others) > 1:
        raise UserError(
            f"{shown}: it has the splits {' and '.join(others)}, and none for training", hint=f"name one {advice}"
        )
    if others and "train" not in examples:
        log.warning("%s: it has the split %s alone, which is taken", shown, others[0])
    elif others:
        log.warning("%s: the split train is taken, without %s; another one %s", shown, ", ".join(others), advice)
    return "train" if "train" in examples else others[0]


def split_of(path: str) -> str:
    """Returns the split that a path tells by a whole word in it; the folders' words come first."""
    for part in path.lower().split("/"):
        words = re.split(r"[^a-z]+", part)
        for split, spellings in SPLITS.items():
            if any(word in spellings for word in words):
                return split
    return ""


def _pattern(path: str) -> str:
    """Returns a pattern of the files of a split, by one of them: their folder, or their shards."""
    folders = [folder for folder in PurePosixPath(path).parents if split_of(folder.name)]
    return folders[-1].as_posix() if folders else re.sub(r"\d{4,6}(-of-\d{4,6})?", "*", path)
