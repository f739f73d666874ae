"""What several tests share."""

import contextlib
import functools
import gc
import importlib
import itertools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.hub_server import hub  # noqa: F401  (A fixture.)
from tests.process import process_kept, seed_all

# Tests that run beside each other get one thread each, and so does what they start: OpenMP's threads wait for one
# another actively, and with more of them than cores a test can take thirty times as long. Shells and job managers set
# the number for a process that is alone.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"

# With AMX, oneDNN 3.12 (torch 2.13) computes some convolutions in bf16 wrongly. Trainings on a CPU are in fp32; tests
# compute in 16 bits there in the place of a GPU. oneDNN reads the variable at its first call.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

# A script that starts the tests in the background has SIGINT ignored, and nohup SIGHUP. The processes that the tests
# start would inherit that; of a signal with a handler they get the system's own.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda number, frame: None)

# The processes of a run share the bytecode of the tests and of the package: compiling it takes each of them seconds.
# The process that only distributes tests to others imports neither them nor torch, so that the others begin at once.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


TESTS = itertools.count()


@pytest.fixture(autouse=True)
def plans_of_one_test(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep no plan beyond a test, since many tests replace what a plan depends on."""
    folder = tmp_path_factory.getbasetemp() / "plans" / str(next(TESTS))
    monkeypatch.setattr("gputrain.caches.plan_folder", lambda: folder)


# Packages that the tests alone need. A test, or a file of tests, that imports a missing one is skipped by its name.
TOOLS = {
    "accelerate", "alifbe", "build", "diffusers", "hypothesis", "jiwer", "monotonic_alignment_search", "num2words",
    "parselmouth", "piper", "pymorphy3", "readme_renderer", "uztextnorm",
}  # fmt: skip


def missing_tool(call: pytest.CallInfo) -> str:
    """Return the name of the package for which a test or an import failed; nothing if there is none."""
    error = call.excinfo.value if call.excinfo else None
    while error is not None:
        name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
        if name in TOOLS:
            return name
        error = error.__cause__ or error.__context__
    return ""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> None:
    if tool := missing_tool(call):
        with pytest.raises(pytest.skip.Exception) as skipped:
            pytest.skip(f"{tool} is not installed")
        call.excinfo = skipped


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector):
    report = yield
    if tool := missing_tool(report.call):
        report.outcome, report.longrepr = "skipped", (str(collector.path), 1, f"Skipped: {tool} is not installed")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session):
    """Collect the tests without garbage collections, and then take what the imports made out of all later ones.

    Searching it again and again takes a sixth of the tests' time.
    """
    gc.disable()
    try:
        if "PYTEST_XDIST_WORKER" in os.environ and session.config.args == session.config.getini("testpaths"):
            import_own_share_first(session.config.rootpath)
        return (yield)
    finally:
        gc.enable()
        leave_alone_what_is_there()


def import_own_share_first(root: Path) -> None:
    """Compile other test files than the other workers at first: each then finds the bytecode of their files."""
    files = sorted((root / "tests").rglob("test_*.py"))
    worker, workers = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw")), os.environ["PYTEST_XDIST_WORKER_COUNT"]
    first = worker * len(files) // int(workers)
    for file in files[first:] + files[:first]:
        with contextlib.suppress(Exception, pytest.skip.Exception):  # The collection reports it.
            importlib.import_module(".".join(file.relative_to(root).with_suffix("").parts))


def leave_alone_what_is_there() -> None:
    gc.collect()
    gc.freeze()


PHOTOGRAPHS = ("astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg", "motorcycle_left.png", "retina.jpg")


def pytest_unconfigure() -> None:
    """Let the interpreter free everything at its end: libraries report objects that are frozen then as leaks."""
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def measured_rates() -> Iterator[None]:
    """Every training measures the rate of matrix products for a quarter of a second, and a planned one that of copies;
    those of the tests share the rates of this CPU."""
    from gputrain.hw import runtime
    from gputrain.planner import model_planner

    measured_once = [
        (runtime, "product_flops_per_second"),
        (model_planner, "product_flops_per_second"),
        (model_planner, "copied_bytes_per_second"),
    ]
    with pytest.MonkeyPatch.context() as patch:
        for module, name in measured_once:
            patch.setattr(module, name, _once_on_the_cpu(getattr(module, name)))
        yield


def _once_on_the_cpu(measure: Callable[..., float]) -> Callable[..., float]:
    once = functools.cache(measure)
    return lambda device, *precision: (once if device.type == "cpu" else measure)(device, *precision)


@pytest.fixture(scope="module")
def flops_known() -> Iterator[None]:
    """Trainings take 1e9 for the FLOPs of a step, as counting those of a small model takes as long as ten of its steps.

    Tests of the recipes and of their benchmarks count them.
    """
    with pytest.MonkeyPatch.context() as patch:
        for module in ("speech.training", "vae.data", "vocoder.recipe"):
            patch.setattr(f"gputrain.{module}.step_flops", lambda *_, **__: 10**9)
        yield


@pytest.fixture
def no_garbage_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let steps and CUDA graphs free memory without collecting the garbage of a whole test run, which takes longer than
    a test."""
    for module in ("cuda_graph", "step"):
        monkeypatch.setattr(f"gputrain.engine.{module}.release_memory", lambda: None)


# Hypothesis tries the same examples in each run, and sets no limit on their time.
with contextlib.suppress(ImportError):
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "suite", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("suite")


@pytest.fixture(autouse=True)
def process_of_a_test() -> Iterator[None]:
    seed_all()
    with process_kept():
        yield


@pytest.fixture(scope="module", autouse=True)
def process_of_a_file() -> Iterator[None]:
    """Ends what the fixtures of a file change with it, and leaves alone what its tests have imported, such as torch's
    compiler."""
    seed_all()
    with process_kept():
        yield
    leave_alone_what_is_there()


@pytest.fixture(scope="session")
def photographs(tmp_path_factory) -> Path:
    """A folder of small real photographs, about 150 pixels a side."""
    import skimage.data
    from PIL import Image

    folder = tmp_path_factory.mktemp("photographs")
    for name in PHOTOGRAPHS:
        with Image.open(Path(skimage.data.__file__).parent / name) as image:
            image.thumbnail((200, 200))
            image.convert("RGB").save(folder / name.replace(".jpg", ".png"))
    return folder


@pytest.fixture
def typed(monkeypatch, tmp_path):
    """Runs a command line to its end, in a folder of its own; gives its exit code and what it said, in one line."""
    from tests.command import gputrain_here

    monkeypatch.chdir(tmp_path)

    def run(*words: object) -> tuple[int, str]:
        done = gputrain_here(*words)
        return done.returncode, " ".join((done.stdout + done.stderr).split())

    return run
