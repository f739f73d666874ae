"""Prepares a folder of pictures for training. Sources are only read, never moved or deleted.

A prepared folder contains the pictures as squares of one size, in the tree of their sources, and three files of JSON
lines:

    manifest.jsonl     a picture per line: path, source, width, height, bytes, sha256, fingerprint of the source, split
    quarantine.jsonl   a source that was left out per line: path, reason, detail, and the file a duplicate repeats
    journal.jsonl      results, with sizes and times of the sources, so that a later run processes only the rest

The pictures, manifest and quarantine depend only on the sources and the settings, not on processes or earlier runs.
"""

import hashlib
import os
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from PIL import Image

from gputrain.engine.data import (
    HELD_OUT_SHARE,
    MANIFEST,
    Progress,
    fingerprint,
    in_processes,
    silent,
    split,
    write_rows,
    writing,
)
from gputrain.errors import UserError
from gputrain.vae.config import PictureFormat, VaePrepareConfig
from gputrain.vae.journal import Journal, JournalRow, PictureJob, recipe_of
from gputrain.vae.pictures import Box, PictureFile, RejectedPicture, look_at, read_picture, scan_pictures

QUARANTINE = "quarantine.jsonl"
PICTURE_KEYS = ("path", "source", "width", "height", "bytes", "sha256", "fingerprint")
SUFFIXES: dict[PictureFormat, str] = {"png": ".png", "jpeg": ".jpg", "webp": ".webp"}
ENCODINGS: dict[PictureFormat, dict[str, Any]] = {
    "png": {"compress_level": 4},  # Level 4 decodes as fast as level 6, and encodes up to three times as fast.
    "jpeg": {"quality": 95, "subsampling": 0},
    "webp": {"lossless": True, "quality": 20, "method": 1},
}


# ------------------------------------------------------------------------------------------------ preparation


@dataclass(frozen=True)
class VaePrepareReport:
    """Result of a preparation: pictures `made` by this run or `kept` from earlier ones, and the files left out."""

    input_dir: str
    output_dir: str
    made: int
    kept: int
    held_out: int
    ignored: dict[str, int]
    refused: list[RejectedPicture]

    def to_json(self) -> dict[str, Any]:
        report = asdict(self)
        report["quarantined"] = report.pop("refused")  # The name of the file that lists them.
        return report


def prepare_images(
    input_dir: Path,
    output_dir: Path,
    config: VaePrepareConfig = VaePrepareConfig(),  # noqa: B008  (It is immutable.)
    *,
    held_out_share: float = HELD_OUT_SHARE,
    num_workers: int = 0,
    progress: Progress = silent,
    overwrite: bool = False,
) -> VaePrepareReport:
    """Resizes every usable picture of a tree to a square, in the same tree under `output_dir`.

    "cover" fills the square and crops both ends evenly; "contain" fits the picture in and pads with repeated border
    pixels, because bars of one colour would teach the model edges that photographs do not have; "stretch" changes
    the proportions. PNG and WebP are lossless, JPEG has quality 95 and full chroma. Broken, tiny, huge, duplicate
    and unreadable files are quarantined: listed in quarantine.jsonl, and not moved.

    Raises UserError if a folder is invalid, no picture is usable, a process dies or the disk is full;
    the next run continues. It also raises UserError if the folder has pictures of other settings, unless `overwrite`.
    """
    _check(input_dir, output_dir)
    journal = Journal.open(input_dir, output_dir)
    if not overwrite:
        journal.check_recipe(recipe_of(config))
    tree = scan_pictures(input_dir)
    repeats = find_duplicates(input_dir, tree.sources)
    sources = [source for source in tree.sources if source.path not in repeats]
    names = output_names([source.path for source in sources], SUFFIXES[config.format])
    jobs = [PictureJob(input_dir, output_dir, source, names[source.path], config) for source in sources]

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


def _check(input_dir: Path, output_dir: Path) -> None:
    read, written = input_dir.resolve(), output_dir.resolve()
    if read == written or read in written.parents or written in read.parents:
        raise UserError(
            f"{input_dir} and {output_dir}: one contains the other, so prepared pictures would mix with sources",
            hint="choose an output folder outside the input folder",
        )
    if output_dir.exists() and not output_dir.is_dir():
        raise UserError(f"{output_dir}: is a file, expected a folder", hint="name a new folder, or one prepared before")


def _sort_out(rows: list[JournalRow], output_dir: Path) -> tuple[list[JournalRow], list[RejectedPicture]]:
    """Separates pictures from rejected sources. Of sources with equal prepared pictures, only the first is kept."""
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
    """Writes the quarantine and then the manifest, which marks the folder as complete. Returns the number of held-out
    pictures."""
    write_rows(output_dir / QUARANTINE, map(asdict, refused))
    if not pictures:
        raise UserError(
            f"{output_dir}: none of {len(refused)} files is a usable picture",
            hint=f"{output_dir / QUARANTINE} names each and its fault",
        )
    parts = split(pictures, held_out_share, key=lambda row: str(row["fingerprint"]))
    held_out = {row["path"] for row in parts.held_out}
    for row in pictures:
        row["split"] = "both" if parts.shared else "held_out" if row["path"] in held_out else "train"
    write_rows(output_dir / MANIFEST, pictures)
    return len(held_out)


# ---------------------------------------------------------------------------------------------- one picture


def prepare_picture(job: PictureJob) -> JournalRow:
    """Prepares a picture in a worker process. Raises UserError if it cannot be written."""
    source = job.input_dir / job.source.path
    row = job.conditions()
    found = look_at(job.name, lambda: (fingerprint(source), _fit(source, job.config)))
    if isinstance(found, RejectedPicture):
        return row | {"reason": found.reason, "detail": found.detail}
    mark, picture = found
    buffer = BytesIO()
    picture.save(buffer, job.config.format, **ENCODINGS[job.config.format])
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


def _fit(path: Path, config: VaePrepareConfig) -> Image.Image:
    size = config.target_size
    crop = _centred if config.resize_mode == "cover" else None
    image = read_picture(path, config, crop=crop, channels=config.image_channels)
    width, height = size, size
    if config.resize_mode == "contain":
        scale = size / max(image.size)
        width, height = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    image = image.resize((width, height), Image.Resampling.LANCZOS, reducing_gap=3.0)
    if (width, height) == (size, size):
        return image
    left, top = (size - width) // 2, (size - height) // 2
    margins = ((top, size - height - top), (left, size - width - left), (0, 0))
    levels = np.asarray(image)
    return Image.fromarray(np.pad(levels, margins[: levels.ndim], mode="edge"))


def _centred(width: int, height: int) -> Box:
    side = min(width, height)
    left, top = (width - side) // 2, (height - side) // 2
    return left, top, left + side, top + side


def output_names(sources: Iterable[str], suffix: str) -> dict[str, str]:
    """Returns a unique path for each source's picture: its own with another suffix if that is free.

    For a.gif and a.jpg, in this order, the paths are a.png and a.jpg.png. Names count as equal if any file system
    treats them as equal; a name that is still taken or too long is shortened and gets a hash.
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
    """Returns {path: the first path with the same content}, by SHA-256.

    Only files with equal sizes and fingerprints are read in full, which avoids nearly all reading.
    """

    def content(digest: Callable[[Path], str], source: PictureFile) -> str:
        try:
            return digest(folder / source.path)
        except OSError:
            return source.path  # A path is unique.

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
    """Returns the SHA-256 of a file, in hexadecimal. Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def duplicate(path: str, first: str, relation: str) -> RejectedPicture:
    return RejectedPicture(path, "duplicate", f"{relation} {first}", repeats=first)
