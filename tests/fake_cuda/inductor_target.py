"""What inductor makes of compiled functions for a CUDA card, on a machine without one: kernels, bytes, graph breaks.

`torch.compile` itself runs, from Dynamo to the generated Triton code, on fake CUDA tensors. Stubs answer for the calls
that ask a card. A generated function is not run: in its place the graph that it was made from runs on the fake tensors,
so that the step around it goes on, its backward pass included.

Otherwise than on a card: matrix products are not padded and constants of joint graphs not folded, both of which
inductor finds out by running something; block sizes are the first that it would try.

`target` changes torch for good. Call it first in a process of its own, with an empty TORCHINDUCTOR_CACHE_DIR.
"""

import copy
import functools
import os
import re
import tempfile
import types
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.device_interface as interfaces
import torch._functorch.config
import torch._inductor.compile_fx as compile_fx
import torch._inductor.config
import triton
from torch import fx, nn
from torch._dynamo.utils import counters
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver

from gputrain.audio import mel
from gputrain.engine.state import TrainState
from gputrain.engine.step import gradients
from gputrain.hw.gpus import find_gpu
from gputrain.hw.plan import Hardware, decide
from gputrain.hw.probe import Machine
from gputrain.hw.runtime import DTYPES, Runtime
from gputrain.planner.kind_work import PlanTarget
from tests.fake_cuda import device_guard

ON_CPU = torch.Generator
# Multiprocessors, shared memory of a block and L2 cache: of a card that has the compute capability.
CARDS = {
    (8, 0): ("A100", 108, 166912, 40 << 20),
    (9, 0): ("H100", 132, 232448, 50 << 20),
    (12, 0): ("RTX 5090", 170, 101376, 96 << 20),
}


@dataclass
class Kernel:
    """A Triton kernel that inductor has written."""

    name: str
    source: str
    gb: float  # Memory traffic of a launch, as counted by inductor; 0: unknown.


@dataclass
class Graph:
    """A forward or backward pass, compiled."""

    function: str
    backward: bool
    kernels: dict[str, Kernel] = field(default_factory=dict)
    launches: list[str] = field(default_factory=list)  # names of kernels, in the order of execution
    calls: list[str] = field(default_factory=list)  # Calls of libraries, then of aten's own kernels.
    runs: int = 0  # Times that it has run.

    @property
    def gb(self) -> float:
        """What the launches move; library calls are not counted."""
        return sum(self.kernels[name].gb for name in self.launches)


@dataclass
class Record:
    """What was compiled, in the order in which it was."""

    graphs: list[Graph] = field(default_factory=list)
    function: str = ""  # Name of the function that is being compiled.


RECORD = Record()
# By the identity of a fake tensor: it, and the tensor on the CPU that holds its values. What is compiled runs on these
# values, its kernels in Triton's interpreter, where TRITON_INTERPRET was set at the start.
VALUES: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}


class _Device:
    """torch.cuda.device, which would switch cards."""

    def __init__(self, *device: object) -> None: ...
    def __enter__(self) -> "_Device":
        return self

    def __exit__(self, *error: object) -> None: ...


class _Unrun:
    """Stands for a kernel, which is never launched."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments, **named: None


class _Driver:
    """Triton's driver of the card."""

    utils = None

    def __init__(self, capability: tuple[int, int]) -> None:
        self.target = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: object = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_device_interface(self) -> Any:
        return torch.cuda

    @staticmethod
    def is_active() -> bool:
        return True


def target(capability: tuple[int, int]) -> Record:
    """Have torch.compile generate code for a card of this compute capability; returns what it will have made."""
    device_guard.allow_cuda_tensors()
    torch.accelerator.current_accelerator = lambda check_available=False: torch.device("cpu")  # type: ignore[assignment]
    torch.accelerator.is_available = lambda: False
    # torch.tensor(..., device="cuda") on fake tensors must not touch the device.
    FakeTensorMode.avoid_device_init = property(lambda mode: True)  # type: ignore[assignment]
    _answer_for(capability)
    _record()
    return RECORD


def _answer_for(capability: tuple[int, int]) -> None:
    name, processors, shared, cache = CARDS[capability]
    properties = types.SimpleNamespace(
        name=name, major=capability[0], minor=capability[1], total_memory=80 << 30, multi_processor_count=processors,
        max_threads_per_multi_processor=1536 if capability[0] > 9 else 2048, warp_size=32, gcnArchName="",
        regs_per_multiprocessor=65536, L2_cache_size=cache, shared_memory_per_block=49152,
        shared_memory_per_block_optin=shared, max_threads_per_block=1024,
    )  # fmt: skip
    answers: dict[str, Any] = {
        "is_available": True, "is_initialized": True, "device_count": 1, "current_device": 0,
        "get_device_properties": properties, "get_device_capability": capability, "synchronize": None,
        "_lazy_init": None, "set_device": None, "_exchange_device": 0, "_maybe_exchange_device": 0,
        "is_bf16_supported": True, "get_rng_state": torch.zeros(16, dtype=torch.uint8), "set_rng_state": None,
    }  # fmt: skip
    for function, answer in answers.items():
        setattr(torch.cuda, function, _answering(answer))
    torch.cuda.device = _Device  # type: ignore[assignment, misc]
    for function in ("_cuda_getDevice", "_cuda_getCurrentRawStream"):
        setattr(torch._C, function, _answering(0))
    torch._C._conv_determine_backend_memory_format = _conv_layout
    # The mel bank is made of real numbers, once, whatever tensors its first caller has.
    mel.mel_bank = lambda mel, device: torch.empty(mel.num_mels, mel.n_fft // 2 + 1, device=device)
    torch.Generator = _Generator  # type: ignore[misc]
    torch._C._dynamo.guards._empty_strided_cuda = _empty_on_cpu  # Generated code allocates with it when it runs.
    driver.set_active(_Driver(capability))

    class Interface(interfaces.CudaInterface):
        device = _Device  # type: ignore[assignment]
        get_raw_stream = staticmethod(_answering(0))

    for function in vars(interfaces.CudaInterface):
        if function in answers:
            setattr(Interface, function, staticmethod(_answering(answers[function])))
    Interface.Worker.get_device_properties = staticmethod(_answering(properties))  # type: ignore[method-assign]
    Interface.Worker.current_device = staticmethod(_answering(0))  # type: ignore[method-assign]
    interfaces.init_device_reg()
    for device in ("cuda", "cuda:0"):
        interfaces.register_interface_for_device(device, Interface)


def _answering(answer: Any) -> Callable[..., Any]:
    return lambda *arguments, **named: answer


def _record() -> None:
    torch._inductor.config.compile_threads = 1
    torch._inductor.config.fx_graph_cache = False
    torch._inductor.config.joint_graph_constant_folding = False  # Folding would fill tensors on the device.
    torch._inductor.config.shape_padding = False  # Padding would time matrix products on the device.
    torch._inductor.config.benchmark_kernel = True  # a kernel tells how much it moves
    torch._functorch.config.enable_autograd_cache = False
    triton_helpers.set_driver_to_gpu = _answering(None)
    AsyncCompile.triton = _keep_kernel  # type: ignore[method-assign]
    AsyncCompile.wait = _answering(None)  # type: ignore[method-assign]
    AsyncCompile.wakeup = _answering(None)  # type: ignore[method-assign]
    GraphLowering.save_output_code = staticmethod(_keep_code)  # type: ignore[method-assign, assignment]
    original = compile_fx.compile_fx
    # A backward pass may be compiled when it is first run; it belongs to the function that is called now.
    compile_fx.compile_fx = lambda *arguments, **named: original(
        *arguments, **{"inner_compile": functools.partial(_compile_one, RECORD.function), **named}
    )


def _keep_kernel(compiler: AsyncCompile, name: str, source: str, device_str: str = "cuda") -> Any:
    found = re.search(r"'kernel_num_gb': ([\d.e-]+)", source)
    RECORD.graphs[-1].kernels[name] = Kernel(name, source, float(found[1]) if found else 0.0)
    return launch_on_cpu(RECORD.graphs[-1].kernels[name]) if os.environ.get("TRITON_INTERPRET") else _Unrun()


# A launch of a Triton kernel, a call of a library, a call of one of aten's own kernels.
CALL = re.compile(r"\b(triton_\w+)\.run\(|extern_kernels\.(\w+)\(|torch\.ops\.(\w+\.\w+)(?:\.\w+)?\(")


def _keep_code(code: str) -> None:
    graph = RECORD.graphs[-1]
    body = code[code.rindex("def call(self, args):") :]
    for launch, library, aten in CALL.findall(body):
        if launch:
            graph.launches.append(launch)
        else:
            graph.calls.append(library or aten)


def _compile_one(
    function: str, module: fx.GraphModule, inputs: Sequence[Any], **named: Any
) -> Callable[[list[Any]], Any]:
    """Inductor's own compilation, and a function that computes the same on fake tensors."""
    graph = Graph(function, bool(named.get("is_backward")))
    RECORD.graphs.append(graph)
    same = fx.GraphModule(module, copy.deepcopy(module.graph))
    compiled = compile_fx.compile_fx_inner(module, inputs, **named)

    def run(arguments: list[Any]) -> Any:
        given = list(arguments)
        arguments.clear()
        graph.runs += 1
        made = fx.Interpreter(same).run(*given)
        if VALUES and all(id(one) in VALUES for one in given):
            with unset_fake_temporarily():
                results = compiled([VALUES[id(one)][1] for one in given])
            for fake, real in zip(made, results, strict=True):
                VALUES[id(fake)] = fake, real
        return made

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def launch_on_cpu(kernel: Kernel) -> "Interpreted":
    """A generated kernel, to be launched on tensors of the CPU by Triton's interpreter."""
    return Interpreted(load(kernel))


class Interpreted:
    """What stands for a kernel in generated code: `run` takes what inductor gives, and launches it at once."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.blocks = kernel, kernel.configs[0].kwargs

    def run(self, *arguments: Any, stream: int) -> None:
        names = [name for name in self.kernel.fn.arg_names if name not in self.blocks]
        sizes = dict(zip(names, arguments, strict=False))
        grid = [
            -(-sizes[size] // self.blocks[block]) if size in sizes else 1
            for size, block in (("xnumel", "XBLOCK"), ("ynumel", "YBLOCK"), ("znumel", "ZBLOCK"))
        ]
        self.kernel.fn[tuple(grid)](*arguments, **self.blocks)


def load(kernel: Kernel) -> Any:
    """Inductor's launcher of a kernel, with its `fn`, `configs` and `triton_meta`."""
    path = Path(tempfile.mkdtemp(dir=os.environ["TORCHINDUCTOR_CACHE_DIR"])) / "kernel.py"
    path.write_text(kernel.source)
    module = types.ModuleType("kernel")
    module.__file__ = str(path)
    exec(compile(kernel.source, str(path), "exec"), module.__dict__)
    return getattr(module, kernel.name, None) or module.__dict__["triton_"]


def cubin(kernel: Kernel, capability: tuple[int, int]) -> bytes:
    """The machine code of a kernel, with the first of inductor's block sizes."""
    found = load(kernel)
    config, signature = found.configs[0], dict(found.triton_meta["signature"])
    constants = {**found.triton_meta["constants"], **config.kwargs}
    signature.update(dict.fromkeys(config.kwargs, "constexpr"))
    by_place = {(found.fn.arg_names.index(n) if isinstance(n, str) else n,): v for n, v in constants.items()}
    card = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    made: bytes = triton.compile(ASTSource(found.fn, signature, by_place), target=card, options=options).asm["cubin"]
    return made


class CompilingRuntime(Runtime):
    """A plan in effect on the fake card, whose compiled functions are known by their names."""

    def place(self, module: nn.Module) -> nn.Module:
        """Fake parameters can't be moved; those of convolutions are made anew in their layout."""
        if self.memory_format == torch.channels_last:
            for part in module.modules():
                for name, parameter in part._parameters.items():
                    if parameter is not None and parameter.ndim == 4:
                        laid = parameter.detach().contiguous(memory_format=torch.channels_last)
                        part._parameters[name] = nn.Parameter(laid, requires_grad=parameter.requires_grad)
        return module

    def compile(self, function: Any, **how: bool) -> Any:
        return named_compile(function, functools.partial(super().compile, **how))


def named_compile(function: Any, compile: Callable[[Any], Any] | None = None) -> Any:
    """A function, compiled as the runtime does it or by `compile`, whose graphs are recorded under its name."""
    compiled = compile(function) if compile else torch.compile(function, dynamic=False)
    owner = type(function.__self__).__name__ + "." if hasattr(function, "__self__") else ""

    @functools.wraps(function)
    def named(*arguments: Any, **keywords: Any) -> Any:
        RECORD.function = owner + function.__name__
        return compiled(*arguments, **keywords)

    return named


def run_step(target: PlanTarget, items: int, card: str, requested: Hardware) -> None:
    """The heaviest step of a training on fake tensors of a card that it is planned for, compiled as the plan says.

    To be called in a FakeTensorMode.
    """
    machine = find_gpu(card).installed_in(Machine(system="Linux", cpu_cores=8))
    plan = decide(machine, requested)
    layout = torch.channels_last if plan.channels_last.value else torch.contiguous_format
    runtime = CompilingRuntime(plan, torch.device("cuda", 0), DTYPES[str(plan.precision.value)], layout)
    with torch.device("cuda"):
        recipe = target.build(runtime, False)
        state = TrainState.for_measurement(recipe, runtime)
    step = recipe.peak_memory_step(0)
    batch = recipe.prepare(target.load(items), step)
    for group in recipe.step_groups:
        gradients(state, group, batch, 1, step)


def graph_breaks() -> Counter[str]:
    """Graph breaks so far by reason."""
    return Counter(counters["graph_break"])


def _empty_on_cpu(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype)


def _conv_layout(x: torch.Tensor, weight: torch.Tensor, backend: object) -> torch.memory_format:
    """cuDNN's rule: channels last where either operand is."""
    operands = [t for t in (x, weight) if t.ndim == 4 and not t.is_contiguous()]
    last = any(operand.is_contiguous(memory_format=torch.channels_last) for operand in operands)
    return torch.channels_last if last else torch.contiguous_format


class _Generator(torch.Generator):
    """Random numbers of the card, of which nothing is drawn."""

    device = torch.device("cuda", 0)

    def __new__(cls, device: object = "cpu") -> torch.Generator:
        return super().__new__(cls, "cpu") if torch.device(str(device)).type == "cuda" else ON_CPU(device)
