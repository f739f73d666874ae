"""Prepared data of an earlier version are opened with the same content, and preparations that it began go on."""

import json
import os
import shutil
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from gputrain.engine.data import MANIFEST, digests, read_rows
from gputrain.speech.buckets import open_speech
from gputrain.speech.config import SpeechKind, SpeechOptions, SpeechPrepareConfig
from gputrain.speech.prepare import prepare_speech
from gputrain.vae.config import VaePrepareConfig
from gputrain.vae.data import open_pictures
from gputrain.vae.prepare import prepare_images
from gputrain.vocoder.prepare import VocoderPrepareConfig, prepare_sound
from gputrain.vocoder.store import open_sounds

FILES = Path(__file__).parents[1] / "data" / "earlier_stores"
EXPECTED = json.loads((FILES / "expected.json").read_text())
HELD_OUT = 0.4
SOURCES_NS = 1_700_000_000 * 10**9


def crc(numbers: Any) -> int:
    return zlib.crc32(np.ascontiguousarray(numbers).tobytes())


def pictures(folders: Sequence[Path]) -> dict[str, Any]:
    found = open_pictures(folders, held_out_share=HELD_OUT)
    parts = {"training": found.train, "held_out": found.held_out}
    facts = {name: [(one.fingerprint, one.width, one.height) for one in part] for name, part in parts.items()}
    contents = [crc(np.asarray(Image.open(one.path))) for one in found.train + found.held_out]
    return {"digests": digests(**facts), "contents": contents}


def sounds(folders: Sequence[Path]) -> dict[str, Any]:
    found = open_sounds(folders, HELD_OUT)
    contents = [[crc(wave), crc(f0)] for _, wave, f0 in found.store]
    return {"digests": digests(training=found.parts.train, held_out=found.parts.held_out), "contents": contents}


def speech(folders: Sequence[Path], kind: SpeechKind) -> dict[str, Any]:
    found = open_speech(folders, {"tts": 64, "asr": 320}[kind], HELD_OUT, kind)
    contents = [crc(found.store.wave(clip)) for clip in found.store.clips]
    return {"digests": digests(training=found.parts.train, held_out=found.parts.held_out), "contents": contents}


OPEN: dict[str, Callable[[Sequence[Path]], dict[str, Any]]] = {
    "vae": pictures,
    "vocoder": sounds,
    "tts": lambda folders: speech(folders, "tts"),
    "asr": lambda folders: speech(folders, "asr"),
}


def prepared(kind: str, output_dir: Path) -> Any:
    """Prepares the sources as the earlier version did."""
    options = SpeechOptions(language="en", min_seconds=0.1)
    if kind == "vae":
        return prepare_images(Path("pictures"), output_dir, VaePrepareConfig(target_size=16, min_size=8))
    if kind == "vocoder":
        return prepare_sound(Path("recordings"), output_dir, VocoderPrepareConfig(8000, 40, "parselmouth", f0_min=65.0))
    config = {
        "tts": SpeechPrepareConfig(options, 8000, 64, kind="tts"),
        "asr": SpeechPrepareConfig(options, 16000, 320, 0.0, kind="asr"),
    }[kind]
    return prepare_speech(Path("recordings"), output_dir, config)


@pytest.fixture(autouse=True)
def _copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current folder has copies of the stores and of their sources, with times and place as in the journals."""
    shutil.copytree(FILES, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    for path in filter(Path.is_file, Path("pictures").rglob("*")):
        os.utime(path, ns=(SOURCES_NS, SOURCES_NS))
    for journal in Path("vae").rglob("journal.jsonl"):
        head, *rows = journal.read_text().splitlines(keepends=True)
        assert json.loads(head) == {"input_dir": "pictures"}
        journal.write_text("".join([json.dumps({"input_dir": str(Path("pictures").resolve())}) + "\n", *rows]))


@pytest.mark.parametrize("kind", OPEN)
def test_earlier_stores_are_opened_with_equal_digests_and_contents(kind: str) -> None:
    shutil.copytree(Path(kind, "prepared"), "second")
    assert OPEN[kind]([Path(kind, "prepared")]) == EXPECTED[kind]["one"]
    assert OPEN[kind]([Path(kind, "prepared"), Path("second=0.5")]) == EXPECTED[kind]["two"]


def files_of(folder: Path) -> dict[str, tuple[bytes, int]]:
    paths = filter(Path.is_file, folder.rglob("*"))
    return {path.relative_to(folder).as_posix(): (path.read_bytes(), path.stat().st_ino) for path in paths}


def refused_in(folder: Path) -> list[tuple[str, str]]:
    return [
        (row["path"], row["reason"]) for row in read_rows(folder / "quarantine.jsonl", ("path", "reason", "detail"))
    ]


@pytest.mark.parametrize("kind", OPEN)
def test_a_finished_preparation_is_not_repeated(kind: str) -> None:
    if kind == "vocoder":
        pytest.importorskip("parselmouth")
    folder = Path(kind, "prepared")
    before, refused = files_of(folder), refused_in(folder)
    report = prepared(kind, folder)
    assert (report.made, report.kept) == (0, 4)
    assert [(one.path, one.reason) for one in report.refused] == refused_in(folder) == refused
    after = files_of(folder)
    assert after.keys() == before.keys()
    changed = [name for name in after if after[name][0] != before[name][0]]
    assert set(changed) <= {"quarantine.jsonl"}  # It quotes the decoder, whose messages differ between its versions.


@pytest.mark.parametrize("kind", OPEN)
def test_an_interrupted_preparation_is_continued(kind: str) -> None:
    """Two of four items are kept as they are, and the rest becomes what it becomes in a preparation at once."""
    if kind == "vocoder":
        pytest.importorskip("parselmouth")
    folder, whole = Path(kind, "interrupted"), Path(kind, "prepared")
    assert not (folder / MANIFEST).exists()
    before = files_of(folder)
    report = prepared(kind, folder)
    assert (report.made, report.kept) == (2, 2)
    after, expected = files_of(folder), files_of(whole)
    assert after.keys() == expected.keys()
    for name, (content, inode) in before.items():
        if name.endswith(".png"):
            assert after[name] == (content, inode)
        elif not name.endswith(".jsonl"):
            assert after[name][0].startswith(content)
    assert refused_in(folder) == refused_in(whole)
    if kind == "tts":
        for name in (MANIFEST, "text.json"):
            assert after[name][0] == expected[name][0]
        new, old = (read_rows(at / "sounds.jsonl", ()) for at in (folder, whole))
        for row in new:
            row.pop("bandwidth_hz", None)  # Earlier versions did not look for it.
        assert new == old
    if kind in ("vae", "tts"):  # The others depend on the versions of the resampler and of the pitch tracker.
        assert OPEN[kind]([folder]) == EXPECTED[kind]["one"]
    else:
        assert len(OPEN[kind]([folder])["contents"]) == 4
