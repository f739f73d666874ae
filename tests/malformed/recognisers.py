"""Malformed prepared speech, models, recordings and language models of recognisers."""

import json
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from gputrain.engine import checkpoint as engine_checkpoint
from tests.asr.models import run_folder, transformers_folder
from tests.asr.stores import spelled_clips, write_store
from tests.malformed.case import Case
from tests.malformed.files import field, rewritten, to_bytes, without
from tests.malformed.media import flipped, sound_bytes, wav
from tests.small_runs import small_run

Made = tuple[list[object], Path]
Damage = Callable[[Path], Path]


@cache
def intact(kind: str) -> Path:
    """Writes a good store, run or folder of transformers once, and returns its place."""
    place = Path(tempfile.mkdtemp()) / kind
    if kind == "store":
        return write_store(place, spelled_clips(6))
    return run_folder(place) if kind == "run" else transformers_folder(place)


def text(key: str, value: object) -> Damage:
    """Returns a change of the file that describes the texts of a store."""
    return rewritten(lambda rows: rows[0].__setitem__(key, value), "text.json")


def vocabulary(key: str, value: object) -> Damage:
    """Returns a change of the symbols that a store's recogniser writes."""
    return rewritten(lambda rows: rows[0]["frontend"].__setitem__(key, value), "text.json")


STORES: dict[str, tuple[Damage, str]] = {
    "an empty vocabulary": (vocabulary("symbols", []), ""),
    "a vocabulary of the blank alone": (vocabulary("symbols", ["<pad>"]), ""),
    "a vocabulary without a letter of its texts": (vocabulary("symbols", ["<pad>", "<unk>", "|"]), ""),
    "a vocabulary of numbers": (vocabulary("symbols", [1, 2, 3]), ""),
    "a vocabulary with a symbol twice": (vocabulary("symbols", ["<pad>", "<unk>", "|", "a", "a", "b"]), ""),
    "a blank outside the vocabulary": (vocabulary("blank", 99), ""),
    "a vocabulary of an unknown language": (vocabulary("language", 7), ""),
    "speech of 22050 Hz": (text("sampling_rate", 22050), "22050 Hz"),
    "speech of 0 Hz": (text("sampling_rate", 0), ""),
    "frames of 256 samples": (text("hop_size", 256), "256 samples a frame"),
    "speech of an unknown kind": (text("kind", "cat"), ""),
    "a text longer than its clip": (field(1, "normalized", "a" * 500), ""),
    "a text of a number": (field(1, "normalized", 7), ""),
    "an empty text": (field(1, "normalized", ""), ""),
    "a clip of a negative length": (field(1, "samples", -5), ""),
    "a clip of 3 samples": (field(1, "samples", 3), ""),
    "no texts": (without("text.json"), ""),
    "no manifest": (without("manifest.jsonl"), ""),
    "a manifest cut off": (to_bytes("manifest.jsonl", lambda content: content[:-20]), ""),
    "waves cut off": (to_bytes("waves.i16", lambda content: content[:-1000]), ""),
}


def store(damage: Damage) -> Callable[[Path], Made]:
    def make(folder: Path) -> Made:
        shutil.copytree(intact("store"), folder / "data")
        path = damage(folder / "data")
        words = ["--preset", "tiny", "--max-steps", 2, "--device", "cpu", "--num-workers", 0, "--no-plan"]
        words += ["--batch-size", 2, "--mask-time-length", 2, "--sample-every-steps", 0]
        return ["train-asr", "--data-path", folder / "data", "--output-dir", folder / "out", *words], path

    return make


# ---------------------------------------------------------------------------------------------------------- models


def words_of(use: str, model: Path, folder: Path) -> list[object]:
    """Returns a command that reads a model."""
    if use == "transcribe":
        (folder / "in").mkdir()
        (folder / "in" / "a.wav").write_bytes(sound_bytes(1.0))
        return ["transcribe", "--model", model, "--input", folder / "in", "--device", "cpu"]
    if use == "evaluate":
        return ["evaluate", "--model", model, "--data-path", intact("store"), "--device", "cpu"]
    if use == "export":
        return ["export", "--model", model, "--format", "transformers", "--output-dir", folder / "out"]
    words = ["train-asr", "--data-path", intact("store"), "--output-dir", folder / "out", "--init-from", model]
    return [*words, "--max-steps", 1, "--device", "cpu", "--no-plan"]


def model(kind: str, damage: Damage, use: str) -> Callable[[Path], Made]:
    def make(folder: Path) -> Made:
        place = folder / "model"
        if kind == "nothing":
            place.mkdir()
        else:
            shutil.copytree(intact(kind), place)
        return words_of(use, place, folder), damage(place)

    return make


def written(name: str, content: str | bytes) -> Damage:
    def damage(place: Path) -> Path:
        (place / name).write_bytes(content.encode() if isinstance(content, str) else content)
        return place

    return damage


def of_folder(damage: Damage) -> Damage:
    """Returns a damage for which the message may name the folder instead of the file."""
    return lambda place: (damage(place), place)[1]


def gone(place: Path) -> Path:
    shutil.rmtree(place)
    return place


def configured(key: str, value: object) -> Damage:
    def damage(place: Path) -> Path:
        content = json.loads((place / "config.json").read_text())
        (place / "config.json").write_text(json.dumps({**content, key: value}))
        return place

    return damage


def checkpointed(change: Callable[[dict[str, Any]], object]) -> Damage:
    def damage(place: Path) -> Path:
        path = place / "checkpoint_last.pt"
        content = torch.load(path, weights_only=True)
        change(content)
        engine_checkpoint.save(place, content)
        return path

    return damage


def shrunk(name: str) -> Damage:
    return of_folder(to_bytes(name, lambda content: content[: len(content) // 2]))


def narrowed(content: dict[str, Any]) -> None:
    weights = content["modules"]["recogniser"]
    weights["lm_head.weight"] = weights["lm_head.weight"][:, :-1]


MODELS: dict[str, tuple[str, Damage, str]] = {
    "a folder that is gone": ("nothing", gone, ""),
    "an empty folder": ("nothing", lambda place: place, ""),
    "a folder of recordings": ("nothing", written("a.wav", sound_bytes(1.0)), ""),
    "a folder with a configuration alone": ("nothing", written("config.json", "{}"), ""),
    "a configuration that is no JSON": ("transformers", written("config.json", "{,"), ""),
    "a configuration of a list": ("transformers", written("config.json", "[1]"), ""),
    "a model of another type": ("transformers", configured("model_type", "bert"), "bert"),
    "a model of an unknown type": ("transformers", configured("model_type", "cat"), ""),
    "frames of another length": ("transformers", configured("conv_stride", [5, 2, 2, 2, 2, 2, 4]), "samples apart"),
    "a width that its weights do not have": ("transformers", configured("hidden_size", 24), "other shapes"),
    "no vocabulary": ("transformers", of_folder(without("vocab.json")), ""),
    "an empty vocabulary": ("transformers", written("vocab.json", "{}"), ""),
    "a vocabulary of a list": ("transformers", written("vocab.json", '["a"]'), ""),
    "a vocabulary of texts for numbers": ("transformers", written("vocab.json", '{"a": "b"}'), ""),
    "a vocabulary larger than the head": (
        "transformers", written("vocab.json", json.dumps({chr(97 + n): n for n in range(900)})), "",
    ),
    "weights cut off": ("transformers", shrunk("model.safetensors"), ""),
    "weights of zeros and ones": ("transformers", written("model.safetensors", bytes(range(256)) * 9), ""),
    "a checkpoint of a VAE": (
        "nothing", lambda place: Path(shutil.copy(small_run("vae") / "run/checkpoint_last.pt", place)), "",
    ),
    "a checkpoint cut off": ("run", to_bytes("checkpoint_last.pt", lambda content: content[:-9000]), ""),
    "a checkpoint with a flipped bit": ("run", to_bytes("checkpoint_last.pt", flipped), ""),
    "a checkpoint without a vocabulary": ("run", checkpointed(lambda one: one["facts"].pop("text")), ""),
    "a checkpoint of an empty vocabulary": (
        "run", checkpointed(lambda one: one["facts"]["text"].update(symbols=[])), "",
    ),
    "a checkpoint without an architecture": ("run", checkpointed(lambda one: one["facts"].pop("architecture")), ""),
    "a checkpoint of no architecture": (
        "run", checkpointed(lambda one: one["facts"].update(architecture={"hidden_size": "wide"})), "",
    ),
    "a checkpoint of other weights": ("run", checkpointed(narrowed), ""),
    "a weight of nan": (
        "run", checkpointed(lambda one: one["modules"]["recogniser"]["lm_head.bias"].fill_(float("nan"))), "finite",
    ),
}  # fmt: skip
USES = ("transcribe", "evaluate", "export", "train-asr")


# ------------------------------------------------------------------------------------ recordings and language models


def transcribed(name: str, content: bytes, *more: object, good: bool = True) -> Callable[[Path], Made]:
    def make(folder: Path) -> Made:
        (folder / "in").mkdir()
        (folder / "in" / name).write_bytes(content)
        if good:
            (folder / "in" / "a.wav").write_bytes(sound_bytes(1.0))
        words = ["transcribe", "--model", intact("run"), "--input", folder / "in", "--json", folder / "o.json"]
        return [*words, "--device", "cpu", *more], folder / "in" / name

    return make


RECORDINGS: dict[str, bytes] = {
    "empty": b"",
    "text as a sound": b"<html>404 Not Found</html>" * 20,
    "shorter than a frame": wav(b"\1\0" * 300),
    "rate of 0 Hz": wav(bytes(32000), rate_hz=0),
}


def cases() -> list[Case]:
    found = [Case("prepared data of asr", title, store(damage), says) for title, (damage, says) in STORES.items()]
    for number, (title, (kind, damage, says)) in enumerate(MODELS.items()):
        # A VAE is evaluated as what it is.
        use = USES[number % len(USES)] if title != "a checkpoint of a VAE" else "transcribe"
        found.append(Case(f"recogniser, {use}", title, model(kind, damage, use), says))
    for title, content in RECORDINGS.items():
        found.append(Case("recording to transcribe", title, transcribed("bad.wav", content), code=0))
        found.append(Case("recording to transcribe", f"alone, {title}", transcribed("bad.wav", content, good=False)))
    return found
