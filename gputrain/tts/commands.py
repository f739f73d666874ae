"""Options of `speak`. Imports no torch."""

from pathlib import Path
from typing import Literal

from gputrain.config import config, opt
from gputrain.errors import UserError
from gputrain.hw.plan import DeviceName
from gputrain.speech.text.commands import LEXICON_HELP

STDOUT = Path("-")


@config(panel="Voice")
class Manner:
    """Sampling options of inference; the defaults are Piper's."""

    length_scale: float = opt(default=1.0, help="Length of every symbol, as a factor; more is slower.", min=0.1, max=10)
    noise_scale: float = opt(
        default=0.667, help="Standard deviation of the latent noise; 0: deterministic sound.", min=0, max=3
    )
    noise_w: float = opt(
        default=0.8, help="Standard deviation of the duration noise; 0: deterministic rhythm.", min=0, max=3
    )
    seed: int = opt(default=0, help="Seed of both noises; the same seed gives the same audio.", min=0)


@config(panel="Speaking")
class Speak:
    model: Path = opt(help="A run folder or a checkpoint of train-tts.")
    text: str | None = opt(
        default=None, help="Text to speak; default: lines of standard input, each as soon as it is read."
    )
    input_file: Path | None = opt(default=None, help="UTF-8 text file with one paragraph in a line.")
    output_file: Path | None = opt(
        default=None, help="Audio file of the whole text; -: streamed to standard output, sentence by sentence."
    )
    output_dir: Path | None = opt(
        default=None, help="Folder for one wav file for each line, named by its number: 0001.wav, 0002.wav, ..."
    )
    output_format: Literal["auto", "wav", "raw"] = opt(
        default="auto", help="wav, or raw 16-bit samples of one channel; auto: raw to standard output, else wav."
    )
    speaker: str = opt(default="", help="Name or number of the speaker; default: the first.")
    lexicon: Path | None = opt(default=None, help=LEXICON_HELP + " They are added to the voice's own.")
    sentence_silence: float = opt(default=0.2, help="Silence between sentences, in seconds.", min=0, max=60)
    manner: Manner = Manner()
    device: DeviceName = opt(default="auto", help="Device to compute on.")

    def __post_init__(self) -> None:
        if self.text is not None and self.input_file is not None:
            raise UserError("text and input_file are both given", hint="give one of them")
        if (self.output_file is None) == (self.output_dir is None):
            raise UserError(
                "output_file and output_dir are both given" if self.output_file else "no output_file is given",
                hint="give --output-file out.wav, --output-file - for standard output, or --output-dir FOLDER",
            )
        if self.output_dir is not None and self.output_format == "raw":
            raise UserError("output_format raw does nothing with output_dir", hint="give --output-file, or drop it")

    @property
    def known_beforehand(self) -> bool:
        """Returns whether all of the text is there before the first sentence is spoken."""
        return self.text is not None or self.input_file is not None

    @property
    def streams(self) -> bool:
        """Returns whether the sound goes to standard output."""
        return self.output_file == STDOUT

    @property
    def format(self) -> Literal["wav", "raw"]:
        if self.output_format == "auto":
            return "raw" if self.streams else "wav"
        return self.output_format
