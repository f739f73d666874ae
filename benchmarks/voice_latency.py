"""Time from a text to the first sound, and to the end, of `speak` in this process: whole sentences against a stream.

    python benchmarks/voice_latency.py [--threads 2] [--rounds 5] [--output-dir benchmarks/results]

Voices have random weights, which take the same time as trained ones; their tempo is set so that the sentence lasts six
seconds, since the durations of an untrained voice are meaningless. Loading the model is not counted. The figures are
medians over the rounds, after one that is not counted.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any, get_args

import torch

from gputrain.bench import runner
from gputrain.config import assemble
from gputrain.hw.probe import machine_facts
from gputrain.speech.text.frontend import frontend
from gputrain.tts.architecture import VoicePreset, voice_architecture
from gputrain.tts.config import SpeakingOptions, TrainTts
from gputrain.tts.load import LoadedVoice
from gputrain.tts.model import Voice, inference_copy
from gputrain.tts.speak import Narrator

TEXT = "The first sound of a long sentence should be heard while the rest of it is still being computed, shouldn't it?"
SECONDS, RATE_HZ = 6.0, 22050


def voice_of(preset: VoicePreset) -> LoadedVoice:
    torch.manual_seed(0)
    reading = frontend("en")
    sizes = voice_architecture(preset, num_symbols=len(reading.symbols), num_speakers=1, sampling_rate=RATE_HZ)
    settings = assemble(TrainTts, {"data_path": ".", "preset": preset})
    return LoadedVoice(inference_copy(Voice(sizes)), reading, settings, ("one",), "random weights")


def times(narrator: Narrator, *, in_chunks: bool) -> dict[str, float]:
    """Returns the seconds to the first samples and to the last, and the seconds of sound."""
    began, first, samples = time.perf_counter(), 0.0, 0
    for part in narrator.say(TEXT, in_chunks=in_chunks):
        first = first or time.perf_counter() - began
        samples += len(part.wave_T)
    return {"first": first, "all": time.perf_counter() - began, "sound": samples / RATE_HZ}


def measured(preset: VoicePreset, rounds: int) -> dict[str, Any]:
    loaded = voice_of(preset)
    scale = 1.0
    for _ in range(3):  # Durations are rounded up to frames, so that the tempo is found in steps.
        scale *= SECONDS / times(Narrator(loaded, SpeakingOptions(length_scale=scale)), in_chunks=False)["sound"]
    row: dict[str, Any] = {"voice": preset}
    for name, in_chunks in (("whole", False), ("stream", True)):
        narrator = Narrator(loaded, SpeakingOptions(length_scale=scale))
        taken = [times(narrator, in_chunks=in_chunks) for _ in range(rounds + 1)][1:]
        for what in ("first", "all", "sound"):
            row[f"{name}_{what}_seconds"] = round(statistics.median(one[what] for one in taken), 3)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output-dir", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = []
    for preset in get_args(VoicePreset):
        rows.append(measured(preset, options.rounds))
        print(rows[-1], flush=True)
    report = {
        "title": "Time to the first sound", **machine_facts("cpu"),
        "command": runner.command_line("python benchmarks/voice_latency.py"), "rows": rows,
    }  # fmt: skip
    runner.open_folder(options.output_dir)
    path = runner.result_path(options.output_dir, "voice_latency", str(report["device"]))
    runner.write_json(path, report)
    print(path)


if __name__ == "__main__":
    main()
