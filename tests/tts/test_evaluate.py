"""Evaluation of voices with known faults, and of a trained one in a folder."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gputrain.audio.mel import log_mel
from gputrain.config import assemble, flatten
from gputrain.engine import checkpoint
from gputrain.engine.recipe import at_least_fp32
from gputrain.errors import UserError
from gputrain.speech.buckets import Speech, open_speech
from gputrain.speech.error_rates import Edits, character_edits
from gputrain.speech.store import SpeechClip, SpeechStore, frame_count
from gputrain.speech.text.frontend import frontend
from gputrain.tts import evaluate, measures
from gputrain.tts.align import alignment_scores, search
from gputrain.tts.architecture import VoiceArchitecture
from gputrain.tts.config import TrainTts
from gputrain.tts.evaluate import (
    LONGEST,
    Evaluation,
    HeldOutClips,
    batch_clips,
    evaluate_clips,
    evaluate_voice,
    open_recogniser,
)
from gputrain.tts.latents import kl_loss
from gputrain.tts.load import architecture_of
from gputrain.tts.model import Voice, frame_prior
from gputrain.tts.reading import Text, clip_seed, encode_recordings, eval_mode, synthesise
from tests.command import ProgressSeen
from tests.speech.speech import RATE_HZ, hum
from tests.tables import each_row
from tests.toy import whole_checkpoint
from tests.tts.test_train import small_presets, spoken
from tests.tts.voices import build, small

pytest.importorskip("parselmouth")

HOP = 256
ENGLISH = frontend("en")
CPU = torch.device("cpu")
TEXTS = ("so it is said", "an owl", "two words and more", "it is late", "yes")


def store_of(folder: Path, **changes: Any) -> SpeechStore:
    """Writes a hum for each text, with its own pitch and length."""
    return SpeechStore.open(spoken(folder, **{"texts": TEXTS, **changes}))


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> SpeechStore:
    return store_of(tmp_path_factory.mktemp("speech"))


def sizes(speakers: int = 1, **changes: int | float) -> VoiceArchitecture:
    shape = small("medium", speakers, **changes)
    return replace(shape, num_symbols=len(ENGLISH.symbols), mel=replace(shape.mel, sampling_rate=RATE_HZ, fmax=8000.0))


class PlaybackVoice(Voice):
    """Returns the recording of every text, `pace` times as long; the rest is silence."""

    def __init__(self, store: SpeechStore, pace: float = 1.0) -> None:
        super().__init__(sizes())
        self.known = {tuple(ENGLISH.ids(clip.normalized)): clip for clip in store.clips}
        self.store, self.pace, self.decoder = store, pace, PlaybackDecoder(self)

    def encode_text(self, ids_BS, lengths_B):
        lengths = lengths_B.tolist()
        self.asked = [self.known[tuple(ids[:n].tolist())] for ids, n in zip(ids_BS, lengths, strict=True)]
        return super().encode_text(ids_BS, lengths_B)

    def predict_durations(self, text, speaker_BG1=None, **manner):
        frames = torch.tensor([self.pace * frame_count(clip.samples, HOP) for clip in self.asked])
        return torch.zeros(text.mask_B1S.shape[::2]).index_fill(1, torch.tensor([2]), 1.0) * frames[:, None].ceil()


class PlaybackDecoder(nn.Module):
    def __init__(self, voice: PlaybackVoice) -> None:
        super().__init__()
        self.voice = [voice]  # The list prevents that the voice becomes a submodule.

    def forward(self, latent_BCT, speaker_BG1=None):
        waves = torch.zeros(len(latent_BCT), 1, latent_BCT.shape[2] * HOP)
        for row, clip in enumerate(self.voice[0].asked):
            said = torch.from_numpy(self.voice[0].store.wave(clip).copy())[: waves.shape[2]] / 32768
            waves[row, 0, : len(said)] = said
        return waves


def measured(voice: Voice, store: SpeechStore, batch_size: int = 1, **settings) -> dict[str, float]:
    return evaluate_clips(voice, batch_clips(store, store.clips, HOP, batch_size), CPU, **settings).scalars


@pytest.mark.parametrize("quick", [False, True])
def test_a_voice_that_is_the_recording(store, quick):
    found = measured(PlaybackVoice(store), store, batch_size=3, quick=quick)
    for name in ("mcd_db", "mcd_db_margin", "mcd_sl_db", "score", "mel_distance"):
        assert found[name] == 0, name
    assert found["duration_ratio"] == found["length_mismatch"] == 1
    assert ("f0_rmse_cents" in found) == ("vuv_f1" in found) == ("rtf" in found) == (not quick)
    if not quick:
        assert found["f0_rmse_cents"] == 0
        assert found["vuv_f1"] == 1
        assert found["rtf"] > 0


@each_row((1.5, 1.5), (0.5, 0.5), (1000.0, LONGEST), (math.inf, LONGEST))
def test_broken_durations_are_seen(store, pace, ratio):
    """Half of the recording, or the recording with a limited silence after it."""
    found = measured(PlaybackVoice(store, pace), store, quick=True)
    assert found["duration_ratio"] == pytest.approx(ratio, rel=0.03)  # Durations are whole frames.
    assert found["length_mismatch"] == pytest.approx(max(ratio, 1 / ratio), rel=0.03)
    assert found["mcd_db"] > 1
    assert found["score"] == pytest.approx(-found["mcd_db"] * found["length_mismatch"], rel=0.05)
    assert found["score"] < -found["mcd_db"]
    assert found["mel_distance"] == 0


def test_a_voice_that_has_diverged_has_bad_and_finite_figures(store):
    found = measured(PlaybackVoice(store, math.nan), store, quick=True)
    assert found["duration_ratio"] == pytest.approx(
        5 * HOP / sum(HOP * frame_count(c.samples, HOP) for c in store.clips)
    )
    assert all(math.isfinite(value) for value in found.values())
    voice = build(sizes())
    voice.decoder.register_forward_hook(lambda module, given, made: made * math.nan)
    found = measured(voice, store, quick=True)
    silent = measures.compare(np.zeros(4 * HOP, np.float32), hum(0.5), voice.architecture.mel)
    assert 1 < found["mcd_db"] < 3 * silent.mcd_db


def test_the_same_weights_have_the_same_figures_and_nobody_elses_random_numbers_are_used(store):
    """A voice in training, with dropout, gives the same result as in eval mode, and for any batch size."""
    voice = build(sizes(encoder_dropout=0.5, duration_dropout=0.5)).train()
    state = torch.get_rng_state()
    first, again = (measured(voice, store, quick=True) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in voice.modules())
    assert all(parameter.grad is None for parameter in voice.parameters())
    torch.manual_seed(99)
    assert first == again == measured(voice.eval(), store, quick=True)
    assert not any(module.training for module in voice.modules())
    together_ = measured(voice, store, batch_size=3, quick=True)
    for name, value in first.items():
        assert together_[name] == pytest.approx(value, rel=0.02), name
    assert together_["duration_ratio"] == first["duration_ratio"]


def test_lower_precision_gives_nearly_the_same_metrics(store):
    voice = build(sizes())
    exactly = measured(voice, store, batch_size=2, quick=True)
    with torch.autocast("cpu", torch.bfloat16):
        coarsely = measured(voice, store, batch_size=2, quick=True)
    assert coarsely != exactly
    for name in ("mcd_db", "duration_ratio", "mel_distance", "kl", "duration"):
        assert coarsely[name] == pytest.approx(exactly[name], rel=0.1), name


def read_by_hand(voice: Voice, store: SpeechStore, clip: SpeechClip) -> dict[str, float]:
    """Computes the training losses of a single clip, not divided yet."""
    draws = torch.Generator().manual_seed(clip_seed(clip))
    ids = torch.tensor([ENGLISH.ids(clip.normalized)])
    frames, symbols = frame_count(clip.samples, HOP), ids.shape[1]
    wave = torch.zeros(1, frames * HOP)
    wave[0, : clip.samples] = torch.from_numpy(store.wave(clip).copy()) / 32768
    duration_noise, noise = torch.randn(1, 2, symbols, generator=draws), torch.randn(1, 8, frames, generator=draws)
    mel = voice.architecture.mel
    padded = nn.functional.pad(wave[None], (384, 384), mode="reflect")[0]
    window = torch.hann_window(1024)
    spectrogram = torch.stft(padded, 1024, HOP, 1024, window, center=False, return_complex=True).abs()
    with eval_mode(voice):
        text = voice.encode_text(ids, torch.tensor([symbols]))
        posterior, prior_latent = voice.encode_sound(spectrogram, torch.tensor([frames]), noise)
        scores = alignment_scores(prior_latent, text.mean_BCS, text.log_scale_BCS)
        durations = search(scores, torch.tensor([symbols]), torch.tensor([frames]))
        kl = kl_loss(prior_latent, posterior.log_scale_BCT, *frame_prior(text, durations, frames), posterior.mask_B1T)
        loss = voice.duration_loss(text, durations, duration_noise)
        made = at_least_fp32(voice.decoder(posterior.latent_BCT))[0].numpy()
    distance = np.abs(measures.log_mel_of(made[0], mel) - measures.log_mel_of(wave[0].numpy(), mel)).mean(axis=0)
    of_symbols = durations[0].numpy()
    return {
        "kl": float(kl), "duration": float(loss), "mel_distance": float(distance.sum()), "frames": frames,
        "symbols": symbols, "alignment_gain": measures.alignment_gain(scores[0].numpy(), of_symbols),
    }  # fmt: skip


@pytest.mark.parametrize(("batch_size", "rel"), [(1, 1e-5), (5, 0.01)])
def test_figures_of_reading_against_training_by_hand(store, batch_size, rel):
    """A recording's end is padded by reflection, and followed by silence in a batch with longer ones."""
    voice = build(sizes())
    found = measured(voice, store, batch_size, quick=True)
    rows = [read_by_hand(voice, store, clip) for clip in store.clips]
    total = {name: sum(row[name] for row in rows) for name in rows[0]}
    assert found["kl"] == pytest.approx(total["kl"] / total["frames"], rel=rel)
    assert found["duration"] == pytest.approx(total["duration"] / total["symbols"], rel=rel)
    assert found["mel_distance"] == pytest.approx(total["mel_distance"] / total["frames"], rel=rel)
    assert found["alignment_gain"] == pytest.approx(total["alignment_gain"] / len(rows), rel=rel)


def test_a_recording_made_again_is_compared_over_its_own_frames(store):
    """Compares silence with noise after the end of a clip, which must be ignored."""
    voice, random = build(sizes()), torch.Generator().manual_seed(0)
    batch = batch_clips(store, store.clips, HOP, 5).collated([1, 2])
    short, long = batch.frames_B.tolist()
    assert short < long - 4

    def silence(module, given, made_B1L):
        behind_L = torch.arange(made_B1L.shape[2]) >= short * HOP
        return torch.randn(made_B1L.shape, generator=random) * behind_L * torch.tensor([1, 0])[:, None, None]

    voice.decoder.register_forward_hook(silence)
    with eval_mode(voice):
        found = encode_recordings(voice, batch, [1, 2], CPU).mel_distance_B
    real_BMT = log_mel(batch.wave_BT / 32768, voice.architecture.mel)
    for row, frames in enumerate((short, long)):
        expected = (real_BMT[row, :, :frames] - math.log(1e-5)).mean(dim=0).sum()
        assert found[row].item() == pytest.approx(expected.item(), rel=1e-5)


def test_figures_of_speaking_against_measures_by_hand(store):
    voice = build(sizes())
    found = measured(voice, store)
    matches = []
    for clip in store.clips:
        frames = frame_count(clip.samples, HOP)
        with eval_mode(voice):
            [spoken] = synthesise(
                voice, [Text(ENGLISH.ids(clip.normalized), 0, clip_seed(clip), LONGEST * frames)], CPU
            )
        assert len(spoken.wave_L) == HOP * int(spoken.durations_S.sum()) <= LONGEST * frames * HOP
        real = np.pad(store.wave(clip) / np.float32(32768), (0, frames * HOP - clip.samples))
        mel = voice.architecture.mel
        matches.append(measures.compare(spoken.wave_L, real, mel, floor_hz=60, ceiling_hz=600))
    mcd = np.array([match.mcd_db for match in matches])
    ratio = np.array([match.duration_ratio for match in matches])
    assert found["mcd_db"] == pytest.approx(mcd.mean(), rel=1e-6)
    assert found["mcd_db_margin"] == pytest.approx(1.96 * mcd.std(ddof=1) / math.sqrt(5), rel=1e-6)
    assert found["mcd_sl_db"] == -found["score"] == pytest.approx((mcd * np.maximum(ratio, 1 / ratio)).mean(), rel=1e-6)
    assert ratio.std() > 0.01
    by_hand = sum((match.pitch for match in matches), measures.PitchMatch()).rmse_cents
    assert found.get("f0_rmse_cents") == (by_hand and pytest.approx(by_hand, rel=1e-12))


def test_a_recogniser_that_writes_nothing_is_accused_and_not_the_voice(store, caplog):
    measured(build(sizes()), store, quick=True, recogniser=lambda wave_L: "")
    assert f"the recogniser wrote nothing for {len(TEXTS)} of {len(TEXTS)} recordings" in caplog.text


def test_a_recogniser_transcribes_both_sides(store):
    """The recogniser transcribes recordings correctly, and everything else as "yes"."""
    waves = {store.wave(clip).tobytes()[:4000]: clip.normalized for clip in store.clips}

    def transcribe(wave_L):
        text = waves.get((wave_L * 32768).astype(np.int16).tobytes()[:4000])
        return text if text else "yes"

    written = "".join(TEXTS)
    found = measured(PlaybackVoice(store), store, quick=True, recogniser=transcribe)
    assert found["cer"] == found["wer"] == found["recorded_cer"] == found["recorded_wer"] == 0
    found = measured(build(sizes()), store, quick=True, recogniser=transcribe)
    assert found["recorded_cer"] == found["recorded_wer"] == 0
    expected = sum((character_edits(text, "yes") for text in TEXTS), Edits())
    assert found["cer"] == expected.rate > 0.5
    assert expected.length == len(written)
    assert found["wer"] == 13 / 14  # One of 14 words is right.


# ------------------------------------------------------------------------------------- a training, and a folder


def settings_of(store: SpeechStore, **changes) -> TrainTts:
    return assemble(TrainTts, {"data_path": str(store.folder), "held_out_share": 0.4, **changes})


def speech_of(store: SpeechStore) -> Speech:
    return open_speech(store.folder, 0.4)


def test_a_training_measures_its_held_out_clips(store):
    voice, speech = build(sizes()).train(), speech_of(store)
    held_out = speech.parts.held_out
    assert 1 < len(held_out) < len(TEXTS)
    report = HeldOutClips(speech, settings_of(store)).evaluate(voice, CPU)
    expected = evaluate_clips(voice, batch_clips(store, held_out, HOP, 16), CPU, quick=True)
    assert report.scalars == expected.scalars
    assert report.scalars["score"] < 0
    one = HeldOutClips(speech, settings_of(store, eval_clips=1)).evaluate(voice, CPU).scalars
    first = min(held_out, key=lambda clip: clip.fingerprint)
    assert one == evaluate_clips(voice, batch_clips(store, [first], HOP, 1), CPU, quick=True).scalars
    assert "mcd_db_margin" not in one


def test_a_failing_recogniser_is_named(monkeypatch):
    class Failing:
        def read(self, wave_L, rate_hz):
            assert not torch.is_autocast_enabled("cpu")  # That of the voice is not the recogniser's.
            raise RuntimeError("no such tensor")

    monkeypatch.setattr(evaluate, "speech_checker", lambda model, device: Failing())
    fails = open_recogniser("of the test", ENGLISH, RATE_HZ, "cpu")
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(UserError, match="the recogniser failed on a sound: no such tensor"),
    ):
        fails(np.zeros(RATE_HZ, np.float32))


def run_of(folder: Path, store: SpeechStore, *speakers: str) -> tuple[Path, Voice]:
    """Writes a checkpoint as training does. Returns it with its voice."""
    settings = settings_of(store, preset="fast")
    facts = {"text": ENGLISH.to_json(), "sampling_rate": RATE_HZ, "hop_size": HOP, "speakers": list(speakers)}
    torch.manual_seed(1)
    voice = Voice(architecture_of(settings, facts))
    modules = {"voice": voice.state_dict(), "discriminators": {}}
    folder.mkdir()
    checkpoint.save(folder, whole_checkpoint(kind="tts", config=flatten(settings), facts=facts, modules=modules))
    return folder, voice


@pytest.fixture(scope="module")
def small_run(store, tmp_path_factory) -> tuple[Path, Voice]:
    with small_presets():
        return run_of(tmp_path_factory.mktemp("runs") / "run", store, "ann")


@pytest.fixture
def trained(small_run) -> Iterator[tuple[Path, Voice]]:
    """A run, which is read with the same small presets."""
    with small_presets():
        yield small_run


def without_time(found: Evaluation) -> dict[str, float]:
    return {name: value for name, value in found.scalars.items() if name != "rtf"}


def test_a_run_is_measured_on_what_it_held_out(store, trained):
    run, voice = trained
    progress = ProgressSeen()
    found = evaluate_voice(run, store.folder, device="cpu", progress=progress)
    held_out = speech_of(store).parts.held_out
    expected = evaluate_clips(voice.eval(), batch_clips(store, held_out, HOP, 1), CPU)
    assert without_time(found) == pytest.approx(without_time(expected), rel=1e-5)
    assert found.clips == len(held_out)
    assert progress.leads_to(len(held_out))
    assert json.loads(json.dumps(found.to_json()))["clips"] == len(held_out)
    fewer = evaluate_voice(run, store.folder, device="cpu", held_out_share=1, max_clips=1)
    assert fewer.clips == 1
    assert without_time(fewer) == pytest.approx(
        without_time(evaluate_clips(voice, batch_clips(store, store.clips[:1], HOP, 1), CPU)), rel=1e-5
    )


def test_speech_that_is_not_for_the_voice(store, trained, tmp_path):
    run, _ = trained
    uzbek = store_of(tmp_path / "uz", language="characters")
    with pytest.raises(UserError, match=r"other symbols than .*only the voice has ") as raised:
        evaluate_voice(run, uzbek.folder, device="cpu")
    assert " b " in raised.value.message  # No text has a b.
    with pytest.raises(UserError, match=r"at 22050 Hz, and the voice .* has 16000 Hz"):
        evaluate_voice(run, store_of(tmp_path / "fast", rate_hz=22050).folder, device="cpu")
    with pytest.raises(UserError, match="not prepared for tts"):
        evaluate_voice(run, tmp_path, device="cpu")


def test_speakers_are_known_by_name(store, trained, tmp_path):
    run, voice = run_of(tmp_path / "run", store, "bob", "ann")
    both = store_of(tmp_path / "both", speakers=("ann", "bob"))
    found = evaluate_voice(run, both.folder, device="cpu", held_out_share=1, max_clips=2)
    clips = [replace(clip, speaker=1 - clip.speaker) for clip in both.clips[:2]]
    expected, other = (evaluate_clips(voice, batch_clips(both, some, HOP, 1), CPU) for some in (clips, both.clips[:2]))
    assert without_time(found) == pytest.approx(without_time(expected), rel=1e-5)
    assert found.scalars["kl"] != pytest.approx(other.scalars["kl"], rel=1e-5)
    eve = store_of(tmp_path / "eve", speakers=("ann", "eve")).folder
    with pytest.raises(UserError, match="does not have the speakers eve") as raised:
        evaluate_voice(run, [both.folder, eve], device="cpu", held_out_share=1)  # The message names the second folder.
    assert raised.value.message.startswith(f"{eve}: {run}")
    assert raised.value.hint == "its speakers are bob, ann"
    assert evaluate_voice(trained[0], both.folder, device="cpu", held_out_share=1, max_clips=2).clips == 2
