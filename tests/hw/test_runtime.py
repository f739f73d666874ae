"""Each setting, on and off, has its effect."""

import logging
import os
import platform
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from gputrain.engine.data import Stream, loader
from gputrain.hw import probe, runtime
from gputrain.hw.plan import Hardware, decide
from gputrain.hw.probe import ALLOCATOR_VARIABLES, Machine
from gputrain.hw.runtime import apply, compiler_failure
from gputrain.hw.speed import product_flops_per_second
from gputrain.vae.architecture import VaeArchitecture
from gputrain.vae.memory_efficient_layers import Features
from gputrain.vae.model import AutoencoderKL, ResnetBlock, blocks
from tests.fake_cuda.device import UNAVAILABLE, fake_cuda
from tests.hw.test_plan import machine
from tests.tables import each_row
from tests.toy import cpu_runtime
from tests.waiting import wait_until

SMALL = VaeArchitecture((32, 64), latent_channels=4)


def on_cpu(**requested):
    return apply(decide(Machine(system="Linux", cpu_cores=2, compiler="g++"), Hardware(device="cpu", **requested)))


@pytest.fixture
def switches(monkeypatch):
    """torch's global settings, restored afterwards. They can be set without a GPU."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = (cudnn.benchmark, cudnn.allow_tf32, torch.get_float32_matmul_precision())
    for name in (*ALLOCATOR_VARIABLES, "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "")  # The value is restored afterwards.
        monkeypatch.delenv(name)
    yield lambda: (cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32)
    cudnn.benchmark, cudnn.allow_tf32 = before[:2]
    torch.set_float32_matmul_precision(before[2])


def test_torch_adds_no_warning_about_many_workers():
    """The plan names the number with its reason; torch would warn on stderr with each loader."""
    many = (os.cpu_count() or 1) + 2
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        on_cpu(num_workers=many)
        torch.utils.data.DataLoader(range(4), num_workers=many)
    assert [str(one.message) for one in told] == []


def test_tf32_and_benchmark(switches):
    apply(decide(machine("H100"), Hardware()))
    assert switches() == (True, True, True)
    apply(decide(machine("H100"), Hardware(precision="fp32"), fixed_shapes=False))
    assert switches() == (False, False, False)
    apply(decide(machine("T4"), Hardware()))
    assert switches() == (True, False, False)


@pytest.mark.skipif(bool(UNAVAILABLE), reason=UNAVAILABLE)
def test_a_trained_model_takes_inputs_of_any_size_without_a_search_for_each():
    with fake_cuda():
        used = runtime.runtime_on("auto")
        assert used.device.type == "cuda"
        assert used.plan.cudnn_benchmark.value is torch.backends.cudnn.benchmark is False


@pytest.mark.parametrize(("wish", "precision", "format"), [(True, "high", "tf32"), (False, "highest", "ieee")])
def test_every_reader_of_the_fp32_precision_agrees(switches, wish, precision, format):
    """torch's own code, such as inductor, reads both kinds of settings; if they contradict, the older ones raise."""
    apply(decide(machine("H100"), Hardware(precision="tf32" if wish else "fp32")))
    assert torch.get_float32_matmul_precision() == precision
    assert torch.backends.cuda.matmul.allow_tf32 is torch.backends.cudnn.allow_tf32 is wish
    assert torch.backends.cuda.matmul.fp32_precision == format
    assert (torch.backends.cudnn.conv.fp32_precision == "tf32") is wish
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=not wish):
        assert torch.backends.cudnn.allow_tf32 is not wish
    assert torch.backends.cudnn.allow_tf32 is wish


def test_the_device_has_an_index(switches, monkeypatch):
    """Without a GPU, torch refuses to limit the memory. Only the query of the GPU is replaced; the check is torch's."""
    used = apply(decide(machine("H100"), Hardware()))
    limits = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80e9))
    monkeypatch.setattr(torch.cuda.memory, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch._C, "_cuda_setMemoryFraction", lambda *given: limits.append(given), raising=False)
    used.limit_memory(20.0)
    assert limits == [(0.25, 0)]
    assert used.plan.device.value == "cuda"  # The plan names no index, whichever GPU of a machine it is.


@pytest.mark.parametrize(
    ("system", "release", "expected"),
    [
        ("Linux", "6.8.0-45-generic", "expandable_segments:True"),
        ("Linux", "5.15.167.4-microsoft-standard-WSL2", None),
        ("Windows", "11", None),
        ("Darwin", "24.1.0", None),
    ],
)
def test_expandable_segments_are_asked_for_before_cuda_starts(switches, monkeypatch, system, release, expected):
    """torch reads the environment when CUDA starts, which is when the machine is probed."""
    seen = []
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "release", lambda: release)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: seen.append(os.environ.get("PYTORCH_CUDA_ALLOC_CONF")))
    monkeypatch.setattr(probe, "ram", lambda: (1.0, 1.0))
    found = probe.probe()
    assert set(seen) == {expected}  # A CUDA build asks again.
    assert found.has_expandable_segments is (expected is not None)


def test_a_process_that_probes_nothing_asks_for_expandable_segments_too(switches):
    apply(decide(machine("H100", wsl=True), Hardware()))
    assert "PYTORCH_CUDA_ALLOC_CONF" not in os.environ
    apply(decide(machine("H100"), Hardware()))
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"


@pytest.mark.parametrize("name", ALLOCATOR_VARIABLES)
def test_the_users_own_allocator_settings_stay(switches, monkeypatch, name):
    monkeypatch.setenv(name, "max_split_size_mb:64")
    apply(decide(machine("H100"), Hardware()))
    assert {n: os.environ[n] for n in ALLOCATOR_VARIABLES if n in os.environ} == {name: "max_split_size_mb:64"}


@pytest.mark.parametrize(
    ("backend", "in_effect", "given", "value", "reason"),
    [
        ("native", True, "", True, "segments grow"),
        ("native", False, "", False, "CUDA was started before"),
        ("native", False, "max_split_size_mb:64", False, "PYTORCH_ALLOC_CONF=max_split_size_mb:64"),
        ("cudaMallocAsync", None, "backend:cudaMallocAsync", False, "PYTORCH_ALLOC_CONF=backend:cudaMallocAsync"),
    ],
)
def test_the_plan_says_what_the_allocator_really_does(
    switches, monkeypatch, caplog, backend, in_effect, given, value, reason
):
    def snapshot(device):
        assert backend == "native", "cudaMallocAsync has no snapshot"
        return {"allocator_settings": {"expandable_segments": in_effect}}

    if given:
        monkeypatch.setenv("PYTORCH_ALLOC_CONF", given)
    plan = decide(machine("H100"), Hardware())
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: backend)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", snapshot)
    with caplog.at_level(logging.WARNING):
        found = runtime.verify_expandable_segments(plan, torch.device("cuda", 0))
    assert found.expandable_segments.value is value
    assert reason in found.expandable_segments.reason
    assert ("expandable segments are off" in caplog.text) is not value


OUT_OF_MEMORY = [
    "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 23.55 GiB of which 1.1 GiB is free.",
    "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in https://docs.nvidia.com/cuda/cuda-runtime-api/"
    "group__CUDART__TYPES.html for more information.\nCUDA kernel errors might be asynchronously reported",
    "CUDA driver error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuFFT error: CUFFT_ALLOC_FAILED",
    "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "137438953472 bytes. Error code 12 (Cannot allocate memory)",
    "[enforce fail at alloc_cpu.cpp:121] data. DefaultCPUAllocator: not enough memory: you tried to allocate "
    "137438953472 bytes.",
]
LIBRARY_FAILURES = [
    "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "cusolver error: CUSOLVER_STATUS_NOT_INITIALIZED, when calling `cusolverDnCreate(handle)`",
    "cuFFT error: CUFFT_INTERNAL_ERROR",
    "GET was unable to find an engine to execute this computation",
    "FIND was unable to find an engine to execute this computation after trying 42 plans.",
    "Unable to find a valid cuDNN algorithm to run convolution",
    "cuDNN Frontend error: [cudnn_frontend] Error: No valid execution plans built.",
]
OTHER_FAILURES = [
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input.",
    "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
    "cuDNN error: CUDNN_STATUS_BAD_PARAM",
    "CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasGemmEx( handle, opa, opb, m, n, k, &falpha, a)`",
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, opa, opb, m, n, k)`",
    "CUDA error: an illegal memory access was encountered",
    "CUDA error: device-side assert triggered",
    "cuFFT error: CUFFT_INVALID_SIZE",
    "out of resource: shared memory, Required: 131088, Hardware limit: 101376. Reducing block sizes may help.",
    "DataLoader worker (pid 41) is killed by signal: Bus error. It is possible that dataloader's workers are out of "
    "shared memory. Please try to raise your shared memory limit.",
    "Calculated padded input size per channel: (3 x 3). Kernel size: (4 x 4). Kernel size can't be greater than actual "
    "input size",
    "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!",
]


@each_row(*((text, True) for text in OUT_OF_MEMORY), *((text, False) for text in OTHER_FAILURES))
def test_running_out_of_memory_is_told_from_other_failures(text, expected):
    assert runtime.is_out_of_memory(RuntimeError(text)) is expected
    assert runtime.is_out_of_memory(torch.OutOfMemoryError(text))
    assert runtime.library_failure(RuntimeError(text)) is None


@pytest.mark.skipif(bool(UNAVAILABLE), reason=UNAVAILABLE)
@each_row((80, 1.0, False), (1.7, 1.0, False), (1.6, 1.0, True), (80, 1.7 / 80, False), (80, 1.6 / 80, True))
def test_a_library_that_fails_has_run_out_of_memory_only_if_little_is_free(memory_gb, fraction, short):
    with fake_cuda(memory_gb=memory_gb):
        torch.cuda.set_per_process_memory_fraction(fraction)
        for text in LIBRARY_FAILURES:
            error = RuntimeError(text)
            assert runtime.is_out_of_memory(error) is short, text
            shown = runtime.library_failure(error)
            assert (shown is None) is short
            assert short or text in shown.message


def test_a_library_that_fails_without_a_gpu_has_not_run_out_of_memory():
    assert not any(runtime.is_out_of_memory(RuntimeError(text)) for text in LIBRARY_FAILURES)


@pytest.mark.skipif(bool(UNAVAILABLE), reason=UNAVAILABLE)
def test_nothing_is_known_of_memory_once_cuda_has_failed(monkeypatch):
    def fails():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with fake_cuda(memory_gb=1.5):
        monkeypatch.setattr(torch.cuda, "mem_get_info", fails)
        assert not runtime.is_out_of_memory(RuntimeError(LIBRARY_FAILURES[0]))
        assert runtime.library_failure(RuntimeError(LIBRARY_FAILURES[0])) is None  # Nobody knows that memory is free.


@each_row(("fp32", torch.float32), ("bf16", torch.bfloat16))
def test_precision_is_that_of_the_convolutions(precision, dtype):
    used = cpu_runtime(precision=precision)
    seen = []
    model = used.place(AutoencoderKL(SMALL))
    for block in blocks(model):
        block.register_forward_hook(lambda block, given, out: seen.append(tensor_of(out).dtype))
    with used.autocast():
        model.decode(model.encode(torch.rand(1, 3, 16, 16)).mean_BLhw)
    assert set(seen) == {dtype}
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("wish", [True, False])
@pytest.mark.parametrize("recompute_norms", [True, False])
def test_channels_last_holds_from_the_first_layer_to_the_last(wish, recompute_norms):
    used = on_cpu(channels_last=wish)
    model = used.place(AutoencoderKL(SMALL, recompute_norms=recompute_norms))
    layout = torch.channels_last if wish else torch.contiguous_format
    assert model.decoder.conv_in.weight.is_contiguous(memory_format=layout)
    seen = []
    for block in blocks(model):
        block.register_forward_hook(
            lambda block, given, out: seen.append(tensor_of(out).is_contiguous(memory_format=layout))
        )
    images = torch.rand(2, 3, 32, 32).contiguous(memory_format=used.memory_format)
    model.decode(model.encode(images).mean_BLhw)
    assert len(seen) == len(blocks(model))
    assert all(seen)


def tensor_of(out):
    """Returns the tensor of a block's result, which is itself one for the last block."""
    return out.x_BCHW if isinstance(out, Features) else out


class Forgetful(nn.Module):
    """A normalisation that returns NCHW, as CUDA's kernel did in some versions of torch."""

    def forward(self, x_BCHW):
        return (x_BCHW - x_BCHW.mean()).contiguous()


def test_a_layout_that_is_lost_switches_channels_last_off(caplog):
    kept = on_cpu(channels_last=True)
    block = ResnetBlock(32, 32, 8)
    kept.verify_layout("ResnetBlock", lambda x_BCHW: block(Features(x_BCHW)).added(), 32)
    assert kept.plan.channels_last.value is True
    lost = on_cpu(channels_last=True)
    with caplog.at_level(logging.WARNING):
        lost.verify_layout("Forgetful", Forgetful(), 32)
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
    assert cpu_runtime().compile(function) is function
    used = cpu_runtime(compiled=True)
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
    cpu_runtime()
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
    cpu_runtime(compiled=True)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "gputrain" / "compiled")


def test_compiler_failures_are_told_from_other_errors():
    import torch._dynamo.exc

    failure = torch._dynamo.exc.TorchDynamoException("\nCppCompileError: no compiler\nmore")
    assert compiler_failure(failure) == "CppCompileError: no compiler"
    assert compiler_failure(RuntimeError("shapes do not fit")) == ""


class Traces:
    """Writes a file for every item that is read."""

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
    wait_until(lambda: len(list(tmp_path.iterdir())) >= 1 + prefetch, "what is read ahead")
    time.sleep(0.3)  # A worker that read more would do so now; nothing else depends on it.
    assert len(list(tmp_path.iterdir())) == 1 + prefetch
    batches.close()


COMPILE = """
import torch
from gputrain.vae.memory_efficient_layers import Features
from gputrain.vae.model import ResnetBlock
from tests.toy import cpu_runtime
used = cpu_runtime(compiled=True)
block = ResnetBlock(32, 32, 8)
used.compile_modules([block])
block(Features(torch.rand(1, 32, 16, 16))).added().sum().backward()
from torch._dynamo.utils import counters
print(counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"])
"""


@pytest.mark.slow
def test_compiled_code_is_found_by_the_next_run(tmp_path):
    chosen = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")  # Those of the processes of other tests.
    environment = {name: value for name, value in os.environ.items() if name not in chosen}
    environment["XDG_CACHE_HOME"] = str(tmp_path)
    hits = [
        int(subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, check=True).stdout)
        for _ in range(2)
    ]
    assert hits[0] == 0
    assert hits[1] > 0


AUTOGRAD = """
import torch
from gputrain.hw.runtime import keep_compiled_code
keep_compiled_code()
class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * {forward}
    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0] * {backward}
x = torch.full((8,), 2.0, requires_grad=True)
y = torch.compile(lambda x: Scaled.apply(x).sum())(x)
y.backward()
from torch._dynamo.utils import counters
print(y.item(), x.grad[0].item(), counters["aot_autograd"]["autograd_cache_hit"])
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_compiled_code_of_a_changed_autograd_function_is_not_used_again(tmp_path):
    """torch leaves its cache off for functions with a backward pass of their own; each process finds the code of the
    ones before in the cache."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}

    def run(forward: int, backward: int) -> list[float]:
        code = AUTOGRAD.format(forward=forward, backward=backward)
        made = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True)
        return [float(word) for word in made.stdout.split()]

    assert run(2, 5) == [32, 10, 0]
    assert run(2, 5) == [32, 10, 1]
    assert run(2, 7) == [32, 14, 0]
    assert run(3, 5) == [48, 10, 0]


def test_the_peak_is_measured_without_touching_the_random_numbers(monkeypatch):
    monkeypatch.setattr(runtime, "product_flops_per_second", product_flops_per_second)
    used = on_cpu()
    torch.manual_seed(0)
    before = torch.get_rng_state()
    rate = used.product_rate
    assert torch.equal(before, torch.get_rng_state())
    assert 1e8 < rate < 1e14
    assert used.product_rate == rate  # It is measured once.


def test_a_gpu_has_a_share_of_its_peak_and_a_cpu_has_none():
    """On a CPU, MKL's product may be half as fast as oneDNN's convolutions, so that it is no peak."""
    on_gpu = replace(on_cpu(), device=torch.device("cuda", 0))
    vars(on_gpu)["product_rate"] = 4e14
    assert on_gpu.peak_share(1e14) == 0.25
    assert on_cpu().peak_share(1e14) is None


def test_memory_by_name():
    memory = runtime.memory_gb(torch.device("cpu"))
    assert 0.05 < memory["memory/peak_gb"] < 1000
