"""Calibration of the vocoder: predictions against real steps, what a measurement is good for, and a real child."""

import json
import sys
from functools import partial

import pytest

from gputrain.calibration import Resident
from gputrain.config import assemble, flatten
from gputrain.bench import Row, measure_row
from gputrain.hw.plan import decide
from gputrain.hw.probe import Machine
from gputrain.hw.runtime import apply
from gputrain.planning import predict_step
from gputrain.vocoder.calibration import CHILD, calibrated, facts
from gputrain.vocoder.config import TrainVocoder
from gputrain.vocoder.plan import Planner
from gputrain.vocoder.recipe import subject
from tests.vocoder.conftest import TINY

CPU = Machine(system="Linux", cpu_cores=2, torch="2.13")
