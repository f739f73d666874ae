"""The voice with alternating steps: the discriminators' first, then the voice's with the updated discriminators."""

import dataclasses
import functools

import pytest
import torch

from gputrain.engine.recipe import phases_of
from gputrain.engine.step import gradients, prepare_optimizer
from gputrain.tts.recipe import VoiceRecipe
from tests.recipes import (
    assert_resumed_is_undisturbed,
    assert_split_changes_nothing,
    go_on,
    largest_difference,
    weights,
)
from tests.tables import slow
from tests.tts.test_recipe import begin, bucket, load, one_sum

ALTERNATING = {"step_order": "alternating"}
LEARNING_RATE = 1e-3


@pytest.mark.parametrize("preset", [slow("medium"), "fast"])
def test_steps_are_those_of_a_loop_by_hand(preset, tmp_path):
    """Two steps in float64, each with a graph for all losses of a network."""
    ours, theirs = (begin(tmp_path, preset, **ALTERNATING) for _ in range(2))
    assert [group.name for group in ours.recipe.step_groups] == ["discriminator", "generator"]
    start = weights(ours)
    go_on(ours, load, range(2), LEARNING_RATE)
    recipe, phases = theirs.recipe, {phase.name: phase for phase in phases_of(theirs.recipe)}
    for module in recipe.modules.values():
        module.requires_grad_(True)
    for step in range(2):
        batch = recipe.prepare([bucket(step)], step)
        for name, index in (("discriminator", 1), ("generator", 0)):
            phases[name].optimizer.zero_grad()
            torch.autograd.backward(one_sum(recipe, batch)[index], inputs=phases[name].parameters())
            prepare_optimizer(theirs, phases[name], LEARNING_RATE * phases[name].lr_scale)
            phases[name].optimizer.step()
        recipe.average(step)
    assert largest_difference(start, weights(ours)) > 1e-3
    assert largest_difference(weights(theirs), weights(ours)) < 1e-10


@pytest.mark.parametrize("compiled", [False, True])
def test_only_those_who_step_get_gradients(compiled, tmp_path):
    """The gradients are those of one sum, also in the passes of compiled discriminators."""
    state = begin(tmp_path, **ALTERNATING)
    recipe: VoiceRecipe = state.recipe
    plan = recipe.runtime.plan
    recipe.runtime.plan = dataclasses.replace(plan, compile=dataclasses.replace(plan.compile, value=compiled))
    batch = recipe.prepare([bucket(0)], 0)
    for group, index, idle in zip(
        recipe.step_groups, (1, 0), (recipe.voice, recipe.discriminators), strict=True
    ):  # fmt: skip
        sums = gradients(state, group, batch, 1, 0)
        (phase,) = group.phases
        assert list(sums) == [phase.name]
        assert all(parameter.grad is None for parameter in idle.parameters())
        found = torch.cat([parameter.grad.flatten() for parameter in phase.parameters()])
        value = one_sum(recipe, batch)[index]
        expected = torch.cat([one.flatten() for one in torch.autograd.grad(value, phase.parameters())])
        assert (found - expected).norm() / expected.norm() < 1e-12
        phase.optimizer.zero_grad(set_to_none=True)


@pytest.mark.slow
def test_any_micro_batch_gives_the_same_weights(tmp_path):
    whole, split = begin(tmp_path, **ALTERNATING), begin(tmp_path, **ALTERNATING, micro_batch_size=4)
    assert_split_changes_nothing(whole, split, load, range(2))


@pytest.mark.slow
def test_a_resumed_training_is_the_undisturbed_one_bit_for_bit(tmp_path):
    begin_fp32 = functools.partial(begin, tmp_path, dtype=torch.float32, **ALTERNATING)
    assert_resumed_is_undisturbed(begin_fp32, load, steps=3, stop=2)
