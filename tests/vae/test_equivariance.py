"""Equivariant latents: what is drawn, exact splits, the loss against a plain one, and the settings around them."""

import dataclasses
from collections import Counter

import pytest
import torch
import torch.nn.functional as F

from gputrain.engine.recipe import ChainGradients, Term
from gputrain.errors import UserError
from gputrain.hw.plan import decide
from gputrain.planner.memory.predict import predict_step
from gputrain.vae import recipe as vae
from gputrain.vae.equivariance import Transformation, Transformations
from gputrain.vae.recipe import VaeRecipe, item_flops, plan_target
from tests.comparison import assert_same, largest_difference
from tests.machines import CPU
from tests.planner.memory.measured_steps import measured_peak_gb
from tests.planner.memory.test_kinds import vae as settings_of_step
from tests.recorded_graphs import RecordedGraphs
from tests.tables import each_row
from tests.toy import cpu_runtime
from tests.vae.test_recipe import crops, settings_of, weights_after

TINY = {"preset": "fast", "channels": [16, 16], "batch_size": 4, "discriminator_start": 0}


def test_what_is_drawn_is_that_of_the_step():
    drawn = Transformations(seed=3, probability=0.5, latent_side=32, smallest_side=3)
    count = Counter(drawn.at(step) for step in range(20_000))
    assert drawn.sides == [8, 12, 16, 20, 24, 28, 32]
    assert len(count) == 28
    assert Transformation(32, 32, 0) not in count
    assert count.pop(None) == pytest.approx(10_000, abs=4 * 71)  # Four standard deviations.
    assert all(abs(n - 10_000 / 27) < 5 * 20 for n in count.values())
    assert drawn.at(7) == dataclasses.replace(drawn).at(7)
    first = drawn.largest_step(100)
    assert [bool(at) and at.side == 32 for at in map(drawn.at, range(100, first + 1))] == [False] * (first - 100) + [
        True
    ]


@each_row(
    ({"image_size": 16}, [8]),  # Smaller pictures are too small for MS-SSIM.
    ({"image_size": 64}, [8, 12, 16, 20, 24, 28, 32]),
    ({"image_size": 64, "adversarial_weight": 0.5}, [12, 16, 20, 24, 28, 32]),
    ({"image_size": 64, "perceptual_loss": "lpips", "lpips_weights": ["x"]}, [16, 20, 24, 28, 32]),
    ({"image_size": 32, "perceptual_loss": "lpips", "lpips_weights": ["x"]}, [16]),
)
def test_no_picture_is_too_small_for_the_losses(changes, sides):
    settings = settings_of(**{"adversarial_weight": 0.0, "eq_probability": 0.5, **changes})
    assert Transformations.of(settings).sides == sides


def test_pictures_are_scaled_and_turned_as_their_latents():
    """Averages of blocks follow half the size and every turn exactly, and a quarter of the side keeps the place."""
    pictures_BCNN = torch.rand(2, 3, 24, 24, dtype=torch.float64)
    for turns in range(4):
        half = Transformation(3, 6, turns)
        assert torch.allclose(half(F.avg_pool2d(pictures_BCNN, 4)), F.avg_pool2d(half(pictures_BCNN), 4), atol=1e-12)
    ramp_NN = torch.arange(24.0)[:, None].expand(24, 24)
    assert torch.equal(Transformation(6, 24, 0)(ramp_NN[None, None])[0, 0, :, 0], 4 * torch.arange(6) + 1.5)
    assert torch.equal(Transformation(24, 24, 3)(ramp_NN[None, None])[0, 0], torch.rot90(ramp_NN, 3))


def gradients_in_two_parts(recipe, batch, step):
    """Returns the gradients of a step by module, as the engine adds them up; and the names of the terms."""
    names = set()
    for group in recipe.step_groups:
        for module in recipe.modules.values():
            module.requires_grad_(module in group.phases[0].modules)
        for part in recipe.split(batch, 2):
            for term in group.loss(part, step):
                if isinstance(term, ChainGradients):
                    torch.autograd.backward(term.tensors, term.gradients)
                elif isinstance(term, Term):
                    torch.autograd.backward(term.value * term.weight)
                    names.add(term.name)
    modules = (recipe.autoencoder, recipe.discriminator)
    found = [[parameter.grad for parameter in module.requires_grad_(True).parameters()] for module in modules]
    for module in modules:
        module.zero_grad()
    return found, names


@each_row(
    (lambda at: at is None, {}),
    (lambda at: at and at.side < at.of and at.turns == 1, {"eq_weight": 0.25}),
    (lambda at: at and at.side < at.of and at.turns == 2, {"step_order": "alternating"}),
    (lambda at: at and at.side == at.of, {}),
)
def test_the_loss_is_that_of_a_few_plain_lines_however_the_batch_is_split(wanted, changes):
    """In float64: the whole batch is scaled and turned, and its losses on the picture have their weight."""
    given = {**TINY, "image_size": 32, "kl_weight": 0.1, "eq_probability": 0.7, **changes}
    recipe = VaeRecipe(settings_of(**given), cpu_runtime(), held_out=[])
    for module in recipe.modules.values():
        module.double()
    recipe.balance.weight.fill_(0.7)
    step = next(step for step in range(5, 1000) if wanted(recipe.transformations.at(step)))
    batch = recipe.prepare(F.interpolate(crops(0, 2).float(), size=32).byte(), step)
    (ours, theirs), names = gradients_in_two_parts(recipe, batch, step)
    at = recipe.transformations.at(step)
    assert names == {"kl", "adversarial", "real_fake", *(("eq_l1", "eq_structural") if at else ("l1", "structural"))}

    images = vae.to_unit(batch.images_BCHW).double()
    mean, logvar = recipe.autoencoder.encode(images)
    latents, target = mean + torch.exp(0.5 * logvar) * batch.noise_BLhw, images
    if at and at.side < at.of:
        sizes = ((latents, at.side), (images, 2 * at.side))
        latents, target = (F.interpolate(x, size=(n, n), mode="bilinear") for x, n in sizes)
    for _ in range(at.turns if at else 0):
        latents, target = (x.transpose(2, 3).flip(2) for x in (latents, target))
    made = recipe.autoencoder.decode(latents)
    on_picture = (made - target).abs().mean() + vae.losses.structural(made, target).mean()
    on_picture = on_picture - 0.5 * 0.7 * recipe.discriminator(made).mean()
    kl = 0.1 * 0.5 * (mean**2 + logvar.exp() - 1 - logvar).sum() / images.numel()
    ((changes.get("eq_weight", 1) if at else 1) * on_picture + kl).backward()
    recipe.discriminator.zero_grad()
    real, fake = recipe.discriminator(target), recipe.discriminator(made.detach())
    (0.5 * (F.relu(1 - real).mean() + F.relu(1 + fake).mean())).backward()
    expected = [*recipe.autoencoder.parameters(), *recipe.discriminator.parameters()]
    for gradient, parameter in zip([*ours, *theirs], expected, strict=True):
        assert float((gradient - parameter.grad).norm()) <= 1e-9 * float(parameter.grad.norm()) + 1e-12


@pytest.mark.slow
@each_row({}, {"step_order": "alternating"})
def test_no_split_changes_the_weights(tmp_path, changes):
    how = {**TINY, "discriminator_warmup_steps": 1, "eq_probability": 0.7, **changes}
    whole, _ = weights_after(6, tmp_path, **how)
    split, _ = weights_after(6, tmp_path, micro_batch_size=3, **how)
    plain, _ = weights_after(6, tmp_path, **{**how, "eq_probability": 0.0})
    assert largest_difference(whole, split) < 1e-11
    assert largest_difference(whole, plain) > 1e-5


def test_lpips_looks_at_crops_of_the_transformed_pictures(tmp_path):
    """Its crops lie in the picture that is compared, and are as large as it if that is smaller."""
    given = {"perceptual_loss": "lpips", "lpips_weights": ["x"], "lpips_crop": 40, "image_size": 64}
    settings = settings_of(**{**TINY, **given, "adversarial_weight": 0.0, "eq_probability": 0.7})
    recipe = VaeRecipe(settings, cpu_runtime(), [], lpips=torch.nn.Identity())
    seen = []
    recipe.lpips = lambda made, images: seen.append((made, images)) or made.flatten(1).mean(1)
    for step in range(12):
        batch, at = recipe.prepare(torch.zeros(2, 3, 64, 64, dtype=torch.uint8), step), recipe.transformations.at(step)
        side = 2 * at.side if at else 64
        rows = torch.arange(side, dtype=torch.float32)[:, None].expand(2, 3, side, side)
        list(recipe._picture_terms(rows, rows, batch))
        made, images = seen.pop()
        size = min(40, side)
        assert torch.equal(made, images)
        assert made.shape[-2:] == (size, size)
        assert torch.equal(made[:, 0, :, 0].diff(dim=1), torch.ones(2, size - 1))  # No row beyond the picture.


@pytest.mark.slow
def test_graphs_hold_the_steps_without_a_transformation(tmp_path):
    how = {**TINY, "dtype": torch.float32, "adversarial_weight": 0.0, "eq_probability": 0.3}
    recorder = RecordedGraphs()
    (ours, _), (theirs, _) = (weights_after(12, tmp_path, graphs=one, **how) for one in (recorder, None))
    assert_same(ours, theirs)
    drawn = Transformations.of(settings_of(**{k: v for k, v in how.items() if k != "dtype"}))
    plain = sum(drawn.at(step) is None for step in range(12))
    assert (recorder.captures, recorder.replays) == (1, plain - 3)


@pytest.mark.slow
def test_a_plan_is_of_the_largest_step():
    """Its memory is that of a real step with a turned copy of the picture, and no other step takes more."""
    settings = settings_of_step(eq_probability=0.5, channels=[16, 16], image_size=32)
    plan, target = decide(CPU, settings.hardware), plan_target(settings)
    predicted = predict_step(target, plan, micro_batch_size=2)
    assert predicted.allocated_gb == pytest.approx(measured_peak_gb(target, plan, 2, False), rel=2e-3)
    plain = dataclasses.replace(settings, losses=dataclasses.replace(settings.losses, eq_probability=0.0))
    assert predict_step(plan_target(plain), plan, micro_batch_size=2).allocated_gb < predicted.allocated_gb
    drawn = Transformations.of(settings)
    small = next(step for step in range(100) if (at := drawn.at(step)) and at.side == drawn.sides[0])
    assert item_flops(settings, small) < 0.7 * item_flops(settings, drawn.largest_step(0))


@each_row(
    ({"eq_weight": 2.0}, "eq_weight 2 has no effect, as eq_probability is 0"),
    ({"eq_probability": 0.5, "train_part": "decoder"}, "an encoder that is not trained"),
    ({"eq_probability": 1.5}, "eq_probability"),
)
def test_settings_without_effect_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        settings_of(**changes)
