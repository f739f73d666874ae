"""The walls of the house: which way imports run, and what the command line may import."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "gputrain"
# From the top floor to the ground: a module imports its own floor and those below.
FLOORS = [
    ["cli"],
    ["vae", "vocoder", "tts", "autoconfig"],
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


def test_models_do_not_import_each_other():
    """Code that two models share belongs to `audio` or `engine`."""
    models, checked = {"vae", "vocoder", "tts", "autoconfig"}, 0
    for path in PACKAGE.rglob("*.py"):
        model = path.relative_to(PACKAGE).parts[0]
        for name in imports_of(path) if model in models else ():
            imported = name.split(".")[1]
            assert imported == model or imported not in models, f"{path.relative_to(PACKAGE)} imports {name}"
            checked += 1
    assert checked > 300


def test_no_files_import_each_other_in_a_circle():
    """Imports within functions and for types alone count too."""
    paths = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
    paths = {name.removesuffix(".__init__"): path for name, path in paths.items()}
    left = {name: {one for one in modules_of(path) if one in paths} - {name} for name, path in paths.items()}
    left = {name: found for name, found in left.items() if name.split(".")[1:2] not in (["cli"], ["autoconfig"])}
    while leaves := [name for name, found in left.items() if not found & left.keys()]:
        for name in leaves:
            del left[name]
    assert not left
    assert len(paths) > 150


def modules_of(path: Path) -> set[str]:
    """Returns what a file imports from the package, each name also as a module of its own."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            submodules = {f"{node.module}.{alias.name}" for alias in node.names}
            are_modules = {
                one for one in submodules if (PACKAGE.parent / one.replace(".", "/")).with_suffix(".py").exists()
            }
            found |= are_modules or {node.module}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


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
