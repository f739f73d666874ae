"""Numbers as people write them, and commands as shells read them, for what is printed and drawn."""

import math
import os
import shlex
import subprocess


def format_number(value: float, digits: int = 3) -> str:
    """Returns a number with about so many significant digits, without an exponent: 0.0123, 1.23, 31.2, 1,234."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    exponent = math.floor(math.log10(abs(value)))
    if exponent < -6:
        return f"{value:.{digits - 1}e}"
    text = f"{value:,.{max(0, digits - 1 - exponent)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def format_bytes(count: int) -> str:
    """Returns a size in three digits: "7.29 kB", "335 MB", "1.2 GB" (1 GB = 1e9 bytes)."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= 0.9995 * size:
            return f"{format_number(count / size)} {unit}"
    return f"{count} bytes"


def format_rate(per_second: float, items: str) -> str:
    """Returns a speed in items, a noun in the plural: "4 images/s", and below one a second "7.5 s an image"."""
    if not 0 < per_second < 1:
        return f"{format_number(per_second)} {items}/s"
    article = "an" if items[0] in "aeiou" else "a"
    return f"{format_number(1 / per_second)} s {article} {items.removesuffix('s')}"


def counted(count: int, noun: str, many: str = "") -> str:
    """Returns a count with its noun, and what follows it: "1 file", "3 files", "1 file is", "2 files are"."""
    return f"{count:,} {noun if count == 1 else many or noun + 's'}"


def shell_command(*words: object) -> str:
    """Returns the words of a command, or one of them, such that the shell of this system reads them as they are."""
    texts = [str(word) for word in words]
    return subprocess.list2cmdline(texts) if os.name == "nt" else shlex.join(texts)
