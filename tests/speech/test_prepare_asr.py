"""Preparation for a recogniser: 16 kHz, many speakers, subtitles, Common Voice, the exact condition of CTC."""

import json
from dataclasses import replace

import numpy as np
import pytest
import soundfile
import torch

from gputrain.audio.config import Sound
from gputrain.data_in.preparation import QUARANTINE, Journal
from gputrain.errors import UserError
from gputrain.speech.buckets import Buckets, open_speech
from gputrain.speech.config import SpeechOptions, encoder_frames
from gputrain.speech.prepare import prepare_speech, speech_prepare_config, without_whole_spans
from gputrain.speech.store import SOUNDS, TEXT, SpeechStore
from gputrain.speech.text.vocabulary import Vocabulary
from gputrain.speech.transcripts import read_transcripts
from gputrain.speech.validate import findings_of, validate_speech
from tests.speech.speech import hum, rest, speak
from tests.tables import each_row

SECOND = "so it is said"  # takes about a second


def recipe(language="en", sound=Sound(), **options):  # noqa: B008
    return speech_prepare_config("asr", SpeechOptions(language=language, **options), sound)


def refusals(folder):
    return [json.loads(line) for line in (folder / QUARANTINE).read_text().splitlines()]


def test_a_store_of_many_speakers_at_16_khz(tmp_path):
    """Ends are not trimmed, a line without a speaker stays, and the vocabulary is that of the clips that are used."""
    wavs = tmp_path / "in/wavs"
    speak(wavs / "a.wav", rest(0.5), hum(1.0), rest(0.7))
    speak(wavs / "b.flac", hum(1.2, hz=200, rate_hz=44100), rate_hz=44100)
    soundfile.write(wavs / "c.mp3", hum(1.5, hz=170, rate_hz=16000), 16000)
    speak(wavs / "d.wav", hum(1.0, hz=190))
    speak(wavs / "short.wav", hum(0.2))
    lines = ["a|ann|So — «it» is, said!", "b||So it is 2.", "c|bob|It's a zoo", "d|ann|so 中 it is", "short|cy|q"]
    (tmp_path / "in/metadata.csv").write_text("\n".join(["audio|speaker|text", *lines]), encoding="utf-8")
    report = prepare_speech(tmp_path / "in", tmp_path / "out", recipe())
    store = SpeechStore.open(tmp_path / "out")
    assert (store.format.kind, store.format.sampling_rate, store.format.hop_size) == ("asr", 16000, 320)
    assert [(clip.path, store.format.speakers[clip.speaker], clip.normalized) for clip in store.clips] == [
        ("wavs/a.wav", "ann", "so it is said"), ("wavs/b.flac", "", "so it is two"),
        ("wavs/c.mp3", "bob", "it's a zoo"),
    ]  # fmt: skip
    assert [clip.samples for clip in store.clips] == [
        pytest.approx(samples, abs=1) for samples in (35200, 19200, 24000)
    ]
    assert np.abs(store.wave(store.clips[0])[:7900]).max() == 0
    vocabulary = store.format.vocabulary
    assert (
        vocabulary.symbols
        == report.vocabulary
        == ("<pad>", "<unk>", "|", *sorted(set("so it's said two a zoo") - {" "}))
    )
    assert json.loads((tmp_path / "out" / TEXT).read_text())["kind"] == "asr"
    reasons = {row["path"]: (row["reason"], row["detail"]) for row in refusals(tmp_path / "out")}
    assert reasons["wavs/d.wav"] == ("unknown symbols", "中 (U+4E2D CJK UNIFIED IDEOGRAPH-4E2D)")
    assert reasons["wavs/short.wav"][0] == "too short"
    assert any("'zoo'" in finding and "z (1: " in finding for finding in findings_of(tmp_path / "out", "asr"))
    again = prepare_speech(tmp_path / "in", tmp_path / "out", recipe())
    assert (again.made, again.kept, again.clips) == (0, 5, 3)


@each_row("a" * 13, "ab" * 12 + "a", "a b a b a b a b a b a b a", "aab" * 5 + "aaa")
def test_the_condition_of_ctc_is_exact(tmp_path, text):
    """The reference is torch's CTC loss on as many frames as wav2vec 2.0 makes of the clip."""
    needed = Vocabulary("und", ("<pad>", "<unk>", "|", "a", "b")).frames_needed(text)
    assert needed == 25
    for samples, is_kept in ((400 + 320 * 24, True), (400 + 320 * 24 - 1, False)):
        frames = encoder_frames(samples)
        speak(tmp_path / "in/a.wav", hum(samples / 16000), text=text)
        ids = torch.tensor([[3 if char == "a" else 4 if char == "b" else 2 for char in text]])
        loss = torch.nn.functional.ctc_loss(
            torch.zeros(frames, 1, 5).log_softmax(-1), ids, torch.tensor([frames]), torch.tensor([ids.shape[1]])
        )
        assert bool(loss.isfinite()) == is_kept
        if is_kept:
            assert prepare_speech(tmp_path / "in", tmp_path / "out", recipe("kk")).clips == 1
        else:
            with pytest.raises(UserError, match="1 fewer frames than symbols"):
                prepare_speech(tmp_path / "in", tmp_path / "out", recipe("kk"))
            (row,) = refusals(tmp_path / "out")
            blanks = 25 - len(text)
            assert row["detail"] == (
                f"24 frames of the encoder for {len(text)} labels and {blanks} blanks between equal ones"
            )


def srt(*cues):
    return "\n\n".join(f"{n}\n00:00:{a:06.3f} --> 00:00:{b:06.3f}\n{text}" for n, (a, b, text) in enumerate(cues, 1))


def test_subtitles_cut_a_long_recording(tmp_path):
    """Each clip is the tone of its time."""
    tones = {100: 2.0, 200: 3.0, 300: 1.5, 400: 2.5, 500: 2.0}
    speak(tmp_path / "in/talk.wav", *(hum(seconds, hz=hz) for hz, seconds in tones.items()))
    cues = [
        (0, 2, "One."),
        (2, 3.5, "Two is"),
        (3.5, 5, "longer."),
        (5, 6.5, "Three"),
        (6.0, 9, "overlaps"),
        (9.1, 11.2, "five"),
    ]
    (tmp_path / "in/talk.en.srt").write_text(srt(*cues, (10.9, 12.0, "after the end"), (30, 31, "far")))
    report = prepare_speech(tmp_path / "in", tmp_path / "out", recipe())
    store = SpeechStore.open(tmp_path / "out")
    assert [(clip.text, clip.first_sample, clip.samples) for clip in store.clips] == [
        ("One.", 0, 32000), ("Two is longer.", 32000, 48000)
    ]  # fmt: skip
    for clip, hz in zip(store.clips, (100, 200), strict=True):
        spectrum = np.abs(np.fft.rfft(store.wave(clip).astype(np.float64)))
        assert spectrum.argmax() * 16000 / clip.samples == pytest.approx(hz, abs=1)
    assert report.transcripts == "subtitles next to the recordings"
    rows = {row["path"]: (row["reason"], row["detail"]) for row in refusals(tmp_path / "out")}
    assert {path: reason for path, (reason, _) in rows.items()} == {
        "talk.en.srt, line 14": "overlapping subtitles", "talk.en.srt, line 18": "overlapping subtitles",
        "talk.en.srt, line 22": "overlapping subtitles", "talk.en.srt, line 26": "overlapping subtitles",
        "talk.en.srt, line 30": "outside the recording",
    }  # fmt: skip
    assert rows["talk.en.srt, line 30"][1] == "30.00 to 31.00 seconds of a recording of 11.00"


def test_a_subtitle_may_end_a_little_after_its_recording(tmp_path):
    speak(tmp_path / "in/talk.wav", hum(5.0))
    for end, is_kept in ((5.4, True), (5.6, False)):
        (tmp_path / "in/talk.vtt").write_text(srt((1, 2.5, "One word."), (3, end, "so it is")))
        report = prepare_speech(tmp_path / "in", tmp_path / "out", recipe())
        assert report.clips == 1 + is_kept
        assert report.reasons == ({} if is_kept else {"outside the recording": 1})
    # Times count from the beginning, so that nothing is trimmed.
    prepare_speech(tmp_path / "in", tmp_path / "trimmed", recipe(sound=Sound(trim_db=30.0)))
    assert Journal(tmp_path / "trimmed" / SOUNDS).head["trim_db"] == 0


def test_subtitles_in_a_linked_folder(tmp_path):
    speak(tmp_path / "far/talk.wav", hum(2.0))
    (tmp_path / "far/talk.srt").write_text(srt((0, 1, "One word.")))
    (tmp_path / "in").mkdir()
    (tmp_path / "in/linked").symlink_to(tmp_path / "far")
    prepare_speech(tmp_path / "in", tmp_path / "out", recipe())
    assert [clip.path for clip in SpeechStore.open(tmp_path / "out").clips] == ["linked/talk.wav"]


def test_text_files_serve_recordings_without_subtitles(tmp_path):
    """Programs write the text of a recording next to its subtitles, too."""
    for number, name in enumerate("abc"):
        speak(tmp_path / f"in/{name}.wav", hum(2.0, hz=100 + number), text=SECOND)
    (tmp_path / "in/a.srt").write_text(srt((0.5, 1.5, "Only this.")))
    (tmp_path / "in/c.de.srt").write_text(srt((0.5, 1.5, "nur")))
    (tmp_path / "in/c.fr.srt").write_text(srt((0.5, 1.5, "seul")))
    report = prepare_speech(tmp_path / "in", tmp_path / "out", recipe())
    clips = SpeechStore.open(tmp_path / "out").clips
    assert [(clip.path, clip.text) for clip in clips] == [("a.wav", "Only this."), ("b.wav", SECOND)]
    assert [(one.path, one.reason, one.detail) for one in report.refused] == [
        ("c.wav", "ambiguous sound", "c.de.srt or c.fr.srt may be its subtitles: give them the language en")
    ]


COMMON_VOICE = "client_id\tpath\tsentence_id\tsentence\tup_votes\tdown_votes\tage\tgender\taccents\tlocale\n"


def test_common_voice(tmp_path):
    clips = tmp_path / "in/clips"
    for number in range(5):
        clips.mkdir(parents=True, exist_ok=True)
        soundfile.write(clips / f"common_voice_uz_{number}.mp3", hum(2.0, hz=100 + 10 * number, rate_hz=48000), 48000)
    rows = [f"{'ab'[n % 2] * 128}\tcommon_voice_uz_{n}.mp3\t1\tOʻzbek “soʻz” {n}!\t2\t0\t\t\t\tuz\n" for n in range(4)]
    (tmp_path / "in/train.tsv").write_text(COMMON_VOICE + "".join(rows[:3]), encoding="utf-8")
    (tmp_path / "in/test.tsv").write_text(COMMON_VOICE + rows[3], encoding="utf-8")
    durations = "".join(f"common_voice_uz_{number}.mp3\t2000\n" for number in range(5))
    (tmp_path / "in/clip_durations.tsv").write_text("clip\tduration[ms]\n" + durations)
    with pytest.raises(UserError, match=r"several places: clip_durations\.tsv, test\.tsv, train\.tsv") as raised:
        prepare_speech(tmp_path / "in", tmp_path / "out", recipe("uz"))
    assert "--transcripts FILE" in str(raised.value.hint)
    report = prepare_speech(tmp_path / "in", tmp_path / "out", recipe("uz", transcripts=tmp_path / "in/train.tsv"))
    store = SpeechStore.open(tmp_path / "out")
    assert [(clip.normalized, clip.speaker) for clip in store.clips] == [
        ("oʻzbek soʻz nol", 0), ("oʻzbek soʻz bir", 1), ("oʻzbek soʻz ikki", 0)
    ]  # fmt: skip
    assert store.format.speakers == ("a" * 128, "b" * 128)
    assert report.refused == []  # The other clips are those of other tables.
    assert report.ignored["not in train.tsv"] == [f"clips/common_voice_uz_{number}.mp3" for number in (3, 4)]


def test_clips_with_silent_ends_are_not_slow(tmp_path):
    """The voice leaves out the short text, too, as its ends are trimmed."""
    for number in range(30):
        sound = [rest(0.2), hum(1.0 + 0.01 * number, hz=100 + number), rest(0.2)]
        speak(tmp_path / f"in/{number:02}.wav", *sound, text=SECOND)
    (tmp_path / "in/07.txt").write_text("a")  # 1.47 seconds for a letter: more than a second of surplus
    speak(tmp_path / "in/08.wav", rest(0.45), hum(0.1, hz=180), rest(0.45), text="a")  # 1.0 second
    (tmp_path / "in/09.txt").write_text(3 * (SECOND + " "))
    report = prepare_speech(tmp_path / "in", tmp_path / "out", recipe())
    assert [(one.path, one.reason) for one in report.refused] == [
        ("07.wav", "odd speaking rate"), ("09.wav", "odd speaking rate")
    ]  # fmt: skip


def test_stores_of_voices_and_recognisers_are_not_mixed_up(tmp_path):
    speak(tmp_path / "in/a.wav", hum(1.0), text=SECOND)
    voice = speech_prepare_config("tts", SpeechOptions(language="en"), Sound(audio_sample_rate=16000, trim_db=0.0))
    prepare_speech(tmp_path / "in", tmp_path / "asr", recipe())
    prepare_speech(tmp_path / "in", tmp_path / "tts", voice)
    with pytest.raises(UserError, match=r"prepared for a voice \(--kind tts\), not for a recogniser"):
        open_speech(tmp_path / "tts", kind="asr")
    with pytest.raises(UserError, match=r"prepared for a recogniser \(--kind asr\), not for a voice"):
        open_speech(tmp_path / "asr")
    for config, folder, found in ((voice, "asr", "asr"), (recipe(), "tts", "tts")):
        before = (tmp_path / folder / TEXT).read_bytes()
        with pytest.raises(UserError, match=f"holds speech prepared with --kind {found}"):
            prepare_speech(tmp_path / "in", tmp_path / folder, config)
        assert (tmp_path / folder / TEXT).read_bytes() == before
    prepare_speech(tmp_path / "in", tmp_path / "other", replace(recipe(), sampling_rate=22050))
    with pytest.raises(UserError, match="prepared at 22050 Hz with 320 samples a frame; a recogniser reads 16000 Hz"):
        open_speech(tmp_path / "other", kind="asr")
    other = json.loads((tmp_path / "tts" / TEXT).read_text())
    del other["kind"]
    (tmp_path / "tts" / TEXT).write_text(json.dumps(other) + "\n")
    with pytest.raises(UserError, match="written by another version of gputrain"):
        open_speech(tmp_path / "tts")


def test_batches_have_labels(tmp_path):
    """Few long recordings are held out by parts."""
    speak(tmp_path / "in/talk.wav", *(hum(2.0, hz=100 + 10 * number) for number in range(20)))
    (tmp_path / "in/talk.srt").write_text(srt(*((2 * n, 2 * n + 2, f"Text {n}.") for n in range(20))))
    prepare_speech(tmp_path / "in", tmp_path / "out", recipe())
    speech = open_speech(tmp_path / "out", 0.2, kind="asr")
    assert not speech.parts.shared
    assert (len(speech.parts.train) + len(speech.parts.held_out), 1 <= len(speech.parts.held_out) <= 8) == (20, True)
    batch = Buckets(speech.store, speech.parts.train, 320, 2, 0).collated([0, 1])
    vocabulary = speech.store.format.vocabulary
    for row in range(2):
        ids = batch.ids_BS[row, : batch.symbols_B[row]].tolist()
        assert vocabulary.text_of(ids) == speech.parts.train[row].normalized
        assert batch.samples_B[row] == 32000
    assert (batch.ids_BS == 0).sum() == (batch.symbols_B.max() - batch.symbols_B).sum()


@pytest.mark.parametrize(
    ("text", "fault"),
    [("?!", r"the vocabulary is empty: no transcript has a letter"), (" ", "1 no transcript")],
)
def test_an_empty_vocabulary(tmp_path, text, fault):
    speak(tmp_path / "in/a.wav", hum(1.0), text=text)
    with pytest.raises(UserError, match=fault):
        prepare_speech(tmp_path / "in", tmp_path / "out", recipe())
    for language, match in ((None, "a recogniser needs a language"), ("characters", "not the code of a language")):
        with pytest.raises(UserError, match=match):
            prepare_speech(tmp_path / "in", tmp_path / "out", recipe(language))


def test_digits_without_rules_are_a_warning(tmp_path, caplog):
    speak(tmp_path / "in/a.wav", hum(2.0), text="Бізде 25 кітап, 3% + 🙂")
    prepare_speech(tmp_path / "in", tmp_path / "out", recipe("kk"))
    (message,) = [record.getMessage() for record in caplog.records if "digits" in record.getMessage()]
    assert message.startswith("--language kk keeps digits, since it has no words for them: 2 (1: ")
    assert all(f"{char} (1: '" in message for char in "235")
    (message,) = [record.getMessage() for record in caplog.records if "rules remove" in record.getMessage()]
    assert all(f"{char} (1: '" in message for char in "%+🙂")
    assert SpeechStore.open(tmp_path / "out").clips[0].normalized == "бізде 25 кітап 3"


def test_numbers_are_words_if_their_language_is_named(tmp_path):
    pytest.importorskip("num2words")
    speak(tmp_path / "in/a.wav", hum(2.0), text="Бізде 25 кітап")
    config = recipe("kk")
    config = replace(config, speech=replace(config.speech, number_words="kk"))
    prepare_speech(tmp_path / "in", tmp_path / "out", config)
    store = SpeechStore.open(tmp_path / "out")
    assert store.clips[0].normalized == "бізде жиырма бес кітап"
    # The store keeps the rule, so that a recogniser normalises other texts equally.
    assert store.format.frontend.normalize("3") == "үш"


@each_row("tts", "asr")
def test_a_manifest_cuts_a_recording_at_its_offsets(tmp_path, kind):
    """Each clip is the tone of its time, in the store of either kind, and in the report on the folder."""
    tones = {100: 2.0, 200: 3.0, 300: 1.5}
    speak(tmp_path / f"{kind}/talk.wav", *(hum(seconds, hz=hz) for hz, seconds in tones.items()))
    speak(tmp_path / f"{kind}/whole.wav", hum(1.2, hz=400))
    speak(tmp_path / f"{kind}/longer.wav", hum(3.0, hz=500))
    cuts = [(0, 2.0), (2.0, 3.0), (5.0, None), (6.2, 2.0), (9.0, 1.0)]
    rows = [{"audio_filepath": "talk.wav", "offset": at, "duration": length, "text": "so it is"} for at, length in cuts]
    rows += [{"audio_filepath": f"{name}.wav", "duration": 1.2, "text": "so it is"} for name in ("whole", "longer")]
    (tmp_path / f"{kind}/train.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = speech_prepare_config(kind, SpeechOptions(language="en"), Sound(audio_sample_rate=16000))
    report = prepare_speech(tmp_path / kind, tmp_path / f"{kind}-out", config)
    store = SpeechStore.open(tmp_path / f"{kind}-out")
    found = []
    for clip in store.clips:
        spectrum = np.abs(np.fft.rfft(store.wave(clip).astype(np.float64)))
        found.append((clip.path, round(spectrum.argmax() * 16000 / clip.samples / 100), clip.samples / 16000))
    assert found == [
        ("talk.wav", 1, 2.0), ("talk.wav", 2, 3.0), ("talk.wav", 3, 1.5), ("whole.wav", 4, 1.2), ("longer.wav", 5, 1.2)
    ]  # fmt: skip
    assert [refusal.reason for refusal in report.refused] == ["outside the recording"] * 2
    seen = validate_speech(tmp_path / kind, config)
    assert (seen.clips, seen.seconds.max, seen.refused) == (5, 3.0, report.refused)
    notes = " ".join(seen.findings)
    assert "longer.wav, of which 1.2 of 3.00 seconds are used" in notes
    assert ("silence at both ends is kept" in notes) == (kind == "tts")


def test_times_in_a_longer_recording_have_no_effect_on_a_clip_that_was_cut_from_it(tmp_path):
    """As those of a data set whose rows have the sound of a clip and its place in a book."""
    speak(tmp_path / "a.wav", hum(1.5))
    speak(tmp_path / "b.wav", hum(3.0))
    rows = [{"audio": "a.wav", "text": "one", "begin_time": 401.2, "end_time": 402.7},
            {"audio": "b.wav", "text": "two", "begin_time": 1.0, "end_time": 2.5}]  # fmt: skip
    (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    notes: list[str] = []
    utterances = read_transcripts(tmp_path, ["a.wav", "b.wav"]).utterances
    found = without_whole_spans(tmp_path, utterances, notes)
    assert {one.path: one.span for one in found} == {"a.wav": None, "b.wav": (1.0, 2.5)}
    assert not notes


def test_a_column_of_channels_is_refused(tmp_path):
    """Their mean is another sound than one channel."""
    speak(tmp_path / "call.wav", hum(1.2))
    (tmp_path / "m.csv").write_text("audio,channel,text\ncall.wav,1,so it is\n")
    with pytest.raises(UserError, match=r"a channel of the recording \(1\), which is not read") as error:
        validate_speech(tmp_path, recipe())
    columns = tuple(error.value.hint.rpartition("--transcript-columns ")[2].split(","))
    assert validate_speech(tmp_path, recipe(transcript_columns=columns)).clips == 1


def test_times_in_another_unit_are_outside_the_recording(tmp_path):
    speak(tmp_path / "a.wav", hum(1.2))
    (tmp_path / "m.csv").write_text("audio,text,duration\na.wav,so it is,1200\n")
    (refused,) = validate_speech(tmp_path, recipe()).refused
    assert (refused.reason, refused.detail) == (
        "outside the recording", "0.00 to 1200.00 seconds of a recording of 1.20",
    )  # fmt: skip


def test_excluded_recordings_are_ignored_by_their_pattern_although_transcripts_name_them(tmp_path):
    for name in ("a_mic1", "a_mic2", "b"):
        speak(tmp_path / f"in/{name}.wav", hum(1.0, hz=200 + 7 * len(name)))
    (tmp_path / "in/metadata.csv").write_text("audio|text\na_mic1|so it is\na_mic2|so it is\nb|it is so\n")
    report = prepare_speech(tmp_path / "in", tmp_path / "out", recipe(), exclude=("*_mic2.wav",))
    assert [clip.path for clip in SpeechStore.open(tmp_path / "out").clips] == ["a_mic1.wav", "b.wav"]
    assert (report.ignored, report.refused) == ({"excluded by *_mic2.wav": ["a_mic2.wav"]}, [])
