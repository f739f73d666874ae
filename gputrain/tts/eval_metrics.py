"""Evaluation metrics: held-out clips, synthesised from their texts, compared with the recordings.

Shapes: S symbols, T frames, L samples, P steps of a path.
"""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from gputrain.audio.config import Mel
from gputrain.audio.io import Samples, from_int16
from gputrain.audio.metrics import ClipMetrics, PitchMatch, log_mel_of, mel_cepstral_distortion
from gputrain.engine.data import Sample
from gputrain.engine.dataset_report import Progress, silent
from gputrain.tts import measures
from gputrain.tts.data import Buckets, ClipBatch
from gputrain.tts.measures import AlignmentHealth, Edits, SpeechMatch
from gputrain.tts.model import Voice
from gputrain.tts.reading import EncodedClips, SynthesisedSpeech, Text, at_rest, encode_recordings, seed_of, synthesise
from gputrain.tts.store import SpeechClip, SpeechStore, frame_count
from gputrain.tts.text.frontend import PAD_ID

LONGEST = 2  # maximum duration of synthesised speech relative to its recording
PADDING = 0.1  # maximum share of padding in an evaluation batch
PITCH_HZ = 60.0, 600.0  # range of speech
WITHIN_95 = 1.96  # standard errors

Recogniser: TypeAlias = Callable[[Samples], str]  # Transcribes samples at the voice's rate to normalised text.


@dataclass(frozen=True)
class Evaluation(ClipMetrics):
    """Results of `evaluate_clips`, which docs/voice.md lists. Metrics without a value are absent.

    - `mcd_db`: mean over clips; its 95 % interval is +- `mcd_db_margin`, for other clips of the same speech.
    - `mcd_sl_db`: MCD-DTW-SL (Chen et al. 2022, "V2C: Visual Voice Cloning", arXiv:2111.12890).
    - `f0_rmse_cents`, `vuv_f1`: agreement of pitches along the warping path, over the frames of all clips.
    - `cer`, `wer`: character and word error rates of a recogniser; `recorded_cer`, `recorded_wer`: those of the
      recordings, a lower bound that a voice cannot be expected to reach.
    - `rtf`: computing time per second of audio, from symbols to samples; the median over clips. The first clip, which
      warms up, is excluded unless it is the only one.
    - `mel_distance`, `kl`, `duration` (nats per frame and symbol) and the alignment: of recordings encoded as in
      training.
    - `score` is -mcd_sl_db, the only metric of the whole path from text to sound with its timing; durations dominate it
      early in training, and sound quality later.
    """


@dataclass
class _Tally:
    """Accumulated metrics of the clips so far."""

    mcd_db: list[float] = field(default_factory=list)
    mismatch: list[float] = field(default_factory=list)
    rtf: list[float] = field(default_factory=list)
    made_samples: int = 0
    real_samples: int = 0
    pitch: PitchMatch = field(default_factory=PitchMatch)
    edits: dict[str, Edits] = field(default_factory=dict)
    frames: int = 0
    symbols: int = 0
    divergence: float = 0.0
    duration_loss: float = 0.0
    mel_distance: float = 0.0
    gain: float = 0.0
    health: AlignmentHealth = field(default_factory=AlignmentHealth)

    def add_read(self, found: EncodedClips, batch: ClipBatch) -> None:
        self.frames += int(batch.frames_B.sum())
        self.symbols += int(batch.symbols_B.sum())
        self.divergence += float(found.divergence_B.sum())
        self.duration_loss += float(found.duration_loss_B.sum())
        self.mel_distance += float(found.mel_distance_B.sum())
        durations, scores = found.durations_BS.cpu().numpy(), found.scores_BTS.float().cpu().numpy()
        sizes = zip(batch.symbols_B.tolist(), batch.frames_B.tolist(), strict=True)
        for item, (symbols, frames) in enumerate(sizes):
            durations_S = durations[item, :symbols]
            self.health += measures.alignment_health(durations_S, batch.ids_BS[item, :symbols].numpy() == PAD_ID)
            self.gain += measures.alignment_gain(scores[item, :frames, :symbols], durations_S)

    def add_spoken(self, made_L: Samples, real_L: Samples, mel: Mel, quick: bool) -> None:
        match = _compared(made_L, real_L, mel, quick)
        self.mcd_db.append(match.mcd_db)
        self.mismatch.append(max(match.duration_ratio, 1 / match.duration_ratio))
        self.pitch += match.pitch
        self.made_samples += len(made_L)
        self.real_samples += len(real_L)

    def add_recognised(self, prefix: str, written: str, recognised: str) -> None:
        for name, edits in (("cer", measures.character_edits), ("wer", measures.word_edits)):
            known = self.edits.get(prefix + name, Edits())
            self.edits[prefix + name] = known + edits(written, recognised)

    def scalars(self) -> dict[str, float]:
        clips = len(self.mcd_db)
        mcd_sl_db = statistics.fmean(math.prod(pair) for pair in zip(self.mcd_db, self.mismatch, strict=True))
        found: dict[str, float | None] = {
            "score": -mcd_sl_db,
            "mcd_db": statistics.fmean(self.mcd_db),
            "mcd_db_margin": WITHIN_95 * statistics.stdev(self.mcd_db) / math.sqrt(clips) if clips > 1 else None,
            "mcd_sl_db": mcd_sl_db,
            "duration_ratio": self.made_samples / self.real_samples,
            "length_mismatch": statistics.fmean(self.mismatch),
            "f0_rmse_cents": self.pitch.rmse_cents,
            "vuv_f1": self.pitch.voicing_f1,
            "mel_distance": self.mel_distance / self.frames,
            "kl": self.divergence / self.frames,
            "duration": self.duration_loss / self.symbols,
            **self.health.scalars(),
            "alignment_gain": self.gain / clips,
            **{name: edits.rate for name, edits in self.edits.items()},
            "rtf": statistics.median(self.rtf[1:] or self.rtf) if self.rtf else None,
        }
        return {name: value for name, value in found.items() if value is not None}


def _compared(made_L: Samples, real_L: Samples, mel: Mel, quick: bool) -> SpeechMatch:
    if not quick:
        return measures.compare(made_L, real_L, mel, floor_hz=PITCH_HZ[0], ceiling_hz=PITCH_HZ[1])
    made_MF, real_MF = (log_mel_of(wave_L, mel) for wave_L in (made_L, real_L))
    made_P, real_P = measures.warping_path(made_MF, real_MF)
    mcd_db = mel_cepstral_distortion(made_MF[:, made_P], real_MF[:, real_P])
    return SpeechMatch(mcd_db, PitchMatch(), len(made_L) / len(real_L))


def clip_seed(clip: SpeechClip) -> int:
    """Returns the seed of a clip's noise, which does not depend on its batch."""
    return seed_of(f"{clip.fingerprint} {clip.first_sample}")


def batch_clips(store: SpeechStore, clips: list[SpeechClip], hop_size: int, batch_size: int) -> Buckets:
    """Batches clips of similar length: at most `batch_size` clips, and at most 1.5 times the frames of `batch_size`
    average clips."""
    frames = sum(frame_count(clip.samples, hop_size) for clip in clips)
    return Buckets(store, clips, hop_size, batch_size, 0, math.ceil(1.5 * batch_size * frames / len(clips)), PADDING)


def evaluate_clips(
    voice: Voice,
    clips: Buckets,
    device: torch.device,
    *,
    recogniser: Recogniser | None = None,
    quick: bool = False,
    progress: Progress = silent,
) -> Evaluation:
    """Synthesises every clip's text and encodes its recording. Texts of a bucket are batched.

    Each clip has its own fixed noise, and the global random state is unchanged. Only the voice computes on `device`,
    within the caller's autocast. `quick` leaves out speed and pitch, whose trackers take as long as everything else.
    Waves are quantised to 16 bits, as in a file, before they are compared.
    """
    tally, mel, done = _Tally(), voice.architecture.mel, 0
    with at_rest(voice):
        for number in range(len(clips)):
            batch = clips[Sample(0, number)]
            these = [clips.clips[place] for place in batch.clips_B.tolist()]
            seeds = [clip_seed(clip) for clip in these]
            tally.add_read(encode_recordings(voice, batch, seeds, device), batch)
            texts = [
                Text(ids_S[:symbols].tolist(), speaker, seed, LONGEST * frames)
                for ids_S, symbols, frames, speaker, seed in zip(
                    batch.ids_BS, batch.symbols_B.tolist(), batch.frames_B.tolist(), batch.speakers_B.tolist(), seeds,
                    strict=True,
                )
            ]  # fmt: skip
            spoken, seconds = _timed(voice, texts, device)
            if not quick:
                tally.rtf.append(seconds * mel.sampling_rate / sum(len(one.wave_L) for one in spoken))
            for one, clip, wave_L, frames in zip(spoken, these, batch.wave_BT, batch.frames_B.tolist(), strict=True):
                real_L = from_int16(wave_L[: frames * mel.hop_size].numpy())
                tally.add_spoken(one.wave_L, real_L, mel, quick)
                if recogniser:
                    written = measures.plain(clip.normalized)
                    tally.add_recognised("", written, recogniser(one.wave_L))
                    tally.add_recognised("recorded_", written, recogniser(real_L))
                done += 1
                progress(done, len(clips.clips))
    return Evaluation(tally.scalars(), done)


def _timed(voice: Voice, texts: list[Text], device: torch.device) -> tuple[list[SynthesisedSpeech], float]:
    """Returns the speech and the seconds it took. The results are on the host, so no synchronisation is needed."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    spoken = synthesise(voice, texts, device)
    return spoken, time.perf_counter() - began
