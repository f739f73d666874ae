"""The engine: a step is the same however it is split, whatever runs out, and wherever the run was cut."""

import pytest
import torch

from gputrain.engine.recipe import JointTerms, PhaseSums, StepGroup, Term, phases_of
from gputrain.engine.schedule import Schedule
from gputrain.engine.step import back_propagate, update
from gputrain.errors import UserError
from tests.comparison import largest_difference
from tests.toy import BATCH, ITEMS, ToyRecipe, batches, new_state, weights

STEPS = 20


def after_20_steps(tmp_path, *, micro_batch=BATCH, fail=None, clip=1.0):
    recipe = ToyRecipe(Schedule(batch_size=BATCH, micro_batch_size=micro_batch, gradient_clip=clip), adversarial_from=3)
    recipe.fail = fail or {}
    state = new_state(recipe, tmp_path)
    for step, x in enumerate(batches(0, STEPS)):
        update(state, recipe.prepare(x, step), step, learning_rate=1e-2)
        recipe.average(step)
    return weights(recipe), state


def test_step_equals_one_summed_loss_with_torchs_own_clipping(tmp_path):
    """The reference: one loss, one backward, torch's clip_grad_norm_ and plain (not fused) AdamW."""
    ours, _ = after_20_steps(tmp_path)

    recipe = ToyRecipe(Schedule(batch_size=BATCH), adversarial_from=3)
    optimizers = {}
    for phase in phases_of(recipe):
        groups = [{k: v for k, v in g.items() if k in ("params", "weight_decay")} for g in phase.optimizer.param_groups]
        optimizers[phase.name] = torch.optim.AdamW(groups, lr=1e-2, betas=(0.5, 0.99), fused=False)
    for step, x in enumerate(batches(0, STEPS)):
        batch = recipe.prepare(x, step)
        made = recipe.generated(batch)
        if step >= 3:
            real = [discriminator(batch.x_BD) for discriminator in recipe.discriminators]
            fake = [discriminator(made.detach()) for discriminator in recipe.discriminators]
            opinion = recipe.statistics.opinion.clone()
            total = sum(((r - 1 - opinion) ** 2 + f**2).mean() for r, f in zip(real, fake, strict=True))
            step_reference(total, recipe.discriminators, optimizers["discriminators"])
            seen = torch.stack([r.detach().mean() for r in real]).mean()
            recipe.statistics.opinion.mul_(0.9).add_(0.1 * seen)
        total = 2 * ((made - batch.x_BD) ** 2).sum(dim=1).mean()
        if step >= 3:
            total = total + sum(
                0.3 * ((discriminator(made) - 1) ** 2).mean() for discriminator in recipe.discriminators
            )
        step_reference(total, recipe.generator, optimizers["generator"])
        recipe.average(step)

    assert largest_difference(ours, weights(recipe)) < 1e-6  # torch's clipping adds 1e-6 to the norm


def step_reference(total, module, optimizer):
    optimizer.zero_grad()
    total.backward(inputs=list(module.parameters()))
    torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    optimizer.step()


@pytest.mark.parametrize("micro_batch", [4, 3, 2, 1])
def test_any_split_gives_the_same_weights(tmp_path, micro_batch):
    whole, _ = after_20_steps(tmp_path)
    split, _ = after_20_steps(tmp_path, micro_batch=micro_batch)
    assert largest_difference(whole, split) < 1e-13


@pytest.mark.parametrize("phase", ["discriminators", "generator"])
def test_running_out_of_memory_changes_nothing(tmp_path, phase, caplog):
    whole, _ = after_20_steps(tmp_path)
    survived, state = after_20_steps(tmp_path, fail={(phase, 5): 4, (phase, 9): 1})
    assert largest_difference(whole, survived) < 1e-13
    other = "generator" if phase == "discriminators" else "discriminators"
    assert state.micro_batch == {phase: 1, other: BATCH}
    assert f"out of memory: the {phase} continues with micro-batches of 4 instead of 8" in caplog.text


def test_out_of_memory_with_one_item_says_so(tmp_path):
    with pytest.raises(UserError, match=r"with a single item \(cpu\): .*DefaultCPUAllocator"):
        after_20_steps(tmp_path, fail={("generator", 2): 0})


def test_other_errors_are_not_taken_for_memory(tmp_path):
    recipe = ToyRecipe(Schedule(batch_size=BATCH))
    state = new_state(recipe, tmp_path)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        update(state, recipe.prepare(ITEMS[:4, :3], 0), 0, 1e-3)


def test_nonfinite_gradient_never_reaches_the_weights(tmp_path):
    recipe = ToyRecipe(Schedule(batch_size=BATCH))
    state = new_state(recipe, tmp_path)
    update(state, recipe.prepare(ITEMS[:BATCH], 0), 0, 1e-2)
    before = weights(recipe)
    poisoned = ITEMS[:BATCH].clone()
    poisoned[5, 2] = float("nan")
    scalars = update(state, recipe.prepare(poisoned, 1), 1, 1e-2)
    assert scalars["nonfinite/discriminators"] == 1
    assert scalars["nonfinite/generator"] == 1
    assert largest_difference(before, weights(recipe)) == 0
    update(state, recipe.prepare(ITEMS[:BATCH], 2), 2, 1e-2)
    assert all(v.isfinite().all() for v in weights(recipe).values())


def test_only_the_phases_own_modules_gather_gradients(tmp_path):
    recipe = ToyRecipe(Schedule(batch_size=BATCH))
    state = new_state(recipe, tmp_path)
    update(state, recipe.prepare(ITEMS[:BATCH], 0), 0, 0.0)
    # After the generator's phase, which ran the discriminators too, nothing is left on them.
    assert all(p.grad is None and not p.requires_grad for p in recipe.discriminators.parameters())
    assert not any(p.requires_grad for p in recipe.ema.parameters())


class RunsOnce(torch.autograd.Function):
    """Twice and three times of two values, from one backward pass, as of a compiled function."""

    @staticmethod
    def forward(ctx, one, other):
        ctx.runs = 0
        return 2 * one, 3 * other

    @staticmethod
    def backward(ctx, *gradients):
        ctx.runs += 1
        assert ctx.runs == 1
        return 2 * gradients[0], 3 * gradients[1]


def test_terms_together_have_the_loss_scale_of_their_own_phase(tmp_path, monkeypatch):
    recipe = ToyRecipe(Schedule(batch_size=BATCH))
    state = new_state(recipe, tmp_path)
    group = StepGroup(tuple(phases_of(recipe)), recipe.generator_loss)
    monkeypatch.setattr(state, "loss_scale", {"discriminators": 16.0, "generator": 1024.0}.get)
    weights_of_phases = [phase.parameters()[0] for phase in group.phases]
    sums = {phase.name: PhaseSums() for phase in group.phases}
    one, other = RunsOnce.apply(*(weight.sum() for weight in weights_of_phases))
    terms = (Term("one", one, phase="discriminators"), Term("other", other, weight=0.5, phase="generator"))
    back_propagate(state, group, [JointTerms(terms)], sums)
    assert [weight.grad.unique().item() for weight in weights_of_phases] == [2 * 16, 3 * 0.5 * 1024]
    assert sums["discriminators"].losses == {"one": one}
    assert sums["generator"].losses == {"other": other}
