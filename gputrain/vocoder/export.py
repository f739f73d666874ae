"""A trained vocoder handed over to the tools of singers: as openvpi's model.ckpt and config.json, or as ONNX.

What is written is read back, and its waves are compared with the live model's, before it takes its place in the folder.

Shape suffixes: M mel bands, F frames, T samples.
"""

import copy
import io
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import yaml
from torch import Tensor

from gputrain.engine.data import writing
from gputrain.errors import UserError
from gputrain.vocoder.generator import Generator, Noise, draw_noise
from gputrain.vocoder.load import CONFIG, Loaded, load
from gputrain.vocoder.onnx_export import largest_difference, write_graph
from gputrain.vocoder.pretrained import MODEL
from gputrain.vocoder.stock_forward import stock_forward, stock_tensors

COMPARED_FRAMES = (1, 7, 40)
STOCK_FRAMES = (1, 7)  # beside the stock forward pass, in fp64, which takes its time
SAME = 1e-4  # of a wave in [-1, 1], between two libraries: 80 dB below full scale
ONLY_FULL = "so-vits-svc and DDSP-SVC cannot load mini_nsf models; DiffSinger and OpenUtau can"


@dataclass(frozen=True)
class Exported:
    files: list[Path]
    largest_difference: float  # of a sample in [-1, 1], between the live model and what was read back or recomputed
    notes: list[str]  # what a user should know about them


def export_openvpi(loaded: Loaded, folder: Path) -> Exported:
    """Write model.ckpt and config.json, as openvpi's tools load them.

    Raises UserError if the stock generator cannot load this shape, weights are not finite or the folder cannot be
    written, RuntimeError if what was read back gives another wave, in our generator or by the stock forward pass.
    """
    _check_stock(loaded.generator)
    generator = _copied(loaded.generator)
    with written_aside(folder) as aside:
        saved = io.BytesIO()  # of a full disk, torch would tell in words of its own
        torch.save({"generator": generator.state_dict()}, saved)
        (aside / MODEL).write_bytes(saved.getbuffer())
        (aside / CONFIG).write_text(json.dumps(_config(loaded), indent=1) + "\n", encoding="utf-8")
        again = load(aside, torch.device("cpu")).generator
        difference = max(_difference(generator, again, frames) for frames in COMPARED_FRAMES)
        if difference != 0:
            raise RuntimeError(f"{folder / MODEL}: read back, a wave differs by {difference:.3g}")
        difference = _stock_difference(generator, aside)
        if not difference < SAME:
            raise RuntimeError(f"{folder / MODEL}: by the stock forward pass, a wave differs by {difference:.3g}")
    return Exported([folder / MODEL, folder / CONFIG], difference, _notes(loaded))


def export_onnx(loaded: Loaded, folder: Path, name: str = "vocoder") -> Exported:
    """Write NAME.onnx (mel [1, n_frames, M], f0 [1, n_frames] -> waveform [1, n_samples]) and vocoder.yaml, as
    DiffSinger and OpenUtau load them.

    Raises UserError if weights are not finite, a package is not installed or the folder cannot be written, RuntimeError
    if onnxruntime makes another wave than torch.
    """
    if not name or Path(name).name != name:
        raise UserError(f"{name!r} is no name of a file", hint="give a name without folders, such as vocoder")
    generator = _copied(loaded.generator)
    file = f"{name}.onnx"
    with written_aside(folder) as aside:
        write_graph(generator, aside / file)
        (aside / "vocoder.yaml").write_text(
            yaml.safe_dump(_vocoder_yaml(loaded, name, file), sort_keys=False, allow_unicode=True), encoding="utf-8"
        )
        difference = largest_difference(generator, aside / file, [probe(generator, n) for n in COMPARED_FRAMES])
        if not difference < SAME:
            raise RuntimeError(f"{folder / file}: onnxruntime's wave differs from torch's by {difference:.3g}")
    return Exported([folder / file, folder / "vocoder.yaml"], difference, _notes(loaded))


def probe(generator: Generator, frames: int) -> tuple[Tensor, Tensor]:
    """A mel (M, F) like that of singing, and a pitch (F,) up to the highest that the source can have, unvoiced in a
    third of the frames."""
    random = torch.Generator().manual_seed(frames)
    mel_MF = -5 + 2 * torch.randn(generator.architecture.mel.num_mels, frames, generator=random)
    ceiling_hz = generator.m_source.rate_hz / 2 if generator.architecture.mini_nsf else 2000.0
    f0_F = 60 * (ceiling_hz / 60) ** torch.rand(frames, generator=random)
    return mel_MF, f0_F * (torch.arange(frames) % 9 < 6)


@torch.no_grad()
def _difference(generator: Generator, other: Generator, frames: int) -> float:
    """Largest of the waves of both, with the same noise."""
    mel_MF, f0_F = probe(generator, frames)
    noise = draw_noise(generator.architecture, 1, frames, torch.Generator().manual_seed(frames))
    waves = [model(mel_MF[None], f0_F[None], noise) for model in (generator, other)]
    return float((waves[0] - waves[1]).abs().max())


def _check_stock(generator: Generator) -> None:
    faults = generator.architecture.stock_faults
    if faults:
        raise UserError(
            f"openvpi's generator cannot load this model: {'; '.join(faults)}",
            hint="--format onnx holds the whole model; for model.ckpt, train with three dilations in every block "
            "(1,3,5), kernels that are even where rates are, and even rates",
        )


@torch.no_grad()
def _stock_difference(generator: Generator, folder: Path) -> float:
    """Largest of the live model's waves and those that the stock code would make of the files, both in fp64, in which
    only mistakes differ. Raises RuntimeError if the stock generator would refuse the tensors."""
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    written = torch.load(folder / MODEL, weights_only=True)["generator"]
    if {name: tuple(tensor.shape) for name, tensor in written.items()} != stock_tensors(config):
        raise RuntimeError(f"{folder / MODEL}: its tensors are not those of the stock generator")
    weights = {name: tensor.double() for name, tensor in written.items()}
    exact, largest = copy.deepcopy(generator).double(), 0.0
    for frames in STOCK_FRAMES:
        mel_MF, f0_F = (values.double() for values in probe(generator, frames))
        drawn = draw_noise(generator.architecture, 1, frames, torch.Generator().manual_seed(frames))
        noise = Noise(*(values.double() for values in drawn))
        drawn_1 = (noise.phase_BH[0], noise.source_BTH[0], noise.features_BCF)
        stock = stock_forward(weights, config, mel_MF[None], f0_F[None], *drawn_1)
        largest = max(largest, float((exact(mel_MF[None], f0_F[None], noise) - stock).abs().max()))
    return largest


def _copied(generator: Generator) -> Generator:
    """In fp32 on the CPU. Raises UserError if a weight is not finite."""
    for name, tensor in generator.state_dict().items():
        if not tensor.isfinite().all():
            raise UserError(f"{name}: not all weights are finite", hint="export an older checkpoint of the run")
    return copy.deepcopy(generator).to("cpu", torch.float32)


@contextmanager
def written_aside(folder: Path) -> Iterator[Path]:
    """A folder whose files go to `folder` once the block is left without an error."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder, prefix=".partial-") as name:
            yield Path(name)
            for path in sorted(Path(name).iterdir()):
                os.replace(path, folder / path.name)


def _notes(loaded: Loaded) -> list[str]:
    return [ONLY_FULL] if loaded.generator.architecture.mini_nsf else []


def _config(loaded: Loaded) -> dict[str, Any]:
    """config.json: every argument of the model, and the sound that it is for."""
    architecture = loaded.generator.architecture
    mel = architecture.mel
    judged = {}
    if loaded.training is not None:
        judged["discriminator_periods"] = list(loaded.training.discriminators.discriminator_periods)
    return {
        "mini_nsf": architecture.mini_nsf,
        "noise_sigma": architecture.noise_sigma,
        "upsample_rates": list(architecture.upsample_rates),
        "upsample_kernel_sizes": list(architecture.upsample_kernel_sizes),
        "upsample_initial_channel": architecture.upsample_initial_channel,
        "resblock_kernel_sizes": list(architecture.resblock_kernel_sizes),
        "resblock_dilation_sizes": [list(row) for row in architecture.resblock_dilation_sizes],
        **judged,
        "resblock": architecture.resblock,
        "sampling_rate": mel.sampling_rate,
        "num_mels": mel.num_mels,
        "hop_size": mel.hop_size,
        "n_fft": mel.n_fft,
        "win_size": mel.win_size,
        "fmin": mel.fmin,
        "fmax": mel.fmax,
        "pc_aug": architecture.pc_aug,
    }


def _vocoder_yaml(loaded: Loaded, name: str, file: str) -> dict[str, Any]:
    mel = loaded.generator.architecture.mel
    return {
        "name": name,
        "model": file,
        "sample_rate": mel.sampling_rate,
        "hop_size": mel.hop_size,
        "win_size": mel.win_size,
        "fft_size": mel.n_fft,
        "num_mel_bins": mel.num_mels,
        "mel_fmin": mel.fmin,
        "mel_fmax": mel.fmax,
        "mel_base": "e",
        "mel_scale": "slaney",
        "pitch_controllable": loaded.generator.architecture.pc_aug,
        "force_on_cpu": False,
    }
