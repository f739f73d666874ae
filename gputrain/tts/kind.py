"""The voice as the commands know it, and what is planned, measured and trained of it. Imports no torch until one of its
functions is called.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gputrain import kinds
from gputrain.audio.config import ClipEvaluation
from gputrain.formatting import counted
from gputrain.planner.kind_work import NO_DATA, SLOW_TO_COMPILE, KindWork, PlannedTraining, StepTraits, SyntheticWork
from gputrain.speech.config import HOP_SIZE
from gputrain.speech.data_commands import PREPARED_SPEECH, RATE_HZ, prepare_command, validate_command, write_demo_speech
from gputrain.tts import coqui
from gputrain.tts.config import (
    PUBLISHED,
    PlannedSpeech,
    PlanTts,
    Speak,
    TrainTts,
    VoiceEvaluation,
)

if TYPE_CHECKING:
    from gputrain.planner.kind_work import PlanTarget
    from gputrain.planner.memory.fit import Fit, MemoryBudget
    from gputrain.tts.data import TtsTraining

# -------------------------------------------------------------------------------------------------- trained models


def evaluate(settings: Any, **shared: Any) -> Any:
    from gputrain.tts.evaluate import evaluate_voice

    return evaluate_voice(
        settings.weights,
        settings.data_path,
        max_clips=settings.clips.max_clips,
        recogniser=settings.voice.recogniser,
        **shared,
    )


def export_piper(settings: Any, progress: kinds.ReportProgress, *, sherpa: bool = False) -> kinds.Exported:
    import torch

    from gputrain.tts import export
    from gputrain.tts.load import load_voice

    voice = load_voice(settings.weights, torch.device("cpu"))
    return export.export_piper(
        voice,
        settings.output_dir,
        settings.name,
        language_code=settings.language_code,
        default_speaker=settings.default_speaker,
        sherpa=sherpa,
        progress=progress,
    )


def speak(settings: Speak, output: kinds.CommandOutput) -> None:
    from gputrain.tts.speak import speak_text

    with output.progress("speaking", shown=settings.has_whole_text and not settings.streams) as progress:
        done = speak_text(settings, progress)
    output.message(
        f"{counted(done.sentences, 'sentence')}, {done.sound_seconds:.1f} s of sound, "
        f"{done.real_time_factor:.3f} s of computing for each; "
        f"{', '.join(str(file) for file in done.files[:3])}"
    )


# --------------------------------------------------------------------------------- planning, benchmarks and training


class TtsWork(KindWork[TrainTts]):
    """The work of planning, measuring and training a voice. Its sizes are a SpeechSize."""

    kind, item = "tts", "clip"
    traits = StepTraits(fixed_shapes=False, generator_is_1d=True, eager_because=SLOW_TO_COMPILE)

    def open_data(self, settings: TrainTts) -> TtsTraining:
        from gputrain.tts.data import TtsTraining

        return TtsTraining.of(settings)

    def target(self, settings: TrainTts) -> PlanTarget:
        from gputrain.speech.training import plan_target
        from gputrain.tts.data import architecture_for
        from gputrain.tts.recipe import VoiceRecipe

        return plan_target(VoiceRecipe, settings, architecture_for(settings, self.sizes), self.sizes.clip, HOP_SIZE)

    def fallbacks(self, settings: TrainTts, budget: MemoryBudget, found: Fit) -> dict[str, TrainTts]:
        model = settings.model
        changes = dict(super().fallbacks(settings, budget, found))
        if model.preset == "high":
            changes["--preset medium"] = replace(settings, model=replace(model, preset="medium"))
        return changes

    def planned(self, settings: Any) -> PlannedTraining:
        from gputrain.speech.training import PlannedClips
        from gputrain.tts.data import facts_of, open_training_speech, size_of

        clips = None
        if settings.data.data_path != NO_DATA:
            speech = open_training_speech(settings)
            clips = len(speech.split.mixture())
            settings = replace(settings, speech=facts_of(speech))
        planned = PlannedClips.of(settings, of_data=clips is not None)
        columns = {
            "preset": settings.model.preset,
            "batch_size": settings.schedule.global_batch_size,
            **planned.columns,
        }
        size = size_of(settings.speech, planned.seconds)
        return PlannedTraining(replace(self, sizes=size), settings, columns, clips)

    def synthetic(self, settings: TrainTts, **options: Any) -> SyntheticWork:
        from gputrain.tts.data import architecture_for, size_of, synthetic_batch
        from gputrain.tts.recipe import VoiceRecipe

        speech = PlannedSpeech(**options)
        clip_seconds, sizes = speech.clip_seconds, size_of(speech, speech.clip_seconds)
        return SyntheticWork(
            title=f"{settings.model.preset}, {settings.schedule.batch_size} clips of {clip_seconds:g} s",
            recipe=partial(VoiceRecipe, settings, architecture_for(settings, sizes), sizes.clip),
            batch=partial(synthetic_batch, settings, sizes),
            seconds=clip_seconds,
        )


# --------------------------------------------------------------------------------------- demo, on synthetic speech

STEPS = 160
SENTENCE = "Singlim soʻradi."  # No clip contains exactly this sentence.


def demo_commands(folder: Path) -> list[kinds.Words]:
    speech, data, run, piper = (folder / name for name in ("speech", "data", "run", "piper"))
    kind = ["--kind", "tts", "--language", "uz", "--audio-sample-rate", RATE_HZ]
    train = [
        "--preset", "fast", "--discriminator-channels", 8, "--encoder-dropout", 0, "--duration-dropout", 0,
        "--batch-size", 4, "--max-padding", 0.1, "--num-epochs", 0, "--num-steps", STEPS,
        "--learning-rate", 1e-3, "--learning-rate-schedule", "cosine", "--warmup-steps", 20, "--gradient-clip", 5,
        "--ema-decay", 0.9, "--held-out-share", 0.1, "--evaluate-every-steps", STEPS, "--checkpoint-every-steps", 0,
        "--sample-every-steps", STEPS, "--num-audio-samples", 2, "--eval-first", "--resume-from", "auto",
    ]  # fmt: skip
    export = ["export", "--format", "piper", "--name", "uz_UZ-demo", "--model", run, "--output-dir", piper]
    return [
        ["prepare-data", *kind, "--input-dir", speech, "--output-dir", data],
        ["validate", *kind, "--input-dir", speech, "--output-file", folder / "validation.json"],
        ["train-tts", "--data-path", data, "--output-dir", run, *train],
        ["evaluate", "--model", run, "--data-path", data, "--json", folder / "evaluation.json"],
        export,
        ["speak", "--model", run, "--text", SENTENCE, "--output-file", folder / "said.wav"],
    ]


def demo_results(folder: Path) -> dict[str, object]:
    from gputrain.report.records import evaluated

    figures = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
    distance, length = (evaluated(folder / "run", name) for name in ("mel_distance", "length_mismatch"))
    samples = folder / "run" / "samples"
    return {
        "mel distance before training": distance[0],
        "mel distance after training": f"{distance[-1]:.4g}, on held-out clips",
        "length of the speech": f"off by a factor of {length[-1]:.2f}, before training {length[0]:.2f}",
        "mel-cepstral distortion": f"{figures['mcd_db']:.1f} dB of speech from text, against recordings",
        "look at": samples / f"recording_step_{STEPS:08d}.png",
        "listen to": f"{folder / 'said.wav'} and {samples}; the recordings are in {folder / 'speech'}",
        "expected result": "a hum in the rhythm of speech; words take many thousands of steps",
        "for Piper and Home Assistant": folder / "piper",
        "next": "gputrain prepare-data --kind tts --language uz --input-dir YOUR_RECORDINGS --output-dir data/tts, "
        "then gputrain train-tts --data-path data/tts --output-dir outputs/tts",
    }


KIND = kinds.ModelKind(
    name="tts",
    title="a voice",
    panel="Voice",
    help="Train a VITS voice on prepared speech.",
    bench_help="Time a step of train-tts in fp32, adding TF32, 16 bit, channels_last and compile.",
    train=TrainTts,
    plan=PlanTts,
    work=TtsWork,
    data="recordings with their texts",
    media="audio",
    prepared=PREPARED_SPEECH,
    prepare=prepare_command("tts", "audio_sample_rate"),
    validate=validate_command("tts", "audio_sample_rate"),
    published=PUBLISHED,
    evaluation=kinds.EvaluateCommand(
        groups={"clips": ClipEvaluation, "voice": VoiceEvaluation},
        names=frozenset({"max_clips", "recogniser"}),
        items="clips",
        run=evaluate,
    ),
    exporters={
        "piper": kinds.Exporter(export_piper, frozenset({"name", "language_code", "default_speaker"}), kinds.ONNX),
        "sherpa": kinds.Exporter(
            partial(export_piper, sherpa=True),
            frozenset({"name", "language_code", "default_speaker"}),
            (*kinds.ONNX, "sherpa_onnx"),
        ),
    },
    commands=(
        kinds.OwnCommand(
            "speak",
            Speak,
            "Synthesise a text with a voice, into audio files or sentence by sentence to standard output.",
            speak,
        ),
    ),
    use=("speak a text", "speak", "--text", "TEXT", "--output-file", "out.wav"),
    headlines=("mcd_sl_db", "mel_distance", "length_mismatch", "cer"),
    demo=kinds.DemoSteps("speech", write_demo_speech, demo_commands, demo_results),
    shipped=Path(__file__).parent / "profiles",
    translate=coqui.translate_coqui,
    packages=("scipy", "skimage", "soundfile"),
    small=("--preset", "fast", "--discriminator-channels", "8", "--batch-size", "8"),
)
