"""Trains each kind of model as its train command does: from its settings, with messages to a console."""

from functools import partial

from gputrain.asr.kind import AsrWork
from gputrain.session import train_model
from gputrain.tts.kind import TtsWork
from gputrain.vae.kind import VaeWork
from gputrain.vocoder.kind import VocoderWork

train_vae = partial(train_model, VaeWork())
train_vocoder = partial(train_model, VocoderWork())
train_tts = partial(train_model, TtsWork())
train_asr = partial(train_model, AsrWork())
