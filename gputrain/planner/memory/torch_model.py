"""Any torch or transformers model as a recipe, to predict or measure a step of its training."""

import copy
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map

from gputrain.engine.first_steps import MeasuredPeak, allocator_peak
from gputrain.engine.recipe import Phase, StepGroup, Term
from gputrain.errors import UserError, first_line
from gputrain.hw.plan import Hardware, Plan, Setting, decide
from gputrain.hw.probe import Machine
from gputrain.hw.runtime import DTYPES, Runtime, release_memory
from gputrain.planner.kind_work import PlanTarget
from gputrain.planner.memory.allocator import PlainAllocator
from gputrain.planner.memory.fake_runtime import FakeRuntime, Rules
from gputrain.planner.memory.predict import MemoryEstimate, explained, predict_step, watch_step
from gputrain.planner.memory.timeline import MemoryTimeline
from gputrain.planner.time.flops import OperatorMode
from gputrain.samples import Report

Precision = Literal["fp32", "bf16", "fp16"]
Optimizer = Literal["adamw", "muon", "sgd"]
Loss = Callable[[Any, Any], Tensor]
M = TypeVar("M", bound=nn.Module)
LOCKS = (type(threading.Lock()), type(threading.RLock()))

# Options of transformers models that draw random numbers in Python or choose by value. None of them makes a step
# larger, so that a prediction without them is an upper bound.
OFF = {
    "layerdrop": 0.0,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "apply_spec_augment": False,
    "mask_time_prob": 0.0,
    "mask_feature_prob": 0.0,
}


def predict_training_memory(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    *,
    precision: Precision = "bf16",
    optimizer: Optimizer = "adamw",
    checkpointing: bool = False,
    gradients_resident: bool = True,
    caching_allocator: bool = True,
    expandable_segments: bool = False,
    autocast_rules: Rules = "cuda",
) -> MemoryEstimate:
    """Returns the memory of an optimizer step: forward, backward of the scalar `loss(model, batch)`, and a fused step.

    `precision` is that of autocast; `checkpointing` enables the gradient checkpointing of a transformers model.
    `gradients_resident`: a micro-batch adds to existing gradients. `caching_allocator`: False for a CPU, which frees
    memory at once; `autocast_rules`: the device whose kernels and rules of autocast are assumed. Raises UserError if
    the model needs values to run, or has modules whose memory cannot be predicted.
    """
    refuse_unpredictable(model)
    target = model_target(model, loss, lambda items: batch, precision, optimizer)
    plan = replace(model_plan(autocast_rules), expandable_segments=Setting(expandable_segments, ""))
    return predict_step(
        target,
        plan,
        micro_batch_size=1,
        checkpointing=checkpointing,
        gradients_resident=gradients_resident,
        caching_allocator=caching_allocator,
    )


def measure_training_memory(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    device: torch.device,
    *,
    precision: Precision,
    optimizer: Optimizer,
    checkpointing: bool = False,
) -> MemoryEstimate:
    """Returns the memory of a real step of a copy of the model on the device, with gradients and optimizer state in
    memory, and releases all of it. Tensors of the batch that have no values get random ones; kernels are not counted.
    """
    on_gpu = device.type == "cuda"
    plan = model_plan("cuda" if on_gpu else "cpu")
    target = model_target(model, loss, lambda items: batch, precision, optimizer)
    runtime = Runtime(plan, device, torch.float32, torch.contiguous_format)
    peak = MeasuredPeak()
    if on_gpu:
        torch.cuda.init()  # type: ignore[no-untyped-call]  # Without it the allocator has no counters.
    before_gb = torch.cuda.memory_allocated(device) / 1e9 if on_gpu else 0.0
    try:
        hint = "pass batch=, a function of the number of items and their seconds, and loss= if need be"
        with explained(target.model_name, hint), allocator_peak(device, peak) if on_gpu else nullcontext():
            step = watch_step(target, runtime, MemoryTimeline(), 1, checkpointing)
    finally:
        release_memory()
    found = replace(step.estimate(PlainAllocator()), micro_batch=(), update=())
    if not on_gpu:
        return found
    # The timeline counts the results of operators; the rest of the measured peak is what operators need to run.
    allocated_gb = peak.allocated_gb - before_gb
    parts = {**found.parts, "workspace": found.parts["workspace"] + allocated_gb - found.allocated_gb}
    return replace(found, allocated_gb=allocated_gb, reserved_gb=peak.reserved_gb - before_gb, parts=parts)


def model_plan(device: Rules) -> Plan:
    """Returns the plan of an uncompiled training by another program, whose loss enters autocast by itself."""
    plan = decide(Machine(system="", cpu_cores=1), Hardware(device="cpu"))
    return replace(plan, device=Setting(device, ""), expandable_segments=Setting(False, ""))


def model_target(
    model: nn.Module,
    loss: Loss,
    make_batch: Callable[[int], Any],
    precision: Precision,
    optimizer: Optimizer,
    shapes: list[torch.Size] | None = None,
) -> PlanTarget:
    """Returns the training of a copy of the model on batches of `make_batch(items)`, as the planner takes it.

    `shapes` gets the shape of every result of the last forward pass, for `compares_items`. The copy and the batches
    have the tensors of the runtime that the recipe is built for. Fake integers of a batch keep their values, because
    losses read those of labels; of real tensors, those that have no values get random ones.
    """

    def build(runtime: Runtime, checkpointing: bool) -> "ModelRecipe":
        fake = isinstance(runtime, FakeRuntime)
        copied = copy_with(model, _shape_of if fake else lambda tensor: _on_device(tensor, runtime.device))
        twin = without_random_choices(copied).train()
        for parameter in twin.parameters():
            parameter.grad = None
        if checkpointing:
            checkpoint_blocks(twin)
        return ModelRecipe(twin, loss, runtime, DTYPES[precision], optimizer, shapes)

    def load(items: int = 1) -> ModelBatch:
        return ModelBatch(items, make_batch(items))

    return PlanTarget(build, load, model_name=type(model).__name__)


@dataclass
class ModelBatch:
    """A batch of the user's data."""

    items: int
    inputs: Any


class ModelRecipe:
    """The training of a user's model on one scalar loss. A batch is one micro-batch."""

    kind, unit = "model", "items"

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        runtime: Runtime,
        dtype: torch.dtype,
        optimizer: Optimizer,
        shapes: list[torch.Size] | None,
    ) -> None:
        self.model, self.loss, self.runtime, self.dtype = model, loss, runtime, dtype
        self._shapes = shapes
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.modules: dict[str, nn.Module] = {"model": model}
        phases = tuple(
            Phase(type(made).__name__, (nn.ParameterList(made.param_groups[0]["params"]),), made)
            for made in make_optimizers(optimizer, trained)
        )
        self.step_groups = [StepGroup(phases, self._loss)]

    def _loss(self, batch: ModelBatch, step: int) -> Iterator[Term]:
        # Other programs leave autocast before the backward pass, and with it the copies of weights that it keeps.
        watching = nullcontext() if self._shapes is None else _ResultShapes(self._shapes)
        with watching, torch.autocast(self.runtime.device.type, self.dtype, enabled=self.dtype != torch.float32):
            value = self.loss(self.model, batch.inputs)
        # Fake tensors would back-propagate a loss of any shape.
        if not isinstance(value, Tensor):
            raise TypeError(f"the loss is a {type(value).__name__}, not a tensor of one number")
        if value.numel() != 1:
            raise ValueError(f"the loss has the shape {tuple(value.shape)}, not one number")
        if not value.requires_grad:
            raise ValueError("the loss depends on no weight that is trained")
        yield Term("loss", value)

    def prepare(self, loaded: ModelBatch, step: int) -> ModelBatch:
        def copy_to_runtime(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            fake = isinstance(self.runtime, FakeRuntime)
            return _shape_of_input(leaf) if fake else _on_device(leaf, self.runtime.device)

        return ModelBatch(loaded.items, tree_map(copy_to_runtime, loaded.inputs))

    def size(self, batch: ModelBatch) -> int:
        return batch.items

    def split(self, batch: ModelBatch, parts: int) -> list[ModelBatch]:
        return [batch]

    def peak_memory_step(self, step: int) -> int:
        return step

    def flops(self, batch: ModelBatch, step: int) -> float:
        return 0.0

    def average(self, step: int) -> None:
        """Does nothing: there is no average."""

    def sample(self) -> Report:
        return Report()

    def evaluate(self) -> Report:
        return Report()


class _ResultShapes(OperatorMode):  # type: ignore[no-untyped-call]
    """Notes the shapes of the results of all operators, in their order."""

    def __init__(self, shapes: list[torch.Size]) -> None:
        super().__init__()
        self.shapes = shapes
        shapes.clear()

    def after(self, function: Any, arguments: tuple[Any, ...], named: dict[str, Any], made: Any) -> None:
        if isinstance(made, Tensor):
            self.shapes.append(made.shape)


def compares_items(few: Sequence[torch.Size], many: Sequence[torch.Size], times: int) -> bool:
    """Returns whether a forward pass compares the items of a batch with each other, as a contrastive loss does.

    `few` and `many` are the shapes of its results; the second batch has `times` as many items. Then a result has two
    axes that grow with the items. Passes of different operators are not compared.
    """
    if len(few) != len(many):
        return False
    pairs = ((a, b) for a, b in zip(few, many, strict=True) if len(a) == len(b))
    return any(sum(x * times == y for x, y in zip(a, b, strict=True)) > 1 for a, b in pairs)


BATCH_STATISTICS = re.compile(r"batch_?(re)?norm|mini_?batch|batch_?std", re.IGNORECASE)


def batch_statistics(model: nn.Module) -> list[str]:
    """Returns the names of the layers that use statistics of all items of a batch in training mode, such as BatchNorm;
    of other libraries' by the names of their classes."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.train()
        return [name for name, module in model.named_modules() if _uses_batch_statistics(module)]
    finally:
        for module, mode in modes:
            module.training = mode


def _uses_batch_statistics(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return module.training  # Some models keep theirs as it is.
    name, is_layer = type(module).__name__, next(module.children(), None) is None
    return is_layer and module.training and "frozen" not in name.lower() and bool(BATCH_STATISTICS.search(name))


def make_optimizers(kind: Optimizer, parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    """Returns the optimizers of a kind, with a learning rate of 0: Muon is for matrices, and AdamW for the rest."""
    if kind == "sgd":
        return [torch.optim.SGD(parameters, lr=0.0, fused=True)]
    matrices = [p for p in parameters if p.ndim == 2] if kind == "muon" else []
    others = [p for p in parameters if p.ndim != 2 or not matrices]
    made: list[torch.optim.Optimizer] = [torch.optim.AdamW(others, lr=0.0, fused=True)] if others else []
    return [*made, torch.optim.Muon(matrices, lr=0.0)] if matrices else made


def _shape_of(tensor: Tensor) -> Tensor:
    """Returns an empty tensor, nominally on the CPU: a fake one while tensors are fake."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")


def _shape_of_input(tensor: Tensor) -> Tensor:
    has_values = not (tensor.is_meta or tensor.is_floating_point() or tensor.is_complex())
    return tensor.detach().cpu() if has_values else _shape_of(tensor)


def _on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a copy of a tensor; one that has no values gets random numbers, or zeros if it is of integers."""
    if not tensor.is_meta:
        return tensor.detach().to(device, copy=True)
    if tensor.is_floating_point():
        return torch.randn(tensor.shape, dtype=tensor.dtype, device=device)
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)


def copy_with(model: M, replace: Callable[[Tensor], Tensor]) -> M:
    """Returns a copy of the model with every tensor replaced: parameters, buffers and those in plain attributes.

    Locks are shared. Raises UserError for a module that cannot be copied.
    """
    memo: dict[int, Any] = {}
    for module in model.modules():
        for leaf in tree_leaves(vars(module)):
            if isinstance(leaf, nn.Parameter):
                memo[id(leaf)] = nn.Parameter(replace(leaf.detach()), leaf.requires_grad)
            elif isinstance(leaf, Tensor):  # Some are recomputed in every step, as by the old weight norm.
                memo[id(leaf)] = replace(leaf.detach())
            elif isinstance(leaf, LOCKS):
                memo[id(leaf)] = leaf
    try:
        return copy.deepcopy(model, memo)
    except (TypeError, RuntimeError) as error:
        raise UserError(
            f"{type(model).__name__} cannot be copied: {first_line(error)}",
            hint="keep objects that cannot be copied, and tensors in objects of your own, out of its modules",
        ) from error


def refuse_unpredictable(model: nn.Module) -> None:
    """Raises UserError for a model without a weight that is trained, and for the first module whose step cannot run on
    fake tensors, and names it."""
    if not any(p.requires_grad for p in model.parameters()):
        raise UserError(
            f"{type(model).__name__} has no weight that is trained",
            hint="call requires_grad_(True) for the parts that are to be trained",
        )
    for name, module in model.named_modules():
        where = f"{name or 'the model'}, a {type(module).__name__},"
        trainable = [p for p in module.parameters(recurse=False) if p.requires_grad]
        if isinstance(module, torch.jit.ScriptModule):
            raise UserError(f"{where} is compiled by torch.jit", hint="pass the module that it was compiled from")
        if any(is_lazy(p) for p in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
            raise UserError(f"{where} has weights without a shape", hint="run a batch through the model first")
        if getattr(module, "sparse", False) and isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and trainable:
            raise UserError(f"{where} gives sparse gradients, which no fused optimizer takes", hint="use sparse=False")
        if any(p.is_complex() for p in trainable):
            raise UserError(
                f"{where} has complex weights, which no fused optimizer takes",
                hint="keep them as real ones with a last axis of two, and use torch.view_as_complex",
            )


def without_random_choices(model: nn.Module) -> nn.Module:
    """Switches the options in `OFF` off in this model."""
    for module in model.modules():
        for holder in (module, getattr(module, "config", None)):
            for name, value in OFF.items():
                if isinstance(getattr(holder, name, None), (int, float)):
                    setattr(holder, name, value)
    return model


def can_checkpoint(model: nn.Module) -> bool:
    return hasattr(model, "gradient_checkpointing_enable") and bool(
        getattr(model, "supports_gradient_checkpointing", True)
    )


def checkpoint_blocks(model: Any) -> None:
    """Enables gradient checkpointing in a transformers model. The method's name changed in version 5.

    Raises UserError if the model has none.
    """
    if not can_checkpoint(model):
        raise UserError(
            f"{type(model).__name__} has no gradient checkpointing that can be enabled",
            hint="build the model with its own checkpointing on, and leave checkpointing out here",
        )
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
