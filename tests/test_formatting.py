"""Numbers and counts in what is printed."""

import math

from gputrain.formatting import counted, format_bytes, format_number, format_rate
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


def test_a_speed_below_one_a_second_is_the_time_of_an_item():
    rates = ((4.0, "images"), (0.134, "images"), (0.5, "clips"), (1.0, "crops"), (0.0, "items"))
    assert [format_rate(*rate) for rate in rates] == [
        "4 images/s", "7.46 s an image", "2 s a clip", "1 crops/s", "0 items/s",
    ]  # fmt: skip


def test_sizes_have_three_digits():
    sizes = (0, 999, 1000, 7289, 999_600, 334_643_276, 1_261_940_000)
    assert [*map(format_bytes, sizes)] == ["0 bytes", "999 bytes", "1 kB", "7.29 kB", "1 MB", "335 MB", "1.26 GB"]


def test_a_count_has_its_noun():
    assert [counted(count, "file") for count in (0, 1, 2000)] == ["0 files", "1 file", "2,000 files"]
    assert [counted(count, "clip is", "clips are") for count in (1, 2)] == ["1 clip is", "2 clips are"]
