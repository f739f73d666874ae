"""Exports a trained vocoder for singing synthesis tools: as openvpi's model.ckpt and config.json, or as ONNX.

The files are read back, and their waves are compared with the model's, before they are moved to the output folder. The
ONNX graph draws its noise itself, like the graphs of DiffSinger and OpenUtau. To compare it with torch, its noise is
made an additional output and passed to torch.

Shape suffixes: B items (one), M mel bands, F frames, T samples, H harmonics, C channels.
"""

import io
import json
import re
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn

from gputrain.audio.export import (
    LARGEST_DIFFERENCE,
    check_file_name,
    cpu_copy,
    exported,
    load_checked_onnx,
    load_line,
    run_onnx,
    wave_difference,
    write_onnx,
)
from gputrain.audio.weight_norm import cached_weights
from gputrain.errors import UserError, import_package
from gputrain.files import Progress, StepProgress, no_progress, written_aside
from gputrain.kinds import Exported
from gputrain.vocoder.config import SAME_OPTIONS
from gputrain.vocoder.generator import HARMONICS, Generator, Noise, draw_noise
from gputrain.vocoder.load import CONFIG, DILATIONS, MODEL, SPECTROGRAM, LoadedVocoder, load_vocoder

COMPARED_FRAMES = (1, 7, 40)
ONLY_FULL = "so-vits-svc and DDSP-SVC cannot load mini_nsf models; DiffSinger and OpenUtau can"
OPSET = 17
EXAMPLE_FRAMES = 10


def export_openvpi(loaded: LoadedVocoder, folder: Path, progress: Progress = no_progress) -> Exported:
    """Writes model.ckpt and config.json in the format that openvpi's tools load.

    Raises UserError if the stock generator cannot load these sizes, weights are not finite or the folder cannot be
    written; RuntimeError if the files, read back, give another wave.
    """
    if faults := loaded.generator.architecture.stock_faults:
        raise UserError(
            f"openvpi's generator cannot load this model: {'; '.join(faults)}",
            hint="use --format onnx; for model.ckpt, train with three dilations in every block (1,3,5), even kernels "
            "for even upsampling rates, and even rates",
        )
    steps = StepProgress(progress, 2)
    generator = cpu_copy(loaded.generator)
    with written_aside(folder) as aside:
        saved = io.BytesIO()  # On a full disk, torch.save to a file raises errors of its own.
        torch.save({"generator": generator.state_dict()}, saved)
        (aside / MODEL).write_bytes(saved.getbuffer())
        (aside / CONFIG).write_text(json.dumps(_config(loaded), indent=1) + "\n", encoding="utf-8")
        steps.next()
        again = load_vocoder(aside, torch.device("cpu")).generator
        difference = max(_difference(generator, again, frames) for frames in COMPARED_FRAMES)
        if difference != 0:
            raise RuntimeError(f"{folder / MODEL}: read back, a wave differs by {difference:.3g}")
        steps.next()
    notes = [ONLY_FULL] if generator.architecture.mini_nsf else []
    return exported([folder / MODEL, folder / CONFIG], loaded.source, "sample", difference, notes)


def export_onnx(
    loaded: LoadedVocoder, folder: Path, name: str = "vocoder", progress: Progress = no_progress
) -> Exported:
    """Writes NAME.onnx (mel [1, n_frames, M], f0 [1, n_frames] -> waveform [1, n_samples]) and vocoder.yaml, in
    the format that DiffSinger and OpenUtau load.

    Raises UserError if weights are not finite, a package is not installed or the folder cannot be written; RuntimeError
    if onnxruntime's wave differs from torch's.
    """
    check_file_name(name, example="vocoder")
    generator, steps = cpu_copy(loaded.generator), StepProgress(progress, 1 + len(COMPARED_FRAMES))
    file = f"{name}.onnx"
    with written_aside(folder) as aside:
        write_graph(generator, aside / file)
        (aside / "vocoder.yaml").write_text(
            yaml.safe_dump(_vocoder_yaml(loaded, name, file), sort_keys=False, allow_unicode=True), encoding="utf-8"
        )
        steps.next()
        probes = [probe_inputs(generator, frames) for frames in COMPARED_FRAMES]
        difference = largest_difference(generator, aside / file, probes, steps.next)
        if not difference < LARGEST_DIFFERENCE:
            raise RuntimeError(f"{folder / file}: onnxruntime's wave differs from torch's by {difference:.3g}")
    mel = generator.architecture.mel
    notes = [
        load_line(folder / file, "mel", "f0"),
        f"Inputs float32: mel (1, frames, {mel.num_mels}), the natural logarithm of magnitudes; f0 (1, frames) in Hz, "
        f"0 where unvoiced; a frame every {mel.hop_size} samples. Output: (1, samples) at {mel.sampling_rate} Hz",
        *([ONLY_FULL] if generator.architecture.mini_nsf else []),
    ]
    return exported([folder / file, folder / "vocoder.yaml"], loaded.source, "sample", difference, notes)


def export_oudep(
    loaded: LoadedVocoder, folder: Path, name: str = "vocoder", progress: Progress = no_progress
) -> Exported:
    """Writes NAME.oudep, a package that OpenUtau installs when it is dropped on its window: a zip file of the files of
    `export_onnx` and of oudep.yaml, which names it. The singers whose dsconfig.yaml has `vocoder: NAME` then use it.

    Raises as `export_onnx` does, and UserError if the name has other characters than OpenUtau allows.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise UserError(f"{name!r} is no name of a package", hint="letters, digits, points, hyphens and underscores")
    package = {
        "name": name,
        "id": re.sub(r"[^a-z0-9.]+", "-", name.lower()),  # Newer versions of OpenUtau look for these three.
        "version": "1.0",
        "description": f"NSF-HiFiGAN vocoder {name}",
    }
    with tempfile.TemporaryDirectory() as place, written_aside(folder) as aside:
        written = export_onnx(loaded, Path(place) / name, name, progress)
        with zipfile.ZipFile(aside / f"{name}.oudep", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("oudep.yaml", yaml.safe_dump(package, sort_keys=False))
            for file in written.files:
                archive.write(file, file.name)
    # The graph is loaded from where OpenUtau unpacks it.
    inside = [note for note in written.notes if place not in note]
    notes = [*inside, f"Drop {name}.oudep on OpenUtau's window; a singer uses it with `vocoder: {name}`"]
    figures = {**written.figures, "files": f"{name}.oudep, with {written.figures['files']} in it"}
    return replace(written, files=[folder / f"{name}.oudep"], figures=figures, notes=notes)


def probe_inputs(generator: Generator, frames: int) -> tuple[Tensor, Tensor]:
    """Draws a mel (M, F) like that of singing, and a pitch (F,) of the source, unvoiced in a third of the frames."""
    random = torch.Generator().manual_seed(frames)
    mel_MF = -5 + 2 * torch.randn(generator.architecture.mel.num_mels, frames, generator=random)
    ceiling_hz = generator.m_source.rate_hz / 2 if generator.architecture.mini_nsf else 2000.0
    f0_F = 60 * (ceiling_hz / 60) ** torch.rand(frames, generator=random)
    return mel_MF, f0_F * (torch.arange(frames) % 9 < 6)


@torch.no_grad()
def _difference(generator: Generator, other: Generator, frames: int) -> float:
    """Returns the largest difference of the waves of two generators with the same noise."""
    mel_MF, f0_F = probe_inputs(generator, frames)
    noise = draw_noise(generator.architecture, 1, frames, torch.Generator().manual_seed(frames))
    waves = [model(mel_MF[None], f0_F[None], noise) for model in (generator, other)]
    return float((waves[0] - waves[1]).abs().max())


def _config(loaded: LoadedVocoder) -> dict[str, Any]:
    """Returns the content of config.json: the arguments of the model and of its spectrogram."""
    architecture = loaded.generator.architecture
    model = {name: getattr(architecture, name) for name in (*SAME_OPTIONS, DILATIONS, "pc_aug")}
    pc_aug = model.pop("pc_aug")
    periods = {}
    if loaded.training is not None:
        periods["discriminator_periods"] = loaded.training.discriminators.discriminator_periods
    mel = {name: getattr(architecture.mel, name) for name in SPECTROGRAM}
    return {**model, **periods, "resblock": "1", **mel, "pc_aug": pc_aug}


def _vocoder_yaml(loaded: LoadedVocoder, name: str, file: str) -> dict[str, Any]:
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


class OnnxGenerator(nn.Module):
    """Wraps the generator with the inputs and the output of the graph; it draws its own noise."""

    def __init__(self, generator: Generator) -> None:
        super().__init__()
        self.generator = generator

    def forward(self, mel_BFM: Tensor, f0_BF: Tensor) -> Tensor:
        wave_B1T: Tensor = self.generator(mel_BFM.transpose(1, 2), f0_BF, self.noise(f0_BF))
        return wave_B1T.squeeze(1)

    def noise(self, f0_BF: Tensor) -> Noise:
        """Draws noise as `draw_noise` does, with sizes that depend on the input; unused parts stay empty."""
        architecture = self.generator.architecture
        phase_BH, source_BTH, features_BCF = f0_BF[:, :0], f0_BF[:, :0, None], f0_BF[:, None][:, :0]
        if not architecture.mini_nsf:
            phase_BH = F.pad(torch.rand(1, HARMONICS - 1), (1, 0))
            like_BFN = f0_BF[..., None].expand(-1, -1, architecture.mel.hop_size * HARMONICS)
            source_BTH = torch.randn_like(like_BFN).reshape(1, -1, HARMONICS)
        if architecture.noise_sigma:
            like_BCF = f0_BF[:, None].expand(-1, architecture.upsample_initial_channel, -1)
            features_BCF = torch.randn_like(like_BCF)
        return Noise(phase_BH, source_BTH, features_BCF)


def write_graph(generator: Generator, path: Path) -> None:
    """Writes the graph of a generator on the CPU, with weight norm already applied, for any number of frames.

    Raises UserError if onnx is not installed.
    """
    frames, bands = EXAMPLE_FRAMES, generator.architecture.mel.num_mels
    with cached_weights(generator):
        write_onnx(
            OnnxGenerator(generator),
            (torch.zeros(1, frames, bands), torch.full((1, frames), 440.0)),
            path,
            input_names=["mel", "f0"],
            output_names=["waveform"],
            dynamic_axes={"mel": {1: "n_frames"}, "f0": {1: "n_frames"}, "waveform": {1: "n_samples"}},
            opset_version=OPSET,
        )
    onnx = import_package("onnx")
    model = onnx.load(path)
    model.graph.output[0].type.tensor_type.shape.dim[0].dim_value = 1  # The exporter cannot derive it.
    onnx.save(model, path)


@torch.no_grad()
def largest_difference(
    generator: Generator,
    path: Path,
    inputs: Iterable[tuple[Tensor, Tensor]],
    step_done: Callable[[], None] = lambda: None,
) -> float:
    """Returns the largest difference between the waves of the graph in onnxruntime and of the generator, for mels (M,
    F) and pitches (F,).

    Raises UserError if onnx or onnxruntime is not installed, RuntimeError if the graph draws other noise than the
    generator needs or a wave has a wrong length.
    """
    session, drawn = _session_with_noise_outputs(path)
    worst = 0.0
    for mel_MF, f0_F in inputs:
        fed = {"mel": mel_MF.T[None].contiguous().numpy(), "f0": f0_F[None].numpy()}
        graph_BT, *numbers = map(torch.from_numpy, session.run(["waveform", *drawn], fed))
        wave_BT = generator(mel_MF[None], f0_F[None], _noise_of_graph(generator, numbers, len(f0_F)))[:, 0]
        worst = max(worst, wave_difference(path, graph_BT, wave_BT))
        step_done()
    return worst


def _noise_of_graph(generator: Generator, numbers: list[Tensor], frames: int) -> Noise:
    """Returns the noise that the graph has drawn, in the order of `OnnxGenerator.noise`."""
    architecture = generator.architecture
    expected = 2 * (not architecture.mini_nsf) + bool(architecture.noise_sigma)
    if len(numbers) != expected:
        raise RuntimeError(f"the graph draws {len(numbers)} times, expected {expected}")
    left = iter(numbers)
    phase_BH, source_BTH, features_BCF = torch.zeros(1, 0), torch.zeros(1, 0, 0), torch.zeros(1, 0, frames)
    if not architecture.mini_nsf:
        phase_BH, source_BTH = F.pad(next(left), (1, 0)), next(left).reshape(1, -1, HARMONICS)
    if architecture.noise_sigma:
        features_BCF = next(left)
    return Noise(phase_BH, source_BTH, features_BCF)


def _session_with_noise_outputs(path: Path) -> tuple[Any, list[str]]:
    """Loads the graph in onnxruntime with its noise as additional outputs; also returns their names."""
    onnx, model = import_package("onnx"), load_checked_onnx(path)
    drawn = [node.output[0] for node in model.graph.node if node.op_type.startswith("Random")]
    model.graph.output.extend(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in drawn)
    return run_onnx(model), drawn
