"""The table of known GPUs, and names as people and drivers write them."""

from dataclasses import replace
from pathlib import Path

import pytest

from gputrain.errors import UserError
from gputrain.hw import gpus
from gputrain.hw.gpus import count_gpus, find_gpu, known_gpus
from gputrain.hw.plan import Hardware, decide
from gputrain.hw.probe import Machine
from tests.tables import each_row

# Memory, compute capability, dense bf16 TFLOPS, TF32 TFLOPS, GB/s by key; None: unknown or disputed.
PUBLISHED = {
    "t4": (16, (7, 5), None, None, 320),
    "l4": (24, (8, 9), 121, 60, 300),
    "a10g": (24, (8, 6), None, None, 600),
    "a100-40": (40, (8, 0), 312, 156, 1555),
    "a100-80": (80, (8, 0), 312, 156, 2039),
    "h100": (80, (9, 0), 989, 494, 3350),
    "h200": (141, (9, 0), 989, 494, 4800),
    "rtx3060": (12, (8, 6), 25.6, 12.8, 360),
    "rtx3090": (24, (8, 6), 71, 35.6, 936),
    "rtx4070": (12, (8, 9), 58.3, 29.1, 504),
    "rtx4090": (24, (8, 9), 165.2, 82.6, 1008),
    "rtx5070ti": (16, (12, 0), 87.9, 43.9, 896),
    "rtx5080": (16, (12, 0), 112.6, 56.3, 960),
    "rtx5090": (32, (12, 0), 209.5, 104.8, 1792),
    "rtxpro6000": (96, (12, 0), None, None, 1792),
    # Cards of every generation since Pascal.
    "gtx1060-6": (6, (6, 1), None, None, 192.2),
    "p40": (24, (6, 1), None, None, 347.1),
    "p100": (16, (6, 0), None, None, 732.2),
    "v100s": (32, (7, 0), None, None, 1130),
    "gtx1660super": (6, (7, 5), None, None, 336),
    "rtx2060-12": (12, (7, 5), None, None, 336),
    "quadrortx8000": (48, (7, 5), None, None, 672),
    "rtx3060laptop": (6, (8, 6), 21.9, 10.9, 336),
    "rtxa4000": (16, (8, 6), 76.7, 38.3, 448),
    "a30": (24, (8, 0), 165, 82.5, 933),
    "rtx4060ti-16": (16, (8, 9), 44.1, 22.1, 288),
    "rtx4070tisuper": (16, (8, 9), 88.2, 44.1, 672.3),
    "l40": (48, (8, 9), 181, 90.5, 864),
    "h100nvl": (94, (9, 0), 835, 418, 3938),
    "gh200-96": (96, (9, 0), 989, 494, 4000),
    "rtx5060ti-16": (16, (12, 0), 47.4, 23.7, 448),
    "gb200": (186, (10, 0), 2500, 1250, 8000),
    "b200-180": (180, (10, 0), 2250, 1125, 8000),
    "b200-192": (192, (10, 0), 2250, 1125, 8000),
}


@each_row(*PUBLISHED)
def test_published_figures(key):
    gpu = known_gpus()[key]
    found = (gpu.memory_gb, gpu.compute_capability, gpu.bf16_tflops, gpu.tf32_tflops, gpu.bandwidth_gb_s)
    assert found == PUBLISHED[key]


@each_row(*known_gpus().values())
def test_figures_agree_with_each_other(gpu):
    assert 2 <= gpu.memory_gb <= 288
    assert 48 <= gpu.bandwidth_gb_s <= 8000
    assert len(gpu.source) > 10
    # Until Ampere up to 6 MB a chip, except for the data center's; since Ada 12 and more.
    large = gpu.compute_capability in {(8, 0), (8, 9)} or gpu.compute_capability >= (9, 0)
    assert 12 <= gpu.l2_mb <= 128 if large else 0.5 <= gpu.l2_mb <= 6
    # A multiprocessor has 64 or 128 fp32 units, which compute two FLOPs a clock of 0.9 to 2.7 GHz.
    units = 64 if gpu.compute_capability in {(6, 0), (7, 0), (7, 5), (8, 0)} else 128
    assert 0.9 < gpu.fp32_tflops * 1e3 / (2 * units * gpu.multiprocessors) < 2.7
    if gpu.compute_capability < (8, 0):
        assert gpu.bf16_tflops is gpu.tf32_tflops is None
    elif gpu.bf16_tflops is None:
        assert "bf16" in gpu.note
        assert gpu.least_bf16_tflops
    else:
        # Tensor cores have one rate for both 16-bit formats and half of it for TF32, if they accumulate in fp32.
        assert gpu.bf16_tflops == gpu.fp16_tflops
        assert gpu.tf32_tflops == pytest.approx(gpu.bf16_tflops / 2, rel=0.015)
        # A sparse figure, twice as high, would be out of range: no GPU does so much arithmetic per byte.
        assert 30 < gpu.bf16_tflops * 1e3 / gpu.bandwidth_gb_s < 460
    # Small chips of Turing have no tensor cores, and no rate of theirs.
    installed = gpu.installed_in(Machine(system="Linux", cpu_cores=1))
    has_tensor_cores = bool(gpu.fp16_tflops or gpu.least_bf16_tflops)
    assert installed.has_tensor_cores == has_tensor_cores
    assert (decide(installed, Hardware()).precision.value == "fp32") == (not has_tensor_cores)


def test_a_gtx_16_trains_in_fp32_also_in_this_machine():
    for name in (
        "NVIDIA GeForce GTX 1660 Ti",
        "NVIDIA GeForce GTX 1650 with Max-Q Design",
        "Quadro T2000",
        "NVIDIA T600",
    ):
        machine = Machine(system="Linux", cpu_cores=1, gpu=name, gpu_memory_gb=6.0, compute_capability=(7, 5),
                          compiled_capabilities=("sm_75",))  # fmt: skip
        precision = decide(machine, Hardware()).precision
        assert (precision.value, "NaN" in precision.reason) == ("fp32", True)
        assert decide(machine, Hardware(precision="bf16")).precision.value == "fp32"
        assert decide(machine, Hardware(precision="mixed")).precision.value == "fp16"
        assert decide(replace(machine, gpu="Tesla T4"), Hardware()).precision.value == "fp16"


def test_the_rtx_4090_and_the_t4_by_precision():
    rates = [find_gpu("rtx4090").flops_per_second(name) for name in ("bf16", "fp16", "tf32", "fp32")]
    assert rates == [165.2e12, 165.2e12, 82.6e12, 82.6e12]
    assert [find_gpu("t4").flops_per_second(name) for name in ("bf16", "fp16", "tf32", "fp32")] == [
        None,
        65e12,
        None,
        8.1e12,
    ]


@each_row(
    ("rtx4090", "rtx4090"),
    ("RTX 4090", "rtx4090"),
    ("rtx-4090", "rtx4090"),
    ("4090", "rtx4090"),
    ("NVIDIA GeForce RTX 4090", "rtx4090"),
    ("NVIDIA GeForce RTX 5070 Ti", "rtx5070ti"),
    ("a100-40", "a100-40"),
    ("A100-80", "a100-80"),
    ("a100", "a100-40"),
    ("NVIDIA A100-SXM4-80GB", "a100-80"),
    ("NVIDIA A100 80GB PCIe", "a100pcie-80"),
    ("Tesla T4", "t4"),
    ("Tesla V100-SXM2-16GB", "v100-16"),
    ("NVIDIA H100 80GB HBM3", "h100"),
    ("NVIDIA H100 PCIe", "h100pcie"),
    ("NVIDIA RTX A6000", "rtxa6000"),
    ("NVIDIA RTX 6000 Ada Generation", "rtx6000ada"),
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtxpro6000"),
    ("RTX 3060 12GB", "rtx3060"),
    ("NVIDIA GeForce RTX 3060", "rtx3060"),
    ("rtx 3060 8gb", "rtx3060-8"),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", "rtx4090laptop"),
    ("GeForce RTX 2070 with Max-Q Design", "rtx2070maxq"),
    ("NVIDIA GeForce RTX 2060", "rtx2060-6"),
    ("4060 Ti 16 GB", "rtx4060ti-16"),
    ("1080 ti", "gtx1080ti"),
    ("Tesla P40", "p40"),
    ("Tesla P100-PCIE-16GB", "p100pcie-16"),
    ("Tesla V100-PCIE-32GB", "v100pcie-32"),
    ("Tesla V100S-PCIE-32GB", "v100s"),
    ("TITAN X (Pascal)", "titanxpascal"),
    ("NVIDIA RTX A2000 12GB", "rtxa2000-12"),
    ("NVIDIA RTX 4000 SFF Ada Generation", "rtx4000sffada"),
    ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "rtxpro6000maxq"),
    ("NVIDIA A800-SXM4-80GB", "a800"),
    ("NVIDIA GH200 480GB", "gh200-96"),
    ("NVIDIA GH200 144G HBM3e", "gh200-144"),
    ("NVIDIA B300 SXM6 AC", "b300"),
    ("Tesla V100-DGXS-32GB", "v100-32"),
    ("GRID T4-16Q", "t4"),
    ("NVIDIA A10-24Q", "a10"),
    ("NVIDIA GeForce RTX 3060 Lite Hash Rate", "rtx3060"),
    ("RTX 4090 Mobile", "rtx4090laptop"),
    ("NVIDIA GeForce RTX 3050 6GB Laptop GPU", "rtx3050laptop-6"),
    ("Colab T4", "t4"),
    ("Colab A100", "a100-40"),
    ("Kaggle P100", "p100pcie-16"),
)
def test_names(name, key):
    assert find_gpu(name).key == key


@each_row(
    ("T4 x2", "t4", 2),
    ("2x T4", "t4", 2),
    ("2 x t4", "t4", 2),  # As a plan names them.
    ("Kaggle GPU T4 x2", "t4", 2),
    ("Kaggle 2x T4", "t4", 2),
    ("t4x2", "t4", 2),
    ("Google Colab A100 40GB", "a100-40", 1),
    ("8xH100", "h100", 8),
    ("a100-80 ×4", "a100-80", 4),
    ("RTX 4090 X 16", "rtx4090", 16),
    ("Colab L4", "l4", 1),
    ("TITAN X (Pascal)", "titanxpascal", 1),
)
def test_names_may_say_how_many(name, key, count):
    one, found = count_gpus(name)
    assert (find_gpu(one).key, one, found) == (key, one.strip(), count)


def test_the_names_of_all_cards_mean_one_card():
    for gpu in known_gpus().values():
        assert count_gpus(gpu.key) == (gpu.key, 1)
        assert count_gpus(gpu.name) == (gpu.name, 1)


@each_row(
    ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "is a slice of a GPU", "--vram-gb 10,"),
    ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", "is a slice of a GPU", "--vram-gb 40,"),
    ("NVIDIA A10-8Q", "NVIDIA A10 has 24 GB", "use a10, or plan by memory: --vram-gb 8,"),
    ("Tesla M40 24GB", "unknown GPU", "--vram-gb 24,"),
)
def test_the_memory_in_an_unknown_name_is_that_of_the_hint(name, message, hint):
    with pytest.raises(UserError, match=message) as error:
        find_gpu(name)
    assert hint in error.value.hint


def test_every_card_is_found_by_its_own_name():
    for gpu in known_gpus().values():
        assert find_gpu(gpu.key) == gpu
        assert find_gpu(f"{gpu.name} {gpu.memory_gb:g}GB") == gpu


@each_row(
    ("rtx 4096", "unknown GPU 'rtx 4096'", "rtx4090"),
    ("a100-60", "has 40 or 80 GB", "a100-40"),
    ("Voodoo 2", "unknown GPU 'Voodoo 2'", "--all-gpus"),
    ("", "unknown GPU ''", "--vram-gb"),
)
def test_unknown_names(name, message, hint):
    with pytest.raises(UserError) as error:
        find_gpu(name)
    assert message in error.value.message
    assert hint in error.value.hint


def test_no_decision_hangs_on_a_name():
    for name in ("probe.py", "plan.py", "runtime.py", "speed.py"):
        text = (Path(gpus.__file__).parent / name).read_text(encoding="utf-8")
        assert "hw.gpus" not in text, name
