"""The learning races: the clock, resumption, the summary, and the measures of sound."""

import argparse
import importlib
import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

FOLDER = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(FOLDER))
race = importlib.import_module("race")
sound = importlib.import_module("race_sound")

METRIC = race.Metric("psnr_db", "PSNR, dB", "higher")


def test_the_clock_counts_the_start_and_stands_still_during_evaluations(monkeypatch):
    """The start takes 5 s, a step 1 s, and an evaluation 60 s."""
    now = 1000.0
    monkeypatch.setattr(race, "time", SimpleNamespace(process_time=lambda: now))

    class Counter:
        steps = 0

        def step(self):
            nonlocal now
            now += 1
            self.steps += 1

    def begin():
        nonlocal now
        now += 5
        return Counter()

    def evaluate(trainee):
        nonlocal now
        now += 60
        return {"seen": trainee.steps}

    points = race.train_and_evaluate(begin, evaluate, [0, 9.5, 15])
    assert [list(point.values()) for point in points] == [[5, 0, 0], [10, 5, 5], [15, 10, 10]]
    assert list(points[0]) == ["cpu_seconds", "steps", "seen"]


def stored(side, seed, values, folder, seconds=8.0):
    shared = {"device": "cpu", "seconds": seconds, "clips": 2, "smoke": False, "data": "d"}
    points = [{"cpu_seconds": mark, "steps": mark, "psnr_db": v} for mark, v in zip((0, 8), values, strict=True)]
    machine = {"device": "Some CPU", "threads": 1}
    content = {"settings": {**shared, "side": side, "seed": seed}, "machine": machine, "points": points}
    path = race.run_path(folder, race.Race("vae", "", [METRIC], None, ""), side, seconds, seed)
    path.write_text(json.dumps(content))
    return shared


def test_stored_runs_of_equal_settings_make_the_summary(tmp_path):
    for seed, last in ((1, 20.0), (2, 22.0), (3, 27.0)):
        shared = stored("ours", seed, (10.0, last), tmp_path)
    stored("peer", 1, (5.0, 6.0), tmp_path)
    stored("ours", 4, (0.0, 99.0), tmp_path, seconds=9.0)  # Another race.
    one = race.Race("vae", "", [METRIC], None, "some conditions")
    options = argparse.Namespace(work_dir=tmp_path, output_dir=tmp_path, smoke=False)
    race.report(one, options, shared)
    report = json.loads((tmp_path / "race_vae_8s_some_cpu.json").read_text())
    assert list(report["sides"]) == ["peer", "ours"]
    assert report["sides"]["ours"]["seeds"] == [1, 2, 3]
    last = report["sides"]["ours"]["points"][1]["psnr_db"]
    assert last["values"] == [20, 22, 27]
    assert last["mean"] == 23
    assert last["interval"] == pytest.approx(4.303 * math.sqrt(13) / math.sqrt(3))  # The variance is (9 + 1 + 16) / 2.
    assert report["sides"]["peer"]["points"][0]["psnr_db"]["interval"] is None
    with Image.open(tmp_path / "race_vae_8s_some_cpu.png") as picture:
        assert picture.width > race.PANEL[0]


@pytest.mark.slow  # The first alignment compiles librosa's code.
def test_distortion_of_a_known_cepstrum(monkeypatch):
    bands = np.arange(sound.MEL_BANDS)[:, None]
    shapes = {0: 0.0, 1: 0.3 * np.cos(2 * np.pi * (2 * bands + 1) / (2 * sound.MEL_BANDS))}
    monkeypatch.setattr(sound, "log_mel", lambda wave, rate: np.zeros((sound.MEL_BANDS, 5)) + shapes[int(wave[0])])
    nothing, shaped = np.zeros(1), np.ones(1)
    distortion, path = sound.aligned(shaped, nothing, 16000)
    assert distortion == pytest.approx(10 / math.log(10) * math.sqrt(2) * 0.3)
    assert sound.aligned(shaped, shaped, 16000)[0] == pytest.approx(0, abs=1e-12)
    assert {tuple(pair) for pair in path} == {(frame, frame) for frame in range(5)}


def test_the_pitch_of_a_tone_and_its_errors():
    times = np.arange(16000) / 16000
    tone = (0.3 * np.sin(2 * np.pi * 220 * times)).astype(np.float32)
    pitch = sound.pitch(tone, 16000)
    assert len(pitch) == 63
    assert np.median(pitch[pitch > 0]) == pytest.approx(220, rel=2e-3)
    real = np.array([100.0, 100, 100, 0, 0, 200])
    made = np.array([100.0, 110, 150, 0, 90, 0])  # 165 cents, gross, silent, voiced, silent.
    counts = sound.pitch_errors(made, real)
    figures = sound.pitch_figures([counts, counts])
    assert figures["f0_frame_error"] == pytest.approx(50)
    assert figures["f0_rmse_cents"] == pytest.approx(1200 * math.log2(1.1) / math.sqrt(2))


def test_character_errors_are_those_of_all_texts():
    assert sound.letters_of("  It's 2 LATE -- to\tgo!") == "it's late to go"
    # A wrong letter, a missing word with its space, and nothing else: 1 + 4 of 10 + 11 characters.
    rate = sound.character_error_rate(["The number", "press pound."], ["the lumber.", "Press p"])
    assert rate == pytest.approx(100 * 5 / 21)
    assert sound.character_error_rate(["yes"], ["no, it is not"]) > 100


@pytest.mark.slow
def test_the_peers_discriminators_are_narrowed_to_ours():
    voice = importlib.import_module("race_voice")
    root = voice.vits_peer.root_of(None)
    if root is None:
        pytest.skip("piper-tts is not installed")
    voice.vits_peer.import_task(root)
    theirs = importlib.import_module("piper.train.vits.models").MultiPeriodDiscriminator()
    wide = sum(parameter.numel() for parameter in theirs.parameters())
    voice.narrow_discriminators(theirs, 8)
    ours = voice.vits_discriminators(8)
    assert sum(one.numel() for one in theirs.parameters()) == sum(one.numel() for one in ours.parameters()) < wide / 15
    wave = torch.randn(1, 1, 8192, generator=torch.Generator().manual_seed(0))
    ours.load_state_dict(theirs.state_dict())
    with torch.no_grad():
        for mine, their in zip(ours, theirs.discriminators, strict=True):
            assert torch.allclose(mine(wave)[0].flatten(), their(wave)[0].flatten(), atol=1e-5)


@pytest.mark.slow
def test_a_race_of_the_image_vae_from_the_command_line(tmp_path):
    (tmp_path / "photos").mkdir()
    draws = np.random.default_rng(0)
    for number in range(12):
        small = draws.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(small).resize((300, 300)).save(tmp_path / "photos" / f"{number}.png")
    command = [sys.executable, str(FOLDER / "race_vae.py"), "--data", "photos", "--smoke", "--output-dir", "out"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "out").glob("*.json")
    sides = json.loads(path.read_text())["sides"]
    assert list(sides) == ["peer", "ours"]
    assert sides["peer"]["points"][-1]["steps"] >= 1
    assert sides["ours"]["points"][0]["psnr_db"]["mean"] > sides["peer"]["points"][0]["psnr_db"]["mean"] + 3
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert "measuring" not in again.stderr
