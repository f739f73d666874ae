"""Profiles of datasets: the lengths of clips, the sizes of items, and the time to decode an item; sounds in items.

A dataset is a list of lengths, a Hugging Face dataset with an audio column, or anything that has a length and returns
items by their number. One without a column of lengths is sampled. Imports no torch, and no dataset library. Shape
suffix: T samples.
"""

import itertools
import logging
import math
import numbers
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from gputrain.autoconfig.lengths import Seconds, checked
from gputrain.engine.data import permutation
from gputrain.errors import UserError

log = logging.getLogger(__name__)

DataKind = Literal["audio", "pictures", "tensors"]

SAMPLING_RATE = 16_000  # Hz; that of speech models, used if the data has none.
TEXT_KEYS = {
    "text", "sentence", "transcript", "transcription", "normalized", "normalized_text", "raw_text", "target_text"
}  # fmt: skip
LENGTH_COLUMNS = ("duration", "duration_seconds", "durations", "seconds", "length_seconds")  # In seconds.
LENGTH_TOLERANCE = 0.1  # The share by which a length may differ from its sound: they are often rounded.
MOST_EXAMINED = 300  # Maximum number of sampled items.
SAMPLING_SECONDS = 5.0  # Time limit of sampling.
TIMED_ITEMS = 8  # Number of items whose decoding is timed.
MOST_VALUES = 8192  # Integers of a tensor whose values are kept.
PICTURE_KEYS = ("pixel_values", "image", "img")
SOUND_KEYS = ("audio", "input_values")


@dataclass(frozen=True)
class TensorShape:
    """A tensor's shape and the name of its dtype, without torch. `values`: those of a short tensor of integers, by
    which models choose what they compute, such as masks and special tokens."""

    shape: tuple[int, ...]
    dtype: str
    values: Any = field(default=None, compare=False, repr=False)

    @property
    def bytes(self) -> int:
        bits = re.search(r"\d+", self.dtype)
        return math.prod(self.shape) * (int(bits[0]) // 8 if bits else 1)


class ClipLength(NamedTuple):
    seconds: float
    sampling_rate: int  # Hz
    beside: Any = None  # The other tensors of the item by name, such as labels, as a tree of TensorShape.


@dataclass(frozen=True, eq=False)
class DatasetProfile:
    """Properties of a dataset."""

    kind: DataKind
    items: int
    looked_at: int  # Number of examined items.
    seconds: Seconds  # Lengths of the examined items; empty unless they are sounds.
    widest: Any = None  # Tree of TensorShape with the largest tensor of each place; of sounds, those beside them.
    item_bytes: float = 0.0  # Average size of a decoded item.
    decode_seconds: float = 0.0  # CPU seconds to decode an item; 0: unknown.
    length_column: str = ""  # Column of the lengths, if there is one.
    labels: str = ""  # Name of what belongs to the whole of a clip, so that it cannot be cut; empty if there is none.

    @property
    def hours(self) -> float:
        """Returns the hours of all items, estimated from the examined ones."""
        return float(self.seconds.mean()) * self.items / 3600 if len(self.seconds) else 0.0

    @property
    def decoded_gb(self) -> float:
        return self.item_bytes * self.items / 1e9

    def quantile(self, share: float) -> float:
        """Returns the seconds that this share of the clips does not exceed."""
        return float(np.quantile(self.seconds, share, method="inverted_cdf"))

    def describe(self) -> str:
        """Returns a sentence on the items and on how many of them were examined."""
        seen = "all" if self.looked_at == self.items else f"a sample of {self.looked_at}"
        if self.kind != "audio":
            size = " x ".join(map(str, max(leaves(self.widest), key=lambda leaf: leaf.bytes).shape))
            return f"{self.items} items ({seen} looked at), the largest {size}"
        half, most = self.quantile(0.5), self.quantile(0.95)
        lengths = f"median {half:.1f} s, 95 % up to {most:.1f} s, longest {self.seconds.max():.1f} s"
        return f"{self.items} clips ({seen} looked at), {self.hours:.2f} hours: {lengths}"


def profile_dataset(dataset: Any) -> DatasetProfile:
    """Returns the profile of a dataset.

    `dataset`: a list of lengths in seconds, or anything with `len(dataset)` and `dataset[number]`. A column of lengths
    is used if the first sounds have these seconds. Raises UserError if it is empty, has no length, has several splits,
    or has lengths that are not positive.
    """
    if isinstance(dataset, (str, Path)):
        raise UserError(f"{dataset}: a path, expected a dataset", hint="pass the dataset that reads it")
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise UserError(
            f"{type(dataset).__name__} has no length", hint="pass a sized dataset, or a list of lengths in seconds"
        )
    columns = getattr(dataset, "column_names", None) or []
    if isinstance(columns, Mapping):
        raise UserError(
            f"a dataset with the splits {', '.join(columns)}", hint=f"pass one: dataset[{next(iter(columns))!r}]"
        )
    if not len(dataset):
        raise UserError("the dataset is empty", hint="give it at least one item")
    if _is_number(dataset[0]):
        seconds = checked(dataset)
        return _of_lengths(seconds, len(seconds), SAMPLING_RATE)
    column = next((name for name in LENGTH_COLUMNS if name in columns), "")
    if not column:
        return _profile_items(dataset)
    lengths = checked(dataset[column])
    found, took = _examined(dataset, range(min(TIMED_ITEMS, len(dataset))))
    sounds = [item.seconds for item in found if isinstance(item, ClipLength)]
    if sounds and not np.allclose(lengths[: len(sounds)], sounds, rtol=LENGTH_TOLERANCE):
        log.warning("the column %s has other lengths than the first %d sounds, and is not used", column, len(sounds))
        return _profile_items(dataset)
    return _of_lengths(
        lengths,
        len(lengths),
        SAMPLING_RATE,
        decode_seconds=took,
        length_column=column,
        labels=labels_of(dataset[0]),
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _of_lengths(seconds: Seconds, items: int, sampling_rate: float, **more: Any) -> DatasetProfile:
    mean_bytes = float(seconds.mean()) * sampling_rate * 4  # fp32
    return DatasetProfile("audio", items, len(seconds), seconds, item_bytes=mean_bytes, **more)


# -------------------------------------------------------------------------------------------------------- items


def _profile_items(dataset: Any) -> DatasetProfile:
    """Profiles a random sample of the items, or all of them if they are few."""
    order = permutation(0, 0, len(dataset))[:MOST_EXAMINED].tolist()
    found, decode_seconds = _examined(dataset, order)
    if isinstance(found[0], ClipLength):
        seconds = checked([sound.seconds for sound in found])
        rate = float(np.mean([sound.sampling_rate for sound in found]))
        more = {"labels": labels_of(dataset[order[0]]), "widest": _widest([sound.beside for sound in found])}
        return _of_lengths(seconds, len(dataset), rate, decode_seconds=decode_seconds, **more)
    return _of_shapes("pictures" if _has_picture(found[0]) else "tensors", found, len(dataset), decode_seconds)


def _has_picture(tree: Any) -> bool:
    first = tree[0] if isinstance(tree, list) and tree else tree
    if isinstance(first, Mapping):
        first = next((first[name] for name in PICTURE_KEYS if name in first), None)
    return isinstance(first, TensorShape) and len(first.shape) == 3


def _of_shapes(kind: DataKind, found: list[Any], items: int, decode_seconds: float) -> DatasetProfile:
    """Profiles items that are trees of TensorShape."""
    sizes = [sum(leaf.bytes for leaf in leaves(tree) if leaf.shape) for tree in found]
    if not max(sizes):
        raise UserError(
            "the items of the dataset contain no tensors, no pictures and no sounds",
            hint="pass a dataset whose items are what the model takes, such as texts that are tokenized; or a list of "
            "lengths in seconds",
        )
    mean_bytes = float(np.mean(sizes))
    return DatasetProfile(kind, items, len(found), np.empty(0), _widest(found), mean_bytes, decode_seconds)


def _widest(found: Sequence[Any]) -> Any:
    """Returns the tree with the largest tensor of each place, as a batch of items of different lengths is padded."""
    present = [tree for tree in found if tree is not None]
    if not present:
        return None
    if isinstance(present[0], Mapping):
        named = [tree for tree in present if isinstance(tree, Mapping)]
        return {
            name: _widest([tree.get(name) for tree in named]) for name in dict.fromkeys(n for t in named for n in t)
        }
    if isinstance(present[0], list):
        return [_widest(column) for column in itertools.zip_longest(*(t for t in present if isinstance(t, list)))]
    return max((tree for tree in present if isinstance(tree, TensorShape)), key=lambda leaf: leaf.bytes, default=None)


def _size_of(item: Any) -> Any:
    """Returns an item as a ClipLength or a tree of TensorShape. An encoded sound is decoded, because that is timed."""
    if _has_sound(item):
        sound = sound_of(item)
        return ClipLength(sound.seconds, sound.sampling_rate, _beside_sound(item))
    if isinstance(item, Mapping):
        return {name: _size_of_value(value) for name, value in item.items()}
    if isinstance(item, (tuple, list)) and not all(map(_is_number, item)):
        return [_size_of(item[0]), *map(_size_of_value, item[1:])]
    return _size_of_value(item)


def _size_of_value(value: Any) -> Any:
    """Returns a value of an item as a tree of TensorShape; None for what no batch of tensors has, such as a text."""
    if hasattr(value, "getbands"):  # A picture of Pillow.
        width, height = value.size
        return TensorShape((len(value.getbands()), height, width), "float32")
    if isinstance(value, Mapping):
        return {name: _size_of_value(part) for name, part in value.items()}
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        shape, dtype = tuple(value.shape), str(value.dtype).removeprefix("torch.")
        integers = dtype.startswith(("int", "uint", "bool")) and math.prod(shape) <= MOST_VALUES
        has_values = integers and not getattr(value, "is_meta", False)
        return TensorShape(shape, dtype, np.asarray(value) if has_values else None)
    if _is_number(value):
        return _size_of_lists(value)
    return _size_of_lists(value) if isinstance(value, (tuple, list)) else None


def _size_of_lists(value: Any) -> TensorShape | None:
    """Returns nested lists of numbers, as datasets store arrays, as a TensorShape, by the first of each level."""
    shape, first = [], value
    while isinstance(first, (tuple, list)) and first:
        shape.append(len(first))
        first = first[0]
    if not isinstance(first, numbers.Real):
        return None
    kinds = ((bool, "bool"), (numbers.Integral, "int64"), (numbers.Real, "float32"))
    dtype = next(name for kind, name in kinds if isinstance(first, kind))
    return TensorShape(tuple(shape), dtype, None if dtype == "float32" else _few_integers(value))


def _few_integers(value: Any) -> Any:
    """Returns integers as an array; None for rows of different lengths, and for too many."""
    try:
        found = np.asarray(value)
    except ValueError:
        return None
    return found if found.size <= MOST_VALUES and found.dtype.kind in "biu" else None


def _has_sound(item: Any) -> bool:
    """Returns True for items with a sound. Beside many other inputs of a model, input_values need not be a wave, and
    with two axes they are a spectrogram."""
    if not isinstance(item, Mapping):
        return False
    if "audio" in item:
        return True
    wave = item.get("input_values")
    return len(item) <= 4 and wave is not None and (np.ndim(wave) == 1 or len(wave) == 1)


def _beside_sound(item: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the tensors beside the sound of an item, by name."""
    found = {name: _size_of_value(value) for name, value in item.items() if name not in SOUND_KEYS}
    return {name: size for name, size in found.items() if size is not None} or None


def leaves(tree: Any) -> list[TensorShape]:
    """Returns the shapes of a tree, in order."""
    if isinstance(tree, TensorShape):
        return [tree]
    inside = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, (list, tuple)) else ()
    return list(itertools.chain.from_iterable(map(leaves, inside)))


# --------------------------------------------------------------------------------------------- sounds in items


class Sound(NamedTuple):
    wave_T: Any  # Array or tensor, (T,) or (channels, T).
    sampling_rate: int  # Hz

    @property
    def samples(self) -> int:
        return int(np.shape(self.wave_T)[-1])

    @property
    def seconds(self) -> float:
        return self.samples / self.sampling_rate


def sound_of(item: Any) -> Sound:
    """Returns the decoded sound of an item. Raises UserError if the item has none."""
    if isinstance(item, Mapping) and "audio" in item:
        return _decoded(item["audio"])
    if isinstance(item, Mapping) and "input_values" in item:
        return Sound(np.asarray(item["input_values"]), SAMPLING_RATE)
    raise UserError(
        f"an item of the dataset is a {type(item).__name__} without a sound",
        hint="items need a column audio, or a column input_values",
    )


def _decoded(sound: Any) -> Sound:
    if hasattr(sound, "get_all_samples"):
        samples = sound.get_all_samples()
        return Sound(samples.data, int(samples.sample_rate))
    if isinstance(sound, Mapping) and sound.get("array") is not None:
        return Sound(np.asarray(sound["array"]), int(sound["sampling_rate"]))
    if isinstance(sound, Mapping) and (sound.get("bytes") or sound.get("path")):
        import soundfile

        encoded = sound.get("bytes")
        try:
            wave_T, rate = soundfile.read(BytesIO(encoded) if encoded else sound["path"], dtype="float32")
        except soundfile.LibsndfileError as error:
            name = "a sound" if encoded else sound["path"]
            raise UserError(f"{name}: {error.error_string}", hint="leave it out of the data, or replace it") from None
        return Sound(wave_T.T, int(rate))
    raise UserError(
        f"the column audio contains {type(sound).__name__}",
        hint="give it dicts of array and sampling_rate, or pass a list of lengths in seconds",
    )


def with_sound(item: Any, sound: Sound) -> Any:
    """Returns the item with another sound in place of its own."""
    decoded = {"array": sound.wave_T, "sampling_rate": sound.sampling_rate}
    if "audio" in item:
        path = {"path": item["audio"].get("path")} if isinstance(item["audio"], Mapping) else {}
        return {**item, "audio": {**path, **decoded}}
    return {**item, "input_values": sound.wave_T}


def labels_of(item: Any) -> str:
    """Returns the name of what belongs to the whole sound of an item, so that a piece would not have it; empty if there
    is nothing such. A number, such as that of a speaker, belongs to every piece."""
    for name, value in item.items():
        if name in SOUND_KEYS:
            continue
        if name.lower() in TEXT_KEYS or (np.ndim(value) and not isinstance(value, (str, bytes, Mapping))):
            return str(name)
    return ""


# --------------------------------------------------------------------------------------------------- in time


def _examined(dataset: Any, numbers: Iterable[int]) -> tuple[list[Any], float]:
    """Loads items until the time limit, at least one. Returns their sizes, and the seconds for one.

    The first is not timed, because it also opens files and imports libraries.
    """
    found, took = [], []
    until = time.perf_counter() + SAMPLING_SECONDS
    for number in numbers:
        began = time.perf_counter()
        found.append(_size_of(dataset[number]))
        took.append(time.perf_counter() - began)
        if time.perf_counter() >= until:
            break
    return found, float(np.mean(took[1:] or took))
