"""The layouts of published corpora of speech: which of their files have the texts, and how. Imports no torch."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from gputrain.errors import UserError
from gputrain.fetch.datasets import of_one_split


class CorpusLine(NamedTuple):
    """A text of a corpus. The recording has the first of the `names` that is there."""

    line: int
    names: tuple[str, ...]
    text: str
    speaker: str = ""
    times: tuple[object, object] = (None, None)  # Start and end in seconds.
    channel: str = ""


Read = Callable[[str], str]  # Returns the content of a file by its path, "" if there is none.


class Layout(NamedTuple):
    name: str
    texts: str  # Pattern of the files with texts.
    lines: Callable[[str, Read], Iterator[CorpusLine]]  # Takes the path of such a file.


class Corpus(NamedTuple):
    """A corpus in a folder: the files with its texts, of one split, and all files beside the recordings."""

    layout: Layout
    texts: list[str]
    is_part: bool  # True if recordings of other splits are there, which are not read.
    files: frozenset[str]


def _numbered(content: str) -> Iterator[tuple[int, str]]:
    return ((number, line.strip()) for number, line in enumerate(content.split("\n"), start=1) if line.strip())


def _librispeech(path: str, read: Read) -> Iterator[CorpusLine]:
    """19/198/19-198.trans.txt: `19-198-0000 NORTHANGER ABBEY`."""
    for number, line in _numbered(read(path)):
        name, _, text = line.partition(" ")
        yield CorpusLine(number, (str(PurePosixPath(path).with_name(name)),), text, name.partition("-")[0])


def _libritts(path: str, read: Read) -> Iterator[CorpusLine]:
    """84/121123/84_121123_000007_000001.normalized.txt is the text of the wav file of this name."""
    name = path.removesuffix(".normalized.txt")
    yield CorpusLine(1, (name,), read(path), name.rpartition("/")[2].partition("_")[0])


def _vctk(path: str, read: Read) -> Iterator[CorpusLine]:
    """txt/p225/p225_001.txt is the text of wav48_silence_trimmed/p225/p225_001_mic1.flac, or of wav48/p225/."""
    speaker, name = path.split("/")[-2:]
    stem = f"{speaker}/{name.removesuffix('.txt')}"
    yield CorpusLine(1, (f"{stem}_mic1", stem), read(path), speaker)


def _arctic(path: str, read: Read) -> Iterator[CorpusLine]:
    """etc/txt.done.data: `( arctic_a0001 "Author of the danger trail." )`, the recordings in wav/ beside etc/."""
    place = path.removesuffix("etc/txt.done.data")
    speaker = re.search(r"cmu_us_([a-z]+)", place)
    for number, line in _numbered(read(path)):
        entry = re.fullmatch(r'\(\s*(\S+)\s+"(.*)"\s*\)', line)
        name, text = (entry[1], entry[2].replace('\\"', '"')) if entry else ("", line)
        yield CorpusLine(number, (f"{place}wav/{name}",) if name else ("",), text, speaker[1] if speaker else "")


def _kaldi(path: str, read: Read) -> Iterator[CorpusLine]:
    """Reads wav.scp, text, and segments, utt2spk and reco2file_and_channel if there are any."""

    def table(name: str) -> Mapping[str, str]:
        pairs = (
            line.replace("\t", " ").partition(" ")
            for _, line in _numbered(read(f"{path.removesuffix('wav.scp')}{name}"))
        )
        return {key: value.strip() for key, _, value in pairs}

    sounds, segments, speakers = table("wav.scp"), table("segments"), table("utt2spk")
    channels = {one: value.split()[-1] for one, value in table("reco2file_and_channel").items() if value}
    if sounds and all(value.endswith("|") for value in sounds.values()):
        raise UserError(
            f"{path}: its recordings are outputs of commands, which are not run",
            hint="write them as wav or flac by these commands, and the paths of the files into wav.scp",
        )
    for number, (name, text) in enumerate(table("text").items(), start=1):
        recording, *times = segments.get(name, name).split() or [name]
        begin, end = (*times, None, None)[:2]
        end = None if end is not None and end.startswith("-") else end  # -1 is the end of the recording.
        names, channel = (sounds.get(recording, recording),), channels.get(recording, "")
        yield CorpusLine(number, names, text, speakers.get(name, ""), (begin, end), channel)


LAYOUTS = (
    Layout("LibriSpeech", r"(.*/)?[^/]+\.trans\.txt", _librispeech),
    Layout("LibriTTS", r"(.*/)?[^/]+\.normalized\.txt", _libritts),
    Layout("VCTK", r"(.*/)?txt/(?P<speaker>[ps]\d+)/(?P=speaker)_\d+\.txt", _vctk),
    Layout("CMU Arctic", r"(.*/)?etc/txt\.done\.data", _arctic),
    Layout("Kaldi", r"(.*/)?wav\.scp", _kaldi),
)


def find_corpus(folder: Path, files: Iterable[str]) -> Corpus | None:
    """Returns the corpus of a folder by its files that are no recordings; of several splits, that for training. None if
    no layout is known. Raises UserError for splits without one for training."""
    files = frozenset(files)
    for layout in LAYOUTS:
        if found := sorted(filter(re.compile(layout.texts).fullmatch, files)):
            texts = of_one_split(found, str(folder), f"{folder}/")
            return Corpus(layout, texts, len(texts) < len(found), files)
    return None
