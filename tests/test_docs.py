"""The documentation agrees with the program: its option tables, its flags, and every command in it."""

import ast
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from gputrain.cli import reference
from gputrain.cli.app import app, command_line
from gputrain.cli.options import settings_of
from gputrain.config import assemble, leaves, to_yaml
from gputrain.tts import coqui
from gputrain.tts.config import SPELLINGS, TrainTts
from gputrain.vae.config import TrainVae
from tests.tables import each_row

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
# Configuration files that the documents name, with their content. They stand for files of the reader.
FILES: dict[str, Callable[[], str]] = {
    "outputs/vae/config.yaml": lambda: to_yaml(assemble(TrainVae, {"data_path": "photos"})),
    "outputs/dilnoza/config.yaml": lambda: to_yaml(assemble(TrainTts, {"data_dir": "data/dilnoza"})),
    "config.yaml": lambda: "epochs: 10\naudio:\n  sample_rate: 22050\n",  # A configuration of Coqui's.
}
# The tests and scripts that truly run each command, as FILE::FUNCTION, or a file that is no test.
RUN_BY = {
    "prepare-data": "tests/cli/test_data_commands.py::test_preprocess_then_validate_as_in_the_guide",
    "validate": "tests/cli/test_data_commands.py::test_preprocess_then_validate_as_in_the_guide",
    "normalize": "tests/cli/test_voice_commands.py::test_normalize_prints_what_a_voice_sees",
    "check-compatibility": "setup.sh",
    "train-vae": "tests/vae/test_use.py::run",
    "train-vocoder": "tests/vocoder/test_train.py::test_the_command_trains_at_the_sizes_of_the_file",
    "train-tts": "tests/cli/test_voice_commands.py::test_from_recordings_to_a_voice",
    "train-asr": "tests/asr/test_train.py::test_train_asr_from_the_command_line",
    "reconstruct": "tests/vae/test_use.py::test_commands_from_a_run_to_stock_diffusers",
    "vocode": "tests/cli/test_model_kind.py::test_the_command_vocodes",
    "speak": "tests/cli/test_voice_commands.py::test_it_is_measured_speaks_into_files_and_is_exported",
    "transcribe": "tests/cli/test_recogniser_commands.py::transcribing",
    "evaluate": "tests/vae/test_use.py::test_commands_from_a_run_to_stock_diffusers",
    "report": "tests/report/test_report.py::test_the_command",
    "export": "tests/vae/test_use.py::test_commands_from_a_run_to_stock_diffusers",
    "demo": "tests/cli/test_demo.py::test_the_vocoders_demo_learns",
    "bench train-vae": "tests/vae/test_bench.py::test_the_command",
    "bench train-vocoder": "tests/vocoder/test_bench.py::test_the_command",
    "bench train-tts": "tests/tts/test_bench.py::test_bench_measures_a_row_of_the_voice_in_its_child",
    "bench train-asr": "tests/asr/test_plan.py::test_bench_train_asr_from_the_command_line",
    "plan train-vae": "tests/vae/test_plan.py::test_a_plan_in_json",
    "plan train-vocoder": "tests/vocoder/test_plan.py::test_the_command_takes_a_configuration_that_comes_along",
    "plan train-tts": "tests/tts/test_plan.py::test_the_command",
    "plan train-asr": "tests/asr/test_plan.py::test_plan_train_asr_from_the_command_line",
}


def commands_of(page: str) -> list[str]:
    """Return the lines of fenced blocks that run gputrain, with continued lines joined."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    lines = [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line.startswith("gputrain ")]


COMMANDS = sorted({line for path in PAGES for line in commands_of(path.read_text(encoding="utf-8"))})


def parsed(line: str) -> tuple[str, object]:
    """Parse a line with the real command line, up to the settings with which the work would begin."""
    words = shlex.split(line, comments=True)[1:]
    words = words[: words.index("|")] if "|" in words else words
    command = command_line()
    names: list[str] = []
    while hasattr(command, "commands"):
        names.append(words.pop(0))
        assert names[-1] in command.commands, f"{line}: no command {' '.join(names)}"
        command = command.commands[names[-1]]
    context = command.make_context(" ".join(names), words)
    name = " ".join(names)
    return name, settings_of(reference.commands(app)[name], context, dict(context.params))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the documents name."""
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content(), encoding="utf-8")
    return tmp_path


@each_row(*COMMANDS)
def test_the_command_line_accepts_every_command_of_the_documents(folder: Path, line: str) -> None:
    name, settings = parsed(line)
    assert type(settings) is reference.commands(app)[name]


def test_a_wrong_option_or_value_of_a_document_is_found(folder: Path) -> None:
    assert len(COMMANDS) > 50
    for line in (
        "gputrain train-vae --data-path d --image-sise 512",
        "gputrain train-vae --data-path d --preset huge",
        "gputrain train-vae --data-path d --image-size 500",
        "gputrain prepare-data --kind voices --input-dir i --output-dir o",
        "gputrain train-tts --config outputs/vae/config.yaml",  # A configuration of a VAE.
        "gputrain export --output-dir o",
    ):
        with pytest.raises(Exception, match=r"image-sise|huge|500|voices|kind|[Mm]issing"):
            parsed(line)


def test_every_command_is_run_by_a_test_or_a_script() -> None:
    assert RUN_BY.keys() == reference.commands(app).keys()
    for name, place in RUN_BY.items():
        path, _, function = place.partition("::")
        text = (ROOT / path).read_text(encoding="utf-8")
        if function:
            found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
            assert function in [node.name for node in found], place
        assert name.split()[-1] in text, place


def test_option_tables_are_current() -> None:
    assert reference.PAGE.read_text(encoding="utf-8") == reference.page(), "run `make docs`"


def test_every_flag_in_readme_and_scripts_exists() -> None:
    known = {leaf.flag for kind in (TrainVae, TrainTts) for leaf in leaves(kind).values()}
    known |= {"--config", "--profile-name"}
    for name in ("train_rtx5090.sh", "train_rtx5090.bat"):
        flags = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", (ROOT / name).read_text(encoding="utf-8")))
        assert flags, name
        assert flags <= known, name
    everything = reference.page()
    written = ("README.md", "docs/vae.md", "docs/vocoder.md", "docs/voice.md")
    pages = "".join((ROOT / name).read_text(encoding="utf-8") for name in written)
    for text in re.findall(r"`(--[a-z][^`]*)`", pages):
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", text):
            known_as = flag.replace("--no-", "--") if flag != "--no-" else "--config"
            assert f"`{known_as}`" in everything or known_as in ("--help", "--config", "--version", "--torch"), flag


def test_the_page_of_the_voice_lists_every_key_of_coquis_configurations() -> None:
    page = (ROOT / "docs/voice.md").read_text(encoding="utf-8")
    rows: dict[str, list[str]] = {}
    for line in page.split("\n## 3. ")[1].split("\n## ")[0].splitlines():
        if line.startswith("| `"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            rows |= dict.fromkeys(re.findall(r"`(\w+)`", cells[0]), cells[1:])
    for key, ours in SPELLINGS.items():
        assert re.match(rf"`{ours}`", rows[key][0]), key
    words = {"True": "true", "False": "false", "": "empty"}
    for key in coqui.known_keys().values():
        if key.is_ignored:
            assert rows[key.name][0] == "any", key.name
        elif key.values:
            assert rows[key.name][0] == words.get(str(key.values[0]), str(key.values[0])), key.name
        elif key.name not in leaves(TrainTts):
            assert key.options[0] in rows[key.name][0], key.name
