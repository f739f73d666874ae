"""Export for Piper: stock piper-tts loads the voices and gives the same audio. Shape suffixes: T samples."""

import json
import sys
import unicodedata
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from gputrain.errors import UserError
from gputrain.kinds import Exported
from gputrain.speech.text.frontend import Frontend, frontend
from gputrain.speech.text.raw import RawRules
from gputrain.tts.architecture import VoicePreset
from gputrain.tts.export import (
    CLEAR,
    check_tokens,
    comparison_text,
    differences,
    export_piper,
    largest_wave_difference,
    locale_of,
    notes,
    piper_config,
    voice_name,
    write_piper_graph,
)
from gputrain.tts.load import LoadedVoice
from gputrain.tts.model import inference_copy
from tests.command import ProgressSeen
from tests.tables import slow
from tests.tts.test_load import full, narrow, settings_of

piper = pytest.importorskip("piper")

SPEAKERS = ("anna", "boris", "clara")
STEP = 1 / 32767  # 16-bit quantisation step
INPUTS = ["input", "input_lengths", "scales", "sid"]
NAME = "uz_UZ-anna-medium"
UZBEK = "Bu 5-yil, gʻalati. Шаҳар!"


def synthesised(voice: Any, text: str, speaker: int | None = None) -> np.ndarray:
    """Returns audio without noise, and without loudness normalisation."""
    manner = piper.SynthesisConfig(
        speaker_id=speaker, noise_scale=0.0, noise_w_scale=0.0, length_scale=1.1, normalize_audio=False
    )
    (chunk,) = voice.synthesize(text, manner)
    return chunk.audio_int16_array


@torch.no_grad()
def ours(loaded: LoadedVoice, normalized: str, speaker: int | None = None) -> np.ndarray:
    ids = loaded.frontend.ids(normalized)
    wave_B1T, _ = loaded.voice.infer(
        torch.tensor([ids]), torch.tensor([len(ids)]), None if speaker is None else torch.tensor([speaker]),
        noise_scale=0.0, noise_w=0.0, length_scale=1.1,
    )  # fmt: skip
    return wave_B1T[0, 0].clamp(-1, 1).numpy()


def speaks_alike(
    loaded: LoadedVoice, graph: Path, text: str, speaker: int | None = None, *, default: int | None = None
) -> None:
    normalized = loaded.frontend.normalize(text)
    expected_T = ours(loaded, normalized, default if speaker is None else speaker)
    wave_T = synthesised(piper.PiperVoice.load(graph), normalized, speaker)
    assert expected_T.std() > 1e-3
    assert len(wave_T) == len(expected_T)
    assert np.abs(wave_T * STEP - expected_T).max() < 1.5 * STEP


@pytest.mark.parametrize("preset", [slow("high"), "medium"])
def test_stock_piper_speaks_as_we_do(preset: VoicePreset, tmp_path: Path) -> None:
    loaded = narrow(preset, "uz")
    progress = ProgressSeen()
    done = export_piper(loaded, tmp_path, progress=progress)
    assert progress.leads_to(5)
    name = f"uz_UZ-anna-{'high' if preset == 'high' else 'medium'}.onnx"
    assert done.files == sorted(tmp_path.iterdir()) == [tmp_path / name, tmp_path / f"{name}.json"]
    assert 0 < done.figures["largest difference of a sample"] < 1e-4
    for text in (UZBEK, "a"):
        speaks_alike(loaded, tmp_path / name, text)


class Handed(NamedTuple):
    """A `fast` voice with three speakers, and its export."""

    loaded: LoadedVoice
    done: Exported
    graph: Path

    @property
    def settings(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(self.done.files[-1].read_text(encoding="utf-8"))
        return content


@pytest.fixture(scope="module")
def handed(tmp_path_factory: pytest.TempPathFactory) -> Handed:
    loaded, folder = narrow("fast", "uz", SPEAKERS), tmp_path_factory.mktemp("piper")
    done = export_piper(loaded, folder, f"{NAME}.onnx", default_speaker="boris", sherpa=True)
    return Handed(loaded, done, folder / f"{NAME}.onnx")


@pytest.mark.slow
def test_several_speakers(handed: Handed) -> None:
    waves = []
    for speaker in range(3):
        speaks_alike(handed.loaded, handed.graph, "Salom, dunyo.", speaker)
        waves.append(ours(handed.loaded, "salom, dunyo.", speaker)[:2000])
    assert np.abs(waves[0] - waves[1]).max() > 0.01
    note = "choose one of 3 speakers by number: --speaker 0 is anna; without it, boris speaks"
    assert note in notes(handed.loaded, "voice", 1)
    unnamed = replace(handed.loaded, speakers=("", "zoë"))
    assert notes(unnamed, "voice")[-1].endswith("--speaker 0 is without a name; without it, speaker 0 speaks")
    speaks_alike(handed.loaded, handed.graph, "Salom, dunyo.", None, default=1)
    with pytest.raises(UserError, match="there is no speaker 'borris'"):
        export_piper(handed.loaded, Path("unused"), default_speaker="borris")
    with pytest.raises(UserError, match="default_speaker has no effect on a voice with one speaker") as refused:
        export_piper(narrow("fast", "uz"), Path("unused"), default_speaker="0")
    assert refused.value.hint == "drop --default-speaker"


@pytest.mark.parametrize("patched", [False, True])
def test_stock_piper_gives_the_times_of_phonemes(handed: Handed, patched: bool) -> None:
    """`patched` is how Piper reads the times of voices that it has exported itself: it adds an output in memory."""
    voice = piper.PiperVoice.load(handed.graph, include_alignments=patched)
    for text in ("salom, dunyo.", "a"):
        (chunk,) = voice.synthesize(text, include_alignments=True)
        times = [(one.phoneme, one.num_samples) for one in chunk.phoneme_alignments]
        assert [phoneme for phoneme, _ in times] == ["^", *text, "$"]
        assert len(chunk.phoneme_id_samples) == len(handed.loaded.frontend.ids(text))
        assert sum(samples for _, samples in times) == len(chunk.audio_float_array)
        assert len({samples for _, samples in times}) > 1


def sherpa_speaks_as_piper(loaded: LoadedVoice, graph: Path, text: str) -> None:
    """Both load the files as they are. sherpa-onnx looks up letters itself, and is given phonemes."""
    sherpa = pytest.importorskip("sherpa_onnx")
    files = sherpa.OfflineTtsVitsModelConfig(
        model=str(graph), tokens=str(graph.with_name("tokens.txt")), length_scale=1.1, noise_scale=0.0,
        noise_scale_w=0.0,
    )  # fmt: skip
    voice = sherpa.OfflineTts(sherpa.OfflineTtsConfig(sherpa.OfflineTtsModelConfig(vits=files)))
    stock, asked, normalized = piper.PiperVoice.load(graph), sherpa.GenerationConfig(), loaded.frontend.normalize(text)
    if loaded.frontend.espeak_voice:
        asked.phoneme_codepoints = [[ord(char) for char in unicodedata.normalize("NFD", normalized)]]
        assert stock.config.phoneme_type == piper.config.PhonemeType.ESPEAK
    for speaker in (0, len(loaded.speakers) - 1):
        expected_T = synthesised(stock, text, speaker) * STEP
        asked.sid = speaker
        heard_T = np.array(voice.generate("" if loaded.frontend.espeak_voice else normalized, asked).samples)
        assert len(heard_T) == len(expected_T) > 1000
        assert np.abs(heard_T - expected_T).max() < 1.5 * STEP
        assert expected_T.std() > 1e-3


def test_stock_programs_speak_what_export_wrote(handed: Handed) -> None:
    sherpa_speaks_as_piper(handed.loaded, handed.graph, "Salom, dunyo")


@pytest.mark.slow
@pytest.mark.parametrize("code", ["de_DE", "kk_KZ"])
def test_stock_programs_speak_other_languages(code: str, tmp_path: Path) -> None:
    text = {"de_DE": "Das kostet 3,5 Euro.", "kk_KZ": "салем алем"}[code]
    reading = frontend("characters", espeak_voice="de")
    if code == "kk_KZ":
        reading = frontend("characters", texts=[text], raw=RawRules(number_words="kk"))
    loaded = narrow("fast", reading, ("", "zoë"))
    done = export_piper(loaded, tmp_path, sherpa=True)
    names = {"tokens.txt", f"{code}-unused-medium.onnx", f"{code}-unused-medium.onnx.json"}
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in done.files} == names
    sherpa_speaks_as_piper(loaded, tmp_path / f"{code}-unused-medium.onnx", text)


@torch.no_grad()
def test_a_batch_of_texts_of_two_lengths(handed: Handed) -> None:
    """Piper reads one text at a time, and the graph any number; the audio of the shorter one ends in padding."""
    session = onnxruntime.InferenceSession(handed.graph, providers=["CPUExecutionProvider"])
    ids_BS = torch.randint(3, 30, (2, 17), generator=torch.Generator().manual_seed(1))
    lengths_B, speaker_B = torch.tensor([17, 3]), torch.tensor([2, 1])
    scales = np.array([0.0, 1.3, 0.0], np.float32)
    given = dict(zip(INPUTS, (ids_BS.numpy(), lengths_B.numpy(), scales, speaker_B.numpy()), strict=True))
    wave_B11T, durations_BS = session.run(None, given)
    expected_B1T, expected_BS = handed.loaded.voice.infer(
        ids_BS, lengths_B, speaker_B, noise_scale=0.0, noise_w=0.0, length_scale=1.3
    )
    assert expected_B1T.std() > 1e-3
    assert wave_B11T[:, 0].shape == expected_B1T.shape
    assert np.abs(wave_B11T[:, 0] - expected_B1T.numpy()).max() < 1e-4
    assert durations_BS.tolist() == expected_BS.tolist()


def test_piper_draws_its_noise(handed: Handed) -> None:
    voice = piper.PiperVoice.load(handed.graph)
    lively = [next(iter(voice.synthesize("salom, dunyo."))).audio_float_array for _ in range(2)]
    assert len(lively[0]) != len(lively[1]) or np.abs(lively[0] - lively[1]).max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["high", "medium", "fast"])
@pytest.mark.parametrize("speakers", [("anna",), SPEAKERS])
def test_stock_piper_speaks_voices_of_full_size(preset: VoicePreset, speakers: tuple[str, ...], tmp_path: Path) -> None:
    voice, reading = full(preset, frontend("uz"), speakers), frontend("uz")
    with torch.no_grad():
        for name, parameter in voice.duration_predictor.named_parameters():
            if "project" in name:  # At this width, the durations of `build` would be hours.
                parameter *= 0.05
    loaded = LoadedVoice(inference_copy(voice), reading, settings_of(preset), speakers, "full")
    export_piper(loaded, tmp_path, "voice")
    speaks_alike(loaded, tmp_path / "voice.onnx", UZBEK, len(speakers) - 1 if len(speakers) > 1 else None)


def read_by_piper(reading: Frontend) -> Any:
    """Returns Piper's text processing with the exported settings of a voice."""
    loaded = narrow("fast", reading)
    config = json.loads(json.dumps(piper_config(loaded, "voice", locale_of(loaded, ""))))
    return piper.PiperVoice(session=None, config=piper.config.PiperConfig.from_dict(config))


@pytest.mark.parametrize("language", ["uz", "en", "ru", "characters"])
def test_pipers_ids_are_ours(language: str, caplog: pytest.LogCaptureFixture) -> None:
    texts = {"uz": UZBEK, "en": "It's 5 o'clock, naïve!", "ru": "Ёж и 21 йод.", "characters": "Ça, où?"}
    reading = frontend(language, texts=[texts["characters"]] if language == "characters" else ())
    normalized, voice = reading.normalize(texts[language]), read_by_piper(reading)
    (symbols,) = voice.phonemize(normalized)
    assert voice.phonemes_to_ids(symbols) == reading.ids(normalized)
    assert not caplog.messages


def test_sounds_of_espeak_are_left_to_piper() -> None:
    """Piper's symbols are in our table."""
    reading = frontend("en", espeak_voice="en-us")
    voice = read_by_piper(reading)
    assert voice.config.phoneme_type == piper.config.PhonemeType.ESPEAK
    assert voice.config.espeak_voice == "en-us"
    (symbols,) = voice.phonemize("Hello, this is one of 12 quick voices?")
    assert len(symbols) > 20
    assert voice.phonemes_to_ids(symbols) == reading.ids("".join(symbols))
    assert not any("normalize" in note for note in notes(narrow("fast", reading), "voice"))


def test_the_settings_are_all_that_piper_and_home_assistant_read(handed: Handed) -> None:
    settings, reading = handed.settings, handed.loaded.frontend
    id_map = settings.pop("phoneme_id_map")
    assert id_map == reading.id_map()
    assert all(isinstance(ids, list) and all(type(number) is int for number in ids) for ids in id_map.values())
    assert (id_map["_"], id_map["^"], id_map["$"]) == ([0], [1], [2])
    assert settings == {
        "audio": {"sample_rate": 22050, "quality": "medium"},
        "espeak": {"voice": "uz"},
        "language": {
            "code": "uz_UZ", "family": "uz", "region": "UZ", "name_native": "Oʻzbekcha", "name_english": "Uzbek",
            "country_english": "Uzbekistan",
        },
        "inference": {"noise_scale": 0.667, "length_scale": 1.0, "noise_w": 0.8},
        "phoneme_type": "text",
        "phoneme_map": {},
        "num_symbols": len(reading.symbols),
        "num_speakers": 3,
        "speaker_id_map": {"anna": 0, "boris": 1, "clara": 2},
        "default_speaker_id": 1,
        "hop_length": 256,
        "dataset": "anna",
        "piper_version": "1.0.0",
    }  # fmt: skip
    config = piper.PiperVoice.load(handed.graph).config
    assert config.speaker_id_map == {"anna": 0, "boris": 1, "clara": 2}
    assert (config.num_symbols, config.sample_rate, config.hop_length, config.espeak_voice) == (37, 22050, 256, "uz")
    assert (config.noise_scale, config.length_scale, config.noise_w_scale) == (0.667, 1.0, 0.8)
    assert config.phoneme_type == piper.config.PhonemeType.TEXT


def test_the_graph_is_as_piper_wants_it(handed: Handed, tmp_path: Path) -> None:
    write_piper_graph(narrow("medium").voice, tmp_path / "alone.onnx")
    for path, names in ((handed.graph, INPUTS), (tmp_path / "alone.onnx", INPUTS[:3])):
        model = onnx.load(path)
        assert [(opset.domain, opset.version) for opset in model.opset_import] == [("", 16)]
        inputs = {given.name: given.type.tensor_type for given in model.graph.input}
        assert list(inputs) == names
        types = {name: onnx.TensorProto.DataType.Name(value.elem_type) for name, value in inputs.items()}
        assert types == {name: "FLOAT" if name == "scales" else "INT64" for name in inputs}
        shapes = [[axis.dim_param or axis.dim_value for axis in value.shape.dim] for value in inputs.values()]
        assert shapes[:3] == [["batch", "phonemes"], ["batch"], [3]]
        outputs = [
            (output.name, output.type.tensor_type.elem_type, len(output.type.tensor_type.shape.dim))
            for output in model.graph.output
        ]
        assert outputs == [("output", onnx.TensorProto.FLOAT, 4), ("durations", onnx.TensorProto.FLOAT, 2)]


@pytest.mark.slow
def test_another_voice_than_the_graphs_is_detected(tmp_path: Path) -> None:
    loaded = narrow("fast")
    path = tmp_path / "voice.onnx"
    write_piper_graph(loaded.voice, path)
    assert largest_wave_difference(loaded.voice, path, (3, 40)) < 1e-5
    with torch.no_grad():
        loaded.voice.decoder.pre.bias[0] += 0.3
    assert largest_wave_difference(loaded.voice, path, (3, 40)) > 1e-4
    with torch.no_grad():
        loaded.voice.duration_predictor.flow.shift -= 0.5
    with pytest.raises(RuntimeError, match="the symbols have other durations than in torch"):
        largest_wave_difference(loaded.voice, path, (40,))
    model = onnx.load(path)
    for node in model.graph.node:
        if node.op_type == "RandomNormalLike":
            node.op_type = "Identity"
            del node.attribute[:]
    onnx.save(model, path)
    with pytest.raises(RuntimeError, match="draws noise 0 times"):
        largest_wave_difference(loaded.voice, path, (3,))


def test_nothing_is_left_of_an_export_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = narrow("fast")
    with torch.no_grad():
        loaded.voice.decoder.pre.bias[0] = torch.inf
    with pytest.raises(UserError, match=r"decoder\.pre\.bias: not all weights are finite"):
        export_piper(loaded, tmp_path / "out")
    loaded = narrow("fast")
    with pytest.raises(UserError, match="not a file name"):
        export_piper(loaded, tmp_path / "out", "a/b")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="cannot be written"):
        export_piper(loaded, tmp_path / "file")
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(UserError, match="the package onnx is not installed") as missing:
        export_piper(loaded, tmp_path / "out")
    assert missing.value.hint == "pip install onnx"
    assert list((tmp_path / "out").iterdir()) == []


def test_locales() -> None:
    loaded = narrow("fast", "en")
    assert locale_of(loaded, "") == ("en", "US", "English", "English", "United States")
    assert locale_of(loaded, "en_GB") == ("en", "GB", "English", "English", "GB")
    other = narrow("fast", frontend("characters", texts=["abc"]))
    assert locale_of(other, "") == ("und", "", "", "", "")
    assert locale_of(other, "kk_KZ") == ("kk", "KZ", "Қазақша", "Kazakh", "Kazakhstan")
    with pytest.raises(UserError, match="language_code is 'kazakh'"):
        locale_of(other, "kazakh")
    assert locale_of(other, "qq_AB") == ("qq", "AB", "qq", "qq", "AB")
    voices = {
        "pt-br": "pt_BR", "cmn": "zh_CN", "en-gb-x-rp": "en_GB", "kk": "kk_KZ", "nb": "no_NO", "es-419": "es_ES",
        "de+f3": "de_DE", "roa/pt-br": "pt_BR", "German": "und_",
    }  # fmt: skip
    spoken = {voice: replace(other, frontend=replace(other.frontend, espeak_voice=voice)) for voice in voices}
    found = {voice: locale_of(loaded, "")[:2] for voice, loaded in spoken.items()}
    assert {voice: "_".join(codes) for voice, codes in found.items()} == voices


def test_voices_are_named_by_speaker_data_and_run() -> None:
    loaded = narrow("medium", "uz")
    cases = {
        (("anna",), "data/uz", "outputs/tts"): "anna",
        (("anna",), "data/uz", "outputs/Night run-2"): "anna_night_run_2",
        (("",), "data/dilnoza", "outputs/dilnoza"): "dilnoza",
        (("a", "b"), "data/tts", "tts"): "voice",
    }
    found = {}
    for speakers, data, run in cases:
        settings = settings_of("medium", data_path=data)
        voice = replace(loaded, speakers=speakers, settings=settings, source=f"{run}/checkpoint_best.pt")
        found[speakers, data, run] = voice_name(voice, locale_of(voice, ""))
    assert found == {case: f"uz_UZ-{name}-medium" for case, name in cases.items()}


def test_export_tells_what_piper_reads_otherwise() -> None:
    """Numbers and words of a lexicon, with an example each."""
    (note,) = differences(narrow("fast", "ru"))
    assert note.startswith("Stock Piper reads otherwise than the voice 1 of 1 texts, such as 'Это стоит 25 рублей.'")
    reading = frontend("en", espeak_voice="en-us", raw=RawRules({"Ng": "engineer"}))
    (note,) = differences(narrow("fast", reading))
    assert "1 of 2 texts, such as 'Ng': it reads" in note
    assert differences(narrow("fast", replace(reading, raw=RawRules()))) == []


def test_tokens_of_another_voice_are_not_replaced(tmp_path: Path) -> None:
    for folder, tokens in (("made", "a 1"), ("out", "b 1")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "tokens.txt").write_text(tokens)
    (tmp_path / "made/mine.onnx").touch()
    check_tokens(tmp_path / "made", tmp_path / "out")
    (tmp_path / "out/other.onnx").touch()
    with pytest.raises(UserError, match=r"tokens\.txt has other symbols, of other\.onnx"):
        check_tokens(tmp_path / "made", tmp_path / "out")


def test_notes_tell_how_to_feed_numbers() -> None:
    command = "gputrain normalize --language uz --input-file text.txt | piper --model voice.onnx --output-file out.wav"
    assert any(command in note for note in notes(narrow("fast", "uz"), "voice"))


def test_probes_are_clear_of_rounding() -> None:
    voice = narrow("medium").voice
    for symbols in (1, 120):
        made = comparison_text(voice, symbols, seed=1)
        text = voice.encode_text(made["input"], torch.tensor([symbols]))
        raw = voice.duration_predictor.log_durations(text.hidden_BCS, text.mask_B1S, torch.zeros(1, 2, symbols))
        raw = raw.exp() * made["scales"][1]
        assert ((raw - raw.round()).abs() / raw).min() > 0.9 * CLEAR
