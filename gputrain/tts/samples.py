"""Samples during training: audio and pictures of synthesised texts, and the alignment of a recording.

A picture of an alignment shows the frames of each symbol, above the spectrogram.

Shapes: S symbols, M mel bands, T and F frames, L samples, H x W pixels, 3 colours.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from gputrain.audio.config import Mel
from gputrain.audio.mel import log_mel
from gputrain.audio.pictures import GAP_PIXELS, colour_map, coloured
from gputrain.engine.data import FULL_SCALE, Sample
from gputrain.engine.samples import INK, PAPER, Report, Sheet, SheetCell, SoundSample, font
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
TEXT_SIZE = 13
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
    share_MF = (log_mel_MF.detach().float().cpu() / math.log(10) - vmin) / (vmax - vmin)
    mel = coloured(share_MF).repeat_interleave(FRAME_PIXELS, dim=1).numpy()
    height, width, _ = mel.shape
    top = STAIRS_PIXELS + GAP_PIXELS
    canvas = Image.new("RGB", (width, top + height + TICK_PIXELS + LABEL_PIXELS * LABEL_ROWS), PAPER)
    canvas.paste(_stairs(durations, width), (0, 0))
    canvas.paste(Image.fromarray(mel), (0, top))
    _write_labels(ImageDraw.Draw(canvas), durations, labels, top + height, width)
    return torch.from_numpy(np.array(canvas))


def _stairs(durations: Sequence[int], width: int) -> Image.Image:
    """Draws symbols by frames; aligned cells are light."""
    colours = [tuple(colour.tolist()) for colour in colour_map()]
    picture = Image.new("RGB", (width, STAIRS_PIXELS), colours[0])
    pen = ImageDraw.Draw(picture)
    pen.line((0, STAIRS_PIXELS - 1, FRAME_PIXELS * sum(durations) - 1, 0), fill=colours[EVEN])
    step = STAIRS_PIXELS / max(1, len(durations))
    for number, (start, end) in enumerate(_spans(durations)):
        bottom = max(THINNEST, STAIRS_PIXELS - 1 - round(number * step))
        highest = min(bottom - THINNEST, STAIRS_PIXELS - round((number + 1) * step))
        if end > start:
            pen.rectangle((start, highest, end - 1, bottom), fill=colours[PATH])
    return picture


def _write_labels(
    pen: ImageDraw.ImageDraw, durations: Sequence[int], labels: Sequence[str], top: int, width: int
) -> None:
    """Draws each label centred between its tick and the next, in the first free row."""
    text = font(TEXT_SIZE)
    labelled = [(start, label) for (start, _), label in zip(_spans(durations), labels, strict=True) if label]
    taken = [0.0] * LABEL_ROWS  # right end of the last label in each row, in pixels
    for (start, label), (end, _) in pairwise([*labelled, (FRAME_PIXELS * sum(durations), "")]):
        pen.line((start, top, start, top + TICK_PIXELS - 2), fill=INK)
        label_width = text.getlength(label)
        left = min(max(0.0, (start + end - label_width) / 2), width - label_width)
        row = next((row for row in range(LABEL_ROWS) if taken[row] <= left), None)
        if label.strip() and row is not None:
            pen.text((left, top + TICK_PIXELS + LABEL_PIXELS * row), label, fill=INK, font=text)
            taken[row] = left + label_width + 2


def _spans(durations: Sequence[int]) -> list[tuple[int, int]]:
    """Returns the pixel range [start, end) of each symbol."""
    ends = np.cumsum(durations) * FRAME_PIXELS
    return [(int(end) - FRAME_PIXELS * frames, int(end)) for end, frames in zip(ends, durations, strict=True)]
