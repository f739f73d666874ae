"""Reads the transcripts of a folder of recordings: tables, JSON, or a text file for each recording.

    LJSpeech     id|text or id|text|normalised text, the recordings in wavs/ or next to the table
    Piper        recording|speaker|text
    CSV          a header in any order, cells separated by |, tabs, commas or semicolons
    JSON         lines or a list of {"audio": ..., "text": ..., "speaker": ...}, "speaker" is optional
    pairs        NAME.wav and NAME.txt, anywhere in the tree, or NAME.json with {"text": ...}
    subtitles    NAME.wav and NAME.srt or NAME.vtt, anywhere in the tree, for a recogniser
    Common Voice client_id, path, sentence, ... separated by tabs, the recordings in clips/

A table may have a header that names its columns. Columns or keys `start`, `end`, `offset` and `duration`, in seconds,
cut a clip out of its recording. An invalid line is left out, without effect on the others.
"""

import logging
import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from gputrain.audio.prepare import RefusalReason
from gputrain.data_in.preparation import RefusedItem
from gputrain.errors import UserError
from gputrain.formatting import counted
from gputrain.speech import subtitles
from gputrain.speech import transcript_tables as tables
from gputrain.speech.sound_finder import PLACES, SoundFinder
from gputrain.speech.text.lines import read_text
from gputrain.speech.transcript_tables import (
    HEADINGS,
    MEANINGS,
    TranscriptColumn,
    TranscriptColumns,
    json_object,
    role_of,
)
from gputrain.speech.utterances import (
    LineChoice,
    LineTags,
    TranscriptRules,
    Utterance,
    with_one_text,
)

log = logging.getLogger(__name__)

JSON_LINES = {".jsonl", ".json", ".ndjson"}
SUFFIXES = ({".csv", ".tsv", ".psv", ".list"}, JSON_LINES, {".txt"})  # A text may be notes.
TRANSCRIPTS = frozenset[str]().union(*SUFFIXES)
# Files by which published corpora are known.
LAYOUTS = {
    "LibriSpeech": "*.trans.txt", "LibriTTS": "*.normalized.txt", "VCTK": "txt/*/*.txt", "CMU Arctic": "txt.done.data",
    "Kaldi": "wav.scp",
}  # fmt: skip
LOOKED_AT = 50  # number of lines read to detect a transcript
TRANSCRIPTS_HINT = "name the transcript with --transcripts FILE"
INVALID = "holds invalid characters (NUL, U+FFFD or surrogates)"


@dataclass
class Transcripts:
    """The transcripts of a folder, gathered file by file. `source` describes the file and the detected format."""

    folder: Path
    sounds: SoundFinder
    source: str = ""
    utterances: list[Utterance] = field(default_factory=list)
    refused: list[RefusedItem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # Each is a sentence about something unexpected.
    columns: dict[str, str] = field(default_factory=dict)  # role of each column or key; "" if ignored
    files: set[str] = field(default_factory=set)  # files that were read
    named: set[str] = field(default_factory=set)  # recordings that a line refers to, accepted or not
    unnamed: Sequence[str] = ()  # recordings that a file that the user has chosen leaves out
    tags: dict[int, LineTags] = field(default_factory=dict)  # tags of utterances, by their place
    to_ignore: Callable[[str], str] = "take the key of the {} out of the lines".format

    def refuse(self, where: str, reason: RefusalReason, detail: str) -> None:
        self.refused.append(RefusedItem(where, reason, detail))

    def find(self, name: str) -> list[str]:
        """Finds the recordings that a line may refer to; a single match is marked as named."""
        found = self.sounds.find(name)
        if len(found) == 1:
            self.named.add(found[0])
        return found

    def read(self, file: Path) -> str:
        """Returns the text of a file, which is then no other file of the folder. Raises UserError as `read_text`."""
        if file.is_relative_to(self.folder):
            self.files.add(file.relative_to(self.folder).as_posix())
        return read_text(file, TRANSCRIPTS_HINT)

    def add(self, where: str, row: Mapping[str, Any], roles: Mapping[str, TranscriptColumn], sound: str = "") -> None:
        """Adds the utterance of a row of a table, or refuses it: `roles` tells what its columns hold, the preferred
        ones first. `sound` is the recording, if the row belongs to one."""
        values: dict[TranscriptColumn, str] = {}
        for column, role in roles.items():
            if role != "other" and role not in values and (value := _plain_value(row.get(column), role)):
                values[role] = value
                self.columns[column] = role
        name, speaker = sound or values.get("audio", ""), values.get("speaker", "")
        text = values.get("normalized") or values.get("text", "")
        found = self.find(name)
        try:
            span = tables.span_of(values.get("start"), values.get("end"), values.get("duration"))
        except ValueError as error:
            self.refuse(where, "malformed", f"{name}: {error}")
            return
        if invalid(text + speaker):
            self.refuse(where, "malformed", INVALID)
        elif not name:
            self.refuse(where, "malformed", "names no recording")
        elif not found:
            place = "" if os.path.isabs(name) else f" in {self.folder}"
            self.refuse(where, "no sound", f"{name}: no such recording{place}")
        elif len(found) > 1:
            self.refuse(where, "ambiguous sound", f"{name} may be {' or '.join(found[:3])}: use its path")
        elif not text:
            self.refuse(where, "no transcript", f"{found[0]}: its text is empty")
        else:
            person = " ".join(unicodedata.normalize("NFC", speaker).split())
            self.tags[len(self.utterances)] = {role: values[role] for role in MEANINGS if role in values}
            self.utterances.append(Utterance(found[0], " ".join(text.split()), person, where, span))

    def choose_lines(self, source: str, language: str) -> None:
        """Leaves out the utterances that columns exclude, and adds sentences about it to the notes."""
        choice = LineChoice(source, self.tags, len(self.utterances), language, self.to_ignore)
        self.columns = {name: "" if role in choice.unused else role for name, role in self.columns.items()}
        for place, (reason, detail) in choice.left_out.items():
            self.refuse(self.utterances[place].where, reason, detail)
        self.utterances = [kept for place, kept in enumerate(self.utterances) if place not in choice.left_out]
        self.notes += choice.notes


def invalid(text: str) -> bool:
    return any(letter in "\0\ufffd" or "\ud800" <= letter <= "\udfff" for letter in text)


def _plain_value(value: Any, role: TranscriptColumn) -> str:
    """Returns the value of a cell or a key as text; "" for one that is missing (None, or NaN, which Python writes for
    it), and for lists and objects, except for the object of a recording with its path, and those that change what a
    line means, which must not be ignored."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, dict):
        value = value.get("path")
    if value is None or value != value:
        return ""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value).strip() if isinstance(value, str | int | float) or role in MEANINGS else ""


def read_transcripts(
    folder: Path,
    paths: Sequence[str],
    *,
    file: Path | None = None,
    columns: TranscriptColumns = (),
    rules: TranscriptRules = TranscriptRules(),  # noqa: B008  (It is immutable.)
) -> Transcripts:
    """Reads the transcripts of the recordings `paths` of a folder, from `file` or from files found in the folder.

    `columns` are those of a table; default: detected. Recordings without a transcript, and those with two different
    ones, are left out; those that a chosen `file` does not name are not part of the choice. Raises UserError if no
    transcript file or several are found, or one is not UTF-8.
    """
    beside, is_chosen = _files_beside(folder, paths, rules), file is not None
    file = file or _find_table(folder, beside)
    place = file.relative_to(folder).parent.as_posix() if file and file.is_relative_to(folder) else "."
    bases = PLACES if place == "." else (*(f"{place}/{name}" for name in PLACES), *PLACES)
    reading = Transcripts(folder, SoundFinder(paths, bases, folder))
    if file is None:
        has_subtitles = any(_is_subtitle(files[0]) for files in beside.values())
        reading.source = "subtitles next to the recordings" if has_subtitles else "a text file for each recording"
        _read_beside(reading, beside, rules)
    else:
        reading.source = f"{file.name}, {_read_file(reading, file, columns)}"
    log.info("transcripts: %s", reading.source)
    reading.choose_lines(file.name if file else reading.source, rules.language)
    reading.utterances = with_one_text(reading.utterances, reading.refused, rules.needs_speakers)
    unnamed = sorted(set(paths) - reading.named)
    if is_chosen:
        reading.unnamed = unnamed
    else:
        for path in unnamed:
            reading.refuse(path, "no transcript", f"it has no text ({reading.source})")
    return reading


# ----------------------------------------------------------------------------------------- one file for all recordings


def _find_table(folder: Path, beside: Mapping[str, Sequence[str]]) -> Path | None:
    """Finds the transcript file of a folder: metadata.csv or of another suffix, otherwise the only table, JSON or text.
    None if there are files of recordings `beside` them instead; objects of JSON there may have anything else, and are
    read if there is no table."""
    of_recordings = {file for files in beside.values() for file in files}
    has_texts = not all(file.lower().endswith(".json") for file in of_recordings)
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and not path.name.startswith(".")]
    files = [path for path in files if path.suffix.lower() in TRANSCRIPTS and path.name not in of_recordings]
    found = [path for path in files if path.stem == "metadata"]
    for suffixes in [] if has_texts else SUFFIXES:
        found = found or [path for path in files if path.suffix.lower() in suffixes]
    if len(found) + has_texts > 1:
        names = ", ".join([path.name for path in found] + ["text files of recordings"] * has_texts)
        raise UserError(
            f"{folder}: transcripts in several places: {names}",
            hint="name one with --transcripts FILE, and if necessary its columns: --transcript-columns audio,text",
        )
    if not found and not beside:
        corpus = next((name for name, pattern in LAYOUTS.items() if any(folder.rglob(pattern))), "")
        layout = f"; it has the layout of {corpus}, which is not read: write a table of path|speaker|text" * bool(
            corpus
        )
        raise UserError(
            f"{folder}: no transcripts: neither metadata.csv, JSON lines, nor text files of recordings{layout}",
            hint="name the file with --transcripts FILE, and --transcript-columns audio,text",
        )
    return found[0] if found else None


def has_transcripts(folder: Path) -> bool:
    """Returns True if a file may be a table or JSON lines, which may name recordings elsewhere."""
    return any(path.suffix.lower() in TRANSCRIPTS for path in folder.iterdir() if not path.name.startswith("."))


def _read_file(reading: Transcripts, file: Path, columns: TranscriptColumns) -> str:
    """Reads a table or JSON; returns a description of the detected format."""
    text = reading.read(file)
    if not text.strip():
        raise UserError(f"{file}: empty", hint="expected a line for each recording, such as NAME|TEXT")
    if file.suffix.lower() in JSON_LINES or tables.holds_json(text):
        return _read_json(reading, file, text)
    return _read_table(reading, file, text.split("\n"), columns)


def _read_json(reading: Transcripts, file: Path, text: str) -> str:
    rows = tables.json_rows(text)
    roles = tables.roles_of({key for _, row in rows if isinstance(row, dict) for key in row})
    tables.check_units(file.name, roles)
    if roles and not {"text", "normalized"} & set(roles.values()):
        named = ", ".join(sorted(roles))
        raise UserError(
            f"{file}: no column of texts; columns: {named}", hint=f"name it {' or '.join(HEADINGS['text'][:4])}"
        )
    reading.columns |= dict.fromkeys(roles, "")
    for place, row in rows:
        where = f"{file.name}, {place}"
        if isinstance(row, str):
            reading.refuse(where, "malformed", row)
        else:
            reading.add(where, row, roles)
    return "JSON lines" if rows[0][0].startswith("line") else "JSON"


def _read_table(reading: Transcripts, file: Path, lines: Sequence[str], columns: TranscriptColumns) -> str:
    filled = [line for line in lines if line.strip()]
    audio_at = columns.index("audio") if columns else 0
    separator = _separator(file, filled[:LOOKED_AT], reading.sounds, audio_at)
    alone = [tables.first_cells(line, separator) for line in filled]
    has_header = tables.is_header(alone[0]) and not reading.sounds.find(alone[0][audio_at])
    if has_header:
        tables.check_units(f"{file.name}, line 1", alone[0])
        doubled = [name for name in alone[0] if alone[0].count(name) > 1 and role_of(name) != "other"]
        if doubled and not columns:
            first = [role_of(name) if alone[0].index(name) == at else "other" for at, name in enumerate(alone[0])]
            raise UserError(
                f"{file}: several columns are called {doubled[0]}",
                hint=f"{tables.COLUMNS_HINT}, such as --transcript-columns {','.join(first)}",
            )
        columns = columns or tuple(map(role_of, alone[0]))
    elif not columns and separator == "," and len({len(cells) for cells in alone}) > 1:
        columns = ("audio", "text")  # The other commas are those of texts.
    columns = columns or tables.columns_of(file, alone)
    reading.to_ignore = lambda kind: f"--transcript-columns {','.join('other' if c == kind else c for c in columns)}"
    headings = alone[0] if has_header and len(alone[0]) == len(columns) else columns
    names = [name if headings.count(name) == 1 else f"column {number}" for number, name in enumerate(headings, 1)]
    reading.columns |= dict.fromkeys(names, "")
    roles = dict(zip(names, columns, strict=True))
    roles = {name: roles[name] for name in tables.roles_of(names)}  # The preferred ones come first.
    least = 2 if columns == tables.LJSPEECH else len(columns)

    def is_row(cells: Sequence[str]) -> bool:
        return len(cells) >= len(columns) and bool(reading.sounds.find(cells[columns.index("audio")]))

    for number, cells in list(tables.records(lines, separator, len(columns), is_row))[has_header:]:
        where = f"{file.name}, line {number}"
        if isinstance(cells, str):
            reading.refuse(where, "malformed", cells)
            continue
        while len(cells) > len(columns) and not cells[-1]:
            cells = cells[:-1]  # A separator at the end of the line.
        if len(cells) > len(columns) and separator == "," and columns[-1] == "text" and '"' not in lines[number - 1]:
            cells = lines[number - 1].split(",", len(columns) - 1)  # The text may have commas.
        if least <= len(cells) <= len(columns):
            reading.add(where, dict(zip(names, cells, strict=False)), roles)
        else:
            wanted = ", ".join(columns)
            reading.refuse(where, "malformed", f"{counted(len(cells), 'column')}, expected {len(columns)}: {wanted}")
            reading.find(cells[0])
    return f"a table of {', '.join(columns)}{' by its header' if has_header else ''}"


def _separator(file: Path, lines: Sequence[str], sounds: SoundFinder, audio_at: int) -> str:
    """Returns the separator of a table: that of its header, or that between the names of recordings and their texts."""
    usual = ("\t", "|", ";", ",") if file.suffix.lower() == ".tsv" else tables.SEPARATORS
    for separator in usual:
        if tables.is_header(tables.first_cells(lines[0], separator)):
            return separator
    rows = {sign: [tables.first_cells(line, sign) for line in lines] for sign in usual}
    split = {sign: [cells for cells in rows[sign] if len(cells) > max(audio_at, 1)] for sign in usual}
    named = {sign: sum(bool(sounds.find(cells[audio_at])) for cells in split[sign]) for sign in usual}
    # Where no name is known, one that texts seldom have; of equal ones, the first.
    return max(usual, key=lambda sign: (named[sign], bool(split[sign]) and sign not in tables.QUOTED, len(split[sign])))


# --------------------------------------------------------------------------------------------- files of each recording


def _is_subtitle(file: str) -> bool:
    return file.lower().endswith(subtitles.SUBTITLES)


def _files_beside(folder: Path, paths: Iterable[str], rules: TranscriptRules) -> dict[str, list[str]]:
    """Returns the file with the text of each recording that has one, of its name: subtitles for a recogniser, a text,
    or an object of JSON as in WebDataset; or several subtitles of which none is that of the language."""
    places = {PurePosixPath(path).parent for path in paths}
    names = [(place, file.name) for place in places for file in (folder / place).iterdir()]
    files = [(place / name).as_posix() for place, name in sorted(names) if not name.startswith(".")]
    found: dict[str, list[str]] = {}
    for suffixes in (*[subtitles.SUBTITLES] * rules.reads_subtitles, (".txt",), (".json",)):
        if suffixes == (".json",) and found:
            break  # Objects beside texts have something else.
        of_kind = [file for file in files if file.lower().endswith(suffixes) and (folder / file).is_file()]
        rest = [path for path in paths if path not in found]
        found |= subtitles.files_by_recording(rest, of_kind, rules.language)
    if len(found) == 1:  # A single file of JSON that has the name of a recording may be the table of all.
        ((file, *_),) = found.values()
        return {} if file.lower().endswith(".json") and json_object(read_text(folder / file, "")) is None else found
    return found


def _read_beside(reading: Transcripts, beside: Mapping[str, Sequence[str]], rules: TranscriptRules) -> None:
    """Reads the files of recordings, and refuses the texts beside them that belong to none."""
    for sound, (file, *others) in beside.items():
        reading.named.add(sound)
        if others:
            detail = f"{' or '.join([file, *others][:3])} may be its subtitles: give them the language {rules.language}"
            reading.refuse(sound, "ambiguous sound", detail)
        elif other := _other_language(file, sound, rules.language):
            reading.refuse(sound, "other language", f"{file} is {other}, not {rules.language}")
        else:
            try:
                _add_text(reading, sound, file, reading.read(reading.folder / file), rules)
            except UserError as error:
                reading.refuse(sound, "malformed", error.message)
    read = {file for files in beside.values() for file in files}
    known = {PurePosixPath(sound).with_suffix("") for sound in beside}
    for place in sorted({PurePosixPath(file).parent for file in read if file.lower().endswith(".txt")}):
        for text in sorted(place / path.name for path in (reading.folder / place).glob("*.[tT][xX][tT]")):
            if text.as_posix() not in read and text.with_suffix("") not in known:
                reading.refuse(text.as_posix(), "no sound", "a text without a recording of the same name")


def _other_language(file: str, sound: str, language: str) -> str:
    """Returns the language in the name of subtitles, NAME.de.srt, if it is another one than that of the texts."""
    tag = file[len(PurePosixPath(sound).with_suffix("").as_posix()) + 1 :].rpartition(".")[0].lower()
    is_other = re.fullmatch("[a-z]{2}(-.*)?", tag) and len(language) == 2 and tag[:2] != language
    return tag if is_other else ""


def _add_text(reading: Transcripts, sound: str, file: str, content: str, rules: TranscriptRules) -> None:
    """Adds the text of a recording, or cuts the recording by the times in it."""
    form = subtitles.CUES if _is_subtitle(file) else subtitles.form_of(content)
    if form == subtitles.LABELS or (form == subtitles.CUES and rules.reads_subtitles):
        _add_cues(reading, sound, file, content, rules, is_track=form == subtitles.LABELS)
    elif file.lower().endswith(".json"):
        row = json_object(content)
        if row is None:
            reading.refuse(file, "malformed", "not a JSON object")
        else:
            reading.columns |= {key: reading.columns.get(key, "") for key in row}
            reading.add(file, row, tables.roles_of(row), sound)
    elif form:
        reading.refuse(file, "malformed", f"holds {form}, not the plain text of its recording")
    else:
        reading.add(file, {"text": content}, {"text": "text"}, sound)


def _add_cues(
    reading: Transcripts, path: str, file: str, content: str, rules: TranscriptRules, *, is_track: bool
) -> None:
    """Adds the subtitles, of which neighbours within a sentence become one utterance, or the labels of an editor."""
    cues, faults = subtitles.parse_labels(content) if is_track else subtitles.parse_subtitles(content)
    if not cues and not faults:
        reading.refuse(path, "no transcript", f"{file} has no subtitle")
    for fault in faults:
        reading.refuse(f"{file}, line {fault.line}", "malformed", fault.detail)
    cues, faults = subtitles.split_overlapping(cues)
    for fault in faults:
        reading.refuse(f"{file}, line {fault.line}", "overlapping subtitles", fault.detail)
    # Somebody has set the ends of labels.
    for cue in cues if is_track else subtitles.join_sentences(cues, rules.max_seconds):
        where = f"{file}, line {cue.line}"
        if invalid(cue.text + cue.speaker):
            reading.refuse(where, "malformed", INVALID)
        else:
            reading.utterances.append(Utterance(path, cue.text, cue.speaker, where, (cue.begin, cue.end)))
