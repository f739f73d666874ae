"""Decides settings, each with its reason, from facts about the machine and from what was asked for. Without torch."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from gputrain.config import Switches, advanced, config, opt
from gputrain.errors import UserError
from gputrain.hw.probe import Machine

MOST_WORKERS = 8  # More only if the rates of decoding and of the device are known to need them.
SHARED_SHARE = 0.8  # Share of the free shared memory that the batches of data workers may take.
ASKED_FOR = "asked for"
NEEDS_GPU = "asked for, but needs a GPU"
MOST_GRAPHED_SHAPES = 8  # Shapes of batches that have CUDA graphs of their own; batches of other shapes have none.
MOST_GRAPHED_PARTS = 16  # Micro-batches of a CUDA graph; with more it would have tens of thousands of kernels.
BATCHES_IN_HAND = 2  # Batches that the training process holds besides those that are prefetched.


DeviceName = Literal["auto", "cuda", "cpu"]
PrecisionWish = Literal["auto", "fp32", "tf32", "mixed", "fp16", "bf16"]
SIXTEEN_BITS: tuple[PrecisionWish, ...] = ("mixed", "bf16", "fp16")
# Other programs' names of a precision, with the values that are left if they are false and if they are true. Beside 16
# bit, products that stay in fp32 are in TF32 in any case.
PRECISION_SWITCHES = {
    "mixed_precision": (("tf32", "fp32"), SIXTEEN_BITS),
    "use_bf16": (("fp16", "tf32", "fp32"), ("bf16",)),
    "enable_tf32": (("fp32", *SIXTEEN_BITS), ("", "auto", "tf32", *SIXTEEN_BITS)),
    "tf32": (("fp32", *SIXTEEN_BITS), ("", "auto", "tf32", *SIXTEEN_BITS)),
}


@config(panel="Hardware")
class Hardware:
    """Hardware options of every train command. None means auto: chosen for the machine."""

    switches: ClassVar[Switches] = Switches("precision", PRECISION_SWITCHES)

    device: DeviceName = opt(default="auto", help="Device: auto, cuda or cpu. auto: the GPU, if any.")
    precision: PrecisionWish = opt(
        default="auto",
        help="fp32, tf32, bf16, fp16, mixed or auto. Weights are fp32 in any case. mixed: 16 bit, that of both which "
        "suits GPU and model, where it is safe; auto: mixed on a GPU, tf32 for a vocoder. Also set by "
        "--mixed-precision, --use-bf16 and --enable-tf32.",
    )
    use_torch_compile: bool | None = opt(
        default=None,
        help="Compile the model, minutes at first. Default: a VAE's, on a GPU, if its steps win the time back.",
    )
    use_cuda_graphs: bool = advanced(
        default=False,
        help="Launch the gradients of a step as one CUDA graph. Not measured on a GPU; no effect on a recogniser.",
    )
    channels_last: bool | None = opt(
        default=None, help="NHWC layout, for tensor cores. Default: on a GPU, where it is faster."
    )
    persistent_workers: bool = advanced(default=True, help="Keep the data workers alive between epochs.")
    num_workers: int = opt(
        default=-1,
        help="Processes that decode data; -1: auto. One a core, more than 8 only if the device takes so many items.",
        min=-1,
    )
    prefetch_factor: int = advanced(default=4, help="Batches that each worker prefetches.", min=1)
    memory_budget: float = opt(
        default=0.0, help="Memory to use, in GB; 0: auto. That is 0.93 of the device's, or what is free.", min=0
    )
    plan: bool = advanced(
        default=True, help="Predict the memory of a step, and choose micro-batch and checkpointing by it."
    )


NOT_PLANNED = ("Evaluation", "Run folder")  # Panels of options that change neither memory nor time of a step.


@config(panel="Cards")
class Cards:
    """Selects the GPUs that a plan is for; default: the GPU of this machine."""

    gpu: tuple[str, ...] = opt(default=(), help="GPUs, such as rtx5090, a100-40 or 'T4 x2'; may be repeated.")
    all_gpus: bool = opt(default=False, help="Plan for every known GPU.")
    vram_gb: tuple[float, ...] = opt(default=(), help="Memory of unnamed GPUs to plan for, in GB.", min=1)
    gpus: int = opt(default=1, help="Equal GPUs that share each batch.", min=1)
    items: int = opt(
        default=0,
        help="Items of the training set; 0: auto. Hours are predicted by them, or by those of --data-path.",
        min=0,
    )
    price_per_hour: tuple[float, ...] = advanced(
        default=(),
        help="Price of an hour of a GPU. It predicts the cost: one price for all, or one for each named GPU.",
        min=0,
    )
    json: bool = opt(default=False, help="Print JSON instead of a table.")
    strict: bool = advanced(default=False, help="Exit with 3 if the training does not fit.")

    def __post_init__(self) -> None:
        named, prices = len(self.gpu) + len(self.vram_gb), len(self.price_per_hour)
        if prices > 1 and (prices != named or self.all_gpus):
            gpus = "all known" if self.all_gpus else f"{named or 'no'} named"
            raise UserError(
                f"{prices} prices for {gpus} GPUs",
                hint="give one --price-per-hour for all, or one for each --gpu, then each --vram-gb, in their order",
            )

    def prices(self) -> tuple[float, ...]:
        """Returns the price of each named GPU, those of `vram_gb` last; 0: unknown."""
        named = max(1, len(self.gpu) + len(self.vram_gb))
        return self.price_per_hour if len(self.price_per_hour) > 1 else (self.price_per_hour or (0.0,)) * named


@dataclass(frozen=True)
class Setting:
    """The value of a setting in effect, and its reason."""

    value: bool | int | float | str
    reason: str
    cost: str = ""  # The price of the setting, if it has one.

    def to_json(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "cost" or value}


@dataclass(frozen=True)
class Plan:
    """All settings. The runtime corrects a setting that turns out not to be in effect."""

    device: Setting
    precision: Setting
    compile: Setting
    tf32: Setting
    channels_last: Setting
    cudnn_benchmark: Setting
    expandable_segments: Setting
    num_workers: Setting
    prefetch_factor: Setting
    persistent_workers: Setting
    pinned_memory: Setting
    cuda_graphs: Setting
    # Settings of the batch; None if it is not planned.
    micro_batch_size: Setting | None = None
    accumulation_steps: Setting | None = None
    gradient_checkpointing: Setting | None = None
    memory_budget_gb: Setting | None = None

    @property
    def settings(self) -> dict[str, Setting]:
        return {name: setting for name, setting in vars(self).items() if setting is not None}

    def to_json(self) -> dict[str, dict[str, object]]:
        return {name: setting.to_json() for name, setting in self.settings.items()}


def decide(
    machine: Machine,
    requested: Hardware,
    *,
    fixed_shapes: bool = True,
    generator_is_1d: bool = False,
    is_1d: bool = False,
    eager_because: str = "",
    fp32_because: str = "",
    graphless_because: str = "",
) -> Plan:
    """Decide every setting.

    `fixed_shapes`: all batches of the model have one shape.
    `generator_is_1d`: only discriminators have 2-D convolutions, to which channels_last applies; `is_1d`: the model has
    none. `eager_because`: the reason why nothing is compiled unless the user asks for it; empty if compiling is the
    default on newer GPUs. `fp32_because`: the reason why the model computes in fp32, and never in bf16, unless the user
    asks for it; empty if 16 bit is the default. `graphless_because`: the reason why no step can be a CUDA graph.

    Raises UserError if the user asks for a GPU that is not there, or if there is a GPU that torch cannot use.
    """
    on_gpu = bool(machine.gpu) and requested.device != "cpu"
    if requested.device != "cpu":
        _check_gpu(machine, requested)
    processes = workers(machine, requested.num_workers)
    return Plan(
        device=_device(machine, requested, on_gpu),
        precision=_precision(machine, requested, on_gpu, fp32_because),
        compile=_compile(machine, requested, on_gpu, eager_because),
        tf32=_tf32(machine, requested, on_gpu),
        channels_last=_channels_last(requested, on_gpu, generator_is_1d, is_1d),
        cudnn_benchmark=_cudnn_benchmark(on_gpu, fixed_shapes),
        expandable_segments=_expandable_segments(machine, on_gpu),
        num_workers=processes,
        prefetch_factor=_for_workers(requested.prefetch_factor, "batches that each worker prefetches", processes),
        persistent_workers=_for_workers(requested.persistent_workers, "workers stay alive between epochs", processes),
        pinned_memory=Setting(on_gpu, "copies to the GPU overlap with its work" if on_gpu else "there is no GPU"),
        cuda_graphs=_cuda_graphs(requested, on_gpu, graphless_because),
    )


def _check_gpu(machine: Machine, requested: Hardware) -> None:
    """Raise UserError if there is a GPU that cannot be used: training must not silently run on the CPU for days."""
    hint = "gputrain check-compatibility says what to do; --device cpu trains without the card meanwhile"
    if machine.gpu and not machine.has_kernels:
        build = f"built for CUDA {machine.cuda}"
        raise UserError(f"{machine.gpu}: this torch, {build}, has no code for the card", hint=hint)
    hidden = machine.visible_devices in ("", "-1")
    if not machine.gpu and machine.driver.cards and not hidden:
        why = machine.gpu_error or ("" if machine.cuda else "it is built without CUDA")
        name = machine.driver.cards[0].name
        raise UserError(f"{name}: this torch cannot use the card{f' ({why})' if why else ''}", hint=hint)
    if not machine.gpu and requested.device == "cuda":
        raise UserError("no GPU that this torch can use", hint=hint)


def _device(machine: Machine, requested: Hardware, on_gpu: bool) -> Setting:
    if on_gpu:
        return Setting("cuda", f"{machine.gpu}, {machine.gpu_memory_gb:.1f} GB")
    return Setting("cpu", ASKED_FOR if requested.device == "cpu" else "no GPU found: this will be slow")


def _precision(machine: Machine, requested: Hardware, on_gpu: bool, fp32_because: str) -> Setting:
    asked = requested.precision in SIXTEEN_BITS
    only_fp16 = on_gpu and machine.has_tensor_cores and not machine.has_tf32  # Volta and Turing
    unused = f"; the tensor cores of {machine.gpu} compute fp16 alone: --precision fp16 uses them" if only_fp16 else ""
    if not on_gpu:
        return Setting("fp32", f"16 bit is {NEEDS_GPU}" if asked else "the CPU computes fp32 fastest")
    if requested.precision in ("fp32", "tf32"):
        return Setting("fp32", f"{ASKED_FOR}{unused}")
    if fp32_because and not asked:
        return Setting("fp32", f"{fp32_because}{unused}")
    gives_nan = machine.compute_capability >= (7, 0) and not machine.has_tensor_cores
    if gives_nan and requested.precision not in ("mixed", "fp16"):
        return Setting(
            "fp32", "fp16 is known to give NaN on GPUs of its generation without tensor cores, like this one"
        )
    if gives_nan:
        return Setting("fp16", "asked for; it is known to give NaN on this GPU: use fp32 if losses become NaN")
    if not machine.has_tensor_cores and not asked:
        return Setting("fp32", "the GPU has no tensor cores, so 16 bit would save memory but no time")
    if machine.has_bf16 and requested.precision == "mixed" and fp32_because:
        return Setting("fp16", f"asked for 16 bit without naming bf16; {fp32_because}")
    if machine.has_bf16 and requested.precision != "fp16":
        return Setting("bf16", "the GPU computes bf16 natively; no loss scaling needed")
    if requested.precision == "bf16":
        return Setting("fp16", f"{machine.gpu} has no native bf16; fp16 with loss scaling instead")
    return Setting("fp16", ASKED_FOR if machine.has_bf16 else "the GPU has no native bf16; loss scaling on")


def _compile(machine: Machine, requested: Hardware, on_gpu: bool, eager_because: str) -> Setting:
    if requested.use_torch_compile is False:
        return Setting(False, "switched off")
    if not on_gpu:
        return Setting(False, NEEDS_GPU if requested.use_torch_compile else "needs a GPU")
    if not machine.triton:
        remedy = "install triton-windows" if machine.system == "Windows" else "install triton"
        return Setting(False, f"torch.compile needs Triton, which is not installed: {remedy}")
    if machine.compute_capability < (7, 5):
        return Setting(False, "Triton does not support this GPU")
    if machine.system == "Linux" and not machine.compiler:
        return Setting(False, "Triton needs a C compiler, and none is on PATH: install gcc")
    if requested.use_torch_compile:
        return Setting(True, "asked for; the first steps compile, which takes minutes the first time")
    if eager_because:
        return Setting(False, eager_because)
    if machine.compute_capability >= (8, 0):
        return Setting(True, "the first step compiles, a minute the first time; --no-use-torch-compile goes without")
    return Setting(False, "the GPU is older than those that Triton is sure to support")


def _tf32(machine: Machine, requested: Hardware, on_gpu: bool) -> Setting:
    if requested.precision == "fp32":
        return Setting(False, "switched off: precision is fp32")
    if not on_gpu or not machine.has_tf32:
        return Setting(False, "needs a GPU of the Ampere generation or later")
    return Setting(True, "fp32 products run on tensor cores with 10 bits of mantissa")


def _channels_last(requested: Hardware, on_gpu: bool, generator_is_1d: bool, is_1d: bool) -> Setting:
    if is_1d:
        return Setting(False, "the model has no 2-D convolutions")
    part = "; for the discriminators' 2-D convolutions, as the generator has none" if generator_is_1d else ""
    if requested.channels_last is None:
        return Setting(on_gpu, f"tensor cores prefer it{part}" if on_gpu else "no gain on the CPU")
    return Setting(requested.channels_last, f"asked for{part}" if requested.channels_last else "switched off")


def _cudnn_benchmark(on_gpu: bool, fixed_shapes: bool) -> Setting:
    if not on_gpu:
        return Setting(False, "needs a GPU")
    if not fixed_shapes:
        return Setting(False, "shapes change from step to step, and each would need a search of its own")
    return Setting(True, "batches are of one shape, so the search for the fastest convolutions pays")


def _cuda_graphs(requested: Hardware, on_gpu: bool, graphless_because: str) -> Setting:
    if not requested.use_cuda_graphs:
        return Setting(False, "off unless asked for: no gain has been measured on a GPU yet")
    if not on_gpu:
        return Setting(False, NEEDS_GPU)
    if graphless_because:
        return Setting(False, f"asked for, but {graphless_because}")
    return Setting(True, "asked for; the gradients of a step are captured after the first ones")


def _expandable_segments(machine: Machine, on_gpu: bool) -> Setting:
    if not on_gpu:
        return Setting(False, "needs a GPU")
    if not machine.has_expandable_segments:
        return Setting(False, f"the allocator cannot do it on {'WSL' if machine.wsl else machine.system}")
    return Setting(True, "the allocator's segments grow, so that less memory is lost to fragmentation")


def _for_workers(wish: bool | int, reason: str, processes: Setting) -> Setting:
    """Return a setting that applies to worker processes only."""
    if not processes.value:
        return Setting(type(wish)(0), "there are no workers")
    return Setting(wish, reason if wish else "switched off")


def workers(
    machine: Machine,
    wish: int = -1,
    *,
    item_seconds: float = 0.0,
    items_per_second: float = 0.0,
    each_gb: float = 0.0,
    batches_gb: float = 0.0,
) -> Setting:
    """Decide the number of processes that decode data.

    `item_seconds`: time of a core to decode an item. `items_per_second`: the device's maximum rate. `each_gb`: memory
    of a process with its prefetched batches, of which `batches_gb` are passed through shared memory. 0 means unknown.
    """
    if wish > machine.cpu_cores:
        return Setting(wish, f"asked for; more than the CPU cores ({machine.cpu_cores}), which they have to share")
    if wish >= 0:
        return Setting(wish, ASKED_FOR)
    most = min(MOST_WORKERS, machine.cpu_cores)
    reason = f"CPU cores: {machine.cpu_cores}, at most {MOST_WORKERS}"
    if item_seconds and items_per_second:
        busy = item_seconds * items_per_second  # cores
        needed = math.ceil(1.25 * busy) or 1  # A quarter more, as items differ.
        if needed < most or most < machine.cpu_cores:
            most = min(needed, machine.cpu_cores)
            decoding = f"an item takes {1000 * item_seconds:.3g} ms to decode"
            reason = f"{decoding}, and the device takes {items_per_second:.3g} a second"
        if busy > machine.cpu_cores:
            reason += f"; decoding wants {busy:.0f}, so the device will wait for data"
    allowed_gb = machine.ram_free_gb / 2
    if each_gb and allowed_gb and most * each_gb > allowed_gb:
        most = int(allowed_gb / each_gb)
        reason = f"each takes {each_gb:.1f} GB, and {machine.ram_free_gb:.1f} GB of RAM are free"
    shared_gb = SHARED_SHARE * machine.shared_memory_gb
    if shared_gb and most * batches_gb > shared_gb:  # A worker that finds it full dies of SIGBUS.
        most = int(shared_gb / batches_gb)
        held = f"the batches of each take {1e3 * batches_gb:.3g} MB"
        reason = f"{held}, and {1e3 * machine.shared_memory_gb:.3g} MB are free in /dev/shm (in Docker: --shm-size)"
    return Setting(most, reason)


def fit_shared_memory(plan: Plan, machine: Machine, batch_bytes: int) -> Plan:
    """Return a plan whose workers' batches fit into the shared memory through which they are passed.

    A worker that finds it full dies of SIGBUS. torch's other sharing strategy takes the same memory, so the number of
    prefetched batches is reduced first, then the number of workers.
    """
    processes, ready = int(plan.num_workers.value), int(plan.prefetch_factor.value)
    if not (processes and machine.shared_memory_gb):
        return plan
    most = max(0, int(SHARED_SHARE * machine.shared_memory_gb * 1e9 / batch_bytes) - BATCHES_IN_HAND)
    if processes * ready <= most:
        return plan
    reason = (
        f"batches of {batch_bytes / 1e6:.3g} MB must fit into the {1e3 * machine.shared_memory_gb:.3g} MB free in "
        "/dev/shm (in Docker: --shm-size)"
    )
    processes = min(processes, most)
    ready = min(ready, most // processes) if processes else 0
    return replace(
        plan,
        num_workers=replace(plan.num_workers, value=processes, reason=reason),
        prefetch_factor=replace(plan.prefetch_factor, value=ready, reason=reason),
        persistent_workers=plan.persistent_workers if processes else Setting(False, "there are no workers"),
    )
