"""The store of sound, with a pitch and without: reading what was written, interrupted writing, damage."""

import itertools
import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputrain.audio.store import (
    PITCHES,
    WAVES,
    Place,
    SoundWriter,
    StoredFile,
    StoredNumbers,
    checksums,
    read_units,
    stored_files,
)
from gputrain.errors import UserError
from tests.tables import each_row

HOPS = [0, 4]  # Samples alone, and hops of four samples with a pitch each.
JOURNAL = "index.jsonl"


@dataclass(frozen=True)
class Sound:
    path: str
    begin: int
    length: int
    block: int = 3
    crcs: tuple[int, ...] = ()

    @property
    def place(self) -> Place:
        return Place(self.begin, self.length, self.crcs, self.block)

    def at_place(self, first: int, sums: tuple[int, ...]) -> "Sound":
        return replace(self, begin=first, crcs=sums)


@dataclass(frozen=True)
class Rate:
    rate_hz: int = 8000


def numbers_of(hop: int, units: int, seed: int) -> list[StoredNumbers]:
    draws = np.random.default_rng(seed)
    wave = draws.integers(-30000, 30000, units * (hop or 1)).astype(np.int16)
    return [wave, draws.uniform(80, 400, units).astype(np.float32)] if hop else [wave]


LENGTHS = (10, 3, 25)


def writer_of(folder: Path, hop: int, format: Rate = Rate()) -> SoundWriter[Sound]:
    return SoundWriter(folder, JOURNAL, format, Sound, stored_files(hop))


def written(folder: Path, hop: int, lengths: tuple[int, ...] = LENGTHS) -> SoundWriter[Sound]:
    writer = writer_of(folder, hop)
    for number in range(len(writer.sounds), len(lengths)):
        sound = Sound(f"{number}.wav", 0, lengths[number])
        writer.append(sound, *numbers_of(hop, lengths[number], number))
    return writer


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("hop", HOPS)
def test_what_is_written_is_read(tmp_path, hop):
    sounds = written(tmp_path, hop).sounds
    assert [sound.begin for sound in sounds] == [0, 10, 13]
    assert [len(sound.crcs) for sound in sounds] == [4, 1, 9]

    @given(st.integers(0, 2), st.data())
    def holds(number, data):
        sound, whole = sounds[number], numbers_of(hop, LENGTHS[number], number)
        first = data.draw(st.integers(0, sound.length - 1))
        count = data.draw(st.integers(1, sound.length - first))
        for file, read, values in zip(
            stored_files(hop), read_units(tmp_path, stored_files(hop), sound, first, count), whole, strict=True
        ):
            a_unit = file.numbers_a_unit
            assert np.array_equal(read, values[first * a_unit : (first + count) * a_unit])

    holds()
    assert (tmp_path / PITCHES).exists() == bool(hop)


def test_checksums_cover_the_numbers_of_all_files():
    """CRC-32 of the numbers of one file, continued over those of the next."""
    import zlib

    wave, pitch = numbers_of(4, 5, 0)
    expected = [
        zlib.crc32(pitch[first : first + 3].tobytes(), zlib.crc32(wave[4 * first : 4 * first + 12].tobytes()))
        for first in (0, 3)
    ]
    assert checksums([wave, pitch], 5, 3) == tuple(expected)


@each_row(*itertools.product(HOPS, (0, 1, 3, 9)))
def test_an_interrupted_writer_goes_on_behind_the_last_whole_sound(tmp_path_factory, hop, cut):
    """Bytes without a row, and an incomplete row, are removed."""
    folder = tmp_path_factory.mktemp("cut")
    written(folder, hop, LENGTHS[:2])
    for file in stored_files(hop):
        with (folder / file.name).open("ab") as to:
            to.write(b"x" * cut)
    with (folder / JOURNAL).open("ab") as to:
        to.write(b'{"path": "2.w'[:cut])
    again = written(folder, hop)
    again.sync()
    assert [sound.path for sound in again.sounds] == ["0.wav", "1.wav", "2.wav"]
    assert files_in(folder) == files_in(written(tmp_path_factory.mktemp("once"), hop).folder)


@pytest.mark.parametrize("hop", HOPS)
def test_a_changed_bit_is_noticed_where_it_is_read_and_only_there(tmp_path, hop):
    sound = written(tmp_path, hop).sounds[2]
    for file in stored_files(hop):
        at = (sound.begin + 13) * file.bytes_per_unit  # Checksums are those of units 12 to 14.
        whole = (tmp_path / file.name).read_bytes()
        (tmp_path / file.name).write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        for first, count in ((0, 12), (15, 10)):
            read_units(tmp_path, stored_files(hop), sound, first, count)
        for first, count in ((0, 13), (12, 1), (14, 1), (0, 25)):
            with pytest.raises(UserError, match=r"2\.wav is damaged in waves\.i16"):
                read_units(tmp_path, stored_files(hop), sound, first, count)
        (tmp_path / file.name).write_bytes(whole)


def test_files_that_are_cut_short_are_named(tmp_path):
    """With a memory map, the process would end with SIGBUS."""
    sound = written(tmp_path, 4).sounds[2]
    (tmp_path / WAVES).write_bytes(b"")
    with pytest.raises(UserError, match=r"waves\.i16: shorter than its index says"):
        read_units(tmp_path, stored_files(4), sound, 0, 5)
    with pytest.raises(UserError, match=r"waves\.i16: shorter than its index says"):
        writer_of(tmp_path, 4)
    (tmp_path / WAVES).unlink()
    with pytest.raises(UserError, match=r"waves\.i16: cannot be read \(No such file or directory\)"):
        read_units(tmp_path, stored_files(4), sound, 0, 5)


def test_another_format_is_another_store(tmp_path):
    before = files_in(written(tmp_path, 0).folder)
    with pytest.raises(UserError, match=r"was prepared with rate_hz 8000, not rate_hz 16000"):
        writer_of(tmp_path, 0, Rate(16000))
    assert files_in(tmp_path) == before
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"):
        writer_of(tmp_path / "file", 0)


@each_row("{", "[]", "{}", '{"path": "1.wav"}', '{"path": 1, "begin": 0, "length": 3}')
def test_a_damaged_index_is_named_and_nothing_is_removed(tmp_path_factory, line):
    folder = written(tmp_path_factory.mktemp("index"), 0).folder
    lines = (folder / JOURNAL).read_text().splitlines()
    for place in (0, 1):
        (folder / JOURNAL).write_text("".join(one + "\n" for one in [*lines[:place], line, *lines[place + 1 :]]))
        before = files_in(folder)
        with pytest.raises(UserError, match=r"index\.jsonl: damaged"):
            writer_of(folder, 0)
        assert files_in(folder) == before


def test_rows_of_the_index_are_json_lines(tmp_path):
    written(tmp_path, 0, LENGTHS[:1])
    head, row = map(json.loads, (tmp_path / JOURNAL).read_text().splitlines())
    assert head == {"rate_hz": 8000}
    assert (row["path"], row["begin"], row["length"], len(row["crcs"])) == ("0.wav", 0, 10, 4)


def test_units_have_the_sizes_of_their_numbers():
    assert [file.bytes_per_unit for file in stored_files(5)] == [10, 4]
    assert StoredFile("x", "<f4", 3).bytes_per_unit == 12
