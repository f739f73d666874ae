"""`gputrain fetch`: the list of published starting points, and loading them ahead of time."""

import json
import shlex
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from gputrain.cli import ui
from gputrain.cli.options import WIDEST
from gputrain.config import ModelName, config, opt
from gputrain.errors import UserError
from gputrain.figures import format_bytes
from gputrain.kinds import former_names, kinds

if TYPE_CHECKING:
    from gputrain.fetch.catalogue import CatalogueEntry
    from gputrain.fetch.hub import HubName

LONGEST_LINE = 1000  # Columns where nobody reads on a terminal.


@config(panel="Fetch")
class FetchSettings:
    names: tuple[ModelName, ...] = opt(
        default=(),
        help="Short names of --list, names on the Hugging Face Hub (org/name:folder/file@revision), or https addresses "
        "of files.",
        separator="",
        is_positional=True,
    )
    list: bool = opt(default=False, help="Show the short names: what they are, their licence and size.")
    kind: Literal["all", "vae", "vocoder", "tts", "asr", "measure"] = opt(
        default="all",
        help="Names to list: those for one kind of model, or for measures.",
        former_values=former_names(),
    )
    json: bool = opt(default=False, help="Print the list as JSON, with everything that is known.")
    output_dir: Path | None = opt(
        default=None, help="Folder for the files; default: the cache, which all runs share (docs/fetching.md)."
    )

    def __post_init__(self) -> None:
        if self.list == bool(self.names):
            raise UserError(
                "fetch takes either names or --list" if self.list else "nothing is named",
                hint="gputrain fetch --list shows the short names; gputrain fetch NAME loads one",
            )
        of_list, of_names = {"kind": self.kind != "all", "json": self.json}, {"output_dir": self.output_dir is not None}
        for name, given in (of_names if self.list else of_list).items():
            if given:
                flag = f"--{name.replace('_', '-')}"
                hint = f"drop {flag}" if self.list else f"add --list, or drop {flag}"
                raise UserError(f"{name} has no effect {'with' if self.list else 'without'} --list", hint=hint)


def fetch(settings: FetchSettings) -> None:
    """Show the list, or load what is named."""
    if settings.list:
        from gputrain.fetch.catalogue import catalogue

        entries = [entry for entry in catalogue().values() if settings.kind in ("all", entry.kind)]
        print_json(entries) if settings.json else print_list(entries)
        return
    from gputrain.fetch.names import find_published, no_such

    if settings.output_dir and settings.output_dir.exists() and not settings.output_dir.is_dir():
        raise UserError(f"{settings.output_dir}: is a file", hint="--output-dir names a folder")
    for name in settings.names:  # A misspelt one is found before anything is loaded.
        if find_published(name) is None:
            if Path(name).exists():
                raise UserError(f"{name}: is a path here, so that nothing is loaded", hint="options take the path")
            raise no_such(name)
    for name in settings.names:
        print_loaded(load(name, settings.output_dir, several=len(settings.names) > 1))


@dataclass(frozen=True)
class Loaded:
    """Describes what was loaded by a name."""

    name: str
    path: Path
    files: Sequence[Path]
    used: str  # What options take: the name; the path, in a folder of the user or if the name is also a path here.
    page: str = ""
    is_data: bool = False


def load(name: str, folder: Path | None, *, several: bool) -> Loaded:
    """Load what is named into the cache or a folder, and verify what is there already.

    If `several` are loaded, each that has several files gets a folder of its own.
    """
    from gputrain.fetch.addresses import Address, fetch_address
    from gputrain.fetch.files import files_below
    from gputrain.fetch.names import find_published

    place = find_published(name)
    assert place is not None
    by_path = bool(folder) or Path(name).exists()
    if not isinstance(place, Address):
        loaded = load_from_hub(name, place, folder, several=several)
        return replace(loaded, used=str(loaded.path)) if by_path else loaded
    with ui.TerminalBar("downloading (MB)") as bar:

        def report(done: int, total: int | None) -> None:
            bar.update(done / 1e6, None if total is None else max(1, round(total / 1e6)))

        below = folder / place.folder_name if folder and several and place.unpacks else folder
        path = fetch_address(place, below, thoroughly=True, progress=report)
    files = [*files_below(path).values()] if place.unpacks else [path]
    return Loaded(name, path, files, str(path) if by_path else name)


def load_from_hub(name: str, place: "HubName", folder: Path | None, *, several: bool) -> Loaded:
    """Load a model or a data set of the Hub."""
    from gputrain.fetch.catalogue import catalogue
    from gputrain.fetch.datasets import download_dataset, is_dataset_name
    from gputrain.fetch.download import writing_into
    from gputrain.fetch.files import copy_files, files_below
    from gputrain.fetch.names import FILE, by_short_name
    from gputrain.fetch.published import fetch_model

    entry = catalogue().get(name)
    below = folder / (entry.name if entry else place.repo.rpartition("/")[2]) if folder and several else folder
    is_data = entry is None and is_dataset_name(name) and not FILE.search(place.path)
    with writing_into(below or Path()):
        if is_data:
            path = download_dataset(name)
            files = files_below(path) if path.is_dir() else {path.name: path}
            if below:
                copy_files(files, below)
                path = below
            return Loaded(name, path, [*files.values()], name, place.page, is_data=True)
        wanted = [
            kind.published for kind in kinds().values() if kind.published and (not entry or entry.kind == kind.name)
        ]
        try:
            model = fetch_model(place, wanted, thoroughly=True, sha256=entry.sha256 if entry else None)
        except UserError as error:
            raise by_short_name(error, place, name) if entry else error from None
        path = model.copy_to(below) if below else model.path
    files_of_model = [(below or model.folder) / file for file in model.files]
    return Loaded(name, path, files_of_model, name, place.page)


def print_loaded(loaded: Loaded) -> None:
    """Print what was loaded, where it is, and the command that uses it."""
    from gputrain.fetch.catalogue import catalogue

    entry = catalogue().get(loaded.name)
    facts: dict[str, object] = {"licence": entry.licence, "page": entry.page} if entry else {}
    if loaded.page and not entry:
        facts = {"licence": "that of its page", "page": loaded.page}
    facts |= {"path": loaded.path, "size": format_bytes(sum(one.stat().st_size for one in loaded.files))}
    used = shlex.quote(loaded.used)
    if not entry:
        facts["option"] = f"--input-dir {used}" if loaded.is_data else f"--init-from {used}"
    ui.print_figures(f"{loaded.name}: {entry.about}" if entry else loaded.name, facts)
    if entry:
        ui.out.print(ui.command_line(ui.escape(command_of(entry, used))), soft_wrap=True)


# ------------------------------------------------------------------------------------------------------------ the list

TITLES = {"vae": "Autoencoders", "vocoder": "Vocoders", "tts": "Voices", "asr": "Recognisers", "measure": "Measures"}


def print_json(entries: Sequence["CatalogueEntry"]) -> None:
    rows = [
        {**asdict(entry), "bytes": entry.bytes or None, "command": command_of(entry, entry.name)} for entry in entries
    ]
    ui.out.print_json(json.dumps(rows))


def print_list(entries: Sequence["CatalogueEntry"]) -> None:
    """Print the entries below a title for each kind: a name with its size and licence, and a line on what it is."""
    width = max(len(entry.name) for entry in entries)
    columns = min(ui.out.width, WIDEST) if ui.out.is_terminal else LONGEST_LINE
    for kind, title in TITLES.items():
        of_kind = [entry for entry in entries if entry.kind == kind]
        if of_kind:
            ui.out.print(f"[bold]{title}[/] ({kind})")
        for entry in of_kind:
            name = f"  {entry.name:<{width}}  {format_bytes(entry.bytes) if entry.bytes else '?':>7}  "
            licence = f"{entry.licence}, with a token" if entry.gated else entry.licence
            lines = textwrap.wrap(licence, columns, initial_indent=name, subsequent_indent=" " * len(name))
            lines += textwrap.wrap(entry.about, columns, initial_indent="    ", subsequent_indent="    ")
            for line in lines:
                ui.out.print(line, markup=False, soft_wrap=True)
    ui.out.print("Options take these names. gputrain fetch NAME loads one; --json has all facts.", soft_wrap=True)


def command_of(entry: "CatalogueEntry", name: str) -> str:
    """Return the command that uses a published file, by its short name or its path."""
    start = f"gputrain train-{'vae' if entry.kind == 'measure' else entry.kind} --data-path FOLDER --output-dir RUN"
    if entry.use == "--rfid-weights":
        start = "gputrain evaluate --model RUN --data-path FOLDER"
    if entry.use == "--lpips-weights":
        from gputrain.fetch.catalogue import catalogue

        start += " --perceptual-loss lpips"
        name = ",".join(name if one == entry else one.name for one in catalogue().values() if one.use == entry.use)
    return " ".join(filter(None, (start, entry.options, entry.use, name)))
