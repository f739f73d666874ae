"""Writes docs/vocoder_keys.md from the table of openvpi's keys: `python -m tests.vocoder.keys_page`."""

from pathlib import Path

from gputrain.translation import NOTHING, Key
from gputrain.vocoder.openvpi import known_keys

PAGE = Path(__file__).parents[2] / "docs" / "vocoder_keys.md"
HEAD = """# Keys of openvpi's configurations

This page lists every key of openvpi/SingingVocoders' NSF-HiFiGAN configurations and its meaning in
`gputrain train-vocoder --config` and `gputrain prepare-data --config`. A key may be in its block or written with a dot,
`binarization_args.num_workers: 16`; a file may also contain keys of gputrain. The files of `base_config` are searched
next to the file, in its parent folder, in the folder above `configs`, and among those that come with gputrain. null is
an error unless the remark says otherwise.

<!-- Written by `python -m tests.vocoder.keys_page`; a test fails when it is stale. -->
"""


def render_keys_page() -> str:
    titles = {"honoured": "Supported", "met": "Without effect"}
    text = HEAD
    for fate, title in titles.items():
        rows = "".join(render_key_row(key) for key in known_keys().values() if key.fate == fate)
        text += f"\n## {title}\n\n| key | command | becomes | remark |\n|---|---|---|---|\n{rows}"
    return text


def render_key_row(key: Key) -> str:
    commands = {"train": "train-vocoder", "prepare": "prepare-data"}
    names = ", ".join(f"`{option}`" for option in key.options)
    where = ", ".join(commands[command] for command in key.of)
    null = "" if key.null_is is NOTHING else f"null is {'0' if key.null_is == 0 else 'none'}."
    return f"| `{key.name}` | {where} | {key.words or names} | {' '.join(filter(None, (key.remark, null)))} |\n"


if __name__ == "__main__":
    PAGE.write_text(render_keys_page(), encoding="utf-8")
