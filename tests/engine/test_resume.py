"""A run that is resumed under other conditions: another precision, another memory format, another optimizer."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

from gputrain.config import assemble
from gputrain.data_in.split import digests
from gputrain.engine import checkpoint
from gputrain.engine.optim import adamw, muon_with_adamw
from gputrain.engine.recipe import phases_of
from gputrain.engine.run_folder import Run
from gputrain.engine.schedule import Schedule
from gputrain.engine.state import TrainState, load_optimizer
from gputrain.engine.step import update
from gputrain.errors import UserError
from tests.engine.test_muon import MuonToy
from tests.engine.test_run import schedule, trained
from tests.toy import BATCH, ToyRecipe, batches, cpu_runtime, new_state, quiet, train_toy

LEARNING_RATE = 1e-2


def begin(folder, dtype: torch.dtype, clip: float = 1.0) -> TrainState:
    """A training of fp32 weights under autocast to `dtype`."""
    recipe = ToyRecipe(Schedule(batch_size=BATCH, gradient_clip=clip), dtype=torch.float32)
    runtime = dataclasses.replace(cpu_runtime(), dtype=dtype)
    return new_state(recipe, folder, runtime)


def make_steps(state: TrainState, first: int, last: int) -> None:
    for step, x_BD in zip(range(first, last), batches(first, last), strict=True):
        update(state, state.recipe.prepare(x_BD.float(), step), step, LEARNING_RATE)


def movement(state: TrainState, snapshot: checkpoint.Content) -> torch.Tensor:
    """How far the next step moves every weight of the generator after the snapshot is restored."""
    state.restore(copy.deepcopy(snapshot))
    before = [p.detach().clone() for p in state.recipe.generator.parameters()]
    make_steps(state, 6, 7)
    after = state.recipe.generator.parameters()
    return torch.cat([(new - old).detach().flatten() for new, old in zip(after, before, strict=True)])


@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_loss_scale_of_fp16_has_no_effect_in_other_precisions(tmp_path, dtype, clip):
    """The reference is the same state without a loss scale, as a run in `dtype` saves it."""
    in_fp16 = begin(tmp_path / "fp16", torch.float16, clip)
    make_steps(in_fp16, 0, 6)
    snapshot = in_fp16.snapshot()
    assert all(scale["scale"] > 1000 and scale["good_steps"] > 1 for scale in snapshot["loss_scales"].values())
    own = begin(tmp_path / "own", dtype, clip)
    reference = movement(own, {**snapshot, "loss_scales": own.snapshot()["loss_scales"]})
    resumed = movement(begin(tmp_path / "resumed", dtype, clip), snapshot)
    assert torch.equal(resumed, reference)
    assert resumed.abs().mean() > 0.1 * LEARNING_RATE


def test_fp16_starts_with_a_scale_of_its_own_after_another_precision(tmp_path):
    in_bf16 = begin(tmp_path / "bf16", torch.bfloat16)
    make_steps(in_bf16, 0, 3)
    snapshot = in_bf16.snapshot()
    assert snapshot["loss_scales"] == {}
    resumed = begin(tmp_path / "fp16", torch.float16)
    resumed.restore(snapshot)
    assert resumed.loss_scale("generator") == 65536.0


def test_fp16_goes_on_with_the_scale_that_it_had(tmp_path):
    saved, resumed = begin(tmp_path / "a", torch.float16), begin(tmp_path / "b", torch.float16)
    saved.loss_scales["generator"].scale.fill_(512.0)
    resumed.restore(saved.snapshot())
    assert resumed.loss_scale("generator") == 512.0


def convolution(memory_format: torch.memory_format) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(16, 32, 3), nn.Conv2d(32, 16, 3))
    return layers.to(memory_format=memory_format)


def optimizer_of(layers: nn.Sequential, name: str) -> torch.optim.Optimizer:
    if name == "muon":
        return muon_with_adamw([layers], learning_rate=LEARNING_RATE, weight_decay=0.01)
    return adamw(layers.parameters(), learning_rate=LEARNING_RATE, weight_decay=0.01, betas=(0.9, 0.99))


def step(layers: nn.Sequential, optimizer: torch.optim.Optimizer, number: int) -> None:
    source = torch.Generator().manual_seed(number)
    for parameter in layers.parameters():
        gradient = torch.randn(parameter.shape, generator=source)
        parameter.grad = torch.empty_like(parameter).copy_(gradient)
    optimizer.step()


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize(
    ("before", "after"),
    [(torch.channels_last, torch.contiguous_format), (torch.contiguous_format, torch.channels_last)],
)
def test_optimizer_state_takes_the_layout_of_the_weights(before, after, name):
    straight = convolution(before)
    optimizer = optimizer_of(straight, name)
    for number in range(3):
        step(straight, optimizer, number)
    resumed = convolution(after)
    resumed.load_state_dict(straight.state_dict())
    again = optimizer_of(resumed, name)
    load_optimizer("phase", again, {"phase": copy.deepcopy(optimizer.state_dict())})
    step(straight, optimizer, 3)
    step(resumed, again, 3)
    for mine, reference in zip(resumed.parameters(), straight.parameters(), strict=True):
        assert torch.equal(mine, reference)
        for key, value in again.state[mine].items():
            assert torch.equal(value, optimizer.state[reference][key])
            assert key == "step" or value.stride() == mine.stride()
    assert resumed[0].weight.stride() != straight[0].weight.stride()


def test_another_optimizer_begins_without_the_state_of_the_one_before(tmp_path, caplog):
    """Muon after AdamW and back: the weights go on, the state is made anew, and a warning says what is lost."""
    trained(tmp_path, 3)
    saved = checkpoint.read(tmp_path / "checkpoint_last.pt", "toy")["modules"]["g"]
    recipe = MuonToy(schedule(3))
    train_toy(recipe, quiet(tmp_path, resume_from="auto"))  # makes no step
    assert "the generator was trained with AdamW and continues with Muon" in caplog.text
    assert all(torch.equal(saved[name], weight) for name, weight in recipe.generator.state_dict().items())
    assert not phases_of(recipe)[1].optimizer.state
    train_toy(MuonToy(schedule(5)), quiet(tmp_path, resume_from="auto"))
    caplog.clear()
    trained(tmp_path, 7, resume_from="auto")
    assert "the discriminators was trained with Muon and continues with AdamW" in caplog.text
    assert checkpoint.read(tmp_path / "checkpoint_last.pt", "toy")["progress"]["step"] == 7


def test_seeds_are_those_that_a_generator_takes_with_a_step():
    with pytest.raises(UserError, match="seed is 4294967296, expected 0 to 4294967295"):
        assemble(Schedule, {"seed": 2**32})
    largest = assemble(Schedule, {"seed": 2**32 - 1}).seed
    torch.Generator().manual_seed((largest << 32) + 10**9)  # Every recipe's prepare seeds its generator like this.


def test_changed_settings_are_told_once_old_and_new(tmp_path, caplog):
    trained(tmp_path, 3)
    changed = {"learning_rate": 1e-3, "seed": 5, "gradient_clip": 0.5}
    train_toy(ToyRecipe(schedule(5, **changed)), quiet(tmp_path, resume_from="auto"))
    (told,) = [text for text in caplog.messages if text.startswith("settings that differ")]
    for difference in (
        "learning_rate 0.0001 -> 0.001", "seed 0 -> 5", "gradient_clip 1.0 -> 0.5", "max_steps 3 -> 5",
        "log_every_steps 1 -> 10",
    ):  # fmt: skip
        assert difference in told
    assert told.count("->") == 5
    caplog.clear()
    train_toy(ToyRecipe(schedule(5, **changed)), quiet(tmp_path, resume_from="auto"))
    assert "settings that differ" not in caplog.text


@pytest.mark.parametrize("change", [
    lambda content: content.pop("data"), lambda content: content.update(colour=7),
    lambda content: content["progress"].pop("finished"), lambda content: content["progress"].update(colour=7),
    lambda content: content["config"].update(colour=7),
])  # fmt: skip
def test_a_checkpoint_of_other_parts_is_refused(tmp_path, change):
    trained(tmp_path, 3)
    content = checkpoint.read(tmp_path / "checkpoint_last.pt", "toy")
    change(content)
    checkpoint.save(tmp_path, content)
    with pytest.raises(UserError, match="written by another version of gputrain") as refused:
        trained(tmp_path, 3, resume_from="auto")
    assert "train again" in refused.value.hint


def test_a_setting_that_a_checkpoint_lacks_has_its_default(tmp_path):
    """So that a later version, which has more options, goes on with the runs of this one."""
    whole = trained(tmp_path / "whole", 5)
    trained(tmp_path / "run", 3)
    content = checkpoint.read(tmp_path / "run" / "checkpoint_last.pt", "toy")
    assert content["config"].pop("weight_decay") == Schedule().weight_decay
    checkpoint.save(tmp_path / "run", content)
    resumed = trained(tmp_path / "run", 5, resume_from="auto")
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)


def test_a_checkpoint_from_before_options_were_renamed_or_left_out_is_resumed(tmp_path, caplog):
    trained(tmp_path, 2)
    content = checkpoint.read(tmp_path / "checkpoint_last.pt", "toy")
    content["config"]["log_freq"] = content["config"].pop("log_every_steps")
    content["config"] |= {"track": ["wandb"], "plan_file": None}  # Options that were left out.
    content["progress"] |= {"stage": 0, "stages": 1}  # Of image sizes that grew.
    checkpoint.save(tmp_path, content)
    with caplog.at_level("INFO"):
        trained(tmp_path, 4, resume_from="auto")
    assert "resuming" in caplog.text
    assert "its run went on in wandb, which is no longer written to" in caplog.text
    assert "log_freq" not in caplog.text
    assert "log_every_steps" not in caplog.text  # No setting has changed.


def test_changed_data_are_told(tmp_path, caplog):
    one, other = [("ab12", 64, 48), ("cd34", 64, 48)], [("cd34", 64, 48), ("ab12", 64, 48)]
    more = [("ab12", 64, 48)] * 3
    resumed = {"data": digests(training=one, held_out=one), "config": {"seed": 0}}
    for now in (digests(training=one, held_out=one), digests(training=other, held_out=more)):
        Run(tmp_path, quiet(tmp_path), {"seed": 0}, "", resumed=resumed, data=now, before={"seed": 0}).warn_of_changes()
    assert sorted(caplog.messages) == [
        "the held_out data differ from the checkpoint's: 2 items -> 3",
        "the training data differ from the checkpoint's: as many items (2), other content or order",
    ]
