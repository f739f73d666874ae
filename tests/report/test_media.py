"""Pictures and sounds of pages, which stay in memory, and files that no page and no report reads."""

import os
import shutil
import struct
import zlib

import numpy as np
import pytest
import soundfile
from PIL import Image

from gputrain.report import media as module
from gputrain.report.media import EmbeddedPicture, EmbeddedSound, LiveMedia, MediaBudget
from gputrain.report.records import read_run
from gputrain.report.sections import sample_section
from tests.report.runs import make_run


@pytest.fixture(scope="module")
def vae_run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("media") / "vae", "vae")


def uris(section):
    return [one.picture.uri for item in section.pictures for one in (item.original, *item.made)]


def test_a_page_decodes_only_new_files(vae_run, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    shutil.copytree(vae_run, folder)
    opened = []
    original = module.open_picture
    monkeypatch.setattr("gputrain.report.sections.open_picture", lambda path: opened.append(path) or original(path))
    media, record = LiveMedia(), read_run(folder)
    first = uris(sample_section(record, media))
    assert len(opened) == 2
    assert len(first) == 6  # Two originals, each with what was made of it at two steps.
    assert uris(sample_section(record, media)) == first
    assert len(opened) == 2
    for uri in first:
        kind, content = media.get(uri.removeprefix("media/"))
        assert kind == "image/jpeg"
        assert content.startswith(b"\xff\xd8")
    assert media.get("../metrics.jsonl") is None
    newest, before = (folder / "samples" / f"reconstructions_step_000000{step}.png" for step in (60, 40))
    shutil.copy(before, newest)
    assert len(uris(sample_section(record, media))) == 8
    assert opened[2:] == [newest, before]  # The latter again, now without the originals.
    newest.write_bytes(newest.read_bytes()[:2000])  # It is being written.
    media.renew(30)
    sample_section(record, media)
    sample_section(record, media)
    assert media.unreadable == 2  # Counted for each of the two, and read once.
    assert len(opened) == 5
    media.renew(-1)  # There is no time for files that weren't shown before.
    shutil.copy(folder / "samples" / "reconstructions_step_00000040.png", newest)
    assert uris(sample_section(record, media)) == first
    assert media.left_out == 1


def test_sounds_of_a_page_are_longer_than_those_of_a_file(tmp_path, monkeypatch):
    def seconds(budget, rate, length=70):
        path = tmp_path / f"{rate}.wav"
        soundfile.write(path, np.zeros(length * rate, np.float32), rate)
        return budget.sound(path, "a sound", with_spectrogram=False).seconds

    media = LiveMedia()
    assert seconds(MediaBudget.of(30), 8000) == 8
    assert seconds(media, 8000) == 60
    assert seconds(media, 48000) == pytest.approx(41.7, abs=0.1)
    heard = media.sound(tmp_path / "8000.wav", "another title", with_spectrogram=False)
    assert isinstance(heard, EmbeddedSound)
    kind, content = media.get(heard.uri.removeprefix("media/"))
    assert (kind, content[:4], len(content)) == ("audio/wav", b"RIFF", 2 * 8000 * 60 + 44)


def test_the_least_recently_used_contents_are_dropped_and_made_again(tmp_path, monkeypatch):
    media = LiveMedia()
    paths = [tmp_path / f"{number}.png" for number in range(3)]
    for number, path in enumerate(paths):
        Image.new("RGB", (64, 64), (number * 80, 0, 0)).save(path)

    def show(path):
        [(_, made)] = media.of_file(path, lambda: [("title", media.picture(module.open_picture(path), "a picture"))])
        assert isinstance(made, EmbeddedPicture)
        return made.uri.removeprefix("media/")

    first = show(paths[0])
    monkeypatch.setattr(module, "LIVE_BYTES", int(2.5 * len(media.get(first)[1])))
    second = show(paths[1])
    show(paths[0])
    show(paths[2])
    assert media.get(first)
    assert media.get(second) is None
    assert show(paths[1]) == second
    assert media.get(second)


def test_what_leads_out_of_the_run_is_never_read(vae_run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(vae_run, folder)
    samples = folder / "samples"
    shutil.copy(samples / "reconstructions_step_00000040.png", tmp_path / "private.png")
    (tmp_path / "private.txt").write_text("clip: a\ntext: secret\nread: secret\n")
    (samples / "reconstructions_step_80.png").symlink_to(tmp_path / "private.png")
    (samples / "transcripts_step_80.txt").symlink_to("../../private.txt")
    (samples / "captions.json").symlink_to("/etc/hostname")
    (samples / "again_step_90.png").symlink_to("reconstructions_step_00000040.png")  # It stays in the run.
    os.mkfifo(samples / "x_step_1.wav")
    for budget in (MediaBudget.of(30), LiveMedia()):
        section = sample_section(read_run(folder), budget)
        steps = [[one.title for one in item.made] for item in section.pictures]
        assert steps == [["step 90"], ["step 90"], ["step 40", "step 20"], ["step 40", "step 20"]]
        assert section.transcripts is None
        assert budget.unreadable == 4
    (folder / "samples").rename(tmp_path / "samples")
    (folder / "samples").symlink_to(tmp_path / "samples")
    assert sample_section(read_run(folder), MediaBudget.of(30)).is_empty


def test_media_that_would_fill_the_memory_and_very_short_sounds_are_no_error(tmp_path):
    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head, rows = struct.pack(">IIBBBBB", 20_000, 20_000, 1, 0, 0, 0, 0), zlib.compress(b"")
    picture = tmp_path / "large.png"
    picture.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b""))
    budget = MediaBudget.of(30)
    assert budget.of_file(picture, lambda: module.open_picture(picture)) is None
    assert budget.unreadable == 1
    for rate, channels in ((2_000_000_000, 1), (8000, 9), (48_000, 400)):  # The file may have holes of any size.
        soundfile.write(tmp_path / "large.wav", np.zeros((40, channels)), rate)
        assert budget.sound(tmp_path / "large.wav", "a bomb") is None
    assert budget.unreadable == 4
    for length in (1, 31, 32):
        soundfile.write(tmp_path / "short.wav", np.full(length, 0.5), 8000)
        sound = budget.sound(tmp_path / "short.wav", "a click")
        assert sound.seconds == length / 8000
        assert (sound.spectrogram is None) == (length < 32)
