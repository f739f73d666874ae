"""The voice in training: independence of items, padding, precision, memory, and gradient flow.

Shape suffixes: B items, S symbols, C channels, T frames, L samples, W distances, 1 and 2 so many channels.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from gputrain.audio.weight_norm import WeightNormed, cached_weights
from gputrain.tts.architecture import VoicePreset
from gputrain.tts.encoder import band_to_square, square_to_band
from gputrain.tts.model import Voice, inference_copy, length_mask, segment_starts, segments
from tests.tables import each_row
from tests.tts.voices import Losses, build, small, some_batch, training

presets = pytest.mark.parametrize("preset", ["high", "medium", "fast"])
speakers = pytest.mark.parametrize("num_speakers", [1, 3])


def gradients(voice: Voice, losses: Losses) -> list[Tensor]:
    return list(torch.autograd.grad(losses.total(), list(voice.parameters())))


def difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """Returns the largest difference, relative to the largest value of each tensor."""
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(ours, theirs, strict=True))


@presets
@speakers
def test_parts_of_a_batch_add_up_to_it(preset: VoicePreset, num_speakers: int) -> None:
    sizes = small(preset, num_speakers)
    voice, batch = build(sizes).double(), some_batch(sizes).to(torch.float64)
    whole = training(voice, batch)
    parts = [training(voice, batch.items(part)) for part in (slice(0, 1), slice(1, 3))]
    for ours, theirs in zip(map(torch.cat, zip(*parts, strict=True)), whole, strict=True):
        assert difference([ours], [theirs]) < 1e-12
    summed = [one + other for one, other in zip(*(gradients(voice, part) for part in parts), strict=True)]
    assert difference(summed, gradients(voice, whole)) < 1e-11


@speakers
def test_padding_changes_nothing(num_speakers: int) -> None:
    """An item has the same losses and segment without its padding, and with noise in it."""
    sizes = small("high", num_speakers)
    voice, batch = build(sizes).double(), some_batch(sizes).to(torch.float64)
    padded = training(voice, batch.items(slice(1, 2)))
    alone = batch.items(slice(1, 2))
    alone = alone._replace(
        ids_BS=alone.ids_BS[:, :4], durations_BS=alone.durations_BS[:, :4],
        duration_noise_B2S=alone.duration_noise_B2S[..., :4], latent_noise_BCT=alone.latent_noise_BCT[..., :9],
        spectrogram_BNT=alone.spectrogram_BNT[..., :9],
    )  # fmt: skip
    assert difference(list(training(voice, alone)), list(padded)) < 1e-12
    noisy = batch.items(slice(1, 2))
    noisy.ids_BS[:, 4:] += 1
    noisy.spectrogram_BNT[..., 9:] += 1
    assert difference(list(training(voice, noisy)), list(padded)) < 1e-12


@presets
def test_gradients_reach_every_parameter(preset: VoicePreset) -> None:
    sizes = small(preset, 3)
    voice = build(sizes)
    losses = training(voice, some_batch(sizes))
    names = [name for name, _ in voice.named_parameters()]
    assert [n for n, g in zip(names, gradients(voice, losses), strict=True) if not g.any()] == []


def test_durations_teach_nothing_but_their_predictor() -> None:
    sizes = small("high", 3)
    voice = build(sizes)
    training(voice, some_batch(sizes)).duration_B.sum().backward()
    touched = {name.split(".")[0] for name, parameter in voice.named_parameters() if parameter.grad is not None}
    assert touched == {"duration_predictor"}


@presets
def test_16_bits(preset: VoicePreset) -> None:
    """Priors, latents, losses and waves are in fp32 and close to those without autocast."""
    sizes = small(preset, 3)
    voice, batch = build(sizes), some_batch(sizes)
    exact = training(voice, batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        coarse = training(voice, batch)
        text = voice.encode_text(batch.ids_BS, batch.symbols_B)
        posterior, prior_BCT = voice.encode_sound(
            batch.spectrogram_BNT, batch.frames_B, batch.latent_noise_BCT, voice.speaker(batch.speaker_B)
        )
    for tensor in (*coarse, text.mean_BCS, text.log_scale_BCS, *posterior[:3], prior_BCT):
        assert tensor.dtype == torch.float32
        assert tensor.isfinite().all()
    assert difference(list(coarse[:2]), list(exact[:2])) < 0.02
    slopes, coarse_slopes = (torch.cat([g.flatten() for g in gradients(voice, x)]) for x in (exact, coarse))
    assert coarse_slopes.isfinite().all()
    assert F.cosine_similarity(slopes, coarse_slopes, dim=0) > 0.99


def test_durations_are_exact_under_autocast() -> None:
    """For equal hidden states, losses and gradients are equal bit for bit."""
    sizes = small()
    voice, batch = build(sizes), some_batch(sizes)
    hidden_BCS, mask_B1S = torch.randn(3, 16, 7), length_mask(batch.symbols_B, 7)
    predictor, given = voice.duration_predictor, (batch.durations_BS, batch.duration_noise_B2S)
    exact_B = predictor(hidden_BCS, mask_B1S, *given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours_B = predictor(hidden_BCS, mask_B1S, *given)
        assert predictor.log_durations(hidden_BCS, mask_B1S, torch.ones(3, 2, 7)).dtype == torch.float32
    slopes, exact_slopes = (torch.autograd.grad(x.sum(), list(predictor.parameters())) for x in (ours_B, exact_B))
    assert torch.equal(ours_B, exact_B)
    assert all(map(torch.equal, slopes, exact_slopes))


def test_the_way_back_of_durations() -> None:
    """The inverse of the flow undoes its logarithm, although it skips the coupling of v."""
    voice = build(small("high", duration_flows=4)).double()
    torch.manual_seed(0)
    text_BCS, x_B2S = torch.randn(2, 16, 5).double(), 2 * torch.randn(2, 2, 5).double()
    mask_B1S = length_mask(torch.tensor([5, 3]), 5)
    flow = voice.duration_predictor.flow
    there_B2S, _ = flow(x_B2S, text_BCS, mask_B1S)
    back_B2S = flow.inverse(there_B2S, text_BCS, mask_B1S)
    assert ((back_B2S - x_B2S) * mask_B1S)[:, 0].abs().max() < 1e-9
    assert ((there_B2S - x_B2S) * mask_B1S)[:, 0].abs().max() > 0.1


def saved_bytes(run: Callable[[], object]) -> int:
    """Returns the bytes of the tensors that a graph holds, each counted once, including parameters."""
    held: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        graph = run()
        assert graph is not None
        return sum(held.values())


@presets
def test_checkpointing_saves_memory_and_changes_nothing(preset: VoicePreset) -> None:
    sizes = small(preset, 3)
    plain, light = (build(sizes, checkpointing=on).double() for on in (False, True))
    batch = some_batch(sizes).to(torch.float64)
    assert difference(gradients(light, training(light, batch)), gradients(plain, training(plain, batch))) < 1e-12
    assert saved_bytes(lambda: training(light, batch)) < 0.6 * saved_bytes(lambda: training(plain, batch))


def test_weights_can_be_made_once() -> None:
    sizes = small("medium", 3)
    voice, batch = build(sizes).double(), some_batch(sizes).to(torch.float64)
    expected = gradients(voice, training(voice, batch))
    with cached_weights(voice):
        for part in (slice(0, 2), slice(2, 3)):
            training(voice, batch.items(part)).total().backward()
    made = [parameter.grad for parameter in voice.parameters()]
    assert difference([gradient for gradient in made if gradient is not None], expected) < 1e-11


@each_row(1, 3, 4, 5, 12)
def test_bands_and_squares(symbols: int) -> None:
    band, square = torch.randn(2, symbols, 9), torch.randn(2, symbols, symbols)
    as_square, as_band = torch.zeros_like(square), torch.zeros_like(band)
    for row in range(symbols):
        for column in range(symbols):
            if abs(column - row) <= 4:
                as_square[:, row, column] = band[:, row, column - row + 4]
                as_band[:, row, column - row + 4] = square[:, row, column]
    assert torch.equal(band_to_square(band), as_square)
    assert torch.equal(square_to_band(square, 4), as_band)


def test_segments() -> None:
    x_BCT = torch.arange(20.0).reshape(2, 1, 10)
    assert segments(x_BCT, torch.tensor([0, 7]), 3).squeeze(1).tolist() == [[0, 1, 2], [17, 18, 19]]
    assert segments(x_BCT[..., :2], torch.tensor([0, 0]), 3).squeeze(1).tolist() == [[0, 1, 0], [10, 11, 0]]
    lengths_B, highest = torch.tensor([10, 3, 2]), torch.full((3,), 1 - 2**-24)
    assert segment_starts(torch.zeros(3), lengths_B, 3).tolist() == [0, 0, 0]
    assert segment_starts(highest, lengths_B, 3).tolist() == [7, 0, 0]


def test_dropout_is_that_of_the_sizes() -> None:
    sizes = small("high", encoder_dropout=0.3, duration_dropout=0.4)
    voice, batch = build(sizes), some_batch(sizes)
    found = {name: m.p for name, m in voice.named_modules() if isinstance(m, torch.nn.Dropout) and m.p}
    shares = {(name.split(".")[0], share) for name, share in found.items()}
    assert shares == {("text_encoder", 0.3), ("duration_predictor", 0.4)}
    assert not torch.equal(training(voice, batch).kl_B, training(voice, batch).kl_B)
    voice.eval()
    assert torch.equal(training(voice, batch).kl_B, training(voice, batch).kl_B)


def test_a_copy_to_speak_with() -> None:
    voice = build(small("fast"))
    names = set(voice.state_dict())
    copied = inference_copy(voice)
    assert set(voice.state_dict()) == names
    assert not any(isinstance(module, WeightNormed) for module in copied.modules())
    assert not any("posterior" in name or "weight_v" in name for name in copied.state_dict())
    assert not any(parameter.requires_grad for parameter in copied.parameters())
    assert not copied.training
