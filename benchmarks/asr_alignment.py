"""Measures forced alignment and the check of transcripts with a trained recogniser, on prompts whose texts are known.

Alignment: trimmed prompts are joined to long recordings with random pauses, so that the beginning and the end of each
are known. The text is aligned with the whole. A boundary is where a sentence ends and the next one begins: its error is
the time from the cut to the pause that was inserted, 0 within it; for prompts joined without pauses, it is the time
from the cut to the joint. Errors of the beginnings and ends of the sentences are given too.

Texts that are not said are added to recordings, and the sentences that the alignment leaves out are counted.

Check: texts of a share of the prompts are exchanged, in many random ways, and precision and recall of the list of
mismatches are counted over all of them. With `--store`, prompts are those that the training of the model held out, and
with `--part` half of them: limits were chosen on the one half (`choose`), and are measured on the other (`measure`).

    python benchmarks/asr_alignment.py --model RUN --speech FOLDER --output benchmarks/results/asr_alignment.json
    python benchmarks/asr_alignment.py --model RUN --store STORE --held-out-share 0.4 --part measure
"""

import argparse
import json
import math
import platform
import random
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gputrain.asr.checking import CtcChecker, load_checker
from gputrain.audio.io import from_int16, read_sound, resample, trim
from gputrain.audio.prepare import scan_recordings
from gputrain.speech.buckets import open_speech
from gputrain.speech.checker import TranscriptCheck, mismatches, other_texts, quietest, sentence_edges
from gputrain.speech.transcripts import read_transcripts

RATE = 16000
TRIM_DB = 40.0
NOISE_DB = 45.0
LONGEST = 12.0  # seconds; longer prompts are left out, so that many fit into a recording

Prompt = tuple[str, np.ndarray]  # Its text and its samples at RATE.


def prompts_of(folder: Path, count: int, checker: CtcChecker) -> list[Prompt]:
    """Returns trimmed prompts whose texts have letters of the recogniser, in a mixed order."""
    utterances = read_transcripts(folder, scan_recordings(folder).paths).utterances
    random.Random(0).shuffle(utterances)
    found = []
    for utterance in utterances:
        wave, rate_hz = read_sound(folder / utterance.path)
        wave = trim(resample(wave, rate_hz, RATE), TRIM_DB)
        if 0.5 <= len(wave) / RATE <= LONGEST and len(checker.labels(utterance.text)) > 3:
            found.append((utterance.text, wave))
        if len(found) == count:
            break
    return found


def held_out_prompts(store: Path, share: float, checker: CtcChecker) -> list[Prompt]:
    """Returns the trimmed prompts of a store that a training with this `--held-out-share` has not seen, in a mixed
    order."""
    speech = open_speech(store, share, kind="asr")
    clips = list(speech.parts.held_out)
    random.Random(0).shuffle(clips)
    found = [(clip.text, trim(from_int16(speech.store.wave(clip)), TRIM_DB)) for clip in clips]
    return [
        (text, wave) for text, wave in found
        if 0.5 <= len(wave) / RATE <= LONGEST and len(checker.labels(text)) > 3
    ]  # fmt: skip


def sounding(wave: np.ndarray) -> tuple[float, float]:
    """Returns the second at which a prompt without noise begins to sound, and at which it ends: its first and last 5 ms
    whose power is within TRIM_DB of the loudest. Trimming leaves up to 64 ms more, half of its window."""
    window = round(0.005 * RATE)
    count = len(wave) // window
    power = np.square(wave[: count * window].astype(np.float64)).reshape(count, window).mean(axis=1)
    loud = np.flatnonzero(power > power.max() * 10 ** (-TRIM_DB / 10))
    return float(loud[0]) * window / RATE, float(loud[-1] + 1) * window / RATE


def aligned(checker: CtcChecker, prompts: list[Prompt], seed: int, pauses: bool) -> dict[str, list[float]]:
    """Joins prompts to one recording and aligns it. Returns absolute errors in milliseconds, and losses."""
    draws, parts, known, sounds, at = random.Random(seed), [], [], [], 0
    for _, wave in prompts:
        pause = np.zeros(round(draws.uniform(0.1, 0.8) * RATE) if pauses else 0, np.float32)
        parts += [pause, wave]
        at += len(pause)
        known.append((at / RATE, (at + len(wave)) / RATE))
        sounds.append(tuple(at / RATE + second for second in sounding(wave)))
        at += len(wave)
    whole = np.concatenate(parts).astype(np.float32)
    # Pauses of recordings are not zero: noise 45 dB below the speech.
    level = float(np.sqrt(np.mean(np.square(whole)))) * 10 ** (-NOISE_DB / 20)
    whole += level * np.random.default_rng(seed).standard_normal(len(whole)).astype(np.float32)
    found = checker.align(whole, RATE, [text for text, _ in prompts])
    names = ("boundary", "begin", "end", "label begin", "label end", "loss", "not said")
    errors: dict[str, list[float]] = {name: [] for name in names}
    pairs = list(zip(found, known, strict=True))
    edges = iter(sentence_edges(whole, RATE, [times for times in found if times]))
    for times, (begin, end) in zip(found, sounds, strict=True):
        errors["not said"].append(float(times is None))
        if times is not None:
            heard = next(edges)
            errors["begin"].append(1000 * abs(heard[0] - begin))
            errors["end"].append(1000 * abs(heard[1] - end))
            errors["label begin"].append(1000 * abs(times.begin - begin))
            errors["label end"].append(1000 * abs(times.end - end))
            errors["loss"].append(times.loss)
    for (one, (_, end)), (other, (begin, _)) in pairwise(pairs):
        if one is not None and other is not None:
            cut = quietest(whole, RATE, one.end, other.begin)
            errors["boundary"].append(1000 * max(0.0, end - cut, cut - begin))
    return errors


def measure_alignment(checker: CtcChecker, prompts: list[Prompt], each: int, pauses: bool) -> dict[str, float]:
    errors: dict[str, list[float]] = {}
    for first in range(0, len(prompts) - each + 1, each):
        for name, values in aligned(checker, prompts[first : first + each], first, pauses).items():
            errors.setdefault(name, []).extend(values)
    figures: dict[str, float] = {"sentences": len(errors["not said"]), "not_found": sum(errors["not said"])}
    for name in ("boundary", "begin", "end", "label begin", "label end"):
        key = name.replace(" ", "_")
        figures[f"median_{key}_ms"] = statistics.median(errors[name])
        figures[f"p90_{key}_ms"] = float(np.percentile(errors[name], 90))
    figures["within_40_ms"] = sum(error <= 40 for error in errors["boundary"]) / len(errors["boundary"])
    figures["median_loss"], figures["largest_loss"] = statistics.median(errors["loss"]), max(errors["loss"])
    return figures


def measure_unsaid(checker: CtcChecker, prompts: list[Prompt], each: int) -> dict[str, int]:
    """Adds texts that are not said, three to each recording, and counts which sentences are left out."""
    counts = {"said": 0, "unsaid": 0, "said_left_out": 0, "unsaid_left_out": 0}
    for first in range(0, len(prompts) - each + 1, each):
        part, others = prompts[first : first + each], prompts[:first] + prompts[first + each :]
        wave = np.concatenate([np.pad(one, (0, round(0.3 * RATE))) for _, one in part]).astype(np.float32)
        texts = [(text, "said") for text, _ in part]
        for text, _ in random.Random(first).sample(others, 3):
            texts.insert(random.Random(text).randint(0, len(texts)), (text, "unsaid"))
        for (_, kind), times in zip(texts, checker.align(wave, RATE, [text for text, _ in texts]), strict=True):
            counts[kind] += 1
            counts[f"{kind}_left_out"] += times is None
    return counts


def measure_check(checker: CtcChecker, prompts: list[Prompt], share: float, draws: int) -> dict[str, Any]:
    """Exchanges the texts of a share of the prompts for texts of others, in several random ways."""
    log_probs = [checker.log_probs(wave, RATE) for _, wave in prompts]
    texts = [text for text, _ in prompts]
    known: dict[tuple[int, str, str], TranscriptCheck] = {}
    counts = {"listed": 0, "exchanged": 0, "right": 0}
    for seed in range(draws):
        given, wrong = exchanged(texts, share, seed)
        checks = []
        for place, (text, other) in enumerate(zip(given, other_texts(given), strict=True)):
            key = (place, text, other)
            if key not in known:
                known[key] = checker.check_log_probs(log_probs[place], text, other)
            checks.append(known[key])
        listed = set(mismatches(checks))
        counts["listed"] += len(listed)
        counts["exchanged"] += len(wrong)
        counts["right"] += len(listed & wrong)
    right = [one for (place, text, _), one in known.items() if text == texts[place]]
    precision, recall = counts["right"] / max(1, counts["listed"]), counts["right"] / counts["exchanged"]
    return {
        "clips": len(texts), "draws": draws, **counts, "precision": precision, "recall": recall,
        "mean_cer_right": statistics.fmean(one.cer for one in right),
        "median_loss_right": statistics.median(one.loss for one in right),
        "median_loss_of_other_texts": statistics.median(one.other_loss for one in right),
    }  # fmt: skip


def exchanged(texts: list[str], share: float, seed: int) -> tuple[list[str], set[int]]:
    """Returns texts of which a share are those of other prompts, and the places of these."""
    given = [*texts]
    moved = random.Random(seed).sample(range(len(texts)), max(2, round(share * len(texts))))
    for place, other in zip(moved, [*moved[1:], moved[0]], strict=True):
        given[place] = texts[other]
    return given, {place for place in moved if given[place] != texts[place]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Run of train-asr, or a folder of transformers.")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--speech", type=Path, help="Folder of recordings with their texts.")
    source.add_argument("--store", type=Path, help="Prepared speech, of which the held-out prompts are measured.")
    parser.add_argument("--held-out-share", type=float, default=0.4, help="As the training of the model had it.")
    parser.add_argument("--part", choices=("all", "choose", "measure"), default="all", help="Half of the prompts.")
    parser.add_argument("--draws", type=int, default=100, help="Random exchanges of texts.")
    parser.add_argument("--prompts", type=int, default=400)
    parser.add_argument("--joined", type=int, default=20, help="Prompts in a recording.")
    parser.add_argument("--share", type=float, default=0.05, help="Share of exchanged texts.")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    checker = load_checker(options.model)
    if options.speech:
        prompts = prompts_of(options.speech, options.prompts, checker)
    else:
        prompts = held_out_prompts(options.store, options.held_out_share, checker)
    if options.part != "all":  # They are in a random order.
        middle = len(prompts) // 2
        prompts = prompts[:middle] if options.part == "choose" else prompts[middle:]
    began = time.perf_counter()
    result = {
        "model": str(options.model.name),
        "device": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "prompts": len(prompts),
        "seconds": math.fsum(len(wave) for _, wave in prompts) / RATE,
        "with_pauses": measure_alignment(checker, prompts, options.joined, pauses=True),
        "without_pauses": measure_alignment(checker, prompts, options.joined, pauses=False),
        "texts_that_are_not_said": measure_unsaid(checker, prompts, options.joined),
        "check": measure_check(checker, prompts, options.share, options.draws),
    }
    result["computing_seconds"] = time.perf_counter() - began
    print(json.dumps(result, indent=2))
    if options.output:
        options.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
