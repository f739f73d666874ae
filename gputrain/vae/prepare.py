"""Prepare a folder of pictures for training. Sources are only read, never moved or deleted.

A prepared folder holds the tree of its sources as squares of one size, and three files of JSON lines:

    manifest.jsonl     a line a picture: path, source, width, height, bytes, sha256, fingerprint of the source, split
    quarantine.jsonl   a line a source that was left out: path, reason, detail, and which file a duplicate repeats
    journal.jsonl      what was done, with sizes and times of the sources, so that a later run does what is missing

The pictures, manifest and quarantine depend on the sources and the settings alone, not on processes or earlier runs.
"""

import hashlib
import json
import os
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import numpy as np
from PIL import Image

from gputrain.engine.data import HELD_OUT_SHARE, MANIFEST, fingerprint, in_processes, split, write_rows, writing
from gputrain.errors import UserError
from gputrain.vae.pictures import (
    JOURNAL,
    MAX_PIXELS,
    MIN_SIZE,
    Box,
    PictureFile,
    RejectedPicture,
    UnusablePicture,
    read_rgb,
    scan_pictures,
)

ResizeMode = Literal["cover", "contain", "stretch"]
PictureFormat = Literal["png", "jpeg", "webp"]
Progress = Callable[[int, int], None]  # pictures done, pictures in all
JournalRow = dict[str, Any]  # a line of the journal: a source with its picture, or with the reason for leaving it out

QUARANTINE = "quarantine.jsonl"
PICTURE_KEYS = ("path", "source", "width", "height", "bytes", "sha256", "fingerprint")
SUFFIXES: dict[PictureFormat, str] = {"png": ".png", "jpeg": ".jpg", "webp": ".webp"}
ENCODINGS: dict[PictureFormat, dict[str, Any]] = {
    "png": {"compress_level": 4},  # decodes as fast as level 6, and is written up to three times as fast
    "jpeg": {"quality": 95, "subsampling": 0},
    "webp": {"lossless": True, "quality": 20, "method": 1},
}


def silent(done: int, total: int) -> None:
    pass


# ------------------------------------------------------------------------------------------------ preparation


@dataclass(frozen=True)
class VaePrepareConfig:
    """What a prepared picture depends on, beside its source."""

    target_size: int
    resize_mode: ResizeMode
    format: PictureFormat
    min_size: int
    max_pixels: int


@dataclass(frozen=True)
class VaePrepareReport:
    """What a preparation did: pictures `made` by this run or `kept` from earlier ones, and the files left out."""

    input_dir: str
    output_dir: str
    made: int
    kept: int
    held_out: int
    ignored: dict[str, int]
    quarantined: list[RejectedPicture]

    def to_json(self) -> dict[str, Any]:
        """The report as plain values."""
        return asdict(self)


def prepare_images(
    input_dir: Path,
    output_dir: Path,
    *,
    target_size: int,
    resize_mode: ResizeMode = "cover",
    format: PictureFormat = "png",
    min_size: int = MIN_SIZE,
    max_pixels: int = MAX_PIXELS,
    held_out_share: float = HELD_OUT_SHARE,
    num_workers: int = 0,
    progress: Progress = silent,
) -> VaePrepareReport:
    """Make every usable picture of a tree a square of `target_size` pixels, in the same tree under `output_dir`.

    "cover" fills the square and crops evenly what hangs over; "contain" fits the picture in and repeats its border
    pixels outwards, because bars of one colour would teach the model edges that no photograph has; "stretch" ignores
    the proportions. PNG and WebP are lossless, JPEG has quality 95 and full chroma. Broken, tiny, huge, duplicate
    and unreadable files are quarantined: listed in quarantine.jsonl, and left where they are.

    Raises UserError if a folder or the size will not do, no picture is usable, or a process dies or the disk fills;
    the next run goes on from there.
    """
    _check(input_dir, output_dir, target_size)
    journal = Journal.open(input_dir, output_dir)
    tree = scan_pictures(input_dir)
    repeats = find_duplicates(input_dir, tree.sources)
    sources = [source for source in tree.sources if source.path not in repeats]
    names = output_names([source.path for source in sources], SUFFIXES[format])
    recipe = VaePrepareConfig(target_size, resize_mode, format, min_size, max_pixels)
    jobs = [PictureJob(input_dir, output_dir, source, names[source.path], recipe) for source in sources]

    kept = journal.keep(jobs)
    progress(len(kept), len(jobs))
    missing = [job for job in jobs if job.source.path not in kept]
    with closing(in_processes(prepare_picture, missing, num_workers)) as results:
        for done, row in enumerate(results, start=len(kept) + 1):
            journal.append(row)
            progress(done, len(jobs))
    rows = [journal.rows[source.path] for source in sources]
    journal.write(rows)

    pictures, refused = _sort_out(rows, output_dir)
    refused += tree.refused + [duplicate(path, first, "has the content of") for path, first in repeats.items()]
    refused.sort(key=lambda refusal: refusal.path)
    held_out = _publish(output_dir, pictures, refused, held_out_share)
    kept_pictures = sum(picture["source"] in kept for picture in pictures)
    made = len(pictures) - kept_pictures
    return VaePrepareReport(str(input_dir), str(output_dir), made, kept_pictures, held_out, tree.ignored, refused)


def _check(input_dir: Path, output_dir: Path, target_size: int) -> None:
    if target_size <= 0 or target_size % 8:
        below = max(8, target_size // 8 * 8)
        raise UserError(
            f"target size {target_size} is not a positive multiple of 8, which the models need",
            hint=f"use {below} or {below + 8}",
        )
    read, written = input_dir.resolve(), output_dir.resolve()
    if read == written or read in written.parents or written in read.parents:
        raise UserError(
            f"{input_dir} and {output_dir}: one holds the other, so prepared pictures would mix with sources",
            hint="choose an output folder beside the input folder",
        )
    if output_dir.exists() and not output_dir.is_dir():
        raise UserError(f"{output_dir}: is a file, expected a folder", hint="name a new folder, or one prepared before")


def _sort_out(rows: list[JournalRow], output_dir: Path) -> tuple[list[JournalRow], list[RejectedPicture]]:
    """Part pictures from refusals; of sources that became the same picture, the first by path remains."""
    pictures, refused = [], []
    firsts: dict[str, str] = {}
    for row in rows:
        if "reason" in row:
            refused.append(RejectedPicture(row["source"], row["reason"], row["detail"]))
        elif (first := firsts.setdefault(row["sha256"], row["source"])) == row["source"]:
            pictures.append({key: row[key] for key in PICTURE_KEYS})
        else:
            refused.append(duplicate(row["source"], first, "becomes the same picture as"))
            with writing(output_dir):
                (output_dir / row["path"]).unlink(missing_ok=True)
    return pictures, refused


def _publish(
    output_dir: Path, pictures: list[JournalRow], refused: list[RejectedPicture], held_out_share: float
) -> int:
    """Write the quarantine and the manifest, which is the sign that all is done; return how many are held out."""
    write_rows(output_dir / QUARANTINE, map(asdict, refused))
    if not pictures:
        raise UserError(
            f"{output_dir}: none of {len(refused)} files gave a picture",
            hint=f"{output_dir / QUARANTINE} names each and its fault",
        )
    parts = split(pictures, held_out_share, key=lambda row: str(row["fingerprint"]))
    held_out = {row["path"] for row in parts.held_out}
    for row in pictures:
        row["split"] = "both" if parts.shared else "held_out" if row["path"] in held_out else "train"
    write_rows(output_dir / MANIFEST, pictures)
    return len(held_out)


@dataclass
class Journal:
    """What earlier runs have done: a row for each source, under a head that says where the sources lie."""

    path: Path
    head: JournalRow
    rows: dict[str, JournalRow]

    @classmethod
    def open(cls, input_dir: Path, output_dir: Path) -> "Journal":
        """Read the journal of an output folder. Raises UserError if the folder holds anything else."""
        path, head = output_dir / JOURNAL, {"input_dir": str(input_dir.resolve())}
        try:
            lines = path.read_text(encoding="ascii", errors="replace").splitlines()
        except (FileNotFoundError, NotADirectoryError):
            if output_dir.is_dir() and any(not file.name.startswith(".") for file in output_dir.iterdir()):
                raise UserError(
                    f"{output_dir}: holds files that were not prepared here", hint="choose an empty or a new folder"
                ) from None
            return cls(path, head, {})
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})", hint="choose another folder") from None
        found, *rows = [row for row in map(_parsed, lines) if row] or [{}]
        if found != head:
            raise UserError(
                f"{output_dir}: was prepared from {found.get('input_dir', 'an unknown folder')}, not from {input_dir}",
                hint="choose another output folder, or delete this one first",
            )
        return cls(path, head, {row["source"]: row for row in rows})

    def keep(self, jobs: Sequence["PictureJob"]) -> set[str]:
        """Drop all rows but those of jobs whose result still holds, with their pictures; return their sources.

        If that leaves work to do, the manifest goes too: it is written when everything is done.
        """
        rows: dict[str, JournalRow] = {}
        sums: set[str] = set()
        for job in jobs:
            row = self.rows.get(job.source.path)
            if row is not None and job.is_done(row, sums):
                rows[job.source.path] = row
                sums.add(row.get("sha256", ""))
        outdated = [row["path"] for source, row in self.rows.items() if source not in rows and "path" in row]
        folder = self.path.parent
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            if outdated or len(rows) < len(jobs):
                (folder / MANIFEST).unlink(missing_ok=True)
            for path in outdated:
                (folder / path).unlink(missing_ok=True)
        self.write(rows.values())
        return set(rows)

    def write(self, rows: Iterable[JournalRow]) -> None:
        """Replace the whole journal."""
        self.rows = {row["source"]: row for row in rows}
        write_rows(self.path, [self.head, *self.rows.values()])

    def append(self, row: JournalRow) -> None:
        """Note what was just done."""
        self.rows[row["source"]] = row
        with writing(self.path), self.path.open("a", encoding="ascii") as file:
            file.write(json.dumps(row) + "\n")


def _parsed(line: str) -> JournalRow | None:
    """A line of the journal; None for the last one of a run that was killed while it wrote."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


# ---------------------------------------------------------------------------------------------- one picture


@dataclass(frozen=True)
class PictureJob:
    """A source, and the relative path `name` that its picture shall have."""

    input_dir: Path
    output_dir: Path
    source: PictureFile
    name: str
    recipe: VaePrepareConfig

    def conditions(self) -> JournalRow:
        """What must not have changed for an earlier result to hold."""
        return {
            "source": self.source.path,
            "source_bytes": self.source.bytes,
            "source_mtime_ns": self.source.mtime_ns,
            "recipe": asdict(self.recipe),
        }

    def is_done(self, row: JournalRow, sums: set[str]) -> bool:
        """Whether an earlier result still holds; `sums` are the SHA-256 of the pictures that come before it.

        A picture that repeats one of them has been removed. What could not be read is tried again.
        """
        if any(row.get(key) != value for key, value in self.conditions().items()):
            return False
        if "reason" in row:
            return bool(row["reason"] != "unreadable")
        file = self.output_dir / self.name
        is_there = file.is_file() and file.stat().st_size == row["bytes"]
        return row["path"] == self.name and (is_there or row["sha256"] in sums)


def prepare_picture(job: PictureJob) -> JournalRow:
    """Prepare one picture, in a worker process. Raises UserError if it cannot be written."""
    source = job.input_dir / job.source.path
    row = job.conditions()
    try:
        mark = fingerprint(source)
        picture = _fit(source, job.recipe)
    except UnusablePicture as refused:
        return row | {"reason": refused.reason, "detail": refused.detail}
    except OSError as error:
        return row | {"reason": "unreadable", "detail": error.strerror or str(error)}
    buffer = BytesIO()
    picture.save(buffer, job.recipe.format, **ENCODINGS[job.recipe.format])
    content = buffer.getvalue()
    path = job.output_dir / job.name
    unfinished = path.with_name(f".{_digest(job.name)}.partial")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_bytes(content)
        unfinished.replace(path)
    return row | {
        "path": job.name,
        "width": picture.width,
        "height": picture.height,
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
        "fingerprint": mark,
    }


def _fit(path: Path, recipe: VaePrepareConfig) -> Image.Image:
    size = recipe.target_size
    crop = _centred if recipe.resize_mode == "cover" else None
    image = read_rgb(path, crop=crop, min_size=recipe.min_size, max_pixels=recipe.max_pixels)
    width, height = size, size
    if recipe.resize_mode == "contain":
        scale = size / max(image.size)
        width, height = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    image = image.resize((width, height), Image.Resampling.LANCZOS, reducing_gap=3.0)
    if (width, height) == (size, size):
        return image
    left, top = (size - width) // 2, (size - height) // 2
    margins = ((top, size - height - top), (left, size - width - left), (0, 0))
    return Image.fromarray(np.pad(np.asarray(image), margins, mode="edge"))


def _centred(width: int, height: int) -> Box:
    side = min(width, height)
    left, top = (width - side) // 2, (height - side) // 2
    return left, top, left + side, top + side


def output_names(sources: Iterable[str], suffix: str) -> dict[str, str]:
    """A path for each source's picture: its own with another suffix, or one that clashes with no other.

    Of a.gif and a.jpg, in this order, the first becomes a.png and the second a.jpg.png. Names count as equal if any
    file system would take them for one; where nothing else is left or a name is too long, it is cut and numbered by
    its hash.
    """
    sources = sorted(sources)
    taken = {_folded(str(folder)) for source in sources for folder in PurePosixPath(source).parents}
    names = {}
    for source in sources:
        path = PurePosixPath(source)
        for stem in (path.stem, path.name, f"{path.stem[:40]}-{_digest(source)}"):
            name = path.with_name(stem + suffix)
            if _folded(str(name)) not in taken and len(os.fsencode(name.name)) <= 255:
                taken.add(_folded(str(name)))
                names[source] = str(name)
                break
    return names


def _digest(name: str) -> str:
    return hashlib.sha256(os.fsencode(name)).hexdigest()[:16]


def _folded(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold()


def find_duplicates(folder: Path, sources: Iterable[PictureFile]) -> dict[str, str]:
    """{path: the first path with the same content}, by SHA-256.

    Only files that agree in size and fingerprint are read in full, which spares nearly all the reading.
    """

    def content(digest: Callable[[Path], str], source: PictureFile) -> str:
        try:
            return digest(folder / source.path)
        except OSError:
            return source.path  # equal to no other

    keys: list[Callable[[PictureFile], str]] = [
        lambda s: str(s.bytes),
        partial(content, fingerprint),
        partial(content, sha256),
    ]
    groups = [list(sources)]
    for key in keys:
        finer: dict[tuple[int, str], list[PictureFile]] = defaultdict(list)
        for number, group in enumerate(groups):
            for source in group:
                finer[number, key(source)].append(source)
        groups = [group for group in finer.values() if len(group) > 1]
    return {source.path: group[0].path for group in groups for source in group[1:]}


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal. Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def duplicate(path: str, first: str, relation: str) -> RejectedPicture:
    return RejectedPicture(path, "duplicate", f"{relation} {first}", repeats=first)
