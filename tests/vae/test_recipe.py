"""The VAE's recipe in the engine: exact splits, exact resuming, out of memory, a delayed adversarial loss."""

import dataclasses

import pytest
import torch
from PIL import Image
from rich.console import Console

from gputrain.config import assemble
from gputrain.engine.cuda_graph import replay_gradients
from gputrain.engine.recipe import ChainGradients, Term
from gputrain.engine.step import update
from gputrain.errors import UserError
from gputrain.hw.plan import Hardware, decide
from gputrain.hw.probe import Machine
from gputrain.hw.runtime import apply
from gputrain.vae import recipe as vae
from gputrain.vae.config import SMALLEST_DISCRIMINATED, TrainVae
from gputrain.vae.data import item_flops
from gputrain.vae.dataset import open_pictures
from gputrain.vae.evaluate import HeldOutPictures
from gputrain.vae.losses import Lpips, PatchDiscriminator
from gputrain.vae.recipe import VaeRecipe
from tests.comparison import assert_same, largest_difference
from tests.tables import each_row, slow
from tests.toy import as_on_a_gpu, cpu_runtime, new_state, weights
from tests.training import train_vae

SMALL = {
    "data_path": "unused",
    "preset": "flux",
    "channels": [32, 32],
    "z_channels": 4,
    "image_size": 24,
    "batch_size": 8,
    "adversarial_weight": 0.5,
    "discriminator_start": 2,
    "discriminator_warmup_steps": 3,
    "discriminator_channels": 16,
    "warmup_steps": 5,
}


def settings_of(**changes) -> TrainVae:
    return assemble(TrainVae, {**SMALL, **changes})


def crops(step: int, count: int = 8) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    coarse = torch.rand(count, 3, 4, 4, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, size=24, mode="bilinear")
    return (255 * smooth).byte()


def weights_after(steps, tmp_path, *, lr=1e-4, fail=None, dtype=torch.float64, graphs=None, **changes):
    recipe = VaeRecipe(settings_of(**changes), cpu_runtime())
    for module in recipe.modules.values():
        module.to(dtype)
    if fail:
        inject(recipe, *fail)
    state = new_state(recipe, tmp_path)
    if graphs:
        replay_gradients(state, graphs)
    for step in range(steps):
        update(state, recipe.prepare(crops(step, recipe.settings.schedule.global_batch_size), step), step, lr)
        recipe.average(step)
    return weights(recipe), state


def inject(recipe: VaeRecipe, name: str, at_step: int) -> None:
    """Raises out of memory in a phase while a micro-batch has more than two pictures."""
    for index, group in enumerate(recipe.step_groups):
        if group.name == name:

            def loss(batch, step, inner=group.loss):
                for term in inner(batch, step):
                    yield term
                    if step == at_step and len(batch.images_BCHW) > 2:
                        torch.empty(10**15)

            recipe.step_groups[index] = dataclasses.replace(group, loss=loss)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return weights_after(20, tmp_path_factory.mktemp("whole"))[0]


@pytest.mark.slow
@pytest.mark.parametrize("micro_batch", [3, *(slow(size) for size in (4, 2, 1))])
def test_micro_batches_give_the_same_weights(whole, tmp_path, micro_batch):
    """Compares in float64 to exclude rounding errors. (In fp32, AdamW turns the rounding noise of a gradient that is
    almost zero into steps as large as the learning rate, for any split.)"""
    split, _ = weights_after(20, tmp_path, micro_batch_size=micro_batch)
    assert largest_difference(whole, split) < 1e-11


@pytest.mark.slow
@pytest.mark.parametrize("phase", [slow("autoencoder"), "discriminator"])
def test_running_out_of_memory_in_a_phase_changes_nothing(whole, tmp_path, phase):
    survived, state = weights_after(20, tmp_path, fail=(phase, 6))
    assert largest_difference(whole, survived) < 1e-11
    assert state.micro_batch[phase] == 2


@pytest.mark.slow
def test_accumulation_is_a_larger_batch(tmp_path):
    """4 pictures accumulated twice are a batch of 8."""
    at_once, _ = weights_after(6, tmp_path, batch_size=8)
    accumulated, state = weights_after(6, tmp_path, batch_size=4, accumulation_steps=2)
    assert state.micro_batch["autoencoder"] == 4
    assert largest_difference(at_once, accumulated) < 1e-11


def terms_at(step, **changes):
    recipe = VaeRecipe(settings_of(**changes), cpu_runtime())
    batch = recipe.prepare(crops(0), step)
    seen = {}
    for group in recipe.step_groups:
        for term in group.loss(batch, step):
            if isinstance(term, Term):
                seen[term.name] = term
                torch.autograd.backward(term.value * term.weight)
    return seen, recipe


def test_adversary_comes_in_stages():
    assert "real_fake" not in terms_at(1)[0]
    assert "real_fake" in terms_at(2)[0]
    assert "adversarial" not in terms_at(4)[0]
    assert "adversarial" in terms_at(5)[0]


def test_what_is_off_costs_nothing():
    terms, recipe = terms_at(9, adversarial_weight=0.0, perceptual_weight=0.0, ema_decay=0.0)
    assert set(terms) == {"l1", "kl"}
    assert set(recipe.modules) == {"autoencoder"}


@each_row(
    ({}, 0.99),
    ({"init_from": "weights"}, 0.99),
    ({"ema_decay": 0.9}, 0.9),
    ({"start": "random"}, 0.0),
    ({"channels": [16, 32]}, 0.0),  # The norms of so few channels have no place for a linear code.
)
def test_the_average_of_good_weights_begins_with_many_steps(changes, least):
    settings = settings_of(**{"preset": "fast", "channels": [], **changes})
    assert VaeRecipe(settings, cpu_runtime()).ema.least_decay == least


def test_gradient_is_that_of_the_summed_loss():
    """Compares three graphs with chained gradients with a single backward pass."""
    recipe = VaeRecipe(settings_of(kl_weight=0.1), cpu_runtime())
    recipe.balance.weight.fill_(0.7)
    for module in recipe.modules.values():
        module.double()
    batch = recipe.prepare(crops(0), 9)
    for term in recipe.autoencoder_loss(batch, 9):
        if isinstance(term, ChainGradients):
            torch.autograd.backward(term.tensors, term.gradients)
        elif isinstance(term, Term):
            torch.autograd.backward(term.value * term.weight)
    carried = {name: p.grad.clone() for name, p in recipe.autoencoder.named_parameters()}

    recipe.autoencoder.zero_grad()
    images = batch.images_BCHW.double() / 127.5 - 1
    mean, logvar = recipe.autoencoder.encode(vae.to_unit(batch.images_BCHW).double())
    made = recipe.autoencoder.decode(mean + torch.exp(0.5 * logvar) * batch.noise_BLhw)
    loss = (made - images).abs().mean() + vae.losses.structural(made, images).mean()
    loss = loss + 0.1 * 0.5 * (mean**2 + logvar.exp() - 1 - logvar).sum() / images.numel()
    loss = loss - 0.5 * 0.7 * recipe.discriminator(made).mean()
    loss.backward()
    for name, parameter in recipe.autoencoder.named_parameters():
        # The pictures are quantised in fp32 here and in fp64 there.
        assert (carried[name] - parameter.grad).norm() <= 1e-5 * parameter.grad.norm() + 1e-12, name


def test_the_smallest_picture_of_the_discriminator():
    discriminator = PatchDiscriminator(16)
    assert discriminator(torch.zeros(1, 3, SMALLEST_DISCRIMINATED, SMALLEST_DISCRIMINATED)).shape == (1, 1, 1, 1)
    with pytest.raises(RuntimeError, match="Kernel size"):
        discriminator(torch.zeros(1, 3, SMALLEST_DISCRIMINATED - 1, SMALLEST_DISCRIMINATED - 1))


def test_discriminator_sees_this_steps_pictures():
    recipe = VaeRecipe(settings_of(), cpu_runtime())
    batch = recipe.prepare(crops(0), 3)
    parts = recipe.split(batch, 3)
    for part in parts:
        for _ in recipe.autoencoder_loss(part, 3):
            pass
    with torch.no_grad():
        images = vae.to_unit(batch.images_BCHW)
        mean, logvar = recipe.autoencoder.encode(images)
        expected = recipe.autoencoder.decode(mean + torch.exp(0.5 * logvar) * batch.noise_BLhw)
    assert torch.allclose(batch.made_BCHW, expected, atol=1e-5)


@pytest.mark.slow
def test_resumed_run_is_bit_for_bit_the_undisturbed_one(tmp_path, photographs):
    """Compares 8 steps with 4 steps, new objects as in a new process, and 4 more; with discriminator and workers."""

    def run(folder, steps, resume=""):
        settings = settings_of(
            data_path=str(photographs),
            output_dir=str(folder),
            batch_size=2,
            accumulation_steps=2,
            max_steps=steps,
            resume_from=resume,
            num_workers=1,
            evaluate_every_epochs=1,
            sample_every_steps=0,
            device="cpu",
        )
        train_vae(settings, Console(quiet=True))
        return torch.load(folder / "checkpoint_last.pt", weights_only=True)

    straight = run(tmp_path / "straight", 8)
    run(tmp_path / "cut", 4)
    resumed = run(tmp_path / "cut", 8, resume="auto")
    assert_same(straight["modules"], resumed["modules"])
    assert_same(straight["optimizers"], resumed["optimizers"])
    assert straight["progress"] == resumed["progress"]
    assert straight["progress"]["items_seen"] == 32


@pytest.mark.slow
@pytest.mark.parametrize("channels_last", [False, True])
def test_bf16_learns_what_fp32_learns(tmp_path, channels_last):
    """Three steps with the discriminator change the weights equally in one part and in four."""
    plan = decide(Machine(system="Linux", cpu_cores=2), Hardware(device="cpu", channels_last=channels_last))
    runtime = apply(as_on_a_gpu(plan, precision="bf16"))
    assert runtime.dtype == torch.bfloat16
    start = VaeRecipe(settings_of(), cpu_runtime()).autoencoder.state_dict()
    moved = []
    for at, micro_batch in ((cpu_runtime(), 8), (runtime, 8), (runtime, 2)):
        recipe = VaeRecipe(settings_of(micro_batch_size=micro_batch), at)
        state = new_state(recipe, tmp_path, at)
        for step in (2, 5, 6):
            scalars = update(state, recipe.prepare(crops(step), step), step, 1e-3)
        assert all(value.isfinite() for value in scalars.values())
        after = recipe.autoencoder.state_dict()
        assert all(tensor.dtype == torch.float32 for tensor in after.values())
        moved.append(torch.cat([(after[name] - start[name]).flatten() for name in start]))
    fp32, whole, split = moved
    assert torch.cosine_similarity(fp32, whole, dim=0) > 0.9
    assert torch.cosine_similarity(whole, split, dim=0) > 0.9


def test_held_out_pictures_that_go_missing_end_no_run(photographs, tmp_path):
    for path in photographs.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    pictures = open_pictures(tmp_path, held_out_share=0.5).held_out
    settings = settings_of(adversarial_weight=0.0)
    recipe = VaeRecipe(settings, cpu_runtime(), HeldOutPictures(settings.data, pictures))
    before = recipe.evaluate().scalars
    for path in tmp_path.iterdir():
        path.unlink()
    assert recipe.evaluate().scalars == before
    sheet = recipe.sample().pictures["reconstructions"]
    assert [[cell.picture_HW3.shape for cell in row] for row in sheet.rows] == 2 * [len(pictures) * [(240, 240, 3)]]


@pytest.fixture(scope="module")
def lpips():
    """Returns the network with random frozen weights: about 59 MB."""
    model = Lpips().to_empty(device="cpu")
    model.shift.zero_()
    model.scale.fill_(1.0)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            fan_in = parameter[0].numel()
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * (2 / fan_in) ** 0.5)
        for head in model.heads:
            head.abs_()
    return model


@pytest.fixture
def small_crops(monkeypatch):
    monkeypatch.setattr("gputrain.vae.recipe.LPIPS_CROP", 32)


def after_lpips(lpips, tmp_path, **changes):
    """Returns weights and terms after two steps in which LPIPS is the only loss on the picture."""
    settings = settings_of(
        perceptual_loss="lpips", lpips_weights=["unused"], image_size=40, reconstruction_weight=0.0,
        adversarial_weight=0.0, kl_weight=0.0, ema_decay=0.0, batch_size=4, **changes,
    )  # fmt: skip
    recipe = VaeRecipe(settings, cpu_runtime(), lpips=lpips)
    recipe.autoencoder.double()
    before = {name: tensor.clone() for name, tensor in recipe.autoencoder.state_dict().items()}
    state = new_state(recipe, tmp_path)
    pictures = torch.nn.functional.interpolate(crops(0, 4).float(), size=40).byte()
    for step in range(2):
        scalars = update(state, recipe.prepare(pictures, step), step, 1e-3)
    return before, recipe.autoencoder.state_dict(), scalars


@pytest.mark.slow
def test_lpips_teaches_and_does_not_depend_on_the_split(small_crops, lpips, tmp_path):
    """Each picture has its own random crop, drawn for the whole batch."""
    before, at_once, scalars = after_lpips(lpips, tmp_path)
    assert float(scalars["loss/autoencoder/lpips"]) > 0
    assert float(scalars["gradient_norm/autoencoder"]) > 0
    moved = [name for name in before if not torch.equal(before[name], at_once[name])]
    assert len(moved) > 0.8 * len(before)
    _, split, _ = after_lpips(lpips, tmp_path, micro_batch_size=1)
    # LPIPS computes in fp32, whose rounding turns steps of Adam where a gradient is near zero: 2 steps of 1e-3 each.
    assert largest_difference(at_once, split) < 4e-3
    assert torch.nn.functional.cosine_similarity(moves(before, at_once), moves(before, split), dim=0) > 0.999


def test_lpips_looks_where_it_was_drawn_to(small_crops, lpips):
    settings = settings_of(perceptual_loss="lpips", lpips_weights=["unused"], image_size=40)
    recipe = VaeRecipe(settings, cpu_runtime(), lpips=lpips)
    batch = recipe.prepare(torch.nn.functional.interpolate(crops(0, 4).float(), size=40).byte(), 0)
    made, images = torch.rand(4, 3, 40, 40), vae.to_unit(batch.images_BCHW)
    (term,) = (term for term in recipe.picture_terms(made, images, batch) if term.name == "lpips")
    places = list(zip(batch.top_B.tolist(), batch.left_B.tolist(), strict=True))
    parts = [
        torch.stack(
            [picture[:, top : top + 32, left : left + 32] for picture, (top, left) in zip(of, places, strict=True)]
        )
        for of in (made, images)
    ]
    assert len(set(places)) > 1
    assert float(term.value) == pytest.approx(float(lpips(*parts).mean()), rel=1e-5)


def moves(before, after):
    return torch.cat([(after[name] - before[name]).flatten() for name in before])


def test_lpips_looks_at_another_place_of_each_picture_in_each_step(small_crops, lpips):
    settings = settings_of(perceptual_loss="lpips", lpips_weights=["unused"], image_size=400)
    recipe = VaeRecipe(settings, cpu_runtime(), lpips=lpips)
    pictures = torch.zeros(4, 3, 400, 400, dtype=torch.uint8)
    places = [recipe.prepare(pictures, step) for step in (0, 1)]
    assert len({(int(top), int(left)) for b in places for top, left in zip(b.top_B, b.left_B, strict=True)}) == 8
    again = recipe.prepare(pictures, 0)
    assert torch.equal(again.top_B, places[0].top_B)
    assert recipe.prepare(pictures[..., :32, :32], 0).top_B is None


@each_row(({"perceptual_loss": "lpips"}, "perceptual_loss lpips needs lpips_weights"))
def test_lpips_settings_that_cannot_be(changes, message):
    with pytest.raises(UserError, match=message):
        settings_of(**changes)


@pytest.mark.slow
def test_flops_of_a_step():
    """Known figures: flux's forward pass is 3.63 TFLOP at 512 px, and a backward pass is twice a forward."""
    flux = assemble(TrainVae, {"data_path": "x", "image_size": 512, "batch_size": 2, "perceptual_weight": 0.0})
    assert item_flops(flux, 0) / 1e12 == pytest.approx(3 * 3.63, rel=2e-3)
    settings = settings_of(image_size=64)
    whole = item_flops(settings, 0)
    assert item_flops(settings_of(image_size=64, gradient_checkpointing=True), 0) == whole
    assert 0.6 < item_flops(settings_of(image_size=64, train_part="decoder"), 0) / whole < 0.9
    assert whole == item_flops(settings, 1) < item_flops(settings, 2) < item_flops(settings, 5)


def test_samples_show_the_user_s_own_pictures(tmp_path):
    paths = [tmp_path / f"{number}.png" for number in range(2)]
    for number, path in enumerate(paths):
        Image.new("RGB", (40, 60), (50 * number, 100, 200)).save(path)
    settings = settings_of(sample_pictures=[str(path) for path in paths])
    held_out = HeldOutPictures(settings.data, [])
    assert [crop[:, 0, 0].tolist() for crop in held_out.chosen] == [[0, 100, 200], [50, 100, 200]]
    sheet = VaeRecipe(settings, cpu_runtime(), held_out).sample().pictures["reconstructions"]
    assert (sheet.title.split(",")[0], len(sheet.rows[0])) == ("own pictures", 2)
    assert VaeRecipe(settings_of(), cpu_runtime()).sample().pictures == {}
    with pytest.raises(UserError, match=r"gone\.png"):
        HeldOutPictures(settings_of(sample_pictures=[str(tmp_path / "gone.png")]).data, [])
