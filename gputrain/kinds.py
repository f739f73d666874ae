"""The kinds of model: a `ModelKind` describes each, and `kinds()` is the table of them. Imports no torch.

The built-in kinds are folders of this package, each with a `ModelKind` in `KIND` of its `kind.py`. Other packages add
kinds by entry points of the group `gputrain.kinds`, each of which names a `ModelKind`:

    [project.entry-points."gputrain.kinds"]
    colouriser = "colouriser.kind:KIND"

The commands, plans, benchmarks, reports and checks loop over the table, and know no kind by its name.
"""

import functools
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from gputrain.config import checked, leaves, read_config
from gputrain.errors import UserError, require
from gputrain.formatting import shell_command

log = logging.getLogger(__name__)

GROUP = "gputrain.kinds"
ONNX = ("onnx", "onnxruntime")  # Modules that exports as ONNX import: they write the graph, and run it to compare.
BUILT_IN = ("vae", "vocoder", "tts", "asr")  # The folders of this package that hold a kind, in the order of help pages.

LONGEST_LINE = 1 << 20  # Bytes read of a line to recognise a file; that of a recogniser with many symbols is long.
Words = list[object]  # The words of a command line.
ReportProgress = Callable[[float, int], None]  # Receives the number of items done and their total.
# Translates the mapping in a file of another program, at the given path, to our keys and values.
Translate = Callable[[dict[str, object], Path], dict[str, object]]


def imported(place: str) -> Callable[..., Any]:
    """Returns a function that, when it is called, imports what a place such as "gputrain.asr.checking:load_checker"
    names, and calls it."""

    def call(*arguments: Any, **named: Any) -> Any:
        module, _, name = place.partition(":")
        return getattr(import_module(module), name)(*arguments, **named)

    return call


class CommandOutput(Protocol):
    """The output of a command: data on stdout, messages and progress on stderr."""

    def progress(self, title: str, *, shown: bool = True) -> AbstractContextManager[ReportProgress]:
        """Shows a bar while the block runs, and gives the function that moves it."""

    def data(self, text: str) -> None:
        """Prints a line on stdout."""

    def message(self, text: str) -> None:
        """Prints a line on stderr."""

    def figures(self, title: str, figures: Mapping[str, object]) -> None:
        """Prints a table of figures on stdout."""


@dataclass(frozen=True)
class OwnCommand:
    """A command that only one kind of model has, such as one that uses a trained model."""

    name: str
    settings: type  # The config class of its options.
    help: str
    run: Callable[[Any, CommandOutput], None]


EXCLUDE_HELP = "Pattern of files to leave out: '*_mask.png'. Or of folders: masks; may be repeated."


class DataWork(NamedTuple):
    """The work of a command on data for a kind of model."""

    run: Callable[..., Any]  # Takes folders, config, num_workers, progress and exclude.
    config: object
    figures: Callable[..., dict[str, object]]  # Returns what is shown of the report.
    # Of a preparation: takes the prepared folder and a number of processes, and returns what validation finds in it.
    # None: the report has its findings.
    findings: Callable[[Path, int], Sequence[str]] | None = None
    train_options: tuple[str, ...] = ()  # Of a preparation: those that a training on such data needs.
    # Of a preparation: raises UserError if it cannot write into the folder, before anything is unpacked for it.
    check_output: Callable[[Path], None] = lambda output_dir: None


@dataclass(frozen=True)
class KindOptions:
    """The options of a command for all kinds of model that have an effect with some of them only."""

    groups: Mapping[str, type] = field(default_factory=dict)  # Config classes, by the field that the command gets.
    names: frozenset[str] = frozenset()  # Options in these groups, and of the command, that have an effect.


@dataclass(frozen=True)
class DataCommand(KindOptions):
    """`prepare-data` or `validate` for a kind of model."""

    work: Callable[[Any], DataWork] = field(kw_only=True)  # Takes the settings of the command.
    check: Callable[[Any], None] = lambda settings: None  # Raises UserError if the settings cannot be used.
    needs: tuple[str, ...] = ()  # Options without a default that `check` asks for, each with a word for its value.


@dataclass(frozen=True)
class EvaluateCommand(KindOptions):
    """`evaluate` for a kind of model."""

    items: str = field(kw_only=True)  # What a model is evaluated on: the name of their number in the figures.
    # Takes the settings and keyword arguments that all kinds have; returns figures.
    run: Callable[..., Any] = field(kw_only=True)


@dataclass(frozen=True)
class Exported:
    """The written files of an export, the figures to show, and notes on the use of the files."""

    files: list[Path]
    figures: dict[str, object]
    notes: list[str]


@dataclass(frozen=True)
class Exporter:
    """A format of `export`."""

    write: Callable[[Any, ReportProgress], Exported]
    options: frozenset[str] = frozenset()  # Those of `export` that not every format has, and that have an effect.
    packages: tuple[str, ...] = ()  # Modules that it imports, other than those of the kind.


@dataclass(frozen=True)
class DemoSteps:
    """The parts of a demo. The functions take the folder of the demo."""

    source: str  # Subfolder for the source data, by which a folder of this demo is recognised.
    make_source: Callable[[Path], None]
    commands: Callable[[Path], list[Words]]
    results: Callable[[Path], dict[str, object]]


@dataclass(frozen=True)
class PublishedFiles:
    """The files that make a published model of a kind, as patterns of their names in its folder."""

    whole: Sequence[str] = ()  # Weights that make their folder a model; the first that is there is taken.
    needed: Sequence[str] = ()  # Files without which these weights make no model.
    single: Sequence[str] = ()  # Weights that are named by themselves, if a folder has one such file.
    beside: Sequence[str] = ()  # Files that are read beside the weights, where they are there.
    parts: Sequence[str] = ()  # Files that are named for a model with such a part, as the adapter of a language.
    folders: Sequence[str] = ("",)  # Places of the model in what is named, such as "vae" in a pipeline.
    # Takes the folder with what was fetched so far, and returns the names of further files, where they are there.
    further: Callable[[Path], Sequence[str]] = lambda folder: ()
    example: str = ""  # A name for messages.
    kind: str = ""  # That of the short names that are such models; "" if there are none.
    only_to_start: bool = False  # Trainings begin with such a model, and no command uses it as it is.


@dataclass(frozen=True)
class ModelKind:
    """A kind of model: all that the commands, reports and checks know of it."""

    name: str  # "vae": also that of the train command, and in checkpoints and configurations.
    title: str  # "an image VAE", for messages.
    panel: str  # Title of the kind's commands on the help page.
    help: str  # What the train command does, in a sentence.
    bench_help: str
    train: type  # The options of train-NAME, and of plan train-NAME. Those of bench train-NAME follow.
    plan: type
    work: Callable[[], Any]  # Imports what plans, measures and trains it: a gputrain.planner.kind_work.KindWork.
    evaluation: EvaluateCommand
    exporters: Mapping[str, Exporter]  # By format; the first is "auto".
    use: tuple[str, ...]  # The command that uses a model: what it is for, its name, and words after --model.
    headlines: tuple[str, ...]  # Figures on held-out data at the head of a report, the most important first.
    data: str = ""  # "pictures": what prepare-data reads.
    media: str = ""  # "image" or "audio": what it reads out of parquet files, archives and the like; "": only folders.
    # Files that show that a folder was prepared for it: keys of the first line of such a file, by the file's name.
    prepared: Mapping[str, frozenset[str]] = field(default_factory=dict)
    prepare: DataCommand | None = None
    validate: DataCommand | None = None
    commands: tuple[OwnCommand, ...] = ()
    demo: DemoSteps | None = None
    shipped: Path | None = None  # Folder of files that --config finds by their names alone.
    translate: Translate | None = None  # Reads other programs' keys in configuration files of the train command,
    translate_data: Translate | None = None  # and in those of prepare-data.
    keys: frozenset[str] = frozenset()  # Those by which a configuration of another program is of this kind.
    published: PublishedFiles | None = None  # The files of a published model that are read.
    checkpoint_suffix: str = ""  # Ending of another program's checkpoints of this kind.
    # Modules that the commands on models import, some of them only in the middle of a training.
    packages: tuple[str, ...] = ()
    small: tuple[str, ...] = ()  # Options for a training that a CPU finishes in hours.
    # Loads a model, on the named device, that aligns and reads recordings of speech.
    load_speech_checker: Callable[..., Any] | None = None

    @property
    def command(self) -> str:
        return f"train-{self.name}"


@functools.cache
def kinds() -> Mapping[str, ModelKind]:
    """Returns the kinds of model by name: the built-in ones, then those of other packages."""
    found: dict[str, ModelKind] = {name: import_module(f"gputrain.{name}.kind").KIND for name in BUILT_IN}
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        try:
            kind = entry.load()
        except Exception as error:  # Another package's defect must not stop the trainings of this one.
            log.warning("the kind of model %s (%s) cannot be loaded: %s", entry.name, entry.value, error)
            continue
        if not isinstance(kind, ModelKind) or kind.name in found:
            reason = f"there is a kind {kind.name} already" if isinstance(kind, ModelKind) else "it is no ModelKind"
            log.warning("the kind of model %s (%s) is left out: %s", entry.name, entry.value, reason)
            continue
        found[kind.name] = kind
    return found


def default_kind() -> ModelKind:
    return next(iter(kinds().values()))


def kinds_with(part: str) -> list[str]:
    """Returns the names of the kinds that have a part: `prepare`, `validate`, `demo`."""
    return [name for name, kind in kinds().items() if getattr(kind, part) is not None]


def speech_checker(model: str | Path, device: str = "auto") -> Any:
    """Loads a recogniser, by the kind of model that has them."""
    kind = next(kind for kind in kinds().values() if kind.load_speech_checker)
    assert kind.load_speech_checker is not None
    require(*kind.packages)
    return kind.load_speech_checker(model, device)


def without_kind(cls: type, content: Mapping[str, object], source: str) -> dict[str, object]:
    """Returns the content of a configuration file without its `kind`, if `cls` has no option of that name.

    Raises UserError if the file configures another kind of model than `cls` trains.
    """
    if "kind" not in content or "kind" in leaves(cls):
        return dict(content)
    given, expected = str(content["kind"]), getattr(cls, "kind", None)
    if given != expected:
        known = kinds()
        hint = f"use gputrain {known[given].command}" if given in known else f"known kinds: {', '.join(known)}"
        raise UserError(f"{source}: kind is {given!r}" + (f", expected {expected!r}" if expected else ""), hint=hint)
    return {name: value for name, value in content.items() if name != "kind"}


def read_defaults(path: Path, settings: type, translate: Translate | None = None) -> dict[str, Any]:
    """Read a file and check its values one by one. Returns them as defaults for the options of `settings`.

    Raises UserError if the file is unreadable, holds an unknown key or a wrong value, or configures another kind of
    model.
    """
    content = without_kind(settings, read_config(path, getattr(settings, "kind", "")), str(path))
    return checked(settings, translate(content, path) if translate else content, str(path))


def format_data_kinds(names: Sequence[str]) -> str:
    """Returns what the data of kinds are: "vae (pictures), tts or asr (recordings with their texts)"."""
    by_data: dict[str, list[str]] = {}
    for name in names:
        by_data.setdefault(kinds()[name].data, []).append(name)
    return ", ".join(f"{' or '.join(same)} ({data})" for data, same in by_data.items())


def prepared_for(folder: Path) -> list[str]:
    """Returns the kinds of model that a folder's data are prepared for, finished or not; none for other folders."""
    first: dict[str, set[str]] = {}
    for name in {name for kind in kinds().values() for name in kind.prepared}:
        try:
            with (folder / name).open("rb") as file:
                row = json.loads(file.readline(LONGEST_LINE))
        except (OSError, ValueError, RecursionError):
            continue
        first[name] = set(row) if isinstance(row, dict) else set()
    return [
        kind.name
        for kind in kinds().values()
        if any(name in first and keys <= first[name] for name, keys in kind.prepared.items())
    ]


def refuse_other_data(folder: Path, *wanted: str, hint: str = "") -> None:
    """Raises UserError if a folder's data are prepared for other kinds of model than those that are `wanted`."""
    found = prepared_for(folder)
    if not found or set(found) & set(wanted):
        return
    names = " or ".join(kinds()[name].command for name in found)
    raise UserError(
        f"{folder}: is prepared for {format_data_kinds(found)}, not for {format_data_kinds(wanted)}",
        hint=hint
        or f"nothing in it is damaged: these are data of {names}, which validate --kind {found[0]} checks; "
        f"{how_to_prepare(*wanted)}",
    )


def refuse_other_model(path: Path, held: str, wanted: str) -> None:
    """Raises UserError if a checkpoint holds a model of another kind than the one that is `wanted`."""
    if held != wanted:
        other = kinds().get(held)
        hint = f"it is {other.title}, which gputrain {other.use[1]} uses" if other else ""
        raise UserError(f"{path}: holds a model of kind {held!r}, expected {wanted!r}", hint=hint)


def how_to_prepare(*names: str, source: str | Path = "FOLDER", options: Sequence[str] = ()) -> str:
    """Returns the hint for data of kinds of model that are not prepared: the command for each kind, with further
    `options`, for the `source` if it holds such data."""
    what = " or ".join(dict.fromkeys(kinds()[name].data for name in names))
    at = Path(source) if Path(source).name not in ("", "..") else Path(source).resolve()
    folders = ("--input-dir", source, "--output-dir", f"{at}_prepared" if at.exists() else "NEW_FOLDER")
    lines = [
        shell_command("gputrain", "prepare-data", "--kind", name, *(made.needs if made else ()), *options, *folders)
        for name, made in ((name, kinds()[name].prepare) for name in names)
    ]
    return f"prepare {what} for it: {' or '.join(lines)}"


def prepared_counts(report: Any, name: str, value: object) -> dict[str, object]:
    """Returns the figures of a preparation, one of them of its own kind of data."""
    figures = {"made": report.made, "kept": report.kept, name: value, "refused": len(report.refused)}
    return {**figures, **report.account()}
