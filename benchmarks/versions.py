"""Tries the declared range of Python and of every dependency: `make versions`.

For each Python from 3.10 to 3.14 that this machine has, uv installs a wheel of gputrain and its extra `all`, with the
lowest and with the newest versions of everything, into an environment of its own, which is removed afterwards: one row
of the table. The checks run outside the checkout, where only the wheel's files are found; the tests alone run in it.
torch comes from the default package index, whose Linux builds bring some gigabytes of CUDA libraries; uv downloads them
once. `--short` is what .ci/run does: the lowest versions on the oldest Python, without the tests.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
RESOLUTIONS = {"lowest": "lowest-direct", "newest": "highest"}
SHOWN = ("torch", "transformers", "numpy")  # Versions in the table.
SECONDS_TO_INSTALL = 1800
SECONDS_OF_A_CHECK = 3600
# All others come as wheels: the lowest version in the range may be older than this Python, and not compile for it.
# docopt has no wheel and needs no compiler.
FROM_SOURCE = ("docopt",)
IMPORT_ALL = """
import importlib, pkgutil, gputrain
for module in pkgutil.walk_packages(gputrain.__path__, "gputrain."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""
PROGRAM = ("-m", "gputrain")
Wanted = tuple[Path, str]  # A wheel and an extra.
Checks = dict[str, list[tuple[str, ...]]]  # Arguments of Python, for each process of a check.
QUICK: Checks = {
    "import": [("-c", IMPORT_ALL)],
    "--help": [(*PROGRAM, "--help")],
    "plan": [(*PROGRAM, "plan", f"train-{kind}", "--gpu", "l4") for kind in ("vae", "vocoder", "tts", "asr")],
}
MORE: Checks = {
    "check": [(*PROGRAM, "check-compatibility")],
    "tests": [("-m", "pytest", "-p", "no:cacheprovider", "-n", "2", "--dist", "loadfile")],
}


def main() -> int:
    arguments = parsed()
    uv = shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if uv is None:
        print("versions: found no uv; install the development tools: ./setup.sh test", file=sys.stderr)
        return 2
    found = {version: path for version in arguments.python if (path := interpreter(uv, version))}
    chosen = [*found][:1] if arguments.short else [*found]
    checks = QUICK if arguments.short else QUICK | MORE
    if arguments.without_tests:
        checks = {name: commands for name, commands in checks.items() if name != "tests"}
    resolutions = ["lowest"] if arguments.short else arguments.versions
    wanted = (arguments.wheel.resolve(), "dev" if "tests" in checks else "all")
    rows = [tried(uv, version, found[version], each, checks, wanted) for version in chosen for each in resolutions]
    print_table([["python", "versions", *SHOWN, "install", *checks], *rows])
    reasons = dict.fromkeys(arguments.python, "no interpreter on PATH, of uv or of pyenv")
    reasons.update(dict.fromkeys(found, "--short"))
    not_tried = [f"Python {v}: {reasons.get(v, 'not asked for')}" for v in PYTHONS if v not in chosen]
    not_tried += [f"{each} versions: not asked for" for each in RESOLUTIONS if each not in resolutions]
    not_tried += [f"{name}: not asked for" for name in QUICK | MORE if name not in checks]
    print("not tried:", *not_tried, "other operating systems and builds of torch: only this machine's", sep="\n  ")
    return int(not rows or any("FAILED" in cell for row in rows for cell in row))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path, help="a wheel of gputrain, as `python -m build` makes it")
    parser.add_argument("--python", nargs="+", choices=PYTHONS, default=PYTHONS, help="versions of Python to try")
    parser.add_argument("--versions", nargs="+", choices=RESOLUTIONS, default=[*RESOLUTIONS], help="of dependencies")
    parser.add_argument("--without-tests", action="store_true", help="leave out the tests, which take minutes each")
    parser.add_argument("--short", action="store_true", help="lowest versions, oldest Python, neither check nor tests")
    arguments = parser.parse_args()
    if not arguments.wheel.is_file():
        parser.error(f"{arguments.wheel}: no such file; make it: python -m build --no-isolation")
    return arguments


def interpreter(uv: str, version: str) -> str:
    """Returns the path of a Python that is at hand; an empty string if there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    path = os.pathsep.join([os.environ["PATH"], *(str(folder) for folder in sorted(pyenv.glob(f"{version}.*/bin")))])
    command = [uv, "python", "find", "--no-project", "--no-python-downloads", "--system", version]
    found = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PATH": path}, check=False)
    return found.stdout.strip() if found.returncode == 0 else ""


def tried(uv: str, version: str, python: str, versions: str, checks: Checks, wanted: Wanted) -> list[str]:
    """Installs a wheel with an extra, and checks it. Returns a row of the table; what fails is printed at once."""
    with tempfile.TemporaryDirectory(prefix="gputrain-versions-") as folder:
        path = str(Path(folder, "venv"))
        began = time.monotonic()
        row = [version, versions]
        error = install(uv, python, path, RESOLUTIONS[versions], wanted)
        if error:
            print(f"versions: Python {version}, {versions}: could not install gputrain\n{error}", file=sys.stderr)
            return [*row, *("" for _ in SHOWN), "FAILED", *("" for _ in checks)]
        own = str(Path(path, "Scripts" if os.name == "nt" else "bin", "python"))
        listed = subprocess.run([uv, "pip", "list", "-q", "-p", own, "--format=json"], capture_output=True, check=True)
        numbers = {each["name"]: each["version"] for each in json.loads(listed.stdout)}
        row += [*(numbers[name] for name in SHOWN), f"{time.monotonic() - began:.0f} s"]
        for name, commands in checks.items():
            began = time.monotonic()
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                passed = all(pool.map(lambda command: passes([own, *command], folder), commands))
            row.append(f"{'ok' if passed else 'FAILED'} {time.monotonic() - began:.0f} s")
            print(f"versions: Python {version}, {versions}: {name}: {row[-1]}", file=sys.stderr)
        return row


def install(uv: str, python: str, path: str, resolution: str, wanted: Wanted) -> str:
    """Makes an environment; returns what uv says if it could not."""
    environment = {**os.environ, "UV_HTTP_TIMEOUT": "30", "UV_HTTP_RETRIES": "2"}  # It ends if the index is dead.
    source = [option for name in FROM_SOURCE for option in ("--no-binary", name)]
    installing = [uv, "pip", "install", "-q", "-p", path, "--resolution", resolution, "--only-binary", ":all:", *source]
    # Only what a list of requirements names has its lowest version; what the wheel needs would have the newest one.
    wheel, extra = wanted
    installing += ["-r", "pyproject.toml", "--extra", extra, str(wheel)]
    for command in ([uv, "venv", "-q", "-p", python, path], installing):
        code, output = output_of(command, ROOT, environment, SECONDS_TO_INSTALL)
        if code:
            return output
    return ""


def passes(command: list[str], folder: str) -> bool:
    """Returns whether a command ends with 0; prints the end of its output if not. The tests run in the repository."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["OMP_NUM_THREADS"] = "1"  # Threads of processes that run at the same time wait for one another.
    code, output = output_of(command, ROOT if "pytest" in command else Path(folder), environment, SECONDS_OF_A_CHECK)
    if code:
        print(f"exit code {code}: {' '.join(command)}\n{output[-5000:]}", file=sys.stderr)
    return code == 0


def output_of(command: list[str], where: Path, environment: dict[str, str], seconds: int) -> tuple[int, str]:
    try:
        done = subprocess.run(
            command, cwd=where, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=seconds, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return 124, f"it was ended after {seconds} s"
    return done.returncode, done.stdout


def print_table(rows: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


if __name__ == "__main__":
    sys.exit(main())
