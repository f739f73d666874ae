"""Lengths of clips: limits by counting, pieces by their properties."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputrain.autoconfig.lengths import checked, is_over, limit_length, piece_count
from gputrain.errors import UserError
from tests.tables import each_row


@each_row(([1.0, math.nan], "clip 1: a length of nan"), ([2, 0], "clip 1: a l"))
def test_what_is_no_length_is_named(lengths, what):
    with pytest.raises(UserError, match=what):
        checked(lengths)


def test_none_negative_and_infinite_lengths():
    with pytest.raises(UserError, match="empty"):
        checked([])
    with pytest.raises(UserError, match="clip 0 and 1 more: a length of -3 s"):
        checked([-3, 1, math.inf])


def test_the_limit_is_the_longest_clip():
    found = limit_length(np.array([3.0, 12.5, 7.0]), "chunk")
    assert (found.seconds, found.clips_over, found.hours_share) == (12.5, 0, 0)


def test_a_rare_outlier_does_not_set_the_limit():
    lengths = np.array([10.0] * 399 + [100.0])
    found = limit_length(lengths, "refuse")
    assert (found.seconds, found.clips_over) == (10, 1)
    assert found.hours_share == pytest.approx(100 / 4090)
    assert "1 longer of 400 clips, 2.4% of the hours, are left out" in found.reason
    assert limit_length(lengths[-50:], "refuse").seconds == 100  # One of 50 is not rare.
    assert limit_length(np.array([10.0] * 399 + [14.0]), "refuse").seconds == 14  # nor is this one far


def test_what_does_not_fit_is_too_long():
    found = limit_length(np.array([5.0, 20.0, 25.0]), "chunk", fitting_seconds=12.3456)
    assert (found.seconds, found.clips_over, found.hours_share) == (12.34, 2, 0.9)
    assert "does not fit even alone" in found.reason


def test_what_is_asked_for_is_the_limit():
    lengths = np.array([10.0] * 399 + [100.0])
    found = limit_length(lengths, "chunk", asked_seconds=50)
    assert (found.seconds, found.clips_over) == (50, 1)
    assert "asked for at most 50.0 s; 1 longer of 400 clips" in found.reason
    assert limit_length(lengths, "chunk", asked_seconds=200).seconds == 100


@given(st.floats(0.05, 60), st.floats(0.1, 60))
def test_pieces_are_the_fewest_under_the_limit(seconds, limit):
    count = piece_count(seconds, limit)
    assert not is_over(seconds / count, limit)
    assert count == 1 or is_over(seconds / (count - 1), limit * (1 - 1e-9))
