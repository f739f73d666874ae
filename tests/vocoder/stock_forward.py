"""The forward pass of openvpi's NSF-HiFiGAN from model.ckpt and config.json alone, to which exports are compared.

It shares no code with `generator`, so that a mistake there or in the exporter shows as a different wave. The formulas
are those of the generator of SingingVocoders at 4d0889c (models/nsf_HiFigan/models.py).

Shape suffixes: B items, M mel bands, F frames, C channels, T samples, H harmonics.
"""

import copy
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gputrain.vocoder.export import probe_inputs
from gputrain.vocoder.generator import Generator, Noise, draw_noise

HARMONICS = 9
SINE_AMPLITUDE, VOICED_STD = 0.1, 0.003


def stock_tensors(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns the names and shapes of all tensors of the stock generator for this config.json."""
    shapes: dict[str, tuple[int, ...]] = {}
    rates, width = config["upsample_rates"], config["upsample_initial_channel"]
    blocks = len(config["resblock_kernel_sizes"])

    def add(name: str, bias: int, *shape: int, normed: bool = True) -> None:
        if normed:
            shapes[f"{name}.weight_g"], shapes[f"{name}.weight_v"] = (shape[0], 1, 1), shape
        else:
            shapes[f"{name}.weight"] = shape
        shapes[f"{name}.bias"] = (bias,)

    add("conv_pre", width, width, config["num_mels"], 7)
    if not config["mini_nsf"]:
        add("m_source.l_linear", 1, 1, HARMONICS, normed=False)
    for stage, kernel in enumerate(config["upsample_kernel_sizes"]):
        width //= 2
        add(f"ups.{stage}", width, 2 * width, width, kernel)
        if not config["mini_nsf"]:
            stride = math.prod(rates[stage + 1 :])
            add(f"noise_convs.{stage}", width, width, 1, 2 * stride if stage + 1 < len(rates) else 1, normed=False)
        elif stage == 1:
            add("source_conv", width, width, 1, 1, normed=False)
        for block, size in enumerate(config["resblock_kernel_sizes"]):
            for convs in ("convs1", "convs2"):
                for number in range(3):
                    add(f"resblocks.{blocks * stage + block}.{convs}.{number}", width, width, width, size)
    add("conv_post", 1, 1, width, 7)
    return shapes


@torch.no_grad()
def stock_difference(generator: Generator, folder: Path) -> float:
    """Returns the largest difference between the waves of a generator and of the stock code with the files in `folder`,
    both in fp64, so that rounding does not matter. The files must hold the stock generator's tensors."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    written = torch.load(folder / "model.ckpt", weights_only=True)["generator"]
    assert {name: tuple(tensor.shape) for name, tensor in written.items()} == stock_tensors(config)
    weights = {name: tensor.double() for name, tensor in written.items()}
    exact, largest = copy.deepcopy(generator).double(), 0.0
    for frames in (1, 7):
        mel_MF, f0_F = (values.double() for values in probe_inputs(generator, frames))
        drawn = draw_noise(generator.architecture, 1, frames, torch.Generator().manual_seed(frames))
        noise = Noise(*(values.double() for values in drawn))
        of_item = (noise.phase_BH[0], noise.source_BTH[0], noise.features_BCF)
        stock = stock_forward(weights, config, mel_MF[None], f0_F[None], *of_item)
        largest = max(largest, float((exact(mel_MF[None], f0_F[None], noise) - stock).abs().max()))
    return largest


def stock_forward(
    weights: Mapping[str, Tensor],
    config: Mapping[str, Any],
    mel_1MF: Tensor,
    f0_1F: Tensor,
    phase_H: Tensor,
    noise_TH: Tensor,
    features_1CF: Tensor,
) -> Tensor:
    """Returns the wave (1, 1, T) for given random numbers: uniform `phase_H`, whose first is 0, normal `noise_TH`, and
    normal `features_1CF`, which are scaled by noise_sigma. Those that a model does not use may be empty."""
    rates, kernels = config["upsample_rates"], config["upsample_kernel_sizes"]
    mini, blocks = config["mini_nsf"], len(config["resblock_kernel_sizes"])
    if mini:
        source = _gliding_sine(f0_1F, config["sampling_rate"] / math.prod(rates[2:]), math.prod(rates[:2]))
    else:
        source = _harmonics(weights, f0_1F, config["sampling_rate"], math.prod(rates), phase_H, noise_TH)
    x = F.conv1d(mel_1MF, *_normed(weights, "conv_pre"), padding=3)
    if config["noise_sigma"]:
        x = x + config["noise_sigma"] * features_1CF
    for stage, (rate, kernel) in enumerate(zip(rates, kernels, strict=True)):
        x = F.conv_transpose1d(
            F.leaky_relu(x, 0.1), *_normed(weights, f"ups.{stage}"), stride=rate, padding=(kernel - rate) // 2
        )
        if not mini:
            stride = math.prod(rates[stage + 1 :])
            entry = _plain(weights, f"noise_convs.{stage}")
            last = stage + 1 == len(rates)
            x = x + (F.conv1d(source, *entry) if last else F.conv1d(source, *entry, stride=stride, padding=stride // 2))
        elif stage == 1:
            x = x + F.conv1d(source, *_plain(weights, "source_conv"))
        stacked = [_block(weights, config, block, f"resblocks.{blocks * stage + block}", x) for block in range(blocks)]
        x = torch.stack(stacked).sum(dim=0) / blocks
    return torch.tanh(F.conv1d(F.leaky_relu(x, 0.01), *_normed(weights, "conv_post"), padding=3))


def _block(weights: Mapping[str, Tensor], config: Mapping[str, Any], block: int, name: str, x: Tensor) -> Tensor:
    """Computes residual block "1": three pairs of convolutions."""
    kernel, dilations = config["resblock_kernel_sizes"][block], config["resblock_dilation_sizes"][block]
    for number in range(3):
        dilated, plain = (_normed(weights, f"{name}.{convs}.{number}") for convs in ("convs1", "convs2"))
        spread = dilations[number]
        inner = F.conv1d(F.leaky_relu(x, 0.1), *dilated, dilation=spread, padding=spread * (kernel - 1) // 2)
        x = x + F.conv1d(F.leaky_relu(inner, 0.1), *plain, padding=(kernel - 1) // 2)
    return x


def _normed(weights: Mapping[str, Tensor], name: str) -> tuple[Tensor, Tensor]:
    direction, length = weights[f"{name}.weight_v"], weights[f"{name}.weight_g"]
    lengths = torch.linalg.vector_norm(direction, dim=(1, 2), keepdim=True)
    return direction * (length / lengths), weights[f"{name}.bias"]


def _plain(weights: Mapping[str, Tensor], name: str) -> tuple[Tensor, Tensor]:
    return weights[f"{name}.weight"], weights[f"{name}.bias"]


def _frame_phase(cycles_1FN: Tensor) -> Tensor:
    """Returns phases (1, F, N) in cycles that continue from frame to frame, given phases that start at 0 in each."""
    advance_1F = torch.fmod(cycles_1FN[..., -1] + 0.5, 1.0) - 0.5
    start_1F = F.pad(advance_1F.cumsum(dim=1).fmod(1.0)[:, :-1], (1, 0))
    return cycles_1FN + start_1F[..., None]


def _harmonics(
    weights: Mapping[str, Tensor], f0_1F: Tensor, rate_hz: float, samples: int, phase_H: Tensor, noise_TH: Tensor
) -> Tensor:
    """Returns the full source (1, 1, T): nine sines and noise, merged by a linear layer."""
    count_N = torch.arange(1, samples + 1, dtype=f0_1F.dtype)
    cycles_T1 = _frame_phase(f0_1F[..., None] / rate_hz * count_N).reshape(-1, 1)
    turns_TH = cycles_T1 * torch.arange(1, HARMONICS + 1, dtype=f0_1F.dtype) + phase_H
    voiced_T1 = (f0_1F > 0).repeat_interleave(samples, dim=1).reshape(-1, 1).to(f0_1F.dtype)
    loudness_T1 = voiced_T1 * VOICED_STD + (1 - voiced_T1) * SINE_AMPLITUDE / 3
    sines_TH = SINE_AMPLITUDE * torch.sin(2 * math.pi * turns_TH) * voiced_T1 + loudness_T1 * noise_TH
    return torch.tanh(F.linear(sines_TH, *_plain(weights, "m_source.l_linear"))).reshape(1, 1, -1)


def _gliding_sine(f0_1F: Tensor, rate_hz: float, samples: int) -> Tensor:
    """Returns the mini source (1, 1, T): one sine, whose pitch is interpolated linearly between frames."""
    count_N = torch.arange(1, samples + 1, dtype=f0_1F.dtype)
    step_1F1 = (f0_1F / rate_hz)[..., None]
    glide_1F1 = F.pad(step_1F1[:, 1:] - step_1F1[:, :-1], (0, 0, 0, 1))
    cycles_1FN = step_1F1 * count_N + 0.5 * glide_1F1 * count_N * (count_N - 1) / samples
    return torch.sin(2 * math.pi * _frame_phase(cycles_1FN)).reshape(1, 1, -1)
