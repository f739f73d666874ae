"""Options of `transcribe`. Imports no torch."""

from pathlib import Path
from typing import Literal

from gputrain.config import config, leaves, opt
from gputrain.errors import UserError
from gputrain.hw.plan import DeviceName

TranscriptFormat = Literal["txt", "srt", "vtt"]


@config(panel="Language model")
class LanguageModelOptions:
    """Options of beam search, which is used if there is a language model."""

    lm: Path | None = opt(
        default=None,
        help="Decode by beam search with an n-gram model of words: an ARPA file, a text with one sentence a line, or a "
        "folder of prepared speech, whose training transcripts are used.",
    )
    lm_order: int = opt(default=3, help="Length of the n-grams of a model made from texts.", min=1, max=6)
    lm_weight: float = opt(default=0.5, help="Weight of the language model's log-probabilities.", min=0, max=10)
    word_score: float = opt(
        default=1.0, help="Score of each word, which makes up for words being improbable.", min=-20, max=20
    )
    beam_width: int = opt(default=50, help="Number of beginnings of the text that are followed at once.", min=1)

    def __post_init__(self) -> None:
        known = leaves(type(self))
        for name in ("lm_order", "lm_weight", "word_score", "beam_width"):
            if self.lm is None and getattr(self, name) != known[name].default:
                raise UserError(f"{name} does nothing without lm", hint=f"give --lm FILE, or drop {known[name].flag}")


@config(panel="Transcription")
class Transcribe:
    model: Path = opt(help="A run folder or a checkpoint of train-asr, or a folder of transformers (Wav2Vec2ForCTC).")
    input: Path = opt(help="A recording, or a folder tree of them, of any length, sampling rate and format.")
    json: Path | None = opt(
        default=None, help="JSON file for a list of recordings: path, text, and words with start and end in seconds."
    )
    output_dir: Path | None = opt(default=None, help="Folder for one file a recording and format, named after it.")
    formats: tuple[TranscriptFormat, ...] = opt(
        default=("srt",), help="Formats in the output folder: txt, or subtitles as srt or vtt."
    )
    chunk_seconds: float = opt(
        default=30.0, help="Seconds that are recognised at once; fewer need less memory.", min=1, max=600
    )
    overlap_seconds: float = opt(
        default=6.0, help="Seconds that neighbouring chunks share; each gives its half.", min=0.1, max=60
    )
    language_model: LanguageModelOptions = LanguageModelOptions()
    device: DeviceName = opt(default="auto", help="Device to compute on.")

    def __post_init__(self) -> None:
        if self.output_dir is None and self.formats != ("srt",):
            raise UserError("formats does nothing without output_dir", hint="give --output-dir FOLDER")
        if not self.formats:
            raise UserError("formats is empty", hint="give --formats txt,srt,vtt or some of them")
