"""The voice's recipe in the engine: chained graphs as one sum, exact splits, exact repetition, out of memory."""

import dataclasses
import functools
import itertools

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from gputrain.audio.mel import log_mel
from gputrain.config import assemble
from gputrain.engine.recipe import phases_of
from gputrain.engine.run_folder import Run
from gputrain.engine.state import TrainState
from gputrain.engine.step import gradients, update
from gputrain.hw import runtime as runtimes
from gputrain.hw.ranks import Ranks
from gputrain.speech.buckets import ClipBatch, ClipSize
from gputrain.tts import recipe as recipe_module
from gputrain.tts.align import alignment_scores, position_prior, search
from gputrain.tts.architecture import VoiceArchitecture, voice_architecture
from gputrain.tts.config import SEGMENT_FRAMES, TrainTts
from gputrain.tts.latents import kl_loss
from gputrain.tts.model import frame_prior, segment_starts, segments
from gputrain.tts.recipe import VoiceRecipe
from tests.recipes import (
    assert_out_of_memory_changes_nothing,
    assert_resumed_is_undisturbed,
    assert_split_changes_nothing,
    go_on,
)
from tests.tables import each_row, slow
from tests.toy import cpu_runtime, quiet

HOP = 16
SIZES = {
    "hidden_channels": 8, "latent_channels": 8, "speaker_channels": 8, "encoder_layers": 1,
    "encoder_filter_channels": 8, "posterior_layers": 2, "flow_couplings": 2, "duration_flows": 2,
    "upsample_initial_channel": 16, "encoder_dropout": 0.0, "duration_dropout": 0.0,
}  # fmt: skip
DECODERS = {
    "medium": {"upsample_rates": (4, 4), "upsample_kernel_sizes": (8, 8), "resblock_kernel_sizes": (3,),
               "resblock_dilation_sizes": ((1, 2),)},
    "fast": {"upsample_rates": (2,), "upsample_kernel_sizes": (4,), "subbands": 2, "istft_n_fft": 16,
             "resblock_kernel_sizes": (3,), "resblock_dilation_sizes": ((1, 2),)},
}  # fmt: skip
CLIP = ClipSize(frames=48, symbols=12)
PRESET = pytest.mark.parametrize("preset", DECODERS)


def shape(preset="medium", speakers=1) -> VoiceArchitecture:
    sizes = {**SIZES, **DECODERS[preset]}
    return voice_architecture(
        preset, num_symbols=9, num_speakers=speakers, sampling_rate=4000, hop_size=HOP, **sizes
    )  # fmt: skip


def settings_of(**changes) -> TrainTts:
    return assemble(
        TrainTts,
        {"data_path": "unused", "batch_size": 6, "ema_decay": 0.9, "discriminator_channels": 8,
         "alignment_prior_steps": 0, **changes},
    )  # fmt: skip


def bucket(step: int, clips: int = 6, longest: int = 60) -> ClipBatch:
    """Returns hums of different lengths, some shorter than a segment."""
    draws = torch.Generator().manual_seed(step)
    frames_B = torch.linspace(20, longest, clips).long()
    symbols_B = torch.linspace(5, 13, clips).long()
    ids_BS = torch.randint(1, 9, (clips, 13), generator=draws) * (torch.arange(13) < symbols_B[:, None])
    time = torch.arange(int(frames_B.max()) * HOP) / 4000
    hz = 80 + 300 * torch.rand(clips, 1, generator=draws)
    wave = 0.3 * torch.sin(2 * torch.pi * hz * time) + 0.02 * torch.randn(clips, len(time), generator=draws)
    wave = wave * (torch.arange(len(time)) < frames_B[:, None] * HOP)
    speakers_B = torch.arange(clips) % 2
    return ClipBatch(
        ids_BS, symbols_B, (wave * 32767).to(torch.int16), frames_B * HOP, frames_B, speakers_B, torch.arange(clips)
    )


def begin(tmp_path, preset="medium", speakers=2, dtype=torch.float64, autocast=torch.float32, **changes) -> TrainState:
    runtime = cpu_runtime()
    runtime.dtype = autocast
    recipe = VoiceRecipe(settings_of(**changes), shape(preset, speakers), CLIP, runtime)
    generator = torch.Generator().manual_seed(5)
    for parameter in recipe.voice.parameters():  # Otherwise flows and text would be initialised to zero.
        if not parameter.any():
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    for module in recipe.modules.values():
        module.to(dtype)
    return TrainState.begin(recipe, recipe.settings.schedule, runtime, Run(tmp_path, quiet(tmp_path), {}, ""))


def load(step: int) -> list[ClipBatch]:
    return [bucket(step)]


def one_sum(recipe: VoiceRecipe, batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the losses of generator and discriminators, each on one graph."""
    voice, frames = recipe.voice, max(batch.frames)
    speaker = voice.speaker(batch.speakers_B)
    text = voice.encode_text(batch.ids_BS, batch.symbols_B)
    mask = (torch.arange(frames) < batch.frames_B[:, None])[:, None]
    posterior, prior_latent = voice.encode_sound(batch.spectrogram_BNT, batch.frames_B, batch.noise_BCT, speaker)
    scores = alignment_scores(prior_latent, text.mean_BCS, text.log_scale_BCS)
    durations = search(scores, batch.symbols_B, batch.frames_B)
    prior = frame_prior(text, durations, frames)
    kl = kl_loss(prior_latent, posterior.log_scale_BCT, *prior, mask).sum() / batch.frames_B.sum()
    duration = voice.duration_loss(text, durations, batch.duration_noise_B2S, speaker).sum() / batch.symbols_B.sum()
    starts = segment_starts(batch.places_B, batch.frames_B, SEGMENT_FRAMES)
    made = voice.decoder(segments(posterior.latent_BCT, starts, SEGMENT_FRAMES), speaker)
    real = segments(batch.wave_B1L, starts * HOP, SEGMENT_FRAMES * HOP)
    difference = log_mel(made.squeeze(1), recipe.mel) - log_mel(real.squeeze(1), recipe.mel)
    generator, discriminators = kl + duration + 45 * difference.abs().mean(), torch.zeros(())
    for discriminator in itertools.chain(*recipe.by_kind.values()):
        (logits, features), (real_logits, targets) = discriminator(made), discriminator(real)
        generator = generator + (logits - 1).square().mean()
        for one, two in zip(features, targets, strict=True):
            generator = generator + 2 * (one - two.detach()).abs().mean()
        fake_logits = discriminator(made.detach())[0]
        discriminators = discriminators + 0.5 * ((real_logits - 1).square().mean() + fake_logits.square().mean())
    return generator, discriminators


@pytest.mark.parametrize(
    ("preset", "speakers", "compiled"),
    [("fast", 2, True), ("medium", 1, False), *(slow(*case) for case in itertools.product(DECODERS, (1, 2), (0, 1)))],
)
def test_cut_graphs_are_one_sum(preset, speakers, compiled, tmp_path):
    state = begin(tmp_path, preset, speakers)
    recipe: VoiceRecipe = state.recipe
    plan = recipe.runtime.plan
    recipe.runtime.plan = dataclasses.replace(plan, compile=dataclasses.replace(plan.compile, value=bool(compiled)))
    assert_cut_graphs_are_one_sum(state)


def assert_cut_graphs_are_one_sum(state: TrainState) -> None:
    recipe: VoiceRecipe = state.recipe
    batch = recipe.prepare([bucket(0)], 0)
    (group,) = recipe.step_groups
    gathered = gradients(state, group, batch, 1, 0)
    values = one_sum(recipe, batch)
    for phase, value in zip(group.phases, values, strict=True):
        losses = gathered[phase.name].losses
        summed = sum(losses[kind] for kind in recipe.by_kind)
        if "mel" in losses:
            summed = summed + 45 * losses["mel"] + losses["kl"] + losses["duration"]
        assert summed.item() == pytest.approx(value.item(), rel=1e-9)
        parameters = phase.parameters()
        assert all(parameter.grad is not None for parameter in parameters)
        ours = torch.cat([parameter.grad.flatten() for parameter in parameters])
        theirs = torch.cat([g.flatten() for g in torch.autograd.grad(value, parameters, retain_graph=True)])
        assert theirs.norm() > 1e-3
        assert (ours - theirs).norm() / theirs.norm() < 1e-12


@each_row((0, 1.0), (3, 0.25), (4, 0.0))
def test_an_even_pace_is_preferred_less_with_every_step(tmp_path, monkeypatch, step, weight):
    seen = []

    def watched(scores_BTS, *counts):
        seen.append(scores_BTS.clone())
        return search(scores_BTS, *counts)

    monkeypatch.setattr(recipe_module, "search", watched)
    for steps in (4, 0):
        state = begin(tmp_path, alignment_prior_steps=steps)
        batch = state.recipe.prepare([bucket(0)], step)
        gradients(state, state.recipe.step_groups[0], batch, 1, step)
    with_prior, without = seen
    prior_BTS = position_prior(batch.symbols_B, batch.frames_B, 13, 60)
    assert torch.allclose(with_prior, without + weight * prior_BTS, rtol=0, atol=1e-9)
    assert torch.equal(with_prior, without) is (weight == 0)


def test_a_voice_that_has_learnt_to_align_has_no_prior_by_default():
    def prior_steps(**changes) -> int:
        return assemble(TrainTts, {"data_path": "unused", **changes}).prior_steps

    assert prior_steps() == 2000
    assert prior_steps(init_from="voice.pt") == 0
    assert prior_steps(init_from="voice.pt", alignment_prior_steps=7) == 7


def test_a_rank_hears_its_clips_as_one_process_does(tmp_path):
    """Silence follows its longest clip, as in the whole batch, rather than that clip's own mirror."""
    from tests.engine.rank_models import part_of  # It imports this file.

    recipe = begin(tmp_path).recipe
    whole = recipe.prepare([bucket(0)], 0)
    for rank in (Ranks(0, 2), Ranks(1, 2)):
        part = recipe.prepare([part_of(bucket(0), rank)], 0)
        for name in ("spectrogram_BNT", "wave_B1L", "noise_BCT", "duration_noise_B2S"):
            own = getattr(part, name)
            assert torch.equal(own, getattr(whole, name)[rank.rows(6)][..., : own.shape[-1]]), name


SLOW = pytest.mark.slow


@pytest.mark.parametrize("size", [pytest.param(1, marks=SLOW), pytest.param(2, marks=SLOW), 4])
def test_any_micro_batch_gives_the_same_weights(size, tmp_path):
    whole, split = (begin(tmp_path, alignment_prior_steps=5, **parts) for parts in ({}, {"micro_batch_size": size}))
    assert_split_changes_nothing(whole, split, load, range(3))


def test_parts_lose_their_padding(tmp_path):
    state = begin(tmp_path)
    recipe: VoiceRecipe = state.recipe
    batch = recipe.prepare([bucket(0)], 0)
    parts = recipe.split(batch, 3)
    assert [part.frames for part in parts] == [(20, 28), (36, 44), (52, 60)]
    assert [part.spectrogram_BNT.shape[2] for part in parts] == [28, 44, 60]
    assert [part.ids_BS.shape[1] for part in parts] == [max(part.symbols) for part in parts] == [6, 9, 13]
    assert [part.wave_B1L.shape[2] for part in parts] == [28 * HOP, 44 * HOP, 60 * HOP]
    assert {float(part.global_frames) for part in parts} == {sum(batch.frames)}
    assert len(recipe.split(batch, 50)) == 6


def test_long_clips_count_for_more(tmp_path):
    recipe = begin(tmp_path).recipe
    assert recipe.size(recipe.prepare([bucket(0, clips=6, longest=40)], 0)) == 6
    assert recipe.size(recipe.prepare([bucket(0, clips=2, longest=480)], 0)) == 20  # 960 frames of 48 a clip


def test_the_optimizers_use_eps(tmp_path):
    """In a resumed run, the present value counts, as of every option."""
    state = begin(tmp_path, eps=1e-5)
    assert [group["eps"] for phase in phases_of(state.recipe) for group in phase.optimizer.param_groups] == [1e-5] * 4
    other = begin(tmp_path / "other", eps=1e-9)
    other.restore({**state.snapshot(), "loss_scales": {}})
    assert {group["eps"] for phase in phases_of(other.recipe) for group in phase.optimizer.param_groups} == {1e-9}


def test_the_discriminators_have_a_rate_and_betas_of_their_own(tmp_path):
    own = {"discriminator_learning_rate": 5e-4, "discriminator_beta1": 0.5, "discriminator_beta2": 0.9}
    state = begin(tmp_path, learning_rate=1e-3, **own)
    go_on(state, load, range(1))
    for phase in phases_of(state.recipe):
        expected = (1e-3, (0.8, 0.99)) if phase.name == "generator" else (5e-4, (0.5, 0.9))
        assert {(group["lr"], group["betas"]) for group in phase.optimizer.param_groups} == {expected}


def test_buckets_accumulate(tmp_path):
    """Two buckets in a step are a batch of all their clips."""
    state = begin(tmp_path, accumulation_steps=2)
    recipe: VoiceRecipe = state.recipe
    batch = recipe.prepare([bucket(0, 4, 40), bucket(1, 3, 60)], 0)
    assert (batch.global_clips, batch.global_frames) == (7, 20 + 26 + 33 + 40 + 20 + 40 + 60)
    assert batch.spectrogram_BNT.shape[2] == 60
    assert batch.wave_B1L[:4, :, 40 * HOP :].count_nonzero() == 0
    scalars = update(state, batch, 0, 1e-3)
    assert all(value.isfinite() for value in scalars.values())


def test_a_resumed_training_is_the_undisturbed_one_bit_for_bit(tmp_path):
    begin_fp32 = functools.partial(begin, tmp_path, dtype=torch.float32)
    assert_resumed_is_undisturbed(begin_fp32, load, steps=4, stop=2, dropout=0.3)


@pytest.mark.parametrize("name", [pytest.param("kl", marks=SLOW), "waves", pytest.param("mel", marks=SLOW)])
def test_running_out_of_memory_changes_nothing(name, tmp_path):
    whole, short = begin(tmp_path), begin(tmp_path)
    assert_out_of_memory_changes_nothing(whole, short, load, name, lambda batch: len(batch.frames) > 2)
    assert short.micro_batch == {"generator": 3}  # of the six clips, which count as eight, two at once


@pytest.mark.slow
def test_bf16_learns_what_fp32_learns(tmp_path):
    exact = begin(tmp_path, dtype=torch.float32)
    coarse = begin(tmp_path, dtype=torch.float32, autocast=torch.bfloat16)
    batch = exact.recipe.prepare([bucket(0)], 0)
    inside = []
    coarse.recipe.voice.decoder.ups[0].register_forward_hook(lambda module, given, made: inside.append(made.dtype))
    ours, theirs = (update(state, batch, 0, 1e-3) for state in (exact, coarse))
    assert set(inside) == {torch.bfloat16}
    for name, value in ours.items():
        if name.startswith("loss/"):
            assert theirs[name].dtype == torch.float32
            assert theirs[name].item() == pytest.approx(value.item(), rel=0.05), name


@pytest.mark.slow
def test_buckets_of_any_count_run_the_same_compiled_code(tmp_path, monkeypatch):
    """Buckets of an epoch have many sizes: compiling for each would take minutes. The graphs are real, and run
    uncompiled. The posterior encoder, whose spectrograms are views of the bucket's with and without an offset, has one
    graph for either."""
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
    monkeypatch.setattr(runtimes, "keep_compiled_code", lambda: None)
    runtime = cpu_runtime(compiled=True)
    recipe = VoiceRecipe(settings_of(), shape("fast", 2), CLIP, runtime)
    state = TrainState.begin(recipe, recipe.settings.schedule, runtime, Run(tmp_path, quiet(tmp_path), {}, ""))
    torch._dynamo.reset()
    made = []
    for step, clips in enumerate((6, 4, 3, 5)):
        update(state, recipe.prepare([bucket(step, clips)], step), step, 1e-3)
        made.append(counter.frame_count)
    assert made[0] > 0
    assert made[1] <= made[0] + 1
    assert made[1:] == [made[1]] * 3
