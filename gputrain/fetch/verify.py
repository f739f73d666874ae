"""Verifies files by their size and SHA-256."""

import hashlib
from pathlib import Path


def sha256(path: Path) -> str:
    """Returns the SHA-256 of a file, in hexadecimal. Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def fault_of(path: Path, size: int | None = None, digest: str = "") -> str:
    """Returns how a file differs from its stated size and SHA-256, of which either may be unknown; nothing if it does
    not. Raises OSError."""
    found = path.stat().st_size
    if size is not None and found != size:
        return f"has {found:,} bytes, expected {size:,}"
    if digest and (actual := sha256(path)) != digest:
        return f"its SHA-256 is {actual}, expected {digest}"
    return ""
