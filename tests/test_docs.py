"""The documentation says what the program does."""

import re
from pathlib import Path

from gputrain.cli import reference
from gputrain.config import leaves
from gputrain.vae.config import TrainVae

ROOT = Path(__file__).parent.parent


def test_option_tables_are_current():
    assert reference.PAGE.read_text(encoding="utf-8") == reference.page(), "run `make docs`"


def test_every_flag_in_readme_and_scripts_exists():
    known = {leaf.flag for leaf in leaves(TrainVae).values()} | {"--config", "--profile-name"}
    for name in ("train_rtx5090.sh", "train_rtx5090.bat"):
        flags = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", (ROOT / name).read_text(encoding="utf-8")))
        assert flags, name
        assert flags <= known, name
    everything = reference.page()
    written = ("README.md", "docs/vae.md", "docs/vocoder.md")
    pages = "".join((ROOT / name).read_text(encoding="utf-8") for name in written)
    lines = re.findall(r"^gputrain .*(?:\\\n.*)*", pages, re.MULTILINE)
    assert len(lines) > 10
    for text in (*lines, *re.findall(r"`(--[a-z][^`]*)`", pages)):
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", text):
            known_as = flag.replace("--no-", "--") if flag != "--no-" else "--config"
            assert f"`{known_as}`" in everything or known_as in ("--help", "--config", "--version", "--torch"), flag
