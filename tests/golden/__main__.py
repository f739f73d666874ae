"""Writes tests/data/golden_*.json again, after a change that is meant to change the arithmetic:

python -m tests.golden [vae] [vocoder_adamw] [vocoder_muon] [tts] [asr]
"""

import json
import sys

from tests.golden.runs import RUNS, record
from tests.golden.test_golden_losses import file_of

for name in sys.argv[1:] or RUNS:
    found = record(name)
    lines = [
        f" {json.dumps(place)}: {{\n"
        + ",\n".join(f"  {json.dumps(key)}: {json.dumps(row)}" for key, row in rows.items())
        + "\n }"
        for place, rows in found.items()
    ]
    file_of(name).write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    print(f"{file_of(name)}: {sum(map(len, found.values()))} rows")
