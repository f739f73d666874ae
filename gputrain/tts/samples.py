"""Samples during training: audio and pictures of synthesised texts, and the alignment of a recording.

A picture of an alignment shows the frames of each symbol, above the spectrogram.

Shapes: S symbols, M mel bands, T and F frames, L samples, H x W pixels, 3 colours.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from gputrain.audio.config import Mel
from gputrain.audio.mel import log_mel
from gputrain.engine.data import FULL_SCALE, Sample
from gputrain.engine.drawing import (
    INK,
    TEXT_SIZE,
    Drawing,
    Inset,
    Label,
    Line,
    Rectangle,
    colour_map,
    font,
    spectrogram_picture,
)
from gputrain.engine.samples import Report, Sheet, SheetCell, SoundSample
from gputrain.speech.buckets import Buckets
from gputrain.speech.store import SpeechClip, SpeechStore
from gputrain.speech.text.frontend import PAD_ID, Frontend
from gputrain.tts.model import Voice
from gputrain.tts.reading import Text, at_rest, clip_seed, encode_recordings, seed_of, synthesise

LONGEST = 2600  # maximum number of frames of a text: half a minute for frames of 256 samples at 22050 Hz
VMIN, VMAX = -5.0, 1.5  # powers of ten: mel magnitudes of the darkest and brightest colours
FRAME_PIXELS = 4  # width of a frame, wide enough for labels
STAIRS_PIXELS = 240  # height of the text
THINNEST = 3  # height of a symbol
GAP_PIXELS = 4
LABEL_PIXELS, LABEL_ROWS = 15, 3  # overlapping labels are moved to another row
TICK_PIXELS = 5
PATH, EVEN = 208, 128  # indices into the colour map


def of_sentence(sentence: str, frontend: Frontend, speaker: int) -> Text:
    """Returns a sentence as a text to synthesise. Raises UserError if it has no symbol of the voice."""
    return Text(frontend.ids(frontend.normalize(sentence)), speaker, seed_of(sentence), LONGEST, sentence)


def of_clip(clip: SpeechClip, frontend: Frontend) -> Text:
    return Text(frontend.ids(clip.normalized), clip.speaker, clip_seed(clip), LONGEST, clip.text, clip)


def synthesise_samples(
    voice: Voice, texts: Sequence[Text], store: SpeechStore, clip: SpeechClip, device: torch.device
) -> Report:
    """Returns audio of each text and a picture of it with the predicted durations; for `clip`, with the alignment of
    its recording. The global random state of torch is unchanged."""
    mel, symbols = voice.architecture.mel, store.format.frontend.symbols
    report = Report()
    with at_rest(voice):
        for number, text in enumerate(texts, start=1):
            [spoken] = synthesise(voice, [text], device)
            wave_L = torch.from_numpy(spoken.wave_L)
            real_L = torch.from_numpy(store.wave(text.clip) / FULL_SCALE).float() if text.clip else None
            report.sounds[f"text_{number}"] = SoundSample(wave_L, mel.sampling_rate, text.words, real_L)
            picture = _picture(wave_L, spoken.durations_S, text.ids, symbols, mel)
            report.pictures[f"text_{number}"] = Sheet([""], [[SheetCell(picture)]], f"text {number}: {text.words}")
        batch = Buckets(store, [clip], mel.hop_size, batch_size=1, seed=0)[Sample(0, 0)]
        durations_S = encode_recordings(voice, batch, [clip_seed(clip)], device).durations_BS[0].cpu()
    picture = _picture(batch.wave_BT[0].float() / FULL_SCALE, durations_S, batch.ids_BS[0].tolist(), symbols, mel)
    report.pictures["recording"] = Sheet([""], [[SheetCell(picture)]], f"alignment of a recording: {clip.text}")
    return report


def _picture(wave_L: Tensor, durations_S: Tensor, ids: Sequence[int], symbols: Sequence[str], mel: Mel) -> Tensor:
    labels = ["" if one == PAD_ID else symbols[one] for one in ids]
    return alignment(log_mel(wave_L[None], mel)[0], durations_S, labels, VMIN, VMAX)


def alignment(log_mel_MF: Tensor, durations_S: Tensor, labels: Sequence[str], vmin: float, vmax: float) -> Tensor:
    """Returns a uint8 picture (HW3). Upper part: time to the right, symbols upwards; the alignment is a staircase, and
    the thin line is a uniform alignment. Lower part: the spectrogram, and under it the label of each symbol, between
    the ticks at its start and at the next symbol's.

    `durations_S` are in frames; frames after their sum have no symbol. Empty `labels` are not drawn (blanks), nor are
    labels without space. `vmin` and `vmax` are the mel magnitudes of the darkest and brightest colours, as powers of
    ten.
    """
    durations = durations_S.tolist()
    decades_MF = log_mel_MF.detach().float().cpu() / math.log(10)
    mel_HW3 = spectrogram_picture(decades_MF, vmin, vmax).repeat_interleave(FRAME_PIXELS, dim=1)
    height, width, _ = mel_HW3.shape
    top = STAIRS_PIXELS + GAP_PIXELS
    drawing = Drawing(width, top + height + TICK_PIXELS + LABEL_PIXELS * LABEL_ROWS)
    drawing.shapes.append(Inset(0, 0, _staircase(durations, width)))
    drawing.shapes.append(Inset(0, top, Image.fromarray(mel_HW3.numpy())))
    _add_labels(drawing, durations, labels, top + height)
    return torch.from_numpy(np.array(drawing.image()))


def _staircase(durations: Sequence[int], width: int) -> Image.Image:
    """Draws symbols by frames; aligned cells are light."""
    dark, uniform, aligned = (f"#{bytes(colour_map()[index]).hex()}" for index in (0, EVEN, PATH))
    drawing = Drawing(width, STAIRS_PIXELS, dark)
    drawing.shapes.append(Line(0, STAIRS_PIXELS - 1, FRAME_PIXELS * sum(durations) - 1, 0, uniform, 1))
    step = STAIRS_PIXELS / max(1, len(durations))
    for number, (start, end) in enumerate(_spans(durations)):
        bottom = max(THINNEST, STAIRS_PIXELS - 1 - round(number * step))
        highest = min(bottom - THINNEST, STAIRS_PIXELS - round((number + 1) * step))
        drawing.shapes.append(Rectangle(start, highest, end - start, bottom + 1 - highest, aligned))
    return drawing.image()


def _add_labels(drawing: Drawing, durations: Sequence[int], labels: Sequence[str], top: int) -> None:
    """Adds a tick at the start of each labelled symbol, and the label centred between its tick and the next, in the
    first free row."""
    labelled = [(start, label) for (start, _), label in zip(_spans(durations), labels, strict=True) if label]
    right_ends = [0.0] * LABEL_ROWS  # The last label of each row ends there, in pixels.
    for (start, label), (end, _) in pairwise([*labelled, (FRAME_PIXELS * sum(durations), "")]):
        drawing.shapes.append(Line(start, top, start, top + TICK_PIXELS - 2, INK, 1))
        label_width = font(TEXT_SIZE).getlength(label)
        left = min(max(0.0, (start + end - label_width) / 2), drawing.width - label_width)
        row = next((row for row in range(LABEL_ROWS) if right_ends[row] <= left), None)
        if label.strip() and row is not None:
            drawing.shapes.append(Label(left, top + TICK_PIXELS + LABEL_PIXELS * (row + 0.5), label))
            right_ends[row] = left + label_width + 2


def _spans(durations: Sequence[int]) -> list[tuple[int, int]]:
    """Returns the pixel range [start, end) of each symbol."""
    ends = np.cumsum(durations) * FRAME_PIXELS
    return [(int(end) - FRAME_PIXELS * frames, int(end)) for end, frames in zip(ends, durations, strict=True)]
