"""Reports on a folder of pictures, prepared or not, and on its defects."""

from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gputrain.engine.data import HELD_OUT_SHARE, MANIFEST, Progress, fingerprint, no_progress, read_rows, split
from gputrain.engine.preparation import (
    DataReport,
    JournalRow,
    RefusedItem,
    SourceFile,
    ValueRange,
    find_duplicates,
    run_jobs,
    sorted_refusals,
    value_range,
)
from gputrain.fetch.files import sha256
from gputrain.vae.config import PictureLimits
from gputrain.vae.data import is_prepared
from gputrain.vae.pictures import (
    Header,
    PictureTree,
    check_colours,
    read_header,
    read_picture,
    result_or_refusal,
    scan_pictures,
)
from gputrain.vae.prepare import PICTURE_KEYS, findings_of


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
    modes: dict[str, int]
    width: ValueRange | None
    height: ValueRange | None
    megapixels: ValueRange | None
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
    num_workers: int = 0,
    progress: Progress = no_progress,
) -> ImageReport:
    """Decodes every picture of a folder tree, and compares a prepared folder with its manifest.

    Raises UserError if the folder is missing or holds no picture, or its manifest is damaged.
    """
    tree = scan_pictures(input_dir)
    manifest = input_dir / MANIFEST
    listed = {row["path"]: row for row in read_rows(manifest, PICTURE_KEYS)} if is_prepared(input_dir) else None
    repeats = find_duplicates(input_dir, tree.sources)
    jobs = [source for source in tree.sources if source.path not in repeats]
    results: list[CheckedPicture | RefusedItem] = []
    run_jobs(partial(check_picture, input_dir, limits, listed is not None), jobs, num_workers, results.append, progress)

    checked = [result for result in results if isinstance(result, CheckedPicture)]
    refused = [*tree.refused, *repeats.values()] + [result for result in results if isinstance(result, RefusedItem)]
    marks = [
        listed[f.source.path]["fingerprint"] if listed and f.source.path in listed else f.fingerprint for f in checked
    ]
    sizes = [(f.header.width, f.header.height) for f in checked]
    held_out = len(split(marks, held_out_share, key=str).held_out)
    return ImageReport(
        input_dir=str(input_dir),
        pictures=len(checked),
        held_out=held_out,
        findings=findings_of(marks, held_out),
        bytes=sum(f.source.bytes for f in checked),
        formats=dict(Counter(f.header.format for f in checked)),
        modes=dict(Counter(f.header.mode for f in checked)),
        width=value_range([width for width, _ in sizes]),
        height=value_range([height for _, height in sizes]),
        megapixels=value_range([width * height / 1e6 for width, height in sizes]),
        ignored=tree.ignored,
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
        return CheckedPicture(source, header, fingerprint(path), sha256(path))

    return result_or_refusal(source.path, look)


def _compare(
    listed: dict[str, JournalRow], checked: list[CheckedPicture], repeats: dict[str, RefusedItem], tree: PictureTree
) -> Disagreement:
    present = {source.path for source in tree.sources} | {refusal.path for refusal in tree.refused}
    sums = {finding.source.path: finding.sha256 for finding in checked}
    sums |= {path: sums.get(one.repeats or "", "") for path, one in repeats.items()}
    return Disagreement(
        missing=sorted(listed.keys() - present),
        changed=sorted(path for path in listed.keys() & present if sums.get(path) != listed[path]["sha256"]),
        extra=sorted(present - listed.keys()),
    )
