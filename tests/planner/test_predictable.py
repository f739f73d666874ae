"""Models that are hard to run on shapes: each is predicted as a real step on the CPU is watched, or refused by name."""

import logging
import threading

import pytest
import torch
from torch import nn
from torch._subclasses import fake_tensor
from torch.nn import functional as F

from gputrain.autoconfig.memory_models import measure_step
from gputrain.errors import UserError
from gputrain.hw import create_optimal_config
from gputrain.planner.predict import predict_training_memory


class Wrapped(nn.Module):
    """A module, with what comes after it."""

    def __init__(self, inner: nn.Module, then=lambda self, out: out):
        super().__init__()
        self.inner, self.then = inner, then

    def forward(self, x):
        out = self.inner(x)
        return self.then(self, out[0] if isinstance(out, tuple) else out)


def with_attributes() -> nn.Module:
    """Tensors that are neither parameters nor buffers, alone and in a list."""
    model = Wrapped(nn.Linear(512, 512), lambda self, out: out * self.scale + self.shifts[0])
    model.scale, model.shifts = torch.ones(512), [torch.ones(512)]
    return model


def with_lock() -> nn.Module:
    def locked(self, out):
        with self.lock:
            return out

    model = Wrapped(nn.Linear(512, 512), locked)
    model.lock = threading.Lock()
    return model


class Experts(nn.Module):
    """A mixture of experts, each for all tokens, summed in place by its share."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(512, 4), nn.Parameter(torch.randn(4, 512, 512) / 20)

    def forward(self, x):
        share, out = self.gate(x).softmax(-1), torch.zeros_like(x)
        for number in range(4):
            out.index_add_(0, torch.arange(len(x)), (x @ self.experts[number]).to(x.dtype) * share[:, number, None])
        return out


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(257, 257, dtype=torch.complex64))

    def forward(self, x):
        return torch.view_as_real(torch.fft.rfft(x) @ self.weight)


class Flex(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(512, 512)

    def forward(self, x):
        from torch.nn.attention.flex_attention import flex_attention

        heads = self.project(x).view(1, 1, -1, 512)
        return flex_attention(heads, heads, heads)


ROWS = torch.zeros(256, 512)
WAVES = torch.zeros(4, 64, 512)
PREDICTED = {
    "old weight norm": (lambda: torch.nn.utils.weight_norm(nn.Conv1d(64, 64, 3)), WAVES),
    "weight norm": (lambda: torch.nn.utils.parametrizations.weight_norm(nn.Conv1d(64, 64, 3)), WAVES),
    "old spectral norm": (lambda: torch.nn.utils.spectral_norm(nn.Conv1d(64, 64, 3)), WAVES),
    "plain attributes": (with_attributes, ROWS),
    "a lock": (with_lock, ROWS),
    "a mixture of experts": (Experts, ROWS),
}
LSTM = torch.zeros(4, 100, 512)
REFUSED = {
    "lstm": (lambda: Wrapped(nn.LSTM(512, 512)), LSTM, r"lstm keeps .*\(in inner, a LSTM\)"),
    "gru": (lambda: Wrapped(nn.GRU(512, 512)), LSTM, r"gru keeps .*\(in inner, a GRU\)"),
    "rnn": (lambda: Wrapped(nn.RNN(512, 512)), LSTM, r"rnn_tanh keeps .*\(in inner, a RNN\)"),
    "lstm cell": (lambda: Wrapped(nn.LSTMCell(512, 512)), ROWS, r"lstm_cell keeps .*\(in inner, a LSTMCell\)"),
    "sparse embedding": (
        lambda: Wrapped(nn.Embedding(100, 512, sparse=True)), torch.zeros(4, 8, dtype=torch.long),
        "inner, a Embedding, gives sparse gradients",
    ),
    "complex weights": (Complex, ROWS, "the model, a Complex, has complex weights"),
    "numpy": (
        lambda: Wrapped(nn.Linear(512, 512), lambda self, out: out * float(out.detach().numpy().mean())), ROWS,
        r"numpy\(\) is not supported .*\(in the model, a Wrapped\)",
    ),
    "values": (
        lambda: Wrapped(nn.Linear(512, 512), lambda self, out: out * out.mean().item()), ROWS,
        r"needs values, .*_local_scalar_dense.*\(in the model, a Wrapped\)",
    ),
    "jit.script": (lambda: nn.Sequential(torch.jit.script(nn.Linear(512, 512))), ROWS, "^0, a .* by torch.jit"),
    "lazy": (lambda: Wrapped(nn.LazyLinear(512)), ROWS, "inner, a LazyLinear, has weights without a shape"),
    "flex_attention": (Flex, ROWS, r"Flex does not run .*\(in the model, a Flex\)"),
    "shapes that do not match": (
        lambda: Wrapped(nn.Linear(512, 512), lambda self, out: torch.cat([out, out[:, :3]])), ROWS,
        r"Wrapped does not run .*\(in the model, a Wrapped\)",
    ),
    "a batch that does not suit": (
        lambda: nn.Sequential(nn.Linear(7, 7)), ROWS, r"Sequential does not run .*\(in 0, a Linear\)"
    ),
}  # fmt: skip


def mean_square(model, batch):
    out = model(batch)
    return (out[0] if isinstance(out, tuple) else out).float().square().mean()


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", PREDICTED)
def test_predicted_as_a_real_step_is_watched(name, precision):
    make, batch = PREDICTED[name]
    model = make()
    found = predict_training_memory(
        model, mean_square, batch, precision=precision, caching_allocator=False, autocast_rules="cpu"
    )  # fmt: skip
    real = measure_step(model, mean_square, batch, torch.device("cpu"), precision=precision, optimizer="adamw")
    assert found.allocated_gb == pytest.approx(real.peak_gb, rel=0.005)
    assert found.flops == real.flops
    by_cuda = predict_training_memory(model, mean_square, batch, precision=precision)
    assert by_cuda.reserved_gb >= by_cuda.allocated_gb >= 0.9 * found.allocated_gb


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*deprecated", "ignore:Lazy modules")
@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name, caplog, capfd):
    """Only the error is printed, without torch's own tracebacks of operators that fail on fake tensors."""
    make, batch, message = REFUSED[name]
    with pytest.raises(UserError, match=message) as error:
        predict_training_memory(make(), mean_square, batch)
    assert error.value.hint
    with pytest.raises(UserError, match=message):
        create_optimal_config(
            [batch[0]] * 8, make(), 4, gpu="l4", loss=mean_square,
            batch=lambda items, seconds: torch.empty_like(batch, device="meta"),
        )  # fmt: skip
    assert (caplog.text, capfd.readouterr().err) == ("", "")
    assert not logging.getLogger(fake_tensor.__name__).filters


def test_a_recurrent_layer_is_measured_where_the_device_is():
    """Not on shapes, where its workspace has no size: two real steps, with all that the kernel keeps."""
    config, manager = create_optimal_config([LSTM[0]] * 8, nn.LSTM(512, 64), 4, loss=mean_square)
    assert "measured in a copy (what the kernel of" in config.reasons["predicted_peak_gb"]
    step = manager.memory_models.step(4, 0.0)
    gates = 4 * 100 * 4 * 64 * 4e-9  # Items, steps and four gates are kept for the backward pass.
    assert step.peak_gb > 4 * 100 * 512 * 4e-9 + gates


# ----------------------------------------------------------------------------------------------------------- CTC


def test_a_ctc_loss_with_labels_and_spec_augment():
    """The model's own loss, by the values of its labels; what SpecAugment masks is left out, and nothing is changed."""
    from tests.autoconfig.test_optimal import tiny

    model = tiny(layers=2, apply_spec_augment=True, mask_time_prob=0.5, mask_time_length=2, ctc_zero_infinity=True)
    labels = torch.randint(1, 8, (3, 20))
    labels[1, 5:] = -100
    batch = {"input_values": torch.randn(3, 32000), "labels": labels}

    def its_own(model, batch):
        return model(**batch).loss

    found = predict_training_memory(
        model, its_own, batch, precision="fp32", caching_allocator=False, autocast_rules="cpu"
    )  # fmt: skip
    assert model.config.apply_spec_augment
    real = measure_step(model, its_own, batch, torch.device("cpu"), precision="fp32", optimizer="adamw")
    assert found.allocated_gb == pytest.approx(real.peak_gb, rel=0.005)
    assert predict_training_memory(model, its_own, batch).allocated_gb > 0


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_a_ctc_loss_keeps_what_the_real_one_keeps(reduction):
    """Log-probabilities (T, B, C), and alpha and beta (B, T, 2 S + 1)."""
    T, B, C, S = 400, 8, 32, 60
    weight = nn.Linear(C, C, bias=False)
    targets = torch.randint(1, C, (B, S))

    def ctc(model, x):
        lengths = torch.full((B,), T), torch.full((B,), S)
        log_probs = F.log_softmax(model(x), -1)
        return F.ctc_loss(log_probs, targets, *lengths, reduction=reduction, zero_infinity=True).sum()

    found = predict_training_memory(
        weight, ctc, torch.randn(T, B, C), precision="fp32", caching_allocator=False, autocast_rules="cpu"
    )  # fmt: skip
    real = measure_step(weight, ctc, torch.randn(T, B, C), torch.device("cpu"), precision="fp32", optimizer="adamw")
    # Beta is the kernel's own, for the time of the backward pass: watching operators does not see it.
    assert found.allocated_gb == pytest.approx(real.peak_gb + 4e-9 * B * T * (2 * S + 1), rel=0.005)
