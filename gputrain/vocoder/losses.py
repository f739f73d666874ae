"""What a made wave is judged by: by discriminators, by its log-mel, by its spectra at several resolutions.

Shapes: B items, 1 channel, T samples, M mel bands, F frames, N frequencies. Waves are in [-1, 1].

Every loss is a value per item, in fp32 at least whatever autocast is on, and every term is the sum over its items
divided by the items of the whole batch, so that the parts of a batch add up to the whole. With `made_B1T` a detached
copy that requires a gradient, each term can be back-propagated before the next is computed, and the gradient gathered
on the copy is then carried through the generator at once: no two discriminators' graphs ever stand together.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gputrain.audio.mel import MelSettings, log_mel
from gputrain.engine import gan
from gputrain.engine.recipe import BatchStat, Term
from gputrain.vocoder.architecture import Resolution
from gputrain.vocoder.generator import frozen, leaves

FEATURE_WEIGHT = 2.0  # Kong et al. 2020 (HiFi-GAN), equation 8
MEL_WEIGHT = 45.0  # the same; lab_aux_melloss
STFT_WEIGHT = 2.5  # lab_aux_stftloss
PITCH_SHIFT_WEIGHT = 30.0  # openvpi's
QUIETEST_MAGNITUDE = 10**-3.5  # magnitudes below count as this, so that silence has a logarithm
QUIETEST_AMPLITUDE = 1e-3  # -60 dB: waves below count as noise of this amplitude, so that silence is no divisor


# A sub-discriminator: of waves B1T, it gives logits B... and features B....
Discriminator = Callable[[Tensor], tuple[Tensor, list[Tensor]]]


def magnitudes(resolution: Resolution, wave_B1T: Tensor) -> Tensor:
    """BNF: of a centred short-time Fourier transform with a Hann window, in fp32 at least.

    Raises RuntimeError where half of fft_size is not less than T, which leaves nothing to reflect at the ends.
    """
    wave_BT = gan.exact(wave_B1T.squeeze(1))
    window = torch.hann_window(resolution.win_length, dtype=wave_BT.dtype, device=wave_BT.device)
    sizes = (resolution.fft_size, resolution.hop_size, resolution.win_length)
    spectrum_BNF: Tensor = torch.stft(wave_BT, *sizes, window, return_complex=True)
    return spectrum_BNF.abs()


def discriminator_terms(
    discriminators: Mapping[str, Iterable[nn.Module]],
    real_B1T: Tensor,
    fake_B1T: Tensor,
    real_items: int,
    fake_items: int,
) -> Iterator[Term]:
    """What the discriminators learn from when they learn alone: a term for each, under the name of its kind.

    There may be more fake waves than real ones; `real_items` and `fake_items` count those of the whole batch.
    """
    fake_B1T = fake_B1T.detach()
    for kind, members in discriminators.items():
        for discriminator in members:
            loss = discriminator_loss(discriminator, real_B1T, fake_B1T, real_items, fake_items)
            yield Term(kind, loss, phase="discriminator")


def discriminator_loss(
    discriminator: Discriminator, real_B1T: Tensor, fake_B1T: Tensor, real_items: int, fake_items: int
) -> Tensor:
    logits, _ = discriminator(torch.cat([real_B1T, fake_B1T]))
    real_logits, fake_logits = torch.tensor_split(logits, [len(real_B1T)])
    return real_loss(real_logits).sum() / real_items + fake_loss(fake_logits).sum() / fake_items


def real_loss(logits: Tensor) -> Tensor:
    """B: half of least squares (Mao et al. 2017): logits of real waves should be 1."""
    return 0.5 * gan.per_item((gan.exact(logits) - 1) ** 2)


def fake_loss(logits: Tensor) -> Tensor:
    """B: the other half: logits of made waves should be 0."""
    return 0.5 * gan.per_item(gan.exact(logits) ** 2)


def adversarial_terms(
    discriminators: Mapping[str, Iterable[nn.Module]],
    real_B1T: Tensor,
    made_B1T: Tensor,
    real_items: int,
    made_items: int,
    *,
    shares_passes: bool,
) -> Iterator[Term | BatchStat]:
    """What the discriminators and the generator learn from in one turn: terms of the phase "discriminator" and of the
    generator's, under the name of a discriminator's kind, and the share that the features have in the latter.

    Both look at the same waves with the same discriminators, so that a pass over real waves serves as the target of the
    features too, and one over made waves is back-propagated twice: into the discriminator's weights, then into the
    waves, a leaf. Where a discriminator is compiled, whose backward pass always makes all gradients and once only,
    the made waves take two passes (`shares_passes` is false).

    The first made waves are those that the real ones are the targets of; the others (shifted in pitch) have none.
    `real_items` and `made_items` count those of the whole batch.
    """
    for kind, members in discriminators.items():
        for discriminator in members:
            real, targets = of_real(discriminator, real_B1T)
            yield Term(kind, real.sum() / real_items, phase="discriminator")
            if shares_passes:
                fake, persuasion, likeness = of_made(discriminator, made_B1T, targets)
                fake = fake.sum() / made_items
                yield Term(kind, fake, phase="discriminator", inputs=leaves(discriminator), keeps_graph=True)
            else:
                fake = fake_loss(discriminator(made_B1T.detach())[0])
                yield Term(kind, fake.sum() / made_items, phase="discriminator")
                with frozen(discriminator):
                    persuasion, likeness = of_made(discriminator, made_B1T, targets)[1:]
            del fake, targets  # which need not stand in memory beside the graph
            likeness = FEATURE_WEIGHT * likeness.sum() / real_items
            yield BatchStat(f"{kind}_features", likeness.detach())
            yield Term(kind, persuasion.sum() / made_items + likeness, inputs=(made_B1T,))


def of_real(discriminator: Discriminator, real_B1T: Tensor) -> tuple[Tensor, list[Tensor]]:
    """B: the discriminator's own loss; and the features, without a graph. The logits are let go here."""
    logits, features = discriminator(real_B1T)
    return real_loss(logits), [feature.detach() for feature in features]


def of_made(discriminator: Discriminator, made_B1T: Tensor, targets: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """B, B, B: the discriminator's own loss; the generator's, to be taken for real (Mao et al. 2017) and to look to
    the discriminator as the real wave does. Beyond the graph nothing stays of the discriminator's features."""
    logits, features = discriminator(made_B1T)
    return fake_loss(logits), gan.generator_loss("least-squares", logits), feature_distance(features, targets)


def feature_distance(made: Sequence[Tensor], target: Sequence[Tensor]) -> Tensor:
    """B: mean absolute differences of features B..., summed over layers (Larsen et al. 2016; Kumar et al. 2019,
    equation 4). Made features beyond the items of `target` are left out."""
    pairs = zip(made, target, strict=True)
    return torch.stack([absolute_difference(ours[: len(theirs)], theirs) for ours, theirs in pairs]).sum(dim=0)


def mel_term(mel: MelSettings, made_B1T: Tensor, target_BMF: Tensor, items: int, weight: float = MEL_WEIGHT) -> Term:
    """Mean absolute difference of log-mels. The target is `log_mel` of the real wave, which is computed once."""
    made_BMF = log_mel(made_B1T.squeeze(1), mel)
    return Term("mel", absolute_difference(made_BMF, target_BMF).sum() / items, weight)


def stft_terms(
    resolutions: Sequence[Resolution], made_B1T: Tensor, target_B1T: Tensor, items: int, weight: float = STFT_WEIGHT
) -> Iterator[Term]:
    """The mean of `stft_distance` over resolutions, in a term for each."""
    for resolution in resolutions:
        distance = stft_distance(resolution, made_B1T, target_B1T).sum()
        yield Term("stft", distance / (items * len(resolutions)), weight)


def stft_distance(resolution: Resolution, made_B1T: Tensor, target_B1T: Tensor) -> Tensor:
    """B: spectral convergence plus log magnitude (Yamamoto et al. 2020, equations 4 and 5).

    Spectral convergence is a ratio of two norms, often taken over a whole batch, which would tie its items together:
    here every item has its own ratio, so that a batch can be split. A silent item, which among loud ones hardly
    counted, would then be divided by next to nothing; so no divisor is less than that of noise at -60 dB.
    """
    made_BNF = magnitudes(resolution, made_B1T).clamp(min=QUIETEST_MAGNITUDE)
    target_BNF = magnitudes(resolution, target_B1T).clamp(min=QUIETEST_MAGNITUDE)
    # White noise of amplitude a has magnitudes of root mean square a |window|, and |Hann|^2 = 3/8 of its length.
    quietest = QUIETEST_AMPLITUDE * (3 / 8 * resolution.win_length * target_BNF[0].numel()) ** 0.5
    norm_B = torch.linalg.vector_norm(target_BNF, dim=(1, 2)).clamp(min=quietest)
    convergence_B = torch.linalg.vector_norm(target_BNF - made_BNF, dim=(1, 2)) / norm_B
    distance_B: Tensor = convergence_B + absolute_difference(made_BNF.log(), target_BNF.log())
    return distance_B


def pitch_shift_term(twice_B1T: Tensor, once_B1T: Tensor, items: int, weight: float = PITCH_SHIFT_WEIGHT) -> Term:
    """Consistency of a pitch-controllable vocoder: shifted by a semitones and, from the log-mel of that, by b more,
    a wave should be what it is when shifted by a + b at once. Both are made, and both learn."""
    return Term("pitch_shift", absolute_difference(twice_B1T, once_B1T).sum() / items, weight)


def absolute_difference(made: Tensor, target: Tensor) -> Tensor:
    """B: mean of |made - target| over all but the items, in fp32 at least. Its graph holds one byte a value."""
    value_B: Tensor = _AbsoluteDifference.apply(made, target)  # type: ignore[no-untyped-call]
    return value_B


class _AbsoluteDifference(torch.autograd.Function):
    """abs() would keep the difference in fp32, which for the features of a discriminator that computes in 16 bit is
    twice what the discriminator itself keeps; the gradient asks for its sign alone."""

    @staticmethod
    def forward(ctx: Any, made: Tensor, target: Tensor) -> Tensor:
        difference = gan.exact(made) - gan.exact(target)
        ctx.save_for_backward(difference.sign().to(torch.int8))
        ctx.dtypes = made.dtype, target.dtype
        return gan.per_item(difference.abs())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (sign,) = ctx.saved_tensors
        share_B = gradients[0] * len(sign) / sign.numel()
        gradient = sign * share_B.view(-1, *[1] * (sign.dim() - 1))
        made, target = ctx.needs_input_grad
        return gradient.to(ctx.dtypes[0]) if made else None, -gradient.to(ctx.dtypes[1]) if target else None
