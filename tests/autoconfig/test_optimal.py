"""Settings for models that are not ours, against arithmetic on models whose memory is known beforehand."""

import json
import math
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import TrainingArguments, Wav2Vec2Config, Wav2Vec2ForCTC

from gputrain.autoconfig.dataset import profile_dataset
from gputrain.autoconfig.inputs import BatchGuess, batch_guesses, output_loss
from gputrain.autoconfig.memory_models import MemoryModels
from gputrain.autoconfig.optimal import Planner, create_optimal_config
from gputrain.autoconfig.settings import load_config
from gputrain.errors import UserError
from gputrain.hw.probe import Machine
from gputrain.planner.memory.torch_model import measure_training_memory, predict_training_memory
from tests.tables import each_row

DEEP = 6


class Scaled(nn.Module):
    """Numbers times weights, over and over: each pass keeps one tensor as large as its input, in fp32 on any card."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, device="meta"))

    def forward(self, x):
        for _ in range(DEEP):
            x = torch.relu(x * self.weight)
        return x


class Items:
    """Tensors that take no memory."""

    def __init__(self, count: int, *shape: int):
        self.count, self.shape = count, shape

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        return torch.empty(1).expand(self.shape)


def peak_gb(items: int, width: int) -> float:
    """Weights four times (gradients and two moments), and of each item the input, what each pass keeps, and four
    tensors on their way back."""
    return 4e-9 * width * (4 + items * (1 + DEEP + 4))


@each_row(("t4", 8), ("l4", 16), ("a100-40", 32), ("NVIDIA A10G", 16))
def test_cards_by_arithmetic(gpu, micro):
    """An item takes 0.9 GB; of 13.6, 20.4 and 34 GB, a twentieth is left for what the prediction misses."""
    config, manager = create_optimal_config(Items(50, 20_000_000), Scaled(20_000_000), 32, 0.85, gpu)
    assert (config.per_device_train_batch_size, config.gradient_accumulation_steps) == (micro, 32 // micro)
    # What the allocator holds beyond its tensors are gradients' blocks between those of activations.
    assert peak_gb(micro, 20_000_000) <= config.predicted_peak_gb <= 1.1 * peak_gb(micro, 20_000_000)
    assert config.budget_gb == pytest.approx(0.85 * manager.machine.gpu_memory_gb)
    assert (config.fp16, config.bf16) == ((True, False) if gpu == "t4" else (False, True))
    assert not config.gradient_checkpointing
    assert set(config.reasons) >= {
        "per_device_train_batch_size", "gradient_accumulation_steps", "fp16", "bf16", "gradient_checkpointing",
        "dataloader_num_workers", "max_duration_seconds", "streaming", "predicted_peak_gb",
    }  # fmt: skip
    assert all(config.reasons.values())


def test_a_plan_for_a_card_is_of_what_the_allocator_reserves():
    config, _ = create_optimal_config(Items(50, 20_000_000), Scaled(20_000_000), 32, gpu="l4")
    batch = torch.empty(config.per_device_train_batch_size, 20_000_000, device="meta")
    found = predict_training_memory(Scaled(20_000_000), output_loss, batch)
    assert found.reserved_gb > found.allocated_gb
    assert config.predicted_peak_gb == pytest.approx(found.reserved_gb, rel=1e-9)


def plan_on_cpu(
    data, model, batch_size: int, ram_gb: float, *, share=0.85, loss=output_loss, seconds=0.0, over="chunk"
):
    """A plan for a machine without a card, whose allocator keeps nothing: there arithmetic holds to the last byte."""
    profile = profile_dataset(data)
    found = MemoryModels(model, loss, batch_guesses(model, profile), "fp32", "adamw", torch.device("cpu"))
    manager = Planner(Machine(system="Linux", cpu_cores=1, ram_gb=ram_gb), profile, found, "")
    return manager.plan(batch_size, share, seconds, over), manager


@each_row(1, 2, 7, 12, 30, 31, 32, 48)
def test_the_batch_is_kept_exactly(batch_size):
    config, _ = plan_on_cpu(Items(50, 10**6), Scaled(10**6), batch_size, 1)
    assert config.per_device_train_batch_size * config.gradient_accumulation_steps == batch_size
    fitting = [m for m in range(1, batch_size + 1) if batch_size % m == 0 and 1.05 * peak_gb(m, 10**6) < 0.85]
    assert config.per_device_train_batch_size == max(fitting)


def test_more_margin_and_more_memory_take_more():
    sizes = [
        create_optimal_config(Items(50, 10**6), Scaled(10**6), 64, margin, vram_gb=gb)[0].per_device_train_batch_size
        for gb, margin in ((1, 0.3), (1, 0.6), (1, 0.9), (2, 0.9), (6, 0.9))
    ]
    assert sizes == [4, 8, 16, 32, 64]  # The limits are 6.1, 13, 19, 39 and 117; sizes divide 64.


def test_what_does_not_fit_says_by_how_much_and_what_would_help():
    with pytest.raises(UserError) as error:
        plan_on_cpu(Items(5, 10**9), Scaled(10**9), 32, 24)
    need_gb = 1.05 * peak_gb(1, 10**9)
    assert error.value.message == (
        f"Scaled does not fit this machine: one item takes {need_gb:.3g} GB, which is {need_gb - 20.4:.3g} GB more "
        "than the available 20.4 GB"
    )
    assert error.value.hint == "the smallest known GPU that it fits is NVIDIA H100 SXM, 80 GB (h100)"
    with pytest.raises(UserError) as error:
        plan_on_cpu(Items(5, 2 * 10**9), Scaled(2 * 10**9), 32, 24)
    alone = 1.05 * 4 * 2 * 4
    assert f"weights, gradients and optimizer state alone take {alone:.3g} GB" in error.value.hint


@each_row(
    ({"safety_margin": 0.04}, r"a safety margin of 0\.04"),
    ({"safety_margin": 0.99}, r"a safety margin of 0\.99"),
    ({"safety_margin": math.nan}, "a safety margin of nan"),
    ({"target_batch_size": 0}, "a target batch size of 0"),
    ({"target_batch_size": 2.5}, r"a target batch size of 2\.5"),
    ({"max_duration_seconds": -1}, "clips of at most -1 s"),
    ({"vram_gb": -1}, "a card of -1 GB"),
    ({"over_long": "burn"}, "'burn' is not a choice"),
    ({"optimizer": "muon"}, "'muon' is not a choice"),
    ({"dataset": []}, "the dataset is empty"),
    ({"dataset": [1.0, -2.0]}, "clip 1: a length of -2 seconds"),
    ({"gpu": "rtx4009"}, "unknown GPU 'rtx4009'"),
)
def test_bad_input_is_named(changes, message):
    with pytest.raises(UserError, match=message) as error:
        create_optimal_config(**{"dataset": Items(5, 8), "model": Scaled(8), **changes})
    if "gpu" in changes:
        assert "rtx4090" in error.value.hint


# ------------------------------------------------------------------------------------- models that mix the items


class Pairs(nn.Module):
    """Compares all items of a batch with each other, without and with memory for it."""

    def __init__(self, wide=4_000_000, *, compares=True):
        super().__init__()
        self.weight, self.compares = nn.Parameter(torch.ones(wide, device="meta")), compares

    def forward(self, x):
        x = torch.relu(x * self.weight)
        return {"loss": torch.log_softmax(x @ x.T, -1).diagonal().mean() if self.compares else x.mean()}


def test_a_loss_that_compares_items_says_that_parts_change_it(caplog):
    for compares, batch_size, said in ((True, 64, True), (False, 64, False), (True, 2, False)):
        caplog.clear()
        config, _ = create_optimal_config(Items(50, 4_000_000), Pairs(compares=compares), batch_size, vram_gb=1)
        assert (config.per_device_train_batch_size < batch_size) == (batch_size == 64)
        assert ("the loss compares the items of a batch with each other" in config.reasons["target_batch_size"]) == said
        assert ("another micro-batch size gives another result" in caplog.text) == said
        assert config.reasons["target_batch_size"].startswith("it is kept exactly") != said


def norms(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 64, 3), layer, nn.ReLU(), nn.Conv2d(64, 64, 3))


class MinibatchStdDev(nn.Module):
    def forward(self, x):
        return x


class Kept(nn.BatchNorm2d):
    def train(self, mode=True):
        return super().train(False)


@each_row(
    (nn.BatchNorm2d(64), True), (nn.SyncBatchNorm(64), True), (nn.BatchNorm2d(64, track_running_stats=False), True),
    (MinibatchStdDev(), True), (nn.GroupNorm(8, 64), False), (nn.InstanceNorm2d(64), False), (Kept(64), False),
)  # fmt: skip
def test_layers_with_statistics_of_a_batch_get_at_least_two_items_and_say_so(layer, found):
    model = norms(layer).eval()
    config, _ = create_optimal_config([torch.zeros(3, 64, 64)] * 40, model, 14, vram_gb=0.02 if not found else 0.04)
    assert config.per_device_train_batch_size in ((2, 7) if found else (1, 2, 7))
    said = f"{type(layer).__name__} (1) uses the statistics of a batch, which here is a micro-batch of"
    assert (said in config.reasons["target_batch_size"]) == found
    assert not (found and "costs nothing in the result" in config.reasons["gradient_accumulation_steps"])
    assert not any(module.training for module in model.modules())


def test_batch_norm_of_vectors_is_planned_from_two_items_on():
    model = nn.Sequential(nn.Linear(10, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 2))
    data = [(torch.zeros(10), 0)] * 33
    for gpu in ("l4", None):
        config, manager = create_optimal_config(data, model, 8, gpu=gpu)
        assert config.per_device_train_batch_size == 8
        assert config.drop_last  # The last of 33 items would be alone.
        assert manager.limit.least == 2
    with pytest.raises(UserError, match="more than 1 value per channel"):
        create_optimal_config(data, model, 1, gpu="l4")


def test_a_prime_batch_that_two_items_do_not_divide_says_so():
    with pytest.raises(UserError, match="the smallest micro-batch, of 13 items takes") as error:
        create_optimal_config([torch.zeros(3, 64, 64)] * 40, norms(nn.BatchNorm2d(64)), 13, vram_gb=0.04)
    assert "choose a target_batch_size that is a multiple of 2" in error.value.hint


# ------------------------------------------------------------------------------------------------------- clips


class Wave(nn.Module):
    """Like `Scaled`, for a wave of any length."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, wave_BL):
        for _ in range(DEEP):
            wave_BL = torch.relu(wave_BL * self.weight)
        return wave_BL


SECOND_GB = 16_000 * 4e-9 * (1 + DEEP + 4)  # Memory of a second of a clip.


def test_clips_that_do_not_fit_are_cut():
    lengths = [10.0] * 30 + [20.0, 25.0]
    config, manager = plan_on_cpu(lengths, Wave(), 8, SECOND_GB * 18 * 1.05 / 0.85)
    assert config.max_duration_seconds == pytest.approx(0.98 * 18, rel=0.01)
    assert config.per_device_train_batch_size == 1
    assert "2 longer of 32 clips, 13.0% of the hours, are cut" in config.reasons["max_duration_seconds"]
    refusing, _ = plan_on_cpu(lengths, Wave(), 8, SECOND_GB * 18 * 1.05 / 0.85, over="refuse")
    assert "are left out" in refusing.reasons["max_duration_seconds"]
    assert manager.profile.hours == pytest.approx(345 / 3600)


def test_half_the_hours_are_not_cut_without_being_asked():
    lengths, ram_gb = [10.0] * 3 + [20.0] * 3, SECOND_GB * 18 * 1.05 / 0.85
    with pytest.raises(UserError, match=r"one item of 20\.0 s takes") as error:
        plan_on_cpu(lengths, Wave(), 8, ram_gb)
    seconds = float(error.value.hint.split("at most ")[1].split(" s")[0])
    config, _ = plan_on_cpu(lengths, Wave(), 8, ram_gb, seconds=seconds)
    assert config.max_duration_seconds == seconds == pytest.approx(0.98 * 18, rel=0.01)
    assert "asked for at most" in config.reasons["max_duration_seconds"]


class Late(nn.Module):
    """Large weights, and layers that are computed again, one after the other: with few items the peak is where the
    optimizer's memory is, with many it is where a layer is repeated."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.ones(1000, device="meta")) for _ in range(4)])
        self.large = nn.Parameter(torch.ones(10**6, device="meta"))

    def forward(self, x):
        def layer(x, weight):
            return torch.relu(torch.relu(torch.relu(x * weight) * weight) * weight)

        for weight in self.weights:
            x = checkpoint(layer, x, weight, use_reentrant=False)
        return {"logits": x, "large": (self.large * self.large * self.large).sum()}


def both(model, batch):
    out = model(batch)
    return out["logits"].square().mean() + out["large"]


def test_a_peak_that_bends_is_looked_at_where_it_counts():
    """The line through one item and two lies below what many take; the choice keeps to what they take."""
    _, manager = plan_on_cpu(Items(5, 1000), Late(), 1, 24, loss=both)
    known = {items: manager.memory_models.step(items, 0.0).reserved_gb for items in (1, 2, 1024, 2048)}
    straight = known[1] + 2047 * (known[2] - known[1])
    assert known[2048] > 1.2 * straight
    between_gb = (straight + known[2048]) / 2  # The line would have allowed all 2048.
    config, _ = plan_on_cpu(Items(5, 1000), Late(), 2048, 1.05 * between_gb / 0.85, loss=both)
    assert config.per_device_train_batch_size == 1024
    assert known[1024] <= config.predicted_peak_gb <= between_gb


def test_data_too_large_for_the_ram_are_streamed():
    machine = Machine(system="Linux", cpu_cores=4, ram_gb=16, ram_free_gb=8)
    for hours, streaming in ((10, False), (20, True)):  # 0.23 GB an hour in fp32 at 16 kHz, and 4 GB are half
        profile = profile_dataset([36.0] * (100 * hours))
        guess = BatchGuess(lambda B, s: torch.empty(B, round(s * 16000)), "")
        found = MemoryModels(Wave(), output_loss, [guess], "fp32", "adamw", None)
        config = Planner(machine, profile, found, "").plan(4, 0.85, 0, "chunk")
        assert config.streaming is streaming
        assert f"about {hours * 3600 * 16000 * 4 / 1e9:.3g} GB" in config.reasons["streaming"]
        assert config.dataloader_num_workers == 4


# ------------------------------------------------------------------------------------------------ transformers


def tiny(layers: int = 1, **changes) -> Wav2Vec2ForCTC:
    config = Wav2Vec2Config(
        vocab_size=8, hidden_size=32, num_hidden_layers=layers, num_attention_heads=2, intermediate_size=128,
        conv_dim=(8,) * 3, conv_kernel=(10, 8, 4), conv_stride=(8, 8, 5), num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2, **changes,
    )  # fmt: skip
    return Wav2Vec2ForCTC(config)


@pytest.mark.slow
def test_a_model_of_transformers_is_predicted_and_left_alone():
    """layerdrop and SpecAugment, which choose by chance, are off in the prediction alone, which is then of a step in
    which nothing falls out: as a real one, counted."""
    model = tiny(layerdrop=0.5, apply_spec_augment=True).eval()
    config, manager = create_optimal_config([2.0], model, 4, gpu="t4")
    assert (model.config.layerdrop, model.config.apply_spec_augment, model.training) == (0.5, True, False)
    # On the CPU, since the segments of a card's allocator are larger than so small a model.
    found = MemoryModels(model, output_loss, manager.memory_models.guesses, "fp32", "adamw", torch.device("cpu"))
    real = measure_training_memory(
        model, output_loss, found.guesses[0].make(2, 2.0), torch.device("cpu"), precision="fp32", optimizer="adamw"
    )  # fmt: skip
    assert real.reserved_gb == pytest.approx(found.step(2, 2.0).reserved_gb, rel=0.01)
    assert not found.unpredictable
    assert config.reasons["predicted_peak_gb"].startswith("predicted on fake tensors, of 13.6 GB")


@pytest.mark.slow
def test_checkpointing_where_too_little_fits_without(tmp_path):
    model = tiny(layers=4)
    model.freeze_feature_encoder()
    _, manager = plan_on_cpu([6.0], model, 4, 24)
    one, leaner = (manager.memory_models.step(1, 6.0, repeats).reserved_gb for repeats in (False, True))
    assert leaner < 0.9 * one
    assert not manager.memory_models.unpredictable
    config, _ = plan_on_cpu([6.0], model, 4, 1.05 * (one + leaner) / 2 / 0.9, share=0.9)
    assert config.gradient_checkpointing
    step = manager.memory_models.step(config.per_device_train_batch_size, 6.0, checkpointing=True)
    assert config.predicted_peak_gb == pytest.approx(step.reserved_gb, rel=1e-3)
    arguments = TrainingArguments(str(tmp_path), **{**config.training_arguments(), "bf16": False})
    name = "activation" if hasattr(arguments, "activation_checkpointing") else "gradient"
    assert getattr(arguments, f"{name}_checkpointing") is True
    assert getattr(arguments, f"{name}_checkpointing_kwargs") == {"use_reentrant": False}


def test_weights_in_16_bit_are_refused_where_no_step_could_be_taken():
    """Frozen ones may stay; the hint is what makes the plan."""
    for dtype, gpu in ((torch.float16, "t4"), (torch.float16, "l4"), (torch.bfloat16, "t4")):
        model = Scaled(1000).to(dtype)
        with pytest.raises(UserError, match=f"Scaled has weights to train in {dtype}") as error:
            create_optimal_config(Items(50, 1000), model, 4, gpu=gpu)
        assert "call model.float() before" in error.value.hint
        create_optimal_config(Items(50, 1000), model.float(), 4, gpu=gpu)
    model = Scaled(1000).to(torch.bfloat16)
    config, _ = create_optimal_config(Items(50, 1000), model, 4, gpu="l4")
    assert config.bf16
    assert "weights in bf16 round small updates away" in config.reasons["bf16"]
    frozen = nn.Sequential(Scaled(1000), Scaled(1000).half().requires_grad_(False))
    create_optimal_config(Items(50, 1000), frozen, 4, gpu="t4", loss=lambda m, x: m[0](x).sum())


def test_arguments_for_the_trainer_are_those_of_the_plan():
    """The evaluation takes the planned micro-batch, not 8, and the optimizer is the planned one."""
    config, _ = create_optimal_config(Items(50, 20_000_000), Scaled(20_000_000), 32, gpu="t4", optimizer="sgd")
    arguments = config.training_arguments()
    assert arguments["per_device_eval_batch_size"] == config.per_device_train_batch_size < 32
    assert config.training_arguments(by_length=True)["per_device_eval_batch_size"] < 32
    assert (arguments["optim"], arguments["eval_accumulation_steps"]) == ("sgd", 1)
    table = str(config).splitlines()
    assert max(map(len, table)) <= 80
    assert {line.split()[0] for line in table[1:] if line[0] != " "} == config.reasons.keys()
    assert "gradient_accumulation_steps  4 " in str(config)


@pytest.mark.slow
def test_training_arguments_are_accepted(tmp_path):
    config, _ = create_optimal_config([1.0], tiny(), 12, gpu="t4")
    arguments = TrainingArguments(str(tmp_path), **{**config.training_arguments(), "fp16": False})  # no T4 is here
    assert arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps == 12
    assert config.training_arguments()["fp16"] is True
    assert arguments.dataloader_num_workers == config.dataloader_num_workers


# -------------------------------------------------------------------------------------- what cannot be predicted


class Choosing(nn.Module):
    """Selects the positive values, whose number does not follow from shapes."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1000))

    def forward(self, x):
        return (x * self.weight).relu()[x > -1e9]


def test_a_model_that_needs_values_is_measured_here_and_refused_elsewhere():
    with pytest.raises(UserError, match=r"needs values.*(nonzero|index)"):
        create_optimal_config(Items(5, 1000), Choosing(), 4, gpu="l4")
    machine = Machine(system="Linux", cpu_cores=1, ram_gb=1)
    profile = profile_dataset(Items(5, 1000))
    model = Choosing()
    guess = BatchGuess(lambda B, s: torch.empty(B, 1000, device="meta"), "")
    found = MemoryModels(model, output_loss, [guess], "fp32", "adamw", torch.device("cpu"))
    config = Planner(machine, profile, found, "").plan(4, 0.85, 0, "chunk")
    assert config.per_device_train_batch_size == 4
    assert config.reasons["predicted_peak_gb"].startswith("measured in a copy")
    # Four items: the input, the product or its relu, the mask, the numbers of what is taken, and what is taken.
    assert 4 * 1000 * 4e-9 * 4 < config.predicted_peak_gb < 4 * 1000 * 4e-9 * 16
    assert model.weight.grad is None


def test_a_batch_that_does_not_suit_asks_for_one():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x, scale):
            return x * self.weight * scale

    with pytest.raises(UserError, match=r"Two does not run on such a batch: .*scale") as error:
        create_optimal_config(Items(5, 8), Two(), 4, gpu="l4")
    assert "batch=" in error.value.hint
    config, _ = create_optimal_config(
        Items(5, 8), Two(), 4, gpu="l4", batch=lambda items, seconds: torch.empty(items, 8),
        loss=lambda model, x: model(x, 2.0).mean(),
    )  # fmt: skip
    assert config.per_device_train_batch_size == 4
    assert "as batch= makes them; the loss is the given one" in config.reasons["predicted_peak_gb"]


# ------------------------------------------------------------------------------------------------------- files


def test_a_configuration_survives_its_file(tmp_path):
    config, manager = create_optimal_config([4.0] * 60 + [16.0] * 60, Wave(), 16, vram_gb=SECOND_GB * 40)
    manager.save_config(config, tmp_path / "config.json")
    assert manager.load_config(tmp_path / "config.json") == config
    former = {**json.loads((tmp_path / "config.json").read_text()), "buckets": [], "devices": {}, "splits": [1]}
    (tmp_path / "config.json").write_text(json.dumps(former))
    assert load_config(tmp_path / "config.json") == config


@each_row(
    (lambda c: c.update(format="another 1"), "not a configuration of gputrain"),
    (lambda c: c.update(bf16="yes"), r"bf16 is 'yes'"),
    (lambda c: c.update(target_batch_size=1.5), r"target_batch_size is '1\.5'"),
    (lambda c: c.update(over_long="burn"), "over_long is 'burn'"),
    (lambda c: c.pop("fp16"), "which is not valid"),
    (lambda c: c.update(reasons=[1]), "reasons is "),
)
def test_a_file_that_was_changed_is_refused(tmp_path, change, message):
    config, manager = create_optimal_config([4.0], Wave(), 2, gpu="l4")
    path = tmp_path / "config.json"
    manager.save_config(config, path)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=message):
        load_config(path)


def test_files_that_are_none(tmp_path):
    with pytest.raises(UserError, match="No such file"):
        load_config(tmp_path / "missing.json")
    (tmp_path / "half.json").write_text('{"format": ')
    with pytest.raises(UserError, match="not valid JSON"):
        load_config(tmp_path / "half.json")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not valid JSON"):
        load_config(tmp_path / "bytes.json")
    config, manager = create_optimal_config([4.0], Wave(), 2, gpu="l4")
    with pytest.raises(UserError, match="No such file"):
        manager.save_config(config, tmp_path / "nowhere" / "config.json")


def test_transformers_is_imported_by_nobody():
    code = "import sys; import gputrain.hw; assert 'torch' not in sys.modules; " \
           "from gputrain.hw import create_optimal_config; assert 'transformers' not in sys.modules"  # fmt: skip
    subprocess.run([sys.executable, "-c", code], check=True)
