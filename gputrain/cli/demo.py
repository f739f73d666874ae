"""Demos: run every command of a kind of model in turn, as a user would type them, on data at hand."""

import json
import shlex
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import NamedTuple

from gputrain.cli import tables, ui
from gputrain.config import Kind
from gputrain.errors import UserError

Words = list[object]


class DemoSteps(NamedTuple):
    """The parts of a demo. The functions take the folder of the demo."""

    source: str  # Subfolder for the source data, by which a folder of this demo is recognised.
    make_source: Callable[[Path], None]
    commands: Callable[[Path], list[Words]]
    results: Callable[[Path], dict[str, object]]


def run_demo(folder: Path, kind: Kind, run_command: Callable[[list[str]], object]) -> None:
    """Write source, data, run, export and synthesised results into `folder`. A second run does only what is missing.

    `run_command` takes the words of a gputrain command.

    Raises UserError if the folder holds something else.
    """
    demo = DEMOS[kind]
    if folder.exists() and any(folder.iterdir()) and not (folder / demo.source).is_dir():
        raise UserError(
            f"{folder} is not empty, and holds no demo of {kind}", hint=f"--output-dir {folder.name}_{kind}, say"
        )
    began = time.monotonic()
    demo.make_source(folder)
    for line in demo.commands(folder):
        words = [str(word) for word in line]
        ui.err.print(f"\n[bold cyan]$ gputrain {shlex.join(words)}[/]", soft_wrap=True)
        run_command(words)
    ui.out.print()
    tables.print_figures(f"The demo took {time.monotonic() - began:.0f} s", demo.results(folder))


def evaluations(run: Path, name: str) -> list[float]:
    """Return a figure on held-out data at each evaluation of a run; the first is from before training."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row[f"eval/{name}"] for row in rows if f"eval/{name}" in row]


# --- the image VAE, on real photographs -------------------------------------------------------------------------------

# Photographs in scikit-image's wheel. Only one of its stereo pair is used, as the other shows the same scene.
PHOTOGRAPHS = (
    "astronaut.png", "camera.png", "chelsea.png", "coffee.png", "coins.png", "hubble_deep_field.jpg", "ihc.png",
    "moon.png", "motorcycle_left.png", "retina.jpg", "rocket.jpg",
)  # fmt: skip

SIZE = 64  # Side of a crop, in pixels.
SHARE = 0.2  # Share of the parts that is held out.


def cut_photographs(folder: Path) -> None:
    """Cut about sixty parts of 200 to 300 pixels a side, so that parts of several photographs are held out."""
    import skimage.data
    from PIL import Image

    parts = folder / "photographs"
    if parts.is_dir():
        return
    parts.mkdir(parents=True)
    for name in PHOTOGRAPHS:
        with Image.open(Path(skimage.data.__file__).parent / name) as image:
            image.thumbnail((640, 640))
            columns, rows = image.width // 200, image.height // 200
            for column, row in product(range(columns), range(rows)):
                box = (column / columns, row / rows, (column + 1) / columns, (row + 1) / rows)
                part = image.crop(tuple(int(at * size) for at, size in zip(box, 2 * image.size, strict=True)))
                part.convert("RGB").save(parts / f"{Path(name).stem}_{row}{column}.png")


def vae_commands(folder: Path) -> list[Words]:
    photographs, data, run, export = (folder / name for name in ("photographs", "data", "run", "export"))
    train = [
        "--preset", "fast", "--image-size", SIZE, "--batch-size", 4, "--num-epochs", 36, "--learning-rate", 1e-4,
        "--warmup-steps", 100, "--perceptual-weight", 0.2, "--ema-decay", 0.9, "--held-out-share", SHARE,
        "--evaluate-freq", 12, "--checkpoint-freq", 0, "--save-samples-freq", 100, "--resume-from", "auto",
    ]  # fmt: skip
    return [
        ["prepare-data", "--input-dir", photographs, "--output-dir", data, "--target-size", 256],
        ["validate", "--input-dir", data, "--output-file", folder / "validation.json"],
        ["train-vae", "--data-path", data, "--output-dir", run, *train],
        ["evaluate", "--model", run, "--data-path", data, "--json", folder / "evaluation.json"],
        ["export", "--model", run, "--output-dir", export],
        ["reconstruct", "--model", export, "--input", photographs, "--output-dir", folder / "reconstructions"],
    ]


def vae_results(folder: Path) -> dict[str, object]:
    psnr = evaluations(folder / "run", "psnr_db")
    return {
        "PSNR before training": f"{psnr[0]:.1f} dB",
        "PSNR after training": f"{psnr[-1]:.1f} dB, on held-out parts",
        "look at": folder / "reconstructions" / "sheet.png",
        "curves": f"tensorboard --logdir {folder / 'run' / 'logs'}",
        "load it": f'diffusers.AutoencoderKL.from_pretrained("{folder / "export"}")',
        "next": "gputrain train-vae --data-path YOUR_PICTURES --output-dir outputs",
    }


# --- the vocoder, on synthetic singing --------------------------------------------------------------------------------

RATE_HZ = 22050
CLIPS, SONGS = 32, 4  # Clips to train on (some are held out), and songs to synthesise.
STEPS, STEPS_ALONE = 420, 300  # Steps in all, and steps before the discriminators start.
SEMITONES = 5
# The rate and hop are half of a vocoder's usual ones. The pitch range is that of the synthetic voices: pyin
# tracks it in a quarter of the time.
FRAMES = ["--audio-sample-rate", RATE_HZ, "--hop-size", 256]
PITCH = ["--f0-min", 80, "--f0-max", 700]
# This generator and these discriminators take less than a second of a core for a step.
MODEL = [
    "--audio-num-mel-bins", 80, "--fft-size", 1024, "--win-size", 1024, "--fmax", 8000,
    "--upsample-rates", "8,8,2,2", "--upsample-kernel-sizes", "16,16,4,4", "--upsample-initial-channel", 128,
    "--resblock-kernel-sizes", "3,7", "--resblock-dilation-sizes", "1,3,5;1,3,5",
    "--discriminator-periods", "2,3", "--fast-mpd-init-channel", 2, "--fast-mrd-init-channel", 2,
    "--fast-mrd-fft-sizes", "512,1024", "--fast-mrd-hop-sizes", "128,256", "--fast-mrd-win-lengths", "512,1024",
]  # fmt: skip


def synthesise_singing(folder: Path) -> None:
    from gputrain.vocoder.synthetic import write_clips

    write_clips(folder / "recordings", range(CLIPS), RATE_HZ)
    write_clips(folder / "songs", range(CLIPS, CLIPS + SONGS), RATE_HZ)


def vocoder_commands(folder: Path) -> list[Words]:
    data, run, export, songs = (folder / name for name in ("data", "run", "export", "songs"))
    prepare = ["--input-dir", folder / "recordings", "--output-dir", data, *FRAMES, *PITCH]
    train = [
        "--crop-mel-frames", 32, "--batch-size", 8, "--val-num", 4, "--num-steps", STEPS,
        "--discriminator-start", STEPS_ALONE, "--discriminator-optimizer", "adamw", "--learning-rate", 2e-3,
        "--discriminator-learning-rate", 5e-4, "--warmup-steps", 20, "--ema-decay", 0.95, "--evaluate-steps", STEPS,
        "--checkpoint-steps", 0, "--save-samples-freq", STEPS // 2, "--resume-from", "auto",
    ]  # fmt: skip
    vocode = ["vocode", "--model", run, "--input", songs, *PITCH]
    onnx = ["export", "--format", "onnx", "--model", run, "--output-dir", folder / "onnx"]
    return [
        ["prepare-data", "--kind", "vocoder", *prepare],
        ["validate", "--kind", "vocoder", "--input-dir", data, "--audio-sample-rate", RATE_HZ,
         "--output-file", folder / "validation.json"],
        ["train-vocoder", "--data-path", data, "--output-dir", run, *FRAMES, *MODEL, *train],
        ["evaluate", "--model", run, "--data-path", data, "--json", folder / "evaluation.json"],
        ["export", "--format", "openvpi", "--model", run, "--output-dir", export],
        onnx,
        [*vocode, "--output-dir", folder / "sung"],
        [*vocode, "--output-dir", folder / "sung_higher", "--shift-semitones", SEMITONES],
    ]  # fmt: skip


def vocoder_results(folder: Path) -> dict[str, object]:
    mel = evaluations(folder / "run", "mel_distance")
    figures = json.loads((folder / "evaluation.json").read_text())
    return {
        "mel distance before training": mel[0],
        "mel distance after training": f"{mel[-1]:.4g}, on held-out clips",
        "error of the pitch": f"{figures['f0_rmse_cents']:.0f} cents",
        "error of the pitch an octave higher": f"{figures['f0_rmse_cents_up_12']:.0f} cents",
        "look at": folder / "run" / "samples" / f"spectrograms_step_{STEPS:08d}.png",
        "listen to": f"{folder / 'songs'}, {folder / 'sung'} and "
        f"{folder / 'sung_higher'} ({SEMITONES} semitones higher)",
        "curves": f"tensorboard --logdir {folder / 'run' / 'logs'}",
        "for openvpi's tools": folder / "export",
        "for DiffSinger and OpenUtau": folder / "onnx",
        "next": "gputrain prepare-data --kind vocoder --input-dir YOUR_RECORDINGS --output-dir data/vocoder, then "
        "gputrain train-vocoder --config base_hifi_gpu.yaml --data-path data/vocoder --output-dir outputs",
    }


# --- the voice, on synthetic speech -----------------------------------------------------------------------------------

SPEECH_RATE_HZ, SPEECH_CLIPS = 16000, 80
SPEECH_STEPS = 160
SENTENCE = "Singlim soʻradi."  # No clip contains exactly this sentence.


def synthesise_speech(folder: Path) -> None:
    from gputrain.speech.synthetic import write_speech

    write_speech(folder / "speech", SPEECH_CLIPS, SPEECH_RATE_HZ)


def tts_commands(folder: Path) -> list[Words]:
    speech, data, run, piper = (folder / name for name in ("speech", "data", "run", "piper"))
    kind = ["--kind", "tts", "--language", "uz", "--audio-sample-rate", SPEECH_RATE_HZ]
    train = [
        "--preset", "fast", "--discriminator-channels", 8, "--encoder-dropout", 0, "--duration-dropout", 0,
        "--batch-size", 4, "--max-padding", 0.1, "--num-epochs", 0, "--num-steps", SPEECH_STEPS,
        "--learning-rate", 1e-3, "--learning-rate-schedule", "cosine", "--warmup-steps", 20, "--gradient-clip", 5,
        "--ema-decay", 0.9, "--held-out-share", 0.1, "--evaluate-steps", SPEECH_STEPS, "--checkpoint-steps", 0,
        "--save-samples-freq", SPEECH_STEPS, "--num-audio-samples", 2, "--resume-from", "auto",
    ]  # fmt: skip
    export = ["export", "--format", "piper", "--name", "uz_UZ-demo", "--model", run, "--output-dir", piper]
    return [
        ["prepare-data", *kind, "--input-dir", speech, "--output-dir", data],
        ["validate", *kind, "--input-dir", speech, "--output-file", folder / "validation.json"],
        ["train-tts", "--data-dir", data, "--output-dir", run, *train],
        ["evaluate", "--model", run, "--data-path", data, "--json", folder / "evaluation.json"],
        export,
        ["speak", "--model", run, "--text", SENTENCE, "--output-file", folder / "said.wav"],
    ]


def tts_results(folder: Path) -> dict[str, object]:
    figures = json.loads((folder / "evaluation.json").read_text())
    distance, length = (evaluations(folder / "run", name) for name in ("mel_distance", "length_mismatch"))
    samples = folder / "run" / "samples"
    return {
        "mel distance before training": distance[0],
        "mel distance after training": f"{distance[-1]:.4g}, on held-out clips",
        "length of the speech": f"off by a factor of {length[-1]:.2f}, before training {length[0]:.2f}",
        "mel-cepstral distortion": f"{figures['mcd_db']:.1f} dB of speech from text, against recordings",
        "look at": samples / f"recording_step_{SPEECH_STEPS:08d}.png",
        "listen to": f"{folder / 'said.wav'} and {samples}; the recordings are in {folder / 'speech'}",
        "expected result": "a hum in the rhythm of speech; words take many thousands of steps",
        "curves": f"tensorboard --logdir {folder / 'run' / 'logs'}",
        "for Piper and Home Assistant": folder / "piper",
        "next": "gputrain prepare-data --kind tts --language uz --input-dir YOUR_RECORDINGS --output-dir data/tts, "
        "then gputrain train-tts --data-dir data/tts --output-dir outputs",
    }


# --- the recogniser, on the same synthetic speech ---------------------------------------------------------------------

RECOGNISER_STEPS = 400


def asr_commands(folder: Path) -> list[Words]:
    speech, data, run, export = (folder / name for name in ("speech", "data", "run", "sherpa"))
    kind = ["--kind", "asr", "--language", "uz"]
    train = [
        "--preset", "tiny", "--batch-size", 8, "--max-padding", 0.1, "--num-epochs", 0, "--num-steps", RECOGNISER_STEPS,
        "--learning-rate", 2e-3, "--warmup-steps", 50, "--mask-time-prob", 0, "--held-out-share", 0.1,
        "--evaluate-steps", 100, "--checkpoint-steps", 0, "--save-samples-freq", RECOGNISER_STEPS,
        "--resume-from", "auto",
    ]  # fmt: skip
    return [
        ["prepare-data", *kind, "--input-dir", speech, "--output-dir", data],
        ["validate", *kind, "--input-dir", speech, "--output-file", folder / "validation.json"],
        ["train-asr", "--data-dir", data, "--output-dir", run, *train],
        ["evaluate", "--model", run, "--data-path", data, "--json", folder / "evaluation.json"],
        ["export", "--format", "sherpa", "--model", run, "--output-dir", export, "--data-path", data],
        ["transcribe", "--model", run, "--input", speech / "wavs", "--json", folder / "transcripts.json",
         "--output-dir", folder / "subtitles"],
    ]  # fmt: skip


def asr_results(folder: Path) -> dict[str, object]:
    figures = json.loads((folder / "evaluation.json").read_text())
    transcripts, cer = json.loads((folder / "transcripts.json").read_text()), evaluations(folder / "run", "cer")
    return {
        "character errors before training": f"{100 * cer[0]:.0f} %",
        "character errors after training": f"{100 * figures['cer']:.1f} %, on held-out clips",
        "word errors after training": f"{100 * figures['wer']:.1f} %",
        "it reads": f"{transcripts[0]['path']}: {transcripts[0]['text']}",
        "look at": f"{folder / 'transcripts.json'} and {folder / 'subtitles'}",
        "curves": f"tensorboard --logdir {folder / 'run' / 'logs'}",
        "for sherpa-onnx": folder / "sherpa",
        "next": "gputrain prepare-data --kind asr --language uz --input-dir YOUR_RECORDINGS --output-dir data/asr, "
        "then gputrain train-asr --data-dir data/asr --output-dir outputs --init-from facebook/wav2vec2-xls-r-300m",
    }


DEMOS: dict[Kind, DemoSteps] = {
    "vae": DemoSteps("photographs", cut_photographs, vae_commands, vae_results),
    "vocoder": DemoSteps("recordings", synthesise_singing, vocoder_commands, vocoder_results),
    "tts": DemoSteps("speech", synthesise_speech, tts_commands, tts_results),
    "asr": DemoSteps("speech", synthesise_speech, asr_commands, asr_results),
}
