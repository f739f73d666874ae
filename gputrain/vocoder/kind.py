"""The vocoder as the commands know it, and what is planned, measured and trained of it. Imports no torch until one of
its functions is called.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gputrain import kinds
from gputrain.audio.config import ClipEvaluation, Sound
from gputrain.config import leaves
from gputrain.engine.stop import format_duration
from gputrain.formatting import counted, format_number
from gputrain.planner.kind_work import (
    CUDA_GRAPHS,
    NO_DATA,
    SLOW_TO_COMPILE,
    SWITCHES,
    KindWork,
    PlannedTraining,
    StepTraits,
    SyntheticWork,
)
from gputrain.vocoder import openvpi
from gputrain.vocoder.config import (
    FP32_BECAUSE,
    PUBLISHED,
    SAMPLING_RATE,
    ExcerptEvaluation,
    PlanVocoder,
    TrainVocoder,
    Vocode,
)

if TYPE_CHECKING:
    from gputrain.audio.prepare import SoundPrepareReport
    from gputrain.planner.kind_work import PlanTarget
    from gputrain.planner.memory.fit import Fit, MemoryBudget
    from gputrain.vocoder.data import VocoderTraining
    from gputrain.vocoder.prepare import SoundReport


# ------------------------------------------------------------------------------------------------------------ data


def prepare_recordings(settings: Any) -> kinds.DataWork:
    from gputrain.vocoder.prepare import check_output, prepare_sound, validate_sounds, vocoder_prepare_config

    config = vocoder_prepare_config(settings.sound)

    def figures(report: SoundPrepareReport) -> dict[str, object]:
        return kinds.prepared_counts(report, "duration", format_duration(3600 * report.hours))

    def findings(folder: Path, processes: int) -> list[str]:
        return validate_sounds(folder, config.sampling_rate, num_workers=processes).findings

    known = leaves(TrainVocoder)
    needed = {known["audio_sample_rate"]: config.sampling_rate, known["hop_size"]: config.hop_size}
    words = [word for leaf, value in needed.items() if value != leaf.default for word in (leaf.flag, str(value))]
    return kinds.DataWork(prepare_sound, config, figures, findings, tuple(words), partial(check_output, recipe=config))


def validate_recordings(settings: Any) -> kinds.DataWork:
    from gputrain.vocoder.prepare import validate_sounds

    return kinds.DataWork(validate_sounds, settings.audio_sample_rate or SAMPLING_RATE, sound_figures)


def sound_figures(report: SoundReport) -> dict[str, object]:
    from gputrain.data_in.preparation import format_range

    figures: dict[str, object] = {"refused": len(report.refused), **report.account()}
    if (total := report.total) is not None:
        pitch = total.pitch_hz
        figures = {
            "recordings": total.recordings,
            "duration": format_duration(3600 * total.hours),
            **figures,
            "rates": ", ".join(f"{count} of {rate} Hz" for rate, count in total.rates.items()),
            "seconds": format_range(total.seconds),
            "clipped": counted(total.clipped, "recording")
            + f", {format_number(100 * total.clipped_share)} % of all samples",
            "silence": f"{100 * total.silent_share:.3g} %",
            "voiced": f"{100 * total.voiced_share:.3g} %",
            "pitch": f"{pitch[0]:.0f} to {pitch[1]:.0f} Hz (nine tenths of it)" if pitch else "none",
        }
    return figures


# --------------------------------------------------------------------------------- planning, benchmarks and training

LEAST_FRAMES = 16  # Shortest crop that is proposed.


class VocoderWork(KindWork[TrainVocoder]):
    """The work of planning, measuring and training a vocoder."""

    kind, item = "vocoder", "crop"
    traits = StepTraits(generator_is_1d=True, eager_because=SLOW_TO_COMPILE, fp32_because=FP32_BECAUSE)
    switches = (*SWITCHES, CUDA_GRAPHS)

    def open_data(self, settings: TrainVocoder) -> VocoderTraining:
        from gputrain.vocoder.data import VocoderTraining, open_training_data

        return VocoderTraining.of(settings, open_training_data(settings))

    def target(self, settings: TrainVocoder) -> PlanTarget:
        from gputrain.vocoder.recipe import target

        return target(settings)

    def fallbacks(self, settings: TrainVocoder, budget: MemoryBudget, found: Fit) -> dict[str, TrainVocoder]:
        model, shorter = settings.model, settings.data.crop_mel_frames // 2
        fast = replace(settings.discriminators, discriminators=("fast_mrd", "fast_mpd"))
        changes = {
            **super().fallbacks(settings, budget, found),
            "--discriminators fast_mrd,fast_mpd": replace(settings, discriminators=fast),
        }
        if shorter >= LEAST_FRAMES:
            data = replace(settings.data, crop_mel_frames=shorter)
            changes[f"--crop-mel-frames {shorter}"] = replace(settings, data=data)
        if model.upsample_initial_channel % 64 == 0:
            narrower = model.upsample_initial_channel // 2
            narrow = replace(model, upsample_initial_channel=narrower)
            changes[f"--upsample-initial-channel {narrower}"] = replace(settings, model=narrow)
        return changes

    def begins(self, settings: TrainVocoder) -> dict[str, int]:
        losses = settings.losses
        return {
            "training of the discriminators (discriminator_start)": losses.discriminator_start,
            "training of the generator (discriminator_only_steps)": losses.discriminator_only_steps,
        }

    def planned(self, settings: Any) -> PlannedTraining:
        from gputrain.vocoder.data import VocoderTraining
        from gputrain.vocoder.store import open_sounds

        columns = {"crop_mel_frames": settings.data.crop_mel_frames, "batch_size": settings.schedule.global_batch_size}
        data, items = settings.data, None
        if data.data_path != NO_DATA:
            items = len(VocoderTraining.of(settings, open_sounds(data.data_path, data.held_out_share)))
        return PlannedTraining(self, settings, columns, items)

    def synthetic(self, settings: TrainVocoder, **options: Any) -> SyntheticWork:
        from gputrain.vocoder.data import synthetic_crops
        from gputrain.vocoder.recipe import VocoderRecipe

        parts = [f"{settings.model.upsample_initial_channel} channels", *settings.discriminators.discriminators]
        return SyntheticWork(
            title=f"{', '.join(parts)}, {settings.schedule.batch_size} crops of {settings.crop_seconds:.2f} s",
            recipe=partial(VocoderRecipe, settings),
            batch=partial(synthetic_crops, settings),
            seconds=settings.crop_seconds,
        )


# -------------------------------------------------------------------------------------------------- trained models


def evaluate(settings: Any, **shared: Any) -> Any:
    from gputrain.vocoder.evaluate import evaluate_folder

    clips, excerpts = settings.clips, settings.excerpts
    return evaluate_folder(
        settings.weights, settings.data_path, max_clips=clips.max_clips, seconds=excerpts.clip_seconds, **shared
    )


def export(settings: Any, progress: kinds.ReportProgress, *, format: str) -> kinds.Exported:
    import torch

    from gputrain.vocoder.export import export_onnx, export_openvpi, export_oudep
    from gputrain.vocoder.load import load_vocoder

    loaded = load_vocoder(settings.weights, torch.device("cpu"))
    if format == "openvpi":
        return export_openvpi(loaded, settings.output_dir, progress)
    write = export_oudep if format == "oudep" else export_onnx
    return write(loaded, settings.output_dir, settings.name or "vocoder", progress)


def vocode(settings: Vocode, output: kinds.CommandOutput) -> None:
    from gputrain.vocoder.vocode import vocode_files

    with output.progress("vocoding") as progress:
        done = vocode_files(settings, progress=progress)
    counts = {"written": len(done.written), "left out": len(done.refused)}
    output.figures(f"Vocoded into {settings.output_dir}", counts)


# -------------------------------------------------------------------------------------- demo, on synthetic singing

RATE_HZ = 22050
CLIPS, SONGS = 32, 4  # Clips to train on (some are held out), and songs to synthesise.
STEPS, STEPS_ALONE = 420, 300  # Steps in all, and steps before the discriminators start.
SEMITONES = 5
# The rate and hop are half of a vocoder's usual ones. The pitch range is that of the synthetic voices.
FRAMES = ["--audio-sample-rate", RATE_HZ, "--hop-size", 256]
PITCH = ["--f0-min", 80, "--f0-max", 700]
# With the configuration `tiny`, a step takes less than a second of a core.
MODEL = """
audio_num_mel_bins: 80
fft_size: 1024
win_size: 1024
upsample_rates: [8, 8, 2, 2]
upsample_kernel_sizes: [16, 16, 4, 4]
"""


def synthesise_singing(folder: Path) -> None:
    from gputrain.audio.synthetic import write_clips

    write_clips(folder / "recordings", range(CLIPS), RATE_HZ)
    write_clips(folder / "songs", range(CLIPS, CLIPS + SONGS), RATE_HZ)


def demo_commands(folder: Path) -> list[kinds.Words]:
    data, run, export, songs = (folder / name for name in ("data", "run", "export", "songs"))
    (folder / "small.yaml").write_text(MODEL, encoding="utf-8")
    prepare = ["--input-dir", folder / "recordings", "--output-dir", data, *FRAMES, *PITCH]
    train = [
        "--val-num", 4, "--num-steps", STEPS, "--discriminator-start", STEPS_ALONE,
        "--discriminator-optimizer", "adamw", "--learning-rate", 2e-3, "--discriminator-learning-rate", 5e-4,
        "--warmup-steps", 20, "--ema-decay", 0.95, "--evaluate-every-steps", STEPS, "--checkpoint-every-steps", 0,
        "--sample-every-steps", STEPS // 2, "--eval-first", "--resume-from", "auto",
    ]  # fmt: skip
    vocode = ["vocode", "--model", run, "--input", songs, *PITCH]
    onnx = ["export", "--format", "onnx", "--model", run, "--output-dir", folder / "onnx"]
    return [
        ["prepare-data", "--kind", "vocoder", *prepare],
        ["validate", "--kind", "vocoder", "--input-dir", data, "--audio-sample-rate", RATE_HZ,
         "--output-file", folder / "validation.json"],
        ["train-vocoder", "--data-path", data, "--output-dir", run, *FRAMES, "--config", "tiny",
         "--config", folder / "small.yaml", *train],
        ["evaluate", "--model", run, "--data-path", data, "--json", folder / "evaluation.json"],
        ["export", "--format", "openvpi", "--model", run, "--output-dir", export],
        onnx,
        [*vocode, "--output-dir", folder / "sung"],
        [*vocode, "--output-dir", folder / "sung_higher", "--shift-semitones", SEMITONES],
    ]  # fmt: skip


def demo_results(folder: Path) -> dict[str, object]:
    from gputrain.report.records import evaluated

    mel = evaluated(folder / "run", "mel_distance")
    figures = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
    return {
        "mel distance before training": mel[0],
        "mel distance after training": f"{mel[-1]:.4g}, on held-out clips",
        "error of the pitch": f"{figures['f0_rmse_cents']:.0f} cents",
        "error of the pitch an octave higher": f"{figures['f0_rmse_cents_up_12']:.0f} cents",
        "look at": folder / "run" / "samples" / f"spectrograms_step_{STEPS:08d}.png",
        "listen to": f"{folder / 'songs'}, {folder / 'sung'} and "
        f"{folder / 'sung_higher'} ({SEMITONES} semitones higher)",
        "for openvpi's tools": folder / "export",
        "for DiffSinger and OpenUtau": folder / "onnx",
        "next": "gputrain prepare-data --kind vocoder --input-dir YOUR_RECORDINGS --output-dir data/vocoder, then "
        "gputrain train-vocoder --config base_hifi_gpu.yaml --data-path data/vocoder --output-dir outputs/vocoder",
    }


KIND = kinds.ModelKind(
    name="vocoder",
    title="a vocoder",
    panel="Vocoder",
    help="Train an NSF-HiFiGAN vocoder on prepared recordings.",
    bench_help="Time a step of train-vocoder in fp32, adding TF32, 16 bit, channels_last, compile and CUDA graphs.",
    train=TrainVocoder,
    plan=PlanVocoder,
    work=VocoderWork,
    data="recordings",
    media="audio",
    prepared=dict.fromkeys(("manifest.jsonl", "journal.jsonl"), frozenset({"sampling_rate", "hop_size"})),
    prepare=kinds.DataCommand(
        groups={"sound": Sound}, names=frozenset({"exclude", *leaves(Sound)}), work=prepare_recordings
    ),
    validate=kinds.DataCommand(names=frozenset({"exclude", "audio_sample_rate"}), work=validate_recordings),
    published=PUBLISHED,
    evaluation=kinds.EvaluateCommand(
        groups={"clips": ClipEvaluation, "excerpts": ExcerptEvaluation},
        names=frozenset({"max_clips", "clip_seconds"}),
        items="clips",
        run=evaluate,
    ),
    exporters={
        "openvpi": kinds.Exporter(partial(export, format="openvpi")),
        "onnx": kinds.Exporter(partial(export, format="onnx"), frozenset({"name"}), kinds.ONNX),
        "oudep": kinds.Exporter(partial(export, format="oudep"), frozenset({"name"}), kinds.ONNX),
    },
    commands=(
        kinds.OwnCommand(
            "vocode", Vocode,
            "Synthesise recordings, or mels with pitch, with a vocoder; at another pitch, if asked for.", vocode,
        ),
    ),
    use=("synthesise recordings", "vocode", "--input", "SONG.wav", "--output-dir", "vocoded"),
    headlines=("m_stft", "mel_distance", "f0_rmse_cents", "pesq"),
    demo=kinds.DemoSteps("recordings", synthesise_singing, demo_commands, demo_results),
    shipped=openvpi.PROFILES,
    translate=partial(openvpi.translate, of="train"),
    translate_data=partial(openvpi.translate, of="prepare"),
    keys=frozenset({"crop_mel_frames", "upsample_rates"}),
    checkpoint_suffix=".ckpt",
    packages=("skimage", "soundfile"),
    small=("--config", "tiny", "--num-steps", "0"),
)  # fmt: skip
