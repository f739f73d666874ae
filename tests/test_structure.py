"""The structure of the package: import layers, cycles, names, sizes, and the words of its documentation."""

import ast
import functools
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "gputrain"
# From the top to the bottom: a module imports modules of its own layer and of the layers below.
LAYERS = [
    {"cli", "__main__"},
    {"vae", "vocoder", "tts", "asr", "autoconfig"},
    {"watch"},
    {"report", "bench", "speech"},
    {"session"},
    {"planner", "audio"},
    {"data_in"},
    {"engine"},
    {"fetch"},
    {"hw"},
    {"kinds"},
    {
        "caches",
        "config",
        "errors",
        "former_options",
        "drawing",
        "files",
        "formatting",
        "heartbeat",
        "samples",
        "serialization",
        "translation",
        "weights",
    },
]
APART = LAYERS[1]  # These packages never import each other.
# The user's entry `from gputrain.hw import create_optimal_config` hands on one name from a layer above.
ENTRY = ("gputrain.hw", "__getattr__")
MOST_LINES_OF_THE_ENTRY = 10
MOST_LINES_OF_A_FILE = 600
MOST_LINES_OF_A_FUNCTION = 60
MOST_FILES = {"gputrain": 250, "gputrain/engine": 24}
MOST_LINES = {"gputrain/engine": 6_500}
# Endings of literal tables, whose columns a formatter would put on lines of their own; calls are formatted.
MOST_UNFORMATTED = 140

# Words that a reader who knows PyTorch would have to learn, and the standard terms for them.
PRIVATE_WORDS = {
    r"\w*judg\w*": "discriminator",
    r"made[-_ ]up": "synthetic",
    r"foretold|foretells?": "predicted, predicts",
    r"noughts?": "zeros",
    r"without a word": "default, or without a message",
    r"the machine decides": "auto",
    r"knobs?": "option",
    r"rehears(e|es|al|als|ed)": "dry run",
    r"gain_over_even": "alignment_gain",
    r"footprints?": "memory model",
    r"dear to": "expensive to",
    r"of the house|the house's": "of the project",
    r"hears? of": "uses",
    r"(is|are|was) told": "is reported",
}
WORDS = re.compile(rf"(?<![\w-])({'|'.join(PRIVATE_WORDS)})(?![\w-])", re.IGNORECASE)


NO_NAMES = {"one", "ones", "one_of"}
STILL_WITH_ONE = {"audio", "cli", "planner", "vocoder"}


def modules() -> dict[str, Path]:
    """Return the package's modules by dotted name."""
    names = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def entry_of(path: Path) -> ast.FunctionDef:
    """Return the function of ENTRY in its module."""
    (found,) = (node for node in tree_of(path).body if isinstance(node, ast.FunctionDef) and node.name == ENTRY[1])
    return found


@functools.cache
def imports() -> dict[str, set[str]]:
    """Return the modules of the package that each module imports: at its top, in functions, and for types only."""
    names = modules()
    found = {}
    for name, path in names.items():
        imported = set()
        entry = {id(node) for node in ast.walk(entry_of(path))} if name == ENTRY[0] else set[int]()
        for node in ast.walk(tree_of(path)):
            if id(node) in entry:
                continue
            if isinstance(node, ast.ImportFrom) and node.module:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                imported |= inner & names.keys() or {node.module}
            elif isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
        found[name] = (imported & names.keys()) - {"gputrain"}
    return {name: imported for name, imported in found.items() if name != "gputrain"}


def test_the_users_entry_hands_on_one_name():
    entry = entry_of(modules()[ENTRY[0]])
    taken = [alias.name for node in ast.walk(entry) if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert taken == ["create_optimal_config"]
    assert (entry.end_lineno or 0) - entry.lineno < MOST_LINES_OF_THE_ENTRY


def layer_of(module: str) -> int:
    package = module.split(".")[1]
    return next(number for number, layer in enumerate(LAYERS) if package in layer)


def test_imports_run_from_upper_to_lower_layers():
    edges = [(importer, imported) for importer, found in imports().items() for imported in found]
    assert len(edges) > 500
    assert not [f"{a} imports {b}" for a, b in edges if layer_of(a) > layer_of(b)]


def test_models_never_import_each_other():
    wrong = []
    for importer, found in imports().items():
        package = importer.split(".")[1]
        others = APART - {package} if package in APART else set()
        wrong += [f"{importer} imports {imported}" for imported in found if imported.split(".")[1] in others]
    assert not wrong, "\n".join(wrong)


def test_the_command_line_imports_no_model():
    """It finds the models in the table of kinds, as it finds those of other packages."""
    models = APART - {"autoconfig"}
    upper = [name for name in imports() if name.split(".")[1] in LAYERS[0]]
    assert "gputrain.cli.app" in upper
    assert not [f"{a} imports {b}" for a in upper for b in imports()[a] if b.split(".")[1] in models]


def test_no_kind_of_model_imports_the_benchmark():
    """A kind says what is measured by plain data beside its KindWork; only its options extend those of a benchmark."""
    models = APART - {"autoconfig"}
    assert not [
        f"{a} imports {b}"
        for a, found in imports().items()
        for b in found
        if a.split(".")[1] in models and b.startswith("gputrain.bench") and b != "gputrain.bench.options"
    ]


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """Return the modules of an import cycle, or an empty list."""
    done: set[str] = set()

    def walk(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for imported in sorted(graph.get(name, ())):
            if found := walk(imported, [*path, name]):
                return found
        done.add(name)
        return []

    return next(filter(None, (walk(name, []) for name in graph)), [])


def test_there_is_no_import_cycle():
    """Imports in functions and for types only count too."""
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert not cycle(imports())


def test_class_names_are_unique():
    """In config.py files, every command may have a class of the same name for the same group of options."""
    places = defaultdict(set)
    for name, path in modules().items():
        if path.name == "config.py":
            continue
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef):
                places[node.name].add(name)
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                alias = node.targets[0].id
                if re.fullmatch(r"[A-Z][a-z]\w*", alias):  # A type alias; type variables have one letter.
                    places[alias].add(name)
    assert len(places) > 150
    wrong = [f"{name}: {', '.join(sorted(found))}" for name, found in sorted(places.items()) if len(found) > 1]
    assert not wrong, "\n".join(wrong)


def test_functions_and_files_are_short():
    wrong = []
    for name, path in modules().items():
        lines = path.read_text(encoding="utf-8").count("\n")
        if lines > MOST_LINES_OF_A_FILE:
            wrong.append(f"{name}: {lines} lines")
        for node in ast.walk(tree_of(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = (node.end_lineno or 0) - node.lineno + 1
                if length > MOST_LINES_OF_A_FUNCTION:
                    wrong.append(f"{name}.{node.name}: {length} lines")
    assert not wrong, "\n".join(wrong)


def test_the_package_has_few_files():
    """A reader opens three of them, not twelve, to follow a checkpoint from the step to the disk."""
    for folder, most in MOST_FILES.items():
        assert len(list((ROOT / folder).rglob("*.py"))) <= most, folder
    for folder, most in MOST_LINES.items():
        assert sum(len(path.read_bytes().splitlines()) for path in (ROOT / folder).rglob("*.py")) <= most, folder


def test_little_is_kept_from_the_formatter():
    kept = sum(path.read_text(encoding="utf-8").count("# fmt: skip") for path in PACKAGE.rglob("*.py"))
    assert kept <= MOST_UNFORMATTED


def test_variables_say_what_they_hold():
    """`one` hides it. STILL_WITH_ONE lists the parts of the package that have it."""
    wrong = []
    for name, path in modules().items():
        for node in ast.walk(tree_of(path)) if not {*name.split(".")} & STILL_WITH_ONE else ():
            is_named = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in NO_NAMES
            if is_named or (isinstance(node, ast.arg) and node.arg in NO_NAMES):
                wrong.append(f"{name}, line {node.lineno}")
    assert not wrong, "\n".join(wrong)


def texts() -> Iterator[Path]:
    """Yield the files of code and documentation."""
    yield from (path for path in ROOT.glob("*") if path.suffix in (".md", ".sh", ".bat"))
    for folder in ("gputrain", "docs", "examples", "tests", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".md", ".yaml", ".sh", ".bat") and "data" not in path.parts:
                yield path


def test_no_private_words():
    found = []
    for path in texts():
        if path.name == "test_structure.py":
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            match = WORDS.search(line)
            if match:
                found.append(f"{path.relative_to(ROOT)}:{number}: {match.group()}: {line.strip()[:80]}")
    assert not found, "\n".join(found)


def test_docstrings_begin_with_what_the_function_does():
    wrong = []
    for name, path in modules().items():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)):
                text = ast.get_docstring(node) or ""
                if re.match(r"(What|Whether|How|Where|Of|By|As) ", text) and not text.startswith("How gputrain trains"):
                    wrong.append(f"{name}: {text.splitlines()[0][:80]}")
    assert not wrong, "\n".join(wrong)


def test_comments_are_sentences():
    """A comment beside code that begins with a preposition or a relative pronoun cannot be read alone."""
    fragment = re.compile(r"# (of|by|as|in|for|with|where|what|which|that|from|how|whose|beside|beyond|else) ")
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
            beside_code = token.type == tokenize.COMMENT and not token.line.strip().startswith("#")
            if beside_code and fragment.match(token.string):
                wrong.append(f"{path.relative_to(ROOT)}:{token.start[0]}: {token.string[:90]}")
    assert not wrong, "\n".join(wrong)


def test_only_the_runtime_sets_torchs_switches():
    for path in PACKAGE.rglob("*.py"):
        if path.name != "runtime.py":
            text = path.read_text(encoding="utf-8")
            for switch in ("torch.backends.", "set_float32_matmul_precision", "torch.compile("):
                assert switch not in text, f"{path.name}: {switch}"


ADVICE = re.compile(r"\b(delete|erase|wipe|rm -\w+|remove (it|the|this|that|them|your))\b", re.IGNORECASE)
NO_ADVICE = {"delete"}  # How an edit of a text is named.


def test_no_message_advises_deleting():
    """What the program didn't make in this call may be all that a user has: messages name another folder or file."""
    wrong = []
    for name, path in modules().items():
        tree = tree_of(path)
        docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        wrong += [
            f"{name}: {node.value!r}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs
            if ADVICE.search(node.value) and node.value not in NO_ADVICE
        ]
    for path in (ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")):
        wrong += [
            f"{path.name}: {line}" for line in path.read_text(encoding="utf-8").splitlines() if ADVICE.search(line)
        ]
    assert not wrong, "\n".join(wrong)
