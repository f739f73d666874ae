"""The vocoder's recipe in the engine: exact splits, discriminator by discriminator as all at once, exact repetition,
memory running out, discriminators that begin late or learn alone."""

import dataclasses

import pytest
import torch

from gputrain.audio import losses
from gputrain.config import assemble
from gputrain.engine.recipe import at_least_fp32, phases_of
from gputrain.engine.state import TrainState
from gputrain.engine.step import accumulate, gradients, unfreeze_only, update
from gputrain.errors import UserError
from gputrain.hw.plan import Hardware, decide
from gputrain.hw.probe import Machine
from gputrain.planner.memory.predict import predict_step, step_flops
from gputrain.vocoder.config import TrainVocoder
from gputrain.vocoder.recipe import VocoderRecipe, target
from tests.comparison import largest_difference
from tests.tables import each_row, slow
from tests.toy import cpu_runtime, new_state, weights

SMALL = {
    "data_path": "unused",
    "audio_sample_rate": 16000,
    "audio_num_mel_bins": 16,
    "hop_size": 64,
    "fft_size": 256,
    "win_size": 256,
    "fmax": 8000,
    "upsample_rates": [8, 2, 2, 2],
    "upsample_kernel_sizes": [16, 4, 4, 4],
    "upsample_initial_channel": 16,
    "resblock_kernel_sizes": [3],
    "resblock_dilation_sizes": "1,3,5",
    "crop_mel_frames": 12,
    "batch_size": 8,
    "discriminator_periods": [2, 3],
    "fast_mpd_init_channel": 2,
    "fast_mpd_strides": [4, 2, 2],
    "fast_mrd_init_channel": 2,
    "fast_mrd_fft_sizes": [128, 64],
    "fast_mrd_hop_sizes": [16, 8],
    "fast_mrd_win_lengths": [128, 64],
    "msd_channels": 16,
    "mpd_channels": 2,
    "mrd_channels": 2,
    "mrd_fft_sizes": [128],
    "mrd_hop_sizes": [16],
    "mrd_win_lengths": [64],
    "loss_fft_sizes": [128, 64],
    "loss_hop_sizes": [25, 12],
    "loss_win_lengths": [100, 60],
    "use_stftloss": False,
    "generator_optimizer": "adamw",
    "discriminator_optimizer": "adamw",
}
VARIANTS = {
    "fast": {},
    "plain": {"discriminators": "msd,mpd,mrd", "generator_optimizer": "muon", "discriminator_optimizer": "muon"},
    "all augmentations": {
        "mini_nsf": True, "noise_sigma": 0.1, "pc_aug": True, "pc_aug_rate": 0.4, "key_aug": True, "use_stftloss": True,
    },
}  # fmt: skip
VARIANT = pytest.mark.parametrize("variant", VARIANTS)


def settings_of(**changes) -> TrainVocoder:
    return assemble(TrainVocoder, {**SMALL, **changes})


def sounds(settings: TrainVocoder, step: int, count: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns hummed notes with a little noise; the last one is unvoiced."""
    draws = torch.Generator().manual_seed(step)
    frames, hop_size = settings.data.frames_to_read, settings.spectrogram.hop_size
    time = torch.arange(frames * hop_size) / settings.spectrogram.audio_sample_rate
    hz = 100 + 200 * torch.rand(count, 1, generator=draws)
    wave = 0.3 * torch.sin(2 * torch.pi * hz * time) + 0.02 * torch.randn(count, len(time), generator=draws)
    f0 = hz.repeat(1, frames)
    f0[:, -2:] = 0
    return (wave * 32767).to(torch.int16), f0


def begin(tmp_path, *, dtype=torch.float64, **changes) -> TrainState:
    recipe = VocoderRecipe(settings_of(**changes), cpu_runtime())
    for module in recipe.modules.values():
        module.to(dtype)
    return new_state(recipe, tmp_path)


def go_on(state: TrainState, steps: range, lr: float = 1e-3) -> None:
    recipe = state.recipe
    for step in steps:
        update(state, recipe.prepare(sounds(recipe.settings, step), step), step, lr)
        recipe.average(step)


@pytest.mark.parametrize(
    "changes",
    [
        VARIANTS["fast"],
        *(slow(VARIANTS[name]) for name in ("plain", "all augmentations")),
    ],
)
def test_any_split_gives_the_same_weights(changes, tmp_path):
    whole = begin(tmp_path, **changes)
    start = weights(whole.recipe)
    go_on(whole, range(2))
    assert largest_difference(start, weights(whole.recipe)) > 1e-3
    for size in (1, 3):
        split = begin(tmp_path, **changes, micro_batch_size=size)
        go_on(split, range(2))
        assert largest_difference(weights(whole.recipe), weights(split.recipe)) < 1e-12


# A gradient sums up some 4,000 products, in another order on the other side: its error in fp32 is about 4000**0.5 *
# 2**-24, or 4e-6. What is summed is the same in float64.
@pytest.mark.parametrize(
    ("variant", "dtype", "bound"),
    [
        ("all augmentations", torch.float64, 1e-13),
        ("plain", torch.float64, 1e-13),
        *(slow(case, *exact) for case in VARIANTS for exact in ((torch.float64, 1e-13), (torch.float32, 4e-6))),
    ],
)
def test_one_by_one_is_one_sum_in_the_recipe(variant, dtype, bound, tmp_path):
    """Every discriminator back-propagated as it comes, and carried on from a detached wave, against the sum of the same
    losses on one graph: relative to the norm of the gradient."""
    state = begin(tmp_path, dtype=dtype, **VARIANTS[variant])
    recipe: VocoderRecipe = state.recipe
    batch = recipe.prepare(sounds(recipe.settings, 0), 0)
    (group,) = recipe.step_groups
    gradients(state, group, batch, 1, 0)
    counts = (batch.global_items, batch.global_waves)
    for phase in group.phases:
        unfreeze_only(dataclasses.replace(group, phases=(phase,)), recipe)
        parameters = phase.parameters()
        gathered = torch.cat([parameter.grad.flatten() for parameter in parameters])
        waves = at_least_fp32(recipe.generate(batch))
        discriminators = [discriminator for kind in recipe.by_kind.values() for discriminator in kind]
        if phase.name == "generator":
            value = sum(term.value * term.weight for term in recipe.reconstruction_terms(waves, batch))
            for discriminator in discriminators:
                (logits, features), (_, targets) = discriminator(waves), discriminator(batch.real_B1T)
                value = value + (logits - 1).square().flatten(1).mean(dim=1).sum() / counts[1]
                value = value + 2 * losses.feature_distance(features, targets).sum() / counts[0]
        else:
            value = 0
            for discriminator in discriminators:
                real_logits, logits = discriminator(batch.real_B1T)[0], discriminator(waves.detach())[0]
                value = value + 0.5 * (real_logits - 1).square().flatten(1).mean(dim=1).sum() / counts[0]
                value = value + 0.5 * logits.square().flatten(1).mean(dim=1).sum() / counts[1]
        at_once = torch.cat([gradient.flatten() for gradient in torch.autograd.grad(value, parameters)])
        assert at_once.norm() > 1e-4
        assert (gathered - at_once).norm() / at_once.norm() < bound


def test_a_resumed_training_is_the_undisturbed_one_bit_for_bit(tmp_path):
    changes = VARIANTS["all augmentations"] | {"generator_optimizer": "muon", "discriminators": "msd,fast_mrd"}
    undisturbed = begin(tmp_path, dtype=torch.float32, **changes)
    go_on(undisturbed, range(3))
    first = begin(tmp_path, dtype=torch.float32, **changes)
    go_on(first, range(2))
    second = begin(tmp_path, dtype=torch.float32, **changes)
    second.restore(first.snapshot())
    go_on(second, range(2, 3))
    assert largest_difference(weights(undisturbed.recipe), weights(second.recipe)) == 0


@pytest.mark.parametrize("phase", [slow("generator"), "discriminator"])
def test_running_out_of_memory_changes_nothing(phase, tmp_path):
    """Memory runs out in a term of either phase."""
    whole = begin(tmp_path)
    go_on(whole, range(3))
    short = begin(tmp_path)
    (group,) = short.recipe.step_groups

    def loss(batch, step):
        for term in group.loss(batch, step):
            yield term
            if step == 1 and len(batch.real_B1T) > 2 and getattr(term, "phase", "") == (phase * (phase != group.name)):
                torch.empty(10**15)

    short.recipe.step_groups = [dataclasses.replace(group, loss=loss)]
    go_on(short, range(3))
    assert short.micro_batch == {"generator": 2}
    assert largest_difference(weights(whole.recipe), weights(short.recipe)) < 1e-12


def test_a_good_generator_waits_until_the_discriminators_have_learnt(tmp_path):
    state = begin(tmp_path, discriminator_only_steps=2, ema_decay=0)
    start = weights(state.recipe)
    go_on(state, range(2))
    warm = weights(state.recipe)
    go_on(state, range(2, 3))
    moved = {name for name in start if not torch.equal(start[name], warm[name])}
    assert moved
    assert all(name.startswith("discriminators.") for name in moved)
    assert any(
        not torch.equal(warm[name], value)
        for name, value in weights(state.recipe).items()
        if name.startswith("generator")
    )


@pytest.mark.parametrize(
    ("variant", "frozen"),
    [
        slow("plain", ["discriminator.mpd"]),
        slow("plain", ["generator.ups", "discriminator.msd.discriminators.0"]),
        ("fast", ["discriminator.mpd", "generator.conv_p"]),
    ],
)
def test_frozen_parameters_keep_their_values_and_the_others_do_not(variant, frozen, tmp_path):
    """openvpi's name of a fast kind is the plain one."""
    state = begin(tmp_path, **VARIANTS[variant], frozen_params=frozen, gradient_clip=1.0, weight_decay=0.1)
    before = weights(state.recipe)
    go_on(state, range(3))
    after = weights(state.recipe)
    starts = [start.replace("discriminator.", "discriminators.") for start in frozen]
    starts += [start.replace(".mpd", ".fast_mpd") for start in starts]
    trained = {name for name, _ in state.recipe.generator.named_parameters(prefix="generator")}
    trained |= {name for name, _ in state.recipe.discriminators.named_parameters(prefix="discriminators")}
    kept = {name for name in trained if name.startswith(tuple(starts))}
    assert kept
    assert kept == {name for name in trained if torch.equal(before[name], after[name])}


@pytest.mark.slow
@pytest.mark.parametrize("frozen", ["discriminator.fast_mpd", "generator.ups"])
def test_frozen_parameters_cost_no_gradients(frozen, tmp_path):
    """They get none, and the plan counts neither their memory nor their FLOPs; other gradients are the same."""
    one_of_each = {
        "discriminator_periods": [3], "fast_mrd_fft_sizes": [128], "fast_mrd_hop_sizes": [16],
        "fast_mrd_win_lengths": [128], "loss_fft_sizes": [128], "loss_hop_sizes": [25], "loss_win_lengths": [100],
    }  # fmt: skip
    states = [
        begin(tmp_path / str(number), frozen_params=names, **one_of_each) for number, names in enumerate(([], [frozen]))
    ]
    found = []
    for state in states:
        batch = state.recipe.prepare(sounds(state.recipe.settings, 0), 0)
        (group,) = state.recipe.step_groups
        accumulate(state, group, batch, 0)
        modules = {"generator": state.recipe.generator, "discriminator": state.recipe.discriminators}
        found.append({f"{part}.{name}": p.grad for part, one in modules.items() for name, p in one.named_parameters()})
    free, partly = found
    kept = {name for name in free if name.startswith(frozen)}
    assert kept == {name for name, gradient in partly.items() if gradient is None} - {
        name for name, gradient in free.items() if gradient is None
    }
    for name in free.keys() - kept:
        if free[name] is not None:
            assert torch.allclose(free[name], partly[name], rtol=1e-5, atol=1e-9), name
    plan = decide(Machine(system="", cpu_cores=1), Hardware(device="cpu"))
    costs = [predict_step(target(state.recipe.settings), plan, micro_batch_size=1) for state in states]
    parameters = [parameter for phase in phases_of(states[1].recipe) for parameter in phase.frozen]
    frozen_gb = sum(parameter.numel() for parameter in parameters) * 4 / 1e9
    assert frozen_gb > 0
    assert costs[0].allocated_gb - costs[1].allocated_gb >= 3 * frozen_gb  # A gradient and two moments.
    assert costs[1].flops < costs[0].flops


def test_gradients_of_frozen_parameters_do_not_count_for_clipping(tmp_path):
    """The norm is that of the trained ones: smaller than without freezing."""
    norms = []
    for number, frozen in enumerate(([], ["discriminator.fast_mpd"])):
        state = begin(tmp_path / str(number), frozen_params=frozen, gradient_clip=1.0)
        batch = state.recipe.prepare(sounds(state.recipe.settings, 0), 0)
        norms.append({name: float(v) for name, v in update(state, batch, 0, 1e-3).items() if "norm" in name})
    free, partly = norms
    assert partly["gradient_norm/discriminator"] < 0.99 * free["gradient_norm/discriminator"]
    # Sums in another order, as memory that is aligned differently may bring, differ by rounding.
    assert partly["gradient_norm/generator"] == pytest.approx(free["gradient_norm/generator"], rel=1e-12)


@each_row(
    (["discriminator.msd"], "no tensor begins with 'discriminator.msd'"),
    (["mpd"], "no tensor begins with 'mpd'"),
    (["generator"], "leaves nothing of the generator to train"),
)
def test_names_that_freeze_nothing_or_everything_are_refused(tmp_path, frozen, said):
    with pytest.raises(UserError, match=said):
        begin(tmp_path, frozen_params=frozen)


def test_discriminators_may_begin_late(tmp_path):
    state = begin(tmp_path, discriminator_start=2)
    discriminators = {name: value for name, value in weights(state.recipe).items() if name.startswith("discriminators")}
    recipe = state.recipe
    for step in range(3):
        scalars = update(state, recipe.prepare(sounds(recipe.settings, step), step), step, 1e-3)
        assert ("loss/discriminator/fast_mpd" in scalars) == ("loss/generator/fast_mpd" in scalars) == (step == 2)
        same = all(
            torch.equal(value, discriminators[name])
            for name, value in weights(state.recipe).items()
            if name in discriminators
        )
        assert same == (step < 2)
    assert recipe.peak_memory_step(0) == 2


def test_the_discriminators_have_a_rate_of_their_own(tmp_path):
    still = begin(tmp_path, learning_rate=1e-3, discriminator_learning_rate=1e-9, ema_decay=0)
    start = weights(still.recipe)
    go_on(still, range(1))
    for name, value in weights(still.recipe).items():
        if name.endswith(("weight", "bias", "weight_v")):
            moved = float((value - start[name]).abs().max())
            assert moved < 1e-8 if name.startswith("discriminators") else moved > 1e-6, name


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_the_discriminators_have_betas_of_their_own(optimizer, tmp_path):
    state = begin(tmp_path, generator_optimizer=optimizer, discriminator_optimizer=optimizer, discriminator_beta1=0.5)
    for phase in phases_of(state.recipe):
        groups = [group for group in phase.optimizer.param_groups if "betas" in group]
        assert {group["betas"] for group in groups} == {(0.5 if phase.name == "discriminator" else 0.8, 0.99)}


def test_spectral_norms_are_refreshed_once_a_step_for_any_parts(tmp_path):
    one, many = (begin(tmp_path, discriminators="msd", micro_batch_size=size) for size in (8, 2))
    for state in (one, many):
        go_on(state, range(1))
    name = "discriminators.msd.discriminators.0.convs.1.weight_u"
    assert torch.allclose(weights(one.recipe)[name], weights(many.recipe)[name], atol=1e-12)
    assert not torch.allclose(
        weights(one.recipe)[name], weights(begin(tmp_path, discriminators="msd").recipe)[name], atol=1e-6
    )


@pytest.mark.slow
def test_flops_of_a_step():
    """Twice for twice the crops; four passes of the generator for a crop that is shifted; more with the
    discriminators."""
    late = settings_of(mini_nsf=True, discriminator_start=3)
    alone, both = (step_flops(target(late), step) for step in (2, 3))
    assert alone < 0.7 * both
    assert both == step_flops(target(settings_of(mini_nsf=True)), 0)
    twice = settings_of(mini_nsf=True, discriminator_start=3, batch_size=16)
    assert step_flops(target(twice), 2) == pytest.approx(2 * alone, rel=1e-3)  # Weights are computed once.
    shifted = settings_of(mini_nsf=True, discriminator_start=3, pc_aug=True, pc_aug_rate=1.0)
    assert step_flops(target(shifted), 2) == pytest.approx(4 * alone, rel=0.05)
