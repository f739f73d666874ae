"""A full or read-only disk under a training: nothing is lost, and the run goes on when there is room again. The disks
are mounted in a mount namespace of the test's own, which only root may create."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.tiny import differences, finish, make_data, words

STEPS = 12
ROOT = Path(__file__).parents[2]


def can_mount() -> bool:
    try:
        done = subprocess.run(
            ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, timeout=200
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


pytestmark = pytest.mark.skipif(not can_mount(), reason="needs the right to mount file systems (root and unshare)")


def in_namespace(script: str) -> str:
    done = subprocess.run(
        ["unshare", "-m", "bash", "-ec", script], cwd=ROOT, capture_output=True, text=True, timeout=200,
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HOME": "/tmp"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_a_run_on_a_full_and_then_read_only_disk_is_resumed(tmp_path):
    """The disk holds one checkpoint of about 80 kB, and not two; then it cannot be written at all; then it has room."""
    data, straight, mounted = make_data("vocoder", tmp_path / "data"), tmp_path / "straight", tmp_path / "disk"
    code, said = finish(words("vocoder", data, straight, STEPS), tmp_path / "log")
    assert code == 0, said
    size = (straight / "checkpoint_last.pt").stat().st_size
    mounted.mkdir()
    line = " ".join([sys.executable, "-m", "tests.chaos.tiny", *words("vocoder", data, mounted / "run", STEPS)])
    said = in_namespace(
        f"""
        mount -t tmpfs -o size={int(1.5 * size)} tmpfs {mounted}
        {line} && exit 1 || echo "full: $?"
        mount -o remount,ro {mounted}
        {line} && exit 1 || echo "read-only: $?"
        mount -o remount,rw,size={20 * size} {mounted}
        {line}
        cp -a {mounted}/run {tmp_path}/run
        """
    )
    assert "checkpoint_last.pt: cannot be written: it takes" in said
    assert "full: 75" in said
    assert "read-only: 2" in said
    assert "Read-only file system" in said
    assert "Traceback" not in said
    assert [line for line in differences(tmp_path / "run", straight) if "metrics.jsonl" not in line] == []
