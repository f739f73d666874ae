"""The recogniser as the commands know it, and what is planned, measured and trained of it. Imports no torch until a
function is called.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gputrain import kinds
from gputrain.asr.config import (
    FINE_TUNING_RATE,
    FROM_SCRATCH_RATE,
    PUBLISHED,
    Model,
    PlanAsr,
    PlannedSpeech,
    TrainAsr,
    Transcribe,
)
from gputrain.audio.config import ClipEvaluation
from gputrain.formatting import counted
from gputrain.planner.kind_work import NO_DATA, SWITCHES, KindWork, PlannedTraining, StepTraits, SyntheticWork
from gputrain.speech.config import STRIDE
from gputrain.speech.data_commands import PREPARED_SPEECH, prepare_command, validate_command, write_demo_speech

if TYPE_CHECKING:
    from gputrain.asr.data import AsrTraining
    from gputrain.asr.transcribe import Transcript
    from gputrain.planner.kind_work import PlanTarget
    from gputrain.planner.memory.fit import Fit, MemoryBudget

log = logging.getLogger(__name__)

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

    def show(made: Transcript) -> None:
        if not quiet:
            output.data(f"{made.path}: {made.text}" if several else made.text)

    with output.progress("transcribing, seconds of sound") as progress:
        done = transcribe_files(settings, show=show, progress=progress)
    output.message(
        f"{counted(done.recordings, 'recording')}, {counted(done.words, 'word')}, {len(done.refused)} left out; "
        f"{done.sound_seconds:.1f} s of sound, {done.real_time_factor:.3f} s of computing for each"
    )


# --------------------------------------------------------------------------------- planning, benchmarks and training

EAGER_BECAUSE = "clips differ in length, and compiled layers of any length were not measured; ask for it to try"
GRAPHLESS_BECAUSE = "shapes change from step to step, and a graph has one"


class AsrWork(KindWork[TrainAsr]):
    """The work of planning, measuring and training a recogniser. Its sizes are UtteranceFacts."""

    kind, item = "asr", "clip"
    traits = StepTraits(
        fixed_shapes=False, is_1d=True, eager_because=EAGER_BECAUSE, graphless_because=GRAPHLESS_BECAUSE
    )
    # Without channels_last, as the model has no 2-D convolutions.
    switches = tuple(switch for switch in SWITCHES if switch[2] != "channels_last")

    def completed(self, settings: TrainAsr) -> TrainAsr:
        """Returns the settings with a learning rate, if it is left to the program. Warns of a preset without effect."""
        model = settings.model
        if model.init_from and model.preset != Model.preset:
            log.warning("preset %s has no effect: the architecture is that of %s", model.preset, model.init_from)
        if settings.schedule.learning_rate:
            return settings
        rate = FINE_TUNING_RATE if settings.model.init_from else FROM_SCRATCH_RATE
        return replace(settings, schedule=replace(settings.schedule, learning_rate=rate))

    def open_data(self, settings: TrainAsr) -> AsrTraining:
        from gputrain.asr.data import AsrTraining

        return AsrTraining.of(settings)

    def target(self, settings: TrainAsr) -> PlanTarget:
        from gputrain.asr.data import architecture_of
        from gputrain.asr.recipe import RecogniserRecipe
        from gputrain.speech.training import plan_target

        return plan_target(RecogniserRecipe, settings, architecture_of(settings, self.sizes), self.sizes.clip, STRIDE)

    def fallbacks(self, settings: TrainAsr, budget: MemoryBudget, found: Fit) -> dict[str, TrainAsr]:
        model, schedule = settings.model, settings.schedule
        changes = {
            **super().fallbacks(settings, budget, found),
            "--ema-decay 0": replace(settings, schedule=replace(schedule, ema_decay=0.0)),
        }
        if model.trains_features:
            changes["--freeze-feature-encoder"] = replace(settings, model=replace(model, freeze_feature_encoder=True))
        if model.adapters == "none":
            frozen = replace(model, adapters="lora", freeze_feature_encoder=None)
            changes["--adapters lora"] = replace(settings, model=frozen)
        if not model.init_from and model.preset == "xls-r-1b":
            changes["--preset xls-r-300m"] = replace(settings, model=replace(model, preset="xls-r-300m"))
        return changes

    def begins(self, settings: TrainAsr) -> dict[str, int]:
        return {"training of the encoder (freeze_encoder_steps)": settings.model.freeze_encoder_steps}

    def planned(self, settings: Any) -> PlannedTraining:
        from gputrain.asr.data import facts_of, open_training_speech
        from gputrain.speech.training import PlannedClips, speaking_rate

        clips = None
        if settings.data.data_path != NO_DATA:
            speech = open_training_speech(settings)
            clips, (clip_seconds, labels_a_second) = len(speech.split.mixture()), speaking_rate(speech)
            facts = PlannedSpeech(
                clip_seconds=clip_seconds,
                labels_a_second=labels_a_second,
                num_symbols=len(speech.store.format.vocabulary.symbols),
            )
            settings = replace(settings, speech=facts)
        model, planned = settings.model, PlannedClips.of(settings, of_data=clips is not None)
        columns = {
            "model": model.init_from or model.preset,
            "adapters": model.adapters,
            "batch_size": settings.schedule.global_batch_size,
            **planned.columns,
        }
        work = replace(self, sizes=facts_of(settings, settings.speech, planned.seconds))
        return PlannedTraining(work, settings, columns, clips)

    def synthetic(self, settings: TrainAsr, **options: Any) -> SyntheticWork:
        from gputrain.asr.data import facts_of, synthetic_batch
        from gputrain.asr.recipe import RecogniserRecipe

        speech = PlannedSpeech(**options)
        clip_seconds, sizes = speech.clip_seconds, facts_of(settings, speech, speech.clip_seconds)
        return SyntheticWork(
            title=f"{settings.model.preset}, {settings.schedule.batch_size} clips of {clip_seconds:g} s",
            recipe=partial(RecogniserRecipe, settings, sizes.architecture, sizes.clip),
            batch=partial(synthetic_batch, settings, sizes),
            seconds=clip_seconds,
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
        "for sherpa-onnx": folder / "sherpa",
        "next": "gputrain prepare-data --kind asr --language uz --input-dir YOUR_RECORDINGS --output-dir data/asr, "
        "then gputrain train-asr --data-path data/asr --output-dir outputs/asr "
        "--init-from facebook/wav2vec2-xls-r-300m",
    }


KIND = kinds.ModelKind(
    name="asr",
    title="a recogniser",
    panel="Speech recogniser",
    help="Train a speech recogniser (wav2vec 2.0, XLS-R, MMS) by CTC on prepared speech.",
    bench_help="Time a step of train-asr in fp32, then with TF32, 16 bit and compile added in turn.",
    train=TrainAsr,
    plan=PlanAsr,
    work=AsrWork,
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
            "transcribe",
            Transcribe,
            "Transcribe recordings of any length with a recogniser: as text, JSON with word times, and subtitles.",
            transcribe,
        ),
    ),
    use=("transcribe a recording", "transcribe", "--input", "RECORDING.wav"),
    headlines=("cer", "wer", "blank_share"),
    demo=kinds.DemoSteps("speech", write_demo_speech, demo_commands, demo_results),
    keys=frozenset({"model_type"}),
    packages=("rapidfuzz", "soundfile", "transformers"),
    load_speech_checker=kinds.imported("gputrain.asr.checking:load_checker"),
    small=("--preset", "tiny", "--batch-size", "8"),
)
