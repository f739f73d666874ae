"""Readers of files of the user raise UserError and nothing else, whatever the files hold."""

import contextlib
import functools
import json
import math
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gputrain.audio.io import read_sound
from gputrain.cli.options import read_defaults
from gputrain.config import assemble, leaves
from gputrain.engine import checkpoint
from gputrain.engine.run_folder import PlanFile
from gputrain.errors import UserError
from gputrain.speech.store import SpeechStore
from gputrain.speech.transcripts import read_transcripts
from gputrain.tts.config import TrainTts
from gputrain.tts.coqui import translate_coqui
from gputrain.vae.config import TrainVae
from gputrain.vae.dataset import open_pictures
from gputrain.vocoder.config import TrainVocoder
from gputrain.vocoder.openvpi import translate
from gputrain.vocoder.store import VocoderStore
from gputrain.weights import read_foreign
from tests.command import gputrain_here
from tests.comparison import differing
from tests.malformed.files import intact
from tests.malformed.media import GOOD, ROW, SOUNDS, picture_bytes, sound_bytes
from tests.small_runs import small_run
from tests.tables import slow

EXAMPLES, MANY_EXAMPLES = 25, 2000  # For each test; the second with `-m slow`.
TRANSLATIONS: dict[Any, Any] = {
    TrainVae: None, TrainVocoder: functools.partial(translate, of="train"), TrainTts: translate_coqui
}  # fmt: skip


def bounded(examples: int) -> Any:
    """Returns settings under which every run tries the same examples."""
    return settings(max_examples=examples, derandomize=True, deadline=None, database=None,
                    suppress_health_check=list(HealthCheck))  # fmt: skip


def often(test: Callable[[], None]) -> Any:
    """Runs a property a few times in the suite, and often with `-m slow`."""
    return pytest.mark.parametrize("examples", [EXAMPLES, slow(MANY_EXAMPLES)])(test)


# ------------------------------------------------------------------------------------------------------ strategies

SCALARS = (
    st.none() | st.booleans() | st.integers() | st.integers(10**18, 10**40) | st.floats() | st.text(max_size=8)
    | st.sampled_from(["auto", "1e999", "nan", "inf", "0x10", "\0", "~", "-1", "3.7", "1_000", "true", "no", "/", ""])
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
SNIPPETS = st.sampled_from(
    ["\t", "\n", ": ", "- ", "*a", "&a ", "!!python/object:a.b", "{", "}", "[", "]", "'", '"', "#", "|\n", "<<: *a",
     "? ", "\ufeff", "\x00", "\x85", "---\n", "...\n", "%YAML 9", "é", "\U0001f600", "null", ".inf", "|", "\r"]
)  # fmt: skip
EDITS = st.lists(
    st.tuples(st.floats(0, 1), st.integers(0, 4), st.binary(max_size=4) | SNIPPETS.map(str.encode)),
    min_size=1,
    max_size=4,
)


def edited(content: bytes, edits: list[tuple[float, int, bytes]]) -> bytes:
    """Replaces some bytes at relative places by others."""
    for place, dropped, added in edits:
        at = int(place * len(content))
        content = content[:at] + added + content[at + dropped :]
    return content


@contextlib.contextmanager
def written(content: bytes, name: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)
        path.write_bytes(content)
        yield path


def only_user_errors(function: Callable[[], Any]) -> Any:
    with contextlib.suppress(UserError):
        return function()
    return None


# ------------------------------------------------------------------------------------------------------ properties


@often
@pytest.mark.parametrize("kind", TRANSLATIONS)
def test_configurations(kind, examples):
    flat = (small_run(kind.kind) / "run" / "config.yaml").read_bytes()

    @bounded(examples)
    @given(EDITS, st.sampled_from(["c.yaml", "c.json"]))
    def holds(edits, name):
        content = flat if name == "c.yaml" else json.dumps(yaml.safe_load(flat)).encode()
        with written(edited(content, edits), name) as path:
            read = only_user_errors(lambda: read_defaults(path, kind, TRANSLATIONS[kind]))
            if read is not None:
                only_user_errors(lambda: assemble(kind, read))

    holds()


@often
@pytest.mark.parametrize("kind", TRANSLATIONS)
def test_values_of_options(kind, examples):
    known = leaves(kind)

    @bounded(examples)
    @given(st.dictionaries(st.sampled_from(sorted(known)) | st.text(max_size=6), VALUES, max_size=4))
    def holds(values):
        made = only_user_errors(lambda: assemble(kind, {"data_path": "data", **values}))
        assert made is None or all(
            math.isfinite(value) for leaf in known.values() if leaf.type is float for value in [_leaf(made, leaf.path)]
        )

    holds()


def _leaf(value: Any, path: tuple[str, ...]) -> Any:
    return functools.reduce(getattr, path, value)


@often
def test_command_lines(examples):
    flags = [flag for leaf in leaves(TrainVae).values() for flag in leaf.flags]
    words = st.sampled_from(flags) | st.text(max_size=6) | st.sampled_from(["--", "-", "-c", "--batch", "1e999", "nan"])

    @bounded(max(6, examples // 6))
    @given(st.lists(words, max_size=4))
    def holds(line):
        with tempfile.TemporaryDirectory() as folder:
            paths = ("--data-path", f"{folder}/none", "--output-dir", f"{folder}/out", "--device", "cpu")
            done = gputrain_here("train-vae", *(word for word in line if word not in ("-h", "--help")), *paths)
            assert done.returncode == 2, done.stderr
            assert done.stderr.strip()

    holds()


@often
@pytest.mark.parametrize("name", ["metadata.csv", "metadata.jsonl"])
def test_transcripts(name, examples):
    good = (GOOD if name == "metadata.csv" else ROW).encode()

    @bounded(examples)
    @given(EDITS)
    def holds(edits):
        with written(edited(good, edits), name) as path:
            read = only_user_errors(lambda: read_transcripts(path.parent, ["0.wav", "1.wav"]))
            for utterance in read.utterances if read else ():
                assert utterance.path in ("0.wav", "1.wav")
                utterance.text.encode()

    holds()


@often
@pytest.mark.parametrize("name", ["a.wav", "a.flac", "a.ogg"])
def test_sounds(name, examples):
    good = sound_bytes(0.2, format=name[2:].upper())
    bad = [content for _, content in SOUNDS.values() if len(content) < 40000]

    @bounded(examples)
    @given(st.sampled_from([good, *bad]), EDITS)
    def holds(content, edits):
        with written(edited(content, edits), name) as path:
            read = only_user_errors(lambda: read_sound(path))
            assert read is None or (len(read.wave_T) and read.rate_hz > 0)

    holds()


@often
def test_plan_files(examples):
    good = (small_run("vae") / "run" / "plan.json").read_bytes()

    @bounded(examples)
    @given(EDITS)
    def holds(edits):
        with written(edited(good, edits), "plan.json") as path:
            only_user_errors(lambda: PlanFile.read(path))

    holds()


@often
@pytest.mark.parametrize("kind", ["vae", "vocoder", "tts"])
def test_prepared_data(kind, examples):
    read: dict[str, Callable[[Path], Any]] = {
        "vae": open_pictures,
        "vocoder": lambda folder: list(VocoderStore.open(folder)),
        "tts": lambda folder: [store.wave(clip) for store in [SpeechStore.open(folder)] for clip in store.clips],
    }

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "data")
        shutil.copytree(small_run(kind) / "data", folder)
        path = folder / "manifest.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        keys = sorted({key for row in rows for key in row})

        @bounded(examples)
        @given(st.integers(0, len(rows) - 1), st.sampled_from(keys), VALUES, EDITS | st.none())
        def holds(number, key, value, edits):
            changed = [{**row, key: value} if index == number else row for index, row in enumerate(rows)]
            content = "".join(json.dumps(row) + "\n" for row in changed).encode()
            path.write_bytes(edited(content, edits) if edits else content)
            only_user_errors(lambda: read[kind](folder))

        holds()


@often
def test_checkpoints(examples):
    """A checkpoint with changed bytes is refused, or holds exactly what it held."""
    good = intact("vocoder")
    with written(good, "c.pt") as path:
        content = checkpoint.read(path, "vocoder")

    @bounded(examples)
    @given(EDITS)
    def holds(edits):
        with written(edited(good, edits), "c.pt") as path:
            read = only_user_errors(lambda: checkpoint.read(path, "vocoder"))
            assert read is None or not differing(read, content)

    holds()


@often
def test_files_of_torch(examples):
    """Files of other programs have no checksum; what they hold may change, and no other error may come of it."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name, "model.ckpt")
        torch.save({"generator": {"a": torch.arange(6.0), "b": [1, "c"]}}, path)
        good = path.read_bytes()

        @bounded(examples)
        @given(EDITS)
        def holds(edits):
            path.write_bytes(edited(good, edits))
            only_user_errors(lambda: read_foreign(path, instead="take another"))

        holds()


@often
def test_pictures(examples):
    good = [picture_bytes(format) for format in ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")]

    @bounded(examples)
    @given(st.sampled_from(good), EDITS)
    def holds(content, edits):
        with written(edited(content, edits), "a.png") as path:
            only_user_errors(lambda: open_pictures(path.parent))

    holds()
