"""Subtitles: cues, lines and clocks."""

from itertools import pairwise

from gputrain.speech.subtitles import TimedWord, cues_of, srt, vtt


def words(text: str, start: float = 0.0, each: float = 0.4) -> list[TimedWord]:
    return [TimedWord(word, start + at * each, start + at * each + 0.3) for at, word in enumerate(text.split())]


def test_both_formats() -> None:
    spoken = [*words("good morning"), *words("bye", start=3725.5)]
    assert srt(spoken) == (
        "1\n00:00:00,000 --> 00:00:01,000\ngood morning\n\n2\n01:02:05,500 --> 01:02:06,500\nbye\n\n"
    )
    assert vtt(spoken) == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.000\ngood morning\n\n01:02:05.500 --> 01:02:06.500\nbye\n"
    )
    assert (srt([]), vtt([])) == ("", "WEBVTT\n")


def test_cues_keep_to_lines_and_seconds_and_hold_every_word() -> None:
    spoken = words("the quick brown fox jumps over a lazy dog and sleeps " * 9)
    cues = cues_of(spoken)
    assert " ".join(" ".join(cue.lines) for cue in cues).split() == [word.word for word in spoken]
    assert all(len(cue.lines) <= 2 and max(map(len, cue.lines)) <= 42 for cue in cues)
    assert all(cue.end - cue.start <= 7.0 for cue in cues)
    assert all(before.end <= after.start for before, after in pairwise(cues))
    assert len(cues) >= 6


def test_a_pause_ends_a_cue_and_a_short_one_does_not() -> None:
    spoken = [*words("one two"), *words("three", start=1.4), *words("four", start=2.6)]
    assert [cue.lines for cue in cues_of(spoken)] == [["one two three"], ["four"]]


def test_a_short_cue_is_shown_until_the_next_at_most() -> None:
    first, second = cues_of([TimedWord("a", 0.0, 0.1), TimedWord("b", 0.95, 1.0)])
    assert (first.end, second.end) == (0.95, 1.95)


def test_a_word_longer_than_a_line_is_kept() -> None:
    assert cues_of([TimedWord("x" * 60, 0, 1)])[0].lines == ["x" * 60]
