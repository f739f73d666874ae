"""Stock `transformers.Trainer` that runs out of memory on the way, against the same training undisturbed."""

import itertools
import logging
import random
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch._dynamo.exc
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments, Wav2Vec2Config, Wav2Vec2ForCTC

from gputrain.audio.synthetic import VOICES, say
from gputrain.autoconfig.dataset import profile_dataset
from gputrain.autoconfig.inputs import BatchGuess, output_loss
from gputrain.autoconfig.memory_models import MemoryModels
from gputrain.autoconfig.optimal import Planner
from gputrain.autoconfig.recovery import MicroBatchLimit, memory_callback, recovering, split, watched_first
from gputrain.errors import UserError
from gputrain.hw.probe import Machine
from tests.tables import each_row
from tests.waiting import wait_until

pytest.importorskip("accelerate")  # transformers' Trainer needs it, and says so in an ImportError of its own.

RAM_GB = 1e-3


class Scarce:
    """Runs out of memory where more than `items` go through a model at once; from the first call to be disturbed on.

    `backward`: on the way back, when gradients of a part of the weights have been added already.
    """

    def __init__(self, model: nn.Module, items: int, first: int, *, backward: bool = False):
        self.items, self.first, self.backward = items, first, backward
        self.calls = self.failures = 0
        self.seen = 0  # items that went through since the last failure or step
        model.register_forward_hook(self.look, with_kwargs=True)

    def look(self, model, arguments, named, out):
        if not torch.is_grad_enabled():
            return
        items = len(next(iter(named.values())))
        self.calls += 1
        if self.calls < self.first or items <= self.items:
            self.seen += items
        elif self.backward:
            next(model.parameters()).register_hook(self.fail)
        else:
            self.fail()

    def fail(self, gradient=None):
        if gradient is None or not self.failures:
            self.seen, self.failures = 0, self.failures + 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more than there is")


def splits_of(caplog) -> list[tuple[int, int, int]]:
    """The optimizer steps at which micro-batches were made smaller, with their items before and after, as logged."""
    said = re.findall(r"step (\d+): out of memory; (\d+) items at once instead of (\d+)", caplog.text)
    return [(int(step), int(before), int(after)) for step, after, before in said]


class Counting(TrainerCallback):
    """Items that went through the model in each optimizer step."""

    def __init__(self, scarce: Scarce):
        self.scarce, self.steps = scarce, []

    def on_step_end(self, args, state, control, **others):
        self.steps.append(self.scarce.seen)
        self.scarce.seen = 0


# -------------------------------------------------------------------------------------------------- a small model


class Toy(nn.Module):
    """Two layers in double precision, and a loss that is taken over the batch in one way or another."""

    def __init__(self, over: str):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(5, 7).double(), nn.Linear(7, 3).double()
        self.over = over

    def forward(self, x, labels=None):
        logits_BNC = self.second(torch.tanh(self.first(x)))
        if self.over == "contrast":
            flat_BC = logits_BNC.mean(1)
            return {"loss": nn.functional.cross_entropy(flat_BC @ flat_BC.T, torch.arange(len(x)))}
        loss_BN = nn.functional.cross_entropy(logits_BNC.transpose(1, 2), labels, reduction="none", ignore_index=-100)
        if self.over == "labels":
            return {"loss": loss_BN.sum() / (labels != -100).sum()}
        loss_B = loss_BN.sum(1) / (labels != -100).sum(1)
        return {"loss": loss_B.mean() if self.over == "items" else loss_B.sum()}


def toy_items(count: int = 40) -> list[dict]:
    generator = torch.Generator().manual_seed(1)
    items = []
    for number in range(count):
        labels = torch.randint(0, 3, (4,), generator=generator)
        labels[1 + number % 4 :] = -100
        items.append({"x": torch.randn(4, 5, generator=generator, dtype=torch.float64), "labels": labels})
    return items


def toy_trainer(folder: Path, model: nn.Module, kind: type[Trainer] = Trainer, **changes) -> Trainer:
    arguments = {
        "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "max_steps": 4, "learning_rate": 0.1,
        "optim": "sgd", "use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True, "seed": 3,
        "logging_steps": 1, **changes,
    }  # fmt: skip
    return kind(model, TrainingArguments(str(folder), **arguments), train_dataset=toy_items())


def difference(one: nn.Module, other: nn.Module, start: nn.Module) -> float:
    """The largest, as a share of how far the weights have gone."""
    flat = [torch.cat([p.detach().flatten() for p in model.parameters()]) for model in (one, other, start)]
    gone = (flat[0] - flat[2]).abs().max()
    assert gone > 1e-3
    return float((flat[0] - flat[1]).abs().max() / gone)


@each_row(*itertools.product(["items", "labels", "sum"], [False, True]))
def test_out_of_memory_leaves_the_result_as_it_is(tmp_path, caplog, over, backward):
    """The fourth micro-batch, the second of its step, does not fit; nor do more than three items from then on."""
    caplog.clear()
    plain, disturbed = Toy(over), Toy(over)
    undisturbed = toy_trainer(tmp_path, plain)
    undisturbed.train()
    scarce = Scarce(disturbed, 3 if not backward else 4, 4, backward=backward)
    trainer, limit = toy_trainer(tmp_path, disturbed), MicroBatchLimit()
    counting = Counting(scarce)
    trainer.add_callback(counting)
    with recovering(trainer, limit):
        trainer.train()
    assert difference(plain, disturbed, Toy(over)) < 1e-12
    expected = [(1, 8, 4)] if backward else [(1, 8, 4), (1, 4, 2)]
    assert splits_of(caplog) == expected
    assert counting.steps == [16, 16, 8, 16]  # an epoch has 40
    assert trainer.state.global_step == 4
    assert (trainer.args.per_device_train_batch_size, trainer.args.gradient_accumulation_steps) == (8, 2)
    losses = [[entry["loss"] for entry in t.state.log_history if "loss" in entry] for t in (undisturbed, trainer)]
    assert losses[0][2:] == pytest.approx(losses[1][2:])
    assert not {"training_step", "compute_loss"} & vars(trainer).keys()


def test_what_goes_through_again_has_the_random_numbers_it_had(tmp_path):
    model, drawn = Toy("items"), []

    def draw(*_):
        numbers = (torch.rand(()).item(), np.random.rand(), random.random())
        if torch.is_grad_enabled():
            drawn.append(numbers)

    model.register_forward_pre_hook(draw)
    Scarce(model, 4, 4)
    with recovering(trainer := toy_trainer(tmp_path, model), MicroBatchLimit()):
        trainer.train()
    assert drawn[4] == drawn[2]  # 0 and 1: the first step; 2 and 3: the second, which fails; then its first part
    assert drawn[5] == drawn[3]
    assert len(set(drawn)) == len(drawn) - 2


def test_a_loss_that_counts_its_labels_over_the_whole_step(tmp_path):
    """The trainer passes such a loss the number of labels of the step, so that parts simply add up."""

    def mean_over_step(outputs, labels, num_items_in_batch):
        loss_BN = nn.functional.cross_entropy(outputs["logits"].transpose(1, 2), labels, reduction="none")
        return loss_BN.sum() / num_items_in_batch

    class Logits(Toy):
        def forward(self, x):
            return {"logits": self.second(torch.tanh(self.first(x)))}

    models = [Logits(""), Logits("")]
    for number, model in enumerate(models):
        trainer, limit = toy_trainer(tmp_path, model), MicroBatchLimit()
        trainer.compute_loss_func = mean_over_step
        trainer.label_names = ["labels"]
        if number:
            Scarce(model, 3, 4)
        with recovering(trainer, limit):
            trainer.train()
    assert difference(*models, Logits("")) < 1e-12
    assert limit.items == 2


def test_a_loss_that_compares_items_cannot_be_split(tmp_path):
    model = Toy("contrast")
    Scarce(model, 3, 2)
    trainer = toy_trainer(tmp_path, model)
    with pytest.raises(UserError, match="the loss cannot be computed in parts"), recovering(trainer, MicroBatchLimit()):
        trainer.train()


def test_a_trainer_that_looks_at_the_outputs_too(tmp_path):
    class Looking(Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            loss, _ = self.compute_loss(model, inputs, return_outputs=True)
            loss = loss / self.current_gradient_accumulation_steps
            loss.backward()
            return loss.detach()

    models = [Toy("labels"), Toy("labels")]
    for number, model in enumerate(models):
        trainer = toy_trainer(tmp_path, model, kind=Looking)
        if number:
            Scarce(model, 3, 4)
        with recovering(trainer, MicroBatchLimit()):
            trainer.train()
    assert difference(*models, Toy("labels")) < 1e-12


def test_a_given_reduction_is_not_looked_for(tmp_path):
    model, asked = Toy("items"), []
    model.register_forward_hook(lambda *_: asked.append(1) if not torch.is_grad_enabled() else None)
    Scarce(model, 4, 2)
    with recovering(trainer := toy_trainer(tmp_path, model), MicroBatchLimit(), "items"):
        trainer.train()
    assert not asked
    plain = Toy("items")
    toy_trainer(tmp_path, plain).train()
    assert difference(plain, model, Toy("items")) < 1e-12


def test_a_single_item_that_does_not_fit(tmp_path, caplog):
    model, limit = Toy("items"), MicroBatchLimit()
    Scarce(model, 0, 3)
    trainer = toy_trainer(tmp_path, model)
    with (
        pytest.raises(UserError, match="out of memory with a single item at once: CUDA out"),
        recovering(trainer, limit),
    ):
        trainer.train()
    assert [(before, after) for _, before, after in splits_of(caplog)] == [(8, 4), (4, 2), (2, 1)]
    assert not {"training_step", "compute_loss"} & vars(trainer).keys()


def test_memory_that_runs_out_without_gradients_too(tmp_path, caplog):
    """The reduction of the loss cannot be found either."""
    model, limit = Toy("items"), MicroBatchLimit()

    def fail(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory")

    model.register_forward_hook(fail)
    trainer = toy_trainer(tmp_path, model)
    with pytest.raises(UserError, match="with a single item at once"), recovering(trainer, limit):
        trainer.train()
    assert [(before, after) for _, before, after in splits_of(caplog)] == [(8, 4), (4, 2), (2, 1)]


@each_row(
    (
        RuntimeError("FIND was unable to find an engine after trying 42 plans."),
        RuntimeError,
    ),
    (torch._dynamo.exc.InternalTorchDynamoError("42 plans of the compiler"), torch._dynamo.exc.TorchDynamoException),
)
def test_what_smaller_parts_cannot_help_is_not_tried_again(tmp_path, failure, expected):
    model, limit = Toy("items"), MicroBatchLimit()

    def fail(*arguments):
        raise failure

    model.register_forward_hook(fail)
    trainer = toy_trainer(tmp_path, model)
    with pytest.raises(expected, match="42 plans"), recovering(trainer, limit):
        trainer.train()
    assert not limit.items


class At(TrainerCallback):
    """Raises before the second optimizer step."""

    def __init__(self, error: Exception):
        self.error = error

    def on_pre_optimizer_step(self, args, state, control, **others):
        if state.global_step == 1:
            raise self.error


def test_other_errors_pass_and_the_trainers_own_methods_come_back(tmp_path):
    trainer = toy_trainer(tmp_path, Toy("items"))
    own = trainer.compute_loss = lambda model, inputs, **named: model(**inputs)["loss"]
    for error in (RuntimeError("shapes do not match"), torch.OutOfMemoryError("CUDA out of memory")):
        trainer.add_callback(At(error))
        with pytest.raises(type(error), match=str(error)), recovering(trainer, MicroBatchLimit()):
            trainer.train()
        trainer.remove_callback(At)
    assert trainer.compute_loss is own


def test_inputs_without_a_row_for_each_item_are_named():
    with pytest.raises(UserError, match="input table has 3 rows for 8 items"):
        split({"x": torch.zeros(8, 2), "table": torch.zeros(3)}, 4)


@each_row((8, 4, [4, 4]), (5, 2, [1, 2, 2]), (7, 3, [2, 2, 3]), (3, 9, [3]))
def test_parts_are_as_equal_as_can_be(items, size, sizes):
    names = [str(number) for number in range(items)]
    parts = split({"x": torch.arange(items), "scale": 2.0, "one": torch.tensor(1), "names": names}, size)
    assert [name for part in parts for name in part["names"]] == names
    assert [len(part["x"]) for part in parts] == sizes
    assert torch.cat([part["x"] for part in parts]).tolist() == list(range(items))
    assert all(part["scale"] == 2 and part["one"] == 1 for part in parts)


def test_a_training_goes_on_from_a_checkpoint(tmp_path, caplog):
    whole, half = Toy("labels"), Toy("labels")
    toy_trainer(tmp_path / "whole", whole).train()
    Scarce(half, 5, 3)
    trainer = toy_trainer(tmp_path / "half", half, save_strategy="steps", save_steps=2)
    planner = planner_of(half)
    planner.train_with_recovery(trainer)
    other = Toy("labels")
    trainer = toy_trainer(tmp_path / "half", other, save_strategy="steps", save_steps=2)
    planner.train_with_recovery(trainer, resume_from_checkpoint=str(tmp_path / "half" / "checkpoint-2"))
    assert trainer.state.global_step == 4
    assert difference(whole, other, Toy("labels")) < 1e-12
    assert [step for step, _, _ in splits_of(caplog)] == [1]


def test_processes_that_divide_the_model_are_refused(tmp_path):
    trainer = toy_trainer(tmp_path, Toy("items"))
    trainer.accelerator = type("Two", (), {"num_processes": 2, "distributed_type": "FSDP"})()
    with pytest.raises(UserError, match="copies of the model in several, and this is FSDP"), recovering(
        trainer, MicroBatchLimit()
    ):  # fmt: skip
        pass


# ------------------------------------------------------------------------------------------------------- memory


def test_memory_is_logged_with_the_rest(tmp_path):
    trainer = toy_trainer(tmp_path, Toy("items"))
    seen = []

    class Reader(TrainerCallback):
        def on_step_begin(self, args, state, control, **others):
            wait_until(callback.monitor.figures, "a reading of the monitor's thread")

        def on_log(self, args, state, control, logs=None, **others):
            seen.append(dict(logs))

    callback = memory_callback()
    trainer.add_callback(Reader())
    trainer.add_callback(callback)
    with watched_first(trainer):
        trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(steps) == 4
    assert all(0.05 < entry["memory/ram_gb"] < 10_000 for entry in [*steps, *seen])


def test_short_memory_is_logged_once_between_two_logs(caplog):
    callback, state = memory_callback(), SimpleNamespace(global_step=2, log_history=[])
    callback.monitor = SimpleNamespace(pressure=lambda: "act", figures=dict)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            for _ in range(3):
                callback.on_step_end(None, state, None)
            callback.on_log(None, state, None, logs={})
    assert caplog.messages == ["step 2: more than 90 % of the memory is in use"] * 2


# ------------------------------------------------------------------------------------------------------- speech

LETTERS = " aeiou"  # 0 is the blank of CTC, for which nothing stands


def speech(count: int = 24) -> list[dict]:
    """Returns synthetic vowels at 16 kHz, by several voices, with their letters."""
    rng, voices, items = np.random.default_rng(0), itertools.cycle(VOICES), []
    for _ in range(count):
        text = "".join(rng.choice(list("aeiou"), rng.integers(2, 6)))
        clip = say(text, 16000, rng, next(voices)).astype(np.float32)
        labels = [LETTERS.index(letter) for letter in text]
        items.append({"audio": {"array": clip / clip.std(), "sampling_rate": 16000}, "labels": labels})
    return items


def collate(items: list[dict]) -> dict[str, torch.Tensor]:
    waves = [torch.from_numpy(item["audio"]["array"]).double() for item in items]
    labels = [torch.tensor(item["labels"]) for item in items]
    pad = nn.utils.rnn.pad_sequence
    mask = pad([torch.ones(len(wave), dtype=torch.long) for wave in waves], batch_first=True)
    padded = pad(waves, batch_first=True)
    return {
        "input_values": padded, "attention_mask": mask,
        "labels": pad(labels, batch_first=True, padding_value=-100),
    }  # fmt: skip


def recogniser() -> Wav2Vec2ForCTC:
    torch.manual_seed(0)
    config = Wav2Vec2Config(
        vocab_size=len(LETTERS), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        conv_dim=(16,) * 4, conv_kernel=(10, 8, 4, 4), conv_stride=(8, 5, 4, 2), num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2, feat_extract_norm="layer", do_stable_layer_norm=True, layerdrop=0.0,
        hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, feat_proj_dropout=0.0, final_dropout=0.0,
        apply_spec_augment=False, ctc_zero_infinity=True, ctc_loss_reduction="mean", pad_token_id=0,
    )  # fmt: skip
    model = Wav2Vec2ForCTC(config).double()
    model.freeze_feature_encoder()
    return model


def planner_of(model: nn.Module) -> Planner:
    """Settings for a machine with little RAM, where a batch must be accumulated."""
    machine = Machine(system="Linux", cpu_cores=0, ram_gb=RAM_GB)

    def make_batch(items: int, seconds: float):
        return {"input_values": torch.empty(items, round(seconds * 16000), dtype=torch.float64, device="meta")}

    memory_models = MemoryModels(model, output_loss, [BatchGuess(make_batch, "")], "fp32", "sgd", None)
    return Planner(machine, profile_dataset(speech()), memory_models, "waves")


@pytest.mark.slow
def test_stock_wav2vec2_survives_out_of_memory_with_the_same_weights(tmp_path, caplog):
    """The settings of the planner and stock Trainer, on signals like speech; the second micro-batch of the third step
    does not fit."""
    planner = planner_of(recogniser())
    seconds = planner.profile.seconds.max()
    planner.memory_models.step(4, seconds)  # The allocator's segments may exceed the line through one item and two.
    peak_gb = planner.memory_models.memory_model(seconds, False).peak_gb(4)
    planner.machine = Machine(system="Linux", cpu_cores=0, ram_gb=1.06 * peak_gb / 0.85)
    config = planner.plan(8, 0.85, 0.0, "chunk")
    assert (config.per_device_train_batch_size, config.gradient_accumulation_steps) == (4, 2)
    assert (config.bf16, config.fp16, config.gradient_checkpointing) == (False, False, False)

    def train(model: nn.Module, *callbacks: TrainerCallback, **changes) -> Trainer:
        arguments = {
            **config.training_arguments(), "max_steps": 8, "learning_rate": 0.02, "optim": "sgd", "use_cpu": True,
            "report_to": [], "save_strategy": "no", "disable_tqdm": True, "remove_unused_columns": False,
            "logging_steps": 1, **changes,
        }  # fmt: skip
        arguments = TrainingArguments(str(tmp_path), **arguments)
        trainer = Trainer(model, arguments, train_dataset=speech(), data_collator=collate, callbacks=[*callbacks])
        planner.train_with_recovery(trainer)
        return trainer

    whole, plain, disturbed = recogniser(), recogniser(), recogniser()
    stock = train(whole, per_device_train_batch_size=8, gradient_accumulation_steps=1)
    train(plain)
    counting = Counting(Scarce(disturbed, 2, 6))
    trainer = train(disturbed, counting, planner.callback())
    assert splits_of(caplog) == [(2, 4, 2)]
    assert counting.steps == [8] * 8
    assert difference(plain, disturbed, recogniser()) < 1e-10
    assert difference(whole, disturbed, recogniser()) < 1e-10
    losses = [[entry["loss"] for entry in t.state.log_history if "loss" in entry] for t in (stock, trainer)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0][-1] < losses[0][0]
    assert trainer.model_accepts_loss_kwargs == stock.model_accepts_loss_kwargs
    assert all("memory/ram_gb" in entry for entry in trainer.state.log_history if "loss" in entry)
    planner.save_config(config, tmp_path / "config.json")
    assert planner.load_config(tmp_path / "config.json") == config
