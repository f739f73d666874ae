"""What holds pictures, recordings and texts is damaged, hostile, or names its files in other ways."""

import gzip
import json
import os
import tarfile
from pathlib import Path

import pytest

from gputrain.engine.sources import open_source
from gputrain.engine.unpacking import safe_parts
from gputrain.errors import UserError
from tests.engine.test_sources import (  # noqa: F401
    HUB_TYPE,
    PICTURE,
    add_to_tar,
    cell,
    files_of,
    folders,
    parquet,
    prepare,
    pyarrow,
    rows_of,
    table,
    table_of,
    tar,
    with_names,
    write_webdataset,
    zipped,
)
from tests.tables import each_row


def marked(offset_of_local, offset_of_central, value):
    """Writes a zip archive whose member has another value in its headers."""

    def write(file):
        zipped(("a.png", PICTURE))(file)
        content = bytearray(file.read_bytes())
        content[content.index(b"PK\3\4") + offset_of_local] = value
        content[content.index(b"PK\1\2") + offset_of_central] = value
        file.write_bytes(content)

    return write


def cut_parquet(file):
    table({"image": [PICTURE] * 9})(file)
    file.write_bytes(file.read_bytes()[:-40])


def tarred(*members):
    def write(file):
        with tarfile.open(file, "w") as archive:
            for name, content in members:
                add_to_tar(archive, name, content)

    return write


def raw(content):
    return lambda file: file.write_bytes(content)


@each_row(
    ("x.parquet", table({"text": ["a"], "n": [1]}), "no column of pictures; columns: text (string), n (int64)",
     "--column NAME"),
    ("x.parquet", table({"audio": [PICTURE]}), "no column of pictures; columns: audio (binary)", "it holds recordings"),
    ("x.parquet", table({"url": ["https://a/b.jpg"]}), "no column of pictures", "nothing is loaded from the addresses"),
    ("x.parquet", table({"image": ["https://a/b.jpg"]}), "row 0: an address, from which nothing is loaded", ""),
    ("x.parquet", table({"a": [PICTURE], "b": [PICTURE]}), "several columns may hold the pictures: a, b", "--column a"),
    ("x.parquet", table({"image": [[PICTURE]]}), "no column of pictures; columns: image (list", "a row for each"),
    ("x.parquet", table({"image": [{"array": [0.5], "path": "a.png"}]}), "no column of pictures", "as encoded bytes"),
    ("x.parquet", table({"image": pyarrow.array([], pyarrow.binary())}), "no pictures in it: it is empty", ""),
    ("x.parquet", table({"image": pyarrow.array([None], pyarrow.binary())}), "row 0: an empty cell", ""),
    ("x.parquet", table({"image": ["gone.jpg"]}), "row 0: no bytes, and no file gone.jpg beside x.parquet", ""),
    ("x.parquet", cut_parquet, "x.parquet: damaged, cut off", "copy or load it again"),
    ("x.parquet", raw(b"version https://git-lfs.github.com/spec/v1\n"), "a git-LFS pointer", "git lfs pull"),
    ("x.parquet", raw(b"PARE" * 9), "an encrypted parquet file", "decrypt it"),
    ("x.parquet", raw(b""), "x.parquet: the file is empty", ""),
    ("x.parquet", raw(b"junk" * 9), "no parquet file, or damaged at its beginning", ""),
    ("x.arrow", raw(b"\xff\xff\xff\xff" + b"\1" * 99), "x.arrow: damaged or cut off after row 0", ""),
    ("x.tar", tarred(("a.txt", b"x"), ("b.zip", b"PK")), "no pictures in it, but 1 .txt, 1 .zip", "it holds archives"),
    ("x.tar", tarred(("a.wav", b"x")), "no pictures in it, but 1 .wav", "it holds recordings: choose a --kind"),
    ("x.tar", os.mkfifo, "x.tar: not a regular file", "hf://datasets/NAME"),
    ("x.tar", tarred(("../a.png", PICTURE)), "x.tar, ../a.png: its name leads out of the archive", ""),
    ("x.zip", marked(6, 8, 1), "x.zip: encrypted", "7z x"),
    ("x.zip", marked(8, 10, 9), "x.zip, a.png: That compression method is not supported; unpack", ""),
    ("x.zip", raw(b"PK\3\4" + b"x" * 99), "x.zip: damaged or cut off", "zip -FF"),
    ("x.7z", raw(b"7z\xbc\xaf\x27\x1c"), "x.7z: a 7z archive", "7z x"),
    ("x.tar.zst", raw(b"\x28\xb5\x2f\xfd"), "compressed by zstd", "zstd -d"),
    ("x.csv", raw(b"url,text\nhttps://a/b.jpg,c\n"), "x.csv: a table", "Nothing is loaded from addresses"),
    ("x.txt", raw(b"https://a/b.jpg"), "no line names one of the pictures; x.txt, line 1: an address", ""),
    ("x.txt", raw(b"a.wav|A text."), "x.txt, line 1: no such file", "--transcripts"),
    ("x.txt", raw(b"caf\xe9.jpg"), "x.txt, line 1: not UTF-8", ""),
    ("x.png", raw(PICTURE), "x.png: a single file", "name the folder"),
    ("x{1..2}.tar", None, "x1.tar is not there", ""),
    ("x{0..999999999}.tar", None, "a range of 1000000000 files", "100000"),
    ("https:/a.b/c.zip", None, "https://a.b/c.zip: data are read from disks and from the Hugging Face Hub", "hf://datasets"),
)  # fmt: skip
def test_what_cannot_be_read_is_refused_with_its_place_and_a_remedy(tmp_path, name, write, fault, remedy):
    folder = Path(tmp_path, str(len(list(tmp_path.iterdir()))))
    folder.mkdir()
    given = Path(name) if name.startswith("https") else folder / name
    if write:
        write(given)
    with pytest.raises(UserError) as error:
        open_source(given, "image", folder / "at")
    assert fault in error.value.message
    assert remedy in error.value.hint
    assert not list(folder.rglob("*.jpg")), "something is left of what was refused"


def test_faulty_rows_are_named_by_file_and_row_and_the_others_are_read(folders, tmp_path):  # noqa: F811
    good = [cell(path.read_bytes(), path.name) for path in files_of(folders / "image")]
    names = ["../../up.jpg", "/root/.cache/abs.jpg", "C:\\data\\drive.jpg", "p0.png", "zip://in/z.png::/tmp/x.zip"]
    strange = [cell(one["bytes"], name) for one, name in zip(good, names, strict=False)]
    bad = [None, cell(None, "gone.jpg"), cell(b""), cell(b"no picture")]
    parquet.write_table(rows_of(*good[5:], *strange, *bad), tmp_path / "x.parquet")
    done = prepare("vae", tmp_path / "x.parquet", tmp_path / "out")
    rows = [json.loads(line) for line in (tmp_path / "out" / "quarantine.jsonl").read_text().splitlines()]
    assert [(row["path"], row["detail"]) for row in rows] == [
        ("x.parquet, row 6", "an empty cell: neither bytes nor a path"),
        ("x.parquet, row 7", "no bytes, and no file gone.jpg beside x.parquet"),
        ("x.parquet, row 8", "an empty cell"),
        ("x/00000009.jpg", "x.parquet, row 9: not a picture, although its name says so"),
    ]
    assert "refused   4" in done.stdout
    kept = [json.loads(line)["source"] for line in (tmp_path / "out" / "manifest.jsonl").read_text().splitlines()]
    assert kept == ["data/drive.jpg", "in/z.png", "p0.png", "p5.jpg", "root/cache/abs.jpg", "up.jpg"]


def test_a_broken_container_loses_nothing_that_is_there(folders, tmp_path, caplog):  # noqa: F811
    whole = write_webdataset(tmp_path / "x.tar", folders / "image").read_bytes()
    packed = gzip.compress(whole, mtime=0)
    damaged = bytearray(packed)
    damaged[-8] ^= 1  # Its checksum.
    shards = tmp_path / "shards"
    shards.mkdir()
    parquet.write_table(table_of(folders / "image", with_names), shards / "t-00001-of-00003.parquet", row_group_size=2)
    (shards / "t-00000-of-00003.parquet").write_bytes(b"PAR1 cut off")
    for name, content, files, fault in (
        ("cut.tar", whole[: len(whole) // 2], 2, "damaged or cut off after 3 members"),
        ("cut.tar.gz", packed[: len(packed) // 2], 2, "damaged or cut off after 3 members"),
        ("sum.tar.gz", bytes(damaged), 6, "CRC check failed"),
        ("shards", None, 6, "damaged, cut off"),
    ):
        if content:
            (tmp_path / name).write_bytes(content)
        source = open_source(tmp_path / name, "image", tmp_path / f"{name}.at")
        assert len(files_of(source.folder)) == files, name
        assert any(fault in one.detail for one in source.refused), (name, source.refused)
    assert "2 of 3 shards" not in caplog.text
    assert "1 of 3 shards of t are not there, the first is number 2" in caplog.text


def test_members_of_archives_stay_within_the_folder(tmp_path):
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        for name in ("/etc/abs.png", "../up.png", "a.png", "a.png", ".hidden/b.png", "__MACOSX/._a.png"):
            add_to_tar(archive, name, name.encode())
        for name, kind in (("l.png", tarfile.SYMTYPE), ("h.png", tarfile.LNKTYPE), ("d.png", tarfile.CHRTYPE)):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "/etc/passwd"
            archive.addfile(info)
    source = open_source(tmp_path / "x.tar", "image", tmp_path / "at")
    found = [path.relative_to(source.folder).as_posix() for path in files_of(source.folder)]
    assert found == ["a-2.png", "a.png", "etc/abs.png"]
    assert [one.path for one in source.refused] == [
        f"x.tar, {name}" for name in ("../up.png", "l.png", "h.png", "d.png")
    ]
    assert source.ignored == {"hidden": 2}


@each_row(
    ("a/b.wav", False, ["a", "b.wav"]),
    ("/a//./b.wav", False, ["a", "b.wav"]),
    ("a:b?.wav", False, ["a:b?.wav"]),
    ("a:b?.wav", True, ["a_b_.wav"]),
    ("con/nul.wav/end. ", True, ["_con", "_nul.wav", "end"]),
    ("@eaDir/x.wav", False, ["_@eaDir", "x.wav"]),
    ("https://host/x.wav", False, ["host", "x.wav"]),
)
def test_safe_names(name, windows, parts):
    assert safe_parts(name, windows=windows) == parts


def test_names_that_are_taken(tmp_path):
    """Of two shards, recordings of the same name stay beside their texts; long names are shortened."""
    for shard in ("a", "b"):
        members = [(f"k{end}", f"{shard}{end}".encode()) for end in (".wav", ".txt")[: 1 + (shard == "b")]]
        zipped(*members, ("x" * 250 + ".wav", shard.encode()))(tmp_path / f"{shard}.zip")
    source = open_source(tmp_path / "[ab].zip", "audio", tmp_path / "at")
    found = {path.relative_to(source.folder).as_posix(): path.read_text() for path in source.folder.rglob("*.*")}
    assert {"k.wav": "a.wav", "b/k.wav": "b.wav", "b/k.txt": "b.txt"}.items() <= found.items()
    assert sorted(len(os.fsencode(Path(name).name)) < 200 for name in found) == [True] * 5


def test_names_of_zip_archives_that_are_utf_8_without_saying_so(tmp_path):
    zipped(("Müller.wav", b"x"), ("Жук.txt", b"y"))(tmp_path / "x.zip")
    content = bytearray((tmp_path / "x.zip").read_bytes())
    for mark, at in ((b"PK\3\4", 7), (b"PK\1\2", 9)):
        for place in range(len(content)):
            if content[place : place + 4] == mark:
                content[place + at] &= ~8
    (tmp_path / "x.zip").write_bytes(content)
    source = open_source(tmp_path / "x.zip", "audio", tmp_path / "at")
    assert {path.name for path in source.folder.iterdir()} == {"Müller.wav", "Жук.txt"}
