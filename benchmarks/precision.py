"""What 16 bit costs: a step of each model and preset in bf16 and fp16 beside the same step in float64, layer by layer.

usage: python benchmarks/precision.py [--case NAME ...] [--output-dir DIR]

Autocast follows CUDA's rules, on the CPU. Convolutions and matrix products take their 16-bit operands in fp32 and round
what comes out: the arithmetic of a tensor core, and the same on every processor, whatever its library makes of 16-bit
operands. Everything else is torch's own. Weights, batch, noise and the voice's alignment are the same on all sides. In
fp16 the loss is scaled as in training: by 65536, halved until no gradient overflows.

Writes benchmarks/results/precision_DEVICE.json, with the layers that fare worst, and prints a table. Figures of
the vocoder's generator still depend on loudness, noise and width more than on its layers: none are published yet.
"""

import argparse
import dataclasses
import functools
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import gpu_check
import torch
import voice_check
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from vits_vs_piper import disturb

from gputrain.bench import runner
from gputrain.bench.step_bench import PLAIN
from gputrain.bench.timing import machine
from gputrain.config import assemble
from gputrain.engine.optim import LossScale
from gputrain.engine.recipe import ChainGradients, StepGroup, phases_of
from gputrain.engine.state import TrainState
from gputrain.engine.train import accumulate
from gputrain.hw.plan import Hardware, decide
from gputrain.hw.probe import Machine
from gputrain.hw.runtime import DTYPES, Runtime
from gputrain.planner.fake_runtime import CudaAutocast, autocast
from gputrain.tts import bench as tts_bench
from gputrain.tts.config import PlannedSpeech, TrainTts
from gputrain.tts.plan import architecture_for, size_of
from gputrain.tts.recipe import VoiceRecipe
from gputrain.vae.config import TrainVae
from gputrain.vae.recipe import VaeRecipe
from gputrain.vocoder.bench import made_up_sound
from gputrain.vocoder.config import TrainVocoder
from gputrain.vocoder.recipe import VocoderRecipe

log = logging.getLogger("precision")
aten = torch.ops.aten
PRODUCTS = {
    aten.convolution.default, aten.convolution_backward.default, aten.mm.default, aten.bmm.default, aten.addmm.default,
    aten.baddbmm.default, aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
}  # fmt: skip
LOW = (torch.bfloat16, torch.float16)
FIRST_SCALE = 65536.0
LOUDNESS = 0.1  # of a wave, root mean square
LOUDER = 20.0  # than a new model is, a trained one; the logarithm of what is near silence knows rounding alone
WORST = 8  # layers that the JSON names
Begun = tuple[Any, Any, Callable[[], AbstractContextManager[object]]]  # recipe, loaded batch, what holds around a step
Case = Callable[[Runtime], Begun]


class ExactProducts(TorchDispatchMode):
    """Computes the products of 16-bit tensors in fp32 and rounds the results, forward and backward."""

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        named = named or {}
        low = [each.dtype for each in arguments if isinstance(each, Tensor) and each.dtype in LOW]
        if function not in PRODUCTS or not low:
            return function(*arguments, **named)
        arguments, named = tree_map_only(Tensor, lambda x: x.float() if x.dtype in LOW else x, (arguments, named))
        result = function(*arguments, **named)
        return tree_map_only(Tensor, lambda x: x.to(low[0]) if x.dtype == torch.float32 else x, result)


class Emulated(Runtime):
    """The CPU, computing as a GPU would under autocast."""

    def autocast(self) -> AbstractContextManager[object]:
        stack = ExitStack()
        if self.dtype in LOW:
            stack.enter_context(CudaAutocast())
            stack.enter_context(autocast(self.dtype))
        return stack


def runtime_of(precision: str) -> Emulated:
    """`precision` is bf16, fp16, or fp64, which autocast leaves alone."""
    plan = decide(Machine(system="", cpu_cores=1), Hardware(device="cpu"))
    dtype = torch.float32 if precision == "fp64" else DTYPES[precision]
    return Emulated(plan, torch.device("cpu"), dtype, torch.contiguous_format)


@dataclasses.dataclass
class Step:
    """What a step came to: outputs by layer, call after call, and gradients by phase and tensor."""

    outputs: dict[str, list[Tensor]]
    gradients: dict[str, dict[str, Tensor]]
    arriving: list[Sequence[Tensor]]  # at the outputs, from all losses together
    scale: float


def make_step(case: Case, precision: str, arriving: Sequence[Sequence[Tensor]] = ()) -> Step:
    """One step's forward and backward passes. Raises RuntimeError if gradients overflow at any loss scale.

    The gradients `arriving` at the outputs take the place of the step's own. Losses are computed in fp32 in any case,
    but the logarithm of a quiet band turns a small error of the output into another gradient altogether. At the waves
    of a vocoder, white noise arrives on every side: of a new one, nearly all of the gradient is that of a few quiet
    bands, in which large terms cancel.
    """
    runtime = runtime_of(precision)
    recipe, loaded, around = case(runtime)
    batch = recipe.prepare(loaded, 0)  # in fp32 on every side: random numbers of fp64 would be others
    if precision == "fp64":
        for module in recipe.modules.values():
            module.double()
        fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
        values = tree_map_only(Tensor, lambda x: x.double() if x.dtype == torch.float32 else x, fields)
        batch = type(batch)(**values)
    scale = FIRST_SCALE if precision == "fp16" else 1.0
    groups = list(recipe.step_groups)
    while scale >= 1:
        outputs: dict[str, list[Tensor]] = {}
        arrived: list[Sequence[Tensor]] = []
        given = [[gradient * scale for gradient in each] for each in arriving]
        white = scale if isinstance(recipe, VocoderRecipe) else 0.0
        recipe.step_groups = [carrying(group, arrived, given, white) for group in groups]
        with around(), ExactProducts(), recorded(recipe.modules, outputs):
            gradients = gradients_of(recipe, runtime, batch, scale)
        if all(gradient.isfinite().all() for each in gradients.values() for gradient in each.values()):
            return Step(outputs, gradients, arrived, scale)
        scale /= 2
    raise RuntimeError(f"{precision}: the gradients are not finite")


def carrying(
    group: StepGroup, arrived: list[Sequence[Tensor]], given: Sequence[Sequence[Tensor]], white: float
) -> StepGroup:
    """The group, which adds the gradients that arrive at its outputs to `arrived`, and carries those given, if any, or
    white noise of the standard deviation `white`, if it is not 0."""
    loss = group.loss

    def terms(batch: Any, step: int) -> Iterator[Any]:
        for term in loss(batch, step):
            if isinstance(term, ChainGradients):
                number, own = len(arrived), term.gradients
                arrived.append(own)
                draws = torch.Generator().manual_seed(number)
                if white:
                    carried = [white * torch.randn(gradient.shape, generator=draws) for gradient in own]
                else:
                    carried = list(given[number] if given else own)
                carried = [gradient.to(old.dtype) for gradient, old in zip(carried, own, strict=True)]
                term = dataclasses.replace(term, gradients=tuple(carried))
            yield term

    return dataclasses.replace(group, loss=terms)


def gradients_of(recipe: Any, runtime: Runtime, batch: Any, scale: float) -> dict[str, dict[str, Tensor]]:
    """Of every phase, by the names of its tensors, unscaled."""
    names = [phase.name for phase in phases_of(recipe)]
    start = LossScale(scale)
    state = TrainState(recipe, runtime, 0.0, dict.fromkeys(names, 64), dict.fromkeys(names, start))
    found: dict[str, dict[str, Tensor]] = {}
    for group in recipe.step_groups:
        accumulate(state, group, batch, 0)
        for phase in group.phases:
            named = [pair for number, module in enumerate(phase.modules) for pair in named_parameters(module, number)]
            found[phase.name] = {name: p.grad.double() / scale for name, p in named if p.grad is not None}
            phase.optimizer.zero_grad()
    return found


def named_parameters(module: nn.Module, number: int) -> Iterator[tuple[str, nn.Parameter]]:
    yield from ((f"{number}.{name}" if number else name, parameter) for name, parameter in module.named_parameters())


@contextmanager
def recorded(modules: Mapping[str, nn.Module], outputs: dict[str, list[Tensor]]) -> Iterator[None]:
    """Within, the floating-point output of every layer is kept, in fp32."""

    def keep(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.is_floating_point():
            outputs.setdefault(name, []).append(output.detach().float())

    handles = [
        layer.register_forward_hook(functools.partial(keep, f"{name}.{path}" if path else name))
        for name, module in modules.items()
        if name != "ema"
        for path, layer in module.named_modules()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclasses.dataclass(frozen=True)
class Cost:
    cosine: float
    error: float  # norm of the difference by the norm of the reference

    @classmethod
    def of(cls, found: Sequence[Tensor], reference: Sequence[Tensor]) -> "Cost":
        ours, exact = (torch.cat([x.flatten().double() for x in each]) for each in (found, reference))
        length = exact.norm()
        cosine = float(torch.nn.functional.cosine_similarity(ours, exact, dim=0, eps=1e-300)) if length else 1.0
        return cls(cosine, float((ours - exact).norm() / length) if length else float(ours.norm()))


def compare(case: Case, precisions: Sequence[str] = ("bf16", "fp16")) -> dict[str, dict[str, Any]]:
    """By precision: costs of the gradient of each phase, of the tensors and layers that fare worst, and of the layer
    that comes last. Tensors whose gradient is rounding even in float64 (below 1e-9 of the phase's) are left out."""
    reference = make_step(case, "fp64")
    made: dict[str, dict[str, Any]] = {}
    for precision in precisions:
        step = make_step(case, precision, reference.arriving)
        phases = {
            name: Cost.of(list(step.gradients[name].values()), list(exact.values()))
            for name, exact in reference.gradients.items()
        }
        tensors: dict[str, Cost] = {}
        for phase, exact in reference.gradients.items():
            length = torch.stack([gradient.norm() for gradient in exact.values()]).norm()
            for name, gradient in exact.items():
                if gradient.norm() > 1e-9 * length:
                    tensors[f"{phase}: {name}"] = Cost.of([step.gradients[phase][name]], [gradient])
        layers = {
            name: Cost.of(found, reference.outputs[name])
            for name, found in step.outputs.items()
            if [x.shape for x in found] == [x.shape for x in reference.outputs.get(name, [])]
        }
        made[precision] = {
            "loss_scale": step.scale,
            "gradients": as_json(phases),
            "worst_gradients": as_json(worst(tensors)),
            "worst_outputs": as_json(worst(layers)),
        }
    return made


def worst(costs: dict[str, Cost]) -> dict[str, Cost]:
    return dict(sorted(costs.items(), key=lambda pair: pair[1].cosine)[:WORST])


def as_json(costs: dict[str, Cost]) -> dict[str, dict[str, float]]:
    return {name: dataclasses.asdict(cost) for name, cost in costs.items()}


# The cases -----------------------------------------------------------------------------------------------------------


def vae(preset: str, **changes: Any) -> Case:
    def begin(runtime: Runtime) -> Begun:
        values = {"data_path": ".", "image_size": 64, "batch_size": 1, "ema_decay": 0, "preset": preset, **changes}
        settings = assemble(TrainVae, {**values, **PLAIN, "device": "cpu"})
        return VaeRecipe(settings, runtime, held_out=[]), gpu_check.pictures(settings), ExitStack

    return begin


VOCODERS: dict[str, dict[str, Any]] = {
    "standard": {"discriminators": "msd,mpd", "discriminator_periods": "3,5,7,11,17,23,37"},
    "optimised": {
        "discriminators": "fast_mrd,fast_mpd", "discriminator_periods": "2,3,5,7,11,17,23",
        "upsample_initial_channel": 1024, "generator_optimizer": "muon", "discriminator_optimizer": "muon",
    },
}  # fmt: skip


# A mini source has no noise of its own, and a new generator makes none of its mel, as a trained one does.
SOURCES: dict[str, dict[str, Any]] = {"full": {}, "mini": {"mini_nsf": True, "noise_sigma": 0.3}}


def roughen(recipe: VocoderRecipe, sound: Any) -> None:
    """Have a new generator fill every band, as loudly as a trained one does: new upsampling layers interpolate, without
    treble, and what is near silence, or at full scale, gives the discriminators little to look at."""
    draws = torch.Generator().manual_seed(1)
    generator = recipe.generator
    for up in generator.get_submodule("ups").children():
        direction = up.get_parameter("weight_v")
        direction.copy_(direction.square().mean().sqrt() * torch.randn(direction.shape, generator=draws))
    batch = recipe.prepare(sound, 0)
    wave_B1T = generator(batch.mel_BMF, batch.f0_BF, batch.noise)
    generator.get_parameter("conv_post.weight_g").mul_(LOUDNESS / wave_B1T.square().mean().sqrt())


def vocoder(configuration: str, source: str, **changes: Any) -> Case:
    def begin(runtime: Runtime) -> Begun:
        values = {"data_path": ".", "batch_size": 1, "crop_mel_frames": 8, "ema_decay": 0, **SOURCES[source]}
        settings = assemble(TrainVocoder, {**values, **VOCODERS[configuration], **changes, **PLAIN, "device": "cpu"})
        recipe = VocoderRecipe(settings, runtime)
        sound = made_up_sound(settings)
        with torch.no_grad():
            roughen(recipe, sound)
        return recipe, sound, ExitStack

    return begin


def voice(preset: str, sizes: Mapping[str, Any] | None = None, **changes: Any) -> Case:
    alignment: list[Tensor] = []  # that the reference has found

    def begin(runtime: Runtime) -> Begun:
        values = {
            "data_dir": ".", "preset": preset, "batch_size": 1, "ema_decay": 0, "encoder_dropout": 0.0,
            "duration_dropout": 0.0, **changes,
        }  # fmt: skip
        settings = assemble(TrainTts, {**values, **PLAIN, "device": "cpu"})
        speech = size_of(PlannedSpeech(), 1.0)
        architecture = dataclasses.replace(architecture_for(settings, speech), **(sizes or {}))
        recipe = VoiceRecipe(settings, architecture, speech.clip, runtime)
        disturb(recipe.voice)
        louder = "weight_g" if preset == "fast" else "weight"
        with torch.no_grad():
            recipe.voice.get_parameter(f"decoder.head.post.{louder}").mul_(LOUDER)
        loaded = tts_bench.synthetic_speech(settings, speech)
        return recipe, loaded, lambda: voice_check.aligned_as(alignment)

    return begin


CASES: dict[str, Case] = {
    **{f"VAE {preset}": vae(preset) for preset in ("flux", "sd", "lite", "fast")},
    **{
        f"vocoder {configuration}, {source} source": vocoder(configuration, source)
        for configuration in VOCODERS
        for source in SOURCES
    },
    **{f"voice {preset}": voice(preset) for preset in ("high", "medium", "fast")},
}


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the table's rows in Markdown."""
    lines = [
        "| model | phase | gradient, bf16 | gradient, fp16 | worst tensor in bf16 |",
        "|---|---|---|---|---|",
    ]
    for name, result in results.items():
        for phase in result["bf16"]["gradients"]:
            both = [result[precision]["gradients"][phase] for precision in ("bf16", "fp16")]
            cells = [f"{cost['cosine']:.6f} ({100 * cost['error']:.2g} %)" for cost in both]
            tensors = {n: c for n, c in result["bf16"]["worst_gradients"].items() if n.startswith(f"{phase}: ")}
            first = next(iter(tensors.items()), None)
            named = f"`{first[0].partition(': ')[2]}` {first[1]['cosine']:.4f}" if first else ""
            lines.append(f"| {name} | {phase} | {' | '.join(cells)} | {named} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=CASES, help="of all; may be repeated")
    parser.add_argument("--output-dir", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    runner.open_folder(options.output_dir)
    facts = machine("cpu")
    path = runner.result_path(options.output_dir, "precision", facts["device"])
    results = json.loads(path.read_text(encoding="utf-8"))["cases"] if path.is_file() else {}
    for name in options.case or CASES:
        results[name] = compare(CASES[name])
        log.info("%s", table({name: results[name]}).splitlines()[-1])
        runner.write_json(path, {**facts, "cases": results})
    print(table(results))


if __name__ == "__main__":
    main()
