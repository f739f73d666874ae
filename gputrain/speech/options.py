"""Options that trainings on prepared speech share. Imports no torch."""

from pathlib import Path

from gputrain.config import config, opt
from gputrain.engine.schedule import SEVERAL


@config(panel="Data")
class SpeechData:
    data_dir: tuple[Path, ...] = opt(help=f"Folder that `prepare-data` has filled{SEVERAL}", separator="")
    batch_seconds: float = opt(
        default=0.0, help="Maximum seconds of audio in a batch, padding included; 0: computed from batch_room.", min=0
    )
    batch_room: float = opt(
        default=1.5, help="Maximum audio of a batch, as a multiple of batch_size clips of average length.", min=1
    )
    max_padding: float = opt(
        default=0.02, help="Maximum share of padding in an epoch; a higher one gives fuller batches.",
        min=0.001, max=0.5,
    )  # fmt: skip
    held_out_share: float = opt(default=0.02, help="Share of the clips kept for evaluation.", min=0.0, max=0.5)
    eval_clips: int = opt(default=64, help="Maximum number of held-out clips evaluated during training.", min=1)
