"""Child processes: the path on which they find the package, and their end."""

import ast
from pathlib import Path

import gputrain
from gputrain.hw.child_process import run_child

ROOT = Path(gputrain.__file__).parents[1]


def test_a_child_finds_the_package_in_the_folder_of_its_parent(tmp_path: Path, monkeypatch) -> None:
    """The package need not be installed. Its own folder is not on the path, as its modules would hide others."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    code, output = run_child(["site"], tmp_path, 60)
    path = ast.literal_eval(output[output.index("[") : output.index("]") + 1])
    assert code in (0, 1, 2)  # The module site returns whether the user's folder is in use.
    assert str(ROOT) in path
    assert str(ROOT / "gputrain") not in path


def test_a_child_that_takes_too_long_is_killed(tmp_path: Path) -> None:
    code, _ = run_child(["timeit", "-n", "1", "-r", "1", "import time; time.sleep(60)"], tmp_path, 0.3)
    assert code is None
