"""Exports a recogniser for transformers, ONNX Runtime and sherpa-onnx. Every export is loaded by its stock consumer and
compared with the torch model before it is moved to its final place.

Shapes: N waves, L samples, F frames, V symbols.
"""

import json
import logging
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gputrain.asr import model as networks
from gputrain.asr.load import Recogniser, greedy_text
from gputrain.audio.export import check_file_name, cpu_copy, exported, load_line, write_onnx
from gputrain.audio.io import Samples, from_int16
from gputrain.audio.synthetic import say, sentences
from gputrain.errors import UserError, import_package
from gputrain.files import Progress, StepProgress, no_progress, written_aside
from gputrain.kinds import Exported
from gputrain.speech.config import STRIDE
from gputrain.speech.error_rates import Edits, character_edits
from gputrain.speech.store import SpeechStore
from gputrain.speech.text.vocabulary import ABSENT, DELIMITER, Vocabulary

log = logging.getLogger(__name__)

LARGEST_DIFFERENCE = 1e-3  # Tolerance between two libraries for log-probabilities of symbols that are not negligible.
LEAST_LOG_PROB = -12.0  # Less probable symbols are compared as if they had this log-probability.
COMPARED_CLIPS = 4
OPSET = 17
# Rounding decides between symbols that are equally probable, so that a letter may differ; int8 that changes more of the
# characters is not recommended.
MOST_CHANGED = 0.01
LARGEST_PROTOBUF = 1_900_000_000  # Bytes; the weights of larger graphs are a file of their own.
BLANK, SPACE = "<blk>", "▁"  # sherpa-onnx's names in tokens.txt
Floats: TypeAlias = NDArray[np.float32]
Compute: TypeAlias = Callable[[Samples], Floats]  # Returns logits or log-probabilities (F, V) of a wave.


def comparison_sounds(recogniser: Recogniser, data_path: Path | None) -> list[Samples]:
    """Returns waves of several lengths: clips of prepared speech, or synthetic speech. Raises UserError if the clips
    have another sampling rate."""
    rate_hz = recogniser.sampling_rate
    if data_path is None:
        texts, draws = sentences()[:COMPARED_CLIPS], np.random.default_rng(0)
        sounds = [say(text, rate_hz, draws).astype(np.float32) for text in texts]
        return [np.concatenate([sound] * (number + 1)) for number, sound in enumerate(sounds)]
    store = SpeechStore.open(data_path)
    if store.format.sampling_rate != rate_hz:
        raise UserError(
            f"{data_path} was prepared at {store.format.sampling_rate} Hz, and the recogniser reads {rate_hz} Hz",
            hint="name a folder that prepare-data --kind asr has filled",
        )
    step = max(1, len(store.clips) // COMPARED_CLIPS)
    return [from_int16(store.wave(clip)) for clip in store.clips[::step][:COMPARED_CLIPS]]


def largest_difference(
    recogniser: Recogniser, sounds: Sequence[Samples], compute: Compute, name: str, steps: StepProgress
) -> float:
    """Returns the largest difference of a log-probability between a consumer and the torch model. Raises RuntimeError
    if it exceeds LARGEST_DIFFERENCE."""
    worst = 0.0
    for sound in sounds:
        ours = recogniser.log_probs([sound])[0].numpy()
        theirs = torch.log_softmax(torch.from_numpy(compute(sound)).float(), dim=-1).numpy()
        if theirs.shape != ours.shape:
            raise RuntimeError(f"{name} returns logits of shape {theirs.shape}, expected {ours.shape}")
        gaps = np.abs(np.maximum(theirs, LEAST_LOG_PROB) - np.maximum(ours, LEAST_LOG_PROB))
        worst = max(worst, float(np.nan_to_num(gaps, nan=math.inf).max()))
        steps.next()
    if not worst < LARGEST_DIFFERENCE:
        raise RuntimeError(f"{name}: log-probabilities differ from torch's by {worst:.3g}")
    return worst


# ---------------------------------------------------------------------------------------------------- transformers


def export_transformers(
    recogniser: Recogniser, folder: Path, *, data_path: Path | None = None, progress: Progress = no_progress
) -> Exported:
    """Writes a folder that AutoModelForCTC and Wav2Vec2Processor load. Raises UserError if it cannot be written,
    RuntimeError if the loaded model computes something else."""
    sounds = comparison_sounds(recogniser, data_path)
    own, steps = _on_cpu(recogniser), StepProgress(progress, 1 + len(sounds))
    with written_aside(folder) as aside, networks.quiet_transformers():
        own.model.save_pretrained(aside)
        for path in aside.glob("*.safetensors"):  # safetensors makes files that nobody else can read.
            shutil.copymode(aside / "config.json", path)
        _write_processor(own, aside)
        steps.next()
        difference = largest_difference(own, sounds, _stock_transformers(own, aside), "transformers", steps)
        files = [folder / path.name for path in sorted(aside.iterdir())]
    notes = [
        f'Load it: transformers.AutoModelForCTC.from_pretrained("{folder}") and '
        f'transformers.Wav2Vec2Processor.from_pretrained("{folder}")'
    ]
    return exported(files, recogniser.source, "log-probability", difference, notes)


def _on_cpu(recogniser: Recogniser) -> Recogniser:
    model = cpu_copy(recogniser.model).eval()
    model.config.vocab_size = model.lm_head.out_features
    model.config.pad_token_id = recogniser.vocabulary.blank
    return Recogniser(model, recogniser.vocabulary, recogniser.sampling_rate, recogniser.normalizes, recogniser.source)


def _write_processor(recogniser: Recogniser, folder: Path) -> None:
    """Writes vocab.json, and the settings of the tokenizer and of the feature extractor."""
    from transformers import Wav2Vec2CTCTokenizer, Wav2Vec2FeatureExtractor, Wav2Vec2Processor

    vocabulary = recogniser.vocabulary
    if vocabulary.delimiter != ABSENT and DELIMITER not in vocabulary.symbols:
        # transformers 5 reads no other delimiter than this one from files.
        symbols = (
            DELIMITER if number == vocabulary.delimiter else symbol for number, symbol in enumerate(vocabulary.symbols)
        )
        vocabulary = replace(vocabulary, symbols=tuple(symbols))
    ids = {symbol: number for number, symbol in enumerate(vocabulary.symbols)}
    path = folder / "vocab.json"
    path.write_text(json.dumps(ids, ensure_ascii=False, indent=1), encoding="utf-8")
    blank = vocabulary.symbols[vocabulary.blank]
    tokenizer = Wav2Vec2CTCTokenizer(
        str(path),
        bos_token=None,
        eos_token=None,
        pad_token=blank,
        unk_token=blank if vocabulary.unknown_id == ABSENT else vocabulary.symbols[vocabulary.unknown_id],
        word_delimiter_token=" " if vocabulary.delimiter == ABSENT else vocabulary.symbols[vocabulary.delimiter],
    )
    extractor = Wav2Vec2FeatureExtractor(
        feature_size=1,
        sampling_rate=recogniser.sampling_rate,
        padding_value=0.0,
        do_normalize=recogniser.normalizes,
        return_attention_mask=networks.uses_attention_mask(recogniser.model),
    )
    Wav2Vec2Processor(feature_extractor=extractor, tokenizer=tokenizer).save_pretrained(folder)
    extractor.save_pretrained(folder)  # transformers before version 5 reads no other file of its settings.


def _stock_transformers(recogniser: Recogniser, folder: Path) -> Compute:
    from transformers import AutoModelForCTC, Wav2Vec2Processor

    model = AutoModelForCTC.from_pretrained(folder).eval()
    processor = Wav2Vec2Processor.from_pretrained(folder)

    def compute(wave_L: Samples) -> Floats:
        inputs = processor(wave_L, sampling_rate=recogniser.sampling_rate, return_tensors="pt")
        with torch.no_grad():
            logits_FV: Floats = model(**inputs).logits[0].numpy()
        decoded = " ".join(processor.decode(logits_FV.argmax(axis=1)).lower().split())
        if decoded != greedy_text(logits_FV, recogniser.vocabulary):
            raise RuntimeError(f"transformers' tokenizer writes {decoded!r}, expected its own symbols")
        return logits_FV

    return compute


# ------------------------------------------------------------------------------------------- ONNX and sherpa-onnx


class RecogniserGraph(nn.Module):
    """A recogniser from raw samples to logits, normalisation included."""

    def __init__(self, recogniser: Recogniser) -> None:
        super().__init__()
        self.model, self.normalizes = cpu_copy(recogniser.model).eval(), recogniser.normalizes
        embedding = self.model.wav2vec2.encoder.pos_conv_embed
        embedding.made = embedding.conv.weight.detach()  # The graph has the weight, not its norms and directions.

    def forward(self, wave_NL: Tensor) -> Tensor:
        """Returns logits (N, F, V) of waves in [-1, 1] of equal length."""
        if self.normalizes:
            centred_NL = wave_NL - wave_NL.mean(dim=1, keepdim=True)
            variance_N1 = centred_NL.square().mean(dim=1, keepdim=True)
            wave_NL = centred_NL / (variance_N1 + networks.NORMALIZING_EPSILON).sqrt()
        return networks.logits(self.model, wave_NL, None)


def write_recogniser_graph(recogniser: Recogniser, path: Path) -> None:
    """Writes the graph with input `x` (N, samples) and output `logits` (N, frames, symbols), and its metadata."""
    onnx = import_package("onnx")
    write_onnx(
        RecogniserGraph(recogniser),
        (torch.zeros(1, recogniser.sampling_rate),),
        path,
        input_names=["x"],
        output_names=["logits"],
        dynamic_axes={"x": {0: "N", 1: "samples"}, "logits": {0: "N", 1: "frames"}},
        opset_version=OPSET,
    )
    graph = onnx.load(path)
    metadata = {
        "model_type": "wav2vec2-ctc",
        "sample_rate": recogniser.sampling_rate,
        "frame_samples": STRIDE,
        "vocab_size": len(recogniser.vocabulary.symbols),
        "language": recogniser.vocabulary.language,
    }
    onnx.helper.set_model_props(graph, {name: str(value) for name, value in metadata.items()})
    for beside in set(path.parent.iterdir()) - {path}:
        beside.unlink()  # The exporter writes each weight of a large graph to a file of its own.
    if sum(4 * weight.numel() for weight in recogniser.model.parameters()) > LARGEST_PROTOBUF:
        onnx.save_model(graph, path, save_as_external_data=True, location=f"{path.stem}.weights")
    else:
        onnx.save_model(graph, path)
    onnx.checker.check_model(str(path))


def write_tokens(vocabulary: Vocabulary, path: Path) -> None:
    """Writes the table of sherpa-onnx: a symbol and its id a line. Raises UserError if a symbol cannot be written."""
    names = list(vocabulary.symbols)
    names[vocabulary.blank] = BLANK
    if vocabulary.delimiter != ABSENT:
        names[vocabulary.delimiter] = SPACE
    for name in names:
        if not name or name.split() != [name]:
            raise UserError(f"the symbol {name!r} is white space, which tokens.txt cannot hold")
    path.write_text("".join(f"{name} {number}\n" for number, name in enumerate(names)), encoding="utf-8")


def _stock_onnxruntime(path: Path) -> Compute:
    session = import_package("onnxruntime").InferenceSession(str(path), providers=["CPUExecutionProvider"])

    def compute(wave_L: Samples) -> Floats:
        (logits_NFV,) = session.run(["logits"], {"x": wave_L[None]})
        found: Floats = logits_NFV[0]
        return found

    return compute


def export_onnx(
    recogniser: Recogniser,
    folder: Path,
    name: str = "recogniser",
    *,
    data_path: Path | None = None,
    progress: Progress = no_progress,
) -> Exported:
    """Writes NAME.onnx, whose input is raw samples of any length, and tokens.txt. Raises UserError for a wrong name or
    if the folder cannot be written, RuntimeError if ONNX Runtime computes something else."""
    name = name.removesuffix(".onnx")
    check_file_name(name, example="recogniser")
    sounds = comparison_sounds(recogniser, data_path)
    steps = StepProgress(progress, 1 + len(sounds))
    with written_aside(folder) as aside:
        graph = aside / f"{name}.onnx"
        write_recogniser_graph(recogniser, graph)
        write_tokens(recogniser.vocabulary, aside / "tokens.txt")
        steps.next()
        difference = largest_difference(recogniser, sounds, _stock_onnxruntime(graph), "ONNX Runtime", steps)
        files = [folder / path.name for path in sorted(aside.iterdir())]
    notes = [
        load_line(folder / graph.name, "x"),
        f"Input x: samples at {recogniser.sampling_rate} Hz in [-1, 1], float32 (N, samples), waves of equal length",
        f"Output logits: float32 (N, frames, {len(recogniser.vocabulary.symbols)}), a frame every {STRIDE} samples; "
        f"id {recogniser.vocabulary.blank} is the blank, {SPACE} in tokens.txt the space",
    ]
    return exported(files, recogniser.source, "log-probability", difference, notes)


def export_sherpa(
    recogniser: Recogniser, folder: Path, *, data_path: Path | None = None, progress: Progress = no_progress
) -> Exported:
    """Writes model.onnx, model.int8.onnx and tokens.txt for sherpa-onnx's loader of CTC models that read raw samples.

    Raises UserError if this recogniser does not suit it, a package is missing or the folder cannot be written,
    RuntimeError if sherpa-onnx transcribes otherwise.
    """
    sherpa_onnx = import_package("sherpa_onnx")
    if not recogniser.normalizes and networks.uses_attention_mask(recogniser.model):
        raise UserError(
            f"{recogniser.source} reads samples as they are, and sherpa-onnx normalises them",
            hint="use --format onnx, or train with a model whose feature extractor has do_normalize",
        )
    sounds = comparison_sounds(recogniser, data_path)
    steps = StepProgress(progress, 3 + 3 * len(sounds))
    texts = [greedy_text(recogniser.log_probs([sound])[0].numpy(), recogniser.vocabulary) for sound in sounds]
    steps.next()
    with written_aside(folder) as aside:
        write_recogniser_graph(recogniser, aside / "model.onnx")
        write_tokens(recogniser.vocabulary, aside / "tokens.txt")
        steps.next()
        graph = _stock_onnxruntime(aside / "model.onnx")
        difference = largest_difference(recogniser, sounds, graph, "ONNX Runtime", steps)
        quantize(aside / "model.onnx", aside / "model.int8.onnx")
        steps.next()
        heard: dict[str, list[str]] = {}
        for name in ("model.onnx", "model.int8.onnx"):
            stock = sherpa_onnx.OfflineRecognizer.from_omnilingual_asr_ctc(str(aside / name), str(aside / "tokens.txt"))
            heard[name] = []
            for sound in sounds:
                heard[name].append(_transcribed_by(stock, sound, recogniser))
                steps.next()
        changed, changed_int8 = (changed_share(texts, heard[name]) for name in ("model.onnx", "model.int8.onnx"))
        if changed > MOST_CHANGED:
            pair = next((read, text) for read, text in zip(heard["model.onnx"], texts, strict=True) if read != text)
            raise RuntimeError(f"sherpa-onnx writes {pair[0]!r}, expected {pair[1]!r}")
        files = [folder / path.name for path in sorted(aside.iterdir())]
    best, why = recommended(changed_int8 if any(texts) else None, data_path)
    tokens = folder / "tokens.txt"
    notes = [f'Use it: sherpa_onnx.OfflineRecognizer.from_omnilingual_asr_ctc("{folder / best}", "{tokens}")', why]
    made = exported(files, recogniser.source, "log-probability", difference, notes)
    if any(texts):
        made.figures["compared transcripts"] = f"{len(texts)}, of {sum(map(len, texts))} characters"
        made.figures["characters that differ"] = f"{100 * changed:.3g} %, with int8 {100 * changed_int8:.3g} %"
    else:
        made.figures["compared transcripts"] = "none, since the recogniser writes nothing for these sounds"
        log.warning(
            "no transcript could be compared, and nothing tells what int8 changes: the recogniser writes nothing for "
            "%s; name other speech with --data-path",
            data_path or "synthetic speech",
        )
    return made


def recommended(changed: float | None, data_path: Path | None) -> tuple[str, str]:
    """Returns the name of the graph to use, and why: int8, unless it changes more than MOST_CHANGED of the characters,
    or it is unknown (None) how many."""
    share, most = f"{100 * (changed or 0):.3g} % of its characters differ", f"{100 * MOST_CHANGED:g} %"
    if changed is not None and changed <= MOST_CHANGED:
        return "model.int8.onnx", f"model.int8.onnx is the smaller one, and {share}, at most {most}"
    why = "nothing tells what it changes" if changed is None else f"{share}, more than {most}"
    other = "" if data_path else "; --data-path FOLDER compares your speech"
    return "model.onnx", f"Not model.int8.onnx: {why}{other}"


def changed_share(texts: Sequence[str], others: Sequence[str]) -> float:
    """Returns the edits that lead from texts to others, divided by the characters of the texts."""
    edits = sum((character_edits(*pair) for pair in zip(texts, others, strict=True)), Edits())
    return edits.edits / max(1, edits.length)


def quantize(path: Path, target: Path) -> None:
    """Writes a graph whose matrix products have 8-bit weights, which takes a quarter of the memory."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    large = (path.parent / f"{path.stem}.weights").is_file()
    logging.disable(logging.WARNING)  # onnxruntime writes advice to the root logger.
    try:
        quantize_dynamic(
            path,
            target,
            op_types_to_quantize=["MatMul"],
            weight_type=QuantType.QUInt8,
            use_external_data_format=large,
        )
    finally:
        logging.disable(logging.NOTSET)


def _transcribed_by(stock: Any, wave_L: Samples, recogniser: Recogniser) -> str:
    stream = stock.create_stream()
    stream.accept_waveform(recogniser.sampling_rate, wave_L)
    stock.decode_stream(stream)
    text = " ".join(stream.result.text.split())
    return text.lower() if recogniser.vocabulary.upper else text
