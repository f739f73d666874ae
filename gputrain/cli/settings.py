"""Options of the commands that serve several kinds of model. Imports no torch."""

import dataclasses
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Literal, TypeVar

from gputrain.config import ModelName, changed, config, leaves, opt
from gputrain.errors import UserError
from gputrain.fetch.names import TRAINED_HELP, TrainedModel
from gputrain.hw.plan import DeviceName, Hardware
from gputrain.hw.probe import usable_cores
from gputrain.kinds import EXCLUDE_HELP, KindOptions, ModelKind, format_data_kinds, kinds, kinds_with

T = TypeVar("T")
PREPARED = kinds_with("prepare")
FORMATS = list(dict.fromkeys(format for kind in kinds().values() for format in kind.exporters))
AUTO = ", ".join(f"{next(iter(kind.exporters))} for {kind.title}" for kind in kinds().values() if kind.exporters)


def options_of(kind: ModelKind, command: str) -> KindOptions:
    """Returns the options of a command that the kind has beside those that all kinds have."""
    found: KindOptions | None = getattr(kind, command)
    return found or KindOptions()


def with_options_of_kinds(command: str) -> Callable[[type[T]], type[T]]:
    """Adds to a config class the groups of options that kinds of model have for a command, each group once."""

    def decorate(cls: type[T]) -> type[T]:
        groups: dict[str, type] = {}
        for kind in kinds().values():
            groups |= options_of(kind, command).groups
        parts = [(name, group, group()) for name, group in groups.items()]
        made = dataclasses.make_dataclass(
            cls.__name__, parts, bases=(cls,), namespace={"__doc__": cls.__doc__}, frozen=True, kw_only=True
        )
        made.__module__ = cls.__module__
        return made

    return decorate


def refuse_others(settings: object, kind: ModelKind, command: str, by: str) -> None:
    """Raises UserError if an option of another kind is given, which would have no effect. `by` names what decided the
    kind, for the message."""
    known = leaves(type(settings))
    of_any = frozenset[str]().union(*(options_of(other, command).names for other in kinds().values()))
    for name in sorted(of_any - options_of(kind, command).names):
        if known[name].value_in(settings) != known[name].default:
            raise UserError(f"{name} does nothing with {by}", hint=f"drop {known[name].flag}")


@config()
class DataSettings:
    """The options that both commands on data have."""

    input_dir: Path = opt(
        help="Folder, archive, or hf://datasets/NAME. A folder tree of pictures or recordings, or parquet, "
        "Arrow, tar or zip files; it is only read."
    )
    kind: str = opt(
        default=PREPARED[0],
        help=f"Kind of model: {', '.join(PREPARED)}. {format_data_kinds(PREPARED)}.",
        choices=PREPARED,
    )
    output_file: Path | None = opt(default=None, help="JSON file for the report.")
    num_workers: int = opt(default=-1, help="Number of processes; -1: one for each core.", min=-1)
    exclude: tuple[str, ...] = opt(default=(), separator="", help=EXCLUDE_HELP)
    column: str = opt(
        default="", help="Column of pictures or recordings. In parquet or Arrow data; default: found by its type."
    )

    @property
    def processes(self) -> int:
        return usable_cores() if self.num_workers < 0 else self.num_workers


@with_options_of_kinds("validate")
@config(panel="Validation")
class ValidateSettings(DataSettings):
    input_dir: Path = changed(DataSettings, "input_dir")
    audio_sample_rate: int | None = opt(
        default=None, help="Sampling rate of the training, in Hz. Default: 44100 for vocoder, 22050 for tts.", min=8000
    )
    check_with: ModelName | None = opt(
        default=None,
        help="Recogniser that reads every clip. Texts that differ are listed. Of train-asr or transformers: its "
        "folder, or its name on the Hugging Face Hub.",
    )
    strict: bool = opt(default=False, help="Exit with 3 if a file is refused.")

    def __post_init__(self) -> None:
        refuse_others(self, kinds()[self.kind], "validate", f"--kind {self.kind}")


@with_options_of_kinds("prepare")
@config(panel="Preparation")
class PrepareSettings(DataSettings):
    mode: Literal["preprocess", "validate"] = opt(
        default="preprocess", help="preprocess or validate. validate only checks the pictures."
    )
    output_dir: Path | None = opt(default=None, help="Folder for the prepared data. Their manifest is in it, too.")
    align_with: ModelName | None = opt(
        default=None,
        help="Recogniser that cuts long recordings. Those longer than max_seconds are cut between sentences. Of "
        "train-asr or transformers: its folder, or its name on the Hugging Face Hub.",
    )

    def __post_init__(self) -> None:
        kind = kinds()[self.kind]
        refuse_others(self, kind, "prepare", f"--kind {self.kind}")
        if kind.prepare:
            kind.prepare.check(self)
        if self.mode == "preprocess" and self.output_dir is None:
            raise UserError("output_dir is missing", hint="name a folder for the prepared data: --output-dir FOLDER")
        if self.mode == "validate" and self.output_dir is not None:
            raise UserError(
                "mode validate writes no pictures", hint="drop --output-dir; --output-file takes the report"
            )

    def as_validation(self) -> ValidateSettings:
        """Returns the options of `validate` for the mode that only checks pictures."""
        shared = {field.name for field in fields(self)} & {field.name for field in fields(ValidateSettings)}
        return ValidateSettings(**{name: getattr(self, name) for name in shared})


@with_options_of_kinds("evaluation")
@config(panel="Evaluation")
class EvaluateSettings(TrainedModel):
    model: ModelName = changed(
        TrainedModel, "model", help=TRAINED_HELP + " Or a model of diffusers, openvpi or transformers (CTC)."
    )
    data_path: tuple[Path, ...] = opt(
        help="Prepared folder; may be repeated. For an image VAE, pictures may be unprepared.", separator=""
    )
    held_out_share: float | None = opt(
        default=None, help="Share to evaluate; 1: all. Default: those that the run held out.", min=0.0, max=1.0
    )
    json: Path | None = opt(default=None, help="JSON file for the metrics.")
    device: DeviceName = changed(Hardware, "device")


@config(panel="Export")
class ExportSettings(TrainedModel):
    model: ModelName = changed(TrainedModel, "model", help="Run folder or checkpoint.")
    output_dir: Path = opt(help="Folder for the exported model.")
    data_path: Path | None = opt(
        default=None,
        help="Data of the check. Pictures that give the latents' scaling and shift factors (default: those of the "
        "run), or prepared speech on which an exported recogniser is compared (default: synthetic speech).",
    )
    device: DeviceName = changed(Hardware, "device")
    format: str = opt(default="auto", help=f"Format to write. auto: {AUTO}.", choices=("auto", *FORMATS))
    name: str = opt(
        default="",
        help="Name of the ONNX file and model. Default: vocoder, recogniser, or for a voice Piper's "
        "LANGUAGE_COUNTRY-NAME-QUALITY by its speaker, data and run.",
    )
    language_code: str = opt(
        default="",
        help="Language and country, such as kk_KZ. If they don't follow from a voice's espeak voice or texts.",
    )
    default_speaker: str = opt(
        default="", help="Speaker of Piper if none is asked for. A name or number; default: the first."
    )


@config(panel="Report")
class ReportSettings:
    runs: tuple[Path, ...] = opt(
        help="Run folders. Several are compared with one another.", separator="", is_positional=True
    )
    output_file: Path = opt(default=Path("report.html"), help="HTML file to write.")


@config(panel="Demo")
class DemoSettings:
    output_dir: Path = opt(default=Path("demo"), help="Folder for all that is made.")
    kind: str = opt(
        default=kinds_with("demo")[0],
        help=f"Kind of model: {', '.join(kinds_with('demo'))}.",
        choices=kinds_with("demo"),
    )
