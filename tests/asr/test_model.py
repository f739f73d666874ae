"""The recogniser's forward pass against transformers', its adapters, and its loading."""

import numpy as np
import torch

from gputrain.asr.load import load_recogniser
from gputrain.asr.model import (
    ForwardOptions,
    add_lora,
    cached_position_weights,
    frame_counts,
    logits,
    lora_parameters,
    merged,
    normalized,
)
from gputrain.asr.recipe import masked_spans
from gputrain.engine.distributed import BatchDraws
from tests.asr.models import VOCABULARY, run_folder, tiny_model, transformers_folder
from tests.tables import each_row

CPU = torch.device("cpu")
LENGTHS = (400, 4000, 9999)


def waves(lengths=LENGTHS, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    samples_B = torch.tensor(lengths)
    wave_BL = torch.randn(len(lengths), max(lengths), generator=generator, dtype=dtype)
    return wave_BL * (torch.arange(max(lengths)) < samples_B[:, None]), samples_B


@each_row(True, False)
def test_logits_are_those_of_transformers(stable):
    model = tiny_model(do_stable_layer_norm=stable).double()
    wave_BL, samples_B = waves()
    inside_BL = (torch.arange(wave_BL.shape[1]) < samples_B[:, None]).long()
    theirs = model(wave_BL, attention_mask=inside_BL).logits
    frames_B = frame_counts(samples_B)
    ours = logits(model, wave_BL, frames_B)
    assert ours.shape == theirs.shape
    for row, frames in enumerate(frames_B.tolist()):
        assert (ours[row, :frames] - theirs[row, :frames]).abs().max() < 1e-12
    assert theirs.std() > 0.1


def test_without_padding_there_is_no_mask():
    model = tiny_model().double()
    wave_BL, _ = waves((5000, 5000))
    assert (logits(model, wave_BL, None) - model(wave_BL).logits).abs().max() < 1e-12


def test_masks_and_dropped_layers():
    """A masked frame doesn't depend on its sound; without its layers the encoder is its positions and its norm."""
    model = tiny_model().double()
    wave_BL, _ = waves((4000,))
    everything = torch.ones(1, 12, dtype=torch.bool)
    all_masked = ForwardOptions(mask_BT=everything, dropped_layers=frozenset({0, 1}))
    assert (logits(model, wave_BL, None, all_masked) - logits(model, -3 * wave_BL, None, all_masked)).abs().max() == 0


def test_a_span_fills_a_clip_of_its_length_and_no_shorter_one():
    """A clip of n frames has n - length + 1 places where a span can begin."""
    draws = BatchDraws(torch.Generator().manual_seed(0), 3, (slice(0, 3),))
    masked = masked_spans(draws, torch.tensor([5, 4, 6]), 8, share=1.0, length=5)
    assert masked[0].tolist() == [True] * 5 + [False] * 3
    assert not masked[1].any()
    assert masked[2].sum() in (5, 6)
    assert not masked[2, 6:].any()
    draws = BatchDraws(torch.Generator().manual_seed(0), 64, (slice(0, 64),))
    masked = masked_spans(draws, torch.full((64,), 6), 6, share=5 / 6, length=5)
    assert {tuple(row) for row in masked.int().tolist()} == {(1, 1, 1, 1, 1, 0), (0, 1, 1, 1, 1, 1)}


@each_row(0, 1)
def test_a_dropped_layer_is_the_one_that_is_named(dropped):
    model, wave_BL = tiny_model().double(), waves((4000,))[0]
    options = ForwardOptions(dropped_layers=frozenset({dropped}))
    found, whole = logits(model, wave_BL, None, options), logits(model, wave_BL, None)
    del model.wav2vec2.encoder.layers[dropped]
    assert (found - model(wave_BL).logits).abs().max() < 1e-12
    assert (found - whole).abs().max() > 1e-3


def test_one_weight_of_the_positions_collects_the_gradients_of_all_passes():
    model = tiny_model().double()
    parameters = list(model.wav2vec2.encoder.pos_conv_embed.parameters())
    wave_BL, _ = waves((4000, 4000))
    (logits(model, wave_BL, None).square().sum()).backward()
    whole = [parameter.grad.clone() for parameter in parameters]
    model.zero_grad()
    with cached_position_weights(model):
        for row in range(2):
            logits(model, wave_BL[row : row + 1], None).square().sum().backward()
    for parameter, expected in zip(parameters, whole, strict=True):
        assert expected.norm() > 1e-4
        assert (parameter.grad - expected).norm() < 1e-12 * expected.norm()
    before = logits(model, wave_BL, None)
    with torch.no_grad():
        parameters[1].mul_(2)  # Behind the block, a step has its effect.
    assert (logits(model, wave_BL, None) - before).abs().max() > 1e-3


def test_lora_begins_as_nothing_and_merges():
    model = tiny_model().double()
    wave_BL, _ = waves((4000,))
    before, names = logits(model, wave_BL, None), set(model.state_dict())
    add_lora(model, 3)
    assert (logits(model, wave_BL, None) - before).abs().max() == 0
    assert len(list(lora_parameters(model))) == 2 * 2 * 4
    with torch.no_grad():
        for parameter in lora_parameters(model):
            parameter.add_(torch.randn_like(parameter))
    changed = logits(model, wave_BL, None)
    assert (changed - before).abs().max() > 1e-3
    plain = merged(model.state_dict())
    assert set(plain) == names
    other = tiny_model(seed=9).double()
    other.load_state_dict(plain)
    assert (logits(other, wave_BL, None) - changed).abs().max() < 1e-12


def test_normalized_waves():
    """The arithmetic of transformers' feature extractor, clip by clip."""
    wave_BL, samples_B = waves()
    made_BL = normalized(wave_BL * 0.1 + 0.3, samples_B)
    for row, samples in enumerate(LENGTHS):
        wave = wave_BL[row, :samples] * 0.1 + 0.3
        expected = (wave - wave.mean()) / (wave.var(correction=0) + 1e-7).sqrt()
        assert (made_BL[row, :samples] - expected).abs().max() < 1e-12
        assert made_BL[row, samples:].count_nonzero() == 0


@each_row(transformers_folder, run_folder)
def test_log_probs_of_a_batch_are_those_of_each_clip(tmp_path, form):
    recogniser = load_recogniser(form(tmp_path / form.__name__), CPU)
    assert (recogniser.sampling_rate, recogniser.normalizes) == (16000, True)
    assert recogniser.vocabulary.symbols == VOCABULARY.symbols
    sounds = [np.random.default_rng(n).normal(0, 0.1, n).astype(np.float32) for n in (9999, 100, 400, 4000)]
    together = recogniser.log_probs(sounds)
    assert [len(one) for one in together] == [30, 0, 1, 12]
    for sound, one in zip(sounds, together, strict=True):
        (alone,) = recogniser.log_probs([sound])
        assert one.dtype == torch.float32
        assert one.shape == alone.shape
        if len(one):
            assert one.exp().sum(1).sub(1).abs().max() < 1e-5
            assert (one - alone).abs().max() < 1e-4


def test_models_with_group_norm_read_clip_by_clip(tmp_path):
    folder = transformers_folder(tmp_path / "model", feat_extract_norm="group", do_stable_layer_norm=False)
    recogniser = load_recogniser(folder, CPU)
    sounds = [np.random.default_rng(n).normal(0, 0.1, n).astype(np.float32) for n in (9999, 4000)]
    together = recogniser.log_probs(sounds)
    assert [len(one) for one in together] == [30, 12]
    with torch.no_grad():
        wave_BL = torch.from_numpy(sounds[1])[None]
        wave_BL = (wave_BL - wave_BL.mean()) / (wave_BL.var(correction=0) + 1e-7).sqrt()
        theirs = recogniser.model(wave_BL).logits.log_softmax(-1)[0]
    assert (together[1] - theirs).abs().max() < 1e-4
