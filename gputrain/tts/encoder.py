"""The text encoder: a Transformer with relative attention in a window (Shaw, Uszkoreit and Vaswani 2018,
arXiv:1803.02155, section 3.2; as in Glow-TTS, Kim et al. 2020, arXiv:2005.11129).

Shape suffixes: B items, S symbols, C channels, A heads, D channels of a head, W distances in the window, 1 a dimension
to broadcast over.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gputrain.engine.recipe import at_least_fp32
from gputrain.tts.architecture import VoiceArchitecture

IMPOSSIBLE = -1e4  # A masked score: softmax gives 0 for it in every precision, and fp16 can represent it.


class EncodedText(NamedTuple):
    """Hidden states of the symbols, and the prior of a frame of each in fp32; all zero beyond the end of an item."""

    hidden_BCS: Tensor
    mean_BCS: Tensor
    log_scale_BCS: Tensor  # log standard deviation
    mask_B1S: Tensor  # True for symbols inside an item


class TextEncoder(nn.Module):
    def __init__(self, architecture: VoiceArchitecture) -> None:
        super().__init__()
        channels = architecture.hidden_channels
        self.embedding = nn.Embedding(architecture.num_symbols, channels)
        nn.init.normal_(self.embedding.weight, std=channels**-0.5)
        self.layers = nn.ModuleList(EncoderLayer(architecture) for _ in range(architecture.encoder_layers))
        self.project = nn.Conv1d(channels, 2 * architecture.latent_channels, 1)

    def forward(self, ids_BS: Tensor, mask_B1S: Tensor) -> EncodedText:
        mask_BS1 = mask_B1S.transpose(1, 2)
        x_BSC = self.embedding(ids_BS) * math.sqrt(self.embedding.embedding_dim) * mask_BS1
        for layer in self.layers:
            x_BSC = layer(x_BSC, mask_BS1)
        hidden_BCS = (x_BSC * mask_BS1).transpose(1, 2)
        mean_BCS, log_scale_BCS = (at_least_fp32(self.project(hidden_BCS)) * mask_B1S).chunk(2, dim=1)
        return EncodedText(hidden_BCS, mean_BCS, log_scale_BCS, mask_B1S)


class EncoderLayer(nn.Module):
    """Attention and two convolutions, each followed by a residual connection and a LayerNorm."""

    def __init__(self, architecture: VoiceArchitecture) -> None:
        super().__init__()
        channels = architecture.hidden_channels
        self.attention = RelativeAttention(architecture)
        self.attention_norm = nn.LayerNorm(channels)
        self.convolutions = Convolutions(architecture)
        self.convolutions_norm = nn.LayerNorm(channels)
        self.dropout = nn.Dropout(architecture.encoder_dropout)

    def forward(self, x_BSC: Tensor, mask_BS1: Tensor) -> Tensor:
        x_BSC = self.attention_norm(x_BSC + self.dropout(self.attention(x_BSC, mask_BS1)))
        out_BSC: Tensor = self.convolutions_norm(x_BSC + self.dropout(self.convolutions(x_BSC, mask_BS1)))
        return out_BSC


class RelativeAttention(nn.Module):
    """Self-attention. In the window, a learnt vector of the distance is added to all heads' keys and values."""

    def __init__(self, architecture: VoiceArchitecture) -> None:
        super().__init__()
        channels = architecture.hidden_channels
        self.heads, self.window = architecture.encoder_heads, architecture.encoder_window
        width, distances = channels // self.heads, 2 * self.window + 1
        self.query_key_value = nn.Linear(channels, 3 * channels)
        for part in self.query_key_value.weight.detach().chunk(3):
            nn.init.xavier_uniform_(part)
        self.relative_keys = nn.Parameter(torch.randn(distances, width) * width**-0.5)
        self.relative_values = nn.Parameter(torch.randn(distances, width) * width**-0.5)
        self.out = nn.Linear(channels, channels)
        self.dropout = nn.Dropout(architecture.encoder_dropout)

    def forward(self, x_BSC: Tensor, mask_BS1: Tensor) -> Tensor:
        query_BASD, key_BASD, value_BASD = (
            part_BSC.reshape(*x_BSC.shape[:2], self.heads, -1).transpose(1, 2)
            for part_BSC in self.query_key_value(x_BSC).chunk(3, dim=2)
        )
        query_BASD = query_BASD * query_BASD.shape[-1] ** -0.5
        near_BASW = query_BASD @ self.relative_keys.T
        score_BASS = query_BASD @ key_BASD.transpose(2, 3) + band_to_square(near_BASW)
        score_BASS = score_BASS.masked_fill(~mask_BS1[:, None].transpose(2, 3), IMPOSSIBLE)
        weight_BASS = self.dropout(score_BASS.softmax(dim=-1))
        seen_BASD = weight_BASS @ value_BASD
        seen_BASD = seen_BASD + square_to_band(weight_BASS, self.window) @ self.relative_values
        out_BSC: Tensor = self.out(seen_BASD.transpose(1, 2).flatten(2))
        return out_BSC


def band_to_square(band: Tensor) -> Tensor:
    """Places a band ...SW into a square ...SS, at distance w - W // 2 from the diagonal; the rest is zero.

    Rows of S + W numbers, reshaped to rows of one less, shift by one position from row to row. Indexing is avoided
    because its gradient is not deterministic; the paper's reshape needs squares twice as wide.
    """
    symbols, window = band.shape[-2], band.shape[-1] // 2
    rows = F.pad(band, (0, symbols)).flatten(-2)[..., :-symbols]
    return rows.reshape(*band.shape[:-1], -1)[..., window : window + symbols]


def square_to_band(square: Tensor, window: int) -> Tensor:
    """Extracts the band ...SW, W = 2 * window + 1, from a square ...SS, zero outside the square."""
    symbols = square.shape[-1]
    rows = F.pad(F.pad(square, (window, window)).flatten(-2), (0, symbols))
    return rows.reshape(*square.shape[:-1], -1)[..., : 2 * window + 1]


class Convolutions(nn.Module):
    def __init__(self, architecture: VoiceArchitecture) -> None:
        super().__init__()
        channels, wide = architecture.hidden_channels, architecture.encoder_filter_channels
        kernel = architecture.encoder_kernel_size
        self.widen = nn.Conv1d(channels, wide, kernel, padding=kernel // 2)
        self.narrow = nn.Conv1d(wide, channels, kernel, padding=kernel // 2)
        self.dropout = nn.Dropout(architecture.encoder_dropout)

    def forward(self, x_BSC: Tensor, mask_BS1: Tensor) -> Tensor:
        mask_B1S = mask_BS1.transpose(1, 2)
        x_BCS = torch.relu(self.widen(x_BSC.transpose(1, 2) * mask_B1S))
        out_BCS: Tensor = self.narrow(self.dropout(x_BCS) * mask_B1S) * mask_B1S
        return out_BCS.transpose(1, 2)
