"""The texts of recordings, and which of them are used: by columns that change what a line of a transcript means (split,
language, weight, and marks of unusable lines), and one for each sound. Imports no torch."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from gputrain.audio.prepare import RefusalReason
from gputrain.data_in.preparation import RefusedItem
from gputrain.errors import UserError
from gputrain.fetch.datasets import NO, split_of
from gputrain.formatting import counted
from gputrain.speech import subtitles


@dataclass(frozen=True)
class Utterance:
    path: str  # path of the recording, relative to the folder
    text: str
    speaker: str  # "" for a single speaker
    where: str  # file and line of the transcript
    span: tuple[float, float] | None = None  # first second in the recording and end; default: the whole recording
    channel: str = ""  # its number, as the transcript counts, or a letter; default: the mean of all

    @property
    def part(self) -> tuple[object, ...]:
        """The sound that it belongs to."""
        return self.path, self.channel, self.span

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
    language: str = ""  # language of the texts
    reads_subtitles: bool = False


# ------- choice

REJECTED = {"reject", "rejected", "discard", "discarded", "deleted", "excluded", "unusable", "invalid"}
CODE = re.compile(r"[A-Za-z]{2,3}([-_][A-Za-z0-9]+)*")  # A code of a language, such as en or pt-BR.

LineTags = Mapping[str, str]  # Values of a line by their columns, such as {"split": "test"}.


@dataclass
class LineChoice:
    """The choice among the lines of a file by their `tags`, which are given by the place of a line.

    `to_ignore` tells how to ignore a column, one of `MEANINGS`. Making it raises UserError for weights that differ, and
    where the choice of a split or a language is the user's.
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
        for column, marks, is_bad in (("exclude", NO, False), ("include", NO, True), ("status", REJECTED, True)):
            for at, value in self.values(column).items():
                if (value.lower() in marks) == is_bad:
                    self.left_out[at] = ("excluded", f"a column marks it as unusable: {value[:40]}")
        if REJECTED.isdisjoint(value.lower() for value in self.values("status").values()):
            self.unused.add("status")
        weights = sorted(set(self.values("weight").values()))
        if len(weights) > 1:
            raise UserError(
                f"{self.file}: a column gives lines other weights ({', '.join(weights[:4])}), which is not done",
                hint="prepare the lines of each weight as a folder of their own, and train with --data-path "
                f"FOLDER=WEIGHT for each; or, to read all lines alike, {self.to_ignore('weight')}",
            )
        self.unused |= {"weight"} if weights else set()
        self.choose_split()
        self.choose_language()

    def values(self, column: str) -> dict[int, str]:
        given = {at: line[column].strip() for at, line in self.tags.items() if column in line}
        return {at: value for at, value in given.items() if value}

    def choose_split(self) -> None:
        """Leaves out the lines of other splits than that for training, by the rules for files on the Hub."""
        values = self.values("split")
        known = {value: split_of(value) for value in set(values.values())}
        splits = set(known.values()) - {"", "other"}  # The latter tells a split only beside one for training.
        if "train" in splits:
            others = {at: value for at, value in values.items() if known[value] not in ("train", "")}
            self.left_out |= {at: ("other split", f"{value}, beside train") for at, value in others.items()}
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
        wanted, *codes = (re.split("[-_]", one.lower())[0] for one in (self.language, *spoken))
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
        others = {at: value for at, value in values.items() if code_of[value] != wanted}
        if len(others) == self.lines:
            raise UserError(
                f"{self.file}: all lines are of another language than {self.language}: {', '.join(spoken[:4])}",
                hint=f"choose --language {codes[0]}; or, if that is not what the column says, {ignore}",
            )
        self.left_out |= {at: ("other language", f"{value}, not {self.language}") for at, value in others.items()}


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


def overlapping(utterances: Sequence[Utterance], rules: TranscriptRules) -> str:
    """Returns a note about clips that transcripts cut out of the same sound; empty if there are none."""
    by_path: dict[tuple[str, str], list[Utterance]] = {}
    for one in utterances:
        if one.span and one.span[1] - one.span[0] <= rules.max_seconds:  # Others are left out or split.
            by_path.setdefault((one.path, one.channel), []).append(one)
    pairs = []
    for parts in by_path.values():
        ordered = sorted(parts, key=lambda one: one.span or (0.0, math.inf))
        for before, after in pairwise(ordered):
            if before.span and after.span and after.span[0] < before.span[1] - subtitles.OVERLAP_SECONDS:
                pairs.append((before, after))
    if not pairs:
        return ""
    before, after = pairs[0]
    example = f"such as {after.where} with {before.where}, both of {after.path}"
    overlap = counted(len(pairs), "clip overlaps", "clips overlap")
    return f"{overlap} the one before, {example}; each text should be all that is said in its clip"


def similar_speakers(speakers: Iterable[str]) -> str:
    """Returns a note about speakers whose names differ in capitals alone; empty if there are none."""
    spelled: dict[str, set[str]] = {}
    for name in set(speakers):
        spelled.setdefault(name.casefold(), set()).add(name)
    alike = [" and ".join(sorted(names)) for names in spelled.values() if len(names) > 1]
    if not alike:
        return ""
    named = ", ".join(sorted(alike)[:3]) + (f" and {len(alike) - 3} more" if len(alike) > 3 else "")
    return f"{named} differ in capitals alone and are separate speakers; if they are one, write the name one way"
