"""Lengths of clips: curves against polynomials, limits by counting, buckets by their properties."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputrain.autoconfig.lengths import LengthCurve, checked, is_over, limit_length, make_buckets, pieces
from gputrain.errors import UserError
from tests.tables import each_row

clips = st.lists(st.floats(0.05, 60), min_size=1, max_size=200).map(lambda values: np.array(values))
curves = st.builds(LengthCurve, st.floats(0, 0.1), st.floats(1e-4, 0.5), st.floats(0, 0.01))


@each_row(([1.0, math.nan], "clip 1: a length of nan"), ([2, 0], "clip 1: a l"))
def test_what_is_no_length_is_named(lengths, what):
    with pytest.raises(UserError, match=what):
        checked(lengths)


def test_none_negative_and_infinite_lengths():
    with pytest.raises(UserError, match="empty"):
        checked([])
    with pytest.raises(UserError, match="clip 0 and 1 more: a length of -3 s"):
        checked([-3, 1, math.inf])


@given(curves, st.floats(0.5, 60))
def test_a_curve_is_found_from_three_of_its_points(curve, longest):
    points = {seconds: curve.item_gb(seconds) for seconds in (longest / 4, longest / 2, longest)}
    found = LengthCurve.through(points)
    for seconds in (longest / 3, longest):
        # Rounding may make a coefficient of about nothing negative, and then it is a line that lies no lower.
        assert found.item_gb(seconds) == pytest.approx(curve.item_gb(seconds), rel=1e-6) or (
            found.linear == max(gb / s for s, gb in points.items())
        )
        assert found.item_gb(seconds) >= curve.item_gb(seconds) * (1 - 1e-6)


def test_a_curve_by_hand():
    found = LengthCurve.through({1.0: 6.0, 2.0: 11.0, 3.0: 18.0})
    assert (found.constant, found.linear, found.quadratic) == pytest.approx((3, 2, 1))
    assert found.longest(11) == pytest.approx(2)
    assert found.longest(3) == 0


def test_a_curve_that_would_fall_is_a_line_above_its_points():
    found = LengthCurve.through({10.0: 1.0, 20.0: 1.5, 40.0: 1.6})
    assert (found.constant, found.linear, found.quadratic) == (0, 0.1, 0)


@given(curves, st.floats(0.01, 50))
def test_the_longest_item_takes_what_there_is(curve, gb):
    seconds = curve.longest(gb)
    assert seconds == 0 if gb <= curve.constant else curve.item_gb(seconds) == pytest.approx(gb)


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


@given(clips, st.floats(0.1, 60))
def test_pieces_keep_the_hours_and_the_limit(lengths, limit):
    cut = pieces(lengths, limit, "chunk")
    assert cut.sum() == pytest.approx(lengths.sum())
    assert not is_over(cut, limit).any()
    assert len(cut) < len(lengths) + lengths.sum() / limit + 1e-9 + len(lengths)
    kept = pieces(lengths, limit, "refuse")
    assert kept.tolist() == [seconds for seconds in lengths if seconds <= limit * 1.001]


def test_the_last_bucket_reaches_to_the_longest_clip_that_is_allowed():
    found = make_buckets(np.array([1.0, 2, 3]), lambda seconds: seconds, 8, 4, 3, longest=4.0)
    assert [(b.to_seconds, b.micro_batch_size) for b in found] == [(1, 4), (2, 4), (4, 2)]
    assert [b.micro_batch_size for b in make_buckets(np.array([1.0, 3]), lambda s: s, 8, 4, 2, smallest=2)] == [4, 2]


@given(clips, curves, st.floats(1, 40), st.integers(1, 64), st.integers(1, 9))
def test_buckets_hold_every_clip_once_and_nothing_over_the_budget(lengths, curve, times, batch, count):
    spare = times * curve.item_gb(lengths.max())
    found = make_buckets(lengths, curve.item_gb, spare, batch, count)
    owners = [[b for b in found if b.over_seconds < seconds <= b.to_seconds] for seconds in lengths]
    assert all(len(owner) == 1 for owner in owners)
    assert [b.clips for b in found] == [sum(owner == [b] for owner in owners) for b in found]
    assert len(found) <= count
    for bucket in found:
        assert batch % bucket.micro_batch_size == 0
        assert bucket.micro_batch_size * curve.item_gb(bucket.to_seconds) <= spare
        larger = [m for m in range(bucket.micro_batch_size + 1, batch + 1) if batch % m == 0]
        assert all(m * curve.item_gb(bucket.to_seconds) > spare for m in larger)  # nor is anything left unused
    sizes = [bucket.micro_batch_size for bucket in found]
    assert sizes == sorted(sizes, reverse=True)


def test_buckets_by_hand():
    """There is 1 GB, and a second of an item takes a tenth: a batch of 8 has micro-batches of 8, 4 and 2 items."""
    found = make_buckets(np.array([1.0, 2.0, 4.0, 1.0, 2.0, 4.0]), lambda s: s / 10, 1.0, 8, 3)
    assert [(b.to_seconds, b.clips, b.micro_batch_size) for b in found] == [(1, 2, 8), (2, 2, 4), (4, 2, 2)]


def test_a_clip_that_fits_no_bucket():
    with pytest.raises(UserError, match=r"a clip of 4\.0 s adds 0\.40 GB, and 0\.30 GB are left"):
        make_buckets(np.array([1.0, 4.0]), lambda s: s / 10, 0.3, 8)
