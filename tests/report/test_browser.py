"""Reports in a real browser: nothing fails, everything is decoded, fits a phone, and answers to the pointer."""

import io
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gputrain.report.media import MediaBudget
from gputrain.report.page import make_page
from gputrain.report.records import read_run
from tests.report.browser import BROWSER, Browser
from tests.report.runs import KINDS, make_run
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(BROWSER is None or sys.platform == "win32", reason="no Chromium is installed")

LOADED = """(async () => {
  for (const one of document.querySelectorAll("details")) one.open = true;
  const images = [...document.images], sounds = [...document.querySelectorAll("audio")];
  await Promise.all(images.map((image) => image.decode()));
  await Promise.all(sounds.map((sound) => sound.readyState ? 0 : new Promise((done, fail) => {
    sound.addEventListener("loadedmetadata", done); sound.addEventListener("error", fail);
  })));
  return {
    images: images.map((image) => image.naturalWidth), sounds: sounds.map((sound) => sound.duration),
    overflow: document.documentElement.scrollWidth - innerWidth, width: innerWidth,
    unnamed: [...document.querySelectorAll("svg, img, audio")]
      .filter((one) => !one.getAttribute("aria-label") && !one.getAttribute("alt")).length,
  };
})()"""
SHOWN = """(selector) => [...document.querySelectorAll(selector)]
  .filter((one) => getComputedStyle(one).display !== "none").length"""
POINT = """(() => {
  const chart = document.querySelector("figure.chart svg"), box = chart.getBoundingClientRect();
  const place = {clientX: box.right - box.width / 40, clientY: box.top + 20, bubbles: true};
  chart.dispatchEvent(new PointerEvent("pointermove", place));
  return document.querySelector(".tip").innerText;
})()"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    runs = [read_run(make_run(folder / kind, kind)) for kind in KINDS]
    path = folder / "report.html"
    path.write_text(make_page(runs, MediaBudget.of(30)))
    return path


@pytest.fixture(scope="module")
def browser():
    with Browser() as opened:
        yield opened


def count(browser: Browser, selector: str) -> int:
    return browser.run(f"({SHOWN})('{selector}')")


@pytest.mark.parametrize("width", [1280, 390])
def test_everything_is_decoded_and_fits(browser, page, width):
    browser.open(page, width)
    found = browser.run(LOADED)
    assert browser.messages == []
    assert found["width"] == width
    assert found["overflow"] <= 0
    assert len(found["images"]) == 6 + 5 + 5
    assert min(found["images"]) > 0
    assert sorted(found["sounds"]) == pytest.approx([*6 * [0.5], 1.0], abs=0.01)  # The recogniser's has a second.
    assert found["unnamed"] == 0


def test_switches_and_pointer(browser, page):
    browser.open(page, 1280)
    linear, first, second = (count(browser, selector) for selector in ("g.lin", "g.r0", "g.r1"))
    assert linear >= 4
    assert min(first, second) >= 5
    assert count(browser, "g.log") == 0
    assert browser.run(POINT).split("\n") == ["step 40", "A", "vae:", "3.05 dB"]  # It is the only run with a PSNR.
    browser.run("document.getElementById('logarithmic').click()")
    assert (count(browser, "g.lin"), count(browser, "g.log")) == (0, linear)
    browser.run("document.getElementById('run-1').click()")
    assert (count(browser, "g.r0"), count(browser, "g.r1")) == (first, 0)
    assert browser.messages == []


def test_a_run_that_has_ended_has_no_value_at_later_steps(browser, tmp_path):
    runs = [read_run(make_run(tmp_path / str(steps), "asr", steps=steps)) for steps in (10, 40)]
    (tmp_path / "page.html").write_text(make_page(runs, MediaBudget.of(30)))
    browser.open(tmp_path / "page.html", 1280)
    assert browser.run(POINT).split("\n") == ["step 40", "B", "40:", "305 %"]
    assert browser.run(POINT.replace("box.right - box.width / 40", "box.left + box.width / 3")).count("%") == 2


VIEWER = """[
  viewer.open, viewed.textContent, viewer.querySelector(".stage").style.getPropertyValue("--at"),
  ...[...viewer.querySelectorAll(".stage img")].map((one) => one.alt),
]"""


def press(browser: Browser, key: str, code: int) -> None:
    for kind in ("rawKeyDown", "keyUp"):
        browser.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)


def test_a_picture_opens_beside_its_original_and_keys_go_through_steps_and_pictures(browser, page):
    browser.open(page, 1280)
    browser.run("document.querySelector('.made .enlarge').click()")
    of = "picture 1, original, a.png", "picture 1, reconstruction, step 40, 40.5 dB"
    assert browser.run(VIEWER) == [True, "picture 1 · step 40 · a.png · 40.5 dB", "50%", of[1], of[0]]
    for key, code in (("ArrowLeft", 37), ("ArrowLeft", 37), ("ArrowDown", 40), ("PageDown", 34)):
        press(browser, key, code)
    assert browser.run(VIEWER)[:3] == [True, "picture 2 · step 20 · <i>.png · 21.5 dB", "48%"]
    assert browser.run("viewer.querySelector('[data-later=\"-1\"]').disabled")
    press(browser, "Escape", 27)
    assert browser.run(VIEWER)[0] is False
    focused = "document.activeElement.closest('[data-item]')?.ariaLabel === 'picture 2'"  # An event after the closing.
    wait_until(lambda: browser.run(focused), "the focus on the picture that was left")
    assert browser.messages == []


def test_another_sound_goes_on_where_the_one_before_it_was(browser, page):
    browser.open(page, 1280)
    browser.run("window.row = document.querySelector('.sound'); window.sounds = [...row.querySelectorAll('audio')]")
    shown = "sounds.map((one) => getComputedStyle(one).display !== 'none')"
    assert browser.run(shown) == [False, True, False]
    browser.run("sounds[1].currentTime = 0.3; row.querySelectorAll('.hear')[0].click()")
    assert browser.run("sounds[0].currentTime") >= 0.3
    assert browser.run(f"[...{shown}, sounds[1].paused]") == [True, False, False, True]
    assert browser.messages == []


def test_it_is_complete_without_scripts(browser, page, tmp_path):
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.open(page, 1280)
        browser.screenshot(tmp_path / "plain.png", height=900)
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)
    browser.open(page, 1280)
    browser.screenshot(tmp_path / "scripted.png", height=900)
    plain, scripted = (np.asarray(Image.open(tmp_path / name).convert("L")) for name in ("plain.png", "scripted.png"))
    assert (plain < 128).sum() > 0.9 * (scripted < 128).sum()


def test_dark_and_light(browser, page, tmp_path):
    for dark in (False, True):
        browser.open(page, 800, dark=dark)
        browser.screenshot(tmp_path / "page.png", height=600)
        levels = np.asarray(Image.open(io.BytesIO(Path(tmp_path / "page.png").read_bytes())).convert("L"))
        assert (np.median(levels) < 60) == dark
        assert levels.std() > 10
