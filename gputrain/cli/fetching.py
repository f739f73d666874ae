"""`gputrain fetch`: the list of published starting points, and loading them ahead of time."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from gputrain.cli import ui
from gputrain.config import ModelName, config, opt
from gputrain.errors import UserError
from gputrain.formatting import format_bytes, shell_command
from gputrain.kinds import kinds

if TYPE_CHECKING:
    from gputrain.fetch.names import CatalogueEntry
    from gputrain.kinds import PublishedFiles


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

    def __post_init__(self) -> None:
        if self.list == bool(self.names):
            raise UserError(
                "fetch takes either names or --list" if self.list else "nothing is named",
                hint="gputrain fetch --list shows the short names; gputrain fetch NAME loads one",
            )
        if self.kind != "all" and not self.list:
            raise UserError("kind has no effect without --list", hint="add --list, or drop --kind")


def fetch(settings: FetchSettings) -> None:
    """Show the list, or load what is named into the cache."""
    from gputrain.fetch.names import catalogue, find_published, no_such

    if settings.list:
        print_list([entry for entry in catalogue().values() if settings.kind in ("all", entry.kind)])
        return
    for name in settings.names:  # A misspelt one is found before anything is loaded.
        if find_published(name) is None:
            if Path(name).exists():
                raise UserError(f"{name}: is a path here, so that nothing is loaded", hint="options take the path")
            raise no_such(name)
    for name in settings.names:
        load(name)


def load(name: str) -> None:
    """Load what is named into the cache. Print what it is, where it is, and the command that uses it."""
    from gputrain.fetch.datasets import download_dataset, is_dataset_name
    from gputrain.fetch.hub import files_below
    from gputrain.fetch.names import FILE, CatalogueEntry, by_short_name, catalogue, fetch_listed, find_published
    from gputrain.fetch.published import fetch_model

    place, entry = find_published(name), catalogue().get(name)
    assert place is not None
    is_data = False
    if isinstance(place, CatalogueEntry):
        path = fetch_listed(place)
        files = files_below(path) if path.is_dir() else {path.name: path}
    elif entry is None and is_dataset_name(name) and not FILE.search(place.path):
        is_data = True
        path, names = download_dataset(name)
        files = {file: path / file for file in names}
    else:
        try:
            path, files = fetch_model(place, published(entry), sha256=entry.sha256 if entry else None)
        except UserError as error:
            raise by_short_name(error, place, name) if entry else error from None
    used = shell_command(path if not is_data and Path(name).exists() else name)
    found = {"path": path, "size": format_bytes(sum(file.stat().st_size for file in files.values()))}
    if entry:
        ui.print_figures(f"{name}: {entry.about}", {"licence": entry.licence, "page": entry.page, **found})
        ui.out.print(f"  {ui.escape(command_of(entry, used))}", soft_wrap=True)
    else:
        page = {} if isinstance(place, CatalogueEntry) else {"licence": "that of its page", "page": place.page}
        option = f"--input-dir {used}" if is_data else f"--init-from {used}"
        ui.print_figures(name, {**page, **found, "option": option})


def published(entry: "CatalogueEntry | None") -> "list[PublishedFiles]":
    """Returns the files of the kind of model that an entry of the list is of; of all kinds if it is none."""
    return [kind.published for kind in kinds().values() if kind.published and (not entry or entry.kind == kind.name)]


# ------------------------------------------------------------------------------------------------------------ the list

TITLES = {"vae": "Autoencoders", "vocoder": "Vocoders", "tts": "Voices", "asr": "Recognisers", "measure": "Measures"}


def print_list(entries: Sequence["CatalogueEntry"]) -> None:
    """Print the entries below a title for each kind: a name with its size and licence, and a line on what it is."""
    width = max(len(entry.name) for entry in entries)
    for kind, title in TITLES.items():
        of_kind = [entry for entry in entries if entry.kind == kind]
        if of_kind:
            ui.out.print(f"[bold]{title}[/] ({kind})")
        for entry in of_kind:
            size = format_bytes(entry.bytes) if entry.bytes else "?"
            licence = f"{entry.licence}, with a token" if entry.gated else entry.licence
            line = f"  {entry.name:<{width}}  {size:>7}  {licence}\n    {entry.about}"
            ui.out.print(line, markup=False, soft_wrap=True)
    ui.out.print("Options take these names. gputrain fetch NAME loads one.", soft_wrap=True)


def command_of(entry: "CatalogueEntry", name: str) -> str:
    """Return the command that uses a published file, by its short name or its path."""
    start = f"gputrain train-{'vae' if entry.kind == 'measure' else entry.kind} --data-path FOLDER --output-dir RUN"
    if entry.use == "--rfid-weights":
        start = "gputrain evaluate --model RUN --data-path FOLDER"
    if entry.use == "--lpips-weights":
        from gputrain.fetch.names import catalogue

        start += " --perceptual-loss lpips"
        name = ",".join(
            name if listed == entry else listed.name for listed in catalogue().values() if listed.use == entry.use
        )
    return " ".join(filter(None, (start, entry.options, entry.use, name)))
