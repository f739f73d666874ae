"""Malformed configurations, stores, checkpoints and plan files: the command ends with 2 and names the file."""

import io
import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.malformed.case import RAN, Case
from tests.malformed.media import flipped, picture_bytes
from tests.small_runs import small_run

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join(8 * [f'*a{n - 1}'])}]\n" for n in range(1, 12)
)
CONFIGS: dict[str, tuple[str | bytes, str]] = {
    "a key twice": ("batch_size: 4\nimage_size: 64\nbatch_size: 8\n", "'batch_size' stands there twice"),
    "a nested key twice": ("Data:\n  image_size: 64\n  image_size: 32\n", "'image_size' stands there twice"),
    "tabs": ("batch_size: 4\n\timage_size: 64\n", "not valid YAML"),
    "billion laughs": (BOMB + "batch_size: *a11\n", "aliases repeat too many values"),
    "an alias of itself": ("channels: &a [*a]\n", "not valid YAML"),
    "an unknown anchor": ("batch_size: *nothing\n", "not valid YAML"),
    "too deeply nested": ("channels: " + "[" * 20000 + "\n", "too deeply nested"),
    "a Python object": ("!!python/object/apply:os.system ['touch ran']\n", "not valid YAML"),
    "a text for a number": ("batch_size: many\n", "batch_size is 'many', expected a whole number"),
    "a fraction for a whole number": ("batch_size: 3.7\n", "expected a whole number"),
    "a list for a number": ("batch_size: [1, 2]\n", "expected a whole number"),
    "a mapping for a number": ("batch_size: {a: 1}\n", "expected a whole number"),
    "a date for a text": ("preset: 2020-01-01\n", "preset is"),
    "a number for a path": ("output_dir: 7\n", "expected a path"),
    "a number for a switch": ("horizontal_flip: 1\n", "expected true or false"),
    "a null": ("batch_size: null\n", "batch_size is null"),
    "NaN": ("learning_rate: .nan\n", "learning_rate is nan"),
    "infinity": ("learning_rate: .inf\n", "learning_rate is inf"),
    "minus infinity": ("learning_rate: -.inf\n", "learning_rate is -inf"),
    "a number beyond floats": ("learning_rate: 1.0e+999\n", "learning_rate is inf"),
    "a number of 5000 digits": ("learning_rate: " + "9" * 5000 + "\n", ""),
    "a whole number beyond 64 bits": ("batch_size: 99999999999999999999\n", "batch_size is 99999999999999999999"),
    "a number out of its range": ("ema_decay: 2\n", "expected 0 to"),
    "a negative number": ("batch_size: -1\n", "expected at least 1"),
    "an unknown key": ("batch_sise: 4\n", "did you mean 'batch_size'"),
    "a number as a key": ("7: 4\n", "expected a mapping"),
    "another kind of model": ("kind: tts\n", "kind is 'tts', expected 'vae'"),
    "an unknown kind of model": ("kind: cat\n", "kind is 'cat'"),
    "a list": ("- batch_size: 4\n", "expected a mapping"),
    "a text": ("batch_size\n", "expected a mapping"),
    "binary": (bytes(range(256)), "not valid YAML"),
    "UTF-16": ("batch_size: 4\n".encode("utf-16"), "not valid YAML"),
    "a NUL in a path": ('output_dir: "a\\0b"\n', "output_dir is"),
    "a control character": ("batch_size: 4\x07\n", "not valid YAML"),
}
JSON_CONFIGS: dict[str, tuple[str, str]] = {
    "JSON with a key twice": ('{"batch_size": 4, "batch_size": 8}', "'batch_size' stands there twice"),
    "JSON with a comma too many": ('{"batch_size": 4,}', "not valid JSON"),
    "JSON too deeply nested": ("[" * 100_000, "too deeply nested"),
    "JSON with NaN": ('{"learning_rate": NaN}', "learning_rate is nan"),
    "JSON with infinity": ('{"learning_rate": Infinity}', "learning_rate is inf"),
}
CONFIG_PATHS: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: None,
    "a folder": lambda path: path.mkdir(),
    "a symbolic link to itself": lambda path: path.symlink_to(path),
    "a device without an end": lambda path: path.symlink_to("/dev/zero"),
}


def train(kind: str, folder: Path, *further: object, data: Path | None = None) -> list[object]:
    return [f"train-{kind}", "--data-path", data or folder / "data", "--output-dir", folder / "out", *further]


def config(content: str | bytes, name: str = "c.yaml") -> Callable[[Path], tuple[list[object], Path]]:
    def make(folder: Path) -> tuple[list[object], Path]:
        path = folder / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return train("vae", folder, "--config", path), path

    return make


def config_path(place: Callable[[Path], object]) -> Callable[[Path], tuple[list[object], Path]]:
    def make(folder: Path) -> tuple[list[object], Path]:
        place(folder / "c.yaml")
        return train("vae", folder, "--config", folder / "c.yaml"), folder / "c.yaml"

    return make


def flag(*words: object) -> Callable[[Path], tuple[list[object], Path]]:
    return lambda folder: (train("vae", folder, *words), folder / str(words[0]))


FLAGS: dict[str, tuple[tuple[object, ...], str]] = {
    "infinity": (("--learning-rate", "inf"), "learning_rate is inf"),
    "NaN": (("--learning-rate", "nan"), "learning"),  # Older versions of typer let NaN pass; gputrain names the key.
    "a number beyond 64 bits": (("--num-steps", "9" * 30), "num_steps is 9"),
    "a number of 5000 digits": (("--num-steps", "9" * 5000), ""),
    "an empty number": (("--batch-size", ""), ""),
    "an unknown option": (("--batch-sise", 4), "--batch-size"),
    "a list with a hole": (("--channels", "32,,32"), "channels is"),
    "a list of infinity": (("--channels", "inf"), "channels is"),
}


# ---------------------------------------------------------------------------------------------------------- stores


def rewritten(change: Callable[[list[Any]], object], name: str = "manifest.jsonl") -> Callable[[Path], Path]:
    """Returns a change of the rows of a file of JSON lines."""

    def damage(data: Path) -> Path:
        path = data / name
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        change(rows)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return damage


def to_bytes(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], Path]:
    def damage(data: Path) -> Path:
        (data / name).write_bytes(change((data / name).read_bytes()))
        return data / name

    return damage


def without(name: str) -> Callable[[Path], Path]:
    def damage(data: Path) -> Path:
        (data / name).unlink()
        return data

    return damage


def field(row: int, key: str, value: object) -> Callable[[Path], Path]:
    return rewritten(lambda rows: rows[row].__setitem__(key, value))


def all_fields(key: str, value: object) -> Callable[[Path], Path]:
    return rewritten(lambda rows: [row.__setitem__(key, value) for row in rows])


STORES: dict[str, dict[str, Callable[[Path], Path]]] = {
    "vocoder": {
        "no manifest": without("manifest.jsonl"),
        "an empty manifest": to_bytes("manifest.jsonl", lambda content: b""),
        "a manifest cut off": to_bytes("manifest.jsonl", lambda content: content[:-20]),
        "a binary manifest": to_bytes("manifest.jsonl", lambda content: bytes(range(256))),
        "a manifest of a format alone": rewritten(lambda rows: rows.__delitem__(slice(1, None))),
        "a manifest of texts for numbers": field(1, "frames", "many"),
        "a manifest of negative lengths": field(1, "frames", -5),
        "a manifest with a huge number": field(1, "first_frame", 10**30),
        "a manifest with an unknown key": field(1, "colour", "red"),
        "a manifest of nulls": field(1, "fingerprint", None),
        "a format of a text for a rate": field(0, "sampling_rate", "fast"),
        "a hop of 0": field(0, "hop_size", 0),
        "no waves": without("waves.i16"),
        "waves cut off": to_bytes("waves.i16", lambda content: content[:-1000]),
        "waves with a flipped bit": to_bytes("waves.i16", lambda content: flipped(flipped(content, 0.2), 0.8)),
        "no pitch": without("f0.f32"),
        "pitch cut off": to_bytes("f0.f32", lambda content: content[:-8]),
        "pitch of another store": to_bytes("f0.f32", lambda content: b"\x7f" * len(content)),
    },
    "tts": {
        "no manifest": without("manifest.jsonl"),
        "an empty manifest": to_bytes("manifest.jsonl", lambda content: b""),
        "a manifest cut off": to_bytes("manifest.jsonl", lambda content: content[:-20]),
        "a manifest of texts for numbers": field(1, "samples", "many"),
        "a manifest of a list for a number": field(1, "samples", [1]),
        "a manifest of fractions": all_fields("samples", 100.5),
        "a manifest with a huge number": field(1, "first_sample", 10**30),
        "a manifest of an unknown speaker": field(1, "speaker", 7),
        "no texts": without("text.json"),
        "texts of another form": to_bytes("text.json", lambda content: b"[1, 2]\n"),
        "texts with a null for a rate": rewritten(lambda rows: rows[0].__setitem__("sampling_rate", None), "text.json"),
        "texts with a hop of 0": rewritten(lambda rows: rows[0].__setitem__("hop_size", 0), "text.json"),
        "texts with a text for speakers": rewritten(lambda rows: rows[0].__setitem__("speakers", 3), "text.json"),
        "no waves": without("waves.i16"),
        "waves cut off": to_bytes("waves.i16", lambda content: content[:-1000]),
        "waves with flipped bits": to_bytes("waves.i16", lambda content: bytes(255 - one for one in content)),
    },
    "vae": {
        "an empty manifest": to_bytes("manifest.jsonl", lambda content: b""),
        "a manifest cut off": to_bytes("manifest.jsonl", lambda content: content[:-20]),
        "a manifest of texts for numbers": all_fields("width", "many"),
        "a manifest of a number for a path": all_fields("path", 7),
        "a manifest of a text for a fingerprint": all_fields("fingerprint", "none"),
        "a manifest of pictures that are gone": all_fields("path", "gone.png"),
        "a manifest of huge numbers": all_fields("bytes", 10**400),
        "not finished": lambda data: ((data / "manifest.jsonl").unlink(), data)[1],
    },
}


def store(kind: str, damage: Callable[[Path], Path]) -> Callable[[Path], tuple[list[object], Path]]:
    def make(folder: Path) -> tuple[list[object], Path]:
        shutil.copytree(small_run(kind) / "data", folder / "data")
        path = damage(folder / "data")
        words = train(kind, folder, "--config", small_run(kind) / "run" / "config.yaml", "--max-steps", 2)
        return words, path

    return make


# ----------------------------------------------------------------------------------------------------- checkpoints


class RunsCode:
    """An object whose unpickling would write a file."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {RAN}",)


def saved(content: object, *, zipped: bool = True) -> bytes:
    file = io.BytesIO()
    torch.save(content, file, _use_new_zipfile_serialization=zipped)
    return file.getvalue()


def zip_bomb() -> bytes:
    """Returns a zip of 200 MB of zeros in the form of a checkpoint."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"format": 1}))
        archive.writestr("archive/data/0", bytes(200_000_000))
    return file.getvalue()


def intact(kind: str) -> bytes:
    """Returns an intact checkpoint."""
    return (small_run(kind) / "run" / "checkpoint_last.pt").read_bytes()


def with_weight(kind: str, value: float) -> bytes:
    """Returns the checkpoint of a kind with one weight of its average replaced."""
    content = torch.load(io.BytesIO(intact(kind)), weights_only=True)
    first = next(one for one in content["modules"]["ema"].values() if one.is_floating_point())
    first.flatten()[0] = value
    return saved(content)


def changed(kind: str, /, **changes: object) -> bytes:
    return saved({**torch.load(io.BytesIO(intact(kind)), weights_only=True), **changes})


CHECKPOINTS: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "truncated or damaged"),
    "cut in half": (lambda: intact("vae")[:60000], "truncated or damaged"),
    "without its last byte": (lambda: intact("vae")[:-1], "truncated or damaged"),
    "with a flipped bit in a weight": (lambda: flipped(intact("vae"), 0.4), "truncated or damaged"),
    "with a flipped bit in its header": (lambda: flipped(intact("vae"), 0.0001), "truncated or damaged"),
    "with another last byte": (lambda: intact("vae")[:-1] + b"!", "truncated or damaged"),
    "twice": (lambda: intact("vae") + intact("vae")[:-3], "truncated or damaged"),
    "text": (lambda: b"404 Not Found\n" * 100, ""),
    "zeros": (lambda: bytes(10000), ""),
    "a tensor of torch": (lambda: saved(torch.zeros(3)), "not a checkpoint"),
    "tensors by name": (lambda: saved({"weight": torch.zeros(3)}), "not a checkpoint"),
    "in the old format of torch": (lambda: saved({"weight": torch.zeros(3)}, zipped=False), ""),
    "a pickle that runs code": (lambda: pickle.dumps(RunsCode()), ""),
    "a zip whose pickle runs code": (lambda: saved({"format": 1, "kind": RunsCode()}), "not a checkpoint"),
    "an empty zip": (lambda: b"PK\x05\x06" + bytes(18), ""),
    "a zip of something else": (lambda: zipped_text(), ""),
    "a zip bomb": (zip_bomb, ""),
    "of another kind": (lambda: intact("vocoder"), "holds a model of kind 'vocoder', expected 'vae'"),
    "of a later format": (lambda: changed("vae", format=99), "not a checkpoint"),
    "without its parts": (lambda: saved({"format": 1, "kind": "vae"}), ""),
    "with other parts": (lambda: changed("vae", modules=3, config=[]), ""),
    "with a number as its kind": (lambda: changed("vae", kind=[7]), ""),
    "with other weights": (lambda: changed("vae", modules={"autoencoder": {"a": torch.zeros(3)}}), ""),
    "with texts for weights": (lambda: changed("vae", modules={"autoencoder": {"a": "b"}, "ema": {"c": 1}}), ""),
    "with an unknown setting": (lambda: changed("vae", config={"data_path": "data", "colour": 7}), ""),
}  # fmt: skip
USES = {"of another kind": ("resume",), "with an unknown setting": ("evaluate",)}  # Where it is an error.
PLACES: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: None,
    "a folder without a checkpoint": lambda path: path.mkdir(),
    "a FIFO": lambda path: os.mkfifo(path),
    "a device without an end": lambda path: path.symlink_to("/dev/zero"),
    "a symbolic link to itself": lambda path: path.symlink_to(path),
}


def zipped_text() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("readme.txt", "nothing")
    return file.getvalue()


def checkpoint(
    content: Callable[[], bytes], use: str, name: str = "c.pt"
) -> Callable[[Path], tuple[list[object], Path]]:
    def make(folder: Path) -> tuple[list[object], Path]:
        (folder / name).write_bytes(content())
        return words_of(use, folder / name, folder), folder / name

    return make


def at_place(place: Callable[[Path], object], use: str) -> Callable[[Path], tuple[list[object], Path]]:
    def make(folder: Path) -> tuple[list[object], Path]:
        place(folder / "c.pt")
        return words_of(use, folder / "c.pt", folder), folder / "c.pt"

    return make


def words_of(use: str, path: Path, folder: Path) -> list[object]:
    """Returns a command that reads a checkpoint of a VAE."""
    data = small_run("vae") / "data"
    if use == "resume":
        words = ("--config", small_run("vae") / "run" / "config.yaml", "--max-steps", 3)
        return train("vae", folder, *words, "--resume-from", path, data=data)
    if use == "evaluate":
        return ["evaluate", "--model", path, "--data-path", data, "--device", "cpu"]
    if use == "export":
        return ["export", "--model", path, "--output-dir", folder / "out"]
    pictures = folder / "pictures"
    pictures.mkdir()
    (pictures / "a.png").write_bytes(picture_bytes())
    return ["reconstruct", "--model", path, "--input", pictures, "--output-dir", folder / "out", "--device", "cpu"]


def damaged_run(change: Callable[[bytes], bytes]) -> Callable[[Path], tuple[list[object], Path]]:
    """Returns a `make` of a run whose newest checkpoint is damaged and whose previous one is intact."""

    def make(folder: Path) -> tuple[list[object], Path]:
        shutil.copytree(small_run("vae") / "run", folder / "out")
        last = folder / "out" / "checkpoint_last.pt"
        shutil.copyfile(last, folder / "out" / "checkpoint_previous.pt")
        last.write_bytes(change(last.read_bytes()))
        words = ("--config", small_run("vae") / "run" / "config.yaml", "--max-steps", 2)
        return train("vae", folder, *words, "--resume-from", "auto", data=small_run("vae") / "data"), last

    return make


def nonfinite(kind: str, value: float) -> Callable[[Path], tuple[list[object], Path]]:
    def make(folder: Path) -> tuple[list[object], Path]:
        path = folder / "c.pt"
        path.write_bytes(with_weight(kind, value))
        if kind == "tts":
            return [
                "speak",
                "--model",
                path,
                "--text",
                "yes",
                "--output-file",
                folder / "o.wav",
                "--device",
                "cpu",
            ], path
        data = small_run(kind) / "data"
        return ["evaluate", "--model", path, "--data-path", data, "--device", "cpu"], path

    return make


def cases() -> list[Case]:
    found = [Case("configuration", title, config(content), says) for title, (content, says) in CONFIGS.items()]
    found += [
        Case("configuration", title, config(text, "c.json"), says) for title, (text, says) in JSON_CONFIGS.items()
    ]
    found += [Case("configuration", title, config_path(place)) for title, place in CONFIG_PATHS.items()]
    found += [Case("option", title, flag(*words), says, names_path=False) for title, (words, says) in FLAGS.items()]
    for kind, damages in STORES.items():
        found += [Case(f"prepared data of {kind}", title, store(kind, one)) for title, one in damages.items()]
    uses = ("resume", "evaluate", "export", "reconstruct")
    for number, (title, (content, says)) in enumerate(CHECKPOINTS.items()):
        for use in USES.get(title, dict.fromkeys(("resume", uses[number % len(uses)]))):
            found.append(Case(f"checkpoint, {use}", title, checkpoint(content, use), says))
    for number, (title, place) in enumerate(PLACES.items()):
        for use in dict.fromkeys(("resume", uses[number % len(uses)])):
            found.append(Case(f"checkpoint, {use}", title, at_place(place, use)))
    found.append(
        Case("checkpoint, resume", "a line break in its name", checkpoint(lambda: b"", "resume", "a\nhint: b.pt"),
             "a\\nhint: b.pt", names_path=False)
    )  # fmt: skip
    for title, change in {
        "cut off": lambda one: one[:9999],
        "with a flipped bit": flipped,
        "empty": lambda one: b"",
    }.items():
        found.append(Case("checkpoint, resume auto", title, damaged_run(change), "checkpoint_previous.pt", code=0))
    for kind in ("vae", "vocoder", "tts"):
        for value in ("nan", "inf"):
            found.append(
                Case(
                    f"checkpoint of {kind}",
                    f"a weight of {value}",
                    nonfinite(kind, float(value)),
                    "not all weights are finite",
                )
            )
    return found
