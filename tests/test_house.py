"""The walls of the house: which way imports run, and what the command line may import."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "gputrain"
# From the top floor to the ground: a module imports its own floor and those below.
FLOORS = [
    ["cli"],
    ["tts"],
    ["vae", "vocoder", "autoconfig"],
    ["planner", "bench", "audio"],
    ["engine"],
    ["hw"],
    ["config", "stored"],
    ["errors"],
]


def floor_of(module: str) -> int:
    room = module.split(".")[1]
    return next(number for number, rooms in enumerate(FLOORS) if room in rooms)


def imports_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = (
                [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "gputrain" else [node.module]
            )
            found.update(names)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return {name for name in found if name.startswith("gputrain.") and name != "gputrain.__version__"}


def test_imports_run_downstairs():
    checked = 0
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        if len(parts) < 2 or parts[1].startswith("__"):
            continue
        for name in imports_of(path):
            if parts == ("gputrain", "hw", "__init__"):  # which hands on what others offer
                continue
            assert floor_of(".".join(parts)) <= floor_of(name), f"{path.name} imports {name}"
            checked += 1
    assert checked > 50


def test_only_the_runtime_sets_torchs_switches():
    for path in PACKAGE.rglob("*.py"):
        if path.name != "runtime.py":
            text = path.read_text(encoding="utf-8")
            for switch in ("torch.backends.", "set_float32_matmul_precision", "torch.compile("):
                assert switch not in text, f"{path.name}: {switch}"


def test_librosa_is_imported_in_one_place():
    """Its import compiles functions into a cache that processes may not write at once."""
    importing = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []
            importing += [path.name for name in names if name.split(".")[0] == "librosa"]
    assert set(importing) == {"numba_cache.py"}


def test_functions_fit_a_screen_and_files_a_sitting():
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert text.count("\n") <= 450, path.name
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                assert (node.end_lineno or 0) - node.lineno <= 70, f"{path.name}: {node.name}"
