"""Several data folders: what is refused, how often an epoch draws their items, what is held out, and resuming."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gputrain.data_in.split import DataFolder, Mixture, data_folders, split_folders
from gputrain.engine.data import Sample, Stream, loader
from gputrain.errors import UserError
from gputrain.hw.ranks import Ranks
from tests.tables import each_row


@pytest.fixture
def folders(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b", "x", "x=2", "rate=0.5"):
        (tmp_path / name).mkdir()
    (tmp_path / "same").symlink_to("a")
    return tmp_path


def test_folders_and_weights_as_they_are_written(folders):
    assert data_folders(Path("a")) == (DataFolder(Path("a"), 1),)
    assert data_folders([Path("a=2"), Path("b=3")]) == (DataFolder(Path("a"), 2), DataFolder(Path("b"), 3))
    # A folder whose name ends like a weight is that folder, unless the shorter name is a folder too.
    assert data_folders([Path("rate=0.5")]) == (DataFolder(Path("rate=0.5")),)
    assert data_folders([Path("b=two")]) == (DataFolder(Path("b=two")),)  # Opening it says that it does not exist.
    assert data_folders([Path("rate=0.5=3")]) == (DataFolder(Path("rate=0.5"), 3),)
    assert data_folders([Path("x=2=1"), Path("x=2.0")]) == (DataFolder(Path("x=2")), DataFolder(Path("x"), 2))


@each_row(
    (["a=0"], "a: its weight is 0,"),
    (["a", "b=0.25"], "b: its weight is 0.25, expected a whole number"),
    (["a", "b=-1"], "b: its weight is -1,"),
    (["a=nan"], "a: its weight is nan,"),
    (["a=inf"], "a: its weight is inf,"),
    (["a=10001"], "a: its weight is 10001,"),
    (["a", "b", "same=2"], "same: the same folder as a"),
    (["a", "b/../a"], "b/../a: the same folder as a"),
    ([], "no data folder is given"),
)
def test_what_is_refused(folders, given, message):
    with pytest.raises(UserError) as refused:
        data_folders(list(map(Path, given)))
    assert str(refused.value).startswith(message)
    assert refused.value.hint


def drawn(mixture: Mixture, epoch: int) -> list[Sample]:
    return [mixture.sample(Sample(epoch, place)) for place in range(len(mixture))]


def test_a_weight_is_how_often_each_item_is_drawn():
    mixture = Mixture((4, 3), (1, 2))
    assert (len(mixture), mixture.draws, mixture.is_plain) == (4 + 6, (4, 6), False)
    for epoch in range(5):
        items = Counter(sample.item for sample in drawn(mixture, epoch))
        assert [items[item] for item in range(7)] == [1, 1, 1, 1, 2, 2, 2]


@settings(max_examples=200)
@given(
    folders=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 5)), min_size=1, max_size=4),
    epochs=st.integers(2, 6),
)
def test_no_sample_is_drawn_twice_and_places_are_those_of_items(folders, epochs):
    """Two equal samples would have the same random crop. `items` and `sample` are two computations of one order."""
    mixture = Mixture(tuple(count for count, _ in folders), tuple(weight for _, weight in folders))
    seen = [sample for epoch in range(epochs) for sample in drawn(mixture, epoch)]
    assert len(set(seen)) == len(seen)
    for epoch in range(epochs):
        assert [sample.item for sample in drawn(mixture, epoch)] == mixture.items.tolist()


def test_without_weights_the_order_is_that_of_one_folder():
    mixture = Mixture((4, 6), (1, 1))
    assert mixture.is_plain
    assert drawn(mixture, 3) == [Sample(3, item) for item in range(10)]
    assert mixture.of("the data set") == "the data set"


class Echo:
    """A data set whose items are their keys."""

    item_bytes = 16

    def __getitem__(self, sample: Sample) -> tuple[int, int]:
        return tuple(sample)


def test_resuming_and_ranks_draw_the_same():
    """From any sample on, and in parts, the loader gives what an uninterrupted single process draws."""
    dataset = Mixture((2, 7), (2, 1)).of(Echo())
    assert (len(dataset), dataset.item_bytes) == (4 + 7, 16)

    def batches(start: int, ranks: Ranks) -> list[list[tuple[int, int]]]:
        stream = Stream(len(dataset), seed=3, batch_size=4, start_sample=start, stop_sample=44, ranks=ranks)
        return [
            list(zip(*(one.tolist() for one in batch), strict=True)) for batch in loader(dataset, stream, num_workers=0)
        ]

    alone = Ranks()
    whole = batches(0, alone)
    assert len(whole) == 11
    assert batches(20, alone) == whole[5:]
    halves = [batches(0, Ranks(rank, 2)) for rank in range(2)]
    assert [one + other for one, other in zip(*halves, strict=True)] == whole
    counts = Counter(item for batch in whole for _, item in batch)  # Of four epochs.
    assert [counts[item] for item in range(9)] == [4 * 2] * 2 + [4] * 7


def fingerprints(*first_digits: int) -> list[str]:
    return [f"{digits:02x}" + "0" * 30 for digits in first_digits]


def parts_of(*items: list[str], share: float = 0.25, count: int = 0):
    folders = tuple(DataFolder(Path(name)) for name, _ in zip("abc", items, strict=False))
    return split_folders(folders, items, share, [str] * len(items), count)


def test_each_folder_holds_out_by_its_own_rules():
    """A quarter is below 0x40: two items of the first folder; of the second, the lowest, as none is below."""
    first, second = fingerprints(0x10, 0x20, 0x50, 0x60, 0x70), fingerprints(0x80, 0x90, 0xA0)
    both = parts_of(first, second)
    assert both.parts.held_out == [first[0], second[0], first[1]]  # They alternate, so that a few come from both.
    assert both.parts.train == first[2:] + second[1:]
    assert both.counts == (3, 2)
    for alone in (first, second):
        assert set(parts_of(alone).parts.held_out) == set(both.parts.held_out) & set(alone)
    assert parts_of(first, second, count=1).parts.held_out == [first[0], second[0]]


def test_what_one_folder_holds_out_another_does_not_train_on(caplog):
    first, second = fingerprints(0x10, 0x50, 0x60), fingerprints(0x05, 0x10, 0x90)
    with caplog.at_level("INFO"):
        both = parts_of(first, second, share=0.0, count=1)
    assert both.parts.held_out == [first[0], second[0]]
    assert both.parts.train == [first[1], first[2], second[2]]
    assert both.counts == (2, 1)
    assert caplog.messages == ["b: 1 items are left out, as another folder holds them out"]
    with pytest.raises(UserError, match="b: nothing is left to train on"):
        parts_of(first, fingerprints(0x10))


def test_folders_of_a_single_item():
    """It is trained on beside others, and serves as both if every folder has one."""
    first, one, other = fingerprints(0x10, 0x50), fingerprints(0x20), fingerprints(0x30)
    both = parts_of(first, one)
    assert (both.parts.train, both.parts.held_out, both.parts.shared) == ([first[1], *one], [first[0]], False)
    single = parts_of(one, other)
    assert (single.parts.train, single.parts.held_out, single.parts.shared) == (one + other, one + other, True)
