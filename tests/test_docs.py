"""The documentation says what the program does."""

import re
from pathlib import Path

from gputrain.cli import reference
from gputrain.config import leaves
from gputrain.tts import coqui
from gputrain.tts.config import SPELLINGS, TrainTts
from gputrain.vae.config import TrainVae

ROOT = Path(__file__).parent.parent


def test_option_tables_are_current():
    assert reference.PAGE.read_text(encoding="utf-8") == reference.page(), "run `make docs`"


def test_every_flag_in_readme_and_scripts_exists():
    known = {leaf.flag for kind in (TrainVae, TrainTts) for leaf in leaves(kind).values()}
    known |= {"--config", "--profile-name"}
    for name in ("train_rtx5090.sh", "train_rtx5090.bat"):
        flags = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", (ROOT / name).read_text(encoding="utf-8")))
        assert flags, name
        assert flags <= known, name
    everything = reference.page()
    written = ("README.md", "docs/vae.md", "docs/vocoder.md", "docs/voice.md")
    pages = "".join((ROOT / name).read_text(encoding="utf-8") for name in written)
    lines = re.findall(r"^gputrain .*(?:\\\n.*)*", pages, re.MULTILINE)
    assert len(lines) > 10
    for text in (*lines, *re.findall(r"`(--[a-z][^`]*)`", pages)):
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", text):
            known_as = flag.replace("--no-", "--") if flag != "--no-" else "--config"
            assert f"`{known_as}`" in everything or known_as in ("--help", "--config", "--version", "--torch"), flag


def test_the_page_of_the_voice_lists_every_key_of_coquis_configurations():
    page = (ROOT / "docs/voice.md").read_text(encoding="utf-8")
    told: dict[str, list[str]] = {}
    for line in page.split("\n## 3. ")[1].split("\n## ")[0].splitlines():
        if line.startswith("| `"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            told |= dict.fromkeys(re.findall(r"`(\w+)`", cells[0]), cells[1:])
    for key, ours in (SPELLINGS | coqui.FURTHER_SPELLINGS).items():
        assert re.match(rf"`{ours}`", told[key][0]), key
    values: dict[object, object] = {True: "true", False: "false", None: "any"}
    for key, settled in coqui.SETTLED.items():
        assert told[key][0] == values.get(settled.value, settled.value), key
    assert {"memory_format", "betas", "scheduler", "lr_scheduler"} <= told.keys()
