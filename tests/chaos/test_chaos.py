"""Runs that are killed, stopped, starved or damaged at random moments resume to the weights of undisturbed ones. The
full set is `python -m tests.chaos`."""

import os
import shutil
import signal

import pytest

from tests.chaos.campaign import Campaign
from tests.chaos.disturb import KILLS, STARVED, TERMS
from tests.chaos.tiny import KINDS, differences

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


@pytest.mark.slow
def test_differences_and_wrong_exit_codes_are_found(tmp_path):
    campaign = Campaign("vocoder", tmp_path, SEED, 3)
    shutil.copytree(campaign.straight, campaign.cut)
    assert differences(campaign.cut, campaign.straight) == []
    metrics = campaign.cut / "metrics.jsonl"
    metrics.write_text("\n".join(metrics.read_text().splitlines()[:-1]) + "\n")
    assert any("metrics.jsonl" in line for line in differences(campaign.cut, campaign.straight))
    (campaign.cut / "checkpoint_previous.pt").unlink()
    assert any("files: ['checkpoint_previous.pt']" in line for line in differences(campaign.cut, campaign.straight))
    for code, said in ((-signal.SIGKILL, "step 1/3"), (75, "step 1/3"), (0, "Traceback")):
        before = len(campaign.faults)
        campaign._check("a stop", code, said, TERMS[0].codes)
        assert len(campaign.faults) == before + 1
    campaign._check("a stop", 75, "step 1/3 | asked to terminate after step 1; everything is saved", TERMS[0].codes)
    assert len(campaign.faults) == 3
