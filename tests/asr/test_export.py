"""Exports, loaded by transformers, ONNX Runtime and sherpa-onnx."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from gputrain.asr import export
from gputrain.asr.load import Recogniser, greedy_text, load_recogniser
from gputrain.asr.model import add_lora
from gputrain.errors import UserError
from gputrain.speech.text.vocabulary import ABSENT, Vocabulary
from tests.asr.models import (
    VOCABULARY,
    run_folder,
    tiny_model,
    transformers_folder,
    written_by_transformers,
)
from tests.command import ProgressSeen
from tests.tables import each_row

CPU = torch.device("cpu")
# Ids in another order, capitals, and a blank that is not the first symbol, as in stock folders.
STOCK = Vocabulary("en", ("A", "B", "'", "|", "[UNK]", "[PAD]", *"CDEFGHIJKLMNOPQRSTUVWXYZ"), 5, 4, 3, upper=True)
GROUP = {"feat_extract_norm": "group", "do_stable_layer_norm": False, "conv_bias": False}


def sounds() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    loudness = (0.3, 0.002, 0.05)  # The second is so quiet that the normalisation's epsilon counts.
    return [(random.normal(size=4000 + 9000 * at) * level).astype(np.float32) for at, level in enumerate(loudness)]


def heard(folder: Path, wave: np.ndarray, name: str = "model.onnx") -> str:
    import sherpa_onnx

    stock = sherpa_onnx.OfflineRecognizer.from_omnilingual_asr_ctc(str(folder / name), str(folder / "tokens.txt"))
    stream = stock.create_stream()
    stream.accept_waveform(16000, wave)
    stock.decode_stream(stream)
    return " ".join(stream.result.text.split())


@pytest.mark.parametrize(("vocabulary", "changes"), [(VOCABULARY, {}), (VOCABULARY, GROUP), (STOCK, {})])
def test_transcripts_are_identical_everywhere(
    tmp_path: Path, vocabulary: Vocabulary, changes: dict[str, object]
) -> None:
    recogniser = load_recogniser(run_folder(tmp_path / "run", vocabulary, **changes), CPU)
    seen = [ProgressSeen(), ProgressSeen()]
    export.export_transformers(recogniser, tmp_path / "transformers", progress=seen[0])
    made = export.export_sherpa(recogniser, tmp_path / "sherpa", progress=seen[1])
    assert seen[0].leads_to(1 + export.COMPARED_CLIPS)
    assert seen[1].leads_to(3 + 3 * export.COMPARED_CLIPS)
    assert str(made.figures["characters that differ"]).startswith("0 %")
    for wave in sounds():
        ours = greedy_text(recogniser.log_probs([wave])[0].numpy(), vocabulary)
        assert len(ours) > 3
        assert written_by_transformers(tmp_path / "transformers", wave).lower() == ours
        assert heard(tmp_path / "sherpa", wave).lower() == ours
        assert heard(tmp_path / "sherpa", wave, "model.int8.onnx")
    assert sorted(path.name for path in (tmp_path / "sherpa").iterdir()) == [
        "model.int8.onnx", "model.onnx", "tokens.txt"
    ]  # fmt: skip
    again = load_recogniser(tmp_path / "transformers", CPU)
    assert again.vocabulary.symbols == vocabulary.symbols
    wave = sounds()[0]
    torch.testing.assert_close(again.log_probs([wave])[0], recogniser.log_probs([wave])[0])


def test_a_recogniser_that_writes_nothing_is_compared_by_its_log_probabilities(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recogniser = load_recogniser(run_folder(tmp_path / "run"), CPU)
    torch.nn.init.constant_(recogniser.model.lm_head.bias[VOCABULARY.blank : 1], 1000.0)
    made = export.export_sherpa(recogniser, tmp_path / "sherpa")
    assert "none, since the recogniser writes nothing" in str(made.figures["compared transcripts"])
    assert "characters that differ" not in made.figures
    assert made.notes[1].startswith("Not model.int8.onnx: nothing tells what it changes; --data-path FOLDER")
    assert float(str(made.figures["largest difference of a log-probability"])) < export.LARGEST_DIFFERENCE
    assert "no transcript could be compared" in caplog.text


def test_int8_is_recommended_where_it_changes_at_most_one_in_a_hundred_characters(tmp_path: Path) -> None:
    """One model writes the same letter whatever it hears. Another has a large weight for a feature that is always zero:
    nothing in fp32, but beside it all other weights of the matrix are zero in 8 bits."""
    recogniser = load_recogniser(run_folder(tmp_path / "run"), CPU)
    head, norm = recogniser.model.lm_head, recogniser.model.wav2vec2.encoder.layer_norm
    with torch.no_grad():
        norm.weight[0] = norm.bias[0] = 0
        head.weight[:, 0] = 1e5
    spoiled = export.export_sherpa(recogniser, tmp_path / "spoiled")
    share = float(str(spoiled.figures["characters that differ"]).split()[-2])
    assert share > 50
    assert 'ctc("{}"'.format(tmp_path / "spoiled" / "model.onnx") in spoiled.notes[0]
    assert spoiled.notes[1].startswith(f"Not model.int8.onnx: {share:g} % of its characters differ, more than 1 %")
    with torch.no_grad():
        head.weight.zero_()
        head.bias[VOCABULARY.symbols.index("a")] = 100.0
    same = export.export_sherpa(recogniser, tmp_path / "same")
    assert same.figures["characters that differ"] == "0 %, with int8 0 %"
    assert 'ctc("{}"'.format(tmp_path / "same" / "model.int8.onnx") in same.notes[0]
    assert same.notes[1].endswith("0 % of its characters differ, at most 1 %")
    assert [export.recommended(share, Path("data"))[0] for share in (0.0, 0.01, 0.0101, None)] == [
        "model.int8.onnx", "model.int8.onnx", "model.onnx", "model.onnx"
    ]  # fmt: skip


def test_onnx_reads_raw_samples_of_any_length_and_number(tmp_path: Path) -> None:
    import onnxruntime

    recogniser = load_recogniser(run_folder(tmp_path / "run"), CPU)
    progress = ProgressSeen()
    made = export.export_onnx(recogniser, tmp_path / "onnx", "speech.onnx", progress=progress)
    assert progress.leads_to(1 + export.COMPARED_CLIPS)
    assert [path.name for path in made.files] == ["speech.onnx", "tokens.txt"]
    session = onnxruntime.InferenceSession(str(made.files[0]), providers=["CPUExecutionProvider"])
    assert session.get_modelmeta().custom_metadata_map["sample_rate"] == "16000"
    waves = np.stack([np.random.default_rng(seed).normal(size=8123) * (seed + 1) / 9 for seed in range(3)])
    (logits,) = session.run(["logits"], {"x": waves.astype(np.float32)})
    for wave, theirs in zip(waves.astype(np.float32), logits, strict=True):
        ours = recogniser.log_probs([wave])[0]
        torch.testing.assert_close(torch.log_softmax(torch.from_numpy(theirs), -1), ours, atol=1e-4, rtol=0)


def test_weights_of_large_graphs_are_a_file_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "LARGEST_PROTOBUF", 10_000)
    recogniser = load_recogniser(run_folder(tmp_path / "run", hidden_size=64), CPU)
    export.export_sherpa(recogniser, tmp_path / "sherpa")
    assert (tmp_path / "sherpa" / "model.weights").is_file()
    wave = sounds()[0]
    assert heard(tmp_path / "sherpa", wave) == greedy_text(recogniser.log_probs([wave])[0].numpy(), VOCABULARY)


def test_low_rank_adapters_are_merged(tmp_path: Path) -> None:
    """The run has a model with adapters that change its output; the export has none and computes the same."""
    from gputrain.asr.load import predict
    from gputrain.engine import checkpoint

    run = run_folder(tmp_path / "run")
    content = checkpoint.read(run / checkpoint.LAST, "asr")
    model = tiny_model()
    add_lora(model, 2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_up"):
                torch.nn.init.normal_(parameter, std=0.5)
    checkpoint.save(run, {**content, "modules": {"recogniser": model.state_dict()}})
    export.export_transformers(load_recogniser(run, CPU), tmp_path / "plain")
    plain = load_recogniser(tmp_path / "plain", CPU)
    assert not any("lora" in name for name in plain.model.state_dict())
    wave = torch.from_numpy(sounds()[0])[None]
    adapted = predict(model.eval(), wave, [wave.shape[1]], normalizes=True)[0]
    torch.testing.assert_close(plain.log_probs([wave[0].numpy()])[0], adapted, atol=1e-4, rtol=1e-4)
    unadapted = predict(tiny_model(), wave, [wave.shape[1]], normalizes=True)[0]
    assert (unadapted - adapted).abs().max() > 0.1


def test_a_consumer_that_computes_something_else_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recogniser = load_recogniser(run_folder(tmp_path / "run"), CPU)
    stock = export._stock_onnxruntime
    monkeypatch.setattr(export, "_stock_onnxruntime", lambda path: lambda wave: stock(path)(wave * 0.5 + 0.1) * 1.01)
    with pytest.raises(RuntimeError, match="ONNX Runtime: log-probabilities differ"):
        export.export_onnx(recogniser, tmp_path / "onnx")
    assert not [path for path in (tmp_path / "onnx").iterdir() if path.is_file()]


def test_what_sherpa_cannot_have_is_refused(tmp_path: Path) -> None:
    """It normalises samples itself, so that a recogniser that reads them as they are would hear others."""
    recogniser = load_recogniser(run_folder(tmp_path / "run", normalizes=False), CPU)
    with pytest.raises(UserError, match="sherpa-onnx normalises"):
        export.export_sherpa(recogniser, tmp_path / "sherpa")
    with pytest.raises(UserError, match="not a file name"):
        export.export_onnx(recogniser, tmp_path, "a/b")
    group = load_recogniser(run_folder(tmp_path / "group", normalizes=False, seed=3, **GROUP), CPU)
    export.export_sherpa(group, tmp_path / "group_sherpa")  # Its first layer is normalised over time anyway.


def test_a_vocabulary_without_delimiter_and_unknown_symbol(tmp_path: Path) -> None:
    vocabulary = Vocabulary("ja", ("<pad>", *"あいうえおかきくけこ"), 0, ABSENT, ABSENT)
    recogniser = load_recogniser(run_folder(tmp_path / "run", vocabulary), CPU)
    export.export_sherpa(recogniser, tmp_path / "sherpa")
    export.export_transformers(recogniser, tmp_path / "transformers")
    wave = sounds()[0]
    ours = greedy_text(recogniser.log_probs([wave])[0].numpy(), vocabulary)
    assert heard(tmp_path / "sherpa", wave) == written_by_transformers(tmp_path / "transformers", wave) == ours != ""


@each_row("_", " ", "|")
def test_any_delimiter_is_a_space_for_transformers(tmp_path: Path, delimiter: str) -> None:
    vocabulary = Vocabulary("en", ("<pad>", delimiter, "<unk>", *"abcdefgh"), 0, 2, 1)
    recogniser = load_recogniser(run_folder(tmp_path / f"run {ord(delimiter)}", vocabulary), CPU)
    folder, wave = tmp_path / f"transformers {ord(delimiter)}", sounds()[0]
    log_probs_FV = recogniser.log_probs([wave])[0]
    with torch.no_grad():  # The delimiter becomes the most probable symbol of half of the frames.
        recogniser.model.lm_head.bias[1] += (log_probs_FV.max(dim=1).values - log_probs_FV[:, 1]).median() + 0.01
    export.export_transformers(recogniser, folder)
    ours = greedy_text(recogniser.log_probs([wave])[0].numpy(), vocabulary)
    assert written_by_transformers(folder, wave) == ours
    assert " " in ours
    again = load_recogniser(folder, CPU)
    assert greedy_text(again.log_probs([wave])[0].numpy(), again.vocabulary) == ours


def test_settings_of_the_feature_extractor_are_where_old_and_new_versions_look(tmp_path: Path) -> None:
    """transformers 4 reads preprocessor_config.json only, and version 5 processor_config.json first."""
    from transformers import Wav2Vec2FeatureExtractor

    recogniser = load_recogniser(run_folder(tmp_path / "run", normalizes=False), CPU)
    export.export_transformers(recogniser, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "preprocessor_config.json").read_text())["do_normalize"] is False
    assert Wav2Vec2FeatureExtractor.from_pretrained(tmp_path / "out").do_normalize is False
    assert load_recogniser(tmp_path / "out", CPU).normalizes is False


def test_white_space_is_no_symbol_of_sherpa(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="white space"):
        export.write_tokens(Vocabulary("xx", ("<pad>", "a", "\u3000"), 0, ABSENT, ABSENT), tmp_path / "tokens.txt")


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    recogniser: Recogniser = load_recogniser(transformers_folder(tmp_path / "model"), CPU)
    monkeypatch.setitem(sys.modules, "sherpa_onnx", None)
    with pytest.raises(UserError, match="the package sherpa-onnx is not installed"):
        export.export_sherpa(recogniser, tmp_path / "sherpa")
