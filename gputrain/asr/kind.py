"""The speech recogniser as the commands know it. Imports no torch by itself."""

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gputrain import kinds
from gputrain.asr.config import PUBLISHED, BenchAsr, PlanAsr, TrainAsr, Transcribe
from gputrain.audio.config import ClipEvaluation
from gputrain.formatting import counted
from gputrain.speech.data_commands import PREPARED_SPEECH, prepare_command, validate_command, write_demo_speech

if TYPE_CHECKING:
    from gputrain.asr.transcribe import Transcript


# -------------------------------------------------------------------------------------------------- trained models


def evaluate(settings: Any, **shared: Any) -> Any:
    from gputrain.asr.evaluate import evaluate_recogniser

    return evaluate_recogniser(settings.weights, settings.data_path, max_clips=settings.clips.max_clips, **shared)


def export_recogniser(settings: Any, progress: kinds.ReportProgress, *, format: str) -> kinds.Exported:
    import torch

    from gputrain.asr import export
    from gputrain.asr.load import load_recogniser

    recogniser = load_recogniser(settings.weights, torch.device("cpu"))
    shared: dict[str, Any] = {"data_path": settings.data_path, "progress": progress}
    if format == "transformers":
        return export.export_transformers(recogniser, settings.output_dir, **shared)
    if format == "onnx":
        return export.export_onnx(recogniser, settings.output_dir, settings.name or "recogniser", **shared)
    return export.export_sherpa(recogniser, settings.output_dir, **shared)


def transcribe(settings: Transcribe, output: kinds.CommandOutput) -> None:
    from gputrain.asr.transcribe import transcribe_files

    several, quiet = settings.input.is_dir(), settings.json is not None or settings.output_dir is not None

    def show(made: "Transcript") -> None:
        if not quiet:
            output.data(f"{made.path}: {made.text}" if several else made.text)

    with output.progress("transcribing") as progress:
        done = transcribe_files(settings, show=show, progress=progress)
    output.message(
        f"{counted(done.recordings, 'recording')}, {counted(done.words, 'word')}, {len(done.refused)} left out; "
        f"{done.sound_seconds:.1f} s of sound, {done.real_time_factor:.3f} s of computing for each"
    )


# --------------------------------------------------------------------------------------- demo, on synthetic speech

STEPS = 400


def demo_commands(folder: Path) -> list[kinds.Words]:
    speech, data, run, export = (folder / name for name in ("speech", "data", "run", "sherpa"))
    kind = ["--kind", "asr", "--language", "uz"]
    train = [
        "--preset", "tiny", "--batch-size", 8, "--max-padding", 0.1, "--num-epochs", 0, "--num-steps", STEPS,
        "--learning-rate", 2e-3, "--warmup-steps", 50, "--mask-time-prob", 0, "--held-out-share", 0.1,
        "--evaluate-every-steps", 100, "--checkpoint-every-steps", 0, "--sample-every-steps", STEPS,
        "--eval-first", "--resume-from", "auto",
    ]  # fmt: skip
    return [
        ["prepare-data", *kind, "--input-dir", speech, "--output-dir", data],
        ["validate", *kind, "--input-dir", speech, "--output-file", folder / "validation.json"],
        ["train-asr", "--data-path", data, "--output-dir", run, *train],
        ["evaluate", "--model", run, "--data-path", data, "--json", folder / "evaluation.json"],
        ["export", "--format", "sherpa", "--model", run, "--output-dir", export, "--data-path", data],
        ["transcribe", "--model", run, "--input", speech / "wavs", "--json", folder / "transcripts.json",
         "--output-dir", folder / "subtitles"],
    ]  # fmt: skip


def demo_results(folder: Path) -> dict[str, object]:
    from gputrain.report.records import evaluated

    figures = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
    transcripts = json.loads((folder / "transcripts.json").read_text(encoding="utf-8"))
    cer = evaluated(folder / "run", "cer")
    return {
        "character errors before training": f"{100 * cer[0]:.0f} %",
        "character errors after training": f"{100 * figures['cer']:.1f} %, on held-out clips",
        "word errors after training": f"{100 * figures['wer']:.1f} %",
        "it reads": f"{transcripts[0]['path']}: {transcripts[0]['text']}",
        "look at": f"{folder / 'transcripts.json'} and {folder / 'subtitles'}",
        "curves": f"tensorboard --logdir {folder / 'run' / 'logs'}",
        "for sherpa-onnx": folder / "sherpa",
        "next": "gputrain prepare-data --kind asr --language uz --input-dir YOUR_RECORDINGS --output-dir data/asr, "
        "then gputrain train-asr --data-path data/asr --output-dir outputs/asr "
        "--init-from facebook/wav2vec2-xls-r-300m",
    }


KIND = kinds.ModelKind(
    name="asr",
    title="a recogniser",
    panel="Speech recogniser",
    help="Train a speech recogniser (wav2vec 2.0, XLS-R, MMS, w2v-BERT 2.0) by CTC on prepared speech.",
    bench_help="Time a step of train-asr in fp32, then with TF32, 16 bit and compile added in turn.",
    train=TrainAsr,
    plan=PlanAsr,
    bench=BenchAsr,
    work=kinds.imported("gputrain.asr.work:AsrWork"),
    data="recordings with their texts",
    media="audio",
    prepared=PREPARED_SPEECH,
    prepare=prepare_command("asr"),
    validate=validate_command("asr"),
    published=PUBLISHED,
    evaluation=kinds.EvaluateCommand(
        groups={"clips": ClipEvaluation},
        names=frozenset({"max_clips"}),
        items="clips",
        run=evaluate,
    ),
    exporters={
        "transformers": kinds.Exporter(partial(export_recogniser, format="transformers"), frozenset({"data_path"})),
        "onnx": kinds.Exporter(partial(export_recogniser, format="onnx"), frozenset({"data_path", "name"}), kinds.ONNX),
        "sherpa": kinds.Exporter(
            partial(export_recogniser, format="sherpa"), frozenset({"data_path"}), (*kinds.ONNX, "sherpa_onnx")
        ),
    },
    commands=(
        kinds.OwnCommand(
            "transcribe", Transcribe,
            "Transcribe recordings of any length with a recogniser: as text, JSON with word times, and subtitles.",
            transcribe,
        ),
    ),
    use=("transcribe a recording", "transcribe", "--input", "RECORDING.wav"),
    headlines=("cer", "wer", "blank_share"),
    selectors=("cer", "wer"),
    demo=kinds.DemoSteps("speech", write_demo_speech, demo_commands, demo_results),
    keys=frozenset({"model_type"}),
    packages=("rapidfuzz", "soundfile", "transformers"),
    load_speech_checker=kinds.imported("gputrain.asr.checking:load_checker"),
)  # fmt: skip
