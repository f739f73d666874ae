"""Compares the losses with numpy and torch; they are zero at equality, finite in silence, equal for any split."""

import functools
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor.compile_fx import compile_fx

from gputrain.audio import losses
from gputrain.audio.config import Mel, Resolution
from gputrain.audio.mel import log_mel, stft_magnitudes
from gputrain.audio.weight_norm import WeightNormed, cached_weights, gradient_leaves
from gputrain.engine.recipe import BatchStat, ChainGradients, JointTerms, Term
from tests.tables import each_row, slow

MEL = Mel(sampling_rate=8000, num_mels=12, hop_size=50, win_size=200, n_fft=200, fmin=20.0, fmax=4000.0)
FINE, COARSE = Resolution(256, 64, 200), Resolution(512, 100, 512)


def waves(items=4, samples=1500, seed=0):
    """Returns generated and target waves of very different loudness."""
    generator = torch.Generator().manual_seed(seed)
    shape = (2, items, 1, samples)
    loudness = torch.logspace(-3, -0.5, items, dtype=torch.float64).view(-1, 1, 1)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * loudness).unbind()


class ToyDiscriminator(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Conv1d(1, 4, 15, 3, dtype=torch.float64)
        self.last = nn.Conv1d(4, 1, 7, dtype=torch.float64)

    def forward(self, wave_B1T):
        x = torch.tanh(self.first(wave_B1T))
        return self.last(x).flatten(1), [x, self.last(x)]


def discriminators():
    return {"one": [ToyDiscriminator(1), ToyDiscriminator(2)], "two": [ToyDiscriminator(3)]}


def terms_of(yielded):
    """Yields the terms, also those that are back-propagated together."""
    for one in yielded:
        yield from one.terms if isinstance(one, JointTerms) else [one] if isinstance(one, Term) else []


def summed(yielded):
    return sum(term.value * term.weight for term in terms_of(yielded) if not term.phase)


def exact_terms(made, target, items):
    """Yields the generator's terms that are computed in the precision of its waves."""
    yield from losses.adversarial_terms(DISCRIMINATORS, target, made, items, items)
    yield from losses.stft_terms([FINE, COARSE], made, target, items)


def mel_terms(made, target, items):
    yield losses.mel_term(MEL, made, log_mel(target.squeeze(1), MEL), items)


DISCRIMINATORS = discriminators()


def test_discriminators_least_squares_are_mean_squared_errors():
    made, real = waves()
    terms = list(losses.discriminator_terms(DISCRIMINATORS, real, made, 4, 4))
    assert [term.name for term in terms] == ["one", "one", "one", "one", "two", "two"]
    both = [real_term.value + fake_term.value for real_term, fake_term in zip(terms[::2], terms[1::2], strict=True)]
    for value, discriminator in zip(both, [*DISCRIMINATORS["one"], *DISCRIMINATORS["two"]], strict=True):
        ones, zeros = torch.ones_like(discriminator(real)[0]), torch.zeros_like(discriminator(made)[0])
        expected = 0.5 * (F.mse_loss(discriminator(real)[0], ones) + F.mse_loss(discriminator(made)[0], zeros))
        assert value.item() == pytest.approx(expected.item(), rel=1e-12)


def test_real_and_fake_items_are_counted_apart():
    """There are four real waves and six fake ones, two of them without a target."""
    made, real = waves(6)
    real = real[:4]
    terms = losses.discriminator_terms({"one": [DISCRIMINATORS["one"][0]]}, real, made, 4, 6)
    discriminator = DISCRIMINATORS["one"][0]
    expected = 0.5 * (((discriminator(real)[0] - 1) ** 2).mean() + (discriminator(made)[0] ** 2).mean())
    assert sum(term.value for term in terms).item() == pytest.approx(expected.item(), rel=1e-12)

    real_term, statistic, joint = losses.adversarial_terms({"one": [discriminator]}, real, made, 4, 6)
    fake_term, term = joint.terms
    assert (real_term.value + fake_term.value).item() == pytest.approx(expected.item(), rel=1e-12)
    features = [
        F.l1_loss(ours[:4], theirs) for ours, theirs in zip(discriminator(made)[1], discriminator(real)[1], strict=True)
    ]
    assert isinstance(statistic, BatchStat)
    assert statistic.value.item() == pytest.approx(2 * sum(features).item(), rel=1e-12)
    adversarial = F.mse_loss(discriminator(made)[0], torch.ones_like(discriminator(made)[0]))
    assert term.value.item() == pytest.approx((adversarial + 2 * sum(features)).item(), rel=1e-12)


def test_discriminators_terms_do_not_reach_the_generator():
    made, real = waves()
    made.requires_grad_()
    for term in losses.discriminator_terms(DISCRIMINATORS, real, made, 4, 4):
        term.value.backward()
    assert made.grad is None
    assert all(p.grad is not None for discriminator in DISCRIMINATORS["one"] for p in discriminator.parameters())


@pytest.mark.parametrize(("terms", "tolerance"), [(exact_terms, 1e-12), (mel_terms, 1e-6)])
@each_row([1, 1, 1, 1], [2, 2], [3, 1], [1, 3])
def test_any_split_adds_up(terms, tolerance, parts):
    made, target = waves()
    whole = made.clone().requires_grad_()
    expected = summed(terms(whole, target, 4))
    expected.backward()

    total, gradients = 0.0, []
    for ours, theirs in zip(made.split(parts), target.split(parts), strict=True):
        part = ours.clone().requires_grad_()
        loss = summed(terms(part, theirs, 4))
        loss.backward()
        total += loss.item()
        gradients.append(part.grad)
    assert total == pytest.approx(expected.item(), rel=tolerance)
    assert (torch.cat(gradients) - whole.grad).abs().max() < tolerance * whole.grad.abs().max()


def test_terms_one_by_one_are_one_sum():
    """Gradients summed on a detached wave and propagated through a generator equal those of one summed loss."""
    torch.manual_seed(0)
    _, target = waves()
    generator = nn.Conv1d(1, 1, 9, padding=4, dtype=torch.float64)
    summed(exact_terms(generator(target), target, 4)).backward()
    expected = [p.grad.clone() for p in generator.parameters()]

    generator.zero_grad()
    made = generator(target)
    leaf = made.detach().requires_grad_()
    for term in exact_terms(leaf, target, 4):
        if joined := [one.value * one.weight for one in terms_of([term])]:
            torch.autograd.backward(joined)
    carry = ChainGradients((made,), (leaf.grad,))
    torch.autograd.backward(carry.tensors, carry.gradients)
    for parameter, gradient in zip(generator.parameters(), expected, strict=True):
        assert parameter.grad.numpy() == pytest.approx(gradient.numpy(), rel=1e-10)


def reference_magnitudes(resolution, wave):
    """Computes magnitudes of frames centred on every hop of a wave padded by reflection, with a periodic Hann
    window."""
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(resolution.win_length) / resolution.win_length)
    before = (resolution.fft_size - resolution.win_length) // 2
    window = np.pad(window, (before, resolution.fft_size - resolution.win_length - before))
    padded = np.pad(wave, resolution.fft_size // 2, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(padded, resolution.fft_size)[:: resolution.hop_size]
    return np.abs(np.fft.rfft(frames * window)).T


@each_row(FINE, COARSE)
def test_stft_distance_is_that_of_numpys_spectra(resolution):
    made, target = waves()
    expected = []
    for pair in zip(made[1:, 0].numpy(), target[1:, 0].numpy(), strict=True):  # The first is quieter than -60 dB.
        ours, theirs = (np.maximum(reference_magnitudes(resolution, wave), 10**-3.5) for wave in pair)
        convergence = np.linalg.norm(theirs - ours) / np.linalg.norm(theirs)
        expected.append(convergence + np.abs(np.log(ours) - np.log(theirs)).mean())
    assert losses.stft_distance(resolution, made, target)[1:].numpy() == pytest.approx(expected, rel=1e-10)


@each_row(FINE, COARSE, Resolution(255, 60, 200))
def test_gradients_of_the_stft_distance_are_autograds(resolution):
    """Autograd's graph of the published formula, on torch's own transform. Parts of the waves are silent, so that some
    magnitudes are below the floor; an odd transform has no highest frequency."""

    def distance(wave_B1T, target_B1T):
        window = torch.hann_window(resolution.win_length, dtype=wave_B1T.dtype)
        sizes = (resolution.fft_size, resolution.hop_size, resolution.win_length)
        made_BNF, target_BNF = (
            torch.stft(one.squeeze(1), *sizes, window, return_complex=True).abs().clamp(min=10**-3.5)
            for one in (wave_B1T, target_B1T)
        )
        norms_B = [torch.linalg.vector_norm(one, dim=(1, 2)) for one in (made_BNF - target_BNF, target_BNF)]
        return norms_B[0] / norms_B[1] + (made_BNF.log() - target_BNF.log()).abs().mean(dim=(1, 2))

    weights_B = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    found = []
    for function in (functools.partial(losses.stft_distance, resolution), distance):
        made, target = (wave[1:].clone() for wave in waves())  # The first is quieter than -60 dB.
        made[0, 0, : made.shape[-1] // 2] = 0
        target[1, 0, : made.shape[-1] // 2] = 0
        made.requires_grad_()
        target.requires_grad_()
        (function(made, target) * weights_B).sum().backward()
        found.append((made.grad, target.grad))
    for ours, autograds in zip(*found, strict=True):
        assert autograds.count_nonzero() > 0
        torch.testing.assert_close(ours, autograds, rtol=1e-9, atol=1e-12 * autograds.abs().max().item())


@each_row(FINE, COARSE)
def test_magnitudes_are_numpys(resolution):
    wave, _ = waves()
    expected = [reference_magnitudes(resolution, one) for one in wave[:, 0].numpy()]
    assert stft_magnitudes(resolution, wave).numpy() == pytest.approx(np.stack(expected), rel=1e-9, abs=1e-12)


def test_stft_terms_are_the_mean_over_resolutions():
    made, target = waves()
    expected = sum(losses.stft_distance(resolution, made, target).mean() for resolution in (FINE, COARSE)) / 2
    terms = list(losses.stft_terms([FINE, COARSE], made, target, 4))
    assert sum(term.value.item() for term in terms) == pytest.approx(expected.item(), rel=1e-12)
    assert {(term.name, term.weight) for term in terms} == {("stft", 2.5)}


def test_silence_divides_as_noise_at_60_db_does():
    """Noise of that amplitude instead of silence has a spectral convergence of 1."""
    noise = 1e-3 * torch.randn(1, 1, 200_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    silence = torch.zeros_like(noise)
    spectra = (stft_magnitudes(COARSE, wave).clamp(min=10**-3.5) for wave in (noise, silence))
    logarithms = [spectrum.log() for spectrum in spectra]
    convergence = losses.stft_distance(COARSE, noise, silence) - (logarithms[0] - logarithms[1]).abs().mean()
    assert convergence.item() == pytest.approx(1, abs=0.05)


def test_mel_term_is_the_mean_absolute_difference():
    made, target = waves()
    ours, theirs = log_mel(made.squeeze(1), MEL), log_mel(target.squeeze(1), MEL)
    term = losses.mel_term(MEL, made, theirs, 4)
    assert (term.name, term.weight) == ("mel", 45.0)
    assert term.value.item() == pytest.approx(np.abs(ours.numpy() - theirs.numpy()).mean(), rel=1e-12)


def test_pitch_shift_term_teaches_both():
    once, twice = (wave.clone().requires_grad_() for wave in waves())
    term = losses.pitch_shift_term(twice, once, 4)
    assert term.value.item() == pytest.approx((twice - once).abs().mean().item(), rel=1e-12)
    term.value.backward()
    assert twice.grad.numpy() == pytest.approx((twice - once).sign().detach().numpy() / once.numel(), rel=1e-12)
    assert (once.grad == -twice.grad).all()


def test_losses_are_zero_at_equality():
    made, _ = waves()
    made.requires_grad_()
    assert losses.stft_distance(FINE, made, made.detach()).tolist() == [0, 0, 0, 0]
    mel = log_mel(made.detach().squeeze(1), MEL)
    for term in (
        losses.mel_term(MEL, made, mel, 4),
        losses.pitch_shift_term(made, made.detach(), 4),
        *losses.stft_terms([FINE, COARSE], made, made.detach(), 4),
    ):
        assert term.value == 0
        term.value.backward()
    assert made.grad.count_nonzero() == 0
    features = DISCRIMINATORS["one"][0](made)[1]
    assert losses.feature_distance(features, features).tolist() == [0, 0, 0, 0]


@each_row((0, 0), (0, 1), (1, 0))
def test_gradients_are_finite_in_silence(made_level, target_level):
    made, target = (wave.float() * level for wave, level in zip(waves(), (made_level, target_level), strict=True))
    made.requires_grad_()
    value = 2**20 * summed(losses.stft_terms([FINE, COARSE], made, target, 4))  # As the scaled loss of fp16.
    value.backward()
    assert value.isfinite()
    assert made.grad.isfinite().all()


def test_absolute_difference_has_torchs_gradients_and_keeps_a_byte_a_value():
    made, target = (torch.randn(3, 5, 7, dtype=torch.float64, requires_grad=True) for _ in range(2))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.nbytes) or x, lambda x: x):
        value_B = losses.absolute_difference(made, target)
    assert kept == [made.numel()]
    (value_B * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    weights = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64).view(-1, 1, 1) / 35
    for leaf, other in ((made, target), (target, made)):
        assert leaf.grad.numpy() == pytest.approx((weights * (leaf - other).sign()).detach().numpy(), rel=1e-6)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_compiled_differences_of_features_are_the_same(layout):
    """They are summed in another order, of channels that are last in memory or of positions."""
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(0)
    pair = torch.randn(2, 3, 4, 6, 5, generator=generator, dtype=torch.float64).unbind()
    made, target = (one.to(memory_format=layout).requires_grad_() for one in pair)
    found = []
    for function in (losses.absolute_difference, torch.compile(losses.absolute_difference, backend="aot_eager")):
        value_B = function(made, target)
        found += [value_B, *torch.autograd.grad(value_B @ torch.arange(1.0, 4.0).double(), (made, target))]
    for value, expected in zip(found[3:], found[:3], strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-14)


def test_features_in_16_bit_are_compared_in_32():
    """Neither 1 - 0.1 nor its mean over 70000 values is exact in bfloat16."""
    made, target = torch.full((2, 70_000), 0.1).bfloat16(), torch.ones(2, 70_000).bfloat16()
    made.requires_grad_()
    value_B = losses.absolute_difference(made, target)
    assert value_B.dtype == torch.float32
    assert value_B.tolist() == pytest.approx([1 - made[0, 0].item()] * 2, rel=1e-5)
    value_B.sum().backward()
    assert made.grad.dtype == torch.bfloat16
    assert made.grad.float().unique().item() == pytest.approx(-1 / 70_000, rel=1e-2)


def test_nothing_of_a_discriminator_outlives_its_term():
    """Otherwise the features of one pass would be in memory during the next."""

    class Traced(ToyDiscriminator):
        def forward(self, wave_B1T):
            logits, features = super().forward(wave_B1T)
            seen.extend(weakref.ref(x) for x in (logits, *features))
            return logits, features

    made, real = waves()
    made.requires_grad_()
    discriminators = {"one": [Traced(1), Traced(2)]}
    for passes, terms in (
        (2, losses.adversarial_terms(discriminators, real, made, 4, 4)),
        (2, losses.discriminator_terms(discriminators, real, made, 4, 4)),
    ):
        seen = []
        for term in terms:
            if isinstance(term, JointTerms):
                torch.autograd.backward([one.value for one in term.terms])
                assert [x() for x in seen] == [None] * len(seen)
            elif isinstance(term, Term):
                torch.autograd.backward(term.value)
                assert [x() for x in seen] == [None] * len(seen)
        assert len(seen) == 2 * passes * 3


class TwoWeights(nn.Module):
    """A discriminator with a weight that is computed once, and one that is not."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first = WeightNormed(nn.Conv1d(1, 4, 15, 3, dtype=torch.float64))
        self.last = nn.Conv1d(4, 1, 7, dtype=torch.float64)

    def forward(self, wave_B1T):
        x = F.leaky_relu(self.first(wave_B1T), 0.1)
        logits = self.last(x)
        return logits.flatten(1), [x, logits]


@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("compiled", [False, slow(True)])
def test_made_waves_take_one_forward_pass(compiled, learns):
    """Losses and gradients are those of separate passes, the discriminator's scaled by 3 (as in fp16, where each phase
    has its own scale); inductor's graphs have each convolution once, and gradients of it only where they are needed."""
    convolutions = []

    def inner(graph, inputs, **named):
        calls = [node for node in graph.graph.nodes if node.op == "call_function"]
        convolutions.append(sum("convolution" in str(node.target) for node in calls))
        return graph

    torch._dynamo.reset()
    function = losses.generated_pass
    if compiled:
        function = torch.compile(function, backend=functools.partial(compile_fx, inner_compile=inner), fullgraph=True)
    discriminator, (wave, real) = TwoWeights().requires_grad_(learns), waves()
    found = []
    for at_once in (True, False):
        made = wave.clone().requires_grad_()
        with cached_weights(discriminator):
            _, targets = losses.real_pass(discriminator, real)
            if at_once:
                fake, *of_generator = function(discriminator, made, *targets)
            else:
                fake = losses.fake_pass(discriminator, made.detach())
                of_generator = losses.generator_pass(discriminator, made, *targets)
            value, leaves = sum(of_generator), [*gradient_leaves(discriminator), *discriminator.parameters()]
            if at_once:
                torch.autograd.backward([3 * fake, value] if fake.requires_grad else [value])
            else:
                (made.grad,) = torch.autograd.grad(value, made, retain_graph=True)
                if learns:
                    torch.autograd.backward(3 * fake, inputs=gradient_leaves(discriminator))
        found.append([fake.detach(), *(one.detach() for one in of_generator), made.grad])
        found[-1] += [parameter.grad for parameter in discriminator.parameters() if learns]
        assert learns or all(leaf.grad is None for leaf in leaves)
        discriminator.zero_grad()
    for ours, expected in zip(*found, strict=True):
        assert expected.count_nonzero() > 0
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-14)
    if compiled:
        forward, *backward = convolutions
        assert forward == 2
        assert backward == [2 + 2 * learns]


def test_autocast_changes_no_loss_of_waves():
    made, target = (wave.float() for wave in waves())
    target_mel = log_mel(target.squeeze(1), MEL)

    def value():
        return summed([losses.mel_term(MEL, made, target_mel, 4), *losses.stft_terms([FINE, COARSE], made, target, 4)])

    plain = value()
    with torch.autocast("cpu", torch.bfloat16):
        cast = value()
    assert cast.dtype == torch.float32
    assert cast == plain
