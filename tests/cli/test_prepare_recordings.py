"""`gputrain prepare-data --kind vocoder`, from recordings to a store, and options of another kind."""

import json

import numpy as np
import pytest
import soundfile

from gputrain.cli.settings import PrepareSettings
from gputrain.config import assemble
from gputrain.errors import UserError
from gputrain.vocoder.store import VocoderStore
from tests.command import gputrain_here
from tests.tables import each_row


@pytest.mark.slow
def test_recordings_become_a_store(tmp_path):
    pytest.importorskip("parselmouth")
    (tmp_path / "in").mkdir()
    time = np.arange(11025) / 22050
    for number, hz in enumerate((200, 300)):
        soundfile.write(tmp_path / "in" / f"{number}.wav", 0.3 * np.sin(2 * np.pi * hz * time), 22050)
    (tmp_path / "in" / "bad.wav").write_bytes(b"RIFF")
    words = ("--input-dir", tmp_path / "in", "--output-dir", tmp_path / "out", "--kind", "vocoder")
    words = (
        *words,
        "--audio-sample-rate",
        16000,
        "--hop_size",
        256,
        "--num-workers",
        2,
        "--output-file",
        tmp_path / "r.json",
    )
    done = gputrain_here("prepare-data", *words)
    assert done.returncode == 0, done.stderr
    assert "bad.wav" in done.stderr
    assert json.loads((tmp_path / "r.json").read_text())["made"] == 2
    store = VocoderStore.open(tmp_path / "out")
    assert (store.format.sampling_rate, store.format.hop_size) == (16000, 256)
    assert [clip.samples for clip in store.clips] == [8000, 8000]
    again = gputrain_here("prepare-data", *words[:-4])
    assert "kept     2" in again.stdout


@each_row(
    ({"kind": "vocoder", "target_size": 512}, "--target-size"), ({"audio_sample_rate": 22050}, "--audio-sample-rate")
)
def test_options_of_the_other_kind_are_refused(given, flag):
    with pytest.raises(UserError, match="does nothing with --kind") as raised:
        assemble(PrepareSettings, {"input_dir": "in", "output_dir": "out", **given})
    assert raised.value.hint == f"drop {flag}"


def test_recordings_need_a_folder_to_go_to():
    with pytest.raises(UserError, match="output_dir is missing"):
        assemble(PrepareSettings, {"input_dir": "in", "kind": "vocoder"})
