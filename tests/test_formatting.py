"""Numbers and counts in what is printed."""

import math

from gputrain.formatting import counted, format_bytes, format_number, likely_unit
from tests.tables import each_row


@each_row(
    (0, "0"), (0.01234, "0.0123"), (1.2, "1.2"), (1.234, "1.23"), (31.26, "31.3"), (123.4, "123"), (-0.5, "-0.5"),
    (1234.5, "1,234"), (12345.6, "12,346"), (2.5e7, "25,000,000"), (1.5e-5, "0.000015"), (2e-9, "2.00e-09"),
    (1130.2, "1,130"), (999.96, "1,000"), (1.0, "1"), (math.nan, "nan"), (math.inf, "inf"),
)  # fmt: skip
def test_numbers_have_about_three_digits_and_no_exponent(value, text):
    assert format_number(value) == text


def test_numbers_may_have_more_digits():
    assert [format_number(value, 4) for value in (36.6512, 0.91534, 123456.7)] == ["36.65", "0.9153", "123,457"]


def test_sizes_have_three_digits():
    sizes = (0, 999, 1000, 7289, 999_600, 334_643_276, 1_261_940_000)
    assert [*map(format_bytes, sizes)] == ["0 bytes", "999 bytes", "1 kB", "7.29 kB", "1 MB", "335 MB", "1.26 GB"]


def test_a_count_has_its_noun():
    assert [counted(count, "file") for count in (0, 1, 2000)] == ["0 files", "1 file", "2,000 files"]
    assert [counted(count, "clip is", "clips are") for count in (1, 2)] == ["1 clip is", "2 clips are"]


@each_row(
    ((1.0, 2.1, 3.0), (1.0, 2.0, 3.0), "s"),
    ((1000, 2100, 9999), (1.0, 2.0, 3.0), "ms"),
    ((22_050, 44_100), (1.0, 2.0), "samples at 22050 Hz"),
    ((24_000, 48_100), (1.0, 2.0), "samples at 24000 Hz"),
    ((1, 2, 3, 4), (4.0, 3.0, 2.0, 1.0), ""),  # The median ratio is about 1, and no item agrees with it.
    ((500, 1000), (1.0, 2.0), ""),
    ((0, math.nan, 5000), (1.0, 2.0, 5.0), "ms"),
    ((0, -1), (1.0, 2.0), ""),
    ((), (), ""),
)
def test_a_unit_is_told_by_measured_values(declared, measured, unit):
    units = {"s": 1, "ms": 1000, "samples at 22050 Hz": 22_050, "samples at 24000 Hz": 24_000}
    assert likely_unit(declared, measured, units) == unit
