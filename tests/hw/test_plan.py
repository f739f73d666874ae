"""Decisions on a table of machines: the value of every setting, and its reason."""

from dataclasses import replace

import pytest

from gputrain.errors import UserError
from gputrain.hw.driver import Card, Driver
from gputrain.hw.plan import Hardware, decide, fit_shared_memory, workers
from gputrain.hw.probe import Machine
from tests.tables import each_row

CARDS = {
    "P100": ((6, 0), 16.0),
    "V100": ((7, 0), 16.0),
    "GTX 1660 SUPER": ((7, 5), 6.0),
    "T1000": ((7, 5), 8.0),
    "T4": ((7, 5), 16.0),
    "A100": ((8, 0), 40.0),
    "RTX 4090": ((8, 9), 24.0),
    "H100": ((9, 0), 80.0),
    "RTX 5090": ((12, 0), 32.0),
}


def machine(name: str = "", **others) -> Machine:
    facts = {"system": "Linux", "cpu_cores": 12, "triton": True, "compiler": "/usr/bin/g++"}
    if name:
        capability, memory = CARDS[name]
        facts |= {"gpu": name, "compute_capability": capability, "gpu_memory_gb": memory, "cuda": "13.0"}
        facts["compiled_capabilities"] = (f"sm_{capability[0]}{capability[1]}",)
    return Machine(**{**facts, **others})


@each_row(
    ("H100", {}, "bf16"),
    ("RTX 5090", {"precision": "bf16"}, "bf16"),
    ("RTX 4090", {"precision": "fp16"}, "fp16"),
    ("RTX 4090", {"precision": "tf32"}, "fp32"),
    ("T4", {}, "fp16"),
    ("T4", {"precision": "bf16"}, "fp16"),
    ("", {}, "fp32"),
    ("", {"precision": "mixed"}, "fp32"),
    ("", {"precision": "bf16"}, "fp32"),
    ("H100", {"device": "cpu"}, "fp32"),
)
def test_precision(name, requested, precision):
    assert decide(machine(name), Hardware(**requested)).precision.value == precision


@each_row(
    ("RTX 5090", {}, "fp32"),
    ("RTX 5090", {"precision": "tf32"}, "fp32"),
    ("RTX 5090", {"precision": "mixed"}, "fp16"),
    ("RTX 5090", {"precision": "bf16"}, "bf16"),
    ("", {}, "fp32"),
)
def test_where_fp32_is_the_default_16_bit_is_asked_for_by_name(name, requested, precision):
    setting = decide(machine(name), Hardware(**requested), fp32_because="a reason").precision
    assert setting.value == precision
    assert (setting.reason == "a reason") == bool(name and not requested)


@each_row(
    ("T4", {}, "fp32", "a reason; the tensor cores of T4 compute fp16 alone: --precision fp16 uses them"),
    ("V100", {}, "fp32", "compute fp16 alone"),
    ("T4", {"precision": "fp16"}, "fp16", "no native bf16"),
    ("RTX 4090", {}, "fp32", "a reason"),
    ("T4", {"precision": "bf16"}, "fp16", "T4 has no native bf16; fp16 with loss scaling instead"),
    ("T4", {"precision": "mixed"}, "fp16", "no native bf16"),
    ("T4", {"precision": "tf32"}, "fp32", "asked for; the tensor cores of T4 compute fp16 alone"),
    ("RTX 4090", {"precision": "tf32"}, "fp32", "asked for"),
    ("T4", {"device": "cpu"}, "fp32", "the CPU computes fp32 fastest"),
    # Without tensor cores, as on the small chips of Turing and on Pascal, 16 bit would save little but memory.
    ("GTX 1660 SUPER", {}, "fp32", "a reason"),
    ("T1000", {}, "fp32", "a reason"),
    ("P100", {}, "fp32", "a reason"),
    ("P100", {"precision": "tf32"}, "fp32", "asked for"),
)
def test_a_vocoder_is_told_of_tensor_cores_that_compute_fp16_alone(name, requested, precision, reason):
    setting = decide(machine(name), Hardware(**requested), fp32_because="a reason").precision
    assert setting.value == precision
    assert reason in setting.reason
    assert ("compute fp16 alone" in setting.reason) == ("compute fp16 alone" in reason)


@each_row(
    ({"name": "H100"}, {"use_torch_compile": True}, True, "asked for"),
    ({"name": "H100"}, {}, True, "the first step compiles"),
    ({"name": "T4"}, {}, False, "older than"),
    ({"name": "T4"}, {"use_torch_compile": True}, True, "asked for"),
    ({}, {}, False, "needs a GPU"),
    ({"name": "H100"}, {"use_torch_compile": False}, False, "switched off"),
    ({"name": "V100"}, {"use_torch_compile": True}, False, "Triton does not support this GPU"),
    ({"name": "H100", "triton": False}, {"use_torch_compile": True}, False, "install triton"),
    ({"name": "H100", "triton": False, "system": "Windows"}, {"use_torch_compile": True}, False, "triton-windows"),
    ({}, {"use_torch_compile": True}, False, "asked for, but needs a GPU"),
)
def test_compile(facts, requested, on, reason):
    setting = decide(machine(**facts), Hardware(**requested)).compile
    assert setting.value is on
    assert reason in setting.reason


def test_tf32_and_channels_last_by_card():
    for name, (capability, _) in CARDS.items():
        plan = decide(machine(name), Hardware())
        assert plan.tf32.value is (capability >= (8, 0)), name
        assert plan.channels_last.value is True
        assert decide(machine(name), Hardware(precision="fp32", channels_last=False)).tf32.value is False
    assert decide(machine(), Hardware()).channels_last.value is False
    assert decide(machine(), Hardware(channels_last=True)).channels_last.value is True


def test_channels_last_of_a_model_whose_generator_is_1d():
    for wish in (None, True):
        setting = decide(machine("H100"), Hardware(channels_last=wish), generator_is_1d=True).channels_last
        assert setting.value is True
        assert "the discriminators' 2-D convolutions" in setting.reason
    assert "2-D" not in decide(machine("H100"), Hardware()).channels_last.reason
    assert "2-D" not in decide(machine(), Hardware(), generator_is_1d=True).channels_last.reason


def test_switches_that_only_a_gpu_has():
    on_gpu, on_cpu = decide(machine("H100"), Hardware()), decide(machine(), Hardware())
    for name in ("cudnn_benchmark", "expandable_segments", "pinned_memory"):
        assert getattr(on_gpu, name).value is True, name
        assert getattr(on_cpu, name).value is False, name
    for facts in ({"system": "Windows"}, {"wsl": True}):
        assert decide(machine("H100", **facts), Hardware()).expandable_segments.value is False
    assert decide(machine("H100"), Hardware(), fixed_shapes=False).cudnn_benchmark.value is False


@each_row(
    ("H100", {}, "", False, "off unless asked for: no gain has been measured on a GPU yet"),
    ("", {}, "", False, "off unless asked for"),
    ("H100", {"use_cuda_graphs": True}, "", True, "asked for; the gradients of a step are captured"),
    ("T4", {"use_cuda_graphs": True}, "", True, "asked for; the gradients of a step are captured"),
    ("H100", {"use_cuda_graphs": True}, "shapes change", False, "asked for, but shapes change"),
    ("", {"use_cuda_graphs": True}, "", False, "asked for, but needs a GPU"),
)
def test_cuda_graphs(name, wish, because, on, reason):
    facts = machine(name) if name else machine()
    setting = decide(facts, Hardware(**wish), graphless_because=because).cuda_graphs
    assert setting.value is on
    assert setting.reason.startswith(reason)


def test_switches_that_only_workers_have():
    plan = decide(machine(), Hardware(num_workers=2, prefetch_factor=3))
    assert (plan.prefetch_factor.value, plan.persistent_workers.value) == (3, True)
    plan = decide(machine(), Hardware(num_workers=2, persistent_workers=False))
    assert plan.persistent_workers.value is False
    many = decide(machine(cpu_cores=2), Hardware(num_workers=6)).num_workers
    assert (many.value, many.reason) == (6, "asked for; more than the CPU cores (2), which they have to share")
    plan = decide(machine(), Hardware(num_workers=0))
    assert (plan.prefetch_factor.value, plan.persistent_workers.value) == (0, False)
    assert "no workers" in plan.persistent_workers.reason


def test_a_card_that_torch_cannot_use_is_an_error_and_not_a_slow_cpu():
    card = Card("RTX 5090")
    unusable = machine(driver=Driver("580.10", "13.0", (card,)), gpu_error="the driver is too old")
    with pytest.raises(UserError, match=r"RTX 5090: .* \(the driver is too old\)"):
        decide(unusable, Hardware())
    assert decide(unusable, Hardware(device="cpu")).device.value == "cpu"
    assert decide(replace(unusable, visible_devices=""), Hardware()).device.value == "cpu"
    with pytest.raises(UserError, match="has no code for the card"):
        decide(machine("RTX 5090", compiled_capabilities=("sm_80", "sm_90")), Hardware())


def test_workers():
    assert decide(machine(), Hardware()).num_workers.value == 8
    assert decide(machine(cpu_cores=2), Hardware()).num_workers.value == 2
    assert decide(machine(), Hardware(num_workers=0)).num_workers.value == 0


@each_row(
    (32, 20, 600, 15),  # 12 cores are busy; a quarter more.
    (32, 20, 100, 3),
    (32, 20, 6000, 32),
    (16, 20, 600, 15),
    (12, 20, 600, 12),
    (4, 20, 600, 4),
    (32, 0, 0, 8),  # Nothing is known.
)
def test_workers_follow_cores_and_rate(cores, item_ms, rate, processes):
    found = workers(machine(cpu_cores=cores), item_seconds=item_ms / 1000, items_per_second=rate)
    assert found.value == processes
    assert ("so the device will wait for data" in found.reason) is (item_ms * rate / 1000 > cores)


@each_row((0.064, 0.02, 2), (0.064, 0.1, 0), (0.064, 0.0, 8), (0.0, 1.0, 8), (32.0, 0.02, 8))
def test_workers_of_other_trainers_fit_into_shared_memory(shared_gb, batches_gb, processes):
    found = workers(machine(cpu_cores=32, shared_memory_gb=shared_gb), batches_gb=batches_gb)
    assert found.value == processes
    assert ("--shm-size" in found.reason) is (processes < 8)


def test_no_gpu_where_one_is_asked_for():
    with pytest.raises(UserError, match="no GPU"):
        decide(machine(), Hardware(device="cuda"))


def test_every_setting_has_its_reason():
    for name in ("", *CARDS):
        for setting in decide(machine(name), Hardware()).to_json().values():
            assert setting["reason"]


@each_row(
    (("sm_80", "sm_90"), (9, 0), True),
    (("sm_80",), (8, 9), True),
    (("sm_89",), (8, 6), False),
    (("sm_80", "sm_90"), (12, 0), False),
    (("sm_90", "compute_90"), (12, 0), True),
    (("sm_90a", "sm_120"), (12, 0), True),
    (("sm_75",), (7, 0), False),
)
def test_kernels_for_the_card(compiled, capability, runs):
    facts = {"gpu": "some", "compute_capability": capability, "compiled_capabilities": compiled}
    assert Machine(system="Linux", cpu_cores=1, **facts).has_kernels is runs


@each_row(
    (64, 1.0, 8, 4),  # 34 of 51 batches fit.
    (64, 2.5, 8, 2),
    (64, 3.0, 8, 1),
    (64, 6.0, 6, 1),
    (64, 12.0, 2, 1),
    (64, 48.0, 0, 0),
    (0, 48.0, 8, 4),  # The size is unknown.
    (8000, 48.0, 8, 4),
)
def test_the_batches_of_workers_fit_into_shared_memory(shared_mb, batch_mb, workers, prefetch):
    facts = machine("H100", shared_memory_gb=shared_mb / 1e3)
    before = decide(facts, Hardware(num_workers=8))
    plan = fit_shared_memory(before, facts, int(batch_mb * 1e6))
    found = int(plan.num_workers.value), int(plan.prefetch_factor.value)
    assert found[1] == prefetch
    assert found[0] == workers
    if shared_mb:
        held = found[0] * found[1] + 2 if found[0] else 0  # The training process holds two.
        assert held * batch_mb <= shared_mb
    if found == (8, 4):
        assert plan == before
    else:
        assert "/dev/shm" in plan.num_workers.reason
        assert "--shm-size" in plan.num_workers.reason
    assert plan.persistent_workers.value is bool(workers)
    assert fit_shared_memory(plan, facts, int(batch_mb * 1e6)) == plan


def test_no_workers_need_no_shared_memory():
    plan = decide(machine("H100"), Hardware(num_workers=0))
    assert fit_shared_memory(plan, machine("H100", shared_memory_gb=0.001), 10**9) == plan
