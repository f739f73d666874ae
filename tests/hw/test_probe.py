"""Facts about a machine: from NVML, from the PCI bus, and written and read again."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest
import torch

from gputrain.hw.driver import NO_DRIVER, Card, Driver
from gputrain.hw.probe import TASKS_OF_PROCESS, Machine, probe, ram, usable_cores
from gputrain.serialization import from_json
from tests.tables import each_row

MEMORY = {"MemTotal": 999_000_000, "MemAvailable": 900_000_000, "SwapTotal": 16_777_212, "SwapFree": 1}


@pytest.fixture
def fake_proc(tmp_path, monkeypatch):
    """Returns the folder that takes the place of /proc, with a machine of 1 TB."""
    others = ("MemFree", "Buffers", "Cached", "Shmem", "Active", "Inactive", "Slab")
    lines = [f"{name}:   {size} kB\n" for name, size in {**dict.fromkeys(others, 0), **MEMORY}.items()]
    (tmp_path / "meminfo").write_text("".join(lines), encoding="ascii")
    (tmp_path / "vmstat").write_text("pswpin 0\npswpout 0\n", encoding="ascii")
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    return tmp_path


# A shared library in place of the driver's. Its first card is an RTX 5090, its second one a card that shares its memory
# with the CPU. NVML_INIT is the code that its start returns, NVML_CARDS the
# number of cards; every start adds a line to NVML_LOG.
FAKE_NVML = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#define NOT_SUPPORTED 3
static int number(const char *name, int otherwise) { return getenv(name) ? atoi(getenv(name)) : otherwise; }
static int second(void *card) { return card == (void *)2; }
int nvmlInitWithFlags(unsigned flags) {
    FILE *log = fopen(getenv("NVML_LOG"), "a");
    fputs("started\n", log);
    fclose(log);
    if (getenv("NVML_HANGS")) sleep(60);
    return number("NVML_INIT", 0);
}
int nvmlShutdown(void) { return 0; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { strncpy(text, "580.95.05", size); return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13010; return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = number("NVML_CARDS", 2); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **card) { *card = (void *)(long)(index + 1); return 0; }
int nvmlDeviceGetName(void *card, char *text, unsigned size) {
    strncpy(text, second(card) ? "NVIDIA GB10" : "NVIDIA GeForce RTX 5090", size); return 0; }
int nvmlDeviceGetDriverModel(void *card, unsigned *current, unsigned *pending) { return NOT_SUPPORTED; }
"""
CARDS = (
    Card("NVIDIA GeForce RTX 5090"),
    Card("NVIDIA GB10"),
)


@pytest.fixture(scope="module")
def fake_nvml(tmp_path_factory):
    """Returns the environment in which a process finds that library, and a program nvidia-smi that is counted too."""
    compiler = shutil.which("cc")
    if sys.platform != "linux" or compiler is None:
        pytest.skip("the stand-in for NVML is compiled with cc on Linux")
    folder = tmp_path_factory.mktemp("nvml")
    (folder / "nvml.c").write_text(FAKE_NVML, encoding="ascii")
    library = folder / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-w", "-o", library, folder / "nvml.c"], check=True)
    program = folder / "nvidia-smi"
    program.write_text('#!/bin/sh\necho "nvidia-smi" >>"$NVML_LOG"\n', encoding="ascii")
    program.chmod(0o755)
    return {**os.environ, "LD_LIBRARY_PATH": str(folder), "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def asked(environment, statements: str, **variables: str) -> Driver:
    """Returns the driver that a process of its own finds."""
    program = f"{statements}\nimport dataclasses, json\nprint(json.dumps(dataclasses.asdict(driver)))"
    done = subprocess.run(
        [sys.executable, "-c", program], env={**environment, **variables}, capture_output=True, check=True, text=True
    )
    return from_json(Driver, json.loads(done.stdout))


ASK = "from gputrain.hw.driver import query_driver\ndriver = query_driver()"


def test_the_driver_is_asked_once_in_a_process(fake_nvml, tmp_path):
    """Several probes start NVML once and no other process."""
    log = tmp_path / "log"
    probes = "from gputrain.hw.probe import probe\nfor _ in range(3):\n    driver = probe().driver"
    assert asked(fake_nvml, probes, NVML_LOG=str(log)) == Driver("580.95.05", "13.1", CARDS)
    assert log.read_text(encoding="ascii") == "started\n"


@each_row(
    ({"NVML_CARDS": "1"}, Driver("580.95.05", "13.1", CARDS[:1])),
    ({"NVML_CARDS": "0"}, Driver(error="no devices were found")),
    ({"NVML_INIT": "9"}, Driver(error="Driver Not Loaded")),
    ({"NVML_INIT": "18"}, Driver(error="RM has detected an NVML/RM version mismatch.")),
    ({"LD_LIBRARY_PATH": "."}, NO_DRIVER),
)
def test_what_nvml_reports(fake_nvml, tmp_path, variables, expected):
    if "LD_LIBRARY_PATH" in variables and Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has an NVIDIA driver")
    assert asked(fake_nvml, ASK, NVML_LOG=str(tmp_path / "log"), **variables) == expected


def test_a_missing_package_and_an_unexpected_answer_are_no_hanging_driver(fake_nvml, tmp_path):
    log = str(tmp_path / "log")
    missing = f"import sys\nsys.modules['pynvml'] = None\n{ASK}"
    assert asked(fake_nvml, missing, NVML_LOG=log) == Driver(error="the package nvidia-ml-py is not installed")
    odd = f"import pynvml\npynvml.nvmlSystemGetDriverVersion = lambda: b'\\xff'.decode()\n{ASK}"
    assert "can't decode byte 0xff" in asked(fake_nvml, odd, NVML_LOG=log).error


def test_a_driver_that_hangs(fake_nvml, tmp_path):
    """The process goes on without an answer, and ends although the call has not returned."""
    impatient = f"from gputrain.hw import driver as module\nmodule.ANSWER_SECONDS = 0.1\n{ASK}"
    found = asked(fake_nvml, impatient, NVML_LOG=str(tmp_path / "log"), NVML_HANGS="1")
    assert found == Driver(error="the driver gives no answer within 0.1 seconds")


def test_this_machine():
    machine = probe()
    assert machine.torch == torch.__version__
    assert machine.python == ".".join(map(str, sys.version_info[:3]))
    assert bool(machine.gpu) is torch.cuda.is_available()
    assert 1 <= machine.cpu_cores <= os.cpu_count()
    if machine.system == "Linux":
        assert (
            0.1 < machine.ram_free_gb < machine.ram_gb <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
        )


@pytest.mark.skipif(sys.platform != "linux", reason="containers and their limits are Linux's")
def test_ram_in_a_container(fake_proc):
    """Write a limit of 1 GiB, of which 1 MiB is free, and 3 MB of the rest are cached files."""
    tmp_path = fake_proc
    limit, used, stat = tmp_path / "memory.max", tmp_path / "memory.current", tmp_path / "memory.stat"
    limit.write_text(f"{2**30}\n", encoding="ascii")
    used.write_text(f"{2**30 - 2**20}\n", encoding="ascii")
    stat.write_text("anon 7\nfile 900\ninactive_file 1000000\nactive_file 2000000\ninactive_anon 5\n", encoding="ascii")
    assert ram(tmp_path, tmp_path) == (2**30 / 1e9, (2**20 + 3_000_000) / 1e9)
    stat.unlink()
    assert ram(tmp_path, tmp_path) == (2**30 / 1e9, 2**20 / 1e9)
    limit.write_text("max\n", encoding="ascii")
    assert ram(tmp_path, tmp_path) == (999_000_000 * 1024 / 1e9, 900_000_000 * 1024 / 1e9)
    (tmp_path / "meminfo").unlink()
    assert ram(tmp_path, tmp_path) == (0.0, 0.0)


@pytest.mark.skipif(sys.platform != "linux", reason="containers and their limits are Linux's")
@pytest.mark.parametrize(
    ("line", "folder", "names", "prefix"),
    [
        ("0::/job/task", "job", ("memory.max", "memory.current"), ""),
        ("7:memory:/job/task", "memory/job", ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_"),
        ("7:memory:/elsewhere", "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_"),
    ],
)
def test_limits_of_the_group_that_the_process_is_in(fake_proc, line, folder, names, prefix):
    """Limits are read in version 2 and 1, from parent groups too, and from the root, a container's own group."""
    tmp_path = fake_proc
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text(f"9:cpu:/other\n{line}\n", encoding="ascii")
    group = tmp_path / folder
    group.mkdir(parents=True, exist_ok=True)
    for name, value in zip(names, (2**30, 2**29), strict=True):
        (group / name).write_text(f"{value}\n", encoding="ascii")
    (group / "memory.stat").write_text(f"{prefix}active_file 3000000\nother 5\n", encoding="ascii")
    assert ram(tmp_path, tmp_path) == (2**30 / 1e9, (2**29 + 3_000_000) / 1e9)


@pytest.mark.skipif(sys.platform != "linux", reason="containers and their limits are Linux's")
def test_quotas_of_cores_and_limits_of_processes_count(tmp_path, monkeypatch):
    """They are those of a container as the root, of a job and of its parents, in version 2 and 1."""
    monkeypatch.setattr("joblib.cpu_count", lambda: 64)
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    joined, tasks = "4:cpu,cpuacct:/job/task\n5:pids:/job", TASKS_OF_PROCESS + 64
    rows = [
        ("0::/job/task", {"job/cpu.max": "150000 50000"}, 3),
        ("0::/job/task", {"job/cpu.max": "max 100000", "job/task/cpu.max": "150000 100000", "cpu.max": "1 1"}, 1),
        ("0::/", {"cpu.max": "max 100000", "pids.max": "max", "pids.current": "9"}, 64),
        (joined, {"cpu/job/task/cpu.cfs_quota_us": "200000", "cpu/job/task/cpu.cfs_period_us": "100000"}, 2),
        (joined, {"cpu/job/cpu.cfs_quota_us": "-1", "cpu/job/cpu.cfs_period_us": "100000"}, 64),
        (joined, {"pids/job/pids.max": f"{9 + 5 * tasks}", "pids/job/pids.current": "9"}, 5),
        ("0::/job", {"job/pids.max": "20", "job/pids.current": "19"}, 1),
        ("0::/job", {}, 64),
    ]
    found = []
    for number, (line, files, _) in enumerate(rows):
        root = tmp_path / str(number)
        for name, value in {"self/cgroup": line, **files}.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(f"{value}\n", encoding="ascii")
        found.append(usable_cores(root, root))
    assert found == [cores for _, _, cores in rows]


@pytest.mark.skipif(sys.platform != "linux", reason="as set by taskset on Linux")
def test_cores_that_the_process_may_not_use_do_not_count():
    code = "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])\n"
    code += "from gputrain.hw.probe import usable_cores; print(usable_cores())"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "1\n"


def test_facts_are_written_and_read(tmp_path):
    machine = replace(
        probe(),
        gpu="NVIDIA GeForce RTX 5090",
        compute_capability=(12, 0),
        compiled_capabilities=("sm_90", "sm_120"),
        driver=Driver("580.95.05", "13.0", (Card("NVIDIA GeForce RTX 5090", "WDDM"),)),
    )
    (tmp_path / "machine.json").write_text(json.dumps(asdict(machine)), encoding="utf-8")
    assert from_json(Machine, json.loads((tmp_path / "machine.json").read_text(encoding="utf-8"))) == machine
    few = {"system": "Linux", "cpu_cores": 2}
    assert from_json(Machine, few) == Machine(**few)


def test_amds_cards_have_their_code():
    card = {
        "gpu": "AMD Radeon PRO W7900",
        "compute_capability": (11, 0),
        "compiled_capabilities": ("gfx942", "gfx1100"),
    }
    assert Machine(system="Linux", cpu_cores=1, **card).has_kernels
