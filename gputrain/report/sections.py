"""The samples of a run as a report shows them: pictures, sounds and transcripts by step, and layouts of sheets."""

import contextlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from PIL import Image

from gputrain.engine.metrics import CAPTIONS, LAYOUT_KEY, REFERENCE
from gputrain.report.media import EmbeddedPicture, EmbeddedSound, MediaBudget, open_picture
from gputrain.report.records import RunRecord, is_inside
from gputrain.samples import LONGEST_CAPTION, clip_caption
from gputrain.speech.error_rates import character_error_rate

PICTURE_STEPS, PICTURES = 6, 6  # Steps and pictures of a sheet that are shown.
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


class ShownPicture(NamedTuple):
    """A picture with what it is, such as "original" or "step 500", and its caption."""

    title: str
    picture: EmbeddedPicture
    caption: str = ""


@dataclass
class PictureItem:
    """A picture at some steps, the newest first, beside its original if it has one."""

    title: str
    original: ShownPicture | None = None
    made: list[ShownPicture] = field(default_factory=list)


@dataclass(frozen=True)
class SoundRow:
    """A recording, if there is one, and what was made at some steps, the newest first; each has a title."""

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

    pictures: list[PictureItem] = field(default_factory=list)  # With their originals.
    sounds: list[SoundRow] = field(default_factory=list)
    sheets: list[PictureItem] = field(default_factory=list)
    transcripts: TranscriptTable | None = None

    @property
    def is_empty(self) -> bool:
        return not (self.pictures or self.sounds or self.sheets or self.transcripts)


def sample_section(run: RunRecord, budget: MediaBudget) -> SampleSection:
    """Returns the samples of a run, as far as the limits allow: sounds of the last step come first."""
    files = find_samples(run.folder)
    section = SampleSection()
    budget.unreadable += files.outside
    section.sounds = sound_rows(files.sounds, files.references, files.captions, budget)
    for name, by_step in files.pictures.items():
        if items := pictures_of_sheets(by_step, budget):
            section.pictures += items
        elif sheet := whole_sheets(name.replace("_", " "), by_step, budget):
            section.sheets.append(sheet)
    for by_step in files.texts.values():
        section.transcripts = section.transcripts or transcript_table(by_step, files, budget)
    return section


def whole_sheets(title: str, by_step: ByStep, budget: MediaBudget) -> PictureItem | None:
    """Returns pictures of several steps as they are; None if none can be shown."""
    item = PictureItem(title)
    for step in evenly_spaced(list(by_step), PICTURE_STEPS)[::-1]:
        path, shown_at = by_step[step], f"step {step:,}"
        whole = budget.of_file(path, partial(_whole_picture, path, f"{title}, {shown_at}", budget))
        item.made += [ShownPicture(shown_at, whole)] if whole else []
    return item if item.made else None


def _whole_picture(path: Path, alt: str, budget: MediaBudget) -> EmbeddedPicture | None:
    return budget.picture(open_picture(path), alt)


def pictures_of_sheets(by_step: ByStep, budget: MediaBudget) -> list[PictureItem]:
    """Returns the pictures of sheets of several steps that contain a layout of two rows, originals and what was made of
    them; none if no sheet does. The originals are those of the newest sheet."""
    items: list[PictureItem] = []
    for step in evenly_spaced(list(by_step), PICTURE_STEPS)[::-1]:
        path, title, is_newest = by_step[step], f"step {step:,}", not items
        rows = budget.of_file(path, partial(_pictures_in, path, title, budget, with_originals=is_newest), is_newest)
        for number, (original, made) in enumerate(rows or ()):
            if is_newest:
                items.append(PictureItem(f"picture {number + 1}", original))
            if made and number < len(items):
                items[number].made.append(made)
    return [item for item in items if item.made]


def _pictures_in(
    path: Path, step: str, budget: MediaBudget, *, with_originals: bool
) -> list[tuple[ShownPicture | None, ShownPicture | None]] | None:
    """Returns originals and what was made of them; None if the file contains no layout of two equally long rows."""
    image = open_picture(path)
    layout = layout_of(image)
    if not layout or len(layout.rows) != 2 or len(layout.rows[0]) != len(layout.rows[1]):
        return None

    def shown(part: SheetPart, title: str, of: str) -> ShownPicture | None:
        picture = budget.picture(image.crop(part.box), ", ".join(filter(None, (of, title, part.caption))))
        return ShownPicture(title, picture, part.caption) if picture else None

    pairs = enumerate(zip(*layout.rows, strict=True), start=1)
    return [
        (shown(first, layout.heads[0], f"picture {number}") if with_originals else None,
         shown(second, step, f"picture {number}, {layout.heads[1]}"))
        for number, (first, second) in islice(pairs, PICTURES)
    ]  # fmt: skip


def sound_rows(
    sounds: dict[str, ByStep], references: dict[str, Path], captions: dict[str, str], budget: MediaBudget
) -> list[SoundRow]:
    """Returns the recordings and the sounds of the last step, and of earlier ones as far as there is room."""
    names = [*sounds][:SOUNDS]
    made: dict[str, list[EmbeddedSound]] = {name: [] for name in names}
    recordings: dict[str, EmbeddedSound] = {}
    for name in names:
        if name in references and (sound := budget.sound(references[name], "recording")):
            recordings[name] = sound
    # The last step of every sound comes before earlier steps of the first one.
    for turn in range(SOUND_STEPS):
        for name in names:
            steps = evenly_spaced(list(sounds[name]), SOUND_STEPS)[::-1]
            if turn < len(steps) and (sound := budget.sound(sounds[name][steps[turn]], f"step {steps[turn]:,}")):
                made[name].append(sound)
    rows = []
    for name in names:
        heard = [recordings[name], *made[name]] if name in recordings else made[name]
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
