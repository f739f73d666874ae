"""Predicts what others have published, and shows both: seconds and memory of inference and of training steps.

    python -m benchmarks.published [--output-dir benchmarks/results] [WORDS ...]

The models are those of diffusers and transformers, with published sizes and random weights; nothing is downloaded, no
GPU is needed, and nothing is measured here. Memory and kernels are those of the planner's prediction for any torch
model (planner/memory/predict.py), times those of its roofline with the published rates of a card
(planner/time/roofline.py). WORDS choose cells whose name contains one of them.

A figure is `calibration`, `held out` or a `claim`. While the first were looked at, a part of our model was chosen: the
factor of the second-level cache by eight times of an image VAE, cuDNN's workspaces by the memory of such VAEs. Nothing
was chosen by the others. `75 W` are times of cards that a slot feeds, `beside 75 W` those of other cards in the same
sources; docs/evidence/cards_of_70_w.md says what was chosen when. A `claim` names neither device nor program that it
was measured with; it counts in no summary. GB is 1e9 bytes.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.published_cells import CELLS, LEFT_OUT, SOURCES, Cell
from gputrain.bench import runner
from gputrain.hw.gpus import Gpu, find_gpu
from gputrain.hw.plan import Cards
from gputrain.hw.probe import machine_facts
from gputrain.planner.memory.allocator import CachingAllocator
from gputrain.planner.memory.fake_runtime import FunctionsOf, on_fake_tensors
from gputrain.planner.memory.predict import MemoryEstimate
from gputrain.planner.memory.timeline import MemoryTimeline
from gputrain.planner.memory.torch_model import make_optimizers, predict_training_memory
from gputrain.planner.model_planner import ModelPlanner
from gputrain.planner.time.roofline import DeviceRates, StepCost

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
RESULTS = Path(__file__).parent / "results"
BOUND_SECONDS, BOUND_MEMORY = 0.20, 0.05  # The aim: a prediction within these shares of what is published.


@dataclass(frozen=True)
class Predicted:
    seconds: float
    allocated_gb: float
    reserved_gb: float
    by_published_rates: float = 0.0  # Seconds without what others have measured of the card's rates.


def rates_of(gpu: Gpu, *, compiled: bool) -> DeviceRates:
    found = DeviceRates.published(gpu, tf32=True, compiled=compiled)
    assert found is not None, gpu.key  # A test holds that all have what a prediction needs.
    return found


def of_step(
    found: MemoryEstimate, gpu: Gpu, passes: int = 1, *, updates: bool = True, compiled: bool = False
) -> Predicted:
    """Returns the prediction of a step of so many micro-batches, with or without an optimizer."""
    cost = StepCost((), found.micro_batch, 1, found.update if updates else ())
    seconds, before = (
        cost.seconds(rates_of(card, compiled=compiled), 1, passes) for card in (gpu, replace(gpu, sustained={}))
    )
    return Predicted(seconds, found.allocated_gb, found.reserved_gb, before)


# Inference ------------------------------------------------------------------------------------------------------------


def autoencoder(cell: Cell, model: str, part: str, size: int, batch: int, with_weights: bool = False) -> Predicted:
    """Returns the prediction of encoding or decoding by stock diffusers, without autocast. Memory is beyond that of the
    weights and the input, unless they count."""
    timeline, dtype = MemoryTimeline.on("cuda"), DTYPES[cell.precision]
    with on_fake_tensors(), torch.no_grad():
        made = stock_autoencoder(model).eval().to(dtype)
        latents = int(made.config.latent_channels)
        decodes = part == "decode"
        shape = (batch, latents, size // 8, size // 8) if decodes else (batch, 3, size, size)
        given = torch.empty(shape, dtype=dtype)
        timeline.note("parameters", made.parameters(), [given])
        weights = MemoryTimeline(list(timeline.events), list(timeline.kinds))
        with FunctionsOf("cuda"), timeline.watching():
            result = made.decode(given).sample if decodes else made.encode(given).latent_dist.mean
        before = CachingAllocator()
        before_bytes, _ = weights.peak(before)
        found = MemoryEstimate.of(timeline, timeline.log.operators, (), CachingAllocator())
        del result
    whole = of_step(found, find_gpu(cell.gpu))
    if with_weights:
        return whole
    return replace(
        whole, allocated_gb=whole.allocated_gb - before_bytes / 1e9,
        reserved_gb=whole.reserved_gb - before.reserved_bytes / 1e9,
    )  # fmt: skip


def stock_autoencoder(model: str) -> Any:
    import diffusers

    channels = [128, 256, 512, 512]
    shared: Any = {
        "block_out_channels": channels, "layers_per_block": 2, "norm_num_groups": 32, "sample_size": 1024,
        "down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4,
    }  # fmt: skip
    if model == "FLUX.2":
        made: Any = diffusers.AutoencoderKLFlux2(**shared, latent_channels=32)
    else:
        quantised = model == "SD"
        made = diffusers.AutoencoderKL(
            **shared, latent_channels=4 if quantised else 16, use_quant_conv=quantised, use_post_quant_conv=quantised
        )
    for name, module in made.named_modules():
        # Behind the attention, activations are in NHWC. The programs that were measured go back to NCHW: FLUX's own
        # code by its sum with the input, former versions of diffusers at the next shortcut, the installed one nowhere.
        if name.endswith("mid_block.attentions.0") and model == "FLUX":
            module.register_forward_hook(lambda module, given, out: out.contiguous())
        elif name.endswith("conv_shortcut"):
            module.register_forward_pre_hook(lambda module, given: (given[0].contiguous(),))
    return made


def forward_pass(made: Any, given: Callable[[], dict[str, Tensor]], gpu: Gpu, *, nhwc: bool = False) -> Predicted:
    """Returns the prediction of a forward pass of a model that `made` builds on fake tensors."""
    timeline = MemoryTimeline.on("cuda")
    with on_fake_tensors(), torch.no_grad():
        model, tensors = made().eval(), given()
        model = model.to(memory_format=torch.channels_last) if nhwc else model
        timeline.note("parameters", model.parameters(), list(tensors.values()))
        with FunctionsOf("cuda"), timeline.watching():
            result = model(**tensors)
        found = MemoryEstimate.of(timeline, timeline.log.operators, (), CachingAllocator())
        del result
    return of_step(found, gpu)


def denoising(cell: Cell, batch: int, nhwc: bool = True) -> Predicted:
    """Returns the prediction of a denoising step of Stable Diffusion 1.5, which predicts each picture twice."""
    import diffusers

    def made() -> nn.Module:
        unet: nn.Module = diffusers.UNet2DConditionModel(sample_size=64, cross_attention_dim=768).half()
        return unet

    def given() -> dict[str, Tensor]:
        states = torch.empty(2 * batch, 77, 768, dtype=torch.float16)
        latents = torch.empty(2 * batch, 4, 64, 64, dtype=torch.float16)
        return {"sample": latents, "timestep": torch.zeros(()), "encoder_hidden_states": states}

    return forward_pass(made, given, find_gpu(cell.gpu), nhwc=nhwc)


def generating(cell: Cell) -> Predicted:
    """Returns the prediction of 20 denoising steps of four pictures, which are decoded one by one."""
    step, decoded = denoising(cell, 4, nhwc=False), autoencoder(cell, "SD", "decode", 512, 1)
    return Predicted(
        20 * step.seconds + 4 * decoded.seconds, step.allocated_gb, step.reserved_gb,
        20 * step.by_published_rates + 4 * decoded.by_published_rates,
    )  # fmt: skip


def classifying(cell: Cell, half: bool) -> Predicted:
    """Returns the prediction of a forward pass of ResNet-50; in 16 bit with weights in fp16, in NHWC."""
    dtype = torch.float16 if half else torch.float32
    return forward_pass(
        lambda: classifier("ResNet-50").to(dtype), lambda: {"pixel_values": torch.empty(128, 3, 224, 224, dtype=dtype)},
        find_gpu(cell.gpu), nhwc=half,
    )  # fmt: skip


def hifigan(cell: Cell) -> Predicted:
    """Returns the prediction of a forward pass of HiFi-GAN V1, without the model of its spectrograms."""
    import transformers as hf

    v1 = hf.SpeechT5HifiGanConfig(
        sampling_rate=22050, upsample_rates=[8, 8, 2, 2], upsample_kernel_sizes=[16, 16, 4, 4]
    )
    frames = round(8.05 * 22050 / 256)
    return forward_pass(
        lambda: hf.SpeechT5HifiGan(v1).half(),
        lambda: {"spectrogram": torch.empty(8, frames, 80, dtype=torch.float16)},
        find_gpu(cell.gpu),
    )


# Training steps -------------------------------------------------------------------------------------------------------


def pictures(cell: Cell, model: str, batch: int, layout: str) -> Predicted:
    """Returns the prediction of a step of timm's benchmark: fp16 by autocast, SGD, gradients that stay."""
    with torch.device("meta"):
        made = classifier(model).train()
    images = torch.empty(batch, 3, 224, 224, device="meta")
    if layout == "nhwc":
        made, images = made.to(memory_format=torch.channels_last), images.to(memory_format=torch.channels_last)
    labels = torch.zeros(batch, dtype=torch.long)

    def loss(model: Any, batch: Any) -> Tensor:
        return F.cross_entropy(model(pixel_values=batch[0]).logits, batch[1])

    found = predict_training_memory(made, loss, (images, labels), precision="fp16", optimizer="sgd")
    return of_step(found, find_gpu(cell.gpu))


def classifier(model: str) -> nn.Module:
    import transformers as hf

    vit = {"num_labels": 1000, "attn_implementation": "eager"}
    found: dict[str, Callable[[], Any]] = {
        "ResNet-50": lambda: hf.ResNetForImageClassification(hf.ResNetConfig(num_labels=1000)),
        "ResNet-101": lambda: hf.ResNetForImageClassification(hf.ResNetConfig(num_labels=1000, depths=[3, 4, 23, 3])),
        "ConvNeXt-B": lambda: hf.ConvNextForImageClassification(
            hf.ConvNextConfig(num_labels=1000, depths=[3, 3, 27, 3], hidden_sizes=[128, 256, 512, 1024])
        ),
        "ViT-B/16": lambda: hf.ViTForImageClassification(hf.ViTConfig(**vit)),
        "ViT-L/16": lambda: hf.ViTForImageClassification(
            hf.ViTConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096, **vit)
        ),
        "Swin-B": lambda: hf.SwinForImageClassification(
            hf.SwinConfig(num_labels=1000, embed_dim=128, depths=[2, 2, 18, 2], num_heads=[4, 8, 16, 32])
        ),
    }
    made: nn.Module = found[model]()
    return made


class DenseSum(torch.autograd.Function):
    """The sum of logits, with a gradient in memory: a product takes no operand without strides, and copies it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return x.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient.expand(ctx.shape).contiguous()


def texts(cell: Cell, model: str, attention: str, batch: int, tokens: int) -> Predicted:
    """Returns the prediction of a forward and backward pass with weights in fp16 and no optimizer. The logits stay in
    memory until the next pass, as in the program that was measured."""
    import transformers as hf

    bert = hf.BertConfig(attn_implementation=attention)
    opt = hf.OPTConfig(
        vocab_size=50272, hidden_size=1024, num_hidden_layers=24, ffn_dim=4096, num_attention_heads=16,
        word_embed_proj_dim=512, do_layer_norm_before=False, attn_implementation=attention,
    )  # fmt: skip
    made: Any = {"bert-base": (hf.BertLMHeadModel, bert), "opt-350m": (hf.OPTForCausalLM, opt)}[model]
    with torch.device("meta"):
        network = made[0](made[1]).train().half()
    kept: list[Tensor] = []

    def loss(model: Any, ids: Any) -> Tensor:
        kept[:] = [model(input_ids=ids).logits]
        value: Tensor = DenseSum.apply(kept[0])  # type: ignore[no-untyped-call]
        return value

    ids = torch.zeros(batch, tokens, dtype=torch.long)
    found = predict_training_memory(network, loss, ids, precision="fp32", optimizer="sgd", gradients_resident=False)
    return of_step(found, find_gpu(cell.gpu), updates=False)


def bert_large(cell: Cell, batch: int, passes: int, precision: Any, checkpointing: bool) -> Predicted:
    """Returns the prediction of a step of the Trainer of transformers 4.21: AdamW, gradients that stay."""
    import transformers as hf

    config = hf.BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096,
        attn_implementation="eager",
    )  # fmt: skip
    with torch.device("meta"):
        made = hf.BertForSequenceClassification(config).train()

    def loss(model: Any, batch: Any) -> Tensor:
        value: Tensor = model(**batch).loss
        return value

    given = {"input_ids": torch.zeros(batch, 512, dtype=torch.long), "labels": torch.zeros(batch, dtype=torch.long)}
    found = predict_training_memory(made, loss, given, precision=precision, checkpointing=checkpointing)
    return of_step(found, find_gpu(cell.gpu), passes)


def bert_base(cell: Cell, batch: int, tokens: int) -> Predicted:
    """Returns the prediction of a step of BERT base with Adam, ours in one kernel, in fp32."""
    import transformers as hf

    with torch.device("meta"):
        made = hf.BertForSequenceClassification(hf.BertConfig(attn_implementation="eager")).train()

    def loss(model: Any, batch: Any) -> Tensor:
        value: Tensor = model(**batch).loss
        return value

    given = {"input_ids": torch.zeros(batch, tokens, dtype=torch.long), "labels": torch.zeros(batch, dtype=torch.long)}
    return of_step(predict_training_memory(made, loss, given, precision="fp32"), find_gpu(cell.gpu))


def gpt2(cell: Cell, compiled: bool = False) -> Predicted:
    """Returns the prediction of a step of GPT-2 under autocast to bf16. Compiled, the whole model is a region."""
    import transformers as hf

    with torch.device("meta"):
        none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        made = hf.GPT2LMHeadModel(hf.GPT2Config(**none, attn_implementation="eager", use_cache=False)).train()

    def loss(model: Any, ids: Any) -> Tensor:
        logits = model(input_ids=ids).logits
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())

    ids = torch.zeros(8, 1024, dtype=torch.long)
    if not compiled:
        found = predict_training_memory(made, loss, ids, precision="bf16", gradients_resident=False)
        return of_step(found, find_gpu(cell.gpu))
    timeline = MemoryTimeline.on("cuda")
    with on_fake_tensors(), FunctionsOf("cuda"):
        made = made.to_empty(device="cpu")
        (optimizer,) = make_optimizers("adamw", list(made.parameters()))
        made.transformer.forward = timeline.in_region(made.transformer.forward)
        with timeline.watching():
            with torch.autocast("cpu", torch.bfloat16):
                value = loss(made, ids)
            torch.autograd.backward(value)
            end = len(timeline.log.operators)
            optimizer.step()
    operators = timeline.log.operators
    found = MemoryEstimate.of(timeline, operators[:end], operators[end:], CachingAllocator())
    return of_step(found, find_gpu(cell.gpu), compiled=True)


def unet(cell: Cell) -> Predicted:
    """Returns the prediction of a micro-batch of 16 latents of 32 x 32. The update, once in 16 of them, is left out."""
    import diffusers

    with torch.device("meta"):
        made = diffusers.UNet2DConditionModel(
            sample_size=64, in_channels=4, out_channels=4, cross_attention_dim=1024, attention_head_dim=[5, 10, 20, 20],
            block_out_channels=[320, 640, 1280, 1280], use_linear_projection=True,
        ).train()  # fmt: skip

    def loss(model: Any, batch: Any) -> Tensor:
        latents, times, states = batch
        return F.mse_loss(model(latents, times, states).sample, latents)

    given = (torch.empty(16, 4, 32, 32), torch.zeros(16, dtype=torch.long), torch.empty(16, 77, 1024))
    return of_step(predict_training_memory(made, loss, given, precision="fp16"), find_gpu(cell.gpu), updates=False)


def planned(cell: Cell, case: str, **options: Any) -> Predicted:
    """Returns what `gputrain plan` predicts for a training of ours with the published batch."""
    from tests.planner import step_counts

    make: Any = {"vae": step_counts.of_vae, "tts": step_counts.of_voice, "vocoder": step_counts.of_shipped}[case]
    settings, spec = make(**options)
    (plan,) = ModelPlanner(spec).card_plans(Cards(gpu=(cell.gpu,)), settings, {})
    seconds, peak_gb = plan.time.seconds_per_step, plan.fit.predicted_peak_gb
    assert seconds is not None  # The rates of every card are published.
    return Predicted(seconds, peak_gb, peak_gb)


PROGRAMS: dict[str, Callable[..., Predicted]] = {
    one.__name__: one
    for one in (
        autoencoder,
        denoising,
        generating,
        classifying,
        hifigan,
        pictures,
        texts,
        bert_large,
        bert_base,
        gpt2,
        unet,
        planned,
    )
}


# The table -----------------------------------------------------------------------------------------------------------


def row_of(cell: Cell) -> dict[str, Any]:
    """Returns what is published of a cell and what is predicted, each figure with their ratio and how it was used."""
    found = PROGRAMS[cell.program](cell, **cell.options)
    row: dict[str, Any] = {
        "cell": cell.name, "gpu": find_gpu(cell.gpu).name, "source": SOURCES[cell.source], "note": cell.note,
    }  # fmt: skip
    gb = found.allocated_gb if cell.counted == "allocated" else found.reserved_gb
    for what, published, predicted in (("seconds", cell.seconds, found.seconds), ("gb", cell.gb, gb)):
        if published:
            used = "calibration" if what in cell.calibrated else "claim" if cell.source == "guide" else cell.sort
            row[what] = {
                "published": round(published, 5), "predicted": round(predicted, 5),
                "ratio": round(predicted / published, 3), "sort": used,
            }  # fmt: skip
    if find_gpu(cell.gpu).sustained:
        row["seconds"]["ratio by published rates"] = round(found.by_published_rates / cell.seconds, 3)
    return row | ({"counted": cell.counted} if cell.gb else {})


def summary_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns how many figures of either sort are within the aim, and the range of their ratios."""
    found = {}
    for what, bound in (("seconds", BOUND_SECONDS), ("gb", BOUND_MEMORY)):
        for sort in ("calibration", "held out", "75 W", "beside 75 W"):
            ratios = [row[what]["ratio"] for row in rows if what in row and row[what]["sort"] == sort]
            if ratios:
                within = sum(abs(ratio - 1) <= bound for ratio in ratios)
                found[f"{what}, {sort}"] = {
                    "cells": len(ratios), f"within {100 * bound:g} %": within,
                    "least": min(ratios), "largest": max(ratios), "median": round(statistics.median(ratios), 3),
                }  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORDS", help="default: all cells")
    parser.add_argument("--output-dir", type=Path, default=RESULTS)
    options = parser.parse_args()
    chosen = [cell for cell in CELLS if not options.words or any(word in cell.name for word in options.words)]
    if not chosen:
        parser.error(f"no cell's name contains {' or '.join(options.words)}")
    rows = []
    for cell in chosen:
        rows.append(row_of(cell))
        shown = [f"{what} {one['published']:g} -> predicted {one['predicted']:.4g} ({one['ratio']:.2f}, {one['sort']})"
                 for what in ("seconds", "gb") if (one := rows[-1].get(what))]  # fmt: skip
        if "ratio by published rates" in rows[-1]["seconds"]:
            shown.append(f"{rows[-1]['seconds']['ratio by published rates']:.2f} by published rates")
        print(f"{cell.name:<62}", "; ".join(shown), flush=True)
    report = {
        "title": "What others have published beside what is predicted; nothing is measured here",
        **machine_facts("cpu"),
        "command": runner.command_line("python -m benchmarks.published"),
        "diffusers": version("diffusers"), "transformers": version("transformers"),
        "summary": summary_of(rows), "rows": rows, "left_out": LEFT_OUT,
    }  # fmt: skip
    print(json.dumps(report["summary"], indent=1))
    runner.open_folder(options.output_dir)
    runner.write_json(options.output_dir / "published.json", report)


if __name__ == "__main__":
    main()
