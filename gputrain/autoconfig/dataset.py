"""Profiles of datasets: the lengths of clips, the sizes of items, and the time to decode an item.

A dataset is a list of lengths, a folder of sounds or pictures, a Hugging Face dataset with an audio column, or anything
that has a length and returns items by their number. One without a column of lengths is sampled. Imports no torch, and
no dataset library.
"""

import itertools
import math
import numbers
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from gputrain.autoconfig.lengths import Seconds, checked
from gputrain.autoconfig.sounds import SAMPLING_RATE, is_waveform, labels_of, sound_of
from gputrain.engine.preparation import check_input_folder, scan
from gputrain.errors import UserError

DataKind = Literal["audio", "pictures", "tensors"]

SOUNDS = {".wav", ".flac", ".ogg", ".opus", ".mp3", ".aif", ".aiff", ".au", ".w64", ".caf"}
PICTURES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff"}
IN_SECONDS = ("duration", "duration_seconds", "durations", "seconds", "length_seconds")  # Columns of lengths.
MOST_DECODED = 300  # Maximum number of sampled items.
PATIENCE_SECONDS = 5.0  # Time limit of sampling.
TIMED = 8  # Number of items whose decoding is timed.


class TensorShape(NamedTuple):
    """A tensor's shape and the name of its dtype, without torch."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        bits = re.search(r"\d+", self.dtype)
        return math.prod(self.shape) * (int(bits[0]) // 8 if bits else 1)


class ClipLength(NamedTuple):
    seconds: float
    sampling_rate: int  # Hz


@dataclass(frozen=True, eq=False)
class DatasetProfile:
    """Properties of a dataset."""

    kind: DataKind
    items: int
    looked_at: int  # Number of examined items.
    seconds: Seconds  # Lengths of the examined items; empty unless they are sounds.
    largest: Any = None  # The largest item as a tree of TensorShape, unless they are sounds.
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

    @property
    def longest_seconds(self) -> float:
        return float(self.seconds.max()) if len(self.seconds) else 0.0

    def quantile(self, share: float) -> float:
        """Returns the seconds that this share of the clips does not exceed."""
        return float(np.quantile(self.seconds, share, method="inverted_cdf"))

    def describe(self) -> str:
        """Returns a sentence on the items and on how many of them were examined."""
        seen = "all" if self.looked_at == self.items else f"a sample of {self.looked_at}"
        if self.kind != "audio":
            size = " x ".join(map(str, max(leaves(self.largest), key=lambda leaf: leaf.bytes).shape))
            return f"{self.items} items ({seen} looked at), the largest {size}"
        half, most = self.quantile(0.5), self.quantile(0.95)
        lengths = f"median {half:.1f} s, 95 % up to {most:.1f} s, longest {self.longest_seconds:.1f} s"
        return f"{self.items} clips ({seen} looked at), {self.hours:.2f} hours: {lengths}"


def profile_dataset(dataset: Any, *, seed: int = 0) -> DatasetProfile:
    """Returns the profile of a dataset.

    `dataset`: a folder, a list of lengths in seconds, or anything with `len(dataset)` and `dataset[number]`. Raises
    UserError if it is empty, has no length, has several splits, or has lengths that are not positive.
    """
    if isinstance(dataset, (str, Path)):
        return _profile_folder(Path(dataset), seed)
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
    column = next((name for name in IN_SECONDS if name in columns), "")
    if not column:
        return _profile_items(dataset, seed)
    seconds = checked(dataset[column])
    _, decode_seconds = _timed(lambda number: _look(dataset[number]), range(min(TIMED, len(dataset))))
    labels = labels_of(dataset[0])
    return _of_lengths(
        seconds, len(seconds), SAMPLING_RATE, decode_seconds=decode_seconds, length_column=column, labels=labels
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _of_lengths(seconds: Seconds, items: int, sampling_rate: float, **more: Any) -> DatasetProfile:
    mean_bytes = float(seconds.mean()) * sampling_rate * 4  # fp32
    return DatasetProfile("audio", items, len(seconds), seconds, item_bytes=mean_bytes, **more)


def _of_sounds(sounds: Sequence[ClipLength], items: int, decode_seconds: float, labels: str = "") -> DatasetProfile:
    seconds = checked([sound.seconds for sound in sounds])
    rate = float(np.mean([sound.sampling_rate for sound in sounds]))
    return _of_lengths(seconds, items, rate, decode_seconds=decode_seconds, labels=labels)


# ------------------------------------------------------------------------------------------------------ folders


def _profile_folder(folder: Path, seed: int) -> DatasetProfile:
    """Profiles a folder by the headers of its files; a few files are decoded to measure the time."""
    check_input_folder(folder, "sounds or pictures")
    files = [folder / path for path in scan(folder, SOUNDS | PICTURES).paths]
    sounds = [path for path in files if path.suffix.lower() in SOUNDS]
    files = sounds or files
    if not files:
        raise UserError(f"{folder}: no sounds and no pictures", hint="pass a folder of .wav, .flac, .png or .jpg files")
    found = _in_time((_sound_header if sounds else _picture_header)(path) for path in _shuffled(files, seed))
    load = _decode_file if sounds else _decode_picture
    _, decode_seconds = _timed(lambda number: load(files[number]), range(min(TIMED, len(files))))
    if sounds:
        return _of_sounds(found, len(files), decode_seconds)
    return _of_shapes("pictures", found, len(files), decode_seconds)


def _sound_header(file: Any) -> ClipLength:
    import soundfile

    try:
        header = soundfile.info(file)
    except soundfile.LibsndfileError as error:
        name = file if isinstance(file, (str, Path)) else "a sound"
        raise UserError(f"{name}: {error.error_string}", hint="remove it from the data, or replace it") from None
    return ClipLength(header.frames / header.samplerate, header.samplerate)


def _decode_file(file: Any) -> None:
    import soundfile

    soundfile.read(file, dtype="float32")


def _picture_header(path: Path) -> TensorShape:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as picture:
            return _shape_of_picture(picture)
    except (OSError, UnidentifiedImageError) as error:
        raise UserError(f"{path}: {error}", hint="remove it from the data, or replace it") from None


def _decode_picture(path: Path) -> None:
    from PIL import Image

    with Image.open(path) as picture:
        picture.load()


def _shape_of_picture(picture: Any) -> TensorShape:
    width, height = picture.size
    return TensorShape((len(picture.getbands()), height, width), "float32")


# -------------------------------------------------------------------------------------------------------- items


def _profile_items(dataset: Any, seed: int) -> DatasetProfile:
    """Profiles a random sample of the items, or all of them if they are few."""
    order = [int(number) for number in _shuffled(range(len(dataset)), seed)[:MOST_DECODED]]
    first, decode_seconds = _timed(lambda number: _look(dataset[number]), order[:TIMED])
    found = [*first, *_in_time(_look(dataset[number]) for number in order[len(first) :])]
    if isinstance(found[0], ClipLength):
        return _of_sounds(found, len(dataset), decode_seconds, labels_of(dataset[order[0]]))
    kind: DataKind = "pictures" if isinstance(found[0], TensorShape) and len(found[0].shape) == 3 else "tensors"
    return _of_shapes(kind, found, len(dataset), decode_seconds)


def _of_shapes(kind: DataKind, found: list[Any], items: int, decode_seconds: float) -> DatasetProfile:
    """Profiles items that are trees of TensorShape."""
    sizes = [sum(leaf.bytes for leaf in leaves(tree)) for tree in found]
    if not max(sizes):
        raise UserError(
            "the items of the dataset contain no tensors, no pictures and no sounds",
            hint="pass a list of lengths in seconds, or a dataset whose items are what the model takes",
        )
    largest = found[sizes.index(max(sizes))]
    return DatasetProfile(
        kind, items, len(found), np.empty(0), largest, float(np.mean(sizes)), decode_seconds=decode_seconds
    )


def _look(item: Any) -> Any:
    """Returns an item as a ClipLength or a tree of TensorShape; decodes it if need be."""
    if isinstance(item, Mapping):
        if "audio" in item:
            return _look_at_sound(item["audio"])
        if "array" in item and "sampling_rate" in item:
            return _look_at_sound(item)
        picture = next((item[name] for name in ("pixel_values", "image", "img") if name in item), None)
        if hasattr(picture, "getbands"):
            return _shape_of_picture(picture)
        if "input_values" in item and len(item) <= 4:
            return ClipLength(np.shape(item["input_values"])[-1] / SAMPLING_RATE, SAMPLING_RATE)
        return {name: _look(value) for name, value in item.items()}
    if is_waveform(item):
        return ClipLength(item[0].shape[-1] / item[1], item[1])
    if isinstance(item, (tuple, list)) and not all(map(_is_number, item)):
        first = _look(item[0])  # The others are labels, because a model has one input.
        return first if isinstance(first, (TensorShape, ClipLength)) else [first]
    if hasattr(item, "getbands"):
        return _shape_of_picture(item)
    if hasattr(item, "get_all_samples"):
        return _look_at_sound(item)
    if hasattr(item, "shape") and hasattr(item, "dtype"):
        return TensorShape(tuple(item.shape), str(item.dtype).removeprefix("torch."))
    if isinstance(item, (tuple, list)) and item:
        return TensorShape((len(item),), "int64" if isinstance(item[0], int) else "float32")
    return None


def _look_at_sound(sound: Any) -> ClipLength:
    """Returns the length of a sound that `sound_of` can decode. Encoded ones are decoded too, because it is timed."""
    if isinstance(sound, Mapping) and sound.get("array") is None and (sound.get("bytes") or sound.get("path")):
        encoded = sound.get("bytes")
        found = _sound_header(BytesIO(encoded) if encoded else sound["path"])
        _decode_file(BytesIO(encoded) if encoded else sound["path"])
        return found
    decoded = sound_of({"audio": sound})
    return ClipLength(decoded.seconds, decoded.sampling_rate)


def leaves(tree: Any) -> list[TensorShape]:
    """Returns the shapes of a tree, in order."""
    if isinstance(tree, TensorShape):
        return [tree]
    inside = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, (list, tuple)) else ()
    return list(itertools.chain.from_iterable(map(leaves, inside)))


# --------------------------------------------------------------------------------------------------- in time


def _shuffled(things: Any, seed: int) -> list[Any]:
    return [things[number] for number in np.random.default_rng(seed).permutation(len(things))]


def _in_time(found: Iterable[Any]) -> list[Any]:
    """Returns the results until the time limit, at least one."""
    until = time.perf_counter() + PATIENCE_SECONDS
    kept = []
    for thing in found:
        kept.append(thing)
        if time.perf_counter() >= until:
            break
    return kept


def _timed(load: Callable[[int], Any], order: Iterable[int]) -> tuple[list[Any], float]:
    """Returns the loaded items and the seconds for one. The first is not timed, because it also opens files and imports
    libraries."""
    found, took = [], []
    until = time.perf_counter() + PATIENCE_SECONDS
    for number in order:
        began = time.perf_counter()
        found.append(load(number))
        took.append(time.perf_counter() - began)
        if time.perf_counter() > until:
            break
    return found, float(np.mean(took[1:] or took))
