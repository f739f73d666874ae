"""bf16 on the CPU: wrong convolutions are found, and oneDNN then does without the instructions that cause them."""

import os
import platform
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.nn.functional as F

from gputrain.errors import UserError
from gputrain.hw import bf16_check, runtime
from gputrain.hw.doctor.trials import try_bf16_on_cpu
from gputrain.hw.plan import Hardware, decide
from gputrain.hw.probe import Machine

PLAN = decide(Machine(system="Linux", cpu_cores=2), Hardware(device="cpu", use_bf16=True))


def without_a_channel(right):
    """Return a convolution that ignores the first channel of its input in 16 bit."""

    def wrong(x_BCT, weight, **options):
        if x_BCT.element_size() == 2:
            x_BCT = torch.cat([torch.zeros_like(x_BCT[:, :1]), x_BCT[:, 1:]], dim=1)
        return right(x_BCT, weight, **options)

    return wrong


def test_right_convolutions_are_as_similar_as_rounding_allows():
    assert 1 - bf16_check.similarity() < 2 * 2.0**-16  # Both factors and the result are rounded to 8 bits.


def test_a_wrong_convolution_and_a_wrong_gradient_are_found():
    assert bf16_check.similarity(convolve=without_a_channel(F.conv1d)) < bf16_check.LEAST_SIMILARITY
    assert bf16_check.similarity(transposed=without_a_channel(F.conv_transpose1d)) < bf16_check.LEAST_SIMILARITY


def test_bf16_that_stays_wrong_is_refused(monkeypatch):
    monkeypatch.setattr(bf16_check, "has_amx", lambda: False)
    with pytest.raises(UserError, match=r"similarity to fp32 is 0\.070") as refused:
        runtime.verify_bf16_on_cpu(PLAN, similarity=lambda: 0.07)
    assert "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16" in refused.value.hint
    assert runtime.apply(PLAN).plan == PLAN


@pytest.mark.parametrize(("has_amx", "environment"), [(False, {}), (True, {bf16_check.VARIABLE: "AVX2"})])
def test_without_amx_or_with_the_users_own_cap_no_process_is_started(monkeypatch, has_amx, environment):
    monkeypatch.setattr(bf16_check, "has_amx", lambda: has_amx)
    monkeypatch.setattr(bf16_check, "similarity_in_child", lambda: pytest.fail("a process was started"))
    monkeypatch.delenv(bf16_check.VARIABLE, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert runtime.cap_onednn_if_wrong() == ""


CAPPED = """
    import os, torch
    from gputrain.hw import bf16_check, runtime
    from tests.hw.test_bf16_check import PLAN

    bf16_check.has_amx = lambda: True
    bf16_check.BELOW_AMX = "SSE41"
    bf16_check.similarity_in_child = lambda: {similarity}
    print("reason:", runtime.apply(PLAN).plan.precision.reason, flush=True)
"""


def test_right_convolutions_are_not_capped(monkeypatch):
    monkeypatch.setattr(bf16_check, "has_amx", lambda: True)
    monkeypatch.setattr(bf16_check, "similarity_in_child", lambda: 1.0)
    monkeypatch.delenv(bf16_check.VARIABLE, raising=False)
    assert runtime.cap_onednn_if_wrong() == ""
    assert bf16_check.VARIABLE not in os.environ


@pytest.mark.skipif(platform.machine().lower() not in ("x86_64", "amd64"), reason="oneDNN's names for x86")
@pytest.mark.parametrize("similarity", [0.07, pytest.param(1.0, marks=pytest.mark.slow)])
def test_the_cap_is_in_effect_in_the_same_process(similarity):
    """oneDNN prints which instructions it uses, at its first call in a process."""
    environment = {name: value for name, value in os.environ.items() if name != bf16_check.VARIABLE}
    child = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CAPPED).format(similarity=similarity)],
        env={**environment, "ONEDNN_VERBOSE": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr
    capped = similarity < 0.5
    assert ("cpu,isa:Intel SSE4.1" in child.stdout) is capped
    assert ("oneDNN runs without AMX (ONEDNN_MAX_CPU_ISA=SSE41)" in child.stdout) is capped
    assert "onednn_verbose" in child.stdout


def test_the_trial():
    assert try_bf16_on_cpu().status == "ok"
    found = try_bf16_on_cpu(lambda: 0.07)
    assert found.status == "note"
    assert "similarity 0.070 to fp32" in found.found
    assert found.remedy
