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
    named = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return named[1] if named else platform.processor() or f"{platform.machine()} CPU"
