"""Exports a trained VAE as a diffusers folder with the scaling of its latents, and verifies the written files."""

import logging
from pathlib import Path

from gputrain.engine.data import Progress, no_progress
from gputrain.engine.mixture import GivenFolders, data_folders
from gputrain.errors import UserError
from gputrain.hw.plan import DeviceName
from gputrain.hw.runtime import runtime_on
from gputrain.kinds import Exported
from gputrain.vae.data import open_pictures
from gputrain.vae.diffusers_folder import CONFIG, WEIGHTS, export_and_verify
from gputrain.vae.evaluate import readable_crops, reconstruction_figures
from gputrain.vae.load import load_model

log = logging.getLogger(__name__)

MEASURED = 512  # Maximum number of pictures for the statistics of the latents: they give millions of values.


def export_vae(
    model: Path,
    output_dir: Path,
    *,
    data_path: Path | None = None,
    device: DeviceName = "auto",
    progress: Progress = no_progress,
) -> Exported:
    """Writes a folder of diffusers. The figures have the statistics of the latents.

    Scaling and shift come from the latents of the training pictures, at the size of training. Raises UserError if there
    is no such model, if its pictures are missing, or if the folder cannot be written.
    """
    runtime = runtime_on(device)
    loaded = load_model(model, runtime.device)
    if loaded.settings is None:
        raise UserError(f"{model}: already exported", hint="--model takes a run folder or a checkpoint")
    data = loaded.settings.data
    given: GivenFolders = data_path or data.data_path
    missing = [str(folder.path) for folder in data_folders(given) if not folder.path.is_dir()]
    if missing:
        raise UserError(
            f"{', '.join(missing)}: the run's pictures are missing",
            hint="name another folder of pictures: --data-path FOLDER",
        )
    opened = open_pictures(given, held_out_share=data.held_out_share)
    pictures = opened.of_epoch
    if len(opened.split.folders) > 1:  # Pictures of all folders, in proportion to their shares of an epoch.
        count = min(MEASURED, len(pictures))
        pictures = [pictures[number * len(pictures) // count] for number in range(count)]
    pictures = pictures[:MEASURED]
    crops, total = readable_crops(pictures, data.image_size, data.image_channels), len(pictures) + 1
    progress(0, total)
    measured = reconstruction_figures(loaded.model, crops, runtime.device, progress=lambda done: progress(done, total))
    factors = {name: measured.scalars[name] for name in ("scaling_factor", "shift_factor")}
    difference = export_and_verify(loaded.model, output_dir, sample_size=data.image_size, **factors)
    progress(total, total)  # The last one is the comparison with the written files.
    figures: dict[str, object] = {
        **factors,
        "measured on": f"{measured.pictures} pictures of {data.image_size} pixels",
        "weights": f"after {loaded.step} steps; read back, they are the same",
        "largest difference of a reconstruction": difference,
    }
    files = [output_dir / CONFIG, output_dir / WEIGHTS]
    return Exported(files, figures, [f'Load it: diffusers.AutoencoderKL.from_pretrained("{output_dir}")'])
