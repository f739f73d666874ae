"""`gputrain bench train-vae`: rows that add one switch each, measured in real training steps."""

import json
import math

import pytest
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode

from gputrain.bench import step_bench
from gputrain.bench.runner import NotMeasured
from gputrain.bench.step_bench import inference_kernels
from gputrain.config import assemble
from gputrain.hw.plan import Hardware, decide
from gputrain.hw.probe import Machine
from gputrain.planner.memory.predict import predict_step
from gputrain.planner.time.roofline import DeviceRates, busy_seconds
from gputrain.vae.config import BenchVae, TrainVae
from gputrain.vae.work import VaeWork
from tests.command import gputrain_here
from tests.tables import each_row
from tests.toy import cpu_runtime

SMALL = {"preset": "fast", "channels": [8, 16], "image_size": 32, "batch_size": 4, "device": "cpu"}
H100 = Machine(
    system="Linux", cpu_cores=8, gpu="H100", gpu_memory_gb=80, compute_capability=(9, 0), triton=True,
    compiled_capabilities=("sm_90",), cuda="13.0", compiler="g++",
)  # fmt: skip
T4 = Machine(
    system="Linux", cpu_cores=8, gpu="T4", gpu_memory_gb=16, compute_capability=(7, 5), triton=True,
    compiled_capabilities=("sm_75",), cuda="13.0", compiler="g++",
)  # fmt: skip


def trains(**changes: object) -> list[TrainVae]:
    """Returns the settings that each row trains, as its child reads them."""
    settings = [
        json.dumps(row.settings) for row in step_bench.bench_rows(VaeWork(), assemble(BenchVae, {**SMALL, **changes}))
    ]
    return [assemble(TrainVae, json.loads(text)["train"]) for text in settings]


def states(machine: Machine) -> list[tuple[object, ...]]:
    """Returns the settings of each row: TF32, precision, channels_last, compile, lean, CUDA graphs."""
    settings = trains(device="auto")
    plans = [decide(machine, train.hardware) for train in settings]
    switches = ("tf32", "precision", "channels_last", "compile")
    return [
        (*(plan.settings[name].value for name in switches), train.model.lean, plan.cuda_graphs.value)
        for plan, train in zip(plans, settings, strict=True)
    ]


def test_each_row_turns_one_switch_on():
    assert states(H100) == [
        (False, "fp32", False, False, False, False),
        (True, "fp32", False, False, False, False),
        (True, "bf16", False, False, False, False),
        (True, "bf16", True, False, False, False),
        (True, "bf16", True, True, False, False),
        (True, "bf16", True, True, True, False),
        (True, "bf16", True, True, True, True),
    ]


def test_an_older_card_has_fp16_and_no_tf32():
    assert states(T4)[1:3] == [
        (False, "fp32", False, False, False, False), (False, "fp16", False, False, False, False),
    ]  # fmt: skip
    tf32 = decide(T4, Hardware())
    with pytest.raises(NotMeasured, match="Ampere"):
        step_bench.check_switch(tf32, "tf32")
    step_bench.check_switch(tf32, "precision")
    cpu = decide(Machine(system="Linux", cpu_cores=2), Hardware(precision="mixed"))
    with pytest.raises(NotMeasured, match="needs a GPU"):
        step_bench.check_switch(cpu, "precision")


def test_rows_train_what_was_asked_for():
    for train in trains(micro_batch_size=2, gradient_checkpointing=True):
        assert train.architecture.block_out_channels == (8, 16)
        assert (train.data.image_size, train.schedule.whole_batch, train.schedule.micro_batch_size) == (32, 4, 2)
        assert train.model.gradient_checkpointing
        assert train.hardware.device == "cpu"


def test_a_benchmark_makes_real_steps(tmp_path):
    settings = trains(micro_batch_size=2)[0]
    trial = step_bench.begin_bench(VaeWork(), settings, cpu_runtime(), tmp_path)
    before = [p.detach().clone() for p in trial.recipe.autoencoder.parameters()]
    figures = trial.measure(warmup=2, steps=3)
    assert trial.steps == 5
    assert (
        sum(bool((p != old).any()) for p, old in zip(trial.recipe.autoencoder.parameters(), before, strict=True)) > 60
    )
    assert figures["items_per_second"] == pytest.approx(4 / figures["seconds_per_step"])
    assert figures["micro_batch_size"] == 2
    assert figures["seconds_per_step"] > 0
    assert figures["first_step_seconds"] > 0
    assert figures["cpu_seconds_per_step"] > 0
    assert 0.1 < figures["peak_gb"] < 10
    with FlopCounterMode(display=False) as counter:
        trial.step()
    flops = figures["tflops"] * 1e12 * figures["seconds_per_step"]
    assert flops == pytest.approx(counter.get_total_flops(), rel=0.01)
    assert not {"share_of_product", "product_tflops"} & figures.keys()


def test_inference_is_measured_without_a_training(tmp_path):
    inference = step_bench.begin_bench(VaeWork(), trains()[-1], cpu_runtime(), tmp_path, inference=True)
    figures = inference.measure(warmup=1, steps=2)
    with FlopCounterMode(display=False) as counter:
        inference.step()
    assert not inference.compute().requires_grad
    assert figures["tflops"] * 1e12 * figures["seconds_per_step"] == pytest.approx(counter.get_total_flops(), rel=1e-6)
    assert figures["items_per_second"] == pytest.approx(4 / figures["seconds_per_step"])


def test_the_time_of_inference_is_predicted_by_its_layers(tmp_path):
    """On a card where only arithmetic takes time, it is that of the convolutions and products."""
    inference = step_bench.begin_bench(VaeWork(), trains()[0], cpu_runtime(), tmp_path, inference=True)
    rates = DeviceRates(1e12, 1e12, math.inf, launch_seconds=0.0, least_seconds=0.0)
    with FlopCounterMode(display=False) as counter:
        inference.step()
    seconds = busy_seconds(inference_kernels(inference.build, inference.runtime.plan), rates)
    unused = seconds * 1e12 / counter.get_total_flops()
    assert 1 <= unused < 4  # Tiles that narrow layers leave partly empty, and waves of few tiles.
    assert inference.measure(warmup=1, steps=1)["predicted_seconds_per_step"] > 0


def test_rows_of_inference_have_a_file_of_their_own(tmp_path, monkeypatch):
    names = []
    monkeypatch.setattr(step_bench.runner, "run_rows", lambda *_, name, **__: names.append(name))
    for inference in (False, True):
        options = {**SMALL, "inference": inference, "output_dir": str(tmp_path)}
        report, _ = step_bench.run_bench(VaeWork(), assemble(BenchVae, options))
        assert ("encoded and decoded" in report.title) == inference
    assert names == ["bench_vae", "bench_vae_inference"]


def test_the_time_of_a_row_is_predicted_as_a_plan_predicts_it(tmp_path):
    """Two micro-batches of two pictures on a card where a launch takes nothing: the products' and the copies' times."""
    settings = trains(micro_batch_size=2)[0]
    rates = DeviceRates(3e12, 1e12, 1e10, launch_seconds=0.0, least_seconds=0.0)
    runtime = cpu_runtime()
    predicted = predict_step(VaeWork().target(settings), runtime.plan, micro_batch_size=2)
    first = [one for one in predicted.micro_batch if not one.accumulates]  # It adds to no gradients.
    kernels = (*first, *predicted.micro_batch, *predicted.update)
    parts = [max(one.flops / one.filled / 1e12, one.bytes / 1e10) for one in kernels]
    found = step_bench.begin_bench(VaeWork(), settings, runtime, tmp_path).predicted_seconds(rates)
    assert found == pytest.approx(sum(parts))
    assert 1e-4 < found < 1


@pytest.mark.slow
def test_the_command(tmp_path, monkeypatch):
    """Measures real rows on the CPU: rows that need a GPU are reported so, and memory is that of the child process."""
    words = ["--preset", "fast", "--channels", "8,16", "--image-size", 32, "--batch-size", 2, "--steps", 2]
    monkeypatch.setenv("PATH", "")
    done = gputrain_here(
        "bench", "train-vae", *words, "--device", "cpu", "--output-dir", tmp_path, "--row-minutes", 0.5,

    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (table,) = tmp_path.glob("bench_vae_*.json")
    page = json.loads(table.read_text())
    rows = {row["label"]: row for row in page["rows"]}
    assert list(rows) == ["fp32", "+ TF32", "+ bf16", "+ channels_last", "+ compile", "+ lean", "+ CUDA graphs"]
    for label, reason in (("+ TF32", "Ampere"), ("+ bf16", "needs a GPU"), ("+ compile", "C++ compiler")):
        assert reason in rows[label]["reason"]
        assert f"{label}" in done.stdout
    assert "needs a GPU" in rows["+ CUDA graphs"]["reason"]
    assert done.stdout.count("not measured") == 4
    for label, layout in (("fp32", False), ("+ channels_last", True), ("+ lean", True)):
        figures = rows[label]["figures"]
        assert figures["plan"]["channels_last"] is layout
        assert math.isfinite(figures["items_per_second"])
        assert rows[label]["settings"]["train"]["lean"] is (label == "+ lean")
    assert page["command"].startswith("gputrain bench train-vae --preset fast")
    assert page["device"]
    with Image.open(table.with_suffix(".png")) as picture:
        assert picture.width == 1200


@each_row(
    (["--image-size", 100], "image_size 100 is not a multiple of 8"),
    (["--batch-size", 0], "--batch-size"),
    (["--channels", "32,48"], "48 is not divisible into 32 groups"),
    (["--output-dir", "file/below"], "Not a directory"),
    (["--preset", "huge"], "--preset"),
)
def test_bad_input_gets_a_sentence_and_2(typed, tmp_path, words, message):
    (tmp_path / "file").write_text("")
    code, printed = typed("bench", "train-vae", *words)
    assert code == 2
    assert message in printed
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]
