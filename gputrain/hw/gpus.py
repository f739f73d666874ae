"""Known GPUs by name, from gpus.yaml. They serve to plan without the GPU, never to decide about a run on it."""

import difflib
import functools
import re
from dataclasses import dataclass, field, replace
from importlib.resources import files
from typing import Any

import yaml

from gputrain.errors import UserError
from gputrain.hw.driver import NO_DRIVER
from gputrain.hw.probe import Machine

# Words that drivers, shops or users add to a name and that do not distinguish GPUs.
EMPTY_WORDS = {"nvidia", "geforce", "tesla", "generation", "blackwell", "workstation", "edition"}
EMPTY_WORDS |= {"gpu", "with", "design", "ac", "sxm", *(f"sxm{number}" for number in range(2, 7))}
EMPTY_WORDS |= {"hbm2", "hbm2e", "hbm3", "hbm3e", "dgxs", "grid", "lite", "hash", "rate", "google", "colab", "kaggle"}
GRACE_GB = 480  # Memory of the processor, in the names of the superchips.
SERIES = ("rtx", "gtx", "gt", "quadro")  # Users leave them out.
TIMES = re.compile(r"(?<!\S)([1-9]\d?) ?[x×] ?(?=\w)|(?<=[\d\s])[x×] ?([1-9]\d?)$", re.IGNORECASE)  # "2x T4", "T4 x2".


@dataclass(frozen=True)
class Gpu:
    """Published figures of a GPU. None means not supported, or that published figures disagree (see `note`)."""

    key: str  # Short name, such as "rtx5090", or "a100-40" if GPUs of one name differ in memory.
    name: str
    memory_gb: float  # Nominal size.
    compute_capability: tuple[int, int]
    bandwidth_gb_s: float
    source: str  # Address of the vendor's document.
    bf16_tflops: float | None = None  # Rate of dense products, accumulated in fp32.
    fp16_tflops: float | None = None
    tf32_tflops: float | None = None
    fp32_tflops: float | None = None  # Rate without tensor cores.
    least_bf16_tflops: float | None = None  # The lowest published rate, if they disagree.
    multiprocessors: int = 0  # 0: unknown.
    l2_mb: float = 0.0  # Second-level cache, in MiB, as vendors count it; 0: unknown.
    # What others have measured in long products and copies, where that is less than cards of other sizes reach: TFLOPS
    # by precision, GB/s under "gb_s".
    sustained: dict[str, float] = field(default_factory=dict, hash=False)
    sustained_source: str = ""
    note: str = ""

    def flops_per_second(self, precision: str) -> float | None:
        """Return the published rate of a matrix product in "bf16", "fp16", "tf32" or "fp32", or the
        lowest one in "least_bf16"; None if it is unknown."""
        tflops: float | None = getattr(self, f"{precision}_tflops")
        return 1e12 * tflops if tflops else None

    def installed_in(self, machine: Machine) -> Machine:
        """Return a Linux machine with the cores and RAM of `machine`, all that training needs, and this GPU."""
        major, minor = self.compute_capability
        return replace(
            machine,
            system="Linux",
            gpu=self.name,
            gpu_memory_gb=self.memory_gb,
            gpu_free_gb=self.memory_gb,
            compute_capability=self.compute_capability,
            compiled_capabilities=(f"sm_{major}{minor}",),
            triton=True,
            compiler="g++",
            driver=NO_DRIVER,
            gpu_error="",
            visible_devices=None,
        )


@functools.cache
def known_gpus() -> dict[str, Gpu]:
    """Return all GPUs by key; a GPU that is sold with several sizes of memory is listed once for each."""
    text = files("gputrain.hw").joinpath("gpus.yaml").read_text(encoding="utf-8")
    cards = [card for key, facts in yaml.safe_load(text).items() for card in _sizes(key, facts)]
    return {card.key: card for card in cards}


def _sizes(key: str, facts: dict[str, Any]) -> list[Gpu]:
    """Return a GPU for each size of memory. Facts that are lists have one value for each."""
    sizes = facts["memory_gb"]
    major, minor = facts["compute_capability"].split(".")
    found = []
    for place, size in enumerate(sizes):
        own = {name: value[place] if isinstance(value, list) else value for name, value in facts.items()}
        own |= {"key": f"{key}-{size}" if len(sizes) > 1 else key, "compute_capability": (int(major), int(minor))}
        found.append(Gpu(**own))
    return found


def find_gpu(name: str) -> Gpu:
    """Find a GPU by a name as users and drivers write it: "rtx4090", "RTX 4090", "NVIDIA A100-SXM4-40GB", "a100-40".

    Without a size, the one that has this very name is returned, else that with the smallest memory. Raises UserError,
    with close names, if none is known.
    """
    words, size = _read(name)
    # The driver names the slot also of cards that have one form only.
    without_slot = words.replace("pcie", "")
    found = [card for card in known_gpus().values() if words in _short_names(card)]
    found = found or [card for card in known_gpus().values() if without_slot in _short_names(card)]
    size = None if size == GRACE_GB else size
    fitting = [card for card in found if size in (None, card.memory_gb)]
    if fitting:
        return min(fitting, key=lambda card: (size is None and card.key not in _short_names(card), card.memory_gb))
    by_memory = f"--vram-gb {size or 16:g}, in Python vram_gb={size or 16:g}"
    if found:
        sizes = " or ".join(f"{card.memory_gb:g}" for card in found)
        hint = f"use {found[0].key}, or plan by memory: {by_memory}"
        raise UserError(f"unknown GPU {name!r}: {found[0].name} has {sizes} GB", hint=hint)
    if words.endswith("mig"):
        raise UserError(f"{name!r} is a slice of a GPU", hint=f"it is planned by its memory: {by_memory}")
    close = difflib.get_close_matches(words or name, known_gpus(), n=3, cutoff=0.5)
    meant = f"did you mean {' or '.join(close)}?" if close else "gputrain plan train-vae --all-gpus lists them"
    hint = f"{meant}; a card that is not listed is planned by its memory: {by_memory}"
    raise UserError(f"unknown GPU {name!r}", hint=hint)


def count_gpus(name: str) -> tuple[str, int]:
    """Return the name of one GPU, and how many of it a name such as "T4 x2" or "8x H100" means."""
    found = TIMES.search(name.strip())
    return (TIMES.sub("", name.strip()).strip(), int(found[1] or found[2])) if found else (name, 1)


def smallest_gpu(memory_gb: float) -> Gpu | None:
    """Return the known GPU with the least memory that is enough, the fastest of its size; laptops' are left out."""
    cards = [card for card in known_gpus().values() if "Laptop" not in card.name and "Max-Q" not in card.name]
    enough = [card for card in cards if card.memory_gb >= memory_gb]
    return min(enough, key=lambda card: (card.memory_gb, -card.bandwidth_gb_s), default=None)


def _short_names(card: Gpu) -> set[str]:
    words, _ = _read(card.key)
    short = {words, *(words.removeprefix(series) for series in SERIES)}
    return short | {name.removeprefix("rtx") for name in short}


def _read(name: str) -> tuple[str, float | None]:
    """Split a name into the words that matter, joined, and its memory: "NVIDIA A100-SXM4-40GB" is ("a100", 40)."""
    kept: list[str] = []
    size = None
    name = re.sub(r"\b(\d+)(?: gb|g)\b|(?<=-)(\d+)[qc]\b", r"\1\2gb", name.lower())  # 24Q: a virtual GPU.
    name = re.sub(r"\bmobile\b", "laptop", name.replace("kaggle p100", "p100 pcie 16gb"))
    for dash, word, unit in re.findall(r"(-?)([a-z0-9]+?)(gb|(?![a-z0-9]))", name):
        # A number alone is a model (RTX 4090). After a dash it is a size (a100-40), unless it is too long (rtx-4090).
        if word.isdecimal() and kept and (unit or (dash and len(word) <= 3)):
            size = float(word)
        elif word + unit not in EMPTY_WORDS:
            kept.append(word + unit)
    return "".join(kept), size
