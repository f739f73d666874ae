"""Measures forced alignment and the check of transcripts with a trained recogniser, on prompts whose texts are known.

Alignment: trimmed prompts are joined to long recordings with random pauses, so that the beginning and the end of each
are known. The text is aligned with the whole. A boundary is where a sentence ends and the next one begins: its error is
the time from the cut to the pause that was inserted, 0 within it; for prompts joined without pauses, it is the time
from the cut to the joint. Errors of the beginnings and ends of the sentences are given too.

Texts that are not said are added to recordings, and the sentences that the alignment leaves out are counted.

Check: texts of a share of the prompts are exchanged, and precision and recall of the list of mismatches are counted.

    python benchmarks/asr_alignment.py --model RUN --speech FOLDER --output benchmarks/results/asr_alignment.json
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

import numpy as np
import torch

from gputrain.asr.checking import CtcChecker, load_checker
from gputrain.audio.io import read_sound, resample, trim
from gputrain.audio.prepare import scan
from gputrain.speech.checker import mismatches
from gputrain.speech.cutting import quietest
from gputrain.speech.transcripts import read_transcripts

RATE = 16000
TRIM_DB = 40.0
LONGEST = 12.0  # seconds; longer prompts are left out, so that many fit into a recording

Prompt = tuple[str, np.ndarray]  # Its text and its samples at RATE.


def prompts_of(folder: Path, count: int, checker: CtcChecker) -> list[Prompt]:
    """Returns trimmed prompts whose texts have letters of the recogniser, in a mixed order."""
    utterances = read_transcripts(folder, scan(folder)[0]).utterances
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


def aligned(checker: CtcChecker, prompts: list[Prompt], seed: int, pauses: bool) -> dict[str, list[float]]:
    """Joins prompts to one recording and aligns it. Returns absolute errors in milliseconds, and losses."""
    draws, parts, known, at = random.Random(seed), [], [], 0
    for _, wave in prompts:
        pause = np.zeros(round(draws.uniform(0.1, 0.8) * RATE) if pauses else 0, np.float32)
        parts += [pause, wave]
        at += len(pause)
        known.append((at / RATE, (at + len(wave)) / RATE))
        at += len(wave)
    whole = np.concatenate(parts).astype(np.float32)
    found = checker.align(whole, RATE, [text for text, _ in prompts])
    errors: dict[str, list[float]] = {"boundary": [], "begin": [], "end": [], "loss": [], "not said": []}
    pairs = list(zip(found, known, strict=True))
    for times, (begin, end) in pairs:
        errors["not said"].append(float(times is None))
        if times is not None:
            errors["begin"].append(1000 * abs(times.begin - begin))
            errors["end"].append(1000 * abs(times.end - end))
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
    for name in ("boundary", "begin", "end"):
        figures[f"median_{name}_ms"] = statistics.median(errors[name])
        figures[f"p90_{name}_ms"] = float(np.percentile(errors[name], 90))
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


def measure_check(checker: CtcChecker, prompts: list[Prompt], share: float) -> dict[str, float]:
    """Exchanges the texts of a share of the prompts for texts of others."""
    texts = [text for text, _ in prompts]
    moved = random.Random(1).sample(range(len(prompts)), max(2, round(share * len(prompts))))
    for place, other in zip(moved, [*moved[1:], moved[0]], strict=True):
        texts[place] = prompts[other][0]
    wrong = {place for place in moved if texts[place] != prompts[place][0]}
    checks = [checker.check(wave, RATE, text) for text, (_, wave) in zip(texts, prompts, strict=True)]
    listed = set(mismatches(checks))
    right = [one for place, one in enumerate(checks) if place not in wrong]
    losses = [min(checks[place].loss, 1e6) for place in wrong]
    return {
        "clips": len(checks), "exchanged": len(wrong), "listed": len(listed),
        "precision": len(listed & wrong) / max(1, len(listed)), "recall": len(listed & wrong) / len(wrong),
        "median_loss_right": statistics.median(one.loss for one in right),
        "p99_loss_right": float(np.percentile([min(one.loss, 1e6) for one in right], 99)),
        "lowest_loss_exchanged": min(losses),
        "median_cer_right": statistics.median(one.cer for one in right),
        "mean_cer_right": statistics.fmean(one.cer for one in right),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Run of train-asr, or a folder of transformers.")
    parser.add_argument("--speech", type=Path, required=True, help="Folder of recordings with their texts.")
    parser.add_argument("--prompts", type=int, default=400)
    parser.add_argument("--joined", type=int, default=20, help="Prompts in a recording.")
    parser.add_argument("--share", type=float, default=0.05, help="Share of exchanged texts.")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    checker = load_checker(options.model)
    prompts = prompts_of(options.speech, options.prompts, checker)
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
        "check": measure_check(checker, prompts, options.share),
    }
    result["computing_seconds"] = time.perf_counter() - began
    print(json.dumps(result, indent=2))
    if options.output:
        options.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
