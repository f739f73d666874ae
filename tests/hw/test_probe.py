"""Facts about a machine: from nvidia-smi, from the PCI bus, and written and read again."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace

import pytest
import torch

from gputrain.hw import driver
from gputrain.hw.driver import Card, Driver, ask_driver, cards_without_driver, parse
from gputrain.hw.probe import Machine, Package, probe, ram, swap_gb
from gputrain.stored import from_json

HEAD_570 = """Mon Jul  7 09:06:34 2025
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 570.133.07             Driver Version: 570.133.07     CUDA Version: 12.8     |
|-----------------------------------------+------------------------+----------------------+
| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |
"""
HEAD_610 = """Sun Jun  7 08:16:57 2026
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 610.43.02              KMD Version: 610.43.02     CUDA UMD Version: 13.3     |
+-----------------------------------------+------------------------+----------------------+
| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |
"""
HEAD_460 = """+-----------------------------------------------------------------------------+
| NVIDIA-SMI 460.91.03    Driver Version: 460.91.03    CUDA Version: 11.2     |
|-------------------------------+----------------------+----------------------+
"""
UBUNTU_WITHOUT_CUDA_LIBRARY = "| NVIDIA-SMI 535.183.01    Driver Version: 535.183.01    CUDA Version: N/A      |\n"
UNKNOWN_COLUMN = 'Field "compute_cap" is not a valid field to query.\n\n'
MISMATCH = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.173\n"


@pytest.mark.parametrize(
    ("report", "table", "expected"),
    [
        (
            HEAD_570,
            "NVIDIA GeForce RTX 4090, 570.133.07, 24564, 8.9, [N/A]\n",
            Driver("570.133.07", "12.8", (Card("NVIDIA GeForce RTX 4090", 25.757, (8, 9)),)),
        ),
        (
            HEAD_610,
            "NVIDIA B200, 610.43.02, 183359, 10.0, [N/A]\nNVIDIA B200, 610.43.02, 183359, 10.0, [N/A]\n",
            Driver("610.43.02", "13.3", (Card("NVIDIA B200", 192.266, (10, 0)),) * 2),
        ),
        (  # Memory is shared with the CPU.
            HEAD_610,
            "NVIDIA GB10, 610.43.02, [N/A], 12.1, [N/A]\n",
            Driver("610.43.02", "13.3", (Card("NVIDIA GB10", 0.0, (12, 1)),)),
        ),
        (
            HEAD_570.replace("\n", "\r\n"),
            "NVIDIA GeForce RTX 5090, 570.133.07, 32607, 12.0, WDDM\r\n",
            Driver("570.133.07", "12.8", (Card("NVIDIA GeForce RTX 5090", 34.191, (12, 0), "WDDM"),)),
        ),
        (HEAD_460, UNKNOWN_COLUMN, Driver("460.91.03", "11.2")),
        (UBUNTU_WITHOUT_CUDA_LIBRARY, "", Driver("535.183.01", "")),
        (MISMATCH, MISMATCH, Driver(error="Failed to initialize NVML: Driver/library version mismatch")),
        ("No devices were found\n", "No devices were found\n", Driver(error="No devices were found")),
        ("", "", Driver(error="nvidia-smi prints nothing")),
    ],
)
def test_what_nvidia_smi_says(report, table, expected):
    found = parse(report, table)
    rounded = tuple(replace(card, memory_gb=round(card.memory_gb, 3)) for card in found.cards)
    assert replace(found, cards=rounded) == expected


LINKS = "5, 5, 8, 16, 575.00, 575.00\n4, 5, 16, 16, 400.00, 575.00\n"
CARDS = "NVIDIA GeForce RTX 5090, 580.95.05, 32607, 12.0, [N/A]\n" * 2


def test_slots_and_power_limits():
    first, second = parse(HEAD_570, CARDS, LINKS).cards
    assert (first.pcie_generation, first.pcie_generation_of_card) == (5, 5)
    assert (first.pcie_lanes, first.pcie_lanes_of_card) == (8, 16)
    assert (second.pcie_generation, second.power_limit_w, second.power_default_w) == (4, 400.0, 575.0)
    unknown = parse(HEAD_570, CARDS, "[N/A], [N/A], 16, 16, [Not Supported], 575.00\n" * 2).cards[0]
    assert (unknown.pcie_generation, unknown.pcie_lanes, unknown.power_limit_w) == (0, 16, 0.0)
    refused = parse(HEAD_570, CARDS, 'Field "pcie.link.gen.gpumax" is not a valid field to query.\n')
    assert refused == parse(HEAD_570, CARDS)


def test_swap_space(tmp_path):
    assert swap_gb(tmp_path) == -1
    (tmp_path / "meminfo").write_text("MemTotal:  1000 kB\nSwapTotal:       16777212 kB\nSwapFree: 1 kB\n")
    assert swap_gb(tmp_path) == pytest.approx(17.18, abs=0.01)


def put_nvidia_smi(folder, monkeypatch, script):
    """Put a program of that name on PATH, as the only one."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


@pytest.mark.skipif(os.name == "nt", reason="the stand-in for nvidia-smi is a shell script")
def test_the_driver_is_asked(tmp_path, monkeypatch):
    report = 'echo "Driver Version: 580.95.05 CUDA Version: 13.0"'
    query = 'case "$1" in --query-gpu=name,driver_version,*) echo "Tesla T4, 580.95.05, 15360, 7.5, [N/A]"; exit;; esac'
    put_nvidia_smi(tmp_path, monkeypatch, f"{query}\n{report}")
    assert ask_driver() == Driver("580.95.05", "13.0", (Card("Tesla T4", 15360 * 2**20 / 1e9, (7, 5)),))
    put_nvidia_smi(tmp_path, monkeypatch, "echo 'Failed to initialize NVML: Unknown Error' >&2; exit 255")
    assert ask_driver() == Driver(error="Failed to initialize NVML: Unknown Error")


@pytest.mark.skipif(os.name == "nt", reason="the stand-in for nvidia-smi is a shell script")
def test_a_driver_that_hangs(tmp_path, monkeypatch):
    put_nvidia_smi(tmp_path, monkeypatch, "while :; do :; done")
    monkeypatch.setattr(driver, "ANSWER_SECONDS", 0.1)
    assert ask_driver() == Driver(error="nvidia-smi gives no answer within 0.1 seconds")


def test_no_nvidia_smi(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(driver, "FURTHER_PATH", str(tmp_path))
    assert ask_driver() == Driver()


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such bus, and links need a right")
def test_cards_without_a_driver(tmp_path):
    devices = [
        ("0x10de", "0x030000", "", True),
        ("0x10de", "0x030200", "nouveau", True),
        ("0x10de", "0x030000", "nvidia", False),
        ("0x10de", "0x030000", "vfio-pci", False),
        ("0x10de", "0x040300", "", False),  # The GPU's sound device.
        ("0x8086", "0x030000", "", False),
    ]
    for number, (vendor, kind, name, _) in enumerate(devices):
        device = tmp_path / "devices" / f"0000:0{number}:00.0"
        device.mkdir(parents=True)
        (device / "vendor").write_text(vendor + "\n", encoding="ascii")
        (device / "class").write_text(kind + "\n", encoding="ascii")
        if name:
            (tmp_path / name).mkdir()
            (device / "driver").symlink_to(tmp_path / name)
    assert cards_without_driver(tmp_path / "devices") == sum(counts for *_, counts in devices)
    assert cards_without_driver(tmp_path / "no such bus") == 0


def test_this_machine():
    machine = probe()
    assert machine.torch == torch.__version__
    assert machine.python == ".".join(map(str, sys.version_info[:3]))
    assert bool(machine.gpu) is torch.cuda.is_available()
    assert 1 <= machine.cpu_cores <= os.cpu_count()
    packages = {package.name: package for package in machine.packages}
    assert packages["torch"] == Package("torch", "2.9", torch.__version__)
    assert "pytest" not in packages  # It belongs to an extra.
    if machine.system == "Linux":
        assert (
            0.1 < machine.ram_free_gb < machine.ram_gb <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
        )


@pytest.mark.skipif(sys.platform != "linux", reason="containers and their limits are Linux's")
def test_ram_in_a_container(tmp_path):
    """Write a limit of 1 GiB, of which 1 MiB is free, and 3 MB of the rest are cached files."""
    (tmp_path / "meminfo").write_text("MemTotal: 999 kB\nMemAvailable:   900000000 kB\n", encoding="ascii")
    limit, used, stat = tmp_path / "memory.max", tmp_path / "memory.current", tmp_path / "memory.stat"
    limit.write_text(f"{2**30}\n", encoding="ascii")
    used.write_text(f"{2**30 - 2**20}\n", encoding="ascii")
    stat.write_text("anon 7\nfile 900\ninactive_file 1000000\nactive_file 2000000\ninactive_anon 5\n", encoding="ascii")
    assert ram(tmp_path, tmp_path) == (2**30 / 1e9, (2**20 + 3_000_000) / 1e9)
    stat.unlink()
    assert ram(tmp_path, tmp_path) == (2**30 / 1e9, 2**20 / 1e9)
    limit.write_text("max\n", encoding="ascii")
    assert ram(tmp_path, tmp_path)[1] == 900_000_000 * 1024 / 1e9
    assert ram(tmp_path / "nowhere", tmp_path / "nowhere")[1] == 0.0


@pytest.mark.skipif(sys.platform != "linux", reason="containers and their limits are Linux's")
@pytest.mark.parametrize(
    ("line", "folder", "names", "prefix"),
    [
        ("0::/job/task", "job", ("memory.max", "memory.current"), ""),
        ("7:memory:/job/task", "memory/job", ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_"),
        ("7:memory:/elsewhere", "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_"),
    ],
)
def test_limits_of_the_group_that_the_process_is_in(tmp_path, line, folder, names, prefix):
    """Limits are read in version 2 and 1, from parent groups too, and from the root, a container's own group."""
    (tmp_path / "meminfo").write_text("MemAvailable:   900000000 kB\n", encoding="ascii")
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text(f"9:cpu:/other\n{line}\n", encoding="ascii")
    group = tmp_path / folder
    group.mkdir(parents=True, exist_ok=True)
    for name, value in zip(names, (2**30, 2**29), strict=True):
        (group / name).write_text(f"{value}\n", encoding="ascii")
    (group / "memory.stat").write_text(f"{prefix}active_file 3000000\nother 5\n", encoding="ascii")
    assert ram(tmp_path, tmp_path) == (2**30 / 1e9, (2**29 + 3_000_000) / 1e9)


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is that of a shell on Linux")
def test_a_limit_of_the_shell_counts():
    """The limit is 8e9 bytes of addresses, some of which the process has taken."""
    code = "from gputrain.hw.probe import ram; print(*ram())"
    words = ["sh", "-c", 'ulimit -v 7812500; exec "$0" -c "$1"', sys.executable, code]
    total_gb, free_gb = map(float, subprocess.run(words, capture_output=True, text=True, check=True).stdout.split())
    assert total_gb == min(8.0, ram()[0])
    assert 0 < free_gb < min(8.0, ram()[0])


def test_facts_are_written_and_read(tmp_path):
    machine = replace(
        probe(),
        gpu="NVIDIA GeForce RTX 5090",
        compute_capability=(12, 0),
        compiled_capabilities=("sm_90", "sm_120"),
        driver=Driver("580.95.05", "13.0", (Card("NVIDIA GeForce RTX 5090", 34.2, (12, 0), "WDDM"),)),
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
