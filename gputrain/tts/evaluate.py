"""Evaluates voices on held-out clips, synthesised from their texts and compared with the recordings: a trained voice on
prepared speech, or one in training; and the samples of a training.

Shapes: S symbols, T and F frames, L samples, M mel bands, H x W pixels, 3 colours.
"""

import logging
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from gputrain.audio.config import Mel
from gputrain.audio.io import Samples, from_int16
from gputrain.audio.mel import frequency_ticks, log_mel
from gputrain.audio.metrics import ClipMetrics, PitchMatch
from gputrain.data_in.split import GivenFolders
from gputrain.drawing import (
    BAND_PIXELS,
    colour_map,
    spectrogram_picture,
    with_axes,
)
from gputrain.engine.checkpoint import load_weights
from gputrain.engine.data import Sample
from gputrain.errors import UserError, first_line, require
from gputrain.files import FULL_SCALE, Progress, no_progress
from gputrain.hw.plan import DeviceName
from gputrain.hw.runtime import runtime_on, synchronize
from gputrain.kinds import speech_checker
from gputrain.samples import Report, Sheet, SheetCell, SoundSample
from gputrain.speech.buckets import Buckets, ClipBatch, Speech, open_speech
from gputrain.speech.error_rates import Edits, character_edits, word_edits
from gputrain.speech.store import SpeechClip, SpeechStore, format_store_folders, frame_count
from gputrain.speech.text.frontend import Frontend
from gputrain.tts import measures
from gputrain.tts.config import TrainTts
from gputrain.tts.load import TrainedVoice, read_trained
from gputrain.tts.model import Voice
from gputrain.tts.reading import (
    EncodedClips,
    SynthesisedSpeech,
    Text,
    clip_seed,
    encode_recordings,
    eval_mode,
    seed_of,
    synthesise,
)

log = logging.getLogger(__name__)

LONGEST = 2  # maximum duration of synthesised speech relative to its recording
PADDING = 0.1  # maximum share of padding in an evaluation batch
PITCH_HZ = 60.0, 600.0  # range of speech
WITHIN_95 = 1.96  # standard errors

Recogniser: TypeAlias = Callable[[Samples], str]  # Transcribes samples at the voice's rate to normalised text.


def open_recogniser(model: str | Path | None, frontend: Frontend, rate_hz: int, device: str) -> Recogniser | None:
    """Loads the recogniser that reads what a voice speaks, if one is named. What it reads gets the voice's text rules.

    It raises UserError where the model fails on a sound. Raises UserError if there is no such model.
    """
    if model is None:
        return None
    require("rapidfuzz", needed_by="error rates")
    checker = speech_checker(model, device)

    def transcribe(wave_L: Samples) -> str:
        try:
            with torch.autocast("cpu", enabled=False):  # That of the voice is not the recogniser's.
                return measures.plain(frontend.normalize(checker.read(wave_L, rate_hz)))
        except Exception as error:  # Whatever a user's model raises.
            raise UserError(
                f"the recogniser failed on a sound: {first_line(error)}", hint="name another recogniser"
            ) from error

    return transcribe


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
    mcd_db: list[float] = field(default_factory=list)
    mismatch: list[float] = field(default_factory=list)
    rtf: list[float] = field(default_factory=list)
    pitch: PitchMatch = field(default_factory=PitchMatch)
    edits: dict[str, Edits] = field(default_factory=lambda: defaultdict(Edits))
    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add_encoded(self, found: EncodedClips, batch: ClipBatch) -> None:
        for name, value_B in (
            ("frames", batch.frames_B),
            ("symbols", batch.symbols_B),
            ("kl", found.divergence_B),
            ("duration", found.duration_loss_B),
            ("mel_distance", found.mel_distance_B),
        ):
            self.sums[name] += float(value_B.sum())
        durations, scores = found.durations_BS.cpu().numpy(), found.scores_BTS.float().cpu().numpy()
        sizes = zip(batch.symbols_B.tolist(), batch.frames_B.tolist(), strict=True)
        for item, (symbols, frames) in enumerate(sizes):
            self.sums["gain"] += measures.alignment_gain(scores[item, :frames, :symbols], durations[item, :symbols])

    def add_spoken(self, made_L: Samples, real_L: Samples, mel: Mel, quick: bool) -> None:
        floor_hz, ceiling_hz = PITCH_HZ
        match = measures.compare(made_L, real_L, mel, floor_hz=floor_hz, ceiling_hz=ceiling_hz, with_pitch=not quick)
        self.mcd_db.append(match.mcd_db)
        self.mismatch.append(max(match.duration_ratio, 1 / match.duration_ratio))
        self.pitch += match.pitch
        self.sums["made_samples"] += len(made_L)
        self.sums["real_samples"] += len(real_L)

    def add_read(self, prefix: str, written: str, read: str) -> None:
        self.sums[f"{prefix}unread"] += not read
        for name, edits in (("cer", character_edits), ("wer", word_edits)):
            self.edits[prefix + name] += edits(written, read)

    def scalars(self) -> dict[str, float]:
        clips, sums = len(self.mcd_db), self.sums
        mcd_sl_db = statistics.fmean(math.prod(pair) for pair in zip(self.mcd_db, self.mismatch, strict=True))
        found: dict[str, float | None] = {
            "score": -mcd_sl_db,
            "mcd_db": statistics.fmean(self.mcd_db),
            "mcd_db_margin": WITHIN_95 * statistics.stdev(self.mcd_db) / math.sqrt(clips) if clips > 1 else None,
            "mcd_sl_db": mcd_sl_db,
            "duration_ratio": sums["made_samples"] / sums["real_samples"],
            "length_mismatch": statistics.fmean(self.mismatch),
            "f0_rmse_cents": self.pitch.rmse_cents,
            "vuv_f1": self.pitch.voicing_f1,
            "mel_distance": sums["mel_distance"] / sums["frames"],
            "kl": sums["kl"] / sums["frames"],
            "duration": sums["duration"] / sums["symbols"],
            "alignment_gain": sums["gain"] / clips,
            **{name: edits.rate for name, edits in self.edits.items()},
            "rtf": statistics.median(self.rtf[1:] or self.rtf) if self.rtf else None,
        }
        return {name: value for name, value in found.items() if value is not None}


def batch_clips(store: SpeechStore, clips: list[SpeechClip], hop_size: int, batch_size: int) -> Buckets:
    """Batches clips of similar length, at most `batch_size` or 1.5 times the frames of so many average clips."""
    frames = sum(frame_count(clip.samples, hop_size) for clip in clips)
    return Buckets(store, clips, hop_size, batch_size, 0, math.ceil(1.5 * batch_size * frames / len(clips)), PADDING)


def evaluate_clips(
    voice: Voice,
    clips: Buckets,
    device: torch.device,
    *,
    recogniser: Recogniser | None = None,
    quick: bool = False,
    progress: Progress = no_progress,
) -> Evaluation:
    """Synthesises every clip's text and encodes its recording. Texts of a bucket are batched.

    Each clip has its own fixed noise, and the global random state is unchanged. Only the voice computes on `device`,
    within the caller's autocast. `quick` leaves out speed and pitch, whose trackers take as long as everything else.
    Waves are quantised to 16 bits, as in a file, before they are compared.
    """
    tally, mel, done = _Tally(), voice.architecture.mel, 0
    progress(0, len(clips.clips))
    with eval_mode(voice):
        for number in range(len(clips)):
            batch = clips[Sample(0, number)]
            these = [clips.clips[place] for place in batch.clips_B.tolist()]
            seeds = [clip_seed(clip) for clip in these]
            tally.add_encoded(encode_recordings(voice, batch, seeds, device), batch)
            texts = [
                Text(ids_S[:symbols].tolist(), speaker, seed, LONGEST * frames)
                for ids_S, symbols, frames, speaker, seed in zip(
                    batch.ids_BS,
                    batch.symbols_B.tolist(),
                    batch.frames_B.tolist(),
                    batch.speakers_B.tolist(),
                    seeds,
                    strict=True,
                )
            ]
            spoken, seconds = _timed(voice, texts, device)
            if not quick:
                tally.rtf.append(seconds * mel.sampling_rate / sum(len(speech.wave_L) for speech in spoken))
            for speech, clip, wave_L, frames in zip(spoken, these, batch.wave_BT, batch.frames_B.tolist(), strict=True):
                real_L = from_int16(wave_L[: frames * mel.hop_size].numpy())
                tally.add_spoken(speech.wave_L, real_L, mel, quick)
                if recogniser is not None:
                    written = measures.plain(clip.normalized)
                    tally.add_read("", written, recogniser(speech.wave_L))
                    tally.add_read("recorded_", written, recogniser(real_L))
                done += 1
                progress(done, len(clips.clips))
    if (unread := round(tally.sums["recorded_unread"])) > done / 2:
        log.warning(
            "the recogniser wrote nothing for %d of %d recordings, so that cer and wer tell about it and not about the "
            "voice: name another one with --recogniser",
            unread,
            done,
        )
    return Evaluation(tally.scalars(), done)


def _timed(voice: Voice, texts: list[Text], device: torch.device) -> tuple[list[SynthesisedSpeech], float]:
    """Returns the speech and the seconds it took. The results are on the host, so no synchronisation is needed."""
    synchronize(device)
    began = time.perf_counter()
    spoken = synthesise(voice, texts, device)
    return spoken, time.perf_counter() - began


class HeldOutClips:
    """Held-out clips of a training, sorted by fingerprint so that they come from many recordings."""

    def __init__(self, speech: Speech, settings: TrainTts) -> None:
        """Raises UserError where a test sentence has no symbol of the voice."""
        data, format = settings.data, speech.store.format
        self.store, self.batch_size = speech.store, data.eval_batch_size
        held_out = sorted(speech.parts.held_out, key=lambda clip: clip.fingerprint)
        reader, speakers, most = format.front_end, len(format.speakers), data.num_audio_samples
        self.clips = held_out[: data.eval_clips]
        sentences = [
            text_of_sentence(sentence, reader, number % speakers) for number, sentence in enumerate(data.test_sentences)
        ]
        self.texts = sentences[:most] or [
            Text(reader.ids(clip.normalized), clip.speaker, clip_seed(clip), LONGEST_TEXT, clip.text, clip)
            for clip in held_out[:most]
        ]

    def sample(self, voice: Voice, device: torch.device) -> Report:
        return synthesise_samples(voice, self.texts, self.store, self.clips[0], device)

    def evaluate(self, voice: Voice, device: torch.device) -> Report:
        """Runs `evaluate_clips` without pitch and speed."""
        clips = batch_clips(self.store, self.clips, voice.architecture.mel.hop_size, self.batch_size)
        return Report(scalars=evaluate_clips(voice, clips, device, quick=True).scalars)


def evaluate_voice(
    model: Path,
    data_dir: GivenFolders,
    *,
    device: DeviceName = "auto",
    held_out_share: float | None = None,
    max_clips: int = 1000,
    recogniser: str | Path | None = None,
    progress: Progress = no_progress,
) -> Evaluation:
    """Evaluates a trained voice on the held-out clips of prepared speech, the first `max_clips` of them, one by one.

    Without `held_out_share`, they are those that the training held out; 1 takes all clips. `recogniser` names
    the model that counts recognition errors. Raises UserError if there is no such model or speech, or the speech is not
    for this voice.
    """
    runtime = runtime_on(device)
    trained = read_trained(model)
    mel = trained.architecture.mel
    reader = open_recogniser(recogniser, trained.frontend, mel.sampling_rate, device)
    share = trained.settings.data.held_out_share if held_out_share is None else held_out_share
    speech = open_speech(data_dir, share)
    check_store_fits(speech.store, trained)
    chosen = speech.store.clips if share == 1 else speech.parts.held_out
    clips = with_speakers_of(trained, speech.store, chosen[:max_clips])
    # The full model is needed: a speaking copy lacks the posterior encoder.
    voice = Voice(trained.architecture)
    load_weights(voice, trained.voice, f"{trained.source}: the checkpoint's voice")
    with runtime.autocast():
        return evaluate_clips(
            voice.to(runtime.device),
            batch_clips(speech.store, clips, mel.hop_size, batch_size=1),
            runtime.device,
            recogniser=reader,
            progress=progress,
        )


def check_store_fits(store: SpeechStore, trained: TrainedVoice) -> None:
    """Raises UserError if the sampling rate or the symbols of a store differ from those of the voice."""
    ours, theirs = trained.frontend.symbols, store.format.frontend.symbols
    rate_hz, stored_hz = trained.architecture.mel.sampling_rate, store.format.sampling_rate
    if stored_hz != rate_hz:
        raise UserError(
            f"{format_store_folders([store])}: prepared at {stored_hz} Hz, and the voice {trained.source} has "
            f"{rate_hz} Hz",
            hint=f"prepare the recordings at {rate_hz} Hz, into another folder",
        )
    if ours != theirs:
        alone = {"only the data": set(theirs) - set(ours), "only the voice": set(ours) - set(theirs)}
        differences = "; ".join(f"{who} has {' '.join(sorted(symbols))}" for who, symbols in alone.items() if symbols)
        others = [part for part in store.parts if not set(part.format.frontend.symbols) <= set(ours)]
        raise UserError(
            f"{format_store_folders(others or [store])}: other symbols than {trained.source}: "
            f"{differences or 'they are in another order'}",
            hint=f"prepare the data in the voice's language, {trained.frontend.language}",
        )


def with_speakers_of(trained: TrainedVoice, store: SpeechStore, clips: list[SpeechClip]) -> list[SpeechClip]:
    """Returns the clips with the speaker ids of the voice, matched by name; a single-speaker voice is used for all.
    Raises UserError for a speaker that the voice does not have."""
    if trained.architecture.num_speakers == 1:
        return [replace(clip, speaker=0) for clip in clips]
    ours, theirs = trained.speakers, list(store.format.speakers)
    unknown = sorted({theirs[clip.speaker] for clip in clips} - set(ours))
    if unknown:
        others = [part for part in store.parts if set(part.format.speakers) & set(unknown)]
        raise UserError(
            f"{format_store_folders(others)}: {trained.source} does not have the speakers "
            + ", ".join(name or "without a name" for name in unknown),
            hint=f"its speakers are {', '.join(ours)}",
        )
    return [replace(clip, speaker=ours.index(theirs[clip.speaker])) for clip in clips]


# -------------------------------------------------------------------------------------------------------------- samples


LONGEST_TEXT = 2600  # maximum number of frames of a text: half a minute for frames of 256 samples at 22050 Hz
VMIN, VMAX = -5.0, 1.5  # powers of ten: mel magnitudes of the darkest and brightest colours
FRAME_PIXELS = 4  # width of a frame
STAIRS_PIXELS = 240  # height of the text
THINNEST = 3  # height of a symbol
PATH, EVEN = 208, 128  # indices into the colour map


def text_of_sentence(sentence: str, frontend: Frontend, speaker: int) -> Text:
    """Returns a sentence as a text to synthesise. Raises UserError if it has no symbol of the voice."""
    return Text(frontend.ids(frontend.normalize(sentence)), speaker, seed_of(sentence), LONGEST_TEXT, sentence)


def synthesise_samples(
    voice: Voice, texts: Sequence[Text], store: SpeechStore, clip: SpeechClip, device: torch.device
) -> Report:
    """Returns audio of each text and a picture of it with the predicted durations; for `clip`, with the alignment of
    its recording. The global random state of torch is unchanged."""
    mel, report = voice.architecture.mel, Report()
    with eval_mode(voice):
        for number, text in enumerate(texts, start=1):
            [spoken] = synthesise(voice, [text], device)
            wave_L = torch.from_numpy(spoken.wave_L)
            real_L = torch.from_numpy(store.wave(text.clip) / FULL_SCALE).float() if text.clip else None
            report.sounds[f"text_{number}"] = SoundSample(wave_L, mel.sampling_rate, text.words, real_L)
            picture = _picture(wave_L, spoken.durations_S, mel)
            report.pictures[f"text_{number}"] = Sheet([""], [[SheetCell(picture)]], f"text {number}: {text.words}")
        batch = Buckets(store, [clip], mel.hop_size, batch_size=1, seed=0)[Sample(0, 0)]
        durations_S = encode_recordings(voice, batch, [clip_seed(clip)], device).durations_BS[0].cpu()
    picture = _picture(batch.wave_BT[0].float() / FULL_SCALE, durations_S, mel)
    report.pictures["recording"] = Sheet([""], [[SheetCell(picture)]], f"alignment of a recording: {clip.text}")
    return report


def _picture(wave_L: Tensor, durations_S: Tensor, mel: Mel) -> Tensor:
    log_mel_MF = log_mel(wave_L[None], mel)[0]
    bands, frames = log_mel_MF.shape
    seconds, height = frames * mel.hop_size / mel.sampling_rate, BAND_PIXELS * bands
    return with_axes(
        alignment(log_mel_MF, durations_S), frequency_ticks(mel), seconds, top=STAIRS_PIXELS, height=height
    )


def alignment(log_mel_MF: Tensor, durations_S: Tensor) -> Tensor:
    """Returns a uint8 picture (HW3). Upper part: time to the right, symbols upwards; the alignment is a staircase, and
    the thin line is a uniform alignment. Lower part: the spectrogram.

    `durations_S` are in frames; frames after their sum have no symbol.
    """
    decades_MF = log_mel_MF.detach().float().cpu() / math.log(10)
    mel_HW3 = spectrogram_picture(decades_MF, VMIN, VMAX).repeat_interleave(FRAME_PIXELS, dim=1)
    width, durations = mel_HW3.shape[1], durations_S.tolist()
    colour_HW = np.zeros((STAIRS_PIXELS, width), np.int64)
    column_W = np.arange(min(width, FRAME_PIXELS * sum(durations)))
    colour_HW[STAIRS_PIXELS - 1 - column_W * STAIRS_PIXELS // max(1, len(column_W)), column_W] = EVEN
    step, start = STAIRS_PIXELS / max(1, len(durations)), 0
    for number, frames in enumerate(durations):
        bottom = max(THINNEST, STAIRS_PIXELS - round(number * step))
        highest = min(bottom - THINNEST, STAIRS_PIXELS - round((number + 1) * step))
        colour_HW[highest:bottom, start : start + FRAME_PIXELS * frames] = PATH
        start += FRAME_PIXELS * frames
    return torch.cat([torch.from_numpy(colour_map()[colour_HW]), mel_HW3])
