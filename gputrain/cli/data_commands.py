"""Runs `prepare-data` and `validate` for each kind of model. Imports no torch by itself."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer
from rich.markup import escape

from gputrain.audio.config import Sound
from gputrain.cli import tables, ui
from gputrain.cli.settings import PrepareSettings, ValidateSettings
from gputrain.config import Kind
from gputrain.errors import UserError
from gputrain.vocoder.config import SAMPLING_RATE

if TYPE_CHECKING:
    from gputrain.engine.preparation import Spread
    from gputrain.speech.checker import SpeechChecker
    from gputrain.speech.prepare import SpeechPrepareReport
    from gputrain.speech.prepare_config import SpeechKind
    from gputrain.speech.validate import SpeechReport
    from gputrain.vae.validate import ImageReport
    from gputrain.vocoder.validate import SoundReport

Figures = dict[str, object]
DRAWINGS = {".svg", ".svgz", ".eps", ".ai", ".pdf", ".psd", ".heic", ".heif", ".cr2", ".cr3", ".nef", ".arw", ".dng"}


class DataWork(NamedTuple):
    """The work of a command on data for a kind of model."""

    run: Callable[..., Any]  # Takes folders, config, num_workers and progress, and returns a report.
    config: object
    figures: Callable[..., Figures]  # Returns what is shown of the report and the predictions.
    predict: Callable[[Any], dict[str, Any]] = lambda report: {}  # Returns predictions that the JSON has too.


def prepare(settings: PrepareSettings) -> None:
    if settings.mode == "validate":
        return validate(settings.as_validation())
    with ui.TerminalBar("preparing") as bar:
        work = PREPARE[settings.kind](settings)
        folders = (settings.input_dir, settings.output_dir)
        report = work.run(*folders, work.config, num_workers=settings.processes, progress=bar.update)
    _show(f"Prepared {settings.output_dir}", work, report, settings.output_file)


def validate(settings: ValidateSettings) -> None:
    with ui.TerminalBar("validating") as bar:
        work = VALIDATE[settings.kind](settings)
        report = work.run(settings.input_dir, work.config, num_workers=settings.processes, progress=bar.update)
    _show(report.input_dir, work, report, settings.output_file)
    if settings.strict and report.refused:
        raise typer.Exit(ui.NOT_PASSED)


def _show(title: str, work: DataWork, report: Any, output_file: Path | None) -> None:
    tables.print_refusals(report.refused)
    for reason in getattr(report, "suspicions", ()):
        tables.print_refusals([one for one in report.suspicious if one.reason == reason], shown=5)
    predictions = work.predict(report)
    tables.print_figures(title, work.figures(report, **predictions))
    for finding in getattr(report, "findings", ()):
        ui.err.print(f"[yellow]note:[/] {escape(finding)}", soft_wrap=True)
    write_report(output_file, report.to_json() | predictions)


def write_report(path: Path | None, report: dict[str, Any]) -> None:
    """Write a report as JSON. Raises UserError if the file cannot be written."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}", hint="name a file that can be written") from None


# ----------------------------------------------------------------------------------------------------- preparation


def prepare_pictures(settings: PrepareSettings) -> DataWork:
    from gputrain.vae.prepare import prepare_images

    run = partial(prepare_images, overwrite=settings.overwrite)
    return DataWork(run, settings.pictures, lambda report: counts(report, "held out", report.held_out))


def prepare_recordings(settings: PrepareSettings) -> DataWork:
    from gputrain.vocoder.prepare import prepare_sound, vocoder_prepare_config

    config = vocoder_prepare_config(settings.sound)
    return DataWork(prepare_sound, config, lambda report: counts(report, "hours", report.hours))


def prepare_transcribed(settings: PrepareSettings, kind: "SpeechKind") -> DataWork:
    from gputrain.speech.prepare import prepare_speech, speech_prepare_config

    prepare_with = partial(prepare_speech, checker=checker_of(settings.align_with))
    return DataWork(prepare_with, speech_prepare_config(kind, settings.speech, settings.sound), prepared_speech)


def checker_of(model: Path | None) -> "SpeechChecker | None":
    """Load a recogniser that aligns and checks texts, if one is named."""
    if model is None:
        return None
    from gputrain.asr.checking import load_checker

    return load_checker(model)


def counts(report: Any, name: str, value: object) -> Figures:
    figures = {"made": report.made, "kept": report.kept, name: value, "refused": len(report.refused)}
    return figures | ({"other files": other_files(report.ignored)} if report.ignored else {})


def other_files(ignored: Mapping[str, int]) -> str:
    """Returns the files that are not read, by suffix; drawings of lines have to be converted to be pictures."""
    found = ", ".join(f"{count} {suffix}" for suffix, count in sorted(ignored.items()))
    drawings = sum(count for suffix, count in ignored.items() if suffix in DRAWINGS)
    return found + (f"; {drawings} drawings or camera files are not read: convert them to png" if drawings else "")


def prepared_speech(report: "SpeechPrepareReport") -> Figures:
    # Common Voice names its speakers by 128 digits.
    names = [name if len(name) <= 20 else f"{name[:8]}…" for name in report.speakers[:8]]
    more = f", ... ({len(report.speakers)})" if len(report.speakers) > 8 else ""
    letters = [symbol for symbol in report.vocabulary if len(symbol) == 1]
    return {
        "recordings": f"{report.made} made, {report.kept} kept",
        "clips": report.clips,
        "hours": report.hours,
        "speakers": ", ".join(filter(None, names)) + more or 1,
        **({"vocabulary": f"{len(report.vocabulary)} symbols: {' '.join(letters)}"} if letters else {}),
        "left out": len(report.refused),
        **{f"  {reason}": count for reason, count in report.reasons.items()},
    }


# ------------------------------------------------------------------------------------------------------ validation


def validate_pictures(settings: ValidateSettings) -> DataWork:
    from gputrain.vae.validate import validate_images

    return DataWork(validate_images, settings.pictures, picture_figures)


def validate_recordings(settings: ValidateSettings) -> DataWork:
    from gputrain.vocoder.validate import validate_sounds

    return DataWork(validate_sounds, settings.audio_sample_rate or SAMPLING_RATE, sound_figures)


def validate_transcribed(settings: ValidateSettings, kind: "SpeechKind") -> DataWork:
    from gputrain.speech.prepare import speech_prepare_config
    from gputrain.speech.validate import validate_speech
    from gputrain.tts.plan import memory_by_preset

    config = speech_prepare_config(kind, settings.speech, Sound(audio_sample_rate=settings.audio_sample_rate))
    validate_with = partial(validate_speech, checker=checker_of(settings.check_with))
    if kind == "asr":
        return DataWork(validate_with, config, speech_figures)

    def predict(report: "SpeechReport") -> dict[str, Any]:
        with ui.err.status("predicting the memory of a step"):
            return {"memory_gb": memory_by_preset(report)}

    return DataWork(validate_with, config, speech_figures, predict)


def picture_figures(report: "ImageReport") -> Figures:
    def spread(of: "Spread | None") -> str:
        return f"{of.min:g} to {of.max:g}, half of them under {of.median:g}" if of else "-"

    figures: Figures = {
        "readable pictures": report.pictures,
        "held out": report.held_out,
        "refused": len(report.refused),
        "other files": other_files(report.ignored) or 0,
        "formats": ", ".join(f"{count} {name}" for name, count in report.formats.items()),
        "size": f"{report.bytes / 1e6:.1f} MB",
        "width in pixels": spread(report.width),
        "height in pixels": spread(report.height),
    }
    if report.manifest:
        odd = {name: len(paths) for name, paths in vars(report.manifest).items() if paths}
        figures["manifest"] = ", ".join(f"{count} {name}" for name, count in odd.items()) or "agrees with the files"
    return figures


def sound_figures(report: "SoundReport") -> Figures:
    figures: Figures = {"refused": len(report.refused), "other files": other_files(report.ignored) or 0}
    if (total := report.total) is not None:
        pitch = total.pitch_hz
        figures = {
            "recordings": total.recordings,
            "hours": total.hours,
            **figures,
            "rates": ", ".join(f"{count} of {rate} Hz" for rate, count in total.rates.items()),
            "seconds": f"{total.seconds.min:.3g} to {total.seconds.max:.3g}, half under {total.seconds.median:.3g}",
            "clipped": f"{total.clipped} recordings, {100 * total.clipped_share:.2g} % of all samples",
            "silence": f"{100 * total.silent_share:.3g} %",
            "voiced": f"{100 * total.voiced_share:.3g} %",
            "pitch": f"{pitch[0]:.0f} to {pitch[1]:.0f} Hz (nine tenths of it)" if pitch else "none",
        }
    return figures


def speech_figures(report: "SpeechReport", memory_gb: Mapping[str, float] | None = None) -> Figures:
    figures: Figures = {"left out": len(report.refused)}
    if report.seconds is not None and (rates := report.symbols_a_second) is not None:
        spoken = {symbol: count for symbol, count in report.symbols.items() if count}
        commonest = " ".join(f"{symbol}:{count}" for symbol, count in list(spoken.items())[:8])
        figures = {
            "clips": report.clips,
            "hours": report.hours,
            "language": report.language,
            "speakers": len(report.speakers),
            **figures,
            "rates": ", ".join(f"{count} of {rate} Hz" for rate, count in report.source_rates.items()),
            "seconds": f"{report.seconds.min:.3g} to {report.seconds.max:.3g}, half under {report.seconds.median:.3g}",
            "clips by seconds": ", ".join(f"{span}: {count}" for span, count in report.histogram.items()),
            "symbols": f"{len(spoken)} of {len(report.symbols)} are spoken: {commonest} ...",
            "rare": " ".join(f"{symbol}:{count}" for symbol, count in report.rare.items()) or "none",
            "symbols a second": f"{rates.median:.3g}, from {rates.min:.3g} to {rates.max:.3g}",
        }
        if memory_gb:
            figures["memory, batch 32"] = ", ".join(f"{preset} {peak:g} GB" for preset, peak in memory_gb.items())
        if report.suspicious:
            figures["suspicious"] = ", ".join(f"{count} {reason}" for reason, count in report.suspicions.items())
    return figures | {f"  {reason}": count for reason, count in report.reasons.items()}


PREPARE: Mapping[Kind, Callable[[PrepareSettings], DataWork]] = {
    "vae": prepare_pictures,
    "vocoder": prepare_recordings,
    "tts": partial(prepare_transcribed, kind="tts"),
    "asr": partial(prepare_transcribed, kind="asr"),
}
VALIDATE: Mapping[Kind, Callable[[ValidateSettings], DataWork]] = {
    "vae": validate_pictures,
    "vocoder": validate_recordings,
    "tts": partial(validate_transcribed, kind="tts"),
    "asr": partial(validate_transcribed, kind="asr"),
}
