"""Prepares a folder of pictures for training, and reports on one. Sources are only read, never moved or deleted.

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
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any

import pooch
from PIL import Image

from gputrain.data_in.preparation import (
    QUARANTINE,
    DataReport,
    Journal,
    JournalRow,
    PrepareReport,
    RefusedItem,
    SourceFile,
    ValueRange,
    check_folders,
    duplicate,
    find_duplicates,
    nothing_usable,
    run_jobs,
    sorted_refusals,
    value_range,
    write_quarantine,
)
from gputrain.data_in.split import HELD_OUT_SHARE, MANIFEST, few_held_out, fingerprint, split
from gputrain.errors import UserError
from gputrain.files import Progress, no_progress, read_rows, write_rows, writing
from gputrain.serialization import unreadable
from gputrain.vae.config import PictureFormat, PictureLimits, VaePrepareConfig
from gputrain.vae.dataset import is_prepared
from gputrain.vae.pictures import (
    JOURNAL,
    Box,
    Header,
    PictureTree,
    check_colours,
    read_header,
    read_picture,
    result_or_refusal,
    scan_pictures,
)

LOOKS = ("target_size", "resize_mode", "format", "image_channels")  # Settings that change the pictures themselves.
PICTURE_KEYS = ("path", "source", "width", "height", "bytes", "sha256", "fingerprint")
SUFFIXES: dict[PictureFormat, str] = {"png": ".png", "jpeg": ".jpg", "webp": ".webp"}
ENCODINGS: dict[PictureFormat, dict[str, Any]] = {
    "png": {"compress_level": 4},  # Level 4 decodes as fast as level 6, and encodes up to three times as fast.
    "jpeg": {"quality": 95, "subsampling": 0},
    "webp": {"lossless": True, "quality": 20, "method": 1},
}


# ------------------------------------------------------------------------------------------------ preparation


@dataclass(frozen=True, kw_only=True)
class VaePrepareReport(PrepareReport):
    held_out: int
    findings: tuple[str, ...] = ()


def prepare_images(
    input_dir: Path,
    output_dir: Path,
    config: VaePrepareConfig = VaePrepareConfig(),  # noqa: B008  (It is immutable.)
    *,
    held_out_share: float = HELD_OUT_SHARE,
    exclude: Sequence[str] = (),
    num_workers: int = 0,
    progress: Progress = no_progress,
    origin: str = "",
) -> VaePrepareReport:
    """Resizes every usable picture of a tree to a square, in the same tree under `output_dir`.

    "cover" fills the square and crops both ends evenly; "stretch" changes the proportions. PNG and WebP are lossless,
    JPEG has quality 95 and full chroma. Broken, tiny, huge, duplicate and unreadable files, and masks, are quarantined:
    listed in quarantine.jsonl, and not moved. Files that a pattern of `exclude` matches are ignored. `origin` names
    what the folder was unpacked from; default: the folder.

    Raises UserError if a folder is invalid, no picture is usable, a process dies or the disk is full;
    the next run continues. It also raises UserError if the folder has pictures of other settings.
    """
    check_folders(input_dir, output_dir, "vae")
    origin = origin or str(input_dir.resolve())
    check_output(output_dir, config, origin=origin)
    journal = Journal(output_dir / JOURNAL)  # Damaged rows are made again.
    journal.head = {"input_dir": origin}
    tree = scan_pictures(input_dir, exclude)
    repeats = find_duplicates(input_dir, tree.sources)
    sources = [source for source in tree.sources if source.path not in repeats]
    names = output_names([source.path for source in sources], SUFFIXES[config.format])
    jobs = [PictureJob(input_dir, output_dir, source, names[source.path], config) for source in sources]

    kept = keep_results(journal, jobs)
    missing = [job for job in jobs if job.source.path not in kept]
    run_jobs(prepare_picture, missing, num_workers, journal.append, progress, kept=len(kept))
    results = {row["source"]: row for row in journal.rows}
    rows = [results[source.path] for source in sources]
    journal.rewrite(rows)

    pictures, refused = _keep_usable(rows, output_dir)
    refused = sorted_refusals([*refused, *tree.refused, *repeats.values()])
    held_out = _publish(output_dir, pictures, refused, held_out_share)
    kept_pictures = sum(picture["source"] in kept for picture in pictures)
    return VaePrepareReport(
        input_dir=str(input_dir), output_dir=str(output_dir), made=len(pictures) - kept_pictures, kept=kept_pictures,
        held_out=held_out, ignored=tree.ignored, refused=refused,
        findings=findings_of([str(row["fingerprint"]) for row in pictures], held_out),
    )  # fmt: skip


def findings_of(fingerprints: Sequence[str], held_out: int) -> tuple[str, ...]:
    """Returns as text what a training on pictures of these fingerprints would warn of."""
    few = few_held_out(held_out, len(fingerprints), "pictures", "a higher --held-out-share of train-vae holds out more")
    return (few,) if few and len(fingerprints) > 1 else ()


def _keep_usable(rows: list[JournalRow], output_dir: Path) -> tuple[list[JournalRow], list[RefusedItem]]:
    """Separates pictures from rejected sources. Of sources with equal prepared pictures, only the first is kept."""
    pictures, refused = [], []
    firsts: dict[str, str] = {}
    for row in rows:
        if "reason" in row:
            refused.append(RefusedItem(row["source"], row["reason"], row["detail"]))
        elif (first := firsts.setdefault(row["sha256"], row["source"])) == row["source"]:
            pictures.append({key: row[key] for key in PICTURE_KEYS})
        else:
            refused.append(duplicate(row["source"], first, "becomes the same picture as"))
            with writing(output_dir):
                (output_dir / row["path"]).unlink(missing_ok=True)
    return pictures, refused


def _publish(output_dir: Path, pictures: list[JournalRow], refused: list[RefusedItem], held_out_share: float) -> int:
    """Writes the quarantine and then the manifest, which marks the folder as complete. Returns the number of held-out
    pictures."""
    write_quarantine(output_dir, refused)
    if not pictures:
        raise nothing_usable(f"{output_dir}: none of {len(refused)} files is a usable picture", output_dir)
    parts = split(pictures, held_out_share, key=lambda row: str(row["fingerprint"]))
    held_out = {row["path"] for row in parts.held_out}
    for row in pictures:
        row["split"] = "both" if parts.shared else "held_out" if row["path"] in held_out else "train"
    write_rows(output_dir / MANIFEST, pictures)
    return len(held_out)


# ---------------------------------------------------------------------------------------------- earlier results


@dataclass(frozen=True)
class PictureJob:
    """A source to prepare; `name` is the relative path of the prepared picture."""

    input_dir: Path
    output_dir: Path
    source: SourceFile
    name: str
    config: VaePrepareConfig

    def conditions(self) -> JournalRow:
        """Returns the values on which a result depends; an earlier one with other values is outdated."""
        return {
            "source": self.source.path,
            "source_bytes": self.source.bytes,
            "source_mtime_ns": self.source.mtime_ns,
            "recipe": dict(vars(self.config)),  # All settings on which a prepared picture depends.
        }

    def is_done(self, row: JournalRow, sums: set[str]) -> bool:
        """Returns True if an earlier result still holds; `sums` has the SHA-256 of the pictures before it.

        A picture with one of these was a duplicate, whose file has been removed. Unreadable sources are tried again.
        """
        if any(row.get(key) != value for key, value in self.conditions().items()):
            return False
        if "reason" in row:
            return bool(row["reason"] != "unreadable")
        file = self.output_dir / self.name
        is_there = file.is_file() and file.stat().st_size == row["bytes"]
        return row["path"] == self.name and (is_there or row["sha256"] in sums)


def check_output(output_dir: Path, config: VaePrepareConfig, *, origin: str) -> None:
    """Raises UserError if the folder contains anything but prepared pictures, those of another source than `origin`, or
    those of other settings."""
    journal = Journal(output_dir / JOURNAL)
    if journal.head is None:
        if output_dir.is_dir() and any(not file.name.startswith(".") for file in output_dir.iterdir()):
            raise UserError(
                f"{output_dir}: holds files that were not prepared here", hint="choose an empty or a new folder"
            )
        return
    check_recipe(journal, dict(vars(config)))
    if journal.head != {"input_dir": origin}:
        before = journal.head.get("input_dir", "an unknown folder")
        raise UserError(
            f"{output_dir}: was prepared from {before}, not from {origin}",
            hint="choose another output folder: --output-dir NEW_FOLDER",
        )


def check_recipe(journal: Journal, recipe: JournalRow) -> None:
    """Raises UserError if the folder has pictures of other settings."""
    for row in journal.rows:
        before = row.get("recipe", {}) if "path" in row else recipe
        if before.keys() != recipe.keys():
            raise unreadable(journal.path, "prepare the pictures again, into another folder: --output-dir NEW_FOLDER")
        if was := [f"{name} {before[name]}, not {recipe[name]}" for name in LOOKS if before[name] != recipe[name]]:
            raise UserError(
                f"{journal.path.parent}: its pictures were prepared with other settings: {'; '.join(was)}",
                hint="choose another output folder: --output-dir NEW_FOLDER",
            )


def keep_results(journal: Journal, jobs: Sequence[PictureJob]) -> set[str]:
    """Returns the sources of the jobs whose earlier result still holds; removes all other rows and their pictures.

    If jobs remain, it also removes the manifest, which is written when all jobs are done.
    """
    earlier = {row["source"]: row for row in journal.rows if "source" in row}
    rows: dict[str, JournalRow] = {}
    sums: set[str] = set()
    for job in jobs:
        row = earlier.get(job.source.path)
        if row is not None and job.is_done(row, sums):
            rows[job.source.path] = row
            sums.add(row.get("sha256", ""))
    outdated = [row["path"] for source, row in earlier.items() if source not in rows and "path" in row]
    folder = journal.path.parent
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if outdated or len(rows) < len(jobs):
            (folder / MANIFEST).unlink(missing_ok=True)
        for path in outdated:
            (folder / path).unlink(missing_ok=True)
    journal.rewrite(rows.values())
    return set(rows)


# ---------------------------------------------------------------------------------------------- one picture


def prepare_picture(job: PictureJob) -> JournalRow:
    """Prepares a picture in a worker process. Raises UserError if it cannot be written."""
    source = job.input_dir / job.source.path
    row = job.conditions()
    found = result_or_refusal(job.name, lambda: (fingerprint(source), _fit(source, job.config)))
    if isinstance(found, RefusedItem):
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
    check_colours(path, image)
    return image.resize((size, size), Image.Resampling.LANCZOS, reducing_gap=3.0)


def _centred(width: int, height: int) -> Box:
    side = min(width, height)
    left, top = (width - side) // 2, (height - side) // 2
    return left, top, left + side, top + side


def output_names(sources: Iterable[str], suffix: str, taken: Iterable[str] = ()) -> dict[str, str]:
    """Returns a unique path for each source's picture: its own with another suffix if that is free, and not `taken`.

    For a.gif and a.jpg, in this order, the paths are a.png and a.jpg.png. Names count as equal if any file system
    treats them as equal; a name that is still taken or too long is shortened and gets a hash.
    """
    sources = sorted(sources)
    taken = {_folded(str(folder)) for source in sources for folder in PurePosixPath(source).parents} | set(taken)
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


# ------------------------------------------------------------------------------------------------- reports


@dataclass(frozen=True)
class Disagreement:
    """Paths that differ between a prepared folder and its manifest: missing files, changed files, and files that are
    not in the manifest."""

    missing: list[str]
    changed: list[str]
    extra: list[str]


@dataclass(frozen=True, kw_only=True)
class ImageReport(DataReport):
    """Report on a folder. `pictures` is the number of decodable pictures, to which the next fields refer."""

    pictures: int
    held_out: int
    bytes: int
    formats: dict[str, int]
    width: ValueRange | None
    height: ValueRange | None
    manifest: Disagreement | None
    findings: tuple[str, ...] = ()


@dataclass(frozen=True)
class CheckedPicture:
    """A picture that has been decoded without errors."""

    source: SourceFile
    header: Header
    fingerprint: str
    sha256: str


def validate_images(
    input_dir: Path,
    limits: PictureLimits = PictureLimits(),  # noqa: B008  (It is immutable.)
    *,
    held_out_share: float = HELD_OUT_SHARE,
    exclude: Sequence[str] = (),
    num_workers: int = 0,
    progress: Progress = no_progress,
) -> ImageReport:
    """Decodes every picture of a folder tree, and compares a prepared folder with its manifest.

    Raises UserError if the folder is missing or holds no picture, or its manifest is damaged.
    """
    tree = scan_pictures(input_dir, None if is_prepared(input_dir) and not exclude else exclude)
    manifest = input_dir / MANIFEST
    listed = {row["path"]: row for row in read_rows(manifest, PICTURE_KEYS)} if is_prepared(input_dir) else None
    repeats = find_duplicates(input_dir, tree.sources)
    jobs = [source for source in tree.sources if source.path not in repeats]
    results: list[CheckedPicture | RefusedItem] = []
    run_jobs(partial(check_picture, input_dir, limits, listed is not None), jobs, num_workers, results.append, progress)

    checked = [result for result in results if isinstance(result, CheckedPicture)]
    refused = [*tree.refused, *repeats.values()] + [result for result in results if isinstance(result, RefusedItem)]
    marks = [(listed or {}).get(f.source.path, {}).get("fingerprint", f.fingerprint) for f in checked]
    sizes = [(f.header.width, f.header.height) for f in checked]
    held_out = len(split(marks, held_out_share, key=str).held_out)
    own = () if listed is None else (MANIFEST, JOURNAL, QUARANTINE)
    others = {kind: [name for name in names if name not in own] for kind, names in tree.ignored.items()}
    return ImageReport(
        input_dir=str(input_dir),
        pictures=len(checked),
        held_out=held_out,
        findings=findings_of(marks, held_out),
        bytes=sum(f.source.bytes for f in checked),
        formats=dict(Counter(f.header.format for f in checked)),
        width=value_range([width for width, _ in sizes]),
        height=value_range([height for _, height in sizes]),
        ignored={kind: names for kind, names in others.items() if names},
        refused=sorted_refusals(refused),
        manifest=None if listed is None else _compare(listed, checked, repeats, tree),
    )


def check_picture(
    folder: Path, limits: PictureLimits, is_prepared: bool, source: SourceFile
) -> CheckedPicture | RefusedItem:
    """Decodes a picture in a worker process. A prepared one with transparency is for a training with it."""

    def look() -> CheckedPicture:
        path = folder / source.path
        header = read_header(path, limits)
        channels = 4 if is_prepared and header.mode == "RGBA" else 3
        check_colours(path, read_picture(path, limits, channels=channels))
        return CheckedPicture(source, header, fingerprint(path), pooch.file_hash(path))

    return result_or_refusal(source.path, look)


def _compare(
    listed: dict[str, JournalRow], checked: list[CheckedPicture], repeats: dict[str, RefusedItem], tree: PictureTree
) -> Disagreement:
    present = {source.path for source in tree.sources} | {refusal.path for refusal in tree.refused}
    sums = {finding.source.path: finding.sha256 for finding in checked}
    sums |= {path: sums.get(refusal.repeats or "", "") for path, refusal in repeats.items()}
    return Disagreement(
        missing=sorted(listed.keys() - present),
        changed=sorted(path for path in listed.keys() & present if sums.get(path) != listed[path]["sha256"]),
        extra=sorted(present - listed.keys()),
    )
