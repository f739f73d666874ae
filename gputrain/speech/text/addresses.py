"""Internet and e-mail addresses, whose signs are spoken by their names: kun.uz, www.gov.uk, info@mail.ru."""

import re
from collections.abc import Callable, Mapping

_ENDINGS = "uz|com|ru|org|net|info|edu|gov|io|uk|de|fr|kz|рф"
ADDRESS = (
    r"(?:https?://|(?<![A-Za-z0-9.])[wWvV]{3}\.)[^\s,;!?<>\"]{1,300}"
    r"|[A-Za-z0-9._+-]{1,64}@[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63}){1,6}"
    r"|(?<![A-Za-zА-яЁё0-9.@-])[A-Za-zа-я0-9-]{2,63}(?:\.[A-Za-z0-9-]{1,63}){0,3}"
    rf"\.(?:{_ENDINGS})(?:/[^\s,;!?]{{0,200}})?(?![A-Za-zА-яЁё0-9])"
)
_LABEL = re.compile(r"[^./@_:?=&%#~+-]+|[./@_:?=&%#~+-]")
_LAST_MARKS = re.compile(r"[.,:'/)]*$")


def spoken_address(found: re.Match[str], signs: Mapping[str, str], spell: Callable[[str, bool], str]) -> str:
    """Returns a match of ADDRESS in words, without its scheme.

    `signs` are the names of the signs. `spell(label, is_last)` returns a part between two signs as it is spoken;
    `is_last` is True for the top-level domain. Marks that end the sentence are kept.
    """
    bare = re.sub(r"^https?://", "", found[0])
    marks = _LAST_MARKS.search(bare)
    bare, ending = (bare[: marks.start()], marks[0].replace("/", "")) if marks else (bare, "")
    host_end = len(re.split("[/?#]", bare, maxsplit=1)[0])
    words = []
    for part in _LABEL.finditer(bare):
        if part[0] in signs:
            words.append(signs[part[0]])
        elif part[0].isalnum():
            words.append(spell(part[0], part.end() == host_end and "." in bare[: part.start()]))
    return " ".join(words) + ending
