"""Runs that are killed, stopped, starved or damaged at random moments resume to the weights of undisturbed ones. The
full set is `python -m tests.chaos`."""

import os

import pytest

from tests.chaos.campaign import Campaign
from tests.chaos.disturb import KILLS, STARVED, TERMS
from tests.chaos.tiny import KINDS

SEED = int(os.environ.get("CHAOS_SEED", "0"))
STEPS = 8


QUICK = {"vae": KILLS[1], "vocoder": TERMS[0], "tts": STARVED[1], "asr": KILLS[0]}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_disturbed_run_equals_the_undisturbed_one(kind, tmp_path):
    campaign = Campaign(kind, tmp_path, SEED, STEPS)
    campaign.run([QUICK[kind]], damaged_share=1.0)
    print(campaign.report())
    assert not campaign.faults, "\n".join(campaign.faults)
    assert campaign.compared


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_disturbed_in_every_way_equals_the_undisturbed_one(kind, tmp_path):
    campaign = Campaign(kind, tmp_path, SEED, STEPS)
    campaign.run([*KILLS, *TERMS, *STARVED], damaged_share=0.3)
    assert not campaign.faults, "\n".join(campaign.faults)
