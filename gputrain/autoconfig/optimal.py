"""Settings for training any torch model on any data: `create_optimal_config`.

    config, manager = create_optimal_config(dataset=train, model=model, target_batch_size=32)
    clips = manager.prepare(train, config)  # For sounds: longer clips are cut or left out.
    trainer = Trainer(model, TrainingArguments("run", **config.training_arguments(by_length=True)), train_dataset=clips)
    trainer.add_callback(manager.callback())
    manager.train_with_recovery(trainer, config=config)

GB is 1e9 bytes.
"""

import functools
import logging
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from torch import nn

from gputrain.autoconfig import settings
from gputrain.autoconfig.clips import LengthSampler, PreparedClips, batched_by_length
from gputrain.autoconfig.dataset import DatasetProfile, profile_dataset
from gputrain.autoconfig.inputs import (
    BatchGuess,
    MakeBatch,
    batch_guesses,
    output_loss,
)
from gputrain.autoconfig.lengths import LengthLimit, OverLong, is_over, limit_length
from gputrain.autoconfig.memory_models import MemoryModels
from gputrain.autoconfig.recovery import MicroBatchLimit, Reduction, memory_callback, recovering, watched_first
from gputrain.autoconfig.settings import OptimalConfig, TrainerOptimizer
from gputrain.errors import UserError
from gputrain.hw.gpus import find_gpu, smallest_gpu
from gputrain.hw.plan import Hardware, decide, workers
from gputrain.hw.probe import Machine, probe
from gputrain.hw.ranks import Ranks, weakest_of
from gputrain.planner.memory.fit import Fit, MemoryBudget, fit
from gputrain.planner.memory.torch_model import Loss, Precision, batch_statistics, can_checkpoint
from gputrain.planner.model_planner import memory_budget, published_rates, unknown_gpu

log = logging.getLogger(__name__)

MOST_HOURS_CUT = 0.5  # Largest share of the hours that is cut or left out unless the user asks for it.
SHORTEST_SECONDS = 1.0  # Shortest length that clips are cut to unless the user asks for less.
WORKER_GB = 0.3  # Memory of a process that has imported torch, without its batches.
PREFETCH = 2  # Micro-batches that each worker prefetches, the default of a DataLoader.


def create_optimal_config(
    dataset: Any,
    model: nn.Module,
    target_batch_size: int = 32,
    safety_margin: float = 0.85,
    gpu: str | None = None,
    *,
    loss: Loss | None = None,
    batch: MakeBatch | None = None,
    vram_gb: float = 0.0,
    optimizer: TrainerOptimizer = "adamw",
    max_duration_seconds: float = 0.0,
    over_long: OverLong | Literal["auto"] = "auto",
    gpus: int = 0,
) -> tuple[OptimalConfig, "Planner"]:
    """Chooses the micro-batch for a batch of `target_batch_size` items, and all settings that depend on it.

    `dataset`: anything that `profile_dataset` reads; `model`: any module, on any device. `safety_margin`: the share of
    the memory that the training may take, 0.05 to 0.98. `gpu`: a GPU by name, such as "l4", which need not be in this
    machine; None: the GPU of this machine, or its CPU and RAM. `vram_gb`: plan for this much memory instead.

    `loss(model, batch)` returns the scalar to train on, and `batch(items, seconds)` a batch; by default both are
    guessed from the model and the data. `max_duration_seconds`: the length of the longest clip; 0: chosen by the data
    and the device. `over_long`: longer clips are cut into pieces ("chunk") or left out ("refuse"); auto: cut unless
    they have labels, which belong to the whole. `gpus`: the number of GPUs that train together; 0: as torchrun says,
    else 1. All have the settings of the weakest of this machine; of GPUs in several machines, name the weakest.

    Raises UserError if a value is out of range, if the GPU is unknown, if the data or the model cannot be read, if
    weights have a precision that cannot be trained, if clips with labels are to be cut, and if a single item does not
    fit; then it says by how much, and what would help.
    """
    if isinstance(target_batch_size, bool) or not isinstance(target_batch_size, int) or target_batch_size < 1:
        raise UserError(f"a target batch size of {target_batch_size}", hint="choose a whole number from 1 on")
    if not 0.05 <= safety_margin <= 0.98:
        raise UserError(f"a safety margin of {safety_margin}", hint="choose 0.05 to 0.98; 0.85 suits most cards")
    if not 0 <= max_duration_seconds < math.inf:
        raise UserError(
            f"clips of at most {max_duration_seconds} s", hint="choose a number of seconds, or leave it out"
        )
    if not 0 <= vram_gb < math.inf:
        raise UserError(f"a card of {vram_gb} GB", hint="choose the memory of a GPU in GB, or leave it out")
    for value, choices in ((over_long, ("auto", *get_args(OverLong))), (optimizer, settings.OPTIM)):
        if value not in choices:
            raise UserError(f"{value!r} is not a choice", hint=f"choose one of {', '.join(choices)}")
    gpus = count_gpus(gpus, target_batch_size)
    machine = machine_to_plan(gpu, vram_gb, gpus)
    profile = profile_dataset(dataset)
    precision = cast(Precision, decide(machine, Hardware()).precision.value)
    refuse_half_weights(model, precision)
    guesses = (
        [BatchGuess(batch, "as batch= makes them")] if batch else batch_guesses(model, profile, own_loss=bool(loss))
    )
    here = None if gpu or vram_gb else torch.device("cuda" if machine.gpu else "cpu")
    memory_models = MemoryModels(model, loss or output_loss, guesses, precision, optimizer, here)
    about = "the given one" if loss else "the model's own, or assumed as expensive as that of its outputs"
    planner = Planner(machine, profile, memory_models, about)
    return planner.plan(target_batch_size, safety_margin, max_duration_seconds, over_long), planner


def refuse_half_weights(model: nn.Module, precision: Precision) -> None:
    """Raises UserError if weights to train are in fp16, or in bf16 where the GPU has none: torch cannot unscale their
    gradients."""
    held = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    for dtype in held & {torch.float16, *([torch.bfloat16] if precision == "fp16" else [])}:
        raise UserError(
            f"{type(model).__name__} has weights to train in {dtype}, and mixed precision needs them in fp32",
            hint="call model.float() before: the settings choose the precision of its computations",
        )


def count_gpus(gpus: int, batch_size: int) -> int:
    """Returns the number of GPUs that train together, as asked for or as torchrun says (0). Raises UserError if the
    batch cannot be divided."""
    count = gpus or Ranks.launched(os.environ).count
    if batch_size % count:
        raise UserError(
            f"a target batch size of {batch_size} cannot be divided among {count} GPUs",
            hint=f"choose a multiple of {count}",
        )
    return count


def machine_to_plan(gpu: str | None, vram_gb: float, gpus: int) -> Machine:
    """Returns this machine with the weakest of its GPUs, or with the named one. Raises UserError if it is unknown."""
    here = replace(probe(), gpus=gpus)
    if gpu:
        machine = find_gpu(gpu).installed_in(here)
    elif vram_gb and not here.gpu:
        machine = unknown_gpu(vram_gb).installed_in(here)
    else:
        each = [replace(probe(index), gpus=gpus) for index in range(1, min(gpus, here.gpu_count))]
        machine = weakest_of([here, *each], here)
    if vram_gb:
        free_gb = min(machine.gpu_free_gb or vram_gb, vram_gb)
        machine = replace(machine, gpu_memory_gb=vram_gb, gpu_free_gb=free_gb)
    return machine


class Planner:
    """The facts that `create_optimal_config` found, and methods to train with its settings."""

    def __init__(
        self,
        machine: Machine,
        profile: DatasetProfile,
        memory_models: MemoryModels,
        loss_used: str,
    ) -> None:
        self.machine, self.profile, self.memory_models, self.loss_used = machine, profile, memory_models, loss_used
        self.limit = MicroBatchLimit()
        self._can_checkpoint = can_checkpoint(memory_models.model)
        self._batch_layers = batch_statistics(memory_models.model)

    # ------------------------------------------------------------------------------------------ for the user

    def save_config(self, config: OptimalConfig, path: str | Path) -> None:
        """Writes it as JSON. Raises UserError."""
        settings.save_config(config, path)

    def load_config(self, path: str | Path) -> OptimalConfig:
        """Returns a saved configuration. Raises UserError if the file is missing, damaged or another."""
        return settings.load_config(path)

    def prepare(self, dataset: Any, config: OptimalConfig) -> PreparedClips:
        """Returns the clips of a dataset with `config.max_duration_seconds`: longer ones are cut or left out.

        Unless `config.streaming`, all items are decoded once and stay in memory; otherwise they are decoded when they
        are read. Raises UserError if an item has no sound, or labels and would have to be cut.
        """
        clips = PreparedClips(
            dataset,
            config.max_duration_seconds,
            config.over_long,
            keep_decoded=not config.streaming,
            length_column=config.length_column,
        )
        if clips.left_out:
            log.warning("%d clips over %.1f s are left out", clips.left_out, config.max_duration_seconds)
        return clips

    def sampler(self, clips: PreparedClips, config: OptimalConfig, seed: int = 0) -> LengthSampler:
        """Returns a batch sampler of whole batches of clips of similar lengths, of which
        `config.per_device_train_batch_size` fit into memory at once.

        Under torchrun each process gets its part of every batch. Raises UserError if a clip is longer than planned.
        """
        longest, planned = max(clips.seconds), config.max_duration_seconds
        if planned and is_over(longest, planned):
            raise UserError(
                f"a clip of {longest:.2f} s is longer than the planned {planned:.2f} s",
                hint="use the clips that manager.prepare returns",
            )
        least = self.memory_models.least_items
        return LengthSampler(clips.seconds, config.target_batch_size, seed, Ranks.launched(os.environ), least)

    def callback(self) -> Any:
        """Returns a `transformers.TrainerCallback` that watches the memory: it logs figures with those of the trainer,
        and warns at 90 %."""
        return memory_callback()

    def train_with_recovery(
        self,
        trainer: Any,
        *,
        config: OptimalConfig | None = None,
        loss_reduction: Reduction | None = None,
        **arguments: Any,
    ) -> Any:
        """Runs `trainer.train(**arguments)`, and continues with smaller parts if memory runs out.

        With `config`, the trainer's dataset must come from `prepare`, and its arguments from `training_arguments(
        by_length=True)`: batches then have clips of similar lengths.

        Under torchrun every process recovers by itself; gradients are averaged when all have computed their parts. The
        batch and its samples stay the same: a micro-batch that does not fit is split, and its parts are weighted so
        that the gradients are those of the whole. `loss_reduction` is the reduction of the loss over a batch: a mean
        over its "items" or "labels", or a "sum"; None: it is found by evaluating the loss, the first time it matters.
        Raises UserError if a single item does not fit, and if the loss cannot be computed in parts.
        """
        with watched_first(trainer), recovering(trainer, self.limit, loss_reduction, config):
            if config is None:
                return trainer.train(**arguments)
            with batched_by_length(trainer, self.sampler(trainer.train_dataset, config, trainer.args.seed)):
                return trainer.train(**arguments)

    # ----------------------------------------------------------------------------------------------- choices

    def plan(
        self, batch_size: int, share: float, most_seconds: float, wish: OverLong | Literal["auto"]
    ) -> OptimalConfig:
        """Returns all settings. Raises UserError if a single item does not fit, or clips with labels must be cut."""
        labels, gpus = self.profile.labels, self.machine.gpus
        over_long: OverLong = ("refuse" if labels else "chunk") if wish == "auto" else wish
        whole_batch_size, batch_size = batch_size, batch_size // gpus
        self.memory_models.least_items = self.limit.least = 2 if self._batch_layers and batch_size > 1 else 1
        eager = decide(self.machine, Hardware(use_torch_compile=False))
        budget = memory_budget(self.machine, eager, Hardware(), published_rates(self.machine.gpu, eager), share)
        limit, found = self._fit(batch_size, budget, most_seconds, over_long)
        if limit.clips_over and over_long == "chunk" and labels:
            clips = f"{limit.clips_over} clips are" if limit.clips_over > 1 else "1 clip is"
            raise UserError(
                f"{clips} longer than {limit.seconds:.1f} s and cannot be cut: {labels} belongs to the whole of a clip",
                hint='over_long="refuse" leaves them out; or cut them together with their labels before',
            )
        chosen = decide(self.machine, Hardware())
        processes = self._workers(found, limit)
        streaming, why_streaming = self._streaming()
        reasons = {
            "target_batch_size": self._why_batch(found.micro_batch_size, batch_size, gpus),
            "per_device_train_batch_size": _sentence(found, "micro_batch_size"),
            "gradient_accumulation_steps": _sentence(found, "accumulation_steps", costs=not self._depends_on_split),
            "fp16": chosen.precision.reason,
            "bf16": chosen.precision.reason + self._why_half(),
            "gradient_checkpointing": self._why_checkpointing(found),
            "dataloader_num_workers": processes.reason,
            "max_duration_seconds": f"{limit.reason}; {self.profile.describe()}",
            "over_long": limit.reason if limit.clips_over else "none of the examined clips is longer",
            "streaming": why_streaming,
            "predicted_peak_gb": self._why_peak(found.predicted_peak_gb, share, budget.budget_gb),
        }
        return OptimalConfig(
            target_batch_size=whole_batch_size,
            per_device_train_batch_size=found.micro_batch_size,
            gradient_accumulation_steps=found.accumulation_steps,
            fp16=self.memory_models.precision == "fp16",
            bf16=self.memory_models.precision == "bf16",
            gradient_checkpointing=found.checkpointing,
            dataloader_num_workers=int(processes.value),
            max_duration_seconds=limit.seconds,
            over_long=over_long,
            streaming=streaming,
            predicted_peak_gb=found.predicted_peak_gb,
            budget_gb=found.budget_gb,
            device=self.machine.gpu or str(chosen.device.value),
            reasons=reasons,
            length_column=self.profile.length_column,
            optimizer=self.memory_models.optimizer,
            gpus=gpus,
            drop_last=self._drops_last(found.micro_batch_size * gpus, gpus),
        )

    def _fit(
        self, batch_size: int, budget: MemoryBudget, most_seconds: float, over_long: OverLong
    ) -> tuple[LengthLimit, Fit]:
        """Returns the longest clip to train on, and the fit of the batch with it."""
        seconds = self.profile.seconds
        if not len(seconds):
            limit = LengthLimit(0.0, 0, 0.0, "the items are not clips")
        else:
            limit = limit_length(seconds, over_long, asked_seconds=most_seconds)
        found = self._fit_length(batch_size, budget, limit.seconds)
        if found.fits:
            return limit, found
        fitting = self._fitting_seconds(budget, limit.seconds)
        if not most_seconds and fitting >= SHORTEST_SECONDS:
            shorter = limit_length(seconds, over_long, fitting_seconds=fitting)
            if shorter.hours_share <= MOST_HOURS_CUT:
                found = self._fit_length(batch_size, budget, shorter.seconds)
                if found.fits:
                    return shorter, found
        raise self._does_not_fit(budget, limit.seconds, fitting, found.micro_batch_size)

    def _fit_length(self, batch_size: int, budget: MemoryBudget, seconds: float) -> Fit:
        """Returns the fit with clips of this length, made again until the chosen micro-batch is itself predicted."""
        memory_model = functools.partial(self.memory_models.memory_model, seconds)
        repeats = None if self._can_checkpoint else False
        while True:
            memory_model(False)  # Its steps show whether the loss compares items.
            found = fit(
                batch_size,
                memory_model,
                budget,
                checkpointing=repeats,
                smallest=self.memory_models.least_items,
                prefers_large=self._depends_on_split,
            )
            if not found.fits or found.micro_batch_size <= self.memory_models.most_items(seconds, found.checkpointing):
                return found
            self.memory_models.step(found.micro_batch_size, seconds, found.checkpointing)

    def _fitting_seconds(self, budget: MemoryBudget, longest: float) -> float:
        """Returns the seconds of a clip that fits alone, with checkpointing if possible; 0: only shorter ones fit."""
        seconds = longest
        while seconds >= SHORTEST_SECONDS:
            memory_model = self.memory_models.memory_model(seconds, self._can_checkpoint)
            fixed_gb, most_gb = memory_model.peak_gb(0), budget.budget_gb / budget.margin
            clip_gb = memory_model.peak_gb(self.memory_models.least_items) - fixed_gb
            if clip_gb <= most_gb - fixed_gb:
                return seconds
            # Memory that does not shrink with the clip makes this too long, and the next round shortens it.
            seconds *= 0.98 * max(0.0, most_gb - fixed_gb) / clip_gb
        return 0.0

    def _does_not_fit(self, budget: MemoryBudget, seconds: float, fitting: float, smallest: int) -> UserError:
        """Returns the error for a step of the smallest micro-batch that does not fit; its hint names what helps, the
        easiest first."""
        found, machine, repeats = self.memory_models, self.machine, self._can_checkpoint
        memory_model = found.memory_model(seconds, repeats)
        need_gb, fixed_gb = budget.margin * memory_model.peak_gb(smallest), budget.margin * memory_model.peak_gb(0)
        remedies = []
        if smallest > found.least_items:
            remedies.append(
                f"choose a target_batch_size that is a multiple of {found.least_items}: a micro-batch of "
                f"{found.least_items} items, the least for BatchNorm, has to divide it"
            )
        if fitting >= SHORTEST_SECONDS:
            remedies.append(f"clips of at most {fitting:.1f} s fit (max_duration_seconds)")
        if fixed_gb > budget.budget_gb:
            remedies.append(
                f"weights, gradients and optimizer state alone take {fixed_gb:.3g} GB: train a smaller model"
            )
        memory_gb = machine.gpu_memory_gb or machine.ram_gb
        if card := smallest_gpu(need_gb / budget.budget_gb * memory_gb):
            remedies.append(f"the smallest known GPU that it fits is {card.name}, {card.memory_gb:g} GB ({card.key})")
        length, how = f" of {seconds:.1f} s" if seconds else "", " with gradient checkpointing" if repeats else ""
        items = "one item" if smallest == 1 else f"the smallest micro-batch, of {smallest} items"
        takes = f"{items}{length}{how} takes {need_gb:.3g} GB"
        return UserError(
            f"{type(found.model).__name__} does not fit {machine.gpu or 'this machine'}: {takes}"
            f", which is {need_gb - budget.budget_gb:.3g} GB more than the available {budget.budget_gb:.3g} GB",
            hint="; or ".join(remedies) or "it fits no known GPU: train a smaller model",
        )

    def _workers(self, found: Fit, limit: LengthLimit) -> Any:
        typical = float(self.profile.seconds.mean()) / limit.seconds if limit.seconds else 1.0
        items, seconds = found.micro_batch_size * found.accumulation_steps, found.predicted_seconds_per_step
        rate = items / (seconds * typical) if seconds else 0.0
        batches_gb = PREFETCH * found.micro_batch_size * self.profile.item_bytes / 1e9
        return workers(
            self.machine,
            item_seconds=self.profile.decode_seconds,
            items_per_second=rate,
            each_gb=WORKER_GB + batches_gb,
            batches_gb=batches_gb,
        )

    def _streaming(self) -> tuple[bool, str]:
        decoded_gb, half_gb = self.profile.decoded_gb, self.machine.ram_free_gb / 2
        if not half_gb:
            return False, "the free RAM is not known"
        reason = f"the decoded data take about {decoded_gb:.3g} GB, and half of the free RAM is {half_gb:.1f} GB"
        return decoded_gb > half_gb, reason

    @property
    def _depends_on_split(self) -> bool:
        return bool(self._batch_layers) or self.memory_models.compares_items

    def _drops_last(self, items: int, gpus: int) -> bool:
        """Returns whether the last micro-batch of an epoch would have too few items for BatchNorm, where the others
        have so many on all GPUs."""
        rest = self.profile.items % items
        return items < self.profile.items and 0 < rest < self.memory_models.least_items * gpus

    def _why_batch(self, micro_batch_size: int, batch_size: int, gpus: int) -> str:
        """Returns whether the result is that of the whole batch at once, and warns if it is not."""
        on_each = f", {batch_size} on each of {gpus} GPUs" if gpus > 1 else ""
        whole = batch_size * gpus
        if not self._depends_on_split or micro_batch_size == whole:
            return f"it is kept exactly{on_each}"
        causes = []
        for name in self._batch_layers[:1]:
            layer = type(self.memory_models.model.get_submodule(name)).__name__
            causes.append(f"{layer} ({name or 'the model'}) uses the statistics of a batch")
        if self.memory_models.compares_items:
            causes.append("the loss compares the items of a batch with each other")
        said = (
            f"{' and '.join(causes)}, which here is a micro-batch of {micro_batch_size} and not all {whole} items: "
            "another micro-batch size gives another result"
        )
        log.warning("%s", said)
        return f"its items are kept exactly{on_each}, but {said}"

    def _why_checkpointing(self, found: Fit) -> str:
        if not self._can_checkpoint:
            return f"{type(self.memory_models.model).__name__} has no gradient checkpointing that can be enabled"
        return _sentence(found, "gradient_checkpointing")

    def _why_half(self) -> str:
        parameters = self.memory_models.model.parameters()
        half = any(parameter.dtype is torch.bfloat16 and parameter.requires_grad for parameter in parameters)
        return "; weights in bf16 round small updates away, which model.float() before keeps" if half else ""

    def _why_peak(self, peak_gb: float, share: float, budget: float) -> str:
        how = "predicted on fake tensors"
        if self.memory_models.unpredictable:
            how = f"measured in a copy ({self.memory_models.unpredictable})"
        device = self.machine.gpu or "this machine"
        return (
            f"{how}, of {budget:.3g} GB, at most {share:.0%} of {device}; batches are "
            f"{self.memory_models.guesses[0].description}; the loss is {self.loss_used}"
        )


def _sentence(found: Fit, name: str, *, costs: bool = True) -> str:
    setting = found.settings[name]
    return f"{setting.reason}; it costs {setting.cost}" if setting.cost and costs else setting.reason
