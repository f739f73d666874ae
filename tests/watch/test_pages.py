"""The pages of runs: only what has changed is sent, long curves are seldom drawn anew, nothing of a run is markup."""

import base64
import hashlib
import io
import json
import re
import shutil
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import pytest
from PIL import Image

from gputrain.engine.run_folder import append_line
from gputrain.heartbeat import Heartbeat
from gputrain.report.media import LiveMedia
from gputrain.watch.pages import Pages
from gputrain.watch.runs import Runs, id_of
from tests.report.runs import PLAN, end_row, make_run, metric_rows, start_row, time_now, write_rows, write_samples


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return [make_run(folder / kind, kind) for kind in ("vae", "tts")]


@pytest.fixture
def folders(made, tmp_path):
    return [Path(shutil.copytree(run, tmp_path / run.name)) for run in made]


class Visitor:
    """A browser that keeps the parts of a page, and asks for what has changed."""

    def __init__(self, *folders: Path, shown: tuple[Path, ...] = ()) -> None:
        self.runs = Runs(folders)
        self.pages = Pages(self.runs, LiveMedia())
        self.ids, self.parts = [id_of(folder) for folder in shown], {}
        self.runs.look()
        self.changes()

    def changes(self) -> set[str]:
        self.runs._looked.set()
        self.runs.touch(self.ids)
        self.runs.read()
        self.answer = json.loads(json.dumps(self.pages.update(self.ids, {part[0] for part in self.parts.values()})))
        self.parts |= self.answer["parts"]
        assert set(self.answer["order"]) <= self.parts.keys()
        return {re.sub(r"-[0-9a-f]{10}", "", name) for name in self.answer["parts"]}


def append(folder: Path, **values: float) -> None:
    append_line(json.dumps(values).encode() + b"\n", folder / "metrics.jsonl")


def test_only_parts_that_have_changed_are_sent(folders):
    vae, tts = folders
    visitor = Visitor(*folders, shown=(vae,))
    assert visitor.changes() == set()
    append(vae, step=50, seconds=50.0, **{"loss/model/vae": 1.0})
    assert visitor.changes() == {"run", *(name for name in visitor.answer["parts"] if name.startswith("chart-"))}
    append(tts, step=50, seconds=50.0, **{"loss/model/tts": 1.0})
    assert visitor.changes() == set()  # It is another run's.
    (vae / "plan.json").write_text(json.dumps({**PLAN, "events": [{"step": 9, "message": "<b>hot</b>"}]}))
    assert visitor.changes() - {name for name in visitor.parts if name.startswith("chart-")} == {"run", "memory-0"}
    assert all("&lt;b&gt;hot" in html for _, html in visitor.answer["parts"].values() if "hot" in html)
    (vae / "notes.md").write_text("warm <i>tones</i>")
    assert visitor.changes() == {"run"}
    assert "warm &lt;i&gt;tones" in str(visitor.answer["parts"])


def test_a_line_more_does_not_draw_a_long_curve_anew(folders):
    run = folders[0]
    write_rows(run / "metrics.jsonl", metric_rows("vae", 1000))
    visitor = Visitor(run)
    drawn = Counter()
    for step in range(1001, 1016):
        append(run, step=step, seconds=float(step), **{"loss/model/vae": 1.0})
        drawn["drawn"] += any(name.startswith("chart-") for name in visitor.changes())
    assert drawn["drawn"] == 3  # A point of a curve of 1,000 steps has 4.5 of them.
    append(run, step=1016, seconds=1016.0, **{"eval/psnr_db": 9.0})
    assert "chart-1-1" in visitor.changes()
    assert "9 dB" in visitor.parts[f"run-{id_of(run)}"][1]
    write_rows(run / "metrics.jsonl", [{**row, "loss/model/vae": 5.0} for row in metric_rows("vae", 1016)])
    assert "chart-2-1" in visitor.changes()  # The same steps, with other losses.


def test_progress_and_time_left(folders):
    run = folders[0]
    write_rows(run / "history.jsonl", [start_row(0, last_step=80, host="elsewhere")])
    beat = Heartbeat(phase="evaluating", step=47, last_step=60, seconds_left=39.0, ends_at="2026-11-29T12:00:00+00:00")
    (run / "heartbeat.json").write_text(json.dumps(asdict(beat)))
    visitor = Visitor(run)
    append(run, step=41, seconds=41.0, **{"gpu/temperature_c": 71.0, "gpu/power_w": 312.0, "gpu/utilisation": 0.98})
    visitor.changes()
    card = visitor.parts[f"run-{id_of(run)}"][1]
    assert "step 47/60, evaluating · 78 % · 39 s left · ends by 2026-11-29 " in card
    assert visitor.answer["title"] == "78 % vae"
    assert "71 °C · 312 W · 98 %" in card
    write_rows(run / "history.jsonl", [start_row(0, last_step=80), end_row(41, "stopped", "asked to <stop>")])
    (run / "heartbeat.json").unlink()
    visitor.changes()
    card = visitor.parts[f"run-{id_of(run)}"][1]
    assert "step 41/80 · 51 %" in card
    assert "stopped: asked to &lt;stop&gt;" in card
    assert " left" not in card


def test_a_training_that_plans_has_a_page_and_no_buttons(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "heartbeat.json").write_text(json.dumps(asdict(Heartbeat("vae", phase="planning"))))
    visitor = Visitor(tmp_path / "run")
    visitor.pages.controls = True
    visitor.changes()
    card, controls = (visitor.parts[f"{part}-{id_of(tmp_path / 'run')}"][1] for part in ("run", "controls"))
    assert '<p class="what">planning</p>' in card
    assert ("<progress" in card, "No evaluation on held-out data yet" in card, "missing" in card) == (
        False,
        True,
        False,
    )
    assert ("Save now" in controls, visitor.answer["title"]) == (False, "run")
    write_rows(tmp_path / "run" / "history.jsonl", [start_row(0, time=time_now())])
    visitor.changes()
    assert "Save now" in visitor.parts[f"controls-{id_of(tmp_path / 'run')}"][1]


def test_runs_appear_vanish_and_are_compared(folders, tmp_path):
    vae, tts = folders
    write_rows(vae / "history.jsonl", [start_row(0, last_step=None)])
    visitor = Visitor(tmp_path)
    assert visitor.answer["title"] == "2 runs"
    assert "<dt>steps</dt><dd>40<" in visitor.parts[f"run-{id_of(vae)}"][1]  # It has no end that a bar could show.
    assert "compare" in visitor.parts[f"run-{id_of(vae)}"][1]
    shutil.copytree(vae, tmp_path / "third")
    visitor.runs.look()
    visitor.changes()
    assert visitor.answer["title"] == "3 runs"
    both = visitor.pages.update([id_of(vae), id_of(tts)], ())
    assert both["title"] == "2 runs compared"
    assert "comparison" in both["order"]
    for folder in (vae, tts):
        shutil.rmtree(folder)
    visitor.runs.look()
    visitor.changes()
    assert visitor.answer["title"] == "third"  # The only run has the page for itself.
    with pytest.raises(KeyError):
        visitor.pages.page([id_of(vae)])
    shutil.rmtree(tmp_path / "third")
    visitor.runs.look()
    visitor.changes()
    assert visitor.answer["title"] == "No runs yet"
    assert str(tmp_path) in str(visitor.parts["folders"])


def test_a_change_of_whatever_a_part_shows_is_sent(folders, tmp_path):
    """Names that grow since another run has the same, a kind that only the settings tell, and notes on samples."""
    run = folders[0]
    visitor, pair = Visitor(tmp_path), Visitor(tmp_path, shown=tuple(folders))
    shutil.copytree(run, tmp_path / "further" / run.name)
    for one in (visitor, pair):
        one.runs.look()
        one.changes()
        shown = " ".join(html for name, (_, html) in one.parts.items() if name in one.answer["order"])
        assert not re.findall(r"(?<![\w/])(?:vae|tts)(?=</a>|</th>|</h[23]>|&#34;)", shown)
    alone = Visitor(folders[1], shown=(folders[1],))
    (folders[1] / "config.yaml").write_text("kind: asr\n")
    assert {"run", "settings", "commands-0"} <= alone.changes()
    (folders[1] / "samples").rename(tmp_path / "away")
    (folders[1] / "samples").symlink_to(tmp_path / "away")
    alone.changes()
    assert "samples cannot be read: it is a link out of the folder" in alone.parts[f"run-{alone.ids[0]}"][1]


def test_a_part_that_cannot_be_shown_hides_no_other_run(folders, tmp_path, caplog):
    """Whatever the reason, the terminal says it."""
    visitor = Visitor(tmp_path)
    vae, tts = (visitor.runs.record(id_of(folder)) for folder in folders)
    vae.metrics, vae.versions["metrics"] = None, 9
    page, _ = visitor.pages.page([])
    assert ("This part cannot be shown" in page, tts.name in page) == (True, True)
    assert "internal error" in caplog.text


def test_an_answer_is_complete_before_another_browser_has_its_turn(folders):
    class Turn:
        """As if another browser asked for the same page whenever one has its answer."""

        def __enter__(self):
            pass

        def __exit__(self, *error):
            for parts in visitor.pages._pages.values():
                parts.shown.clear()

    visitor = Visitor(folders[0])
    visitor.runs.lock = Turn()
    answer = visitor.pages.update([], ())
    assert len(answer["order"]) == len(answer["parts"]) > 5


def test_new_samples_are_sent_alone(folders):
    run = folders[1]
    visitor = Visitor(run)
    sound = next(name for name in visitor.parts if name.startswith("sound-"))
    samples = sorted((run / "samples").glob("*_step_00000040.wav"))
    shutil.copyfile(run / "samples" / "clip_1_reference.wav", samples[0].with_name("clip_1_step_00000060.wav"))
    assert {name.partition("-")[0] for name in visitor.changes()} == {"sound"}
    assert "step 60" in visitor.parts[sound][1]
    for name in re.findall(r'src="media/([^"]+)"', visitor.parts[sound][1]):
        kind, content = visitor.pages.media.get(name)
        assert (kind, content[:4]) in (("audio/wav", b"RIFF"), ("image/jpeg", b"\xff\xd8\xff\xe0"))


def test_samples_that_a_resumed_run_makes_again_replace_those_before(folders):
    """The same files, with other pictures."""
    visitor = Visitor(folders[0])
    write_samples(folders[0], "vae", seed=1)
    assert "pictures-0" in visitor.changes()
    assert not list((folders[0] / "samples").glob("*.partial"))
    content = visitor.parts[f"pictures-{id_of(folders[0])}-0"][1]
    shown = re.findall(r'class="enlarge"><img src="media/([^"]+)" width="(\d+)" height="(\d+)"', content)
    assert len(shown) == 6
    for name, width, height in shown:  # The address is that of the picture at full size.
        with Image.open(io.BytesIO(visitor.pages.media.get(name)[1])) as picture:
            assert picture.size == (int(width), int(height)) == (32, 32)


def test_the_policy_allows_the_style_and_the_script_of_the_page_alone(folders):
    visitor = Visitor(folders[0])
    page, policy = visitor.pages.page([])
    for tag, directive in (("style", "style-src"), ("script", "script-src")):
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in policy
    assert not re.findall(r'\bon\w+="|\bstyle="|unsafe|(?:src|href)="(?!data:|media/|#|\./)', page + policy)
    assert "default-src 'none'" in policy
