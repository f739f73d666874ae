"""Predicts the memory of a vocoder's step: with one discriminator after another, as in gputrain, and with the same
losses summed and back-propagated at once, as in other trainers. The configurations are the two files that come with
gputrain, in fp32 and fp16.

    python benchmarks/vocoder_memory.py [--json FILE]

No GPU is needed: the step runs on fake tensors with the plan of an RTX 5090 (its autocast rules and allocator).
GB = 1e9 bytes.
"""

import argparse
import functools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from gputrain.audio import losses
from gputrain.audio.weight_norm import cached_weights
from gputrain.cli.options import read_defaults
from gputrain.config import assemble
from gputrain.engine.recipe import StepGroup, Term, Yielded, at_least_fp32
from gputrain.hw.plan import Cards, Plan, decide
from gputrain.hw.runtime import Runtime
from gputrain.planner.kind_work import PlanTarget
from gputrain.planner.memory.predict import predict_step
from gputrain.planner.model_planner import target_machines
from gputrain.vocoder.config import TrainVocoder
from gputrain.vocoder.openvpi import PROFILES, translate
from gputrain.vocoder.recipe import VocoderBatch, VocoderRecipe, target

FILES = {"standard": "base_hifi_gpu.yaml", "optimised": "base_hifi_rtx5090_optimized.yaml"}


class AtOnce(VocoderRecipe):
    """The same losses as in other trainers: the sum of all losses of the generator on one graph, in a phase of its own,
    then the sum of all discriminators."""

    def __init__(self, settings: TrainVocoder, runtime: Runtime) -> None:
        super().__init__(settings, runtime)
        discriminators = functools.partial(cached_weights, self.discriminators)
        (group,) = self.step_groups
        generator, discriminator = group.phases
        self.step_groups = [
            replace(group, phases=(generator,), loss=self.generator_loss),
            StepGroup((discriminator,), self.discriminator_loss, discriminators),
        ]
        self.waves: Tensor

    def generator_loss(self, batch: VocoderBatch, step: int) -> Iterator[Yielded]:
        waves_W1T = self.generate(batch)
        self.waves = waves_W1T.detach()
        terms = self.reconstruction_terms(at_least_fp32(waves_W1T), batch)
        sums = [term.value * term.weight for term in terms]
        for discriminator in self.every_discriminator():
            with torch.no_grad():
                targets = discriminator(batch.real_B1T)[1]
            logits, features = discriminator(at_least_fp32(waves_W1T))
            matching = losses.FEATURE_WEIGHT * losses.feature_distance(features, targets)
            sums.append((losses.generator_loss(logits) + matching).sum() / batch.global_items)
        yield Term("sum", torch.stack(sums).sum())

    def discriminator_loss(self, batch: VocoderBatch, step: int) -> Iterator[Yielded]:
        values = [
            losses.real_pass(discriminator, batch.real_B1T)[0] + losses.fake_pass(discriminator, self.waves)
            for discriminator in self.every_discriminator()
        ]
        yield Term("sum", torch.stack(values).sum() / batch.global_items)

    def every_discriminator(self) -> list[nn.Module]:
        return [discriminator for discriminators in self.by_kind.values() for discriminator in discriminators]


def at_once(settings: TrainVocoder) -> PlanTarget:
    def build(runtime: Runtime, checkpointing: bool) -> VocoderRecipe:
        return AtOnce(replace(settings, model=replace(settings.model, gradient_checkpointing=checkpointing)), runtime)

    return replace(target(settings), build=build)


def switches(settings: TrainVocoder) -> Plan:
    (machine_target,) = target_machines(Cards(gpu=("rtx5090",)))
    return decide(machine_target.machine, settings.hardware)


def rows() -> Iterator[dict[str, object]]:
    for name, file in FILES.items():
        values = read_defaults(PROFILES / file, TrainVocoder, functools.partial(translate, of="train"))
        for precision in ("tf32", "fp16"):
            settings = assemble(TrainVocoder, {**values, "data_path": ".", "precision": precision})
            plan, whole = switches(settings), settings.schedule.global_batch_size
            ours, theirs = (
                predict_step(one, plan, micro_batch_size=whole) for one in (target(settings), at_once(settings))
            )
            yield {
                "configuration": name,
                "precision": plan.precision.value,
                "one_by_one_gb": round(ours.allocated_gb, 2),
                "at_once_gb": round(theirs.allocated_gb, 2),
                "ratio": round(ours.allocated_gb / theirs.allocated_gb, 3),
                "parts": {kind: round(gb, 2) for kind, gb in ours.parts.items()},
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = []
    for row in rows():
        print(json.dumps(row), flush=True)
        found.append(row)
    if arguments.json:
        arguments.json.write_text(json.dumps({"torch": torch.__version__, "rows": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
