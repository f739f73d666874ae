"""The documentation agrees with the program: its option tables, its flags, and every command in it."""

import ast
import json
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gputrain.cli.app import app, command_line
from gputrain.cli.options import settings_of
from gputrain.config import assemble, leaves, to_yaml
from gputrain.hw.gpus import known_gpus
from gputrain.hw.plan import PRECISION_SWITCHES
from gputrain.tts.config import TrainTts
from gputrain.vae.config import TrainVae
from tests import keys_page
from tests.cli import options_page
from tests.command import gputrain_here
from tests.tables import each_row

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINKED = [*PAGES, ROOT / "CHANGELOG.md", *(ROOT / "benchmarks").glob("*.md")]
README = (ROOT / "README.md").read_text(encoding="utf-8")
VAE_PAGE = (ROOT / "docs" / "vae.md").read_text(encoding="utf-8")
# Configuration files that the documents name, with their content. They stand for files of the reader.
FILES: dict[str, Callable[[], str]] = {
    "outputs/vae/config.yaml": lambda: to_yaml(assemble(TrainVae, {"data_path": "photos"})),
    "outputs/dilnoza/config.yaml": lambda: to_yaml(assemble(TrainTts, {"data_path": "data/dilnoza"})),
    "config.yaml": lambda: "epochs: 10\naudio:\n  sample_rate: 22050\n",  # A configuration of Coqui's.
    "vocoder.yaml": lambda: (ROOT / "docs" / "sounds" / "vocoder.yaml").read_text(encoding="utf-8"),
}
# The tests and scripts that truly run each command, as FILE::FUNCTION, or a file that is no test.
RUN_BY = {
    "prepare-data": "tests/cli/test_data_commands.py::test_preprocess_then_validate_as_in_the_guide",
    "validate": "tests/cli/test_data_commands.py::test_preprocess_then_validate_as_in_the_guide",
    "fetch": "tests/cli/test_fetching.py::test_a_name_is_loaded_verified_and_repaired",
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
    "watch": "tests/watch/test_server.py::test_the_page_and_its_end",
    "export": "tests/vae/test_use.py::test_commands_from_a_run_to_stock_diffusers",
    "demo": "tests/cli/test_demo.py::test_the_vocoders_demo_learns",
    "bench train-vae": "tests/bench/test_step_bench.py::test_the_command",
    "bench train-vocoder": "tests/bench/test_step_bench.py::test_the_command",
    "bench train-tts": "tests/bench/test_step_bench.py::test_the_command",
    "bench train-asr": "tests/bench/test_step_bench.py::test_the_command",
    "plan train-vae": "tests/vae/test_plan.py::test_a_plan_in_json",
    "plan train-vocoder": "tests/vocoder/test_plan.py::test_the_command_takes_a_configuration_that_comes_along",
    "plan train-tts": "tests/tts/test_plan.py::test_the_command",
    "plan train-asr": "tests/asr/test_plan.py::test_plan_train_asr_from_the_command_line",
}


def commands_of(page: str) -> list[str]:
    """Return the lines of fenced blocks that run gputrain, in a notebook after a `!`, with continued lines joined."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    lines = [line.strip().removeprefix("!") for block in blocks for line in block.replace("\\\n", " ").splitlines()]
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
    return name, settings_of(options_page.commands(app)[name], context, dict(context.params))


# A name that pip, uv or pipx would look for in an index, where gputrain is nobody's: no path, no wheel and no address.
OF_AN_INDEX = re.compile(
    r"(?:\bpip install|\bpipx (?:install|run)|\buv add|\buv tool (?:install|run)|\buvx)(?:[^`\n#]*[ \"'=]|\s+[\"']?)"
    r"gputrain(?:\[[\w,-]+\])?(?:[=<>~!]=?[\d.*]+)?(?=[\"'`\s)]|$)(?! @ )"
)


@each_row(
    ("pip install gputrain", True), ('pip install --upgrade "gputrain[all]"', True), ("`uvx gputrain demo`", True),
    ("uv tool install --torch-backend auto gputrain", True), ('(`pip install\n"gputrain[f0]"`)', True),
    ("pipx install 'gputrain==0.2'", True), ("pip install -r x gputrain[f0]", True),
    ('pip install ".[all]"', False), ("pip install ./gputrain", False), ('%pip install -q "./gputrain[all]"', False),
    ('pip install "gputrain[onnx] @ git+ADDRESS"', False), ('pip install "./gputrain-0.2.0-py3-none.whl[all]"', False),
    ("pip install torch # for gputrain", False), ("pip install torch\ngputrain demo", False),
    ("git clone ADDRESS gputrain", False), ("install gputrain as above", False),
)  # fmt: skip
def test_what_pip_would_look_for_in_an_index_is_seen(line: str, seen: bool) -> None:
    assert bool(OF_AN_INDEX.search(line)) is seen


def test_nothing_installs_gputrain_from_an_index() -> None:
    """Anybody could register the name there. Whoever owns it one day changes this test with the documents."""
    kinds = ("*.md", "*.py", "*.yaml", "*.ipynb", "*.sh", "*.toml", "Containerfile", "Makefile", "*.bat")
    folders = (ROOT / name for name in ("docs", "examples", "gputrain", "benchmarks"))
    files = [path for folder in folders for kind in kinds for path in folder.rglob(kind)]
    files += [path for kind in (*kinds, ".ci/run") for path in ROOT.glob(kind)]
    assert len(files) > 300
    found = {str(path.relative_to(ROOT)): OF_AN_INDEX.findall(path.read_text(encoding="utf-8")) for path in files}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the documents name."""
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content(), encoding="utf-8")
    return tmp_path


# --------------------------------------------------------------------------------------------- links and the front page


def without_code(page: str) -> str:
    """Return a page without its blocks and spans of code."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL))


def anchors_of(path: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page: `heading`, then `heading-1` where it repeats."""
    seen: Counter[str] = Counter()
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        seen[re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")] += 1
    return {name if number == 0 else f"{name}-{number}" for name, count in seen.items() for number in range(count)}


def broken_links(path: Path) -> Iterator[str]:
    """Yield the relative links of a page whose file or heading doesn't exist."""
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(path.read_text(encoding="utf-8"))):
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        if re.match(r"[a-z]+:", link):
            continue
        if not target.exists() or (anchor and anchor not in anchors_of(target)):
            yield link


def test_every_relative_link_leads_to_a_file_and_a_heading() -> None:
    assert {path.name: broken for path in LINKED if (broken := list(broken_links(path)))} == {}


def test_the_index_links_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    linked = {link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", index)}
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")} - {"README.md"}
    assert pages - linked == set()


def test_every_question_of_the_index_leads_to_a_heading() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    rows = [row.strip("| ").split(" | ") for row in index.split("\n## Questions\n")[1].split("\n## ")[0].splitlines()]
    links = {row[0]: re.findall(r"\]\(([^)\s]+)\)", row[1]) for row in rows[3:] if len(row) > 1}
    assert len(links) >= 20
    assert [question for question, found in links.items() if not found or not all("#" in link for link in found)] == []


def test_the_front_page_is_short_and_leads_with_the_users_job() -> None:
    assert len(README.splitlines()) <= 90
    assert re.findall(r"^#+ (.*)$", without_code(README), re.MULTILINE) == [
        "gputrain",
        "Install",
        "From your folder to a trained model",
        "Why trust it",
        "Beside other trainers",
        "Measured",
        "Licence",
    ]
    assert "![" in README.split("\n## ")[0]
    assert re.findall(r"^\./setup\.sh", README.split("\n## ")[1], re.MULTILINE)  # No placeholder before it.
    assert len(commands_of(README.split("\n## ")[2])) == 4


def test_the_checks_of_a_change_run_the_commands_of_the_front_page() -> None:
    install = README.split("\n## ")[1]
    run = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert re.findall(r"\./setup\.sh (\w+)", install) == ["demo", "test"]
    assert set(re.findall(r"\./setup\.sh (\w+)", run)) == {"demo", "test"}


def test_what_others_lack_is_shown_by_their_own_pages() -> None:
    rows = [line.strip("| ").split(" | ") for line in README.split("## Beside other trainers\n")[1].splitlines()]
    rows = [row for row in rows if len(row) > 1][2:]
    assert len(rows) >= 4
    for row in rows:
        assert re.search(r"\]\(https://(github\.com|huggingface\.co)/", row[-1]), row[0]


@pytest.mark.slow  # It plans for three GPUs.
@pytest.mark.parametrize("page", ["README.md", "docs/planning.md", "docs/voice.md"])
def test_the_first_plan_of_a_page_is_what_the_command_prints(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    line = next(line for line in commands_of(text) if line.startswith("gputrain plan "))
    shown = text.split("```text\n")[1].split("```")[0].rstrip().splitlines()
    printed = gputrain_here(*shlex.split(line)[1:]).stdout.splitlines()
    assert len(shown) > 5
    assert [row for row in shown if row.rstrip() not in {row.rstrip() for row in printed}] == []


@pytest.mark.slow  # It plans for five sizes.
def test_the_profiles_of_the_vae_are_planned_as_its_page_says() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| (\d+) \| (\d+).* \| ([\d.]+) GB \|$", VAE_PAGE, re.MULTILINE)
    planned = []
    for name, *_ in rows:
        (plan,) = json.loads(gputrain_here("plan", "train-vae", "--config", name, "--gpu", "rtx5090", "--json").stdout)
        figures = [plan[key] for key in ("image_size", "batch_size", "micro_batch_size")]
        planned.append((name, *map(str, figures), f"{plan['predicted_peak_gb']:.1f}"))
    assert rows == planned
    assert len(rows) == 5


@pytest.mark.slow  # It plans four times for two GPUs.
@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("fine_tune_*.md")), ids=lambda page: page.stem)
def test_the_seconds_of_a_fine_tuning_are_what_its_plan_predicts(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    line = next(line for line in commands_of(text) if line.startswith("gputrain plan "))
    shown = re.findall(r"([\d.]+) s ", text.split("**How long**")[1])[:2]
    plans = json.loads(gputrain_here(*shlex.split(line)[1:], "--json").stdout)
    assert len(plans) == 2
    for seconds, plan in zip(shown, plans, strict=True):
        assert float(seconds) == pytest.approx(plan["predicted_seconds_per_step"], rel=0.01), plan["gpu"]


def test_planning_is_short_and_evidence_begins_with_what_it_shows_and_how() -> None:
    assert len((ROOT / "docs" / "planning.md").read_text(encoding="utf-8").split()) <= 1500
    pages = sorted((ROOT / "docs" / "evidence").glob("*.md"))
    assert len(pages) > 5
    for path in pages:
        begins = path.read_text(encoding="utf-8").split("\n\n")[1]
        for needed in (r"This page \w+s", "[Dd]evice|CPU|card", r"torch \d|versions", r"[Cc]ommands?[^`]*`"):
            assert re.search(needed, begins), f"{path.name}: {needed}"


def test_the_front_page_counts_the_known_gpus() -> None:
    assert f" {len(known_gpus())} cards are known" in README


def messages() -> str:
    """Return every string of the program, with `...` for the values that are put into it."""
    found = []
    for path in sorted((ROOT / "gputrain").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "..." for part in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return re.sub(r"\{[a-z_]+(:[^}]*)?\}|%(\.\d)?[sdfg]", "...", "\n".join(found))


def test_every_message_of_the_page_on_failures_is_the_programs() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("|")]
    shown = [message for row in rows for message in re.findall(r"`([^`]+)`", row.split(" | ")[0])]
    program = messages()
    assert len(shown) > 20
    assert [message for message in shown if message.strip(".: ") not in program] == []


# ------------------------------------------------------------------------------------------------------------- commands


@each_row(*COMMANDS)
def test_the_command_line_accepts_every_command_of_the_documents(folder: Path, line: str) -> None:
    name, settings = parsed(line)
    assert type(settings) is options_page.commands(app)[name]


def test_every_command_is_run_by_a_test_or_a_script() -> None:
    assert RUN_BY.keys() == options_page.commands(app).keys()
    for name, place in RUN_BY.items():
        path, _, function = place.partition("::")
        text = (ROOT / path).read_text(encoding="utf-8")
        if function:
            found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
            assert function in [node.name for node in found], place
        assert name.split()[-1] in text, place


def test_option_tables_are_current() -> None:
    assert options_page.PAGE.read_text(encoding="utf-8") == options_page.page(), "run `make docs`"


def test_every_flag_in_readme_and_scripts_exists() -> None:
    options = [leaf for settings in options_page.commands(app).values() for leaf in leaves(settings).values()]
    known = {flag for leaf in options if leaf.level != "file" for flag in leaf.flags}
    known |= {f"--{name.replace('_', '-')}" for name in PRECISION_SWITCHES}
    known |= {"--help", "--help-all", "--config", "--version", "--torch"}  # The last one is of setup.sh.
    for name in ("train_rtx5090.sh", "train_rtx5090.bat"):
        flags = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", (ROOT / name).read_text(encoding="utf-8")))
        assert flags, name
        assert flags <= known, name
    written = ("README.md", "docs/vae.md", "docs/vocoder.md", "docs/voice.md")
    pages = "".join((ROOT / name).read_text(encoding="utf-8") for name in written)
    for text in re.findall(r"`(--[a-z][^`]*)`", pages):
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", text):
            known_as = flag.replace("--no-", "--") if flag != "--no-" else "--config"
            assert known_as in known, flag


def test_pages_of_other_programs_keys_are_current() -> None:
    stale = [path.name for path, text in keys_page.pages().items() if path.read_text(encoding="utf-8") != text]
    assert stale == [], "run `make docs`"
