"""Each switch, on and off, changes what it says it changes."""

import logging
import os
import subprocess
import sys
import time

import pytest
import torch
from torch import nn

from gputrain.data import Stream, loader
from gputrain.hw import runtime
from gputrain.hw.plan import Hardware, decide
from gputrain.hw.probe import Machine
from gputrain.hw.runtime import apply, compiler_failure
from gputrain.vae.config import Architecture
from gputrain.vae.model import AutoencoderKL, ResnetBlock, blocks
from tests.hw.test_plan import machine

SMALL = Architecture((32, 64), latent_channels=4)


def on_cpu(**wishes):
    return apply(decide(Machine(system="Linux", cpu_cores=2, compiler="g++"), Hardware(device="cpu", **wishes)))


@pytest.fixture
def switches(monkeypatch):
    """torch's own switches, put back afterwards. (They can be set without a GPU.)"""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = (cudnn.benchmark, cudnn.conv.fp32_precision, matmul.fp32_precision)
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    yield lambda: (cudnn.benchmark, cudnn.conv.fp32_precision, matmul.fp32_precision)
    cudnn.benchmark, cudnn.conv.fp32_precision, matmul.fp32_precision = before


def test_tf32_and_benchmark(switches):
    apply(decide(machine("H100"), Hardware()))
    assert switches() == (True, "tf32", "tf32")
    apply(decide(machine("H100"), Hardware(enable_tf32=False), fixed_shapes=False))
    assert switches() == (False, "ieee", "ieee")
    apply(decide(machine("T4"), Hardware()))
    assert switches() == (True, "ieee", "ieee")


def test_allocator(switches, monkeypatch):
    apply(decide(machine("H100", system="Windows"), Hardware()))
    assert "PYTORCH_CUDA_ALLOC_CONF" not in os.environ
    apply(decide(machine("H100"), Hardware()))
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    apply(decide(machine("H100"), Hardware()))
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:64"  # the user's own


@pytest.mark.parametrize(
    ("wishes", "dtype"),
    [({}, torch.float32), ({"use_bf16": True}, torch.bfloat16), ({"use_bf16": False}, torch.float32)],
)
def test_precision_is_that_of_the_convolutions(wishes, dtype):
    used = on_cpu(**wishes)
    seen = []
    model = used.place(AutoencoderKL(SMALL))
    for block in blocks(model):
        block.register_forward_hook(lambda block, given, out: seen.append(out.dtype))
    with used.autocast():
        model.decode(model.encode(torch.rand(1, 3, 16, 16)).mean_BLhw)
    assert set(seen) == {dtype}
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("wish", [True, False])
@pytest.mark.parametrize("lean", [True, False])
def test_channels_last_holds_from_the_first_layer_to_the_last(wish, lean):
    used = on_cpu(channels_last=wish)
    model = used.place(AutoencoderKL(SMALL, lean=lean))
    layout = torch.channels_last if wish else torch.contiguous_format
    assert model.decoder.conv_in.weight.is_contiguous(memory_format=layout)
    seen = []
    for block in blocks(model):
        block.register_forward_hook(lambda block, given, out: seen.append(out.is_contiguous(memory_format=layout)))
    images = torch.rand(2, 3, 32, 32).contiguous(memory_format=used.memory_format)
    model.decode(model.encode(images).mean_BLhw)
    assert len(seen) == len(blocks(model))
    assert all(seen)


class Forgetful(nn.Module):
    """A normalisation that answers in NCHW, as CUDA's kernel did in some versions of torch."""

    def forward(self, x_BCHW):
        return (x_BCHW - x_BCHW.mean()).contiguous()


def test_a_layout_that_is_lost_switches_channels_last_off(caplog):
    kept = on_cpu(channels_last=True)
    kept.verify_layout(ResnetBlock(32, 32, 8), 32)
    assert kept.plan.channels_last.value is True
    lost = on_cpu(channels_last=True)
    with caplog.at_level(logging.WARNING):
        lost.verify_layout(Forgetful(), 32)
    assert lost.plan.channels_last.value is False
    assert lost.memory_format == torch.contiguous_format
    assert "Forgetful" in lost.plan.channels_last.reason
    assert "channels_last is off" in caplog.text


@pytest.mark.slow
def test_compiled_functions_can_go_back_to_what_they_were(switches):
    traced = []

    def function(x):
        traced.append(torch.compiler.is_compiling())
        return x + 1

    x = torch.zeros(3)
    assert on_cpu(use_torch_compile=False).compile(function) is function
    used = on_cpu(use_torch_compile=True)
    either = used.compile(function)
    assert torch.equal(either(x), x + 1)
    assert torch.equal(either(x), x + 1)
    assert traced == [True, True]
    used.stop_compiling("for a test")
    assert torch.equal(either(x), x + 1)
    assert traced[2:] == [False]
    assert used.plan.compile.value is False


def test_compiled_code_is_kept_under_the_users_folder(switches, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    on_cpu(use_torch_compile=False)
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
    on_cpu(use_torch_compile=True)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "gputrain" / "compiled")


def test_compiler_failures_are_told_from_other_errors():
    import torch._dynamo.exc

    failure = torch._dynamo.exc.TorchDynamoException("\nCppCompileError: no compiler\nmore")
    assert compiler_failure(failure) == "CppCompileError: no compiler"
    assert compiler_failure(RuntimeError("shapes do not fit")) == ""


class Workers:
    """Says which process reads."""

    def __getitem__(self, sample):
        return os.getpid()


@pytest.mark.parametrize("persistent", [True, False])
def test_workers_alive_over_epochs(persistent):
    stream = Stream(item_count=4, seed=0, batch_size=2, start_sample=0, stop_sample=12)
    pids = [set(batch.tolist()) for batch in loader(Workers(), stream, num_workers=1, persistent=persistent)]
    assert len(pids) == 6
    assert len(set.union(*pids)) == (1 if persistent else 3)


class Traces:
    """Leaves a file for every item that is read."""

    def __init__(self, folder):
        self.folder = folder

    def __getitem__(self, sample):
        (self.folder / f"{sample.epoch}_{sample.item}").touch()
        return 0


@pytest.mark.parametrize("prefetch", [1, 3])
def test_prefetch_is_what_each_worker_reads_ahead(tmp_path, prefetch):
    stream = Stream(item_count=10, seed=0, batch_size=1, start_sample=0, stop_sample=10)
    batches = loader(Traces(tmp_path), stream, num_workers=1, prefetch=prefetch)
    next(batches)
    until = time.monotonic() + 20
    while len(list(tmp_path.iterdir())) < 1 + prefetch and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(0.3)
    assert len(list(tmp_path.iterdir())) == 1 + prefetch
    batches.close()


COMPILE = """
import torch
from gputrain.hw.plan import Hardware, decide
from gputrain.hw.probe import probe
from gputrain.hw.runtime import apply
from gputrain.vae.model import ResnetBlock
used = apply(decide(probe(), Hardware(device="cpu", use_torch_compile=True)))
block = ResnetBlock(32, 32, 8)
used.compile_modules([block])
block(torch.rand(1, 32, 16, 16)).sum().backward()
from torch._dynamo.utils import counters
print(counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"])
"""


@pytest.mark.slow
def test_compiled_code_is_found_by_the_next_run(tmp_path):
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    hits = [
        int(subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, check=True).stdout)
        for _ in range(2)
    ]
    assert hits[0] == 0
    assert hits[1] > 0


def test_the_peak_is_measured_without_touching_the_random_numbers():
    used = on_cpu()
    torch.manual_seed(0)
    before = torch.get_rng_state()
    rate = used.product_rate
    assert torch.equal(before, torch.get_rng_state())
    assert 1e8 < rate < 1e14
    assert used.product_rate == rate  # measured once


def test_memory_by_name():
    memory = runtime.memory_gb(torch.device("cpu"))
    assert 0.05 < memory["memory/peak_gb"] < 1000
