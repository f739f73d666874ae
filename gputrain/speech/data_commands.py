"""`prepare-data` and `validate` for speech, which a voice and a recogniser share. Imports no torch by itself."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gputrain.audio.config import Sound
from gputrain.config import leaves
from gputrain.engine.stop import format_duration
from gputrain.kinds import DataCommand, DataWork, speech_checker
from gputrain.speech.config import SpeechKind, SpeechOptions

if TYPE_CHECKING:
    from gputrain.speech.prepare import SpeechPrepareReport
    from gputrain.speech.validate import SpeechReport

# Of a voice and of a recogniser: their unfinished preparations differ in nothing.
PREPARED_SPEECH = {"text.json": frozenset({"frontend", "hop_size"}), "sounds.jsonl": frozenset({"trim_db"})}


def options_of(kind: SpeechKind) -> frozenset[str]:
    """Returns the options of speech that have an effect for a kind: only a voice may be trained on phonemes."""
    return frozenset(leaves(SpeechOptions)) - ({"espeak_voice"} if kind == "asr" else frozenset())


def prepare_command(kind: SpeechKind, *further: str) -> DataCommand:
    """Returns `prepare-data` for a kind, with the options of a recording that the kind leaves to the user."""

    def check(settings: Any) -> None:
        settings.speech.language_for(kind)

    return DataCommand(
        groups={"sound": Sound, "speech": SpeechOptions},
        names=options_of(kind) | {"align_with", "exclude", "trim_db", "loudness_db", *further},
        work=partial(prepare_transcribed, kind=kind),
        check=check,
        needs=("--language", "LANGUAGE"),
    )


def validate_command(kind: SpeechKind, *further: str) -> DataCommand:
    """Returns `validate` for a kind."""
    return DataCommand(
        groups={"speech": SpeechOptions},
        names=options_of(kind) | {"check_with", "exclude", *further},
        work=partial(validate_transcribed, kind=kind),
    )


def prepare_transcribed(settings: Any, kind: SpeechKind) -> DataWork:
    from gputrain.speech.prepare import check_output, prepare_speech, speech_prepare_config
    from gputrain.speech.validate import findings_of

    prepare_with = partial(prepare_speech, checker=settings.align_with and speech_checker(settings.align_with))
    config = speech_prepare_config(kind, settings.speech, settings.sound)
    return DataWork(
        prepare_with, config, prepared_speech, lambda folder, processes: findings_of(folder, kind),
        check_output=partial(check_output, config=config),
    )  # fmt: skip


def prepared_speech(report: "SpeechPrepareReport") -> dict[str, object]:
    # Common Voice names its speakers by 128 digits.
    names = [name if len(name) <= 20 else f"{name[:8]}..." for name in report.speakers[:8]]
    more = f", ... ({len(report.speakers)})" if len(report.speakers) > 8 else ""
    letters = [symbol for symbol in report.vocabulary if len(symbol) == 1]
    return {
        "recordings": f"{report.made} made, {report.kept} kept",
        "clips": report.clips,
        "duration": format_duration(3600 * report.hours),
        "speakers": ", ".join(filter(None, names)) + more or 1,
        **({"vocabulary": f"{len(report.vocabulary)} symbols: {' '.join(letters)}"} if letters else {}),
        **report.account(),
        "left out": len(report.refused),
        **{f"  {reason}": count for reason, count in report.reasons.items()},
    }


def validate_transcribed(settings: Any, kind: SpeechKind) -> DataWork:
    from gputrain.speech.prepare import speech_prepare_config
    from gputrain.speech.validate import validate_speech

    config = speech_prepare_config(kind, settings.speech, Sound(audio_sample_rate=settings.audio_sample_rate))
    validate_with = partial(validate_speech, checker=settings.check_with and speech_checker(settings.check_with))
    return DataWork(validate_with, config, speech_figures)


def speech_figures(report: "SpeechReport") -> dict[str, object]:
    from gputrain.data_in.preparation import format_range

    figures: dict[str, object] = {}
    if report.seconds is not None and (rates := report.symbols_a_second) is not None:
        spoken = {symbol: count for symbol, count in report.symbols.items() if count}
        commonest = " ".join(f"{symbol}:{count}" for symbol, count in list(spoken.items())[:8])
        figures = {
            "clips": report.clips,
            "duration": format_duration(3600 * report.hours),
            "language": report.language,
            "speakers": len(report.speakers),
            "rates": ", ".join(f"{count} of {rate} Hz" for rate, count in report.source_rates.items()),
            "seconds": format_range(report.seconds),
            "symbols": f"{len(spoken)} of {len(report.symbols)} are spoken: {commonest} ...",
            "rare": " ".join(f"{symbol}:{count}" for symbol, count in report.rare.items()) or "none",
            "symbols a second": f"{rates.median:.3g}, from {rates.min:.3g} to {rates.max:.3g}",
        }
        if report.differing:
            figures["suspicious"] = f"{len(report.differing)} text differs"
    left_out = {"left out": len(report.refused), **{f"  {reason}": count for reason, count in report.reasons.items()}}
    return figures | report.account() | left_out


RATE_HZ, CLIPS = 16000, 80  # The synthetic speech of demos.


def write_demo_speech(folder: Path) -> None:
    from gputrain.audio.synthetic import write_speech

    write_speech(folder / "speech", CLIPS, RATE_HZ)
