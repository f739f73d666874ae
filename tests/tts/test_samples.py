"""Samples of a training: their texts, audio, and durations in the picture."""

import numpy as np
import pytest
import torch

from gputrain.audio.mel import log_mel
from gputrain.drawing import AXIS_PIXELS
from gputrain.errors import UserError
from gputrain.speech.store import SpeechStore, frame_count
from gputrain.tts.evaluate import FRAME_PIXELS, STAIRS_PIXELS, HeldOutClips, alignment
from gputrain.tts.reading import Text, clip_seed, eval_mode, synthesise
from tests.tts.test_evaluate import CPU, ENGLISH, HOP, RATE_HZ, PlaybackVoice, settings_of, sizes, speech_of, store_of
from tests.tts.voices import build

SENTENCES = ["It is 5 o'clock.", "So be it!"]


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> SpeechStore:
    return store_of(tmp_path_factory.mktemp("speech"))


def held_out(store: SpeechStore, **changes) -> HeldOutClips:
    return HeldOutClips(speech_of(store), settings_of(store, **changes))


def test_sentences_are_spoken_as_the_model_reads_them(store):
    voice = build(sizes(encoder_dropout=0.5, duration_dropout=0.5)).train()
    state = torch.get_rng_state()
    clips = held_out(store, test_sentences=SENTENCES)
    report = clips.sample(voice, CPU)
    assert torch.equal(torch.get_rng_state(), state)
    assert voice.training
    assert list(report.sounds) == ["text_1", "text_2"]
    assert list(report.pictures) == ["text_1", "text_2", "recording"]
    again = clips.sample(voice, CPU)
    ids = ENGLISH.ids("it is five o'clock.")
    assert clips.texts[0].ids == ids
    with eval_mode(voice):
        [spoken] = synthesise(voice, clips.texts[:1], CPU)
    audio = report.sounds["text_1"]
    assert audio.rate_hz == RATE_HZ
    assert torch.equal(audio.wave_T, torch.from_numpy(spoken.wave_L))
    assert torch.equal(audio.wave_T, again.sounds["text_1"].wave_T)
    assert len(audio.wave_T) == HOP * int(spoken.durations_S.sum()) > 0
    mel = log_mel(audio.wave_T[None], voice.architecture.mel)[0]
    expected = alignment(mel, spoken.durations_S)
    shown = report.pictures["text_1"].rows[0][0].picture_HW3
    assert torch.equal(shown[: len(expected), -expected.shape[1] :], expected)  # The rest are axes.
    assert report.pictures["text_1"].title == f"text 1: {SENTENCES[0]}"
    assert (audio.caption, audio.reference_T) == (SENTENCES[0], None)


def test_texts_of_held_out_clips_where_none_are_given(store):
    clips = held_out(store, num_audio_samples=2)
    chosen = sorted(speech_of(store).parts.held_out, key=lambda clip: clip.fingerprint)
    assert [text.ids for text in clips.texts] == [ENGLISH.ids(clip.normalized) for clip in chosen[:2]]
    voice = PlaybackVoice(store)
    report = clips.sample(voice, CPU)
    for number, clip in enumerate(chosen[:2], start=1):
        played = report.sounds[f"text_{number}"].wave_T.numpy()
        assert np.array_equal((32768 * played[: clip.samples]).astype(np.int16), store.wave(clip))
        assert report.sounds[f"text_{number}"].caption == clip.text
        recorded = report.sounds[f"text_{number}"].reference_T
        assert np.array_equal((32768 * recorded.numpy()).astype(np.int16), store.wave(clip))
    assert list(held_out(store, num_audio_samples=0).sample(voice, CPU).pictures) == ["recording"]


def test_the_recording_is_shown_over_all_its_frames_with_the_alignment_that_was_found(store):
    report = held_out(store, num_audio_samples=0).sample(build(sizes()), CPU)
    clip = min(speech_of(store).parts.held_out, key=lambda clip: clip.fingerprint)
    wide = FRAME_PIXELS * frame_count(clip.samples, HOP)
    picture = report.pictures["recording"].rows[0][0].picture_HW3[:-AXIS_PIXELS, -wide:]
    assert picture.shape[1] == wide
    real = torch.from_numpy(store.wave(clip).copy())[None] / 32768
    frames = clip.samples // HOP
    shown = alignment(log_mel(real, sizes().mel)[0], torch.ones(frames, dtype=torch.int64))
    top, bottom, sure = STAIRS_PIXELS, STAIRS_PIXELS + 160, FRAME_PIXELS * (frames - 2)
    assert torch.equal(picture[top:bottom, :sure], shown[top:bottom, :sure])


def test_a_voice_without_end_is_cut_off_and_one_that_has_diverged_is_silent(store):
    voice = build(sizes())
    text = Text(ENGLISH.ids("so it is"), 0, 0, 40)
    voice.duration_predictor.flow.shift.data[0] = -20.0  # shift of log durations
    voice.decoder.register_forward_hook(lambda module, given, made: made * torch.nan)
    with eval_mode(voice):
        [spoken] = synthesise(voice, [text], CPU)
    assert int(spoken.durations_S.sum()) == 40
    assert len(spoken.wave_L) == 40 * HOP
    assert not spoken.wave_L.any()


def test_speakers_take_turns(store, tmp_path):
    both = store_of(tmp_path, speakers=("ann", "bob"))
    clips = held_out(both, test_sentences=[*SENTENCES, "third"])
    assert [text.speaker for text in clips.texts] == [0, 1, 0]
    assert [text.ids for text in held_out(both, test_sentences=SENTENCES, num_audio_samples=1).texts] == [
        ENGLISH.ids("it is five o'clock.")
    ]
    report = clips.sample(build(sizes(2)), CPU)
    assert list(report.sounds) == ["text_1", "text_2", "text_3"]
    of_clips = held_out(both).texts
    chosen = sorted(speech_of(both).parts.held_out, key=lambda clip: clip.fingerprint)
    assert [(text.speaker, text.seed) for text in of_clips] == [(clip.speaker, clip_seed(clip)) for clip in chosen]


def test_a_sentence_without_a_symbol_is_refused_before_training(store):
    with pytest.raises(UserError, match="no symbol of the voice in"):
        held_out(store, test_sentences=["so", "привет"])
