"""Uzbek numbers in words: money, percentages, measures, fractions, telephone numbers and others."""

import re

from gputrain.speech.text.language import NUMBER, any_of, is_spoken_whole, parse_number, rewriter, with_prefixes
from gputrain.speech.text.uzbek.letters import WORDS

UNITS, TENS, SCALES, PARTS = (list[str](WORDS[name]) for name in ("units", "tens", "scales", "decimal_parts"))

# Suffixes that are part of the number's word: 5ta, 10-dan, 100ga, 3-chi, 2talik.
SUFFIX = (
    r"(?:(?:i?nchi|chi)(?:si)?(?:lar)?(?:ni(?:ng)?|ga(?:cha)?|da(?:n|gi)?)?"
    r"|ta(?:si|lik|cha|dan)?(?:lar)?(?:ni(?:ng)?|ga(?:cha)?|da(?:n|gi)?)?"
    r"|l(?:ar|ik|ab|i)(?:i)?(?:ni(?:ng)?|ga(?:cha)?|da(?:n|gi)?)?"
    r"|si(?:ni(?:ng)?|ga(?:cha)?|da(?:n|gi)?)?"
    r"|ni(?:ng|ki)?|[gkq]a(?:cha)?|da(?:n|gi|y|k)?|dek|cha|mi)"
)
# 5, -5, 5-10, -5...-7; a dash before a space (Narxi - 500) or after another sign (5%-10%) is no minus.
AMOUNT = rf"(?<![0-9A-Za-z.,])(?:(?<![^\s(«=])[+-])?{NUMBER}(?:(?:-| - |\.{{2,3}}){NUMBER}|\.{{2,3}}[+-]{NUMBER})?"


def cardinal(number: int) -> str:
    """Returns a number below 10^21 in words.

    `bir` is also said before yuz and ming, unless nothing else follows: bir yuz bir, but yuz, ming and yuz ming.
    """
    if number == 0:
        return UNITS[0]
    words: list[str] = []
    for power in reversed(range(len(SCALES))):
        count = number // 1000**power % 1000
        if count:
            words += [*_below_thousand(count), SCALES[power]]
    said = " ".join(word for word in words if word)
    first, _, rest = said.partition(" ")
    bare = set(rest.split()) <= set(SCALES) | {"yuz"} and rest.startswith(("yuz", "ming"))
    return rest if first == UNITS[1] and bare else said


def _below_thousand(count: int) -> list[str]:
    hundreds, tens, units = count // 100, count // 10 % 10, count % 10
    words = [UNITS[hundreds], "yuz"] if hundreds else []
    return words + [TENS[tens]] * (tens > 0) + [UNITS[units]] * (units > 0)


def digit_by_digit(digits: str) -> str:
    return " ".join(UNITS[int(digit)] for digit in digits)


def whole(digits: str) -> str:
    """Returns digits as one number, or digit by digit if they begin with 0 or exceed the largest scale."""
    return cardinal(int(digits)) if is_spoken_whole(digits, SCALES) else digit_by_digit(digits)


def ordinal(digits: str) -> str:
    return ordinal_of(whole(digits))


def ordinal_of(words: str) -> str:
    """Adds -nchi after a vowel and -inchi after a consonant: ikkinchi, beshinchi."""
    return words + ("nchi" if words.endswith(("a", "i")) else "inchi")


def decimal(whole_words: str, fraction: str) -> str:
    """Returns a decimal number with `butun` and tenths to millionths; beyond these, digit by digit."""
    if len(fraction) >= len(PARTS):
        return f"{whole_words} butun {digit_by_digit(fraction)}"
    return f"{whole_words} butun {PARTS[len(fraction)]}dan {cardinal(int(fraction))}"


def number(written: str) -> str:
    """Returns a match of NUMBER in words."""
    parsed = parse_number(written, ",")
    return decimal(whole(parsed.whole), parsed.fraction) if parsed.fraction else whole(parsed.whole)


def amount(written: str) -> str:
    """Returns a match of AMOUNT in words: a number with or without a sign, or a range of two."""
    first, _, last = re.sub(r"(?<=[0-9]) ?(?:-|\.{2,3}) ?(?=[0-9+-])", "|", written, count=1).partition("|")
    return joined(_signed(first), _signed(last)) if last else _signed(first)


def _signed(written: str) -> str:
    sign = {"-": "minus ", "+": "plyus "}.get(written[0], "")
    return sign + number(written.lstrip("+- ").strip())


def joined(first: str, last: str) -> str:
    """Joins the ends of a range: besh-oʻn; with a pause if an end has several words."""
    return f"{first} - {last}" if " " in first + last else f"{first}-{last}"


def attached(words: str, suffix: str) -> str:
    """Adds a suffix to number words by the rules of spelling: ellik + ga is ellikka, qirq + ga is qirqqa."""
    suffix = re.sub(r"^[kq]a", "ga", suffix.lower())
    for ending in ("inchi", "nchi", "chi"):
        if suffix.startswith(ending):
            return ordinal_of(words) + suffix.removeprefix(ending)
    if suffix.startswith("ta") and words.endswith("bir"):
        return words[:-1] + "t" + suffix  # bitta, oʻn bitta
    if suffix.startswith("si"):
        return ordinal_of(words) + suffix
    if suffix.startswith("ga") and words.endswith(("k", "q")):
        return words + words[-1] + suffix[1:]
    return words + suffix


# ---------------------------------------------------------------------------------------------------------- quantities


CURRENCIES, _CENTS, _LENGTHS = WORDS["currencies"], WORDS["cents"], WORDS["lengths"]
MEASURES: dict[str, str] = {
    **with_prefixes(WORDS["metric"], WORDS["prefixes"]),
    **_LENGTHS,
    **WORDS["measures"],
    **{form: f"kvadrat {name}" for unit, name in _LENGTHS.items() for form in (unit + "2", "kv." + unit)},
    **{form: f"kub {name}" for unit, name in _LENGTHS.items() for form in (unit + "3", "kub." + unit)},
}
_MAGNITUDE = r"(?P<magnitude> ?(?:ming|million|milliard|trillion))?"
_OWN = r"i(?:ni(?:ng)?|ga|da(?:n|gi)?)?"  # 60%ini
_ENDING = (
    rf"(?:(?: ?-?(?={SUFFIX}(?![A-Za-zʻʼ]))|-?(?={_OWN}(?![A-Za-zʻʼ])))(?P<suffix>{SUFFIX}|{_OWN}))?(?![A-Za-zʻʼ])"
)
# "5 ga" is hectares, "5ga" a dative; "5 A sinf" is a class, and "5 li" an ending.
_UNIT = any_of(MEASURES.keys() - {"ga", "b", *"AVBNJ", "l"}) + "|l(?!i)|[AVBNJ](?! (?:sinf|guruh|kurs|blok|toifa))"
# "5 ga" is hectares at the end of a clause and before land; "101 ga qoʻngʻiroq" and "20 ga yaqin" are datives.
_LAND = r"(?=$|[.,;:!?)]| (?:yer|maydon|ekin|paxta|bugʻdoy|gʻalla|sholi|bogʻ|oʻrmon|hudud|dala|sugʻor|lalmi|tokzor))"


def _money(found: re.Match[str]) -> str:
    written, name = found["amount"], CURRENCIES[found["currency"]]
    magnitude = f" {found['magnitude'].strip()}" if found["magnitude"] else ""
    cents = re.fullmatch(r"(.*[0-9])[.,]([0-9]{2})", written)
    if cents and found["currency"] in _CENTS and not magnitude and "-" not in written:
        coins = f" {cardinal(int(cents[2]))} {_CENTS[found['currency']]}" if int(cents[2]) else ""
        return attached(f"{amount(cents[1])} {name}{coins}", found["suffix"] or "")
    return attached(f"{amount(written)}{magnitude} {name}", found["suffix"] or "")


def _measure(found: re.Match[str]) -> str:
    unit, per = found["unit"], found.groupdict().get("per")
    name = (per and WORDS["before_slash"].get(unit)) or MEASURES[unit]
    before = WORDS["per"][per] + " " if per else ""
    magnitude = f" {found['magnitude'].strip()}" if found["magnitude"] else ""
    return attached(f"{before}{amount(found['amount'])}{magnitude} {name}", found["suffix"] or "")


def _telephone(found: re.Match[str]) -> str:
    """Returns the groups of a telephone number as written; without groups, as 998 90 123 45 67."""
    groups = re.findall(r"[0-9]+", found[0])
    if len(groups) == 1:
        groups = [part for part in re.split(r"(998)?(..)(...)(..)(..)$", groups[0]) if part]
    return ("plyus " if found[0].startswith("+") else "") + " ".join(map(whole, groups))


def _version(found: re.Match[str]) -> str:
    """Returns versions and IP addresses (2.13.0, 192.168.1.1) in words; groups of three digits form one number."""
    if re.fullmatch(r"[1-9][0-9]{0,2}(?:\.[0-9]{3})+", found[0]):
        return found[0]
    return " nuqta ".join(map(whole, found[0].split(".")))


def _fraction(found: re.Match[str]) -> str:
    """Returns 3/4 as toʻrtdan uch, 1 1/2 as bir butun ikkidan bir; an improper fraction number by number."""
    mixed, above, below = found["mixed"], found["above"], found["below"]
    if int(above) >= int(below):
        return " ".join(whole(part) for part in (mixed, above, below) if part)
    part = f"{attached(whole(below), 'dan')} {whole(above)}"
    words = f"{whole(mixed)} butun {part}" if mixed else part
    return attached(words, found["suffix"] or "")


def _number(found: re.Match[str]) -> str:
    """Returns a plain number in words with its suffix, and with a space if a letter follows."""
    words = attached(amount(found["amount"]) + (found["magnitude"] or ""), found["suffix"] or "")
    return words + " " * found.string[found.end() : found.end() + 1].isalpha()


rewrite = rewriter(
    (r"\+998(?:[ -]?\(?[0-9]{2}\)?)(?:[ -]?[0-9]{3})(?:[ -]?[0-9]{2}){2}(?![0-9])", _telephone),
    (r"\+[0-9]{1,3}[ -]?\(?[0-9]{2,4}\)?(?:[ -][0-9]{2,4}){2,4}(?![0-9])", _telephone),
    (r"(?<![0-9.,-])\(?[0-9]{2}\)?[ -][0-9]{3}[ -][0-9]{2}[ -][0-9]{2}(?![0-9-])", _telephone),
    (r"(?<![0-9.,-])[0-9]{3}-[0-9]{2}-[0-9]{2}(?![0-9-])", _telephone),
    (r"(?<![0-9.,])[0-9]{1,9}(?:\.[0-9]{1,9}){2,}(?![0-9])", _version),
    (r"(?<=[0-9]) ?[x*] ?(?=[0-9])", lambda _: " × "),
    (rf"(?:US)?(?P<currency>[$€£₽¥₸₺]) ?(?P<amount>{NUMBER}(?:-{NUMBER})?){_MAGNITUDE}{_ENDING}", _money),
    (rf"(?P<amount>{AMOUNT}){_MAGNITUDE} ?(?P<currency>{any_of(CURRENCIES)}){_ENDING}", _money),
    (rf"(?P<amount>{AMOUNT}){_MAGNITUDE} (?P<unit>ga)(?![A-Za-zʻʼ]){_LAND}(?P<suffix>)", _measure),
    (rf"(?P<amount>{AMOUNT}){_MAGNITUDE} ?(?P<unit>{_UNIT})(?:/(?P<per>{any_of(WORDS['per'])}))?{_ENDING}", _measure),
    (
        r"(?<![0-9A-Za-z.,/])(?:(?P<mixed>[0-9]{1,9}) )?(?P<above>[0-9]{1,9})/(?P<below>[0-9]{1,9})(?![0-9/])"
        rf"(?:-?(?P<suffix>{SUFFIX})(?![A-Za-zʻʼ]))?",
        _fraction,
    ),
    (rf"(?P<amount>{AMOUNT}){_MAGNITUDE}(?: ?-?(?P<suffix>{SUFFIX})(?![A-Za-zʻʼ]))?", _number),
    (r"[0-9]+", lambda found: f" {whole(found[0])} "),
)
