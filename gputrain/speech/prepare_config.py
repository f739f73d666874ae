"""Options of `prepare-data --kind tts`, which prepares recordings of speech. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gputrain.config import config, opt
from gputrain.errors import UserError
from gputrain.speech.transcript_columns import COLUMNS_HINT, TranscriptColumn

SAMPLING_RATE, HOP_SIZE = 22050, 256  # Piper's voices use these values.
TRIM_DB = 40.0  # This threshold suits recordings made in a quiet room.


@config(panel="Voice, with --kind tts")
class SpeechOptions:
    """Options that select clips from recordings and their transcripts."""

    language: Literal["uz", "en", "ru", "characters"] | None = opt(
        default=None, help="Language of the texts; characters: any other, read letter by letter."
    )
    alphabet: Path | None = opt(default=None, help="Table of letters that replaces the language's own.")
    espeak_voice: str = opt(default="", help="Phonemise with this voice of an installed espeak-ng.")
    transcripts: Path | None = opt(default=None, help="File of the transcripts; default: found in the folder.")
    transcript_columns: tuple[TranscriptColumn, ...] = opt(
        default=(), help="Columns: audio,text or audio,text,normalized or audio,speaker,text; default: detected."
    )
    min_seconds: float = opt(default=0.4, help="Leave out shorter clips, in seconds.", min=0.05)
    max_seconds: float = opt(default=20.0, help="Split or leave out longer clips, in seconds.", min=1)
    over_long: Literal["refuse", "split"] = opt(
        default="refuse", help="Treatment of longer clips; split: cut at pauses that match the sentences."
    )
    max_clipped: float = opt(
        default=0.001, help="Leave out clips with a larger share of samples at full scale.", min=0, max=1
    )
    max_rate_deviation: float = opt(
        default=5.0, help="Leave out clips whose speaking rate is so many deviations off the median; 0 is off.", min=0
    )

    def __post_init__(self) -> None:
        if self.min_seconds > self.max_seconds:
            raise UserError(
                f"min_seconds {self.min_seconds:g} and max_seconds {self.max_seconds:g} leave no clip between them",
                hint="0.4 and 20 suit most voices",
            )
        named = [column for column in self.transcript_columns if column != "other"]
        if named and ("audio" not in named or "text" not in named or len(set(named)) < len(named)):
            raise UserError(
                f"transcript_columns {','.join(self.transcript_columns)}: audio and text must occur once each",
                hint=COLUMNS_HINT,
            )


@dataclass(frozen=True)
class SpeechPrepareConfig:
    """Settings that prepared speech depends on, apart from its source."""

    speech: SpeechOptions
    sampling_rate: int = SAMPLING_RATE  # Hz
    hop_size: int = HOP_SIZE  # samples of a frame; a clip needs a frame for each symbol
    trim_db: float = TRIM_DB  # Ends this far below the peak are trimmed; 0 is off.
    loudness_db: float = 0.0  # Target RMS of each file in dBFS (negative); 0 is off.
