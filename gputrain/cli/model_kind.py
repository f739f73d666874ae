"""Finds the kind of a trained model, and evaluates and exports each kind. Imports no torch by itself."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

from gputrain.cli.settings import EvaluateSettings, ExportSettings
from gputrain.config import FORMER_KINDS, Kind, read_file
from gputrain.errors import UserError
from gputrain.hw.plan import DeviceName

if TYPE_CHECKING:
    from gputrain.tts.evaluate import SpeechReader

ReportProgress = Callable[[float, int], None]  # Receives the number of items done and their total.
EvaluationReport = tuple[str, dict[str, Any], dict[str, Any]]  # A title, the figures to show, and the report.
ExportReport = tuple[dict[str, Any], list[str]]  # The figures to show, and hints on what to do next.


@dataclass(frozen=True)
class ModelKind:
    """The commands on trained models, for one kind of model."""

    title: str  # The kind in words, for messages.
    items: str  # What a model is evaluated on: the name of their number in the figures.
    evaluate: Callable[..., Any]  # Takes the settings and keyword arguments that all kinds have; returns figures.
    exporters: Mapping[str, Callable[[ExportSettings, ReportProgress], ExportReport]]  # By format; the first is "auto".


# ------------------------------------------------------------------------------------------------------ evaluation


def evaluate_vae(settings: EvaluateSettings, **shared: Any) -> Any:
    from gputrain.vae.evaluate import evaluate_pictures

    return evaluate_pictures(settings.model, settings.data_path, settings.pictures, **shared)


def evaluate_vocoder(settings: EvaluateSettings, **shared: Any) -> Any:
    from gputrain.vocoder.evaluate import evaluate_folder

    return evaluate_folder(
        settings.model, settings.data_path, max_clips=settings.max_clips, seconds=settings.clip_seconds, **shared
    )


def evaluate_tts(settings: EvaluateSettings, **shared: Any) -> Any:
    from gputrain.tts.evaluate import evaluate_voice

    reader = reader_of(settings.recogniser, settings.device)
    return evaluate_voice(settings.model, settings.data_path, max_clips=settings.max_clips, reader=reader, **shared)


def reader_of(model: Path | None, device: DeviceName) -> "SpeechReader | None":
    """Load a model that reads speech, if one is named: of faster-whisper, or a recogniser of ours or transformers."""
    if model is None:
        return None
    if not model.is_dir() or kind_of(model) == "asr":
        from gputrain.asr.checking import load_checker

        checker = load_checker(model, device)
        return lambda wave, rate_hz, language: checker.read(wave, rate_hz)
    from gputrain.tts.measures import recognise

    return partial(recognise, model=model)


def evaluate_asr(settings: EvaluateSettings, **shared: Any) -> Any:
    from gputrain.asr.evaluate import evaluate_recogniser

    options = settings.language_model
    return evaluate_recogniser(
        settings.model, settings.data_path, max_clips=settings.max_clips, language_model=options, **shared
    )


def evaluate(settings: EvaluateSettings, kind: Kind, progress: ReportProgress) -> EvaluationReport:
    of = MODEL_KINDS[kind]
    figures = of.evaluate(settings, device=settings.device, held_out_share=settings.held_out_share, progress=progress)
    count = getattr(figures, of.items)
    title = f"{settings.model} on {count} {of.items if count != 1 else of.items.removesuffix('s')}"
    return title, dict(getattr(figures, "shown", figures.scalars)), figures.to_json()


# ---------------------------------------------------------------------------------------------------------- export


def export_diffusers(settings: ExportSettings, progress: ReportProgress) -> ExportReport:
    from gputrain.vae.export import export_vae

    figures = export_vae(
        settings.model, settings.output_dir, data_path=settings.data_path, device=settings.device, progress=progress
    )
    return dict(figures), [f'Load it: diffusers.AutoencoderKL.from_pretrained("{settings.output_dir}")']


def export_vocoder(settings: ExportSettings, progress: ReportProgress, *, format: str) -> ExportReport:
    import torch

    from gputrain.vocoder.export import export_onnx, export_openvpi, export_oudep
    from gputrain.vocoder.load import load_vocoder

    loaded = load_vocoder(settings.model, torch.device("cpu"))
    if format == "openvpi":
        written = export_openvpi(loaded, settings.output_dir, progress)
    else:
        write = export_oudep if format == "oudep" else export_onnx
        written = write(loaded, settings.output_dir, settings.name or "vocoder", progress)
    return _written(loaded.source, written), written.notes


def export_piper(settings: ExportSettings, progress: ReportProgress) -> ExportReport:
    import torch

    from gputrain.tts import export
    from gputrain.tts.load import load_voice

    voice = load_voice(settings.model, torch.device("cpu"))
    written = export.export_piper(
        voice, settings.output_dir, settings.name or "voice", language_code=settings.language_code, progress=progress
    )
    return _written(voice.source, written), written.notes


def export_recogniser(settings: ExportSettings, progress: ReportProgress, *, format: str) -> ExportReport:
    import torch

    from gputrain.asr import export
    from gputrain.asr.load import load_recogniser

    recogniser = load_recogniser(settings.model, torch.device("cpu"))
    shared: dict[str, Any] = {"data_path": settings.data_path, "progress": progress}
    if format == "transformers":
        written = export.export_transformers(recogniser, settings.output_dir, **shared)
    elif format == "onnx":
        written = export.export_onnx(recogniser, settings.output_dir, settings.name or "recogniser", **shared)
    else:
        written = export.export_sherpa(recogniser, settings.output_dir, **shared)
    return written.figures, written.notes


def _written(source: str, written: Any) -> dict[str, Any]:
    files = ", ".join(file.name for file in written.files)
    return {"of": source, "files": files, "largest difference of a sample": written.largest_difference}


MODEL_KINDS: Mapping[Kind, ModelKind] = {
    "vae": ModelKind("an image VAE", "pictures", evaluate_vae, {"diffusers": export_diffusers}),
    "vocoder": ModelKind(
        "a vocoder",
        "clips",
        evaluate_vocoder,
        {name: partial(export_vocoder, format=name) for name in ("openvpi", "onnx", "oudep")},
    ),
    "tts": ModelKind("a voice", "clips", evaluate_tts, {"piper": export_piper}),
    "asr": ModelKind(
        "a recogniser",
        "clips",
        evaluate_asr,
        {name: partial(export_recogniser, format=name) for name in ("transformers", "onnx", "sherpa")},
    ),
}


def format_of(settings: ExportSettings, kind: Kind) -> str:
    """Return the format to write. Raises UserError if this kind of model doesn't have it, or options don't apply."""
    title, known = MODEL_KINDS[kind].title, list(MODEL_KINDS[kind].exporters)
    if settings.format not in ("auto", *known):
        if not _holds_model(settings.model):
            raise UserError(f"{settings.model}: holds no model", hint="name a run folder, or a checkpoint in it")
        raise UserError(
            f"{settings.model} is {title}, which has no format {settings.format}", hint=f"use {' or '.join(known)}"
        )
    format = known[0] if settings.format == "auto" else settings.format
    if format not in ("onnx", "oudep", "piper") and settings.name:
        raise UserError(f"name does nothing with format {format}", hint="drop --name")
    if format != "piper" and settings.language_code:
        raise UserError(f"language_code does nothing with format {format}", hint="drop --language-code")
    if kind not in ("vae", "asr") and settings.data_path is not None:
        raise UserError(f"data_path does nothing with {title}", hint="drop --data-path")
    if kind != "vae" and settings.device == "cuda":
        raise UserError(f"{title} is exported on the CPU", hint="drop --device")
    return format


# -------------------------------------------------------------------------------------------------- kind of a model


def kind_of(model: Path) -> Kind:
    """Return the kind of a run, a checkpoint, or a model in another program's format.

    The `kind` of the run's config.yaml or of the checkpoint decides. If there is none, a model of transformers is
    treated as a recogniser, and any other as an image VAE; their loaders report what is wrong.
    """
    folder = model if model.is_dir() else model.parent
    if model.suffix == ".ckpt" or (model.is_dir() and (model / "model.ckpt").is_file()):
        return "vocoder"
    if (folder / "config.yaml").is_file():
        content = read_file(folder / "config.yaml")
        return _known_kind(content["kind"]) if "kind" in content else _kind_by_keys(content)
    if model.is_file() and model.suffix == ".pt":
        return _known_kind(_saved_kind(model))
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "vae"
    if not isinstance(content, dict):
        return "vae"
    return "vocoder" if "upsample_rates" in content else "asr" if "model_type" in content else "vae"


def _holds_model(path: Path) -> bool:
    """Return True for a file, and for a folder with a configuration or a checkpoint."""
    names = ("config.yaml", "config.json", "*.pt", "*.ckpt")
    return path.is_file() or any(True for name in names for _ in path.glob(name))


def _known_kind(kind: object) -> Kind:
    """Return a kind by its present or its former name; an image VAE for any other."""
    present: dict[str, Kind] = {**FORMER_KINDS, **{name: name for name in MODEL_KINDS}}
    return present.get(str(kind), "vae")


def _kind_by_keys(content: Mapping[str, object]) -> Kind:
    """Return the kind of a config.yaml of an older version, which did not write the kind."""
    return "vocoder" if "crop_mel_frames" in content else "tts" if "data_dir" in content else "vae"


def _saved_kind(checkpoint: Path) -> str:
    """Return the kind that a checkpoint states; nothing if it is unreadable, which its loader reports."""
    import torch

    try:
        content = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, ValueError, EOFError, UnpicklingError):
        return ""
    return str(content.get("kind", "")) if isinstance(content, dict) else ""
