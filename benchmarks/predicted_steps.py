"""Predicted time of each model's training step on five cards, with its launches, GB and TFLOP. Nothing is measured.

    python -m benchmarks.predicted_steps [--peer CHECKOUT] [--output-dir benchmarks/results] [--name predicted_steps]
                                         [CASE ...]

The cases are those of tests/planner/step_counts.py, as they run on an H100, and steps of the peers. For the other cards
the same kernels are taken; a T4 would compute in fp16, and compiles only if asked. The whole batch is one micro-batch,
whether it fits the card or not. `launches` are those of the processor.

The peers run their own code on fake tensors, by CUDA's rules and in the precision that their users have:

- Stock diffusers: AutoencoderKL in bf16 with a fused AdamW and EMA, as in benchmarks/vae_vs_diffusers.py. Compiled,
  encoder and decoder are a region each, counted by the model of planner/time/fusion.py like ours. Beside inductor's
  real kernels that model counts plain layers too low, in favour of the peer.
- openvpi/SingingVocoders (--peer: a checkout at 4d0889c) with the two files that come with gputrain: `base_hifi_gpu` in
  fp32, where torch has TF32 for convolutions, and the other one in 16-mixed, with Muon's products in bf16.
- Piper (the installed piper-tts) in fp32 with TF32, which its trainer switches on.

SingingVocoders and Piper compile nothing but Piper's gates, which torch.jit fuses; these count as compiled. Their
optimizers use foreach kernels, torch's default on a GPU. What Python reads from the device is assumed
(`AssumedValues`). Not counted, in favour of the peers: waiting for those values, the several kernels of picking by a
mask, Lightning's work, and Piper's alignment search on the processor with its copies. Peers that are not installed are
left out.
"""

import argparse
import functools
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from gputrain.bench import runner
from gputrain.hw.gpus import find_gpu
from gputrain.hw.probe import machine_facts
from gputrain.planner.memory.fake_runtime import FakeRuntime, FunctionsOf, on_fake_tensors
from gputrain.planner.memory.timeline import MemoryTimeline
from gputrain.planner.memory.torch_model import make_optimizers
from gputrain.planner.time.roofline import DeviceRates, StepCost
from gputrain.vae.architecture import PRESETS
from tests.planner.predictions import totals_of
from tests.planner.step_counts import CASES, HIGH, of_voice, plan_of, whole_step

CARDS = ("h100", "rtx5090", "rtx4090", "l4", "t4")
MODULES = {"diffusers": "diffusers", "piper-tts": "piper"}  # Packages of peers, and the names they are imported by.
CPU = torch.device("cpu")  # Fake tensors are nominally there.
AVERAGE_SHARE = 1e-3  # Share of the weights in the EMA of stock diffusers.
aten = torch.ops.aten
PICKS = aten.index.Tensor
PICKING = {PICKS, aten.index_put_.default, aten._index_put_impl_.default}
Step = Callable[[], object]


class WholeStep(NamedTuple):
    """The kernels of a step on one micro-batch, with the optimizers and averages."""

    cost: StepCost

    def ms(self, rates: DeviceRates) -> float:
        return round(1e3 * self.cost.seconds(rates, self.cost.items, 1), 1)


def step_of(name: str) -> WholeStep:
    settings, spec = CASES[name].make(**CASES[name].options)
    found = whole_step(settings, spec)
    items = settings.schedule.batch_size
    return WholeStep(StepCost((), found.micro_batch, items, found.update))


# Peers ----------------------------------------------------------------------------------------------------------------


def step_of_peer(begin: Callable[[MemoryTimeline], Step]) -> WholeStep:
    """Returns the kernels of a peer's second step. `begin` makes its model, and returns what runs a step."""
    timeline = MemoryTimeline.on("cuda")
    values = AssumedValues()
    hooks = (register_optimizer_step_pre_hook(values.count), register_optimizer_step_post_hook(values.count_ends))
    try:
        # Modules are on the only device, and torch cannot move parameters that are fake.
        still = patch.object(nn.Module, "to", lambda module, *where, **named: module)
        with still, on_fake_tensors(), values, FunctionsOf("cuda"):
            step = begin(timeline)
            step()
            kernels = peer_module("predictions").kernels_of(step, timeline)
    finally:
        for hook in hooks:
            hook.remove()
    return WholeStep(StepCost((), kernels, 1))


class AssumedValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Has every number that Python reads from a fake tensor be 0, or 1 within an optimizer's step, which reads its
    count. A mask picks every element."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.number = 0

    def count(self, *arguments: object) -> None:
        self.number = 1

    def count_ends(self, *arguments: object) -> None:
        self.number = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        first: Any = arguments[0] if arguments else None
        if function is aten._local_scalar_dense.default:
            return float(self.number) if first.is_floating_point() else self.number
        masks = [one for one in arguments[1] if one is not None] if function in PICKING else []
        if masks and masks[0].dtype == torch.bool:
            return first.new_empty(masks[0].numel(), *first.shape[masks[0].ndim :]) if function is PICKS else first
        return function(*arguments, **(named or {}))


def stock_step(compiled: bool, timeline: MemoryTimeline) -> Step:
    """Begins a training of flux at 8 pictures of 512 pixels by stock diffusers."""
    model = peer_module("vae_vs_diffusers").stock_autoencoder(PRESETS["flux"]).train()
    if compiled:
        for part in (model.encoder, model.decoder):
            part.forward = timeline.in_region(part.forward)
    weights, images = list(model.parameters()), torch.empty(8, 3, 512, 512)
    average = [torch.empty_like(one) for one in weights]
    (optimizer,) = make_optimizers("adamw", weights)

    @torch.no_grad()
    def update() -> None:
        optimizer.step()
        torch._foreach_lerp_(average, weights, AVERAGE_SHARE)

    def step() -> None:
        with torch.autocast(CPU.type, torch.bfloat16):
            loss = reconstruction(model, images)
        torch.autograd.backward(loss)
        update()
        optimizer.zero_grad()

    return step


def reconstruction(model: Any, images: Tensor) -> Tensor:
    """Returns L1 and KL of a picture and its reconstruction from a sample of the posterior."""
    posterior = model.encode(images).latent_dist
    mean, logvar = posterior.mean.float(), posterior.logvar.float()
    made = model.decode(mean + (0.5 * logvar).exp() * torch.randn_like(mean)).sample
    kl = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).sum((1, 2, 3)).mean()
    loss: Tensor = (made.float() - images).abs().mean() + 1e-6 * kl
    return loss


def vocoder_step(folder: Path, configuration: str, timeline: MemoryTimeline) -> Step:
    """Begins a training of SingingVocoders by one of our files."""
    peer, files = peer_module("vocoder_peer"), peer_module("vocoder_vs_openvpi")
    content = files.profile({"configuration": configuration, "changes": {}, "channels": 0})
    task = peer.load(folder, content, CPU)
    items, frames = content["batch_size"], content["crop_mel_frames"]
    sample = peer.make_sample(task, torch.empty(items, frames * content["hop_size"]), torch.empty(items, frames))
    step: Step = peer.stepping(task, sample, CPU, fp16=content["pl_trainer_precision"] == "16-mixed")
    for one in task.steppers:
        as_on_a_gpu(one.optimizer)
    return step


def voice_step(root: Path, timeline: MemoryTimeline) -> Step:
    """Begins a training of Piper's `high` on the batch of our case."""
    peer = peer_module("vits_peer")
    settings, spec = of_voice(**HIGH)
    target = spec.target(settings)
    recipe: Any = target.build(FakeRuntime(plan_of(settings, spec), MemoryTimeline()), False)
    task = peer.load(root, recipe.architecture, settings.schedule.batch_size, CPU)
    batch = recipe.prepare(target.load(), 0)
    frequencies = recipe.architecture.mel.n_fft // 2 + 1
    frames = batch.wave_B1L.shape[-1] // recipe.architecture.mel.hop_size
    spectrogram_BNT = torch.empty(len(batch.wave_B1L), frequencies, frames)
    package = peer.TASK.rpartition(".")[0]
    path: Any = importlib.import_module(f"{package}.monotonic_align")
    path.maximum_path = lambda scores_BTS, mask_BTS: torch.zeros_like(mask_BTS)
    layers: Any = importlib.import_module(f"{package}.modules")
    layers.fused_add_tanh_sigmoid_multiply = timeline.in_region(gate)
    step: Step = peer.stepping(task, peer.batch_for(task, batch, spectrogram_BNT))
    for optimizer in task.steppers:
        as_on_a_gpu(optimizer)
    return step


def gate(one_BCT: Tensor, other_BCT: Tensor, channels: Tensor) -> Tensor:
    """Replaces the function that torch.jit fuses; the first half of the channels is that of tanh."""
    first_BCT, second_BCT = (one_BCT + other_BCT).chunk(2, dim=1)
    return first_BCT.tanh() * second_BCT.sigmoid()


def as_on_a_gpu(optimizer: Any) -> None:
    """Has an optimizer, with those that it chains, take the kernels that it takes on a GPU."""
    for one in (optimizer, *getattr(optimizer, "optimizers", ())):
        for group in one.param_groups:
            if "foreach" in group:
                group["foreach"] = True
        if hasattr(one, "bf16_support_map"):
            one.bf16_support_map = {CPU: True}


def peer_module(name: str) -> Any:
    """Imports one of the scripts beside this one, which import each other by their names alone."""
    folder = str(Path(__file__).resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(name)


def peers(checkout: Path | None) -> dict[str, Callable[[MemoryTimeline], Step]]:
    """Returns the peers' cases of which the code is there, by name."""
    found: dict[str, Callable[[MemoryTimeline], Step]] = {}
    if importlib.util.find_spec("diffusers"):
        for how, compiled in (("eager", False), ("compiled", True)):
            found[f"vae flux 512 x 8, stock diffusers, {how}"] = functools.partial(stock_step, compiled)
    if checkout:
        for configuration, file in peer_module("vocoder_vs_openvpi").CONFIGURATIONS.items():
            name = f"vocoder {Path(file).stem}, openvpi/SingingVocoders"
            found[name] = functools.partial(vocoder_step, checkout, configuration)
    if root := peer_module("vits_peer").root_of(None):
        found["voice high 64 x 4.7 s, Piper"] = functools.partial(voice_step, root)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="default: all")
    parser.add_argument("--peer", type=Path, metavar="CHECKOUT", help="of openvpi/SingingVocoders")
    parser.add_argument("--output-dir", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--name", default="predicted_steps", help="name of the file")
    options = parser.parse_args()
    of_peers = peers(options.peer)
    of_ours = [name for name, case in CASES.items() if case.within is nullcontext]
    if unknown := set(options.cases) - {*of_ours, *of_peers}:
        parser.error(f"no such case, or its peer is not there: {', '.join(sorted(unknown))}")
    rows = []
    for name in options.cases or [*of_ours, *of_peers]:
        rows.append(row_of(name, step_of_peer(of_peers[name]) if name in of_peers else step_of(name)))
        print(json.dumps(rows[-1]), flush=True)
    report = {
        "title": "Predicted time of a step on shapes, not measured", **machine_facts("cpu"),
        "command": runner.command_line("python -m benchmarks.predicted_steps"),
        "peers": versions(options.peer), "rows": rows,
    }  # fmt: skip
    runner.open_folder(options.output_dir)
    runner.write_json(options.output_dir / f"{options.name}.json", report)


def versions(checkout: Path | None) -> dict[str, str]:
    found = {name: version(name) for name in ("diffusers", "piper-tts") if importlib.util.find_spec(MODULES[name])}
    return found | ({"openvpi/SingingVocoders": peer_module("vocoder_peer").commit(checkout)} if checkout else {})


def row_of(name: str, step: WholeStep) -> dict[str, Any]:
    compiled = name.endswith(", compiled")  # Otherwise Python launches each kernel.
    rates = {card: DeviceRates.published(find_gpu(card), tf32=True, compiled=compiled) for card in CARDS}
    totals = totals_of(step.cost, step.cost.items)
    ms = {card: step.ms(rate) for card, rate in rates.items() if rate}
    return {"case": name, **totals._asdict(), "launches": totals.kernels, "predicted_ms": ms}


if __name__ == "__main__":
    main()
