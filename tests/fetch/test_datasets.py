"""Data sets of the Hub, fetched from a server on this machine."""

import logging

import pytest

from gputrain.errors import UserError
from gputrain.fetch.datasets import download_dataset, is_dataset_name
from tests.hub_server import NO_REPOSITORY
from tests.tables import each_row


def of(*names):
    return {name: f"content of {name}".encode() * 100 for name in (*names, "README.md", ".gitattributes")}


TWO_SPLITS = (
    "data/test-00000-of-00001.parquet",
    "data/train-00000-of-00002.parquet",
    "data/train-00001-of-00002.parquet",
)


@each_row(
    (TWO_SPLITS, "", TWO_SPLITS[1:], "hf://datasets/ann/set/data/test-*.parquet"),
    (TWO_SPLITS, "/data/test-*.parquet", TWO_SPLITS[:1], ""),
    (TWO_SPLITS, "/data", TWO_SPLITS[1:], "data/test-*.parquet"),
    (("a.parquet", "training.parquet"), "", ("a.parquet", "training.parquet"), ""),
    (("train.parquet", "all.parquet", "test.parquet", "words.txt"), "", ("train.parquet", "words.txt"),
     "1 files of no split are not read, such as all.parquet"),
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
    with caplog.at_level(logging.WARNING, logger="gputrain.fetch.datasets"):
        folder, names = download_dataset(f"hf://datasets/ann/set{path}")
    assert names == sorted(expected)
    assert said in caplog.text if said else not caplog.text
    for name in expected:
        assert (folder / name).read_bytes() == of(name)[name]


def test_names_of_one_file_and_of_pages_and_what_the_cache_has(hub, monkeypatch):
    hub.add("datasets/ann/set", of(*TWO_SPLITS))
    assert download_dataset("hf://datasets/ann/set/data/test*")[1] == [TWO_SPLITS[0]]
    folder, names = download_dataset("hf://datasets/ann/set")
    assert names == list(TWO_SPLITS[1:])
    before = hub.sent()
    assert download_dataset("https://huggingface.co/datasets/ann/set/tree/main/data") == (folder, names)
    name = f"https://huggingface.co/datasets/ann/set/blob/main/{TWO_SPLITS[0]}"
    assert download_dataset(name) == (folder, [TWO_SPLITS[0]])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert download_dataset("hf://datasets/ann/set") == (folder, names)
    assert hub.sent() == before
    with pytest.raises(UserError, match=r"the cache .* does not have it"):
        download_dataset("hf://datasets/ann/other")


PAGE = """---
configs:
- config_name: uz
  data_files: {uz}
- config_name: kk
  data_files:
  - split: train
    path: [kk/a*.parquet, kk/more/**]
  - {{split: test, path: kk/t.parquet}}
{more}
---
A page.
"""
OF_PAGE = ("uz/a.parquet", "kk/a1.parquet", "kk/more/deep/b.parquet", "kk/t.parquet", "kk/deep/a2.parquet")


@each_row(
    ("", "uz/*.parquet", "", "several subsets in one: uz, kk", "name one: hf://datasets/ann/set/uz"),
    ("/uz", "uz/*.parquet", "", OF_PAGE[:1], ""),
    ("", "uz/*.parquet", "  default: true", OF_PAGE[1:3], "the split train is taken, without test; another one by its"),
    ("/kk", "uz/*.parquet", "", OF_PAGE[1:3], "by its files: hf://datasets/ann/set/kk/t.parquet"),
    ("/kk/t.parquet", "uz/*.parquet", "", OF_PAGE[3:4], ""),
    ("/uz", "[{split: dev, path: uz/a.parquet}]", "", OF_PAGE[:1], "it has the split dev alone"),
    ("/uz", "[{split: dev, path: a}, {split: test, path: b}]", "", "the splits dev and test, and none", ""),
    ("/uz", "uz/*.tar", "", "has no data there", "it has"),
)  # fmt: skip
def test_subsets_as_the_page_of_a_data_set_declares_them(hub, caplog, path, uz, more, expected, said):
    page = PAGE.format(uz=uz, more=more).encode()
    hub.add("datasets/ann/set", {**of(*OF_PAGE), "README.md": page})
    caplog.clear()
    if isinstance(expected, tuple):
        assert download_dataset(f"hf://datasets/ann/set{path}")[1] == sorted(expected)
        assert said in caplog.text
        assert said or not caplog.text
        return
    with pytest.raises(UserError, match=expected) as raised:
        download_dataset(f"hf://datasets/ann/set{path}")
    assert said in raised.value.hint


@each_row(
    ("hf://datasets/ann/set", ("dev.parquet", "test.parquet"), "the splits validation and test, and none", "/dev.p"),
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
