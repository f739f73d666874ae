"""`gputrain fetch`: the list of published starting points, and loading them ahead of time."""

import filecmp
import json
import os
import shlex
import shutil
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from gputrain.cli import ui
from gputrain.cli.help_page import WIDEST
from gputrain.config import ModelName, config, opt
from gputrain.errors import UserError
from gputrain.formatting import format_bytes
from gputrain.kinds import kinds

if TYPE_CHECKING:
    from gputrain.fetch.names import CatalogueEntry
    from gputrain.kinds import PublishedFiles

LONGEST_LINE = 1000  # Columns where nobody reads on a terminal.


@config(panel="Fetch")
class FetchSettings:
    names: tuple[ModelName, ...] = opt(
        default=(),
        help="Short names of --list, or names on the Hub. org/name:folder/file@revision.",
        separator="",
        is_positional=True,
    )
    list: bool = opt(default=False, help="Show the short names. What they are, their licence and size.")
    kind: Literal["all", "vae", "vocoder", "tts", "asr", "measure"] = opt(
        default="all", help="Names to list: of a kind of model, or measure."
    )
    json: bool = opt(default=False, help="Print the list as JSON.")
    output_dir: Path | None = opt(
        default=None, help="Folder for the files; default: the cache. All runs share it (docs/fetching.md)."
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
        from gputrain.fetch.names import catalogue

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
    """Load what is named into the cache, and copy it into a folder of the user if one is given.

    If `several` are loaded, each that has several files gets a folder of its own there.
    """
    from gputrain.fetch.archives import stem_of
    from gputrain.fetch.datasets import download_dataset, is_dataset_name
    from gputrain.fetch.hub import files_below
    from gputrain.fetch.names import FILE, CatalogueEntry, by_short_name, catalogue, fetch_listed, find_published
    from gputrain.fetch.published import fetch_model

    place, entry = find_published(name), catalogue().get(name)
    assert place is not None
    is_data = False
    if isinstance(place, CatalogueEntry):
        path, page, own = fetch_listed(place), "", stem_of(place.file_name)
        files = files_below(path) if path.is_dir() else {path.name: path}
    else:
        page, own = place.page, entry.name if entry else place.repo.rpartition("/")[2]
        is_data = entry is None and is_dataset_name(name) and not FILE.search(place.path)
        if is_data:
            path, names = download_dataset(name)
            files = {one: path / one for one in names}
        else:
            try:
                path, files = fetch_model(place, published(entry), sha256=entry.sha256 if entry else None)
            except UserError as error:
                raise by_short_name(error, place, name) if entry else error from None
    if folder:
        below = folder / own if several else folder
        copy_files(files, below)
        path = below / path.name if path.is_file() else below
        files = {file: below / file for file in files}
    used = str(path) if not is_data and (folder or Path(name).exists()) else name
    return Loaded(name, path, [*files.values()], used, page, is_data)


def copy_files(files: Mapping[str, Path], folder: Path) -> None:
    """Copy files into a folder, under the names that are their keys; each appears when it is complete.

    A file that is there already stays. Raises UserError before anything is copied if one of them is another file, and
    if the folder cannot be written to.
    """
    lacking = {}
    for name, source in files.items():
        target = folder / name
        if not os.path.lexists(target):
            lacking[target] = source
        elif not (target.is_file() and filecmp.cmp(source, target, shallow=False)):
            raise UserError(
                f"{target}: is there already, and is another file",
                hint="it is not replaced: name another --output-dir",
            )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for target, source in lacking.items():
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=target.parent) as aside:
                shutil.copyfile(source, Path(aside, target.name))
                os.replace(Path(aside, target.name), target)
    except OSError as error:
        raise UserError(
            f"{error.filename or folder}: cannot be written: {error.strerror or error}",
            hint="see to the disk, or name another --output-dir",
        ) from None


def published(entry: "CatalogueEntry | None") -> "list[PublishedFiles]":
    """Returns the files of the kind of model that an entry of the list is of; of all kinds if it is none."""
    return [kind.published for kind in kinds().values() if kind.published and (not entry or entry.kind == kind.name)]


def print_loaded(loaded: Loaded) -> None:
    """Print what was loaded, where it is, and the command that uses it."""
    from gputrain.fetch.names import catalogue

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
        from gputrain.fetch.names import catalogue

        start += " --perceptual-loss lpips"
        name = ",".join(name if one == entry else one.name for one in catalogue().values() if one.use == entry.use)
    return " ".join(filter(None, (start, entry.options, entry.use, name)))
