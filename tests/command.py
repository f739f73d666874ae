"""The command line as a user types it: a process of its own."""

import subprocess
import sys
from typing import Any


def gputrain(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gputrain", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **options)
