"""Compiled code on disk: one process compiles at a time, and damaged code is found."""

import importlib
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile

from gputrain.audio import f0
from gputrain.errors import UserError
from gputrain.hw import numba_cache
from gputrain.hw.doctor import trials
from gputrain.vocoder import prepare

# Prints when it starts and ends compiling each of two functions, which takes a while.
COMPILER = """
import os, time
from gputrain.hw.numba_cache import compiling, stamp

stamp("one", "1.0")  # imports what that takes
print("ready", flush=True)
input()
for name in ("one", "two"):
    with compiling(name, "1.0"):
        os.write(2, f"{os.getpid()} begins\\n".encode())
        time.sleep(0.05)
        os.write(2, f"{os.getpid()} ends\\n".encode())
"""
PYIN = """
import os
import numpy as np
from gputrain.audio.f0 import f0

print("ready", flush=True)
input()
found_F = f0(np.sin(2 * np.pi * 220 * np.arange(8000) / 16000).astype(np.float32), 16000, 200, "pyin")
os.write(2, f"{np.median(found_F):.0f}\\n".encode())
"""


def at_once(script: str, processes: int, folder: Path) -> list[str]:
    """Return the stderr of processes with one cache that run a script and pass its `input()` together."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(folder / "cache"), "NUMBA_OPT": "0"}
    with (folder / "said").open("ab") as said:
        command = [sys.executable, "-c", script]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": said}
        started = [subprocess.Popen(command, env=environment, **pipes) for _ in range(processes)]
    for process in started:
        assert process.stdout.readline() == b"ready\n"
    for process in started:
        process.stdin.write(b"\n")
        process.stdin.close()
    assert [process.wait() for process in started] == [0] * processes
    return (folder / "said").read_text().splitlines()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache; numba's setting is restored afterwards."""
    config = importlib.import_module("numba").config
    monkeypatch.setattr(config, "CACHE_DIR", config.CACHE_DIR)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_processes_compile_one_after_another(tmp_path):
    said = [line.split() for line in at_once(COMPILER, 2, tmp_path)]
    assert len(said) == 8
    for begins, ends in zip(said[::2], said[1::2], strict=True):
        assert (begins[0], begins[1], ends[1]) == (ends[0], "begins", "ends")


@pytest.mark.slow
def test_four_processes_that_compile_pyin_at_once_leave_code_that_works(tmp_path):
    assert at_once(PYIN, 4, tmp_path) == ["220"] * 4
    (stamp,) = (tmp_path / "cache").glob("pyin-*.compiled")
    files = set(tmp_path.rglob("*.nb*"))
    assert at_once(PYIN, 1, tmp_path) == ["220"] * 5
    assert set(tmp_path.rglob("*.nb*")) == files  # Nothing was compiled again.
    assert stamp.exists()


def test_only_what_has_been_compiled_gets_a_stamp(cache):
    with pytest.raises(RuntimeError), numba_cache.compiling("one", "1.0"):
        raise RuntimeError
    assert not numba_cache.stamp("one", "1.0").exists()
    with numba_cache.compiling("one", "1.0"):
        pass
    assert numba_cache.stamp("one", "1.0").exists()
    assert not numba_cache.stamp("one", "1.1").exists()
    assert str(cache) == importlib.import_module("numba").config.CACHE_DIR


def test_a_folder_that_cannot_be_locked_is_told_and_does_no_harm(cache, caplog):
    (cache / "compiling.lock").mkdir(parents=True)
    before = importlib.import_module("numba").config.CACHE_DIR
    with caplog.at_level(logging.WARNING), numba_cache.compiling("one", "1.0"):
        pass
    assert "NUMBA_CACHE_DIR names another folder" in caplog.text
    assert before == importlib.import_module("numba").config.CACHE_DIR


def test_the_folder_is_gputrains_own_unless_the_user_names_one(monkeypatch, tmp_path):
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("LOCALAPPDATA" if os.name == "nt" else "XDG_CACHE_HOME", str(tmp_path))
    assert numba_cache.folder() == tmp_path / "gputrain" / "numba"


# Damaged compiled code crashes in the first call.
CRASHING = "import os, signal\ndef pyin(*arguments, **named): os.kill(os.getpid(), signal.SIGSEGV)\n"


@pytest.fixture
def damaged(cache, monkeypatch, tmp_path):
    (tmp_path / "librosa.py").write_text(CRASHING)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    return cache


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="signals of POSIX")
def test_damaged_code_is_found_and_the_folder_named(damaged):
    found = trials.try_pitch()
    assert (found.status, found.found) == ("failed", "pyin crashed (SIGSEGV)")
    assert f"NUMBA_CACHE_DIR to a new folder, which takes the place of {damaged}" in found.remedy
    with pytest.raises(UserError, match="cannot be compiled: SIGSEGV") as caught:
        f0.compile_tracker("pyin")
    assert f"NUMBA_CACHE_DIR to a new folder, which takes the place of {damaged}" in caught.value.hint
    assert not list(damaged.glob("*.compiled"))


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="signals of POSIX")
def test_validation_tells_of_the_compilation_before_it_begins(damaged, monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(prepare, "default_method", lambda: "pyin")
    (tmp_path / "in").mkdir()
    soundfile.write(tmp_path / "in/a.wav", np.full(16000, 0.5, np.float32), 16000)
    with (
        caplog.at_level(logging.INFO, "gputrain"),
        pytest.raises(UserError, match="the pitch tracker pyin cannot be compiled"),
    ):
        prepare.validate_sounds(tmp_path / "in")
    assert "compiling the pitch tracker pyin, once: half a minute on a free core, minutes on a busy" in caplog.text
