"""`make versions` without a package index. `.ci/run` shows the other outcome, which installs gigabytes."""

import os
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def empty_wheel(folder: Path) -> Path:
    """Writes a wheel that has no files, and needs a package."""
    path, info = folder / "gputrain-0.1.0-py3-none-any.whl", "gputrain-0.1.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: gputrain\nVersion: 0.1.0\nRequires-Dist: numpy\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return path


@pytest.mark.slow
def test_without_a_package_index_it_ends_with_a_message_and_the_table(tmp_path):
    pytest.importorskip("uv")
    own = "{}.{}".format(*sys.version_info)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # It never listens, so connections are refused.
        index = f"http://127.0.0.1:{unused.getsockname()[1]}/simple"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("UV_")}
        done = subprocess.run(
            [sys.executable, ROOT / "benchmarks/versions.py", empty_wheel(tmp_path), "--short", "--python", own],
            env={**environment, "UV_DEFAULT_INDEX": index, "UV_CACHE_DIR": str(tmp_path)},
            capture_output=True, text=True, timeout=200, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert f"Python {own}, lowest: could not install gputrain" in done.stderr
    assert "127.0.0.1" in done.stderr
    head, row, *rest = [line.split() for line in done.stdout.splitlines()]
    assert (head[:2], row) == (["python", "versions"], [own, "lowest", "FAILED"])
    others = [
        f"Python {version}: not asked for" for version in ("3.10", "3.11", "3.12", "3.13", "3.14") if version != own
    ]
    assert [" ".join(line) for line in rest[:5]] == ["not tried:", *others]
