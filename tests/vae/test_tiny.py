"""Tiny decoders for the latents of another autoencoder, compared with stock diffusers."""

import copy
import dataclasses
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import diffusers
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from gputrain.engine.step import update
from gputrain.errors import UserError
from gputrain.planner.memory.predict import step_flops
from gputrain.vae import tiny
from gputrain.vae.architecture import VaeArchitecture
from gputrain.vae.diffusers_folder import WEIGHTS, save_diffusers
from gputrain.vae.latents import LatentScaling, PatchStatistics
from gputrain.vae.model import AutoencoderKL
from gputrain.vae.pretrained import load_model
from gputrain.vae.recipe import VaeRecipe, plan_target
from gputrain.vae.tiny import DistilledAutoencoder, TinyArchitecture, export_taesd, export_tiny, load_tiny
from tests.comparison import assert_same
from tests.recipes import assert_resumed_is_undisturbed, assert_split_changes_nothing
from tests.tables import each_row
from tests.toy import cpu_runtime, new_state
from tests.vae.test_recipe import crops, settings_of
from tests.vae.test_train import run

pytestmark = pytest.mark.usefixtures("flops_known")

SCALING = LatentScaling(0.4, 0.25)
TINY = {"train_part": "tiny-decoder", "adversarial_weight": 0.0}
CPU = torch.device("cpu")


def save_teacher(folder: Path, scaling: LatentScaling = SCALING) -> AutoencoderKL:
    torch.manual_seed(5)
    model = AutoencoderKL(settings_of().architecture)
    save_diffusers(model, folder, scaling, sample_size=24)
    return model


def pictures(count: int = 2, channels: int = 3) -> Tensor:
    return torch.rand(count, channels, 24, 24, generator=torch.Generator().manual_seed(0)) * 2 - 1


def stock_tiny(shape: TinyArchitecture) -> diffusers.AutoencoderTiny:
    torch.manual_seed(1)
    return diffusers.AutoencoderTiny(**dataclasses.asdict(shape))


@each_row(
    TinyArchitecture(),
    TinyArchitecture(latent_channels=16),
    TinyArchitecture.for_latents_of(VaeArchitecture((8, 8, 8), 5, in_channels=1, out_channels=1)),
    TinyArchitecture(3, 3, (8, 8), (16, 16), 4, (2, 1), (1, 3)),
)
def test_layers_are_those_of_stock_diffusers(tmp_path: Path, shape: TinyArchitecture) -> None:
    """A folder that diffusers wrote is read; latents, pictures and gradients are the same in float64."""
    stock = stock_tiny(shape)
    stock.save_pretrained(tmp_path / "stock")
    ours, stock = load_tiny(tmp_path / "stock").double(), stock.double()
    assert ours.architecture == shape
    images = pictures(channels=shape.in_channels).double()
    latents = stock.encode(images).latents
    assert (ours.encode(images).mean_BLhw.double() - latents).abs().max() < 1e-6  # Moments are in fp32.
    latents = (4 * torch.randn_like(latents)).requires_grad_()  # Some are squashed.
    grads = []
    for made in (ours.decode(latents), stock.decode(latents).sample):
        (grad,) = torch.autograd.grad(made.square().mean(), latents)
        grads += [made, grad]
    assert (grads[0] - grads[2]).abs().max() < 1e-12
    assert (grads[1] - grads[3]).abs().max() < 1e-12 * grads[3].abs().max()


@pytest.fixture(autouse=True, scope="module")
def _narrow():
    """Makes tiny decoders narrower, as time is in proportion to the square of their width."""
    with mock.patch.multiple(tiny, WIDTH=16, BLOCKS=1):
        yield


@pytest.fixture(scope="module")
def trained(photographs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with `teacher` and `run`, which has three steps of a tiny decoder."""
    folder = tmp_path_factory.mktemp("tiny")
    save_teacher(folder / "teacher")
    run(folder / "run", photographs, init_from=str(folder / "teacher"), max_steps=3, learning_rate=1e-3, **TINY)
    return folder


def test_stock_diffusers_decodes_the_latents_of_a_pipeline(trained: Path, tmp_path: Path, typed) -> None:
    """What a pipeline does, latents / scaling_factor + shift_factor, then decode, gives our picture of the picture
    whose latents the teacher made; the tiny encoder takes the teacher's place, too."""
    code, output = typed("export", "--model", trained / "run", "--output-dir", tmp_path / "export")
    assert code == 0, output
    assert "diffusers.AutoencoderTiny.from_pretrained" in output
    stock = diffusers.AutoencoderTiny.from_pretrained(tmp_path / "export")
    teacher = diffusers.AutoencoderKL.from_pretrained(trained / "teacher")
    images = pictures()
    ours = load_model(trained / "run", CPU).model
    with torch.no_grad():
        factor, shift = teacher.config.scaling_factor, teacher.config.shift_factor
        latents = (teacher.encode(images).latent_dist.mean - shift) * factor  # As a denoiser gets them.
        theirs = stock.decode(latents / stock.config.scaling_factor + stock.config.shift_factor).sample
        assert torch.allclose(theirs, ours.decode(ours.encode(images).mean_BLhw), atol=1e-5)
        read = load_model(tmp_path / "export", CPU).model
        assert torch.equal(read.encode(images).mean_BLhw, stock.encode(images).latents)
    assert len(stock.config.block_out_channels) == len(teacher.config.block_out_channels)  # Pipelines count them.


class Clamped(nn.Module):
    """The first layer of ComfyUI's small decoder."""

    def forward(self, latents: Tensor) -> Tensor:
        return torch.tanh(latents / 3) * 3


def test_the_files_of_comfyui_give_the_pictures_of_diffusers(tmp_path: Path, typed) -> None:
    """Its decoder is a sequence that begins with a clamp and ends with pictures in [0, 1]."""
    torch.manual_seed(0)
    model = DistilledAutoencoder(VaeArchitecture((8, 8, 8, 8), 16, norm_num_groups=2, layers_per_block=1))
    flux = LatentScaling(0.3611, 0.1159)
    export_tiny(model, tmp_path / "stock")
    files, difference = export_taesd(model, tmp_path / "comfy", flux)
    assert ([file.name for file in files], difference) == (
        ["taef1_decoder.safetensors", "taef1_encoder.safetensors"], 0,
    )  # fmt: skip
    assert export_taesd(model, tmp_path / "mine", None)[0][0].name == "mine_decoder.safetensors"
    stock = diffusers.AutoencoderTiny.from_pretrained(tmp_path / "stock")
    decoder = nn.Sequential(Clamped(), *copy.deepcopy(stock.decoder.layers))
    decoder.load_state_dict({name: torch.zeros_like(one) for name, one in decoder.state_dict().items()})
    decoder.load_state_dict(load_file(files[0]))
    latents, images = 4 * torch.randn(1, 16, 4, 4), torch.rand(1, 3, 16, 16)
    with torch.no_grad():
        assert torch.equal(decoder(latents) * 2 - 1, stock.decode(latents).sample)
        encoder = copy.deepcopy(stock.encoder.layers)
        encoder.load_state_dict(load_file(files[1]))
        assert torch.equal(encoder(images), stock.encode(images * 2 - 1).latents)
    with pytest.raises(UserError, match="four levels"):
        export_taesd(DistilledAutoencoder(settings_of().architecture), tmp_path / "other", flux)


def test_a_resumed_run_needs_no_teacher_and_goes_on_bit_for_bit(
    trained: Path, photographs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    teacher = save_teacher(tmp_path / "teacher")
    changes = {"init_from": str(tmp_path / "teacher"), "learning_rate": 1e-3, **TINY}
    begun = run(tmp_path / "cut", photographs, max_steps=1, **changes)
    shutil.rmtree(tmp_path / "teacher")
    resumed = run(tmp_path / "cut", photographs, max_steps=3, resume_from="auto", **changes)
    straight = torch.load(trained / "run" / "checkpoint_last.pt", weights_only=True)
    assert_same(straight["modules"], resumed["modules"])
    assert_same(straight["optimizers"], resumed["optimizers"])
    assert begun["facts"]["latents"]["scaling"]["scaling_factor"] == SCALING.scaling_factor
    weights, averaged = resumed["modules"]["autoencoder"], resumed["modules"]["ema"]
    for name, tensor in teacher.state_dict().items():
        assert name.startswith(("decoder.", "post_quant_conv.")) or torch.equal(weights[name], tensor), name
    assert not any(
        name.startswith(("decoder.up_blocks", "average.decoder.up_blocks")) for name in (*weights, *averaged)
    )


def test_evaluation_stands_beside_the_teacher(trained: Path, photographs: Path, tmp_path: Path, typed) -> None:
    def figures(model: Path) -> dict[str, float]:
        path = tmp_path / "figures.json"
        code, output = typed(
            "evaluate", "--model", model, "--data-path", photographs, "--image-size", 24, "--json", path
        )
        assert code == 0, output
        return {**json.loads(path.read_text()), "output": output}

    beside, alone = figures(trained / "run"), figures(trained / "teacher")
    assert beside["teacher_psnr_db"] == pytest.approx(alone["psnr_db"], abs=1e-4)
    assert min(beside["decode_seconds"], beside["teacher_decode_seconds"]) > 0
    (trained / "teacher").rename(trained / "elsewhere")
    try:
        for other in (None, {}, {"preset": "lite", "channels": [16, 16]}):
            if other is not None:  # Another autoencoder in its place, of the same or of other layers.
                torch.manual_seed(6)
                model = AutoencoderKL(settings_of(**other).architecture)
                save_diffusers(model, trained / "teacher", SCALING, sample_size=24)
            without = figures(trained / "run")
            assert without["psnr_db"] == beside["psnr_db"]
            assert "teacher_psnr_db" not in without
            assert "is not evaluated beside it" in without["output"]
            shutil.rmtree(trained / "teacher", ignore_errors=True)
    finally:
        (trained / "elsewhere").rename(trained / "teacher")


def begun(tmp_path: Path, **changes: object):
    recipe = VaeRecipe(settings_of(**{**TINY, **changes}), cpu_runtime(), held_out=[])
    for module in recipe.modules.values():
        module.double()
    return new_state(recipe, tmp_path)


def test_splits_and_resumption_change_nothing(tmp_path: Path) -> None:
    learns = {"adversarial_weight": 0.5, "discriminator_start": 0, "discriminator_warmup_steps": 1}
    assert_split_changes_nothing(
        begun(tmp_path, **learns), begun(tmp_path, micro_batch_size=3, **learns), crops, range(3)
    )
    assert_resumed_is_undisturbed(lambda: begun(tmp_path), crops, steps=3, stop=1)


def test_the_encoder_stays_and_both_tiny_halves_learn(tmp_path: Path) -> None:
    """Gradient checkpointing changes nothing, and the moving average begins without the random weights."""
    changed, states = set(), []
    for checkpointing in (False, True):
        state = begun(tmp_path, gradient_checkpointing=checkpointing)
        before = {name: one.clone() for name, one in state.recipe.autoencoder.state_dict().items()}
        update(state, state.recipe.prepare(crops(0), 0), 0, 1e-3)
        states.append(state.recipe.autoencoder.state_dict())
        changed |= {name.split(".")[0] for name, one in states[-1].items() if not torch.equal(before[name], one)}
        assert state.recipe.ema.least_decay == 0
    assert changed == {"decoder", "tiny_encoder"}
    assert_same(*states)


def test_latents_are_normalised_with_the_means_of_channels() -> None:
    """Those of Playground 2.5 have a mean and a deviation each, as the pipeline of SDXL undoes them."""
    model = DistilledAutoencoder(VaeArchitecture((8, 8), 4, norm_num_groups=4))
    teacher = AutoencoderKL(model.architecture)
    mean, std = torch.tensor([1.0, -2, 3, 0.5]), torch.tensor([2.0, 3, 4, 5])
    model.load_state_dict(model.beginning(teacher.state_dict(), LatentScaling(0.5, None, mean.tolist(), std.tolist())))
    images = pictures()
    with torch.no_grad():
        theirs, ours = teacher.encode(images), model.encode(images)
    undone = ours.mean_BLhw * std[:, None, None] / 0.5 + mean[:, None, None]
    assert torch.allclose(undone, theirs.mean_BLhw, atol=1e-5)
    ratio = (0.5 * (theirs.logvar_BLhw - ours.logvar_BLhw)).exp()
    assert torch.allclose(ratio, (std / 0.5)[:, None, None].expand_as(ratio), rtol=1e-4)


def test_a_run_without_factors_has_those_of_its_export(
    photographs: Path, tmp_path: Path, typed, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gputrain")
    run(tmp_path / "teacher", photographs, max_steps=1)
    made = run(tmp_path / "tiny", photographs, max_steps=1, init_from=str(tmp_path / "teacher"), **TINY)
    assert typed("export", "--model", tmp_path / "teacher", "--output-dir", tmp_path / "export")[0] == 0
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    weights = made["modules"]["autoencoder"]
    assert weights["latents_factor_L"].tolist() == pytest.approx([config["scaling_factor"]] * 4, rel=1e-6)
    assert weights["latents_shift_L"].tolist() == pytest.approx([config["shift_factor"]] * 4, rel=1e-6)
    assert "latents are normalised as pipelines do: scaling_factor" in caplog.text


def test_factors_of_a_file_that_does_not_say_its_own_are_a_guess_that_is_warned_of(
    trained: Path, photographs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_file(load_file(trained / "teacher" / WEIGHTS), tmp_path / "ae.safetensors")
    made = run(tmp_path / "tiny", photographs, max_steps=1, init_from=str(tmp_path / "ae.safetensors"), **TINY)
    (factor, *_), (shift, *_) = (made["modules"]["autoencoder"][f"latents_{one}_L"] for one in ("factor", "shift"))
    (warning,) = (one.getMessage() for one in caplog.records if "does not say by which factors" in one.getMessage())
    assert f"scaling_factor {factor:.6g}, " in warning
    assert f"shift_factor {shift:.6g} (measured on" in warning
    assert "config.json" in warning


def test_a_step_is_planned_with_the_encoder_of_the_teacher() -> None:
    """The frozen encoder runs once and forwards: the step has its FLOPs, and three times those of the tiny halves."""
    settings = settings_of(**TINY, preset="fast", perceptual_weight=0.0, recompute_norms=False)

    def flops(module: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> float:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            module(torch.zeros(1, *shape))
        return counter.get_total_flops()

    model = DistilledAutoencoder(settings.architecture, recompute_norms=False)
    once = flops(lambda x: model.encode(x).mean_BLhw, (3, 24, 24))
    first = 2 * 9 * tiny.WIDTH * (3 * 24 * 24)  # Pictures need no gradient.
    halves = flops(model.decoder, (4, 12, 12)) + flops(model.tiny_encoder, (3, 24, 24))
    assert step_flops(plan_target(settings), 0, items=1) == pytest.approx(once + 3 * halves - first, rel=0.01)


@each_row(
    ({"train_part": "tiny-decoder"}, "needs the autoencoder whose latents it decodes", "--init-from"),
    ({"train_part": "decoder", "init_from": "RUN"}, "has a tiny decoder", "--train-part tiny-decoder"),
    ({"init_from": "RUN"}, "cannot be trained with train_part all", "teacher is the autoencoder"),
    ({"train_part": "tiny-decoder", "init_from": "EXPORT"}, "describes AutoencoderTiny", "the run that trained it"),
    ({"train_part": "tiny-decoder", "preset": "flux2"}, "pipelines of FLUX.2 take no", "--decoder-channels 64"),
    ({"train_part": "tiny-decoder", "decoder_channels": [32, 64]}, "no effect on a tiny decoder", "drop --decoder-ch"),
    (
        {"init_from": "TEACHER", "train_part": "decoder", "decoder_channels": [32, 64]},
        "different architecture",
        "--train-part tiny-decoder",
    ),
    (
        {"init_from": "TEACHER", "train_part": "decoder", "resume_from": "RUN"},
        "was trained with train_part tiny-decoder, and this run has decoder",
        "--train-part tiny-decoder, or begin a new run",
    ),
)
def test_what_has_no_latents_is_refused(
    trained: Path, photographs: Path, tmp_path: Path, changes: dict[str, str], message: str, hint: str
) -> None:
    if not (trained / "export").exists():
        diffusers.AutoencoderTiny().save_pretrained(trained / "export")
    places = {name.upper(): str(trained / name) for name in ("run", "export", "teacher")}
    with pytest.raises(UserError, match=message) as caught:
        run(
            tmp_path / "new",
            photographs,
            max_steps=1,
            **{key: places.get(str(one), one) for key, one in changes.items()},
        )
    assert hint in (caught.value.hint or "")


@pytest.mark.slow
def test_a_tiny_decoder_can_begin_with_another(trained: Path, photographs: Path, tmp_path: Path) -> None:
    """Its weights, the frozen encoder and the source of its latents are those of the other run."""
    changes = {**TINY, "init_from": str(trained / "run"), "learning_rate": 0.0, "max_steps": 1}
    made = run(tmp_path / "second", photographs, **changes)
    before = load_model(trained / "run", CPU)
    assert_same(made["modules"]["autoencoder"], dict(before.model.state_dict()))
    assert made["facts"]["latents"]["source"] == str(trained / "teacher")


@pytest.mark.slow
def test_a_narrower_decoder_learns_the_latents_of_flux2(photographs: Path, tmp_path: Path, typed) -> None:
    """The encoder and the statistics of patches stay, and the export decodes the latents of the source."""
    settings = settings_of(preset="flux2", train_part="decoder", decoder_channels=[32, 64], adversarial_weight=0.0)
    torch.manual_seed(5)
    teacher = AutoencoderKL(dataclasses.replace(settings.architecture, decoder_block_out_channels=()))
    statistics = PatchStatistics([0.5] * 16, [2.0] * 16)
    save_diffusers(teacher, tmp_path / "teacher", LatentScaling(patches=statistics), sample_size=24)
    changes = {"preset": "flux2", "train_part": "decoder", "decoder_channels": [32, 64]}
    run(tmp_path / "run", photographs, max_steps=2, init_from=str(tmp_path / "teacher"), **changes)
    assert typed("export", "--model", tmp_path / "run", "--output-dir", tmp_path / "export")[0] == 0
    stock = diffusers.AutoencoderKLFlux2.from_pretrained(tmp_path / "export")
    ours, images = load_model(tmp_path / "run", CPU).model, pictures()
    with torch.no_grad():
        latents = teacher.encode(images).mean_BLhw
        assert torch.allclose(stock.encode(images).latent_dist.mean, latents, atol=1e-5)
        assert torch.allclose(stock.decode(latents).sample, ours.decode(latents), atol=1e-5)
    assert stock.bn.running_var.tolist() == statistics.var
    code, output = typed("evaluate", "--model", tmp_path / "run", "--data-path", photographs, "--image-size", 24)
    assert code == 0, output
    assert "teacher_psnr_db" in output
