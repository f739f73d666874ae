"""Phonemes in IPA from the program espeak-ng, if the user has installed it.

Stock Piper does the same with its own copy of espeak-ng for a voice of phoneme_type "espeak".
"""

import re
import shutil
import subprocess
import unicodedata

from gputrain.errors import UserError

# Letters, IPA and its marks, as code points after NFD: the output of espeak-ng for all of its languages.
IPA = "".join(
    map(
        chr,
        (
            *range(ord("a"), ord("z") + 1),
            *map(ord, "æçðøħŋœǀǁǂǃβεθχᵻⱱ"),
            *range(0x250, 0x2B0),  # IPA extensions
            *map(ord, "ʰʲʷˈˌːˑ˞ˠˡˤⁿ"),
            *range(0x300, 0x362),  # combining marks
        ),
    )
)
SYMBOLS = "".join(sorted({*unicodedata.normalize("NFD", IPA)}))
_CLAUSE = re.compile(r"([^!,.:;?]*)([!,.:;?]*)")
_LANGUAGE_SWITCH = re.compile(r"\([a-z-]+\)")


def phonemes(text: str, voice: str) -> str:
    """Returns a normalised text in IPA, with its punctuation. Raises UserError if the program is missing or fails."""
    program = shutil.which("espeak-ng")
    if program is None:
        raise UserError(
            "espeak-ng is not installed, or not on the PATH",
            hint="install it (apt install espeak-ng, brew install espeak-ng), or leave out the espeak voice",
        )
    clauses = [(words.strip(), marks) for words, marks in _CLAUSE.findall(text) if words.strip() or marks]
    command = [program, "-q", "--ipa", "-b", "1", "-v", voice]
    said = []
    for words, marks in clauses:
        if words:
            done = subprocess.run([*command, "--", words], capture_output=True, encoding="utf-8", check=False)
            if done.returncode:
                raise UserError(f"espeak-ng failed for the voice {voice!r}: {done.stderr.strip()[:200]}")
            words = " ".join(_LANGUAGE_SWITCH.sub("", done.stdout).split())
        said.append(words + marks)
    return unicodedata.normalize("NFC", " ".join(said))
