"""Live pages in a real browser: they follow a run, play its sounds, outlive a network that is gone, and act."""

import contextlib
import json
import shutil
import subprocess
import sys
import threading

import pytest

from gputrain.engine.run_folder import append_line
from gputrain.report.media import LiveMedia
from gputrain.watch import runs
from gputrain.watch.app import WatchApp
from gputrain.watch.pages import Pages
from gputrain.watch.runs import Runs, id_of
from gputrain.watch.server import PageServer, listen
from tests.chaos.tiny import make_data, words
from tests.report.browser import BROWSER, Browser
from tests.report.runs import make_run, start_row, time_now, write_rows
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(BROWSER is None or sys.platform == "win32", reason="no Chromium is installed")

NOW = "dispatchEvent(new Event('online'))"  # Lets a page ask at once.
PLAY = """(async () => {
  const one = document.querySelector(".sound audio");
  await one.play();
  return one.duration;
})()"""
STATE = "[document.querySelector('#trouble').hidden, document.querySelector('#trouble').textContent]"


@pytest.fixture(scope="module")
def opened():
    with Browser() as opened:
        yield opened


@pytest.fixture
def browser(opened, monkeypatch):
    """The browser without a page: that of the test before has no server any more."""
    monkeypatch.setattr(runs, "READ_SECONDS", 0.05)
    monkeypatch.setattr(runs, "LOOK_SECONDS", 0.1)
    opened.open("about:blank", 1280)
    opened.messages.clear()
    return opened


@contextlib.contextmanager
def served(folder, port=0, act=None):
    """Serves the runs in a folder, and yields the port."""
    found, media = Runs([folder]), LiveMedia()
    with listen("127.0.0.1", port) as listening:
        port = listening.getsockname()[1]
        app = WatchApp(found, media, Pages(found, media, controls=act is not None), token="", act=act)
        server = PageServer(listening, app)
    found.start()
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield port
    finally:
        server.shutdown()
        server.server_close()


def follow(browser, script, what):
    """Waits until a page shows something, which it asks for all the time."""

    def shown():
        with contextlib.suppress(AssertionError):  # The page may just be loaded anew.
            browser.run(NOW)
            return browser.run(script)
        return False

    wait_until(shown, what)


def has_text(text):
    return f"document.body?.innerText.includes({json.dumps(text)})"


def test_a_page_follows_a_run(browser, tmp_path):
    run = make_run(tmp_path / "voice", "tts")
    write_rows(run / "history.jsonl", [start_row(0, last_step=80)])
    asked = []
    with served(tmp_path, act=lambda content: asked.append(content) or f"did {content['action']}") as port:
        browser.open(f"http://127.0.0.1:{port}/", 1280)
        assert browser.run(has_text("step 40/80"))
        browser.run("window.isSame = true; document.querySelector('#curves details').open = true")
        append_line(
            json.dumps({"step": 41, "seconds": 41.0, "learning_rate": 0.5}).encode() + b"\n", run / "metrics.jsonl"
        )
        follow(browser, has_text("step 41/80"), "the next step")
        # A sound that plays stays as it is, until it has ended.
        assert browser.run(PLAY) == pytest.approx(0.5, abs=0.01)
        browser.run("document.querySelector('audio').pause()")
        shutil.copyfile(run / "samples" / "clip_1_reference.wav", run / "samples" / "clip_1_step_00000060.wav")
        follow(browser, "document.querySelectorAll('.sound audio').length === 4", "the new sample")
        assert browser.run("window.isSame && document.querySelector('#curves details').open")
        browser.run("document.querySelector('[data-action=stop]').click()")
        follow(browser, has_text("did stop"), "the answer")
        assert asked == [{"action": "stop", "run": id_of(run)}]
        assert "Stop voice" in browser.questions[-1]
        browser.run("document.querySelector('textarea').value = 'warm'")
        browser.run("document.querySelector('form[data-action=note]').requestSubmit()")
        follow(browser, has_text("did note"), "the answer")
        assert asked[-1] == {"action": "note", "run": id_of(run), "text": "warm"}
        assert browser.messages == []


def test_the_network_is_gone_for_a_while(browser, tmp_path):
    run = make_run(tmp_path / "images", "vae")
    with served(tmp_path) as port:
        browser.open(f"http://127.0.0.1:{port}/", 360)
        assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    browser.run(NOW)
    follow(browser, f"!{STATE}[0] && {STATE}[1].startsWith('No answer since')", "the note that there is no answer")
    browser.run("scrollTo({top: document.body.scrollHeight, behavior: 'instant'})")
    follow(browser, "document.elementFromPoint(innerWidth / 2, innerHeight - 30).id === 'trouble'", "the note there")
    write_rows(run / "history.jsonl", [start_row(0, last_step=99)])
    with served(tmp_path, port):
        follow(browser, f"{STATE}[0] && {has_text('step 40/99')}", "the page's recovery")


def test_the_overview_leads_to_a_comparison(browser, tmp_path):
    for kind, name in (("vae", "\u202e<b>"), ("asr", "n" * 200)):
        make_run(tmp_path / name, kind)
    with served(tmp_path) as port:
        browser.open(f"http://127.0.0.1:{port}/", 360, dark=True, height=300)
        assert browser.run("document.querySelectorAll('article h2 a').length") == 2
        assert browser.run("document.documentElement.scrollWidth <= innerWidth")
        top = "document.querySelectorAll('h2 a')[1].getBoundingClientRect().top"
        browser.run(f"scrollBy({{top: {top} - 9, behavior: 'instant'}}), document.querySelectorAll('h2 a')[1].focus()")
        follow(browser, f"{top} >= document.querySelector('#compare').getBoundingClientRect().bottom", "a free sight")
        browser.run("document.querySelectorAll('input[name=run]').forEach((one) => one.click())")
        browser.run("document.querySelector('#compare button').click()")
        follow(browser, has_text("2 runs compared"), "the comparison")
        assert browser.run("document.documentElement.scrollWidth <= innerWidth")
        make_run(tmp_path / "later", "tts")
        browser.open(f"http://127.0.0.1:{port}/", 1280)
        follow(browser, has_text("3 runs"), "the new run")
        assert browser.messages == []


def test_what_a_reader_has_chosen_outlives_updates(browser, tmp_path):
    """What is ticked, typed and focused, and the values at a step of a chart; when the page is loaded anew, too."""
    folders = [make_run(tmp_path / name, "tts") for name in ("one", "two")]
    with served(tmp_path, act=lambda content: "done") as port:
        browser.open(f"http://127.0.0.1:{port}/", 1280)
        follow(browser, "document.querySelectorAll('input[name=run]').length === 2", "the runs")
        ticked = "document.querySelector('input[name=run]:checked').ariaLabel"
        browser.run("document.querySelector('input[aria-label=\"compare one\"]').click()")
        browser.run("document.querySelector('input[name=run]:checked').focus()")
        browser.run("window.isSame = true")
        for run in reversed(folders):  # Each comes first.
            write_rows(run / "history.jsonl", [start_row(0, last_step=90, time=time_now())])
            follow(browser, f"document.querySelector('h2').innerText === '{run.name}'", "another order")
        kept = "'compare one' === document.activeElement.ariaLabel"
        follow(browser, f"{ticked} === 'compare one' && {kept}", "what was ticked and focused")
        assert not browser.run("window.isSame")

        browser.open(f"http://127.0.0.1:{port}/?run={id_of(folders[0])}", 1280)
        browser.run("document.querySelector('#logarithmic').click(); window.isSame = true")
        browser.run("document.querySelector('input[name=steps]').value = '7'")
        browser.run("document.querySelector('figure.chart').focus()")
        for key in ("Tab", "ArrowLeft", "ArrowLeft"):
            for kind in ("rawKeyDown", "keyUp"):
                code = {"Tab": 9, "ArrowLeft": 37}[key]
                browser.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)
        shown = "document.querySelector('.tip:not([hidden])').innerText"
        assert browser.run(shown).startswith("step 38\n")
        for step, name in ((50, "loss/model/tts"), (51, "loss/other")):
            row = {"step": step, "seconds": float(step), name: 1.0}
            append_line(json.dumps(row).encode() + b"\n", folders[0] / "metrics.jsonl")
            kept = "document.querySelector('input[name=steps]').value === '7' && document.activeElement.innerText"
            kept += f".startsWith('model: tts') && {shown}.startsWith('step 38\\n')"
            follow(browser, f"{has_text(f'step {step}/90')} && {kept}", "a step more, with all that was there")
            assert browser.run("document.querySelector('#logarithmic').checked")
        assert not browser.run("window.isSame")
        assert browser.messages == []


@pytest.mark.slow
def test_a_real_training_is_watched_and_stopped(browser, tmp_path):
    """The page of a training that just begins: its first figures, a sample that plays, and its end."""
    data = make_data("vocoder", tmp_path / "data")
    (tmp_path / "runs").mkdir()
    program = [sys.executable, "-m", "gputrain"]
    page = subprocess.Popen(
        [*program, "watch", tmp_path / "runs", "--wait", "--allow-control", "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
    )
    line = words("vocoder", data, tmp_path / "runs" / "sung", 0, sample_every_steps=4, num_steps=100_000)
    training = subprocess.Popen([*program, *map(str, line)], stderr=subprocess.PIPE, text=True)
    with page, training:
        try:
            address = page.stdout.readline().strip()
            assert "?token=" in address
            browser.open(address.partition("?")[0], 1280)
            assert browser.run("document.body.innerText").startswith("this page needs its token")
            browser.messages.clear()
            browser.open(address, 1280)
            follow(browser, "location.search === ''", "the address without the token")
            follow(browser, has_text("No runs yet") + " || " + has_text("running"), "the page")
            follow(browser, has_text("/100000"), "the training")
            follow(browser, "document.querySelectorAll('.sound audio').length > 1", "a sample")
            assert browser.run(PLAY) > 0.1
            browser.run("[...document.querySelectorAll('audio')].forEach((one) => one.pause())")
            browser.run("document.querySelector('[data-action=stop]').click()")
            assert training.wait(120) == 75
            assert "everything is saved" in training.stderr.read()
            follow(browser, has_text("stopped: asked to stop from gputrain watch"), "the end of the training")
            assert browser.run("document.querySelector('[data-action=stop]')") is None
            assert browser.messages == []
        finally:
            training.kill()
            page.terminate()
        assert page.wait(20) == 0
    assert (tmp_path / "runs" / "sung" / "checkpoint_last.pt").exists()
