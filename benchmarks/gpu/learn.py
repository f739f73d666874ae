"""What real trainings learn on this GPU within a minute each: held-out figures by time; at most five minutes.

The VAE `flux` at 256 pixels from random weights and from the linear start, the vocoder, and the voice `fast`, on the
data that `gpu.sh prepare` has made. They run kernel by kernel, as compiling would take most of the time, and each is
stopped by --max-time.
"""

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gpu.alive import NEEDED
from gpu.commands import gputrain, rows_of, steps_of
from gpu.runner import Context, Figures, Part, Subcommand, main
from gputrain.bench.runner import NotMeasured

SECONDS = 68  # Of each training, with its start, its evaluations and its end.
LEAST_SECONDS = 20  # With less time left, a training would say nothing.
EVALUATIONS = {"vae": "eval/psnr_db", "vocoder": "eval/mel_distance", "tts": "eval/mel_distance"}
OPTIONS = (
    "--eval-first", "--no-use-torch-compile", "--no-plan", "--no-report", "--log-every-steps", 10,
    "--sample-every-steps", 0,
    "--checkpoint-every-minutes", 0, "--evaluate-every-epochs", 0, "--checkpoint-every-steps", 0,
    "--warmup-steps", 20, "--ema-decay", 0.99,
)  # fmt: skip
TRAININGS: dict[str, tuple[str, tuple[object, ...], int]] = {  # The kind, its options, and steps between evaluations.
    "flux 256 px, random start": ("vae", ("--preset", "flux", "--image-size", 256, "--batch-size", 16,
                                          "--num-epochs", 10_000, "--start", "random", "--learning-rate", 2e-4), 40),
    "flux 256 px, linear start": ("vae", ("--preset", "flux", "--image-size", 256, "--batch-size", 16,
                                          "--num-epochs", 10_000, "--start", "linear", "--learning-rate", 2e-4), 40),
    "vocoder": ("vocoder", ("--config", "base_hifi_gpu.yaml", "--config", Path(__file__).with_name("learn.yaml"),
                            "--num-workers", 4, "--val-num", 4), 100),
    "voice fast": ("tts", ("--preset", "fast", "--batch-size", 32, "--num-epochs", 0, "--num-steps", 100_000), 100),
}  # fmt: skip
TINY: dict[str, tuple[object, ...]] = {
    "vae": ("--channels", "32,32,32,32", "--image-size", 32, "--batch-size", 2, "--max-steps", 4),
    "vocoder": ("--upsample-initial-channel", 64, "--batch-size", 1, "--crop-mel-frames", 16, "--max-steps", 2,
                "--discriminators", "mpd", "--discriminator-periods", "3", "--val-num", 1),
    "tts": ("--discriminator-channels", 8, "--batch-size", 2, "--max-steps", 2),
}  # fmt: skip


def learn(name: str, context: Context) -> Figures:
    """Trains for a while. Returns the first, the last and all held-out figures, with their times."""
    kind, options, every = TRAININGS[name]
    data, run = context.data / kind, context.scratch / "run"
    if not data.is_dir():
        raise NotMeasured("there are no prepared data of this kind (gpu.sh prepare)")
    seconds = int(min(SECONDS, context.seconds_left() - 4))
    if seconds < LEAST_SECONDS:
        raise NotMeasured("too little time is left")
    words = [f"train-{kind}", "--data-path", data, "--output-dir", run, "--device", context.device, *OPTIONS, *options]
    words += ["--evaluate-every-steps", 2, *TINY[kind]] if context.smoke else ["--evaluate-every-steps", every]
    began = time.perf_counter()
    try:
        gputrain(*words, "--max-time", time_of(seconds))
    finally:
        if (run / "metrics.jsonl").is_file():
            context.note(curves(run, EVALUATIONS[kind]))
    made = steps_of(run)
    return {"steps": made[-1]["step"], "seconds_a_step": made[-1]["speed/seconds_per_step"],
            "wall_seconds": time.perf_counter() - began}  # fmt: skip


def time_of(seconds: int) -> str:
    return f"{seconds // 60}m{seconds % 60}s" if seconds >= 60 else f"{seconds}s"


def curves(run: Any, figure: str) -> Figures:
    """Returns the held-out figures of a run by step and second, with the first and the last one."""
    rows, name = [row for row in rows_of(run) if figure in row], figure.removeprefix("eval/")
    found: Figures = {"evaluations": rows}
    if rows:
        first, last = rows[0], rows[-1]
        found |= {f"{name}_first": first[figure], f"{name}_last": last[figure], "at_second": last["seconds"]}
    return found


def parts(smoke: bool) -> Sequence[Part]:
    return [Part(name, SECONDS + 8, partial(learn, name), NEEDED[kind]) for name, (kind, _, _) in TRAININGS.items()]


if __name__ == "__main__":
    main(Subcommand("learn", __doc__, 300, parts, needs_data=True))
