"""Compares the CPU time of a step of train-asr with that of transformers' Trainer, on the same clips in one run.

usage: python benchmarks/asr_step_vs_transformers.py --data STORE [--clips 192] [--rounds 6] [--smoke]

Weights, clips and settings are those of asr_vs_transformers.py. In each round every side makes the same number of steps
on the same clips, and each step of a side has as many clips as the others'; the sides take turns, in another order in
each round:

- `ours`: the recipe of train-asr with its buckets;
- `trainer, same batches`: transformers.Trainer on batches of the same clips as ours, so that the padding is equal, too;
- `trainer, own batches`: the Trainer with its default, random order.

A round gives the CPU seconds of all threads for each step, reading and collating the clips included, and the ratio of
ours to the other sides; the result is the median over rounds, with the smallest and the largest ratio. Further sides of
ours show what an EMA of the weights and gradient clipping cost. Writes
benchmarks/results/asr_step_vs_transformers_cpu.json. `--smoke` makes a few steps of a tiny model, to test the script.
"""

import argparse
import copy
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from asr_vs_transformers import RATE, Clips, Ours, collated, setting_of, untrained
from torch.utils.data import DataLoader

from gputrain import __version__
from gputrain.engine.data import Sample
from gputrain.engine.step import update

Batches = Sequence[Sequence[int]]  # Indices of clips, batch by batch.


class FixedTrainer(transformers.Trainer):  # type: ignore[misc]
    """Trainer whose batches are given."""

    batches: Batches = ()

    def get_train_dataloader(self) -> Any:
        loader: DataLoader[Any] = DataLoader(
            self.train_dataset, batch_sampler=self.batches, collate_fn=self.data_collator
        )
        return self.accelerator.prepare(loader)


class StepPeer:
    """transformers' Trainer on a copy of the weights, which makes one step on each of the batches."""

    def __init__(self, model: Any, clips: Clips) -> None:
        self.model, self.clips = model, clips
        self.padding: list[tuple[int, int]] = []

    def seconds(self, batches: Batches, number: int) -> float:
        """Returns the CPU seconds of the steps, from the first batch to the end of the last step."""
        times: dict[str, float] = {}

        class Clock(transformers.TrainerCallback):
            def on_train_begin(self, *arguments: Any, **named: Any) -> None:
                times["begin"] = time.process_time()

            def on_train_end(self, *arguments: Any, **named: Any) -> None:
                times["end"] = time.process_time()

        def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
            made = collated(rows)
            self.padding.append((int(made["attention_mask"].sum()), made["attention_mask"].numel()))
            return made

        with tempfile.TemporaryDirectory() as folder:
            arguments = transformers.TrainingArguments(
                folder, num_train_epochs=1, learning_rate=RATE, max_grad_norm=1.0, optim="adamw_torch_fused",
                lr_scheduler_type="constant", save_strategy="no", logging_strategy="no", report_to=[],
                disable_tqdm=True, use_cpu=True, seed=number, dataloader_num_workers=0, remove_unused_columns=False,
            )  # fmt: skip
            trainer = FixedTrainer(
                self.model, arguments, train_dataset=self.clips, data_collator=collate, callbacks=[Clock()]
            )
            trainer.batches = batches
            trainer.train()
        return times["end"] - times["begin"]


def our_seconds(ours: Ours, numbers: Sequence[int]) -> float:
    """Returns the CPU seconds of a step on each of these buckets, from reading the first clip on."""
    begin = time.process_time()
    for number in numbers:
        loaded = ours.buckets[Sample(0, number)]
        batch = ours.recipe.prepare([loaded], ours.step)
        update(ours.state, batch, ours.step, RATE)
        ours.recipe.average(ours.step)
        ours.step += 1
        ours.padding.append((int(loaded.samples_B.sum()), batch.sound_BX.numel()))
    return time.process_time() - begin


def shuffled(batches: Batches, seed: int) -> Batches:
    """Returns batches of the same sizes with the same clips in a random order."""
    members = np.random.default_rng(seed).permutation(np.concatenate(batches)).tolist()
    ends = np.cumsum([len(batch) for batch in batches]).tolist()
    return [members[begin:end] for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


def measured(sides: dict[str, Callable[[Sequence[int], int], float]], buckets: int, rounds: int) -> dict[str, Any]:
    """Returns the CPU seconds of a step for each side and round; a round has every second bucket."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):  # The first round allocates memory and is not counted.
        numbers = list(range(number % 2, buckets, 2))
        order = list(sides)
        for name in order[number % len(order) :] + order[: number % len(order)]:
            each = sides[name](numbers, number) / len(numbers)
            if number:
                seconds[name].append(each)
                print(f"round {number}: {name}: {each:.3f} CPU s a step", flush=True)
    return seconds


def ratios(ours: list[float], other: list[float]) -> dict[str, float]:
    found = [one / two for one, two in zip(ours, other, strict=True)]
    return {"median": statistics.median(found), "smallest": min(found), "largest": max(found)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--clips", type=int, default=192)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--output-dir", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--smoke", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    setting = setting_of(given.data, given.clips, given.batch_size, small=given.smoke)
    model = untrained(setting)
    weights, clips = copy.deepcopy(model.state_dict()), Clips(setting.speech)
    ours, plain = (Ours(setting, weights) for _ in range(2))
    plain.state.gradient_clip = 0.0
    averaged = Ours(setting.with_ema(), weights)
    same, own = (StepPeer(copy.deepcopy(model), clips) for _ in range(2))
    batches = [ours.buckets.members(Sample(0, number)).tolist() for number in range(len(ours.buckets))]
    sides: dict[str, Callable[[Sequence[int], int], float]] = {
        "ours": lambda numbers, _: our_seconds(ours, numbers),
        "trainer, same batches": lambda numbers, at: same.seconds([batches[one] for one in numbers], at),
        "trainer, own batches": lambda numbers, at: own.seconds(shuffled([batches[one] for one in numbers], at), at),
        "ours, gradients not clipped": lambda numbers, _: our_seconds(plain, numbers),
        "ours, with an EMA": lambda numbers, _: our_seconds(averaged, numbers),
    }
    found = measured(sides, len(batches), 1 if given.smoke else given.rounds)
    padding = {"ours": ours.padding, "trainer, same batches": same.padding, "trainer, own batches": own.padding}
    report = {
        "command": "python benchmarks/asr_step_vs_transformers.py --data STORE", "gputrain": __version__,
        "torch": torch.__version__, "transformers": transformers.__version__, "cpu": platform.processor(),
        "threads": 1, "clips": len(clips), "batches": len(batches), "clips_a_step": len(clips) / len(batches),
        "weights": sum(p.numel() for p in model.parameters()),
        "cpu_seconds_of_a_step": found,
        "medians": {name: statistics.median(values) for name, values in found.items()},
        "padding": {
            name: 1 - sum(real for real, _ in pairs) / sum(whole for _, whole in pairs)
            for name, pairs in padding.items()
        },
        "ours_to_trainer_at_equal_padding": ratios(found["ours"], found["trainer, same batches"]),
        "ours_to_trainer_with_its_padding": ratios(found["ours"], found["trainer, own batches"]),
        "ema": ratios(found["ours, with an EMA"], found["ours"]),
        "no_clipping": ratios(found["ours, gradients not clipped"], found["ours"]),
    }  # fmt: skip
    print(json.dumps({name: value for name, value in report.items() if name != "cpu_seconds_of_a_step"}, indent=1))
    if not given.smoke:
        given.output_dir.mkdir(parents=True, exist_ok=True)
        path = given.output_dir / "asr_step_vs_transformers_cpu.json"
        path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
