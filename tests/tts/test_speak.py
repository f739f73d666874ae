"""Synthesis of long texts: chunks, seeds, sentences, and invalid input.

Shape suffixes: B items, C channels, G channels of a speaker, F frames, S symbols, T samples, 1 and 2 so many channels.
"""

import itertools
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from gputrain.config import assemble
from gputrain.engine.checkpoint import LAST
from gputrain.errors import UserError
from gputrain.speech.text.frontend import frontend
from gputrain.speech.text.raw import RawRules
from gputrain.tts.architecture import VoicePreset
from gputrain.tts.config import Speak, SpeakingOptions
from gputrain.tts.decoder import WaveDecoder
from gputrain.tts.load import LoadedVoice
from gputrain.tts.speak import (
    STREAM_FRAMES,
    AudioStream,
    Narrator,
    SentenceAudio,
    SoundFile,
    decode_in_chunks,
    decoder_receptive_field,
    sentence_chunks,
    speak_text,
    speaker_number,
    with_lexicon,
)
from tests.tables import each_row
from tests.tts.test_load import full, narrow, run_folder, settings_of
from tests.tts.test_train import small_presets
from tests.tts.voices import small

RATE = 22050
PRESETS = pytest.mark.parametrize("preset", ["high", "medium", "fast"])
TEXT = "Hello there. It is 5 o'clock! And now?"


@PRESETS
@torch.no_grad()
def test_the_receptive_field_of_a_decoder(preset: VoicePreset) -> None:
    """A change of one frame has effects up to `receptive_field_frames` away, and nearly as far."""
    decoder, reach = WaveDecoder(small(preset)).double(), decoder_receptive_field(small(preset))
    latent_BCF = torch.randn(1, 8, 101, dtype=torch.float64)
    changed_BCF = latent_BCF.clone()
    changed_BCF[..., 50] += 1
    difference_T = (decoder(latent_BCF) - decoder(changed_BCF))[0, 0]
    changed = difference_T.nonzero().flatten() / 256
    assert 50 - reach <= changed.min()
    assert 50 + reach - 1.5 < changed.max() < 51 + reach


@PRESETS
@torch.no_grad()
def test_chunks_make_the_whole(preset: VoicePreset) -> None:
    loaded = narrow(preset, speakers=("anna", "boris"))
    voice, reach = loaded.voice, decoder_receptive_field(loaded.voice.architecture)
    latent_BCF, speaker_BG1 = torch.randn(1, 8, 150), voice.speaker(torch.tensor([1]))
    whole_T = voice.decoder(latent_BCF, speaker_BG1)[0, 0]
    assert whole_T.std() > 1e-3
    for frames, lengths in ((16, [16, 32, 64, 38]), (64, [64, 86]), (149, [149, 1]), (150, [150]), (512, [150])):
        pieces = list(decode_in_chunks(voice.decoder, latent_BCF, reach, speaker_BG1, frames=frames))
        assert [len(piece) // 256 for piece in pieces] == lengths
        assert (torch.cat(pieces) - whole_T).abs().max() < 1e-5
    short = list(decode_in_chunks(voice.decoder, latent_BCF, 2, speaker_BG1, frames=64))
    assert (torch.cat(short) - whole_T).abs().max() > 1e-3


def test_an_utterance_is_what_infer_makes_of_the_same_noise() -> None:
    loaded = narrow("medium", speakers=("anna", "boris"))
    ids = loaded.frontend.ids("some words, and more of them.")
    manner = SpeakingOptions(length_scale=1.3, noise_scale=0.5, noise_w=0.4)
    wave_T = torch.cat(list(sentence_chunks(loaded.voice, ids, manner, torch.Generator().manual_seed(3), speaker=1)))
    random = torch.Generator().manual_seed(3)
    noise_B2S = torch.randn(1, 2, len(ids), generator=random)
    noise_BCT = torch.randn(1, 8, len(wave_T) // 256, generator=random)
    expected, _ = loaded.voice.infer(
        torch.tensor([ids]), torch.tensor([len(ids)]), torch.tensor([1]), noise_scale=0.5, length_scale=1.3,
        noise_w=0.4, duration_noise_B2S=noise_B2S, noise_BCT=noise_BCT,
    )  # fmt: skip
    assert expected.shape == (1, 1, len(wave_T))
    assert (wave_T - expected[0, 0]).abs().max() < 1e-5


def said(loaded: LoadedVoice, text: str, **manner: Any) -> list[SentenceAudio]:
    return list(Narrator(loaded, SpeakingOptions(**manner)).say(text))


def test_a_seed_and_a_text_are_a_wave() -> None:
    loaded = narrow()
    first, again, other = (said(loaded, TEXT, seed=seed) for seed in (7, 7, 8))
    assert len(first) == 3
    assert all(torch.equal(one.wave_T, two.wave_T) for one, two in zip(first, again, strict=True))
    assert not any(torch.equal(one.wave_T, two.wave_T) for one, two in zip(first, other, strict=True))
    still = [said(loaded, TEXT, seed=seed, noise_scale=0.0, noise_w=0.0) for seed in (7, 8)]
    assert all(torch.equal(one.wave_T, two.wave_T) for one, two in zip(*still, strict=True))


def test_what_cannot_be_said_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    loaded = narrow()
    assert [len(said(loaded, text)) for text in ("", "  \n\n", "😀😀", "...", "?!\n—")] == [0] * 5
    assert "nothing to say in '😀😀': left out" in caplog.messages
    caplog.clear()
    reading = frontend("characters", texts=["abc"])
    voice = narrow("fast", reading)
    assert reading.unknown(reading.normalize("abx")) == ["x"]
    narrator = Narrator(voice, SpeakingOptions())
    assert len([*narrator.say("abx! xa"), *narrator.say("xxx"), *narrator.say("xc")]) == 3
    assert [text for text in caplog.messages if "no symbol" in text] == ["the voice has no symbol for 'x': left out"]
    assert "nothing to say in 'xxx': left out" in caplog.messages
    caplog.clear()
    narrator = Narrator(narrow("fast", frontend("characters", texts=["ș a"])), SpeakingOptions())
    assert len([*narrator.say("a ★ şa")]) == 1
    (message,) = [text for text in caplog.messages if "no symbol" in text]
    assert message == "the voice has no symbol for '\u0327' '★': left out"


def test_digits_without_rules_are_a_warning_once(caplog: pytest.LogCaptureFixture) -> None:
    narrator = Narrator(narrow("fast", frontend("characters", texts=["abc 123"])), SpeakingOptions())
    assert len([*narrator.say("abc"), *narrator.say("ab 12. C 3")]) == 3
    (message,) = [text for text in caplog.messages if "digits" in text]
    assert message.startswith("the voice reads digits as letters, as in 'ab 12.': write numbers in words")


def test_a_lexicon_is_added_to_that_of_the_voice(tmp_path: Path) -> None:
    reading = frontend("uz", raw=RawRules({"Makro": "makra", "Beeline": "bilayn"}))
    path = tmp_path / "words.yaml"
    path.write_text("Makro: makra market\n", encoding="utf-8")
    loaded = with_lexicon(narrow("fast", reading), path)
    assert loaded.frontend.normalize("Makro va Beeline") == "makra market va bilayn"
    assert with_lexicon(narrow("fast", reading), None).frontend == reading


def test_a_stream_begins_with_a_short_chunk_and_is_the_same_wave() -> None:
    loaded = narrow("fast")
    narrator, text = Narrator(loaded, SpeakingOptions(length_scale=4)), "Hello you over there. Yes."
    whole = list(narrator.say(text))
    chunks = list(narrator.say(text, in_chunks=True))
    begins = [number for number, chunk in enumerate(chunks) if chunk.begins]
    assert len(begins) == len(whole) == 2
    assert len(chunks) > 4
    assert {len(chunks[number].wave_T) // 256 for number in begins} == {STREAM_FRAMES}
    for one, first, end in zip(whole, begins, (*begins[1:], len(chunks)), strict=True):
        wave_T = torch.cat([chunk.wave_T for chunk in chunks[first:end]])
        assert len(wave_T) == len(one.wave_T)
        assert (wave_T - one.wave_T).abs().max() < 1e-5


def test_a_stream_is_made_softer_from_the_chunk_on_that_is_too_loud() -> None:
    loaded = narrow("fast")
    narrator = Narrator(loaded, SpeakingOptions(length_scale=4))
    (plain,) = narrator.say("Hello you over there.")
    peaks = [chunk.peak for chunk in narrator.say("Hello you over there.", in_chunks=True)]
    with torch.no_grad():
        loaded.voice.decoder.head.filter_bank.filters *= 3 / plain.peak
    chunks = list(narrator.say("Hello you over there.", in_chunks=True))
    highest = list(itertools.accumulate((3 * peak / plain.peak for peak in peaks), max))
    for chunk, peak, high in zip(chunks, peaks, highest, strict=True):
        assert chunk.peak == pytest.approx(3 * peak / plain.peak, rel=1e-4)
        assert chunk.wave_T.abs().max() == pytest.approx(chunk.peak / max(1, high), rel=1e-4)
    assert [chunk.softened for chunk in chunks].count(True) == 1


def test_a_wave_beyond_its_range_is_made_softer() -> None:
    loaded = narrow("fast")
    (plain,) = said(loaded, "Hello.")
    assert plain.peak < 1
    assert plain.wave_T.abs().max() == plain.peak
    with torch.no_grad():
        loaded.voice.decoder.head.filter_bank.filters *= 3 / plain.peak
    (loud,) = said(loaded, "Hello.")
    assert loud.peak == pytest.approx(3)
    assert loud.wave_T.abs().max() == 1
    assert torch.allclose(loud.wave_T, plain.wave_T / plain.peak, atol=1e-5)
    with torch.no_grad():
        loaded.voice.decoder.head.filter_bank.filters *= torch.nan
    with pytest.raises(UserError, match="its audio is not finite"):
        said(loaded, "Hello.")


@each_row(-30.0, float("nan"))
def test_a_voice_that_would_never_end_is_stopped(shift: float) -> None:
    loaded = narrow()
    with torch.no_grad():
        loaded.voice.duration_predictor.flow.shift += shift
    with pytest.raises(UserError, match=r"this voice predicts .* seconds for one sentence"):
        said(loaded, "Hello.")


def test_speakers_by_name_and_by_number() -> None:
    speakers = ("anna", "boris", "7")
    assert [speaker_number(speakers, asked) for asked in ("", "boris", "1", "7")] == [0, 1, 1, 2]
    with pytest.raises(UserError, match="no speaker 'borris'") as wrong:
        speaker_number(speakers, "borris")
    assert wrong.value.hint == "this voice has boris, anna, 7"
    with pytest.raises(UserError, match="no speaker '3'"):
        speaker_number(speakers, "3")
    with pytest.raises(UserError) as raised:
        speaker_number(("", "zoë"), "anna")
    assert raised.value.hint == "this voice has 0, zoë"
    assert speaker_number((), "0") == 0
    with pytest.raises(UserError) as alone:
        speaker_number(("",), "anna")
    assert alone.value.hint == "this voice has one: drop --speaker"


@pytest.fixture(scope="module")
def small_voice(tmp_path_factory: pytest.TempPathFactory) -> Path:
    reading = frontend("en")
    with small_presets():
        return run_folder(tmp_path_factory.mktemp("speak") / "run", full("fast", reading), reading, settings_of("fast"))


@pytest.fixture
def voice(small_voice: Path) -> Iterator[Path]:
    """A run, which is read with the same small presets."""
    with small_presets():
        yield small_voice


def options(voice: Path, **given: Any) -> Speak:
    return assemble(Speak, {"model": voice, "device": "cpu", **given})


def test_a_text_to_a_file(voice: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out.wav"
    done = speak_text(options(voice, text="Hello.\n\n😀. And you?", output_file=out, sentence_silence=0.5))
    assert (done.files, done.sentences) == ([out], 2)
    assert list(out.parent.iterdir()) == [out]
    wave_T, rate = soundfile.read(out, dtype="int16")
    info = soundfile.info(out)
    assert (rate, info.subtype, info.channels) == (RATE, "PCM_16", 1)
    assert len(wave_T) / RATE == pytest.approx(done.sound_seconds + 0.5, abs=1e-4)
    first = len(wave_T) - round(0.5 * RATE)
    silent = np.flatnonzero(np.convolve(wave_T == 0, np.ones(RATE // 2), "valid") == RATE // 2)
    assert len(silent) >= 1
    assert 0 < silent[0] < first
    assert done.real_time_factor == pytest.approx(done.computing_seconds / done.sound_seconds)
    assert done.computing_seconds > 0


def test_a_file_to_one_wave_or_to_a_wave_a_line(voice: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(b"\xef\xbb\xbfOne.\r\n\r\n!!!\r\nTwo. Three.\r\n")
    folder = tmp_path / "waves"
    each = speak_text(options(voice, input_file=text, output_dir=folder))
    assert each.files == [folder / "0001.wav", folder / "0004.wav"]
    assert sorted(folder.iterdir()) == each.files
    assert speak_text(options(voice, text="One.", output_dir=folder)).files == each.files[:1]
    (folder / "0001.txt").write_text("of a recording")
    with pytest.raises(UserError, match=r"holds 0001\.wav beside other files, such as 0001\.txt"):
        speak_text(options(voice, text="One.", output_dir=folder))
    (folder / "0001.txt").unlink()
    told: list[tuple[int, int]] = []
    all_in_one = options(voice, input_file=text, output_file=tmp_path / "all.wav", sentence_silence=0.0)
    whole = speak_text(all_in_one, lambda *done: told.append(done))
    assert told == [(1, 4), (2, 4), (3, 4)]  # "!!!" is left out.
    assert (each.sentences, whole.sentences) == (3, 3)
    waves = [soundfile.read(path, dtype="int16")[0] for path in (*each.files, *whole.files)]
    quiet = round(0.2 * RATE)
    assert len(waves[2]) == len(waves[0]) + len(waves[1]) - quiet
    assert np.array_equal(waves[2][: len(waves[0])], waves[0])
    alone = speak_text(options(voice, text="One.", output_file=tmp_path / "one.wav"))
    assert np.array_equal(soundfile.read(alone.files[0], dtype="int16")[0], waves[0])


def test_bad_input(voice: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.wav"
    for text in ("", "  \n ", "😀 ... !"):
        with pytest.raises(UserError, match="nothing to say"):
            speak_text(options(voice, text=text, output_file=out))
    assert not out.exists()
    wide = tmp_path / "wide.txt"
    wide.write_text("héllo", encoding="latin-1")
    with pytest.raises(UserError, match=r"wide\.txt, line 1: not UTF-8"):
        speak_text(options(voice, input_file=wide, output_file=out))
    with pytest.raises(UserError, match=r"none\.txt: No such file"):
        speak_text(options(voice, input_file=tmp_path / "none.txt", output_file=out))
    with pytest.raises(UserError, match="cannot be written"):
        speak_text(options(voice, text="Hi.", output_file=wide / "out.wav"))
    for given, match in (
        ({}, "no output_file"),
        ({"output_file": out, "output_dir": tmp_path}, "both given"),
        ({"text": "a", "input_file": wide, "output_file": out}, "text and input_file are both given"),
    ):
        with pytest.raises(UserError, match=match):
            options(voice, **given)


PROGRAM = """
import sys
from gputrain.config import assemble
from gputrain.tts.config import Speak
from gputrain.tts.speak import sentence_chunks, speak_text
from tests.tts.test_train import small_presets
with small_presets():
    requested = {"model": sys.argv[1], "output_file": "-", "device": "cpu"}
    speak_text(assemble(Speak, requested))
"""


def quieter(voice: Path, file: Path) -> Path:
    """Writes a checkpoint whose waves have a hundredth of the amplitude before tanh, and returns the file."""
    content = torch.load(voice / LAST, weights_only=True)
    found = [w for state in content["modules"].values() for n, w in state.items() if n.endswith("head.post.weight_g")]
    assert found
    for weight in found:
        weight.mul_(0.01)
    torch.save(content, file)
    return file


@pytest.mark.slow
def test_a_conversation_by_pipes(voice: Path, tmp_path: Path) -> None:
    """A sentence is received before the next line is written; the samples are those of the file to a step of 16 bits,
    since a stream decodes shorter chunks, whose sums round otherwise. The voice is quiet, as a stream is scaled down
    only from the chunk on that exceeds full scale."""
    voice = quieter(voice, tmp_path / "quiet.pt")
    lines = [b"One. Two.\n", b"Three.\n"]
    (tmp_path / "text.txt").write_bytes(b"".join(lines))
    expected = speak_text(options(voice, input_file=tmp_path / "text.txt", output_file=tmp_path / "out.wav")).files[0]
    samples = soundfile.read(expected, dtype="int16")[0]
    first = speak_text(options(voice, text="One. Two.", output_file=tmp_path / "first.wav")).files[0]
    size = 2 * len(soundfile.read(first)[0])
    command = [sys.executable, "-c", PROGRAM, str(voice)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(lines[0])
        process.stdin.flush()
        received = process.stdout.read(size)
        process.stdin.write(lines[1])
        process.stdin.close()
        received += process.stdout.read()
    assert process.returncode == 0
    np.testing.assert_allclose(np.frombuffer(received, "<i2"), samples, rtol=0, atol=1)


def test_a_file_is_whole_or_not_there(tmp_path: Path) -> None:
    samples_T, path = np.arange(-300, 300, dtype=np.int16), tmp_path / "out.wav"
    with SoundFile(path, RATE) as file:
        file.write(samples_T[:100])
        file.write(samples_T[100:])
    fields = struct.unpack("<4sI4s4sIHHIIHH4sI", path.read_bytes()[:44])
    assert fields == (b"RIFF", 1236, b"WAVE", b"fmt ", 16, 1, 1, RATE, 2 * RATE, 2, 16, b"data", 1200)
    kept = path.read_bytes()
    assert kept[44:] == samples_T.tobytes()
    cut_off = SoundFile(path, RATE)
    cut_off.write(samples_T[:5])
    cut_off.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert path.read_bytes() == kept
    assert list(tmp_path.iterdir()) == [path]


def test_a_closed_pipe_is_an_error_of_the_user() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as out, pytest.raises(UserError, match="closed before the end"):
        AudioStream(out).write(np.zeros(100_000, np.int16))


@pytest.mark.slow
def test_ten_thousand_characters(caplog: pytest.LogCaptureFixture) -> None:
    """One line without an end of a sentence; memory stays bounded."""
    loaded = narrow("fast")
    text = "many words without an end " * 400
    longest = 0
    total = 0
    for utterance in Narrator(loaded, SpeakingOptions(length_scale=0.1)).say(text):
        total += len(utterance.wave_T)
        longest = max(longest, len(utterance.wave_T))
    assert len(text) > 10_000
    assert total > 20 * RATE
    assert longest < total / 20
    assert not caplog.messages
