"""The recogniser's recipe in the engine: gradients of transformers, exact splits and repetition, out of memory."""

import functools
import itertools
import math

import pytest
import torch

from gputrain.asr.config import TrainAsr
from gputrain.asr.data import init_weights
from gputrain.asr.model import logits
from gputrain.asr.recipe import RecogniserRecipe
from gputrain.config import assemble
from gputrain.engine.run_folder import Run
from gputrain.engine.state import TrainState
from gputrain.engine.step import gradients, update
from gputrain.planner.memory.predict import predict_step, step_flops
from gputrain.speech.buckets import ClipBatch, ClipSize
from gputrain.speech.config import STRIDE, encoder_frames
from gputrain.speech.training import plan_target
from tests.asr.models import VOCABULARY, tiny_architecture, transformers_folder
from tests.recipes import (
    assert_out_of_memory_changes_nothing,
    assert_resumed_is_undisturbed,
    assert_same_weights,
    assert_split_changes_nothing,
    go_on,
    weights,
)
from tests.tables import slow
from tests.toy import cpu_runtime, quiet

SYMBOLS = 30
CLIP = ClipSize(frames=30, symbols=6)
GROUP = {"feat_extract_norm": "group", "do_stable_layer_norm": False}


def settings_of(**changes) -> TrainAsr:
    values = {"data_path": "unused", "preset": "tiny", "batch_size": 6, "learning_rate": 1e-3, "ema_decay": 0.9}
    return assemble(TrainAsr, {**values, **changes})


def bucket(step: int, clips: int = 6, longest: int = 12000) -> ClipBatch:
    """Returns noisy clips of different lengths."""
    draws = torch.Generator().manual_seed(step)
    samples_B = torch.linspace(4000, longest, clips).long()
    labels_B = torch.linspace(3, 9, clips).long()
    ids_BS = torch.randint(2, SYMBOLS, (clips, 9), generator=draws) * (torch.arange(9) < labels_B[:, None])
    frames_B = -(-samples_B // 320)
    wave_BL = 3000 * torch.randn(clips, int(frames_B.max()) * 320, generator=draws)
    wave_BL = wave_BL * (torch.arange(wave_BL.shape[1]) < samples_B[:, None])
    return ClipBatch(
        ids_BS, labels_B, wave_BL.to(torch.int16), samples_B, frames_B, torch.zeros(clips).long(), torch.arange(clips)
    )


def make(architecture=None, dtype=torch.float64, runtime=None, **changes) -> RecogniserRecipe:
    settings = settings_of(**changes)
    whole = tiny_architecture(**(architecture or {}))
    recipe = RecogniserRecipe(settings, whole, CLIP, runtime or cpu_runtime())
    for module in recipe.modules.values():
        module.to(dtype)
    return recipe


def begin(tmp_path, architecture=None, dtype=torch.float64, **changes) -> TrainState:
    recipe = make(architecture, dtype, **changes)
    return TrainState.begin(recipe, recipe.settings.schedule, cpu_runtime(), Run(tmp_path, quiet(tmp_path), {}, ""))


def load(step: int) -> list[ClipBatch]:
    return [bucket(step)]


def their_gradients(
    recipe: RecogniserRecipe, loaded: ClipBatch, reduction: str, monkeypatch
) -> dict[str, torch.Tensor]:
    """Returns the gradients of transformers' own forward pass and loss on the same clips, by name.

    Their loss computes log-probabilities in fp32; here they have the precision of the logits, so that only the
    arithmetic is compared.
    """
    batch, model = recipe.prepare([loaded], 0), recipe.model.train()
    model.config.ctc_loss_reduction, model.config.mask_time_prob = reduction, 0.0
    lengths_B = batch.frames_B if batch.wave_BL.ndim == 3 else loaded.samples_B
    inside = torch.arange(batch.wave_BL.shape[1]) < lengths_B[:, None]
    labels = loaded.ids_BS.masked_fill(torch.arange(9) >= loaded.symbols_B[:, None], -100)
    model.requires_grad_(True)
    log_softmax = torch.nn.functional.log_softmax
    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, "log_softmax", lambda logits, dim, **named: log_softmax(logits, dim=dim))
        encode = model.wav2vec2.forward  # Wav2Vec2ForCTC passes no masks on.
        patch.setattr(model.wav2vec2, "forward", functools.partial(encode, mask_time_indices=batch.mask_BT))
        mask = None if batch.keeps_length else inside.long()
        model(batch.wave_BL, attention_mask=mask, labels=labels).loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def our_gradients(recipe: RecogniserRecipe, loaded: ClipBatch) -> dict[str, torch.Tensor]:
    gradients(
        TrainState.for_measurement(recipe, cpu_runtime()), recipe.step_groups[0], recipe.prepare([loaded], 0), 1, 0
    )
    return {name: p.grad for name, p in recipe.model.named_parameters() if p.grad is not None}


ARCHITECTURES = {"xls-r": {}, "group": GROUP, "post": {"do_stable_layer_norm": False}}


@pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=ARCHITECTURES)
@pytest.mark.parametrize("masks", [0.0, 0.3])
def test_gradients_are_those_of_transformers(architecture, masks, monkeypatch):
    """Their loss is the sum over clips with `sum`; ours is divided by the labels of the batch."""
    recipe = make(architecture, freeze_feature_encoder=False, mask_time_prob=masks, mask_time_length=3)
    batch = recipe.prepare([bucket(0)], 0)
    assert (batch.mask_BT is not None and bool(batch.mask_BT.any())) == bool(masks)
    theirs = their_gradients(recipe, bucket(0), "sum", monkeypatch)
    ours = our_gradients(recipe, bucket(0))
    assert ours.keys() == theirs.keys()
    assert len(ours) >= 50
    labels = int(bucket(0).symbols_B.sum())
    for name, gradient in ours.items():
        expected = theirs[name] / labels
        assert (gradient - expected).norm() <= 1e-10 * expected.norm() + 1e-13, name


def test_gradients_of_clips_of_equal_numbers_of_labels_are_those_of_their_mean(monkeypatch):
    """transformers' default, `mean`, divides each clip's loss by its own labels, then by the clips."""
    recipe = make(freeze_feature_encoder=False, mask_time_prob=0.0)
    loaded = bucket(0)._replace(symbols_B=torch.full((6,), 3))
    theirs, ours = their_gradients(recipe, loaded, "mean", monkeypatch), our_gradients(recipe, loaded)
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        assert (gradient - theirs[name]).norm() <= 1e-10 * theirs[name].norm() + 1e-13, name


def test_gradients_in_fp32_differ_by_rounding():
    exact, rounded = (make(dtype=dtype, freeze_feature_encoder=False) for dtype in (torch.float64, torch.float32))
    found = []
    for recipe in (exact, rounded):
        batch = recipe.prepare([bucket(0)], 0)
        gradients(TrainState.for_measurement(recipe, cpu_runtime()), recipe.step_groups[0], batch, 1, 0)
        found.append(torch.cat([p.grad.double().flatten() for p in recipe.phase.parameters()]))
    assert (found[0] - found[1]).norm() / found[0].norm() < 1e-4


VARIANTS = {
    "whole": {"freeze_feature_encoder": False, "layer_drop": 0.3, "mask_time_prob": 0.2},
    "frozen": {"freeze_feature_encoder": True, "freeze_encoder_steps": 1},
    "lora": {"adapters": "lora", "lora_rank": 2},
    "attention": {"adapters": "attention"},
}


def variant(tmp_path, name: str, **changes) -> TrainState:
    architecture = {"adapter_attn_dim": 4} if name == "attention" else {}
    return begin(tmp_path, architecture, **VARIANTS[name], **changes)


@pytest.mark.parametrize(
    ("name", "size"),
    [("whole", 4), ("lora", 4), *(slow(*case) for case in itertools.product(VARIANTS, (1, 4)))],
)
def test_any_micro_batch_gives_the_same_weights(name, size, tmp_path):
    whole, split = variant(tmp_path, name), variant(tmp_path, name, micro_batch_size=size)
    assert_split_changes_nothing(whole, split, load, range(3))


def test_a_model_with_group_norm_keeps_the_padding_of_the_whole_batch(tmp_path):
    whole, split = (begin(tmp_path, GROUP, micro_batch_size=size) for size in (6, 2))
    assert_split_changes_nothing(whole, split, load, range(2))


def test_checkpointing_changes_nothing_but_memory(tmp_path):
    plain, kept = (begin(tmp_path, gradient_checkpointing=on) for on in (False, True))
    assert_same_weights(plain, kept, load, range(2), within=1e-12)


@pytest.mark.parametrize("name", ["lora", "attention", "frozen"])
def test_only_what_trains_has_optimizer_state_and_moves(name, tmp_path):
    state = variant(tmp_path, name)
    before = weights(state)
    go_on(state, load, range(3))
    moved = {key for key, tensor in weights(state).items() if not torch.equal(tensor, before[key])}
    moved = {key.removeprefix("recogniser.") for key in moved if key.startswith("recogniser.")}
    assert {"lm_head.weight", "lm_head.bias"} < moved
    wanted = {"attention": ("adapter_layer", "lm_head"), "frozen": ("",)}.get(name, ("lora_", "lm_head"))
    assert all(any(part in key for part in wanted) for key in moved)
    assert not any("feature_extractor" in key for key in moved)
    (phase,) = state.recipe.step_groups[0].phases
    trained = {id(parameter) for parameter in phase.parameters()}
    assert {id(parameter) for parameter in phase.optimizer.state} <= trained
    assert len(moved) == len(trained)


def test_the_encoder_stays_as_it_is_in_the_first_steps(tmp_path):
    state = begin(tmp_path, freeze_encoder_steps=2, ema_decay=0.0)
    assert state.recipe.peak_memory_step(0) == 2
    start = weights(state)
    go_on(state, load, range(2))
    moved = {key for key, tensor in weights(state).items() if not torch.equal(tensor, start[key])}
    assert moved == {"recogniser.lm_head.weight", "recogniser.lm_head.bias"}
    go_on(state, load, range(2, 3))
    moved = {key for key, tensor in weights(state).items() if not torch.equal(tensor, start[key])}
    assert "recogniser.wav2vec2.encoder.layers.0.attention.q_proj.weight" in moved


def test_masks_and_layers_are_functions_of_the_step():
    recipe = make(layer_drop=0.5, mask_time_prob=0.5, mask_time_length=4)
    first, again, other = (recipe.prepare([bucket(0)], step) for step in (3, 3, 4))
    assert torch.equal(first.mask_BT, again.mask_BT)
    assert not torch.equal(first.mask_BT, other.mask_BT)
    dropped = [recipe.prepare([bucket(0)], step).dropped_layers for step in range(40)]
    assert 20 < sum(len(one) for one in dropped) < 60
    assert len(recipe.prepare([bucket(0)], recipe.peak_memory_step(0)).dropped_layers) == 0
    parts = recipe.split(first, 3)
    assert [part.mask_BT.shape for part in parts] == [(2, max(part.frames)) for part in parts]
    assert {part.dropped_layers for part in parts} == {first.dropped_layers}
    share = float(first.mask_BT.float().mean())
    assert 0.2 < share < 0.5  # Spans overlap, and padding is never masked.
    for row, frames in enumerate(first.frames):
        assert not first.mask_BT[row, frames:].any()


def test_clips_with_too_few_frames_count_as_zero_and_are_counted():
    recipe = make(mask_time_prob=0.0, freeze_feature_encoder=True)
    loaded = bucket(0, clips=2, longest=8000)
    short = loaded._replace(ids_BS=torch.full((2, 20), 5), symbols_B=torch.tensor([20, 9]))
    batch = recipe.prepare([short], 0)
    assert batch.frames == (12, 24)  # Twenty equal labels need 39 frames, nine 17.
    state = TrainState.for_measurement(recipe, cpu_runtime())
    sums = gradients(state, recipe.step_groups[0], batch, 1, 0)["recogniser"]
    assert sums.statistics["infinite"].item() == 0.5
    assert math.isfinite(sums.losses["ctc"].item())
    assert all(p.grad.isfinite().all() for p in recipe.phase.parameters() if p.grad is not None)
    assert 0 <= sums.statistics["blank_share"].item() <= 1


def test_the_share_of_blanks_is_that_of_the_frames_of_each_clip():
    """Of unequal clips the padding does not count, whether their symbols there are blanks or not."""
    recipe, loaded = make(mask_time_prob=0.0), bucket(0)
    for bias in (0.0, 9.0):
        with torch.no_grad():
            recipe.model.lm_head.bias[recipe.blank] = bias
            recipe.model.lm_head.weight.mul_(20 if not bias else 1)
        batch = recipe.prepare([loaded], 0)
        sums = gradients(TrainState.for_measurement(recipe, cpu_runtime()), recipe.step_groups[0], batch, 1, 0)
        read_BT = logits(recipe.model, batch.wave_BL, batch.frames_B).argmax(dim=-1)
        shares = [
            float((row[:frames] == recipe.blank).double().mean())
            for row, frames in zip(read_BT, batch.frames, strict=True)
        ]
        found = float(sums["recogniser"].statistics["blank_share"])
        assert found == pytest.approx(sum(shares) / len(shares), abs=1e-12)
    assert found > 0.1


def test_the_average_begins_with_the_given_weights_and_is_what_is_evaluated(tmp_path):
    recipe = make(dtype=torch.float32)
    given = transformers_folder(tmp_path / "given", hidden_act="relu")
    init_weights(recipe, str(given), VOCABULARY)
    averaged, trained = recipe.ema.average.state_dict(), recipe.model.state_dict()
    assert all(torch.equal(averaged[name], tensor) for name, tensor in trained.items())
    assert recipe.best_model is recipe.ema.average
    alone = make(ema_decay=0.0)
    assert alone.best_model is alone.model


def test_parts_lose_their_padding():
    recipe = make()
    batch = recipe.prepare([bucket(0)], 0)
    parts = recipe.split(batch, 3)
    assert batch.most_frames == max(batch.frames) == encoder_frames(12000)
    assert [part.wave_BL.shape[1] for part in parts] == [(max(part.frames) - 1) * 320 + 400 for part in parts]
    assert [part.labels_BS.shape[1] for part in parts] == [max(part.labels) for part in parts]
    assert len(recipe.split(batch, 50)) == 6
    assert recipe.size(recipe.prepare([bucket(0, clips=2, longest=48000)], 0)) == 10  # 300 frames of 30 a clip


def test_buckets_accumulate(tmp_path):
    state = begin(tmp_path, accumulation_steps=2)
    batch = state.recipe.prepare([bucket(0, 4, 8000), bucket(1, 3)], 0)
    assert batch.global_clips == 7
    assert batch.global_labels == int(bucket(0, 4).symbols_B.sum() + bucket(1, 3).symbols_B.sum())
    assert all(value.isfinite() for value in update(state, batch, 0, 1e-3).values())


def test_a_resumed_training_is_the_undisturbed_one_bit_for_bit(tmp_path):
    """Across the step from which the encoder trains."""
    changes = {"dtype": torch.float32, "freeze_encoder_steps": 3, "layer_drop": 0.3}
    assert_resumed_is_undisturbed(lambda: begin(tmp_path, **changes), load, steps=5, stop=2, dropout=0.3)


def test_running_out_of_memory_changes_nothing(tmp_path):
    whole, short = begin(tmp_path), begin(tmp_path)
    assert_out_of_memory_changes_nothing(whole, short, load, "ctc", lambda batch: len(batch.frames) > 2)
    assert short.micro_batch == {"recogniser": 3}


def test_bf16_learns_what_fp32_learns(tmp_path):
    exact, coarse = begin(tmp_path, dtype=torch.float32), begin(tmp_path, dtype=torch.float32)
    batch = exact.recipe.prepare([bucket(0)], 0)
    coarse.runtime.dtype = torch.bfloat16
    inside = []
    layer = coarse.recipe.model.wav2vec2.encoder.layers[0].attention.q_proj
    layer.register_forward_hook(lambda module, given, made: inside.append(made.dtype))
    ours, theirs = (update(state, batch, 0, 1e-3) for state in (exact, coarse))
    assert set(inside) == {torch.bfloat16}
    name = "loss/recogniser/ctc"
    assert theirs[name].dtype == torch.float32
    assert theirs[name].item() == pytest.approx(ours[name].item(), rel=0.05)


def test_memory_and_flops_are_predicted_on_shapes():
    target = plan_target(RecogniserRecipe, settings_of(), tiny_architecture(), CLIP, STRIDE)
    runtime = cpu_runtime()
    one, six = (predict_step(target, runtime.plan, micro_batch_size=items) for items in (1, 6))
    assert 0 < one.allocated_gb < six.allocated_gb
    assert step_flops(target, 0, 12) == pytest.approx(2 * step_flops(target, 0, 6), rel=0.01)


def test_waves_are_normalised_over_all_samples_of_a_clip():
    """Also over those after the last whole frame, which the longest clip of a batch loses."""
    recipe, loaded = make(), bucket(0)
    batch = recipe.prepare([loaded], 0)
    assert batch.wave_BL.shape[1] < int(loaded.samples_B.max())
    for row, samples in enumerate(loaded.samples_B.tolist()):
        wave = loaded.wave_BT[row, :samples].double() / 32768
        expected = ((wave - wave.mean()) / (wave.var(correction=0) + 1e-7).sqrt())[: batch.wave_BL.shape[1]]
        assert (batch.wave_BL[row, : len(expected)] - expected).abs().max() < 1e-12
