"""Architectures of voices: VITS (Kim, Kong and Son 2021, arXiv:2106.06103) and two smaller ones. Imports no torch."""

from dataclasses import dataclass, replace
from typing import Any, Literal

from gputrain.audio.config import Mel, check_hifigan_sizes

VoicePreset = Literal["high", "medium", "fast"]
DecoderKind = Literal["hifi-gan", "multi-band"]

MEL = Mel(22050, num_mels=80, hop_size=256, win_size=1024, n_fft=1024, fmin=0.0, fmax=11025.0)


@dataclass(frozen=True)
class VoiceArchitecture:
    """Sizes of the generator; the defaults are those of VITS. Raises UserError for inconsistent sizes of the decoder.

    A frame is `mel.hop_size` samples: the product of `upsample_rates`, and for a multi-band decoder of `istft_hop_size`
    and `subbands`. The posterior encoder reads the `n_fft // 2 + 1` linear magnitudes of the same STFT.
    """

    num_symbols: int
    num_speakers: int = 1
    mel: Mel = MEL
    hidden_channels: int = 192
    latent_channels: int = 192
    speaker_channels: int = 256  # size of the speaker embedding of multi-speaker models
    # Text encoder:
    encoder_layers: int = 6
    encoder_heads: int = 2
    encoder_filter_channels: int = 768
    encoder_kernel_size: int = 3
    encoder_window: int = 4  # window of relative attention, in symbols to each side
    encoder_dropout: float = 0.1
    # Posterior encoder and flow:
    wavenet_kernel_size: int = 5
    posterior_layers: int = 16
    flow_layers: int = 4
    flow_couplings: int = 4
    # Stochastic duration predictor:
    duration_kernel_size: int = 3
    duration_layers: int = 3
    duration_flows: int = 4
    duration_bins: int = 10
    duration_bound: float = 5.0  # The splines are the identity outside [-bound, bound].
    duration_dropout: float = 0.5
    # Decoder:
    decoder: DecoderKind = "hifi-gan"
    upsample_initial_channel: int = 512
    upsample_rates: tuple[int, ...] = (8, 8, 2, 2)
    upsample_kernel_sizes: tuple[int, ...] = (16, 16, 4, 4)
    resblock: Literal["1", "2"] = "1"
    resblock_kernel_sizes: tuple[int, ...] = (3, 7, 11)
    resblock_dilation_sizes: tuple[tuple[int, ...], ...] = ((1, 3, 5), (1, 3, 5), (1, 3, 5))
    subbands: int = 4  # multi-band decoder only, as the next two
    istft_n_fft: int = 16  # four times the hop, so that every sample lies in four windows
    istft_hop_size: int = 4

    def __post_init__(self) -> None:
        if self.decoder == "multi-band":
            samples = self.istft_hop_size * self.subbands
            check_hifigan_sizes(self, samples=samples, with_samples=", istft_hop_size and subbands")
        else:
            check_hifigan_sizes(self)

    @property
    def spectrogram_bins(self) -> int:
        return self.mel.n_fft // 2 + 1

    @property
    def conditioned_channels(self) -> int:
        """Channels of the speaker conditioning; 0 for a single-speaker model."""
        return self.speaker_channels if self.num_speakers > 1 else 0


# Piper's medium voice has a narrower decoder with lighter blocks. Its speaker embedding is twice as wide as VITS's.
MEDIUM: dict[str, Any] = {
    "speaker_channels": 512,
    "upsample_initial_channel": 256,
    "upsample_rates": (8, 8, 4),
    "upsample_kernel_sizes": (16, 16, 8),
    "resblock": "2",
    "resblock_kernel_sizes": (3, 5, 7),
    "resblock_dilation_sizes": ((1, 2), (2, 6), (3, 12)),
}
PRESETS: dict[str, dict[str, Any]] = {
    "high": {},
    "medium": MEDIUM,
    # Rates and kernels of MB-iSTFT-VITS (Kawamura et al. 2022, arXiv:2210.15975), the widths of `medium`.
    "fast": {
        **MEDIUM, "decoder": "multi-band", "upsample_rates": (4, 4), "upsample_kernel_sizes": (16, 16)
    },
}  # fmt: skip


def voice_architecture(
    preset: VoicePreset,
    *,
    num_symbols: int,
    num_speakers: int = 1,
    sampling_rate: int = 22050,
    hop_size: int = 256,
    **sizes: Any,
) -> VoiceArchitecture:
    """Returns a preset at a sampling rate in Hz; `sizes` are fields of VoiceArchitecture that replace the preset's.

    Raises UserError for inconsistent sizes, such as a hop_size that is not the product of the upsampling rates.
    """
    mel = replace(MEL, sampling_rate=sampling_rate, hop_size=hop_size, fmax=sampling_rate / 2)
    return VoiceArchitecture(num_symbols, num_speakers, **{"mel": mel, **PRESETS[preset], **sizes})
