"""Exports a trained voice for Piper, Home Assistant and sherpa-onnx: NAME.onnx and NAME.onnx.json, and tokens.txt.

The exported graph is compared with the torch model before it is moved to its final place.

Shape suffixes: B items, S symbols, T samples, 1 a dimension.
"""

import json
import math
import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gputrain.audio.export import (
    LARGEST_DIFFERENCE,
    add_metadata,
    check_file_name,
    cpu_copy,
    exported,
    load_checked_onnx,
    load_line,
    run_onnx,
    wave_difference,
    write_onnx,
)
from gputrain.config import read_table
from gputrain.errors import UserError, import_package, is_installed
from gputrain.files import Progress, StepProgress, no_progress, written_aside
from gputrain.kinds import Exported
from gputrain.speech.text.frontend import BOS_ID, EOS_ID, PAD_ID, RESERVED, Frontend, phonemizer_version
from gputrain.speech.text.language import CODE
from gputrain.tts.export_layers import faster_in_onnxruntime
from gputrain.tts.load import LoadedVoice
from gputrain.tts.model import Voice
from gputrain.tts.speak import speaker_number

COMPARED_SYMBOLS = (1, 5, 33, 120)
# Piper has four quality names, from which its users infer memory and speed.
QUALITIES = {"high": "high", "medium": "medium", "fast": "medium"}
LOCALE = re.compile(r"([a-z]{2,3})_([A-Z]{2})")
VOICE_NAME = re.compile(r"[^-]+-([^-]+)-[^-]+")
SAYS_NOTHING = ("", "data", "out", "outputs", "prepared", "run", "runs", "tts", "voice")  # names of folders
UNNAMED = "und"  # ISO 639 code of an undetermined language
OTHER_CODES = {"cmn": "zh", "nb": "no"}  # Codes of espeak-ng that Piper's voices have under another one.
OPSET = 16
EXAMPLE_SYMBOLS = 11
AXES = {
    "input": {0: "batch", 1: "phonemes"},
    "input_lengths": {0: "batch"},
    "sid": {0: "batch"},
    "output": {0: "batch", 3: "time"},
    "durations": {0: "batch", 1: "phonemes"},
}
OUTPUTS = ["output", "durations"]  # Piper and sherpa-onnx read the first; newer versions of Piper read times in both.
DRAWS = 2  # number of noises that the graph draws: for durations and latents
CLEAR = 1e-4  # relative change of the tempo that must not change any duration, so that rounding cannot either


class Locale(NamedTuple):
    family: str
    region: str
    native: str
    english: str
    country: str


def export_piper(
    loaded: LoadedVoice,
    folder: Path,
    name: str = "",
    *,
    language_code: str = "",
    default_speaker: str = "",
    sherpa: bool = False,
    progress: Progress = no_progress,
) -> Exported:
    """Writes NAME.onnx and NAME.onnx.json, which piper-tts loads; with `sherpa` also the files that sherpa-onnx needs.

    `name` is that of `voice_name` by default; `language_code`, such as kk_KZ, replaces the default of the voice's
    language, and `default_speaker` the first speaker. Raises UserError for an invalid name or code or an unknown
    speaker, if weights are not finite, a package is not installed or the folder cannot be written; RuntimeError if
    onnxruntime's wave or durations differ from torch's, or sherpa-onnx does not speak.
    """
    locale, speaker = locale_of(loaded, language_code), default_speaker_id(loaded.speakers, default_speaker)
    name = name.removesuffix(".onnx") or voice_name(loaded, locale)
    check_file_name(name, example="uz_UZ-dilnoza-medium")
    voice, steps = cpu_copy(loaded.voice), StepProgress(progress, 1 + len(COMPARED_SYMBOLS))
    config = piper_config(loaded, name, locale, speaker)
    with written_aside(folder) as aside:
        graph, settings = aside / f"{name}.onnx", aside / f"{name}.onnx.json"
        write_piper_graph(voice, graph)
        add_metadata(graph, sherpa_metadata(config))
        steps.next()
        difference = largest_wave_difference(voice, graph, COMPARED_SYMBOLS, steps.next)
        if not difference < LARGEST_DIFFERENCE:
            raise RuntimeError(f"{folder / graph.name}: onnxruntime's wave differs from torch's by {difference:.3g}")
        settings.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        if sherpa:
            add_tokens(aside, config, loaded.frontend)
            check_tokens(aside, folder)
        files = [folder / path.name for path in sorted(aside.iterdir())]
        replaced = [f"Replaced the earlier {graph.name}"] * (folder / graph.name).exists()
    told = sherpa_notes(folder, name, loaded.frontend) if sherpa else notes(loaded, str(folder / name), speaker)
    told += replaced + differences(loaded)
    if locale.family == UNNAMED:
        told.append("Piper's servers offer no voice without a language: export with --language-code, such as kk_KZ")
    return exported(files, loaded.source, "sample", difference, told)


def voice_name(loaded: LoadedVoice, locale: Locale) -> str:
    """Returns a name by Piper's convention, LANGUAGE_COUNTRY-NAME-QUALITY: NAME has the speaker, or the data of
    several, and the run folder, unless they say nothing."""
    data, run = (path.name for path in (loaded.settings.data.data_path[0], Path(loaded.source).parent))
    parts = [loaded.speakers[0] if len(loaded.speakers) == 1 and loaded.speakers[0] else data, run]
    told = dict.fromkeys(re.sub(r"\W+", "_", part.lower()).strip("_") for part in parts)
    name = "_".join(part for part in told if part not in SAYS_NOTHING) or "voice"
    quality = QUALITIES[loaded.settings.model.preset]
    return f"{locale.family}_{locale.region}-{name}-{quality}" if locale.region else f"{locale.family}-{name}-{quality}"


def default_speaker_id(speakers: tuple[str, ...], asked: str) -> int:
    """Returns the id of the speaker to speak with if none is asked for. Raises UserError if there is no choice."""
    if asked and len(speakers) < 2:
        raise UserError("default_speaker has no effect on a voice with one speaker", hint="drop --default-speaker")
    return speaker_number(speakers, asked)


def locale_of(loaded: LoadedVoice, language_code: str) -> Locale:
    """Returns the locale of a language code, by default that of the espeak voice or of the texts. Raises UserError for
    an invalid code."""
    if language_code and not LOCALE.fullmatch(language_code):
        raise UserError(
            f"language_code is {language_code!r}", hint="give language and country in ISO's codes, such as kk_KZ"
        )
    known = language_code.replace("_", "-") or loaded.frontend.espeak_voice or loaded.frontend.orthography
    code, *parts = known.partition("+")[0].rpartition("/")[2].split("-")  # espeak-ng's roa/fr-be+f3 is fr-be.
    if not CODE.fullmatch(code):  # characters, or a voice by its name, such as German
        return Locale(UNNAMED, "", "", "", "")
    family = OTHER_CODES.get(code.lower(), code.lower())
    own = Locale(family, *read_table("gputrain.tts", "locales.yaml").get(family, ("", family, family, "")))
    region = next((part.upper() for part in parts if len(part) == 2), own.region)
    return own if region == own.region else own._replace(region=region, country=region)


def piper_config(loaded: LoadedVoice, name: str, locale: Locale, default_speaker_id: int = 0) -> dict[str, Any]:
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
        "speaker_id_map": {speaker or str(number): number for number, speaker in enumerate(loaded.speakers) if several},
        "default_speaker_id": default_speaker_id,
        "hop_length": sizes.mel.hop_size,
        "dataset": named[1] if (named := VOICE_NAME.fullmatch(name)) else name,
        "piper_version": "1.0.0",
    }


def notes(loaded: LoadedVoice, name: str, default_speaker_id: int = 0) -> list[str]:
    frontend, speakers = loaded.frontend, loaded.speakers
    several = loaded.voice.architecture.num_speakers > 1
    lines = [
        f"Piper looks for both files in one folder: piper --model {name}.onnx",
        load_line(Path(f"{name}.onnx"), "input", "input_lengths", "scales", *["sid"] * several),
        "Inputs: input int64 (1, symbols), ids by the phoneme_id_map of the .json; input_lengths int64 (1,); scales "
        f"float32 (3,), noise, length and noise of durations{'; sid int64 (1,), the speaker' * several}",
        "Outputs: output float32 (1, 1, 1, samples); durations float32 (1, symbols), in frames of hop_length samples, "
        "from which Piper gives the times of phonemes: synthesize(text, include_alignments=True)",
    ]
    if frontend.phoneme_type == "text":
        table = " --lexicon FILE" * bool(frontend.raw.lexicon)
        table += f" --number-words {frontend.raw.number_words}" * bool(frontend.raw.number_words)
        lines += [
            "Piper does not write out numbers, dates and abbreviations: gputrain normalize --language "
            f"{frontend.language}{table} --input-file text.txt | piper --model {name}.onnx --output-file out.wav",
            "Piper synthesises each line at once: give it one sentence for each line",
        ]
    else:
        lines += ["Piper contains the espeak-ng of this voice, which also converts numbers and abbreviations to words"]
    if several:
        first, default = (
            speakers[0] or "without a name",
            speakers[default_speaker_id] or f"speaker {default_speaker_id}",
        )
        lines += [
            f"choose one of {len(speakers)} speakers by number: --speaker 0 is {first}; without it, {default} speaks"
        ]
    return lines


# A sentence that is compared, with a number where a language has rules for it.
SENTENCES = {"en": "It costs 25 pounds.", "ru": "Это стоит 25 рублей.", "uz": "Bu 25 soʻm turadi.", "tr": "İzmir 25"}


def differences(loaded: LoadedVoice) -> list[str]:
    """Returns what stock Piper reads otherwise than the voice: of the test sentences of its training, and of a sentence
    with a number and words of its lexicon."""
    reading = loaded.frontend
    if reading.espeak_voice and not is_installed("piper"):
        return ["piper-tts is not installed: what it reads otherwise than the voice is not known"]
    told = []
    if reading.espeak_voice and reading.phonemizer != phonemizer_version():
        told = [f"The data were phonemised by {reading.phonemizer}, and compared is {phonemizer_version()}"]
    own = SENTENCES.get(reading.orthography, "25" if reading.raw.number_words else "")
    texts = [*loaded.settings.data.test_sentences, *[own] * bool(own), *list(reading.raw.lexicon)[:3]]
    found = reading.piper_differences(texts)
    return [*told, *([f"Stock Piper reads otherwise than the voice {found}"] if found else [])]


DECOMPOSED = ', with letters and marks apart: unicodedata.normalize("NFD", text)'


def sherpa_metadata(config: Mapping[str, Any]) -> dict[str, object]:
    """Returns the metadata of the graph of a voice, by which sherpa-onnx turns texts to the ids of Piper's map."""
    language = config["language"]
    facts: dict[str, object] = {
        "model_type": "vits",
        "comment": "piper",
        "language": language["name_english"] or language["code"],
        "voice": config["espeak"]["voice"],
        "n_speakers": config["num_speakers"],
        "sample_rate": config["audio"]["sample_rate"],
        "has_espeak": int(config["phoneme_type"] == "espeak"),
    }
    if config["phoneme_type"] == "text":
        ids = {"blank_id": PAD_ID, "bos_id": BOS_ID, "eos_id": EOS_ID}
        facts |= {"frontend": "characters", "add_blank": 1, "use_eos_bos": 1, **ids}
    return facts


def add_tokens(folder: Path, config: Mapping[str, Any], reading: Frontend) -> None:
    """Writes tokens.txt, the symbols with their ids, beside the graph. Raises UserError if a package is not installed,
    RuntimeError if sherpa-onnx does not speak with the first or the last speaker."""
    sherpa_onnx = import_package("sherpa_onnx")
    rows = [f"{symbol} {ids[0]}\n" for symbol, ids in config["phoneme_id_map"].items() if len(ids) == 1]
    (folder / "tokens.txt").write_text("".join(rows), encoding="utf-8")
    (graph,) = folder.glob("*.onnx")
    files = sherpa_onnx.OfflineTtsVitsModelConfig(model=str(graph), tokens=str(folder / "tokens.txt"))
    voice = sherpa_onnx.OfflineTts(sherpa_onnx.OfflineTtsConfig(sherpa_onnx.OfflineTtsModelConfig(vits=files)))
    text, asked = "".join(reading.symbols[len(RESERVED) :][-COMPARED_SYMBOLS[2] :]), sherpa_onnx.GenerationConfig()
    if reading.espeak_voice:
        asked.phoneme_codepoints = [[ord(char) for char in text]]
    for asked.sid in {0, config["num_speakers"] - 1}:
        made = voice.generate("" if reading.espeak_voice else text, asked)
        peak = max(map(abs, made.samples), default=0.0)
        if made.sample_rate != config["audio"]["sample_rate"] or not 0 < peak < math.inf:
            raise RuntimeError(f"{graph.name}: sherpa-onnx makes no sound of it for speaker {asked.sid}")


def check_tokens(made: Path, folder: Path) -> None:
    """Raises UserError if a new tokens.txt would replace a different one that other voices in the folder need."""
    tokens, others = folder / "tokens.txt", {path.name for path in folder.glob("*.onnx")} - {*os.listdir(made)}
    if others and tokens.is_file() and tokens.read_bytes() != (made / tokens.name).read_bytes():
        raise UserError(f"{tokens} has other symbols, of {min(others)}", hint="export to a folder of its own")


def sherpa_notes(folder: Path, name: str, reading: Frontend) -> list[str]:
    files = f'model="{folder / name}.onnx", tokens="{folder / "tokens.txt"}"'
    given = f"text as gputrain normalize prints it{DECOMPOSED * any(map(unicodedata.combining, reading.symbols))}"
    if reading.espeak_voice:
        voice = f"piper.phonemize_espeak.EspeakPhonemizer().phonemize({reading.espeak_voice!r}, text)"
        given = f"GenerationConfig.phoneme_codepoints, the code points of {voice}"
    return [f"Use it: sherpa_onnx.OfflineTtsVitsModelConfig({files})", f"sherpa-onnx 2 takes {given}"]


class PiperGraph(nn.Module):
    """Wraps a voice with the inputs and the outputs of Piper's graphs."""

    def __init__(self, voice: Voice) -> None:
        super().__init__()
        self.voice = voice

    def forward(
        self, ids_BS: Tensor, lengths_B: Tensor, scales: Tensor, speaker_B: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns waves (B, 1, 1, T), and the durations of symbols in frames, BS; `scales` has noise_scale,
        length_scale and noise_w."""
        noise_scale, length_scale, noise_w = scales.unbind()
        wave_B1T, durations_BS = self.voice.infer(
            ids_BS, lengths_B, speaker_B, noise_scale=noise_scale, length_scale=length_scale, noise_w=noise_w
        )
        return wave_B1T[:, None], durations_BS


def write_piper_graph(voice: Voice, path: Path) -> None:
    """Writes the graph of a speaking copy on the CPU. Raises UserError if onnx is not installed."""
    example = comparison_text(voice, EXAMPLE_SYMBOLS, seed=0)
    write_onnx(
        PiperGraph(faster_in_onnxruntime(voice)),
        tuple(example.values()),
        path,
        input_names=list(example),
        output_names=OUTPUTS,
        dynamic_axes={name: axes for name, axes in AXES.items() if name in example or name in OUTPUTS},
        opset_version=OPSET,
    )


@torch.no_grad()
def largest_wave_difference(
    voice: Voice, path: Path, lengths: Iterable[int], step_done: Callable[[], None] = lambda: None
) -> float:
    """Returns the largest difference between the waves of the graph in onnxruntime and of the voice, without noise, for
    texts with these numbers of symbols.

    Raises UserError if onnx or onnxruntime is not installed, RuntimeError if the graph does not draw both noises, or a
    wave has another shape or its symbols have other durations.
    """
    model = load_checked_onnx(path)
    draws = sum(node.op_type == "RandomNormalLike" for node in model.graph.node)
    if draws != DRAWS:
        raise RuntimeError(f"{path}: the graph draws noise {draws} times, expected {DRAWS}")
    session = run_onnx(model)
    worst, spoken = 0.0, PiperGraph(voice)
    for symbols in lengths:
        given = comparison_text(voice, symbols, seed=symbols)
        found = session.run(OUTPUTS, {name: tensor.numpy() for name, tensor in given.items()})
        (graph_B11T, graph_BS), (wave_B11T, durations_BS) = map(torch.from_numpy, found), spoken(*given.values())
        if not torch.equal(graph_BS, durations_BS):
            raise RuntimeError(f"{path}: the symbols have other durations than in torch")
        worst = max(worst, wave_difference(path, graph_B11T, wave_B11T))
        step_done()
    return worst


@torch.no_grad()
def comparison_text(voice: Voice, symbols: int, seed: int) -> dict[str, Tensor]:
    """Returns the inputs of a graph without noise: a random text whose durations are equal in every library. Before
    rounding up, none is so close to a whole number of frames that fp32 rounding errors could change it. Raises
    RuntimeError if none is found."""
    sizes, random = voice.architecture, torch.Generator().manual_seed(seed)
    for attempt in range(100):
        ids_1S = torch.randint(0, sizes.num_symbols, (1, symbols), generator=random)
        speaker_1 = torch.randint(0, sizes.num_speakers, (1,), generator=random)
        lengths_1, length_scale = torch.tensor([symbols]), 1 + attempt / 100
        text = voice.encode_text(ids_1S, lengths_1)
        slower, faster = (
            voice.predict_durations(text, voice.speaker(speaker_1), length_scale=length_scale * factor, noise_w=0.0)
            for factor in (1 + CLEAR, 1 - CLEAR)
        )
        if torch.equal(slower, faster):
            inputs = {"input": ids_1S, "input_lengths": lengths_1, "scales": torch.tensor([0, length_scale, 0])}
            return inputs | ({"sid": speaker_1} if sizes.num_speakers > 1 else {})
    raise RuntimeError(f"no text of {symbols} symbols has durations clear of rounding")
