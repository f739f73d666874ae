"""The VAE with alternating steps: the discriminator's first, then the autoencoder's with the updated discriminator."""

import pytest
import torch
import torch.nn.functional as F

from gputrain.engine.recipe import Phase, phases_of
from gputrain.engine.state import TrainState
from gputrain.engine.step import prepare_optimizer, update
from gputrain.errors import UserError
from gputrain.vae import recipe as vae
from gputrain.vae.recipe import VaeRecipe
from tests.comparison import largest_difference
from tests.tables import slow
from tests.toy import cpu_runtime, new_state, weights
from tests.vae.test_recipe import crops, settings_of, weights_after

ALTERNATING = {
    "step_order": "alternating", "discriminator_start": 0, "discriminator_warmup_steps": 1, "lecam_weight": 0.1,
    "batch_size": 4,
}  # fmt: skip
LEARNING_RATE = 1e-3


def begin(tmp_path, *, dtype=torch.float64, **changes) -> TrainState:
    recipe = VaeRecipe(settings_of(**{**ALTERNATING, **changes}), cpu_runtime(), held_out=[])
    for module in recipe.modules.values():
        module.to(dtype)
    return new_state(recipe, tmp_path)


def go_on(state: TrainState, steps: range) -> None:
    for step in steps:
        update(state, state.recipe.prepare(crops(step, 4), step), step, LEARNING_RATE)
        state.recipe.average(step)


def step_by_hand(state: TrainState, step: int) -> None:
    """Trains the discriminator, and then the autoencoder with what has become of it, each with a single graph."""
    recipe: VaeRecipe = state.recipe
    batch, discriminator, balance = recipe.prepare(crops(step, 4), step), recipe.discriminator, recipe.balance
    phases = {phase.name: phase for phase in phases_of(recipe)}
    images = vae.to_unit(batch.images_BCHW).double()
    mean, logvar = recipe.autoencoder.encode(images)
    made = recipe.autoencoder.decode(mean + torch.exp(0.5 * logvar) * batch.noise_BLhw)
    real, fake = discriminator(images), discriminator(made.detach())
    loss = 0.5 * (F.relu(1 - real).mean() + F.relu(1 + fake).mean())
    loss = loss + 0.1 * ((real - balance.fake).square().mean() + (fake - balance.real).square().mean())
    step_on(state, phases["discriminator"], loss)
    for average, seen in ((balance.real, real), (balance.fake, fake)):
        average.mul_(0.99).add_(0.01 * seen.detach().mean())
    others = (made - images).abs().mean() + vae.losses.structural(made, images).mean()
    (of_others,) = torch.autograd.grad(others, made, retain_graph=True)
    loss = others + 1e-6 * 0.5 * (mean**2 + logvar.exp() - 1 - logvar).sum() / images.numel()
    if step >= 1:
        adversarial = -discriminator(made).mean()
        (of_adversarial,) = torch.autograd.grad(adversarial, made, retain_graph=True)
        weight = float(balance.weight)
        balance.weight.fill_(min(10.0, float(of_others.norm() / of_adversarial.norm())))
        loss = loss + 0.5 * weight * adversarial
    step_on(state, phases["autoencoder"], loss)
    recipe.average(step)


def step_on(state: TrainState, phase: Phase, loss: torch.Tensor) -> None:
    phase.optimizer.zero_grad()
    torch.autograd.backward(loss, inputs=phase.parameters(), retain_graph=True)
    prepare_optimizer(state, phase, LEARNING_RATE)
    phase.optimizer.step()


def test_steps_are_those_of_a_loop_by_hand(tmp_path):
    """Three steps in float64; the adversarial loss begins with the second, with a weight that begins with the third."""
    ours, theirs = begin(tmp_path), begin(tmp_path)
    for module in theirs.recipe.modules.values():
        module.requires_grad_(True)
    for phase in (*phases_of(ours.recipe), *phases_of(theirs.recipe)):
        for group in phase.optimizer.param_groups:
            group["eps"] = 1e-5  # Some gradients are zero but for rounding, such as that of the keys' bias.
    assert [group.name for group in ours.recipe.step_groups] == ["discriminator", "autoencoder"]
    start = weights(ours.recipe)
    go_on(ours, range(3))
    for step in range(3):
        step_by_hand(theirs, step)
    assert largest_difference(start, weights(ours.recipe)) > 1e-3
    assert largest_difference(weights(theirs.recipe), weights(ours.recipe)) < 1e-10


def test_a_resumed_training_is_the_undisturbed_one_bit_for_bit(tmp_path):
    undisturbed, first, second = (begin(tmp_path, dtype=torch.float32) for _ in range(3))
    go_on(undisturbed, range(3))
    go_on(first, range(2))
    second.restore(first.snapshot())
    go_on(second, range(2, 3))
    assert largest_difference(weights(undisturbed.recipe), weights(second.recipe)) == 0


@pytest.mark.parametrize("norm", ["group", slow("spectral")])
def test_any_split_gives_the_same_weights(norm, tmp_path):
    given = {**ALTERNATING, "discriminator_norm": norm, "batch_size": 8}
    whole, split = (weights_after(3, tmp_path, **given, micro_batch_size=size)[0] for size in (8, 3))
    assert largest_difference(whole, split) < 1e-11


def test_without_a_discriminator_there_is_no_order():
    with pytest.raises(UserError, match="step_order alternating has no effect without a discriminator"):
        settings_of(step_order="alternating", adversarial_weight=0.0)
