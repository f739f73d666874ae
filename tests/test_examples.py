"""The examples for batch systems and rented machines: SLURM's script with real signals, the unit of systemd, the task
of SkyPilot, the start script with a stand-in for the installation, and the container's file."""

import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from gputrain.engine import checkpoint
from tests.engine.test_leaving import GROUP_RUN
from tests.engine.test_run import rows_of, wait_for_steps
from tests.tables import each_row
from tests.waiting import HANG_SECONDS, wait_until

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "slurm" / "train.sbatch"
START = ROOT / "examples" / "cloud" / "start.sh"
CONTAINERFILE = ROOT / "examples" / "cloud" / "Containerfile"

# A step of SLURM: a session of its own, whose number SLURM signals. srun waits for it and returns its exit code.
SRUN = """
import os, subprocess, sys
process = subprocess.Popen(sys.argv[1:], start_new_session=True)
with open("step.pid.partial", "w") as file:
    file.write(str(process.pid))
os.replace("step.pid.partial", "step.pid")
sys.exit(process.wait())
"""
# The training of the toy with two data workers, where the script starts gputrain.
GPUTRAIN = """
import sys
open("arguments", "a").write(" ".join(sys.argv[1:]) + chr(10))
if "user-error" in sys.argv:
    sys.exit(2)
sys.path.insert(0, {root!r})
sys.argv = ["-c", {folder!r}, "work"]
"""


# In the place of setup.sh: notes its input and where caches go, and makes a .venv whose gputrain is the toy's training.
SETUP = """#!/bin/sh
[ -t 0 ] && echo "a terminal" >>"$LOG"
echo "setup $# $XDG_CACHE_HOME $HF_HOME" >>"$LOG"
mkdir -p "$(dirname "$0")/.venv/bin"
cp "$GPUTRAIN" "$(dirname "$0")/.venv/bin/gputrain"
exit "${SETUP_CODE:-0}"
"""


@pytest.fixture
def cluster(tmp_path) -> dict[str, str]:
    """The environment of a job, with the commands of SLURM that the script calls."""
    programs = tmp_path / "bin"
    programs.mkdir()
    gputrain = GPUTRAIN.format(root=str(ROOT), folder=str(tmp_path / "run"))
    gputrain += GROUP_RUN.replace("log_every_steps=1)", 'log_every_steps=1, resume_from="auto")')
    python = {"srun": SRUN, "gputrain": gputrain}
    shell = {"scontrol": 'echo "$@" >>scontrol.log', "squeue": 'echo "${STATE:-RUNNING}"'}
    for name, text in python.items():
        (programs / name).write_text(f"#!{sys.executable}\n{text}")
    for name, text in shell.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
    for path in programs.iterdir():
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "SLURM_JOB_ID": "42"}


def start(cluster: dict[str, str], folder: Path, *words: str, **more: str) -> "subprocess.Popen[str]":
    (folder / "step.pid").unlink(missing_ok=True)
    command = ["bash", str(SCRIPT), *words]
    return subprocess.Popen(
        command, cwd=folder, env={**cluster, **more}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def step_of(folder: Path) -> int:
    wait_until((folder / "step.pid").exists, "the step of the job")
    return int((folder / "step.pid").read_text())


pytestmark = pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "state", "requeued", "code"),
    [("time is up", "RUNNING", True, 0), ("cancelled", "CANCELLED", False, 75), ("preempted", "PREEMPTED", False, 75)],
)
def test_a_job_that_slurm_signals_saves_and_is_requeued_if_it_still_runs(
    cluster, tmp_path, case, state, requeued, code
):
    """SIGUSR1 goes to all processes of the step, the data workers too. At a preemption, SIGTERM goes to the shell and
    to the step; the shell must not end before the training has saved."""
    job = start(cluster, tmp_path, "train-toy", "--data-path", "a b", STATE=state)
    step = step_of(tmp_path)
    wait_for_steps(tmp_path / "run", 2)
    if case == "time is up":
        os.killpg(step, signal.SIGUSR1)
    else:
        os.kill(job.pid, signal.SIGTERM)
        time.sleep(0.2)
        assert job.poll() is None
        os.killpg(step, signal.SIGTERM)
    talk, _ = job.communicate(timeout=HANG_SECONDS)
    assert job.returncode == code, talk
    assert "everything is saved" in talk
    log = tmp_path / "scontrol.log"
    assert (log.read_text() if log.exists() else "") == ("requeue 42\n" if requeued else "")
    expected = "train-toy --data-path a b --resume-from auto --max-time 3h56m\n"
    assert (tmp_path / "arguments").read_text() == expected
    saved = checkpoint.read(tmp_path / "run" / "checkpoint_last.pt", "toy")["progress"]["step"]
    assert saved == rows_of(tmp_path / "run")[-1]["step"]


class RentedMachine:
    """A user without root, apt and a home; a checkout with the start script and a stand-in for setup.sh."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.workspace = folder, folder / "the volume"
        self.checkout, programs = self.workspace / "a checkout", folder / "bin"
        (self.checkout / "examples" / "cloud").mkdir(parents=True)
        programs.mkdir()
        self.script = Path(shutil.copy(START, self.checkout / "examples" / "cloud"))
        for tool in ("bash", "cat", "cp", "dirname", "flock", "mkdir", "stat"):
            if found := shutil.which(tool):
                (programs / tool).symlink_to(found)
        (programs / "python3").symlink_to(sys.executable)
        self.put(self.checkout / "setup.sh", SETUP)
        self.put(programs / "id", "#!/bin/sh\necho 1000\n")
        gputrain = GPUTRAIN.format(root=str(ROOT), folder=str(folder / "run"))
        gputrain += GROUP_RUN.replace(
            "log_every_steps=1)", 'log_every_steps=1, resume_from="auto", checkpoint_every_minutes=0.001)'
        )
        self.put(folder / "gputrain", f"#!{sys.executable}\n{gputrain}")
        self.environment = {
            "PATH": str(programs), "HOME": str(folder / "none"), "WORKSPACE": str(self.workspace),
            "LOG": str(folder / "log"), "GPUTRAIN": str(folder / "gputrain"),
        }  # fmt: skip

    def put(self, path: Path, text: str) -> None:
        path.write_text(text)
        path.chmod(0o755)

    def start(self, *words: str, **more: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            ["bash", str(self.script), *words], cwd=self.folder, env={**self.environment, **more},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def ended(self, *words: str, **more: str) -> tuple[int, str]:
        process = self.start(*words, **more)
        said, _ = process.communicate(timeout=HANG_SECONDS)
        return process.returncode, said

    @property
    def log(self) -> list[str]:
        path = self.folder / "log"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def rented(tmp_path) -> RentedMachine:
    return RentedMachine(tmp_path)


def test_a_rented_machine_is_installed_and_trains_on_its_volume(rented):
    code, said = rented.ended("train-vae", "user-error", "--data-path", "my data")
    assert code == 2, said
    cache = rented.workspace / "cache"
    assert rented.log == [f"setup 0 {cache} {cache / 'huggingface'}"]
    arguments = rented.workspace / "arguments"  # It is written into the folder in which the training runs.
    assert arguments.read_text() == "train-vae user-error --data-path my data --resume-from auto\n"
    rented.ended("train-vae", "user-error", "--resume_from=other.pt", XDG_CACHE_HOME="/c", HF_HOME="/h")
    assert arguments.read_text().splitlines()[1] == "train-vae user-error --resume_from=other.pt"
    assert rented.log[1:] == ["setup 0 /c /h"]


@each_row(
    ((), {}, "usage:", []),
    (("plan", "train-vae"), {}, "usage:", []),
    (("train-vae",), {"WORKSPACE": "/no/such/volume"}, "WORKSPACE=/path", []),
    (("train-vae",), {"SETUP_CODE": "2"}, "only root can install", ["setup"]),
)
def test_a_start_that_cannot_work_ends_before_the_training(rented, words, more, said, log):
    (rented.folder / "bin" / "cc").unlink(missing_ok=True)
    code, message = rented.ended(*words, **more)
    assert (code, [line.split()[0] for line in rented.log[-1:]]) == (2, log)
    assert said in message
    assert not (rented.workspace / "arguments").exists()


def test_root_installs_what_python_lacks_and_goes_on_if_that_fails(rented):
    rented.put(rented.folder / "bin" / "id", "#!/bin/sh\necho 0\n")
    rented.put(rented.folder / "bin" / "apt-get", '#!/bin/sh\necho "$@" >>"$LOG"\n[ "$1" != install ]\n')
    code, said = rented.ended("train-vae", "user-error")
    assert code == 2, said
    assert [line.split()[0] for line in rented.log] == ["update", "install", "setup"]
    assert "python3-venv" in rented.log[1]
    assert "apt-get failed" in said


@pytest.mark.slow
def test_a_training_on_a_rented_machine_that_is_killed_goes_on_at_the_next_start(rented, tmp_path):
    killed = rented.start("train-toy", "work")
    wait_until((tmp_path / "run" / "checkpoint_last.pt").exists, "a checkpoint")
    killed.kill()
    killed.communicate(timeout=HANG_SECONDS)
    before = checkpoint.read(tmp_path / "run" / "checkpoint_last.pt", "toy")["progress"]["step"]
    again = rented.start("train-toy", "work")
    wait_for_steps(tmp_path / "run", before + 2)
    again.terminate()
    said, _ = again.communicate(timeout=HANG_SECONDS)
    assert again.returncode == 75, said
    steps = [row["step"] for row in rows_of(tmp_path / "run")]
    assert steps == list(range(1, len(steps) + 1))  # Those after the checkpoint were made again, and none before it.
    assert checkpoint.read(tmp_path / "run" / "checkpoint_last.pt", "toy")["progress"]["step"] > before


def test_the_container_copies_files_that_exist_and_installs_by_setup():
    text = CONTAINERFILE.read_text(encoding="utf-8").replace("\\\n", " ")
    copied = [line.split()[1:-1] for line in text.splitlines() if line.startswith("COPY")]
    assert {"setup.sh", "constraints.txt", "gputrain"} <= {name for names in copied for name in names}
    assert all((ROOT / name).exists() for names in copied for name in names)
    build = re.search(r"^ARG TORCH=(\w+)$", text, re.MULTILINE)
    assert build
    done = subprocess.run([ROOT / "setup.sh", "--torch", build[1], "--dry-run"], capture_output=True, text=True)
    assert f"build:  {build[1]}" in done.stdout, done.stderr


def test_an_error_of_the_user_is_not_requeued(cluster, tmp_path):
    job = start(cluster, tmp_path, "user-error")
    talk, _ = job.communicate(timeout=HANG_SECONDS)
    assert job.returncode == 2, talk
    assert not (tmp_path / "scontrol.log").exists()
    assert subprocess.run(["bash", SCRIPT], env=cluster, capture_output=True).returncode == 2


@pytest.mark.parametrize(("tool", "file"), [("shellcheck", SCRIPT), ("shellcheck", START), ("hadolint", CONTAINERFILE)])
def test_the_files_are_free_of_what_linters_find(tool, file):
    if not (linter := shutil.which(tool)):
        pytest.skip(f"{tool} is not installed")
    done = subprocess.run([linter, file], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_unit_of_systemd_is_valid(tmp_path):
    """systemd-analyze also looks for the program, which lies in the reader's home."""
    if not (analyze := shutil.which("systemd-analyze")):
        pytest.skip("systemd is not installed")
    unit = (ROOT / "examples" / "systemd" / "gputrain.service").read_text()
    path = tmp_path / "gputrain.service"
    path.write_text(unit.replace("%h/gputrain/.venv/bin/gputrain", "/bin/true").replace("%h/gputrain", "/tmp"))
    done = subprocess.run([analyze, "verify", "--man=no", path], capture_output=True, text=True)
    assert "gputrain.service" not in done.stderr, done.stderr


def test_the_task_of_skypilot_resumes_from_the_bucket():
    task = yaml.safe_load((ROOT / "examples" / "skypilot" / "train.yaml").read_text())
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == 75
    (mount,) = task["file_mounts"]
    assert f"--output-dir {mount}/" in task["envs"]["OPTIONS"]
    assert "--resume-from auto" in task["run"]
