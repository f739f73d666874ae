"""The wheel: made from the source distribution, as `python -m build` does, it has all files and what an index shows."""

import email.message
import email.parser
import email.policy
import importlib
import importlib.util
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

from tests.tables import each_row

ROOT = Path(__file__).parents[1]


class Built(NamedTuple):
    wheel: set[str]  # Names of the files.
    sdist: set[str]
    metadata: email.message.EmailMessage

    @property
    def description(self) -> str:
        return str(self.metadata.get_content())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    importlib.import_module("build")
    # A copy, because setuptools remembers in the checkout which files earlier builds had.
    folder, source = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("source")
    shutil.copytree(ROOT / "gputrain", source / "gputrain", ignore=shutil.ignore_patterns("__pycache__"))
    (source / "tests").mkdir()
    shutil.copy(Path(__file__), source / "tests")
    for name in ("LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, source]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as files, tarfile.open(sdist) as archive:
        names = set(files.namelist())
        (path,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        parser = email.parser.BytesParser(policy=email.policy.default.clone(utf8=True))
        inside = {name.partition("/")[2] for name in archive.getnames()}
        return Built(names, inside, parser.parsebytes(files.read(path)))  # type: ignore[arg-type]


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(built: Built) -> None:
    own = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "gputrain").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {"gputrain/py.typed", "gputrain/report/report.css", "gputrain/fetch/catalogue.yaml"} <= own
    info = {name for name in built.wheel if ".dist-info/" in name}
    assert built.wheel - info == own
    assert {"LICENSE", "METADATA", "RECORD", "WHEEL", "entry_points.txt"} <= {Path(name).name for name in info}


def test_the_source_distribution_has_what_builds_it_and_no_tests(built: Built) -> None:
    assert {"LICENSE", "README.md", "pyproject.toml", "setup.py", "gputrain/__init__.py"} <= built.sdist
    assert not [name for name in built.sdist if name.startswith(("tests", "docs", "benchmarks", "shared"))]


def test_an_index_shows_the_readme_without_links_that_lead_nowhere(built: Built) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert built.metadata["Description-Content-Type"] == "text/markdown"
    assert re.findall(r"^#+ .*", built.description, re.MULTILINE) == re.findall(r"^#+ .*", readme, re.MULTILINE)
    renderer = importlib.import_module("readme_renderer.markdown")
    page = renderer.render(built.description)
    assert page, "it cannot be rendered"
    targets = re.findall(r"""(?:href|src)=["']([^"']*)""", page)
    assert not [target for target in targets if not target.startswith(("https://", "http://", "#", "mailto:"))]
    assert built.description.count("```") == readme.count("```")


def test_the_metadata_name_all_kinds_and_every_python(built: Built) -> None:
    for word in ("VAE", "vocoder", "voice", "recogniser", "plan"):
        assert word in built.metadata["Summary"], word
    known = built.metadata.get_all("Classifier")
    assert known is not None
    assert [f"Programming Language :: Python :: 3.{minor}" in known for minor in range(9, 16)] == [
        False, True, True, True, True, True, False,
    ]  # fmt: skip
    assert built.metadata["License-Expression"] == "Apache-2.0"


def setup_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("setup_script", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@each_row(
    ("see [docs/a.md](docs/a.md).", "see docs/a.md."),
    ("[`x`](../x#part), [y](https://example.com/y), [z](#z)", "`x`, [y](https://example.com/y), [z](#z)"),
    ("![a *b*](docs/a.png)\nend", "\nend"),
    ("[![shown](docs/a.png)](docs/a.md) and [![kept](https://e.org/a.svg)](https://e.org)",
     " and [![kept](https://e.org/a.svg)](https://e.org)"),
    ('<img width="9" src="docs/a.png" alt="a"> <img src="https://e.org/a.png">', ' <img src="https://e.org/a.png">'),
    ("[a [b] c](d.md \"title\")", "a [b] c"),
    ("```bash\nx[0](y)\n```\n[a](b)", "```bash\nx[0](y)\n```\na"),
)  # fmt: skip
def test_relative_links_become_their_text(text: str, shown: str) -> None:
    assert setup_script().description(text) == shown
