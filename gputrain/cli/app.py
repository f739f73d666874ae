"""Defines the commands. Each passes its settings to the package that does the work, which is imported only then."""

import contextlib
import functools
import json
from collections.abc import Iterator, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from gputrain import __version__
from gputrain.asr.commands import Transcribe
from gputrain.asr.config import BenchAsr, PlanAsr, TrainAsr
from gputrain.bench.options import BenchSettings
from gputrain.cli import data_commands, model_kind, tables, ui
from gputrain.cli.completion import complete_at_the_first_tab
from gputrain.cli.data_commands import write_report
from gputrain.cli.help_pages import WIDEST, GroupPage
from gputrain.cli.model_kind import MODEL_KINDS, format_of, kind_of
from gputrain.cli.options import command
from gputrain.cli.settings import (
    EVALUATION_OPTIONS,
    DemoSettings,
    EvaluateSettings,
    ExportSettings,
    PrepareSettings,
    ReportSettings,
    ValidateSettings,
    refuse_others,
)
from gputrain.config import Kind, read_file
from gputrain.engine.schedule import Saving
from gputrain.errors import UserError
from gputrain.hw.doctor.report import CheckCompatibility, check_machine
from gputrain.speech.text.commands import Normalize
from gputrain.tts import coqui
from gputrain.tts.commands import Speak
from gputrain.tts.config import BenchTts, PlanTts, TrainTts
from gputrain.vae.config import BenchVae, PlanVae, Reconstruct, TrainVae
from gputrain.vocoder import openvpi
from gputrain.vocoder.commands import BenchVocoder, PlanVocoder, Vocode
from gputrain.vocoder.config import TrainVocoder

app = typer.Typer(
    help="Train image VAEs, vocoders, voices and speech recognisers at the limit of the GPU at hand, and export them "
    "in the formats that other tools load.",
    cls=GroupPage,
    rich_markup_mode=None,  # Otherwise brackets in a help text, such as gputrain[f0], are taken for markup.
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": WIDEST},
)
bench = typer.Typer(cls=GroupPage, rich_markup_mode=None, no_args_is_help=True)
app.add_typer(
    bench, name="bench", rich_help_panel="Machine", help="Measure the effect of each optimisation on this machine.",
    context_settings=app.info.context_settings,
)  # fmt: skip
plan = typer.Typer(cls=GroupPage, rich_markup_mode=None, no_args_is_help=True)
app.add_typer(
    plan, name="plan", rich_help_panel="Machine", help="Plan a training for any GPU, without the GPU.",
    context_settings=app.info.context_settings,
)  # fmt: skip
VAE_PROFILES, TTS_PROFILES = (Path(__file__).parents[1] / kind / "profiles" for kind in ("vae", "tts"))
TRAIN_SETTINGS: Mapping[str, type] = {"vae": TrainVae, "vocoder": TrainVocoder, "tts": TrainTts, "asr": TrainAsr}
to_train = partial(openvpi.translate, of="train")
to_prepare = partial(openvpi.translate, of="prepare")


def main() -> None:
    complete_at_the_first_tab()
    ui.run(lambda: command_line()())


@functools.cache
def command_line() -> Any:
    """Return the parser of all commands. Called by itself, `app` would make it anew for each command line."""
    return typer.main.get_command(app)


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


# ------------------------------------------------------------------------------------------------------------ data


@command(app, "Data", shipped=openvpi.PROFILES, translate=to_prepare)
def prepare_data(settings: PrepareSettings) -> None:
    """Prepare a folder of pictures, recordings or speech for training. A second run does only what is missing."""
    data_commands.prepare(settings)


@command(app, "Data")
def validate(settings: ValidateSettings) -> None:
    """Decode every picture or recording of a folder, and report what the folder holds and which files are faulty."""
    data_commands.validate(settings)


@command(app, "Data")
def normalize(settings: Normalize) -> None:
    """Print the normalised form of a text, of a file, or of standard input, as a voice is trained on it."""
    from gputrain.speech.text import commands

    for line in commands.normalize_lines(settings):
        ui.out.print(line, markup=False, highlight=False, soft_wrap=True)
        if ui.out.quiet:  # Nobody reads the lines any more, and standard input may have no end.
            break


# --------------------------------------------------------------------------------------------------------- machine


@command(app, "Machine")
def check_compatibility(settings: CheckCompatibility) -> None:
    """Check whether this machine can train, what to repair if not, and which settings suit it."""
    with ui.err.status("examining the machine") as status:
        report = check_machine(settings.data_path, quick=settings.quick, doing=status.update)
    if settings.json:
        ui.out.print_json(json.dumps(report.to_json()))
    else:
        tables.print_checks(report.checks)
        ui.out.print("\nSettings that suit this machine:")
        ui.out.print(f"  {report.command}", markup=False, soft_wrap=True)
        tables.print_each_gpu(report.each_gpu)
    if not report.can_train:
        raise typer.Exit(1)


@command(bench, "Machine", name="train-vae")
def bench_train_vae(settings: BenchVae) -> None:
    """Time a step of train-vae in fp32, adding TF32, bf16, channels_last, compile, lean layers and CUDA graphs."""
    print_bench("vae", settings)


@command(bench, "Machine", name="train-vocoder", shipped=openvpi.PROFILES, translate=to_train)
def bench_train_vocoder(settings: BenchVocoder) -> None:
    """Time a step of train-vocoder in fp32, adding TF32, 16 bit, channels_last, compile and CUDA graphs."""
    print_bench("vocoder", settings)


@command(bench, "Machine", name="train-tts", translate=coqui.translate_coqui)
def bench_train_tts(settings: BenchTts) -> None:
    """Time a step of train-tts in fp32, adding TF32, 16 bit, channels_last and compile."""
    print_bench("tts", settings)


@command(bench, "Machine", name="train-asr")
def bench_train_asr(settings: BenchAsr) -> None:
    """Time a step of train-asr in fp32, then with TF32, 16 bit and compile added in turn."""
    print_bench("asr", settings)


def print_bench(kind: Kind, settings: BenchSettings) -> None:
    """Run the benchmark of a kind of model. Raises UserError if no row could be measured."""
    from gputrain.bench.step_bench import run_bench

    report, written = run_bench(import_module(f"gputrain.{kind}.bench").BENCH, settings)
    tables.print_bench(report)
    ui.out.print(ui.escape(f"The table is in {written[0]}, the chart in {written[1]}"), soft_wrap=True)
    if not any(result.figures for result in report.results):
        raise UserError("no row could be measured", hint="the table gives the reason for each row")


@command(plan, "Machine", name="train-vae", profiles=VAE_PROFILES)
def plan_train_vae(settings: PlanVae) -> None:
    """Predict the memory of train-vae and choose its settings for any GPU, from the options alone."""
    print_plans("vae", settings)


@command(plan, "Machine", name="train-vocoder", shipped=openvpi.PROFILES, translate=to_train)
def plan_train_vocoder(settings: PlanVocoder) -> None:
    """Predict the memory of train-vocoder and choose its settings for any GPU, from the options alone."""
    print_plans("vocoder", settings)


@command(plan, "Machine", name="train-tts", profiles=TTS_PROFILES, translate=coqui.translate_coqui)
def plan_train_tts(settings: PlanTts) -> None:
    """Predict the memory of train-tts and choose its settings for any GPU, from the options alone."""
    print_plans("tts", settings)


@command(plan, "Machine", name="train-asr")
def plan_train_asr(settings: PlanAsr) -> None:
    """Predict the memory of train-asr and choose its settings for any GPU, from the options alone."""
    print_plans("asr", settings)


def print_plans(kind: Kind, settings: PlanVae | PlanVocoder | PlanTts | PlanAsr) -> None:
    with ui.err.status("running a step on fake tensors"):
        plans = import_module(f"gputrain.{kind}.plan").plan_cards(settings)
    if settings.cards.json:
        ui.out.print_json(json.dumps([one.to_json() for one in plans]))
    else:
        tables.print_plans(plans)
        for one in plans if settings.cards.explain else ():
            tables.print_operators(one)
    tables.print_missing_costs(settings.cards.price_per_hour, plans)
    if settings.cards.chart:
        tables.draw_plans(plans, settings.cards.chart)
    if settings.cards.strict and not all(one.fit.fits for one in plans):
        raise typer.Exit(ui.NOT_PASSED)


# -------------------------------------------------------------------------------------------------------- training


@command(app, "Image VAE", profiles=VAE_PROFILES)
def train_vae(settings: TrainVae) -> None:
    """Train an image VAE on a folder of pictures."""
    from gputrain.vae import train

    with reported(settings.saving):
        train.train_vae(settings, ui.err)
    print_next_steps("vae", settings.saving.output_dir)


@command(app, "Vocoder", shipped=openvpi.PROFILES, translate=to_train)
def train_vocoder(settings: TrainVocoder) -> None:
    """Train an NSF-HiFiGAN vocoder on prepared recordings."""
    from gputrain.vocoder import train

    with reported(settings.saving):
        train.train_vocoder(settings, ui.err)
    print_next_steps("vocoder", settings.saving.output_dir)


@command(app, "Voice", profiles=TTS_PROFILES, translate=coqui.translate_coqui)
def train_tts(settings: TrainTts) -> None:
    """Train a VITS voice on prepared speech."""
    from gputrain.tts import train

    with reported(settings.saving):
        train.train_tts(settings, ui.err)
    print_next_steps("tts", settings.saving.output_dir)


@command(app, "Speech recogniser")
def train_asr(settings: TrainAsr) -> None:
    """Train a speech recogniser (wav2vec 2.0, XLS-R, MMS) by CTC on prepared speech."""
    from gputrain.asr import train

    with reported(settings.saving):
        train.train_asr(settings, ui.err)
    print_next_steps("asr", settings.saving.output_dir)


@contextlib.contextmanager
def reported(saving: Saving) -> Iterator[None]:
    """Write a report into the run folder at the end of the training in the block."""
    from gputrain.report.write import report_at_end

    with report_at_end(saving, TRAIN_SETTINGS):
        yield


def print_next_steps(kind: Kind, run: Path) -> None:
    """Print where a run is, and the commands that use its model."""
    from gputrain.engine.run_folder import CONFIG
    from gputrain.report.next_commands import model_commands

    commands = [one.line for one in model_commands(run, kind, read_file(run / CONFIG))]
    commands.append(f"tensorboard --logdir {run / 'logs'}")
    for line in (f"The run is in {run}. Next:", *(f"  {line}" for line in commands)):
        ui.out.print(ui.escape(line), soft_wrap=True)


# -------------------------------------------------------------------------------------------------- trained models


@command(app, "Image VAE")
def reconstruct(settings: Reconstruct) -> None:
    """Reconstruct pictures of any size with a VAE, and show them next to their originals."""
    from gputrain.vae.reconstruct import reconstruct_folder

    with ui.TerminalBar("reconstructing") as bar:
        written = reconstruct_folder(settings, bar.update)
    ui.out.print(ui.escape(f"{len(written) - 1} pictures; look at {written[-1]}"), soft_wrap=True)


@command(app, "Vocoder")
def vocode(settings: Vocode) -> None:
    """Synthesise recordings, or mels with pitch, with a vocoder; at another pitch, if asked for."""
    from gputrain.vocoder.vocode import vocode_files

    with ui.TerminalBar("vocoding") as bar:
        done = vocode_files(settings, progress=bar.update)
    counts = {"written": len(done.written), "left out": len(done.refused)}
    tables.print_figures(f"Vocoded into {settings.output_dir}", counts)


@command(app, "Voice")
def speak(settings: Speak) -> None:
    """Synthesise a text with a voice, into audio files or sentence by sentence to standard output."""
    from gputrain.tts import speak

    with ui.TerminalBar("speaking", shown=settings.known_beforehand and not settings.streams) as bar:
        done = speak.speak_text(settings, bar.update)
    sentences = "1 sentence" if done.sentences == 1 else f"{done.sentences} sentences"
    ui.err.print(
        f"{sentences}, {done.sound_seconds:.1f} s of sound, {done.real_time_factor:.3f} s of computing for each; "
        f"{', '.join(str(file) for file in done.files[:3])}", soft_wrap=True,
    )  # fmt: skip


@command(app, "Speech recogniser")
def transcribe(settings: Transcribe) -> None:
    """Transcribe recordings of any length with a recogniser: as text, JSON with word times, and subtitles."""
    from gputrain.asr import transcribe

    several, quiet = settings.input.is_dir(), settings.json is not None or settings.output_dir is not None

    def show(made: transcribe.Transcript) -> None:
        if not quiet:
            ui.out.print(ui.escape(f"{made.path}: {made.text}" if several else made.text), soft_wrap=True)

    with ui.TerminalBar("transcribing") as bar:
        done = transcribe.transcribe_files(settings, show=show, progress=bar.update)
    counts = {"recordings": done.recordings, "words": done.words, "left out": len(done.refused)}
    ui.err.print(
        f"{', '.join(f'{count} {name}' for name, count in counts.items())}; {done.sound_seconds:.1f} s of sound, "
        f"{done.real_time_factor:.3f} s of computing for each", soft_wrap=True,
    )  # fmt: skip


@command(app, "Trained models")
def evaluate(settings: EvaluateSettings) -> None:
    """Evaluate a model on held-out data: pictures of a VAE, sound and pitch of a vocoder, speech of a voice."""
    kind = kind_of(settings.model)
    refuse_others(settings, kind, EVALUATION_OPTIONS, f"{settings.model}, {MODEL_KINDS[kind].title}")
    with ui.TerminalBar("evaluating") as bar:
        title, figures, report = model_kind.evaluate(settings, kind, bar.update)
    tables.print_figures(title, figures)
    write_report(settings.json, report)


@command(app, "Trained models")
def export(settings: ExportSettings) -> None:
    """Write a model in the format of another program, and verify that the file read back computes the same."""
    kind = kind_of(settings.model)
    write = MODEL_KINDS[kind].exporters[format_of(settings, kind)]
    with ui.TerminalBar("exporting") as bar:
        figures, hints = write(settings, bar.update)
    tables.print_figures(f"Exported {settings.output_dir}", figures)
    for hint in hints:
        ui.out.print(hint, markup=False, soft_wrap=True)
    if repo := settings.push_to_hub:
        from gputrain.cli.publish import model_card, push_to_hub

        card = model_card(repo, kind, settings.model, figures, hints)
        with ui.err.status(f"uploading to {repo}"):
            address = push_to_hub(repo, settings.output_dir, card, private=settings.private)
        ui.out.print(ui.escape(f"Uploaded to {address}"), soft_wrap=True)


@command(app, "Trained models")
def report(settings: ReportSettings) -> None:
    """Write one HTML file about one or more runs: curves, samples, settings, memory, history."""
    from gputrain.report.write import write_report

    size = write_report(settings.runs, settings.output_file, TRAIN_SETTINGS)
    ui.out.print(ui.escape(f"{settings.output_file}: {size / 1e6:.1f} MB"), soft_wrap=True)


@command(app, "Trained models")
def demo(settings: DemoSettings) -> None:
    """Prepare, train, evaluate and export a small model in a few minutes, on any machine and on data at hand."""
    from gputrain.cli.demo import run_demo

    run_demo(settings.output_dir, settings.kind, lambda words: command_line()(words, standalone_mode=False))
