"""Options that every `gputrain bench` command has. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from gputrain.config import assemble, changed, config, flatten, leaves, opt
from gputrain.hw.plan import DeviceName, Hardware


@dataclass(frozen=True)
class MeasuredFile:
    """A configuration file of the measured train command: its name, and its options by name."""

    name: str
    values: Mapping[str, Any]


@config(panel="Benchmark")
class BenchOptions:
    untimed_steps: int = opt(default=3, help="Steps before the timed ones.", min=1)
    steps: int = opt(default=10, help="Timed steps of a row. The median is reported.", min=1)
    row_minutes: float = opt(default=10, help="Time limit of a row, in minutes.", min=0.01)
    output_dir: Path = opt(default=Path("."), help="Folder for the JSON and the chart.")
    device: DeviceName = changed(Hardware, "device", default="auto")
    # From the command line, and no options themselves:
    files: tuple[MeasuredFile, ...] = field(default=())
    flags: frozenset[str] = field(default=frozenset())  # Names of the options that were given; they beat a file.


class BenchSettings:
    """Base of the options of a benchmark, some of which are options of the measured train command."""

    measured: ClassVar[type]  # The options of the train command.
    bench: BenchOptions

    def __post_init__(self) -> None:
        for file in self.bench.files or (None,):
            assemble(self.measured, self.training(file))  # It raises UserError for the same values as the command.

    @property
    def own_options(self) -> dict[str, Any]:
        """Returns the options that only the benchmark of this kind has, such as the length of a clip."""
        shared = leaves(self.measured).keys() | leaves(BenchOptions).keys()
        return {name: value for name, value in flatten(self).items() if name not in shared}

    def training(self, file: MeasuredFile | None = None) -> dict[str, Any]:
        """Returns the options of the measured train command: those of a file, if there is one, and of the benchmark;
        the other options keep their defaults."""
        names = leaves(self.measured).keys() - leaves(BenchOptions).keys()
        own = {name: value for name, value in flatten(self).items() if name in names}
        read = self._without_folders(file) if file else {}
        if file:
            own = {name: value for name, value in own.items() if name in self.bench.flags or name not in read}
        return {"data_path": ".", **read, "device": self.bench.device, **own}

    def _without_folders(self, file: MeasuredFile) -> dict[str, Any]:
        """Returns the values of a file without its folders and its limits, since synthetic data are measured."""
        data = {leaf.name for leaf in leaves(self.measured).values() if "data_path" in leaf.names}
        left_out = data | {"output_dir", "resume_from", "init_from", "plan_file"}
        return {name: value for name, value in file.values.items() if name not in left_out}
