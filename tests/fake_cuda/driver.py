"""The functions of torch's CUDA library that a build without it lacks, checking their arguments as the C++ code does.

torch.cuda's own Python code runs unchanged above them: its checks of devices, its lazy initialisation, its order of
calls. What is not stubbed here raises AttributeError, as in any build without CUDA: add it with its checks.
"""

import os
import warnings
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from tests.fake_cuda.tensors import Generator

COUNT = 1  # Number of devices.
UUID = "00000000-1111-2222-3333-444444444444"  # torch omits the prefix "GPU-".
ALLOCATED_GB, RESERVED_GB = 1.0, 1.25  # The allocator always reports these figures as those of the moment.
MILLISECONDS = 5.0  # between any two events
VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # The allocator uses the first one that is set.


@dataclass
class Card:
    """A card, and what was asked of it: the state behind the stubs."""

    name: str
    capability: tuple[int, int]
    memory_gb: float
    initialised: bool = False
    allocator_settings: str | None = None  # Settings of the environment when the allocator was first used.
    memory_fraction: dict[int, float] = field(default_factory=dict)  # Key: device index.
    current: int = 0
    most_gb: float = 0.0  # Memory that was allocated for a moment, beyond ALLOCATED_GB, since the peaks were reset.
    calls: Counter[str] = field(default_factory=Counter)
    sync_debug_mode: int = 0

    @property
    def properties(self) -> SimpleNamespace:
        major, minor = self.capability
        return SimpleNamespace(
            name=self.name, major=major, minor=minor, total_memory=int(self.memory_gb * 1e9), uuid=UUID,
            multi_processor_count=132, regs_per_multiprocessor=65536, warp_size=32, L2_cache_size=50 << 20,
            max_threads_per_multi_processor=2048, shared_memory_per_block_optin=232448, gcnArchName="",
        )  # fmt: skip

    def functions(self) -> dict[str, Any]:
        """By their names in torch._C."""
        found = {name: getattr(self, name) for name in dir(type(self)) if name.startswith("_cuda_")}
        return {name: self._counted(name, function) for name, function in found.items()}

    def _counted(self, name: str, function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            self.calls[name] += 1
            return function(*arguments)

        return call

    def _index(self, device: object, function: str) -> int:
        """Raises what THPUtils_checkLong and the allocator's check of the device raise."""
        if type(device) is not int:
            raise TypeError(f"{function}: expected an int for the device, got {type(device).__name__}")
        if not 0 <= device < COUNT:
            raise RuntimeError(f"{function}: Invalid device argument {device}: did you call init?")
        return device

    def _started(self, function: str) -> None:
        if not self.initialised:
            raise RuntimeError(f"{function}: Allocator not initialized for device 0: did you call init?")

    def _read_environment(self) -> str:
        """The allocator reads its settings once, with the start of CUDA or at the first question."""
        if self.allocator_settings is None:
            self.allocator_settings = next((os.environ[name] for name in VARIABLES if name in os.environ), "")
        return self.allocator_settings

    # ------------------------------------------------------------------------------------- torch/csrc/cuda/Module.cpp

    def _cuda_init(self) -> None:
        self.initialised = True
        self._read_environment()
        torch.cuda.default_generators = tuple(Generator(f"cuda:{index}") for index in range(COUNT))

    def _cuda_getDeviceCount(self) -> int:
        return COUNT

    def _cuda_getDevice(self) -> int:
        return self.current

    def _cuda_setDevice(self, device: object) -> None:
        self.current = self._index(device, "setDevice")

    def _cuda_exchangeDevice(self, device: object) -> int:
        if type(device) is not int:
            raise TypeError(f"exchangeDevice: expected an int, got {type(device).__name__}")
        before = self.current
        self.current = before if device < 0 else self._index(device, "exchangeDevice")
        return before if device >= 0 else -1

    _cuda_maybeExchangeDevice = _cuda_exchangeDevice

    def _cuda_getArchFlags(self) -> str:
        return "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120"

    def _cuda_synchronize(self) -> None:
        self._started("synchronize")

    def _cuda_set_sync_debug_mode(self, mode: object) -> None:
        if mode not in (0, 1, 2):
            raise RuntimeError(f"invalid value of debug_mode {mode}, expected one of 0, 1, 2")
        self.sync_debug_mode = int(str(mode))

    def synchronised(self) -> None:
        """c10/cuda/CUDAFunctions.cpp, warn_or_error_on_sync: the host reads the device."""
        if self.sync_debug_mode == 2:
            raise RuntimeError("called a synchronizing CUDA operation")
        if self.sync_debug_mode == 1:
            warnings.warn("called a synchronizing CUDA operation", stacklevel=2)

    def _cuda_emptyCache(self, *pool: object) -> None:
        self._started("emptyCache")

    def _cuda_setMemoryFraction(self, fraction: object, device: object) -> None:
        """CUDACachingAllocator.cpp, setMemoryFraction."""
        index = self._index(device, "setMemoryFraction")
        self._started("setMemoryFraction")
        if not isinstance(fraction, float) or not 0 <= fraction <= 1:
            raise RuntimeError(f"invalid fraction:{fraction}. Please set within [0, 1].")
        self.memory_fraction[index] = fraction

    def _cuda_getMemoryFraction(self, device: object) -> float:
        index = self._index(device, "getMemoryFraction")
        self._started("getMemoryFraction")
        return self.memory_fraction.get(index, 1.0)

    def _cuda_memoryStats(self, device: object) -> dict[str, Any]:
        self._index(device, "memoryStats")
        sizes = {"allocated_bytes": ALLOCATED_GB, "reserved_bytes": RESERVED_GB}
        stats: dict[str, Any] = {
            name: {"all": {"current": int(gb * 1e9), "peak": round((gb + self.most_gb) * 1e9)}}
            for name, gb in sizes.items()
        }
        return {**stats, "num_alloc_retries": 0, "num_ooms": 0}

    def _cuda_resetPeakMemoryStats(self, device: object) -> None:
        self._index(device, "resetPeakMemoryStats")
        self._started("resetPeakMemoryStats")
        self.most_gb = 0.0

    def allocate_for_a_moment(self, gb: float) -> None:
        self.most_gb = max(self.most_gb, gb)

    def _cuda_getAllocatorBackend(self) -> str:
        return "native"

    def _cuda_memorySnapshot(self, pool: object) -> dict[str, Any]:
        options = dict(part.split(":", 1) for part in self._read_environment().split(",") if ":" in part)
        expandable = options.get("expandable_segments", "").strip().lower() == "true"
        return {"segments": [], "allocator_settings": {"expandable_segments": expandable}, "device_traces": []}

    def _accelerator_setAllocatorSettings(self, settings: object) -> None:
        if not isinstance(settings, str):
            raise TypeError(f"setAllocatorSettings: expected a str, got {type(settings).__name__}")
        self.allocator_settings = settings

    def device_properties(self, device: object) -> SimpleNamespace:
        self._index(device, "get_device_properties")
        return self.properties

    def memory_info(self, device: object) -> tuple[int, int]:
        """Free and total bytes, of torch.cuda.cudart().cudaMemGetInfo."""
        self._index(device, "cudaMemGetInfo")
        total = int(self.memory_gb * 1e9)
        return total - int(1e9), total


class Event:
    """torch.cuda.Event, which raises where it was not recorded or does not time."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.enable_timing, self.recorded = enable_timing, False

    def record(self, stream: object = None) -> None:
        self.recorded = True

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Waiting for an event that was never recorded returns at once, as in CUDA."""

    def elapsed_time(self, end: "Event") -> float:
        if not (self.enable_timing and end.enable_timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if not (self.recorded and end.recorded):
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return MILLISECONDS


class Nvml:
    """NVML of the same card, for the functions of pynvml that the package calls."""

    def __init__(self, card: Card) -> None:
        self.card, self.open = card, 0

    def functions(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in dir(type(self)) if name.startswith("nvml")}

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self._started()
        self.open -= 1

    def _started(self) -> None:
        import pynvml

        if not self.open:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.95.05"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 13000

    def nvmlDeviceGetCount(self) -> int:
        self._started()
        return COUNT

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        self._started()
        return UUID

    def nvmlDeviceGetName(self, handle: str) -> str:
        return self.card.name

    def nvmlDeviceGetCudaComputeCapability(self, handle: str) -> tuple[int, int]:
        return self.card.capability

    def nvmlDeviceGetCurrentDriverModel(self, handle: str) -> int:
        import pynvml

        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)  # There is none but on Windows.

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        import pynvml

        self._started()
        if uuid != f"GPU-{UUID}":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return uuid

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        self._started()
        return SimpleNamespace(used=int(2e9), total=int(self.card.memory_gb * 1e9), free=0)

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(gpu=90, memory=40)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return 350_000

    def nvmlDeviceGetPowerManagementDefaultLimit(self, handle: str) -> int:
        return 700_000  # Milliwatts, of an H100.

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: str) -> int:
        return 500_000

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        return 60

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
        self._started()
        return 0x4  # The power limit.

    def nvmlDeviceGetMigMode(self, handle: str) -> list[int]:
        return [0, 0]
