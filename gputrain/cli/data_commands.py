"""Runs `prepare-data` and `validate` for each kind of model. Imports no torch by itself."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gputrain.audio.config import Sound
from gputrain.cli import tables, ui
from gputrain.cli.settings import PrepareSettings, ValidateSettings
from gputrain.config import Kind
from gputrain.errors import UserError
from gputrain.vae.config import Validate as PictureValidation
from gputrain.vocoder.config import SAMPLING_RATE


def prepare_pictures(settings: PrepareSettings) -> None:
    from gputrain.vae.prepare import prepare_images

    if settings.output_dir is None:
        return validate_pictures(settings.as_validation())
    with ui.TerminalBar("preparing") as bar:
        report = prepare_images(settings.input_dir, settings.output_dir, progress=bar.update, **settings.choices())
    tables.print_refusals(report.quarantined)
    counts = {"made": report.made, "kept": report.kept, "held out": report.held_out, "refused": len(report.quarantined)}
    tables.print_figures(f"Prepared {settings.output_dir}", counts)
    write_report(settings.output_file, report.to_json())


def prepare_recordings(settings: PrepareSettings) -> None:
    from gputrain.vocoder.prepare import prepare_sound, vocoder_prepare_config

    assert settings.output_dir is not None  # The options have been checked.
    with ui.TerminalBar("preparing") as bar:
        report = prepare_sound(
            settings.input_dir, settings.output_dir, vocoder_prepare_config(settings.sound),
            num_workers=settings.processes, progress=bar.update,
        )  # fmt: skip
    tables.print_refusals(report.refused)
    counts = {"made": report.made, "kept": report.kept, "hours": report.hours, "refused": len(report.refused)}
    tables.print_figures(f"Prepared {settings.output_dir}", counts)
    write_report(settings.output_file, report.to_json())


def prepare_speech(settings: PrepareSettings) -> None:
    from gputrain.tts.prepare import prepare_voice, voice_prepare_config

    assert settings.output_dir is not None  # The options have been checked.
    with ui.TerminalBar("preparing") as bar:
        report = prepare_voice(
            settings.input_dir, settings.output_dir, voice_prepare_config(settings.voice, settings.sound),
            num_workers=settings.processes, progress=bar.update,
        )  # fmt: skip
    tables.print_refusals(report.refused)
    tables.print_prepared_speech(report)
    write_report(settings.output_file, report.to_json())


def validate_pictures(settings: PictureValidation) -> None:
    from gputrain.vae.validate import validate_images

    with ui.TerminalBar("validating") as bar:
        report = validate_images(settings.input_dir, progress=bar.update, **settings.choices())
    tables.print_refusals(report.refused)
    tables.print_pictures(report)
    write_report(settings.output_file, report.to_json())


def validate_recordings(settings: ValidateSettings) -> None:
    from gputrain.vocoder.validate import validate_sounds

    processes = settings.choices()["num_workers"]
    with ui.TerminalBar("validating") as bar:
        report = validate_sounds(
            settings.input_dir, sampling_rate=settings.audio_sample_rate or SAMPLING_RATE, num_workers=processes,
            progress=bar.update,
        )  # fmt: skip
    tables.print_refusals(report.refused)
    tables.print_sounds(report)
    write_report(settings.output_file, report.to_json())


def validate_speech(settings: ValidateSettings) -> None:
    from gputrain.tts.plan import memory_by_preset
    from gputrain.tts.prepare import voice_prepare_config
    from gputrain.tts.validate import validate_voice

    recipe = voice_prepare_config(settings.voice, Sound(audio_sample_rate=settings.audio_sample_rate))
    with ui.TerminalBar("validating") as bar:
        report = validate_voice(
            settings.input_dir, recipe, num_workers=settings.choices()["num_workers"], progress=bar.update
        )
    tables.print_refusals(report.refused)
    with ui.err.status("predicting the memory of a step"):
        memory_gb = memory_by_preset(report)
    tables.print_speech(report, memory_gb)
    write_report(settings.output_file, {**report.to_json(), "memory_gb": memory_gb})


PREPARE: Mapping[Kind, Callable[[PrepareSettings], None]] = {
    "vae": prepare_pictures, "vocoder": prepare_recordings, "tts": prepare_speech
}  # fmt: skip
VALIDATE: Mapping[Kind, Callable[[ValidateSettings], None]] = {
    "vae": validate_pictures, "vocoder": validate_recordings, "tts": validate_speech
}  # fmt: skip


def write_report(path: Path | None, report: dict[str, Any]) -> None:
    """Write a report as JSON. Raises UserError if the file cannot be written."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}", hint="name a file that can be written") from None
