"""Options that every `gputrain bench` command has. Imports no torch."""

from pathlib import Path
from typing import Any, ClassVar

from gputrain.config import assemble, config, flatten, leaves, opt
from gputrain.hw.plan import DeviceName


@config(panel="Benchmark")
class BenchOptions:
    warmup_steps: int = opt(default=3, help="Steps before the timed ones.", min=1)
    steps: int = opt(default=10, help="Timed steps of a row; the median is reported.", min=1)
    row_minutes: float = opt(default=10, help="Time limit of a row, in minutes.", min=0.01)
    output_dir: Path = opt(default=Path("."), help="Folder for the JSON and the chart.")
    device: DeviceName = opt(default="auto", help="Device; auto uses the GPU if there is one.")


class BenchSettings:
    """Base of the options of a benchmark, some of which are options of the measured train command."""

    measured: ClassVar[type]  # The options of the train command.
    bench: BenchOptions

    def __post_init__(self) -> None:
        assemble(self.measured, self.training())  # It raises UserError for the same values as the train command.

    def training(self) -> dict[str, Any]:
        """Returns the options of the measured train command; the other options keep their defaults."""
        names = leaves(self.measured).keys() - leaves(BenchOptions).keys()
        shared = {name: value for name, value in flatten(self).items() if name in names}
        return {"data_path": ".", "device": self.bench.device, **shared}
