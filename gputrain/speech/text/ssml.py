"""Tags of SSML (Speech Synthesis Markup Language 1.1, W3C 2010) in a raw text, which is read without them.

Only elements of SSML are tags, so that `a < b` stays. A break becomes a comma, the end of a paragraph or a sentence a
new line, and <sub alias="..."> its alias; the content of all other elements is read as it is.
"""

import re

_NAMES = (
    "speak|voice|lang|p|s|break|prosody|emphasis|say-as|sub|phoneme|token|w|mark|audio|desc|lexicon|lookup|meta|metadata"
    r"|par|seq|media|(?:amazon|mstts|google):[a-z-]+"
)
_SUBSTITUTE = re.compile(r"<sub\s[^<>]*?alias\s*=\s*([\"'])(?P<alias>[^<>]*?)\1[^<>]*>[^<>]*</sub\s*>", re.IGNORECASE)
_TAG = re.compile(rf"<!--.*?-->|<[?!][^<>]*>|<(?P<end>/?)(?P<name>{_NAMES})(?:\s[^<>]*)?/?>", re.IGNORECASE | re.DOTALL)
_ENTITIES = {"&amp;": "&", "&quot;": '"', "&apos;": "'", "&lt;": " ", "&gt;": " "}


def without_tags(text: str) -> str:
    """Returns a text without the tags of SSML, and with its entities as characters; other text stays as it is."""
    if "<" not in text:
        return text
    plain, count = _TAG.subn(_spoken, _SUBSTITUTE.sub(lambda found: found["alias"], text))
    if not count and plain == text:
        return text
    for entity, char in _ENTITIES.items():
        plain = plain.replace(entity, char)
    return without_tags(plain)


def _spoken(found: re.Match[str]) -> str:
    name = (found["name"] or "").lower()
    return ", " if name == "break" else "\n" if name in ("p", "s") and found["end"] else ""
