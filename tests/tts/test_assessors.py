"""Predictors of opinion scores as ONNX files, failing assessors, and the best checkpoint by their measures."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gputrain.config import assemble
from gputrain.errors import UserError
from gputrain.speech.buckets import Speech, open_speech
from gputrain.tts import assessors, work
from gputrain.tts.assessors import AssessmentFailed, Assessors, MosPredictor
from gputrain.tts.config import TrainTts, VoiceEvaluation
from gputrain.tts.evaluate import SCORES, HeldOutClips
from gputrain.tts.model import Voice
from tests.speech.trainings import rows
from tests.tables import each_row
from tests.tts.test_evaluate import CPU, HOP, sizes
from tests.tts.test_train import QUIET, TINY, small_presets, spoken, train
from tests.tts.voices import build

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
FLOAT, INT64 = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64


def graph(
    file: Path, shape: list[Any], *, type: int = FLOAT, outputs: int = 1, keepdims: int = 0, rate: str = "16000",
    scale: float = 1.0, axes: int = 1,
) -> Path:  # fmt: skip
    """Writes a network that returns the mean square of its input times `scale`."""
    helper = onnx.helper
    names = [f"score_{number}" for number in range(outputs)]
    nodes = [
        helper.make_node("Cast", ["wave"], ["as_float"], to=FLOAT),
        helper.make_node("Mul", ["as_float", "as_float"], ["squares"]),
        helper.make_node("Mul", ["squares", "scale"], ["scaled"]),
        *(helper.make_node("ReduceMean", ["scaled"], [name], keepdims=keepdims, axes=[axes - 1]) for name in names),
    ]
    made = helper.make_graph(
        nodes, "scores", [helper.make_tensor_value_info("wave", type, shape)],
        [helper.make_tensor_value_info(name, FLOAT, None) for name in names],
        [onnx.numpy_helper.from_array(np.float32(scale), "scale")],
    )  # fmt: skip
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    helper.set_model_props(model, {"sampling_rate": rate} if rate else {})
    onnx.save(model, file)
    return file


@each_row(
    (["samples"], 1, 0), (["batch", "samples"], 2, 0), ([1, "samples"], 2, 0), (["batch", "samples"], 2, 1),
)  # fmt: skip
def test_a_predictor_scores_a_wave_of_any_length(tmp_path, shape, axes, keepdims):
    """Shapes [samples] and [batch, samples]; outputs [], [batch] and [batch, 1]."""
    predictor = MosPredictor.open(graph(tmp_path / "mos.onnx", shape, axes=axes, keepdims=keepdims))
    wave_L = np.full(2 * 16000, 0.5, np.float32)
    assert predictor.score(wave_L, 16000) == pytest.approx(0.25, rel=1e-6)
    assert predictor.score(wave_L[:4000], 16000) == pytest.approx(0.25 * 4000 / 16000, rel=1e-6)  # Then silence.
    time_T = np.arange(22050) / 22050
    tone_L = np.sin(2 * math.pi * 440 * time_T).astype(np.float32)
    assert predictor.score(tone_L, 22050) == pytest.approx(0.5, abs=0.01)  # As many samples at its own rate.


@each_row(
    ({"shape": ["batch", 144160], "axes": 2}, r"inputs wave tensor\(float\) \['batch', 144160\]"),
    ({"shape": [8, "samples"], "axes": 2}, r"inputs wave tensor\(float\) \[8, 'samples'\]"),
    ({"shape": ["batch", 1, "samples"], "axes": 3}, "inputs wave"),
    ({"shape": ["samples"], "type": INT64}, r"tensor\(int64\)"),
    ({"shape": ["samples"], "outputs": 2}, "outputs score_0 .*, score_1 "),
    ({"shape": ["samples"], "rate": ""}, "metadata have no sampling_rate"),
    ({"shape": ["samples"], "rate": "fast"}, "sample_rate is 'fast'"),
    ({"shape": ["samples"], "scale": math.nan}, r"its output is \[nan\]"),
    ({"shape": ["batch", "samples"], "axes": 1}, "shape"),
)
def test_other_graphs_are_refused_with_what_they_have(tmp_path, options, said):
    with pytest.raises(UserError, match=said):
        MosPredictor.open(graph(tmp_path / "mos.onnx", **options))


def test_a_given_rate_is_that_of_the_predictor_and_files_that_are_none_are_refused(tmp_path):
    assert MosPredictor.open(graph(tmp_path / "mos.onnx", ["samples"], rate=""), 8000).rate_hz == 8000
    (tmp_path / "none.onnx").write_text("none")
    for name, said in (("none.onnx", "onnxruntime cannot load it"), ("missing.onnx", "no such file")):
        with pytest.raises(UserError, match=said):
            MosPredictor.open(tmp_path / name)


# ------------------------------------------------------------------------------------------------------- a training


@pytest.fixture(autouse=True, scope="module")
def _small() -> Iterator[None]:
    with small_presets():
        yield


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    return spoken(tmp_path_factory.mktemp("speech") / "store")


def settings_of(store: Path, **changes: object) -> TrainTts:
    return assemble(TrainTts, {"data_path": str(store), "held_out_share": 0.4, **changes})


def held_out_of(store: Path, found: Assessors, best_by: str) -> tuple[HeldOutClips, Speech, Voice]:
    speech = open_speech(store, HOP, 0.4)
    settings = settings_of(store, best_by=best_by, recogniser="of the test", mos_predictor="of the test")
    return HeldOutClips(speech, settings, found), speech, build(sizes())


@each_row(
    ({"best_by": "cer"}, "best_by cer needs a recogniser"),
    ({"best_by": "mos", "recogniser": "a"}, "best_by mos needs a mos_predictor"),
    ({"mos_sampling_rate": 16000}, "mos_sampling_rate has no effect without mos_predictor"),
    ({"recogniser": "a", "evaluate_every_steps": 0}, "recogniser has no effect: nothing is evaluated"),
)
def test_settings_without_effect_are_refused(changes, said):
    with pytest.raises(UserError, match=said):
        settings_of(Path("data"), **changes)


def test_the_score_is_that_of_the_chosen_measure_and_all_are_reported(store):
    heard: list[int] = []

    def mos(wave_L: np.ndarray) -> float:
        heard.append(len(wave_L))
        return 3.5

    found = Assessors(cer=lambda wave_L: "yes", mos=mos)
    for best_by, expected in (("distance", "mcd_sl_db"), ("cer", "cer"), ("mos", "mos")):
        clips, speech, voice = held_out_of(store, found, best_by)
        scalars = clips.evaluate(voice, CPU).scalars
        value = scalars[expected]
        assert scalars["score"] == {"distance": -value, "cer": 1 - value, "mos": value}[best_by] != 0
        assert scalars["mos"] == scalars["recorded_mos"] == 3.5
        assert scalars["cer"] > 0
    count = len(speech.parts.held_out)
    assert len(heard) == 3 * 2 * count
    assert clips.evaluate(voice, CPU).scalars == scalars
    assert len(heard) == 3 * 2 * count + count  # Recordings are heard once.


def test_a_voice_that_cannot_be_read_yet_is_chosen_by_its_distance():
    """From the first letters that are read, the error rate decides."""
    silent, near, louder, read = (
        SCORES["cer"]({"cer": cer, "mcd_sl_db": distance})
        for cer, distance in ((1.0, 20.0), (1.2, 12.0), (1.0, 15.0), (0.99, 30.0))
    )
    assert silent < louder < near < read


def test_a_failing_assessor_ends_the_run_only_if_it_chooses_the_best(store, caplog):
    def fails(wave_L: np.ndarray) -> str:
        raise RuntimeError("no such tensor")

    clips, _, voice = held_out_of(store, Assessors(cer=fails, mos=lambda wave_L: 2.0), "mos")
    scalars = clips.evaluate(voice, CPU).scalars
    assert scalars["score"] == 2.0
    assert "cer" not in scalars
    assert "the recogniser failed on a sound: no such tensor: cer is not measured any more in this run" in caplog.text
    clips, _, voice = held_out_of(store, Assessors(cer=fails), "cer")
    with pytest.raises(AssessmentFailed, match="the recogniser failed on a sound") as raised:
        clips.evaluate(voice, CPU)
    assert "--best-by distance" in raised.value.hint


def test_assessors_compute_outside_the_autocast_of_the_voice():
    seen = []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        Assessors(cer=lambda wave_L: seen.append(torch.is_autocast_enabled("cpu")) or "").hear(np.zeros(9, np.float32))
    assert seen == [False]


@pytest.mark.slow
def test_the_best_checkpoint_by_another_measure_is_chosen_anew_on_resuming(store, tmp_path, monkeypatch, caplog):
    """The scores of mos are far above those of distances, so that no distance would beat them."""
    mos = str(graph(tmp_path / "mos.onnx", ["samples"], scale=1e6))
    options = {**QUIET, "evaluate_every_steps": 1, "mos_predictor": mos, "early_stopping_patience": 50}
    first = train(tmp_path / "run", store, **options, best_by="mos", max_steps=1)["progress"]
    assert first["best_score"] == rows(tmp_path / "run")[-1]["eval/mos"] > 0
    again = train(tmp_path / "run", store, **options, best_by="mos", max_steps=2, resume_from="auto")["progress"]
    assert again["best_evaluation"] == max(
        row["eval/mos"] for row in rows(tmp_path / "run") if "eval/mos" in row and row["step"]
    )
    assert "chosen anew" not in caplog.text
    other = train(tmp_path / "run", store, **options, max_steps=3, resume_from="auto")["progress"]
    assert "scores of another measure are not compared: checkpoint_best.pt is chosen anew" in caplog.text
    last = rows(tmp_path / "run")[-1]
    assert other["best_score"] == other["best_evaluation"] == -last["eval/mcd_sl_db"] < 0
    best = torch.load(tmp_path / "run" / "checkpoint_best.pt", weights_only=True)
    assert (best["progress"]["step"], best["config"]["best_by"]) == (3, "distance")


def test_assessors_are_opened_before_the_run_folder_and_by_the_evaluating_process_alone(store, tmp_path, monkeypatch):
    opened: list[VoiceEvaluation] = []
    monkeypatch.setattr(work, "open_assessors", lambda options, *others: opened.append(options) or Assessors())
    settings = assemble(TrainTts, {**TINY, "data_path": str(store), "mos_predictor": str(tmp_path / "none.onnx")})
    work.TtsWork().open_data(settings)
    assert [str(one.mos_predictor) for one in opened] == [str(tmp_path / "none.onnx")]
    for name, value in (("RANK", 1), ("WORLD_SIZE", 2), ("LOCAL_RANK", 1), ("LOCAL_WORLD_SIZE", 2)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")
    work.TtsWork().open_data(settings)
    assert len(opened) == 1
    with pytest.raises(UserError, match="no such file"):
        assessors.open_assessors(settings.assessors, None, 16000, "cpu")  # type: ignore[arg-type]
