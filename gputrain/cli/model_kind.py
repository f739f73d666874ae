"""Evaluates and exports trained models of every kind. Imports no torch by itself."""

from typing import Any

from gputrain.cli.settings import EvaluateSettings, ExportSettings
from gputrain.errors import UserError
from gputrain.kinds import ModelKind, ReportProgress

EvaluationReport = tuple[str, dict[str, Any], dict[str, Any]]  # A title, the figures to show, and the report.


def evaluate(settings: EvaluateSettings, kind: ModelKind, progress: ReportProgress) -> EvaluationReport:
    figures = kind.evaluation.run(
        settings, device=settings.device, held_out_share=settings.held_out_share, progress=progress
    )
    items = kind.evaluation.items
    count = getattr(figures, items)
    title = f"{settings.model} on {count} {items if count != 1 else items.removesuffix('s')}"
    return title, dict(getattr(figures, "shown", figures.scalars)), figures.to_json()


def format_of(settings: ExportSettings, kind: ModelKind) -> str:
    """Return the format to write. Raises UserError if this kind of model doesn't have it, or options don't apply."""
    title, known = kind.title, list(kind.exporters)
    if settings.format not in ("auto", *known):
        if not _holds_model(settings):
            raise UserError(f"{settings.model}: holds no model", hint="name a run folder, or a checkpoint in it")
        raise UserError(
            f"{settings.model} is {title}, which has no format {settings.format}", hint=f"use {' or '.join(known)}"
        )
    format = known[0] if settings.format == "auto" else settings.format
    used = kind.exporters[format].options
    if settings.name and "name" not in used:
        raise UserError(f"name does nothing with format {format}", hint="drop --name")
    if settings.language_code and "language_code" not in used:
        raise UserError(f"language_code does nothing with format {format}", hint="drop --language-code")
    if settings.data_path is not None and "data_path" not in used:
        raise UserError(f"data_path does nothing with {title}", hint="drop --data-path")
    if settings.device == "cuda" and "device" not in used:
        raise UserError(f"{title} is exported on the CPU", hint="drop --device")
    return format


def _holds_model(settings: ExportSettings) -> bool:
    """Return True for a file, and for a folder with a configuration or a checkpoint."""
    path, names = settings.model, ("config.yaml", "config.json", "*.pt", "*.ckpt")
    return path.is_file() or any(True for name in names for _ in path.glob(name))
