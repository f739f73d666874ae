"""Sounds in the items of datasets, decoded or not. Imports no torch, and no dataset library.

Shape suffix: T samples.
"""

from collections.abc import Mapping
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np

from gputrain.errors import UserError

SAMPLING_RATE = 16_000  # Hz; that of speech models, used if the data has none.
TEXT_KEYS = {
    "text", "sentence", "transcript", "transcription", "normalized", "normalized_text", "raw_text", "target_text"
}  # fmt: skip


class Sound(NamedTuple):
    wave_T: Any  # Array or tensor, (T,) or (channels, T).
    sampling_rate: int  # Hz

    @property
    def samples(self) -> int:
        return int(np.shape(self.wave_T)[-1])

    @property
    def seconds(self) -> float:
        return self.samples / self.sampling_rate


def is_waveform(item: Any) -> bool:
    """Returns True for items of the form (wave, sampling rate, ...), as in torchaudio's datasets."""
    return (
        isinstance(item, tuple)
        and len(item) > 1
        and hasattr(item[0], "shape")
        and isinstance(item[1], int)
        and 4000 <= item[1] <= 192_000
        and len(item[0].shape) in (1, 2)
    )


def sound_of(item: Any) -> Sound:
    """Returns the decoded sound of an item. Raises UserError if the item has none."""
    if is_waveform(item):
        return Sound(item[0], item[1])
    if isinstance(item, Mapping) and "audio" in item:
        return _decoded(item["audio"])
    if isinstance(item, Mapping) and "array" in item and "sampling_rate" in item:
        return _decoded(item)
    if isinstance(item, Mapping) and "input_values" in item:
        return Sound(np.asarray(item["input_values"]), SAMPLING_RATE)
    raise UserError(
        f"an item of the dataset is a {type(item).__name__} without a sound",
        hint="items need a column audio, a column input_values, or the form (wave, sampling rate, ...)",
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
        wave_T, rate = soundfile.read(BytesIO(encoded) if encoded else sound["path"], dtype="float32")
        return Sound(wave_T.T, int(rate))
    raise UserError(
        f"the column audio contains {type(sound).__name__}",
        hint="give it dicts of array and sampling_rate, or pass a list of lengths in seconds",
    )


def with_sound(item: Any, sound: Sound) -> Any:
    """Returns the item with another sound in place of its own."""
    if is_waveform(item):
        return (sound.wave_T, sound.sampling_rate, *item[2:])
    decoded = {"array": sound.wave_T, "sampling_rate": sound.sampling_rate}
    if "audio" in item:
        path = {"path": item["audio"].get("path")} if isinstance(item["audio"], Mapping) else {}
        return {**item, "audio": {**path, **decoded}}
    return {**item, **decoded} if "array" in item else {**item, "input_values": sound.wave_T}


def labels_of(item: Any) -> str:
    """Returns the name of what belongs to the whole sound of an item, so that a piece would not have it; empty if there
    is nothing such. A number, such as that of a speaker, belongs to every piece."""
    if is_waveform(item):
        return next(("its text" for value in item[2:] if isinstance(value, str)), "")
    if not isinstance(item, Mapping):
        return ""
    for name, value in item.items():
        if name in ("audio", "array", "input_values"):
            continue
        if name.lower() in TEXT_KEYS or (np.ndim(value) and not isinstance(value, (str, bytes, Mapping))):
            return str(name)
    return ""
