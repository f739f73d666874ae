"""Exports a trained voice for Piper and Home Assistant: NAME.onnx and NAME.onnx.json.

The exported model is compared with the torch model before it is moved to its final place.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from gputrain.audio.export import LARGEST_DIFFERENCE, Exported, cpu_copy, written_aside
from gputrain.engine.dataset_report import silent
from gputrain.errors import UserError
from gputrain.tts.load import LoadedVoice
from gputrain.tts.onnx_export import largest_wave_difference, write_piper_graph

COMPARED_SYMBOLS = (1, 5, 33, 120)
# Piper has four quality names, from which its users infer memory and speed.
QUALITIES = {"high": "high", "medium": "medium", "fast": "medium"}
LOCALE = re.compile(r"([a-z]{2,3})_([A-Z]{2})")
UNNAMED = "und"  # ISO 639 code of an undetermined language


class Locale(NamedTuple):
    """Language and country of a voice in Piper's configuration."""

    family: str
    region: str
    native: str
    english: str
    country: str


LOCALES = {
    "uz": Locale("uz", "UZ", "Oʻzbekcha", "Uzbek", "Uzbekistan"),
    "en": Locale("en", "US", "English", "English", "United States"),
    "ru": Locale("ru", "RU", "Русский", "Russian", "Russia"),
}


def export_piper(
    loaded: LoadedVoice,
    folder: Path,
    name: str = "voice",
    *,
    language_code: str = "",
    progress: Callable[[int, int], None] = silent,
) -> Exported:
    """Writes NAME.onnx and NAME.onnx.json in the format that piper-tts loads.

    `language_code`, such as kk_KZ, replaces the default of the voice's language. Raises UserError for an invalid name
    or code, if weights are not finite, a package is not installed or the folder cannot be written; RuntimeError if
    onnxruntime's wave differs from torch's.
    """
    name = name.removesuffix(".onnx")
    if not name or Path(name).name != name:
        raise UserError(f"{name!r} is not a file name", hint="give a name without folders, such as uz_UZ-dilnoza")
    locale = locale_of(loaded, language_code)
    voice, steps = cpu_copy(loaded.voice), 1 + len(COMPARED_SYMBOLS)
    done = iter(range(2, steps + 1))
    with written_aside(folder) as aside:
        graph, settings = aside / f"{name}.onnx", aside / f"{name}.onnx.json"
        write_piper_graph(voice, graph)
        progress(1, steps)
        difference = largest_wave_difference(voice, graph, COMPARED_SYMBOLS, lambda: progress(next(done), steps))
        if not difference < LARGEST_DIFFERENCE:
            raise RuntimeError(f"{folder / graph.name}: onnxruntime's wave differs from torch's by {difference:.3g}")
        text = json.dumps(piper_config(loaded, name, locale), indent=2, ensure_ascii=False)
        settings.write_text(text + "\n", encoding="utf-8")
    return Exported([folder / graph.name, folder / settings.name], difference, notes(loaded, name))


def locale_of(loaded: LoadedVoice, language_code: str) -> Locale:
    """Returns the locale of a language code. Raises UserError for an invalid code."""
    own = LOCALES.get(loaded.frontend.language, Locale(UNNAMED, "", "", "", ""))
    if not language_code:
        return own
    named = LOCALE.fullmatch(language_code)
    if named is None:
        raise UserError(
            f"language_code is {language_code!r}", hint="give language and country in ISO's codes, such as kk_KZ"
        )
    if named[1] != own.family:
        return Locale(named[1], named[2], named[1], named[1], named[2])
    return own if named[2] == own.region else own._replace(region=named[2], country=named[2])


def piper_config(loaded: LoadedVoice, name: str, locale: Locale) -> dict[str, Any]:
    """Returns the content of NAME.onnx.json, which Piper and Home Assistant read."""
    sizes, frontend = loaded.voice.architecture, loaded.frontend
    several = sizes.num_speakers > 1
    return {
        "audio": {"sample_rate": sizes.mel.sampling_rate, "quality": QUALITIES[loaded.settings.model.preset]},
        "espeak": {"voice": frontend.espeak_voice or locale.family},  # Piper requires the key in any case.
        "language": {
            "code": f"{locale.family}_{locale.region}" if locale.region else locale.family,
            "family": locale.family,
            "region": locale.region,
            "name_native": locale.native,
            "name_english": locale.english,
            "country_english": locale.country,
        },
        "inference": {"noise_scale": 0.667, "length_scale": 1.0, "noise_w": 0.8},
        "phoneme_type": frontend.phoneme_type,
        "phoneme_map": {},
        "phoneme_id_map": frontend.id_map(),
        "num_symbols": sizes.num_symbols,
        "num_speakers": sizes.num_speakers,
        "speaker_id_map": {speaker: number for number, speaker in enumerate(loaded.speakers)} if several else {},
        "hop_length": sizes.mel.hop_size,
        "dataset": name,
        "piper_version": "1.0.0",
    }


def notes(loaded: LoadedVoice, name: str) -> list[str]:
    """Returns notes for the user of this voice in Piper."""
    frontend, speakers = loaded.frontend, loaded.speakers
    lines = [f"Piper looks for both files in one folder: piper --model {name}.onnx"]
    if frontend.phoneme_type == "text":
        table = " --alphabet TABLE" if frontend.alphabet else ""
        lines += [
            "Piper does not write out numbers, dates and abbreviations: gputrain normalize --language "
            f"{frontend.language}{table} --input-file text.txt | piper --model {name}.onnx --output-file out.wav",
            "Piper synthesises each line at once: give it one sentence for each line",
        ]
    else:
        lines += ["Piper contains the espeak-ng of this voice, which also converts numbers and abbreviations to words"]
    if loaded.voice.architecture.num_speakers > 1:
        lines += [f"choose one of {len(speakers)} speakers by number: --speaker 0 is {speakers[0]}"]
    return lines
