"""Prepares recordings for training a vocoder: resampled, mixed to one channel, and stored with their pitch.

Files of any sampling rate, number of channels and bit depth are accepted. Sources are only read.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gputrain.audio import prepare as audio_prepare
from gputrain.audio.config import Sound as Wishes
from gputrain.audio.f0 import compile_tracker, default_method, f0, require_tracker
from gputrain.audio.prepare import SoundPrepareReport
from gputrain.audio.store import Pitch, Wave, check_format
from gputrain.engine.data import MANIFEST, Progress, no_progress, to_int16
from gputrain.engine.preparation import (
    RefusedItem,
    check_folders,
    faults_of,
    nothing_usable,
    run_jobs,
    sorted_refusals,
    write_quarantine,
)
from gputrain.errors import UserError
from gputrain.vocoder.config import SAMPLING_RATE
from gputrain.vocoder.store import JOURNAL, VocoderFormat, VocoderStoreWriter

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class VocoderPrepareConfig(VocoderFormat):
    """Settings of a preparation: the format of the store, and how recordings are changed."""

    trim_db: float = 0.0  # Level below the loudest part at which both ends are trimmed, in dB; 0 is off.
    loudness_db: float = 0.0  # Root mean square of each file, in dB relative to full scale (negative); 0 keeps it.

    @property
    def format(self) -> VocoderFormat:
        return VocoderFormat(self.sampling_rate, self.hop_size, self.f0_method, self.f0_min, self.f0_max)


def vocoder_prepare_config(wishes: Wishes) -> VocoderPrepareConfig:
    """Returns the settings given by the options. Without parselmouth, it chooses pyin and logs a warning.

    Raises UserError if the chosen pitch tracker is not installed.
    """
    method = default_method() if wishes.f0_method == "auto" else wishes.f0_method
    require_tracker(method)
    if wishes.f0_method == "auto" and method == "pyin":
        log.warning('the pitch is tracked by pyin, a hundred times slower than parselmouth: pip install "gputrain[f0]"')
    return VocoderPrepareConfig(
        wishes.audio_sample_rate or SAMPLING_RATE, wishes.hop_size, method, wishes.f0_min, wishes.f0_max,
        wishes.trim_db or 0.0, wishes.loudness_db,
    )  # fmt: skip


def check_output(output_dir: Path, recipe: VocoderPrepareConfig) -> None:
    """Raises UserError if the folder holds recordings that were prepared with other settings."""
    for journal in (JOURNAL, MANIFEST):  # Of an unfinished preparation, and of a finished one.
        check_format(output_dir, journal, recipe.format)


def prepare_sound(
    input_dir: Path,
    output_dir: Path,
    recipe: VocoderPrepareConfig,
    *,
    num_workers: int = 0,
    progress: Progress = no_progress,
) -> SoundPrepareReport:
    """Puts every usable recording of a folder tree into the store `output_dir`. Run again, it prepares what is missing.

    Raises UserError if a folder is unusable, no recording is usable, or a source of the store has changed.
    """
    check_folders(input_dir, output_dir, "vocoder")
    tree = audio_prepare.scan_recordings(input_dir)
    refused = list(tree.refused)
    prints = audio_prepare.fingerprints(input_dir, tree.paths, refused)
    writer = VocoderStoreWriter(output_dir, recipe.format)
    kept = {clip.path: clip.fingerprint for clip in writer.sounds}
    for path, known in kept.items():
        if prints.get(path) != known:
            raise UserError(
                f"{output_dir} holds another version of {path} than {input_dir}", hint="prepare into another folder"
            )
    missing = [path for path in prints if path not in kept]
    if missing:
        compile_tracker(recipe.f0_method)

    remarks: list[tuple[str, str]] = []

    def store(made: PreparedRecording | RefusedItem) -> None:
        if isinstance(made, RefusedItem):
            refused.append(made)
        else:
            writer.add(made.path, prints[made.path], made.wave_T, made.f0_F)
            remarks.append((made.path, made.remark))

    run_jobs(
        prepare_recording, [(input_dir, path, recipe) for path in missing], num_workers, store, progress, len(kept)
    )
    for note in audio_prepare.remarks_on(remarks):
        log.warning("%s", note)
    refused = sorted_refusals(refused)
    write_quarantine(output_dir, refused)
    if not writer.sounds:
        raise nothing_usable(
            f"{input_dir}: none of {len(tree.paths)} files holds usable sound: {faults_of(refused)}", output_dir
        )
    writer.finish()
    hours = sum(clip.samples for clip in writer.sounds) / recipe.sampling_rate / 3600
    return SoundPrepareReport(
        input_dir=str(input_dir), output_dir=str(output_dir), made=len(writer.sounds) - len(kept), kept=len(kept),
        hours=hours, ignored=tree.ignored, refused=refused,
    )  # fmt: skip


class PreparedRecording(NamedTuple):
    path: str
    wave_T: Wave
    f0_F: Pitch  # The pitch of each frame.
    remark: str  # What was unusual about its scale or channels, if anything.


def prepare_recording(job: tuple[Path, str, VocoderPrepareConfig]) -> PreparedRecording | RefusedItem:
    """Decodes a recording and tracks its pitch in a worker. Returns the reason for leaving it out if it can't."""
    folder, path, recipe = job
    rate_hz, hop_size = recipe.sampling_rate, recipe.hop_size
    decoded = audio_prepare.decode_recording(
        folder, path, rate_hz, trim_db=recipe.trim_db, loudness_db=recipe.loudness_db
    )
    if isinstance(decoded, RefusedItem):
        return decoded
    wave_T, remark = decoded.wave_T, decoded.remark
    del decoded
    samples = len(wave_T)
    wave_T = np.pad(wave_T, (0, -samples % hop_size))
    pitch_F = f0(wave_T, rate_hz, hop_size, recipe.f0_method, floor_hz=recipe.f0_min, ceiling_hz=recipe.f0_max)
    stored_T = np.concatenate([to_int16(block_T) for block_T in audio_prepare.blocks(wave_T[:samples])])
    return PreparedRecording(path, stored_T, pitch_F, remark)
