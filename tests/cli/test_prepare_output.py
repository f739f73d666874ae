"""What the commands on data print and refuse: items by reason, odd names, files that are not read, options."""

from pathlib import Path

import numpy as np
import soundfile
from PIL import Image

from gputrain.cli import tables, ui
from gputrain.data_in.preparation import RefusedItem
from tests.command import gputrain_here
from tests.tables import each_row
from tests.vocoder.conftest import flags


def test_refusals_are_counted_by_reason_after_the_first_few(capsys):
    items = [RefusedItem(f"{number}.wav", "no transcript", "it has no text") for number in range(446)]
    items[100:100] = [RefusedItem("a.wav", "silent", "its peak is 0"), RefusedItem("b.wav", "silent", "so")]
    tables.print_refusals(items)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        *(f"no transcript: {number}.wav: it has no text" for number in range(5)),
        "no transcript: and 441 more, 446 in all",
        "silent: a.wav: its peak is 0",
        "silent: b.wav: so",
    ]
    tables.print_refusals(items[:6])
    assert len(capsys.readouterr().err.splitlines()) == 6


def test_a_line_break_in_a_name_stays_on_its_line(capsys):
    tables.print_refusals([RefusedItem("a\n  two.wav", "silent", "like b\nc.wav")])
    ui.print_figures("in\n  put", {"files": "a\n  b"})
    told = capsys.readouterr()
    assert told.err == "silent: a\\n  two.wav: like b\\nc.wav\n"
    assert told.out == "in\\n  put\n  files  a\\n  b\n"


def test_drawings_are_ignored_and_another_size_asks_first(tmp_path):
    raw, out = tmp_path / "raw", tmp_path / "out"
    raw.mkdir()
    for seed in range(3):
        noise = np.random.default_rng(seed).integers(0, 256, (70, 70, 3), dtype=np.uint8)
        Image.fromarray(noise).save(raw / f"{seed}\n.png")
    (raw / "logo.svg").write_text("<svg/>")
    words = ("prepare-data", "--input-dir", raw, "--output-dir", out, "--num-workers", 1, "--target-size")
    done = gputrain_here(*words, 64)
    assert done.returncode == 0, done.stderr
    assert "ignored files  logo.svg\n" in done.stdout
    done = gputrain_here(*words, 32)
    assert done.returncode == 2
    assert "its pictures were prepared with other settings: target_size 64, not 32" in done.stderr
    assert "--output-dir NEW_FOLDER" in done.stderr
    assert {Image.open(path).size for path in out.glob("*.png")} == {(64, 64)}


@each_row(
    ({"kind": "asr", "language": "uz", "audio_sample_rate": 22050}, "does nothing with", "drop --audio-sample-rate"),
    ({"kind": "asr", "language": "uz", "espeak_voice": "uz"}, "does nothing with --kind asr", "drop --espeak-voice"),
    ({"kind": "asr", "language": "uz", "hop_size": 256}, "does nothing with --kind asr", "drop --hop-size"),
    ({"kind": "tts", "language": "en", "f0_min": 55}, "f0_min does nothing with --kind tts", "drop --f0-min"),
    ({"kind": "tts", "language": "en", "target_size": 64}, "target_size does nothing", "drop --target-size"),
    ({"kind": "vocoder", "target_size": 512}, "does nothing with --kind vocoder", "drop --target-size"),
    ({"kind": "vocoder", "language": "en"}, "language does nothing with --kind vocoder", "drop --language"),
    ({"audio_sample_rate": 22050}, "does nothing with --kind vae", "drop --audio-sample-rate"),
    ({"kind": "asr"}, "needs a language", "--language"),
    ({"kind": "tts"}, "needs a language", "--language characters"),
    ({"kind": "tts", "espeak_voice": "en-us"}, "needs a language", "beside --espeak-voice too"),
    ({"kind": "asr", "language": "characters"}, "language 'characters' is not the code", "use uz, ru or en"),
    ({"kind": "asr", "language": "k"}, "language 'k' is not the code", "use uz, ru or en"),
    ({"kind": "tts", "language": "kk"}, "language 'kk' has no text rules for a voice", "--language characters"),
    ({"kind": "tts", "language": "en", "max_seconds": 1, "min_seconds": 2}, "leave no clip", "0.4"),
)
def test_options_that_do_not_fit_the_kind_are_refused(typed, given, said, hint):
    code, printed = typed("prepare-data", "--input-dir", "in", *flags({"output_dir": "out", **given}))
    assert code == 2
    assert said in printed
    assert hint in printed
    assert not Path("out").exists()


@each_row(("vocoder", ()), ("tts", ("--language", "en")), ("asr", ("--language", "en")))
def test_a_preparation_says_what_validation_says_and_what_comes_next(tmp_path, kind, further):
    """The recordings are short, and lack the treble of their rate; a second run that makes nothing says it no more."""
    noise_T = np.random.default_rng(0).normal(size=4000) / 10
    for number in range(2):
        folder = tmp_path / f"{kind} in"
        folder.mkdir(exist_ok=True)
        soundfile.write(folder / f"{number}.wav", np.repeat(np.roll(noise_T, number), 8), 32000)
        (folder / f"{number}.txt").write_text(f"it is said {number}.")
    line = ["--kind", kind, *(["--audio-sample-rate", 16000] if kind != "asr" else []), "--num-workers", 1]
    out = tmp_path / f"{kind} out"
    words = ["prepare-data", *line, *further, "--input-dir", folder, "--output-dir", out]
    done = gputrain_here(*words)
    assert done.returncode == 0, done.stderr
    notes = [one for one in done.stderr.splitlines() if one.startswith("note: ")]
    assert any("is little" in note for note in notes)
    checked = gputrain_here("validate", *line, "--input-dir", out)
    assert [one for one in checked.stderr.splitlines() if one.startswith("note: ")] == notes
    rate = " --audio-sample-rate 16000" if kind == "vocoder" else ""  # Other kinds take it from the data.
    assert done.stdout.splitlines()[-2:] == [
        f"Next: gputrain plan train-{kind} --data-path '{out}'{rate}",
        f"      gputrain train-{kind} --data-path '{out}' --output-dir outputs/{kind}{rate}",
    ]
    assert "is little" not in gputrain_here(*words).stderr
