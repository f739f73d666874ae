"""Predicted memory against arithmetic and real steps."""

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from gputrain.errors import UserError
from gputrain.hw.gpus import find_gpu
from gputrain.hw.plan import Hardware, decide
from gputrain.hw.probe import Machine
from gputrain.planner.memory import fake_runtime
from gputrain.planner.memory.allocator import GRAIN, CachingAllocator
from gputrain.planner.memory.fake_runtime import on_fake_tensors
from gputrain.planner.memory.predict import predict_step
from gputrain.planner.memory.timeline import MemoryTimeline
from gputrain.planner.memory.torch_model import predict_training_memory
from gputrain.planner.time.fusion import kernel_costs
from tests.planner.predictions import StepTotals
from tests.planner.step_counts import of_vae, plan_of

MB = 2**20
STEP = GRAIN  # The optimizer counts the steps of each weight in a tensor.


def layers(count: int, width: int) -> nn.Sequential:
    return nn.Sequential(*(part for _ in range(count) for part in (nn.Linear(width, width, bias=False), nn.ReLU())))


def mean_square(model, batch):
    return model(batch).square().mean()


def test_a_row_of_linear_layers_by_arithmetic():
    """8 layers of 512 x 512 on 4096 rows: each ReLU's output is kept, once, for itself and the next layer."""
    found = predict_training_memory(layers(8, 512), mean_square, torch.empty(4096, 512), precision="fp32")
    weights, rows = 8 * 512 * 512 * 4, 4096 * 512 * 4
    assert found.parts["parameters"] == pytest.approx((weights + rows) / 1e9)  # The batch counts too.
    assert found.parts["gradients"] == pytest.approx(weights / 1e9)
    assert found.parts["optimizer"] == pytest.approx((2 * weights + 8 * STEP) / 1e9)
    # 8 kept; and as the backward pass begins, the gradient of the mean, and of the square with its factor 2 x.
    assert found.parts["activations"] == pytest.approx(8 * rows / 1e9, rel=1e-3)
    assert 2 <= found.parts["workspace"] / rows * 1e9 <= 4.1
    assert found.allocated_gb == pytest.approx(sum(found.parts.values()))
    assert found.reserved_gb >= found.allocated_gb
    assert found.flops == 2 * 4096 * 512 * 512 * (8 * 3 - 1)  # the first layer's input needs no gradient


def test_gradients_that_do_not_stay():
    """Small batches have their peak when gradients and moments are both in memory, either way."""
    few = torch.empty(1, 512)
    resident = predict_training_memory(layers(8, 512), mean_square, few, precision="fp32")
    fresh = predict_training_memory(layers(8, 512), mean_square, few, precision="fp32", gradients_resident=False)
    weights = 8 * 512 * 512 * 4 / 1e9
    assert resident.allocated_gb == pytest.approx(4 * weights + weights / 8, rel=0.02)  # one gradient is on its way
    assert fresh.allocated_gb == pytest.approx(4 * weights, rel=0.02)


def test_autocast_by_the_rules_of_cuda():
    """A layer norm is computed and kept in fp32 on CUDA; the CPU's autocast leaves it in 16 bit."""
    model = nn.Sequential(*(part for _ in range(6) for part in (nn.Linear(256, 256, bias=False), nn.LayerNorm(256))))
    rows = torch.empty(8192, 256)
    of = {
        rules: predict_training_memory(model, mean_square, rows, precision="bf16", autocast_rules=rules)
        for rules in ("cuda", "cpu")
    }
    assert of["cuda"].parts["activations"] > 1.3 * of["cpu"].parts["activations"]
    assert of["cuda"].flops == of["cpu"].flops


class Attention(nn.Module):
    def forward(self, x):
        attended = torch.nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.1)
        return torch.nn.functional.scaled_dot_product_attention(attended, attended, attended, None, 0.1)


def kept_gb(model, batch, rules="cuda"):
    """Returns the activations of a step whose loss is the sum."""
    found = predict_training_memory(model, lambda m, x: m(x).sum(), batch, precision="fp32", autocast_rules=rules)
    return found.parts["activations"]


def test_attention_with_dropout_keeps_no_scores_on_cuda():
    """4 heads of 2048 tokens have 67 MB of scores in fp32, twice, which only the CPU's function for dropout keeps."""
    rows = nn.Parameter(torch.empty(1, 4, 2048, 64)), 4 * 2048 * 2048 * 4 / 1e9

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.rows, self.attention = rows[0], Attention()

        def forward(self, x):
            return self.attention(self.rows * x)

    assert kept_gb(Model(), torch.empty(1)) < 0.2 * rows[1]
    assert kept_gb(Model(), torch.empty(1), "cpu") > 2 * rows[1]


def test_dropout_keeps_a_byte_of_each_number_on_cuda():
    """One kernel with a mask of bytes, where the CPU's keeps noise in the dtype of its input."""
    numbers = 1 << 22

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.rows, self.dropout = nn.Parameter(torch.empty(numbers)), nn.Dropout(0.1)

        def forward(self, x):
            return self.dropout(self.rows * x)

    # Besides the mask, the product and the result are there while dropout runs.
    assert kept_gb(Model(), torch.empty(1)) == pytest.approx(numbers * (1 + 8) / 1e9, rel=0.01)
    assert kept_gb(Model(), torch.empty(1), "cpu") == pytest.approx(numbers * (4 + 8) / 1e9, rel=0.01)
    found = predict_training_memory(Model(), lambda m, x: m(x).sum(), torch.empty(1), precision="fp32")
    assert [kernel.name for kernel in found.micro_batch if "dropout" in kernel.name or "bernoulli" in kernel.name] == [
        "native_dropout", "native_dropout_backward"
    ]  # fmt: skip


def test_group_norm_reads_and_writes_nchw_on_cuda():
    def layout(rules):
        with on_fake_tensors(), fake_runtime.FunctionsOf(rules):
            x = torch.empty(2, 8, 4, 4).to(memory_format=torch.channels_last)
            return torch.nn.functional.group_norm(x, 2).is_contiguous()

    assert layout("cuda")
    assert not layout("cpu")


def test_a_module_has_the_layout_of_the_plan():
    """Weights of one pixel are in either layout until they are given one, and a bias of one number is no obstacle."""
    plan = decide(find_gpu("h100").installed_in(Machine(system="Linux", cpu_cores=8)), Hardware())
    with on_fake_tensors():
        runtime = fake_runtime.FakeRuntime(plan, MemoryTimeline())
        model = runtime.place(nn.Sequential(nn.Conv2d(8, 16, 1), nn.Conv2d(16, 1, 3)))
        made = model[0](torch.empty(1, 8, 4, 4))
    assert plan.channels_last.value
    assert made.is_contiguous(memory_format=torch.channels_last)
    assert model[1].weight.requires_grad


def test_a_convolution_has_the_workspace_of_its_conversions():
    """16 channels of 256 x 256 in fp16 to 16: at the peak the input, the result, and copies of both and of the weight.
    Published peaks of a VAE on an RTX 4090 have exactly these (docs/evidence/published_times.md)."""

    def peak_mb(device, layout=torch.contiguous_format, dtype=torch.float16):
        timeline = MemoryTimeline.on(device)
        with on_fake_tensors(), torch.no_grad(), timeline.watching():
            x = torch.empty(1, 16, 256, 256, dtype=dtype).to(memory_format=layout)
            torch.nn.functional.conv2d(x, torch.empty(16, 16, 3, 3, dtype=dtype), padding=1)
        return timeline.peak()[0] / 2**20

    weight = 16 * 16 * 9 * 2 / 2**20
    assert peak_mb("cuda") == pytest.approx(4 * 2 + 2 * weight, abs=2e-3)
    assert peak_mb("cuda", torch.channels_last) == peak_mb("cpu") == pytest.approx(2 * 2 + weight, abs=2e-3)
    assert peak_mb("cuda", dtype=torch.float32) == pytest.approx(3 * 4 + 4 * weight, abs=2e-3)


def test_the_model_and_the_batch_are_left_alone():
    torch.manual_seed(0)
    model, rows = layers(2, 8), torch.randn(3, 8)
    before = [p.clone() for p in model.parameters()], rows.clone(), torch.get_rng_state()
    predict_training_memory(model, mean_square, rows)
    assert all(torch.equal(a, b) for a, b in zip(before[0], model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(rows, before[1])
    assert torch.equal(torch.get_rng_state(), before[2])


def test_a_model_on_the_meta_device_and_shared_weights():
    with torch.device("meta"):
        model = layers(2, 64)
        rows = torch.empty(16, 64)
    model[2].weight = model[0].weight
    found = predict_training_memory(model, mean_square, rows, precision="fp32")
    assert found.parts["optimizer"] == pytest.approx((2 * 64 * 64 * 4 + STEP) / 1e9)


class Checkpointed(nn.Module):
    """Blocks that keep their input alone, and run again in the backward pass."""

    def __init__(self, count: int):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64)) for _ in range(count)
        )

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def test_checkpointing_keeps_the_inputs_and_one_blocks_inside():
    rows = torch.empty(4096, 64)
    few, many = (predict_training_memory(Checkpointed(n), mean_square, rows, precision="fp32") for n in (4, 16))
    inside, between = 4096 * 512 * 4 / 1e9, 4096 * 64 * 4 / 1e9
    assert 2 * inside < few.parts["workspace"] < 4.2 * inside
    assert many.parts["workspace"] == pytest.approx(few.parts["workspace"], rel=0.02)
    # At the peak, as the last block is gone through: the inputs of all, and the output of the last.
    assert few.parts["activations"] == pytest.approx(4 * between, rel=0.3)
    assert many.parts["activations"] == pytest.approx(16 * between, rel=0.1)


def test_what_checkpointing_repeats_follows_the_same_rules_of_autocast():
    """A norm inside a repeated block is in fp32 both times; torch refuses a repetition that comes out otherwise."""

    class Normed(Checkpointed):
        def __init__(self) -> None:
            super().__init__(2)
            for block in self.blocks:
                block.append(nn.LayerNorm(64))

    found = predict_training_memory(Normed(), mean_square, torch.empty(512, 64), precision="bf16")
    assert found.parts["workspace"] > 512 * 512 * 2 / 1e9


def test_copies_of_weights_that_checkpointing_repeats_do_not_stay():
    """A program that leaves autocast before the backward pass keeps 16-bit copies of one block's weights at a time."""
    found = predict_training_memory(
        Checkpointed(16), mean_square, torch.empty(16, 64), precision="bf16", gradients_resident=False
    )  # fmt: skip
    block = 2 * 64 * 512 * 2 / 1e9
    assert found.parts["workspace"] + found.parts["activations"] < 4 * block


def test_weights_that_have_no_part_in_the_step():
    """They are there, but without gradient and state; and a tensor of no elements takes nothing."""

    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = layers(2, 64), layers(2, 64)

        def forward(self, x):
            return self.used(x) + x.new_empty(0).sum()

    found = predict_training_memory(Partly(), mean_square, torch.empty(16, 64), precision="fp32")
    assert found.parts["parameters"] == pytest.approx((4 * 64 * 64 + 16 * 64) * 4 / 1e9)
    assert found.parts["gradients"] == pytest.approx(2 * 64 * 64 * 4 / 1e9)
    assert found.parts["optimizer"] == pytest.approx(2 * (2 * 64 * 64 * 4 + STEP) / 1e9)


def test_frozen_weights_have_no_gradient_and_no_state():
    model = layers(4, 64)
    model[0].weight.requires_grad_(False)
    found = predict_training_memory(model, mean_square, torch.empty(16, 64), precision="fp32")
    assert found.parts["optimizer"] == pytest.approx(3 * (2 * 64 * 64 * 4 + STEP) / 1e9)


def test_one_forward_pass_is_enough():
    """Also where weights have no part in the step, and with gradients that stay: passes are what a prediction costs."""
    calls = []

    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = layers(1, 64), layers(1, 64)

        def forward(self, x):
            calls.append(x.shape)
            return self.used(x)

    predict_training_memory(Counted(), mean_square, torch.empty(16, 64))
    assert calls == [(16, 64)]


def test_the_short_way_of_frequent_operators_changes_no_figure(monkeypatch):
    """Against torch's own FakeTensorMode, operator by operator."""
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    config = Wav2Vec2Config(
        vocab_size=8, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128,
        conv_dim=(8,) * 3, conv_kernel=(10, 8, 4), conv_stride=(8, 8, 5), num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2, do_stable_layer_norm=True, feat_extract_norm="layer",
    )  # fmt: skip
    model, waves = Wav2Vec2ForCTC(config).train(), torch.empty(2, 16000)

    def logits(model, waves):
        return torch.log_softmax(model(waves).logits.float(), -1).mean()

    def figures():
        found = predict_training_memory(model, logits, waves)
        return found.allocated_gb, found.reserved_gb, found.parts, found.flops, StepTotals.of(found.micro_batch)

    short = figures()
    taken = []
    monkeypatch.setattr(FakeTensorMode, "dispatch", _noting(FakeTensorMode.dispatch, taken))

    def all_have_values(self, values):
        raise fake_runtime._NotOfShapes

    monkeypatch.setattr(fake_runtime.QuickFakeMode, "_described", all_have_values)
    assert figures() == short
    assert taken.count(torch.ops.aten.addmm.default) > 10


def _noting(dispatch, taken):
    def noted(self, func, types, args=(), kwargs=None):
        taken.append(func)
        return dispatch(self, func, types, args, kwargs or {})

    return noted


class Chooser(nn.Module):
    """Looks at values."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return x[x > 0].sum() * self.weight


def test_a_model_that_needs_values_names_the_operator():
    with pytest.raises(UserError, match=r"nonzero|index"):
        predict_training_memory(Chooser(), mean_square, torch.empty(4), precision="fp32")


def real_steps(model, batch, accumulated: bool) -> tuple[int, int]:
    """Allocated and reserved bytes of two real optimizer steps on the CPU, watched from the first to the last, after
    the optimizer's state has been made."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    timeline = MemoryTimeline()
    timeline.note("parameters", model.parameters(), [batch])
    timeline.note("optimizer", *(state.values() for state in optimizer.state.values()))
    with timeline.watching():
        for _ in range(2):
            for _ in range(1 + accumulated):
                mean_square(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    allocator = CachingAllocator()
    return timeline.peak(allocator)[0], allocator.reserved_bytes


class Mixed(nn.Module):
    """Layers of many widths, one of them used twice, and one whose gradient comes as an expanded view."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in ((640, 900), (900, 700), (700, 900)))
        self.shift = nn.Parameter(torch.zeros(900, 700))

    def forward(self, x):
        for number in (0, 1, 2, 1):
            x = torch.relu(self.layers[number](x))
        return x + self.shift.sum()


def gelus(*widths: int) -> nn.Sequential:
    return nn.Sequential(*(part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.GELU())))


# Model, rows and columns of its batch, and whether a step has two parts.
STEPS = {
    "a weight used twice": (Mixed, 500, 640, True),
    "an expanded gradient": (Mixed, 500, 640, False),
    "checkpointed": (lambda: Checkpointed(4), 1000, 64, False),
    "large blocks": (lambda: layers(2, 2560), 8, 2560, False),
    "a larger second step": (lambda: gelus(1700, 1700, 700, 500, 1300, 700), 200, 1700, True),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_as_real_ones_are_watched(name):
    """A step is watched once, with gradients and state already there. In models of a few megabytes the allocator then
    places blocks otherwise, each of which may be 1 MiB larger than its request."""
    make, rows, width, accumulated = STEPS[name]
    model, batch = make(), torch.randn(rows, width)
    allocated, reserved = real_steps(model, batch, accumulated)
    found = predict_training_memory(model, mean_square, batch, precision="fp32", gradients_resident=accumulated)
    assert found.allocated_gb == pytest.approx(allocated / 1e9, rel=0.05)
    assert found.reserved_gb == pytest.approx(reserved / 1e9, rel=0.12)


def test_whole_blocks_are_allocated():
    """A matrix of 25 MiB has a block of 26, since segments are of even size and a rest of 1 MiB is not split off."""
    found = predict_training_memory(layers(2, 2560), mean_square, torch.empty(8, 2560), precision="fp32")
    batch, counts = 8 * 2560 * 4, 2 * STEP
    assert found.parts["parameters"] == pytest.approx((2 * 26 * MB + batch) / 1e9, rel=1e-9)
    assert found.parts["optimizer"] == pytest.approx((4 * 26 * MB + counts) / 1e9, rel=1e-9)
    grown = predict_training_memory(
        layers(2, 2560), mean_square, torch.empty(8, 2560), precision="fp32", expandable_segments=True
    )  # fmt: skip
    assert grown.parts["parameters"] == pytest.approx((2 * 25 * MB + batch) / 1e9, rel=1e-9)


def test_muon_keeps_one_moment_of_a_matrix_and_works_on_copies():
    """torch's Muon holds the momentum of a matrix and, in its step, 16-bit copies of one matrix at a time; what is no
    matrix goes to AdamW with two moments."""
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    few = torch.empty(1, 512)
    adamw, muon = (
        predict_training_memory(model, mean_square, few, precision="fp32", optimizer=o) for o in ("adamw", "muon")
    )
    matrix, bias = 512 * 512 * 4, 512 * 4
    assert adamw.parts["optimizer"] == pytest.approx(4 * (2 * matrix + 2 * bias + 2 * STEP) / 1e9)
    assert muon.parts["optimizer"] == pytest.approx(4 * (matrix + 2 * bias + STEP) / 1e9)
    assert muon.flops > adamw.flops  # the products that make a matrix orthogonal


def test_a_fused_function_takes_its_outputs_alone():
    def step(timeline: MemoryTimeline, function) -> int:
        with on_fake_tensors():
            x = torch.empty(1000, 1000)
            timeline.note("parameters", [x])
            with torch.no_grad(), timeline.watching():
                function(x)
        return timeline.peak()[0]

    def chain(x):
        return (((x + 1) * 2).exp() - 3).sum(1)

    plain, fused = MemoryTimeline(), MemoryTimeline()
    picture = 4 * 1000 * 1000
    assert step(plain, chain) == pytest.approx(3 * picture, rel=0.01)  # the input, and two links of the chain
    assert step(fused, fused.in_region(chain, frees_inner=True)) == pytest.approx(picture, rel=0.01)
    assert sum(operator.launches for operator in plain.log.operators) == 5
    assert [kernel.launches for kernel in kernel_costs(fused.log.operators)] == [1]


def test_a_fused_function_under_autograd_keeps_what_the_backward_pass_needs():
    timeline = MemoryTimeline()
    with on_fake_tensors():
        x = torch.empty(1000, 1000, requires_grad=True)
        with timeline.watching():
            out = timeline.in_region(lambda x: x.exp().sin(), frees_inner=True)(x)
    assert out.grad_fn is not None
    assert timeline.peak()[0] == pytest.approx(3 * 4e6 - 4e6, rel=0.01)


def test_a_timeline_against_arithmetic():
    """8 MB are in memory, 3 of them are freed before the peak, at which there are two more tensors of 4 MB."""
    held = [torch.empty(size, dtype=torch.uint8) for size in (5_000_064, 3_000_064)]
    timeline = MemoryTimeline()
    timeline.note("parameters", held)
    with timeline.watching():
        del held[1:]
        for _ in range(3):
            first = torch.zeros(1_000_064)
            second = first + 1
            del first, second
        torch.zeros(10)
    assert timeline.peak()[0] == 5_000_192 + 2 * 4_000_256


@pytest.mark.slow
def test_gradients_of_one_group_end_before_those_of_the_next():
    """At the peak, in the autoencoder's step, the discriminator has no gradients, nor in the steps after the first."""
    found = {}
    for weight in (0.0, 0.5):
        settings, work = of_vae(preset="fast", image_size=128, batch_size=4, adversarial_weight=weight)
        target = work.target(settings)
        found[weight] = predict_step(target, plan_of(settings, work), micro_batch_size=4).parts["gradients"]
    assert found[0.5] == pytest.approx(found[0.0], rel=1e-6)
