"""English numbers in words: cardinals without "and", ordinals, years in pairs of digits, fractions."""

import re

from gputrain.config import read_table
from gputrain.speech.text.language import is_spoken_whole, parse_number

WORDS = read_table("gputrain.speech.text", "english.yaml")
SMALL, TENS, SCALES = (list[str](WORDS[name]) for name in ("small", "tens", "scales"))


def cardinal(number: int) -> str:
    """Returns a number below 10^21 in words, without "and"."""
    if number < 20:
        return SMALL[number]
    words = []
    for power in reversed(range(len(SCALES))):
        count = number // 1000**power % 1000
        if count:
            words.append(f"{_below_thousand(count)} {SCALES[power]}".strip())
    return " ".join(words)


def _below_thousand(count: int) -> str:
    hundreds, rest = divmod(count, 100)
    words = [SMALL[hundreds], "hundred"] if hundreds else []
    if rest >= 20:
        words.append(TENS[rest // 10] + ("-" + SMALL[rest % 10] if rest % 10 else ""))
    elif rest:
        words.append(SMALL[rest])
    return " ".join(words)


def ordinal(number: int) -> str:
    words = cardinal(number)
    last = re.split("[ -]", words)[-1]
    changed = WORDS["ordinals"].get(last) or (last[:-1] + "ieth" if last.endswith("y") else last + "th")
    return words[: len(words) - len(last)] + changed


def year(number: int) -> str:
    """Returns a year in words: nineteen eighty-four, nineteen oh five, two thousand four."""
    century, rest = divmod(number, 100)
    if not 1000 <= number < 10000 or (century % 10 == 0 and rest < 10):
        return cardinal(number)
    return f"{cardinal(century)} {pair(rest)}" if rest else f"{cardinal(century)} hundred"


def pair(number: int) -> str:
    """Returns two digits of a year or of a time: oh five, forty-five."""
    return f"oh {SMALL[number]}" if number < 10 else cardinal(number)


def whole(digits: str) -> str:
    return cardinal(int(digits)) if is_spoken_whole(digits, SCALES) else digit_by_digit(digits)


def digit_by_digit(digits: str) -> str:
    return " ".join(SMALL[int(digit)] for digit in digits)


def number(written: str) -> str:
    """Returns a number with its sign, and its decimals digit by digit."""
    sign = {"-": "minus ", "+": "plus "}.get(written[0], "")
    parsed = parse_number(written.lstrip("+- "), ".")
    point = " point " + digit_by_digit(parsed.fraction) if parsed.fraction else ""
    return sign + whole(parsed.whole) + point


def fraction(above: int, below: int) -> str:
    """Returns a fraction: one half, three quarters, two thirds, seven tenths; `over` if there is no such word."""
    if not 2 <= below <= 1000:
        return f"{cardinal(above)} over {cardinal(below)}"
    name = {2: "half", 4: "quarter"}.get(below) or ordinal(below)
    plural = "halves" if below == 2 else name + "s"
    return f"{cardinal(above)} {name if above == 1 else plural}"


def plural(name: str, words: str) -> str:
    """Returns the name of a unit for a number in words: kilometers per hour, feet, pence; unchanged for one."""
    if words.removeprefix("minus ") == "one" or name.endswith("hertz"):
        return name
    *before, head = re.split(" (?=per )", name)[0].split(" ")
    rest = name[len(" ".join([*before, head])) :]
    if head in ("celsius", "fahrenheit"):
        return name.replace("degree", "degrees")
    irregular = {"foot": "feet", "penny": "pence", "inch": "inches", "yen": "yen", "won": "won", "sen": "sen"}
    return " ".join([*before, irregular.get(head, head + "s")]) + rest
