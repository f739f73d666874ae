"""Assessors of what a voice speaks: a recogniser that reads it, and a predictor of the opinion of listeners.

Shape suffixes: L samples.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from gputrain.audio.io import Samples, resample
from gputrain.errors import UserError, first_line, import_package, require
from gputrain.fetch.names import kind_of, local_path
from gputrain.kinds import PublishedFiles, kinds, speech_checker
from gputrain.speech.text.frontend import Frontend
from gputrain.tts.config import VoiceEvaluation
from gputrain.tts.measures import check_whisper, plain, recognise

Recogniser: TypeAlias = Callable[[Samples], str]  # Transcribes samples at the voice's rate to normalised text.
# Transcribes samples at a rate in Hz; the language, a code or None, is for those that know many.
SpeechReader: TypeAlias = Callable[[Samples, int, str | None], str]

# Of faster-whisper, which reads what a voice speaks.
WHISPER = PublishedFiles(
    whole=("model.bin",), needed=("config.json",), beside=("tokenizer.json", "vocabulary.*", "preprocessor_config.json")
)
MOS_INPUT = "one float32 input [samples] or [batch, samples] of any length, and one score as output"
RATE_KEYS = ("sampling_rate", "sample_rate")  # Keys of the metadata of an ONNX file.


class AssessmentFailed(UserError):
    """An assessor has no result for a sound. `measure` is the field of Assessors that it is in."""

    def __init__(self, measure: str, error: Exception) -> None:
        title = {"cer": "the recogniser", "mos": "the MOS predictor"}[measure]
        without = "resume without it (--best-by distance needs neither), or with another one"
        hint = f"{error.hint}, or {without}" if isinstance(error, UserError) and error.hint else without
        super().__init__(f"{title} failed on a sound: {first_line(error)}", hint=hint)
        self.measure = measure


class Heard(NamedTuple):
    """The text and the score that the assessors give a sound; None without such an assessor."""

    text: str | None
    mos: float | None


@dataclass(frozen=True)
class Assessors:
    """Both are optional, compute on the CPU in fp32, and are named as the measures that a best checkpoint can have."""

    cer: Recogniser | None = None
    mos: Callable[[Samples], float] | None = None

    def hear(self, wave_L: Samples) -> Heard:
        """Raises AssessmentFailed."""
        with torch.autocast("cpu", enabled=False):  # That of the voice is not theirs.
            return Heard(*(self._result(measure, wave_L) for measure in ("cer", "mos")))

    def _result(self, measure: str, wave_L: Samples) -> Any:
        assessor = getattr(self, measure)
        try:
            return assessor(wave_L) if assessor else None
        except Exception as error:  # Whatever a user's model raises.
            raise AssessmentFailed(measure, error) from error


def open_assessors(options: VoiceEvaluation, frontend: Frontend, rate_hz: int, device: str) -> Assessors:
    """Opens the assessors of speech with the sampling rate and the text rules of a voice. Raises UserError if one
    cannot be used."""
    reader = reader_of(options.recogniser, device)
    predictor = None
    if options.mos_predictor:
        predictor = MosPredictor.open(options.mos_predictor, options.mos_sampling_rate)
    return Assessors(
        make_recogniser(reader, frontend, rate_hz) if reader else None,
        partial(predictor.score, rate_hz=rate_hz) if predictor else None,
    )


def reader_of(model: str | Path | None, device: str) -> SpeechReader | None:
    """Loads a model that reads speech, if one is named: of faster-whisper, or a recogniser of ours or transformers."""
    if model is None:
        return None
    require("rapidfuzz", needed_by="error rates")
    recognisers = [kind.published for kind in kinds().values() if kind.load_speech_checker and kind.published]
    path = local_path(model, *recognisers, WHISPER)
    if not path.is_dir() or kind_of(path).load_speech_checker:
        checker = speech_checker(path, device)
        return lambda wave, rate_hz, language: str(checker.read(wave, rate_hz))
    check_whisper(path)
    return partial(recognise, model=path)


def make_recogniser(reader: SpeechReader, frontend: Frontend, rate_hz: int) -> Recogniser:
    """Returns a recogniser that reads speech and applies the voice's text normaliser."""
    language = None if frontend.language == "characters" else frontend.language

    def transcribe(wave_L: Samples) -> str:
        return plain(frontend.normalize(reader(wave_L, rate_hz, language)))

    return transcribe


@dataclass(frozen=True)
class MosPredictor:
    """A network of an ONNX file that predicts the mean opinion score of speech, such as UTMOS (Saeki et al. 2022,
    arXiv:2204.02152). A higher score is better; its scale is the network's own."""

    session: Any
    rate_hz: int
    has_batch: bool

    @classmethod
    def open(cls, file: Path, rate_hz: int = 0) -> "MosPredictor":
        """Opens a file whose input has `rate_hz`, or the rate of its metadata if that is 0, and tries it on a second of
        noise. Raises UserError for a graph that takes or gives anything else than MOS_INPUT."""
        runtime = import_package("onnxruntime", needed_by="mos_predictor")
        if not file.is_file():
            raise UserError(f"{file}: no such file", hint="--mos-predictor takes an ONNX file")
        try:
            session = runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime's errors have no class of their own.
            raise UserError(f"{file}: onnxruntime cannot load it: {first_line(error)}", hint=MOS_INPUT) from None
        rate_hz = rate_hz or _rate_of(session.get_modelmeta().custom_metadata_map, file)
        inputs, outputs = session.get_inputs(), session.get_outputs()
        shape = (inputs[0].shape if len(inputs) == len(outputs) == 1 else None) or []
        is_fixed = [isinstance(size, int) and size != 1 for size in shape]  # Of a batch of one, 1 is no obstacle.
        if len(shape) not in (1, 2) or any(is_fixed) or shape[-1] == 1 or inputs[0].type != "tensor(float)":
            raise _other_graph(file, inputs, outputs)
        opened = cls(session, rate_hz, has_batch=len(shape) == 2)
        noise_L = np.random.default_rng(0).normal(0, 0.1, rate_hz).astype(np.float32)
        try:
            opened.score(noise_L, rate_hz)
        except Exception as error:
            raise UserError(f"{file}: does not score a second of sound: {first_line(error)}", hint=MOS_INPUT) from None
        return opened

    def score(self, wave_L: Samples, rate_hz: int) -> float:
        """Returns the score of a wave; one that is shorter than a second is followed by silence. Raises ValueError if
        it is not one finite number."""
        own_L = resample(wave_L, rate_hz, self.rate_hz).astype(np.float32)
        own_L = np.pad(own_L, (0, max(0, self.rate_hz - len(own_L))))
        given = {self.session.get_inputs()[0].name: own_L[None] if self.has_batch else own_L}
        found = np.asarray(self.session.run(None, given)[0])
        if found.size != 1 or not np.isfinite(found).all():
            raise ValueError(f"its output is {np.array2string(found.ravel()[:4])} of shape {list(found.shape)}")
        return float(found.reshape(()))


def _rate_of(metadata: dict[str, str], file: Path) -> int:
    given = next((metadata[key] for key in RATE_KEYS if key in metadata), "")
    if not re.fullmatch(r"\d{4,6}", given):
        found = f"its {' or '.join(RATE_KEYS)} is {given!r}" if given else f"its metadata have no {RATE_KEYS[0]}"
        raise UserError(f"{file}: {found}", hint="name the rate of its input in Hz: --mos-sampling-rate 16000")
    return int(given)


def _other_graph(file: Path, inputs: Any, outputs: Any) -> UserError:
    found = [
        f"{what} {', '.join(f'{one.name} {one.type} {one.shape}' for one in ends)}"
        for what, ends in (("inputs", inputs), ("outputs", outputs))
    ]
    return UserError(f"{file}: has the {' and the '.join(found)}", hint=f"a predictor has {MOS_INPUT}")
