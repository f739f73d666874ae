"""How time and memory grow with the size of the data, of the work that isn't training: what grows faster is named.

    python -m benchmarks.growth [NAMES...] [--full]

Each work runs at sizes that double, each in a process of its own, after a run at a smaller size that loads and caches
what it needs once. CPU seconds and the growth of the peak memory are printed by size, with the exponent p of
seconds = a x size^p between the sizes (least squares of the logarithms). Linear work has 1, and reading from a cache
less. Above 1.35 the row ends with "grows faster than its size", and the exit code is 1. The sizes take a minute in
all; `--full` takes those of large data sets (100,000 pictures, 200,000 clips, a million lines of metrics), which
take several minutes.
"""

import argparse
import hashlib
import io
import json
import math
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import psutil

FASTER = 1.35  # Exponents of linear work are between 0.9 and 1.2; that of sorting is 1.1.
SIZES = 3  # Sizes of a work; each is twice the one before.
RATE_HZ = 16000

Prepared = Callable[[], object]  # The work itself, which alone is measured.


class Work(NamedTuple):
    """Work whose growth is measured. `prepare` takes a folder and a size, and returns what is measured."""

    unit: str
    prepare: Callable[[Path, int], Prepared]
    largest: int  # The largest size by default.
    full: int  # That of `--full`.


class Growth(NamedTuple):
    sizes: list[int]
    seconds: list[float]  # CPU time.
    peak_mb: list[float]  # Growth of the peak memory of the process.

    @property
    def exponent(self) -> float:
        return exponent(self.sizes, self.seconds)

    @property
    def is_faster(self) -> bool:
        return self.exponent > FASTER


def exponent(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """Returns p of seconds = a x size^p, by least squares of the logarithms."""
    x, y = [math.log(size) for size in sizes], [math.log(max(1e-6, one)) for one in seconds]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    above = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return above / sum((a - mean_x) ** 2 for a in x)


def measure(work: Work, largest: int) -> Growth:
    """Measures a work at sizes up to `largest`."""
    sizes = [largest >> shift for shift in reversed(range(SIZES))]
    found = [_in_a_process(work, size, max(1, sizes[0] // 2)) for size in sizes]
    return Growth(sizes, *(list(column) for column in zip(*found, strict=True)))


def _in_a_process(work: Work, size: int, first: int) -> tuple[float, float]:
    context = multiprocessing.get_context("fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_measured, args=(work, size, first, sender))
    child.start()
    sender.close()
    try:
        measured: tuple[float, float] = receiver.recv()
    except EOFError:
        raise RuntimeError(f"the process that measured {size} {work.unit} failed") from None
    finally:
        child.join()
    return measured


def _measured(work: Work, size: int, first: int, sender: "multiprocessing.connection.Connection") -> None:
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        for number, one in enumerate((first, size)):
            folder = Path(name, str(number))
            folder.mkdir()
            run = work.prepare(folder, one)
            with peak_of() as peak:
                began = time.process_time()
                run()
                seconds = time.process_time() - began
    sender.send((seconds, peak[0]))


@contextmanager
def peak_of() -> Iterator[list[float]]:
    """Yields a list that gets the growth of the memory of this process to its peak, in MB; 0 where it is unknown."""
    found, clear = [0.0], Path("/proc/self/clear_refs")
    before = psutil.Process().memory_info().rss
    if clear.exists():
        clear.write_text("5")  # Linux begins a new peak.
    yield found
    if clear.exists():
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
        found[0] = max(0.0, int(line.split()[1]) * 1024 - before) / 1e6


# ------------------------------------------------------------------------------------------------------------- works


def open_folder_of_pictures(folder: Path, size: int) -> Prepared:
    from PIL import Image

    from gputrain.vae.dataset import open_pictures

    for number in range(size):
        Image.new("L", (32, 32)).save(folder / f"{number}.png", pnginfo=_text(number), compress_level=0)
    return lambda: open_pictures(folder)


def _text(number: int) -> object:
    """Returns a text for a PNG file, so that all have different contents."""
    from PIL.PngImagePlugin import PngInfo

    info = PngInfo()
    info.add_text("number", str(number))
    return info


def open_prepared_pictures(folder: Path, size: int) -> Prepared:
    from gputrain.vae.dataset import open_pictures

    (folder / "picture.png").write_bytes(b"\x89PNG")
    row = {"path": "picture.png", "width": 256, "height": 256, "bytes": 4}
    lines = (json.dumps({**row, "fingerprint": _fingerprint(number)}) + "\n" for number in range(size))
    (folder / "manifest.jsonl").write_text("".join(lines))
    return lambda: open_pictures(folder)


def _fingerprint(number: int) -> str:
    return hashlib.blake2b(str(number).encode(), digest_size=16).hexdigest()


def _write_clips(folder: Path, size: int) -> None:
    """Writes the files of prepared speech with clips of 1 to 9 seconds, whose samples take no room on the disk."""
    from gputrain.speech.store import SpeechClip, SpeechFormat
    from gputrain.speech.text.vocabulary import vocabulary_of

    text, first = "so it is said", 0
    format = SpeechFormat(vocabulary_of("en", [text]), RATE_HZ, 320, ("a",), "asr")
    (folder / "text.json").write_text(json.dumps(format.to_json()) + "\n")
    with (folder / "manifest.jsonl").open("w") as file:
        for number in range(size):
            samples = RATE_HZ + number * 7919 % (8 * RATE_HZ)
            clip = SpeechClip(f"{number}.wav", _fingerprint(number), first, samples, text, text, 0)
            file.write(json.dumps(asdict(clip)) + "\n")
            first += samples
    (folder / "sounds.jsonl").write_text("{}\n")
    with (folder / "waves.i16").open("wb") as waves:
        waves.truncate(2 * first)


def open_clips(folder: Path, size: int) -> Prepared:
    from gputrain.speech.buckets import open_speech

    _write_clips(folder, size)
    return lambda: open_speech(folder, kind="asr")


def members_of_an_epoch(folder: Path, size: int) -> Prepared:
    from gputrain.engine.data import Sample
    from gputrain.speech.buckets import Buckets, open_speech

    _write_clips(folder, size)
    speech = open_speech(folder, kind="asr")
    buckets = Buckets(speech.store, speech.parts.train, 320, batch_size=32, seed=0)
    return lambda: [buckets.members(Sample(0, number)) for number in range(len(buckets))]


def resume_metrics(folder: Path, size: int) -> Prepared:
    from gputrain.engine.metrics import Metrics
    from gputrain.hw.plan import Hardware, decide
    from gputrain.hw.probe import Machine
    from gputrain.hw.runtime import apply

    _write_metrics(folder, size)
    runtime = apply(decide(Machine(system="", cpu_cores=1), Hardware(device="cpu")))

    def resume() -> None:
        from rich.console import Console

        console = Console(file=io.StringIO())
        metrics = Metrics(folder, console, runtime, unit="clips", first_step=size, last_step=size + 1)
        metrics.forget_report(size, "eval")

    return resume


def _write_metrics(folder: Path, size: int) -> None:
    row = {"epoch": 1, "seconds": 1.5, **{f"loss/generator/{number}": 0.123456 + number for number in range(12)}}
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, size + 1):
            file.write(json.dumps({"step": step, **row}) + "\n")
        file.write(json.dumps({"step": size, "eval/score": 1.0}) + "\n")


def report_metrics(folder: Path, size: int) -> Prepared:
    from gputrain.report.records import read_run

    _write_metrics(folder, size)
    return lambda: read_run(folder)


def name_transcripts(folder: Path, size: int) -> Prepared:
    from gputrain.asr.config import Transcribe
    from gputrain.asr.transcribe import _targets

    settings = Transcribe(model=folder, input=folder, output_dir=folder / "out")
    paths = [folder / f"{number}.wav" for number in range(size)]
    return lambda: _targets(settings, paths)


def read_table(folder: Path, size: int) -> Prepared:
    from gputrain.speech.transcripts import read_transcripts

    paths = [f"wavs/{number}.wav" for number in range(size)]
    (folder / "wavs").mkdir()
    lines = (f"{number}|{_fingerprint(number)}|So it is said {number}.\n" for number in range(size))  # With speakers.
    (folder / "metadata.csv").write_text("".join(lines))
    return lambda: read_transcripts(folder, paths)


def rewrite_journal(folder: Path, size: int) -> Prepared:
    from gputrain.data_in.preparation import Journal

    rows = ({"source": f"{number}.png", "path": f"{number}.png", "bytes": 1000} for number in range(size))
    path = folder / "journal.jsonl"
    path.write_text('{"of": "x"}\n' + "".join(json.dumps(row) + "\n" for row in rows))

    def rewrite() -> None:
        journal = Journal(path)
        journal.rewrite(journal.rows)

    return rewrite


def order_of_an_epoch(folder: Path, size: int) -> Prepared:
    from gputrain.engine.data import Stream

    return lambda: sum(map(len, Stream(size, seed=0, batch_size=32, start_sample=0, stop_sample=size)))


def normalise(language: str, part: str) -> Callable[[Path, int], Prepared]:
    """Returns the preparation of a text of one line, which repeats a part to a number of characters."""

    def prepare(folder: Path, size: int) -> Prepared:
        from gputrain.speech.text.frontend import frontend

        made = frontend(language)  # type: ignore[arg-type]
        text = (part * (size // len(part) + 1))[:size]
        return lambda: made.normalize(text)

    return prepare


WORKS = {
    "pictures of a folder": Work("pictures", open_folder_of_pictures, 2000, 100_000),
    "prepared pictures": Work("pictures", open_prepared_pictures, 4000, 100_000),
    "prepared clips": Work("clips", open_clips, 8000, 200_000),
    "buckets of an epoch": Work("clips", members_of_an_epoch, 16_000, 200_000),
    "order of an epoch": Work("items", order_of_an_epoch, 100_000, 1_000_000),
    "metrics to resume": Work("lines", resume_metrics, 20_000, 1_000_000),
    "metrics to report": Work("lines", report_metrics, 20_000, 1_000_000),
    "names of transcripts": Work("files", name_transcripts, 4000, 100_000),
    "table of transcripts": Work("lines", read_table, 16_000, 200_000),
    "journal": Work("rows", rewrite_journal, 20_000, 200_000),
    **{
        f"{language} {what}": Work("characters", normalise(language, part), 8000, 100_000)
        for language, parts in {
            "en": {"prose": "So it is said, and 5 of 12 agree. ", "letters": "a", "digits": "1"},
            "ru": {"prose": "Так и сказано: 5 из 12 согласны. ", "letters": "а", "digits": "1"},
            "uz": {"prose": "Shunday aytilgan, 12 tadan 5 tasi. ", "letters": "a", "digits": "1"},
        }.items()
        for what, part in parts.items()
    },
}


def row_of(name: str, unit: str, growth: Growth) -> str:
    cells = [f"{size:>9} {seconds:>8.3f} s {peak:>6.0f} MB" for size, seconds, peak in zip(*growth, strict=True)]
    remark = "  grows faster than its size" if growth.is_faster else ""
    return f"{name:<22}{unit:<11}{'  '.join(cells)}  ^{growth.exponent:.2f}{remark}"


def main(works: dict[str, Work] = WORKS) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"works to measure, of {', '.join(works)}")
    parser.add_argument("--full", action="store_true", help="the sizes of large data sets")
    given = parser.parse_args()
    if unknown := [name for name in given.names if name not in works]:
        parser.error(f"there is no {unknown[0]!r}: {', '.join(works)}")
    grown = []
    for name in given.names or works:
        growth = measure(works[name], works[name].full if given.full else works[name].largest)
        print(row_of(name, works[name].unit, growth), flush=True)
        grown += [name] if growth.is_faster else []
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())
