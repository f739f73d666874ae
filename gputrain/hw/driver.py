"""Finds the NVIDIA driver and its GPUs with nvidia-smi and on the PCI bus, without CUDA and without torch."""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

MIB = 2**20
ANSWER_SECONDS = 20  # A driver that loads on demand takes some seconds; one that hangs never answers.
COLUMNS = "name,driver_version,memory.total,compute_cap,driver_model.current"
# Columns of the link to the board and of the power limit, which older drivers refuse.
LINK_COLUMNS = (
    "pcie.link.gen.max,pcie.link.gen.gpumax,pcie.link.width.current,pcie.link.width.max,power.limit,power.default_limit"
)
# Windows' subsystem for Linux keeps its nvidia-smi here, which is not always on PATH.
FURTHER_PATH = "/usr/lib/wsl/lib"


@dataclass(frozen=True)
class Card:
    """A GPU as the driver describes it."""

    name: str
    memory_gb: float  # 0 if unknown, as for memory shared with the CPU.
    compute_capability: tuple[int, int]  # (0, 0) if the driver is too old to report it.
    driver_model: str = ""  # WDDM, MCDM or TCC on Windows, empty elsewhere.
    # 0 if unknown:
    pcie_generation: int = 0  # Newest generation of PCIe that card and slot have in common.
    pcie_generation_of_card: int = 0
    pcie_lanes: int = 0  # Lanes in use.
    pcie_lanes_of_card: int = 0
    power_limit_w: float = 0.0  # Limit that is set.
    power_default_w: float = 0.0  # Limit that the maker has set.


@dataclass(frozen=True)
class Driver:
    """The report of nvidia-smi; everything is empty if there is no nvidia-smi."""

    version: str = ""  # Driver version, such as "580.95.05".
    cuda: str = ""  # Newest CUDA version that the driver runs.
    cards: tuple[Card, ...] = ()
    error: str = ""  # Message of nvidia-smi instead of a report.


NO_DRIVER = Driver()


def ask_driver() -> Driver:
    """Run nvidia-smi, if there is one, and return its report."""
    program = shutil.which("nvidia-smi", path=os.pathsep.join([os.environ.get("PATH", os.defpath), FURTHER_PATH]))
    if program is None:
        return NO_DRIVER
    try:
        report = _output(program)
        table = _output(program, f"--query-gpu={COLUMNS}", "--format=csv,noheader,nounits")
        links = _output(program, f"--query-gpu={LINK_COLUMNS}", "--format=csv,noheader,nounits")
    except subprocess.TimeoutExpired:
        return Driver(error=f"nvidia-smi gives no answer within {ANSWER_SECONDS} seconds")
    except OSError as error:
        return Driver(error=f"{program}: {error.strerror}")
    return parse(report, table, links)


def _output(program: str, *arguments: str) -> str:
    asked = subprocess.run(
        [program, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=ANSWER_SECONDS, check=False
    )
    return asked.stdout.decode(errors="replace")


def parse(report: str, table: str, links: str = "") -> Driver:
    """Parse the report of a plain `nvidia-smi`, and the tables of queries for COLUMNS and for LINK_COLUMNS, with one
    GPU on each line.

    The report's head names the versions: "Driver Version" and "CUDA Version" in drivers before 610, "KMD Version" and
    "CUDA UMD Version" since then. A report without them is an error message.
    """
    version = re.search(r"\b(?:Driver|KMD) Version:\s*([\d.]+)", report)
    if version is None:
        lines = [line.strip() for line in report.splitlines() if line.strip()]
        return Driver(error=lines[0] if lines else "nvidia-smi prints nothing")
    cuda = re.search(r"\bCUDA(?: UMD)? Version:\s*(\d+\.\d+)", report)
    cards = tuple(filter(None, map(_card, table.splitlines())))
    details = [row for line in links.splitlines() if (row := _cells(line, LINK_COLUMNS))]
    if len(details) == len(cards):
        cards = tuple(_with_link(card, row) for card, row in zip(cards, details, strict=True))
    return Driver(version=version[1], cuda=cuda[1] if cuda else "", cards=cards)


def _card(line: str) -> Card | None:
    """Parse a line of the table. Returns None for a message, such as the refusal of a column by an old driver."""
    cells = _cells(line, COLUMNS)
    if not cells:
        return None
    name, _, memory, capability, model = cells
    major, _, minor = capability.partition(".")
    return Card(
        name=name,
        memory_gb=float(memory) * MIB / 1e9 if memory.isdecimal() else 0.0,
        compute_capability=(int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else (0, 0),
        driver_model="" if model.startswith("[") else model,
    )


def _cells(line: str, columns: str) -> list[str]:
    """Return the cells of a line of a table; nothing if it has not one for each column."""
    cells = [cell.strip() for cell in line.split(",")]
    return cells if len(cells) == len(columns.split(",")) else []


def _with_link(card: Card, cells: list[str]) -> Card:
    numbers = [float(cell) if re.fullmatch(r"\d+(\.\d+)?", cell) else 0.0 for cell in cells]
    link, power = map(int, numbers[:4]), numbers[4:]
    return Card(card.name, card.memory_gb, card.compute_capability, card.driver_model, *link, *power)


def cards_without_driver(bus: Path = Path("/sys/bus/pci/devices")) -> int:
    """Count the NVIDIA GPUs on the PCI bus that have no NVIDIA driver. Only Linux lists them; elsewhere it is 0.

    A GPU that has its driver may still be unavailable, for example in a container; one that is passed to a virtual
    machine has another driver. Neither is counted.
    """
    return sum(_is_nvidia_display(device) and _driver_of(device) in ("", "nouveau") for device in bus.glob("*"))


def _is_nvidia_display(device: Path) -> bool:
    try:
        vendor, kind = ((device / name).read_text(encoding="ascii").strip() for name in ("vendor", "class"))
    except OSError:
        return False
    return vendor == "0x10de" and kind.startswith("0x03")


def _driver_of(device: Path) -> str:
    link = device / "driver"
    return link.resolve().name if link.exists() else ""
