"""The first line of an error's message, and packages that are not installed."""

import ast
import re
import sys
from pathlib import Path

import pytest
from torch import nn

from gputrain.errors import (
    DISTRIBUTIONS,
    UserError,
    first_line,
    import_package,
    missing_package,
    require,
    without_secrets,
)
from tests.tables import each_row

ROOT = Path(__file__).parents[1]


@each_row(
    ("see https://b:c@d/e?f and http://g:1/h?i=j&k=l, m", "see https://d/e and http://g:1/h, m"),
    ("ftp://a:b@c/d.pt?token=e: no such file", "ftp://c/d.pt: no such file"),
    ("unexpected extra argument (json://a:b@c/d)", "unexpected extra argument (json://c/d)"), ("hf://a@b", "hf://a@b"),
    ("https:/a:b@c/d?e", "https:/c/d"), ("s3://KEY:b@c/d", "s3://c/d"), ("('https://a/b?c')", "('https://a/b')"),
    ("token hf_abcdefghijABCDEFGHIJklmn, not", "token hf_, not"), ("hf_hub, a@b, why? so", "hf_hub, a@b, why? so"),
    ("https://huggingface.co/a/b/tree/main#x", "https://huggingface.co/a/b/tree/main#x"),
    ("'hf://datasets/a/b/train-?.parquet'", "'hf://datasets/a/b/train-?.parquet'"),
)  # fmt: skip
def test_secrets_of_addresses_are_left_out(text, shown):
    assert without_secrets(text) == shown


def test_the_first_line_says_what_is_wrong():
    with pytest.raises(RuntimeError) as error:
        nn.Linear(2, 3).load_state_dict(nn.Linear(2, 4).state_dict())
    assert "state_dict for Linear: size mismatch for weight" in first_line(error.value)
    assert "bias" not in first_line(error.value)
    assert first_line(ValueError("one:")) == "one:"
    assert first_line(ValueError("one\ntwo")) == "one"
    assert first_line(KeyError()) == "KeyError"


@each_row(
    (("soxr",), {}, "the package soxr is not installed", "pip install soxr"),
    (("skimage",), {}, "the package scikit-image is not installed", "pip install scikit-image"),
    (
        ("rapidfuzz", "swift_f0", "soxr"),
        {},
        "the packages rapidfuzz, swift-f0, soxr are not installed",
        "pip install rapidfuzz swift-f0 soxr",
    ),
    (
        ("torch_fidelity",),
        {"needed_by": "rfid", "otherwise": "leave --rfid out"},
        "rfid: the package torch-fidelity is not installed",
        "pip install torch-fidelity, or leave --rfid out",
    ),
)
def test_a_missing_package_is_named_with_how_to_install_it(modules, options, message, hint):
    error = missing_package(*modules, **options)
    assert (error.message, error.hint) == (message, hint)


@pytest.mark.parametrize(
    "cause", ["ImportError from KeyboardInterrupt()", "ImportError('KeyboardInterrupt: \\n\\nAt:')"]
)
def test_a_signal_while_a_compiled_module_is_imported_is_no_broken_package(cause, tmp_path, monkeypatch):
    (tmp_path / "interrupted_package.py").write_text(f"raise {cause}")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        import_package("interrupted_package")


def test_missing_and_broken_packages_are_told_apart(tmp_path, monkeypatch):
    (tmp_path / "broken_package.py").write_text("raise OSError('libbroken.so.1: cannot open shared object file')")
    (tmp_path / "whole_package.py").write_text("answer = 42")
    monkeypatch.syspath_prepend(tmp_path)
    require("broken_package", "whole_package")
    assert "broken_package" not in sys.modules
    with pytest.raises(UserError, match="the package no-such-package is not installed"):
        require("whole_package", "no_such_package")
    with pytest.raises(UserError, match=r"broken-package cannot be imported: libbroken\.so\.1") as broken:
        import_package("broken_package", otherwise="do without")
    assert broken.value.hint == "pip install --force-reinstall broken-package, or do without"
    assert import_package("whole_package").answer == 42
    monkeypatch.setitem(sys.modules, "whole_package", None)
    with pytest.raises(UserError, match="the package whole-package is not installed"):
        import_package("whole_package")
    with pytest.raises(UserError, match="the package beside-it is not installed"):
        import_package("json", "beside_it")


def requirements(of: str) -> set[str]:
    """Return the names of the packages that a list in pyproject.toml holds. (Python 3.10 reads no TOML.)"""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(rf"^{of} = (\[.*?\])$", text, re.MULTILINE | re.DOTALL)
    assert found, of
    return {re.split(r"[>=;\[ ]", one)[0] for one in ast.literal_eval(found[1])}


def test_every_imported_package_is_a_dependency_or_one_of_an_extra():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = text.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    extras = re.findall(r"^([\w-]+) = \[", section, re.MULTILINE)
    base, optional = requirements("dependencies"), set().union(*map(requirements, {*extras} - {"all", "dev"}))
    assert {"asr", "onnx", "f0", "fid"} <= {*extras}
    assert not base & optional
    imported = set()
    for path in (ROOT / "gputrain").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            imported |= {name.partition(".")[0] for name in names}
    brought = {"pyarrow", "tqdm", "torchvision", "piper"}
    others = imported - sys.stdlib_module_names - {"gputrain", "triton", "tomli"} - brought
    distributions = {DISTRIBUTIONS.get(module, module.replace("_", "-")) for module in others}
    assert distributions <= base | optional, distributions - base - optional
