"""Data sets of the Hub, fetched from a server on this machine."""

import logging

import pytest

from gputrain.errors import UserError
from gputrain.fetch.datasets import download_dataset, is_dataset_name
from tests.hub_server import NO_REPOSITORY
from tests.tables import each_row


def held(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def of(*names):
    return {name: f"content of {name}".encode() * 100 for name in (*names, "README.md", ".gitattributes")}


TWO_SPLITS = (
    "data/test-00000-of-00001.parquet",
    "data/train-00000-of-00002.parquet",
    "data/train-00001-of-00002.parquet",
)


@each_row(
    (TWO_SPLITS, "", TWO_SPLITS[1:], "hf://datasets/ann/set/data/test*.parquet"),
    (TWO_SPLITS, "/data/test-*.parquet", TWO_SPLITS[:1], ""),
    (TWO_SPLITS, "/data", TWO_SPLITS[1:], "data/test*.parquet"),
    (("a.parquet", "training.parquet"), "", ("a.parquet", "training.parquet"), ""),
    (("train.parquet", "all.parquet", "test.parquet", "words.txt"), "", ("train.parquet", "words.txt"),
     "without all.parquet, test;"),
    (("clips.tar", "train.tsv", "dev.tsv", "other.tsv", "validated.tsv"), "", ("clips.tar", "train.tsv"),
     "without validation, other;"),
    (("other/a.png", "b.png"), "", ("b.png", "other/a.png"), ""),
    (("train/a.png", "train/texts.csv", "validation/b.png"), "", ("train/a.png", "train/texts.csv"), "validation"),
    (("transcript/en/train.tsv", "transcript/en/test.tsv", "audio/en/train/0.tar", "audio/en/test/1.tar"), "",
     ("audio/en/train/0.tar", "transcript/en/train.tsv"), "audio/en/test"),
    (("val/a.png", "val/b.png"), "", ("val/a.png", "val/b.png"), "the split validation alone"),
    (("0.tar", "1.tar", "captions.json"), "", ("0.tar", "1.tar", "captions.json"), ""),
    (("trainer/a.png", "b.png"), "", ("b.png", "trainer/a.png"), ""),  # No word of a split.
    (("uz/train.parquet", "kk/train.parquet"), "/uz", ("uz/train.parquet",), ""),
)  # fmt: skip
def test_the_data_files_of_what_is_named(hub, caplog, files, path, expected, said):
    hub.add("datasets/ann/set", of(*files))
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="gputrain.fetch.datasets"):
        folder = download_dataset(f"hf://datasets/ann/set{path}")
    assert held(folder) == sorted(expected)
    assert said in caplog.text if said else not caplog.text
    for name in expected:
        assert (folder / name).read_bytes() == of(name)[name]


def test_a_split_does_not_stand_beside_one_that_was_fetched_before(hub):
    hub.add("datasets/ann/set", of(*TWO_SPLITS))
    assert held(download_dataset("hf://datasets/ann/set/data/test*")) == [TWO_SPLITS[0]]
    assert held(download_dataset("hf://datasets/ann/set")) == list(TWO_SPLITS[1:])
    before = hub.sent()
    assert held(download_dataset("https://huggingface.co/datasets/ann/set/tree/main/data")) == list(TWO_SPLITS[1:])
    assert hub.sent() == before
    file = download_dataset(f"https://huggingface.co/datasets/ann/set/blob/main/{TWO_SPLITS[0]}")
    assert file.is_file()
    assert file.name == "test-00000-of-00001.parquet"


@each_row(
    ("hf://datasets/ann/set", ("dev.parquet", "test.parquet"), "the splits validation and test, and none", "/dev*.p"),
    ("hf://datasets/ann/set/uz", TWO_SPLITS, "has no data there", "it has data/test"),
    ("hf://datasets/ann/set", (), "has no data there", "it has README.md"),
    ("ann/set", TWO_SPLITS, "not a name of a data set", "hf://datasets/org/name"),
    ("hf://datasets/ann/sets", TWO_SPLITS, "not on the Hugging Face Hub, or private", "spelling"),
)  # fmt: skip
def test_what_cannot_be_had(hub, name, files, message, hint):
    hub.add("datasets/ann/set", of(*files))
    hub.refuse("/api/datasets/ann/sets/revision/main", NO_REPOSITORY)
    with pytest.raises(UserError, match=message) as raised:
        download_dataset(name)
    assert hint in raised.value.hint


@each_row(
    ("hf://datasets/ann/set", True), ("https://huggingface.co/datasets/ann/set/tree/main", True), ("ann/set", False),
    ("hf://ann/model", False), ("data/train", False), ("datasets/ann/set", False), ("C:\\data", False),
)  # fmt: skip
def test_names_of_data_sets(name, expected):
    assert is_dataset_name(name) is expected
