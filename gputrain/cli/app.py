"""The commands. Each hands its configuration to the package that does the work, which is imported only then."""

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gputrain import __version__
from gputrain.cli import ui
from gputrain.cli.bridge import command
from gputrain.cli.config import OF_EVALUATION, Demo, Evaluate, Export, Prepare, Validate, format_of, refuse_others
from gputrain.cli.kinds import kind_of
from gputrain.errors import UserError
from gputrain.hw.doctor.report import CheckCompatibility, check
from gputrain.tts import coqui
from gputrain.tts.commands import Speak
from gputrain.tts.config import BenchTts, PlanTts, TrainTts
from gputrain.tts.text.commands import Normalize
from gputrain.vae.config import BenchVae, PlanVae, Reconstruct, TrainVae
from gputrain.vae.config import Validate as ValidatePictures
from gputrain.vocoder import openvpi
from gputrain.vocoder.commands import BenchVocoder, PlanVocoder, Vocode
from gputrain.vocoder.config import SAMPLING_RATE, Sound, TrainVocoder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gputrain.bench.runner import BenchReport
    from gputrain.planner.model_planner import CardPlan

app = typer.Typer(
    help="Train image VAEs, vocoders and voices at the limit of the GPU at hand, and hand them over in the formats "
    "other tools load.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench = typer.Typer(no_args_is_help=True)
app.add_typer(
    bench, name="bench", rich_help_panel="Machine", help="Measure what each switch gives on this machine.",
    context_settings=app.info.context_settings,
)  # fmt: skip
plan = typer.Typer(no_args_is_help=True)
app.add_typer(
    plan, name="plan", rich_help_panel="Machine", help="See how a training goes through a card, without the card.",
    context_settings=app.info.context_settings,
)  # fmt: skip
VAE_PROFILES = Path(__file__).parents[1] / "vae" / "profiles"
to_train = partial(openvpi.translate, of="train")
to_prepare = partial(openvpi.translate, of="prepare")


def main() -> None:
    ui.run(app)


def _show_version(wanted: bool) -> None:
    if wanted:
        ui.out.print(f"gputrain {__version__}")
        raise typer.Exit


@app.callback()
def gputrain(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version.")
    ] = False,
) -> None:
    pass


@command(app, "Data", shipped=openvpi.PROFILES, translate=to_prepare)
def prepare_data(settings: Prepare) -> None:
    """Make a folder of pictures, recordings or speech ready for training. Run again, it does only what is missing."""
    from gputrain.vae.prepare import prepare_images

    if settings.kind == "vocoder":
        return prepare_recordings(settings)
    if settings.kind == "voice":
        return prepare_speech(settings)
    if settings.output_dir is None:
        return validate_pictures(settings.as_validation())
    with ui.Bar("preparing") as bar:
        report = prepare_images(settings.input_dir, settings.output_dir, progress=bar.update, **settings.choices())
    ui.print_refusals(report.quarantined)
    counts = {"made": report.made, "kept": report.kept, "held out": report.held_out, "refused": len(report.quarantined)}
    ui.print_figures(f"Prepared {settings.output_dir}", counts)
    write_report(settings.output_file, report.to_json())


def prepare_recordings(settings: Prepare) -> None:
    from gputrain.vocoder.prepare import prepare_sound, recipe_of

    assert settings.output_dir is not None  # the options have been checked
    with ui.Bar("preparing") as bar:
        report = prepare_sound(
            settings.input_dir, settings.output_dir, recipe_of(settings.sound), num_workers=settings.processes,
            progress=bar.update,
        )  # fmt: skip
    ui.print_refusals(report.refused)
    counts = {"made": report.made, "kept": report.kept, "hours": report.hours, "refused": len(report.refused)}
    ui.print_figures(f"Prepared {settings.output_dir}", counts)
    write_report(settings.output_file, report.to_json())


def prepare_speech(settings: Prepare) -> None:
    from gputrain.tts.prepare import prepare_voice, voice_prepare_config

    assert settings.output_dir is not None  # the options have been checked
    with ui.Bar("preparing") as bar:
        report = prepare_voice(
            settings.input_dir, settings.output_dir, voice_prepare_config(settings.voice, settings.sound),
            num_workers=settings.processes, progress=bar.update,
        )  # fmt: skip
    ui.print_refusals(report.refused)
    ui.print_prepared_speech(report)
    write_report(settings.output_file, report.to_json())


@command(app, "Data")
def validate(settings: Validate) -> None:
    """Decode every picture or recording of a folder, and report what it holds and what is wrong with it."""
    if settings.kind == "vocoder":
        validate_recordings(settings)
    elif settings.kind == "voice":
        validate_speech(settings)
    else:
        validate_pictures(settings)


def validate_pictures(settings: ValidatePictures) -> None:
    from gputrain.vae.validate import validate_images

    with ui.Bar("validating") as bar:
        report = validate_images(settings.input_dir, progress=bar.update, **settings.choices())
    ui.print_refusals(report.refused)
    ui.print_validation(report)
    write_report(settings.output_file, report.to_json())


def validate_recordings(settings: Validate) -> None:
    from gputrain.vocoder.validate import validate_sounds

    processes = settings.choices()["num_workers"]
    with ui.Bar("validating") as bar:
        report = validate_sounds(
            settings.input_dir, sampling_rate=settings.audio_sample_rate or SAMPLING_RATE, num_workers=processes,
            progress=bar.update,
        )  # fmt: skip
    ui.print_refusals(report.refused)
    ui.print_sounds(report)
    write_report(settings.output_file, report.to_json())


def validate_speech(settings: Validate) -> None:
    from gputrain.tts.plan import memory_by_preset
    from gputrain.tts.prepare import voice_prepare_config
    from gputrain.tts.validate import validate_voice

    recipe = voice_prepare_config(settings.voice, Sound(audio_sample_rate=settings.audio_sample_rate))
    with ui.Bar("validating") as bar:
        report = validate_voice(
            settings.input_dir, recipe, num_workers=settings.choices()["num_workers"], progress=bar.update
        )
    ui.print_refusals(report.refused)
    with ui.err.status("predicting the memory of a step"):
        memory_gb = memory_by_preset(report)
    ui.print_speech(report, memory_gb)
    write_report(settings.output_file, {**report.to_json(), "memory_gb": memory_gb})


@command(app, "Data")
def normalize(settings: Normalize) -> None:
    """Print what a voice would see of a text, of a file, or of standard input."""
    from gputrain.tts.text import commands

    for line in commands.normalize_lines(settings):
        ui.out.print(line, markup=False, highlight=False, soft_wrap=True)


@command(app, "Machine")
def check_compatibility(settings: CheckCompatibility) -> None:
    """See whether training can run here, what to mend if not, and which settings suit this machine."""
    with ui.err.status("looking at the machine") as status:
        report = check(settings.data_path, quick=settings.quick, doing=status.update)
    if settings.json:
        ui.out.print_json(json.dumps(report.to_json()))
    else:
        ui.print_checks(report.checks)
        ui.out.print("\nSettings that suit this machine:")
        ui.out.print(f"  {report.command}", markup=False, soft_wrap=True)
    if not report.can_train:
        raise typer.Exit(1)


@command(app, "Image VAE", profiles=VAE_PROFILES)
def train_vae(settings: TrainVae) -> None:
    """Train an image VAE on a folder of pictures."""
    from gputrain.vae import train

    train.train_vae(settings, ui.err)
    ui.out.print(f"The run is in {settings.saving.output_dir}. Next:", soft_wrap=True)
    ui.out.print(f"  tensorboard --logdir {settings.saving.output_dir / 'logs'}", soft_wrap=True)
    ui.out.print(f"  gputrain export --model {settings.saving.output_dir} --output-dir EXPORT", soft_wrap=True)


@command(app, "Image VAE")
def reconstruct(settings: Reconstruct) -> None:
    """Send pictures of any size through a VAE, and lay them beside their reconstructions."""
    from gputrain.vae.reconstruct import reconstruct_folder

    with ui.Bar("reconstructing") as bar:
        written = reconstruct_folder(settings, bar.update)
    ui.out.print(f"{len(written) - 1} pictures; look at {written[-1]}", soft_wrap=True)


@command(app, "Vocoder", shipped=openvpi.PROFILES, translate=to_train)
def train_vocoder(settings: TrainVocoder) -> None:
    """Train an NSF-HiFiGAN vocoder on prepared sound."""
    from gputrain.vocoder import train

    train.train_vocoder(settings, ui.err)
    ui.out.print(f"The run is in {settings.saving.output_dir}. Next:", soft_wrap=True)
    ui.out.print(f"  tensorboard --logdir {settings.saving.output_dir / 'logs'}", soft_wrap=True)
    ui.out.print(
        f"  gputrain vocode --model {settings.saving.output_dir} --input SONG.wav --output-dir sung", soft_wrap=True
    )
    ui.out.print(f"  gputrain export --model {settings.saving.output_dir} --output-dir EXPORT", soft_wrap=True)


@command(app, "Vocoder")
def vocode(settings: Vocode) -> None:
    """Sing recordings, or mels and pitches, with a vocoder; higher or lower, if asked for."""
    from gputrain.vocoder.vocode import vocode_files

    with ui.Bar("singing") as bar:
        done = vocode_files(**vars(settings), progress=bar.update)
    ui.print_figures(f"Sung into {settings.output_dir}", {"written": len(done.written), "left out": len(done.refused)})


@command(app, "Voice", translate=coqui.translate_coqui)
def train_tts(settings: TrainTts) -> None:
    """Train a VITS voice on prepared speech."""
    from gputrain.tts import train

    train.train_tts(settings, ui.err)
    run = settings.saving.output_dir
    ui.out.print(f"The run is in {run}. Next:", soft_wrap=True)
    ui.out.print(f"  tensorboard --logdir {run / 'logs'}", soft_wrap=True)
    ui.out.print(f"  gputrain speak --model {run} --text TEXT --output-file out.wav", soft_wrap=True)
    ui.out.print(f"  gputrain export --model {run} --output-dir EXPORT", soft_wrap=True)


@command(app, "Voice")
def speak(settings: Speak) -> None:
    """Speak a text with a voice, into a wave file or sentence by sentence to standard output."""
    from gputrain.tts import speak

    done = speak.speak_text(settings)
    said = "1 sentence" if done.sentences == 1 else f"{done.sentences} sentences"
    ui.err.print(
        f"{said}, {done.sound_seconds:.1f} s of sound, {done.real_time_factor:.3f} s of computing for each; "
        f"{', '.join(str(file) for file in done.files[:3])}", soft_wrap=True,
    )  # fmt: skip


@command(app, "Trained models")
def evaluate(settings: Evaluate) -> None:
    """Measure a model on held-out data: a VAE's pictures, a vocoder's sounds and pitches, a voice's speech."""
    from gputrain.cli.use import evaluate_model

    kind = kind_of(settings.model)
    refuse_others(settings, kind, OF_EVALUATION, f"{settings.model}, a model of {kind}")
    with ui.Bar("evaluating") as bar:
        title, figures, report = evaluate_model(settings, kind, bar.update)
    ui.print_figures(title, figures)
    write_report(settings.json, report)


@command(app, "Trained models")
def export(settings: Export) -> None:
    """Write a model as stock tools load it, and prove that what is read back does what ours does."""
    from gputrain.cli.use import export_model

    kind = kind_of(settings.model)
    format = format_of(settings, kind)
    with ui.Bar("exporting") as bar:
        figures, hints = export_model(settings, format, bar.update)
    ui.print_figures(f"Exported {settings.output_dir}", figures)
    for hint in hints:
        ui.out.print(hint, markup=False, soft_wrap=True)


@command(app, "Trained models")
def demo(settings: Demo) -> None:
    """From real photographs, or sound, to a trained, evaluated and exported model in a few minutes, on any machine."""
    from gputrain.cli.demo import run_demo

    run_demo(settings.output_dir, settings.kind)


@command(bench, "Machine", name="train-vae")
def bench_train_vae(settings: BenchVae) -> None:
    """Time a step of train-vae in fp32, then with TF32, bf16, channels_last, compile and lean layers added in turn."""
    from gputrain.vae.bench import bench_vae

    tell_bench(*bench_vae(settings))


@command(plan, "Machine", name="train-vae", profiles=VAE_PROFILES)
def plan_train_vae(settings: PlanVae) -> None:
    """Predict the memory of train-vae and choose its settings for any card, from the options alone."""
    from gputrain.vae.plan import plan_cards

    with ui.err.status("going through a step on shapes"):
        plans = plan_cards(settings)
    tell_plans(plans, json_wanted=settings.cards.json)


@command(bench, "Machine", name="train-vocoder")
def bench_train_vocoder(settings: BenchVocoder) -> None:
    """Time a step of train-vocoder in fp32, then with TF32, 16 bit and compile added in turn."""
    from gputrain.vocoder.bench import bench_vocoder

    tell_bench(*bench_vocoder(settings))


@command(plan, "Machine", name="train-vocoder", shipped=openvpi.PROFILES, translate=to_train)
def plan_train_vocoder(settings: PlanVocoder) -> None:
    """Predict the memory of train-vocoder and choose its settings for any card, from the options alone."""
    from gputrain.vocoder.plan import plan_cards

    with ui.err.status("going through a step on shapes"):
        plans = plan_cards(settings)
    tell_plans(plans, json_wanted=settings.cards.json)


@command(bench, "Machine", name="train-tts")
def bench_train_tts(settings: BenchTts) -> None:
    """Time a step of train-tts in fp32, then with TF32, 16 bit and compile added in turn."""
    from gputrain.tts.bench import bench_tts

    tell_bench(*bench_tts(settings))


@command(plan, "Machine", name="train-tts", translate=coqui.translate_coqui)
def plan_train_tts(settings: PlanTts) -> None:
    """Predict the memory of train-tts and choose its settings for any card, from the options alone."""
    from gputrain.tts.plan import plan_cards

    with ui.err.status("going through a step on shapes"):
        plans = plan_cards(settings)
    tell_plans(plans, json_wanted=settings.cards.json)


def tell_bench(report: "BenchReport", written: "Sequence[Path]") -> None:
    ui.print_bench(report)
    ui.out.print(f"The table is in {written[0]}, the chart in {written[1]}", soft_wrap=True)
    if not any(result.figures for result in report.results):
        raise UserError("no row could be measured", hint="the table says why")


def tell_plans(plans: "Sequence[CardPlan]", *, json_wanted: bool) -> None:
    if json_wanted:
        ui.out.print_json(json.dumps([one.to_json() for one in plans]))
    else:
        ui.print_plans(plans)


def write_report(path: Path | None, report: dict[str, Any]) -> None:
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}", hint="name a file that can be written") from None
