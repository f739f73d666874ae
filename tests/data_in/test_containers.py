"""What holds pictures, recordings and texts is damaged, hostile, or names its files in other ways."""

import bz2
import gzip
import io
import json
import os
import tarfile
import zipfile
from multiprocessing import active_children
from pathlib import Path

import pytest

from gputrain.data_in.sources import open_source
from gputrain.errors import UserError
from gputrain.fetch import archives
from tests.data_in.test_sources import (  # noqa: F401
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
    tables_are_read_here,
    tar,
    with_names,
    write_arrow,
    write_webdataset,
    zipped,
)
from tests.tables import each_row


def changed(write, *places):
    """Writes a container in whose bytes others stand after the first occurrences of marks: (mark, offset, bytes)."""

    def write_changed(file):
        write(file)
        content = bytearray(file.read_bytes())
        for mark, offset, value in places:
            at = content.index(mark) + offset
            content[at : at + len(value)] = value
        file.write_bytes(content)

    return write_changed


def marked(offset_of_local, offset_of_central, value):
    """Writes a zip archive whose member has another value in its headers."""
    return changed(
        zipped(("a.png", PICTURE)), (b"PK\3\4", offset_of_local, value), (b"PK\1\2", offset_of_central, value)
    )


def cut(write, length):
    def write_cut(file):
        write(file)
        file.write_bytes(file.read_bytes()[:length])

    return write_cut


def twice(write):
    """Writes a container and a copy of it behind it."""

    def write_twice(file):
        write(file)
        file.write_bytes(file.read_bytes() * 2)

    return write_twice


def tarred(*members, mode="w"):
    """Writes a tar archive of (name, content) and of TarInfo."""

    def write(file):
        with tarfile.open(file, mode, format=tarfile.GNU_FORMAT) as archive:
            for member in members:
                if isinstance(member, tarfile.TarInfo):
                    archive.addfile(member, io.BytesIO(bytes(min(member.size, 1024))))
                else:
                    add_to_tar(archive, *member)

    return write


def info(name, kind, **facts):
    made = tarfile.TarInfo(name)
    made.type = kind
    for fact, value in facts.items():
        setattr(made, fact, value)
    return made


def link(kind):
    return tarred(info("a.png", kind, linkname="/etc/passwd"))


def nested_long_names(file):
    """Writes headers of which each says that the next one has a long name."""
    header = info("././@LongLink", tarfile.GNUTYPE_LONGNAME, size=512).tobuf(tarfile.GNU_FORMAT) + b"a" * 512
    file.write_bytes(header * 3000 + info("a.png", tarfile.REGTYPE).tobuf() + bytes(1024))


def zeros(kind, compress):
    """Writes the beginning of a member of 3 GB, or of a name of 3 GB, in a few kB."""

    def write(file):
        start = info("a.png", kind, size=3_000_000_000).tobuf(tarfile.GNU_FORMAT)
        file.write_bytes(compress(start) + compress(bytes(10_000_000)) * 9)

    return write


def sparse(file):
    """Writes a file of 3 TB that has nothing but a hole."""
    facts = {"major": "1", "minor": "0", "name": "a.png", "realsize": "3000000000000"}
    with tarfile.open(file, "w", format=tarfile.PAX_FORMAT) as archive:
        member = info("a.png", tarfile.REGTYPE, size=512)
        member.pax_headers = {f"GNU.sparse.{name}": value for name, value in facts.items()}
        archive.addfile(member, io.BytesIO(b"0\n".ljust(512, b"\0")))


def raw(content):
    return lambda file: file.write_bytes(content)


def paths(*cells):
    return table({"image": cells})


ONE = (("a.png", PICTURE),)
TWICE = (("a.png", b"1"), ("./a.png", b"2"))
NOT_UTF_8 = pyarrow.array([b"\xff\xfe"]).view(pyarrow.string())
OUTSIDE = "leads out of the table's folder"


@each_row(
    ("x.parquet", table({"text": ["a"], "n": [1]}), "no column of pictures; columns: text (string), n (int64)",
     "--column NAME"),
    ("x.parquet", table({"audio": [PICTURE]}), "no column of pictures; columns: audio (binary)", "it holds recordings"),
    ("x.parquet", table({"url": ["https://a/b.jpg"]}), "no column of pictures", "loads addresses into tar files"),
    ("x.parquet", paths("https://a/b.jpg"), "row 0: an address, from which nothing is loaded", ""),
    ("x.parquet", table({"a": [PICTURE]}), "no column of pictures; columns: a (binary)", "--column NAME"),
    ("x.parquet", table({"image": [[PICTURE]]}), "no column of pictures; columns: image (List", "Lists, arrays and"),
    ("x.parquet", table({"image": [{"array": [0.5], "path": "a.png"}]}), "no column of pictures", "of bytes and paths"),
    ("x.parquet", table({"image": pyarrow.array([], pyarrow.binary())}), "no pictures in it", "looked for .avif"),
    ("x.parquet", table({"image": pyarrow.array([None], pyarrow.binary())}), "row 0: an empty cell", ""),
    ("x.parquet", paths("gone.jpg"), "row 0: no bytes, and no file gone.jpg", ""),
    *(("x.parquet", paths(path), OUTSIDE, "--transcripts")
      for path in ("/etc/passwd", "../../x.png", "/proc/self/mem", "a/../../x.png", "C:\\x.png", "..\\x.png")),
    ("x.parquet", table({"image": [PICTURE], "file_name": NOT_UTF_8}), "x.parquet: damaged, cut off or of an", ""),
    ("x.parquet", table({"image": pyarrow.repeat(bytes(3_000_000), 20)}), "hold more than", "program of your"),
    ("x.parquet", cut(table({"image": [PICTURE] * 9}), -40), "x.parquet: damaged, cut off", "copy or load it again"),
    ("x.parquet", raw(b"version https://git-lfs.github.com/spec/v1\n"), "a git-LFS pointer", "git lfs pull"),
    ("x.parquet", raw(b"PARE" * 9), "no parquet file that can be read", ""),
    ("x.parquet", raw(b""), "x.parquet: the file is empty", ""),
    ("x.arrow", raw(b"\xff\xff\xff\xff" + b"\1" * 99), "x.arrow: damaged", ""),
    ("x.arrow", cut(lambda file: write_arrow(file, rows_of(*[cell()] * 9)), 700), "x.arrow: damaged", ""),
    ("x.tar", tarred(("a.txt", b"x"), ("b.zip", b"PK")), "no pictures in it", "it holds archives"),
    ("x.tar", tarred(("a.wav", b"x")), "no pictures in it", "it holds recordings, for train-vocoder or "),
    ("x.tar", os.mkfifo, "x.tar: no regular file", "hf://datasets/NAME"),
    *((name, write((member, PICTURE)), f"{name}: is not unpacked, since its member {member!r} {fault}", "of your own")
      for name, write in (("x.tar", tarred), ("x.zip", zipped))
      for member, fault in (("../a.png", "would be written outside"), ("/a.png", "would be written outside"),
                            ("a::b.png", "would be written outside"))),
    ("x.tar", tarred(("a" * 300, b"x")), "has a name that this disk cannot hold", ""),
    ("x.tar", tarred(*TWICE), "'./a.png' is there twice", ""),
    ("x.zip", zipped(*TWICE), "'./a.png' is there twice", ""),
    ("x.tar", tarred(("a", b"x"), ("a/b.png", PICTURE)), "'a/b.png' is there twice", ""),
    *(("x.tar", link(kind), "member 'a.png' is no plain file", "program of your own")
      for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE)),
    ("x.tar", sparse, "member 'a.png' is no plain file", ""),
    ("x.tar", tarred(("a\udcff.png", PICTURE)), "'a\\udcff.png' has a name that is not UTF-8", ""),
    ("x.zip", changed(zipped(("a\u00e9.png", PICTURE)), (b"PK\1\2", 47, b"\xff")), "x.zip: damaged, or not an", ""),
    ("x.tar", nested_long_names, "x.tar: damaged, or not an archive", ""),
    *((f"x.tar.{ending}", zeros(kind, compress), "hold more than", "program of your own")
      for ending, compress in (("gz", gzip.compress), ("bz2", bz2.compress))
      for kind in (tarfile.REGTYPE, tarfile.GNUTYPE_LONGNAME)),
    ("x.zip", zipped(("a.png", bytes(11_000_000)), compress_type=zipfile.ZIP_DEFLATED), "hold more than 10 MB", ""),
    *((f"x.tar{ending}", twice(tarred(*ONE, mode=mode)), "it goes on behind its end, as two archives in one", "7z")
      for ending, mode in (("", "w"), (".gz", "w:gz"))),
    ("x.tar", cut(tarred(*ONE), 600), "x.tar: damaged, or not an archive that can be unpacked", "copy it again"),
    ("x.tar", cut(tarred(*ONE, ("b.png", PICTURE)), 1024), "x.tar: damaged, or not an archive", "copy it again"),
    ("x.tar.gz", cut(tarred(*ONE, mode="w:gz"), -9), "x.tar.gz: damaged", ""),
    ("x.tgz", changed(tarred(*ONE, mode="w:gz"), (b"\x1f\x8b", 60, b"12")), "x.tgz: damaged", ""),
    ("x.zip", cut(zipped(*ONE), -30), "x.zip: damaged", ""),
    ("x.zip", changed(zipped(*ONE), (PICTURE, 3, b"_")), "x.zip: damaged, or not an archive that can be", ""),
    ("x.zip", marked(6, 8, b"\1"), "member 'a.png' is encrypted", "7z x"),
    ("x.zip", marked(8, 10, b"\x09"), "x.zip: damaged, or not an archive that can be unpacked: That compression", "7z"),
    ("x.zip", marked(4, 6, b"\x63"), "x.zip: damaged, or not an archive that can be unpacked: zip file version", ""),
    ("x.zip", raw(b"PK\3\4" + b"x" * 99), "x.zip: damaged", ""),
    ("x.7z", raw(b"7z\xbc\xaf\x27\x1c"), "x.7z: is neither a folder nor a file", "Unpack other archives by their own"),
    ("x.csv", raw(b"url,text\nhttps://a/b.jpg,c\n"), "x.csv: is neither", "files at addresses are loaded by"),
    ("x.txt", raw(b"a.jpg"), "x.txt: is neither a folder nor a file", ""),
    ("x.png", raw(PICTURE), "x.png: a single file", "name the folder"),
    ("https:/a.b/c.zip", None, "https://a.b/c.zip: data are read from disks and from the Hugging Face Hub", "hf://datasets"),
)  # fmt: skip
def test_what_cannot_be_read_is_refused_with_its_place_and_a_remedy(tmp_path, monkeypatch, name, write, fault, remedy):
    monkeypatch.setattr(archives, "SMALL", 10_000_000)
    folder = Path(tmp_path, str(len(list(tmp_path.iterdir()))))
    folder.mkdir()
    given = Path(name) if name.startswith("https") else folder / name
    if write:
        write(given)
    held = given.read_bytes() if given.is_file() else b""
    with pytest.raises(UserError) as error:
        open_source(given, "image", folder / "at")
    assert fault in error.value.message
    assert remedy in error.value.hint
    assert not [path for path in folder.rglob("*") if path not in (given, folder / "at") and path.suffix != ".lock"]
    assert not held or given.read_bytes() == held


def test_a_table_that_ends_the_process_that_reads_it_is_named(tmp_path, monkeypatch):
    paths("a.png")(tmp_path / "x.parquet")
    monkeypatch.undo()
    with pytest.raises(UserError, match=r"x\.parquet: reading it ended the process \(SIGKILL\)"):
        open_source(
            tmp_path / "x.parquet", "image", tmp_path / "at", progress=lambda *done: active_children()[0].kill()
        )
    assert not list((tmp_path / "at").glob("*/content"))


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
        ("x.parquet, row 7", "no bytes, and no file gone.jpg"),
        ("x.parquet, row 8", "an empty cell"),
        ("x/00000009.jpg", "not a picture, although its name says so"),
    ]
    assert "refused   4" in done.stdout
    kept = [json.loads(line)["source"] for line in (tmp_path / "out" / "manifest.jsonl").read_text().splitlines()]
    assert kept == [
        "p0.png",
        "p5.jpg",
        *(f"x/0000000{row}.{end}" for row, end in enumerate(("png", "jpg", "png"), 1)),
        "x/00000005.png",
    ]


def test_texts_of_the_user_beside_containers_stay_as_they_are(folders, tmp_path, caplog):  # noqa: F811
    """They are copied beside the content of archives, and named beside tables, which have texts of their own."""
    line = json.dumps({"file_name": "shard/k.0.wav", "text": "of the user"})
    inside = json.dumps({"file_name": "s0.wav", "text": "inside"})
    for name in ("tar", "parquet", "both"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metadata.jsonl").write_text(line)
        if name != "parquet":
            with tarfile.open(write_webdataset(tmp_path / name / "a.tar", folders / "audio"), "a") as archive:
                add_to_tar(archive, "metadata.jsonl", inside.encode())
        if name != "tar":
            written = table_of(folders / "audio", with_names)
            parquet.write_table(written, tmp_path / name / "b.parquet")
    source = open_source(tmp_path / "tar", "audio", tmp_path / "at")
    assert (source.folder / "metadata.jsonl").read_text() == line
    assert (source.folder / "a" / "metadata.jsonl").read_text() == inside
    source = open_source(tmp_path / "parquet", "audio", tmp_path / "at")
    texts = [json.loads(row) for row in (source.folder / "metadata.jsonl").read_text().splitlines()]
    assert [row["sentence"] for row in texts] == written["sentence"].to_pylist()
    assert "texts beside tables are not read, such as metadata.jsonl" in caplog.text
    with pytest.raises(UserError, match=r"holds archives and tables, such as a\.tar and b\.parquet"):
        open_source(tmp_path / "both", "audio", tmp_path / "at")
    assert {path.read_text() for path in tmp_path.glob("*/metadata.jsonl")} == {line}


def test_a_damaged_shard(folders, tmp_path):  # noqa: F811
    written = table_of(folders / "image", with_names)
    parquet.write_table(written, tmp_path / "t-00001-of-00003.parquet", row_group_size=2)
    assert len(files_of(open_source(tmp_path, "image", tmp_path.with_name("at")).folder)) == 6
    (tmp_path / "t-00000-of-00003.parquet").write_bytes(b"PAR1 cut off")
    with pytest.raises(UserError, match=r"t-00000-of-00003\.parquet: damaged, cut off"):
        open_source(tmp_path, "image", tmp_path.with_name("at"))


def test_files_of_the_same_name_in_two_shards_stay_beside_their_texts(tmp_path):
    for shard in ("a", "b"):
        members = [(f"k{end}", f"{shard}{end}".encode()) for end in (".wav", ".txt")[: 1 + (shard == "b")]]
        zipped(*members, (f"{shard}.wav", b""))(tmp_path / f"{shard}.zip")
    source = open_source(tmp_path / "[ab].zip", "audio", tmp_path / "at")
    found = {path.relative_to(source.folder).as_posix(): path.read_text() for path in source.folder.rglob("*.*")}
    texts = {"k.wav": "a.wav", "b/k.wav": "b.wav", "b/k.txt": "b.txt"}
    assert found == {**texts, "a.wav": "", "b/b.wav": ""}


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
