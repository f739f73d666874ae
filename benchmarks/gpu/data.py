"""Prepares what `gpu.sh alive`, `measure` and `learn` read, to be carried to a machine with a GPU.

FOLDER/vae gets pictures, FOLDER/vocoder, FOLDER/tts and FOLDER/asr get sound, each as `gputrain prepare-data` writes
it, at most 40 MB together. The source holds photographs in photos/, and recordings with a transcript (metadata.csv
beside wavs/) in speech/; for what it lacks, and without one, the photographs of scikit-image and synthetic sound are
taken, as in `gputrain demo`. A kind whose packages are missing is left out, and the reason is printed. With --card,
FOLDER/predictions.json gets what is predicted of the measured steps on these cards, which takes some minutes.
"""

import argparse
import contextlib
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from gpu.commands import gputrain
from gputrain.errors import UserError, first_line
from gputrain.hw.gpus import find_gpu

MOST_BYTES = {"vae": 20e6, "vocoder": 3e6, "tts": 6e6, "asr": 6e6}
LANGUAGE = "en"
KINDS = tuple(MOST_BYTES)
PITCH = ("--f0-min", 80, "--f0-max", 700)  # Of the voices; the search of a smaller range is faster.


def prepare(folder: Path, source: Path | None = None, *, few: bool = False) -> dict[str, str]:
    """Prepares what `folder` does not hold yet. Returns the reasons why kinds are left out."""
    reasons = {}
    for kind in KINDS:
        made = folder / kind
        if made.is_dir():
            continue
        try:
            with tempfile.TemporaryDirectory() as scratch:
                options = write_source(kind, Path(scratch) / "source", source, few)
                gputrain("prepare-data", "--input-dir", Path(scratch) / "source", "--output-dir", made, *options)
        except (ImportError, UserError, OSError) as error:
            shutil.rmtree(made, ignore_errors=True)
            reasons[kind] = first_line(error)
    return reasons


def write_source(kind: str, to: Path, source: Path | None, few: bool) -> list[object]:
    """Writes pictures or recordings into a new folder. Returns the options by which they are prepared."""
    if kind == "vae":
        photographs = source / "photos" if source else None
        if photographs and photographs.is_dir():
            copy_some(sorted(photographs.iterdir()), to, MOST_BYTES["vae"] * 4)  # They become smaller.
        else:
            from gputrain.vae.kind import cut_photographs

            cut_photographs(to.parent)
            (to.parent / "photographs").rename(to)
        return ["--target-size", 256]
    speech = source / "speech" if source else None
    if speech and (speech / "metadata.csv").is_file():
        return copy_speech(kind, speech, to)
    if kind == "vocoder":
        from gputrain.audio.synthetic import write_clips

        write_clips(to, range(6 if few else 24), 44100)
        return ["--kind", "vocoder", *PITCH]
    from gputrain.audio.synthetic import write_speech

    write_speech(to, 12 if few else 80, 22050 if kind == "tts" else 16000)
    return ["--kind", kind, "--language", "uz"]


def copy_speech(kind: str, speech: Path, to: Path) -> list[object]:
    """Copies recordings, and of the transcripts those of the copied ones."""
    copied = copy_some(sorted((speech / "wavs").iterdir()), to / "wavs", MOST_BYTES[kind])
    names = {path.stem for path in copied}
    lines = (speech / "metadata.csv").read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if line.partition("|")[0] in names]
    if kind == "vocoder":
        return ["--kind", "vocoder", *PITCH]
    (to / "metadata.csv").write_text("\n".join(kept) + "\n", encoding="utf-8")
    return ["--kind", kind, "--language", LANGUAGE]


def copy_some(paths: list[Path], to: Path, most_bytes: float) -> list[Path]:
    """Copies as many files as there is room for, evenly chosen. Returns them."""
    to.mkdir(parents=True)
    sizes = sum(path.stat().st_size for path in paths)
    chosen = paths[:: max(1, round(sizes / most_bytes))]
    copied, bytes_left = [], most_bytes
    for path in chosen:
        bytes_left -= path.stat().st_size
        if bytes_left < 0 and copied:
            break
        shutil.copy(path, to / path.name)
        copied.append(path)
    return copied


@contextlib.contextmanager
def data_folder(folder: Path, few: bool) -> Iterator[Path]:
    """Yields a folder of prepared data: the given one, or a temporary one that is made now."""
    if folder.is_dir():
        yield folder
        return
    with tempfile.TemporaryDirectory() as scratch:
        for kind, reason in prepare(Path(scratch), few=few).items():
            print(f"no data for {kind}: {reason}")
        yield Path(scratch)


def main() -> None:
    parser = argparse.ArgumentParser("gpu.sh prepare", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("folder", type=Path, help="where to write; gpu.sh alive, measure and learn take it as --data")
    parser.add_argument("--source", type=Path, metavar="FOLDER", help="photographs and recordings of your own")
    parser.add_argument("--card", nargs="+", default=[], help="cards to predict for, such as h100")
    parser.add_argument("--few", action="store_true", help="few clips, for a smoke test")
    options = parser.parse_args()
    for card in options.card:
        try:
            find_gpu(card)
        except UserError as error:
            parser.error(error.message)
    for kind, reason in (reasons := prepare(options.folder, options.source, few=options.few)).items():
        print(f"not prepared: {kind}: {reason}")
    if options.card:
        from gpu.measure import PREDICTIONS, predict

        predict(options.card, options.folder / PREDICTIONS)
    files = [path for path in options.folder.rglob("*") if path.is_file()]
    print(f"{options.folder}: {len(files)} files, {sum(path.stat().st_size for path in files) / 1e6:.1f} MB")
    print(f"Next, where the GPU is: benchmarks/gpu.sh measure --data {options.folder}")
    sys.exit(len(reasons) == len(KINDS))


if __name__ == "__main__":
    main()
