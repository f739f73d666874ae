"""Finds the NVIDIA driver and its GPUs through NVML, without CUDA and without torch."""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from gputrain.errors import first_line, missing_package

T = TypeVar("T")

ANSWER_SECONDS = 20  # A driver that loads on demand takes some seconds; one that hangs never answers.


@dataclass(frozen=True)
class Card:
    """A GPU as the driver describes it."""

    name: str
    driver_model: str = ""  # WDDM, MCDM or TCC on Windows, empty elsewhere.


@dataclass(frozen=True)
class Driver:
    """The report of NVML; everything is empty if there is no NVML."""

    version: str = ""  # Driver version, such as "580.95.05".
    cuda: str = ""  # Newest CUDA version that the driver runs.
    cards: tuple[Card, ...] = ()
    error: str = ""  # Message of NVML instead of a report.


NO_DRIVER = Driver()

# Torch's builds for CUDA 12.8 and later have no code for Pascal and Volta since 2.11; the one for 12.6 ends with 2.14.
# https://github.com/pytorch/pytorch/issues/172352 and /190385
OLDEST_CAPABILITY = (7, 5)


def torch_for(capability: tuple[int, int], setup: str = "./setup.sh") -> str:
    """Return how to install a build of torch with code for a GPU; "" if the default one has it. `setup`: the script."""
    by_pip = 'pip install "torch==2.13.0+cu126" --index-url https://download.pytorch.org/whl/cu126'
    return f"{setup} --torch cu126, or in your own environment {by_pip}" if capability < OLDEST_CAPABILITY else ""


@functools.cache
def query_driver() -> Driver:
    """Return NVML's report. It is asked for once in a process, in a thread, as a driver may hang."""
    answers: list[Driver] = []
    thread = threading.Thread(target=lambda: answers.append(read_nvml()), name="nvml", daemon=True)
    thread.start()
    thread.join(ANSWER_SECONDS)
    return answers[0] if answers else Driver(error=f"the driver gives no answer within {ANSWER_SECONDS} seconds")


def read_nvml() -> Driver:
    try:
        import pynvml
    except ImportError:
        return Driver(error=missing_package("pynvml").message)
    try:
        with nvml():
            cuda = nvml_answer(pynvml.nvmlSystemGetCudaDriverVersion_v2) or 0
            cards = tuple(map(_card, range(pynvml.nvmlDeviceGetCount())))
            if not cards:
                return Driver(error="no devices were found")
            version = pynvml.nvmlSystemGetDriverVersion()
            return Driver(version, f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else "", cards)
    except pynvml.NVMLError_LibraryNotFound:
        return NO_DRIVER
    except Exception as error:  # Besides NVMLError, whatever a driver's answer or its library may cause.
        return Driver(error=first_line(error))


@contextmanager
def nvml() -> Iterator[None]:
    """Start NVML and shut it down. Raises pynvml.NVMLError if there is no NVML, or no driver for it."""
    import pynvml

    pynvml.nvmlInit()
    try:
        yield
    finally:
        pynvml.nvmlShutdown()


def nvml_answer(ask: Callable[[], T]) -> T | None:
    """Return NVML's answer; None if this device, driver or user cannot get it."""
    from pynvml import NVMLError_FunctionNotFound, NVMLError_NoPermission, NVMLError_NotSupported

    try:
        return ask()
    except (NVMLError_NotSupported, NVMLError_NoPermission, NVMLError_FunctionNotFound):
        return None


def _card(index: int) -> Card:
    """Return the card of this number. https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html"""
    import pynvml

    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    models = {pynvml.NVML_DRIVER_WDDM: "WDDM", pynvml.NVML_DRIVER_WDM: "TCC", pynvml.NVML_DRIVER_MCDM: "MCDM"}
    model: Any = nvml_answer(lambda: pynvml.nvmlDeviceGetCurrentDriverModel(handle))
    return Card(pynvml.nvmlDeviceGetName(handle), models.get(model, ""))
