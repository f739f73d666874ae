"""Finds the recordings that transcripts name."""

import os
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath

from gputrain.audio.prepare import OTHER_SUFFIXES, SUFFIXES

PLACES = ("", "wavs/", "clips/")  # Folders of the recordings next to a table.


class SoundFinder:
    """Finds the recordings of a tree by the names in transcripts: a path, with or without its suffix, relative to the
    folder, to its wavs/ or clips/, or to the folder of the transcript; an absolute path, or one that leads out of the
    folder, of an existing file; or the bare name if it is unique in the tree. `root` is the folder."""

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

    def find(self, name: str) -> list[str]:
        """Returns the recordings that match; only those of supported formats if there are any."""
        given = name.strip().strip('"').replace("\\", "/")
        key = unicodedata.normalize("NFC", given).removeprefix("./")
        if outside := self._outside(given):
            return outside
        ways = [(self._by_path, base + key) for base in self._bases] + [(self._by_name, _name(key))]
        for known, way in ways:
            for spelled in (way, _bare(way)):
                if spelled in known:
                    found = known[spelled]
                    return [path for path in found if _suffix(path) in SUFFIXES] or found
        return []

    def _outside(self, given: str) -> list[str]:
        """Resolves an absolute path or one with `..`; a file inside the folder is returned by its relative path."""
        if self._root is None or _suffix(given) not in SUFFIXES | OTHER_SUFFIXES:
            return []
        if Path(given).is_absolute():
            places = [given]
        else:
            places = [str(self._root / base / given) for base in self._bases] if ".." in given.split("/") else []
        for place in filter(os.path.isfile, places):
            real, root = Path(place).resolve(), self._root.resolve()
            within = real.relative_to(root).as_posix() if real.is_relative_to(root) else ""
            return self._by_path.get(unicodedata.normalize("NFC", within), [Path(place).as_posix()])
        return []


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def _suffix(path: str) -> str:
    return PurePosixPath(path).suffix.lower()


def _bare(path: str) -> str:
    """Removes an audio suffix; an id may contain other full stops."""
    return path.rpartition(".")[0] if _suffix(path) in SUFFIXES | OTHER_SUFFIXES else path
