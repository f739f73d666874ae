"""Figures that others have published, with their sources. benchmarks/published.py predicts them."""

from dataclasses import dataclass, field
from typing import Any, Literal

MIB = 2**20 / 1e9  # GB of a MiB, which many programs print as MB.
TIMM = "https://github.com/huggingface/pytorch-image-models/blob/c865028c/results/"
EXAMPLES = "https://github.com/NVIDIA/DeepLearningExamples/blob/729963dd/PyTorch/"
SOURCES = {
    "invokeai": "https://github.com/invoke-ai/InvokeAI/tree/7785061e/vae_benchmarks (torch 2.7; MiB)",
    "hybrid": "https://huggingface.co/docs/diffusers/hybrid_inference/vae_encode and vae_decode (fp16 is assumed)",
    "capacitor": "https://huggingface.co/data-archetype/capacitor_decoder and full_capacitor",
    "bert": "https://github.com/huggingface/transformers/pull/28802 (torch 2.2; model_doc/bert.md)",
    "opt": "https://github.com/huggingface/transformers/pull/33298 (torch 2.4)",
    "anatomy": "https://huggingface.co/docs/transformers/v4.21.0/perf_train_gpu_one (MiB by NVML, 1343 of them before "
    "the model is loaded)",
    "timm-nhwc": TIMM + "benchmark-train-amp-nhwc-pt112-cu113-rtx3090.csv (torch 1.12)",
    "timm-nchw": TIMM + "benchmark-train-amp-nchw-pt112-cu113-rtx3090.csv (torch 1.12)",
    "nanogpt": "https://github.com/karpathy/nanoGPT/commit/5a725d90 (torch 2.0 nightly)",
    "mosaic": "https://github.com/mosaicml/diffusion/blob/066e68fa/README.md (torch 1.13, eight cards)",
    "diffusers": "https://github.com/huggingface/diffusers/blob/2c529b75/docs/source/en/optimization/torch2.0.md "
    "(torch 2.0, not compiled)",
    "examples": EXAMPLES + "Classification/ConvNets/resnet50v1.5/README.md (torch 1.9, 21.03)",
    "hifigan": EXAMPLES + "SpeechSynthesis/HiFiGAN/README.md (torch 1.11, 21.12, TorchScript, no denoising)",
    "apple": "https://github.com/lucadiliello/pytorch-apple-silicon-benchmarks/tree/45596026 (100 steps)",
    "webui": "https://github.com/vladmandic/sd-extension-system-info at 0a93d2ee, pages/benchmark-data.json (batch 4; "
    "medians of entries with xformers or sdp, none)",
    "guide": "docs/corrections.md: a guide to VAEs and vocoders on an RTX 5090, a report on VITS on an RTX 4090",
}  # fmt: skip

Counted = Literal["allocated", "reserved", "in use"]


@dataclass(frozen=True)
class Cell:
    """A published figure of a model on a card, and the function of benchmarks/published.py that predicts it."""

    model: str
    size: str
    precision: str
    gpu: str  # Its key in gputrain/hw/gpus.yaml.
    source: str
    program: str
    options: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0  # 0: not published.
    gb: float = 0.0
    counted: Counted = "allocated"  # By `gb`, beyond the weights where only those are there before.
    calibrated: tuple[str, ...] = ()  # "seconds", "gb": a part of our model was chosen while this figure was looked at.
    sort: str = "held out"  # What it is used for, if it is neither calibrated nor of a `guide`.
    quick: bool = False  # It is predicted in every run of the tests.
    note: str = ""

    @property
    def name(self) -> str:
        return f"{self.model}, {self.size}, {self.precision}, {self.gpu}"


CACHE = ("seconds",)  # The eight times on which the factor of the second-level cache was chosen.
WORKSPACE = ("gb",)  # Memory by which cuDNN's workspaces were recognised.
BOTH: dict[str, Any] = {
    "with_weights": True, "note": "another decoder's weights, of about 0.14 GB, are in their memory too"
}  # fmt: skip
GUIDE = "no device, version or program is named with it; ours is what `gputrain plan` plans for the same batch"
PYTHON = "many small kernels, which Python launches more slowly than the 4 microseconds of the roofline"
EAGER = "products of 768 and 1024 columns reach less of the card's rate than the 0.8 of large ones"
OPT = f"{EAGER}; memory: measured with transformers 4.45, predicted with the installed one; why less is not known"
BOOST = "a GeForce card clocks above the rate that is published for it"
NVML = "NVML counts what libraries allocate by themselves, too; how much that is, is not published"
NANO = "the card is not named with the figure (the README names an A100 of 40 GB); reading of data and losses included"
FSDP = f"{PYTHON}; one of eight cards that exchange weights and gradients (FSDP), with the loop of Composer"
QKV = f"{BOOST}; timm computes q, k and v as one product"


def _vae(model: str, part: str, size: int, gpu: str, source: str, seconds: float, **more: Any) -> Cell:
    batch, weights = more.pop("batch", 1), more.pop("with_weights", False)
    options = {"model": model, "part": part, "size": size, "batch": batch, "with_weights": weights}
    name = f"{model} VAE, {part}"
    return Cell(
        name,
        f"{batch} x {size} px",
        more.pop("precision", "fp16"),
        gpu,
        source,
        "autoencoder",
        options,
        seconds,
        **more,
    )


def _picture(model: str, batch: int, layout: str, seconds: float, note: str = "", **more: Any) -> Cell:
    return Cell(
        model, f"{batch} x 224 px, {layout}", "fp16", "rtx3090", f"timm-{layout}", "pictures",
        {"model": model, "batch": batch, "layout": layout}, seconds, note=note, **more,
    )  # fmt: skip


def _texts(model: str, how: str, batch: int, tokens: int, gpu: str, seconds: float, mb: float, **more: Any) -> Cell:
    options = {"model": model, "attention": how, "batch": batch, "tokens": tokens}
    source = more.pop("source", model.split("-")[0])
    return Cell(
        f"{model}, {how} attention", f"{batch} x {tokens} tokens", "fp16 weights", gpu, source, "texts", options,
        seconds, mb / 1e3, **more,
    )  # fmt: skip


def _large(batch: int, samples: float, mb: int, passes: int = 1, precision: str = "fp32", **more: Any) -> Cell:
    repeats = more.pop("checkpointing", False)
    size = f"{batch * passes} x 512 tokens" + (f" as {passes} micro-batches" if passes > 1 else "")
    options = {"batch": batch, "passes": passes, "precision": precision, "checkpointing": repeats}
    return Cell(
        "BERT large" + (", checkpointed" if repeats else ""), size, precision, "v100-16", "anatomy", "bert_large",
        options, batch * passes / samples, (mb - 1343) * MIB, "reserved", **more,
    )  # fmt: skip


def _beside(
    model: str, size: str, precision: str, source: str, program: str, seconds: dict[str, float], **options: Any
) -> list[Cell]:
    """Returns a cell for each card that one source measured: those that a slot of 75 W feeds, and those beside them."""
    return [
        Cell(
            model, size, precision, gpu, source, program, options, took,
            sort="75 W" if gpu in SLOT_FED else "beside 75 W",
        )
        for gpu, took in seconds.items()
    ]  # fmt: skip


def _denoising(batch: int, iterations: dict[str, float]) -> list[Cell]:
    seconds = {gpu: 1 / rate for gpu, rate in iterations.items()}
    size = f"{batch} x 512 px"
    return _beside("SD 1.5 U-Net, denoising step", size, "fp16", "diffusers", "denoising", seconds, batch=batch)


def _bert_base(tokens: int, batch: int, t4: float, v100: float) -> list[Cell]:
    size, seconds = f"{batch} x {tokens} tokens", {"t4": t4, "v100-16": v100}
    return _beside("BERT base, training", size, "fp32", "apple", "bert_base", seconds, batch=batch, tokens=tokens)


RESERVED: dict[str, Any] = {"counted": "reserved", "calibrated": CACHE + WORKSPACE}

CELLS = [
    _vae("FLUX", "encode", 1024, "rtx4090", "invokeai", 0.0794, gb=1798 * MIB, **RESERVED),
    _vae("FLUX", "decode", 1024, "rtx4090", "invokeai", 0.1534, gb=4260 * MIB, **RESERVED),
    _vae("FLUX", "encode", 2048, "rtx4090", "invokeai", 0.4071, gb=7198 * MIB, **RESERVED),
    _vae("FLUX", "decode", 2048, "rtx4090", "invokeai", 0.6930, gb=16932 * MIB, **RESERVED),
    _vae("SD", "encode", 512, "rtx4090", "hybrid", 0.015, calibrated=CACHE, quick=True),
    _vae("SD", "decode", 512, "rtx4090", "hybrid", 0.031, calibrated=CACHE),
    _vae("SD", "encode", 512, "rtx3090", "hybrid", 0.032, calibrated=CACHE),
    _vae("SD", "decode", 512, "rtx3090", "hybrid", 0.062, calibrated=CACHE),
    _vae("SD", "encode", 1024, "rtx4090", "invokeai", 0.0816, gb=1536.28 * MIB, calibrated=WORKSPACE, quick=True),
    _vae("SD", "decode", 1024, "rtx4090", "invokeai", 0.1538, gb=2434.23 * MIB, calibrated=WORKSPACE, quick=True),
    _vae("SD", "encode", 1024, "rtx4090", "invokeai", 0.1510, gb=2560.56 * MIB, precision="fp32", calibrated=WORKSPACE),
    _vae("SD", "decode", 1024, "rtx4090", "invokeai", 0.2798, gb=3842.70 * MIB, precision="fp32", calibrated=WORKSPACE),
    _vae("SD", "decode", 1024, "rtx4080", "hybrid", 0.224),
    _vae("SD", "encode", 1024, "rtx3090", "hybrid", 0.136),
    _vae("SD", "decode", 1024, "rtx3090", "hybrid", 0.253),
    _vae("SD", "encode", 1024, "rtx3080", "hybrid", 0.157),
    _vae("SD", "decode", 1024, "rtx3080", "hybrid", 0.286),
    _vae("SD", "decode", 512, "rtx3070", "hybrid", 0.102),
    _vae("FLUX.2", "encode", 512, "rtx5090", "capacitor", 0.35358, batch=32, precision="bf16"),
    _vae("FLUX.2", "encode", 256, "rtx5090", "capacitor", 0.38341, batch=128, precision="bf16"),
    _vae("FLUX.2", "decode", 512, "rtx5090", "capacitor", 0.02503, precision="bf16", gb=920.5 * MIB, **BOTH),
    _vae("FLUX.2", "decode", 1024, "rtx5090", "capacitor", 0.12535, precision="bf16", gb=2795.2 * MIB, **BOTH),
    _vae("FLUX.2", "decode", 2048, "rtx5090", "capacitor", 0.61134, precision="bf16", gb=10291.8 * MIB, **BOTH),
    _picture("ResNet-50", 512, "nhwc", 0.419528, quick=True),
    _picture("ResNet-50", 512, "nchw", 0.618983, quick=True),
    _picture("ResNet-101", 256, "nhwc", 0.340740),
    _picture("ResNet-101", 256, "nchw", 0.448321),
    _picture("ConvNeXt-B", 128, "nhwc", 0.376119),
    _picture("ViT-B/16", 192, "nchw", 0.490391, QKV),
    _picture("ViT-L/16", 64, "nchw", 0.544981, QKV),
    _picture("Swin-B", 128, "nchw", 0.455817, QKV),
    _texts("bert-base", "eager", 4, 256, "a100-80", 0.023, 939.213, note=PYTHON),
    _texts("bert-base", "eager", 16, 512, "a100-80", 0.064, 6964.659, note=EAGER, quick=True),
    _texts("bert-base", "sdpa", 16, 256, "a100-80", 0.024, 2134.262, note=f"{EAGER}; {PYTHON}"),
    _texts("bert-base", "sdpa", 16, 512, "a100-80", 0.044, 3961.013, note=EAGER, quick=True),
    _texts("opt-350m", "sdpa", 8, 512, "l40s", 0.060, 4750.55, note=OPT),
    _texts("opt-350m", "sdpa", 8, 1024, "l40s", 0.122, 8821.18, note=OPT),
    _large(4, 8.86, 14949, note=NVML),
    _large(1, 7.75, 8681, 4, note=f"{NVML}; fp32 on a V100 does more than 0.8 of its published rate"),
    _large(1, 5.99, 6775, 4, checkpointing=True, note="fp32 on a V100 does more than 0.8 of its published rate"),
    _large(4, 18.64, 13939, precision="fp16", note=f"{NVML}; their AdamW is a loop of separate kernels, ours one"),
    Cell("GPT-2 124M, eager", "8 x 1024 tokens", "bf16", "a100-40", "nanogpt", "gpt2", {}, 0.250, note=NANO),
    Cell("GPT-2 124M, compiled", "8 x 1024 tokens", "bf16", "a100-40", "nanogpt", "gpt2", {"compiled": True}, 0.135,
         note=NANO),
    Cell("SD 2 U-Net", "16 x 256 px a micro-batch", "fp16", "a100-80", "mosaic", "unet", {}, 16 / (1100 / 8),
         note=FSDP),
    Cell("VAE flux, a whole step", "16 x 1024 px", "bf16", "rtx5090", "guide", "planned",
         {"case": "vae", "preset": "flux", "image_size": 1024, "batch_size": 16}, 0.9, 26.0, "in use", note=GUIDE),
    Cell("vocoder, optimised configuration", "32 x 80 frames", "fp16", "rtx5090", "guide", "planned",
         {"case": "vocoder", "name": "base_hifi_rtx5090_optimized"}, 0.5, 26.5, "in use", note=GUIDE),
    Cell("VITS, a whole step", "64 x 5 s", "bf16", "rtx4090", "guide", "planned",
         {"case": "tts", "preset": "high", "batch_size": 64, "clip_seconds": 5.0}, 25.45 * 3600 / 130_000, 23.4,
         "in use", note=GUIDE),
]  # fmt: skip

SLOT_FED = ("t4", "l4", "p4", "rtxa2000-12")
CELLS += [
    *_denoising(1, {"t4": 6.9, "v100-16": 18.99, "rtx3090": 22.56}),
    *_denoising(4, {"t4": 1.79, "v100-16": 5.96, "rtx3090": 6.46}),
    *_denoising(16, {"t4": 1 / 2.34, "v100-16": 1.66, "rtx3090": 1.7}),
    *_beside("ResNet-50, inference", "128 x 224 px, nhwc", "fp16", "examples", "classifying",
             {"t4": 128 / 1190, "v100-16": 128 / 3249}, half=True),
    *_beside("ResNet-50, inference", "128 x 224 px, nchw", "fp32", "examples", "classifying",
             {"t4": 128 / 426, "v100-16": 128 / 1229}, half=False),
    *_bert_base(128, 16, 0.31, 0.12),
    *_bert_base(128, 64, 1.20, 0.41),
    *_bert_base(512, 16, 1.45, 0.47),
    *_beside("HiFi-GAN V1, inference", "8 x 8.05 s", "fp16", "hifigan", "hifigan", {"t4": 0.399, "v100-16": 0.139}),
    *_beside("SD 1.5 with its VAE, 20 steps", "4 x 512 px", "fp16", "webui", "generating", {
        gpu: 80 / rate for gpu, rate in {
            "t4": 5.07, "l4": 12.09, "p4": 1.85, "rtxa2000-12": 8.09, "rtx3060": 7.86, "p100pcie-16": 4.09,
            "rtx3060laptop": 8.06, "rtx3070laptop": 9.77, "rtx3090": 20.12,
        }.items()
    }),
]  # fmt: skip

# What is published and cannot be predicted honestly, and why.
LEFT_OUT = {
    "Piper medium on an RX 7600, about a minute an epoch (https://github.com/OHF-Voice/piper1-gpl/issues/66)":
        "neither the number of clips nor the batch is named, and gpus.yaml has no AMD cards",
    "BigVGAN's table of speed and memory (https://github.com/NVIDIA/BigVGAN)":
        "it is inference, and no package that is installed here has the model",
    "memory in per cent of a card, of diffusers' hybrid-inference page":
        "the page does not say whether it is allocated or reserved, nor what else is in it",
    "steps of torchtune and LitGPT": "adapters, quantised weights or optimizers that are not modelled",
    "steps of wav2vec 2.0": "pages with a batch, a clip length, a card and a time were not found",
}  # fmt: skip
