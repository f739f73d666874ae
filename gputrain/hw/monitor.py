"""What a training run watches of its device while it trains: memory, utilisation, power and temperature.

A thread asks NVML, which counts all programs on the card and touches no CUDA, so that neither the training nor the data
workers that it forks notice; of torch it asks only the allocator's own counts. On the CPU it is the RAM that is
watched: the kernel ends a run that takes too much of it. GB is 1e9 bytes.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from statistics import fmean
from types import TracebackType
from typing import Literal

import torch

from gputrain.hw.probe import ram

log = logging.getLogger(__name__)

WARN_SHARE, ACT_SHARE = 0.90, 0.95  # of the device's memory
CONTEXT_GB = 1.0  # of GPU memory, that a process takes outside torch's allocator, with all of CUDA's libraries loaded
LIBRARIES_GB = 0.5  # of it, that are loaded only after the plan has looked at what is free
HANG_SECONDS = 5  # that the end of a training waits for a driver that does not answer

Pressure = Literal["", "warn", "act"]


@dataclass(frozen=True)
class Reading:
    """One look at the device; None where it does not tell."""

    used_gb: float | None = None  # by all programs
    total_gb: float | None = None
    utilisation: float | None = None  # 0 to 1: the share of the last moments in which a kernel ran
    power_w: float | None = None
    temperature_c: float | None = None
    reserved_gb: float | None = None  # of used_gb, what this process's allocator holds on a GPU

    def is_crowded(self, outside_gb: float) -> bool:
        """Whether more memory than `outside_gb` lies outside this process's allocator, or nobody knows."""
        return self.used_gb is None or self.reserved_gb is None or self.used_gb - self.reserved_gb > outside_gb

    @property
    def memory_share(self) -> float:
        """Of the device's memory, the share in use; 0 where unknown."""
        return self.used_gb / self.total_gb if self.used_gb and self.total_gb else 0.0


Look = Callable[[], Reading]


def summary(readings: Sequence[Reading], memory: str = "memory/device_gb") -> dict[str, float]:
    """Means of utilisation and power, maxima of memory (under the name given) and temperature, of what is known."""
    columns: dict[str, tuple[Callable[[list[float]], float], str]] = {
        memory: (max, "used_gb"),
        "gpu/utilisation": (fmean, "utilisation"),
        "gpu/power_w": (fmean, "power_w"),
        "gpu/temperature_c": (max, "temperature_c"),
    }
    figures = {}
    for name, (reduce, field) in columns.items():
        known = [value for reading in readings if (value := getattr(reading, field)) is not None]
        if known:
            figures[name] = reduce(known)
    return figures


def pressure_of(readings: Sequence[Reading], outside_gb: float = 0.0) -> Pressure:
    """By the largest share of the device's memory in use: "warn" from 0.90, "act" from 0.95.

    Readings of a GPU count where more than `outside_gb` of it lies outside this process's allocator. What is inside was
    planned, measured to fit and limited; on a small card it alone, with the CUDA context, is more than 0.95.
    """
    share = max((reading.memory_share for reading in readings if reading.is_crowded(outside_gb)), default=0.0)
    return "act" if share >= ACT_SHARE else "warn" if share >= WARN_SHARE else ""


class Monitor:
    """Looks at the device once in `seconds` from a thread of its own, from `__enter__` to `__exit__`; for one use.

    `look` says what to look with; left out, it is NVML for a GPU and the RAM for a CPU. Where NVML is missing, or the
    GPU is lost on the way, there is one warning and fewer figures; nothing is raised.
    """

    def __init__(self, device: torch.device, *, seconds: float = 1.0, look: Look | None = None) -> None:
        self.device, self.seconds = device, seconds
        self._look = look or (None if device.type == "cuda" else look_at_ram)
        self._closing = ExitStack()  # NVML, where it is the one to look with
        self._readings: list[Reading] = []  # since figures() was last called
        self._latest: list[Reading] = []  # one at most
        self._lock = threading.Lock()  # for the two above
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="monitor", daemon=True)

    def __enter__(self) -> "Monitor":
        with _forgiving_nvml():
            self._look = self._look or self._open_nvml()
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(HANG_SECONDS)

    def figures(self) -> dict[str, float]:
        """Under the names of the metrics, what was seen since the last call (or last, if nothing since), and what
        torch's allocator holds now. What the device does not tell is left out."""
        with self._lock:
            readings, self._readings = self._completed(), []
        if self.device.type != "cuda":
            return summary(readings, "memory/ram_gb")
        return {
            "memory/allocated_gb": torch.cuda.memory_allocated(self.device) / 1e9,
            "memory/reserved_gb": torch.cuda.memory_reserved(self.device) / 1e9,
            **summary(readings),
        }

    def pressure(self) -> Pressure:
        """How close to its limit the device's memory has come since the last call of `figures`."""
        with self._lock:
            readings = self._completed()
        total_gb = max((reading.total_gb or 0.0 for reading in readings), default=0.0)
        return pressure_of(readings, outside_gb(total_gb, self._limit_gb(total_gb)))

    def _limit_gb(self, total_gb: float) -> float:
        """What this process may reserve of a GPU."""
        if self.device.type != "cuda" or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return total_gb
        return torch.cuda.get_per_process_memory_fraction(self.device) * total_gb

    def _completed(self) -> list[Reading]:
        """The readings, or the latest if there are none since; and torch's word where none tells a GPU's memory."""
        readings = self._readings or self._latest
        if self.device.type == "cuda" and all(reading.used_gb is None for reading in readings):
            return [*readings, self._with_reserved(_look_with_torch(self.device))]
        return readings

    def _with_reserved(self, reading: Reading) -> Reading:
        """Asks torch's allocator, which counts by itself, at the same moment. It asks no CUDA for it."""
        if self.device.type != "cuda":
            return reading
        return replace(reading, reserved_gb=torch.cuda.memory_reserved(self.device) / 1e9)

    def _open_nvml(self) -> Look:
        with ExitStack() as opened:
            opened.enter_context(nvml())
            look = look_at_gpu(str(torch.cuda.get_device_properties(self.device).uuid))
            self._closing = opened.pop_all()
        return look

    def _watch(self) -> None:
        assert self._look
        with _forgiving_nvml(), self._closing:
            while not self._stopped.is_set():
                reading = self._with_reserved(self._look())
                with self._lock:
                    self._readings.append(reading)
                    self._latest = [reading]
                self._stopped.wait(self.seconds)
        if not self._stopped.is_set():  # the GPU is lost: what it said last holds no longer
            with self._lock:
                self._latest = []


def outside_gb(total_gb: float, limit_gb: float) -> float:
    """What may lie on a GPU outside an allocator that is limited to `limit_gb`: this process's CUDA context, and what
    other programs held when the limit was chosen."""
    return max(CONTEXT_GB, total_gb - limit_gb + LIBRARIES_GB)


def look_at_ram() -> Reading:
    """RAM in use by all programs, within a container's limit."""
    total_gb, free_gb = ram()
    return Reading(used_gb=total_gb - free_gb, total_gb=total_gb) if free_gb else Reading()


def _look_with_torch(device: torch.device) -> Reading:
    """A GPU's memory as CUDA tells it, once torch has started CUDA: to look must not take memory."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return Reading()
    try:
        free, total = torch.cuda.mem_get_info(device)
    except RuntimeError:  # the GPU is lost; the training's own next call says so better
        return Reading()
    return Reading(used_gb=(total - free) / 1e9, total_gb=total / 1e9)


# -------------------------------------------------------------------------------------------------------- NVML
# https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html


@contextmanager
def nvml() -> Iterator[None]:
    """NVML, started and shut down. Raises pynvml.NVMLError where there is none, or no driver for it."""
    import pynvml

    pynvml.nvmlInit()
    try:
        yield
    finally:
        pynvml.nvmlShutdown()


def look_at_gpu(uuid: str) -> Look:
    """How to look at the GPU, or the slice of one (MIG), that torch names by this UUID, whatever CUDA_VISIBLE_DEVICES
    calls it. Raises pynvml.NVMLError, as the look does, where the GPU is not there or not any more."""
    import pynvml

    handle = _handle(uuid)
    total_gb = _answer(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle).total / 1e9)

    def look() -> Reading:
        return Reading(
            used_gb=_answer(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle).used / 1e9),
            total_gb=total_gb,
            utilisation=_answer(lambda: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100),
            power_w=_answer(lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / 1000),
            temperature_c=_answer(lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)),
        )

    return look


def _handle(uuid: str) -> object:
    """NVML's handle. Its UUIDs begin with the kind of device, which torch's leave out."""
    import pynvml

    try:
        handle: object = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except pynvml.NVMLError_NotFound:
        return pynvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")
    # A card that is cut into slices trains on one of them only: figures of the whole would mislead.
    if _answer(lambda: pynvml.nvmlDeviceGetMigMode(handle)[0]) == pynvml.NVML_DEVICE_MIG_ENABLE:
        raise pynvml.NVMLError_NotFound()
    return handle


def _answer(ask: Callable[[], float]) -> float | None:
    """NVML's answer; None where this device, this driver or this user's rights don't have it."""
    from pynvml import NVMLError_FunctionNotFound, NVMLError_NoPermission, NVMLError_NotSupported

    try:
        return ask()
    except (NVMLError_NotSupported, NVMLError_NoPermission, NVMLError_FunctionNotFound):
        return None


@contextmanager
def _forgiving_nvml() -> Iterator[None]:
    """Have a failure of NVML end what is inside, and cost a warning."""
    from pynvml import NVMLError

    try:
        yield
    except NVMLError as error:
        log.warning("NVML fails (%s); training goes on without the GPU's utilisation, power and temperature", error)
