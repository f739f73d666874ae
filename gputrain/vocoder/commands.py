"""Options of the vocoder's other commands. Imports no torch."""

from pathlib import Path
from typing import Any, ClassVar, Literal

from gputrain.audio.config import F0Method
from gputrain.bench.options import BenchOptions, BenchSettings, MeasuredFile
from gputrain.config import config, opt
from gputrain.hw.plan import Cards, DeviceName
from gputrain.vocoder.config import Data, TrainVocoder


@config(panel="Data")
class PlannedData(Data):
    data_path: tuple[Path, ...] = opt(
        default=(Path("."),), help="Data whose items are counted, to predict hours; not needed.", separator=""
    )


@config()
class PlanVocoder(TrainVocoder):
    """The options of train-vocoder, and the GPUs to plan for."""

    data: PlannedData = PlannedData()
    cards: Cards = Cards()


@config(panel="Vocoding")
class Vocode:
    model: Path = opt(help="A run folder, a checkpoint, or openvpi's model.ckpt with its config.json.")
    input: Path = opt(help="A recording, or mel and pitch (NAME.npz, NAME.mel.npy + NAME.f0.npy), or a folder of them.")
    output_dir: Path = opt(help="Folder for the output, 16-bit wav.")
    shift_semitones: float = opt(default=0.0, help="Shift of the pitch, in semitones.", min=-48, max=48)
    f0_method: F0Method = opt(default="auto", help="Pitch tracker for recordings, as in prepare-data.")
    f0_min: float = opt(default=40.0, help="Lowest pitch that is tracked, in Hz.", min=10)
    f0_max: float = opt(default=1100.0, help="Highest pitch that is tracked, in Hz.", min=20)
    chunk_seconds: float = opt(default=10.0, help="Seconds synthesised at once; fewer need less memory.", min=0.1)
    seed: int = opt(default=0, help="Seed of the noise of the source.", min=0)
    device: DeviceName = opt(default="auto", help="Device to compute on.")


@config(panel="Benchmark")
class BenchVocoder(BenchSettings):
    measured: ClassVar[type] = TrainVocoder

    upsample_initial_channel: int = opt(default=512, help="Channels before the first upsampling stage.", min=32)
    discriminators: tuple[str, ...] = opt(default=("fast_mrd", "fast_mpd"), help="As in train-vocoder.")
    discriminator_periods: tuple[int, ...] = opt(default=(2, 3, 5, 7, 11), help="Periods of mpd and fast_mpd.", min=1)
    mini_nsf: bool = opt(default=False, help="Use the mini source (one sine) instead of the full one.")
    crop_mel_frames: int = opt(default=48, help="Frames of a crop.", min=8)
    batch_size: int = opt(default=16, help="Crops per step.", min=1)
    micro_batch_size: int = opt(default=0, help="Crops per micro-batch, if fewer than batch_size.", min=0)
    optimizer: Literal["adamw", "muon"] = opt(
        default="muon", help="Optimizer of generator and discriminators; it beats --config if it is given."
    )
    inference: bool = opt(default=False, help="Measure the synthesis of crops without gradients, not training steps.")
    bench: BenchOptions = BenchOptions()

    def training(self, file: MeasuredFile | None = None) -> dict[str, Any]:
        optimizers = dict.fromkeys(("generator_optimizer", "discriminator_optimizer"), self.optimizer)
        trained = super().training(file)
        return optimizers | trained if file and "optimizer" not in self.bench.flags else trained | optimizers
