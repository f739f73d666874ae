"""Samples during training: audio and pictures of synthesised texts, and the alignment of a recording.

Shapes: S symbols, M mel bands, T frames, L samples.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gputrain.audio.config import Mel
from gputrain.audio.mel import log_mel
from gputrain.engine.data import Sample
from gputrain.engine.metrics import Report, SoundSample
from gputrain.engine.wav import FULL_SCALE
from gputrain.tts.data import Buckets
from gputrain.tts.eval_metrics import clip_seed
from gputrain.tts.model import Voice
from gputrain.tts.pictures import alignment
from gputrain.tts.reading import Text, at_rest, encode_recordings, seed_of, synthesise
from gputrain.tts.store import SpeechClip, SpeechStore
from gputrain.tts.text.frontend import PAD_ID, Frontend

LONGEST = 2600  # maximum number of frames of a text: half a minute for frames of 256 samples at 22050 Hz
VMIN, VMAX = -5.0, 1.5  # powers of ten: mel magnitudes of the darkest and brightest colours


def of_sentence(sentence: str, frontend: Frontend, speaker: int) -> Text:
    """Returns a sentence as a text to synthesise. Raises UserError if it has no symbol of the voice."""
    return Text(frontend.ids(frontend.normalize(sentence)), speaker, seed_of(sentence), LONGEST)


def of_clip(clip: SpeechClip, frontend: Frontend) -> Text:
    return Text(frontend.ids(clip.normalized), clip.speaker, clip_seed(clip), LONGEST)


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
            report.sounds[f"text_{number}"] = SoundSample(wave_L, mel.sampling_rate)
            report.pictures[f"text_{number}"] = _picture(wave_L, spoken.durations_S, text.ids, symbols, mel)
        batch = Buckets(store, [clip], mel.hop_size, batch_size=1, seed=0)[Sample(0, 0)]
        durations_S = encode_recordings(voice, batch, [clip_seed(clip)], device).durations_BS[0].cpu()
    real_L = batch.wave_BT[0].float() / FULL_SCALE
    report.pictures["recording"] = _picture(real_L, durations_S, batch.ids_BS[0].tolist(), symbols, mel)
    return report


def _picture(wave_L: Tensor, durations_S: Tensor, ids: Sequence[int], symbols: Sequence[str], mel: Mel) -> Tensor:
    labels = ["" if one == PAD_ID else symbols[one] for one in ids]
    return alignment(log_mel(wave_L[None], mel)[0], durations_S, labels, VMIN, VMAX)
