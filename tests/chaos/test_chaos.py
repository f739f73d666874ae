"""Runs that are killed, stopped, starved or damaged at random moments resume to the weights of undisturbed ones. The
full set is `python -m tests.chaos`."""

import os
import random
import shutil
import signal

import pytest

from tests.chaos.campaign import Campaign
from tests.chaos.disturb import KILLS, STARVED, TERMS, Disturbance
from tests.chaos.tiny import KINDS, differences

SEED = int(os.environ.get("CHAOS_SEED", "0"))
STEPS = 10


@pytest.mark.parametrize("kind", KINDS)
def test_a_disturbed_run_equals_the_undisturbed_one(kind, tmp_path):
    number = KINDS.index(kind)
    campaign = Campaign(kind, tmp_path, SEED, STEPS)
    campaign.run([KILLS[number], [*TERMS, *STARVED][3 * number]], damaged_share=1.0)
    print(campaign.report())
    assert not campaign.faults, "\n".join(campaign.faults)
    assert campaign.compared


def test_a_difference_is_found(tmp_path):
    """The comparison itself: another seed of the training gives other weights and losses."""
    campaign = Campaign("vocoder", tmp_path, SEED, 3)
    shutil.copytree(campaign.straight, campaign.cut)
    assert differences(campaign.cut, campaign.straight) == []
    (campaign.cut / "checkpoint_best.pt").unlink(missing_ok=True)
    metrics = campaign.cut / "metrics.jsonl"
    metrics.write_text("\n".join(metrics.read_text().splitlines()[:-1]) + "\n")
    assert any("metrics.jsonl" in line for line in differences(campaign.cut, campaign.straight))


def test_a_wrong_exit_code_is_found(tmp_path):
    campaign = Campaign("vocoder", tmp_path, SEED, 3)
    killed = Disturbance("a kill that should be a stop", KILLS[0].act, frozenset({75}))
    campaign.seconds, campaign.rng = 0.0, random.Random(0)
    campaign.run([killed], damaged_share=0.0)
    assert any(f"exit code {-signal.SIGKILL}" in fault for fault in campaign.faults)
