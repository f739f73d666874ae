"""The scripts for Windows under the command interpreter of Wine, with programs that only note how they are called.

Wine's interpreter lacks some programs of Windows (findstr), so that not every way through setup_windows.bat is taken.
What needs no interpreter (labels, line ends, agreement with the shell scripts) is in test_setup.py.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.test_setup import BY_WORD, ROOT, SIZES, SWITCHES, SWITCHES_TTS, without_data

COMPILER = "x86_64-w64-mingw32-gcc"

# Notes its name and arguments in the file that LOG names; `python -m venv` makes a folder with programs like itself.
# Fails if its line contains the text of FAILS.
PROGRAM = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <windows.h>

int main(int count, char **words) {
    char line[8192], self[MAX_PATH];
    GetModuleFileNameA(NULL, self, MAX_PATH);
    snprintf(line, sizeof line, "%s", strrchr(self, '\\') + 1);
    for (int i = 1; i < count; i++) snprintf(line + strlen(line), sizeof line - strlen(line), "|%s", words[i]);
    FILE *log = fopen(getenv("LOG"), "a");
    fprintf(log, "%s\n", line);
    fclose(log);
    if (strstr(line, "|-m|venv|")) {
        CreateDirectoryA(".venv", NULL);
        CreateDirectoryA(".venv\\Scripts", NULL);
        CopyFileA(self, ".venv\\Scripts\\python.exe", FALSE);
        CopyFileA(self, ".venv\\Scripts\\gputrain.exe", FALSE);
    }
    if (getenv("FAILS") && strstr(line, getenv("FAILS"))) return 1;
    return strstr(line, "gputrain.exe") && getenv("CODE") ? atoi(getenv("CODE")) : 0;
}
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (shutil.which("wine") and shutil.which(COMPILER)), reason="needs Wine and MinGW"),
]


@pytest.fixture(scope="module")
def programs(tmp_path_factory) -> Path:
    """Returns a folder with a Wine prefix and the program."""
    folder = tmp_path_factory.mktemp("wine")
    (folder / "program.c").write_text(PROGRAM)
    subprocess.run([COMPILER, "-O1", "-o", folder / "program.exe", folder / "program.c"], check=True)
    (folder / "bin").mkdir()
    return folder


class Windows:
    """A folder with the scripts, and a command line there."""

    def __init__(self, folder: Path, programs: Path) -> None:
        self.folder, self.programs, self.log = folder, programs, folder.parent / "log"
        folder.mkdir()
        for name in ("setup_windows.bat", "train_rtx5090.bat", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, folder)
        self.bin = folder.parent / "bin"
        self.bin.mkdir()

    def put(self, name: str) -> None:
        target = self.bin / name if "/" not in name else self.folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(self.programs / "program.exe", target)

    def run(self, line: str, typed: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
        """Runs a line as a user types it."""
        self.log.unlink(missing_ok=True)
        (self.folder / "line.bat").write_bytes(f"@{line}\r\n".encode())
        own = {name: value for name, value in os.environ.items() if name != "CI"}
        own |= {"WINEPREFIX": str(self.programs / "prefix"), "WINEDEBUG": "-all", "WINEPATH": f"Z:{self.bin}"}
        own |= {"LOG": f"Z:{self.log}", **environment}
        return subprocess.run(
            ["wine", "cmd", "/c", "line.bat"], cwd=self.folder, env=own, input=typed, capture_output=True, text=True,
            timeout=120, check=False,
        )  # fmt: skip

    @property
    def calls(self) -> list[list[str]]:
        return [line.split("|") for line in self.log.read_text().splitlines()] if self.log.exists() else []


@pytest.fixture
def windows(tmp_path, programs) -> Windows:
    return Windows(tmp_path / "gpu train", programs)


@pytest.mark.parametrize(("word", "begins"), BY_WORD)
def test_training_passes_arguments_on_after_its_own(windows, word, begins):
    windows.put("./.venv/Scripts/gputrain.exe")
    done = windows.run(f'train_rtx5090.bat {" ".join(word)} --data-path "my pictures" --batch-size 8')
    assert done.returncode == 0, done.stderr
    assert windows.calls == [["gputrain.exe", *without_data(begins), "--data-path", "my pictures", "--batch-size", "8"]]


@pytest.mark.parametrize("flag", ["-c", "--config"])
@pytest.mark.parametrize(("word", "begins"), [("", f"train-vae {SWITCHES}"), ("tts", f"train-tts {SWITCHES_TTS}")])
def test_a_configuration_has_its_own_folders(windows, flag, word, begins):
    windows.put("./.venv/Scripts/gputrain.exe")
    assert windows.run(f"train_rtx5090.bat {word} {flag} wide.yaml").returncode == 0
    assert windows.calls == [["gputrain.exe", *begins.split(), flag, "wide.yaml"]]


def test_the_exit_code_is_the_trainings(windows):
    windows.put("./.venv/Scripts/gputrain.exe")
    assert windows.run("train_rtx5090.bat", CODE="75").returncode == 75
    assert windows.calls == [["gputrain.exe", "train-vae", *f"{SIZES} {SWITCHES}".split()]]


def test_set_up_makes_a_venv_installs_and_checks(windows):
    windows.put("py.exe")
    done = windows.run("setup_windows.bat --torch cpu")
    assert done.returncode == 0, done.stderr
    steps = [" ".join(call) for call in windows.calls]
    patterns = [
        r"py\.exe -3\.13 -c import sys; .*", r"py\.exe -3\.13 -m venv --clear \.venv",
        r"python\.exe -m pip .* install --no-deps .*--index-url https://\S+/whl/cpu torch==[\d.]+\+cpu",
        r"python\.exe -m pip .* install -e \.\[all\] -c constraints\.txt", r"gputrain\.exe check-compatibility",
    ]  # fmt: skip
    assert len(steps) == len(patterns), steps
    for step, pattern in zip(steps, patterns, strict=True):
        assert re.fullmatch(pattern, step), step
    assert (windows.folder / ".venv" / "setup-stamp.txt").read_text().split()[:2] == ["cpu", "plain"]
    assert windows.run("setup_windows.bat demo", CI="1").returncode == 0
    assert " ".join(windows.calls[-1]) == "gputrain.exe demo"
    assert not any("venv" in call for call in windows.calls)  # The finished one is kept.


@pytest.mark.parametrize("fails", ["|-m|venv|", "|-e|.[all]"])
def test_a_step_of_the_set_up_that_fails_ends_it(windows, fails):
    windows.put("py.exe")
    done = windows.run("setup_windows.bat --torch cpu", FAILS=fails)
    assert done.returncode == 1
    assert "setup: failed; the error stands above" in done.stderr
    assert not (windows.folder / ".venv" / "setup-stamp.txt").exists()


def test_another_index_is_tried_where_torch_s_own_fails(windows):
    windows.put("py.exe")
    done = windows.run("setup_windows.bat --torch cpu", FAILS="--index-url")
    assert done.returncode == 0
    assert "taking it from pip's default index" in done.stderr
    assert re.fullmatch(r"python\.exe -m pip .*install --no-deps torch==[\d.]+", " ".join(windows.calls[3]))


def test_the_menu_and_the_plan_of_the_set_up(windows):
    windows.put("py.exe")
    done = windows.run("setup_windows.bat --dry-run test", typed="4\n")
    assert "build:  cu128" in done.stdout
    assert 'venv:   make "Z:' in done.stdout
    assert "then:   check-compatibility test" in done.stdout
    assert not (windows.folder / ".venv").exists()


@pytest.mark.parametrize("line", ["--nope", "--torch cu999", "--torch", "demo test"])
def test_wrong_words_are_refused(windows, line):
    windows.put("py.exe")
    done = windows.run(f"setup_windows.bat {line}")
    assert done.returncode == 2
    assert done.stderr.startswith("setup: ")
    assert windows.calls == []


def test_without_python_it_says_what_to_install(windows):
    done = windows.run("setup_windows.bat --torch cpu")
    assert done.returncode == 2
    assert "found no 64-bit Python 3.10 to 3.14" in done.stderr
