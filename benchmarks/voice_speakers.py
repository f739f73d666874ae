"""Measures what a new speaker costs a voice: its embedding alone, and all weights with speech of the old speakers.

usage: python benchmarks/voice_speakers.py --recordings FOLDER [--steps 80] [--more 40] [--seeds 1 2 3]

FOLDER holds metadata.csv (`id|text`) and wavs/. The recordings are of one person; two artificial speakers are made of
them by Praat's "Change gender" (parselmouth), which moves formants and pitch. A narrow `fast` voice with narrow
discriminators learns the recordings and the first of the two, 150 clips of each, in STEPS steps. Then the second is
added from 40 other clips in MORE steps, in both ways. Held-out clips of the new and of the old speakers are evaluated
by the command's own code before and after. Prints means and 95 % intervals over the seeds, and writes
voice_speakers.json.
"""

import argparse
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import soundfile
import torch
from race import interval
from rich.console import Console

from gputrain.config import assemble
from gputrain.errors import import_package
from gputrain.hw.probe import machine_facts
from gputrain.report.records import read_run
from gputrain.session import train_model
from gputrain.tts import architecture
from gputrain.tts.config import TrainTts
from gputrain.tts.work import TtsWork

NARROW = {"hidden_channels": 32, "latent_channels": 32, "encoder_filter_channels": 64, "encoder_layers": 2,
          "posterior_layers": 4, "flow_layers": 2, "speaker_channels": 32, "upsample_initial_channel": 32}  # fmt: skip
SPEAKERS = {"old": (1.0, 0.0), "low": (0.84, 120.0), "new": (1.12, 260.0)}  # ratio of formants, median pitch in Hz
CLIPS, NEW_CLIPS = 150, 40
FIGURES = ("mcd_db", "mel_distance", "length_mismatch")


def write_speakers(recordings: Path, folder: Path) -> dict[str, Path]:
    """Writes and prepares the speech of old speakers and of the new one. No sentence of the new one is an old one's."""
    parselmouth = import_package("parselmouth")
    call = importlib.import_module("parselmouth.praat").call
    lines = [line.split("|", 1) for line in (recordings / "metadata.csv").read_text(encoding="utf-8").splitlines()]
    long = [(name, text) for name, text in lines if 20 <= len(text) <= 90]
    parts = {"old": long[:CLIPS], "low": long[:CLIPS], "new": long[CLIPS : CLIPS + NEW_CLIPS]}
    prepared = {name: folder / name / "data" for name in ("old", "new")}
    for group in prepared:
        (folder / group / "in" / "wavs").mkdir(parents=True, exist_ok=True)
    rows: dict[str, list[str]] = {"old": [], "new": []}
    for speaker, (formants, pitch_hz) in SPEAKERS.items():
        group = "new" if speaker == "new" else "old"
        for name, text in parts[speaker]:
            sound = parselmouth.Sound(str(recordings / "wavs" / f"{name}.wav"))
            if pitch_hz:
                sound = call(sound, "Change gender", 75, 600, formants, pitch_hz, 1.0, 1.0)
            file = f"{speaker}_{name}.wav"
            soundfile.write(folder / group / "in" / "wavs" / file, sound.values[0], int(sound.sampling_frequency))
            rows[group].append(f"{file}|{speaker}|{text}")
    for group, data in prepared.items():
        (folder / group / "in" / "metadata.csv").write_text("\n".join(rows[group]) + "\n", encoding="utf-8")
        words = ["prepare-data", "--kind", "tts", "--language", "en", "--audio-sample-rate", "16000"]
        words += ["--input-dir", str(folder / group / "in"), "--output-dir", str(data)]
        subprocess.run([sys.executable, "-m", "gputrain", *words], check=True)
    return prepared


def train(folder: Path, steps: int, seed: int, clips: int, data: list[Path], **changes: Any) -> dict[str, Any]:
    """Trains a run unless it is there. Returns the figures of its first and last evaluation."""
    if not (folder / "report.html").exists():
        values = {
            "data_path": [str(one) for one in data], "output_dir": str(folder), "seed": seed, "preset": "fast",
            "batch_size": 2, "discriminator_channels": 8, "num_epochs": 0, "num_steps": steps, "held_out_share": 0.15,
            "evaluate_every_steps": steps, "eval_clips": clips, "device": "cpu", "plan": False, "num_workers": 0,
            "max_padding": 0.2, "ema_decay": 0.98, "checkpoint_every_steps": 0, "sample_every_steps": 0,
            "resume_from": "auto", **changes,
        }  # fmt: skip
        train_model(TtsWork(), assemble(TrainTts, values), Console(stderr=True))
    record = read_run(folder)
    return {
        f"{group}{figure} {when}": points[place][1]
        for figure in FIGURES
        for group in ("new_", "old_", "")
        if (points := record.series(f"eval/{group}{figure}"))
        for when, place in (("before", 0), ("after", -1))
    }


def measure(args: argparse.Namespace, data: dict[str, Path], seed: int) -> dict[str, Any]:
    folder = args.work_dir / f"seed_{seed}"
    base = folder / "base"
    train(base, args.steps, seed, args.clips, [data["old"]])
    added = {"init_from": str(base), "add_speaker": "new"}
    replayed = [data["new"].parent / f"{data['new'].name}=2", data["old"]]
    return {
        "speaker": train(
            folder / "speaker", args.more, seed, args.clips, [data["new"]], train_part="speaker", **added
        ),
        "replay": train(folder / "replay", args.more, seed, args.clips, replayed, **added),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recordings", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--more", type=int, default=40)
    parser.add_argument("--clips", type=int, default=8)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--work-dir", type=Path, default=Path("voice_speakers"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    architecture.PRESETS["fast"] = {**architecture.PRESETS["fast"], **NARROW}
    data = {name: args.work_dir / name / "data" for name in ("old", "new")}
    if not all((folder / "manifest.jsonl").exists() for folder in data.values()):
        data = write_speakers(args.recordings, args.work_dir)
    found = {str(seed): measure(args, data, seed) for seed in args.seeds}
    for way in ("speaker", "replay"):
        for figure in found[str(args.seeds[0])][way]:
            values = [one[way][figure] for one in found.values()]
            margin = interval(values)
            mean = f"{sum(values) / len(values):.3f}{f' +- {margin:.3f}' if margin is not None else ''}"
            print(f"{way}: {figure} {mean} ({len(values)} seeds)")
    result = {
        "command": f"python benchmarks/voice_speakers.py {' '.join(sys.argv[1:])}", "torch": torch.__version__,
        "machine": machine_facts("cpu"), "seeds": found,
    }  # fmt: skip
    path = Path(__file__).parent / "results" / "voice_speakers.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
