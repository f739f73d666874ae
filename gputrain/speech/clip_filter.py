"""Selects the clips that a voice or a recogniser is trained on, with a reason for each other one, and finds what is odd
about their texts: rare symbols, mixed scripts, signs that are lost."""

import math
import re
import statistics
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeAlias

from gputrain.audio.prepare import RefusalReason
from gputrain.data_in.preparation import RefusedItem
from gputrain.errors import UserError
from gputrain.speech.config import SpeechPrepareConfig, encoder_frames
from gputrain.speech.store import Recording, SpeechClip, SpeechFormat, frame_count
from gputrain.speech.text.frontend import RESERVED, Frontend, frontend, shortened
from gputrain.speech.text.language import CHARACTERS
from gputrain.speech.text.raw import raw_rules
from gputrain.speech.text.unicode_cleanup import APOSTROPHES, IPA_SIGNS, is_removed, script_of
from gputrain.speech.text.vocabulary import SPECIAL, Vocabulary, plain_words, rules_of, vocabulary_of
from gputrain.speech.utterances import Utterance

MOST_EXAMPLES = 5  # maximum number of characters listed in a warning
SPOKEN_SIGNS = "/\\@%&#*§‰†"
DEVIATION = 1.4826  # standard deviation of a normal distribution in units of its median absolute deviation
FEW_CLIPS = 20  # too few clips to estimate the spread of speaking rates
USUAL_RATES = 1.6  # ratio of speaking rates that is always accepted
END_SECONDS = 1.0  # silence at the ends of a clip that does not count as slow speech
BEYOND_SECONDS = 0.5  # accepted end of a subtitle after that of its recording

ONE_WRITING = {"Cjk", "Hiragana", "Katakana"}  # Japanese has all of them.

RARE = 20  # minimum number of occurrences for a symbol to be learnt
MOST_NAMED = 8  # maximum number of symbols named in a sentence
# Letters that look alike, from Unicode's confusables.txt (UTS 39), some of them in upper case only.
ALIKE = (
    "aа", "aα", "ɑα", "bв", "cс", "eе", "hн", "hһ", "iі", "iι", "ıι", "jј", "kк", "kκ", "mм", "oо", "oο", "oօ", "pр",
    "pρ", "qԛ", "sѕ", "tт", "tτ", "uυ", "vν", "wԝ", "xх", "yу", "yγ", "əә", "əǝ", "әǝ", "ɵө", "gɡ", "lӏ", "ɛε", "ßβ",
    "şș", "ţț", "ģǵ", "ïї", "ëё", "äӓ", "öӧ", "ÿӱ", "ăӑ", "ңӊ", "қӄ", "یي", "یى", "کك", "ہه", "ۃة", "۴٤", "۵٥", "۶٦",
    "'ʼ", "’ʼ", "ʻʼ",
)  # fmt: skip
# Remarks about a sound, and what programs write for a missing text.
ANNOTATION = re.compile(r"\[[^\[\]]+\]|<[^<>]+>|\{[^{}]+\}|\*[^*]+\*|\(\([^()]*\)\)|♪|^(?:nan|NaN|None|null|NULL|N/A)$")

Reader: TypeAlias = Frontend | Vocabulary


@dataclass(frozen=True)
class Selection:
    format: SpeechFormat
    clips: list[SpeechClip]
    refused: list[RefusedItem]


class _Unfit(Exception):
    """Raised with the reason for leaving out a recording."""

    def __init__(self, reason: RefusalReason, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


def reader_of(config: SpeechPrepareConfig, utterances: Sequence[Utterance]) -> Reader:
    """Returns the text front end of a voice, or the vocabulary of a recogniser.

    Raises UserError if no language is given, or no text has a letter, and as `raw_rules` does.
    """
    options, language = config.speech, config.speech.language_for(config.kind)
    has_rules = bool(rules_of(language)) if config.kind == "asr" else language != CHARACTERS.name
    raw = raw_rules(language, has_rules, options.lexicon, options.number_words)
    texts = [utterance.text for utterance in utterances]
    if config.kind == "tts":
        return frontend(language, espeak_voice=options.espeak_voice, texts=texts, raw=raw)
    if not texts:  # The reason for leaving out each transcript is reported instead.
        return Vocabulary(language, SPECIAL, raw=raw)
    return vocabulary_of(language, (plain_words(text, language, raw) for text in texts), raw)


def select_clips(
    utterances: Sequence[Utterance], recordings: Mapping[str, Recording], config: SpeechPrepareConfig
) -> Selection:
    """Selects clips of the utterances whose path is among the recordings. Raises UserError as `reader_of` does."""
    reader = reader_of(config, utterances)
    clip_filter = _ClipFilter(config, reader, unread(reader, (utterance.text for utterance in utterances)))
    refused: list[RefusedItem] = []
    found: list[tuple[str, SpeechClip]] = []
    speakers = sorted({utterance.speaker for utterance in utterances})
    places = {speaker: place for place, speaker in enumerate(speakers)}
    for utterance in utterances:
        if recording := recordings.get(utterance.path):
            try:
                clip = clip_filter.clip_of(utterance, recording, places[utterance.speaker])
                found.append((utterance.name, clip))
            except _Unfit as fault:
                refused.append(RefusedItem(utterance.name, fault.reason, fault.detail))
    clips = _evenly_spoken(found, refused, config, reader)
    present = {number: place for place, number in enumerate(sorted({clip.speaker for clip in clips}))}
    clips = [replace(clip, speaker=present[clip.speaker]) for clip in clips]
    names = tuple(speakers[number] for number in present)
    if config.kind == "asr" and clips:  # Texts that are left out add no symbols.
        reader = vocabulary_of(reader.language, (clip.normalized for clip in clips), reader.raw)
    return Selection(SpeechFormat(reader, config.sampling_rate, config.hop_size, names, config.kind), clips, refused)


def unread(reader: Reader, texts: Iterable[str]) -> frozenset[str]:
    """Returns the letters and digits of raw texts that the front end removes, so that they would not be spoken."""
    letters = set(unicodedata.normalize("NFC", "".join(texts)))
    spoken = [char for char in letters if unicodedata.category(char)[0] in "LN"]
    return frozenset(char for char in spoken if is_removed(char, reader.normalize))


def text_notes(reader: Reader, utterances: Sequence[Utterance]) -> list[str]:
    """Returns what the texts as read lose or keep against expectation."""
    return list(filter(None, (odd_letters(reader, utterances), removed_signs(reader, utterances))))


def removed_signs(reader: Reader, utterances: Iterable[Utterance]) -> str:
    """Returns a warning about signs and marks of the texts as read that normalisation removes, with the number of texts
    and an example. Brackets, quotation marks and the like say nothing, and letters lead to a refusal."""

    @cache
    def is_lost(char: str) -> bool:
        is_sign = unicodedata.category(char)[0] in "SM" or char in SPOKEN_SIGNS
        return is_sign and is_removed(char, reader.normalize)

    found = examples_of((utterance.text, filter(is_lost, set(utterance.text))) for utterance in utterances)
    return f"signs that the text rules remove, with the number of texts: {found}" if found else ""


def odd_letters(reader: Reader, utterances: Iterable[Utterance]) -> str:
    """Returns a warning about digits and signs that a language without rules for them does not spell as they are
    spoken, with the number of texts and an example."""
    if isinstance(reader, Vocabulary):
        if rules_of(reader.language) or reader.raw.number_words:
            return ""
        said = f"--language {reader.language} keeps digits, since it has no words for them"
    elif reader.language != CHARACTERS.name or reader.espeak_voice:
        return ""
    else:
        said = "--language characters treats digits and signs as letters, since it has no words for them"
    # Digits, symbols such as + or €, and SPOKEN_SIGNS stand for words that they do not spell.
    odd = {"Nd", "Nl", "No", "Sc", "Sm", "Sk", "So"}
    texts = ((utterance.text, set(reader.normalize(utterance.text)) - IPA_SIGNS) for utterance in utterances)
    found = examples_of(
        (text, (char for char in chars if unicodedata.category(char) in odd or char in SPOKEN_SIGNS))
        for text, chars in texts
    )
    remedy = "" if reader.raw.number_words else ", or use --number-words with a language that num2words has"
    return f"{said}: {found}; write them out as they are spoken{remedy}" if found else ""


def examples_of(texts: Iterable[tuple[str, Iterable[str]]]) -> str:
    """Returns the characters that are found in texts, the commonest first, each with the number of its texts and the
    first of them; "" for none."""
    counts, examples = Counter[str](), dict[str, str]()
    for text, found in texts:
        for char in sorted(found):
            counts[char] += 1
            examples.setdefault(char, text)
    named = [f"{char} ({count}: {shortened(examples[char])!r})" for char, count in counts.most_common(MOST_EXAMPLES)]
    return ", ".join(named) + (f" and {len(counts) - MOST_EXAMPLES} more" if len(counts) > MOST_EXAMPLES else "")


@dataclass(frozen=True)
class _ClipFilter:
    """Makes clips of recordings, or raises _Unfit."""

    config: SpeechPrepareConfig
    reader: Reader
    unread: frozenset[str]

    def clip_of(self, utterance: Utterance, recording: Recording, speaker: int) -> SpeechClip:
        options, rate_hz = self.config.speech, self.config.sampling_rate
        if recording.clipped_share > options.max_clipped:
            raise _Unfit("clipped", f"{100 * recording.clipped_share:.2g} % of its samples are at full scale")
        normalized = self.normalized(utterance.text)
        begin, end = self.span(utterance, recording)
        if end - begin > options.max_seconds * rate_hz:
            detail = f"{(end - begin) / rate_hz:.1f} seconds, more than {options.max_seconds:g}"
            raise _Unfit("too long", f"{detail}; --align-with MODEL cuts it at the ends of sentences")
        first = recording.first_sample + begin
        source = (recording.path, recording.fingerprint)
        return self.fit(SpeechClip(*source, first, end - begin, utterance.text, normalized, speaker))

    def span(self, utterance: Utterance, recording: Recording) -> tuple[int, int]:
        """Returns the first sample of an utterance in its recording, and the end."""
        if utterance.span is None:
            return 0, recording.samples
        rate_hz, (first, last) = self.config.sampling_rate, utterance.span
        begin, length = round(first * rate_hz), recording.samples
        if begin >= length or (last < math.inf and last * rate_hz > length + BEYOND_SECONDS * rate_hz):
            part = f"{first:.2f} to {last:.2f} seconds" if last < math.inf else f"{first:.2f} seconds to the end"
            raise _Unfit("outside the recording", f"{part} of a recording of {length / rate_hz:.2f}")
        return begin, min(round(min(last, length) * rate_hz), length)

    def normalized(self, text: str) -> str:
        try:
            normalized = self.reader.normalize(text)
        except UserError as error:
            raise _Unfit("malformed", error.message) from None
        unread = {*self.reader.unknown(normalized), *(self.unread & set(unicodedata.normalize("NFC", text)))}
        if unread:
            named = [f"{char} (U+{ord(char):04X} {unicodedata.name(char, 'nameless')})" for char in sorted(unread)]
            raise _Unfit("unknown symbols", ", ".join(named))
        if not normalized.strip():
            raise _Unfit("no transcript", f"nothing is left of {text[:40]!r} after normalisation")
        return normalized

    def fit(self, clip: SpeechClip) -> SpeechClip:
        """Returns the clip if it reaches the minimum duration and has at least one frame for each symbol."""
        seconds, shortest = clip.samples / self.config.sampling_rate, self.config.speech.min_seconds
        if seconds < shortest:
            raise _Unfit("too short", f"{seconds:.2f} seconds of sound, less than {shortest:g}")
        hop, needed = self.config.hop_size, self.reader.frames_needed(clip.normalized)
        if self.config.kind == "tts":
            frames = frame_count(clip.samples, hop)
            said = f"{frames} frames of {hop} samples for {needed} symbols with the blanks between them"
        else:
            frames, labels = encoder_frames(clip.samples), len(self.reader.ids(clip.normalized))
            said = f"{frames} frames of the encoder for {labels} labels and {needed - labels} blanks between equal ones"
        if frames < needed:
            raise _Unfit("fewer frames than symbols", said)
        return clip


def _evenly_spoken(
    found: Sequence[tuple[str, SpeechClip]], refused: list[RefusedItem], config: SpeechPrepareConfig, reader: Reader
) -> list[SpeechClip]:
    """Removes clips, given with the names of their utterances, with an outlying speaking rate: most often their text
    belongs to another recording.

    A rate is outlying if it differs from the median by more standard deviations than the option allows, and by more
    than a usual factor; a slow one, if the clip also has more seconds than its text and silent ends fill.
    """
    clips, allowed = [clip for _, clip in found], config.speech.max_rate_deviation
    if len(clips) < FEW_CLIPS or not allowed:
        return clips
    # The ends of a recogniser's clips are not trimmed, so that silence makes short texts slow.
    silence = END_SECONDS if config.kind == "asr" else 0.0
    symbols = [reader.spoken(clip.normalized) for clip in clips]
    seconds = [clip.samples / config.sampling_rate for clip in clips]
    rates = [count / length for count, length in zip(symbols, seconds, strict=True)]
    middle = statistics.median(map(math.log, rates))
    # The median absolute deviation is not changed by outliers.
    deviation = DEVIATION * statistics.median(abs(math.log(rate) - middle) for rate in rates)
    limit, median = max(allowed * deviation, math.log(USUAL_RATES)), math.exp(middle)
    kept = []
    for (name, clip), rate, count, length in zip(found, rates, symbols, seconds, strict=True):
        if abs(math.log(rate) - middle) > limit and (rate > median or length - count / median > silence):
            detail = f"{rate:.1f} symbols per second; the median of all clips is {median:.1f}"
            refused.append(RefusedItem(name, "odd speaking rate", detail))
        else:
            kept.append(clip)
    return kept


# ---------------------------------------------------------------------------------------------- symbols of all texts


def symbol_counts(clips: Iterable[SpeechClip], reader: Reader) -> dict[str, int]:
    """Returns the occurrences of every symbol that stands for a part of a text, the most frequent first."""
    found = Counter(number for clip in clips for number in reader.ids(clip.normalized))
    hidden = {reader.blank, reader.unknown_id} if isinstance(reader, Vocabulary) else {*range(len(RESERVED))}
    counts = {symbol: found[number] for number, symbol in enumerate(reader.symbols) if number not in hidden}
    return dict(sorted(counts.items(), key=lambda pair: -pair[1]))


def vocabulary_findings(clips: Sequence[SpeechClip], counts: Mapping[str, int]) -> Iterator[str]:
    """Yields what is odd about the symbols of the texts, with examples; `counts` are those of `symbol_counts`."""
    rare = [symbol for symbol, count in counts.items() if 0 < count < RARE and symbol not in SPECIAL]
    if rare:
        spoken = [word for clip in clips for word in clip.normalized.split()]
        words = {symbol: next((word for word in spoken if symbol in word), "") for symbol in rare[-MOST_NAMED:]}
        named = [f"{symbol} ({counts[symbol]}: {shortened(word, 30)!r})" for symbol, word in words.items()]
        more = f" and {len(rare) - MOST_NAMED} more" if len(rare) > MOST_NAMED else ""
        yield f"symbols that occur less than {RARE} times, too rarely to be learnt: {', '.join(named)}{more}"
    # Rules may have made one script of those of a text, as those of Uzbek do.
    mixed = [*script_findings(counts)] or [found for clip in clips for found in script_findings(Counter(clip.text))]
    yield from mixed[:1]
    marks = [mark for mark in APOSTROPHES if mark in counts]
    # The standard Uzbek alphabet has two: ʻ is a part of letters, ʼ stands between them.
    if len(marks) > 1 and {*marks} != {"ʻ", "ʼ"}:
        yield f"several signs for an apostrophe: {', '.join(f'{mark} (U+{ord(mark):04X})' for mark in marks)}"


def script_findings(counts: Mapping[str, int]) -> Iterator[str]:
    """Yields which characters of texts are of another script than the most, by their occurrences."""
    scripts = Counter[str]()
    for symbol, count in counts.items():
        if script := script_of(symbol):
            scripts[script] += count
    if len(scripts) > 1 and not scripts.keys() <= ONE_WRITING:
        (main, _), *others = scripts.most_common()
        parts = [f"{' '.join([s for s in counts if script_of(s) == name][:MOST_NAMED])} ({name})" for name, _ in others]
        yield f"letters of other scripts than {main}, which may only look alike: {', '.join(parts)}"


def lookalike_findings(counts: Mapping[str, int]) -> Iterator[str]:
    """Yields which characters of texts look alike, by their occurrences."""
    wide = [unicodedata.normalize("NFKC", char) + char for char in sorted(counts) if "！" <= char <= "ￜ"]
    pairs = [pair for pair in (*ALIKE, *wide) if counts.keys() >= set(pair)]
    if pairs:
        named = [" and ".join(f"{char} (U+{ord(char):04X}, {counts[char]} times)" for char in pair) for pair in pairs]
        yield f"letters that look alike, perhaps one in two spellings: {'; '.join(named[:MOST_NAMED])}"
