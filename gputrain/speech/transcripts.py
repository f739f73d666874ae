"""Reads the transcripts of a folder of recordings: tables, JSON lines, or a text file for each recording.

    LJSpeech     id|text or id|text|normalised text, the recordings in wavs/ or next to the table
    Piper        recording|speaker|text
    JSON lines   {"audio": ..., "text": ..., "speaker": ...}, "speaker" is optional
    pairs        NAME.wav and NAME.txt, anywhere in the tree
    subtitles    NAME.wav and NAME.srt or NAME.vtt, anywhere in the tree, for a recogniser
    Common Voice client_id, path, sentence, ... separated by tabs, the recordings in clips/

A table may have a header that names its columns. An invalid line is left out, without effect on the others.
"""

import json
import logging
import math
import os
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path, PurePosixPath

from gputrain.audio.prepare import OTHER_SUFFIXES, SUFFIXES, RefusalReason
from gputrain.engine.preparation import RefusedItem
from gputrain.errors import UserError
from gputrain.speech import subtitles
from gputrain.speech.transcript_columns import TranscriptColumns, columns_of, header_of

log = logging.getLogger(__name__)

TABLES = {".csv", ".tsv", ".psv", ".list", ".txt"}
JSON_LINES = {".jsonl", ".json", ".ndjson"}
AUDIO_KEYS = ("audio", "audio_filepath", "audio_file", "audio_path", "wav", "file", "file_name", "path")
TEXT_KEYS = ("text", "transcript", "transcription", "sentence")
SPEAKER_KEYS = ("speaker", "speaker_name", "speaker_id")
COMMON_VOICE = {"client_id", "path", "sentence"}
COMMON_VOICE_HINT = (
    "name one with --transcripts: train.tsv, which leaves dev.tsv and test.tsv for evaluation, or validated.tsv, which "
    "holds all that listeners have confirmed"
)
PLACES = ("", "wavs/", "clips/")  # Folders of the recordings next to a table.
LOOKED_AT = 50  # number of lines read to detect a transcript


@dataclass(frozen=True)
class Utterance:
    path: str  # path of the recording, relative to the folder
    text: str
    speaker: str  # "" for a single speaker
    where: str  # file and line of the transcript
    span: tuple[float, float] | None = None  # first second in the recording and end; default: the whole recording

    @property
    def name(self) -> str:
        """The name in reports: the recording, or the subtitle that is a part of it."""
        return self.where if self.span else self.path


@dataclass(frozen=True)
class TranscriptRules:
    """Rules of a kind of model for transcripts."""

    needs_speakers: bool = True  # True if a line without a speaker is left out where others have one
    cue_gap: float = 0.0  # seconds between subtitles that are joined
    max_seconds: float = math.inf  # maximum length of joined subtitles
    language: str = ""  # language whose subtitles are read; "": subtitles are not read


@dataclass(frozen=True)
class Transcripts:
    """The transcripts of a folder. `source` describes the file and the detected format."""

    source: str
    utterances: list[Utterance]
    refused: list[RefusedItem]


INVALID = "holds invalid characters (NUL, U+FFFD or surrogates)"


def invalid(text: str) -> bool:
    return any(letter in "\0\ufffd" or "\ud800" <= letter <= "\udfff" for letter in text)


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


@dataclass
class _Reading:
    folder: Path
    sounds: SoundFinder
    utterances: list[Utterance] = field(default_factory=list)
    refused: list[RefusedItem] = field(default_factory=list)
    named: set[str] = field(default_factory=set)  # recordings that a line refers to, accepted or not
    is_selection: bool = False  # True if the file lists a part of the recordings on purpose

    def refuse(self, where: str, reason: RefusalReason, detail: str) -> None:
        self.refused.append(RefusedItem(where, reason, detail))

    def find(self, name: str) -> list[str]:
        """Finds the recordings that a line may refer to; a single match is marked as named."""
        found = self.sounds.find(name)
        if len(found) == 1:
            self.named.add(found[0])
        return found

    def add(self, where: str, name: str, text: str, speaker: str = "") -> None:
        """Adds the utterance of a line, or refuses the line."""
        found = self.find(name)
        if invalid(text + speaker):
            self.refuse(where, "malformed", INVALID)
        elif not name.strip():
            self.refuse(where, "malformed", "names no recording")
        elif not found:
            place = "" if Path(name).is_absolute() else f" in {self.folder}"
            self.refuse(where, "no sound", f"{name}: no such recording{place}")
        elif len(found) > 1:
            self.refuse(where, "ambiguous sound", f"{name} may be {' or '.join(found[:3])}: use its path")
        elif not text.strip():
            self.refuse(where, "no transcript", f"{found[0]}: its text is empty")
        else:
            self.utterances.append(Utterance(found[0], " ".join(text.split()), speaker.strip(), where))


def read_transcripts(
    folder: Path,
    paths: Sequence[str],
    *,
    file: Path | None = None,
    columns: TranscriptColumns = (),
    rules: TranscriptRules = TranscriptRules(),
) -> Transcripts:
    """Reads the transcripts of the recordings `paths` of a folder, from `file` or from files found in the folder.

    `columns` are those of a table; default: detected. Recordings without a transcript, and those with two different
    ones, are left out. Raises UserError if no transcript file or several are found, or one is not UTF-8.
    """
    subtitled = (
        subtitles.files_by_recording(paths, _subtitle_files(folder, paths), rules.language) if rules.language else {}
    )
    file = file or _found(folder, [path for path in paths if path not in subtitled], bool(subtitled))
    if file is None and subtitled:
        reading, source = _Reading(folder, SoundFinder(paths, root=folder)), "subtitles next to the recordings"
        for path, given in subtitled.items():
            _read_subtitles(reading, path, given, rules)
        _read_pairs(reading, paths, subtitled)
    elif file is None:
        reading, source = _Reading(folder, SoundFinder(paths, root=folder)), "a text file for each recording"
        _read_pairs(reading, paths)
    else:
        relative = file.relative_to(folder).parent.as_posix() + "/" if file.is_relative_to(folder) else "./"
        bases = PLACES if relative == "./" else (*(relative + place for place in PLACES), *PLACES)
        reading = _Reading(folder, SoundFinder(paths, bases, folder))
        source = f"{file.name}, {_read_file(reading, file, columns)}"
    log.info("transcripts: %s", source)
    utterances = _single(reading, rules.needs_speakers)
    for path in [] if reading.is_selection else sorted(set(paths) - reading.named):
        reading.refuse(path, "no transcript", f"it has no text ({source})")
    return Transcripts(source, utterances, reading.refused)


def _found(folder: Path, paths: Sequence[str], has_subtitles: bool) -> Path | None:
    """Finds the transcript file of a folder; None if there is a text file for each recording, or there are subtitles.
    `paths` are the recordings without subtitles."""
    sounds = SoundFinder(paths, root=folder)
    pairs = {PurePosixPath(path).with_suffix(".txt").as_posix() for path in paths}
    candidates = [
        path
        for path in sorted(folder.iterdir())
        if path.suffix.lower() in TABLES | JSON_LINES and path.name not in pairs and not path.name.startswith(".")
        if path.is_file() and (path.stem == "metadata" or _names_sounds(path, sounds))
    ]
    paired = sum((folder / pair).is_file() for pair in pairs)
    if any(map(_is_common_voice, candidates)):  # Its clip_durations.tsv names the recordings, too.
        candidates = [path for path in candidates if _is_common_voice(path) or path.suffix.lower() != ".tsv"]
    others = bool(paired) or has_subtitles
    if len(candidates) + others > 1:
        names = [path.name for path in candidates]
        names += ["subtitles"] * has_subtitles + ["text files of recordings"] * bool(paired)
        if not others and all(_is_common_voice(path) for path in candidates):
            raise UserError(f"{folder}: a Common Voice folder: {', '.join(names)}", hint=COMMON_VOICE_HINT)
        raise UserError(
            f"{folder}: transcripts in several places: {', '.join(names)}",
            hint="name one with --transcripts FILE, and if necessary its columns: --transcript-columns audio,text",
        )
    if not candidates and not others:
        raise UserError(
            f"{folder}: no transcripts: neither metadata.csv, JSON lines, nor text files of recordings",
            hint="name the file with --transcripts FILE, and its columns with --transcript-columns audio,text",
        )
    return candidates[0] if candidates else None


def has_transcripts(folder: Path) -> bool:
    """Returns True if a file may be a table or JSON lines, which may name recordings elsewhere."""
    return any(path.suffix.lower() in TABLES | JSON_LINES for path in folder.iterdir())


def _names_sounds(path: Path, sounds: SoundFinder) -> bool:
    """Returns True if one of the first lines names a recording in the expected place."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            lines = list(islice(file, LOOKED_AT))
    except OSError:
        return False
    if path.suffix.lower() in JSON_LINES:
        return any(sounds.find(_first_of(row, AUDIO_KEYS)) for row in map(_object, lines) if row)
    separator = _separator(path)
    return any(sounds.find(cell) for line in lines if separator in line for cell in line.split(separator))


def _read_file(reading: _Reading, file: Path, columns: TranscriptColumns) -> str:
    """Reads a table or JSON lines; returns a description of the detected format."""
    lines = [(number, line) for number, line in enumerate(_text_of(file).split("\n"), start=1) if line.strip()]
    if not lines:
        raise UserError(f"{file}: empty", hint="expected a line for each recording, such as NAME|TEXT")
    if file.suffix.lower() in JSON_LINES:
        _read_json(reading, file, lines)
        return "JSON lines"
    return _read_table(reading, file, lines, columns)


def _text_of(file: Path) -> str:
    """Returns the text with Unix line ends. Raises UserError if the file cannot be read or is not UTF-8."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}", hint="name the transcript with --transcripts FILE") from None
    content = content.removeprefix(b"\xef\xbb\xbf")
    try:
        return content.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        number = content.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{file}, line {number}: not UTF-8", hint="save it as UTF-8, for instance with iconv -f CP1251 -t UTF-8"
        ) from None


def _separator(file: Path) -> str:
    return "\t" if file.suffix.lower() == ".tsv" else "|"


def _read_table(reading: _Reading, file: Path, lines: Sequence[tuple[int, str]], columns: TranscriptColumns) -> str:
    rows = [(number, [cell.strip() for cell in line.split(_separator(file))]) for number, line in lines]
    header = None if reading.sounds.find(rows[0][1][0]) else header_of(rows[0][1])
    rows = rows[1:] if header else rows
    reading.is_selection = header is not None and _is_common_voice(file)
    columns = columns or header or columns_of(file, [cells for _, cells in rows])
    least = 2 if columns == ("audio", "text", "normalized") else len(columns)
    for number, cells in rows:
        where = f"{file.name}, line {number}"
        if not least <= len(cells) <= len(columns):
            wanted = ", ".join(columns)
            reading.refuse(where, "malformed", f"{len(cells)} columns, expected {len(columns)}: {wanted}")
            reading.find(cells[0])
            continue
        values = dict(zip(columns, cells, strict=False))
        reading.add(where, values["audio"], values.get("normalized") or values["text"], values.get("speaker", ""))
    return f"a table of {', '.join(columns)}{' by its header' if header else ''}"


def _read_json(reading: _Reading, file: Path, lines: Sequence[tuple[int, str]]) -> None:
    for number, line in lines:
        where, row = f"{file.name}, line {number}", _object(line)
        if row is None:
            reading.refuse(where, "malformed", "not a JSON object")
        elif not _first_of(row, AUDIO_KEYS):
            reading.refuse(where, "malformed", f"names no recording: none of {', '.join(AUDIO_KEYS)}")
        else:
            reading.add(where, _first_of(row, AUDIO_KEYS), _first_of(row, TEXT_KEYS), _first_of(row, SPEAKER_KEYS))


def _object(line: str) -> dict[str, object] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _first_of(row: dict[str, object], keys: Iterable[str]) -> str:
    """Returns the first string or integer under one of the keys; empty if there is none."""
    given = (row[key] for key in keys if key in row)
    return next((str(value) for value in given if isinstance(value, (str, int)) and not isinstance(value, bool)), "")


def _is_common_voice(file: Path) -> bool:
    """Returns True for a table of Common Voice, which lists a part of the recordings in clips/."""
    if file.suffix.lower() != ".tsv":
        return False
    with file.open(encoding="utf-8", errors="replace") as lines:
        return set(next(lines, "").strip().split("\t")) >= COMMON_VOICE


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
    try:
        cues, faults = subtitles.parse_subtitles(_text_of(reading.folder / file))
    except UserError as error:
        reading.refuse(path, "malformed", error.message)
        return
    if not cues and not faults:
        reading.refuse(path, "no transcript", f"{file} has no subtitle")
    for fault in faults:
        reading.refuse(f"{file}, line {fault.line}", "malformed", fault.detail)
    cues, faults = subtitles.split_overlapping(cues)
    for fault in faults:
        reading.refuse(f"{file}, line {fault.line}", "overlapping subtitles", fault.detail)
    for cue in subtitles.join_sentences(cues, rules.cue_gap, rules.max_seconds):
        where = f"{file}, line {cue.line}"
        if invalid(cue.text + cue.speaker):
            reading.refuse(where, "malformed", INVALID)
        else:
            reading.utterances.append(Utterance(path, cue.text, cue.speaker, where, (cue.begin, cue.end)))


def _read_pairs(reading: _Reading, paths: Sequence[str], subtitled: Collection[str] = ()) -> None:
    for sound in paths:
        text_file = PurePosixPath(sound).with_suffix(".txt")
        if sound in subtitled or not (reading.folder / text_file).is_file():
            continue  # It is reported with all recordings without a transcript.
        try:
            text = _text_of(reading.folder / text_file)
        except UserError as error:
            reading.named.add(sound)
            reading.refuse(sound, "malformed", error.message)
        else:
            reading.add(text_file.as_posix(), sound, text)
    texts = {PurePosixPath(sound).with_suffix(".txt") for sound in paths}
    places = {text.parent for text in texts if (reading.folder / text).is_file()}
    for place in sorted(places):
        for path in sorted((reading.folder / place).glob("*.txt")):
            if (alone := place / path.name) not in texts:
                reading.refuse(alone.as_posix(), "no sound", "a text without a recording of the same name")


def _single(reading: _Reading, needs_speakers: bool) -> list[Utterance]:
    """Keeps utterances with a unique transcript, and with a speaker if they need one. The rest is refused."""
    texts: dict[object, set[tuple[str, str]]] = {}
    for utterance in reading.utterances:
        texts.setdefault((utterance.path, utterance.span), set()).add((utterance.text, utterance.speaker))
    several = needs_speakers and any(utterance.speaker for utterance in reading.utterances)
    taken: dict[object, Utterance] = {}
    for utterance in reading.utterances:
        part = (utterance.path, utterance.span)
        if len(texts[part]) > 1:
            reading.refuse(utterance.where, "doubled transcript", f"{utterance.path} has another one too: drop one")
        elif part in taken:
            detail = f"{utterance.path} has it from {taken[part].where} already"
            reading.refuse(utterance.where, "doubled transcript", detail)
        elif several and not utterance.speaker:
            reading.refuse(utterance.where, "no speaker", f"{utterance.path}: other lines have a speaker")
        else:
            taken[part] = utterance
    return list(taken.values())
