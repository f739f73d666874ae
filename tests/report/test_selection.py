"""Which checkpoint each measure chooses, and how far their orders agree."""

import json
from pathlib import Path

import numpy as np
import pytest

from gputrain.report.page import rank_correlation, selectors_of, write_report
from gputrain.report.records import read_run
from tests.report.runs import make_run, write_rows
from tests.tables import each_row


def evaluated_run(folder: Path, **series: list[float]) -> Path:
    """Writes a voice's run with these figures of step 0, 10, 20 and so on."""
    make_run(folder, "tts", steps=10)
    rows = [dict(zip(series, values, strict=True)) for values in zip(*series.values(), strict=True)]
    write_rows(folder / "metrics.jsonl", [
        {"step": 10 * number, "epoch": 0, **{f"eval/{name}": value for name, value in row.items()}}
        for number, row in enumerate(rows)
    ])  # fmt: skip
    return folder


@each_row(
    ([1, 2, 3, 4], [10, 20, 21, 99], 1.0),
    ([1, 2, 3, 4], [4, 3, 2, 1], -1.0),
    ([1, 2, 3], [5, 5, 5], None),
)
def test_rank_correlations_of_known_orders(one, other, expected):
    assert rank_correlation(one, other) == (expected if expected is None else pytest.approx(expected, abs=1e-12))


def test_rank_correlations_with_equal_values_are_scipys():
    stats = pytest.importorskip("scipy.stats")
    draws = np.random.default_rng(0)
    for _ in range(5):
        one, other = draws.integers(0, 6, (2, 12)).tolist()
        assert rank_correlation(one, other) == pytest.approx(stats.spearmanr(one, other).statistic, abs=1e-12)


def test_measures_agree_where_they_prefer_the_same_checkpoints(tmp_path):
    """Lower distances and higher scores are better; before the first step there is no checkpoint to choose."""
    run = evaluated_run(
        tmp_path / "run", mcd_sl_db=[1.0, 9.0, 8.0, 7.0, 6.0], cer=[0.0, 0.5, 0.2, 0.3, 0.4], mos=[5, 1, 2, 3, 4]
    )
    distance, cer, mos = selectors_of(read_run(run))
    assert [(one.step, one.value) for one in (distance, cer, mos)] == [(40, "6 dB"), (20, "20 %"), (40, "4")]
    assert distance.correlations == ["1.00", "0.20", "1.00"]
    assert cer.correlations == ["0.20", "1.00", "0.20"]
    write_report([run], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count("rank correlation with character error rate") == 1
    assert 'href="#selection"' in page


def test_one_measure_or_two_evaluations_have_no_correlation(tmp_path):
    alone = evaluated_run(tmp_path / "alone", mcd_sl_db=[9.0, 8.0, 7.0, 6.0])
    short = evaluated_run(tmp_path / "short", mcd_sl_db=[9.0, 8.0, 7.0], cer=[1.0, 0.9, 0.8])
    for run in (alone, short):
        assert selectors_of(read_run(run)) == []
        write_report([run], tmp_path / "report.html")
        assert 'id="selection"' not in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert json.loads((short / "metrics.jsonl").read_text().splitlines()[2])["eval/cer"] == 0.8
