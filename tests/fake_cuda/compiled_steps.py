"""What the recipes compile, made for a card: `python -m tests.fake_cuda.compiled_steps CASE MAJOR.MINOR FILE [CUBINS]`.

The file says of every compiled function what it became. CUBINS are compute capabilities, such as 8.0,12.0, that every
kernel is compiled to machine code for.
"""

import json
import logging
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.fake_cuda import inductor_target


def layers(card: str) -> None:
    """Forward and backward pass of a memory-efficient layer, in bf16: 4 pictures of 256 pixels, 256 channels."""
    from gputrain.vae import memory_efficient_layers as efficient
    from gputrain.vae.norm_arithmetic import Arithmetic

    norm, conv = nn.GroupNorm(32, 256, device="cuda"), nn.Conv2d(256, 256, 3, padding=1, device="cuda")
    x_BCHW = torch.empty(4, 256, 256, 256, device="cuda", dtype=torch.bfloat16, memory_format=torch.channels_last)
    compiled = Arithmetic.compiled(inductor_target.named_compile)
    with torch.autocast("cuda", torch.bfloat16):
        (out_BCHW, _), _ = efficient.norm_silu_conv(efficient.Features(x_BCHW.requires_grad_()), norm, conv, compiled)
    out_BCHW.backward(torch.empty_like(out_BCHW))


def vae(card: str, **chosen: object) -> None:
    from gputrain.config import assemble
    from gputrain.vae.config import TrainVae
    from gputrain.vae.data import plan_target

    chosen = {"preset": "fast", "image_size": 256, "batch_size": 4, "adversarial_weight": 0.5, **chosen}
    settings = assemble(TrainVae, {"data_path": ".", **chosen})
    inductor_target.run_step(plan_target(settings), 4, card, settings.hardware)


def vocoder(card: str, **chosen: object) -> None:
    from gputrain.config import assemble
    from gputrain.vocoder.config import TrainVocoder
    from gputrain.vocoder.recipe import target

    one_of_each_kind: dict[str, object] = {"discriminator_periods": [3]}
    for kind, size in (("mrd", 1024), ("fast_mrd", 512)):
        one_of_each_kind |= {
            f"{kind}_fft_sizes": [size], f"{kind}_hop_sizes": [size // 8], f"{kind}_win_lengths": [size]
        }  # fmt: skip
    settings = assemble(TrainVocoder, {"data_path": ".", "batch_size": 8, **one_of_each_kind, **chosen})
    inductor_target.run_step(target(settings), 8, card, settings.hardware)


def voice(card: str, preset: str) -> None:
    from gputrain.config import assemble
    from gputrain.speech.buckets import ClipSize
    from gputrain.speech.config import HOP_SIZE
    from gputrain.speech.training import plan_target
    from gputrain.tts.config import TrainTts
    from gputrain.tts.data import SpeechSize, architecture_for
    from gputrain.tts.recipe import VoiceRecipe

    settings = assemble(TrainTts, {"data_path": ".", "batch_size": 8, "preset": preset})
    clip = ClipSize(frames=400, symbols=80)
    architecture = architecture_for(settings, SpeechSize(22050, 60, 1, clip))
    subject = plan_target(VoiceRecipe, settings, architecture, clip, HOP_SIZE)
    inductor_target.run_step(subject, 8, card, settings.hardware)


CASES: dict[str, Callable[[str], None]] = {
    "layers": layers,
    "vae": vae,
    "vae-plain": partial(vae, recompute_norms=False),
    "vocoder": partial(vocoder, precision="bf16"),
    "vocoder-mini": partial(vocoder, precision="tf32", mini_nsf=True, discriminators=["msd", "mpd", "mrd"]),
    "voice": partial(voice, preset="fast"),
    "voice-medium": partial(voice, preset="medium"),
}
CARDS = {(8, 0): "a100-40", (9, 0): "h100", (12, 0): "rtx5090"}


def counts(graphs: list[inductor_target.Graph]) -> dict[str, Any]:
    """By function and pass: graphs, launches of Triton kernels, library calls and MB that the launches move.

    A function has a graph for each shape and each choice of what needs a gradient. `step_launches` and `step_mb` are
    those of the whole step, in which a graph may run several times.
    """
    none = {"graphs": 0, "launches": 0, "calls": 0, "mb": 0.0, "step_launches": 0, "step_mb": 0.0}
    found: dict[str, Any] = defaultdict(none.copy)
    for graph in graphs:
        row = found[f"{graph.function} {'backward' if graph.backward else 'forward'}"]
        row["graphs"] += 1
        row["launches"] += len(graph.launches)
        row["calls"] += len(graph.calls)
        row["mb"] += 1e3 * graph.gb
        row["step_launches"] += graph.runs * len(graph.launches)
        row["step_mb"] += graph.runs * 1e3 * graph.gb
    return dict(found)


def main(case: str, capability: str, file: str, cubins: str = "") -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    major, minor = map(int, capability.split("."))
    record = inductor_target.target((major, minor))
    with FakeTensorMode(allow_non_fake_inputs=True):
        CASES[case](CARDS[major, minor])
    kernels = {kernel.source: kernel for graph in record.graphs for kernel in graph.kernels.values()}
    for card in filter(None, cubins.split(",")):
        one, two = map(int, card.split("."))
        for kernel in kernels.values():
            assert inductor_target.cubin(kernel, (one, two)).startswith(b"\x7fELF"), kernel.name
    breaks = dict(inductor_target.graph_breaks())
    told = {"functions": counts(record.graphs), "kernels": len(kernels), "breaks": breaks}
    Path(file).write_text(json.dumps(told, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
