"""Machines that tests decide for: none of them is the one that the tests run on."""

from gputrain.hw.probe import Machine

CPU = Machine(system="Linux", cpu_cores=2, torch="2.13")
H100 = Machine(
    system="Linux", cpu_cores=8, gpu="H100", gpu_memory_gb=80, compute_capability=(9, 0), triton=True,
    compiled_capabilities=("sm_90",), cuda="13.0", compiler="g++",
)  # fmt: skip
T4 = Machine(
    system="Linux", cpu_cores=8, gpu="T4", gpu_memory_gb=16, compute_capability=(7, 5), triton=True,
    compiled_capabilities=("sm_75",), cuda="13.0", compiler="g++",
)  # fmt: skip
