"""Options of the commands around `train-tts`. Imports no torch."""

from pathlib import Path
from typing import Literal

from gputrain.config import config, opt
from gputrain.errors import UserError

Device = Literal["auto", "cuda", "cpu"]
STDOUT = Path("-")


@config(panel="Voice")
class Manner:
    """How a voice speaks; the defaults are Piper's."""

    length_scale: float = opt(default=1.0, help="Length of every symbol, as a factor; more is slower.", min=0.1, max=10)
    noise_scale: float = opt(default=0.667, help="Liveliness of the sound; 0: the same always.", min=0, max=3)
    noise_w: float = opt(default=0.8, help="Liveliness of the rhythm; 0: the same always.", min=0, max=3)
    seed: int = opt(default=0, help="Seed of that liveliness: a text sounds the same with the same one.", min=0)


@config(panel="Speaking")
class Speak:
    model: Path = opt(help="A run folder or a checkpoint of train-tts.")
    text: str | None = opt(
        default=None, help="What to say; without it and input_file, the lines of standard input, each as it comes."
    )
    input_file: Path | None = opt(default=None, help="A text file, UTF-8, a paragraph a line.")
    output_file: Path | None = opt(
        default=None, help="The wave of all of it; - is standard output, sentence by sentence as it is made."
    )
    output_dir: Path | None = opt(
        default=None, help="Folder for a wav of every line, instead: 0001.wav, 0002.wav, ... by the line's number."
    )
    output_format: Literal["auto", "wav", "raw"] = opt(
        default="auto", help="wav, or raw 16-bit samples of one channel; auto: raw to standard output, else wav."
    )
    speaker: str = opt(default="", help="Name or number of the speaker; without a word, the first.")
    sentence_silence: float = opt(default=0.2, help="Silence between sentences, in seconds.", min=0, max=60)
    manner: Manner = Manner()
    device: Device = opt(default="auto", help="Where to compute.")

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
    def format(self) -> Literal["wav", "raw"]:
        if self.output_format == "auto":
            return "raw" if self.output_file == STDOUT else "wav"
        return self.output_format
