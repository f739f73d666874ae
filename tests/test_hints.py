"""Every hint can be followed: the commands in it are complete and accepted, its options exist, and the hint is gone
after it."""

import ast
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import soundfile
from PIL import Image

from gputrain.config import assemble
from gputrain.kinds import kinds, read_defaults
from tests.command import Done, gputrain_here
from tests.hints import OPTION, PLACEHOLDERS, commands_in, faults, known
from tests.small_runs import small_run
from tests.tables import each_row

PACKAGE = Path(__file__).parents[1] / "gputrain"


def texts(path: Path) -> Iterator[str]:
    """Yields every text of a file that may be printed, without docstrings; `VALUE` stands for what is put in."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inner: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node, clean=False):
            first = node.body[0]
            assert isinstance(first, ast.Expr)
            inner.add(id(first.value))
        if isinstance(node, ast.JoinedStr):
            inner |= {id(part) for part in node.values}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "shell_command":
            inner |= {id(word) for word in node.args}
            words = [word.value if isinstance(word, ast.Constant) else "VALUE" for word in node.args]
            yield " ".join(map(str, words))
    for node in ast.walk(tree):
        if id(node) in inner:
            continue
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "VALUE" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def commands_of(path: Path) -> set[str]:
    """Returns the commands that may print a text of a file: those of the kind whose folder it is in, or all."""
    kind = kinds().get(path.relative_to(PACKAGE).parts[0])
    if kind is None:
        return set(known())
    of_all = {name for name in known() if "train-" not in name}
    others = {own.name for other in kinds().values() if other != kind for own in other.commands}
    return {name for name in known() if name.endswith(kind.command)} | (of_all - others)


def test_every_command_and_option_in_a_text_of_the_program_exists() -> None:
    wrong, seen = {}, 0
    for path in sorted(PACKAGE.rglob("*.py")):
        for text in texts(path):
            seen += len(list(commands_in(text)))
            text = re.sub(r"%(\.\d)?[sdfgr]", "VALUE", text)
            if " " in text and ("--" in text or "gputrain " in text) and (found := faults(text, commands_of(path))):
                wrong[f"{path.name}: {text}"] = found
    assert seen > 50
    assert not wrong, "\n".join(f"{text!r}: {found}" for text, found in wrong.items())


# ---------------------------------------------------------------------------------------------------------- situations


def hint_of(done: Done) -> str:
    """Returns the hint of a command that was refused."""
    assert done.returncode == 2, done.stderr
    (hint,) = [line.removeprefix("hint: ") for line in done.stderr.splitlines() if line.startswith("hint: ")]
    return hint


def pasted(hint: str) -> list[str]:
    """Returns the words of the one command in a hint, as a shell reads them, with placeholders filled in."""
    (words,) = [words for words in commands_in(hint) if len(words) > 1]
    return [PLACEHOLDERS.get(word, word) for word in shlex.split(" ".join(words))]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with pictures and recordings as a newcomer has them, below names with spaces."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    Path("my pictures").mkdir()
    for number in range(4):
        Image.fromarray(rng.integers(0, 256, (32, 32, 3), np.uint8)).save(f"my pictures/{number}.png")
    Path("it's said").mkdir()
    texts = ("salom dunyo", "yaxshi kun", "bir ikki uch", "besh olti yetti")
    for number in range(4):
        tone_T = np.sin(np.arange(22050) * (0.03 + 0.004 * number)) * np.hanning(22050)
        soundfile.write(f"it's said/{number}.wav", 0.3 * tone_T, 22050)
    rows = [f"{number}|{text}\n" for number, text in enumerate(texts)]
    Path("it's said/metadata.csv").write_text("".join(rows), encoding="utf-8")
    return tmp_path


@each_row("vocoder", "tts", "asr")
def test_raw_recordings_are_prepared_by_the_command_that_a_training_prints(home: Path, kind: str) -> None:
    refused = gputrain_here(f"train-{kind}", "--data-path", "it's said", "--output-dir", "run")
    prepared = gputrain_here(*pasted(hint_of(refused)), "--num-workers", 0)
    assert prepared.returncode == 0, prepared.stderr
    data = Path(f"it's said_prepared_{kind}")
    Path("it's said_prepared").rename(data)
    train = kinds()[kind].train
    assert len(kinds()[kind].work().open_data(assemble(train, {"data_path": str(data)}))) > 0


# A command that is refused, and the one that follows its hint: `OPTIONS` are those of the hint.
FOLLOWED = (
    ("validate './my pictures'", "validate OPTIONS"),
    ("prepare-data './my pictures' --output-dir made", "prepare-data OPTIONS --output-dir made"),
    ('validate --input-dir "it\'s said"', 'validate --input-dir "it\'s said" --kind vocoder'),
    ("validate --input-dir 'my pictures' --kind vocoder", "validate --input-dir 'my pictures' --kind vae"),
)


@each_row(*FOLLOWED)
def test_a_refused_command_is_accepted_with_the_options_of_its_hint(home: Path, line: str, then: str) -> None:
    hint = hint_of(gputrain_here(*shlex.split(line)))
    options = hint[hint.index("--") :]
    for flag in OPTION.findall(then):
        assert flag in line or flag in hint, flag
    done = gputrain_here(*shlex.split(then.replace("OPTIONS", options)), "--num-workers", 0)
    assert done.returncode == 0, done.stderr


def test_a_folder_that_is_not_there_is_named_without_an_option_of_another_command(home: Path) -> None:
    for words in (
        ("prepare-data", "--input-dir", "gone", "--output-dir", "made"), ("validate", "--input-dir", "gone"),
        ("train-vae", "--data-path", "gone"),
    ):  # fmt: skip
        refused = gputrain_here(*words)
        assert "gone: no such folder" in refused.stderr
        assert OPTION.findall(hint_of(refused)) == (["--data-path"] if "--data-path" in words else [])


def test_a_run_that_is_there_goes_on_with_the_option_of_the_hint(home: Path) -> None:
    shutil.copytree(small_run("vae"), "copied run")
    words = ["train-vae", "--config", "copied run/run/config.yaml", "--data-path", "copied run/data"]
    words += ["--output-dir", "copied run/run", "--max-steps", "3"]
    hint = hint_of(gputrain_here(*words))
    assert "--resume-from auto" in hint
    done = gputrain_here(*words, "--resume-from", "auto")
    assert done.returncode == 0, done.stderr
    next_lines = [line.strip() for line in done.stdout.splitlines() if line.startswith("  ")]
    assert shlex.split(next_lines[-1]) == ["tensorboard", "--logdir", str(Path("copied run/run/logs"))]


def test_a_shipped_configuration_says_nothing_of_its_own_keys(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "gputrain")
    names = []
    for kind in kinds().values():
        for path in sorted(kind.shipped.glob("*.yaml") if kind.shipped else ()):
            read_defaults(path, kind.train, kind.translate)
            names.append(path.name)
    assert len(names) > 5
    assert [record.getMessage() for record in caplog.records] == []


def test_words_without_an_option_are_named_with_theirs(home: Path) -> None:
    for line, expected in (
        ("evaluate 'my pictures' './my pictures'", "--model 'my pictures' --data-path './my pictures'"),
        ("transcribe a.wav", "--model MODEL --input PATH"),
        ("train-tts", "--data-path PATH"),
        ("report", "RUN"),
    ):
        assert hint_of(gputrain_here(*shlex.split(line))) == f"each value follows its option: {expected}"
