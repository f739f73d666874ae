"""Decides from facts alone what slows a training down on this machine: slots, power limits, CPU, memory. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from gputrain.hw.driver import Card
from gputrain.hw.probe import Machine

LITTLE_RAM_GB = 4.0
ENOUGH_RAM_GB = 64.0  # From this RAM on, a training needs no swap space.
LITTLE_SHARED_MEMORY_GB = 1.0  # Docker gives 64 MB by default.
LITTLE_POWER_SHARE = 0.9  # Share of the maker's power limit below which a card is clearly slower.


@dataclass(frozen=True)
class Check:
    """One line of the report.

    The status note means that training runs, failed that it cannot run, or not on the GPU that is there. With both,
    `remedy` says what to do.
    """

    name: str
    status: Literal["ok", "note", "failed"]
    found: str
    remedy: str = ""


def host_checks(machine: Machine) -> list[Check]:
    """Check the CPU and the kinds of memory."""
    return [_cpu(machine), *_ram(machine), *_swap(machine), *_shared_memory(machine)]


def card_checks(cards: Sequence[Card]) -> list[Check]:
    """Check the slot and the power limit of every card that the driver lists."""
    return [_card(number, card) for number, card in enumerate(cards)]


def _card(number: int, card: Card) -> Check:
    found, remedies = [card.name], []
    if card.memory_gb:
        found.append(f"{card.memory_gb:.1f} GB")
    if card.pcie_generation and card.pcie_lanes:
        slow = card.pcie_generation < card.pcie_generation_of_card
        narrow = card.pcie_lanes < card.pcie_lanes_of_card
        link = f"PCIe {card.pcie_generation}.0 x{card.pcie_lanes}"
        found.append(
            f"{link} of {card.pcie_generation_of_card}.0 x{card.pcie_lanes_of_card}" if slow or narrow else link
        )
        if narrow:
            remedies.append(
                "put the card into the slot next to the CPU, without a riser, and free slots that share lanes"
            )
        elif slow:
            remedies.append("a board with newer slots, or the BIOS's setting for the slot, would copy batches faster")
    if card.power_limit_w:
        low = card.power_limit_w < LITTLE_POWER_SHARE * card.power_default_w
        of = f" of {card.power_default_w:.0f}" if low else ""
        found.append(f"power limit {card.power_limit_w:.0f}{of} W")
        if low:
            remedies.append(f"sudo nvidia-smi -i {number} --power-limit {card.power_default_w:.0f} restores its speed")
    return Check(f"card {number}", "note" if remedies else "ok", ", ".join(found), "; ".join(remedies))


def _cpu(machine: Machine) -> Check:
    found = f"{machine.cpu_cores} core{'s' if machine.cpu_cores > 1 else ''}"
    if machine.gpu and machine.cpu_cores < 4:
        remedy = "resize the pictures to the size of the training beforehand: gputrain prepare-data"
        return Check("cpu", "note", f"{found}, few to decode pictures as fast as a GPU trains", remedy)
    return Check("cpu", "ok", found)


def _ram(machine: Machine) -> Iterator[Check]:
    if not machine.ram_gb:
        return
    free = f"{machine.ram_free_gb:.1f} of " if machine.ram_free_gb else ""
    found = f"{free}{machine.ram_gb:.1f} GB{' free' if free else ''}"
    if machine.ram_free_gb and machine.ram_free_gb < LITTLE_RAM_GB:
        yield Check("ram", "note", found, "close other programs, or use fewer workers (--num-workers 1)")
    else:
        yield Check("ram", "ok", found)


def _swap(machine: Machine) -> Iterator[Check]:
    if machine.swap_gb < 0:
        return
    if machine.swap_gb == 0 and 0 < machine.ram_gb < ENOUGH_RAM_GB:
        found = "none: a program that runs out of RAM is killed at once"
        remedy = "sudo fallocate -l 16G /swapfile && sudo chmod 600 /swapfile && sudo mkswap /swapfile && "
        yield Check("swap", "note", found, remedy + "sudo swapon /swapfile; in a container, on its host")
    else:
        yield Check("swap", "ok", f"{machine.swap_gb:.1f} GB" if machine.swap_gb else "none, and the RAM suffices")


def _shared_memory(machine: Machine) -> Iterator[Check]:
    if not machine.shared_memory_gb:
        return
    found = f"{machine.shared_memory_gb:.3g} GB free in /dev/shm"
    if machine.shared_memory_gb < LITTLE_SHARED_MEMORY_GB:
        remedy = "sudo mount -o remount,size=8G /dev/shm, in Docker: docker run --shm-size 8g; otherwise fewer data "
        remedy += "workers are used"
        yield Check("shared memory", "note", f"{found}, through which data workers pass batches", remedy)
    else:
        yield Check("shared memory", "ok", found)
