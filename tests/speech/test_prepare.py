"""Preparation of recordings and transcripts: stored clips, reasons for leaving others out, repeated runs."""

import json
from dataclasses import replace

import numpy as np
import pytest
import soundfile

from gputrain.audio.store import WAVES
from gputrain.data_in.preparation import QUARANTINE
from gputrain.data_in.split import MANIFEST, fingerprint
from gputrain.errors import UserError
from gputrain.speech.config import SpeechOptions, SpeechPrepareConfig
from gputrain.speech.prepare import prepare_speech
from gputrain.speech.store import SOUNDS, TEXT, SpeechStore
from gputrain.speech.validate import validate_speech
from tests.speech.speech import hum, rest, speak
from tests.tables import each_row

RECIPE = SpeechPrepareConfig(SpeechOptions(language="en"), sampling_rate=16000)
SECOND = "so it is said"  # takes about a second


def voice_of(recipe: SpeechPrepareConfig = RECIPE, **choices) -> SpeechPrepareConfig:
    return replace(recipe, speech=replace(recipe.speech, **choices))


@pytest.fixture
def folder(tmp_path):
    """Writes three good clips of two speakers, with several rates and formats, and one for every fault."""
    wavs = tmp_path / "in/wavs"
    speak(wavs / "a.wav", rest(0.5), hum(1.0), rest(0.7))
    speak(wavs / "b.flac", hum(1.2, hz=200, rate_hz=44100), rate_hz=44100)
    soundfile.write(wavs / "c.wav", np.stack([hum(0.9, rate_hz=8000)] * 2, 1), 8000, subtype="PCM_U8")
    speak(wavs / "short.wav", rest(1.0), hum(0.2), rest(1.0))
    speak(wavs / "long.wav", hum(21.0))
    speak(wavs / "dense.wav", hum(0.6, hz=170))
    speak(wavs / "foreign.wav", hum(1.0, hz=180))
    speak(wavs / "silent.wav", rest(1.0))
    speak(wavs / "clipped.wav", (9 * hum(1.0)).clip(-1, 1))
    speak(wavs / "untold.wav", hum(1.0, hz=190))
    speak(wavs / "mute.wav", hum(1.0, hz=195))
    (wavs / "empty.wav").write_bytes(b"")
    (wavs / "broken.flac").write_bytes(b"fLaC" + bytes(100))
    soundfile.write(wavs / "headless.wav", np.zeros(0, np.float32), 16000)
    soundfile.write(wavs / "nan.wav", np.full(8000, np.nan, np.float32), 16000, subtype="FLOAT")
    (wavs / "copy.wav").write_bytes((wavs / "a.wav").read_bytes())
    (wavs / "phone.m4a").write_bytes(b"\0\0\0\x1cftypM4A " + bytes(100))
    (wavs / "dangling.wav").symlink_to(tmp_path / "moved.wav")
    speakers = dict.fromkeys((path.stem for path in sorted(wavs.iterdir()) if path.stem != "untold"), "bob")
    speakers["a"] = "ann"
    texts = {"a": "So it is said!", "dense": 12 * SECOND, "foreign": "so 中 it ж is", "mute": "  "}
    lines = [f"{stem}|{speaker}|{texts.get(stem, SECOND)}" for stem, speaker in speakers.items()]
    (tmp_path / "in/metadata.csv").write_text("\n".join([*lines, "gone|bob|" + SECOND]), encoding="utf-8")
    return tmp_path / "in"


REASONS = {
    "metadata.csv, line 13": "no transcript", "metadata.csv, line 18": "no sound", "wavs/broken.flac": "unreadable",
    "wavs/clipped.wav": "clipped", "wavs/copy.wav": "duplicate", "wavs/dense.wav": "fewer frames than symbols",
    "wavs/empty.wav": "unreadable", "wavs/foreign.wav": "unknown symbols", "wavs/headless.wav": "unreadable",
    "wavs/long.wav": "too long", "wavs/nan.wav": "unreadable", "wavs/phone.m4a": "unreadable",
    "wavs/dangling.wav": "unreadable",
    "wavs/short.wav": "too short", "wavs/silent.wav": "silent", "wavs/untold.wav": "no transcript",
}  # fmt: skip


def test_good_clips_are_stored_and_each_other_has_its_reason(folder, tmp_path):
    report = prepare_speech(folder, tmp_path / "out", RECIPE)
    store = SpeechStore.open(tmp_path / "out")
    assert [(clip.path, store.format.speakers[clip.speaker], clip.normalized) for clip in store.clips] == [
        ("wavs/a.wav", "ann", "so it is said!"), ("wavs/b.flac", "bob", SECOND), ("wavs/c.wav", "bob", SECOND),
    ]  # fmt: skip
    assert store.clips[0].text == "So it is said!"
    lengths = [clip.samples / 16000 for clip in store.clips]
    assert lengths == pytest.approx([1.0, 1.2, 0.9], abs=0.13)  # Trimming keeps up to a window of 2048 samples.
    for clip in store.clips:
        assert np.abs(store.wave(clip)).max() / 32768 == pytest.approx(0.3, rel=0.15)
    assert {refusal.path: refusal.reason for refusal in report.refused} == REASONS
    assert report.reasons["unreadable"] == 6
    rows = [json.loads(line) for line in (tmp_path / "out" / QUARANTINE).read_text().splitlines()]
    assert {row["path"]: row["reason"] for row in rows} == REASONS
    details = {row["path"]: row["detail"] for row in rows}
    assert "ж (U+0436 CYRILLIC SMALL LETTER ZHE), 中 (U+4E2D" in details["wavs/foreign.wav"]
    assert details["wavs/dense.wav"].startswith("38 frames of 256 samples for 315 symbols")
    assert details["wavs/dangling.wav"] == f"a link to {tmp_path / 'moved.wav'}, which is not there"
    assert details["wavs/phone.m4a"].startswith("cannot be decoded")
    assert details["metadata.csv, line 13"] == "wavs/mute.wav: its text is empty"
    assert details["wavs/copy.wav"] == "has the content of wavs/a.wav"
    assert (report.made, report.kept, report.clips, report.speakers) == (8, 0, 3, ("ann", "bob"))
    assert report.hours == pytest.approx(sum(lengths) / 3600)
    json.dumps(report.to_json())


def test_a_clip_needs_a_frame_for_every_symbol_and_no_more(tmp_path):
    speak(tmp_path / "in/a.wav", hum(0.5))  # 8000 samples, 32 frames of 250
    for symbols, kept in ((14, True), (15, False)):  # 2 n + 3 with the blanks: 31 and 33
        (tmp_path / "in/a.txt").write_text("a" * symbols)
        recipe = replace(RECIPE, hop_size=250, trim_db=0.0)
        if kept:
            assert prepare_speech(tmp_path / "in", tmp_path / "out", recipe).clips == 1
        else:
            with pytest.raises(UserError, match="1 fewer frames than symbols"):
                prepare_speech(tmp_path / "in", tmp_path / "out", recipe)


def test_a_run_that_was_cut_off_goes_on(folder, tmp_path):
    class Cut(Exception):
        pass

    def cut(done: int, total: int) -> None:
        if done == 3:
            raise Cut

    with pytest.raises(Cut):
        prepare_speech(folder, tmp_path / "out", RECIPE, progress=cut)
    with pytest.raises(UserError, match="not finished"):
        SpeechStore.open(tmp_path / "out")
    report = prepare_speech(folder, tmp_path / "out", RECIPE)
    assert (report.made + report.kept, report.clips) == (8, 3)
    assert report.kept >= 1
    prepare_speech(folder, tmp_path / "once", RECIPE)
    for name in (WAVES, SOUNDS, MANIFEST, TEXT, QUARANTINE):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "once" / name).read_bytes()


@pytest.mark.slow
def test_any_number_of_processes_writes_the_same(folder, tmp_path):
    for workers in (1, 2):
        prepare_speech(folder, tmp_path / str(workers), RECIPE, num_workers=workers)
    for name in (WAVES, SOUNDS, MANIFEST, QUARANTINE):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()


def test_other_texts_and_limits_need_no_new_sound(folder, tmp_path):
    prepare_speech(folder, tmp_path / "out", RECIPE)
    size = (tmp_path / "out" / WAVES).stat().st_size
    recipe = voice_of(language="characters", min_seconds=0.1, max_seconds=60, max_clipped=1)
    report = prepare_speech(folder, tmp_path / "out", recipe)
    store = SpeechStore.open(tmp_path / "out")
    assert (report.made, report.kept, report.clips) == (0, 8, 6)
    assert {clip.path for clip in store.clips} >= {"wavs/foreign.wav", "wavs/long.wav", "wavs/clipped.wav"}
    assert store.format.frontend.language == "characters"
    assert (tmp_path / "out" / WAVES).stat().st_size == size


def test_a_changed_recording_is_prepared_again(folder, tmp_path):
    prepare_speech(folder, tmp_path / "out", RECIPE)
    speak(folder / "wavs/a.wav", hum(1.1, hz=300))
    report = prepare_speech(folder, tmp_path / "out", RECIPE)
    store = SpeechStore.open(tmp_path / "out")
    assert (report.made, report.kept) == (2, 7)  # The copy of the old recording is no duplicate any more.
    (clip,) = [clip for clip in store.clips if clip.path == "wavs/a.wav"]
    spectrum = np.abs(np.fft.rfft(store.wave(clip).astype(np.float64)))
    assert spectrum.argmax() * 16000 / clip.samples == pytest.approx(300, abs=2)


def test_loudness(tmp_path):
    speak(tmp_path / "in/a.wav", hum(1.0, loud=0.02), text=SECOND)
    prepare_speech(tmp_path / "in", tmp_path / "out", replace(RECIPE, loudness_db=-20.0))
    store = SpeechStore.open(tmp_path / "out")
    unit = store.wave(store.clips[0]) / 32768
    assert 20 * np.log10(np.sqrt(np.mean(unit**2))) == pytest.approx(-20, abs=0.1)


def test_a_text_that_is_anothers_is_noticed_by_its_rate(tmp_path):
    """Thirty clips have about 13 symbols per second, one has 3 and one 25."""
    rng = np.random.default_rng(0)
    for number in range(30):
        speak(tmp_path / f"in/{number:02}.wav", hum(1.0 + 0.2 * rng.random(), hz=100 + number), text=SECOND)
    (tmp_path / "in/07.txt").write_text("ash")
    (tmp_path / "in/21.txt").write_text(SECOND + " " + SECOND)
    report = prepare_speech(tmp_path / "in", tmp_path / "out", RECIPE)
    assert [(refusal.path, refusal.reason) for refusal in report.refused] == [
        ("07.wav", "odd speaking rate"), ("21.wav", "odd speaking rate"),
    ]  # fmt: skip
    assert report.clips == 28
    assert prepare_speech(tmp_path / "in", tmp_path / "out", voice_of(max_rate_deviation=0)).clips == 30


def test_a_long_clip_is_left_out_with_the_way_to_cut_it(tmp_path):
    speak(tmp_path / "in/a.wav", hum(6.0), text="A sentence.")
    with pytest.raises(UserError, match="1 too long"):
        prepare_speech(tmp_path / "in", tmp_path / "out", voice_of(max_seconds=5))
    assert "seconds, more than 5; --align-with MODEL cuts it" in (tmp_path / "out" / QUARANTINE).read_text()


def test_folders_and_languages_that_will_not_do(folder, tmp_path):
    with pytest.raises(UserError, match="needs a language"):
        prepare_speech(folder, tmp_path / "out", SpeechPrepareConfig(SpeechOptions()))
    with pytest.raises(UserError, match="no such folder"):
        prepare_speech(tmp_path / "nowhere", tmp_path / "out", RECIPE)
    with pytest.raises(UserError, match="one contains the other"):
        prepare_speech(folder, folder / "out", RECIPE)
    with pytest.raises(UserError, match="leave no clip"):
        SpeechOptions(min_seconds=3, max_seconds=2)
    with pytest.raises(UserError, match="audio and text must occur once each"):
        SpeechOptions(transcript_columns=("audio", "speaker"))
    assert not (tmp_path / "out").exists()


def test_sound_elsewhere_is_reached_by_links_and_by_absolute_paths(tmp_path):
    speak(tmp_path / "elsewhere/a.wav", hum(1.0, hz=150))
    speak(tmp_path / "far/b.wav", hum(1.0, hz=180))
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "linked").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    (folder / "linked/around").symlink_to(folder, target_is_directory=True)  # a cycle
    (folder / "metadata.csv").write_text(f"a|{SECOND}\n{tmp_path / 'far/b.wav'}|{SECOND}\n")
    report = prepare_speech(folder, tmp_path / "out", RECIPE)
    assert (report.clips, report.refused) == (2, [])
    assert {clip.path for clip in SpeechStore.open(tmp_path / "out").clips} == {
        "linked/a.wav",
        str(tmp_path / "far/b.wav"),
    }
    (folder / "linked").unlink()
    report = prepare_speech(folder, tmp_path / "out", RECIPE)  # The folder itself has no recording.
    assert (report.clips, report.reasons) == (1, {"no sound": 1})


def test_a_folder_without_usable_sound_names_the_cause(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.jpg").touch()
    with pytest.raises(UserError, match=r"no recording in it, but other files: 1 \.jpg"):
        prepare_speech(folder, tmp_path / "out", RECIPE)
    (folder / "a.m4a").write_bytes(b"\0\0\0\x1cftypM4A " + bytes(100))
    (folder / "a.txt").write_text(SECOND)
    with pytest.raises(UserError, match=r"nothing to train on: 1 unreadable; a\.m4a: cannot be decoded"):
        prepare_speech(folder, tmp_path / "out", RECIPE)


@pytest.mark.parametrize(
    ("text", "warned"),
    [("so it is, 12/34 + 5", ["+ (", "/ (", "1 (", "2 (", "3 (", "and 2 more"]), ("so “it” is... – said!", [])],
)
def test_digits_and_signs_are_no_letters_without_a_warning(tmp_path, caplog, text, warned):
    speak(tmp_path / "in/a.wav", hum(2.0), text=text)
    prepare_speech(tmp_path / "in", tmp_path / "out", voice_of(language="characters"))
    messages = [record.getMessage() for record in caplog.records if "digits and signs" in record.getMessage()]
    assert len(messages) == bool(warned)
    assert all(each in messages[0] and repr(text) in messages[0] for each in warned)
    finding = validate_speech(tmp_path / "in", voice_of(language="characters")).findings
    assert [each for each in finding if "digits and signs" in each] == messages


@each_row(
    ("characters", "ma★ ma°", "signs that the text rules remove, with the number of texts: ° (1: 'ma★ ma°'), ★ (1: "),
    ("en", "it is ˥ so", "signs that the text rules remove, with the number of texts: ˥ (1: 'it is ˥ so')"),
    ("characters", "<i>it is", "1 text has what may be no speech, such as '<i>it is'"),
    ("characters", "şi și", "letters that look alike, perhaps one in two spellings: ş (U+015F, 1 times) and ș (U+0219"),
    ("characters", "hallo ｈ", "letters that look alike, perhaps one in two spellings: h (U+0068, 1 times) and ｈ"),
    ("characters", "п'ять пʼять", "letters that look alike, perhaps one in two spellings: ' (U+0027, 1 times) and ʼ"),
)
def test_what_the_rules_remove_or_confuse_is_named_by_the_text_as_read(tmp_path, caplog, language, text, said):
    speak(tmp_path / "in/a.wav", hum(2.0), text=text)
    report = validate_speech(tmp_path / "in", voice_of(language=language))
    assert any(finding.startswith(said) for finding in report.findings), report.findings


def test_recordings_that_share_a_fingerprint_are_both_kept(tmp_path):
    """They differ only between the blocks that a fingerprint covers."""
    wave = (hum(10.0) * 32767).astype(np.int16)
    other = wave.copy()
    other[80_000 // 2 : 90_000 // 2] = 0
    for name, samples in (("a", wave), ("b", other)):
        (tmp_path / "in").mkdir(exist_ok=True)
        soundfile.write(tmp_path / f"in/{name}.wav", samples, 16000)
    assert fingerprint(tmp_path / "in/a.wav") == fingerprint(tmp_path / "in/b.wav")
    (tmp_path / "in/metadata.csv").write_text(f"a|{SECOND}\nb|{SECOND}\n")
    config = replace(RECIPE, trim_db=0.0)
    for made, kept in ((2, 0), (0, 2)):
        report = prepare_speech(tmp_path / "in", tmp_path / "out", config)
        assert (report.made, report.kept, report.refused) == (made, kept, [])
        store = SpeechStore.open(tmp_path / "out")
        assert [clip.path for clip in store.clips] == ["a.wav", "b.wav"]
        for clip, samples in zip(store.clips, (wave, other), strict=True):
            assert (store.wave(clip) == samples).all()
    (tmp_path / "in/a.wav").rename(tmp_path / "in/c.wav")
    (tmp_path / "in/metadata.csv").write_text(f"b|{SECOND}\nc|{SECOND}\n")
    prepare_speech(tmp_path / "in", tmp_path / "out", config)
    store = SpeechStore.open(tmp_path / "out")
    assert [clip.path for clip in store.clips] == ["b.wav", "c.wav"]
    assert (store.wave(store.clips[0]) == other).all()
    assert (store.wave(store.clips[1]) == wave).all()


@each_row("tts", "asr")
def test_channels_of_opposite_phases_are_named(tmp_path, caplog, kind):
    wave_T = hum(1.0)
    speak(tmp_path / kind / "opposite.wav", wave_T, text=SECOND)
    soundfile.write(tmp_path / kind / "opposite.wav", np.stack([wave_T, -0.97 * wave_T], axis=1), 16000)
    config = replace(RECIPE, kind=kind, trim_db=0.0, hop_size=320)
    caplog.clear()
    prepare_speech(tmp_path / kind, tmp_path / f"{kind}-out", config)
    store = SpeechStore.open(tmp_path / f"{kind}-out")
    assert np.abs(store.wave(store.clips[0])).max() / 32768 == pytest.approx(0.3, rel=1e-3)
    sentence = "1 recording is not stored as they were recorded: opposite.wav: its channels cancel each other"
    assert any(message.startswith(sentence) for message in caplog.messages)
    for folder in (tmp_path / kind, tmp_path / f"{kind}-out"):
        findings = validate_speech(folder, config).findings
        assert any(finding.startswith(sentence) for finding in findings), findings
