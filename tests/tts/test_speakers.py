"""A new speaker in a voice: what is kept bit for bit, the names of the speech, and what is refused."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gputrain.errors import UserError
from gputrain.tts.evaluate import evaluate_voice
from gputrain.tts.export import export_piper
from gputrain.tts.load import LoadedVoice, load_voice, read_origin
from gputrain.tts.model import Voice
from gputrain.tts.pretrained_import import Origin
from gputrain.tts.speakers import KnownVoice
from tests.speech.trainings import read_checkpoint, rows
from tests.tables import each_row
from tests.tts.test_train import QUIET, TINY, small_presets, spoken, train

CPU = torch.device("cpu")
FEW = ("so it is said", "an owl", "yes", "we go", "all is well")


@pytest.fixture(autouse=True, scope="module")
def _small() -> Iterator[None]:
    with small_presets():
        yield


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """Holds prepared speech and the runs of a voice of two speakers and of one without a name."""
    folder = tmp_path_factory.mktemp("base")
    for name, speakers, texts in (
        ("both", ("ann", "bob"), {}), ("alone", ("",), {}), ("new", ("",), {"texts": FEW}),
        ("eve", ("eve",), {"texts": FEW}),
    ):  # fmt: skip
        spoken(folder / name, speakers=speakers, **texts)
    train(folder / "two", folder / "both", **QUIET, max_steps=2)
    train(folder / "one", folder / "alone", **QUIET, max_steps=2)
    return folder


def adding(base: Path, run: str, *data: str, **changes: Any) -> dict[str, Any]:
    """Returns the settings of a training that adds eve to a run's voice."""
    return {
        **TINY, **QUIET, "data_path": [str(base / name) for name in data], "init_from": str(base / run),
        "add_speaker": "eve", "max_steps": 3, **changes,
    }  # fmt: skip


@pytest.fixture(scope="module")
def learnt(base) -> dict[str, Any]:
    """The checkpoint of a training of the embedding alone."""
    options = {"train_part": "speaker", "evaluate_every_steps": 3, "output_dir": str(base / "learnt")}
    return train.of(adding(base, "two", "new", **options))


@torch.no_grad()
def said(loaded: LoadedVoice, speaker: int | None) -> Tensor:
    torch.manual_seed(0)
    speaker_B = None if speaker is None else torch.tensor([speaker])
    return loaded.voice.infer(torch.arange(3, 18)[None], torch.tensor([15]), speaker_B)[0]


def test_only_the_row_of_the_new_speaker_learns_and_others_sound_as_before_bit_for_bit(base, learnt):
    """With the average, the optimizer and the weight decay of every other weight."""
    before = read_checkpoint(base / "two" / "checkpoint_last.pt")["modules"]["ema"]
    for module, prefix in (("voice", "average."), ("ema", "")):
        for name, tensor in learnt["modules"][module].items():
            was = before[prefix + name]
            if not name.endswith("speakers.weight"):
                assert torch.equal(tensor, was), name
                continue
            assert torch.equal(tensor[:2], was)
            assert (tensor[2] - was.mean(dim=0)).abs().min() > 0.01  # 50 times the learning rate, three steps.
    assert learnt["facts"]["speakers"] == ["ann", "bob", "eve"]
    assert list(learnt["optimizers"]["generator"]["state"]) == [0]
    old, new = load_voice(base / "two", CPU), load_voice(base / "learnt", CPU)
    for speaker in (0, 1):
        assert torch.equal(said(old, speaker), said(new, speaker))
    assert not torch.equal(said(new, 2), said(new, 1))


@pytest.mark.slow
def test_a_stock_piper_speaks_old_and_new_speakers_under_their_numbers(base, learnt, tmp_path):
    piper = pytest.importorskip("piper")
    for run in ("two", "learnt"):
        export_piper(load_voice(base / run, CPU), tmp_path, run)
    config = json.loads((tmp_path / "learnt.onnx.json").read_text())
    assert config["speaker_id_map"] == {"ann": 0, "bob": 1, "eve": 2}
    voices = [piper.PiperVoice.load(tmp_path / f"{run}.onnx") for run in ("two", "learnt")]

    def spoken_by(voice: Any, speaker: int) -> np.ndarray:
        still = piper.SynthesisConfig(speaker_id=speaker, noise_scale=0.0, noise_w_scale=0.0)
        return np.concatenate([chunk.audio_float_array for chunk in voice.synthesize("so it is", still)])

    for speaker in (0, 1):
        assert np.array_equal(*(spoken_by(voice, speaker) for voice in voices))
    assert len(spoken_by(voices[1], 2)) > 0


def test_a_voice_of_one_speaker_keeps_its_sound_under_number_0(base, tmp_path):
    """The layers that are conditioned on a speaker begin there, and add exactly nothing for the old one."""
    made = train.of(adding(base, "one", "new", train_part="speaker", output_dir=str(tmp_path)))
    assert made["facts"]["speakers"] == ["", "eve"]
    table = made["modules"]["voice"]["speakers.weight"]
    assert not table[0].any()
    assert table[1].abs().min() > 0.01
    old, new = load_voice(base / "one", CPU), load_voice(tmp_path, CPU)
    assert torch.equal(said(old, None), said(new, 0))
    assert not torch.equal(said(new, 0), said(new, 1))


@pytest.mark.slow
def test_with_speech_of_the_others_all_weights_train_and_both_are_evaluated(base, tmp_path):
    """Speech without a name is the old speaker's where the new one has a name. The start is needed only once."""
    options = adding(base, "one", "eve", "alone", output_dir=str(tmp_path), evaluate_every_steps=2)
    first = train.of({**options, "max_steps": 2})
    made = train.of({**options, "init_from": "moved away", "resume_from": "auto"})
    assert made["facts"] == first["facts"]
    assert made["facts"]["speakers"] == ["", "eve"]
    assert not torch.equal(made["modules"]["voice"]["decoder.pre.weight"],
                           first["modules"]["voice"]["decoder.pre.weight"])  # fmt: skip
    figures = rows(tmp_path)[-1]
    for name in ("mcd_sl_db", "mel_distance", "score"):
        new, old = (figures[f"eval/{group}_{name}"] for group in ("new", "old"))
        assert new != old
        assert figures[f"eval/{name}"] == pytest.approx((new + old) / 2, rel=1e-12)
    found = evaluate_voice(tmp_path, (base / "eve", base / "alone"), device="cpu")
    assert {"new_mcd_sl_db", "old_mcd_sl_db"} < found.scalars.keys()
    assert "new_mcd_sl_db" not in evaluate_voice(tmp_path, base / "eve", device="cpu").scalars


@each_row(
    (("new",), {"add_speaker": "ann", "train_part": "speaker"}, "has a speaker of this name"),
    (("new",), {}, "speech of eve alone, of which the other speakers would be unlearnt"),
    (("new", "alone"), {"init_from": "one"}, "speech of eve alone, .*told apart by a column of speakers"),
    (("eve",), {"add_speaker": "zed"}, "speech of eve, who is neither zed nor in"),
    (("new", "both"), {"train_part": "speaker"}, "also has speech of others than eve"),
    (("both",), {}, "no speech of eve"),
    (("eve", "both", "alone"), {}, "some of the speech names no speaker, and .* has 2"),
    (("new",), {"train_part": "speaker", "preset": "high"}, "tensors have other shapes than those of preset high"),
    (("new",), {"init_from": None}, "add_speaker eve needs a voice"),
    (("new",), {"add_speaker": "", "train_part": "speaker"}, "train_part speaker trains a new speaker"),
)
def test_speech_and_settings_that_cannot_add_a_speaker_are_refused(base, tmp_path, data, changes, said):
    values = adding(base, "two", *data, output_dir=str(tmp_path / "run"), **changes)
    if changes.get("init_from"):
        values["init_from"] = str(base / changes["init_from"])
    with pytest.raises(UserError) as raised:
        train.of({name: value for name, value in values.items() if value is not None})
    assert re.search(said, f"{raised.value.message} {raised.value.hint}")


@each_row(
    ({"add_speaker": "", "train_part": "all"}, "began with add_speaker eve", "go on with --add-speaker eve"),
    ({"add_speaker": "zed"}, "began with add_speaker eve", "go on with --add-speaker eve"),
    ({"train_part": "all"}, "began with train_part speaker", "go on with --train-part speaker"),
)
def test_a_run_goes_on_with_its_new_speaker_and_its_part(base, learnt, tmp_path, changes, said, hint):
    resumed = {"resume_from": str(base / "learnt" / "checkpoint_last.pt"), "output_dir": str(tmp_path / "run")}
    with pytest.raises(UserError, match=said) as raised:
        train.of({**adding(base, "two", "new", train_part="speaker", **resumed), **changes})
    assert hint in raised.value.hint


@pytest.mark.slow
def test_speech_with_other_symbols_is_refused_and_with_fewer_takes_those_of_the_voice(base, tmp_path):
    letters = spoken(tmp_path / "letters", texts=("so it is said", "an owl", "yes"), language="characters")
    run = tmp_path / "letters run"
    train(run, letters, **QUIET, max_steps=1)
    for name, texts in (("fewer", ("is it", "so an owl")), ("other", ("is it", "ʒ an owl"))):
        spoken(tmp_path / name, texts=texts, language="characters", speakers=("",))
    values = {**TINY, **QUIET, "init_from": str(run), "add_speaker": "eve", "train_part": "speaker", "max_steps": 1}
    made = train.of({**values, "data_path": str(tmp_path / "fewer"), "output_dir": str(tmp_path / "made")})
    assert made["facts"]["text"] == read_checkpoint(run / "checkpoint_last.pt")["facts"]["text"]
    assert evaluate_voice(tmp_path / "made", tmp_path / "fewer", device="cpu", held_out_share=1).clips == 2
    with pytest.raises(UserError, match=r"symbols that .* lacks: ʒ"):
        train.of({**values, "data_path": str(tmp_path / "other"), "output_dir": str(tmp_path / "none")})


def test_speakers_of_other_toolkits_are_known_by_row(base):
    """A row without a name is known by its number; a voice without a table has one speaker."""
    several = Origin({"speakers.weight": torch.zeros(3, 8)}, {}, {}, {"anna": 0, "carl": 2}, "piper.ckpt")
    assert KnownVoice.of(several).speakers == ("anna", "1", "carl")
    assert KnownVoice.of(Origin({}, {}, {}, {}, "piper.ckpt")).speakers == ("",)
    own = KnownVoice.of(read_origin(base / "two", Voice.__new__(Voice), torch.nn.Module()))
    assert own.speakers == ("ann", "bob")
