"""The examples for batch systems: SLURM's script with real signals, the unit of systemd, the task of SkyPilot."""

import os
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
from tests.waiting import HANG_SECONDS, wait_until

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "slurm" / "train.sbatch"

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


@pytest.fixture
def cluster(tmp_path) -> dict[str, str]:
    """The environment of a job, with the commands of SLURM that the script calls."""
    programs = tmp_path / "bin"
    programs.mkdir()
    gputrain = GPUTRAIN.format(root=str(ROOT), folder=str(tmp_path / "run"))
    gputrain += GROUP_RUN.replace("log_freq=1)", 'log_freq=1, resume_from="auto")')
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


def test_an_error_of_the_user_is_not_requeued(cluster, tmp_path):
    job = start(cluster, tmp_path, "user-error")
    talk, _ = job.communicate(timeout=HANG_SECONDS)
    assert job.returncode == 2, talk
    assert not (tmp_path / "scontrol.log").exists()
    assert subprocess.run(["bash", SCRIPT], env=cluster, capture_output=True).returncode == 2


def test_the_script_for_slurm_is_free_of_what_shellcheck_finds():
    if not (shellcheck := shutil.which("shellcheck")):
        pytest.skip("shellcheck is not installed")
    done = subprocess.run([shellcheck, SCRIPT], capture_output=True, text=True)
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
