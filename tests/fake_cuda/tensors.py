"""CUDA tensors without a GPU: fake tensors whose device is CUDA, on which autograd, autocast and copies work.

torch's own FakeTensorMode gives a tensor a shape, a dtype, strides and a device, and no memory. What a build of torch
without CUDA lacks beside it is supplied here:

- a device guard, without which autograd refuses CUDA tensors: the CPU's, which does nothing, is registered for CUDA.
  With it, autograd's engine really runs, every backward function included, and checks the devices of gradients;
- the real and the fake part of a program side by side: tensors on the CPU stay real, with their values, and whatever
  touches a CUDA device runs on fake tensors (`FunctionMode`);
- values that the host reads from the device (`.item()`, `.cpu()`, `bool()`): zeros, or ones of whole numbers, which
  may count something, and a note of who asked;
- random generators of the device.
"""

import contextlib
import ctypes
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from gputrain.planner.memory.fake_runtime import ctc_loss

CUDA = torch.device("cuda", 0)
PACKAGE = str(Path(__file__).parents[2] / "gputrain")
REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"  # c10::impl::device_guard_impl_registry
CPU_TYPE, XLA_TYPE = 0, 9  # numbers of c10::DeviceType
# The device that torch's C++ code sees. A CUDA device sends autograd to look for CUDA's streams, which this build
# has none of; XLA's have no streams, and the rules of CUDA's autocast hold for both.
ALIAS = torch.device("xla", 0)
NAMES = (CUDA, torch.device("cuda"), "cuda", "cuda:0")

aten = torch.ops.aten

# The outputs of these operators follow from their kernels for the meta device, without FakeTensorMode's checks.
PLAIN = {
    aten.view.default, aten._unsafe_view.default, aten.t.default, aten.transpose.int, aten.permute.default,
    aten.expand.default, aten.unsqueeze.default, aten.detach.default, aten.alias.default, aten._to_copy.default,
    aten.mm.default, aten.bmm.default, aten.addmm.default, aten.neg.default, aten.add.Tensor, aten.add_.Tensor,
    aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.div_.Scalar, aten.sum.dim_IntList, aten.bernoulli_.float,
    aten.gelu.default, aten.gelu_backward.default, aten.silu.default, aten.relu.default,
    aten.threshold_backward.default, aten.native_layer_norm.default, aten.native_layer_norm_backward.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
}  # fmt: skip
TO_DEVICE, TO_HOST = "host to device", "device to host"


@dataclass(frozen=True)
class Copy:
    """A tensor that went from one side to the other."""

    direction: str  # TO_DEVICE or TO_HOST
    operator: str
    where: str  # file and function of the package's innermost frame, or "" for tests and libraries
    pinned: bool = True  # whether the source was in pinned memory, as a copy that does not wait asks for


def guard_slots() -> "ctypes.Array[ctypes.c_void_p]":
    """torch's table of device guards, by device type. Raises OSError or ValueError where it cannot be found."""
    name = {"darwin": "libc10.dylib"}.get(sys.platform, "libc10.so")
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name))
    return (ctypes.c_void_p * (XLA_TYPE + 1)).in_dll(library, REGISTRY)


@contextlib.contextmanager
def device_guard() -> Iterator[None]:
    """Let the CPU's device guard, whose functions do nothing, serve the alias; and have autograd run in this thread."""
    slots = guard_slots()
    before = slots[XLA_TYPE]
    slots[XLA_TYPE] = slots[CPU_TYPE]
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        slots[XLA_TYPE] = before


def frame_in_package() -> str:
    """The innermost frame that belongs to the package, as "vae/recipe.py:prepare"."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(PACKAGE) and not frame.f_code.co_name.startswith(
            "<"
        ):  # An expression counts as its function.
            return f"{Path(name).relative_to(PACKAGE).as_posix()}:{frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def flat(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among arguments, also those in lists, tuples and dicts."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from flat(value)
        elif isinstance(value, dict):
            yield from flat(value.values())


class DeviceMode(FakeTensorMode):
    """Fake tensors of the device. Every copy between the sides is noted in `copies`."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.copies: list[Copy] = []
        self.depth = 0  # Depth of nested operators; only the outermost one counts copies.
        self.pinned: set[int] = set()  # storages in pinned memory
        self.synchronised: Any = lambda: None  # Called when the host reads the device.
        self.pinned_copies = WeakTensorKeyDictionary()  # Stand-ins for pinned tensors.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return device_for_cpp(*args)
        self.depth += 1
        args, kwargs = _replaced(args, (ALIAS,), CUDA), _replaced(kwargs or {}, (ALIAS,), CUDA)
        if self.depth == 1 and torch.Tag.nondeterministic_seeded in func.tags:
            _draw(args, kwargs)
        try:
            out = super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self.depth -= 1
        if not self.depth:
            self._note_copies(func, args, kwargs or {}, out)
        return out

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As FakeTensorMode does, by a shortcut for frequent operators whose tensors are all on the device."""
        kwargs = kwargs or {}
        if func not in PLAIN or "device" in kwargs or not all(map(self._is_on_device, args)):
            return super().dispatch(func, types, args, kwargs)
        with in_kernel_invocation_manager(self):
            made = func(*args, **kwargs)
        return tuple(map(self._faked, made)) if isinstance(made, tuple) else self._faked(made)

    def _is_on_device(self, value: Any) -> bool:
        """Whether an argument is not a tensor, or one of the device; numbers on the CPU go the longer way."""
        if not isinstance(value, Tensor):
            return True
        return type(value) is FakeTensor and value.fake_mode is self and value.fake_device == CUDA

    def _faked(self, made: Any) -> Any:
        plain = isinstance(made, Tensor) and not isinstance(made, FakeTensor)
        return FakeTensor(self, made, CUDA) if plain else made

    def _note_copies(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        sources = list(flat((args, kwargs)))
        targets = list(flat((out,)))
        name = str(func)
        if name.startswith("aten.copy_") and len(sources) == 2:
            targets, sources = sources[:1], sources[1:]
        from_host = [t for t in sources if t.device.type == "cpu"]
        # A number, though it is a tensor on the CPU, is an argument of the kernel; only a copy copies it.
        moved = [t for t in from_host if t.ndim or "copy" in name]
        if moved and any(t.device.type == "cuda" for t in targets):
            self.note(TO_DEVICE, name, pinned=all(self.is_pinned(t) for t in moved))
        if any(t.device.type == "cuda" for t in sources) and any(t.device.type == "cpu" for t in targets):
            self.note(TO_HOST, name)

    def note(self, direction: str, operator: str, pinned: bool = True) -> None:
        self.copies.append(Copy(direction, operator, frame_in_package(), pinned))
        if direction == TO_HOST:
            self.synchronised()

    def is_pinned(self, tensor: Tensor) -> bool:
        if isinstance(tensor, FakeTensor):
            return tensor in self.pinned_copies
        return tensor.untyped_storage().data_ptr() in self.pinned


READS = {
    Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__bool__, Tensor.__float__, Tensor.__int__, Tensor.__index__,
    Tensor.__contains__, Tensor.cpu, torch.equal, torch.allclose,
}  # fmt: skip
MOVES = {Tensor.to, Tensor.type_as}
INDEXING = {Tensor.__getitem__, Tensor.__setitem__}
FROM_NUMBERS = {torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor}


def device_for_cpp(tensor: FakeTensor) -> torch.device:
    """The device that torch's C++ code gets when it asks a tensor for its device."""
    if tensor.fake_mode.in_kernel_invocation:
        return torch.device("meta")
    return ALIAS if tensor.fake_device.type == "cuda" else tensor.fake_device


def answering_cpp(dispatch: Any) -> Any:
    """FakeTensor.__torch_dispatch__ with that answer."""

    def answer(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return device_for_cpp(*args) if func is torch.ops.prim.device.default else dispatch(func, types, args, kwargs)

    return staticmethod(answer)


def answering_cpp_in(mode: type[TorchDispatchMode]) -> Any:
    """The same for a dispatch mode of the package that would answer the question itself."""
    dispatch = mode.__torch_dispatch__

    def answer(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return device_for_cpp(*args)
        return dispatch(self, func, types, args, kwargs)

    return answer


def is_cuda(tensor: FakeTensor) -> bool:
    return tensor.device.type == "cuda"


class FunctionMode(TorchFunctionMode):
    """Runs what touches the device on fake tensors, and everything else as it is."""

    def __init__(self, mode: DeviceMode) -> None:
        super().__init__()
        self.mode = mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.pin_memory:
            return self._pin(args[0])
        touched = [t for t in flat((args, kwargs)) if isinstance(t, FakeTensor) and t.fake_mode is self.mode]
        on_device = any(t.fake_device.type == "cuda" for t in touched)
        if on_device and func in READS:
            return self._read(func, args, kwargs)
        if on_device and func in MOVES and self._target(args, kwargs) == "cpu":
            return self._read(func, args, kwargs)
        made_there = not touched and self._names_device(func, args, kwargs)
        if not touched and not made_there:
            return func(*args, **kwargs)
        self._check_generator(func, args, kwargs)
        if made_there:
            torch.cuda.init()
        if func in FROM_NUMBERS and made_there and not isinstance(args[0], Tensor):
            made = func(*args, **{name: value for name, value in kwargs.items() if name != "device"})
            return self.__torch_function__(Tensor.to, (), (made, CUDA))
        if func is Tensor.new_tensor:
            made = torch.tensor(*args[1:], **{"dtype": args[0].dtype, **kwargs})
            return self.__torch_function__(Tensor.to, (), (made, CUDA))
        if func is torch.arange:  # Its bounds may be tensors, whose values are read.
            args = tuple(self._read(Tensor.item, (a,), {}) if isinstance(a, FakeTensor) else a for a in args)
        if func in INDEXING:
            args = (args[0], _index_tensors(args[1]), *args[2:])
        if func in MOVES or func is Tensor.cuda:  # The tensor has values, and the mode would compute with them.
            args = (self._fake(args[0]), *args[1:])
        if func is torch.nn.functional.ctc_loss:
            # Lengths on the device would be copied to the host. What torch's kernels copy themselves is not counted.
            assert not any(isinstance(length, Tensor) for length in args[2:4])
            with self.mode:
                return ctc_loss(*args, **kwargs)
        with self.mode:
            return func(*_told_alias(args), **_told_alias(kwargs))

    def _fake(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        fake = self.mode.from_tensor(tensor)
        if self.mode.is_pinned(tensor):
            self.mode.pinned_copies[fake] = True
        return fake

    def _pin(self, tensor: Tensor) -> Tensor:
        pinned = tensor.clone()
        self.mode.pinned.add(pinned.untyped_storage().data_ptr())
        return pinned

    def _names_device(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether a function that is given no tensor of the device makes one."""
        if func in MOVES:
            return self._target(args, kwargs) == "cuda"
        if func is Tensor.cuda:
            return True
        named = kwargs.get("device")
        return named is not None and _type_of(named) == "cuda"

    def _target(self, args: Any, kwargs: Any) -> str:
        """The device type that a tensor is moved to; "" where it stays."""
        others = [*args[1:], *kwargs.values()]
        for other in others:
            if isinstance(other, Tensor):
                return other.device.type
            if isinstance(other, (torch.device, str)):
                return _type_of(other)
        return ""

    def _check_generator(self, func: Any, args: Any, kwargs: Any) -> None:
        """As a kernel does: a generator belongs to a device."""
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Generator) and value.device.type != "cuda":
                raise RuntimeError(f"{func}: Expected a 'cuda' device type for generator but found 'cpu'")

    def _read(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What the host sees of the device: zeros, and ones of whole numbers. torch waits for the device here."""
        self.mode.note(TO_HOST, getattr(func, "__name__", str(func)))
        values = tuple(_stand_in(value) for value in args)
        return func(*values, **{name: _stand_in(value) for name, value in kwargs.items()})


def _type_of(device: Any) -> str:
    return "cuda" if isinstance(device, int) else torch.device(device).type


def _told_alias(arguments: Any) -> Any:
    """The arguments of a function with the device as C++ is to know it; one without an index is the current one."""
    return _replaced(arguments, NAMES, ALIAS)


def _replaced(arguments: Any, names: tuple[Any, ...], after: torch.device) -> Any:
    """Arguments, by position or by name, with `after` in place of a device by one of these names."""
    values = arguments.values() if isinstance(arguments, dict) else arguments
    if not any(type(value) in (torch.device, str) and value in names for value in values):
        return arguments
    chosen = (after if type(value) in (torch.device, str) and value in names else value for value in values)
    return dict(zip(arguments, chosen, strict=True)) if isinstance(arguments, dict) else tuple(chosen)


def _index_tensors(index: Any) -> Any:
    """An index whose lists are tensors on the CPU, as torch makes them before it copies them to the device."""
    if isinstance(index, tuple):
        return tuple(_index_tensors(part) for part in index)
    return torch.tensor(index) if isinstance(index, list) else index


def _stand_in(value: Any) -> Any:
    if not isinstance(value, FakeTensor):
        return value
    counts = not (value.dtype.is_floating_point or value.dtype.is_complex or value.dtype == torch.bool)
    strided = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    return strided.fill_(1 if counts else 0).requires_grad_(value.requires_grad)


@dataclass
class GeneratorState:
    """What torch's CUDAGeneratorState knows beside its seed and offset."""

    capturing: bool = False


class Generator(torch.Generator):
    """A generator of random numbers for either side; that of the device draws nothing."""

    where: torch.device
    state: GeneratorState

    def __new__(cls, device: Any = "cpu") -> "Generator":
        where = torch.device(device)
        made = super().__new__(cls, "cpu" if where.type == "cuda" else where)
        made.where = CUDA if where.type == "cuda" else where
        made.state = GeneratorState()
        return made

    @property
    def device(self) -> torch.device:
        return self.where

    def clone_state(self) -> "Generator":
        """As in C++, seed and offset are copied, and the copy takes part in no capture."""
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("Cannot call CUDAGeneratorImpl::clone_impl during CUDA graph capture.")
        made = Generator(self.where)
        made.set_state(self.get_state())
        return made

    def graphsafe_set_state(self, other: "Generator") -> None:  # type: ignore[override]
        self.state = other.state
        self.set_state(other.get_state())


def _draw(args: Any, kwargs: Any) -> None:
    """Refuses what CUDAGeneratorState::increase refuses before a kernel draws random numbers on the device."""
    values = (*args, *kwargs.values())
    on_device = any(isinstance(value, FakeTensor) and value.fake_device.type == "cuda" for value in flat(values))
    if not on_device and kwargs.get("device") != CUDA:
        return
    given = [value for value in values if isinstance(value, Generator)]
    capturing = (given or torch.cuda.default_generators)[0].state.capturing
    if torch.cuda.is_current_stream_capturing() and not capturing:
        raise RuntimeError("Attempt to increase offset for a CUDA generator not in capture mode.")
    if capturing and not torch.cuda.is_current_stream_capturing():
        raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")


def apply_to_parameters(module: nn.Module, function: Any, recurse: bool = True) -> nn.Module:
    """nn.Module._apply, which refuses to replace fake parameters of fake ones. As in torch, whoever holds a parameter
    keeps it where memory format or dtype change on the device; a move to the device makes new ones here."""
    if recurse:
        for child in module.children():
            child._apply(function)
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        with torch.no_grad():
            moved = function(parameter)
        if isinstance(parameter, FakeTensor) and isinstance(moved, FakeTensor):
            if moved is not parameter:
                parameter.data = moved
        elif isinstance(moved, FakeTensor):
            module._parameters[name] = nn.Parameter(moved, requires_grad=parameter.requires_grad)
        else:
            parameter.data = moved
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = function(buffer)
    return module


def grouping() -> Any:
    """torch._C's grouping of tensors by device, which answers in Python, where the device has its own name."""
    group = torch._C._group_tensors_by_device_and_dtype

    def grouped(*arguments: Any) -> dict[Any, Any]:
        found = group(*arguments).items()
        return {(CUDA if device == ALIAS else device, dtype): held for (device, dtype), held in found}

    return grouped


def saving() -> Any:
    """torch.save, which brings tensors of the device to the host, as zeros."""
    save = torch.save

    def saved(content: Any, *arguments: Any, **named: Any) -> None:
        save(tree_map(_stand_in, content), *arguments, **named)

    return saved


def conv_layout(x: Tensor, weight: Tensor, backend: Any) -> torch.memory_format:
    """The layout of a convolution's result, by cuDNN's rule: channels last where either operand is."""
    for operand in (x, weight):
        last = operand.ndim == 4 and operand.is_contiguous(memory_format=torch.channels_last)
        if last and not operand.is_contiguous():
            return torch.channels_last
    return torch.contiguous_format
