"""Synthesises sound of any length with a trained vocoder, from recordings or from files of mel and pitch.

Shape suffixes: M mel bands, F frames, T samples, B items (one), C channels, H harmonics.
"""

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gputrain.audio.f0 import default_method, interpolated
from gputrain.audio.io import HOW_TO_CONVERT
from gputrain.audio.weight_norm import weights_made_once
from gputrain.engine.checkpoint import shortened
from gputrain.engine.data import Progress, silent, write_wav, writing
from gputrain.engine.preparation import RefusedItem
from gputrain.errors import UserError
from gputrain.hw.runtime import runtime_on
from gputrain.vocoder import inputs
from gputrain.vocoder.architecture import NsfHifiganArchitecture
from gputrain.vocoder.config import Vocode
from gputrain.vocoder.generator import Generator, Noise, draw_noise
from gputrain.vocoder.load import load_vocoder

log = logging.getLogger(__name__)

CHUNK_SECONDS = 20.0
NOISE_FRAMES = 256  # Frames whose noise is drawn at once, from a seed of their own.


@dataclass(frozen=True)
class Vocoded:
    written: list[Path]
    refused: list[RefusedItem]


def vocode(
    generator: Generator, mel_MF: Tensor, f0_F: Tensor, *, seed: int = 0, chunk_seconds: float = CHUNK_SECONDS
) -> Tensor:
    """Returns the wave (T,) of a log-mel spectrogram and a pitch in Hz, 0 where unvoiced: T = F * hop_size, fp32, CPU.

    Where the pitch is 0, it is interpolated, as in training. The wave is computed in chunks on the device of the
    generator and does not depend on their length: chunks have the context of the receptive field, continue the phase of
    the whole, and draw noise as a function of seed and frame.
    """
    mel = generator.architecture.mel
    frames = max(1, round(chunk_seconds * mel.sampling_rate / mel.hop_size))
    return torch.cat(list(wave_chunks(generator, mel_MF, f0_F, seed=seed, frames=frames)))


@torch.no_grad()
def wave_chunks(generator: Generator, mel_MF: Tensor, f0_F: Tensor, *, seed: int, frames: int) -> Iterator[Tensor]:
    """Yields the same wave in pieces of `frames`; the last may be shorter."""
    f0_F = torch.from_numpy(interpolated(f0_F.cpu().numpy()))
    architecture, device = generator.architecture, next(generator.parameters()).device
    margin, hop, count = reach_frames(architecture), architecture.mel.hop_size, len(f0_F)
    start_F = generator.frame_starts(f0_F[None].float())[0]
    noise = FrameNoise(architecture, seed, device)
    for first in range(0, count, frames):
        last = min(first + frames, count)
        low, high = max(0, first - margin), min(count, last + margin)
        seen = [part[..., low:high].to(device, torch.float32)[None] for part in (mel_MF, f0_F, start_F)]
        with weights_made_once(generator):
            wave_T = generator(seen[0], seen[1], noise.between(low, high), seen[2])[0, 0]
        yield wave_T[(first - low) * hop : (last - low) * hop].cpu()


def reach_frames(architecture: NsfHifiganArchitecture) -> int:
    """Returns the receptive field of a sample in frames to either side."""
    per_frame, reach = 1, 3.0  # The reach of conv_pre is 3 frames.
    blocks = max(
        sum((kernel - 1) // 2 * (dilation + 1) for dilation in dilations)
        for kernel, dilations in zip(
            architecture.resblock_kernel_sizes, architecture.resblock_dilation_sizes, strict=True
        )
    )
    for rate, kernel in zip(architecture.upsample_rates, architecture.upsample_kernel_sizes, strict=True):
        reach += kernel / rate / per_frame  # The kernels of the source, two strides long, reach no further.
        per_frame *= rate
        reach += blocks / per_frame
    return math.ceil(reach + 3 / per_frame) + 1  # For conv_post and the glide of mini-NSF.


@dataclass(frozen=True)
class FrameNoise:
    """Noise as a function of the seed and the frame, so that the noise of an hour need not be kept."""

    architecture: NsfHifiganArchitecture
    seed: int
    device: torch.device

    def between(self, low: int, high: int) -> Noise:
        """Returns the noise of the frames low .. high - 1."""
        hop = self.architecture.mel.hop_size
        numbers = range(low // NOISE_FRAMES, -(-high // NOISE_FRAMES))
        blocks = [self._drawn(NOISE_FRAMES, self.seed, number) for number in numbers]
        begin, end = (frame - numbers.start * NOISE_FRAMES for frame in (low, high))
        return Noise(
            self._drawn(0, self.seed).phase_BH,
            torch.cat([block.source_BTH for block in blocks], dim=1)[:, begin * hop : end * hop],
            torch.cat([block.features_BCF for block in blocks], dim=2)[..., begin:end],
        )

    def _drawn(self, frames: int, *words: int) -> Noise:
        (seed,) = np.random.SeedSequence(words).generate_state(1, np.uint64)
        random = torch.Generator(self.device).manual_seed(int(seed) >> 1)
        return draw_noise(self.architecture, 1, frames, random)


def vocode_files(settings: Vocode, *, progress: Progress = silent) -> Vocoded:
    """Synthesises every recording, and every mel with its pitch, of a file or a folder tree: 16-bit wav in
    `output_dir`.

    A recording is resampled to the model's rate, analysed and resynthesised at its length. A mel (natural logarithm,
    frames and bands in any order) and its pitch in Hz are `mel` and `f0` in NAME.npz, or NAME.mel.npy and NAME.f0.npy.
    Pitches are shifted by `shift_semitones`, and clipped at the highest pitch of the model's source. Raises UserError
    if there is no such model or no input, if a source would be overwritten, or if no input could be synthesised.
    """
    wanted = inputs.targets(settings.input, settings.output_dir)
    runtime = runtime_on(settings.device)
    generator = load_vocoder(settings.model, runtime.device).generator
    mel = generator.architecture.mel
    method = default_method() if settings.f0_method == "auto" else settings.f0_method
    read = inputs.VocoderInputReader(mel, method, settings.f0_min, settings.f0_max, runtime.device)
    done = Vocoded([], [])
    for count, (source, target) in enumerate(wanted.items(), start=1):
        try:
            song = read(source)
        except UserError as error:
            log.warning("%s; left out", error.message)
            done.refused.append(RefusedItem(str(source), "unreadable", error.message.removeprefix(f"{source}: ")))
        else:
            f0_F = _reachable(generator, song.f0_F * 2 ** (settings.shift_semitones / 12), source)
            wave_T = vocode(generator, song.mel_MF, f0_F, seed=settings.seed, chunk_seconds=settings.chunk_seconds)
            with writing(target):
                target.parent.mkdir(parents=True, exist_ok=True)
            write_wav(target, wave_T[: song.samples].numpy(), mel.sampling_rate)
            done.written.append(target)
        progress(count, len(wanted))
    if not done.written:
        causes = shortened([f"{refusal.path}: {refusal.detail}" for refusal in done.refused])
        raise UserError(f"{settings.input}: no usable input: {causes}", hint=HOW_TO_CONVERT)
    return done


def _reachable(generator: Generator, f0_F: Tensor, source: Path) -> Tensor:
    """Clips the pitch to half the rate of the model's sine, above which it would alias."""
    ceiling_hz = generator.m_source.rate_hz / 2
    above = int((f0_F > ceiling_hz).sum())
    if above:
        log.warning(
            "%s: %d frames are above %.0f Hz, the highest pitch of this model: clipped", source, above, ceiling_hz
        )
    return f0_F.clamp(max=ceiling_hz)
