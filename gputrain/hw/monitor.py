"""Monitors the device during a training: memory, utilisation, power and temperature.

A thread reads NVML, which counts all programs on the GPU and does not use CUDA, so that it affects neither the
training nor the data workers that it forks. From torch it reads only the allocator's own counts. On the CPU the RAM is
monitored: the kernel kills a run that takes too much of it. GB is 1e9 bytes.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from statistics import fmean
from types import TracebackType
from typing import Literal

import torch

from gputrain.hw.driver import nvml, nvml_answer
from gputrain.hw.probe import ram

log = logging.getLogger(__name__)

WARN_SHARE, ACT_SHARE = 0.90, 0.95  # Shares of the device's memory.
# GPU memory that a process takes outside torch's allocator, with all of CUDA's libraries loaded.
CONTEXT_GB = 1.0
LIBRARIES_GB = 0.5  # Part of CONTEXT_GB for libraries that load after the plan has read the free memory.
LOW_POWER_SHARE = 0.95  # Share of the maker's power limit below which a limit counts as lowered.
HANG_SECONDS = 5  # Time that the end of a training waits for a driver that does not answer.

Pressure = Literal["", "warn", "act"]


@dataclass(frozen=True)
class Reading:
    """One reading of the device; None if the device does not report a value."""

    used_gb: float | None = None  # Memory used by all programs.
    total_gb: float | None = None
    utilisation: float | None = None  # Share of the last moments in which a kernel ran, 0 to 1.
    power_w: float | None = None
    temperature_c: float | None = None
    thermal: float | None = None  # 1 if heat slows the GPU down, otherwise 0.
    power_brake: float | None = None  # 1 if the power supply slows the GPU down, otherwise 0.
    power_capped: float | None = None  # 1 if a power limit below the maker's slows the GPU down, otherwise 0.
    reserved_gb: float | None = None  # Part of used_gb that this process's allocator holds on a GPU.

    def is_crowded(self, outside_gb: float) -> bool:
        """Return True if more memory than `outside_gb` is outside this process's allocator, or it is unknown."""
        return self.used_gb is None or self.reserved_gb is None or self.used_gb - self.reserved_gb > outside_gb

    @property
    def memory_share(self) -> float:
        """Share of the device's memory in use; 0 if unknown."""
        return self.used_gb / self.total_gb if self.used_gb and self.total_gb else 0.0


Look = Callable[[], Reading]


def summary(readings: Sequence[Reading], memory: str = "memory/device_gb") -> dict[str, float]:
    """Return means of utilisation, power and slow-down by its causes, and maxima of memory (under the given name) and
    temperature, if known."""
    columns: dict[str, tuple[Callable[[list[float]], float], str]] = {
        memory: (max, "used_gb"),
        "gpu/utilisation": (fmean, "utilisation"),
        "gpu/power_w": (fmean, "power_w"),
        "gpu/temperature_c": (max, "temperature_c"),
        "gpu/thermal_throttling": (fmean, "thermal"),
        "gpu/power_brake": (fmean, "power_brake"),
        "gpu/power_capped": (fmean, "power_capped"),
    }
    figures = {}
    for name, (reduce, field) in columns.items():
        known = [value for reading in readings if (value := getattr(reading, field)) is not None]
        if known:
            figures[name] = reduce(known)
    return figures


def pressure_of(readings: Sequence[Reading], outside_gb: float = 0.0) -> Pressure:
    """Classify the largest share of the device's memory in use: "warn" from 0.90, "act" from 0.95.

    A reading of a GPU counts if more than `outside_gb` is outside this process's allocator. The memory inside was
    planned, measured to fit and limited; on a small GPU it alone, with the CUDA context, is more than 0.95.
    """
    share = max((reading.memory_share for reading in readings if reading.is_crowded(outside_gb)), default=0.0)
    return "act" if share >= ACT_SHARE else "warn" if share >= WARN_SHARE else ""


class Monitor:
    """Reads the device every `seconds` from its own thread, from `__enter__` to `__exit__`. It can be used once.

    `look` is the function that reads; default: NVML for a GPU and the RAM for a CPU. If NVML is missing, or the GPU is
    lost meanwhile, there is one warning and fewer figures; nothing is raised.
    """

    def __init__(self, device: torch.device, *, seconds: float = 1.0, look: Look | None = None) -> None:
        self.device, self.seconds = device, seconds
        self._look = look or (None if device.type == "cuda" else read_ram)
        self._readings: list[Reading] = []  # Readings since figures() was last called.
        self._latest: list[Reading] = []  # The latest reading, or none.
        self._lock = threading.Lock()  # Guards the two lists above.
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="monitor", daemon=True)

    def __enter__(self) -> "Monitor":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._thread.join(HANG_SECONDS)

    def figures(self) -> dict[str, float]:
        """Return the readings since the last call (or the latest one, if there are none) and what torch's allocator
        holds now, under the names of the metrics. Values that the device does not report are left out."""
        with self._lock:
            readings, self._readings = self._readings or self._latest, []
        if self.device.type != "cuda":
            return summary(readings, "memory/ram_gb")
        return {
            "memory/allocated_gb": torch.cuda.memory_allocated(self.device) / 1e9,
            "memory/reserved_gb": torch.cuda.memory_reserved(self.device) / 1e9,
            **summary(readings),
        }

    def pressure(self) -> Pressure:
        """Return how close to its limit the device's memory has come since the last call of `figures`."""
        with self._lock:
            readings = self._readings or self._latest
        total_gb = max((reading.total_gb or 0.0 for reading in readings), default=0.0)
        return pressure_of(readings, outside_gb(total_gb, self._limit_gb(total_gb)))

    def _limit_gb(self, total_gb: float) -> float:
        """Return the memory of a GPU that this process may reserve."""
        if self.device.type != "cuda" or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return total_gb
        return torch.cuda.get_per_process_memory_fraction(self.device) * total_gb

    def _watch(self) -> None:
        with _forgiving_nvml(), nullcontext() if self._look else nvml():
            look = self._look or read_gpu(str(torch.cuda.get_device_properties(self.device).uuid))
            while not self._stopped.is_set():
                reading = look()
                if self.device.type == "cuda":  # torch's allocator counts by itself, without a call of CUDA.
                    reading = replace(reading, reserved_gb=torch.cuda.memory_reserved(self.device) / 1e9)
                with self._lock:
                    self._readings.append(reading)
                    self._latest = [reading]
                self._stopped.wait(self.seconds)
        if not self._stopped.is_set():  # The GPU is lost: its last reading is no longer valid.
            with self._lock:
                self._latest = []


def outside_gb(total_gb: float, limit_gb: float) -> float:
    """Return the memory that may be used on a GPU outside an allocator that is limited to `limit_gb`: this process's
    CUDA context, and what other programs held when the limit was chosen."""
    return max(CONTEXT_GB, total_gb - limit_gb + LIBRARIES_GB)


def read_ram() -> Reading:
    """Read the RAM in use by all programs, within a container's limit."""
    total_gb, free_gb = ram()
    return Reading(used_gb=total_gb - free_gb, total_gb=total_gb) if free_gb else Reading()


# -------------------------------------------------------------------------------------------------------- NVML
# https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html


def read_gpu(uuid: str) -> Look:
    """Return a function that reads the GPU, or slice of one (MIG), of this UUID, which torch reports regardless of
    CUDA_VISIBLE_DEVICES. Both raise pynvml.NVMLError if the GPU is not there, or not any more."""
    import pynvml

    handle = _handle(uuid)
    heat = pynvml.nvmlClocksThrottleReasonSwThermalSlowdown | pynvml.nvmlClocksThrottleReasonHwThermalSlowdown
    brake, cap = pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown, pynvml.nvmlClocksThrottleReasonSwPowerCap
    total_gb = nvml_answer(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle).total / 1e9)
    # At the maker's limit, a GPU that is busy is always capped.
    makers_w = nvml_answer(lambda: pynvml.nvmlDeviceGetPowerManagementDefaultLimit(handle)) or 0.0
    limit_w = nvml_answer(lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(handle)) or makers_w
    cap = cap if limit_w < LOW_POWER_SHARE * makers_w else 0

    def look() -> Reading:
        reasons = nvml_answer(lambda: pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
        slowed = [None if reasons is None else bool(int(reasons) & bit) for bit in (heat, brake, cap)]
        return Reading(
            used_gb=nvml_answer(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle).used / 1e9),
            total_gb=total_gb,
            utilisation=nvml_answer(lambda: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100),
            power_w=nvml_answer(lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / 1000),
            temperature_c=nvml_answer(lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)),
            thermal=slowed[0],
            power_brake=slowed[1],
            power_capped=slowed[2] if cap else None,
        )

    return look


def _handle(uuid: str) -> object:
    """Return NVML's handle. NVML's UUIDs begin with the type of device, which torch omits."""
    import pynvml

    try:
        handle: object = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except pynvml.NVMLError_NotFound:
        return pynvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")
    # On a GPU with MIG on, a training uses one slice only: figures of the whole GPU would mislead.
    if nvml_answer(lambda: pynvml.nvmlDeviceGetMigMode(handle)[0]) == pynvml.NVML_DEVICE_MIG_ENABLE:
        raise pynvml.NVMLError_NotFound()
    return handle


def _errors_of_nvml() -> tuple[type[Exception], ...]:
    """Return what NVML raises, which is an ImportError where its package is not installed."""
    try:
        from pynvml import NVMLError
    except ImportError:
        return (ImportError,)
    return (NVMLError,)


@contextmanager
def _forgiving_nvml() -> Iterator[None]:
    """End the block at a failure of NVML, with a warning."""
    try:
        yield
    except _errors_of_nvml() as error:
        log.warning("NVML fails (%s); training goes on without the GPU's utilisation, power and temperature", error)
