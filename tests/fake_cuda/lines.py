"""Statements of the package that only run on CUDA: which there are, and which of them were reached.

A statement is one of them if it asks torch.cuda or NVML for something, if it stands in a branch that a comparison of a
device type with "cuda" or "cpu" or `is_cuda` leads to, or if it is of a module that needs Triton. It is known by its
file, its function and its text, so that edits elsewhere don't matter.
"""

import ast
import copy
import functools
import gc
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import NamedTuple

PACKAGE = Path(__file__).parents[2] / "gputrain"
TRITON_MODULES = {"tts/align_triton.py"}
HOOK = "_reached_cuda_only_statement"
ASKS = ("torch.cuda.", "pynvml.", "device='cuda'")
# torch.cuda.is_available is for machines without CUDA too, and what it leads to is found by itself.
HARMLESS = ("torch.cuda.is_available()", "torch.cuda.is_initialized()")


class Statement(NamedTuple):
    file: str
    function: str
    text: str


@functools.cache
def of_package() -> dict[Statement, None]:
    """All of them, in the order of files and lines."""
    files = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
    able = [file for file in files if file in TRITON_MODULES or re.search("cuda|cpu|pynvml", _source(file))]
    return {statement: None for file in able for statement, _ in _found(file, ast.parse(_source(file)))}


def _source(file: str) -> str:
    return (PACKAGE / file).read_text(encoding="utf-8")


def _found(file: str, tree: ast.Module) -> Iterator[tuple[Statement, ast.stmt]]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for statement in _within(node.body, file in TRITON_MODULES):
                yield Statement(file, node.name, header(statement)), statement


def _within(body: list[ast.stmt], everything: bool) -> Iterator[ast.stmt]:
    """Statements of a function that only run on CUDA, its inner functions left out."""
    for statement in body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        documents = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if not documents and (everything or _asks(header(statement)) or _chooses(statement)):
            yield statement
        here = _leads_to_cuda(statement.test) if isinstance(statement, ast.If) else None
        for name in ("body", "orelse", "handlers", "finalbody"):
            for inner in getattr(statement, name, []):
                part = inner.body if isinstance(inner, ast.ExceptHandler) else [inner]
                branch = here is not None and (here if name == "body" else not here)
                yield from _within(part, everything or branch)
        if here is False and isinstance(statement, ast.If) and _ends(statement.body):
            everything = True  # Everything after an early return of the CPU is for CUDA.


def _asks(text: str) -> bool:
    for harmless in HARMLESS:
        text = text.replace(harmless, "")
    return any(name in text for name in ASKS)


def _chooses(statement: ast.stmt) -> bool:
    """Whether an expression of a simple statement depends on the device."""
    if hasattr(statement, "body"):
        return False
    return any(isinstance(node, ast.IfExp) and _leads_to_cuda(node.test) is not None for node in ast.walk(statement))


def _leads_to_cuda(test: ast.expr) -> bool | None:
    """True: on CUDA alone its body runs; False: on CUDA alone what comes instead of its body; None: neither."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return True if any(_leads_to_cuda(value) is True for value in test.values) else None
    if isinstance(test, ast.Attribute) and test.attr == "is_cuda":
        return True
    if not (isinstance(test, ast.Compare) and isinstance(test.comparators[0], ast.Constant)):
        return None
    compared, equal = test.comparators[0].value, isinstance(test.ops[0], ast.Eq)
    if compared not in ("cuda", "cpu") or not isinstance(test.ops[0], (ast.Eq, ast.NotEq)):
        return None
    return (compared == "cuda") == equal


def _ends(body: list[ast.stmt]) -> bool:
    return isinstance(body[-1], (ast.Return, ast.Raise, ast.Continue))


def header(statement: ast.stmt) -> str:
    """The text of a statement, of a compound one that of its first line."""
    if not hasattr(statement, "body"):
        return ast.unparse(statement)
    empty = copy.copy(statement)
    for name in ("body", "orelse", "handlers", "finalbody"):
        if hasattr(empty, name):
            setattr(empty, name, [])
    return ast.unparse(empty)


# ------------------------------------------------------------------------------------------------ instrumentation


class _Marking(ast.NodeTransformer):
    """Puts a call of the hook before every statement that is to be seen."""

    def __init__(self, numbers: dict[ast.stmt, int]) -> None:
        self.numbers = numbers

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for name in ("body", "orelse", "finalbody"):
            body = getattr(node, name, None)
            if isinstance(body, list):
                setattr(node, name, [part for statement in body for part in self._marked(statement)])
        return node

    def _marked(self, statement: ast.stmt) -> list[ast.stmt]:
        if statement not in self.numbers:
            return [statement]
        (call,) = ast.parse(f"{HOOK}({self.numbers[statement]})").body
        for node in ast.walk(
            call
        ):  # The call takes the position of the statement, so that functions keep their first line.
            ast.copy_location(node, statement)
        return [call, statement]


class Reached:
    """Gathers the statements that are reached, from `begin` on. Functions get new code, so that nothing is slower."""

    def __init__(self) -> None:
        self.statements: list[Statement] = []
        self.seen: set[Statement] = set()
        self._before: list[tuple[FunctionType, CodeType]] = []
        self._made: dict[tuple[str, str, int], CodeType] = {}  # Key: file, name and first line of a function.

    def begin(self) -> None:
        for file in {statement.file for statement in of_package()}:
            self._made.update(self._codes(file))
        self.include_new_modules()

    def include_new_modules(self) -> None:
        """Watch modules that were imported after the beginning, too."""
        gc.unfreeze()  # gc.get_objects leaves out what conftest.py has frozen.
        for function in [held for held in gc.get_objects() if type(held) is FunctionType]:
            code = function.__code__
            new = self._made.get((code.co_filename, code.co_name, code.co_firstlineno))
            if new is not None and new is not code and new.co_freevars == code.co_freevars:
                self._before.append((function, code))
                function.__globals__[HOOK] = self._reach
                function.__code__ = new

    def end(self) -> None:
        for function, code in self._before:
            function.__code__ = code
            function.__globals__.pop(HOOK, None)

    def _reach(self, number: int) -> None:
        self.seen.add(self.statements[number])

    def _codes(self, file: str) -> dict[tuple[str, str, int], CodeType]:
        """The functions of a file, with calls of the hook."""
        tree, path = ast.parse(_source(file)), str(PACKAGE / file)
        numbers = {}
        for statement, node in _found(file, tree):
            numbers[node] = len(self.statements)
            self.statements.append(statement)
        code = compile(_Marking(numbers).visit(tree), path, "exec")
        return {(path, inner.co_name, inner.co_firstlineno): inner for inner in _nested(code)}


def _nested(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if inspect.iscode(constant):
            yield constant
            yield from _nested(constant)
