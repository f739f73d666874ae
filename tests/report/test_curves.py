"""Curves: scales, points that are drawn, and what the drawing says."""

import json
import re
from html import unescape
from itertools import pairwise

import numpy as np
import pytest

from gputrain.report.curves import (
    MOST_POINTS,
    Chart,
    Curve,
    draw,
    extremes,
    format_value,
    linear_axes,
    logarithmic_axes,
    smoothed,
    step_ticks,
    style_of,
    thinned,
    tick_label,
)
from tests.tables import each_row


@each_row(
    (10.1, 31.2, [0, 10, 20, 30, 40]),
    (27.0, 31.2, [27, 28, 29, 30, 31, 32]),
    (0, 0.9, [0, 0.25, 0.5, 0.75, 1]),
    (-3, 5, [-4, -2, 0, 2, 4, 6]),
    (5, 5, [4.5, 4.75, 5, 5.25, 5.5]),
    (0, 0, [-1, -0.5, 0, 0.5, 1]),
)
def test_linear_ticks_are_round_and_reach_around_the_values(low, high, ticks):
    axes = linear_axes(low, high, 100)
    assert axes.ticks == ticks
    assert axes.low <= low <= high <= axes.high


def test_places_follow_the_scales():
    linear, logarithmic = linear_axes(0, 100, 200), logarithmic_axes(0.01, 100, 200)
    assert logarithmic.ticks == pytest.approx([0.01, 0.1, 1, 10, 100])
    for axes, middle in ((linear, 50), (logarithmic, 1)):
        assert axes.y(middle) == pytest.approx((axes.y(axes.low) + axes.y(axes.high)) / 2)
        assert axes.x(100) == pytest.approx((axes.x(0) + axes.x(200)) / 2)
        assert axes.y(axes.high) < axes.y(axes.low)  # Larger values are higher up.
    assert logarithmic_axes(0.12, 0.9, 5).ticks == pytest.approx([0.1, 0.2, 0.5, 1])
    assert step_ticks(4948) == [0, 1000, 2000, 3000, 4000]
    assert step_ticks(1) == [0, 1]


def test_long_curves_are_thinned_without_losing_peaks():
    points = np.array([(step, step % 7) for step in range(5000)], dtype=float)
    points[1234, 1] = 99
    means = thinned(points)
    assert len(means) == MOST_POINTS
    assert means[:, 1].mean() == pytest.approx(3.02, abs=0.05)
    drawn = list(map(tuple, extremes(points).tolist()))
    assert len(drawn) <= 2 * MOST_POINTS
    assert (1234, 99.0) in drawn
    assert drawn == sorted(drawn)
    np.testing.assert_array_equal(thinned(points[:5]), points[:5])


def test_parts_of_a_curve_are_those_of_their_definition():
    """Of 500 points, each part has two or three; of equal values the first is drawn."""
    points = np.array([(step, step * step % 5) for step in range(500)], dtype=float)
    edges = [500 * part // MOST_POINTS for part in range(MOST_POINTS + 1)]
    parts = [points[first:last].tolist() for first, last in pairwise(edges)]
    expected = [(part[len(part) // 2][0], sum(value for _, value in part) / len(part)) for part in parts]
    np.testing.assert_allclose(thinned(points), expected, rtol=1e-12)
    ends = [{tuple(choose(part, key=lambda point: point[1])) for choose in (min, max)} for part in parts]
    assert extremes(points).tolist() == [list(point) for both in ends for point in sorted(both)]


def test_smoothing_is_centred():
    """A straight line stays as it is, to its ends, and noise shrinks with the root of the width."""
    line = np.array([(step, 3.0 * step) for step in range(400)])
    np.testing.assert_allclose(smoothed(line), line)
    noise = np.array([(step, (-1.0) ** step) for step in range(400)])
    assert abs(smoothed(noise)[20:-20, 1]).max() < 0.06


def test_a_chart_says_what_it_shows():
    chart = Chart("loss <a>", [Curve("one & two", 0, [(0, 4.0), (10, 1.0), (20, 2.0)])], "s", "lower", reach=40)
    page = str(draw(chart))
    assert "loss &lt;a&gt;" in page
    assert "<a>" not in page
    assert 'aria-label="loss &lt;a&gt;: 4 s at step 0, 2 s at step 20, best 1 s"' in page
    data = json.loads(unescape(re.search(r'data-chart="([^"]*)"', page)[1]))
    points = [[0, 4.0], [10, 1.0], [20, 2.0]]
    assert data["curves"] == [{"label": "one & two", "run": 0, "letter": "", "points": points}]
    assert data["reach"] == 40
    assert '<g class="lin">' in page
    assert '<g class="log">' in page
    assert page.count("<circle") == 6  # Three points on each scale.


def test_only_positive_values_have_a_logarithmic_scale():
    page = str(draw(Chart("l", [Curve("a", 0, [(0, 0.0), (1, 5.0)])])))
    assert '<g class="both">' in page
    assert '<g class="log">' not in page


def test_many_points_are_drawn_plain_and_smoothed():
    page = str(draw(Chart("l", [Curve("a", 7, [(step, 1.0 + step % 3) for step in range(500)])])))
    assert page.count('class="raw"') == page.count('class="smooth"') == 2
    assert "run r7 c1 wide" in page  # The eighth run has the second colour, with wide lines.


def test_numbers_and_titles():
    assert [tick_label(value) for value in (0.9375, 100 * 0.07, 5000, 0.0)] == ["0.9375", "7", "5,000", "0"]
    assert format_value(0.1234, "%") == "12.3 %"
    assert style_of("eval/psnr_db").title == "PSNR"
    assert style_of("loss/generator/fast_mpd").title == "generator: fast mpd"
    assert style_of("speed/images_per_second").title == "images a second"
