"""The texts of recordings, and which of them are used: by columns that change what a line of a transcript means (split,
language, weight, and marks of unusable lines), and one for each sound. Imports no torch."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from gputrain.audio.prepare import RefusalReason
from gputrain.data_in.preparation import RefusedItem
from gputrain.errors import UserError
from gputrain.fetch.datasets import NO, split_of


@dataclass(frozen=True)
class Utterance:
    path: str  # path of the recording, relative to the folder
    text: str
    speaker: str  # "" for a single speaker
    where: str  # file and line of the transcript
    span: tuple[float, float] | None = None  # first second in the recording and end; default: the whole recording

    @property
    def part(self) -> tuple[object, ...]:
        """The sound that it belongs to."""
        return self.path, self.span

    @property
    def name(self) -> str:
        """The name in reports: the recording, or the subtitle that is a part of it."""
        return self.where if self.span else self.path


@dataclass(frozen=True)
class TranscriptRules:
    """Rules of a kind of model for transcripts."""

    needs_speakers: bool = True  # True if a line without a speaker is left out where others have one
    max_seconds: float = math.inf  # maximum length of joined subtitles
    language: str = ""  # language of the texts
    reads_subtitles: bool = False


CODE = re.compile(r"[A-Za-z]{2,3}([-_][A-Za-z0-9]+)*")  # A code of a language, such as en or pt-BR.
# Columns that change what a line means, and what is done where they tell lines apart.
UNSUPPORTED: Mapping[str, str] = {
    "channel": "a channel of the recording: write each channel as a recording of its own",
    "weight": "a weight: prepare the lines of each as a folder, and train with --data-path FOLDER=WEIGHT for each",
    "include": "whether it is used: keep the lines that are used",
    "status": "whether it is used: keep the lines that are used",
}
REFUSING = {*NO, "reject", "rejected", "discard", "discarded", "deleted", "excluded", "unusable", "invalid"}
LineTags = Mapping[str, str]  # Values of a line by their columns, such as {"split": "test"}.


@dataclass
class LineChoice:
    """The choice among the lines of a file by their `tags`, which are given by the place of a line.

    `to_ignore` tells how to ignore a column. Making it raises UserError for columns whose meaning is not supported, if
    their lines differ, and where the choice of a split or a language is the user's.
    """

    file: str
    tags: Mapping[int, LineTags]
    lines: int
    language: str
    to_ignore: Callable[[str], str]
    left_out: dict[int, tuple[RefusalReason, str]] = field(default_factory=dict)  # a reason and its detail, by place
    unused: set[str] = field(default_factory=set)  # columns without an effect
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for column, meaning in UNSUPPORTED.items():
            values = sorted(set(self.values(column).values()))
            self.unused.add(column)
            refuses = column in ("include", "status") and any(value.lower() in REFUSING for value in values)
            # Equal weights and marks choose nothing, but a channel and a mark that refuses do.
            if refuses or len(values) > (column != "channel"):
                said, _, advice = meaning.partition(": ")
                raise UserError(
                    f"{self.file}: a column gives each line {said} ({', '.join(values[:4])}), which is not read",
                    hint=f"{advice}; or, to read all lines alike, {self.to_ignore(column)}",
                )
        for place, value in self.values("exclude").items():
            if value.lower() not in NO:
                self.left_out[place] = ("excluded", f"a column marks it as unusable: {value[:40]}")
        self.choose_split()
        self.choose_language()

    def values(self, column: str) -> dict[int, str]:
        """Returns the values of a column by the places of the lines that have one."""
        given = {place: line[column].strip() for place, line in self.tags.items() if column in line}
        return {place: value for place, value in given.items() if value}

    def choose_split(self) -> None:
        """Leaves out the lines of other splits than that for training, by the rules for files on the Hub."""
        values = self.values("split")
        known = {value: split_of(value) for value in set(values.values())}
        splits = set(known.values()) - {"", "other"}  # The latter tells a split only beside one for training.
        if "train" in splits:
            others = {place: value for place, value in values.items() if known[value] not in ("train", "")}
            self.left_out |= {place: ("other split", f"{value}, beside train") for place, value in others.items()}
        elif len(splits) > 1:
            raise UserError(
                f"{self.file}: it has the splits {' and '.join(sorted(splits))}, and none for training",
                hint=f"keep the lines of one; or, to read all, {self.to_ignore('split')}",
            )
        elif splits:
            self.notes.append(f"{self.file}: it has the split {splits.pop()} alone, which is taken")
        else:
            self.unused.add("split")

    def choose_language(self) -> None:
        """Leaves out the lines of other languages than the one of the training, if codes tell it."""
        values, ignore = self.values("language"), self.to_ignore("language")
        spoken = sorted(set(values.values()))
        wanted, *codes = (re.split("[-_]", name.lower())[0] for name in (self.language, *spoken))
        code_of = dict(zip(spoken, codes, strict=True))
        if not all(map(CODE.fullmatch, spoken)) or {*map(len, codes)} != {len(wanted)}:
            self.unused.add("language")
            if len(spoken) > 1:
                raise UserError(
                    f"{self.file}: several languages, {', '.join(spoken[:4])}, none of which is known to be "
                    f"{self.language}",
                    hint=f"keep the lines of one language; or, to read all, {ignore}",
                )
            return
        others = {place: value for place, value in values.items() if code_of[value] != wanted}
        if len(others) == self.lines:
            raise UserError(
                f"{self.file}: all lines are of another language than {self.language}: {', '.join(spoken[:4])}",
                hint=f"choose --language {codes[0]}; or, if that is not what the column says, {ignore}",
            )
        self.left_out |= {place: ("other language", f"{value}, not {self.language}") for place, value in others.items()}


def with_one_text(utterances: Sequence[Utterance], refused: list[RefusedItem], needs_speakers: bool) -> list[Utterance]:
    """Returns the utterances with a unique text, and with a speaker if they need one. Others are added to `refused`."""

    def refuse(where: str, reason: RefusalReason, detail: str) -> None:
        refused.append(RefusedItem(where, reason, detail))

    texts: dict[object, set[tuple[str, str]]] = {}
    for utterance in utterances:
        texts.setdefault(utterance.part, set()).add((utterance.text, utterance.speaker))
    several = needs_speakers and any(utterance.speaker for utterance in utterances)
    taken: dict[object, Utterance] = {}
    for utterance in utterances:
        part = utterance.part
        if len(texts[part]) > 1:
            refuse(utterance.where, "doubled transcript", f"{utterance.path} has another one too: drop one")
        elif part in taken:
            detail = f"{utterance.path} has it from {taken[part].where} already"
            refuse(utterance.where, "doubled transcript", detail)
        elif several and not utterance.speaker:
            refuse(utterance.where, "no speaker", f"{utterance.path}: other lines have a speaker")
        else:
            taken[part] = utterance
    return list(taken.values())
