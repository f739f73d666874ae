"""Predicts the memory of a VAE step with the whole batch on fake tensors: the table of docs/evidence/vae_guide.md.

    python benchmarks/vae_memory.py

The settings are bf16 by CUDA's autocast rules, AdamW, EMA, L1 and KL, and the switches of an RTX 5090. No GPU is
needed, and nothing is measured. GB is 1e9 bytes.
"""

from gputrain.config import assemble
from gputrain.hw.gpus import find_gpu
from gputrain.hw.plan import decide
from gputrain.hw.probe import probe
from gputrain.planner.memory.predict import predict_step
from gputrain.vae.config import TrainVae
from gputrain.vae.data import plan_target

ROWS = ((512, 32), (768, 24), (1024, 16), (1536, 8), (2048, 4))
DESIGNS = {
    "stock layers": {"recompute_norms": False, "use_torch_compile": False},
    "memory-efficient layers, not compiled": {"use_torch_compile": False},
    "memory-efficient layers, compiled": {},
    "memory-efficient layers, compiled, checkpointed": {"gradient_checkpointing": True},
    "`lite`, memory-efficient layers, compiled": {"preset": "lite"},
    "`fast`, memory-efficient layers, compiled": {"preset": "fast"},
}


def whole_batch_gb(side: int, batch: int, design: dict[str, object]) -> float:
    settings = assemble(
        TrainVae, {"data_path": ".", "image_size": side, "batch_size": batch, "perceptual_weight": 0, **design}
    )
    plan = decide(find_gpu("rtx5090").installed_in(probe()), settings.hardware)
    repeats = bool(settings.model.gradient_checkpointing)
    return predict_step(plan_target(settings), plan, micro_batch_size=batch, checkpointing=repeats).allocated_gb


def main() -> None:
    print(f"{'':28}", *(f"{side}x{batch}".rjust(8) for side, batch in ROWS))
    for name, design in DESIGNS.items():
        print(f"{name:28}", *(f"{whole_batch_gb(*row, design):8.1f}" for row in ROWS), flush=True)


if __name__ == "__main__":
    main()
