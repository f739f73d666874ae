"""Exports a trained voice for Piper and Home Assistant: NAME.onnx and NAME.onnx.json.

The exported graph is compared with the torch model before it is moved to its final place.

Shape suffixes: B items, S symbols, T samples, 1 a dimension.
"""

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gputrain.audio.export import (
    LARGEST_DIFFERENCE,
    check_file_name,
    cpu_copy,
    exported,
    load_checked_onnx,
    load_line,
    run_onnx,
    wave_difference,
    write_onnx,
)
from gputrain.engine.data import Progress, StepProgress, no_progress, written_aside
from gputrain.errors import UserError
from gputrain.kinds import Exported
from gputrain.tts.export_layers import faster_in_onnxruntime
from gputrain.tts.load import LoadedVoice
from gputrain.tts.model import Voice
from gputrain.tts.speak import speaker_number

COMPARED_SYMBOLS = (1, 5, 33, 120)
# Piper has four quality names, from which its users infer memory and speed.
QUALITIES = {"high": "high", "medium": "medium", "fast": "medium"}
LOCALE = re.compile(r"([a-z]{2,3})_([A-Z]{2})")
UNNAMED = "und"  # ISO 639 code of an undetermined language
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
    default_speaker: str = "",
    progress: Progress = no_progress,
) -> Exported:
    """Writes NAME.onnx and NAME.onnx.json in the format that piper-tts loads.

    `language_code`, such as kk_KZ, replaces the default of the voice's language, and `default_speaker` the first
    speaker. Raises UserError for an invalid name or code or an unknown speaker, if weights are not finite, a package is
    not installed or the folder cannot be written; RuntimeError if onnxruntime's wave or durations differ from torch's.
    """
    name = name.removesuffix(".onnx")
    check_file_name(name, example="uz_UZ-dilnoza")
    locale, speaker = locale_of(loaded, language_code), default_speaker_id(loaded.speakers, default_speaker)
    voice, steps = cpu_copy(loaded.voice), StepProgress(progress, 1 + len(COMPARED_SYMBOLS))
    with written_aside(folder) as aside:
        graph, settings = aside / f"{name}.onnx", aside / f"{name}.onnx.json"
        write_piper_graph(voice, graph)
        steps.next()
        difference = largest_wave_difference(voice, graph, COMPARED_SYMBOLS, steps.next)
        if not difference < LARGEST_DIFFERENCE:
            raise RuntimeError(f"{folder / graph.name}: onnxruntime's wave differs from torch's by {difference:.3g}")
        text = json.dumps(piper_config(loaded, name, locale, speaker), indent=2, ensure_ascii=False)
        settings.write_text(text + "\n", encoding="utf-8")
    files = [folder / graph.name, folder / settings.name]
    return exported(files, loaded.source, "sample", difference, notes(loaded, str(folder / name), speaker))


def default_speaker_id(speakers: tuple[str, ...], asked: str) -> int:
    """Returns the id of the speaker to speak with if none is asked for. Raises UserError if there is no choice."""
    if asked and len(speakers) < 2:
        raise UserError("default_speaker has no effect on a voice with one speaker", hint="drop --default-speaker")
    return speaker_number(speakers, asked)


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
        "dataset": name,
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
        table = " --alphabet TABLE" * bool(frontend.alphabet) + " --lexicon FILE" * bool(frontend.raw.lexicon)
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


class ComparisonText(NamedTuple):
    """Input of a comparison without noise: symbols of one item, its speaker and its length scale."""

    ids_1S: Tensor
    speaker_1: Tensor
    length_scale: float

    def inputs(self, voice: Voice) -> dict[str, Tensor]:
        lengths_1 = torch.tensor([self.ids_1S.shape[1]])
        inputs = {"input": self.ids_1S, "input_lengths": lengths_1, "scales": torch.tensor([0, self.length_scale, 0])}
        return inputs | ({"sid": self.speaker_1} if voice.architecture.num_speakers > 1 else {})


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
    example = comparison_text(voice, EXAMPLE_SYMBOLS, seed=0).inputs(voice)
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
        given = comparison_text(voice, symbols, seed=symbols).inputs(voice)
        found = session.run(OUTPUTS, {name: tensor.numpy() for name, tensor in given.items()})
        (graph_B11T, graph_BS), (wave_B11T, durations_BS) = map(torch.from_numpy, found), spoken(*given.values())
        if not torch.equal(graph_BS, durations_BS):
            raise RuntimeError(f"{path}: the symbols have other durations than in torch")
        worst = max(worst, wave_difference(path, graph_B11T, wave_B11T))
        step_done()
    return worst


@torch.no_grad()
def comparison_text(voice: Voice, symbols: int, seed: int) -> ComparisonText:
    """Returns a random text whose durations are equal in every library: before rounding up, none is so close to a whole
    number of frames that fp32 rounding errors could change it. Raises RuntimeError if none is found."""
    sizes, random = voice.architecture, torch.Generator().manual_seed(seed)
    for attempt in range(100):
        made = ComparisonText(
            torch.randint(0, sizes.num_symbols, (1, symbols), generator=random),
            torch.randint(0, sizes.num_speakers, (1,), generator=random),
            length_scale=1 + attempt / 100,
        )
        text = voice.encode_text(made.ids_1S, torch.tensor([symbols]))
        slower, faster = (
            voice.predict_durations(
                text, voice.speaker(made.speaker_1), length_scale=made.length_scale * factor, noise_w=0.0
            )
            for factor in (1 + CLEAR, 1 - CLEAR)
        )
        if torch.equal(slower, faster):
            return made
    raise RuntimeError(f"no text of {symbols} symbols has durations clear of rounding")
