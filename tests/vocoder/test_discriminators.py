"""Discriminators: openvpi's names, sizes and numbers; any length; no item knows of another; one by one as all at
once."""

import itertools
from functools import partial

import pytest
import torch
from torch._inductor.compile_fx import compile_fx

from gputrain.audio.losses import DiscriminatorPasses, adversarial_terms, real_pass
from gputrain.audio.weight_norm import SpectralNormed
from gputrain.engine.recipe import JointTerms, Term
from gputrain.vocoder import discriminators
from gputrain.vocoder.config import Discriminators
from gputrain.vocoder.discriminators import KINDS
from tests.tables import each_row

SEVEN = Discriminators(discriminator_periods=(2, 3, 5, 7, 11, 17, 23))
SMALL = Discriminators(
    discriminator_periods=(2, 3),
    msd_channels=16,
    mpd_channels=2,
    fast_mpd_init_channel=2,
    fast_mpd_strides=(4, 2, 2),
    fast_mrd_init_channel=2,
    fast_mrd_fft_sizes=(128, 64),
    fast_mrd_hop_sizes=(16, 8),
    fast_mrd_win_lengths=(128, 64),
    mrd_channels=4,
    mrd_fft_sizes=(128, 64),
    mrd_hop_sizes=(30, 12),
    mrd_win_lengths=(100, 48),
)
PRODUCTS = ("convolution", "mm", "addmm", "bmm", "baddbmm")
SAMPLES = 500  # It is not a multiple of any period, stride or hop.
KIND = pytest.mark.parametrize("kind", KINDS)


def small(kind, dtype=torch.float64):
    torch.manual_seed(0)
    return KINDS[kind](SMALL).to(dtype)


def waves(items=4, seed=0, samples=SAMPLES):
    generator = torch.Generator().manual_seed(seed)
    return 0.3 * torch.randn(items, 1, samples, generator=generator, dtype=torch.float64)


@each_row(
    ("msd", 29_618_821),
    ("mpd", 57_548_078),
    ("mrd", 280_902),
    ("fast_mrd", 1_228_803),
    ("fast_mpd", 9_945_383),
)
def test_parameters(kind, parameters):
    with torch.device("meta"):
        assert sum(p.numel() for p in KINDS[kind](SEVEN).parameters()) == parameters


@pytest.mark.parametrize("kind", ["mpd", "mrd"])
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_the_memory_format_of_the_weights_is_that_of_every_feature(kind, layout):
    """The input of one channel has the layout of both formats."""
    plain, placed = small(kind), small(kind).to(memory_format=layout)
    for one, other in zip(plain, placed, strict=True):
        (_, expected), (_, features) = one(waves()), other(waves())
        for feature, reference in zip(features[:-1], expected[:-1], strict=True):  # The last one has one channel.
            assert feature.is_contiguous(memory_format=layout)
            assert torch.allclose(feature, reference, rtol=1e-9, atol=1e-9)


@each_row(
    (
        "msd",
        80,
        {
            "discriminators.0.convs.2.weight_orig": (256, 8, 41),
            "discriminators.0.convs.2.weight_u": (256,),
            "discriminators.0.convs.2.weight_v": (328,),
            "discriminators.2.convs.6.weight_g": (1024, 1, 1),
            "discriminators.2.conv_post.weight_v": (1, 1024, 3),
        },
    ),
    (
        "mpd",
        126,
        {
            "discriminators.6.convs.1.weight_v": (128, 32, 5, 1),
            "discriminators.6.convs.1.weight_g": (128, 1, 1, 1),
            "discriminators.0.conv_post.bias": (1,),
        },
    ),
    (
        "fast_mpd",
        196,
        {
            "discriminators.0.pre.weight": (32, 4),
            "discriminators.3.residual_layers.0.net.1.weight": (32, 32, 11),
            "discriminators.3.residual_layers.1.net.1.weight": (128, 1, 11),
            "discriminators.6.residual_layers.2.net.7.bias": (512,),
        },
    ),
    (
        "fast_mrd",
        60,
        {
            "discriminators.1.window": (1024,),
            "discriminators.2.freq_coords": (1025, 1, 1),
            "discriminators.0.freq.weight": (32, 1),
            "discriminators.2.layers.2.net.1.weight": (256, 128, 3, 3),
            "discriminators.2.layers.2.net.4.weight": (128, 128),
        },
    ),
)
def test_names_and_shapes_are_openvpis(kind, tensors, samples):
    with torch.device("meta"):
        state = KINDS[kind](SEVEN).state_dict()
    assert len(state) == tensors
    assert {name: tuple(state[name].shape) for name in samples} == samples


def fill(discriminator):
    """Sets weights that are the same on every machine."""
    for number, parameter in enumerate(discriminator.parameters()):
        k = torch.arange(parameter.numel(), dtype=torch.float64)
        values = 2 * (4e4 * torch.sin(k + number)).remainder(1) - 1
        scale = 2 * parameter[0].numel() ** -0.5 if parameter.dim() > 1 else 0.01
        parameter.data.copy_((values * scale).view_as(parameter))
    for module in discriminator.modules():
        if isinstance(module, SpectralNormed):
            module.iterate(30)
        elif hasattr(module, "weight_g"):
            module.weight_g.data.fill_(2)


# Kind and discriminator: mean and deviation of the logits, mean magnitude of every feature.
GOLDEN = {
    ("msd", 0): (
        -9.91268e-05,
        0.000828308,
        [0.0254389, 0.014042, 0.00591224, 0.0033979, 0.00308966, 0.0029573, 0.00305133, 0.000507848],
    ),
    ("msd", 2): (0.845735, 0.961657, [0.191878, 0.269616, 0.358362, 0.479216, 0.604157, 0.578254, 0.808624, 0.958093]),
    ("mpd", 0): (2.67462, 1.57104, [0.169019, 0.243767, 0.362367, 0.479787, 0.619298, 2.70778]),
    ("fast_mpd", 0): (-0.2008, 1.17435, [0.755157, 0.754375]),
    ("fast_mrd", 1): (-1.6092, 0.729081, [0.825036, 0.826507]),
}


@pytest.mark.parametrize(("kind", "member"), GOLDEN)
def test_logits_and_features_are_openvpis(kind, member):
    """Compares with values of openvpi/SingingVocoders (4d0889c) for these weights."""
    torch.manual_seed(0)
    discriminator = KINDS[kind](Discriminators(discriminator_periods=(3,)))
    discriminator = discriminator.discriminators[member]
    fill(discriminator)
    t = torch.arange(3 * 64 * 16 if kind.endswith("mpd") else 4096)
    wave_B1T = (0.3 * torch.sin(0.02 * t + 1e-5 * t * t) + 0.1 * torch.cos(0.9 * t)).view(1, 1, -1)
    with torch.no_grad():
        logits, features = discriminator(wave_B1T)
    logit, deviation, feature_sizes = GOLDEN[kind, member]
    assert [logits.mean().item(), logits.std().item()] == pytest.approx([logit, deviation], rel=1e-3)
    assert [feature.abs().mean().item() for feature in features] == pytest.approx(feature_sizes, rel=1e-3)


@each_row(*itertools.product(KINDS, [300, 512, 777]))
def test_any_length_is_accepted(kind, samples):
    for discriminator in small(kind):
        logits, features = discriminator(waves(2, samples=samples))
        assert len(logits) == 2
        assert all(len(feature) == 2 for feature in features)
        assert torch.stack([x.abs().sum() for x in (logits, *features)]).min() > 0


@each_row(*KINDS)
def test_the_last_sample_matters(kind):
    """Lengths that do not divide are padded, not truncated."""
    for discriminator in small(kind):
        wave = waves(1, samples=SAMPLES).requires_grad_()
        discriminator(wave)[0].square().sum().backward()
        assert wave.grad[0, 0, -5:].abs().min() > 0


def back_propagated(kind, discriminators, real, made, items):
    """Yields every term of both phases, back-propagated as in the engine."""
    for term in adversarial_terms({kind: discriminators}, real, made, items, items):
        if isinstance(term, JointTerms):
            torch.autograd.backward([one.value for one in term.terms])
            yield from term.terms
        elif isinstance(term, Term):
            torch.autograd.backward(term.value)
            yield term


def gradients(discriminators, *leaves):
    return torch.cat([p.grad.flatten() for p in [*discriminators.parameters(), *leaves] if p.grad is not None])


@KIND
@pytest.mark.parametrize("parts", [[1, 1, 1, 1], [3, 1]])
def test_any_split_gives_the_same_gradients(kind, parts):
    discriminators, real, made = small(kind), waves(), waves(seed=1).requires_grad_()
    expected = sum(term.value for term in back_propagated(kind, discriminators, real, made, 4))
    whole = gradients(discriminators, made)
    discriminators.zero_grad()
    made.grad = None

    total, seen = 0.0, []
    for real_part, made_part in zip(real.split(parts), made.split(parts), strict=True):
        part = made_part.detach().requires_grad_()
        total += sum(term.value.item() for term in back_propagated(kind, discriminators, real_part, part, 4))
        seen.append(part.grad)
    made.grad = torch.cat(seen)
    assert total == pytest.approx(expected.item(), rel=1e-12)
    assert (gradients(discriminators, made) - whole).abs().max() < 1e-10 * whole.abs().max()


@KIND
def test_one_by_one_is_one_sum(kind):
    """Each discriminator's terms back-propagated as they come, onto the discriminator and a detached wave: one sum's
    gradients."""
    discriminators, real, made = small(kind), waves(), waves(seed=1).requires_grad_()
    ours, theirs = 0.0, 0.0
    for discriminator in discriminators:
        (logits, features), (real_logits, targets) = discriminator(made), discriminator(real)
        theirs += 0.5 * ((real_logits - 1).square().mean() + discriminator(made.detach())[0].square().mean())
        matching = sum((one - two.detach()).abs().mean() for one, two in zip(features, targets, strict=True))
        ours += (logits - 1).square().mean() + 2 * matching
    expected = torch.cat(
        [g.flatten() for g in torch.autograd.grad(theirs, [*discriminators.parameters()], retain_graph=True)]
    )
    expected = torch.cat([expected, torch.autograd.grad(ours, made)[0].flatten()])

    terms = list(back_propagated(kind, discriminators, real, made, 4))
    assert [term.phase for term in terms] == ["discriminator", "discriminator", ""] * len(discriminators)
    assert sum(t.value.item() for t in terms if t.phase) == pytest.approx(theirs.item(), rel=1e-12)
    assert sum(t.value.item() for t in terms if not t.phase) == pytest.approx(ours.item(), rel=1e-12)
    assert (gradients(discriminators, made) - expected).abs().max() < 1e-10 * expected.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fast_mrd", "fast_mpd"])  # These kinds have linear layers.
def test_compiled_discriminators_make_one_forward_pass_over_generated_waves(kind):
    """The graphs of inductor have as many convolutions and products as a pass over real waves, although frozen weights
    would have linear layers choose other products."""
    counts = []

    def inner(graph, inputs, **named):
        names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        counts.append([sum(f"aten.{product}.default" in name for name in names) for product in PRODUCTS])
        return graph

    torch._dynamo.reset()
    compile = partial(torch.compile, backend=partial(compile_fx, inner_compile=inner), fullgraph=True)
    passes, discriminator = DiscriminatorPasses.compiled(compile), next(iter(small(kind)))
    _, targets = compile(real_pass)(discriminator, waves())
    passes.made(discriminator, waves(seed=1).requires_grad_(), *targets)
    of_real, of_made = counts
    assert sum(of_real) >= 5
    assert of_made == of_real


def test_gate_has_the_gradient_of_its_formula():
    x = torch.randn(3, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    value, gate = x.chunk(2, dim=-1)
    expected = value / (1 + value.abs()) * (gate / (1 + gate.abs()))
    torch.testing.assert_close(discriminators.gated(x), expected, rtol=1e-14, atol=1e-15)
    assert torch.autograd.gradcheck(discriminators.gated, (x,))


def test_unit_power_is_its_formula_and_leaves_silence_alone():
    x = torch.randn(3, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = x.numpy() / (x.numpy() ** 2).mean(axis=-1, keepdims=True) ** 0.5
    assert discriminators.unit_power(x).numpy() == pytest.approx(expected, rel=1e-5)
    silence = torch.zeros(2, 8, requires_grad=True)
    made = discriminators.unit_power(silence)
    made.sum().backward()
    assert made.abs().max() == 0
    assert silence.grad.isfinite().all()


@each_row(*KINDS)
def test_silence_has_finite_gradients(kind):
    for discriminator in small(kind, torch.float32):
        wave = torch.zeros(2, 1, SAMPLES, requires_grad=True)
        discriminator(wave)[0].square().sum().backward()
        assert wave.grad.isfinite().all()
        assert all(p.grad is None or p.grad.isfinite().all() for p in discriminator.parameters())


@each_row(*KINDS)
def test_16_bit_autocast_is_near(kind):
    for discriminator in small(kind, torch.float32):
        wave = waves().float()
        expected, _ = discriminator(wave)
        with torch.autocast("cpu", torch.bfloat16):
            logits, features = discriminator(wave)
        assert {logits.dtype, *(feature.dtype for feature in features)} == {torch.bfloat16}
        assert (logits - expected).abs().max() < 0.05 * expected.abs().max()
