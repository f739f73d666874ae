"""The scripts at the root of the repository, run in a copy of it with a PATH that holds only what a test puts there."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from gputrain.config import leaves
from gputrain.hw.driver import torch_for
from gputrain.vocoder.config import TrainVocoder
from tests.tables import check_rows, each_row

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the scripts under test are bash")

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("bash", "cat", "chmod", "cksum", "cp", "dirname", "mkdir", "mktemp", "rm", "tail", "tee", "uname")
SHELL_SCRIPTS = ("setup.sh", "train_rtx5090.sh", ".ci/run")

PYTHON_312 = """#!/bin/sh
case "$*" in
    *sys.version_info*) echo 3.12 ;;
    *ensurepip*) exit 0 ;;
esac
"""

# Replaces Python 3.12 and logs its arguments. Its venv holds a copy of itself and of a logging gputrain; torch's own
# index is unreachable, and every call that $BROKEN matches fails.
LOGGING_PYTHON = """#!/bin/sh
case "$*" in
    *sys.version_info*) echo 3.12; exit ;;
    *ensurepip*) exit ;;
    *importlib*) exit ;;
esac
echo "$@" >>"$LOG"
case "$*" in
    "-m venv"*)
        rm -rf .venv
        mkdir -p .venv/bin
        cp "$0" .venv/bin/python
        printf '#!/bin/sh\\necho gputrain "$@" >>"$LOG"\\n[ "$1" != "$BROKEN" ]\\n' >.venv/bin/gputrain
        chmod +x .venv/bin/gputrain ;;
    *download.pytorch.org* | *${BROKEN:-nothing}*) exit 1 ;;
esac
"""


def nvidia_smi(cuda: str, *capabilities: str, label: str = "CUDA Version") -> str:
    """Return a program that prints the head of nvidia-smi's report, or the compute capabilities on a query."""
    cards = "\n".join(capabilities)
    return f"""#!/bin/sh
case "$*" in *compute_cap*)
cat <<'TEXT'
{cards}
TEXT
exit ;;
esac
cat <<'TEXT'
Fri Nov 21 10:00:00 2025
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 570.86.10              Driver Version: 570.86.10      {label}: {cuda:<8}|
|-----------------------------------------+------------------------+----------------------+
| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |
|   0  NVIDIA GeForce RTX 5090        Off |   00000000:01:00.0  On |                  N/A |
+-----------------------------------------+------------------------+----------------------+
TEXT
"""


class Machine:
    """A copy of the scripts in a folder with a space in its name, and a PATH of a few tools and the fakes put there."""

    def __init__(self, folder: Path) -> None:
        self.checkout = folder / "a checkout"
        self.bin = folder / "bin"
        (self.checkout / ".ci").mkdir(parents=True)
        self.bin.mkdir()
        for name in (*SHELL_SCRIPTS, "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, self.checkout / name)
        for tool in TOOLS:
            found = shutil.which(tool)
            assert found, f"{tool} is not on PATH"
            (self.bin / tool).symlink_to(found)
        self.environment = {"PATH": str(self.bin), "LOG": str(folder / "log")}

    def put(self, name: str, text: str) -> None:
        """Put a program on PATH, or into the checkout if `name` holds a slash."""
        path = self.checkout / name if "/" in name else self.bin / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def run(self, script: str, *arguments: str, stdin: int = subprocess.DEVNULL) -> subprocess.CompletedProcess[str]:
        """Run a script of the checkout from another folder."""
        command: list[str | Path] = [self.checkout / script, *arguments]
        return subprocess.run(
            command, cwd=self.bin, env=self.environment, stdin=stdin, capture_output=True, text=True, timeout=200
        )

    def plan(self, *arguments: str, stdin: int = subprocess.DEVNULL) -> dict[str, str]:
        """Return the plan that `setup.sh --dry-run` prints."""
        done = self.run("setup.sh", "--dry-run", *arguments, stdin=stdin)
        assert done.returncode == 0, done.stderr
        return {key: value.strip() for key, value in (line.split(":", 1) for line in done.stdout.splitlines())}

    def log(self) -> list[str]:
        """Return the logged calls of the fakes since the last call of this method."""
        path = Path(self.environment["LOG"])
        lines = path.read_text().splitlines() if path.exists() else []
        path.write_text("")
        return lines


@contextmanager
def terminal(typed: str) -> Iterator[int]:
    """Open a terminal with typed input."""
    keyboard, screen = os.openpty()
    try:
        os.write(keyboard, typed.encode())
        yield screen
    finally:
        os.close(keyboard)
        os.close(screen)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path)
    made.put("python3", PYTHON_312)
    return made


# --- which build of torch ---------------------------------------------------------------------------------------------


@each_row(
    ("13.0", ["12.0"], "cu130", "2.13.0"),  # RTX 5090, driver 580
    ("12.8", ["12.0"], "cu128", "2.11.0"),  # RTX 5090, driver 570
    ("12.9", ["8.9", "8.9"], "cu128", "2.11.0"),  # two RTX 4090
    ("13.1", ["9.0"], "cu130", "2.13.0"),  # H100
    ("14.0", ["7.5"], "cu130", "2.13.0"),  # T4
    ("12.7", ["8.6"], "cu126", "2.13.0"),  # RTX 3090, driver 565
    ("12.6", ["8.0"], "cu126", "2.13.0"),  # A100, driver 560
    ("13.0", ["6.1"], "cu126", "2.13.0"),  # GTX 1080 Ti
    ("12.8", ["7.0"], "cu126", "2.13.0"),  # V100
    ("12.8", ["8.9", "6.1"], "cu126", "2.13.0"),  # RTX 4090 and GTX 1060: 12.6 runs both.
    ("12.8", ["6.1", "12.0"], "cu128", "2.11.0"),  # RTX 5090 and GTX 1060: no build runs both.
    ("13.0", ["[N/A]"], "cu130", "2.13.0"),  # The GPU does not report it.
)
def test_auto_picks_the_newest_build_that_driver_and_cards_run(
    machine: Machine, cuda: str, capabilities: list[str], build: str, torch: str
) -> None:
    machine.put("nvidia-smi", nvidia_smi(cuda, *capabilities))
    plan = machine.plan()
    assert (plan["build"], plan["torch"]) == (build, torch)
    assert plan["index"] == f"https://download.pytorch.org/whl/{build}"


def test_a_plan_names_the_build_that_setup_takes_for_a_card(machine: Machine) -> None:
    for capability in ((6, 1), (7, 0), (7, 5), (9, 0), (12, 0)):
        machine.put("nvidia-smi", nvidia_smi("13.0", ".".join(map(str, capability))))
        plan, named = machine.plan(), torch_for(capability)
        parts = (f"--torch {plan['build']}, ", f'"torch=={plan["torch"]}+{plan["build"]}"', plan["index"])
        assert all(part in named for part in parts) if plan["build"] != "cu130" else named == ""


def test_auto_reads_the_report_of_drivers_from_610_on(machine: Machine) -> None:
    machine.put("nvidia-smi", nvidia_smi("13.3", "12.0", label="CUDA UMD Version"))
    assert machine.plan("--torch", "auto")["build"] == "cu130"
    assert machine.plan("--torch=cu126")["build"] == "cu126"


def test_without_nvidia_smi_the_build_is_cpu(machine: Machine) -> None:
    assert machine.plan("test") == {
        "build": "cpu",
        "torch": "2.13.0",
        "index": "https://download.pytorch.org/whl/cpu",
        "python": f"{machine.bin}/python3 (3.12)",
        "venv": f"make {machine.checkout}/.venv",
        "then": "check-compatibility, test",
    }


@pytest.mark.parametrize("program", ["#!/bin/sh\nexit 9\n", nvidia_smi("N/A", "8.9")])
def test_a_driver_that_does_not_work_means_cpu_and_is_named(machine: Machine, program: str) -> None:
    machine.put("nvidia-smi", program)
    done = machine.run("setup.sh", "--dry-run")
    assert done.stdout.split()[:2] == ["build:", "cpu"]
    assert "nvidia-smi shows no working driver" in done.stderr


@pytest.mark.parametrize("cuda", ["12.5", "12.2", "11.8"])
def test_an_old_driver_is_an_error_unless_cpu_is_asked_for(machine: Machine, cuda: str) -> None:
    machine.put("nvidia-smi", nvidia_smi(cuda, "8.6"))
    done = machine.run("setup.sh", "--dry-run")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"it runs CUDA {cuda}" in done.stderr
    assert "Install driver 580" in done.stderr
    assert machine.plan("--torch", "cpu")["build"] == "cpu"


def test_a_terminal_gets_the_menu_unless_it_is_ci(machine: Machine) -> None:
    rows = [("1\n", "cu130"), ("\n", "cu130"), ("2\n", "cpu"), ("3\n", "cu126"), ("4\n", "cu128"), ("9\n5\n", "cu130")]

    machine.put("nvidia-smi", nvidia_smi("13.0", "12.0"))

    def check(typed: str, build: str) -> None:
        with terminal(typed) as screen:
            assert machine.plan(stdin=screen)["build"] == build

    check_rows(rows, check)
    machine.environment["CI"] = "true"
    with terminal("4\n") as screen:
        assert machine.plan(stdin=screen)["build"] == "cu130"


# --- arguments and Python ---------------------------------------------------------------------------------------------


@each_row(
    (["--tourch", "cpu"], "unknown argument '--tourch'"),
    (["demmo"], "unknown argument 'demmo'"),
    (["--torch", "cu121"], "unknown build 'cu121'"),
    (["--torch"], "--torch needs a value"),
    (["demo", "test"], "one task at a time"),
)
def test_wrong_arguments_exit_2_with_the_usage(machine: Machine, arguments: list[str], message: str) -> None:
    done = machine.run("setup.sh", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    usage = machine.run("setup.sh", "--help").stdout
    assert usage.startswith("usage: ./setup.sh [--torch auto|cpu|")
    assert done.stderr.endswith(usage)


def test_python_3_9_is_passed_over_and_named_as_missing(machine: Machine) -> None:
    machine.put("python3", PYTHON_312.replace("3.12", "3.9"))
    machine.put("python3.13", "#!/bin/sh\nexit 127\n")  # This is a version manager's shim with nothing behind it.
    done = machine.run("setup.sh", "--dry-run")
    assert done.returncode == 2
    assert "found no Python 3.10 to 3.14" in done.stderr
    machine.put("python3.10", PYTHON_312.replace("3.12", "3.10"))
    assert machine.plan()["python"] == f"{machine.bin}/python3.10 (3.10)"


def test_a_python_without_venv_names_the_debian_package(machine: Machine) -> None:
    machine.put("python3", PYTHON_312.replace("exit 0", "exit 1"))
    done = machine.run("setup.sh", "--dry-run")
    assert done.returncode == 2
    assert "sudo apt install python3.12-venv" in done.stderr


def test_the_python_variable_decides(machine: Machine) -> None:
    machine.put("my python/python", PYTHON_312.replace("3.12", "3.14"))
    mine = f"{machine.checkout}/my python/python"
    machine.environment["PYTHON"] = mine
    assert machine.plan()["python"] == f"{mine} (3.14)"
    machine.environment["PYTHON"] = "/nowhere/python"
    done = machine.run("setup.sh", "--dry-run")
    assert done.returncode == 2
    assert "PYTHON=/nowhere/python is no Python 3.10 to 3.14" in done.stderr
    machine.environment["PYTHON"] = sys.executable
    assert machine.plan()["python"] == f"{sys.executable} ({sys.version_info[0]}.{sys.version_info[1]})"


# --- what is installed, and what is not installed twice ---------------------------------------------------------------

PIP = "-m pip --disable-pip-version-check --no-input -qq install"
INSTALL = f"{PIP} -e .[all] -c constraints.txt"
INSTALL_DEV = f"{PIP} -e .[dev] -c constraints.txt"


TESTS = "-m pytest -n auto --maxprocesses 4 --dist loadfile --durations=20"


def from_nothing(build: str, torch: str) -> list[str]:
    """Return the calls for a new .venv when torch's own index is unreachable."""
    index = f"https://download.pytorch.org/whl/{build}"
    return [
        "-m venv --clear .venv",
        f"{PIP} --no-deps --timeout 10 --retries 1 --index-url {index} torch=={torch}+{build}",
        f"{PIP} --no-deps torch=={torch}",
    ]


@pytest.fixture
def installed(machine: Machine) -> Machine:
    """Return a machine after `setup.sh demo`."""
    machine.put("python3", LOGGING_PYTHON)
    done = machine.run("setup.sh", "demo")
    assert done.returncode == 0, done.stderr
    return machine


def test_setup_falls_back_to_the_default_index_and_runs_the_demo(installed: Machine) -> None:
    assert installed.log() == [
        *from_nothing("cpu", "2.13.0"),
        INSTALL,
        "gputrain check-compatibility",
        "gputrain demo",
    ]


def test_run_again_it_only_does_what_is_missing(installed: Machine) -> None:
    installed.log()
    for task, asked in [
        ("demo", ["gputrain check-compatibility", "gputrain demo"]),
        ("test", [INSTALL_DEV, "gputrain check-compatibility", TESTS]),
        ("test", ["gputrain check-compatibility", TESTS]),
        ("demo", ["gputrain check-compatibility", "gputrain demo"]),
    ]:
        assert installed.run("setup.sh", task).returncode == 0
        assert installed.log() == asked


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_changed_requirements_are_installed_with_the_tools_that_were_there(installed: Machine, name: str) -> None:
    installed.run("setup.sh", "test")
    with (installed.checkout / name).open("a") as file:
        file.write("# changed\n")
    installed.log()
    installed.run("setup.sh")
    assert installed.log() == [INSTALL_DEV, "gputrain check-compatibility"]


def test_another_build_gets_a_new_environment_and_stays(installed: Machine) -> None:
    installed.log()
    installed.run("setup.sh", "--torch", "cu128")
    assert installed.log() == [*from_nothing("cu128", "2.11.0"), INSTALL, "gputrain check-compatibility"]
    assert installed.plan()["build"] == "cu128"
    assert installed.plan()["venv"].startswith("keep")
    assert installed.plan("--torch", "auto")["build"] == "cpu"


def test_a_half_made_broken_or_moved_environment_is_replaced(installed: Machine) -> None:
    stamp = installed.checkout / ".venv/setup-stamp"
    kept = stamp.read_text()
    stamp.unlink()
    assert installed.plan()["venv"].startswith("replace")
    stamp.write_text(kept)
    assert installed.plan()["venv"].startswith("keep")
    installed.checkout = installed.checkout.rename(installed.checkout.with_name("moved"))
    assert installed.plan()["venv"].startswith("replace")
    installed.checkout = installed.checkout.rename(installed.checkout.with_name("a checkout"))
    (installed.checkout / ".venv/bin/python").unlink()
    assert installed.plan()["venv"].startswith("replace")


def test_a_failed_installation_is_not_taken_for_a_finished_one(installed: Machine) -> None:
    with (installed.checkout / "constraints.txt").open("a") as file:
        file.write("# changed\n")
    installed.environment["BROKEN"] = "constraints.txt"
    assert installed.run("setup.sh", "demo").returncode == 1
    assert "gputrain demo" not in installed.log()[-1]
    assert installed.plan()["venv"].startswith("replace")


def test_a_failed_check_is_the_exit_code_of_setup_alone(installed: Machine) -> None:
    installed.environment["BROKEN"] = "check-compatibility"
    failed = installed.run("setup.sh")
    assert failed.returncode == 1
    assert installed.run("setup.sh", "demo").returncode == 0
    installed.environment["BROKEN"] = "demo"
    done = installed.run("setup.sh")
    assert done.returncode == 0
    # The README's commands begin with gputrain, which is found only then.
    activate = "source .venv/bin/activate"
    assert activate in done.stderr
    assert activate not in failed.stderr
    assert f"\n{activate}" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert installed.run("setup.sh", "demo").returncode == 1


# --- train_rtx5090 ----------------------------------------------------------------------------------------------------

PRINT_ARGUMENTS = '#!/bin/sh\nprintf "%s\\n" "$@"\n'
SWITCHES = "--precision bf16 --use-torch-compile --channels-last --persistent-workers"
SIZES = "--data-path ./data/train --output-dir ./outputs/rtx5090_training --config standard"
SWITCHES_VOCODER = "--use-torch-compile --persistent-workers"
SIZES_VOCODER = (
    "--data-path ./data/vocoder --output-dir ./outputs/rtx5090_vocoder --config base_hifi_rtx5090_optimized.yaml"
)
SWITCHES_TTS = "--precision mixed --use-torch-compile --channels-last --persistent-workers"
SIZES_TTS = "--data-path ./data/tts --output-dir ./outputs/rtx5090_tts --preset high --batch-size 64"
SIZES_VOICE = "--data-path ./data/voice --output-dir ./outputs/rtx5090_voice --config vits_rtx4090"
BY_WORD = [
    ([], f"train-vae {SIZES} {SWITCHES}"),
    (["vae"], f"train-vae {SIZES} {SWITCHES}"),
    (["vocoder"], f"train-vocoder {SIZES_VOCODER} {SWITCHES_VOCODER}"),
    (["tts"], f"train-tts {SIZES_TTS} {SWITCHES_TTS}"),
    (["voice"], f"train-tts {SIZES_VOICE} {SWITCHES_TTS}"),
]


@each_row(*BY_WORD)
def test_train_rtx5090_passes_arguments_on_after_its_own(machine: Machine, word: list[str], begins: str) -> None:
    machine.put("gputrain", PRINT_ARGUMENTS)
    assert machine.run("train_rtx5090.sh", *word).stdout.split() == begins.split()
    done = machine.run("train_rtx5090.sh", *word, "--data_path", "my vocoder", "--batch_size", "8")
    # Every folder that is named adds one, so those of the script are left out.
    assert done.stdout.splitlines() == [*without_data(begins), "--data_path", "my vocoder", "--batch_size", "8"]
    for given in (["--data-path=a", "--data-path", "b=2"], ["--data-dir", "a"], ["--data_dir=a"]):
        assert machine.run("train_rtx5090.sh", *word, *given).stdout.split() == [*without_data(begins), *given]
    done = machine.run("train_rtx5090.sh", *word, "--eval-first", "--output-dir", "data_dir")
    assert done.stdout.split() == [*begins.split(), "--eval-first", "--output-dir", "data_dir"]


def without_data(begins: str) -> list[str]:
    """Returns the words of a command without its data folder, which follows the name of the command."""
    command, flag, _, *others = begins.split()
    assert flag in ("--data-path", "--data-dir")
    return [command, *others]


def test_train_rtx5090_takes_a_word_only_where_it_is_the_first(machine: Machine) -> None:
    machine.put("gputrain", PRINT_ARGUMENTS)
    for words in (["--data-path", "vocoder"], ["vae", "vocoder"], ["vocoders"], ["ttss"]):
        passed_on = words[words[0] == "vae" :]
        begins = BY_WORD[0][1]
        expected = without_data(begins) if "--data-path" in words else begins.split()
        assert machine.run("train_rtx5090.sh", *words).stdout.split() == [*expected, *passed_on]


@each_row(
    *[
        (arguments, word, begins)
        for arguments in [["--config", "wide.json"], ["--config=wide.json"], ["-c", "wide.json"], ["-cwide.json"]]
        for (word, begins) in [
            ([], f"train-vae {SWITCHES}"),
            (["vocoder"], f"train-vocoder {SWITCHES_VOCODER}"),
            (["tts"], f"train-tts {SWITCHES_TTS}"),
            (["voice"], f"train-tts {SWITCHES_TTS}"),
        ]
    ]
)
def test_train_rtx5090_leaves_data_and_sizes_to_a_configuration(
    machine: Machine, arguments: list[str], word: list[str], begins: str
) -> None:
    machine.put("gputrain", PRINT_ARGUMENTS)
    done = machine.run("train_rtx5090.sh", *word, *arguments)
    assert done.stdout.split() == [*begins.split(), *arguments]


def test_train_rtx5090_says_what_train_vocoder_understands() -> None:
    words = dict(zip(*[iter(SIZES_VOCODER.split())] * 2, strict=True))
    assert (ROOT / "gputrain/vocoder/profiles" / words.pop("--config")).is_file()
    known = {leaf.flag for leaf in leaves(TrainVocoder).values()}
    assert {*words, *SWITCHES_VOCODER.split()} <= known


def test_train_rtx5090_prefers_the_environment_beside_it(machine: Machine) -> None:
    done = machine.run("train_rtx5090.sh")
    assert (done.returncode, done.stdout) == (2, "")
    assert "run ./setup.sh first" in done.stderr
    machine.put("gputrain", "#!/bin/sh\nexit 3\n")
    assert machine.run("train_rtx5090.sh").returncode == 3
    machine.put(".venv/bin/gputrain", "#!/bin/sh\nexit 4\n")
    assert machine.run("train_rtx5090.sh").returncode == 4


# --- .ci/run ----------------------------------------------------------------------------------------------------------


@each_row("", "demo", "test", "slow", "ruff check", "ruff format", "mypy", "build", "twine", "versions")
def test_ci_runs_everything_and_fails_with_any(machine: Machine, broken: str) -> None:
    fails = f'echo "$*" >>"$LOG"; case "$*" in *"{broken or "nothing"}"*) exit 1 ;; esac\n'
    machine.put("./setup.sh", f'#!/bin/sh\n[ "$CI" ] || exit 1\n[ "$1" = demo ] || echo "7 passed in 0.10s"\n{fails}')
    machine.put(".venv/bin/python", f"#!/bin/sh\necho clean\n{fails}")
    done = machine.run(".ci/run")
    notebooks = r"-m pytest -m slow -n 2 tests/test_notebooks\.py"
    linters = ["-m ruff check", "-m ruff format --check", "-m mypy --strict"]
    folder = r"/\S+/tmp\.\w+"
    wheel = [
        f"-m build --no-isolation --outdir {folder}", rf"-m twine check --strict {folder}/\*",
        rf"benchmarks/versions\.py --short {folder}/\*\.whl",
    ]  # fmt: skip
    for line, expected in zip(machine.log(), ["demo", "test", notebooks, *linters, *wheel], strict=True):
        assert re.fullmatch(expected, line)
    assert done.returncode == (1 if broken else 0)
    assert done.stdout.splitlines()[-1] == "7 passed in 0.10s"


# --- what no run shows ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHELL_SCRIPTS)
def test_shell_scripts_are_sound(name: str) -> None:
    subprocess.run(["bash", "-n", ROOT / name], check=True)
    assert os.access(ROOT / name, os.X_OK)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", ROOT / name], check=True)


@pytest.mark.parametrize("name", ["setup_windows.bat", "train_rtx5090.bat"])
def test_batch_files_have_windows_line_ends_and_all_their_labels(name: str) -> None:
    text = (ROOT / name).read_bytes().decode("ascii")
    assert text.count("\n") == text.count("\r\n")
    wanted = set(re.findall(r"(?:goto|call) :?(\w+)", re.sub(r"(?m)^rem.*", "", text))) - {"gputrain"}
    labels = re.findall(r"(?m)^:(\w+)\r$", text)
    assert sorted(labels) == sorted(set(labels))
    # A label may also be reached from the line above it.
    assert wanted <= set(labels)


@each_row(
    ("setup.sh", "setup_windows.bat", r"\b\d\.\d+\.\d+\b"),  # torch's versions.
    ("setup.sh", "setup_windows.bat", r"https://[\w./]+"),
    ("setup.sh", "setup_windows.bat", r"(?m)  (\d\) [AC].*)$"),  # The menu.
    ("setup.sh", "setup_windows.bat", r"\b(?:1206|1208|1300|705|1000)\b"),  # The bounds of the decision.
    ("setup.sh", "setup_windows.bat", r"--(?:no-deps|timeout|retries|index-url|clear)(?: \d+)?"),
    ("train_rtx5090.sh", "train_rtx5090.bat", r"--[a-z][\w-]*(?: [\w./]+)?"),
)
def test_windows_and_linux_agree(shell: str, batch: str, pattern: str) -> None:
    in_shell = set(re.findall(pattern, (ROOT / shell).read_text()))
    in_batch = set(re.findall(pattern, (ROOT / batch).read_text()))
    assert in_shell == in_batch
    assert in_shell


@each_row("3.10", "3.11", "3.12", "3.13", "3.14")
def test_constraints_pin_every_dependency_once_for_each_python(python: str) -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    pins = [pin for pin in pins if pin.marker is None or pin.marker.evaluate({"python_version": python})]
    names = [pin.name for pin in pins]
    assert sorted(names) == sorted(set(names))
    of_torch = [name for name in names if name.startswith(("torch", "nvidia", "triton", "cuda"))]
    assert of_torch == ["nvidia-ml-py"]  # It queries the driver, and belongs to no build.

    versions = {pin.name: str(pin.specifier).removeprefix("==") for pin in pins}
    try:
        needed = [Requirement(text) for text in requires("gputrain") or []]
    except PackageNotFoundError:
        pytest.skip("gputrain is not installed")
    # Only the extra for development and those it names are checked: packages of others may need one build of torch.
    extras = ["dev"]
    for extra in extras:
        own = [need for need in needed if need.name == "gputrain" and need.marker.evaluate({"extra": extra})]
        extras += [name for need in own for name in sorted(need.extras)]
    needed = [need for need in needed if not need.marker or any(need.marker.evaluate({"extra": e}) for e in extras)]
    needed = [need for need in needed if need.name != "gputrain"]
    assert {need.name for need in needed} >= {"numpy", "torch", "pytest", "transformers"}
    for need in needed:
        if need.name not in ("torch", "triton"):  # Each build of torch needs its own triton.
            assert need.specifier.contains(versions[need.name.lower()]), need
