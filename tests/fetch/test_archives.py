"""Archives are unpacked whole, or not at all."""

import io
import os
import stat
import tarfile
import zipfile
from pathlib import Path

import pytest

from gputrain.errors import UserError
from gputrain.fetch import archives
from gputrain.fetch.archives import content_of, stem_of, unpack
from tests.tables import each_row

FILES = {"voice/model.ckpt": b"weights", "voice/sub/config.json": b"{}"}


def write_zip(path: Path, files: dict[str, bytes], mode: int = 0o644, **facts: int) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            info = zipfile.ZipInfo(name)
            info.external_attr, info.compress_type = mode << 16, zipfile.ZIP_DEFLATED
            for fact, value in facts.items():
                setattr(info, fact, value)
            archive.writestr(info, content)


def write_tar(path: Path, files: dict[str, bytes], kind: bytes = tarfile.REGTYPE) -> None:
    with tarfile.open(path, "w:gz" if path.name.endswith("gz") else "w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.type = len(content), kind
            info.linkname = "/etc/passwd" if kind in (tarfile.SYMTYPE, tarfile.LNKTYPE) else ""
            archive.addfile(info, io.BytesIO(content))


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@each_row("a.zip", "a.tar.gz", "a.tgz", "a.tar", "A.ZIP")
def test_files_are_unpacked(tmp_path, name):
    (write_zip if name.lower().endswith("zip") else write_tar)(tmp_path / name, FILES)
    unpack(tmp_path / name, tmp_path / "out" / name)
    assert files_of(tmp_path / "out" / name) == FILES
    assert content_of(tmp_path / "out" / name).name == "voice"
    assert not list(tmp_path.rglob("*.partial"))


def test_endings():
    assert [stem_of(name) for name in ("a.b.ZIP", "v1.0.tar.gz", "model.pt", "zip")] == ["a.b", "v1.0", "", ""]


@each_row("../outside", "/outside", "a/../../outside", "..\\outside", "C:/outside", "C:outside", "a/\0/b")
def test_paths_that_leave_the_folder(tmp_path, name):
    folder = tmp_path / "a" / "out"
    for archive, write in ((tmp_path / "a.zip", write_zip), (tmp_path / "a.tar", write_tar)):
        if "\0" in name:  # Both formats end a name there.
            continue
        write(archive, {"good": b"x", name: b"y"})
        with pytest.raises(UserError, match="would be written outside its folder") as caught:
            unpack(archive, folder)
        assert caught.value.hint
        assert not folder.exists()
    assert not list(tmp_path.rglob("*outside*"))


def test_links_devices_and_encrypted_files(tmp_path):
    write_zip(tmp_path / "link.zip", {"link": b"/etc/passwd"}, stat.S_IFLNK | 0o777)
    for kind, name in ((tarfile.SYMTYPE, "s"), (tarfile.LNKTYPE, "h"), (tarfile.FIFOTYPE, "f"), (tarfile.CHRTYPE, "c")):
        write_tar(tmp_path / f"{name}.tar", {"thing": b""}, kind)
    for archive in sorted(tmp_path.iterdir()):
        with pytest.raises(UserError, match="is no plain file"):
            unpack(archive, tmp_path / "out")
    write_zip(tmp_path / "secret.zip", {"a": b"x"})
    raw = (tmp_path / "secret.zip").read_bytes()
    at = raw.index(b"PK\x01\x02") + 8
    (tmp_path / "secret.zip").write_bytes(raw[:at] + bytes([raw[at] | 1]) + raw[at + 1 :])
    with pytest.raises(UserError, match="is encrypted"):
        unpack(tmp_path / "secret.zip", tmp_path / "out")
    write_zip(tmp_path / "twice.zip", {"a": b"x", "./a": b"y"})
    with pytest.raises(UserError, match="is in it twice"):
        unpack(tmp_path / "twice.zip", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_bombs(tmp_path, monkeypatch):
    """The content may be some times as large as the archive, in all; a false size lets no more through."""
    monkeypatch.setattr(archives, "SMALL", 1000)
    write_zip(tmp_path / "bomb.zip", {f"{number}": bytes(50_000) for number in range(3)})
    write_tar(tmp_path / "bomb.tgz", {"zeros": bytes(1_000_000)})
    for archive in sorted(tmp_path.iterdir()):
        with pytest.raises(UserError, match=r"hold more than [\d.]+ kB"):
            unpack(archive, tmp_path / "out")
        assert not (tmp_path / "out").exists()
    assert sorted(os.listdir(tmp_path)) == ["bomb.tgz", "bomb.zip"]
    raw = (tmp_path / "bomb.zip").read_bytes()
    (tmp_path / "false.zip").write_bytes(raw.replace((50_000).to_bytes(4, "little"), (100).to_bytes(4, "little")))
    with pytest.raises(UserError, match="damaged"):
        unpack(tmp_path / "false.zip", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@each_row("a.zip", "a.tar.gz", "a.tar")
def test_damaged_archives(tmp_path, name):
    (write_zip if name.endswith("zip") else write_tar)(tmp_path / name, {"model.bin": os.urandom(50_000)})
    whole = (tmp_path / name).read_bytes()
    flipped = bytearray(whole)
    flipped[30_000] ^= 255
    damaged = [whole[:20_000], b"", b"<html>", *([bytes(flipped)] if name != "a.tar" else [])]  # It has no checksums.
    for content in damaged:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match="damaged"):
            unpack(tmp_path / name, tmp_path / "out")
        assert not (tmp_path / "out").exists()
