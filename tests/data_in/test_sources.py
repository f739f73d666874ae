"""The same pictures, recordings and texts, whichever way they come; how they are unpacked, and what is chosen."""

import errno
import hashlib
import io
import json
import logging
import math
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from decimal import Decimal
from functools import partial
from pathlib import Path, PurePosixPath, PureWindowsPath

import numpy as np
import pytest
from filelock import FileLock, Timeout
from PIL import Image

from gputrain.config import assemble, flatten
from gputrain.data_in import containers, sources
from gputrain.data_in.preparation import DataReport
from gputrain.data_in.sources import hub_name, open_source
from gputrain.data_in.split import digests
from gputrain.errors import UserError
from gputrain.speech.buckets import open_speech
from gputrain.vae.config import TrainVae
from gputrain.vae.data import VaeData
from gputrain.vae.dataset import open_pictures
from gputrain.vae.kind import VaeWork
from gputrain.vocoder.store import open_sounds
from tests.command import gputrain_here
from tests.hub_server import hub  # noqa: F401
from tests.speech.speech import hum, speak
from tests.tables import each_row

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

HUB_TYPE = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
WORDS = ("one", "two", "three", "four", "five", "six")


@pytest.fixture(autouse=True)
def tables_are_read_here(monkeypatch):
    """A process for each table would import the library each time. Commands in processes of their own have them."""
    monkeypatch.setattr(containers, "_in_process", lambda job, progress: containers.work(job, lambda *told: None))


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Six pictures and six recordings of speech with their texts, as folders."""
    root = tmp_path_factory.mktemp("sources")
    (root / "image").mkdir()
    levels = np.random.default_rng(0).integers(0, 255, (6, 40, 48, 3), dtype=np.uint8)
    for number, picture in enumerate(levels):
        Image.fromarray(picture).save(root / "image" / f"p{number}.{'jpg' if number % 2 else 'png'}")
    for number in range(len(WORDS)):
        speak(root / "audio" / "ab"[number // 3] / f"s{number}.wav", hum(0.6 + 0.1 * number, hz=120 + 9 * number))
    lines = [f"s{number}|{word} {word}" for number, word in enumerate(WORDS)]
    (root / "audio" / "metadata.csv").write_text("\n".join(lines), encoding="utf-8")
    return root


def files_of(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix in (".png", ".jpg", ".wav"))


def table_of(folder, cell, **more):
    """Returns a table with a row for each file, of `cell(file, its name)`."""
    media = folder.name
    cells = [cell(path, path.relative_to(folder).as_posix()) for path in files_of(folder)]
    columns = {media: pyarrow.array(cells, type=HUB_TYPE if isinstance(cells[0], dict) else None), "n": range(6)}
    texts = {"sentence": [f"{word} {word}" for word in WORDS]} if media == "audio" else {}
    return pyarrow.table({**columns, **texts, **more})


def with_names(path, name):
    return {"bytes": path.read_bytes(), "path": name}


def without_names(path, name):
    return {"bytes": path.read_bytes(), "path": None}


def write_arrow(file, table, opened=pyarrow.ipc.new_stream):
    with pyarrow.OSFile(str(file), "wb") as sink, opened(sink, table.schema) as writer:
        for batch in table.to_batches(max_chunksize=4):
            writer.write_batch(batch)


def add_to_tar(archive, name, content):
    info = tarfile.TarInfo(name)
    info.size = len(content)
    archive.addfile(info, io.BytesIO(content))


def write_webdataset(file, folder, mode="w", text=lambda word: (".txt", f"{word} {word}".encode())):
    """Writes key.png, or key.txt or key.json before key.wav; keys have a folder and a full stop."""
    with tarfile.open(file, mode) as archive:
        for number, path in enumerate(files_of(folder)):
            if path.suffix == ".wav":
                ending, content = text(WORDS[number])
                add_to_tar(archive, f"shard/k.{number}{ending}", content)
            add_to_tar(archive, f"shard/k.{number}{path.suffix}", path.read_bytes())
    return file


PICTURE = b"\xff\xd8\xff picture"


def rows_of(*cells, name="image"):
    return pyarrow.table({name: pyarrow.array(cells, type=HUB_TYPE)})


def cell(content=PICTURE, path=None):
    return {"bytes": content, "path": path}


def table(columns):
    return lambda file: parquet.write_table(pyarrow.table(columns), file)


def zipped(*members, **options):
    def write(file):
        with zipfile.ZipFile(file, "w") as archive:
            for name, content in members:
                archive.writestr(name, content, **options)

    return write


def named_parquet(folder, at, site):
    parquet.write_table(table_of(folder, with_names), at / "x.parquet", row_group_size=4)
    return at / "x.parquet"


def nameless_shards(folder, at, site):
    table = table_of(folder, without_names)
    for number in range(2):
        parquet.write_table(table.slice(3 * number, 3), at / f"train-{number:05d}-of-00002.parquet")
    parquet.write_table(table.slice(0, 1), at / "test-00000-of-00001.parquet")
    return at


def parquet_of_paths(folder, at, site):
    shutil.copytree(folder, at / "files")
    parquet.write_table(table_of(folder, lambda path, name: f"files/{name}"), at / "x.parquet")
    return at / "x.parquet"


def parquet_of_bytes(folder, at, site):
    parquet.write_table(table_of(folder, lambda path, name: path.read_bytes()), at / "x.parquet")
    return at / "x.parquet"


def arrow_stream(folder, at, site):
    write_arrow(at / "x.arrow", table_of(folder, with_names))
    return at / "x.arrow"


def arrow_file(folder, at, site):
    write_arrow(at / "x.arrow", table_of(folder, without_names), pyarrow.ipc.new_file)
    return at / "x.arrow"


def tar(folder, at, site):
    with tarfile.open(at / "x.tar", "w") as archive:
        archive.add(folder, "./my data")
    return at / "x.tar"


def tar_of_texts(folder, at, site):
    return write_webdataset(at / "x.tar.gz", folder, "w:gz")


def tar_of_json(folder, at, site):
    return write_webdataset(
        at / "x.tar", folder, text=lambda word: (".json", json.dumps({"text": f"{word} {word}", "n": 1}).encode())
    )


def zip_archive(folder, at, site):
    with zipfile.ZipFile(at / "x.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(folder.rglob("*")):
            archive.write(path, f"my data/{path.relative_to(folder)}")
    return at / "x.zip"


def pattern(folder, at, site):
    nameless_shards(folder, at, site)
    return at / "train-0000[01]-of-0000?.parquet"


def parquet_on_the_hub(folder, at, site):
    site.add("datasets/ann/set", nameless_shards(folder, at, site))
    return Path("hf://datasets/ann/set")


def folder_on_the_hub(folder, at, site):
    site.add("datasets/ann/files", folder)
    return Path("hf://datasets/ann/files")


WAYS = (
    named_parquet, nameless_shards, parquet_of_paths, parquet_of_bytes, arrow_stream, arrow_file, tar, tar_of_texts,
    tar_of_json, zip_archive, pattern, parquet_on_the_hub, folder_on_the_hub,
)  # fmt: skip
KEEPS_NAMES = (named_parquet, arrow_stream, tar, zip_archive, folder_on_the_hub)
PREPARE = {
    "vae": ("image", ("--target-size", 32)),
    "vocoder": ("audio", ("--f0-method", "pyworld", "--audio-sample-rate", 16000, "--hop-size", 256)),
    "tts": ("audio", ("--language", "en", "--audio-sample-rate", 16000)),
    "asr": ("audio", ("--language", "en")),
}  # fmt: skip


def prepare(kind, given, at, *more):
    _, options = PREPARE[kind]
    done = gputrain_here(
        "prepare-data", "--kind", kind, "--input-dir", given, "--output-dir", at, "--num-workers", 0, *options, *more
    )
    assert done.returncode == 0, done.stderr
    assert not at.with_name(f"{at.name}.unpacked").exists()
    return done


def content_of(kind, folder, *, with_names):
    """Returns the digests of prepared data, the bytes of every item, and their names. The digests are those that a
    training logs, or those of the same items without their names."""
    if kind == "vae":
        pictures = open_pictures(folder)
        parts = pictures.split.parts
        items = [one.path.read_bytes() for one in (*parts.train, *parts.held_out)]
        return VaeData(pictures).digests(), items, [one.path.relative_to(folder) for one in parts.train]
    opened = open_sounds(folder) if kind == "vocoder" else open_speech(folder, kind=kind)
    named = {"training": opened.parts.train, "held_out": opened.parts.held_out}
    items = [{**vars(one), "path": one.path if with_names else ""} for part in named.values() for one in part]
    waves = hashlib.sha256((folder / "waves.i16").read_bytes()).hexdigest()
    found = digests(**named) if with_names else [len(part) for part in named.values()]
    return found, [items, waves], [one.path for one in opened.parts.train]


@pytest.mark.parametrize("kind", PREPARE)
def test_the_same_content_gives_the_same_store_whichever_way_it_comes(kind, folders, tmp_path, hub):  # noqa: F811
    folder, compared = folders / PREPARE[kind][0], partial(content_of, kind)
    prepare(kind, folder, tmp_path / "expected")
    assert len(files_of(folder)) == 6
    wrong = []
    for way in WAYS if kind in ("vae", "tts") else WAYS[::3]:
        (tmp_path / way.__name__).mkdir()
        out = tmp_path / f"{way.__name__}.prepared"
        prepare(kind, way(folder, tmp_path / way.__name__, hub), out)
        keeps_names = way in KEEPS_NAMES
        found, expected = (compared(at, with_names=keeps_names) for at in (out, tmp_path / "expected"))
        if found[:2] != expected[:2] or (keeps_names and found[2] != expected[2]):
            wrong.append((way.__name__, found[0], found[2], expected[2]))
    assert not wrong


# --------------------------------------------------------------------------------------------------- unpacking


def test_a_second_preparation_does_only_what_is_missing(folders, tmp_path):
    given = named_parquet(folders / "image", tmp_path, None)
    assert "made      6" in prepare("vae", given, tmp_path / "out").stdout
    os.utime(given, (1, 1))  # The times of unpacked files follow from their content.
    assert "kept      6" in prepare("vae", given, tmp_path / "out").stdout
    (tmp_path / "out" / "p1.png").unlink()
    assert "made      1" in prepare("vae", given, tmp_path / "out").stdout


def test_an_output_folder_that_will_not_do_is_refused_before_unpacking(folders, tmp_path):
    given = named_parquet(folders / "image", tmp_path, None)
    prepare("vae", given, tmp_path / "out")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").touch()
    for out, fault in (("out", "prepared with other settings: target_size 32, not 48"), ("other", "not prepared here")):
        done = gputrain_here("prepare-data", "--input-dir", given, "--output-dir", tmp_path / out, "--target-size", 48)
        assert done.returncode == 2
        assert fault in " ".join(done.stderr.split())
        assert not (tmp_path / f"{out}.unpacked").exists()


def test_what_is_unpacked_is_used_again_and_a_broken_off_run_starts_over(folders, tmp_path, monkeypatch):
    given = zip_archive(folders / "image", tmp_path, None)
    monkeypatch.setattr(sources, "_merge", lambda *names: sys.exit(1))
    with pytest.raises(SystemExit):
        open_source(given, "image", tmp_path / "at")
    monkeypatch.undo()
    source = open_source(given, "image", tmp_path / "at")
    before = [(path, path.stat().st_ino) for path in files_of(source.folder)]
    assert len(before) == 6
    again = open_source(given, "image", tmp_path / "at")
    assert [(path, path.stat().st_ino) for path in files_of(again.folder)] == before
    zipped(("z.png", PICTURE))(given)
    assert len(files_of(open_source(given, "image", tmp_path / "at").folder)) == 1  # That of the changed file.
    shutil.rmtree(source.unpacked)
    source.unpacked.mkdir()
    (source.unpacked / "mine.txt").touch()
    with pytest.raises(UserError, match="was not unpacked here"):
        open_source(given, "image", tmp_path / "at")
    assert (source.unpacked / "mine.txt").exists()


def test_marked_rows_of_pictures_and_those_of_other_splits_are_left_out(tmp_path):
    marks = {"split": ["train", "test", "train", None], "do_not_use": [False, False, True, False]}
    table = pyarrow.table({"image": [PICTURE + bytes([number]) for number in range(4)], **marks, "note": ["x"] * 4})
    for name, rows, left_out in (
        ("x", table, ["split: test", "do_not_use: True"]),
        ("test", table.slice(1, 1), []),
    ):
        parquet.write_table(rows, tmp_path / f"{name}.parquet")
        source = open_source(tmp_path / f"{name}.parquet", "image", tmp_path / f"at-{name}")
        assert [one.detail for one in source.refused] == left_out
        assert len([*source.folder.rglob("*.*")]) == len(rows) - len(left_out)


def test_what_exists_under_its_own_name_is_no_pattern(tmp_path, monkeypatch):
    """Brackets in names of folders are those of names; escaped ones, and others, are of a pattern."""
    for name in ("d[1]/a", "d[1]/b", "d1/c"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        with zipfile.ZipFile(tmp_path / f"{name}.zip", "w") as archive:
            archive.writestr(f"{name[-1]}.png", b"x")
    (tmp_path / "d1/x.png").write_bytes(b"x")
    monkeypatch.chdir(tmp_path)
    rows = {
        "d[1]/*.zip": "ab", "d[[]1]/*.zip": "ab", "d[12]/*.zip": "c", "d?/*.zip": "c", "d[1]/[b-z].zip": "b",
        "[d]1/*.zip": "c",
    }  # fmt: skip
    for name, expected in rows.items():
        for given in (Path(name), tmp_path / name):
            source = open_source(given, "image", tmp_path / "at")
            assert "".join(sorted(path.stem for path in source.folder.rglob("*.png"))) == expected, given
    with pytest.raises(UserError, match="a pattern names archives or tables"):
        open_source(Path("d1/*"), "image", tmp_path / "at")


def test_a_disk_that_is_too_small_is_told_with_both_numbers(folders, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr("gputrain.fetch.archives.shutil.disk_usage", lambda path: usage)
    for given in (named_parquet(folders / "image", tmp_path, None), tar(folders / "image", tmp_path, None)):
        with pytest.raises(UserError, match=r"takes \d\d\.?\d* kB, and the disk of .* has 1 kB free"):
            open_source(given, "image", tmp_path / "at")


MEASURED = """
import resource, sys
from pathlib import Path
from gputrain.data_in.sources import open_source
for size in ("small", "large"):
    source = open_source(Path(sys.argv[1], f"{size}.parquet"), "image", Path(sys.argv[1], "at"))
    print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1000, len(list(source.folder.rglob("*.jpg"))))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the unit of ru_maxrss is that of Linux")
def test_the_memory_does_not_grow_with_the_file(tmp_path):
    """Of two files in row groups of 4 MB, the second has three times as many."""
    for size, count in (("small", 400), ("large", 1200)):
        parquet.write_table(
            pyarrow.table({"image": [PICTURE + bytes(200_000)] * count}), tmp_path / f"{size}.parquet",
            row_group_size=20, compression="none", use_dictionary=False, write_batch_size=8, data_page_size=1 << 20,
        )  # fmt: skip
    assert (tmp_path / "large.parquet").stat().st_size > 240e6
    done = subprocess.run([sys.executable, "-c", MEASURED, tmp_path], capture_output=True, text=True)
    small_mb, few, large_mb, many = map(float, done.stdout.split())
    assert (few, many) == (400, 1200)
    assert large_mb - small_mb < 60


def test_a_training_unpacks_into_its_run_and_resumes_from_there(folders, tmp_path):
    """The data that it logs are those of the folder, and its configuration names the container."""
    given = zip_archive(folders / "image", tmp_path, None)
    expected = VaeWork().open_data(assemble(TrainVae, {"data_path": [str(folders / "image")]})).digests()
    settings = assemble(TrainVae, {"data_path": [str(given)], "output_dir": str(tmp_path / "run")})
    for _ in range(2):
        data = VaeWork().open_data(settings)
        assert data.digests() == expected
        assert all(picture.path.is_relative_to(tmp_path / "run" / "unpacked") for picture in data.pictures.train)
    assert flatten(settings)["data_path"] == [str(given)]
    assert len(list((tmp_path / "run" / "unpacked").glob("*/journal.json"))) == 1


def test_trainings_on_prepared_data_say_how_to_prepare_a_container(folders, tmp_path):
    given = named_parquet(folders / "audio", tmp_path, None)
    for opened in (open_sounds, open_speech):
        with pytest.raises(UserError, match=r"x.parquet: is no prepared folder") as error:
            opened(given)
        assert "gputrain prepare-data --kind" in error.value.hint


@each_row(
    (PurePosixPath("hf://datasets/ann/set"), "hf://datasets/ann/set"),
    (PureWindowsPath("hf://datasets/ann/set@v1/data"), "hf://datasets/ann/set@v1/data"),
    (PureWindowsPath("https://huggingface.co/datasets/ann/set"), "https://huggingface.co/datasets/ann/set"),
    (PurePosixPath("datasets/ann/set"), ""),
)
def test_names_of_the_hub_survive_as_paths(path, name):
    assert hub_name(path) == name


# --------------------------------------------------------------------------------------------------- choices


def test_the_column_that_is_read(folders, tmp_path):
    first, second = (pyarrow.array([cell(PICTURE + mark)], type=HUB_TYPE) for mark in (b"1", b"2"))
    parquet.write_table(pyarrow.table({"mask": first, "Image": second, "audio": first}), tmp_path / "x.parquet")
    for column, expected in (("", b"2"), ("mask", b"1")):
        source = open_source(tmp_path / "x.parquet", "image", tmp_path / f"at{column}", column=column)
        assert next(source.folder.rglob("*.jpg")).read_bytes()[-1:] == expected
        report = source.complete(DataReport(input_dir="", ignored={".jsonl": ["metadata.jsonl"]}, refused=[]))
        used = column or "Image"
        assert report.columns == {"mask": "", "Image": "", "audio": ""} | {used: "pictures"}
        assert report.ignored == {}
    for given, column, fault in (
        (tmp_path / "x.parquet", "n", "no column n of pictures; columns: mask"),
        (folders / "image", "image", "column does nothing"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=fault):
            open_source(given, "image", tmp_path / "other", column=column)


def test_pictures_beside_containers_are_read_alone(folders, tmp_path, caplog):
    shutil.copytree(folders / "image", tmp_path / "data")
    zipped(("z.png", PICTURE))(tmp_path / "data" / "more.zip")
    with caplog.at_level(logging.WARNING):
        assert open_source(tmp_path / "data", "image").folder == tmp_path / "data"
    assert "others that are not, such as more.zip (1 in all): name these" in caplog.text


def test_an_archive_in_a_prepared_folder_changes_nothing(folders, tmp_path):
    prepare("tts", folders / "audio", tmp_path / "data")
    zipped(("z.wav", PICTURE))(tmp_path / "data" / "backup.zip")
    assert open_source(tmp_path / "data", "audio").unpacked is None


def test_several_data_sets_are_not_mixed(folders, tmp_path):
    for name in ("uz", "kk"):
        (tmp_path / name).mkdir()
        parquet.write_table(table_of(folders / "image", with_names), tmp_path / name / "train-00000-of-00001.parquet")
    with pytest.raises(UserError, match="several data sets in one: kk, uz") as error:
        open_source(tmp_path, "image", tmp_path / "at")
    assert error.value.hint == f"name one: {tmp_path}/kk"


def test_without_datasets_its_extra_is_named(folders, tmp_path, monkeypatch):
    given = named_parquet(folders / "image", tmp_path, None)
    monkeypatch.setattr("gputrain.errors.is_installed", lambda module: module != "datasets")
    with pytest.raises(UserError, match="the package datasets is not installed") as error:
        open_source(given, "image", tmp_path / "at")
    assert error.value.hint == "pip install datasets"


# --------------------------------------------------------------------------------------------------- as they are found


def test_values_of_databases_become_those_of_a_table(tmp_path):
    """Decimals are numbers, NaN is no value, and files without a suffix get that of their content."""
    (tmp_path / "0001").write_bytes(b"RIFF0000WAVE")
    rows = {
        "audio": ["0001", "0001"],
        "speaker_id": [Decimal(7), Decimal(8)],
        "start": [Decimal("0.25"), None],
        "end": [1.5, math.nan],
        "words": [["one"], None],
        "json": [{"text": "one", "n": None, "at": [1]}, None],
    }
    parquet.write_table(pyarrow.table(rows), tmp_path / "x.parquet")
    source = open_source(tmp_path / "x.parquet", "audio", tmp_path / "at")
    assert [json.loads(line) for line in (source.folder / "metadata.jsonl").read_text().splitlines()] == [
        {"audio": "0001.wav", "speaker_id": 7, "start": 0.25, "end": 1.5, "text": "one", "words": None},
        {"audio": "x/00000001.wav", "speaker_id": 8},
    ]


def test_missing_shards_are_named(tmp_path, caplog):
    zipped(("a.wav", b""))(tmp_path / "t-00001-of-00003.zip")
    open_source(tmp_path, "audio", tmp_path.with_name("at"))
    assert "2 of 3 t-N-of-00003.zip are not there, such as 0" in caplog.text


def test_tables_beside_the_shards_of_img2dataset_are_not_read(folders, tmp_path):
    write_webdataset(tmp_path / "00000.tar", folders / "image")
    table({"url": ["https://a/b.jpg"], "key": ["000"]})(tmp_path / "00000.parquet")
    source = open_source(tmp_path, "image", tmp_path.with_name("at"))
    assert len(files_of(source.folder)) == 6
    assert source.refused == ()


def test_a_preview_beside_a_larger_container_is_not_taken_for_the_data(folders, tmp_path, caplog):
    parquet.write_table(table_of(folders / "image", with_names), tmp_path / "train.parquet")
    (tmp_path / "preview.png").write_bytes(PICTURE)
    source = open_source(tmp_path, "image", tmp_path.with_name("at"))
    assert len(files_of(source.folder)) == 6
    assert "others that are not, such as preview.png (1 in" in caplog.text


def test_a_container_replaced_by_one_of_equal_size_and_time_is_unpacked_again(tmp_path):
    given = tmp_path / "x.zip"
    for content in (b"first", b"other"):
        zipped(("a.png", content))(given)
        os.utime(given, (1, 1))
        assert (open_source(given, "image", tmp_path / "at").folder / "a.png").read_bytes() == content


def test_a_preparation_notes_the_container_and_refuses_another_before_unpacking(folders, tmp_path):
    """The output folder may have another name the second time: the notes do not tell where the data were unpacked."""
    given = zip_archive(folders / "image", tmp_path, None)
    prepare("vae", given, tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / "renamed")
    assert "kept      6" in prepare("vae", given, tmp_path / "renamed").stdout
    for kind, name, options, fault in (
        ("vae", "y.zip", (), f"was prepared from {given}, not from {tmp_path / 'y.zip'}"),
        ("vocoder", "x.zip", ("--hop-size", 128), "hop_size 256, not "),
        ("tts", "x.zip", ("--audio-sample-rate", 22050), "sampling_rate 16000, not "),
    ):
        out = tmp_path / "renamed" if kind == "vae" else tmp_path / kind
        if kind != "vae":
            prepare(kind, folders / "audio", out)
        shutil.copy(given, tmp_path / name) if name != "x.zip" else None
        done = gputrain_here(
            "prepare-data", "--kind", kind, "--input-dir", tmp_path / name, "--output-dir", out,
            *PREPARE[kind][1], *options,
        )  # fmt: skip
        assert done.returncode == 2
        assert fault.split(", not")[0] in " ".join(done.stderr.split()), done.stderr
        assert "unpacking" not in done.stderr


def test_what_a_preparation_reads_is_kept_until_it_has_ended(folders, tmp_path, monkeypatch):
    """A second process that unpacks the same waits for the first, which removes it."""
    given, at = zip_archive(folders / "image", tmp_path, None), tmp_path / "at"
    first = open_source(given, "image", at, exclusive=True)
    held = FileLock(first.unpacked.with_name(f"{first.unpacked.name}.lock"))
    with pytest.raises(Timeout):
        held.acquire(timeout=0)
    first.remove()

    def removed_meanwhile(lock):
        monkeypatch.undo()
        shutil.rmtree(at)
        raise FileNotFoundError(errno.ENOENT, "its folder is gone")

    monkeypatch.setattr(FileLock, "acquire", removed_meanwhile)
    assert len(files_of(open_source(given, "image", at, exclusive=True).folder)) == 6


def test_a_transcript_in_an_archive_is_named_as_there(folders, tmp_path):
    given = tar(folders / "audio", tmp_path, None)
    with tarfile.open(given, "a") as archive:
        add_to_tar(archive, "./my data/test.csv", b"s0|another text")
    done = gputrain_here(
        "prepare-data", "--kind", "tts", "--input-dir", given, "--output-dir", tmp_path / "out", "--num-workers", 0,
        *PREPARE["tts"][1], "--transcripts", "metadata.csv",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "out" / "manifest.jsonl").read_text().splitlines()) == 6
