"""The demos: the command line accepts each of their commands, and their last page shows what was measured."""

import json
from functools import partial
from pathlib import Path

import pytest

from gputrain.asr import kind as asr
from gputrain.audio.synthetic import sentences
from gputrain.cli import kind_commands
from gputrain.cli.app import app, command_line
from gputrain.config import assemble, leaves
from gputrain.errors import UserError
from gputrain.kinds import kinds, read_defaults
from gputrain.report.records import evaluated
from gputrain.speech import data_commands as speech
from gputrain.speech.text.frontend import frontend
from gputrain.tts import kind as tts
from gputrain.tts.config import TrainTts
from gputrain.vae import kind as vae
from gputrain.vocoder import kind as vocoder
from gputrain.vocoder.config import TrainVocoder
from gputrain.vocoder.openvpi import PROFILES, translate
from tests.tables import each_row


def run_demo(folder: Path, kind: str) -> None:
    kind_commands.run_demo(folder, kind, lambda words: app(words, standalone_mode=False))


def parsed(line: list[object]) -> dict[str, object]:
    """Parse a command line. Fails if an option is unknown."""
    name, *words = map(str, line)
    found = command_line().commands[name]
    return dict(found.make_context(name, words).params)


TRAINED_BY = {"vae": "train-vae", "vocoder": "train-vocoder", "tts": "train-tts", "asr": "train-asr"}


@each_row("vae", "vocoder", "tts", "asr")
def test_every_command_of_a_demo_is_understood(tmp_path: Path, kind: str) -> None:
    commands = [[str(word) for word in line] for line in kinds()[kind].demo.commands(tmp_path)]
    assert [line[0] for line in commands][:5] == [
        "prepare-data", "validate", TRAINED_BY[kind], "evaluate", "export"
    ]  # fmt: skip
    for line in commands:
        assert str(tmp_path) in " ".join(f"{value}" for value in parsed(list(line)).values())


def test_the_vocoder_is_trained_on_what_was_prepared(tmp_path: Path) -> None:
    by_name = {str(line[0]): parsed(line) for line in vocoder.demo_commands(tmp_path)}
    given = {name: value for name, value in by_name["train-vocoder"].items() if name in leaves(TrainVocoder)}
    joined = {
        name: ",".join(map(str, value)) if isinstance(value, (list, tuple)) else value for name, value in given.items()
    }
    flags = {name: value for name, value in joined.items() if value not in (None, "")}
    files = PROFILES / "tiny.yaml", tmp_path / "small.yaml"
    assert by_name["train-vocoder"]["config"] == [Path("tiny"), files[1]]
    tiny, mel = (read_defaults(file, TrainVocoder, partial(translate, of="train")) for file in files)
    settings = assemble(TrainVocoder, {**flags, **tiny, **mel})
    mel, prepared = settings.spectrogram.mel, by_name["prepare-data"]
    assert (mel.sampling_rate, mel.hop_size) == (prepared["audio_sample_rate"], prepared["hop_size"]) == (22050, 256)
    assert settings.data.data_path == (Path(str(prepared["output_dir"])),)
    assert by_name["vocode"]["f0_max"] == prepared["f0_max"] == 700
    assert settings.losses.discriminator_start < settings.schedule.num_steps


def test_the_voice_is_trained_on_what_was_prepared_and_speaks_a_new_sentence(tmp_path: Path) -> None:
    by_name = {str(line[0]): parsed(line) for line in tts.demo_commands(tmp_path)}
    given = {name: value for name, value in by_name["train-tts"].items() if name in leaves(TrainTts)}
    settings = assemble(TrainTts, {name: value for name, value in given.items() if value not in (None, "", [], ())})
    prepared, checked = by_name["prepare-data"], by_name["validate"]
    assert prepared["audio_sample_rate"] == checked["audio_sample_rate"] == speech.RATE_HZ
    assert settings.data.data_path == (Path(str(prepared["output_dir"])),)
    assert (settings.schedule.num_steps, settings.schedule.num_epochs) == (tts.STEPS, 0)
    assert {str(by_name[name]["model"]) for name in ("speak", "evaluate")} == {str(settings.saving.output_dir)}
    assert settings.data.held_out_share * speech.CLIPS > 2
    reader = frontend("uz")
    assert reader.normalize(tts.SENTENCE).rstrip(".") in sentences()[speech.CLIPS :]


def test_the_last_page_shows_first_and_last_figures(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    rows: list[dict[str, float]] = [
        {"step": 0, "eval/mel_distance": 2.25, "eval/length_mismatch": 1.512, "eval/psnr_db": 10.26},
        {"step": 10, "loss/generator/mel": 1.5},
        {"step": 20, "eval/mel_distance": 0.625, "eval/length_mismatch": 1.128, "eval/psnr_db": 20.94},
    ]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "evaluation.json").write_text(json.dumps({"f0_rmse_cents": 12.4, "f0_rmse_cents_up_12": 33.3}))
    sung = vocoder.demo_results(tmp_path)
    assert sung["mel distance before training"] == 2.25
    assert sung["mel distance after training"] == "0.625, on held-out clips"
    assert sung["error of the pitch"] == "12 cents"
    assert sung["error of the pitch an octave higher"] == "33 cents"
    (tmp_path / "evaluation.json").write_text(json.dumps({"mcd_db": 7.25}))
    voice = tts.demo_results(tmp_path)
    assert voice["mel distance before training"] == 2.25
    assert voice["mel distance after training"] == "0.625, on held-out clips"
    assert voice["length of the speech"] == "off by a factor of 1.13, before training 1.51"
    assert voice["mel-cepstral distortion"] == "7.2 dB of speech from text, against recordings"
    (tmp_path / "evaluation.json").write_text(json.dumps({"cer": 0.0525, "wer": 0.125}))
    (tmp_path / "transcripts.json").write_text(json.dumps([{"path": "speech/wavs/001.wav", "text": "ona keldi"}]))
    rows = [{"step": 0, "eval/cer": 2.5}, {"step": 10, "eval/cer": 0.05}]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recogniser = asr.demo_results(tmp_path)
    assert recogniser["character errors before training"] == "250 %"
    assert recogniser["character errors after training"] == "5.2 %, on held-out clips"
    assert recogniser["word errors after training"] == "12.5 %"
    assert recogniser["it reads"] == "speech/wavs/001.wav: ona keldi"
    rows = [{"step": 0, "eval/psnr_db": 10.26}, {"step": 20, "eval/psnr_db": 20.94}]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pictures = vae.demo_results(tmp_path)
    assert pictures["PSNR before training"] == "10.3 dB"
    assert pictures["PSNR after training"] == "20.9 dB, on held-out parts"


def test_a_folder_that_holds_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "photographs").mkdir()
    with pytest.raises(UserError, match="holds no demo of vocoder") as caught:
        run_demo(tmp_path, "vocoder")
    assert f"{tmp_path.name}_vocoder" in caught.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["photographs"]
    (tmp_path / "photographs").rmdir()
    (tmp_path / "recordings").write_text("a list")
    with pytest.raises(UserError, match="holds no demo of vae"):
        run_demo(tmp_path, "vae")


@pytest.mark.slow
def test_the_vocoders_demo_learns(tmp_path: Path) -> None:
    run_demo(tmp_path / "demo", "vocoder")
    before, *_, after = evaluated(tmp_path / "demo" / "run", "mel_distance")
    assert after < before / 2
    assert {path.name for path in (tmp_path / "demo" / "export").iterdir()} == {"model.ckpt", "config.json"}
    for folder in ("sung", "sung_higher"):
        assert len(list((tmp_path / "demo" / folder).glob("*.wav"))) == vocoder.SONGS


@pytest.mark.slow
def test_the_voices_demo_learns(tmp_path: Path) -> None:
    run_demo(tmp_path / "demo", "tts")
    before, *_, after = evaluated(tmp_path / "demo" / "run", "mel_distance")
    assert after < before / 2
    exported = {path.name for path in (tmp_path / "demo" / "piper").iterdir()}
    assert exported == {"uz_UZ-demo.onnx", "uz_UZ-demo.onnx.json"}
    assert (tmp_path / "demo" / "said.wav").stat().st_size > 0.3 * 2 * speech.RATE_HZ


@pytest.mark.slow
def test_the_recognisers_demo_learns(tmp_path: Path) -> None:
    run_demo(tmp_path / "demo", "asr")
    before, *_, after = evaluated(tmp_path / "demo" / "run", "cer")
    assert after < before / 2
    assert len(json.loads((tmp_path / "demo" / "transcripts.json").read_text())) == speech.CLIPS
    assert len(list((tmp_path / "demo" / "subtitles").glob("*.srt"))) == speech.CLIPS
    exported = {path.name for path in (tmp_path / "demo" / "sherpa").iterdir()}
    assert exported == {"model.onnx", "model.int8.onnx", "tokens.txt"}
