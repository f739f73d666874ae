"""Archives are unpacked whole, or not at all."""

import io
import stat
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from gputrain.errors import UserError
from gputrain.fetch.archives import content_of, stem_of, unpack
from tests.tables import each_row

FILES = {"voice/model.ckpt": b"weights", "voice/sub/config.json": b"{}"}


def write_zip(path: Path, files: dict[str, bytes], mode: int = 0o644) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            info = zipfile.ZipInfo(name)
            info.external_attr, info.compress_type = mode << 16, zipfile.ZIP_DEFLATED
            archive.writestr(info, content)


def write_tar(path: Path, files: dict[str, bytes]) -> None:
    mode = next((f"w:{one}" for one in ("gz", "bz2", "xz") if path.name.endswith(one)), "w")
    with tarfile.open(path, mode) as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@each_row("a.zip", "a.tar.gz", "a.tgz", "a.tar", "a.tar.bz2", "a.txz", "A.ZIP")
def test_files_are_unpacked(tmp_path, name):
    (write_zip if name.lower().endswith("zip") else write_tar)(tmp_path / name, FILES)
    unpack(tmp_path / name, tmp_path / "out" / name)
    assert files_of(tmp_path / "out" / name) == FILES
    assert content_of(tmp_path / "out" / name).name == "voice"
    for other, folder in ((".DS_Store", "voice"), ("._voice", "voice"), (".hidden.png", name)):
        (tmp_path / "out" / name / other).touch()
        assert content_of(tmp_path / "out" / name).name == folder
        (tmp_path / "out" / name / other).unlink()
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


def write_zip_in(path: Path, page: str, names: list[str]) -> None:
    """Writes an archive as Windows does: with names in a code page, which nothing in it states."""
    stand_ins = [f"{number:04d}".rjust(len(name.encode(page)), "-") for number, name in enumerate(names)]
    write_zip(path, dict.fromkeys(stand_ins, b"x"))
    raw = path.read_bytes()
    for one, name in zip(stand_ins, names, strict=True):
        raw = raw.replace(one.encode(), name.encode(page))
    path.write_bytes(raw)


def test_names_without_a_mark_are_utf_8_or_refused(tmp_path):
    write_zip_in(tmp_path / "a.zip", "utf-8", ["Аня/Запись.wav", "表示.wav"])
    unpack(tmp_path / "a.zip", tmp_path / "a")
    assert {*files_of(tmp_path / "a")} == {"Аня/Запись.wav", "表示.wav"}
    write_zip_in(tmp_path / "b.zip", "cp866", ["привет.wav"])
    with pytest.raises(UserError, match="nothing states the code page of its names"):
        unpack(tmp_path / "b.zip", tmp_path / "b")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="zipfile of Python 3.11 takes a code page")
def test_the_command_for_names_in_a_code_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_zip_in(Path("a.zip"), "gbk", ["录音.wav", "照片.wav"])
    with pytest.raises(UserError) as caught:
        unpack(Path("a.zip"), Path("out"))
    words = caught.value.hint.partition("python ")[2].replace("cp866", "gbk").split()
    subprocess.run([sys.executable, *words], check=True)
    assert {*files_of(Path("FOLDER"))} == {"录音.wav", "照片.wav"}


def test_links_in_zip_archives_and_false_sizes(tmp_path):
    """Further attacks are in the table of tests/data_in/test_containers.py."""
    write_zip(tmp_path / "link.zip", {"link": b"/etc/passwd"}, stat.S_IFLNK | 0o777)
    with pytest.raises(UserError, match="is no plain file"):
        unpack(tmp_path / "link.zip", tmp_path / "out")
    write_zip(tmp_path / "bomb.zip", {f"{number}": bytes(50_000) for number in range(3)})
    raw = (tmp_path / "bomb.zip").read_bytes()
    (tmp_path / "false.zip").write_bytes(raw.replace((50_000).to_bytes(4, "little"), (100).to_bytes(4, "little")))
    with pytest.raises(UserError, match="damaged"):
        unpack(tmp_path / "false.zip", tmp_path / "out")
    assert not (tmp_path / "out").exists()
