"""Writes the pages of docs/ on the keys of openvpi and Coqui from their tables: `python -m tests.keys_page`."""

from collections.abc import Iterable
from pathlib import Path

from gputrain.translation import NOTHING, Key, same_value
from gputrain.tts import coqui
from gputrain.tts.config import SPELLINGS
from gputrain.vocoder import openvpi

DOCS = Path(__file__).parents[1] / "docs"
WRITTEN = "\n<!-- Written by `python -m tests.keys_page`; a test fails when it is stale. -->\n"
OPENVPI = """# Keys of openvpi's configurations

This page lists every key of openvpi/SingingVocoders' NSF-HiFiGAN configurations and its meaning in
`gputrain train-vocoder --config` and `gputrain prepare-data --config`. A key may be in its block or written with a dot,
`binarization_args.num_workers: 16`; a file may also contain keys of gputrain. The files of `base_config` are searched
next to the file, in its parent folder, in the folder above `configs`, and among those that come with gputrain. null is
an error unless the remark says otherwise.
"""
COQUI = """# Keys of Coqui's configurations

Train with a configuration that was written for Coqui's VITS: this page lists what becomes of each of its keys.

```bash
gputrain train-tts --config config.yaml --data-path ./data/dilnoza
```

The file is YAML or JSON; sections are flattened, and keys of gputrain may stand among the others. The `config.json`
that Coqui's trainer writes beside a VITS voice can be given as it is, with `--data-path`: its architecture is
`preset: high`, and the first text of each of its `test_sentences` is used. Keys without effect are named when the
training starts, unless a file of Coqui's asks for what is done anyway; they may be null, other keys only where the
remark says so. Any other key is an error with a suggestion.
"""


def pages() -> dict[Path, str]:
    """Return the text of each page by its file."""
    spelt = {name: same_value(name, option) for name, option in SPELLINGS.items()}
    made = {
        "vocoder_keys.md": OPENVPI + WRITTEN + "".join(tables(openvpi.known_keys().values(), commands=True)),
        "coqui_keys.md": COQUI + WRITTEN + "".join(tables((spelt | coqui.known_keys()).values(), commands=False)),
    }
    return {DOCS / name: text for name, text in made.items()}


def tables(keys: Iterable[Key], commands: bool) -> Iterable[str]:
    """Yield a table of the supported keys and one of those without effect, with a column of commands or without."""
    columns = ["key", *(["command"] if commands else []), "becomes", "remark"]
    head = f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}\n"
    for fate, title in {"honoured": "Supported", "met": "Without effect"}.items():
        rows: dict[str, list[str]] = {}  # By the rest of the row: keys that become the same.
        for key in keys:
            if key.fate == fate:
                rows.setdefault(row(key, commands), []).append(f"`{key.name}`")
        yield f"\n## {title}\n\n{head}" + "".join(f"| {', '.join(names)} | {rest}" for rest, names in rows.items())


def row(key: Key, commands: bool) -> str:
    """Return the row of a key without its name."""
    where = {"train": "train-vocoder", "prepare": "prepare-data"}
    command = f"{', '.join(where[name] for name in key.of)} | " if commands else ""
    becomes = key.words or ", ".join(f"`{option}`" for option in key.options)
    meant = "the default" if key.null_is is None else "0" if key.null_is == 0 else "none"
    null = "" if key.null_is is NOTHING or key.fate == "met" else f"null is {meant}."
    return f"{command}{becomes} | {' '.join(filter(None, (key.remark, null)))} |\n"


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
