"""Comparison with transformers' VitsModel, an independent VITS: equal weights give equal waves, latents and losses.

Shape suffixes: B items, S symbols, N frequencies, C channels, G channels of a speaker, T frames, 2 so many channels.
"""

import functools
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import VitsConfig, VitsModel

from gputrain.audio.weight_norm import WeightNormed
from gputrain.tts.architecture import VoiceArchitecture, voice_architecture
from gputrain.tts.model import Voice, inference_copy, length_mask

SMALL = VoiceArchitecture(
    num_symbols=30, hidden_channels=32, latent_channels=32, speaker_channels=24, encoder_layers=2,
    encoder_filter_channels=48, posterior_layers=3, flow_layers=2, flow_couplings=3, upsample_initial_channel=32,
)  # fmt: skip
speakers = pytest.mark.parametrize("num_speakers", [1, 3])

# These patterns rename our tensors to theirs, in order.
RENAMED: tuple[tuple[str, str], ...] = (
    ("speakers", "embed_speaker"),
    ("embedding", "embed_tokens"),
    (r"text_encoder\.layers", "text_encoder.encoder.layers"),
    ("convolutions_norm", "final_layer_norm"),
    ("attention_norm", "layer_norm"),
    (r"convolutions\.widen", "feed_forward.conv_1"),
    (r"convolutions\.narrow", "feed_forward.conv_2"),
    (r"attention\.out", "attention.out_proj"),
    (r"relative_(.)\w+", r"emb_rel_\1"),
    ("query_key_value", "?_proj"),
    (r"wavenet\.layers\.(\d+)\.conv", r"wavenet.in_layers.\1"),
    (r"wavenet\.layers\.(\d+)\.out", r"wavenet.res_skip_layers.\1"),
    (r"wavenet\.condition", "wavenet.cond_layer"),
    (r"(posterior_encoder|decoder)\.pre", r"\1.conv_pre"),
    (r"posterior_encoder\.project", "posterior_encoder.conv_proj"),
    (r"^flow\.couplings\.(\d+)", r"flow.flows.\1"),
    (r"(flows\.\d+)\.(pre|post)", r"\1.conv_\2"),
    (r"predictor\.posterior_", "predictor.post_"),
    (r"predictor\.text_", "predictor."),
    (r"(predictor\.|predictor\.post_)pre\.", r"\1conv_pre."),
    (r"(predictor\.|predictor\.post_)post\.", r"\1conv_proj."),
    (r"flow\.shift", "flows.0.translate"),
    (r"flow\.log_scale", "flows.0.log_scale"),
    (r"flow\.couplings\.3\.", "flows.4."),  # Their numbers include the affine map.
    (r"flow\.couplings\.2\.", "flows.3."),
    (r"flow\.couplings\.1\.", "flows.2."),
    (r"flow\.couplings\.0\.", "flows.1."),
    (r"(flows\.\d\.)pre", r"\1conv_pre"),
    (r"(flows\.\d\.)project", r"\1conv_proj"),
    (r"stack\.layers\.(\d)\.(\w+)", r"conv_dds.\2.\1"),
    ("depthwise_norm", "norms_1"),
    ("pointwise_norm", "norms_2"),
    ("depthwise", "convs_dilated"),
    ("pointwise", "convs_pointwise"),
    ("condition", "cond"),
    (r"decoder\.ups", "decoder.upsampler"),
    (r"decoder\.head\.post", "decoder.conv_post"),
    ("weight_g", "parametrizations.weight.original0"),
    ("weight_v", "parametrizations.weight.original1"),
)


def as_theirs(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Returns our tensors by their names."""
    there = functools.reduce(lambda made, pair: re.sub(*pair, made), RENAMED, name)
    if "?" in there:
        return {there.replace("?", part): piece for part, piece in zip("qkv", tensor.chunk(3), strict=True)}
    if "emb_rel" in there:
        return {there: tensor[None]}
    if "convs_pointwise" in there and there.endswith("weight"):
        return {there: tensor[..., None]}
    return {there: tensor}


def config_of(architecture: VoiceArchitecture) -> Any:
    return VitsConfig(
        vocab_size=architecture.num_symbols, hidden_size=architecture.hidden_channels,
        flow_size=architecture.latent_channels,
        num_hidden_layers=architecture.encoder_layers, num_attention_heads=architecture.encoder_heads,
        window_size=architecture.encoder_window, ffn_dim=architecture.encoder_filter_channels,
        ffn_kernel_size=architecture.encoder_kernel_size, spectrogram_bins=architecture.spectrogram_bins,
        num_speakers=architecture.num_speakers, speaker_embedding_size=architecture.conditioned_channels,
        upsample_initial_channel=architecture.upsample_initial_channel, upsample_rates=architecture.upsample_rates,
        upsample_kernel_sizes=architecture.upsample_kernel_sizes,
        resblock_kernel_sizes=architecture.resblock_kernel_sizes,
        resblock_dilation_sizes=architecture.resblock_dilation_sizes,
        prior_encoder_num_flows=architecture.flow_couplings,
        prior_encoder_num_wavenet_layers=architecture.flow_layers,
        posterior_encoder_num_wavenet_layers=architecture.posterior_layers, pad_token_id=0,
    )  # fmt: skip


def both(architecture: VoiceArchitecture) -> tuple[Voice, Any]:
    """Returns both voices with equal weights for inference; no weight is zero."""
    torch.manual_seed(0)
    voice = Voice(architecture).eval()
    with torch.no_grad():
        for name, parameter in voice.named_parameters():
            if not parameter.any():
                nn.init.normal_(parameter, std=0.3 if "project" in name else 0.05)
        voice.duration_predictor.flow.shift -= 1.5  # about five frames per symbol
        for layer in voice.decoder.modules():
            if isinstance(layer, WeightNormed):
                layer.weight_g *= 1.7  # so that the audio is loud
    reference = VitsModel(config_of(architecture)).eval()
    reference.decoder.apply_weight_norm()
    weights: dict[str, Tensor] = {}
    for name, tensor in voice.state_dict().items():
        weights |= as_theirs(name, tensor)
    reference.load_state_dict(weights)  # Strict loading ensures that no tensor is missing.
    return voice, reference


def difference(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    return (ours - theirs).abs().max().item()


def some_ids(architecture: VoiceArchitecture, items: int = 1, symbols: int = 17) -> Tensor:
    return torch.randint(0, architecture.num_symbols, (items, symbols), generator=torch.Generator().manual_seed(4))


def speaker_of(architecture: VoiceArchitecture) -> tuple[Tensor | None, int | None]:
    """Returns the last speaker in our form and in theirs."""
    last = architecture.num_speakers - 1
    return (torch.tensor([last]), last) if last else (None, None)


@speakers
def test_the_same_weights_give_the_same_wave(num_speakers: int) -> None:
    same_wave(replace(SMALL, num_speakers=num_speakers))


@pytest.mark.slow
def test_the_same_weights_give_the_same_wave_at_full_size() -> None:
    same_wave(voice_architecture("high", num_symbols=38))


def same_wave(sizes: VoiceArchitecture) -> None:
    voice, reference = both(sizes)
    ids_BS, (speaker_B, speaker_id) = some_ids(sizes), speaker_of(sizes)
    reference.noise_scale = reference.noise_scale_duration = 0.0
    quiet = {"noise_scale": 0.0, "noise_w": 0.0}
    with torch.no_grad():
        theirs_BT = reference(ids_BS, speaker_id=speaker_id).waveform
        ours_B1T, _ = voice.infer(ids_BS, torch.tensor([17]), speaker_B, **quiet)
        copied_B1T, _ = inference_copy(voice).infer(ids_BS, torch.tensor([17]), speaker_B, **quiet)
    assert theirs_BT.std() > 0.01
    assert difference(ours_B1T[:, 0], theirs_BT) < 1e-5
    assert difference(copied_B1T[:, 0], theirs_BT) < 1e-5


@speakers
def test_with_the_same_noise_too(num_speakers: int) -> None:
    """Noise is drawn in their order: for the durations, then for latents, which are transposed in memory."""
    sizes = replace(SMALL, num_speakers=num_speakers)
    voice, reference = both(sizes)
    voice, reference = voice.double(), reference.double()
    ids_BS, (speaker_B, speaker_id) = some_ids(sizes), speaker_of(sizes)
    lengths_B = torch.tensor([17])
    with torch.no_grad():
        torch.manual_seed(7)
        reference.speaking_rate = 0.8
        theirs_BT = reference(ids_BS, speaker_id=speaker_id).waveform
        torch.manual_seed(7)
        noise_B2S = torch.randn(1, 2, 17).double()
        options = {"length_scale": 1.25, "duration_noise_B2S": noise_B2S}
        _, durations_BS = voice.infer(ids_BS, lengths_B, speaker_B, **options)
        torch.manual_seed(7)
        torch.randn(1, 2, 17)
        noise_BCT = torch.randn_like(torch.empty(1, int(durations_BS.sum()), 32, dtype=torch.float64).mT)
        ours_B1T, _ = voice.infer(ids_BS, lengths_B, speaker_B, noise_BCT=noise_BCT, **options)
    assert len(durations_BS.unique()) > 2
    assert difference(ours_B1T[:, 0], theirs_BT) < 1e-9


@speakers
def test_durations_are_as_likely(num_speakers: int) -> None:
    """Compares the training direction, which transformers implements without training, with padding.

    There it swaps the two channels once more than VITS does, and than it does itself on the way back: undone here.
    """
    sizes = replace(SMALL, num_speakers=num_speakers)
    voice, reference = both(sizes)
    voice, reference = voice.double(), reference.double()
    for flows in (reference.duration_predictor.flows, reference.duration_predictor.post_flows):
        flows[0].register_forward_hook(lambda module, inputs, out: (out[0].flip(1), out[1]))
    torch.manual_seed(1)
    hidden_BCS = torch.randn(2, 32, 9, dtype=torch.float64)
    mask_B1S = length_mask(torch.tensor([9, 6]), 9)
    durations_BS = torch.randint(1, 12, (2, 9)) * mask_B1S[:, 0]
    speaker_BG1 = voice.speaker(torch.tensor([1, 0]) if num_speakers > 1 else None)
    torch.manual_seed(2)
    theirs_B = reference.duration_predictor(
        hidden_BCS, mask_B1S.double(), speaker_BG1, durations=durations_BS[:, None].double()
    )
    torch.manual_seed(2)
    noise_B2S = torch.randn(2, 2, 9).double()
    ours_B = voice.duration_predictor(hidden_BCS, mask_B1S, durations_BS, noise_B2S, speaker_BG1)
    assert difference(ours_B, theirs_B) < 1e-9 * theirs_B.abs().max()


@speakers
def test_latents_and_where_the_flow_takes_them(num_speakers: int) -> None:
    sizes = replace(SMALL, num_speakers=num_speakers)
    voice, reference = both(sizes)
    voice, reference = voice.double(), reference.double()
    torch.manual_seed(1)
    spectrogram_BNT = torch.rand(2, 513, 11, dtype=torch.float64)
    lengths_B = torch.tensor([11, 8])
    mask_B1T = length_mask(lengths_B, 11).double()
    speaker_BG1 = voice.speaker(torch.tensor([1, 0]) if num_speakers > 1 else None)
    with torch.no_grad():
        torch.manual_seed(2)
        theirs = reference.posterior_encoder(spectrogram_BNT, mask_B1T, speaker_BG1)
        torch.manual_seed(2)
        noise_BCT = torch.randn(2, 32, 11, dtype=torch.float64)
        ours, prior_BCT = voice.encode_sound(spectrogram_BNT, lengths_B, noise_BCT, speaker_BG1)
        assert max(map(difference, ours[:3], theirs)) < 1e-9
        assert difference(prior_BCT, reference.flow(theirs[0], mask_B1T, speaker_BG1)) < 1e-9
        back_BCT = voice.flow.inverse(prior_BCT, length_mask(lengths_B, 11), speaker_BG1)
        assert difference(back_BCT, ours.latent_BCT) < 1e-10
        assert difference(prior_BCT, ours.latent_BCT) > 0.1


def test_text_with_padding() -> None:
    voice, reference = both(SMALL)
    voice, reference = voice.double(), reference.double()
    ids_BS, lengths_B = some_ids(SMALL, items=2), torch.tensor([17, 3])
    mask_BS = length_mask(lengths_B, 17)[:, 0]
    with torch.no_grad():
        theirs = reference.text_encoder(ids_BS, mask_BS[..., None].double(), mask_BS.long())
        ours = voice.encode_text(ids_BS, lengths_B)
    assert difference(ours.hidden_BCS.mT, theirs.last_hidden_state) < 1e-9
    assert difference(ours.mean_BCS.mT, theirs.prior_means) < 1e-9
    assert difference(ours.log_scale_BCS.mT, theirs.prior_log_variances) < 1e-9


def test_a_count_of_parameters_is_theirs() -> None:
    sizes = voice_architecture("high", num_symbols=256)
    with torch.device("meta"):
        ours, theirs = Voice(sizes), VitsModel(config_of(sizes))
        theirs.decoder.apply_weight_norm()
    assert sum(weight.numel() for weight in ours.parameters()) == sum(weight.numel() for weight in theirs.parameters())
