"""Reads the transcripts of a folder of recordings: tables, JSON, or a text file for each recording.

    LJSpeech     id|text or id|text|normalised text, the recordings in wavs/ or next to the table
    Piper        recording|speaker|text
    CSV          a header in any order, cells separated by |, tabs, commas or semicolons
    JSON         lines or a list of {"audio": ..., "text": ..., "speaker": ...}, "speaker" is optional
    corpora      LibriSpeech, LibriTTS, VCTK, CMU Arctic, and data folders of Kaldi
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
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

from gputrain.audio.prepare import RefusalReason
from gputrain.data_in.preparation import RefusedItem
from gputrain.errors import UserError
from gputrain.formatting import counted
from gputrain.speech import subtitles
from gputrain.speech.corpora import Corpus, find_corpus
from gputrain.speech.sound_finder import PLACES, SoundFinder, suffix_of_name
from gputrain.speech.text.lines import decoded, read_text
from gputrain.speech.transcript_columns import (
    AUDIO_KEYS,
    COLUMNS_HINT,
    DURATION_KEYS,
    END_KEYS,
    MEANINGS,
    START_KEYS,
    TEXT_KEYS,
    TranscriptColumns,
    check_units,
    columns_of,
    header_of,
    role_of,
    span_of,
    speaker_keys_of,
    text_keys_of,
)
from gputrain.speech.transcript_files import (
    QUOTED,
    SEPARATORS,
    first_cells,
    holds_json,
    is_declaration,
    json_object,
    json_rows,
    table_rows,
)
from gputrain.speech.utterances import (
    LineChoice,
    LineTags,
    TranscriptRules,
    Utterance,
    overlapping,
    similar_speakers,
    with_one_text,
)

log = logging.getLogger(__name__)

TABLES = {".csv", ".tsv", ".psv", ".list", ".txt"}
JSON_LINES = {".jsonl", ".json", ".ndjson"}
COMMON_VOICE = {"client_id", "path", "sentence"}
COMMON_VOICE_HINT = (
    "name one with --transcripts: train.tsv, which leaves dev.tsv and test.tsv for evaluation, or validated.tsv, which "
    "holds all that listeners have confirmed"
)
WHISPER = re.compile(r"start\tend\ttext\n\d+\t\d+\t")
LOOKED_AT = 50  # number of lines read to detect a transcript
LOOKED_AT_BYTES = 1 << 16


@dataclass(frozen=True)
class Transcripts:
    """The transcripts of a folder. `source` describes the file and the detected format."""

    source: str
    utterances: list[Utterance]
    refused: list[RefusedItem]
    notes: list[str]  # Each is a sentence about something unexpected.
    columns: dict[str, str] = field(default_factory=dict)  # role of each column or key; "" if ignored
    files: frozenset[str] = frozenset()  # files that were read
    to_ignore: Callable[[str], str] = "drop the column {}".format  # advice on ignoring a column of a kind


TRANSCRIPTS_HINT = "name the transcript with --transcripts FILE"
INVALID = "holds invalid characters (NUL, U+FFFD or surrogates)"


def invalid(text: str) -> bool:
    return any(letter in "\0\ufffd" or "\ud800" <= letter <= "\udfff" for letter in text)


@dataclass
class _Reading:
    folder: Path
    sounds: SoundFinder
    utterances: list[Utterance] = field(default_factory=list)
    refused: list[RefusedItem] = field(default_factory=list)
    named: set[str] = field(default_factory=set)  # recordings that a line refers to, accepted or not
    is_selection: bool = False  # True if the file lists a part of the recordings on purpose
    columns: dict[str, str] = field(default_factory=dict)  # role of each column or key; "" if ignored
    files: set[str] = field(default_factory=set)  # files that were read
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
        if file.is_fifo():
            raise UserError(f"{file}: a pipe, and a table is read twice", hint=TRANSCRIPTS_HINT)
        return read_text(file, TRANSCRIPTS_HINT)

    def add(
        self, where: str, name: str, text: str, speaker: str = "", times: tuple[object, object, object] = (None,) * 3,
        tags: LineTags = MappingProxyType({}),
    ) -> None:  # fmt: skip
        """Adds the utterance of a line, whose times are its start, its end and its duration, or refuses the line.
        `tags` are the values of its columns that are in `MEANINGS`."""
        found = self.find(name)
        try:
            span = span_of(*times)
        except ValueError as error:
            self.refuse(where, "malformed", f"{name}: {error}")
            return
        if invalid(text + speaker):
            self.refuse(where, "malformed", INVALID)
        elif not name.strip():
            self.refuse(where, "malformed", "names no recording")
        elif not found:
            fault = "no such recording" if os.path.isabs(name) else f"no such recording in {self.folder}"
            is_elsewhere = os.path.isabs(name) and os.path.isfile(name)
            self.refuse(where, "no sound", f"{name}: {'not in the list of recordings' if is_elsewhere else fault}")
        elif len(found) > 1:
            self.refuse(where, "ambiguous sound", f"{name} may be {' or '.join(found[:3])}: use its path")
        elif not text.strip():
            self.refuse(where, "no transcript", f"{found[0]}: its text is empty")
        else:
            person = " ".join(unicodedata.normalize("NFC", speaker).split())
            if tags:
                self.tags[len(self.utterances)] = tags
            channel = tags.get("channel", "")
            self.utterances.append(Utterance(found[0], " ".join(text.split()), person, where, span, channel))

    def choose_lines(self, source: str, language: str) -> list[str]:
        """Leaves out the utterances that columns exclude. Returns sentences about it."""
        choice = LineChoice(source, self.tags, len(self.utterances), language, self.to_ignore)
        self.columns = {name: "" if role in choice.unused else role for name, role in self.columns.items()}
        for at, (reason, detail) in choice.left_out.items():
            self.refuse(self.utterances[at].where, reason, detail)
        self.utterances = [one for at, one in enumerate(self.utterances) if at not in choice.left_out]
        return choice.notes


def read_transcripts(
    folder: Path,
    paths: Sequence[str],
    *,
    file: Path | None = None,
    columns: TranscriptColumns = (),
    rules: TranscriptRules = TranscriptRules(),  # noqa: B008  (It is immutable.)
    others: Iterable[str] = (),
) -> Transcripts:
    """Reads the transcripts of the recordings `paths` of a folder, from `file` or from files found in the folder, of
    which `others` are those that are no recordings.

    `columns` are those of a table; default: detected. Recordings without a transcript, and those with two different
    ones, are left out. Raises UserError if no transcript file or several are found, or one is not UTF-8.
    """
    subtitled: Mapping[str, list[str]] = {}
    if rules.reads_subtitles:
        subtitled = subtitles.files_by_recording(paths, _subtitle_files(folder, paths), rules.language)
    corpus = None if file else find_corpus(folder, others)
    file = file or _found(folder, [path for path in paths if path not in subtitled], bool(subtitled), corpus)
    place = file.relative_to(folder).parent.as_posix() if file and file.is_relative_to(folder) else "."
    bases = PLACES if place == "." else (*(f"{place}/{one}" for one in PLACES), *PLACES)
    reading = _Reading(folder, SoundFinder(paths, bases, folder))
    if file is None and subtitled:
        source = "subtitles next to the recordings"
        for path, given in subtitled.items():
            _read_subtitles(reading, path, given, rules)
        _read_pairs(reading, paths, rules, subtitled)
    elif file is None and corpus and not _texts_of(folder, paths):
        source = f"the layout of {corpus.layout.name}"
        _read_corpus(reading, corpus)
    elif file is None:
        source = "a text file for each recording"
        _read_pairs(reading, paths, rules)
    else:
        source = f"{file.name}, {_read_file(reading, file, columns)}"
    log.info("transcripts: %s", source)
    notes = reading.choose_lines(file.name if file else source, rules.language)
    utterances = with_one_text(reading.utterances, reading.refused, rules.needs_speakers)
    for path in [] if reading.is_selection else sorted(set(paths) - reading.named):
        reading.refuse(path, "no transcript", f"it has no text ({source})")
    notes += filter(None, (overlapping(utterances, rules), similar_speakers(one.speaker for one in utterances)))
    return Transcripts(
        source, utterances, reading.refused, notes, reading.columns, frozenset(reading.files), reading.to_ignore
    )


def _read_corpus(reading: _Reading, corpus: Corpus) -> None:
    def read(path: str) -> str:
        return reading.read(reading.folder / path) if path in corpus.files else ""

    reading.is_selection = corpus.is_part
    for path in corpus.texts:
        where = path.replace("wav.scp", "text")
        for one in corpus.layout.lines(path, read):
            name = next(filter(reading.sounds.find, one.names), one.names[0])
            tags = {"channel": one.channel} if one.channel else {}
            reading.add(f"{where}, line {one.line}", name, one.text, one.speaker, (*one.times, None), tags)


def _found(folder: Path, paths: Sequence[str], has_subtitles: bool, corpus: Corpus | None) -> Path | None:
    """Finds the transcript file of a folder; None if there is a text file for each recording, or there are subtitles or
    texts of a corpus. `paths` are the recordings without subtitles."""
    sounds = SoundFinder(paths, root=folder)
    pairs = set(_texts_of(folder, paths).values())
    candidates = [
        path
        for path in sorted(folder.iterdir())
        if path.suffix.lower() in TABLES | JSON_LINES and path.name not in pairs and not path.name.startswith(".")
        if path.is_file() and (path.stem == "metadata" or _names_sounds(path, sounds))
    ]
    if any(map(_is_common_voice, candidates)):  # Its clip_durations.tsv names the recordings, too.
        candidates = [path for path in candidates if _is_common_voice(path) or path.suffix.lower() != ".tsv"]
    beside = {PurePosixPath(path).with_suffix(".json").as_posix() for path in paths}
    tables = [path for path in candidates if path.name not in beside]
    candidates = (
        candidates if len(candidates) - len(tables) < 2 else tables
    )  # Objects of recordings, not tables of all.
    others = bool(pairs) or has_subtitles
    if len(candidates) + others > 1:
        names = [path.name for path in candidates]
        names += ["subtitles"] * has_subtitles + ["text files of recordings"] * bool(pairs)
        if not others and all(_is_common_voice(path) for path in candidates):
            raise UserError(f"{folder}: a Common Voice folder: {', '.join(names)}", hint=COMMON_VOICE_HINT)
        raise UserError(
            f"{folder}: transcripts in several places: {', '.join(names)}",
            hint="name one with --transcripts FILE, and if necessary its columns: --transcript-columns audio,text",
        )
    if not candidates and not others and not corpus and not _objects_of(folder, paths):
        if timed := sorted(path.name for path in folder.glob("*.tsv") if WHISPER.match(_head_of(path))):
            raise UserError(
                f"{folder}: no transcripts: {timed[0]} has times in milliseconds, as Whisper writes it",
                hint="for a recogniser, write subtitles: whisper --output_format srt; for a voice, a table of audio, "
                "start, end and text, in seconds",
            )
        other = next(
            (f", but {one.name}" for one in sorted(folder.iterdir()) if one.is_file() and one.name not in paths), ""
        )
        raise UserError(
            f"{folder}: no transcripts: neither metadata.csv, JSON lines, nor text files of recordings{other}",
            hint="name the file with --transcripts FILE, and --transcript-columns audio,text",
        )
    return candidates[0] if candidates else None


def has_transcripts(folder: Path) -> bool:
    """Returns True if a file may be a table or JSON lines, or of Kaldi, which may name recordings elsewhere."""
    if (folder / "wav.scp").is_file():
        return True
    found = (path for path in folder.iterdir() if not path.name.startswith("."))
    return any(path.suffix.lower() in TABLES | JSON_LINES for path in found)


def _names_sounds(path: Path, sounds: SoundFinder) -> bool:
    """Returns True if one of the first lines names a recording in the expected place."""
    text = _head_of(path)
    if path.suffix.lower() in JSON_LINES or holds_json(text):
        objects = [row for _, row in json_rows(text) if row]
        objects = objects or [row for _, row in json_rows(_head_of(path, None)) if row]
        # Reports on a folder, and lists of lengths, name its recordings without their texts.
        spoken = [row for row in objects if any(key in row for key in TEXT_KEYS)]
        return any(sounds.find(_first_of(row, AUDIO_KEYS)) for row in spoken[:LOOKED_AT])
    lines = [line for line in text.split("\n") if line.strip() and not is_declaration(line)][:LOOKED_AT]
    tables = [[first_cells(line, separator) for line in lines if separator in line] for separator in SEPARATORS]
    for separator, rows in zip(SEPARATORS, tables, strict=True):
        if separator not in QUOTED or (rows and header_of(rows[0]) is not None):
            found = any(sounds.find(cell) for cells in rows for cell in cells)
        else:  # Commas stand in any text, and its words may be names of recordings.
            found = 2 * sum(bool(sounds.find(cells[0])) for cells in rows) > len(lines)
        if found:
            return True
    return False


def _head_of(path: Path, size: int | None = LOOKED_AT_BYTES) -> str:
    """Returns the beginning of a text; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            return decoded(file.read() if size is None else file.read(size), errors="replace")
    except (OSError, UnicodeError):
        return ""


def _read_file(reading: _Reading, file: Path, columns: TranscriptColumns) -> str:
    """Reads a table or JSON; returns a description of the detected format."""
    text = reading.read(file)
    if not text.strip():
        raise UserError(f"{file}: empty", hint="expected a line for each recording, such as NAME|TEXT")
    if file.suffix.lower() in JSON_LINES or holds_json(text):
        return _read_json(reading, file, json_rows(text))
    return _read_table(reading, file, text.split("\n"), columns)


def _read_table(reading: _Reading, file: Path, lines: Sequence[str], columns: TranscriptColumns) -> str:
    filled = [line for line in lines if line.strip() and not is_declaration(line)]
    audio_at = columns.index("audio") if columns else 0
    separator = _separator(file, filled[:LOOKED_AT], reading.sounds, audio_at)
    alone = [first_cells(line, separator) for line in filled]
    has_header = header_of(alone[0]) is not None and not reading.sounds.find(alone[0][audio_at])
    reading.is_selection = has_header and _is_common_voice(file)
    if has_header:
        check_units(f"{file.name}, line 1", alone[0])
        doubled = [name for name in alone[0] if alone[0].count(name) > 1 and role_of(name) != "other"]
        if doubled and not columns:
            example = ",".join(header_of(alone[0]) or ())
            raise UserError(
                f"{file}: several columns are called {doubled[0]}",
                hint=f"{COLUMNS_HINT}, such as --transcript-columns {example}",
            )
    if not columns and not has_header and separator == "," and len({len(cells) for cells in alone}) > 1:
        columns = ("audio", "text")  # The other commas are those of texts.
    columns = columns or (has_header and header_of(alone[0])) or columns_of(file, alone)
    reading.to_ignore = lambda kind: f"--transcript-columns {','.join('other' if c == kind else c for c in columns)}"
    names = [one if one != "other" else f"column {n}" for n, one in enumerate(columns, 1)]
    if has_header and len(set(alone[0])) == len(alone[0]):
        names = alone[0]
    reading.columns |= {name: "" if kind == "other" else kind for name, kind in zip(names, columns, strict=False)}
    audio_at, least = columns.index("audio"), 2 if columns == ("audio", "text", "normalized") else len(columns)

    def is_row(cells: Sequence[str]) -> bool:
        return bool(reading.sounds.find(cells[audio_at]))

    rows = list(table_rows(lines, separator, len(columns), is_row))
    for number, cells in rows[has_header:]:
        where = f"{file.name}, line {number}"
        if isinstance(cells, str):
            reading.refuse(where, "malformed", cells)
            continue
        while len(cells) > len(columns) and not cells[-1]:
            cells = cells[:-1]  # A separator at the end of the line.
        if len(cells) > len(columns) and separator == "," and columns[-1] == "text" and '"' not in lines[number - 1]:
            cells = lines[number - 1].split(",", len(columns) - 1)  # The text may have commas.
        if not least <= len(cells) <= len(columns):
            wanted = ", ".join(columns)
            reading.refuse(where, "malformed", f"{counted(len(cells), 'column')}, expected {len(columns)}: {wanted}")
            reading.find(cells[0])
            continue
        values = dict(zip(columns, cells, strict=False))
        times = values.get("start"), values.get("end"), values.get("duration")
        text = values.get("normalized") or values["text"]
        tags: LineTags = {str(kind): value for kind in MEANINGS if (value := values.get(kind))}
        reading.add(where, values["audio"], text, values.get("speaker", ""), times, tags)
    return f"a table of {', '.join(columns)}{' by its header' if has_header else ''}"


def _separator(file: Path, lines: Sequence[str], sounds: SoundFinder, audio_at: int) -> str:
    """Returns the separator of a table: that of its header, or that between the names of recordings and their texts."""
    usual = ("\t", "|", ";", ",") if file.suffix.lower() == ".tsv" else SEPARATORS
    for separator in usual:
        if header_of(first_cells(lines[0], separator)) is not None:
            return separator
    rows = {separator: [first_cells(line, separator) for line in lines] for separator in usual}
    split = {one: [cells for cells in rows[one] if len(cells) > max(audio_at, 1)] for one in usual}
    named = {separator: sum(bool(sounds.find(cells[audio_at])) for cells in split[separator]) for separator in usual}
    # Where no name is known, one that texts seldom have; of equal ones, the first.
    return max(usual, key=lambda one: (named[one], bool(split[one]) and one not in QUOTED, len(split[one])))


def _read_json(reading: _Reading, file: Path, rows: Sequence[tuple[str, dict[str, Any] | None]]) -> str:
    keys = sorted({key for _, row in rows[:LOOKED_AT] if row for key in row})
    check_units(file.name, keys)
    if keys and not any(key in row for _, row in rows if row for key in text_keys_of(row)):
        raise UserError(
            f"{file}: no column of texts; columns: {', '.join(keys)}", hint=f"name it {' or '.join(TEXT_KEYS)}"
        )
    for place, row in rows:
        where = f"{file.name}, {place}"
        if row is None:
            reading.refuse(where, "malformed", "not a JSON object, or one with a key twice")
        elif not (name := _first_of(row, AUDIO_KEYS, reading.columns, "audio")):
            reading.refuse(where, "malformed", f"names no recording: none of {', '.join(AUDIO_KEYS)}")
        else:
            _add_object(reading, where, name, row)
    return "JSON lines" if rows[0][0].startswith("line") else "JSON"


_TIME_KEYS = (START_KEYS, END_KEYS, DURATION_KEYS)


def _add_object(reading: _Reading, where: str, name: str, row: dict[str, Any]) -> None:
    """Adds the utterance of a JSON object for the recording of a name."""
    for key in row:
        reading.columns.setdefault(key, "")
    start, end, duration = (next((row[key] for key in keys if key in row), None) for keys in _TIME_KEYS)
    reading.columns |= {key: role_of(key) for keys in _TIME_KEYS for key in keys if key in row}
    if isinstance(pair := row.get("timestamp"), list) and len(pair) == 2 and (start, end) == (None, None):
        start, end = pair  # As transformers writes the chunks of Whisper.
        reading.columns["timestamp"] = "start"
    words = _first_of(row, text_keys_of(row), reading.columns, "text")
    person = _first_of(row, speaker_keys_of(row), reading.columns, "speaker")
    tags: dict[str, str] = {}
    for key in row:
        if (kind := role_of(key)) in MEANINGS and kind not in tags:
            value = row[key][0] if isinstance(row[key], list) and len(row[key]) == 1 else row[key]
            reading.columns[key] = kind
            tags |= {} if value is None else {kind: str(value)}
    reading.add(where, name, words, person, (start, end, duration), tags)


def _first_of(row: dict[str, Any], keys: Iterable[str], used: dict[str, str] | None = None, role: str = "") -> str:
    """Returns the first string or integer under one of the keys, or under `path` within it, that is not empty, and
    notes its key with its role among those that are `used`; empty if there is none."""
    for key in keys:
        value = row.get(key)
        value = value.get("path") if isinstance(value, dict) else value
        value = int(value) if isinstance(value, float) and value.is_integer() else value
        if isinstance(value, (str, int)) and not isinstance(value, bool) and str(value).strip():
            if used is not None:
                used[key] = role
            return str(value)
    return ""


def _is_common_voice(file: Path) -> bool:
    """Returns True for a table of Common Voice, which lists a part of the recordings in clips/."""
    if file.suffix.lower() != ".tsv":
        return False
    return set(_head_of(file).partition("\n")[0].strip().split("\t")) >= COMMON_VOICE


def _subtitle_files(folder: Path, paths: Iterable[str]) -> list[str]:
    """Returns the subtitle files next to recordings, which may be in linked folders."""
    places = {PurePosixPath(path).parent for path in paths}
    names = [(place, file.name) for place in places for file in (folder / place).iterdir()]
    found = [(place / name).as_posix() for place, name in names if not name.startswith(".")]
    return sorted(path for path in found if path.lower().endswith(subtitles.SUBTITLES))


def _read_subtitles(reading: _Reading, path: str, files: Sequence[str], rules: TranscriptRules) -> None:
    """Reads the subtitles of a recording; neighbours within a sentence become one utterance."""
    reading.named.add(path)
    if len(files) > 1:
        detail = f"{' or '.join(files[:3])} may be its subtitles: give them the language {rules.language}"
        reading.refuse(path, "ambiguous sound", detail)
        return
    (file,) = files
    tag = file[len(PurePosixPath(path).with_suffix("").as_posix()) + 1 :].rpartition(".")[0].lower()
    if re.fullmatch("[a-z]{2}(-.*)?", tag) and len(rules.language) == 2 and tag[:2] != rules.language:
        reading.refuse(path, "other language", f"{file} is {tag}, not {rules.language}")
        return
    try:
        content = reading.read(reading.folder / file)
    except UserError as error:
        reading.refuse(path, "malformed", error.message)
        return
    _add_cues(reading, path, file, content, rules)


def _add_cues(reading: _Reading, path: str, file: str, content: str, rules: TranscriptRules) -> None:
    """Adds the subtitles, or the labels of an editor, that a file has for a recording."""
    is_track = subtitles.form_of(content) == subtitles.LABELS
    cues, faults = subtitles.parse_labels(content) if is_track else subtitles.parse_subtitles(content)
    gap = 0.0 if is_track else rules.cue_gap  # Somebody has set the ends of labels.
    if not cues and not faults:
        reading.refuse(path, "no transcript", f"{file} has no subtitle")
    for fault in faults:
        reading.refuse(f"{file}, line {fault.line}", "malformed", fault.detail)
    cues, faults = subtitles.split_overlapping(cues)
    for fault in faults:
        reading.refuse(f"{file}, line {fault.line}", "overlapping subtitles", fault.detail)
    for cue in subtitles.join_sentences(cues, gap, rules.max_seconds):
        where = f"{file}, line {cue.line}"
        if invalid(cue.text + cue.speaker):
            reading.refuse(where, "malformed", INVALID)
        else:
            reading.utterances.append(Utterance(path, cue.text, cue.speaker, where, (cue.begin, cue.end)))


def _texts_of(folder: Path, paths: Iterable[str]) -> dict[str, str]:
    """Returns the text file of each recording that has one: NAME.txt for NAME.wav, or one whose name differs in
    capitals if it is that of no other recording."""
    paths = list(paths)
    found = _text_files(folder, paths)
    same = {path: text for path in paths if (text := PurePosixPath(path).with_suffix(".txt").as_posix()) in found}
    folded: dict[str, list[str]] = {}
    for text in found - set(same.values()):
        folded.setdefault(text.casefold(), []).append(text)
    for path in (path for path in paths if path not in same):
        others = folded.pop(PurePosixPath(path).with_suffix(".txt").as_posix().casefold(), [])
        if len(others) == 1:
            same[path] = others[0]
    return same


def _text_files(folder: Path, paths: Iterable[str]) -> set[str]:
    """Returns the text files next to recordings."""
    places = {PurePosixPath(path).parent for path in paths}
    names = [(place, file.name) for place in places for file in (folder / place).iterdir()]
    texts = [(place / name).as_posix() for place, name in names if not name.startswith(".")]
    return {path for path in texts if suffix_of_name(path) == ".txt" and (folder / path).is_file()}


def _objects_of(folder: Path, paths: Iterable[str]) -> dict[str, str]:
    """Returns the JSON file of each recording that has one, NAME.json for NAME.wav as in WebDataset; none if no one of
    the first files has a text."""
    named = {path: PurePosixPath(path).with_suffix(".json").as_posix() for path in paths}
    found = {path: file for path, file in named.items() if (folder / file).is_file()}
    first = [json_object(_head_of(folder / file, None)) or {} for file in islice(found.values(), LOOKED_AT)]
    return found if any(_first_of(row, text_keys_of(row)) for row in first) else {}


def _read_pairs(
    reading: _Reading, paths: Sequence[str], rules: TranscriptRules, subtitled: Collection[str] = ()
) -> None:
    texts = _texts_of(reading.folder, paths) or _objects_of(reading.folder, paths)
    for sound in paths:
        if sound in subtitled or sound not in texts:
            continue  # It is reported with all recordings without a transcript.
        try:
            text = reading.read(reading.folder / texts[sound])
        except UserError as error:
            reading.named.add(sound)
            reading.refuse(sound, "malformed", error.message)
        else:
            if suffix_of_name(texts[sound]) == ".txt":
                _add_text(reading, texts[sound], sound, text, rules)
            elif (row := json_object(text)) is not None:
                _add_object(reading, texts[sound], sound, row)
            else:
                reading.named.add(sound)
                reading.refuse(texts[sound], "malformed", "not a JSON object")
    places = {PurePosixPath(text).parent for text in texts.values()}
    for alone in sorted(_text_files(reading.folder, paths) - set(texts.values())):
        if PurePosixPath(alone).parent in places:
            reading.refuse(alone, "no sound", "a text without a recording of the same name")


def _add_text(reading: _Reading, file: str, sound: str, text: str, rules: TranscriptRules) -> None:
    """Adds the text of a recording, or cuts it by the times in it. Refuses it in a form that is no plain text."""
    form = subtitles.form_of(text)
    if form == subtitles.LABELS or (form == subtitles.CUES and rules.reads_subtitles):
        reading.named.add(sound)
        _add_cues(reading, sound, file, text, rules)
    elif form:
        reading.named.add(sound)
        reading.refuse(file, "malformed", f"holds {form}, not the plain text of its recording")
    else:
        reading.add(file, sound, text)
