"""Memory of a vocoder's step, predicted on shapes: judge by judge as gputrain does it, and with the same losses summed
and back-propagated at once, as its peers do.

    python benchmarks/vocoder_memory.py [--json FILE]

No GPU is needed: the plan of an RTX 5090 is followed (its autocast rules and allocator) on tensors without memory.
GB = 1e9 bytes.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from gputrain.config import assemble
from gputrain.gan import exact
from gputrain.hw.plan import Cards, Plan, decide
from gputrain.hw.runtime import Runtime
from gputrain.hw.seats import seats
from gputrain.planning import Subject, predict_step
from gputrain.train import Term, Yielded
from gputrain.vocoder import losses
from gputrain.vocoder.config import TrainVocoder
from gputrain.vocoder.recipe import VocoderBatch, VocoderRecipe, subject

STANDARD = {
    "batch_size": 16, "crop_mel_frames": 48, "discriminators": "msd,mpd",
    "discriminator_periods": "3,5,7,11,17,23,37",
}  # fmt: skip
OPTIMISED = {
    "batch_size": 32, "crop_mel_frames": 80, "upsample_initial_channel": 1024, "discriminators": "fast_mrd,fast_mpd",
    "discriminator_periods": "2,3,5,7,11,17,23", "generator_optimizer": "muon", "discriminator_optimizer": "muon",
}  # fmt: skip


class AtOnce(VocoderRecipe):
    """The same losses, summed on one graph: of the generator with everything that judges it, and of all judges."""

    def generator_loss(self, batch: VocoderBatch, step: int) -> Iterator[Yielded]:
        waves_W1T = self._make(batch)
        batch.made_B1T.copy_(waves_W1T.detach())
        terms = [*self._likeness(exact(waves_W1T), batch)]
        terms += losses.generator_terms(self.by_kind, batch.real_B1T, exact(waves_W1T), batch.whole, batch.whole)
        yield Term("sum", total(terms))

    def discriminator_loss(self, batch: VocoderBatch, step: int) -> Iterator[Yielded]:
        yield Term("sum", total([*super().discriminator_loss(batch, step)]))


def total(terms: list[Yielded]) -> Tensor:
    return torch.stack([term.value * term.weight for term in terms if isinstance(term, Term)]).sum()


def at_once(settings: TrainVocoder) -> Subject:
    def build(runtime: Runtime, checkpointing: bool) -> VocoderRecipe:
        return AtOnce(replace(settings, model=replace(settings.model, gradient_checkpointing=checkpointing)), runtime)

    return replace(subject(settings), build=build)


def switches(settings: TrainVocoder) -> Plan:
    (seat,) = seats(Cards(gpu=("rtx5090",)))
    return decide(seat.machine, settings.hardware)


def rows() -> Iterator[dict[str, object]]:
    for name, values in (("standard", STANDARD), ("optimised", OPTIMISED)):
        for precision in ({"mixed_precision": False}, {"mixed_precision": True, "use_bf16": False}):
            settings = assemble(TrainVocoder, {"data_path": ".", **values, **precision})
            plan, whole = switches(settings), settings.schedule.whole_batch
            ours, theirs = (
                predict_step(one, plan, micro_batch_size=whole) for one in (subject(settings), at_once(settings))
            )
            yield {
                "configuration": name,
                "precision": plan.precision.value,
                "judge_by_judge_gb": round(ours.allocated_gb, 2),
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
