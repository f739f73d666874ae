"""Synthesises text of any length sentence by sentence, and a stream chunk by chunk, so that sound starts before the
text or the sentence is finished.

Shape suffixes: B items (one), S symbols, C channels, G channels of a speaker, F frames, T samples, 1 and 2 so many
channels.
"""

import difflib
import logging
import math
import os
import re
import sys
import time
import unicodedata
import wave
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gputrain.errors import UserError
from gputrain.files import to_int16, writing
from gputrain.hw.runtime import runtime_on
from gputrain.speech.text.frontend import shortened
from gputrain.speech.text.lines import text_lines
from gputrain.tts.architecture import VoiceArchitecture
from gputrain.tts.config import Speak, SpeakingOptions
from gputrain.tts.decoder import FilterBank, WaveDecoder
from gputrain.tts.load import LoadedVoice, load_voice
from gputrain.tts.model import Voice

log = logging.getLogger(__name__)

CHUNK_FRAMES = 512  # Frames decoded at once: about six seconds with the presets.
STREAM_FRAMES = 16  # Frames of a stream's first chunk, a fifth of a second; each next one is twice as long.
LONGEST_SECONDS = 1000  # Maximum duration of a sentence, whose latents are kept in memory.


# -------------------------------------------------------------------------------------------------------- audio outputs


Int16Samples = npt.NDArray[np.int16]


class SoundFile:
    """Mono 16-bit wav file, written to a temporary name and renamed at the end of the block; no file without samples.

    Raises UserError if it cannot be written.
    """

    def __init__(self, path: Path, rate_hz: int) -> None:
        self.path, self.rate_hz = path, rate_hz
        self.partial = path.with_name(f".partial-{path.name}")
        self.files: list[Path] = []
        self.file: wave.Wave_write | None = None

    def __enter__(self) -> "SoundFile":
        return self

    @property
    def begun(self) -> bool:
        return self.file is not None

    def write(self, samples_T: Int16Samples) -> None:
        with writing(self.path):
            if self.file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self.file = wave.Wave_write(str(self.partial))
                self.file.setparams((1, 2, self.rate_hz, 0, "NONE", ""))
            self.file.writeframesraw(samples_T.astype("<i2").tobytes())

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.file is None:
            return
        with writing(self.path):
            try:
                self.file.close()  # Writes the length into the header.
                if kind is None:
                    os.replace(self.partial, self.path)
                    self.files.append(self.path)
            finally:
                self.partial.unlink(missing_ok=True)


class AudioStream:
    """Unbuffered stream of 16-bit samples. Raises UserError if the reader has closed the pipe."""

    def __init__(self, out: BinaryIO) -> None:
        self.out = out
        self.files: list[Path] = []
        self.begun = False

    def __enter__(self) -> "AudioStream":
        return self

    def write(self, samples_T: Int16Samples) -> None:
        self.begun = True
        try:
            self.out.write(samples_T.astype("<i2").tobytes())
            self.out.flush()
        except BrokenPipeError:
            # The remaining buffer is discarded, so that Python does not report an error at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.out.fileno())
            raise UserError("standard output was closed before the end of the text") from None

    def __exit__(self, *raised: object) -> None:
        pass


# ------------------------------------------------------------------------------------------------------------- speaking


class SentenceAudio(NamedTuple):
    """A sentence, or a chunk of one."""

    wave_T: Tensor  # Samples in [-1, 1], fp32, on the CPU.
    peak: float  # peak before normalisation
    seconds: float  # synthesis time
    begins: bool = True  # False for a chunk in the middle of a sentence.
    softened: bool = False  # True if full scale was exceeded for the first time in this sentence.


@dataclass
class SpeechStatistics:
    files: list[Path] = field(default_factory=list)
    sentences: int = 0
    softened: int = 0  # sentences whose peak was scaled down to avoid clipping
    sound_seconds: float = 0.0
    computing_seconds: float = 0.0

    @property
    def real_time_factor(self) -> float:
        """Computing time per second of audio."""
        return self.computing_seconds / self.sound_seconds


def speak_text(settings: Speak, progress: Callable[[int, int], None] = lambda done, total: None) -> SpeechStatistics:
    """Synthesises a text, a file or standard input to one audio file, one file per line, or standard output.

    `progress` receives the number of sentences that are done and of all, where these are known beforehand. Characters
    without a symbol in the voice are left out with a warning. Raises UserError if there is no such voice or
    speaker, the text cannot be read or the audio cannot be written, or the text is empty.
    """
    lines = _lines(settings)
    loaded = with_lexicon(load_voice(settings.weights, runtime_on(settings.device).device), settings.lexicon)
    narrator = Narrator(loaded, settings.sampling, speaker_number(loaded.speakers, settings.speaker))
    rate_hz = loaded.voice.architecture.mel.sampling_rate
    silence = np.zeros(round(settings.sentence_silence * rate_hz), np.int16)
    spoken = SpeechStatistics()
    total = sum(len(loaded.frontend.sentences(line)) for line in lines) if settings.has_whole_text else 0
    for writer, texts in _writers(settings, lines, rate_hz):
        with writer:
            for text in texts:
                for utterance in narrator.say(text, in_chunks=isinstance(writer, AudioStream)):
                    samples_T = to_int16(utterance.wave_T.numpy())
                    pauses = utterance.begins and writer.begun
                    writer.write(np.concatenate([silence, samples_T]) if pauses else samples_T)
                    spoken.sentences += utterance.begins
                    spoken.softened += utterance.softened
                    spoken.sound_seconds += len(samples_T) / rate_hz
                    spoken.computing_seconds += utterance.seconds
                    if total:
                        progress(spoken.sentences, total)
        spoken.files += writer.files
    if not spoken.sentences:
        raise UserError(
            "there is nothing to say in this text", hint="gputrain normalize prints the text that the voice receives"
        )
    if spoken.softened:
        log.warning("%d of %d sentences exceeded full scale and were scaled down", spoken.softened, spoken.sentences)
    return spoken


def _writers(
    settings: Speak, lines: Iterable[str], rate_hz: int
) -> Iterator[tuple[SoundFile | AudioStream, Iterable[str]]]:
    """Yields each audio writer with the lines that it receives."""
    if settings.output_dir is not None:
        is_foreign = re.compile(r"(?!\.partial-|\d{4,}\.wav$)").match
        foreign = next(filter(is_foreign, os.listdir(settings.output_dir)), "") if settings.output_dir.is_dir() else ""
        for number, line in enumerate(lines, start=1):
            if foreign and (settings.output_dir / f"{number:04d}.wav").exists():
                fault = f"{settings.output_dir}: holds {number:04d}.wav beside other files, such as {foreign}"
                raise UserError(fault, hint="name another --output-dir")
            yield SoundFile(settings.output_dir / f"{number:04d}.wav", rate_hz), [line]
    elif settings.streams:
        log.info("raw to standard output: %d Hz, 16 bits, one channel", rate_hz)
        yield AudioStream(sys.stdout.buffer), lines
    else:
        assert settings.output_file is not None  # Speak.__post_init__ checks this.
        yield SoundFile(settings.output_file, rate_hz), lines


def _lines(settings: Speak) -> Iterable[str]:
    """Returns the lines, read lazily from standard input. Raises UserError if they are not text."""
    if settings.text is not None:
        return settings.text.splitlines()
    return text_lines(settings.input_file)


def with_lexicon(loaded: LoadedVoice, path: Path | None) -> LoadedVoice:
    """Returns a voice that also uses the spellings of a file. Raises UserError if the file is invalid."""
    return replace(loaded, frontend=replace(loaded.frontend, raw=loaded.frontend.raw.with_words(path)))


def speaker_number(speakers: tuple[str, ...], asked: str) -> int:
    """Returns the id of a speaker given by name or number; default: the first. Raises UserError if unknown."""
    if asked in speakers or not asked:
        return speakers.index(asked) if asked else 0
    if asked.isdecimal() and int(asked) < max(1, len(speakers)):
        return int(asked)
    near = difflib.get_close_matches(asked, speakers, n=len(speakers), cutoff=0.5)
    others = [name or str(number) for number, name in enumerate(speakers) if name not in near]
    raise UserError(
        f"there is no speaker {asked!r}",
        hint=f"this voice has {', '.join(near + others)}"
        if len(speakers) > 1
        else "this voice has one: drop --speaker",
    )


@dataclass
class Narrator:
    """A voice with its sampling options. Each unknown character is reported once, as are digits; `reported` has all
    characters that were looked up."""

    loaded: LoadedVoice
    sampling: SpeakingOptions
    speaker: int = 0
    reported: set[str] = field(default_factory=set)
    told_digits: bool = False

    def say(self, text: str, *, in_chunks: bool = False) -> Iterator[SentenceAudio]:
        """Synthesises the sentences of a raw text and skips empty ones. The same seed gives the same audio.

        `in_chunks`: each sentence comes in chunks, the first of which is short, so that it can be heard at once. A
        sentence that exceeds full scale is then scaled down only from the chunk on that does.
        """
        random = torch.Generator().manual_seed(self.sampling.seed)
        for sentence in self.loaded.frontend.sentences(text):
            begun = time.perf_counter()
            ids = self._ids(sentence)
            if not ids:
                continue
            frames = STREAM_FRAMES if in_chunks else CHUNK_FRAMES
            chunks = sentence_chunks(self.loaded.voice, ids, self.sampling, random, self.speaker, frames=frames)
            highest = 0.0
            for number, wave_T in enumerate(chunks if in_chunks else [torch.cat(list(chunks))]):
                peak = wave_T.abs().max().item()
                if not math.isfinite(peak):
                    raise UserError(f"{self.loaded.source}: its audio is not finite", hint="use another checkpoint")
                softened, highest = highest <= 1 < peak, max(highest, peak)
                scaled_T = wave_T / max(1.0, highest)
                yield SentenceAudio(scaled_T, peak, time.perf_counter() - begun, not number, softened)
                begun = time.perf_counter()

    def _ids(self, sentence: str) -> list[int]:
        """Returns the ids of a sentence; empty if none of its letters has a symbol."""
        frontend = self.loaded.frontend
        normalized = frontend.normalize(sentence)
        unknown = frontend.unknown(normalized)
        if new := sorted(frontend.lost(sentence, self.reported)):
            log.warning("the voice has no symbol for %s: left out", " ".join(map(repr, new)))
        self.reported |= {*new, *sentence}
        # A language without rules leaves digits in the text.
        if not (self.told_digits or frontend.espeak_voice) and any(char.isdecimal() for char in normalized):
            self.told_digits = True
            log.warning(
                "the voice reads digits as letters, as in %r: write numbers in words, or prepare its data with "
                "--number-words",
                shortened(sentence),
            )
        if not any(char.isalnum() for char in set(unicodedata.normalize("NFD", normalized)) - set(unknown)):
            log.warning("nothing to say in %r: left out", shortened(sentence))
            return []
        return frontend.ids(normalized)


@torch.no_grad()
def sentence_chunks(
    voice: Voice,
    ids: list[int],
    sampling: SpeakingOptions,
    random: torch.Generator,
    speaker: int = 0,
    *,
    frames: int = CHUNK_FRAMES,
) -> Iterator[Tensor]:
    """Yields the wave of ids in chunks (T,), the first of which has at most `frames` frames."""
    device = voice.text_encoder.embedding.weight.device
    ids_BS, lengths_B = torch.tensor([ids], device=device), torch.tensor([len(ids)], device=device)
    speaker_BG1 = voice.speaker(torch.tensor([speaker], device=device))
    text = voice.encode_text(ids_BS, lengths_B)
    noise_B2S = torch.randn(1, 2, len(ids), generator=random)
    durations_BS = voice.predict_durations(
        text, speaker_BG1, length_scale=sampling.length_scale, noise_w=sampling.noise_w, noise_B2S=noise_B2S.to(device)
    )
    count = _frames(voice.architecture, float(durations_BS.sum()))
    noise_BCF = torch.randn(1, voice.architecture.latent_channels, count, generator=random)
    latent_BCF = voice.speak(
        text, durations_BS, speaker_BG1, noise_scale=sampling.noise_scale, noise_BCT=noise_BCF.to(device)
    )
    reach = decoder_receptive_field(voice.architecture)
    for wave_T in decode_in_chunks(voice.decoder, latent_BCF, reach, speaker_BG1, frames=frames):
        yield wave_T.cpu()


def _frames(architecture: VoiceArchitecture, durations: float) -> int:
    """Returns the frames of a sentence. Raises UserError if an undertrained voice predicts an excessive duration."""
    seconds = durations * architecture.mel.hop_size / architecture.mel.sampling_rate
    if not seconds <= LONGEST_SECONDS:
        raise UserError(
            f"this voice predicts {seconds:.3g} seconds for one sentence",
            hint="use another checkpoint of the run, or continue the training",
        )
    return max(1, int(durations))


def decode_in_chunks(
    decoder: WaveDecoder,
    latent_BCF: Tensor,
    reach: int,
    speaker_BG1: Tensor | None = None,
    *,
    frames: int = CHUNK_FRAMES,
) -> Iterator[Tensor]:
    """Yields the wave in chunks, (T,) each: the first of `frames`, and each next one twice as long, up to CHUNK_FRAMES.
    The result equals decoding at once, because each chunk is decoded with the decoder's receptive field as context on
    both sides."""
    count, first = latent_BCF.shape[2], 0
    while first < count:
        last = min(first + frames, count)
        low, high = max(0, first - reach), min(count, last + reach)
        wave_T = decoder(latent_BCF[..., low:high], speaker_BG1)[0, 0]
        hop = len(wave_T) // (high - low)
        yield wave_T[(first - low) * hop : (last - low) * hop].float()
        first, frames = last, max(frames, min(2 * frames, CHUNK_FRAMES))


def decoder_receptive_field(architecture: VoiceArchitecture) -> int:
    """Returns the receptive field of the decoder to each side, in frames."""
    inner = 1 if architecture.resblock == "1" else 0  # HiFi-GAN's "1" has a convolution without dilation behind each
    blocks = max(
        sum((kernel - 1) // 2 * (dilation + inner) for dilation in dilations)
        for kernel, dilations in zip(
            architecture.resblock_kernel_sizes, architecture.resblock_dilation_sizes, strict=True
        )
    )
    per_frame, reach = 1, 3.0  # receptive field of the first convolution
    for rate, kernel in zip(architecture.upsample_rates, architecture.upsample_kernel_sizes, strict=True):
        reach += (kernel + rate) / 2 / rate / per_frame
        per_frame *= rate
        reach += blocks / per_frame
    head = 3.0  # receptive field of the last convolution
    if architecture.decoder == "multi-band":
        filters = FilterBank(architecture.subbands).taps / architecture.subbands  # Its unit is a sample of a band.
        head += 1 + (architecture.istft_n_fft + filters) / 2 / architecture.istft_hop_size
    return math.ceil(reach + head / per_frame)
