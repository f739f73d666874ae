"""Options of `gputrain watch`. Imports no torch."""

from pathlib import Path

from gputrain.config import config, opt
from gputrain.errors import UserError

PORT = 8765
PARENT = "GPUTRAIN_WATCH_PARENT"  # Set to 1 for a page that ends soon after the end of its standard input.


@config(panel="Watch")
class WatchSettings:
    folders: tuple[Path, ...] = opt(
        default=(),
        help="Run folders, or folders above runs. Default: outputs if it exists, or else the current folder.",
        separator="",
        is_positional=True,
    )
    port: int = opt(default=PORT, help="Port of the page; 0: any free one.", min=0, max=65535)
    host: str = opt(
        default="127.0.0.1",
        help="Address; 0.0.0.0: all of this machine. Any other than the default needs a token, which the printed "
        "address contains.",
    )
    allow_control: bool = opt(
        default=False, help="Let the page control trainings. Save, stop and cool down, and write notes."
    )

    wait: bool = opt(default=False, help="Wait for folders that do not exist yet.")

    def __post_init__(self) -> None:
        for folder in self.folders:
            if not (folder.exists() or self.wait):
                raise UserError(f"{folder}: no such folder", hint="--wait shows its runs as soon as there are some")
            if folder.exists() and not folder.is_dir():
                raise UserError(f"{folder}: is a file, expected a folder", hint="name a run folder, or one above runs")

    @property
    def watched(self) -> tuple[Path, ...]:
        """The folders to watch."""
        return self.folders or (Path("outputs") if Path("outputs").is_dir() else Path(),)
