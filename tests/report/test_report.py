"""Whole reports: what is in them for every kind, what is escaped, limits, and the report at the end of a run."""

import contextlib
import io
import json
import random
import re
import shlex
import shutil
from base64 import b64decode
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image
from rich.console import Console

from gputrain.cli.app import app, command_line, print_next_steps
from gputrain.cli.options import settings_of
from gputrain.engine.metrics import Metrics
from gputrain.engine.schedule import Saving
from gputrain.engine.stop import format_duration
from gputrain.errors import Stopped
from gputrain.kinds import kinds
from gputrain.report import page as write
from gputrain.report.curves import COLOURS
from gputrain.report.media import MediaBudget
from gputrain.report.page import (
    RunView,
    comparison,
    make_page,
    next_commands,
    report_at_end,
    unique_names,
    write_report,
)
from gputrain.report.records import read_run
from gputrain.report.settings_table import run_parts, settings_table
from gputrain.samples import Report, Sheet, SheetCell
from tests.command import gputrain_here
from tests.report.runs import KINDS, PLAN, end_row, make_run, metric_rows, start_row, write_rows
from tests.tables import each_row
from tests.toy import cpu_runtime

VOID = {"meta", "link", "img", "input", "br"}


class Checked(HTMLParser):
    """Collects tags, and fails where they are not closed in order or something is loaded from elsewhere."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict]] = []
        self.words: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.tags.append((tag, values))
        for name in ("src", "href"):
            assert values.get(name, "data:").startswith(("data:", "#")), values[name]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] not in (["style"], ["script"]):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def all(self, tag: str) -> list[dict]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return {kind: make_run(folder / f"{kind}_run", kind) for kind in KINDS}


def page_of(*folders: Path, budget: MediaBudget | None = None) -> Checked:
    records = [read_run(folder, name) for folder, name in zip(folders, unique_names(folders), strict=True)]
    return Checked(make_page(records, budget or MediaBudget.of(30)))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_figures_curves_samples_and_commands(runs, kind):
    page = page_of(runs[kind])
    assert "finished" in page.text
    assert "predicted peak 2.00 GB, measured peak 2.50 GB of the whole process" in page.text
    assert "the loss rose" in page.text
    assert f"gputrain train-{kind} --config {runs[kind] / 'config.yaml'} --resume-from auto" in page.text
    charts = [attributes for attributes in page.all("svg") if attributes.get("aria-label")]
    assert len(charts) >= 6
    assert all(image["alt"] for image in page.all("img"))
    if kind == "asr":
        assert "a/1.wav" in page.text
        assert page.text.count("<b>2.wav") == 1  # It is a name, not markup.
        assert "o" in [word.strip() for word in page.words]  # The letter that "god day" misses stands alone.
        assert "12 %" in page.text
        (player,) = page.all("audio")  # The clip without a recording has none.
        assert player["aria-label"] == "recording of <b>2.wav"
        assert soundfile.info(io.BytesIO(b64decode(player["src"].partition(",")[2]))).duration == 1.0
        assert not page.all("img")
    if kind == "vae":
        shown = [word.strip() for word in page.words if word in ("original", "step 20", "step 40")]
        assert shown == 2 * ["original", "step 40", "step 20"]  # The newest stands beside the original.
        assert "40.5 dB" in page.text
        assert len(page.all("img")) == 6
        assert "picture 1, reconstruction, step 20, 20.5 dB" in [image["alt"] for image in page.all("img")]
    if kind in ("vocoder", "tts"):
        sounds = page.all("audio")
        assert [sound["aria-label"].split(" of ")[0] for sound in sounds] == ["recording", "step 40", "step 20"]
        assert [button["aria-pressed"] for button in page.all("button") if button.get("class") == "hear"] == [
            "false", "true", "false",
        ]  # fmt: skip
        assert [sound["class"] for sound in sounds] == ["", "chosen", ""]
        assert all(sound["src"].startswith("data:audio/wav;base64,") for sound in sounds)
        assert "what <is> said & sung" in page.text
        assert len(page.all("img")) == 5  # A spectrogram of each, and a sheet of each step.


def test_samples_come_before_curves_and_open_at_full_size(tmp_path):
    """Each picture is a button that the script enlarges, and the file holds it as large as the sample is."""
    folder = make_run(tmp_path / "run", "vae")
    for path in (folder / "samples").iterdir():
        path.unlink()
    levels = torch.randint(0, 255, (2, 700, 900, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    sheet = Sheet(["original", "reconstruction"], [[SheetCell(levels[0])], [SheetCell(levels[1], "9.9 dB")]])
    with Metrics(folder, Console(quiet=True), cpu_runtime(), unit="items", first_step=0, last_step=40) as metrics:
        metrics.report(7, 1, "samples", Report(pictures={"reconstructions": sheet}))
    write_rows(folder / "metrics.jsonl", metric_rows("vae", 40))  # They began anew.
    page = page_of(folder)
    places = [values["id"] for tag, values in page.tags if tag == "section"]
    assert places.index("samples") < places.index("curves")
    inside = [inner for outer, inner in zip(page.tags, page.tags[1:], strict=False) if "enlarge" in str(outer)]
    assert [tag for tag, _ in inside] == ["img", "img"]
    for (_, image), expected_HW3 in zip(inside, levels, strict=True):
        with Image.open(io.BytesIO(b64decode(image["src"].partition(",")[2]))) as shown:
            assert (str(shown.width), str(shown.height)) == (image["width"], image["height"]) == ("900", "700")
            error = np.abs(np.asarray(shown).astype(float) - expected_HW3.numpy()).mean()
        assert error < 8  # A file of 4:2:0 colours would be several times as far from noise.
    (dialog,) = page.all("dialog")
    assert dialog["aria-labelledby"] in [title.get("id") for title in page.all("h2")]
    assert all(border["aria-label"] for border in page.all("input") if border.get("type") == "range")
    assert not [name for _, values in page.tags for name in values if name.startswith("on") or name == "style"]


def test_runs_are_compared(runs, tmp_path):
    other = make_run(tmp_path / "vae_run", "vae", steps=30, seed=1)
    text = (other / "config.yaml").read_text().replace("batch_size: 4", "batch_size: 32")
    (other / "config.yaml").write_text(text)
    page = page_of(runs["vae"], other)
    assert "2 runs compared" in page.text
    table = settings_table([read_run(runs["vae"]), read_run(other)])
    assert [(row.name, row.values) for row in table.differing] == [("batch_size", ["4", "32"])]
    assert [row["class"] for row in page.all("tr") if "class" in row] == 2 * ["differs"]
    curves = [group for group in page.all("g") if group.get("class", "").startswith("run r1 c1")]
    assert len(curves) > 6
    data = [json.loads(figure["data-chart"])["curves"] for figure in page.all("figure") if "data-chart" in figure]
    assert {"".join(curve["letter"] for curve in curves) for curves in data} == {"AB"}


def with_best(folder, step: int, figures: dict[int, dict[str, float]]):
    """A run whose checkpoint_best.pt is that of a step, with these figures on held-out data."""
    make_run(folder, "vae")
    torch.save({"progress": {"step": step}}, folder / "checkpoint_best.pt")
    rows = [{"step": at, **{f"eval/{name}": value for name, value in row.items()}} for at, row in figures.items()]
    write_rows(folder / "metrics.jsonl", rows)
    return read_run(folder)


def test_the_figure_at_the_head_is_that_of_the_best_checkpoint(tmp_path):
    """The evaluation before the first step, however good, is of no checkpoint."""
    psnr = {0: 30.0, 10: 20.0, 20: 25.0, 30: 24.0}
    record = with_best(tmp_path / "run", 20, {step: {"psnr_db": value} for step, value in psnr.items()})
    head = RunView(record, 0, MediaBudget.of(1)).headline
    assert (head.title, head.value) == ("PSNR on held-out data", "25 dB")
    assert head.detail == "at step 20, in checkpoint_best.pt · 30 dB at step 0 · 24 dB at step 30, the last"
    record.best_step = None
    head = RunView(record, 0, MediaBudget.of(1)).headline
    assert (head.value, head.detail) == ("24 dB", "at step 30, the last · 30 dB at step 0")


@each_row(
    # The other run's values; which run is the best (-1: none).
    ({"psnr_db": 22.9}, 0),  # By more than the 2 dB from the evaluation before.
    ({"psnr_db": 23.1}, -1),
    ({"psnr_db": 29.0}, -1),  # It has a single evaluation, by which its noise is unknown.
    ({"cer": 0.25, "cer_low": 0.2, "cer_high": 0.3}, 0),  # The interval of the better run counts.
    ({"cer": 0.19, "cer_low": 0.1, "cer_high": 0.3}, -1),
    ({"cer": 0.12, "cer_low": 0.11, "cer_high": 0.14}, 1),
    ({"cer": 0.15, "cer_low": 0.1, "cer_high": 0.2}, -1),
)
def test_a_difference_within_the_noise_is_marked_as_nobodys(tmp_path_factory, other, best):
    rates = {"cer_low": 0.1, "cer_high": 0.2}
    figures = {0: {"psnr_db": 23.0, "cer": 0.5}, 10: {"psnr_db": 25.0, "cer": 0.15}, 20: {"psnr_db": 24.0, "cer": 0.16}}
    folder = tmp_path_factory.mktemp("runs")
    first = with_best(folder / "first", 10, {step: {**row, **rates} for step, row in figures.items()})
    (found,) = comparison([first, with_best(folder / "second", 7, {7: other})])
    assert found.best == best


def test_training_and_held_out_values_of_one_figure_share_a_chart(tmp_path):
    folder = make_run(tmp_path / "run", "vae")
    rows = [{"step": step, "loss/autoencoder/l1": 1 / step} for step in range(1, 11)]
    write_rows(folder / "metrics.jsonl", [*rows, {"step": 5, "eval/l1": 0.3}, {"step": 10, "eval/l1": 0.2}])
    charts = [json.loads(figure["data-chart"]) for figure in page_of(folder).all("figure") if "data-chart" in figure]
    assert [[curve["label"] for curve in chart["curves"]] for chart in charts] == [["run", "run, training"], ["run"]]
    assert charts[0]["curves"][1]["points"][-1] == [10, 0.1]


def test_charts_that_are_left_out_are_counted(tmp_path):
    write_rows(tmp_path / "metrics.jsonl", [{"step": 1, **{f"loss/{number}": 1.0 for number in range(1070)}}])
    page = page_of(tmp_path)
    assert "Training losses: the first 60 of 1,070" in page.text
    assert len([figure for figure in page.all("figure") if "data-chart" in figure]) == 60


def test_names_are_escaped(tmp_path):
    folder = make_run(tmp_path / "<script>alert(1)</script>", "vocoder")
    write_rows(folder / "history.jsonl", [start_row(0), end_row(3, "failed", "<img src=x onerror=alert(2)>")])
    page = page_of(folder)
    assert len(page.all("script")) == 1
    assert not [image for image in page.all("img") if "onerror" in image]
    assert "<script>alert(1)</script>" in page.text


def test_a_run_that_has_only_begun(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    page = page_of(tmp_path)
    assert "No evaluation on held-out data." in page.text
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "epoch": 0, "seconds": 1, "eval/score": -1.0}\n')
    assert "at step 0, the last" in page_of(tmp_path).text


def test_pictures_and_sounds_are_limited(runs):
    full = page_of(runs["vocoder"])
    sizes = sorted(len(sound["src"]) for sound in full.all("audio"))
    budget = MediaBudget(MediaBudget.of(30).deadline, bytes_left=2 * sizes[-1] + 30_000)
    some = page_of(runs["vocoder"], budget=budget)
    assert [sound["aria-label"].split(" of ")[0] for sound in some.all("audio")] == ["recording", "step 40"]
    assert "left out" in some.text
    none = page_of(runs["vocoder"], budget=MediaBudget(0.0))
    assert (len(none.all("audio")), len(none.all("img"))) == (0, 0)


def test_damaged_samples_are_left_out(runs, tmp_path):
    for kind in KINDS:
        folder = tmp_path / kind
        shutil.copytree(runs[kind], folder)
        for path in (folder / "samples").iterdir():
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        page_of(folder)
    page = page_of(tmp_path / "vae")
    assert "cannot be read" in page.text


JUNK = (None, True, -1, 0, 3.5, 1e308, "x", "", [], [1], {}, {"a": 1}, 10**30, "<b>", [[]], float("nan"))


def test_nonsense_in_any_file_is_no_error(runs, tmp_path):
    """Any value of any file may be any other value, or be missing."""
    rng = random.Random(0)

    def mutated(value: object, share: float) -> object:
        if rng.random() < share:
            return rng.choice(JUNK)
        if isinstance(value, dict):
            return {name: mutated(part, share) for name, part in value.items() if rng.random() > share / 3}
        return [mutated(part, share) for part in value] if isinstance(value, list) else value

    folder = tmp_path / "run"
    shutil.copytree(runs["asr"], folder)
    settings = {"kind": "asr", "batch_size": 4, "output_dir": "x", "data_path": "y", "num_steps": 3, "many": [1, 2]}
    history = [start_row(0, changes={"a": [1, 2]}), end_row(5), start_row(5), end_row(9)]
    for _ in range(40):
        share = rng.choice([0.02, 0.1, 0.3])
        (folder / "plan.json").write_text(json.dumps(mutated(PLAN, share)))
        (folder / "config.yaml").write_text(json.dumps(mutated(settings, share)))
        write_rows(folder / "history.jsonl", [mutated(row, share) for row in history])
        write_rows(folder / "metrics.jsonl", [mutated(row, share / 3) for row in metric_rows("asr", 20)])
        page_of(folder)


def test_changes_on_resuming(tmp_path):
    machine = {**start_row(0)["machine"], "device": "Another GPU", "torch": "2.10.0"}
    history = [
        start_row(0), end_row(20, "stopped", "interrupted after step 20"), start_row(20, logged_step=29),
        start_row(20, machine=machine, changes={"batch_size": [4, 8], "odd": 3}), end_row(40),
    ]  # fmt: skip
    folder = make_run(tmp_path / "run", "asr")
    write_rows(folder / "history.jsonl", history)
    first, second, third = run_parts(read_run(folder))
    assert (first.outcome, first.lost_steps, first.changes) == ("stopped", 0, [])
    assert (second.outcome, second.last_step, second.lost_steps) == ("no end was reported", None, 9)
    assert third.changes == ["batch_size: 4 → 8", "device: Some CPU, 2 cores → Another GPU", "torch: 2.9.0 → 2.10.0"]
    text = page_of(folder).text
    assert "9 steps were lost and made again" in text
    assert "device: Some CPU, 2 cores → Another GPU" in text


def commands() -> dict[str, type]:
    return {command.name: vars(command.callback)["settings"] for command in app.registered_commands}


@pytest.mark.parametrize("kind", KINDS)
def test_a_training_ends_with_the_commands_that_use_its_model(runs, kind, capsys):
    print_next_steps(kinds()[kind], runs[kind])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"The run is in {runs[kind]}. Next:"
    commands = [next_command.line for next_command in next_commands(read_run(runs[kind]))]
    assert [line.strip() for line in lines[1:]] == [*commands[1:4], commands[-1]]
    use = {"vae": "reconstruct", "vocoder": "vocode", "tts": "speak", "asr": "transcribe"}[kind]
    assert [line.split()[1] for line in lines[1:4]] == ["evaluate", use, "export"]


@each_row(*KINDS)
def test_the_commands_are_accepted_by_the_command_line(runs, tmp_path, kind):
    """Only the values are not: the files are the reader's."""
    copied = tmp_path / f"a copy of {kind}"
    shutil.copytree(runs[kind], copied)
    click = command_line()
    for command in next_commands(read_run(copied)):
        program, *words = shlex.split(command.line)
        if program != "gputrain":
            assert program == "tensorboard"
            continue
        if kind == "vae" or "--config" not in words:
            name, *flags = words
            context = click.commands[name].make_context(name, flags)
            settings_of(commands()[name], context, context.params)
        assert str(copied) in command.line


@each_row('"\\ud800"', '"a\\0b"', "[1]", "5")
def test_an_output_dir_that_is_no_name_is_no_error(runs, tmp_path, written):
    folder = tmp_path / "run"
    shutil.copytree(runs["tts"], folder, dirs_exist_ok=True)
    (folder / "config.yaml").write_text(f"kind: tts\noutput_dir: {written}\n")
    assert next_commands(read_run(folder))[0].line.startswith(f"gputrain train-tts --config {folder}")


def luminance(colour: str) -> float:
    """Returns the relative luminance of WCAG 2.2."""
    shares = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
    return sum(weight * share for weight, share in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrasts_are_sufficient(scheme):
    """Text has a contrast of at least 4.5 with what is behind it, and curves of at least 3 (WCAG 2.2, AA)."""
    css = files("gputrain.report").joinpath("report.css").read_text()
    found = [dict(re.findall(r"--(\w+): (#\w{6})", part)) for part in re.findall(r":root \{(.*?)\}", css, re.DOTALL)]
    colours = {**found[0], **(found[1] if scheme == "dark" else {})}
    texts = [(ink, paper) for ink in ("ink", "muted") for paper in ("paper", "card", "soft", "mark")]
    texts += [("accent", "paper"), ("good", "card"), ("good", "soft"), ("bad", "soft"), ("ink", "add"), ("ink", "gone")]
    curves = [(f"c{number}", "card") for number in range(COLOURS)]
    for pairs, least in ((texts, 4.5), (curves, 3.0)):
        for pair in pairs:
            high, low = sorted((luminance(colours[name]) for name in pair), reverse=True)
            assert (high + 0.05) / (low + 0.05) >= least, pair


def test_small_things(tmp_path):
    assert [format_duration(seconds) for seconds in (0, 59.7, 61, 3725, 90061)] == [
        "0 s", "1 min", "1 min 1 s", "1 h 2 min", "1 d 1 h",
    ]  # fmt: skip
    assert unique_names([tmp_path / "a" / "run", tmp_path / "b" / "run"]) == ["a/run", "b/run"]
    assert unique_names([tmp_path / "a" / "run"]) == ["run"]


# ----------------------------------------------------------------------------------------------- files and commands


def test_the_command(runs, tmp_path):
    page = tmp_path / "deep" / "both.html"
    done = gputrain_here("report", runs["vae"], runs["asr"], "--output-file", page)
    assert done.returncode == 0, done.stderr
    assert "2 runs compared" in Checked(page.read_text()).text
    (tmp_path / "empty").mkdir()
    failed = gputrain_here("report", tmp_path / "empty")
    assert (failed.returncode, "holds no run" in failed.stderr) == (2, True)


def saving(folder: Path, **others: object) -> Saving:
    return Saving(output_dir=folder, **others)


def trained(folder: Path) -> None:
    """Does what a training does to the history."""
    write_rows(folder / "history.jsonl", [start_row(0), end_row(40), start_row(40), end_row(44)])


def test_a_run_ends_with_a_report_however_it_ends(tmp_path):
    for error in (None, Stopped("asked to stop"), ValueError("wrong")):
        folder = make_run(tmp_path / type(error).__name__, "vocoder")
        expected = pytest.raises(type(error), match=str(error)) if error else contextlib.nullcontext()
        with expected, report_at_end(saving(folder)):
            trained(folder)
            if error:
                raise error
        assert len(Checked((folder / "report.html").read_text()).all("audio")) == 3


def test_no_report_of_a_run_that_did_not_train_or_does_not_want_one(tmp_path):
    folder = make_run(tmp_path / "run", "vocoder")
    with pytest.raises(ValueError, match="refused"), report_at_end(saving(folder)):
        raise ValueError("refused")
    with report_at_end(saving(folder, report=False)):
        trained(folder)
    assert not (folder / "report.html").exists()


def test_an_error_of_the_report_is_a_warning(tmp_path, monkeypatch, caplog):
    folder = make_run(tmp_path / "run", "vocoder")
    (folder / "report.html").mkdir()
    with report_at_end(saving(folder)):
        trained(folder)
    monkeypatch.setattr(write, "make_page", lambda *arguments: 1 / 0)
    write_rows(folder / "history.jsonl", [start_row(0)])
    with report_at_end(saving(folder)):
        trained(folder)
    assert [len(record.message.splitlines()) for record in caplog.records] == [1, 1]
    assert re.findall(r"report\.html is not written: .*?(Is a directory|division by zero)", caplog.text) == [
        "Is a directory", "division by zero",
    ]  # fmt: skip


def test_a_file_that_cannot_be_written_is_the_users_error(runs, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(write.UserError, match="file"):
        write_report([runs["vae"]], tmp_path / "file" / "report.html")
