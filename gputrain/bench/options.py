"""Options that every `gputrain bench` command has. Imports no torch."""

from pathlib import Path

from gputrain.config import config, opt
from gputrain.hw.plan import DeviceName


@config(panel="Benchmark")
class BenchOptions:
    warmup_steps: int = opt(default=3, help="Steps before the timed ones.", min=1)
    steps: int = opt(default=10, help="Timed steps of a row; the median is reported.", min=1)
    row_minutes: float = opt(default=10, help="Time limit of a row, in minutes.", min=0.01)
    output_dir: Path = opt(default=Path("."), help="Folder for the JSON and the chart.")
    device: DeviceName = opt(default="auto", help="Device; auto uses the GPU if there is one.")
