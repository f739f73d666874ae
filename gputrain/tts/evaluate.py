"""Evaluates voices: a trained one on prepared speech, or one in training on its held-out clips."""

from dataclasses import replace
from pathlib import Path

import torch

from gputrain.audio.io import Samples
from gputrain.engine.dataset_report import Progress, silent
from gputrain.engine.loading import load_modules
from gputrain.engine.metrics import Report
from gputrain.errors import UserError
from gputrain.hw.plan import DeviceName
from gputrain.hw.runtime import runtime_on
from gputrain.tts.config import TrainTts
from gputrain.tts.data import Speech, open_speech
from gputrain.tts.eval_metrics import Evaluation, Recogniser, batch_clips, evaluate_clips
from gputrain.tts.load import TrainedVoice, read_trained
from gputrain.tts.measures import plain, recognise
from gputrain.tts.model import Voice
from gputrain.tts.samples import of_clip, of_sentence, synthesise_samples
from gputrain.tts.store import SpeechClip, SpeechStore
from gputrain.tts.text.frontend import Frontend


class HeldOutClips:
    """Held-out clips for evaluation and samples during training, sorted by fingerprint so that they come from many
    recordings."""

    def __init__(self, speech: Speech, settings: TrainTts) -> None:
        """Raises UserError where a test sentence has no symbol of the voice."""
        data, format = settings.data, speech.store.format
        self.store, self.batch_size = speech.store, data.eval_batch_size
        held_out = sorted(speech.parts.held_out, key=lambda clip: clip.fingerprint)
        self.clips = held_out[: data.eval_clips]
        reader, speakers, most = format.frontend, len(format.speakers), data.num_audio_samples
        sentences = [of_sentence(one, reader, number % speakers) for number, one in enumerate(data.test_sentences)]
        self.texts = sentences[:most] or [of_clip(clip, reader) for clip in held_out[:most]]

    def sample(self, voice: Voice, device: torch.device) -> Report:
        return synthesise_samples(voice, self.texts, self.store, self.clips[0], device)

    def evaluate(self, voice: Voice, device: torch.device) -> Report:
        """Runs `measure` without pitch, speed and speech recognition."""
        clips = batch_clips(self.store, self.clips, voice.architecture.mel.hop_size, self.batch_size)
        return Report(scalars=evaluate_clips(voice, clips, device, quick=True).scalars)


def evaluate_voice(
    model: Path,
    data_dir: Path,
    *,
    device: DeviceName = "auto",
    held_out_share: float | None = None,
    max_clips: int = 1000,
    recogniser: Path | str = "",
    progress: Progress = silent,
) -> Evaluation:
    """Evaluates a trained voice on the held-out clips of prepared speech, the first `max_clips` of them, one by one.

    Without `held_out_share`, they are those that the training held out; 1 takes all clips. `recogniser` is the folder
    of a Whisper model for faster-whisper; without it, nothing is recognised. Raises UserError if there is no such
    voice, speech or recogniser, or the speech is not for this voice.
    """
    runtime = runtime_on(device)
    trained = read_trained(model)
    mel = trained.architecture.mel
    share = trained.settings.data.held_out_share if held_out_share is None else held_out_share
    speech = open_speech(data_dir, mel.hop_size, share)
    check_store_fits(speech.store, trained)
    chosen = speech.store.clips if share == 1 else speech.parts.held_out
    clips = with_speakers_of(trained, speech.store, chosen[:max_clips])
    # The full model is needed: a speaking copy lacks the posterior encoder.
    voice = Voice(trained.architecture)
    load_modules({"voice": voice}, {"voice": dict(trained.voice)})
    with runtime.autocast():
        return evaluate_clips(
            voice.to(runtime.device),
            batch_clips(speech.store, clips, mel.hop_size, batch_size=1),
            runtime.device,
            recogniser=make_recogniser(Path(recogniser), trained.frontend, mel.sampling_rate) if recogniser else None,
            progress=progress,
        )


def make_recogniser(model: Path, frontend: Frontend, rate_hz: int) -> Recogniser:
    """Returns a recogniser that transcribes with a Whisper model and applies the voice's text normaliser."""
    language = None if frontend.language == "characters" else frontend.language

    def transcribe(wave_L: Samples) -> str:
        return plain(frontend.normalize(recognise(wave_L, rate_hz, language, model)))

    return transcribe


def check_store_fits(store: SpeechStore, trained: TrainedVoice) -> None:
    """Raises UserError if the sampling rate or the symbols of a store differ from those of the voice."""
    ours, theirs = trained.frontend.symbols, store.format.frontend.symbols
    rate_hz, stored_hz = trained.architecture.mel.sampling_rate, store.format.sampling_rate
    if stored_hz != rate_hz:
        raise UserError(
            f"{store.folder} was prepared at {stored_hz} Hz, and the voice {trained.source} has {rate_hz} Hz",
            hint=f"prepare the recordings at {rate_hz} Hz, into another folder",
        )
    if ours != theirs:
        alone = {"only the data": set(theirs) - set(ours), "only the voice": set(ours) - set(theirs)}
        differences = "; ".join(f"{who} has {' '.join(sorted(symbols))}" for who, symbols in alone.items() if symbols)
        raise UserError(
            f"{store.folder} has other symbols than {trained.source}: {differences or 'they are in another order'}",
            hint=f"prepare the data in the voice's language, {trained.frontend.language}, with its alphabet",
        )


def with_speakers_of(trained: TrainedVoice, store: SpeechStore, clips: list[SpeechClip]) -> list[SpeechClip]:
    """Returns the clips with the speaker ids of the voice, matched by name; a single-speaker voice is used for all.
    Raises UserError for a speaker that the voice does not have."""
    if trained.architecture.num_speakers == 1:
        return [replace(clip, speaker=0) for clip in clips]
    ours, theirs = trained.speakers, store.format.speakers
    unknown = sorted({theirs[clip.speaker] for clip in clips} - set(ours))
    if unknown:
        raise UserError(
            f"{store.folder} has speakers that {trained.source} does not have: {', '.join(unknown)}",
            hint=f"its speakers are {', '.join(ours)}",
        )
    return [replace(clip, speaker=ours.index(theirs[clip.speaker])) for clip in clips]
