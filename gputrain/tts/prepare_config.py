"""How recordings of speech are prepared: every knob of `prepare-data --kind voice`. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gputrain.config import config, opt
from gputrain.errors import UserError
from gputrain.tts.transcript_columns import HOW_TO_SAY, Column

SAMPLING_RATE, HOP_SIZE, TRIM_DB = 22050, 256, 40.0  # those of Piper's voices; what a quiet room allows


@config(panel="Voice, with --kind voice")
class Voice:
    """What is taken of recordings and their transcripts."""

    language: Literal["uz", "en", "ru", "characters"] | None = opt(
        default=None, help="Language of the texts; characters: any other, read letter by letter."
    )
    alphabet: Path | None = opt(default=None, help="Table of letters in place of the language's own.")
    espeak_voice: str = opt(default="", help="Let this voice of an espeak-ng that is installed give the symbols.")
    transcripts: Path | None = opt(default=None, help="File of the transcripts; without a word it is looked for.")
    transcript_columns: tuple[Column, ...] = opt(
        default=(), help="Its columns: audio,text or audio,text,normalized or audio,speaker,text; else it is looked at."
    )
    min_seconds: float = opt(default=0.4, help="Leave out shorter clips, in seconds.", min=0.05)
    max_seconds: float = opt(default=20.0, help="Split or leave out longer clips, in seconds.", min=1)
    over_long: Literal["refuse", "split"] = opt(
        default="refuse", help="What becomes of longer clips; split: at pauses, where they fit the sentences."
    )
    max_clipped: float = opt(
        default=0.001, help="Leave out clips with a larger share of samples at full scale.", min=0, max=1
    )
    max_rate_deviation: float = opt(
        default=5.0, help="Leave out clips spoken so many deviations faster or slower than the rest; 0 is off.", min=0
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
                f"transcript_columns {','.join(self.transcript_columns)}: one is audio, one is text", hint=HOW_TO_SAY
            )


@dataclass(frozen=True)
class Recipe:
    """What prepared speech depends on, beside its source."""

    voice: Voice
    sampling_rate: int = SAMPLING_RATE  # Hz
    hop_size: int = HOP_SIZE  # samples a frame, of which a clip needs one a symbol
    trim_db: float = TRIM_DB  # silence at both ends, so far below the loudest, is cut off; 0: nothing is
    loudness_db: float = 0.0  # root mean square to bring each file to, in dB below full scale (negative); 0: as it is
