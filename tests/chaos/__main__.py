"""Kills, stops, starves and damages tiny trainings of every kind, and resumes them until they have finished.

    python -m tests.chaos --kills 200 --terms 50 --starved 20 --seed 0

The moments are random, counted from the first line that a process prints; a third of the kills come in a save. Every
attempt is the same command with `--resume-from auto`; between the attempts, some checkpoints are damaged. Exits with 1
if an exit code is wrong, damage goes unnoticed, or a finished run differs from the undisturbed one in any bit of its
checkpoints or any of its losses.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos.campaign import STEPS, Campaign
from tests.chaos.disturb import KILLS, STARVED, TERMS
from tests.chaos.tiny import KINDS

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--kills", type=int, default=60, help="over all kinds")
parser.add_argument("--terms", type=int, default=20, help="over all kinds: SIGTERM to the process group")
parser.add_argument(
    "--signals", type=int, default=7, help="over all kinds: SIGINT, SIGHUP, SIGUSR1, and signals sent twice"
)
parser.add_argument("--starved", type=int, default=6, help="over all kinds: data workers killed or held")
parser.add_argument(
    "--damaged-share", type=float, default=0.2, help="share of the attempts after which a file is damaged"
)
parser.add_argument("--steps", type=int, default=STEPS)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--kind", choices=KINDS, action="append")

if __name__ == "__main__":
    given = parser.parse_args()
    kinds, began, failed = given.kind or KINDS, time.monotonic(), False
    print(f"seed {given.seed}", flush=True)
    for number, kind in enumerate(kinds):
        planned = []
        for count, choices in (
            (given.kills, KILLS),
            (given.terms, TERMS[:1]),
            (given.signals, TERMS[1:]),
            (given.starved, STARVED),
        ):
            planned += [choices[index % len(choices)] for index in range(number, count, len(kinds))]
        with tempfile.TemporaryDirectory() as name:
            campaign = Campaign(kind, Path(name), given.seed, given.steps)
            campaign.rng.shuffle(planned)
            campaign.run(planned, damaged_share=given.damaged_share)
        print(campaign.report(), *campaign.faults, sep="\n", flush=True)
        failed = failed or bool(campaign.faults)
    print(f"{time.monotonic() - began:.0f} s")
    sys.exit(failed)
