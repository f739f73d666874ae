"""Predicts how well training scales over the GPUs of one machine: the least time of a step against that of summing its
gradients. Nothing is measured; the table of docs/distributed.md comes from here.

    python -m benchmarks.rank_efficiency

The time of a step is the larger of two: its FLOPs at the published rate of the GPU, divided among the GPUs, and 4
microseconds for each kernel of a micro-batch, which are not divided, without the compiler. Real steps take longer, so
that the exchange takes a smaller share than predicted. A ring moves 2 (N - 1) / N times the gradients of
each GPU over its slowest link (Patarasuk and Yuan 2009). No overlap with the backward pass is assumed, as there is
none. A cell gives the time of the exchange, and how many times faster than one GPU the same batch is trained, and a
batch that grows with the number of GPUs.
"""

from collections.abc import Iterator

from gputrain.config import assemble
from gputrain.engine.recipe import phases_of
from gputrain.hw.gpus import find_gpu
from gputrain.hw.plan import Hardware, decide
from gputrain.hw.probe import Machine
from gputrain.hw.runtime import apply
from gputrain.planner.kind_work import PlanTarget
from gputrain.planner.memory.fake_runtime import on_fake_tensors
from gputrain.planner.memory.predict import predict_step, step_flops
from gputrain.tts.config import PlanTts
from gputrain.tts.data import size_of
from gputrain.tts.kind import TtsWork
from gputrain.vae.config import TrainVae
from gputrain.vae.kind import VaeWork
from gputrain.vocoder.config import TrainVocoder
from gputrain.vocoder.kind import VocoderWork

GPU, TFLOPS = "H100", 989.0  # Published rate of dense bf16 products.
LINKS_GB_S = {"NVLink": 360.0, "PCIe 4 x16": 25.0}  # 80 % of the published rates in one direction.
LAUNCH_SECONDS = 4e-6
COUNTS = (2, 4, 8)


def trainings() -> Iterator[tuple[str, PlanTarget, int]]:
    """Yields a training of each model at its own default size: name, target, items of a batch."""
    vae = assemble(TrainVae, {"data_path": "unused", "image_size": 512, "batch_size": 32, "adversarial_weight": 0.5})
    yield "VAE flux, 512 px, batch 32", VaeWork().target(vae), 32
    vocoder = assemble(TrainVocoder, {"data_path": "unused", "batch_size": 16})
    yield "vocoder, batch 16", VocoderWork().target(vocoder), 16
    voice = assemble(PlanTts, {"data_path": "unused", "preset": "high", "batch_size": 64})
    size = size_of(voice.speech, voice.data.max_batch_audio_ratio * voice.speech.clip_seconds)
    yield "voice high, batch 64", TtsWork(size).target(voice), 64


def gradient_gb(target: PlanTarget) -> float:
    """Returns the size of the gradients that a step sums over the ranks, in fp32."""
    with on_fake_tensors():
        runtime = apply(decide(Machine(system="", cpu_cores=1), Hardware(device="cpu")))
        recipe = target.build(runtime, False)
        return sum(p.numel() for phase in phases_of(recipe) for p in phase.parameters()) * 4 / 1e9


def main() -> None:
    print(
        f"| training | gradients | step on one {GPU}, least | link | " + " | ".join(f"{n} GPUs" for n in COUNTS) + " |"
    )
    print("|---|---|---|---|" + "---|" * len(COUNTS))
    card = find_gpu(GPU).installed_in(Machine(system="Linux", cpu_cores=16))
    plan = decide(card, Hardware(use_torch_compile=False))
    for name, target, items in trainings():
        size_gb, arithmetic = gradient_gb(target), step_flops(target, 10**9) / (TFLOPS * 1e12)
        kernels = predict_step(target, plan, micro_batch_size=items // max(COUNTS)).micro_batch
        launches = LAUNCH_SECONDS * sum(kernel.launches for kernel in kernels if not kernel.accumulates)
        alone = max(arithmetic, launches)
        for link, rate in LINKS_GB_S.items():
            cells = []
            for count in COUNTS:
                exchange = 2 * (count - 1) / count * size_gb / rate
                together = max(arithmetic / count, launches) + exchange
                grown = count * alone / (alone + exchange)
                cells.append(f"{1000 * exchange:.1f} ms: {alone / together:.2f} / {grown:.2f} x")
            print(f"| {name} | {size_gb:.2f} GB | {1000 * alone:.0f} ms | {link} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
