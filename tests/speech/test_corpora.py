"""The layouts of published corpora, rebuilt with empty recordings."""

from pathlib import Path

import pytest

from gputrain.audio.prepare import scan_recordings
from gputrain.errors import UserError
from gputrain.speech.transcripts import read_transcripts
from tests.tables import each_row


def read(folder: Path, files: dict[str, str]):
    """Reads the transcripts of a folder that is made of these files."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content.replace("FOLDER", str(folder)))
    tree = scan_recordings(folder)
    return read_transcripts(folder, tree.paths, others=(name for names in tree.ignored.values() for name in names))


@each_row(
    (
        "LibriSpeech",
        {
            "L/train-clean-100/19/198/19-198.trans.txt": "19-198-0000 NORTHANGER ABBEY\n19-198-0001 THIS LITTLE WORK\n",
            "L/train-clean-100/19/198/19-198-0000.flac": "", "L/train-clean-100/19/198/19-198-0001.flac": "",
            "L/train-clean-100/26/495/26-495.trans.txt": "26-495-0000 NO NEWS\n",
            "L/train-clean-100/26/495/26-495-0000.flac": "",
            "L/test-clean/61/70/61-70.trans.txt": "61-70-0000 NOT FOR TRAINING\n",
            "L/test-clean/61/70/61-70-0000.flac": "",
            "L/SPEAKERS.TXT": "19 | F | train-clean-100\n",
        },
        [("19-198-0000.flac", "NORTHANGER ABBEY", "19"), ("19-198-0001.flac", "THIS LITTLE WORK", "19"),
         ("26-495-0000.flac", "NO NEWS", "26")],
    ),
    (
        "LibriTTS",
        {
            "84/121123/84_121123_000007_000001.normalized.txt": "Doctor Who.",
            "84/121123/84_121123.trans.tsv": "x\ty\n",
            "84/121123/84_121123_000007_000001.original.txt": "Dr. Who.", "84/121123/84_121123_000007_000001.wav": "",
        },
        [("84_121123_000007_000001.wav", "Doctor Who.", "84")],
    ),
    (
        "VCTK",
        {
            "txt/p225/p225_001.txt": "Please call Stella.\n",
            "txt/p226/p226_001.txt": "Ask her.", "speaker-info.txt": "x",
            "wav48_silence_trimmed/p225/p225_001_mic1.flac": "", "wav48_silence_trimmed/p226/p226_001_mic1.flac": "",
        },
        [("p225_001_mic1.flac", "Please call Stella.", "p225"), ("p226_001_mic1.flac", "Ask her.", "p226")],
    ),
    (
        "VCTK",
        {"V/txt/p225/p225_001.txt": "Please call Stella.", "V/wav48/p225/p225_001.wav": ""},
        [("p225_001.wav", "Please call Stella.", "p225")],
    ),
    (
        "CMU Arctic",
        {
            "cmu_us_bdl_arctic/etc/txt.done.data": '( a0001 "Author of the \\"trail\\"." )\n( a0002 "Not." )\n',
            "cmu_us_bdl_arctic/wav/a0001.wav": "", "cmu_us_bdl_arctic/wav/a0002.wav": "",
            "cmu_us_slt_arctic/etc/txt.done.data": '( a0001 "The same name." )\n',
            "cmu_us_slt_arctic/wav/a0001.wav": "",
        },
        [("a0001.wav", 'Author of the "trail".', "bdl"), ("a0002.wav", "Not.", "bdl"),
         ("a0001.wav", "The same name.", "slt")],
    ),
    (
        "Kaldi",
        {
            "data/wav.scp": "rec FOLDER/sound/rec.wav\n",
            "data/text": "ann-1 so it is\nann-2 not now\nann-3 lost\nann-4 x\n",
            "data/segments": "ann-1 rec 0.5 2.0\nann-2 rec 2.5 -1\nann-3 gone 0 1\nann-4\n", "sound/rec.wav": "",
            "data/utt2spk": "ann-1 ann\nann-2 ann\nann-3 ann\n", "data/reco2file_and_channel": "rec rec B\n",
        },
        [("rec.wav", "so it is", "ann", (0.5, 2.0), "B"), ("rec.wav", "not now", "ann", (2.5, float("inf")), "B")],
    ),
)  # fmt: skip
def test_each_layout_gives_its_texts_and_speakers(tmp_path, name, files, expected):
    transcripts = read(tmp_path / f"{name} {len(list(tmp_path.iterdir()))}", files)
    assert transcripts.source == f"the layout of {name}"
    found = [(Path(one.path).name, one.text, one.speaker, one.span, one.channel) for one in transcripts.utterances]
    assert found == [(*row, None, "")[:5] if len(row) == 3 else row for row in expected]
    assert [one.reason for one in transcripts.refused] == ["no sound"] * 2 * (name == "Kaldi")


def test_a_table_of_ones_own_is_read_and_commands_of_kaldi_are_not_run(tmp_path):
    files = {"txt/p225/p225_001.txt": "Not this.", "wav48/p225/p225_001.wav": "", "metadata.csv": "p225_001|This.\n"}
    assert [one.text for one in read(tmp_path / "own", files).utterances] == ["This."]
    with pytest.raises(UserError, match="outputs of commands, which are not run"):
        read(tmp_path / "k", {"wav.scp": "a sph2pipe a.sph |\n", "text": "a so it is\n", "b.wav": ""})
