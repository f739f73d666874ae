"""What 16 bit costs: a training step of each model and preset in bf16 and fp16, compared with the same step in float64.

usage: python benchmarks/precision.py [--case NAME ...] [--output-dir DIR]

Each model, at the sizes that the results name, is first trained for some steps in fp32 on synthetic data, because
gradients of new weights are not like those of a training. Then one step on a held-out batch is computed in float64,
bf16 and fp16, and its outputs and gradients are compared, layer by layer. Two comparisons are made:

- step: each side has its own losses, as in training;
- network: the gradients of the losses at the outputs of the model are those of the float64 step, so that what is
  compared is the arithmetic of the model alone.

Autocast follows CUDA's rules, on the CPU. Convolutions and matrix products of 16-bit tensors are computed in fp32 and
their results rounded: the arithmetic of a tensor core, and the same on every processor. Everything else is torch's own.
Weights, batch, noise and the voice's alignment are the same on all sides. In fp16, the loss is scaled as in training:
by 65536, or by less until no gradient overflows.

Writes benchmarks/results/precision_DEVICE.json and prints a table.
"""

import argparse
import dataclasses
import functools
import importlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from vits_vs_piper import disturb

from gputrain.audio import synthetic
from gputrain.bench import runner
from gputrain.bench.step_bench import PLAIN
from gputrain.config import assemble
from gputrain.engine.optim import LossScale
from gputrain.engine.recipe import ChainGradients, StepGroup, phases_of
from gputrain.engine.state import TrainState
from gputrain.engine.step import accumulate, update
from gputrain.hw.plan import Hardware, decide
from gputrain.hw.probe import Machine, machine_facts
from gputrain.hw.runtime import DTYPES, Runtime
from gputrain.planner.memory.fake_runtime import FunctionsOf
from gputrain.speech.buckets import ClipBatch
from gputrain.tts.config import PlannedSpeech, TrainTts
from gputrain.tts.data import architecture_for, size_of
from gputrain.tts.recipe import VoiceRecipe
from gputrain.vae.config import TrainVae
from gputrain.vae.recipe import VaeRecipe
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
WORST = 8  # number of layers and of weights that the results name
NOTABLE = 0.01  # share of the norm of a phase's gradient below which the gradient of a weight is not named
recipes: Any = importlib.import_module("gputrain.tts.recipe")  # Its search is replaced in `aligned_as`.
NARROW: dict[str, int] = {  # Sizes of a small voice.
    "hidden_channels": 32, "latent_channels": 32, "encoder_filter_channels": 64, "encoder_layers": 2,
    "posterior_layers": 4, "upsample_initial_channel": 64,
}  # fmt: skip
Weights = dict[str, dict[str, Tensor]]  # state dict of each module of a recipe


@dataclasses.dataclass(frozen=True)
class Case:
    """A model of one preset to be trained and measured."""

    sizes: str
    begin: Callable[[Runtime], Any]  # returns a new recipe
    batches: Callable[[], Sequence[Any]]  # batches as the data loader gives them; the last is held out
    steps: int  # of training before the step that is measured
    learning_rate: float = 5e-4
    output: int = 0  # which ChainGradients of a step starts at the output of the model
    around: Callable[[], AbstractContextManager[object]] = nullcontext  # context of the steps that are compared


class Tf32Products(TorchDispatchMode):
    """Computes the products of fp32 tensors from inputs that are rounded to the 10 bits of TF32's mantissa."""

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        named = named or {}
        if function in PRODUCTS:
            arguments, named = tree_map_only(Tensor, to_tf32, (arguments, named))
        return function(*arguments, **named)


def to_tf32(x: Tensor) -> Tensor:
    if x.dtype != torch.float32:
        return x
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


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


class AutocastOfCuda(FunctionsOf):
    """The functions that CUDA's autocast computes in fp32. CTC keeps its values, which a plan does without."""

    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        if getattr(function, "__name__", "") == "ctc_loss":
            return function(*arguments, **(named or {}))
        return super().__torch_function__(function, types, arguments, named)


@dataclasses.dataclass
class Emulated(Runtime):
    """The CPU, computing as a GPU would under autocast, or with TF32."""

    tf32: bool = False

    def autocast(self) -> AbstractContextManager[object]:
        stack = ExitStack()
        if self.dtype in LOW:
            stack.enter_context(AutocastOfCuda("cuda"))
            stack.enter_context(super().autocast())
            stack.enter_context(ExactProducts())
        elif self.tf32:
            stack.enter_context(Tf32Products())
        return stack


def runtime_of(precision: str) -> Emulated:
    """Returns a runtime for bf16, fp16, tf32 or fp32; float64 is computed as fp32, whose autocast does nothing."""
    plan = decide(Machine(system="", cpu_cores=1), Hardware(device="cpu"))
    dtype = DTYPES.get(precision, torch.float32)
    return Emulated(plan, torch.device("cpu"), dtype, torch.contiguous_format, tf32=precision == "tf32")


def begin_training(recipe: Any, runtime: Runtime, scale: float = 1.0) -> TrainState:
    names = [phase.name for phase in phases_of(recipe)]
    scales = {name: LossScale(scale).to(runtime.device) for name in names}
    return TrainState(recipe, runtime, 0.0, dict.fromkeys(names, 64), scales)


def train(case: Case) -> Weights:
    """Trains a new model in fp32 and returns its weights."""
    runtime = runtime_of("fp32")
    recipe = case.begin(runtime)
    state = begin_training(recipe, runtime)
    *batches, _ = case.batches()
    for step in range(case.steps):
        update(state, recipe.prepare(batches[step % len(batches)], step), step, case.learning_rate)
    return {name: module.state_dict() for name, module in recipe.modules.items()}


# One step -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Step:
    """The outputs of each layer, call after call, the gradient of each weight by phase, and the losses."""

    layers: dict[str, list[Tensor]]
    gradients: dict[str, dict[str, Tensor]]
    outputs: list[Sequence[Tensor]]  # tensors of each ChainGradients
    arriving: list[Sequence[Tensor]]  # gradients of the losses at these
    scale: float
    losses: dict[str, float] = dataclasses.field(default_factory=dict)


def make_step(
    case: Case, weights: Weights, precision: str, arriving: Sequence[Sequence[Tensor]] = (),
    runtime: Runtime | None = None,
) -> Step:  # fmt: skip
    """Computes the gradients of one step, by default on the CPU as a GPU would. Gradients `arriving` at the outputs
    replace those of the step's own losses. On another `runtime`, the outputs of layers are not recorded.

    Raises RuntimeError if gradients overflow at any loss scale.
    """
    records, runtime = runtime is None, runtime or runtime_of(precision)
    recipe, on_cpu = case.begin(runtime), runtime_of("fp32")
    for name, module in recipe.modules.items():
        module.load_state_dict(weights[name])
    # Drawn in fp32 on the CPU for every side, for the same random numbers.
    batch = case.begin(on_cpu).prepare(case.batches()[-1], case.steps)
    if precision == "float64":
        for module in recipe.modules.values():
            module.double()
        fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
        values = tree_map_only(Tensor, lambda x: x.double() if x.dtype == torch.float32 else x, fields)
        batch = type(batch)(**values)
    if runtime.device.type != "cpu":
        fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
        batch = type(batch)(**tree_map_only(Tensor, lambda x: x.to(runtime.device), fields))
    scale = FIRST_SCALE if precision == "fp16" else 1.0
    groups = list(recipe.step_groups)
    while scale >= 1:
        step = Step({}, {}, [], [], scale)
        recipe.step_groups = [recording(group, step, arriving) for group in groups]
        with case.around(), recorded(recipe.modules, step.layers) if records else nullcontext():
            step.gradients, step.losses = gradients_of(recipe, runtime, batch, scale, case.steps)
        if all(gradient.isfinite().all() for each in step.gradients.values() for gradient in each.values()):
            return step
        scale /= 8
    raise RuntimeError(f"{precision}: the gradients are not finite")


def recording(group: StepGroup, step: Step, arriving: Sequence[Sequence[Tensor]]) -> StepGroup:
    """Returns the group with a loss that records each ChainGradients and, if there are any, replaces its gradients."""
    loss = group.loss

    def terms(batch: Any, number: int) -> Iterator[Any]:
        for term in loss(batch, number):
            if isinstance(term, ChainGradients):
                step.outputs.append([tensor.detach().cpu().double() for tensor in term.tensors])
                step.arriving.append([gradient.cpu().double() / step.scale for gradient in term.gradients])
                if arriving:
                    given = zip(arriving[len(step.arriving) - 1], term.gradients, strict=True)
                    gradients = tuple((exact * step.scale).to(own) for exact, own in given)
                    term = dataclasses.replace(term, gradients=gradients)
            yield term

    return dataclasses.replace(group, loss=terms)


def gradients_of(
    recipe: Any, runtime: Runtime, batch: Any, scale: float, step: int
) -> tuple[dict[str, dict[str, Tensor]], dict[str, float]]:
    """Returns the unscaled gradients of every phase, by the names of the weights, and the losses."""
    state = begin_training(recipe, runtime, scale)
    found: dict[str, dict[str, Tensor]] = {}
    losses: dict[str, float] = {}
    for group in recipe.step_groups:
        sums = accumulate(state, group, batch, step)
        for phase in group.phases:
            losses |= {f"{phase.name}/{name}": value.item() for name, value in sums[phase.name].losses.items()}
            named = [pair for module in phase.modules for pair in module.named_parameters()]
            found[phase.name] = {name: p.grad.cpu().double() / scale for name, p in named if p.grad is not None}
            phase.optimizer.zero_grad()
    return found, losses


@contextmanager
def recorded(modules: Mapping[str, nn.Module], layers: dict[str, list[Tensor]]) -> Iterator[None]:
    """Within this context, the floating-point output of every layer is kept, in fp32."""

    def keep(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.is_floating_point():
            layers.setdefault(name, []).append(output.detach().to(torch.float32, copy=True))

    handles = [
        layer.register_forward_hook(functools.partial(keep, f"{name}.{path}"))
        for name, module in modules.items()
        for path, layer in module.named_modules()
        if path
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# The comparison -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Cost:
    """Cosine similarity with the reference, and the norm of the difference relative to the reference's."""

    cosine: float
    error: float

    @classmethod
    def of(cls, found: Sequence[Tensor], reference: Sequence[Tensor]) -> "Cost":
        ours, exact = (torch.cat([x.flatten().double() for x in each]) for each in (found, reference))
        length = exact.norm()
        cosine = float(torch.nn.functional.cosine_similarity(ours, exact, dim=0, eps=1e-300)) if length else 1.0
        return cls(cosine, float((ours - exact).norm() / length) if length else float(ours.norm()))


def compare(case: Case, precisions: Sequence[str] = ("bf16", "fp16")) -> dict[str, Any]:
    """Trains the model and returns, by precision, the costs of its output and of the gradients of each phase."""
    weights = train(case)
    reference = make_step(case, weights, "float64")
    made: dict[str, Any] = {"sizes": case.sizes, "steps": case.steps}
    for precision in precisions:
        step = make_step(case, weights, precision)
        network = make_step(case, weights, precision, reference.arriving)
        tensors = {
            f"{phase}: {name}": Cost.of([step.gradients[phase][name]], [exact])
            for phase, gradients in reference.gradients.items()
            for name, exact in notable(gradients).items()
        }
        layers = {name: Cost.of(found, reference.layers[name]) for name, found in step.layers.items()}
        made[precision] = {
            "loss_scale": step.scale,
            "output": dataclasses.asdict(Cost.of(step.outputs[case.output], reference.outputs[case.output])),
            "step": phases(step, reference),
            "network": phases(network, reference),
            "worst_weights": as_json(worst(tensors)),
            "worst_layers": as_json(worst(layers)),
        }
    return made


def phases(step: Step, reference: Step) -> dict[str, dict[str, float]]:
    gradients = reference.gradients.items()
    return as_json({name: Cost.of([*step.gradients[name].values()], [*exact.values()]) for name, exact in gradients})


def notable(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the gradients that make up more than a share of a phase's, which rounding does not dominate."""
    length = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    return {name: gradient for name, gradient in gradients.items() if gradient.norm() > NOTABLE * length}


def worst(costs: dict[str, Cost]) -> dict[str, Cost]:
    return dict(sorted(costs.items(), key=lambda pair: pair[1].cosine)[:WORST])


def as_json(costs: dict[str, Cost]) -> dict[str, dict[str, float]]:
    return {name: dataclasses.asdict(cost) for name, cost in costs.items()}


# The cases ------------------------------------------------------------------------------------------------------------


def vae(preset: str, *, channels: Sequence[int], pixels: int = 64, items: int = 2, steps: int = 20) -> Case:
    count = min(8, steps + 1)
    adversary = {"adversarial_weight": 0.1, "discriminator_start": 0, "discriminator_warmup_steps": 0}
    values = {
        "data_path": ".", "preset": preset, "channels": channels, "image_size": pixels, "batch_size": items * count,
        "ema_decay": 0, "discriminator_channels": 16, **adversary, **PLAIN, "device": "cpu",
    }  # fmt: skip
    settings = assemble(TrainVae, values)
    return Case(
        f"{items} images of {pixels} x {pixels}, channels {', '.join(map(str, channels))}",
        lambda runtime: VaeRecipe(settings, runtime),
        functools.cache(lambda: pictures(items * count, pixels).split(items)),
        steps,
    )


def pictures(count: int, pixels: int) -> Tensor:
    """Returns smooth random pictures, (B, C, H, W) in uint8."""
    coarse_BChw = torch.rand(count, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    return (255 * nn.functional.interpolate(coarse_BChw, size=pixels, mode="bilinear")).byte()


VOCODERS: dict[str, dict[str, Any]] = {
    "standard": {
        "discriminators": "msd,mpd", "discriminator_periods": "3,5,7,11,17,23,37", "msd_channels": 16,
        "mpd_channels": 4,
    },
    "optimised": {
        "discriminators": "fast_mrd,fast_mpd", "discriminator_periods": "2,3,5,7,11,17,23", "fast_mpd_init_channel": 2,
        "fast_mrd_init_channel": 2,
    },
}  # fmt: skip
SOURCES: dict[str, dict[str, Any]] = {"full": {}, "mini": {"mini_nsf": True}}


def vocoder(
    configuration: str, source: str, *, channels: int = 128, frames: int = 16, items: int = 2, steps: int = 100,
    **changes: Any,
) -> Case:  # fmt: skip
    values = {
        "data_path": ".", "batch_size": items, "crop_mel_frames": frames, "upsample_initial_channel": channels,
        "ema_decay": 0, "discriminator_start": steps * 4 // 5, **VOCODERS[configuration], **SOURCES[source], **PLAIN,
        "device": "cpu", **changes,
    }  # fmt: skip
    settings = assemble(TrainVocoder, values)
    return Case(
        f"{items} crops of {frames} frames, {channels} channels",
        lambda runtime: VocoderRecipe(settings, runtime),
        functools.cache(lambda: sung_batches(settings, 16)),
        steps,
        learning_rate=1e-3,
    )


def sung_batches(settings: TrainVocoder, count: int) -> list[tuple[Tensor, Tensor]]:
    """Returns batches of crops of synthetic singing (int16) with the pitch that was sung, the most voiced one last."""
    mel, frames = settings.spectrogram.mel, settings.data.frames_to_read
    samples = count * settings.schedule.global_batch_size * frames * mel.hop_size
    rate_hz = mel.sampling_rate
    wave_T, pitch_P = synthetic.sing(synthetic.VOICES[0], samples / rate_hz, rate_hz, np.random.default_rng(0))
    at_F = (np.arange(0, samples, mel.hop_size) + mel.hop_size / 2) * synthetic.CONTROL_HZ / rate_hz
    pitch_F = pitch_P[at_F.astype(int)]
    waves = torch.from_numpy(32767 * wave_T[:samples]).to(torch.int16).view(count, -1, frames * mel.hop_size)
    pitches = torch.from_numpy(pitch_F).float().view(count, -1, frames)
    return sorted(zip(waves, pitches, strict=True), key=lambda batch: int(batch[1].count_nonzero()))


def voice(preset: str, *, steps: int = 30, decoder_channels: int = 128, **sizes: int) -> Case:
    values = {
        "data_path": ".", "preset": preset, "batch_size": 2, "ema_decay": 0, "encoder_dropout": 0.0,
        "duration_dropout": 0.0, "discriminator_channels": 8, **PLAIN, "device": "cpu",
    }  # fmt: skip
    settings = assemble(TrainTts, values)
    speech = size_of(PlannedSpeech(), 1.0)
    architecture = dataclasses.replace(
        architecture_for(settings, speech),
        **{**NARROW, "upsample_initial_channel": decoder_channels, **sizes},
    )

    alignment: list[Tensor] = []  # as found by the float64 step

    def begin(runtime: Runtime) -> VoiceRecipe:
        recipe = VoiceRecipe(settings, architecture, speech.clip, runtime)
        disturb(recipe.voice)
        return recipe

    return Case(
        f"2 clips of about 1 s, {architecture.hidden_channels} channels in the encoders and "
        f"{architecture.upsample_initial_channel} in the decoder",
        begin,
        functools.cache(lambda: spoken_batches(architecture.mel, min(16, steps + 1))),
        steps,
        output=1,
        around=lambda: aligned_as(alignment),
    )


@contextmanager
def aligned_as(alignment: list[Tensor]) -> Iterator[None]:
    """Within this context, the first step stores its alignment in the empty list, and the others use it: rounding
    errors can change the choice of a path."""
    found = recipes.search

    def search(scores_BTS: Tensor, symbols_B: Tensor, frames_B: Tensor) -> Tensor:
        if not alignment:
            alignment.append(found(scores_BTS, symbols_B, frames_B).cpu())
        return alignment[0].to(scores_BTS.device)

    recipes.search = search
    try:
        yield
    finally:
        recipes.search = found


def spoken_batches(mel: Any, count: int) -> list[list[ClipBatch]]:
    """Returns batches of two clips of synthetic speech."""
    batches, rate_hz, hop_size = [], mel.sampling_rate, mel.hop_size
    for number in range(count):
        draws = np.random.default_rng(number)
        texts = synthetic.sentences()[2 * number : 2 * number + 2]
        ids = [torch.tensor([3 + [*synthetic.SOUNDS].index(letter) for letter in synthetic.letters(t)]) for t in texts]
        waves = [torch.from_numpy(32767 * synthetic.say(text, rate_hz, draws)).to(torch.int16) for text in texts]
        symbols_B, samples_B = (torch.tensor([len(each) for each in several]) for several in (ids, waves))
        frames_B = -(-samples_B // hop_size)
        padded = torch.nn.functional.pad
        longest = int(frames_B.max()) * hop_size
        zeros_B = torch.zeros_like(symbols_B)
        bucket = ClipBatch(
            ids_BS=torch.stack([padded(each, (0, int(symbols_B.max()) - len(each))) for each in ids]),
            symbols_B=symbols_B,
            wave_BT=torch.stack([padded(each, (0, longest - len(each))) for each in waves]),
            samples_B=samples_B,
            frames_B=frames_B,
            speakers_B=zeros_B,
            clips_B=zeros_B,
        )
        batches.append([bucket])
    return batches


CASES: dict[str, Callable[[], Case]] = {
    "VAE flux": lambda: vae("flux", channels=(64, 128, 128, 128)),
    "VAE sd": lambda: vae("sd", channels=(64, 128, 128, 128)),
    "VAE lite": lambda: vae("lite", channels=(32, 64, 128, 256)),
    "VAE fast": lambda: vae("fast", channels=(32, 64, 128, 256)),
    **{
        f"vocoder {configuration}, {source} source": functools.partial(vocoder, configuration, source)
        for configuration in VOCODERS
        for source in SOURCES
    },
    **{f"voice {preset}": functools.partial(voice, preset) for preset in ("high", "medium", "fast")},
}


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the results as a table in Markdown."""
    lines = [
        "| model | phase | output error: bf16, fp16 | gradients of a step: bf16 | fp16 | of the network: bf16 | fp16 | "
        "worst weight in bf16 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        for number, phase in enumerate(result["bf16"]["step"]):
            errors = [f"{100 * result[precision]['output']['error']:.2g} %" for precision in ("bf16", "fp16")]
            costs = [result[precision][kind][phase] for kind in ("step", "network") for precision in ("bf16", "fp16")]
            cells = [f"{cost['cosine']:.5f} ({100 * cost['error']:.2g} %)" for cost in costs]
            weights = {n: c for n, c in result["bf16"]["worst_weights"].items() if n.startswith(f"{phase}: ")}
            first = next(iter(weights.items()), None)
            named = f"`{first[0].partition(': ')[2]}` {first[1]['cosine']:.4f}" if first else ""
            output = ", ".join(errors) if number == 0 else ""
            lines.append(f"| {name} | {phase} | {output} | {' | '.join(cells)} | {named} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=CASES, help="Case to measure; may be repeated; default: all")
    parser.add_argument("--output-dir", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    runner.open_folder(options.output_dir)
    facts = {**machine_facts("cpu"), "command": "python benchmarks/precision.py"}
    path = runner.result_path(options.output_dir, "precision", facts["device"])
    results = json.loads(path.read_text(encoding="utf-8"))["cases"] if path.is_file() else {}
    for name in options.case or CASES:
        results[name] = compare(CASES[name]())
        log.info("%s", "\n".join(table({name: results[name]}).splitlines()[2:]))
        ordered = {each: results[each] for each in CASES if each in results}
        runner.write_json(path, {**facts, "cases": ordered})
    print(table(ordered))


if __name__ == "__main__":
    main()
