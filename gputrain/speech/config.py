"""Options of preparing recordings of speech, for voices and recognisers, of training on them, and of normalising texts;
and the frames of a recogniser. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from gputrain.config import advanced, config, opt
from gputrain.engine.schedule import SEVERAL
from gputrain.errors import UserError
from gputrain.speech.text.language import check_language
from gputrain.speech.transcript_tables import COLUMNS_HINT, TranscriptColumn

SAMPLING_RATE, HOP_SIZE = 22050, 256  # Piper's voices use these values.
# Of wav2vec 2.0, XLS-R and MMS, which read samples at 16 kHz.
ENCODER_RATE = 16000  # Hz
STRIDE = 320  # samples from one frame to the next: the product of the strides 5, 2, 2, 2, 2, 2, 2
FIELD = 400  # samples that a frame reads
TRIM_DB = 40.0  # This threshold suits recordings made in a quiet room.
SpeechKind = Literal["tts", "asr"]
CLIPS_HELP = "Maximum number of clips in a batch. Long clips count for more."
LanguageName = Literal["uz", "en", "ru", "characters"]
LEXICON_HELP = "File of spellings by word. YAML or JSON, such as Facebook: feysbuk; whole words match."
ESPEAK_HELP = "Phonemise with this voice of espeak-ng. That of Piper."
NUMBER_WORDS_HELP = "Language in which num2words writes numbers. Only where texts have no rules, such as tr."


def encoder_frames(samples: int) -> int:
    """Returns the exact number of frames that the seven convolutions make of a wave, which has no padding.

    Source: Baevski et al. 2020 (https://arxiv.org/abs/2006.11477), section 4.2. floor((floor((n - a) / b) + 1 - c) / d)
    of nested convolutions equals one floor of the whole, so this equals the frames layer by layer.
    """
    return max(0, (samples - FIELD) // STRIDE + 1)


@dataclass(frozen=True)
class SpeechPolicy:
    """Differences between speech that is prepared for a voice and for a recogniser."""

    name: str  # the model in words, for messages
    sampling_rate: int  # Hz, by default
    hop_size: int  # samples from one frame to the next
    trim_db: float  # default of the trimming of both ends
    needs_speakers: bool  # True if either all lines of a transcript have a speaker, or none has
    reads_subtitles: bool  # True if subtitles next to long recordings cut these into clips


# A recogniser hears silence before and after speech when it is used, so it is trained with it.
POLICIES: Mapping[SpeechKind, SpeechPolicy] = {
    "tts": SpeechPolicy("a voice", SAMPLING_RATE, HOP_SIZE, TRIM_DB, needs_speakers=True, reads_subtitles=False),
    "asr": SpeechPolicy("a recogniser", ENCODER_RATE, STRIDE, 0.0, needs_speakers=False, reads_subtitles=True),
}


@config(panel="Speech, with --kind tts or asr")
class SpeechOptions:
    """Options that select clips from recordings and their transcripts."""

    language: str | None = opt(
        default=None,
        help="Language of the texts: uz, en, ru or another. For tts characters: any other, read letter by letter; for "
        "asr the code of any other, such as kk.",
    )
    lexicon: Path | None = opt(default=None, help=LEXICON_HELP)
    number_words: str = advanced(default="", help=NUMBER_WORDS_HELP)
    espeak_voice: str = opt(default="", help=ESPEAK_HELP)
    transcripts: Path | None = opt(default=None, help="File of the transcripts. Default: found in the folder.")
    transcript_columns: tuple[TranscriptColumn, ...] = opt(
        default=(),
        help="Columns, such as audio,speaker,text. audio,text and also normalized, other, start, end and duration in "
        "seconds; default: detected.",
    )
    min_seconds: float = opt(default=0.4, help="Leave out shorter clips, in seconds.", min=0.05)
    max_seconds: float = opt(default=20.0, help="Leave out longer clips, in seconds. align_with cuts them.", min=1)
    max_clipped: float = advanced(
        default=0.001, help="Leave out clips with a larger share of samples at full scale.", min=0, max=1
    )
    max_rate_deviation: float = advanced(
        default=5.0, help="Leave out clips whose speaking rate is so many deviations off the median; 0 is off.", min=0
    )

    def __post_init__(self) -> None:
        if self.min_seconds > self.max_seconds:
            raise UserError(
                f"min_seconds {self.min_seconds:g} and max_seconds {self.max_seconds:g} leave no clip between them",
                hint="0.4 and 20 suit most voices and recognisers",
            )
        named = [column for column in self.transcript_columns if column != "other"]
        if named and ("audio" not in named or "text" not in named or len(set(named)) < len(named)):
            raise UserError(
                f"transcript_columns {','.join(self.transcript_columns)}: audio and text must occur once each",
                hint=COLUMNS_HINT,
            )

    def language_for(self, kind: SpeechKind) -> str:
        """Returns the language. Raises UserError if none is given, or this kind of model does not know it."""
        if self.language is None:
            hint = f"{LANGUAGE_HINTS[kind]}{BESIDE_ESPEAK if self.espeak_voice else ''}"
            raise UserError(f"{POLICIES[kind].name} needs a language", hint=hint)
        if kind == "tts" and self.language not in get_args(LanguageName):
            raise UserError(f"language {self.language!r} has no text rules for a voice", hint=LANGUAGE_HINTS[kind])
        if kind == "asr":
            check_language(self.language)
        return self.language


BESIDE_ESPEAK = "; beside --espeak-voice too: its rules tell sentences apart"
LANGUAGE_HINTS: Mapping[SpeechKind, str] = {
    "tts": "use --language uz, en or ru, or --language characters for any other",
    "asr": "use --language uz, en or ru, or the code of any other language, such as kk",
}


@dataclass(frozen=True)
class SpeechPrepareConfig:
    """Settings that prepared speech depends on, apart from its source."""

    speech: SpeechOptions
    sampling_rate: int = SAMPLING_RATE  # Hz
    hop_size: int = HOP_SIZE  # samples of a frame; a clip needs as many frames as its text takes
    trim_db: float = TRIM_DB  # Ends this far below the peak are trimmed; 0 is off.
    loudness_db: float = 0.0  # Target RMS of each file in dBFS (negative); 0 is off.
    kind: SpeechKind = "tts"


# ------------------------------------------------------------------------------------------------------------- training


@config(panel="Data")
class SpeechData:
    data_path: tuple[Path, ...] = opt(help="Folder that prepare-data has filled." + SEVERAL, separator="")
    max_batch_audio_ratio: float = advanced(
        default=1.5, help="Maximum audio of a batch, as a multiple of batch_size clips of average length.", min=1
    )
    max_padding: float = advanced(
        default=0.02,
        help="Maximum share of padding in an epoch. A higher one gives fuller batches.",
        min=0.001,
        max=0.5,
    )
    held_out_share: float = opt(default=0.02, help="Share kept for evaluation.", min=0.0, max=0.5)
    eval_clips: int = advanced(default=64, help="Maximum number of held-out clips evaluated during training.", min=1)


# ---------------------------------------------------------------------------------------------------------------- texts


@config(panel="Text")
class Normalize:
    language: LanguageName = opt(
        default="uz", help="uz, en, ru or characters. characters: any other, without normalisation rules."
    )
    text: str = opt(default="", help="Text to normalise; default: standard input. Each line is a text.")
    input_file: Path | None = opt(default=None, help="UTF-8 text file, read line by line.")
    lexicon: Path | None = opt(default=None, help=LEXICON_HELP)
    number_words: str = opt(default="", help=NUMBER_WORDS_HELP)
    espeak_voice: str = opt(default="", help=ESPEAK_HELP)

    def __post_init__(self) -> None:
        if self.text and self.input_file:
            raise UserError("text and input_file are both given", hint="give one of them")
