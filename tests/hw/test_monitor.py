"""The monitor: figures from readings, the thread, the RAM; and NVML, replaced by a library that is built here and
called through the real bindings."""

import itertools
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from gputrain.hw import monitor
from gputrain.hw.monitor import Monitor, Reading, pressure_of, read_ram, summary
from gputrain.hw.probe import ram
from tests.tables import each_row
from tests.waiting import HANG_SECONDS, wait_until

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_figures_are_means_and_maxima_of_what_is_known():
    readings = [
        Reading(used_gb=20.0, total_gb=32.0, utilisation=0.5, power_w=300.0, temperature_c=60.0, thermal=False),
        Reading(used_gb=28.0, total_gb=32.0, utilisation=1.0, power_w=None, temperature_c=71.0, thermal=True),
        Reading(used_gb=24.0, total_gb=32.0, utilisation=0.9, power_w=500.0, temperature_c=70.0),
    ]
    assert summary(readings) == {
        "memory/device_gb": 28.0,
        "gpu/utilisation": pytest.approx(0.8),
        "gpu/power_w": 400.0,
        "gpu/temperature_c": 71.0,
        "gpu/thermal_throttling": 0.5,
    }
    assert summary([Reading(used_gb=3.0), Reading(power_w=0.0)], "memory/ram_gb") == {
        "memory/ram_gb": 3.0,
        "gpu/power_w": 0.0,
    }
    assert summary([Reading()]) == summary([]) == {}


@each_row((28.79, ""), (28.8, "warn"), (30.39, "warn"), (30.4, "act"), (32.0, "act"), (None, ""))
def test_the_pressure_is_that_of_the_fullest_moment(used_gb, expected):
    readings = [Reading(used_gb=1.0, total_gb=32.0), Reading(used_gb=used_gb, total_gb=32.0), Reading(used_gb=31.0)]
    assert pressure_of(readings) == pressure_of(readings[::-1]) == expected
    assert pressure_of([]) == ""


def on_a_card(total_gb, others_gb, context_gb=0.6, free_share=1.0):
    """Return a reading of a training that reserves all that it may: 0.93 of the GPU, or what was free at first."""
    limit_gb = min(0.93 * total_gb, free_share * total_gb)
    used_gb = min(total_gb, limit_gb + context_gb + others_gb)
    reading = Reading(used_gb=used_gb, total_gb=total_gb, reserved_gb=used_gb - context_gb - others_gb)
    return reading, monitor.outside_gb(total_gb, limit_gb)


@each_row(*itertools.product([8.0, 10.0, 12.0, 24.0], [0.3, 0.6, 0.9]))
def test_what_a_training_takes_itself_is_no_pressure(total_gb, context_gb):
    """The allocator's 0.93 and the context together are more than 0.95 of a GPU of up to 24 GB."""
    reading, outside_gb = on_a_card(total_gb, 0.0, context_gb)
    assert reading.memory_share > (0.95 if total_gb < 24 or context_gb > 0.5 else 0.94)
    assert pressure_of([reading], outside_gb) == ""
    assert pressure_of([Reading(reading.used_gb, total_gb)], outside_gb) == pressure_of(
        [reading]
    )  # The allocator's part is unknown.


@pytest.mark.parametrize("total_gb", [8.0, 10.0, 12.0, 24.0])
def test_what_another_program_takes_on_the_way_is_pressure(total_gb):
    """Another program has left less memory than the training may reserve."""
    reading, outside_gb = on_a_card(total_gb, 2.0)
    half_full = Reading(used_gb=0.5 * total_gb, total_gb=total_gb, reserved_gb=0.5 * total_gb - 2.6)
    assert pressure_of([half_full], outside_gb) == ""  # Much is outside the allocator, but little is used.
    assert pressure_of([half_full, reading], outside_gb) == "act"


@pytest.mark.parametrize("total_gb", [8.0, 10.0, 12.0, 24.0])
def test_what_another_program_held_when_the_plan_was_made_is_no_pressure(total_gb):
    others_gb, context_gb = 1.5, 0.5
    free_share = 1 - (others_gb + context_gb) / total_gb
    for loaded_gb, expected in (
        (0.0, ""),
        (0.4, ""),
        (0.6, "act"),
    ):  # Memory that libraries or the other program took since.
        reading, outside_gb = on_a_card(total_gb, others_gb + loaded_gb, context_gb, free_share)
        assert pressure_of([reading], outside_gb) == expected, loaded_gb


class Meter:
    """Counts its readings, and returns the count as GB of 100."""

    def __init__(self):
        self.looks = 0

    def __call__(self):
        self.looks += 1
        return Reading(used_gb=float(self.looks), total_gb=100.0)


class Periods(threading.Event):
    """The monitor's event: a period passes when the test says so."""

    def __init__(self):
        super().__init__()
        self.begun, self.passed = [], threading.Semaphore(0)

    def wait(self, timeout=None):
        self.begun.append(timeout)
        assert self.passed.acquire(timeout=HANG_SECONDS)
        return self.is_set()


def test_the_thread_looks_once_a_period():
    meter, periods = Meter(), Periods()
    watching = Monitor(CPU, seconds=0.25, look=meter)
    watching._stopped = periods
    with watching:
        for looks in (1, 2, 3, 4):
            wait_until(lambda looks=looks: len(periods.begun) == looks, "the next period")
            assert meter.looks == looks
            if looks == 4:
                periods.set()
            periods.passed.release()
    assert not watching._thread.is_alive()
    assert (meter.looks, periods.begun) == (4, [0.25] * 4)


def test_the_thread_stops_in_the_middle_of_a_period(monkeypatch):
    monkeypatch.setattr(monitor, "HANG_SECONDS", HANG_SECONDS)
    meter = Meter()
    with Monitor(CPU, seconds=100 * HANG_SECONDS, look=meter) as watching:
        wait_until(lambda: meter.looks == 1, "the first reading")
    assert not watching._thread.is_alive()
    assert meter.looks == 1


def test_each_figure_is_of_the_time_since_the_last():
    readings = [Reading(10.0, 100.0), Reading(99.0, 100.0), Reading(91.0, 100.0)]
    shown, asked = [], threading.Event()

    def look():
        if len(shown) == 2:
            assert asked.wait(HANG_SECONDS)
        shown.append(readings[min(len(shown), 2)])
        return shown[-1]

    with Monitor(CPU, seconds=0.001, look=look) as watching:
        wait_until(lambda: watching.pressure() == "act", "the second reading")
        assert watching.pressure() == "act"  # A call of pressure() drops no reading.
        assert watching.figures() == {"memory/ram_gb": 99.0}
        assert (watching.pressure(), watching.figures()) == (
            "act",
            {"memory/ram_gb": 99.0},
        )  # Without new readings, the latest counts.
        asked.set()
        wait_until(lambda: watching.pressure() == "warn", "the third reading")
        assert watching.figures() == {"memory/ram_gb": 91.0}


def test_before_the_first_look_there_are_no_figures():
    watching = Monitor(CPU)
    assert (watching.figures(), watching.pressure()) == ({}, "")


def test_a_driver_that_hangs_holds_nobody(monkeypatch):
    monkeypatch.setattr(monitor, "HANG_SECONDS", 0.05)
    hanging, answer = threading.Event(), threading.Event()

    def look():
        hanging.set()
        assert answer.wait(HANG_SECONDS)
        return Reading(used_gb=1.0)

    with Monitor(CPU, look=look) as watching:
        assert hanging.wait(HANG_SECONDS)
        assert (watching.figures(), watching.pressure()) == ({}, "")
    assert watching._thread.is_alive()  # It still hangs, and nobody has waited for it.
    answer.set()
    watching._thread.join(HANG_SECONDS)


def test_the_thread_does_not_keep_the_process_alive():
    program = """if True:
        import threading, torch
        from gputrain.hw.monitor import Monitor
        Monitor(torch.device("cpu"), look=threading.Event().wait).__enter__()
        """
    subprocess.run([sys.executable, "-c", program], check=True, timeout=HANG_SECONDS)


def in_use_by_meminfo():
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    kib = {name: int(rest.split()[0]) for name, rest in (line.split(":") for line in lines)}
    return (kib["MemTotal"] - kib["MemAvailable"]) * 1024 / 1e9, kib["MemTotal"] * 1024 / 1e9


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="Linux shows its memory here")
def test_ram_by_meminfo():
    if ram()[0] < in_use_by_meminfo()[1] * 0.99:
        pytest.skip("a container's limit counts here")
    with Monitor(CPU, seconds=3600) as watching:
        wait_until(watching.figures, "the first reading")
        assert set(watching.figures()) == {"memory/ram_gb"}

    def readings_agree() -> bool:
        used_gb, total_gb = in_use_by_meminfo()
        reading = read_ram()
        assert reading.total_gb == pytest.approx(total_gb, rel=0.01)
        return abs(reading.used_gb - used_gb) < 0.01

    wait_until(readings_agree, "two readings between which other programs neither take nor free 10 MB")


def test_ram_that_is_not_known_is_no_pressure(monkeypatch):
    monkeypatch.setattr(monitor, "ram", lambda: (16.0, 0.0))
    assert read_ram() == Reading()
    monkeypatch.setattr(monitor, "ram", lambda: (16.0, 0.5))
    assert pressure_of([read_ram()]) == "act"


# -------------------------------------------------------------------------------------------------------- NVML

# Two GPUs, of which heat slows the second down, a slice of a third, and the third with MIG on. Environment variables
# name the calls that fail.
STAND_IN = r"""
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
typedef unsigned long long Bytes;
typedef struct { const char *uuid; int cut; Bytes total, used; unsigned percent, milliwatts, celsius, reasons; } Gpu;
typedef struct { Bytes total, free, used; } Memory;
typedef struct { unsigned gpu, memory; } Utilisation;
static Gpu gpus[] = {
    {"GPU-11111111-aaaa-bbbb-cccc-000000000001", 0, 24000000000ull, 6000000000ull, 97, 312500, 66, 0x4},
    {"GPU-22222222-aaaa-bbbb-cccc-000000000002", 0, 32000000000ull, 31000000000ull, 40, 501000, 71, 0xa4},
    {"MIG-33333333-aaaa-bbbb-cccc-000000000003", 0, 10000000000ull, 9200000000ull, 0, 0, 0, 0},
    {"GPU-44444444-aaaa-bbbb-cccc-000000000004", 1, 80000000000ull, 79000000000ull, 0, 90000, 50, 0},
};
static int looks;
int looks_so_far(void) { return looks; }
static int number(const char *name) { return getenv(name) ? atoi(getenv(name)) : 0; }
static void say(const char *word) { if (write(2, word, strlen(word)) < 0) abort(); }
int nvmlInitWithFlags(unsigned flags) { say(flags ? "?" : "init "); looks = 0; return number("INIT"); }
int nvmlShutdown(void) { say("shutdown "); return number("LOST_AFTER") ? 15 : 0; }
const char *nvmlErrorString(int result) { return result == 24 ? "wrong frequency" : "?"; }
int nvmlDeviceGetHandleByUUID(const char *uuid, Gpu **gpu) {
    for (*gpu = gpus; *gpu < gpus + 4; ++*gpu) if (!strcmp((*gpu)->uuid, uuid)) return 0;
    return 6;
}
int nvmlDeviceGetMigMode(Gpu *gpu, unsigned *now, unsigned *later) { *now = *later = 1; return gpu->cut ? 0 : 3; }
int nvmlDeviceGetMemoryInfo(Gpu *gpu, Memory *memory) {
    *memory = (Memory){gpu->total, gpu->total - gpu->used, gpu->used};
    return ++looks > number("LOST_AFTER") && number("LOST_AFTER") ? 15 : number("MEMORY");
}
int nvmlDeviceGetUtilizationRates(Gpu *gpu, Utilisation *share) {
    *share = (Utilisation){gpu->percent, 5};
    return *gpu->uuid == 'M' ? 3 : 0;
}
int nvmlDeviceGetPowerUsage(Gpu *gpu, unsigned *milliwatts) {
    *milliwatts = gpu->milliwatts;
    return *gpu->uuid == 'M' ? 4 : number("POWER");
}
int nvmlDeviceGetPowerManagementDefaultLimit(Gpu *gpu, unsigned *milliwatts) {
    *milliwatts = 575000;
    return *gpu->uuid == 'M' ? 3 : 0;
}
int nvmlDeviceGetEnforcedPowerLimit(Gpu *gpu, unsigned *milliwatts) {
    *milliwatts = gpu->milliwatts > 500000 ? 500000 : 575000;  // That of the second GPU is lowered.
    return *gpu->uuid == 'M' ? 3 : 0;
}
int nvmlDeviceGetTemperature(Gpu *gpu, int sensor, unsigned *celsius) {
    *celsius = gpu->celsius;
    return *gpu->uuid == 'M' ? 13 : sensor;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(Gpu *gpu, unsigned long long *reasons) {
    *reasons = gpu->reasons;
    return *gpu->uuid == 'M' ? 3 : 0;
}
"""

# Monitors the device of each case, and prints the result.
PROGRAM = """
import ctypes, json, logging, os, sys, time
from types import SimpleNamespace
import torch
from gputrain.hw.monitor import Monitor

class Kept(logging.Handler):
    def emit(self, record):
        warnings.append(record.getMessage())

logging.getLogger("gputrain").addHandler(Kept())
library = ctypes.CDLL("libnvidia-ml.so.1")
results = []
for uuid, environment in json.loads(sys.argv[1]):
    os.environ.update(environment)
    warnings = []
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid=uuid)  # A CPU build has none.
    with Monitor(torch.device("cuda"), seconds=0.001) as watching:
        # The first reading follows the start of NVML, which begins to count anew.
        while (not watching._latest or library.looks_so_far() < 10) and not warnings:
            time.sleep(0.001)
        first = [watching.pressure(), watching.figures()]
        time.sleep(0.05)
        watching.figures()
        results.append([*first, list(watching.figures()) == list(first[1]), warnings])
    sys.stderr.write("| ")
    sys.stderr.flush()
    for name in environment:
        del os.environ[name]
print(json.dumps(results))
"""

CASES = {
    "card": ("11111111-aaaa-bbbb-cccc-000000000001", {}),
    "full": ("22222222-aaaa-bbbb-cccc-000000000002", {}),
    "slice": ("33333333-aaaa-bbbb-cccc-000000000003", {}),
    "cut": ("44444444-aaaa-bbbb-cccc-000000000004", {}),
    "unknown": ("99999999-aaaa-bbbb-cccc-000000000009", {}),
    "no power": ("11111111-aaaa-bbbb-cccc-000000000001", {"POWER": "3"}),
    "no memory": ("22222222-aaaa-bbbb-cccc-000000000002", {"MEMORY": "3"}),
    "lost": ("22222222-aaaa-bbbb-cccc-000000000002", {"LOST_AFTER": "5"}),
    "driver": ("11111111-aaaa-bbbb-cccc-000000000001", {"INIT": "24"}),
}
COOL = {"gpu/thermal_throttling": 0.0, "gpu/power_brake": 0.0}  # At the maker's limit a cap is no throttling.
HOT = {"gpu/thermal_throttling": 1.0, "gpu/power_brake": 1.0, "gpu/power_capped": 1.0}
TORCH = {"memory/allocated_gb": 0.0, "memory/reserved_gb": 0.0}
WARNING = "NVML fails ({}); training goes on without the GPU's utilisation, power and temperature"


@pytest.fixture(scope="module")
def watched(tmp_path_factory) -> dict:
    """Return the result of each case, and its calls to start and shut down NVML."""
    if sys.platform != "linux" or shutil.which("gcc") is None:
        pytest.skip("needs gcc, and Linux, to build the stand-in for NVML")
    folder = tmp_path_factory.mktemp("nvml")
    (folder / "nvml.c").write_text(STAND_IN, encoding="ascii")
    library = folder / "libnvidia-ml.so.1"
    subprocess.run(["gcc", "-Wall", "-Werror", "-shared", "-fPIC", "-o", library, folder / "nvml.c"], check=True)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", PROGRAM, json.dumps(list(CASES.values()))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert done.returncode == 0, done.stderr
    calls = done.stderr.split("|")
    return {
        name: (*result, calls[number].split())
        for number, (name, result) in enumerate(zip(CASES, json.loads(done.stdout), strict=True))
    }


@each_row(
    (
        "card",
        "",
        {"memory/device_gb": 6.0, "gpu/utilisation": 0.97, "gpu/power_w": 312.5, "gpu/temperature_c": 66.0, **COOL},
    ),
    (
        "full",
        "act",
        {"memory/device_gb": 31.0, "gpu/utilisation": 0.4, "gpu/power_w": 501.0, "gpu/temperature_c": 71.0, **HOT},
    ),
    ("slice", "warn", {"memory/device_gb": 9.2}),
    ("no power", "", {"memory/device_gb": 6.0, "gpu/utilisation": 0.97, "gpu/temperature_c": 66.0, **COOL}),
    ("no memory", "", {"gpu/utilisation": 0.4, "gpu/power_w": 501.0, "gpu/temperature_c": 71.0, **HOT}),
)
def test_nvml_tells_of_the_device_with_torchs_uuid_what_it_can(watched, case, pressure, figures):
    expected = TORCH | {name: pytest.approx(value) for name, value in figures.items()}
    assert watched[case] == (pressure, expected, True, [], ["init", "shutdown"])


@pytest.mark.parametrize("case", ["cut", "unknown"])
def test_no_other_device_is_taken_for_it(watched, case):
    """A training does not run on a whole GPU with MIG on."""
    assert watched[case] == ("", TORCH, True, [WARNING.format("Not Found")], ["init", "shutdown"])


def test_a_gpu_lost_on_the_way_costs_one_warning(watched):
    pressure, figures, still_shown, *rest = watched["lost"]
    assert (pressure, figures["memory/device_gb"]) == ("act", 31.0)
    assert not still_shown  # The last reading before the loss is shown once.
    assert rest == [[WARNING.format("GPU is lost")], ["init", "shutdown"]]


def test_a_driver_that_does_not_start_costs_one_warning(watched):
    assert watched["driver"] == ("", TORCH, True, [WARNING.format("wrong frequency")], ["init"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, there is NVML")
def test_without_nvml_there_is_one_warning_and_a_training(caplog):
    with caplog.at_level(logging.WARNING), Monitor(CUDA, seconds=0.001) as watching:
        assert watching.figures() == TORCH
        assert watching.pressure() == ""
        assert not torch.cuda.is_initialized()
    assert caplog.messages == [WARNING.format("NVML Shared Library Not Found")]


@pytest.mark.parametrize(("device", "warnings"), [("cpu", []), ("cuda:0", ["import of pynvml halted"])])
def test_without_the_package_a_gpu_costs_one_warning_and_a_cpu_none(device, warnings, caplog, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with caplog.at_level(logging.WARNING), Monitor(torch.device(device), seconds=0.001) as watching:
        assert watching.pressure() == ""
    assert [message.partition(";")[0] for message in caplog.messages] == [
        WARNING.format(f"{start}; None in sys.modules").partition(";")[0] for start in warnings
    ]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_real_gpu():
    tensor_N = torch.ones(250_000_000, device=CUDA)  # 1 GB
    with Monitor(CUDA, seconds=0.02) as watching:
        wait_until(lambda: "memory/device_gb" in watching.figures(), "a reading of the GPU")
        figures = watching.figures()
    free, total = torch.cuda.mem_get_info()
    assert figures["memory/allocated_gb"] == pytest.approx(tensor_N.nbytes / 1e9, abs=0.1)
    assert figures["memory/device_gb"] == pytest.approx((total - free) / 1e9, abs=1.0)
