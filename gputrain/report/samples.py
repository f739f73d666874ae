"""The samples of a run folder by name and step, and the layout of sheets of pictures."""

import contextlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from PIL import Image

from gputrain.engine.metrics import CAPTIONS, LAYOUT_KEY, REFERENCE
from gputrain.engine.samples import LONGEST_CAPTION
from gputrain.speech.error_rates import character_error_rate

T = TypeVar("T")
SAMPLE = re.compile(r"(?P<name>.+)_step_(?P<step>\d{1,12})\.(?P<kind>png|wav|txt)", re.DOTALL)
MOST_FILES = 100_000
MOST_TRANSCRIPTS = 50
LONGEST_TEXT = 1_000_000  # Bytes of a file of transcripts.
ENTRY = re.compile(r"^clip: (.*?)\ntext: (.*?)\nread: (.*?)\n?$", re.DOTALL)

ByStep = dict[int, Path]


@dataclass
class SampleFiles:
    """Files in samples/ by name and step, the recordings by the name of the sound, and captions of sounds."""

    pictures: dict[str, ByStep] = field(default_factory=dict)
    sounds: dict[str, ByStep] = field(default_factory=dict)
    texts: dict[str, ByStep] = field(default_factory=dict)
    references: dict[str, Path] = field(default_factory=dict)
    captions: dict[str, str] = field(default_factory=dict)


def find_samples(folder: Path) -> SampleFiles:
    """List the samples of a run folder. Names and steps are sorted."""
    found = SampleFiles()
    groups = {"png": found.pictures, "wav": found.sounds, "txt": found.texts}
    try:
        paths = sorted(path for path, _ in zip((folder / "samples").iterdir(), range(MOST_FILES), strict=False))
    except OSError:
        return found
    for path in paths:
        if match := SAMPLE.fullmatch(path.name):
            groups[match["kind"]].setdefault(match["name"], {})[int(match["step"])] = path
        elif path.suffix == ".wav" and path.stem.endswith(REFERENCE):
            found.references[path.stem.removesuffix(REFERENCE)] = path
    for group in groups.values():
        for name, by_step in group.items():
            group[name] = dict(sorted(by_step.items()))
    with contextlib.suppress(OSError, ValueError, AttributeError, RecursionError):
        content = json.loads((folder / "samples" / CAPTIONS).read_text(encoding="utf-8"))
        found.captions = {str(name): str(text)[:LONGEST_CAPTION] for name, text in content.items()}
    return found


def spread(values: Sequence[T], most: int) -> list[T]:
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
    """Returns the layout that a sheet's file contains; None if it contains none, as those of older versions."""
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


class Edit(NamedTuple):
    """A piece of a transcript: "equal", "delete" (missing in what was read), "insert" (not in the text)."""

    change: str
    text: str


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
    def edits(self) -> list[Edit]:
        """The text that was read, with missing and additional pieces; both where one replaces the other."""
        from rapidfuzz.distance import Levenshtein

        made: list[Edit] = []
        for operation in Levenshtein.opcodes(self.text, self.read):
            change = operation.tag
            missing = self.text[operation.src_start : operation.src_end]
            read = self.read[operation.dest_start : operation.dest_end]
            if change == "equal":
                made.append(Edit("equal", read))
                continue
            made += [Edit("delete", missing)] if missing else []
            made += [Edit("insert", read)] if read else []
        return made


def read_transcripts(path: Path) -> list[ReadText]:
    """Read the transcripts of one step; entries that are none are left out. Raises OSError."""
    with path.open("rb") as file:
        content = file.read(LONGEST_TEXT).decode("utf-8", "replace")
    entries = re.split(r"\n\n(?=clip: )", content.strip("\n"))
    matches = [match for entry in entries if (match := ENTRY.match(entry))]
    return [ReadText(*(part[:2000] for part in match.groups())) for match in matches[:MOST_TRANSCRIPTS]]
