"""The name of the device and the versions, without which a figure says nothing."""

import platform
import re
from pathlib import Path
from typing import Any

import torch

from gputrain import __version__
from gputrain.hw.probe import usable_cores


def machine_facts(device: str = "auto") -> dict[str, Any]:
    """Returns the name of the device ("auto": the GPU, if any) and the versions, which every figure needs."""
    on_gpu = device != "cpu" and torch.cuda.is_available()
    facts = {
        "device": torch.cuda.get_device_name() if on_gpu else f"{cpu_name()}, {usable_cores()} cores",
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gputrain": __version__,
    }
    if on_gpu:
        card = torch.cuda.get_device_properties(torch.cuda.current_device())
        facts |= {"memory_gb": round(card.total_memory / 1e9, 2), "cuda": torch.version.cuda}
    return facts


def cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:  # not Linux
        text = ""
    return cpu_name_in(text) or platform.processor() or f"{platform.machine()} CPU"


def cpu_name_in(cpuinfo: str) -> str:
    """Returns the processor's name in /proc/cpuinfo, "" if there is none.

    Virtual machines may hide the number in it ("Intel(R) Xeon(R) Processor"); family and model then tell processors
    apart.
    """
    found: dict[str, str] = dict(re.findall(r"^(model name|cpu family|model)[ \t]*: *(.+)$", cpuinfo, re.MULTILINE))
    name = found.get("model name", "")
    if not name or re.search(r"\d", name) or not {"cpu family", "model"} <= found.keys():
        return name
    return f"{name} (family {found['cpu family']}, model {found['model']})"
