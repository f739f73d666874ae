"""Finds the recordings of a folder by the names that transcripts give them. Imports no torch."""

import os
import posixpath
import re
import unicodedata
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

from gputrain.data_in.containers import FFMPEG_SOUNDS, SOUNDS

PLACES = ("", "wavs/", "clips/")  # Folders of the recordings next to a table.


class SoundFinder:
    """Finds the recordings of a tree by the names in transcripts: a path, with or without its suffix, relative to the
    folder, to its wavs/ or clips/, or to the folder of the transcript; an absolute path, or one that leads out of the
    folder, of an existing file; or the bare name if it is unique in the tree. A name that differs in capitals or has
    another suffix is that of a recording if no other fits better. `root` is the folder."""

    def __init__(self, paths: Iterable[str], bases: Sequence[str] = PLACES, root: Path | None = None) -> None:
        self._bases, self._root = bases, root
        self._by_path: dict[str, list[str]] = {}
        self._by_name: dict[str, list[str]] = {}
        for path in paths:
            key = unicodedata.normalize("NFC", path)  # Some file systems decompose letters.
            for spelled in {key, _bare(key)}:
                self._by_path.setdefault(spelled, []).append(path)
            for spelled in {_name(key), _bare(_name(key))}:
                self._by_name.setdefault(spelled, []).append(path)

    @cached_property
    def _by_folded(self) -> dict[str, list[str]]:
        """The recordings by their paths and names without regard to capitals."""
        found: dict[str, dict[str, None]] = {}
        for known in (self._by_path, self._by_name):
            for spelled, paths in known.items():
                found.setdefault(spelled.casefold(), {}).update(dict.fromkeys(paths))
        return {spelled: list(paths) for spelled, paths in found.items()}

    def find(self, name: str) -> list[str]:
        """Returns the recordings that match; only those of supported formats if there are any."""
        given = name.strip().strip('"').replace("\\", "/")
        key = unicodedata.normalize("NFC", given).removeprefix("./")
        if outside := self._outside(given):
            return outside
        parts = key.split("/")
        # The path may begin with folders above this one.
        places = [*(base + key for base in self._bases), *("/".join(parts[at:]) for at in range(1, len(parts) - 1))]
        if found := _first_known([*((self._by_path, place) for place in places), (self._by_name, parts[-1])]):
            return found
        other = re.sub(r"\.[A-Za-z][A-Za-z0-9]{1,3}$", "", parts[-1])  # Of a format that is not read, such as .sph.
        return _first_known((self._by_folded, place.casefold()) for place in (*places, parts[-1], other))

    def _outside(self, given: str) -> list[str]:
        """Resolves an absolute path or one with `..`; a file inside the folder is returned by its relative path."""
        if self._root is None or suffix_of_name(given) not in SOUNDS | FFMPEG_SOUNDS:
            return []
        if Path(given).is_absolute():
            places = [given]
        else:
            places = [str(self._root / base / given) for base in self._bases] if ".." in given.split("/") else []
        for place in filter(os.path.isfile, places):
            return [self._by_target.get(os.path.realpath(place), Path(place).as_posix())]
        return []

    @cached_property
    def _by_target(self) -> dict[str, str]:
        """The recordings by the files that they are, or are links to."""
        root = self._root or Path()
        return {os.path.realpath(root / path): path for paths in self._by_path.values() for path in paths}


def _first_known(ways: Iterable[tuple[dict[str, list[str]], str]]) -> list[str]:
    """Returns the recordings of the first spelling that is known; only those of supported formats if there are any."""
    for known, place in ways:
        for spelled in (place, _bare(place)):
            if spelled in known:
                return [path for path in known[spelled] if suffix_of_name(path) in SOUNDS] or known[spelled]
    return []


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def suffix_of_name(path: str) -> str:
    return posixpath.splitext(path)[1].lower()


def _bare(path: str) -> str:
    """Removes an audio suffix; an id may contain other full stops."""
    return path.rpartition(".")[0] if suffix_of_name(path) in SOUNDS | FFMPEG_SOUNDS else path
