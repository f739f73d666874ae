"""Models that are hard to run on shapes: each is predicted as a real step on the CPU is watched, or refused by name."""

import logging
import re
import threading

import pytest
import torch
from torch import nn
from torch._subclasses import fake_tensor
from torch.nn import functional as F

from gputrain.autoconfig.optimal import create_optimal_config
from gputrain.errors import UserError
from gputrain.planner.memory.fake_runtime import on_fake_tensors
from gputrain.planner.memory.torch_model import measure_training_memory, predict_training_memory


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
    device = torch.device("cpu")
    real = measure_training_memory(model, mean_square, batch, device, precision=precision, optimizer="adamw")
    assert found.allocated_gb == pytest.approx(real.allocated_gb, rel=0.005)
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


class Shifted(nn.Module):
    """A linear layer whose outputs are looked up by a name that they do not have."""

    def __init__(self):
        super().__init__()
        self.inner = Wrapped(nn.Linear(512, 8), lambda self, out: {"logits": out}["tokens"])

    def forward(self, x):
        return self.inner(x)


def test_losses_and_models_that_cannot_be_trained_say_why():
    """On shapes, and in a real step on this machine, where errors of the model used to pass as they were."""
    model = nn.Linear(512, 8)
    lost = "Linear does not run on such a batch: the loss "
    cases = [
        (model, lambda model, batch: model(batch), re.escape(lost + "has the shape (16, 8), not one number")),
        (model, lambda model, batch: model(batch).detach().sum(), lost + "depends on no weight that is trained"),
        (model, lambda model, batch: None, lost + "is a NoneType, not a tensor of one number"),
        (model, lambda model, batch: 1.0, lost + "is a float, not a tensor of one number"),
        (nn.Linear(512, 8).requires_grad_(False), mean_square, "Linear has no weight that is trained"),
        (nn.ReLU(), mean_square, "ReLU has no weight that is trained"),
        (Shifted(), mean_square, r"Shifted does not run .*: KeyError: 'tokens' \(in inner, a Wrapped\)"),
    ]
    rows = torch.zeros(16, 512)

    def on_shapes(model, loss):
        return predict_training_memory(model, loss, rows)

    def on_this_machine(model, loss):
        return create_optimal_config([rows[0]] * 16, model, 16, loss=loss, batch=lambda items, seconds: rows)

    wrong = []
    for model, loss, message in cases:
        for way in (on_shapes, on_this_machine):
            try:
                way(model, loss)
                wrong.append((way.__name__, message, "no error"))
            except Exception as error:
                if not (isinstance(error, UserError) and re.match(message, error.message) and error.hint):
                    wrong.append((way.__name__, message, repr(error)))
    assert not wrong


def test_a_recurrent_layer_is_measured_where_the_device_is():
    """Not on shapes, where its workspace has no size: two real steps, with all that the kernel keeps."""
    config, manager = create_optimal_config([LSTM[0]] * 8, nn.LSTM(512, 64), 4, loss=mean_square)
    assert "measured in a copy (what the kernel of" in config.reasons["predicted_peak_gb"]
    step = manager.memory_models.step(4, 0.0)
    gates = 4 * 100 * 4 * 64 * 4e-9  # Items, steps and four gates are kept for the backward pass.
    assert step.allocated_gb > 4 * 100 * 512 * 4e-9 + gates


# --------------------------------------------------------------------------------------------------------- draws


class Branching(nn.Module):
    """Two layers, each of which is left out if `out(rate)` says so."""

    def __init__(self, out, rate=0.5):
        super().__init__()
        self.layers, self.out, self.rate = nn.ModuleList(nn.Linear(512, 512) for _ in range(2)), out, rate

    def forward(self, x):
        for layer in self.layers:
            if not self.out(self.rate):
                x = layer(x).relu()
        return x * self.layers[0].bias


DRAWN = {
    "rand": lambda rate: torch.rand([]) < rate,
    "rand of one element": lambda rate: torch.rand(1).item() < rate,
    "rand beside a tensor": lambda rate: torch.rand([]).lt(torch.tensor(rate)),
    "rand_like": lambda rate: torch.rand_like(torch.zeros(())) < rate,
    "uniform_": lambda rate: torch.empty([]).uniform_() < rate,
    "uniform_ between others": lambda rate: torch.empty(1).uniform_(1, 2) - 1 < rate,
}


def test_a_drawn_number_that_decides_a_branch_keeps_the_layer():
    """As transformers' models draw and compare, the step is the one with all layers."""
    options = {"precision": "fp32", "caching_allocator": False, "autocast_rules": "cpu"}
    real = measure_training_memory(
        Branching(lambda rate: False), mean_square, ROWS, torch.device("cpu"), precision="fp32", optimizer="adamw"
    )
    found = {
        (name, rate): predict_training_memory(Branching(out, rate), mean_square, ROWS, **options)
        for name, out in DRAWN.items() for rate in (0.0, 0.5)
    }  # fmt: skip
    expected = (real.flops, pytest.approx(real.allocated_gb, rel=0.005))
    assert {case: (step.flops, step.allocated_gb) for case, step in found.items()} == dict.fromkeys(found, expected)


def test_numbers_that_depend_on_data_are_refused_beside_drawn_ones():
    of_data = {
        "a product": lambda x: torch.rand([]) * x.mean() > 0.5,
        "a sum in place": lambda x: torch.rand([]).add_(x.mean()) > 0.5,
        "a write to a view": lambda x: _written(torch.rand([]), x.mean()) > 0.5,
        "one of many": lambda x: torch.rand(8)[0] > 0.5,
    }
    messages = {}
    for name, decide in of_data.items():
        model = Wrapped(nn.Linear(512, 512), lambda self, out, decide=decide: out if decide(out) else 2 * out)
        try:
            messages[name] = str(predict_training_memory(model, mean_square, ROWS))
        except UserError as error:
            messages[name] = error.message
    refused = "the model needs values, not shapes alone: aten._local_scalar_dense.default (in the model, a Wrapped)"
    assert messages == dict.fromkeys(of_data, refused)


def test_a_parameter_of_one_number_is_no_draw():
    """Layers initialise their biases with random numbers, and a bias that had a value could not change its layout."""
    with on_fake_tensors():
        layer = nn.Conv2d(4, 1, 3).to(memory_format=torch.channels_last)
        with pytest.raises(RuntimeError):
            layer.bias.item()


def _written(drawn, value):
    drawn.view(1).copy_(value[None])
    return drawn


WAV2VEC2 = {
    "num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 40,
    "conv_dim": (32,) * 7, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2,
}  # fmt: skip
SEQUENCES = {
    "encoder_layers": 2, "decoder_layers": 2, "d_model": 64, "encoder_attention_heads": 4, "vocab_size": 100,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "forced_eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
IDS = torch.arange(120).reshape(3, 40) % 90 + 4
WAVE = {"input_values": torch.zeros(3, 16000), "labels": IDS[:, :20] % 7 + 1}
WITH_LAYER_DROP = {
    "Wav2Vec2ForCTC": ("Wav2Vec2Config", WAV2VEC2, WAVE),
    "HubertForCTC": ("HubertConfig", WAV2VEC2, WAVE),
    "WavLMForCTC": ("WavLMConfig", WAV2VEC2, WAVE),
    "UniSpeechForCTC": ("UniSpeechConfig", WAV2VEC2, WAVE),
    "SEWForCTC": ("SEWConfig", {**WAV2VEC2, "conv_dim": (32,) * 13}, WAVE),
    "WhisperForConditionalGeneration": (
        "WhisperConfig", {**SEQUENCES, "max_source_positions": 100},
        {"input_features": torch.zeros(3, 80, 200), "labels": IDS},
    ),
    "BartForConditionalGeneration": (
        "BartConfig", SEQUENCES,
        {"input_ids": IDS, "labels": IDS, "attention_mask": IDS > 0, "decoder_attention_mask": IDS > 0},
    ),
}  # fmt: skip


@pytest.mark.slow
def test_layer_drop_of_transformers_is_predicted_as_a_step_without_it():
    """Some versions draw a tensor for each layer as soon as the model trains, also where the rate is 0."""
    import transformers

    def own_loss(model, batch):
        return model(**batch).loss

    def made(name: str, rate: float) -> nn.Module:
        config, sizes, _ = WITH_LAYER_DROP[name]
        drop = ("encoder_layerdrop", "decoder_layerdrop") if "d_model" in sizes else ("layerdrop",)
        # What SpecAugment masks is left out of a prediction.
        masks = {} if "d_model" in sizes else {"mask_time_prob": 0.0, "mask_feature_prob": 0.0}
        return getattr(transformers, name)(getattr(transformers, config)(**sizes, **masks, **dict.fromkeys(drop, rate)))

    ratios = {}
    for name, (_, _, batch) in WITH_LAYER_DROP.items():
        real = measure_training_memory(
            made(name, 0.0).train(), own_loss, batch, torch.device("cpu"), precision="fp32", optimizer="adamw"
        )
        found = predict_training_memory(
            made(name, 0.9).train(), own_loss, batch, precision="fp32", caching_allocator=False, autocast_rules="cpu"
        )  # fmt: skip
        ratios[name] = found.allocated_gb / real.allocated_gb
    assert ratios == dict.fromkeys(ratios, pytest.approx(1.0, rel=0.006))


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
    real = measure_training_memory(model, its_own, batch, torch.device("cpu"), precision="fp32", optimizer="adamw")
    assert found.allocated_gb == pytest.approx(real.allocated_gb, rel=0.005)
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
    scores, device = torch.randn(T, B, C), torch.device("cpu")
    real = measure_training_memory(weight, ctc, scores, device, precision="fp32", optimizer="adamw")
    # Beta is the kernel's own, for the time of the backward pass: watching operators does not see it.
    assert found.allocated_gb == pytest.approx(real.allocated_gb + 4e-9 * B * T * (2 * S + 1), rel=0.005)
