"""Losses of generated waves: adversarial loss, feature matching, log-mel and STFT distances.

Shapes: B items, 1 channel, T samples, M mel bands, F frames, N frequencies. Waves are in [-1, 1].

Every loss is a value per item, in fp32 at least even under autocast, and every term is the sum over its items divided
by the items of the global batch, so that micro-batches add up to the batch. With `made_B1T` a detached copy that
requires a gradient, each term can be back-propagated before the next is computed; the gradient summed on the copy is
then propagated through the generator once. So the graphs of two discriminators are never in memory together.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gputrain.audio.config import Mel, Resolution
from gputrain.audio.discriminators import ConvolutionalDiscriminator
from gputrain.audio.mel import log_mel, stft_magnitudes
from gputrain.audio.weight_norm import detached_weights, gradient_leaves
from gputrain.engine.recipe import BatchStat, JointTerms, Term, at_least_fp32, per_item

FEATURE_WEIGHT = 2.0  # Weight of feature matching: Kong et al. 2020 (HiFi-GAN), equation 8.
MEL_WEIGHT = 45.0  # From the same equation; the option lab_aux_melloss.
# One discriminator maps waves B1T to logits B... and features B....
Discriminator = Callable[[Tensor], tuple[Tensor, list[Tensor]]]
STFT_WEIGHT = 2.5  # The option lab_aux_stftloss.
PITCH_SHIFT_WEIGHT = 30.0  # openvpi's weight.
QUIETEST_MAGNITUDE = 10**-3.5  # Lower magnitudes are raised to this, so that silence has a logarithm.
QUIETEST_AMPLITUDE = 1e-3  # Amplitude (-60 dB) of the noise that bounds the divisor in silence.


def discriminator_terms(
    discriminators: Mapping[str, Iterable[nn.Module]],
    real_B1T: Tensor,
    fake_B1T: Tensor,
    real_items: float,
    fake_items: float,
    *,
    passes: "DiscriminatorPasses | None" = None,
) -> Iterator[Term]:
    """Yields the terms that train the discriminators alone, under the name of their kind.

    There may be more fake waves than real ones; `real_items` and `fake_items` count those of the global batch.
    `passes` are those of compiled discriminators.
    """
    passes, fake_B1T = passes or UNCOMPILED_PASSES, fake_B1T.detach()
    for kind, members in discriminators.items():
        for discriminator in members:
            real, _ = passes.real(discriminator, real_B1T)
            yield Term(kind, real / real_items, phase="discriminator")
            yield Term(kind, passes.fake(discriminator, fake_B1T) / fake_items, phase="discriminator")


def adversarial_terms(
    discriminators: Mapping[str, Iterable[nn.Module]],
    real_B1T: Tensor,
    made_B1T: Tensor,
    real_items: float,
    made_items: float,
    *,
    passes: "DiscriminatorPasses | None" = None,
) -> Iterator[Term | JointTerms | BatchStat]:
    """Yields the terms that train the discriminators and the generator in one step group: terms of the phase
    "discriminator" and of the generator's, under the name of a discriminator's kind, and the part of feature matching
    in the latter.

    Both phases use the same waves and the same discriminators, so a pass over real waves also gives the targets of
    feature matching, and one forward pass over generated waves gives the losses of both (`generated_pass`). They are
    back-propagated together, into the discriminator's weights and into the waves, which are a leaf, before the next
    discriminator runs.

    The real waves are targets of the first generated waves; the others (shifted in pitch) have no target.
    `real_items` and `made_items` count those of the global batch.
    """
    passes = passes or UNCOMPILED_PASSES
    for kind, members in discriminators.items():
        for discriminator in members:
            real, targets = passes.real(discriminator, real_B1T)
            yield Term(kind, real / real_items, phase="discriminator")
            fake, adversarial, matching = passes.made(discriminator, made_B1T, *targets)
            del targets  # They are not needed in memory together with the graph.
            of_fake = Term(kind, fake / made_items, phase="discriminator")
            matching = FEATURE_WEIGHT * matching / real_items
            yield BatchStat(f"{kind}_features", matching.detach())
            yield JointTerms((of_fake, Term(kind, adversarial / made_items + matching)))


def real_loss(logits: Tensor) -> Tensor:
    """Returns the discriminator's loss of real waves, B: least squares (Mao et al. 2017, a = 0, b = c = 1)."""
    return 0.5 * per_item((at_least_fp32(logits) - 1) ** 2)


def fake_loss(logits: Tensor) -> Tensor:
    """Returns the discriminator's loss of generated waves, B."""
    return 0.5 * per_item(at_least_fp32(logits) ** 2)


def generator_loss(logits: Tensor) -> Tensor:
    """Returns the generator's adversarial loss, B."""
    return per_item((at_least_fp32(logits) - 1) ** 2)


def real_pass(discriminator: Discriminator, real_B1T: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Returns the discriminator's loss of real waves, summed over items, and their features without a graph."""
    logits, features = discriminator(real_B1T)
    return real_loss(logits).sum(), [feature.detach() for feature in features]


def fake_pass(discriminator: Discriminator, made_B1T: Tensor) -> Tensor:
    """Returns the discriminator's loss of generated waves, summed over items."""
    return fake_loss(discriminator(made_B1T)[0]).sum()


def generator_pass(discriminator: Discriminator, made_B1T: Tensor, *targets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the generator's adversarial loss and feature matching, each summed over items."""
    _, adversarial_B, matching_B = losses_of_generated_waves(discriminator, made_B1T, targets)
    return adversarial_B.sum(), matching_B.sum()


def generated_pass(discriminator: nn.Module, made_B1T: Tensor, *targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the losses of `fake_pass` and `generator_pass` from one forward pass. The gradients of the first reach
    the discriminator's weights alone, those of the others the waves alone; they must be computed together, as the
    backward pass of a compiled function runs only once."""
    if torch.compiler.is_compiling():
        # The compiler finds that both forward passes are the same, and keeps one. It cannot do so with two calls.
        fake = fake_pass(discriminator, made_B1T.detach())
        known = functools.partial(torch.func.functional_call, discriminator, detached_weights(discriminator))
        return fake, *generator_pass(known, made_B1T, *targets)
    return _GeneratedLosses.apply(made_B1T, discriminator, targets)  # type: ignore[no-untyped-call, no-any-return]


class _GeneratedLosses(torch.autograd.Function):
    """Computes `generated_pass` as it runs uncompiled: one forward pass that is back-propagated twice."""

    @staticmethod
    def forward(
        ctx: Any, made_B1T: Tensor, discriminator: nn.Module, targets: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.wave_B1T, ctx.leaves = made_B1T.detach().requires_grad_(), gradient_leaves(discriminator)
        with torch.enable_grad():
            fake, adversarial, matching = (
                loss_B.sum() for loss_B in losses_of_generated_waves(discriminator, ctx.wave_B1T, targets)
            )
        ctx.losses = fake, adversarial, matching
        return fake.detach(), adversarial.detach(), matching.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (fake, *others), ctx.losses = ctx.losses, None
        if ctx.leaves:  # All of it may be frozen.
            torch.autograd.backward([fake], [gradients[0]], inputs=ctx.leaves, retain_graph=True)
        (gradient_B1T,) = torch.autograd.grad(others, ctx.wave_B1T, gradients[1:])
        return gradient_B1T, None, None


class DiscriminatorPasses(NamedTuple):
    """The passes of compiled discriminators, each compiled together with its losses. That of real waves through
    convolutions is not: it would gain 2 % of a step, for a quarter of the compiling (docs/evidence/h200.md)."""

    real: Callable[..., tuple[Tensor, list[Tensor]]]
    fake: Callable[..., Tensor]
    made: Callable[..., tuple[Tensor, Tensor, Tensor]]

    @classmethod
    def compiled(cls, compile: Callable[..., Any]) -> "DiscriminatorPasses":
        compiled = compile(real_pass)

        def real(discriminator: Discriminator, real_B1T: Tensor) -> tuple[Tensor, list[Tensor]]:
            by_convolutions = isinstance(discriminator, ConvolutionalDiscriminator)
            return (real_pass if by_convolutions else compiled)(discriminator, real_B1T)

        return cls(real, compile(fake_pass), compile(generated_pass))


UNCOMPILED_PASSES = DiscriminatorPasses(real_pass, fake_pass, generated_pass)


def losses_of_generated_waves(
    discriminator: Discriminator, made_B1T: Tensor, targets: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns three losses of each item, B: the discriminator's, the adversarial loss of the generator (Mao et al.
    2017), and feature matching. No features outlive the call outside the graph."""
    logits, features = discriminator(made_B1T)
    return (
        fake_loss(logits),
        generator_loss(logits),
        feature_distance(features, targets),
    )


def feature_distance(made: Sequence[Tensor], target: Sequence[Tensor]) -> Tensor:
    """Returns the mean absolute differences of features B..., summed over layers, B (Larsen et al. 2016; Kumar et al.
    2019, equation 4). Generated features beyond the items of `target` are left out."""
    if len(made[0]) > len(target[0]):  # Autograd would copy the gradient of a slice of all items too.
        made = [ours[: len(target[0])] for ours in made]
    return torch.stack([absolute_difference(*pair) for pair in zip(made, target, strict=True)]).sum(dim=0)


def mel_term(mel: Mel, made_B1T: Tensor, target_BMF: Tensor, items: float, weight: float = MEL_WEIGHT) -> Term:
    """Returns the mean absolute difference of log-mels. The target is `log_mel` of the real wave, computed once."""
    made_BMF = log_mel(made_B1T.squeeze(1), mel)
    return Term("mel", absolute_difference(made_BMF, target_BMF).sum() / items, weight)


def absolute_difference(made: Tensor, target: Tensor) -> Tensor:
    """Returns the mean of |made - target| by item, B, in fp32 at least. Its graph holds one byte a value."""
    return _AbsoluteDifference.apply(made, target)  # type: ignore[no-untyped-call, no-any-return]


class _AbsoluteDifference(torch.autograd.Function):
    """Saves only the sign of the difference, which is all that the gradient needs. abs() would save the difference in
    fp32: for features in 16 bits, twice the memory of the features themselves."""

    @staticmethod
    def forward(ctx: Any, made: Tensor, target: Tensor) -> Tensor:
        difference = at_least_fp32(made) - at_least_fp32(target)
        ctx.save_for_backward(difference.sign().to(torch.int8))
        ctx.dtypes = made.dtype, target.dtype
        size = difference.abs()
        if torch.compiler.is_compiling() and size.ndim > 2:
            # A compiler sums over what is contiguous in memory in the kernel that computes the features.
            size = size.mean(dim=1) if size.stride(1) == 1 else size.flatten(2).mean(dim=2)
        return per_item(size)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (sign,) = ctx.saved_tensors
        share_B = gradients[0] * len(sign) / sign.numel()
        gradient = sign * share_B.view(-1, *[1] * (sign.dim() - 1))
        made, target = ctx.needs_input_grad
        return gradient.to(ctx.dtypes[0]) if made else None, -gradient.to(ctx.dtypes[1]) if target else None


def stft_terms(
    resolutions: Sequence[Resolution], made_B1T: Tensor, target_B1T: Tensor, items: float, weight: float = STFT_WEIGHT
) -> Iterator[Term]:
    """Yields one term for each resolution; they add up to the mean of `stft_distance` over resolutions."""
    for resolution in resolutions:
        distance_B = stft_distance(resolution, made_B1T, target_B1T)
        yield Term("stft", distance_B.sum() / (items * len(resolutions)), weight)


def stft_distance(resolution: Resolution, made_B1T: Tensor, target_B1T: Tensor) -> Tensor:
    """Returns spectral convergence plus log-magnitude distance, B (Yamamoto et al. 2020, equations 4 and 5).

    Spectral convergence is a ratio of two norms, often taken over a whole batch, which would couple its items. Here
    every item has its own ratio, so that a batch can be split. A silent item would then be divided by almost zero, so
    no divisor is less than that of noise at -60 dB.
    """
    made_BNF, target_BNF = (
        stft_magnitudes(resolution, wave_B1T).clamp(min=QUIETEST_MAGNITUDE) for wave_B1T in (made_B1T, target_B1T)
    )
    # White noise of amplitude a has magnitudes of root mean square a |window|, and |Hann|^2 = 3/8 of its length.
    quietest = QUIETEST_AMPLITUDE * (3 / 8 * resolution.win_length * target_BNF[0].numel()) ** 0.5
    norm_B, target_B = (
        torch.linalg.vector_norm(magnitudes_BNF, dim=(1, 2)) for magnitudes_BNF in (made_BNF - target_BNF, target_BNF)
    )
    logarithms_B = (made_BNF / target_BNF).log().abs().mean(dim=(1, 2))
    distance_B: Tensor = norm_B / target_B.clamp(min=quietest) + logarithms_B
    return distance_B


def pitch_shift_term(twice_B1T: Tensor, once_B1T: Tensor, items: float) -> Term:
    """Returns the consistency loss of a pitch-controllable vocoder: a wave shifted by a semitones and, from the log-mel
    of that, by b more, should equal the wave shifted by a + b at once. Both are generated, and both get gradients."""
    return Term("pitch_shift", absolute_difference(twice_B1T, once_B1T).sum() / items, PITCH_SHIFT_WEIGHT)
