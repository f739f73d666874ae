"""Compares train-asr with transformers' Trainer on the same clips in one run: CPU time of an epoch, and padding.

usage: python benchmarks/asr_vs_transformers.py --data STORE [--clips 192] [--rounds 2] [--smoke]

STORE is a folder that `prepare-data --kind asr` has filled. All sides train equal weights of one architecture in fp32,
on one CPU thread, with a frozen feature encoder, SpecAugment, clipped gradients and fused AdamW, on the same clips,
each once in an epoch, at most `--batch-size` clips a step. The sides take turns within this process, round after round:

- `trainer`: transformers.Trainer with its default order, which is random, and a collator that pads to the longest clip;
- `trainer, grouped`: the same with batches of similar length, its option for that;
- `ours`: the recipe of train-asr with its buckets, from reading the clips to the optimizer's step.

A side's result is the median over rounds of the CPU seconds of an epoch, of all threads, data loading included. First,
one step is checked: the gradients of both sides on one batch without masks, by their relative difference in float64.
Writes benchmarks/results/asr_vs_transformers_cpu.json. `--smoke` trains a tiny model once, to test the script.
"""

import argparse
import copy
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers.trainer_pt_utils import LengthGroupedSampler

from gputrain import __version__
from gputrain.asr.architecture import preset_architecture
from gputrain.asr.config import TrainAsr
from gputrain.asr.data import fill_buckets
from gputrain.asr.load import predict
from gputrain.asr.recipe import RecogniserRecipe
from gputrain.config import assemble
from gputrain.engine.data import Sample
from gputrain.engine.recipe import phases_of
from gputrain.engine.state import TrainState
from gputrain.engine.step import gradients, update
from gputrain.hw.plan import Hardware, decide
from gputrain.hw.probe import probe
from gputrain.hw.runtime import apply
from gputrain.speech.buckets import Speech, open_speech
from gputrain.speech.config import encoder_frames

SMALL = {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 1024,
         "conv_dim": (128,) * 7, "num_conv_pos_embeddings": 128}  # fmt: skip
TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
        "conv_dim": (16,) * 7, "num_conv_pos_embeddings": 16}  # fmt: skip
RATE = 1e-4
LONGEST_SECONDS = 15.0


class Clips(torch.utils.data.Dataset):
    """The clips as transformers' example script holds them: arrays, with their lengths for grouping."""

    def __init__(self, speech: Speech) -> None:
        self.rows = []
        for clip in speech.parts.train:
            wave = speech.store.wave(clip).astype(np.float32) / 32768
            labels = speech.store.format.vocabulary.ids(clip.normalized)
            self.rows.append({"input_values": wave, "labels": labels, "input_length": len(wave)})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self.rows[number]


def collated(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Pads a batch as transformers' DataCollatorCTCWithPadding and Wav2Vec2FeatureExtractor do."""
    samples, labels = ([len(row[name]) for row in rows] for name in ("input_values", "labels"))
    wave_BL = torch.zeros(len(rows), max(samples))
    mask_BL = torch.zeros(len(rows), max(samples), dtype=torch.int64)
    labels_BS = torch.full((len(rows), max(labels)), -100)
    for row, one in enumerate(rows):
        wave = one["input_values"]
        wave_BL[row, : samples[row]] = torch.from_numpy((wave - wave.mean()) / np.sqrt(wave.var() + 1e-7))
        mask_BL[row, : samples[row]] = 1
        labels_BS[row, : labels[row]] = torch.tensor(one["labels"])
    return {"input_values": wave_BL, "attention_mask": mask_BL, "labels": labels_BS}


class GroupedTrainer(transformers.Trainer):  # type: ignore[misc]
    """Trainer as with its option of batches of similar length, which reads lengths from datasets' own classes only."""

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        lengths = [row["input_length"] for row in self.train_dataset.rows]
        return LengthGroupedSampler(self.args.per_device_train_batch_size, lengths=lengths)


class Peer:
    """transformers' Trainer on a copy of the weights."""

    def __init__(self, model: Any, clips: Clips, batch_size: int, *, grouped: bool) -> None:
        self.model, self.clips, self.batch_size, self.grouped = model, clips, batch_size, grouped
        self.padding: list[tuple[int, int]] = []

    def epoch(self, number: int) -> float:
        """Returns the CPU seconds of an epoch, from the first batch to the last step."""
        seconds: dict[str, float] = {}

        class Clock(transformers.TrainerCallback):
            def on_train_begin(self, *arguments: Any, **named: Any) -> None:
                seconds["begin"] = time.process_time()

            def on_train_end(self, *arguments: Any, **named: Any) -> None:
                seconds["end"] = time.process_time()

        def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
            made = collated(rows)
            self.padding.append((int(made["attention_mask"].sum()), made["attention_mask"].numel()))
            return made

        with tempfile.TemporaryDirectory() as folder:
            arguments = transformers.TrainingArguments(
                folder, per_device_train_batch_size=self.batch_size, num_train_epochs=1, learning_rate=RATE,
                max_grad_norm=1.0, optim="adamw_torch_fused", lr_scheduler_type="constant", save_strategy="no",
                logging_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, seed=number,
                dataloader_num_workers=0, remove_unused_columns=False,
            )  # fmt: skip
            trainer = (GroupedTrainer if self.grouped else transformers.Trainer)(
                self.model, arguments, train_dataset=self.clips, data_collator=collate, callbacks=[Clock()]
            )
            trainer.train()
        return seconds["end"] - seconds["begin"]


@dataclass(frozen=True)
class Setting:
    """What all sides train: the clips, the options of train-asr and the architecture."""

    settings: TrainAsr
    architecture: dict[str, Any]
    speech: Speech

    def with_ema(self) -> "Setting":
        schedule = replace(self.settings.schedule, ema_decay=0.999)
        return replace(self, settings=replace(self.settings, schedule=schedule))


def setting_of(data: Path, clips: int, batch_size: int, *, small: bool) -> Setting:
    """Returns randomly chosen clips of a store, and a model for them."""
    whole = open_speech(data, 0.05, kind="asr")
    short = [clip for clip in whole.parts.train if clip.samples <= LONGEST_SECONDS * 16000]
    chosen = sorted(np.random.default_rng(0).permutation(len(short))[:clips].tolist())
    speech = replace(whole, parts=replace(whole.parts, train=[short[number] for number in chosen]))
    settings = assemble(TrainAsr, {
        "data_path": str(data), "preset": "base", "batch_size": batch_size, "learning_rate": RATE,
        "freeze_feature_encoder": True, "ema_decay": 0.0,
    })  # fmt: skip
    symbols = len(speech.store.format.vocabulary.symbols)
    architecture = preset_architecture("base", num_symbols=symbols)
    return Setting(settings, {**architecture, **(TINY if small else SMALL)}, speech)


def untrained(setting: Setting) -> Any:
    """Returns the model with random weights, as the Trainer takes it: its loss is the mean over clips."""
    settings, speech = setting.settings, setting.speech
    torch.manual_seed(0)
    model = RecogniserRecipe(
        settings, setting.architecture, fill_buckets(settings, speech).largest_average,
        apply(decide(probe(), Hardware(device="cpu"))),
    ).model  # fmt: skip
    model.config.ctc_loss_reduction = "mean"
    model.requires_grad_(True)
    model.freeze_feature_encoder()
    return model


class Ours:
    """The recipe of train-asr on a copy of the weights."""

    def __init__(self, setting: Setting, weights: Any) -> None:
        settings, architecture, speech = setting.settings, setting.architecture, setting.speech
        self.buckets = fill_buckets(settings, speech)
        clip = self.buckets.largest_average
        runtime = apply(decide(probe(), Hardware(device="cpu")))
        self.recipe = RecogniserRecipe(settings, architecture, clip, runtime)
        self.recipe.model.load_state_dict(weights)
        self.state = TrainState.for_measurement(self.recipe, runtime)
        self.state.gradient_clip = 1.0
        self.state.micro_batch = {"recogniser": settings.schedule.batch_size * 4}
        self.padding: list[tuple[int, int]] = []
        self.step = 0

    def epoch(self, number: int) -> float:
        """Returns the CPU seconds of an epoch, from reading the first clip to the last step."""
        begin = time.process_time()
        for item in range(len(self.buckets)):
            loaded = self.buckets[Sample(number, item)]
            batch = self.recipe.prepare([loaded], self.step)
            update(self.state, batch, self.step, RATE)
            self.recipe.average(self.step)
            self.step += 1
            self.padding.append((int(loaded.samples_B.sum()), batch.sound_BX.numel()))
        return time.process_time() - begin


def difference_of_gradients(ours: Ours) -> float:
    """Returns the relative difference of a step's gradients, in float64, on a bucket without masks."""
    recipe, loaded = ours.recipe, ours.buckets[Sample(0, 0)]
    model = copy.deepcopy(recipe.model).double().train()
    for module in recipe.modules.values():
        module.double()
    batch = recipe.prepare([loaded], 0)
    object.__setattr__(batch, "mask_BT", None)
    gradients(ours.state, recipe.step_groups[0], batch, 1, 0)
    found = torch.cat([p.grad.flatten() for p in recipe.phase.parameters() if p.grad is not None])
    model.config.mask_time_prob, model.config.ctc_loss_reduction = 0.0, "sum"
    model.freeze_feature_encoder()
    inside = (torch.arange(batch.sound_BX.shape[1]) < loaded.samples_B[:, None]).long()
    width = int(loaded.symbols_B.max())
    labels = loaded.ids_BS.masked_fill(torch.arange(width) >= loaded.symbols_B[:, None], -100)
    log_softmax = torch.nn.functional.log_softmax  # Their loss computes it in fp32, whatever the logits are.
    with mock.patch.object(torch.nn.functional, "log_softmax", lambda x, dim, **named: log_softmax(x, dim=dim)):
        (model(batch.sound_BX, attention_mask=inside, labels=labels).loss / int(loaded.symbols_B.sum())).backward()
    theirs = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    for phase in phases_of(recipe):
        phase.optimizer.zero_grad(set_to_none=True)
    for module in recipe.modules.values():
        module.float()
    return float((found - theirs).norm() / theirs.norm())


def same_output(model: Any) -> float:
    """Returns the largest difference of log-probabilities of two clips, one padded, between both forward passes."""
    samples_B = torch.tensor([16000, 9000])
    wave_BL = torch.randn(2, 16000) * (torch.arange(16000) < samples_B[:, None])
    ours = predict(model, wave_BL, samples_B.tolist(), normalizes=False)
    mask = (torch.arange(16000) < samples_B[:, None]).long()
    with torch.no_grad():
        theirs = copy.deepcopy(model).eval()(wave_BL, attention_mask=mask).logits.log_softmax(-1)
    frames = encoder_frames(9000)
    return float(max((ours[0] - theirs[0]).abs().max(), (ours[1, :frames] - theirs[1, :frames]).abs().max()))


def padded_share(pairs: list[tuple[int, int]]) -> float:
    return 1 - sum(real for real, _ in pairs) / sum(whole for _, whole in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--clips", type=int, default=192)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--output-dir", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--smoke", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    setting = setting_of(given.data, given.clips, given.batch_size, small=given.smoke)
    model = untrained(setting)
    clips, ours = Clips(setting.speech), Ours(setting, copy.deepcopy(model.state_dict()))
    sides: dict[str, Any] = {
        "trainer": Peer(copy.deepcopy(model), clips, given.batch_size, grouped=False),
        "trainer, grouped": Peer(copy.deepcopy(model), clips, given.batch_size, grouped=True),
        "ours": ours,
    }
    checks = {"gradients": difference_of_gradients(ours), "log_probabilities": same_output(model)}
    print(checks)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(1 if given.smoke else given.rounds):
        for name, side in sides.items():
            run: Callable[[int], float] = side.epoch
            seconds[name].append(run(number))
            print(f"round {number}: {name}: {seconds[name][-1]:.1f} CPU s", flush=True)
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    report = {
        "command": "python benchmarks/asr_vs_transformers.py --data STORE", "gputrain": __version__,
        "torch": torch.__version__, "transformers": transformers.__version__, "cpu": platform.processor(),
        "threads": 1, "clips": len(clips),
        "seconds_of_audio": sum(len(row["input_values"]) for row in clips.rows) / 16000,
        "batch_size": given.batch_size, "weights": sum(p.numel() for p in model.parameters()), "checks": checks,
        "cpu_seconds_of_an_epoch": seconds, "medians": medians,
        "steps": {"trainer": -(-len(clips) // given.batch_size), "ours": len(ours.buckets)},
        "padding": {name: padded_share(side.padding) for name, side in sides.items()},
        "ours_to_trainer": medians["ours"] / medians["trainer"],
        "ours_to_grouped": medians["ours"] / medians["trainer, grouped"],
    }  # fmt: skip
    print(json.dumps({name: report[name] for name in ("medians", "padding", "ours_to_trainer", "ours_to_grouped")}))
    if not given.smoke:
        given.output_dir.mkdir(parents=True, exist_ok=True)
        path = given.output_dir / "asr_vs_transformers_cpu.json"
        path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
