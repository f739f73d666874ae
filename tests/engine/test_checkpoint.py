"""What a disk may do to a checkpoint: flip its bits, refuse to read or to write it, lose its folder, kill between two
steps of a save. An intact checkpoint serves, and a wrong value is never loaded."""

import fcntl
import os
import random
import re
import shutil
import struct
import zipfile
from pathlib import Path

import pytest
import torch

from gputrain.engine import checkpoint
from gputrain.engine.checkpoint import BEST, LAST, PREVIOUS
from tests.tables import slow
from tests.toy import whole_checkpoint


def content(step: int) -> dict:
    tensors = {f"layer.{number}": torch.full((3, 5), float(100 * step + number)) for number in range(4)}
    return whole_checkpoint(step=step, modules={"g": tensors})


def step_of(found) -> int:
    """The step of a checkpoint all of whose values are those that were saved."""
    step = found["progress"]["step"]
    expected = content(step)
    assert found.keys() == {*expected, "format"}
    assert found["modules"]["g"].keys() == expected["modules"]["g"].keys()
    for name, tensor in expected["modules"]["g"].items():
        assert torch.equal(found["modules"]["g"][name], tensor)
    return step


@pytest.fixture
def folder(tmp_path) -> Path:
    """Saved at steps 1 (kept and best), 2 (kept), 3 and 4."""
    for step in (1, 2, 3, 4):
        checkpoint.save(tmp_path, content(step))
        if step <= 2:
            checkpoint.keep(tmp_path, f"checkpoint_step_{step}.pt")
        if step == 1:
            checkpoint.keep(tmp_path, BEST)
    return tmp_path


def damage(path: Path) -> None:
    """Replace a file by one with a byte changed; its other names keep what they had."""
    changed = bytearray(path.read_bytes())
    changed[len(changed) // 2] ^= 4
    path.unlink()
    path.write_bytes(changed)


def test_a_checkpoint_is_an_archive_that_any_reader_of_torchs_files_opens(folder):
    path = folder / LAST
    assert step_of(torch.load(path, weights_only=True)) == 4
    assert step_of(torch.load(path, weights_only=True, mmap=True)) == 4
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert archive.comment.startswith(b"gputrain crc32 ")


def test_a_checkpoint_from_before_the_checksum_is_read_and_its_damage_seen(tmp_path):
    path = tmp_path / LAST
    torch.save({"format": checkpoint.FORMAT, **content(7)}, path)
    assert step_of(checkpoint.read(path, "toy")) == 7
    changed = path.read_bytes().replace(struct.pack("<f", 702), struct.pack("<f", 702.5))
    path.write_bytes(changed)
    assert (
        torch.load(path, weights_only=True)["modules"]["g"]["layer.2"][0, 0] == 702.5
    )  # torch.load does not notice the change.
    with pytest.raises(checkpoint.Damaged, match="truncated or damaged"):
        checkpoint.read(path, "toy")


@pytest.mark.parametrize("count", [200, slow(2500)])
def test_no_flipped_bit_loads_a_wrong_value_or_keeps_an_intact_checkpoint_from_serving(folder, count):
    path = folder / LAST
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        directory = 8 * archive.start_dir  # Half of the flips hit the directory, which misleads readers.
    rng, size, outcomes = random.Random(0), 8 * len(whole), {4: 0, 3: 0}
    for number in range(count):
        bit = rng.randrange(directory if number % 2 else 0, size)
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        found = checkpoint.find("auto", folder, "toy")
        assert found is not None
        outcomes[step_of(found[1])] += 1
        assert step_of(checkpoint.find_named(path, "toy", ["g"])[1]) in (1, 4)
    # A flip in the mark of the checksum itself harms nothing: the archive's own checksums are looked at.
    assert outcomes[4] < count / 10 < outcomes[3]


def test_for_the_use_of_a_model_only_its_weights_are_kept(tmp_path):
    """The state of the optimizer is most of a checkpoint."""
    moments = {"exp_avg": torch.full((7, 11), 5.0)}
    average = {f"average.{name}": tensor + 0.5 for name, tensor in content(4)["modules"]["g"].items()}
    plain = {**content(4), "optimizers": {"g": moments}, "random": {"cpu": torch.zeros(5, dtype=torch.uint8)}}
    with_average = {**plain, "modules": {**plain["modules"], "d": {"x": torch.ones(3)}, "ema": average}}
    for whole, names in ((plain, {"g"}), (with_average, {"ema", "d"})):
        checkpoint.save(tmp_path, whole)
        path = tmp_path / LAST
        assert checkpoint.read(path, "toy", [])["modules"] == {}
        found = checkpoint.read(path, "toy", ["g", "d"])
        assert (found["optimizers"], found["random"], found["modules"].keys()) == ({}, {}, names)
        expected = {name: tensor for part in names for name, tensor in whole["modules"][part].items()}
        read = {name: tensor for part in found["modules"].values() for name, tensor in part.items()}
        assert read.keys() == expected.keys()
        assert all(torch.equal(read[name], expected[name]) for name in expected)
    path.write_bytes(path.read_bytes().replace(struct.pack("<f", 402.5), struct.pack("<f", 402.25)))
    with pytest.raises(checkpoint.Damaged, match="truncated or damaged"):
        checkpoint.read(path, "toy", ["g"])


@pytest.mark.parametrize(
    ("damaged", "serves"),
    [
        ((), 4),
        ((LAST,), 3),
        ((LAST, PREVIOUS), 2),
        ((LAST, PREVIOUS, "checkpoint_step_2.pt"), 1),
        ((LAST, PREVIOUS, "checkpoint_step_2.pt", "checkpoint_step_1.pt"), 1),
    ],
)
def test_every_intact_checkpoint_serves_from_the_newest_on(folder, damaged, serves, caplog):
    for name in damaged:
        damage(folder / name)
    for named in ("auto", str(folder), str(folder / LAST)):
        caplog.clear()
        assert step_of(checkpoint.find(named, folder, "toy")[1]) == serves
        assert caplog.text.count("truncated or damaged") == len(damaged)
    if damaged:
        assert re.search(rf"{damaged[-1]}: truncated or damaged; checkpoint_\w+.pt is used instead", caplog.text)


def test_a_model_is_taken_from_the_best_one_and_a_run_goes_on_from_the_last(folder, caplog):
    caplog.set_level("INFO")
    source, found = checkpoint.find_named(folder, "toy")
    assert (source, step_of(found)) == (folder / BEST, 1)
    assert f"using {source} (step 1, the best on held-out data; checkpoint_last.pt there is the newest)" in caplog.text
    assert step_of(checkpoint.find(str(folder), folder, "toy")[1]) == 4
    assert step_of(checkpoint.find_named(folder / LAST, "toy")[1]) == 4
    damage(folder / BEST)
    assert step_of(checkpoint.find_named(folder, "toy")[1]) == 4
    assert f"{BEST}: truncated or damaged; {LAST} is used instead" in caplog.text
    (folder / BEST).unlink()
    caplog.clear()
    assert checkpoint.find_named(folder, "toy")[0] == folder / LAST
    other = shutil.copytree(folder, folder / "copy")
    checkpoint.find_named(other, "toy")
    assert f"using {other / LAST} (step 4, the newest; none was the best)" in caplog.text


def test_without_an_intact_one_there_is_an_error(folder):
    for path in folder.glob("*.pt"):
        damage(path)
    with pytest.raises(checkpoint.Damaged, match=f"{BEST}: truncated or damaged") as raised:
        checkpoint.find("auto", folder, "toy")
    assert f"{folder} holds no intact one" in raised.value.hint
    assert "another folder" in raised.value.hint


def test_the_kept_ones_are_tried_by_their_numbers_although_copying_has_changed_their_times(tmp_path):
    for step in (9, 10, 100):
        checkpoint.save(tmp_path, content(step))
        checkpoint.keep(tmp_path, f"checkpoint_step_{step}.pt")
    for time, step in enumerate((100, 9, 10)):
        os.utime(tmp_path / f"checkpoint_step_{step}.pt", (time, time))
    names = [path.name for path in checkpoint.newest_first(tmp_path) if "step" in path.name]
    assert names == ["checkpoint_step_100.pt", "checkpoint_step_10.pt", "checkpoint_step_9.pt"]


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="Linux has a file that cannot be read")
def test_an_input_output_error_is_damage(folder, caplog):
    """Reading address 0 of a process fails with EIO, as a broken disk does."""
    (folder / LAST).unlink()
    (folder / LAST).symlink_to("/proc/self/mem")
    with pytest.raises(OSError, match="Input/output error"):
        (folder / LAST).read_bytes()
    assert step_of(checkpoint.find("auto", folder, "toy")[1]) == 3
    assert f"{LAST}: cannot be read: Input/output error; {PREVIOUS} is used instead" in caplog.text


def test_a_full_disk_is_named_with_what_is_free(tmp_path):
    """/dev/full takes no byte, and says that the device has no space left."""
    (tmp_path / (LAST + ".partial")).symlink_to("/dev/full")
    with pytest.raises(checkpoint.SaveFailed, match="No space left on device") as caught:
        checkpoint.save(tmp_path, content(1))
    assert "free some space" in caught.value.hint
    assert not list(tmp_path.glob("*.partial"))


def test_a_folder_that_is_gone_is_named(tmp_path):
    with pytest.raises(checkpoint.SaveFailed, match="No such file or directory") as caught:
        checkpoint.save(tmp_path / "deleted", content(1))
    assert "the folder no longer exists" in caught.value.hint
    assert "free some space" not in caught.value.hint


def test_a_folder_that_may_not_be_written_is_named(tmp_path):
    """By permissions, or for root, whom they don't bind, by an attribute of the file system."""
    with unwritable(tmp_path), pytest.raises(checkpoint.SaveFailed) as caught:
        checkpoint.save(tmp_path, content(1))
    assert caught.value.hint == "make the folder writable again"


class unwritable:
    IMMUTABLE, GET, SET = 0x10, 0x80086601, 0x40086602

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> None:
        self.folder.chmod(0o500)
        if os.access(self.folder, os.W_OK):
            self._flag(True)

    def __exit__(self, *error: object) -> None:
        if os.geteuid() == 0:
            self._flag(False)
        self.folder.chmod(0o700)

    def _flag(self, on: bool) -> None:
        handle = os.open(self.folder, os.O_RDONLY)
        try:
            flags = bytearray(8)
            fcntl.ioctl(handle, self.GET, flags)
            now = int.from_bytes(flags, "little")
            wanted = now | self.IMMUTABLE if on else now & ~self.IMMUTABLE
            fcntl.ioctl(handle, self.SET, wanted.to_bytes(8, "little"))
        except OSError as error:
            pytest.skip(f"nothing keeps root from writing here ({error})")
        finally:
            os.close(handle)
