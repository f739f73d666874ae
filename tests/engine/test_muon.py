"""Muon with AdamW against torch.optim, against singular values, and in what `train.update` asks of an optimizer."""

import copy
import itertools
import math
import sys

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gputrain.engine import optim
from gputrain.engine.optim import Muon, muon_with_adamw, orthogonalised
from gputrain.engine.schedule import Schedule
from gputrain.hw.gpus import find_gpu
from gputrain.hw.plan import Hardware, decide
from gputrain.hw.probe import Machine
from gputrain.planner.memory.fake_runtime import FakeRuntime, on_fake_tensors
from gputrain.planner.memory.timeline import MemoryTimeline
from tests.tables import each_row
from tests.toy import BATCH, ToyRecipe, quiet, train_toy, weights

SHAPES = [(24, 40), (40, 24), (16, 16), (24, 40), (1, 30), (24, 40), (16, 16)]
STEPS = 20


def parameters(shapes, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    source = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=source, dtype=dtype)) for shape in shapes]


def give_gradients(to: list[nn.Parameter], step: int, scale: float = 1.0) -> None:
    source = torch.Generator().manual_seed(1000 + step)
    for parameter in to:
        parameter.grad = torch.randn(parameter.shape, generator=source, dtype=parameter.dtype) * scale


def distance(ours: list[nn.Parameter], theirs: list[nn.Parameter]) -> float:
    return max(float((a - b).detach().abs().max()) for a, b in zip(ours, theirs, strict=True))


def reference(to: list[nn.Parameter]) -> torch.optim.Muon:
    return torch.optim.Muon(to, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")


@pytest.mark.parametrize(("product_dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-3)])
def test_matrices_move_as_in_torchs_muon(monkeypatch, product_dtype, tolerance):
    """torch's has its products in bf16, always; for the exact comparison, its rounding to bf16 is taken away."""
    if product_dtype == torch.float32:
        # torch casts by the one method, and from 2.15 on by the other.
        monkeypatch.setattr(Tensor, "bfloat16", Tensor.float)
        monkeypatch.setattr(Tensor, "to", lambda tensor, *dtype, **named: tensor.float().clone())
    ours, theirs = parameters(SHAPES), parameters(SHAPES)
    mine = Muon(ours, learning_rate=0.0, weight_decay=0.1, update_rms=0.2, product_dtype=product_dtype)
    torchs = reference(theirs)
    for step in range(STEPS):
        for optimizer, moved in ((mine, ours), (torchs, theirs)):
            optimizer.param_groups[0]["lr"] = 0.02 / (1 + step % 3)
            give_gradients(moved, step)
            optimizer.step()
    assert distance(ours, parameters(SHAPES)) > 0.05
    assert distance(ours, theirs) < tolerance


def test_the_rest_moves_as_in_torchs_fused_adamw():
    shapes = [(7,), (5, 4), (1,)]
    ours, theirs = parameters(shapes), parameters(shapes)
    mine = Muon([], ours, learning_rate=0.01)
    torchs = torch.optim.AdamW(theirs, lr=0.01, betas=(0.8, 0.99), weight_decay=0.0, fused=True)
    for step in range(STEPS):
        for optimizer, moved in ((mine, ours), (torchs, theirs)):
            give_gradients(moved, step, scale=8.0)
            optimizer.grad_scale = torch.tensor(8.0)
            optimizer.step()
    assert distance(ours, parameters(shapes)) > 0.05
    assert distance(ours, theirs) < 1e-6


@each_row(((3, 8, 20),), ((3, 20, 8),), ((2, 9, 9),), ((1, 1, 5),))
def test_orthogonalising_moves_singular_values_by_the_quintic_alone(shape):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    left, values, right = torch.linalg.svd(matrices, full_matrices=False)
    values = values / values.norm(dim=1, keepdim=True)
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    expected = left @ torch.diag_embed(values) @ right
    made = orthogonalised(matrices, 5)
    assert torch.allclose(made, expected, rtol=0, atol=1e-10)
    assert made.is_contiguous()


def test_a_kernel_counts_as_a_matrix_of_its_outputs_and_its_update_is_a_learning_rate():
    """Any layout in memory; the root mean square of the update is about the learning rate for every shape."""
    kernels = parameters([(8, 4, 3), (8, 4, 3, 5), (64, 4, 1)])
    kernels[1].data = kernels[1].data.to(memory_format=torch.channels_last)
    flat = [nn.Parameter(kernel.detach().flatten(1).clone()) for kernel in kernels]
    before = copy.deepcopy(flat)
    for moved in (kernels, flat):
        optimizer = Muon(moved, learning_rate=0.1)
        for step in range(3):
            give_gradients(moved, step)
            optimizer.step()
    assert distance([nn.Parameter(kernel.flatten(1)) for kernel in kernels], flat) < 1e-6
    one_step = [nn.Parameter(parameter.clone()) for parameter in before]
    give_gradients(one_step, 0)
    Muon(one_step, learning_rate=0.1).step()
    for after, start in zip(one_step, before, strict=True):
        spread = (after - start).norm() / math.sqrt(min(start.shape))
        assert 0.06 < float(spread.detach() / math.sqrt(max(start.shape))) < 0.13


def test_stacked_or_one_by_one(monkeypatch):
    together, apart, single = (parameters(SHAPES) for _ in range(3))
    optimizers = [Muon(together, learning_rate=0.01), Muon(apart, learning_rate=0.01)]
    alone = [Muon([parameter], learning_rate=0.01) for parameter in single]
    for step in range(5):
        for moved in (together, apart, single):
            give_gradients(moved, step)
        monkeypatch.setattr(optim, "STACKED_NUMBERS", 15 << 20)
        optimizers[0].step()
        monkeypatch.setattr(optim, "STACKED_NUMBERS", 2 * 24 * 40)
        optimizers[1].step()
        for optimizer in alone:
            optimizer.step()
    assert distance(together, parameters(SHAPES)) > 0.05
    assert distance(together, apart) < 1e-6
    assert distance(together, single) < 1e-6


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 8)
        self.old = torch.nn.utils.weight_norm(nn.Conv1d(8, 12, 3))
        self.new = torch.nn.utils.parametrizations.weight_norm(nn.Conv1d(8, 12, 3))
        self.up = nn.ConvTranspose1d(12, 6, 4)
        self.out = nn.Linear(6, 2)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_matrices_are_all_weights_but_gains_and_embeddings():
    net = Net()
    optimizer = muon_with_adamw([net, net.out], learning_rate=0.1, weight_decay=0.3)
    names = {parameter: name for name, parameter in net.named_parameters()}
    matrices, rest = ([names[p] for p in group["params"]] for group in optimizer.param_groups)
    assert matrices == ["old.weight_v", "new.parametrizations.weight.original1", "up.weight", "out.weight"]
    assert rest == [
        "embed.weight", "old.bias", "old.weight_g", "new.bias", "new.parametrizations.weight.original0",
        "up.bias", "out.bias",
    ]  # fmt: skip
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    assert optimizer.param_groups[1]["betas"] == (0.8, 0.99)


def mixed(seed: int = 0) -> tuple[list[nn.Parameter], Muon]:
    moved = parameters([*SHAPES, (6,), (3, 2)], seed)
    return moved, Muon(moved[: len(SHAPES)], moved[len(SHAPES) :], learning_rate=0.01, weight_decay=0.1)


def snapshot(moved: list[nn.Parameter], optimizer: Muon) -> list[Tensor]:
    state = optimizer.state_dict()["state"]
    return [t.detach().clone() for t in (*moved, *(state[k][name] for k in sorted(state) for name in state[k]))]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_where_found_inf_is_set_nothing_changes(bad):
    moved, optimizer = mixed()
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(0.0)
    for step in range(2):
        give_gradients(moved, step)
        optimizer.step()
    before = snapshot(moved, optimizer)
    for parameter in moved:
        parameter.grad.view(-1)[0] = bad
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.step()
    assert same(snapshot(moved, optimizer), before)
    optimizer.found_inf = torch.tensor(0.0)
    give_gradients(moved, 2)
    optimizer.step()
    assert not any(torch.equal(a, b) for a, b in zip(snapshot(moved, optimizer), before, strict=True))


def test_gradients_are_divided_by_the_scale():
    results = []
    for scale in (1.0, 4096.0):
        moved, optimizer = mixed()
        optimizer.grad_scale = torch.tensor(scale)
        for step in range(3):
            give_gradients(moved, step, scale)
            optimizer.step()
        results.append(snapshot(moved, optimizer))
    assert same(*results)


class Calls(TorchDispatchMode):
    """Operators by name, and the shapes of Gram matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.grams: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name, made = function.overloadpacket.__name__, function(*args, **(kwargs or {}))
        self.names.append(name)
        if name == "bmm":
            self.grams.add(tuple(made.shape[1:]))
        return made


def test_the_operators_of_a_step_go_by_shapes_not_by_parameters():
    """Three products a round, fifteen a shape, and none that waits for the device."""
    counts = []
    for copies in (2, 8):
        moved = parameters([shape for shape in ((8, 12), (12, 8), (5, 3, 2)) for _ in range(copies)])
        optimizer = Muon(moved, learning_rate=0.01, weight_decay=0.1)
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(0.0)
        give_gradients(moved, 0)
        optimizer.step()
        with Calls() as calls:
            optimizer.step()
        products = [name for name in calls.names if name in ("bmm", "baddbmm")]
        views = {"view", "_unsafe_view", "unbind", "transpose", "expand", "detach", "alias", "_reshape_alias"}
        counts.append((len(products), len([name for name in calls.names if name not in views])))
        assert calls.grams == {(8, 8), (5, 5)}  # The Gram matrices have the shorter side.
        assert not {"_local_scalar_dense", "is_nonzero", "equal", "nonzero"} & set(calls.names)
    assert counts[0] == counts[1]
    assert counts[0][0] == 3 * 15
    assert counts[0][1] <= 3 * 36


# Until Python 3.11, whoever calls a function keeps its arguments until it returns.
OF_CALLERS_GB = 0.06 if sys.version_info < (3, 11) else 0.0


@pytest.mark.parametrize(("dtype", "limit_gb"), [(torch.bfloat16, 0.16), (torch.float32, 0.256 + OF_CALLERS_GB)])
def test_workspace_of_a_step_on_shapes(dtype, limit_gb):
    """Seven discriminators' worth of the widest kernels (1024, 1024, 5) and large squares: stacks keep their copies
    small."""
    with on_fake_tensors():
        kernels = [nn.Parameter(torch.empty(1024, 1024, 5)) for _ in range(7)]
        squares = [nn.Parameter(torch.empty(1024, 1024)) for _ in range(40)]
        bias = nn.Parameter(torch.empty(1024))
        optimizer = Muon([*kernels, *squares], [bias], learning_rate=0.01, product_dtype=dtype)
        for parameter in (*kernels, *squares, bias):
            parameter.grad = torch.empty_like(parameter)
        optimizer.step()
        timeline = MemoryTimeline()
        with timeline.watching():
            optimizer.step()
        peak_bytes, _ = timeline.peak()
    assert optimizer.state[kernels[0]]["momentum_buffer"].shape == (1024, 1024, 5)
    assert optimizer.state[bias]["exp_avg_sq"].shape == (1024,)
    assert peak_bytes / 1e9 < limit_gb


class MuonToy(ToyRecipe):
    def _adamw(self, module: nn.Module) -> torch.optim.Optimizer:
        return muon_with_adamw([module], learning_rate=0.0, weight_decay=0.01)


@each_row(*itertools.product(["stack", "orthogonalised", "linalg.vector_norm"], [False, True]))
def test_a_step_that_runs_out_of_memory_is_repeated_in_parts(monkeypatch, place, bad):
    """Memory runs out for more than one matrix at once, in each of the places that take it, and the step is the same up
    to the rounding of the batched product. Where the gradients are not finite, nothing moves."""
    straight, undisturbed = mixed()
    cut, optimizer = mixed()
    owner = torch if place == "stack" else optim if place == "orthogonalised" else torch.linalg
    name, failures = place.rpartition(".")[2], 0
    enough = getattr(owner, name)

    def limited(matrices, *arguments, **named):
        nonlocal failures
        if len(matrices) > 1:
            failures += 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return enough(matrices, *arguments, **named)

    for step in range(4):
        for to, by in ((straight, undisturbed), (cut, optimizer)):
            give_gradients(to, step)
            by.found_inf = torch.tensor(float(bad and step == 2))
            with monkeypatch.context() as patched:
                if by is optimizer:
                    patched.setattr(owner, name, limited)
                by.step()
    assert failures >= 4
    assert distance(straight, cut) < 1e-5
    for one, other in zip(straight, cut, strict=True):
        state, theirs = undisturbed.state[one], optimizer.state[other]
        assert all(float((state[key] - theirs[key]).abs().max()) < 1e-6 for key in state)


def schedule_of(steps: int, **changes) -> Schedule:
    return Schedule(batch_size=BATCH, learning_rate=0.01, warmup_steps=0, max_steps=steps, num_epochs=9, **changes)


def trained(folder, *, steps: int, resume_from: str = "", **changes) -> dict[str, Tensor]:
    recipe = MuonToy(schedule_of(steps, **changes), adversarial_from=2)
    train_toy(recipe, quiet(folder, resume_from=resume_from))
    return weights(recipe)


def test_the_engine_trains_with_it_the_same_for_every_split_and_through_a_resume(tmp_path):
    whole = trained(tmp_path / "whole", steps=8)
    split = trained(tmp_path / "split", steps=8, micro_batch_size=3)
    assert max(float((whole[name] - split[name]).abs().max()) for name in whole) < 1e-12
    trained(tmp_path / "cut", steps=5)
    resumed = trained(tmp_path / "cut", steps=8, resume_from="auto")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def svd_with(values: Tensor, rows: int, columns: int) -> Tensor:
    """A matrix with these singular values, in fp64."""
    source = torch.Generator().manual_seed(1)
    matrix = torch.randn(rows, columns, generator=source, dtype=torch.float64)
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    return left @ torch.diag(values) @ right


@pytest.mark.parametrize(("gpu", "dtype"), [("h100", torch.bfloat16), ("rtx3090", torch.bfloat16), ("t4", None)])
def test_a_plan_for_a_gpu_has_the_products_of_that_gpu(gpu, dtype):
    """Fake tensors are nominally on the CPU, whose products are in fp32."""
    machine = find_gpu(gpu).installed_in(Machine(system="Linux", cpu_cores=8))
    assert FakeRuntime(decide(machine, Hardware()), MemoryTimeline()).product_dtype is dtype
    on_cpu = decide(machine, Hardware(device="cpu"))
    assert FakeRuntime(on_cpu, MemoryTimeline()).product_dtype is None
