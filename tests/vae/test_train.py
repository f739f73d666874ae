"""The train-vae command: resolution stages, initialisation, trained parts, profiles, the profiler."""

import contextlib
import json
import logging
import multiprocessing
import os
import shutil
import signal
from dataclasses import replace
from unittest import mock

import pytest
import torch
from PIL import Image
from rich.console import Console

from gputrain.config import assemble, leaves, read_file
from gputrain.data_in.split import Mixture
from gputrain.engine.data import Sample
from gputrain.engine.run_folder import PlanFile
from gputrain.errors import UserError
from gputrain.fetch.hub import cache_folder
from gputrain.kinds import kinds
from gputrain.planner.memory import predict
from gputrain.vae import architecture, data
from gputrain.vae.config import TrainVae
from gputrain.vae.data import log_training, warn_of_small_pictures
from gputrain.vae.dataset import CropDataset, open_pictures
from gputrain.vae.diffusers_folder import save_diffusers
from gputrain.vae.kind import VaeWork
from gputrain.vae.latents import LatentScaling
from gputrain.vae.model import AutoencoderKL
from gputrain.vae.pretrained import load_model
from gputrain.vae.recipe import VaeRecipe
from tests.comparison import assert_same
from tests.toy import as_on_a_gpu, cpu_runtime
from tests.training import train_vae
from tests.vae.test_recipe import SMALL, settings_of

pytestmark = pytest.mark.usefixtures("flops_known")

PROFILES = ("draft", "fast", "high", "standard", "ultra")


@contextlib.contextmanager
def few_layers():
    """Gives the blocks of the preset one layer, as time and the size of checkpoints are in proportion to the layers."""
    made = {name: replace(architecture.PRESETS[name], layers_per_block=1) for name in ("flux", "flux2")}
    with mock.patch.dict(architecture.PRESETS, made):
        yield


@pytest.fixture(autouse=True, scope="module")
def _few_layers():
    with few_layers():
        yield


def run(folder, photographs, **changes):
    """Trains, and returns the content of the last checkpoint."""
    settings = {
        "data_path": str(photographs), "output_dir": str(folder), "batch_size": 2, "num_workers": 0, "device": "cpu",
        "evaluate_every_epochs": 0, "sample_every_steps": 0, "log_every_steps": 1, "adversarial_weight": 0.0,
        "plan": False,
    }  # fmt: skip
    train_vae(assemble(TrainVae, {**SMALL, **settings, **changes}), Console(quiet=True))
    return torch.load(folder / "checkpoint_last.pt", weights_only=True)


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_many_files_that_are_left_out_are_named_in_part_and_counted(photographs, tmp_path, caplog):
    for path in photographs.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    for number in range(13):
        (tmp_path / f"{number:02}.heic").write_bytes(b"\0\0\0\x18ftypheic" + bytes(20 + number))
    log_training(settings_of(), cpu_runtime(), open_pictures(tmp_path))
    assert sum("; left out" in message for message in caplog.messages) == 10
    assert "3 more files are left out (3 unsupported); gputrain validate names each" in caplog.messages


def test_an_unreadable_sample_picture_is_refused_before_the_first_step(photographs, tmp_path):
    with pytest.raises(UserError, match=r"gone\.png"):
        run(tmp_path, photographs, sample_pictures=[str(tmp_path / "gone.png")], num_epochs=1)
    assert not list(tmp_path.glob("checkpoint_*.pt"))
    assert not (tmp_path / "metrics.jsonl").exists()


def test_several_folders_with_weights_resume_bit_for_bit(photographs, tmp_path, caplog, monkeypatch):
    """Two folders of three photographs, one held out of each: an epoch has 2 * 1.5 + 2 * 1 pictures."""
    names = sorted(path.name for path in photographs.iterdir())
    for number, name in enumerate(names):
        folder = tmp_path / ("a", "b")[number % 2]
        folder.mkdir(exist_ok=True)
        (folder / name).symlink_to(photographs / name)
    count = len(names)
    folders = [f"{tmp_path / 'a'}=3", str(tmp_path / "b")]
    shared = {"data_path": folders, "num_epochs": 0, "num_steps": 6}
    read: list[Sample] = []
    crop_of = CropDataset.__getitem__
    monkeypatch.setattr(CropDataset, "__getitem__", lambda crops, key: read.append(key) or crop_of(crops, key))
    with caplog.at_level("INFO"):
        whole = run(tmp_path / "whole", photographs, **shared)
    drawn = Mixture((2, 2), (3, 1))
    first_epoch = [drawn.sample(Sample(0, place)) for place in range(8)]
    assert sorted(read[:8]) == sorted(first_epoch)
    assert (len(read), len(set(read))) == (12, 12)
    assert count == 6
    assert f"{tmp_path / 'a'}: 2 pictures with weight 3: 6 of an epoch, 75.0 %" in caplog.messages
    assert f"{tmp_path / 'b'}: 2 pictures with weight 1: 2 of an epoch, 25.0 %" in caplog.messages
    assert (whole["progress"]["items"], whole["data"]["held_out"]["items"]) == (8, 2)
    run(tmp_path / "parts", photographs, **shared, max_steps=3)
    resumed = run(tmp_path / "parts", photographs, **shared, resume_from="auto")
    assert_same(whole["modules"], resumed["modules"])
    assert not any("data_path" in message for message in caplog.messages)
    shared["data_path"] = [f"{tmp_path / 'a'}=2", str(tmp_path / "b")]
    run(tmp_path / "parts", photographs, **{**shared, "num_steps": 7}, resume_from="auto")
    (said,) = [message for message in caplog.messages if "data_path" in message]
    assert "a=3" in said
    assert "a=2" in said


def test_a_run_is_continued_at_another_size(photographs, tmp_path):
    """5 pictures: 3 steps of 2 at the first size, then 5 of 1 at the second."""
    first = run(tmp_path, photographs, image_size=24, num_epochs=1, batch_size=2)
    larger = {"image_size": 32, "num_epochs": 1, "batch_size": 1}
    continued = run(tmp_path, photographs, **larger, resume_from=str(tmp_path / "checkpoint_epoch_1.pt"))
    assert (first["progress"]["step"], continued["progress"]["step"], continued["progress"]["finished"]) == (3, 8, True)
    assert {"checkpoint_epoch_1.pt", "checkpoint_epoch_2.pt"} <= {path.name for path in tmp_path.iterdir()}
    assert read_file(tmp_path / "config.yaml")["image_size"] == continued["config"]["image_size"] == 32
    assert run(tmp_path, photographs, **larger, resume_from="auto")["progress"] == continued["progress"]


def test_a_resolution_schedule_of_an_earlier_version_is_refused():
    with pytest.raises(UserError, match="there is no option resolution_schedule any more"):
        settings_of(resolution_schedule="64:1,128:1", image_size=256)
    with pytest.raises(UserError, match="image_size 33 is not a multiple of 2"):
        settings_of(image_size=33)


def test_only_the_decoder_learns(photographs, tmp_path, caplog):
    before = run(tmp_path / "before", photographs, max_steps=1, learning_rate=0.0)["modules"]["autoencoder"]
    assert "trains: " not in caplog.text
    with caplog.at_level(logging.INFO, "gputrain"):
        after = run(tmp_path / "after", photographs, max_steps=3, train_part="decoder")["modules"]["autoencoder"]
    millions = [
        sum(one.numel() for name, one in after.items() if name.startswith(part)) / 1e6 for part in ("decoder", "")
    ]
    assert f"trains: {millions[0]:.3g} of {millions[1]:.3g} M parameters of the autoencoder: decoder" in caplog.text
    changed = {name.split(".")[0] for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"decoder"}
    assert "loss/autoencoder/l1" in rows(tmp_path / "after")[0]
    assert "loss/autoencoder/kl" not in rows(tmp_path / "after")[0]


def test_training_begins_from_a_stock_folder(photographs, tmp_path, caplog):
    caplog.set_level(logging.INFO, "gputrain")
    settings = settings_of()
    torch.manual_seed(5)
    model = AutoencoderKL(settings.architecture)
    save_diffusers(model, tmp_path / "stock", LatentScaling(1.0), sample_size=24)
    changes = {"init_from": str(tmp_path / "stock"), "learning_rate": 0.0, "max_steps": 1}
    made = run(tmp_path / "run", photographs, **changes)["modules"]
    assert caplog.text.count(f"start: the weights of {tmp_path / 'stock'}") == 1
    assert_same(made["autoencoder"], dict(model.state_dict()))
    averaged = load_model(tmp_path / "run", torch.device("cpu")).model.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.allclose(averaged[name], tensor, atol=1e-6), name
    # A resumed run continues from its own weights, and no longer needs the folder.
    (tmp_path / "stock" / "config.json").unlink()
    run(tmp_path / "run", photographs, **{**changes, "max_steps": 2}, resume_from="auto")

    with pytest.raises(UserError, match=r"config\.json"):
        run(tmp_path / "other", photographs, **changes)


def test_training_begins_from_a_name_of_the_hub(photographs, tmp_path, hub, caplog):
    """A pipeline is named, of which the autoencoder is fetched, in the form that is read."""
    caplog.set_level(logging.INFO, "gputrain")
    torch.manual_seed(5)
    model = AutoencoderKL(settings_of().architecture)
    pipeline = tmp_path / "pipeline"
    save_diffusers(model, pipeline / "vae", LatentScaling(0.5), sample_size=24)
    (pipeline / "unet").mkdir()
    for other in ("model_index.json", "unet/config.json", "vae/diffusion_pytorch_model.bin", "model.safetensors",
                  "vae/diffusion_pytorch_model.fp16.safetensors"):  # fmt: skip
        (pipeline / other).write_bytes(b"{}")
    hub.add("ann/pipeline", pipeline)
    changes = {"init_from": "ann/pipeline", "learning_rate": 0.0, "max_steps": 1}
    made = run(tmp_path / "run", photographs, **changes)
    assert_same(made["modules"]["autoencoder"], dict(model.state_dict()))
    assert hub.fetched() == {"vae/config.json", "vae/diffusion_pytorch_model.safetensors"}
    assert "start: the weights of ann/pipeline" in caplog.text
    assert made["config"]["init_from"] == read_file(tmp_path / "run" / "config.yaml")["init_from"] == "ann/pipeline"
    assert made["facts"]["latents"]["source"] == "ann/pipeline"
    hub.server.files.clear()
    shutil.rmtree(cache_folder())  # A resumed run needs neither the Hub nor the cache.
    asked = len(hub.server.log)
    run(tmp_path / "run", photographs, **{**changes, "max_steps": 2}, resume_from="auto")
    assert len(hub.server.log) == asked


def test_pictures_smaller_than_a_crop_are_said_with_what_helps(tmp_path, caplog):
    """Leaving small pictures out is no remedy where all of them are small."""
    for sides, helps, does_not in (
        ([256] * 6, ("6 of 6 pictures", "--image-size 256", "--target-size 512"), "--min-size"),
        ([600] * 9 + [200], ("1 of 10 pictures is smaller", "--image-size 192", "--min-size 512"), "--target-size"),
        ([512, 600], (), "pictures are smaller"),
    ):
        caplog.clear()
        folder = tmp_path / str(len(sides))
        folder.mkdir()
        for number, side in enumerate(sides):
            Image.new("RGB", (side, 600), (number, 0, 0)).save(folder / f"{number}.png")
        warn_of_small_pictures(open_pictures(folder), 512)
        assert all(part in caplog.text for part in helps), caplog.text
        assert does_not not in caplog.text


def test_a_stock_folder_of_another_architecture_is_refused(photographs, tmp_path, caplog):
    model = AutoencoderKL(settings_of(z_channels=8).architecture)
    save_diffusers(model, tmp_path / "stock", LatentScaling(1.0), sample_size=24)
    with pytest.raises(UserError, match="latent_channels") as caught:
        run(tmp_path / "run", photographs, init_from=str(tmp_path / "stock"), plan=True)
    assert "--z-channels 8" in caught.value.hint
    assert "runs on" not in caplog.text  # It is refused before anything is planned.


def test_every_profile_is_a_configuration():
    known = leaves(TrainVae)
    folder = kinds()["vae"].shipped
    assert sorted(path.stem for path in folder.iterdir()) == list(PROFILES)
    sizes = {}
    for name in PROFILES:
        values = read_file(folder / f"{name}.yaml")
        assert set(values) <= set(known)
        made = assemble(TrainVae, {"data_path": "x", **values})
        sizes[name] = (made.data.image_size, made.schedule.batch_size)
    assert sizes == {
        "ultra": (2048, 4), "high": (1536, 8), "standard": (1024, 16), "fast": (768, 24), "draft": (512, 32),
    }  # fmt: skip


@pytest.mark.slow
def test_progress_shows_arithmetic(photographs, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "step_flops", predict.step_flops)
    run(tmp_path, photographs, num_epochs=4, max_steps=11)
    row = rows(tmp_path)[-1]
    assert "speed/peak_share" not in row  # On a CPU, the rate of a product is no peak.
    tflops = row["speed/tflops"] * row["speed/seconds_per_step"]
    assert tflops * 1e12 == pytest.approx(2 * data.item_flops(settings_of(adversarial_weight=0.0), 10), rel=1e-6)


@pytest.mark.slow
def test_a_compiler_that_fails_ends_no_run(photographs, tmp_path, monkeypatch, caplog):
    """A C++ compiler that always fails takes the place of Triton."""
    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    decide = VaeWork.decide
    monkeypatch.setattr(VaeWork, "decide", lambda *facts: as_on_a_gpu(decide(*facts), compiled=True))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    with torch._inductor.config.patch({"cpp.cxx": (str(broken),)}), caplog.at_level(logging.WARNING):
        run(tmp_path / "run", photographs, max_steps=2)
    assert "torch.compile failed" in caplog.text
    assert "training goes on without it" in caplog.text
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert plan["settings"]["compile"]["value"] is False
    assert "the compiler failed" in plan["settings"]["compile"]["reason"]


def test_a_run_is_planned(photographs, tmp_path, caplog):
    with caplog.at_level(logging.INFO, "gputrain"):
        run(tmp_path / "first", photographs, max_steps=2, plan=True, memory_budget=0.5, num_workers=-1)
    record = PlanFile.read(tmp_path / "first" / "plan.json")
    assert record.plan.memory_budget_gb.value == 0.5
    assert record.plan.num_workers.value >= 1  # How many depends on the measured times of decoding and of a step.
    assert record.micro_batch == {"autoencoder": 2}
    parts = record.prediction["parts"]
    assert record.prediction["predicted_peak_gb"] == pytest.approx(sum(parts.values()))
    assert parts["optimizer"] > 2 * parts["gradients"]  # two moments, and the step count of each weight
    assert "memory: 0.01 of 0.5 GB predicted; the whole batch" in caplog.text


@pytest.mark.slow
def test_a_training_that_does_not_fit_ends_before_it_begins(photographs, tmp_path):
    with pytest.raises(UserError, match=r"a single picture is predicted to take .* GB") as raised:
        run(tmp_path / "run", photographs, max_steps=1, plan=True, memory_budget=0.001)
    assert "--no-plan" in raised.value.hint
    assert not (tmp_path / "run" / "checkpoint_last.pt").exists()


TWO_EPOCHS = {"image_size": 24, "num_epochs": 2, "batch_size": 2, "evaluate_every_epochs": 1, "eval_first": True}


def killed_in_the_second_evaluation(folder, photographs):
    """The first evaluation precedes the first step; the second one ends the first epoch."""
    evaluate, count = VaeRecipe.evaluate, 0

    def counted(recipe):
        nonlocal count
        count += 1
        if count == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return evaluate(recipe)

    VaeRecipe.evaluate = counted
    with few_layers():
        run(folder, photographs, **TWO_EPOCHS)


@pytest.mark.slow
def test_a_run_killed_before_the_evaluation_of_an_epoch_makes_it(photographs, tmp_path):
    straight = run(tmp_path / "a", photographs, **TWO_EPOCHS)
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=killed_in_the_second_evaluation, args=(tmp_path / "b", photographs))
    process.start()
    process.join(200)
    assert process.exitcode == -signal.SIGKILL
    resumed = run(tmp_path / "b", photographs, **TWO_EPOCHS, resume_from="auto")
    assert_same(straight["modules"], resumed["modules"])
    assert straight["progress"] == resumed["progress"]
    scores = [[(row["step"], row["eval/score"]) for row in rows(tmp_path / x) if "eval/score" in row] for x in "ab"]
    assert scores[0] == scores[1]
    assert [step for step, _ in scores[0]] == [0, 3, 5]
    names = [sorted(path.name for path in (tmp_path / x).glob("*.pt")) for x in "ab"]
    assert names[0] == names[1]
    assert "checkpoint_best.pt" in names[0]
    best = [torch.load(tmp_path / x / "checkpoint_best.pt", weights_only=True) for x in "ab"]
    assert best[0]["progress"] == best[1]["progress"]
