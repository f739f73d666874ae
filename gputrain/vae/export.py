"""Exports a trained VAE as a diffusers folder with the scaling of its latents, and verifies the written files."""

import logging
from dataclasses import replace
from pathlib import Path

import torch

from gputrain.data_in.sources import is_there
from gputrain.data_in.split import GivenFolders, data_folders, format_folders
from gputrain.engine.checkpoint import load_weights, refuse_nonfinite
from gputrain.errors import UserError
from gputrain.files import Progress, no_progress
from gputrain.hw.plan import DeviceName
from gputrain.hw.runtime import runtime_on
from gputrain.kinds import Exported
from gputrain.vae.architecture import PRESETS, VaeArchitecture
from gputrain.vae.dataset import open_pictures
from gputrain.vae.diffusers_folder import (
    CONFIG,
    WEIGHTS,
    export_and_verify,
    stock_weights,
    tile_size,
    verify,
    write_folder,
)
from gputrain.vae.evaluate import readable_crops, reconstruction_figures
from gputrain.vae.latents import LatentScaling, LatentSource, nearest_family
from gputrain.vae.model import AutoencoderKL
from gputrain.vae.pretrained import LoadedVae, load_model, read_pretrained, renamed

log = logging.getLogger(__name__)

MEASURED = 512  # Maximum number of pictures for the statistics of the latents: they give millions of values.


def export_vae(
    model: Path,
    output_dir: Path,
    *,
    data_path: Path | None = None,
    device: DeviceName = "auto",
    single_file: bool = False,
    progress: Progress = no_progress,
) -> Exported:
    """Writes a folder of diffusers, or a `single_file` of the original layout. The figures have the factors of the
    latents.

    If the encoder is that of a pretrained model, the factors stay those of that model; otherwise they are measured on
    the training pictures, at the size of training, or on those of `data_path`. Raises UserError if there is no such
    model, if the original layout has none of its layers, if pictures are needed and missing, or if the folder cannot be
    written.
    """
    runtime = runtime_on(device)
    loaded = load_model(model, runtime.device)
    if loaded.settings is None:
        raise UserError(f"{model}: already exported", hint="--model takes a run folder or a checkpoint")
    source, architecture = loaded.latents, loaded.model.architecture
    if single_file:
        refuse_other_layers(architecture)
    kept = source.scaling if source and not source.encoder_trained else None
    figures: dict[str, object] = {}
    if kept and source:
        scaling, total = kept, 1
        written = f"those of {source.source} ({source.told_by}), whose encoder was not trained"
        progress(0, total)
    if kept is None or data_path is not None:
        measured, figures["measured on"], count = measure_scaling(loaded, source, data_path, runtime.device, progress)
        total = count + 1
        if kept:
            figures["measured there, not written"] = str(measured)
        else:
            scaling, written = choose_scaling(measured, source, architecture.latent_channels)
    if single_file:
        files, notes, difference = write_single_file(loaded.model, output_dir)
    else:
        files = [output_dir / CONFIG, output_dir / WEIGHTS]
        notes = [f'Load it: diffusers.{architecture.class_name}.from_pretrained("{output_dir}")']
        size = tile_size(loaded.settings.data.image_size, architecture)
        config = source.config if source else {}
        difference = export_and_verify(loaded.model, output_dir, scaling, sample_size=size, kept=config)
        if source and config:
            figures[f"kept of {source.source}"] = ", ".join(f"{name} {value}" for name, value in config.items())
    progress(total, total)  # The last one is the comparison with the written files.
    shown = {**_shown_factors(scaling), "these factors are": written, **figures}
    if source and source.encoder_trained and source.scaling:
        shown["before training"] = f"{source.scaling} ({source.source}); the encoder was trained, so they changed"
    shown |= {
        "weights": f"after {loaded.step} steps; read back, they are the same",
        "largest difference of a reconstruction": difference,
    }
    return Exported(files, shown, notes)


def _shown_factors(scaling: LatentScaling) -> dict[str, object]:
    shown: dict[str, object] = {}
    if scaling.scaling_factor is not None:
        factors = {"scaling_factor": scaling.scaling_factor, "shift_factor": scaling.shift_factor}
        shown = {name: "none" if value is None else f"{value:.6g}" for name, value in factors.items()}
    if scaling.patches:
        shown["statistics of patches (bn)"] = str(LatentScaling(patches=scaling.patches))
    return shown


def refuse_other_layers(architecture: VaeArchitecture) -> None:
    """Raises UserError for an architecture that the original layout, which has no configuration, cannot tell."""
    faults = {
        "statistics of patches, as FLUX.2": architecture.patch_statistics,
        "no attention": not architecture.mid_block_add_attention,
        f"norms of {architecture.norm_num_groups} groups instead of 32": architecture.norm_num_groups != 32,
    }
    if odd := [fault for fault, is_there in faults.items() if is_there]:
        raise UserError(
            f"the original layout of Stable Diffusion and FLUX.1 cannot hold this model: it has {odd[0]}",
            hint="--format diffusers writes it",
        )


def write_single_file(model: AutoencoderKL, output_dir: Path) -> tuple[list[Path], list[str], float]:
    """Writes the file that A1111, Forge and ComfyUI load, with the names of the first latent diffusion models.

    Returns it, notes on its use, and the largest difference of a reconstruction with the file as it is read again.
    """
    file = output_dir / f"{output_dir.resolve().name}.safetensors"
    weights = stock_weights(model, LatentScaling())
    refuse_nonfinite(weights, str(file))
    write_folder(output_dir, None, {file.name: renamed(weights, to_original=True)})
    found = read_pretrained(file)
    read = AutoencoderKL(found.architecture)
    load_weights(read, found.weights, str(file))
    notes = [f'Load it: diffusers.AutoencoderKL.from_single_file("{file}", config=FOLDER_OF_A_CONFIG)']
    if model.architecture.block_out_channels == PRESETS["sd"].block_out_channels:
        notes = ["Copy it into models/VAE of A1111 or Forge, or models/vae of ComfyUI"]
    notes.append("The file holds no factors of the latents: programs take those of the denoiser")
    return [file], notes, verify(model, read, file)


def choose_scaling(measured: LatentScaling, source: LatentSource | None, channels: int) -> tuple[LatentScaling, str]:
    """Returns the factors to write where no pretrained model says them, and as text where they are from. Of an
    AutoencoderKLFlux2 that are only the statistics of patches: what reads both would scale its latents twice."""
    family = None
    if source and source.published and not source.encoder_trained:
        family = nearest_family(measured, channels)
    if family is None and measured.patches:
        measured = LatentScaling(patches=measured.patches)
    if source is None or source.encoder_trained or not source.published:
        return measured, "measured"
    if family is None:
        return measured, f"measured, as {source.source} does not say its own"
    return family.scaling, (
        f"those of {family.name}: {source.source} does not say its own, its encoder was not trained, and they are "
        f"nearest to the measured {measured}; write others into {CONFIG} if it is another model"
    )


def measure_scaling(
    loaded: LoadedVae, source: LatentSource | None, data_path: Path | None, device: torch.device, progress: Progress
) -> tuple[LatentScaling, str, int]:
    """Measures the factors of the latents of training pictures: of `data_path`, of the run whose encoder it is, or of
    this run. Returns them, as text on which pictures, and the number of these. Raises UserError if they are missing."""
    assert loaded.settings is not None
    data = loaded.settings.data
    given: GivenFolders = data_path or data.data_path
    image_size, share = data.image_size, data.held_out_share
    own = source.pictures if source and not source.encoder_trained and data_path is None else None
    if source and own:
        folders = tuple(map(Path, own.data_path))
        if all(is_there(folder.path) for folder in data_folders(folders)):
            given, image_size, share = folders, own.image_size, own.held_out_share
        else:
            log.warning(
                "the encoder is that of %s, whose pictures are missing (%s): the factors are measured on those of this "
                "run, and differ from those of its export", source.source, ", ".join(own.data_path),
            )  # fmt: skip
    missing = [str(folder.path) for folder in data_folders(given) if not is_there(folder.path)]
    if missing:
        raise UserError(
            f"{', '.join(missing)}: the run's pictures are missing",
            hint="name another folder of pictures: --data-path FOLDER",
        )
    opened = open_pictures(given, held_out_share=share, exclude=data.exclude if given is data.data_path else ())
    pictures = opened.of_epoch
    if len(opened.split.folders) > 1:  # Pictures of all folders, in proportion to their shares of an epoch.
        count = min(MEASURED, len(pictures))
        pictures = [pictures[number * len(pictures) // count] for number in range(count)]
    pictures = pictures[:MEASURED]
    crops, total = readable_crops(pictures, image_size, data.image_channels), len(pictures) + 1
    progress(0, total)
    made = reconstruction_figures(loaded.model, crops, device, progress=lambda done: progress(done, total))
    where = f"{made.pictures} training pictures in {format_folders(given)}, crops of {image_size} pixels"
    scaling = replace(made.latents.scaling, patches=made.patches.statistics if made.patches else None)
    return scaling, where, len(pictures)
