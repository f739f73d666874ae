"""The samples of a run as a report shows them: pictures, sounds and transcripts by step, and layouts of sheets."""

import contextlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from PIL import Image

from gputrain.engine.metrics import CAPTIONS, LAYOUT_KEY, REFERENCE
from gputrain.report.media import EmbeddedPicture, EmbeddedSound, MediaBudget, open_picture
from gputrain.report.records import RunRecord, is_inside
from gputrain.samples import LONGEST_CAPTION, clip_caption
from gputrain.speech.error_rates import character_error_rate

PICTURE_STEPS, PICTURES, PICTURE_SIDE = 6, 6, 320  # Steps and pictures of a grid, and the pixels of one.
SOUND_STEPS, SOUNDS = 3, 6
TEXT_STEPS, PLAYED = 8, 16  # PLAYED is the largest number of transcripts with a player.


# ----------------------------------------------------------------------------------------------------- files of samples


T = TypeVar("T")
SAMPLE = re.compile(r"(?P<name>.+)_step_(?P<step>\d{1,12})\.(?P<kind>png|wav|txt)", re.DOTALL)
MOST_FILES = 100_000
MOST_TRANSCRIPTS = 50
LONGEST_TEXT = 1_000_000  # Bytes of a file of transcripts.
ENTRY = re.compile(r"^clip: (.*?)\ntext: (.*?)\nread: (.*?)\n?$", re.DOTALL)

ByStep = dict[int, Path]


@dataclass
class SampleFiles:
    """Files in samples/ by name and step, the recordings by the name of the sound, and captions of sounds. Links to
    files outside the run folder are not read, and counted."""

    pictures: dict[str, ByStep] = field(default_factory=dict)
    sounds: dict[str, ByStep] = field(default_factory=dict)
    texts: dict[str, ByStep] = field(default_factory=dict)
    references: dict[str, Path] = field(default_factory=dict)
    captions: dict[str, str] = field(default_factory=dict)
    outside: int = 0


def find_samples(folder: Path) -> SampleFiles:
    """List the samples of a run folder. Names and steps are sorted."""
    found = SampleFiles()
    groups = {"png": found.pictures, "wav": found.sounds, "txt": found.texts}
    try:
        with os.scandir(folder / "samples") as entries:
            files = sorted(
                (entry for entry, _ in zip(entries, range(MOST_FILES), strict=False)), key=lambda entry: entry.name
            )
        has_inside = is_inside(folder / "samples", folder)
        paths = [
            Path(entry.path)
            for entry in files  # A pipe is no file, and would be waited for.
            if entry.is_file() and (is_inside(entry.path, folder) if entry.is_symlink() else has_inside)
        ]
    except OSError:
        return found
    found.outside = len(files) - len(paths)
    for path in paths:
        if match := SAMPLE.fullmatch(path.name):
            groups[match["kind"]].setdefault(match["name"], {})[int(match["step"])] = path
        elif path.suffix == ".wav" and path.stem.endswith(REFERENCE):
            found.references[path.stem.removesuffix(REFERENCE)] = path
    for group in groups.values():
        for name, by_step in group.items():
            group[name] = dict(sorted(by_step.items()))
    with contextlib.suppress(OSError, ValueError, AttributeError, RecursionError):
        captions = folder / "samples" / CAPTIONS
        content = json.loads(captions.read_text(encoding="utf-8")) if captions in paths else {}
        found.captions = {str(name): str(text)[:LONGEST_CAPTION] for name, text in content.items()}
    return found


def evenly_spaced(values: Sequence[T], most: int) -> list[T]:
    """Returns at most `most` of the values, evenly spread: always the last one, and the first one if there is room."""
    if len(values) <= most:
        return list(values)
    if most <= 1:
        return list(values[-1:])
    return [values[round(index * (len(values) - 1) / (most - 1))] for index in range(most)]


class SheetPart(NamedTuple):
    """A part of a sheet: its place (left, top, right, bottom) and its caption."""

    box: tuple[int, int, int, int]
    caption: str


class SheetLayout(NamedTuple):
    """The labels of the rows of a sheet, and the parts of each row."""

    heads: list[str]
    rows: list[list[SheetPart]]


@dataclass
class SheetFile:
    """A file of a sheet with its layout, and with its image while parts are cut out of it."""

    path: Path
    layout: SheetLayout
    image: Image.Image | None

    @classmethod
    def read(cls, path: Path) -> "SheetFile | None":
        """Read a file; returns None if it contains no layout. Raises what `open_picture` raises."""
        image = open_picture(path)
        layout = layout_of(image)
        return cls(path, layout, image) if layout else None


def layout_of(image: Image.Image) -> SheetLayout | None:
    """Returns the layout that a sheet's file contains; None if it contains none."""
    try:
        layout: Any = json.loads(image.info[LAYOUT_KEY])
        heads = [str(head) for head in layout["heads"]]
        rows = [[_part(part, image) for part in row] for row in layout["rows"]]
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        return None
    return SheetLayout(heads, rows) if len(heads) == len(rows) else None


def _part(part: Any, image: Image.Image) -> SheetPart:
    """Raises ValueError if the place of a part is not in the picture."""
    left, top, right, bottom = (int(value) for value in part["box"])
    if not (0 <= left < right <= image.width and 0 <= top < bottom <= image.height):
        raise ValueError
    return SheetPart((left, top, right, bottom), str(part["caption"])[:100])


# ------------------------------------------------------------------------------------------------------- transcripts


@dataclass(frozen=True)
class ReadText:
    """A clip with the text that was spoken and the text that was read."""

    clip: str
    text: str
    read: str

    @property
    def cer(self) -> float:
        """The character error rate."""
        return character_error_rate(self.text, self.read)

    @property
    def edits(self) -> list[tuple[str, str]]:
        """Pieces of the text that was read: "equal", "delete" (missing in it), "insert" (not in what was spoken)."""
        from rapidfuzz.distance import Levenshtein

        made: list[tuple[str, str]] = []
        for edit in Levenshtein.opcodes(self.text, self.read):
            if edit.tag in ("delete", "replace"):
                made.append(("delete", self.text[edit.src_start : edit.src_end]))
            if edit.tag != "delete":
                change = "equal" if edit.tag == "equal" else "insert"
                made.append((change, self.read[edit.dest_start : edit.dest_end]))
        return made


def read_transcripts(path: Path) -> list[ReadText]:
    """Read the transcripts of one step; entries that are none are left out. Raises OSError."""
    with path.open("rb") as file:
        content = file.read(LONGEST_TEXT).decode("utf-8", "replace")
    entries = re.split(r"\n\n(?=clip: )", content.strip("\n"))
    matches = [match for entry in entries if (match := ENTRY.match(entry))]
    return [ReadText(*(part[:2000] for part in match.groups())) for match in matches[:MOST_TRANSCRIPTS]]


# ------------------------------------------------------------------------------------------------------------- sections


@dataclass(frozen=True)
class GridCell:
    """A picture of a grid with its caption; None if it could not be embedded."""

    picture: EmbeddedPicture | None
    caption: str


@dataclass(frozen=True)
class PictureGrid:
    """Held-out pictures in rows: the original, and what was made of it at each step."""

    heads: list[str]
    rows: list[list[GridCell]]


@dataclass(frozen=True)
class SoundRow:
    """A recording, if there is one, and what was made at each step; `sounds` has a title for each."""

    caption: str
    sounds: list[EmbeddedSound]


@dataclass(frozen=True)
class TranscriptRow:
    """A clip with its transcript, its character error rate at some steps, and its recording, if there is one."""

    read: ReadText
    rates: list[float | None]
    recording: EmbeddedSound | None = None


@dataclass(frozen=True)
class TranscriptTable:
    """Transcripts of the last step, with the error rates at some steps."""

    step: int
    steps: list[int]
    rows: list[TranscriptRow]

    @property
    def has_recordings(self) -> bool:
        return any(row.recording for row in self.rows)


@dataclass
class SampleSection:
    """All samples of a run that are shown."""

    grids: list[PictureGrid] = field(default_factory=list)
    sounds: list[SoundRow] = field(default_factory=list)
    pictures: list[EmbeddedPicture] = field(default_factory=list)
    transcripts: TranscriptTable | None = None

    @property
    def is_empty(self) -> bool:
        return not (self.grids or self.sounds or self.pictures or self.transcripts)


def sample_section(run: RunRecord, budget: MediaBudget) -> SampleSection:
    """Returns the samples of a run, as far as the limits allow: sounds of the last step come first."""
    files = find_samples(run.folder)
    section = SampleSection()
    budget.unreadable += files.outside
    section.sounds = sound_rows(files.sounds, files.references, files.captions, budget)
    for name, by_step in files.pictures.items():
        grid = picture_grid(by_step, budget)
        if grid:
            section.grids.append(grid)
            continue
        step, path = list(by_step.items())[-1]
        title = f"{name.replace('_', ' ')}, step {step:,}"
        whole = budget.of_file(path, partial(_whole_picture, path, title, budget))
        section.pictures += [whole] if whole else []
    for by_step in files.texts.values():
        section.transcripts = section.transcripts or transcript_table(by_step, files, budget)
    return section


def _whole_picture(path: Path, alt: str, budget: MediaBudget) -> EmbeddedPicture | None:
    return budget.picture(open_picture(path), alt)


def picture_grid(by_step: ByStep, budget: MediaBudget) -> PictureGrid | None:
    """Returns sheets of several steps as a grid; None if they don't contain a layout of two rows.

    The originals are those of the last sheet.
    """
    sheets: list[tuple[int, SheetFile]] = []
    for step in evenly_spaced(list(by_step), PICTURE_STEPS):
        sheet = budget.of_file(by_step[step], partial(SheetFile.read, by_step[step]), "sheet")
        if sheet and len(sheet.layout.rows) == 2 and len(sheet.layout.rows[0]) == len(sheet.layout.rows[1]):
            sheets.append((step, sheet))
        elif sheet:
            sheet.image = None
    if not sheets:
        return None
    _, last = sheets[-1]
    rows = []
    for number, part in enumerate(last.layout.rows[0][:PICTURES]):
        alt = f"held-out picture {number + 1}"
        row = [_cell(last, part, f"{alt}, {last.layout.heads[0]}", budget)]
        for step, sheet in sheets:
            if number < len(sheet.layout.rows[1]):
                made = sheet.layout.rows[1][number]
                row.append(_cell(sheet, made, f"{alt}, {sheet.layout.heads[1]} at step {step}, {made.caption}", budget))
            else:
                row.append(GridCell(None, ""))
        rows.append(row)
    for _, sheet in sheets:
        sheet.image = None  # A page keeps the sheet, and needs the image no more.
    return PictureGrid([last.layout.heads[0], *(f"step {step:,}" for step, _ in sheets)], rows)


def _cell(sheet: SheetFile, part: SheetPart, alt: str, budget: MediaBudget) -> GridCell:
    def cut() -> EmbeddedPicture | None:
        sheet.image = sheet.image or open_picture(sheet.path)
        return budget.picture(sheet.image.crop(part.box), alt, PICTURE_SIDE)

    return GridCell(budget.of_file(sheet.path, cut, part.box), part.caption)


def sound_rows(
    sounds: dict[str, ByStep], references: dict[str, Path], captions: dict[str, str], budget: MediaBudget
) -> list[SoundRow]:
    """Returns the recordings and the sounds of the last step, and of earlier ones as far as there is room."""
    names = [*sounds][:SOUNDS]
    made: dict[str, list[tuple[int, EmbeddedSound]]] = {name: [] for name in names}
    recordings: dict[str, EmbeddedSound] = {}
    for name in names:
        if name in references and (sound := budget.sound(references[name], "recording")):
            recordings[name] = sound
    # The last step of every sound comes before earlier steps of the first one.
    for turn in range(SOUND_STEPS):
        for name in names:
            steps = evenly_spaced(list(sounds[name]), SOUND_STEPS)[::-1]
            if turn < len(steps) and (sound := budget.sound(sounds[name][steps[turn]], f"step {steps[turn]:,}")):
                made[name].append((steps[turn], sound))
    rows = []
    for name in names:
        in_order = [sound for _, sound in sorted(made[name], key=lambda place: place[0])]
        heard = [recordings[name], *in_order] if name in recordings else in_order
        rows += [SoundRow(captions.get(name, name.replace("_", " ")), heard)] if heard else []
    return rows


def transcript_table(by_step: ByStep, files: SampleFiles, budget: MediaBudget) -> TranscriptTable | None:
    """Returns the transcripts of the last step that can be read, with the error rates at some steps, and with the
    recordings of the first clips."""
    found: dict[int, list[ReadText]] = {}
    for step in evenly_spaced(list(by_step), TEXT_STEPS):
        try:
            found[step] = read_transcripts(by_step[step])
        except OSError:
            continue
    steps = [step for step, texts in found.items() if texts]
    if not steps:
        return None
    recordings = {files.captions.get(name): path for name, path in files.references.items()}
    rows = []
    for number, read in enumerate(found[steps[-1]]):
        path = recordings.get(clip_caption(read.clip, read.text)) if number < PLAYED else None
        sound = budget.sound(path, "recording", with_spectrogram=False) if path else None
        rates = [next((other.cer for other in found[step] if other.clip == read.clip), None) for step in steps]
        rows.append(TranscriptRow(read, rates, sound))
    return TranscriptTable(steps[-1], steps, rows)
