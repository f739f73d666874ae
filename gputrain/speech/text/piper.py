"""The phonemes that stock Piper makes of a text, by its own code and the espeak-ng that it contains, so that a voice
hears in training what its player sends.

piper-tts is under the GPL, and therefore runs as a program of its own, which answers each line of JSON with one.
"""

import atexit
import json
import subprocess
import sys
import tempfile
from functools import cache, lru_cache
from importlib.metadata import version

from gputrain.errors import UserError, require

_PROGRAM = """
import json, sys
sys.path[:] = [folder for folder in sys.path if folder]
from piper import PiperVoice
from piper.config import PhonemeType, PiperConfig
for line in sys.stdin:
    text, voice = json.loads(line)
    config = PiperConfig(num_symbols=1, num_speakers=1, sample_rate=1, espeak_voice=voice, phoneme_id_map={},
                         phoneme_type=PhonemeType.ESPEAK)
    try:
        sentences = PiperVoice(session=None, config=config).phonemize(text)
        answer = {"sentences": ["".join(sentence) for sentence in sentences]}
    except Exception as error:
        answer = {"error": str(error)}
    print(json.dumps(answer), flush=True)
"""
_HINT = 'install a newer one: pip install "piper-tts>=1.3"'


def phonemizer_version() -> str:
    """Returns the name and the version of the phonemiser. Raises UserError if it is not installed."""
    require("piper", needed_by="the espeak voice", otherwise="leave out the espeak voice")
    return f"piper-tts {version('piper-tts')}"


@cache
def _phonemizer() -> "subprocess.Popen[str]":
    phonemizer_version()
    log = tempfile.TemporaryFile()  # noqa: SIM115  The program keeps it for as long as it runs.
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
    )
    atexit.register(process.kill)
    return process


@lru_cache(maxsize=1 << 16)
def piper_phonemes(text: str, voice: str) -> tuple[str, ...]:
    """Returns the phonemes and the punctuation of each sentence of a text, as Piper separates them.

    Raises UserError if piper-tts is not installed, or its espeak-ng does not have the voice.
    """
    process = _phonemizer()
    assert process.stdin is not None  # Both are pipes.
    assert process.stdout is not None
    try:
        print(json.dumps([text, voice]), file=process.stdin, flush=True)
        answer = json.loads(process.stdout.readline())
    except (OSError, ValueError):
        _phonemizer.cache_clear()
        raise UserError(f"the phonemiser of {phonemizer_version()} does not start", hint=_HINT) from None
    if "error" in answer:
        raise UserError(
            f"Piper's espeak-ng cannot phonemise with the voice {voice!r}: {answer['error']}",
            hint="name a voice of espeak-ng, such as de, en-us or pt-br",
        )
    return tuple(answer["sentences"])
