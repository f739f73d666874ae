"""Plans of train-vae without the GPU: predictions compared with a reference table, the user's five rows, bad input."""

import json

import pytest

from gputrain.config import assemble
from gputrain.errors import UserError
from gputrain.hw.gpus import find_gpu, known_gpus
from gputrain.hw.plan import decide
from gputrain.planner.memory import timeline
from gputrain.planner.memory.fit import BUDGET_SHARE, MARGIN
from gputrain.planner.memory.predict import predict_step
from gputrain.planner.model_planner import (
    NCCL_GB,
    CardPlan,
    ModelPlanner,
    memory_budget,
    plan_cards,
    published_rates,
    target_machines,
)
from gputrain.vae.config import PlanVae
from gputrain.vae.data import item_flops, plan_target
from gputrain.vae.kind import VaeWork
from tests.command import gputrain_here
from tests.tables import slow

ROWS = [(512, 32), (768, 24), (1024, 16), (1536, 8), (2048, 4)]
# GB at the peak with the whole batch at once: bf16, AdamW, EMA, L1 and KL, as counted for stock diffusers and for a
# prototype of the layers that recompute norms.
STOCK = (252, 424, 503, 565, 503)
LEAN = (61, 101, 120, 134, 120)
BOUNDS = (18, 22, 26, 28, 30)  # GB of the five rows in the user's guide


def settings(**values) -> PlanVae:
    return assemble(PlanVae, values if "vram_gb" in values else {"gpu": "rtx5090", **values})


def global_batch_size(side: int, batch: int, **values) -> float:
    asked = settings(image_size=side, batch_size=batch, perceptual_weight=0, **values)
    (machine_target,) = target_machines(asked.cards)
    return predict_step(
        plan_target(asked), decide(machine_target.machine, asked.hardware), micro_batch_size=batch
    ).allocated_gb


@pytest.mark.parametrize("row", [slow(row) for row in range(5)], ids=lambda row: str(ROWS[row]))
def test_rows_of_the_reference_table(row, monkeypatch):
    """The reference counted tensors alone; cuDNN's workspaces add 0.8 %."""
    monkeypatch.setattr(timeline, "cudnn_workspace", lambda *arguments, **named: (0, 0))
    side, batch = ROWS[row]
    assert global_batch_size(side, batch, recompute_norms=False, use_torch_compile=False) == pytest.approx(
        STOCK[row], rel=0.005
    )
    assert global_batch_size(side, batch) == pytest.approx(LEAN[row], rel=0.05)


@pytest.mark.slow
def test_the_users_five_rows_on_an_rtx5090():
    planner = ModelPlanner(VaeWork())
    for (side, batch), bound in zip(ROWS, BOUNDS, strict=True):
        # A plan fills the memory that it may take: the guide's memory, with the margin that it keeps free.
        asked = settings(image_size=side, batch_size=batch, memory_budget=min(29.7, bound * MARGIN))
        (machine_target,) = target_machines(asked.cards)
        switches = decide(machine_target.machine, asked.hardware)
        _, found = planner.plan(
            asked,
            switches,
            memory_budget(
                machine_target.machine, switches, asked.hardware, published_rates(machine_target.gpu, switches)
            ),
        )
        assert found.fits
        assert found.predicted_peak_gb <= bound
        assert found.micro_batch_size * found.accumulation_steps == batch


SMALL = {"preset": "fast", "channels": "32,32", "image_size": 64, "batch_size": 8}


@pytest.mark.slow
def test_a_perceptual_network_counts_with_its_weights_and_its_arithmetic():
    asked = settings(**SMALL)
    seen = settings(**SMALL, perceptual_loss="lpips", lpips_weights="unused")
    (machine_target,) = target_machines(asked.cards)
    switches = decide(machine_target.machine, asked.hardware)
    plain, perceptual = (predict_step(plan_target(one), switches, micro_batch_size=1) for one in (asked, seen))
    vgg16 = 14_714_688 * 4 / 1e9  # its convolutions
    assert perceptual.parts["parameters"] - plain.parts["parameters"] == pytest.approx(vgg16, rel=0.01)
    # Two pictures forward, and one backward to the picture.
    forward = 2 * 64 * 64 * 9 * (3 * 64 + 64 * 64 + (64 * 128 + 128**2) / 4 + (128 * 256 + 2 * 256**2) / 16)
    forward += 2 * 64 * 64 * 9 * ((256 * 512 + 2 * 512**2) / 64 + 3 * 512**2 / 256)
    assert perceptual.flops - plain.flops == pytest.approx(3 * forward, rel=0.05)
    assert item_flops(seen, 0) - item_flops(asked, 0) == pytest.approx(3 * forward, rel=0.05)


def test_a_named_gpu_that_is_not_used_is_said(caplog):
    """The configuration of a run on a CPU names the CPU."""
    small = {"preset": "fast", "channels": [32, 32], "image_size": 32, "batch_size": 1, "gpu": "h100"}
    assert plan_cards(VaeWork(), settings(**small, device="cuda"))[0].plan.device.value == "cuda"
    assert not caplog.messages
    assert plan_cards(VaeWork(), settings(**small, device="cpu"))[0].plan.device.value == "cpu"
    assert caplog.messages == ["the device is cpu, so that h100 is not used; --device cuda plans for it"]


@pytest.mark.slow
def test_a_plan_in_json():
    words = ["plan", "train-vae", "--gpu", "rtx5090", "--gpu", "t4,l4", "--vram-gb", 24, "--json"]
    words += ["--items", 1000, "--price-per-hour", 1.5]
    words += [word for name, value in SMALL.items() for word in ("--" + name.replace("_", "-"), value)]
    plans = json.loads(gputrain_here(*words).stdout)
    assert [plan["gpu"] for plan in plans] == ["rtx5090", "t4", "l4", "24 GB"]
    assert [plan["precision"] for plan in plans] == ["bf16", "fp16", "bf16", "bf16"]
    for plan in plans:
        assert plan["micro_batch_size"] * plan["accumulation_steps"] == 8
        assert plan["fits"]
        assert not plan["checkpointing"]
        assert plan["predicted_peak_gb"] == pytest.approx(sum(plan["parts"].values()))
        assert {"precision", "micro_batch_size", "gradient_checkpointing", "num_workers"} <= plan["reasons"].keys()
        assert all(len(reason) > 10 for reason in plan["reasons"].values())
    seconds = [plan["predicted_seconds_per_step"] for plan in plans]
    assert 0 < seconds[0] < seconds[2] < seconds[1]  # A T4 has about the bandwidth of an L4, and half the FLOPS.
    assert seconds[3] is None  # The GPU has no name.
    for plan in plans[:3]:
        assert plan["predicted_items_per_second"] == pytest.approx(8 / plan["predicted_seconds_per_step"])
        compiling = 60 * ("the first step compiles" in plan["reasons"]["compile"])
        seconds = compiling + 100 * 125 * plan["predicted_seconds_per_step"]
        assert plan["predicted_hours"] == pytest.approx(seconds / 3600)
        assert plan["predicted_cost"] == pytest.approx(1.5 * plan["predicted_hours"])


@pytest.mark.slow
def test_a_plan_that_does_not_fit_names_what_would():
    (plan,) = plan_cards(VaeWork(), settings(preset="lite", image_size=1024, batch_size=1, vram_gb="3"))
    assert not plan.fit.fits
    assert plan.fit.checkpointing
    size = next(remedy for remedy in plan.remedies if remedy.startswith("--image-size"))
    assert 256 <= int(size.split()[1]) < 1024
    assert any(remedy.startswith("--preset fast would take") for remedy in plan.remedies)
    card = find_gpu(next(remedy for remedy in plan.remedies if remedy.startswith("a card of")).split()[7].strip(","))
    needed_gb = plan.fit.predicted_peak_gb * MARGIN / BUDGET_SHARE
    assert card.memory_gb == min(gpu.memory_gb for gpu in known_gpus().values() if gpu.memory_gb >= needed_gb)


def test_cards_that_are_not_known():
    with pytest.raises(UserError, match="unknown GPU 'rtx5900'") as raised:
        plan_cards(VaeWork(), settings(gpu="rtx5900"))
    assert "rtx5090" in raised.value.hint
    with pytest.raises(UserError, match="a memory budget of 20 GB on a card of 16"):
        plan_cards(VaeWork(), settings(gpu="t4", memory_budget=20))


@pytest.mark.slow
def test_gpus_share_a_batch():
    """Each of four GPUs is planned for its quarter of the batch, with 1 GB less for the exchange."""
    planner = ModelPlanner(VaeWork())

    def planned(**cards: object) -> CardPlan:
        settings = assemble(PlanVae, {"image_size": 64, "channels": (128, 128), "batch_size": 30, **cards})
        (only,) = planner.card_plans(settings.cards, settings, {})
        return only

    one, four = planned(gpu=("rtx4090",)), planned(gpu=("rtx4090",), gpus=4)
    assert [plan.gpu for plan in (one, four)] == ["rtx4090", "4 x rtx4090"]
    assert [plan.fit.micro_batch_size * plan.fit.accumulation_steps for plan in (one, four)] == [30, 8]
    assert one.fit.budget_gb - four.fit.budget_gb == pytest.approx(NCCL_GB)
