"""The machines that a plan is for, and the price of an hour on each."""

import pytest

from gputrain.errors import UserError
from gputrain.hw.plan import Cards
from gputrain.planner.model_planner import target_machines
from tests.tables import each_row


@each_row(
    ({"gpu": ("t4", "l4"), "price_per_hour": (0.3, 0.8)}, {"t4": 0.3, "l4": 0.8}),
    ({"gpu": ("t4", "l4"), "price_per_hour": (0.5,)}, {"t4": 0.5, "l4": 0.5}),
    ({"gpu": ("t4", "l4")}, {"t4": 0.0, "l4": 0.0}),
    ({"gpu": ("t4",), "vram_gb": (16.0,), "price_per_hour": (0.3, 0.4)}, {"t4": 0.3, "16 GB": 0.4}),
    ({"gpu": ("l4",), "gpus": 4, "price_per_hour": (0.75,)}, {"4 x l4": 3.0}),
    ({"gpu": ("T4 x2", "t4"), "price_per_hour": (0.3, 0.4)}, {"2 x t4": 0.6, "t4": 0.4}),
    ({"gpu": ("2x L4",), "gpus": 2, "vram_gb": (16.0,)}, {"4 x l4": 0.0, "2 x 16 GB": 0.0}),
)
def test_every_gpu_has_its_price(options, prices):
    assert {one.name: one.price_per_hour for one in target_machines(Cards(**options))} == prices


def test_a_count_in_a_name_is_that_of_the_gpus_that_share_the_batch():
    found = target_machines(Cards(gpu=("Kaggle T4 x2", "Colab L4")))
    assert [(one.machine.gpus, one.machine.gpu) for one in found] == [(2, "Tesla T4"), (1, "NVIDIA L4")]
    assert [one.machine.gpus for one in target_machines(Cards(gpus=3))] == [3]


def test_one_price_is_that_of_every_known_gpu():
    found = target_machines(Cards(all_gpus=True, price_per_hour=(2.0,)))
    assert len(found) > 20
    assert {one.price_per_hour for one in found} == {2.0}
    assert [one.price_per_hour for one in target_machines(Cards(price_per_hour=(1.5,)))] == [1.5]


@each_row(
    ({"gpu": ("t4", "l4", "a10"), "price_per_hour": (0.3, 0.8)}, "2 prices for 3 named GPUs"),
    ({"all_gpus": True, "price_per_hour": (0.3, 0.8)}, "2 prices for all known GPUs"),
    ({"price_per_hour": (0.3, 0.8)}, "2 prices for no named GPUs"),
)
def test_prices_that_belong_to_no_gpu_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        Cards(**options)
