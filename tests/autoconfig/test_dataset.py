"""Profiles of datasets of known contents: objects shaped like those of other libraries."""

from io import BytesIO
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image

from gputrain.autoconfig import dataset as module
from gputrain.autoconfig.dataset import TensorShape, profile_dataset
from gputrain.errors import UserError
from tests.tables import each_row

RATE = 8000


def tone(seconds: float, rate: int = RATE) -> np.ndarray:
    return np.sin(np.arange(round(seconds * rate)) / 9).astype(np.float32)


def encoded(seconds: float, rate: int = RATE) -> bytes:
    file = BytesIO()
    soundfile.write(file, tone(seconds, rate), rate, format="WAV")
    return file.getvalue()


class Table(list):
    """Rows by number and columns by name, as a dataset of Hugging Face gives them."""

    @property
    def column_names(self):
        return list(super().__getitem__(0))

    def __getitem__(self, key):
        return [row[key] for row in self] if isinstance(key, str) else super().__getitem__(key)


class Decoder:
    """Decodes when asked, as that of torchcodec."""

    def __init__(self, seconds: float):
        self.seconds = seconds

    def get_all_samples(self):
        return SimpleNamespace(data=torch.from_numpy(tone(self.seconds))[None], sample_rate=RATE)


@each_row(list, tuple, np.array)
def test_a_list_of_lengths(make):
    found = profile_dataset(make([2.0, 4.0, 12.0, 6.0]))
    assert (found.kind, found.items, found.looked_at, found.seconds.max()) == ("audio", 4, 4, 12)
    assert found.hours == pytest.approx(24 / 3600)
    assert found.quantile(0.5) == 4
    assert found.decoded_gb == pytest.approx(24 * 16000 * 4 / 1e9)
    assert found.decode_seconds == 0
    assert found.describe() == (
        "4 clips (all looked at), 0.01 hours: median 4.0 s, 95 % up to 12.0 s, longest 12.0 s"
    )  # fmt: skip


@each_row(
    lambda s: {"array": tone(s), "sampling_rate": RATE, "path": None},
    lambda s: {"bytes": encoded(s), "path": "clip.wav"},
    Decoder,
)
def test_a_column_of_sounds(shape):
    rows = Table({"text": "words", "audio": shape(seconds)} for seconds in (0.5, 1.25, 0.75))
    found = profile_dataset(rows)
    assert (found.kind, found.items, found.looked_at) == ("audio", 3, 3)
    assert sorted(found.seconds) == [0.5, 0.75, 1.25]
    assert found.decode_seconds > 0
    assert found.item_bytes == pytest.approx(2.5 / 3 * RATE * 4)


def test_a_column_of_lengths_is_used_and_few_sounds_are_decoded():
    decoded = []

    class Row(dict):
        def __getitem__(self, key):
            if key == "audio":
                decoded.append(key)
            return super().__getitem__(key)

    rows = Table(Row(duration=1.0 + n, audio={"array": tone(1.0 + n), "sampling_rate": RATE}) for n in range(100))
    found = profile_dataset(rows)
    assert (found.looked_at, found.seconds.max(), found.length_column) == (100, 100, "duration")
    assert len(decoded) == module.TIMED_ITEMS


@each_row((1, ""), (1.05, ""), (1000, "has other lengths"), (7, "has other lengths"))
def test_a_column_of_lengths_that_the_sounds_contradict_is_not_used(caplog, factor, said):
    caplog.clear()
    lengths = (1.0, 2.0, 3.0, 2.0)
    rows = Table({"duration": n * factor, "audio": {"array": tone(n), "sampling_rate": RATE}} for n in lengths)
    found = profile_dataset(rows)
    assert sorted(found.seconds) == pytest.approx(sorted(n * (1 if said else factor) for n in lengths))
    assert found.length_column == ("" if said else "duration")
    assert said in caplog.text
    assert bool(said) == bool(caplog.text)


@each_row(
    (lambda n: Image.new("RGB", (10 * n, 20)), "pictures", TensorShape((3, 20, 50), "float32")),
    (
        lambda n: (Image.new("L", (10 * n, 20)), n),
        "pictures",
        [TensorShape((1, 20, 50), "float32"), TensorShape((), "int64")],
    ),
    (
        lambda n: {"image": Image.new("RGB", (10, 20 * n)), "text": "a", "label": n},
        "pictures",
        {"image": TensorShape((3, 100, 10), "float32"), "text": None, "label": TensorShape((), "int64")},
    ),
    (
        lambda n: (torch.zeros(3, 8, n), 7),
        "pictures",
        [TensorShape((3, 8, 5), "float32"), TensorShape((), "int64")],
    ),
    (lambda n: {"frames": [[0.5] * n] * 4}, "tensors", {"frames": TensorShape((4, 5), "float32")}),
    (lambda n: torch.zeros(4 * n, dtype=torch.float16), "tensors", TensorShape((20,), "float16")),
    (
        lambda n: {"input_ids": list(range(n)), "mask": torch.ones(n, dtype=torch.bool)},
        "tensors",
        {"input_ids": TensorShape((5,), "int64"), "mask": TensorShape((5,), "bool")},
    ),
)
def test_items_of_other_datasets(item, kind, widest):
    found = profile_dataset([item(n) for n in range(1, 6)])
    assert (found.kind, found.widest) == (kind, widest)


def test_the_largest_of_each_tensor_may_come_from_different_items():
    items = [{"input_ids": [1] * a, "labels": [2] * b} for a, b in ((9, 1), (2, 5), (4, 4))]
    found = profile_dataset(items)
    shapes = {"input_ids": TensorShape((9,), "int64"), "labels": TensorShape((5,), "int64")}
    assert found.widest == shapes
    assert found.widest["labels"].values.tolist() == [2] * 5


def test_tensors_beside_a_sound():
    items = [{"audio": {"array": tone(0.5), "sampling_rate": RATE}, "labels": [1] * n, "text": "a"} for n in (3, 7)]
    assert profile_dataset(items).widest == {"labels": TensorShape((7,), "int64")}
    spectrogram = profile_dataset([{"input_values": torch.zeros(64, 32), "labels": 1}])
    assert (spectrogram.kind, spectrogram.widest["input_values"]) == ("tensors", TensorShape((64, 32), "float32"))


def test_a_large_dataset_is_sampled_and_says_so():
    class Large:
        def __len__(self):
            return 10_000

        def __getitem__(self, number):
            return {"audio": {"array": np.zeros(80 * (number % 10 + 1)), "sampling_rate": RATE}}

    found = profile_dataset(Large())
    assert (found.items, found.looked_at) == (10_000, module.MOST_EXAMINED)
    assert "a sample of 300 looked at" in found.describe()
    assert found.hours == pytest.approx(10_000 * 0.055 / 3600, rel=0.1)
    assert profile_dataset(Large()).seconds.tolist() == found.seconds.tolist()


def test_a_slow_dataset_is_left_in_time(monkeypatch):
    monkeypatch.setattr(module, "SAMPLING_SECONDS", 0.0)
    found = profile_dataset([{"audio": {"array": tone(0.1), "sampling_rate": RATE}}] * 50)
    assert found.looked_at == 1
    assert found.items == 50


def test_what_is_no_dataset():
    with pytest.raises(UserError, match="generator has no length"):
        profile_dataset(n for n in range(3))
    with pytest.raises(UserError, match="empty"):
        profile_dataset([])
    with pytest.raises(UserError, match="splits train, test") as error:
        profile_dataset(type("Splits", (dict,), {"column_names": {"train": ["audio"], "test": ["audio"]}})())
    assert "dataset['train']" in error.value.hint
    with pytest.raises(UserError, match="contain no tensors"):
        profile_dataset([{"text": "words"}])
    with pytest.raises(UserError, match="clip 1: a length of nan"):
        profile_dataset([1.0, float("nan")])
    with pytest.raises(UserError, match="column audio contains str"):
        profile_dataset([{"audio": "clip.wav"}])
    with pytest.raises(UserError, match="a path, expected a dataset"):
        profile_dataset("nowhere")
