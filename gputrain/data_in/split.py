"""The held-out split of data, and the digests by which a resumed run notices that data have changed."""

import errno
import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")

MANIFEST = "manifest.jsonl"
HELD_OUT_SHARE = 0.05
FEW_HELD_OUT, FEW_ITEMS = 4, 20  # Fewer held-out items are too few for figures, if there are so many items in all.
FINGERPRINT_BLOCK = 65536  # bytes


def fingerprint(path: Path) -> str:
    """Returns 32 hexadecimal digits of a file's size and its first, middle and last 64 KiB (BLAKE2b).

    Equal content has equal fingerprints; up to 192 KiB the converse holds too. Raises OSError.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file")  # Reading a FIFO or a device might never end.
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest = hashlib.blake2b(size.to_bytes(8, "little"), digest_size=16)
        last = max(0, size - FINGERPRINT_BLOCK)
        for offset in (0, last // 2, last):
            file.seek(offset)
            digest.update(file.read(FINGERPRINT_BLOCK))
    return digest.hexdigest()


def is_held_out(fingerprint: str, share: float) -> bool:
    """Returns True if the fingerprint, read as a fraction, is below the held-out `share`."""
    return int(fingerprint[:16], 16) < share * 2**64


@dataclass(frozen=True)
class Split(Generic[T]):
    """Training and held-out items. `shared`: there is only one item, which is used as both."""

    train: list[T]
    held_out: list[T]
    shared: bool


def split(items: Sequence[T], share: float, key: Callable[[T], str], count: int = 0) -> Split[T]:
    """Hold out a share of the items, or `count` of them, by their fingerprints, `key(item)`, keeping the order on both
    sides.

    Equal fingerprints never part. Where the share alone would leave a side empty, the item with the lowest
    fingerprint is held out, or the one with the highest is trained on.
    """
    kinds = sorted({key(item) for item in items})
    if len(kinds) < 2:
        return Split(list(items), list(items), shared=True)
    count = min(max(1, count or sum(is_held_out(kind, share) for kind in kinds)), len(kinds) - 1)
    lowest = set(kinds[:count])
    train = [item for item in items if key(item) not in lowest]
    return Split(train, [item for item in items if key(item) in lowest], shared=False)


def few_held_out(held_out: int, items: int, noun: str, remedy: str) -> str:
    """Returns a warning if so few of the items are held out that single ones decide what evaluations tell: fewer than
    four where there are twenty, or one; otherwise "". `noun` is that of an item, in the plural."""
    if held_out >= FEW_HELD_OUT or (held_out > 1 and items < FEW_ITEMS):
        return ""
    are, them = ("is", "it") if held_out == 1 else ("are", "them")
    return (
        f"only {held_out} of {items} {noun} {are} held out: every evaluation, the samples and checkpoint_best.pt "
        f"depend on {them}; {remedy}"
    )


def warn_of_few_held_out(parts: Split[Any], noun: str, remedy: str) -> None:
    """Warns if training items are evaluated, or so few held-out ones that single ones decide."""
    held_out = len(parts.held_out)
    if parts.shared:
        log.warning("all data are of one file, which is used both for training and for evaluation")
    elif few := few_held_out(held_out, held_out + len(parts.train), f"{noun}s", remedy):
        log.warning("%s", few)


def digests(**parts: Iterable[object]) -> dict[str, dict[str, Any]]:
    """Returns the number of items and a digest of their descriptions, in order, for each part of the data."""
    found = {}
    for name, items in parts.items():
        digest, count = hashlib.blake2b(digest_size=16), 0
        for item in items:
            digest.update(repr(item).encode("utf-8", "surrogatepass") + b"\n")
            count += 1
        found[name] = {"items": count, "digest": digest.hexdigest()}
    return found
