"""Small run folders of every kind, as trainings write them, without training."""

import json
import math
from datetime import datetime, timezone
from pathlib import Path

import torch
from rich.console import Console

from gputrain.config import assemble, to_yaml
from gputrain.engine.metrics import Metrics
from gputrain.samples import Report, Sheet, SheetCell, SoundSample, clip_caption
from gputrain.vae.config import TrainVae
from tests.toy import cpu_runtime

RATE_HZ = 16000
KINDS = ("vae", "vocoder", "tts", "asr")
SCORES = {"vae": "psnr_db", "vocoder": "m_stft", "tts": "mcd_sl_db", "asr": "cer"}
TRANSCRIPTS = "clip: a/1.wav\ntext: good day\nread: god day\n\nclip: <b>2.wav\ntext: yes\nread: \n"
PLAN = {
    "settings": {"device": {"value": "cpu", "reason": "asked for"}, "compile": {"value": False, "reason": "slow"}},
    "micro_batch": {"model": 4},
    "prediction": {"parts": {"parameters": 0.5, "gradients": 0.25, "activations": 1.25}, "budget_gb": 4.0},
    "measured": {"peak_gb": 2.5},
    "events": [{"step": 3, "check": "rise", "message": "the loss rose"}],
}


def time_now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def start_row(step: int, **others: object) -> dict:
    machine = {"device": "Some CPU, 2 cores", "torch": "2.9.0", "gputrain": "1.0", "python": "3.11"}
    return {
        "time": "2026-01-02T03:04:05+00:00", "event": "start", "step": step, "last_step": 40, "logged_step": step,
        "machine": machine, "host": "elsewhere", "process": 1, "changes": {}, **others,
    }  # fmt: skip


def end_row(step: int, outcome: str = "finished", message: str = "") -> dict:
    return {"time": "2026-01-02T04:04:05+00:00", "event": "end", "step": step, "outcome": outcome, "message": message}


def write_rows(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def metric_rows(kind: str, steps: int) -> list[dict]:
    units = {"vae": "images", "vocoder": "crops"}
    rows = [{"step": 0, "epoch": 0, "seconds": 0.5, f"eval/{SCORES[kind]}": 3.0}]
    for step in range(1, steps + 1):
        loss = 2 / step
        rows.append({
            "step": step, "epoch": step // 10, "seconds": float(step), f"loss/model/{kind}": loss,
            f"speed/{units.get(kind, 'clips')}_per_second": 5.0, "speed/seconds_per_step": 0.2,
            "memory/peak_gb": 2.5, "learning_rate": 1e-3,
        })  # fmt: skip
        if step % 10 == 0:
            rows.append({"step": step, "epoch": 1, "seconds": float(step), f"eval/{SCORES[kind]}": 3 + loss})
    return rows


def make_run(folder: Path, kind: str, *, steps: int = 40, seed: int = 0) -> Path:
    """Writes a run folder with metrics, a plan, a history, and samples of two steps."""
    folder.mkdir(parents=True)
    write_samples(folder, kind, seed)
    write_rows(folder / "metrics.jsonl", metric_rows(kind, steps))
    (folder / "plan.json").write_text(json.dumps(PLAN))
    write_rows(folder / "history.jsonl", [start_row(0), end_row(steps)])
    if kind == "vae":
        settings = assemble(TrainVae, {"data_path": "photos", "output_dir": str(folder), "batch_size": 4})
        (folder / "config.yaml").write_text(to_yaml(settings))
    else:
        (folder / "config.yaml").write_text(f"kind: {kind}\ndata_path: my data\noutput_dir: {folder}\nseed: {seed}\n")
    return folder


def write_samples(folder: Path, kind: str, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    with Metrics(folder, Console(quiet=True), cpu_runtime(), unit="items", first_step=0, last_step=40) as metrics:
        for step in (20, 40):
            metrics.report(step, 1, "samples", samples(kind, step, generator))


def samples(kind: str, step: int, generator: torch.Generator) -> Report:
    def picture(height: int = 32) -> torch.Tensor:
        return torch.randint(0, 255, (height, 32, 3), dtype=torch.uint8, generator=generator)

    if kind == "asr":
        wave_T = torch.linspace(-0.5, 0.5, RATE_HZ)
        recordings = {"clip_2": SoundSample(wave_T, RATE_HZ, clip_caption("<b>2.wav", "yes"))}
        return Report(texts={"transcripts": TRANSCRIPTS}, recordings=recordings)
    if kind == "vae":
        rows = [[SheetCell(picture(), name) for name in ("a.png", "<i>.png")],
                [SheetCell(picture(), f"{step + number}.5 dB") for number in range(2)]]  # fmt: skip
        return Report(pictures={"reconstructions": Sheet(["original", "reconstruction"], rows)})
    wave_T = torch.sin(torch.arange(RATE_HZ // 2) * 2 * math.pi * 440 / RATE_HZ) / 2
    return Report(
        pictures={"spectrograms": Sheet(["recording"], [[SheetCell(picture())]])},
        sounds={"clip_1": SoundSample(wave_T, RATE_HZ, "what <is> said & sung", 0.5 * wave_T)},
    )
