"""The parts of benchmarks/gpu.sh without a GPU, and the predicted times beside the measured ones."""

import contextlib
import dataclasses
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from gputrain.bench import step_bench
from gputrain.kinds import kinds
from tests.fake_cuda.device import UNAVAILABLE, fake_cuda
from tests.fake_cuda.test_training import few_layers
from tests.machines import H100

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
predictions = importlib.import_module("predictions")
precision = importlib.import_module("precision")
checks = importlib.import_module("gpu.checks")
commands = importlib.import_module("gpu.commands")
data = importlib.import_module("gpu.data")
learn = importlib.import_module("gpu.learn")
measure = importlib.import_module("gpu.measure")
runner = importlib.import_module("gpu.runner")
trainings = importlib.import_module("gpu.trainings")


IN_BASH = pytest.mark.skipif(sys.platform != "linux" or not shutil.which("bash"), reason="gpu.sh needs bash")


@pytest.fixture
def context(tmp_path):
    figures = {}
    return runner.Context(True, tmp_path, tmp_path / "data", tmp_path, figures.update, tmp_path, time.time() + 60)


def environment(**more):
    path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    return {**os.environ, "PYTHONPATH": path, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **more}


def gpu_sh(*words, **options):
    command = ["bash", str(ROOT / "benchmarks" / "gpu.sh"), *map(str, words)]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, **options)


def results(folder, name):
    return {one["name"]: one for one in json.loads((folder / f"{name}.json").read_text())["parts"]}


# ------------------------------------------------------------------------------------------------------- the runner

TRIAL = """
import os, signal, sys, time
from gpu.runner import Part, Subcommand, main
from gputrain.bench.runner import NotMeasured

def noted(context):
    context.note({"seen": 1})
    os.kill(os.getpid(), signal.SIGKILL)

def hangs(context):
    context.note({"begun": True})
    time.sleep(600)

def fails(context):
    raise ValueError("no such thing")

def skips(context):
    raise NotMeasured("needs another card")

def beside(context):
    with context.alone():
        context.note({"pid": os.getpid()})
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)

def parts(smoke):
    return [
        Part("first", 9, lambda context: {"pid": os.getpid()}),
        Part("skips", 9, skips),
        Part("fails", 9, fails),
        Part("lacks", 9, fails, ("no_such_module", "sys")),
        Part("second", 9, lambda context: {"pid": os.getpid()}),
        Part("dies", 9, noted),
        Part("hangs", HANGS, hangs),
        Part("beside", 900, beside, beside=True),
        Part("third", 9, lambda context: {"pid": os.getpid()}),
    ]

if __name__ == "__main__":
    main(Subcommand("trial", None, 900, parts))
"""


def trial(tmp_path, hangs, *words):
    (tmp_path / "trial.py").write_text(TRIAL.replace("HANGS", str(hangs)))
    path = os.pathsep.join([str(tmp_path), str(ROOT), str(ROOT / "benchmarks")])
    command = [sys.executable, "-m", "trial", "--smoke", "--output-dir", str(tmp_path / "out"), *words]
    return subprocess.Popen(command, env=environment(PYTHONPATH=path), stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
@IN_BASH
def test_a_part_that_ends_badly_leaves_the_others_be(tmp_path):
    running = trial(tmp_path, 0.1)  # Ten times as long in a smoke test.
    printed, _ = running.communicate()
    assert running.returncode == 1
    found = results(tmp_path / "out", "trial")
    assert {name: one["state"] for name, one in found.items()} == {
        "first": "ok", "skips": "not run", "fails": "failed", "lacks": "not run", "second": "ok", "dies": "failed",
        "hangs": "cut off", "beside": "failed", "third": "ok",
    }  # fmt: skip
    assert found["lacks"]["reason"] == "not installed: no_such_module"
    assert found["skips"]["reason"] == "needs another card"
    assert found["dies"]["reason"] == "the process: died of SIGKILL"
    assert (found["dies"]["figures"], found["hangs"]["figures"]) == ({"seen": 1}, {"begun": True})
    pids = [found[name]["figures"]["pid"] for name in ("first", "second", "third")]
    assert pids[0] == pids[1] != pids[2]
    assert found["beside"]["figures"]["pid"] not in pids
    assert found["beside"]["began"] < found["third"]["began"]
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["tracebacks.txt", "trial.json", "trial.log"]
    tracebacks = (tmp_path / "out" / "tracebacks.txt").read_text()
    assert "ValueError: no such thing" in tracebacks
    assert "== hangs at " in tracebacks
    assert "in hangs" in tracebacks.partition("== hangs")[2]  # The place at which it was cut off.
    table = printed.rstrip().splitlines()[-10:]
    assert table[0].startswith("trial on ")
    assert "3 ok, 3 failed, 1 cut off, 2 not run" in table[0]
    assert [line.split()[0] for line in table[1:]] == [
        "ok", "not", "FAILED", "not", "ok", "FAILED", "CUT", "FAILED", "ok"
    ]  # fmt: skip
    assert "ValueError: no such thing" in printed.partition("trial on ")[0]


@pytest.mark.slow
@IN_BASH
def test_a_run_that_is_stopped_prints_what_it_has_found(tmp_path):
    running = trial(tmp_path, 900, "--only", "first", "hangs", "third")
    while not (tmp_path / "out" / "trial.json").exists() or results(tmp_path / "out", "trial")["hangs"]["state"] == "":
        assert running.poll() is None
        time.sleep(0.05)
    running.send_signal(signal.SIGTERM)
    printed, _ = running.communicate()
    found = results(tmp_path / "out", "trial")
    assert [one["state"] for one in found.values()] == ["ok", "failed", "not run"]
    assert found["third"]["reason"] == "stopped by a signal"
    with pytest.raises(ProcessLookupError):
        os.kill(found["first"]["figures"]["pid"], 0)
    assert printed.rstrip().splitlines()[-3].startswith("ok")


# ------------------------------------------------------------------------------------------------------ a simulation

# Seconds by part on an H200, as measured where it was (eager trainings), else as expected.
ON_H200 = {
    "rates": 3, "convolutions": 12, "eager, vocoder standard, 16 x 48": 27, "graphs, vocoder standard, 16 x 48": 8,
    "eager, voice high, 64 x 4.7 s": 17, "graphs, voice high, 64 x 4.7 s": 8, "eager, flux 512 px x 4": 13,
    "eager, flux 512 px x 4, plain": 11, "graphs, flux 512 px x 4": 11, "eager, XLS-R 300M, 8 x 8 s": 15,
    "SingingVocoders standard": 30, "Piper high": 20, "Piper high, bf16": 15, "diffusers flux 512 px x 4": 25,
    "eager, vocoder optimised, 32 x 80": 25, "graphs, vocoder optimised, 32 x 80": 10, "SingingVocoders optimised": 25,
    "compiled, flux 512 px x 4": 75, "compiled, vocoder standard, 16 x 48": 195,
    "compiled, vocoder optimised, 32 x 80": 230, "compiled, voice high, 64 x 4.7 s": 320,
    "imports": 7, "aligner": 1, "allocator": 1, "vae, eager": 20, "vocoder, eager": 29, "tts, eager": 24,
    "asr, eager": 11, **{f"{kind}, default switches": 100 for kind in data.KINDS},
    **{f"{kind}, compiled": 1 for kind in data.KINDS}, **{f"out of memory, {kind}": 13 for kind in checks.LARGER},
}  # fmt: skip


def simulate(subcommand, seconds, tmp_path, monkeypatch):
    """Returns the results of all parts by the clock of a simulation, in which a part that is not named takes 20 s."""
    parts = subcommand.parts(False)
    file = tmp_path / "seconds"
    file.write_text(json.dumps({"start": 10, **{part.name: seconds.get(part.name, 20) for part in parts}}))
    monkeypatch.setenv("SIMULATED_SECONDS", str(file))
    monkeypatch.setattr(runner, "clean_up", lambda: None)
    options = SimpleNamespace(
        smoke=True, seconds=subcommand.SECONDS, data=tmp_path, output_dir=tmp_path, caches=None
    )  # fmt: skip
    found = {}
    for group in [[part for part in parts if not part.beside], *([part] for part in parts if part.beside)]:
        report = runner.Report(tmp_path / "group.json", results=[runner.Result(part.name) for part in group])
        for part, result in zip(group, report.results, strict=True):
            runner.run_part(dataclasses.replace(part, ask=lambda context: {}, needs=()), result, report, options)
            found[part.name] = result
    return found


def test_what_matters_is_measured_before_the_time_is_over(tmp_path, monkeypatch):
    found = simulate(measure, ON_H200, tmp_path, monkeypatch)
    assert list(found)[:10] == list(ON_H200)[:10]
    ends = {name: one.began + one.seconds for name, one in found.items() if one.state == "ok"}
    uncompiled = [name for name in found if not name.startswith(("compiled", "memory"))]
    assert max(ends[name] for name in uncompiled) < 300
    assert all(ends[name] < 400 for name in ON_H200 if name in found)
    assert found["compiled, voice high, 64 x 4.7 s"].began == 10  # Beside the others.
    assert sum(name.startswith("memory, ") for name in found) == 12
    assert {one.state for name, one in found.items() if name.startswith("memory")} == {"ok", "cut off", "not run"}


def test_the_default_switches_of_all_kinds_are_tried_before_the_time_is_over(tmp_path, monkeypatch):
    found = simulate(importlib.import_module("gpu.alive"), ON_H200, tmp_path, monkeypatch)
    first = [name for name in ON_H200 if name in found and "memory" not in name]
    assert {found[name].state for name in first} == {"ok"}
    assert found["check-compatibility"].state == "not run"
    assert found["check-compatibility"].reason == "no time was left"


@pytest.mark.parametrize("name", ["alive", "measure"])
def test_a_part_that_takes_its_whole_limit_leaves_the_others_theirs(name, tmp_path, monkeypatch):
    subcommand = importlib.import_module(f"gpu.{name}")
    found = simulate(subcommand, dict.fromkeys(ON_H200, 1000), tmp_path, monkeypatch)
    for part in subcommand.parts(False):
        one = found[part.name]
        if part.name in ON_H200 and not part.name.startswith("out of memory"):
            assert (one.state, one.figures) == ("cut off", {})
            assert one.limit == min(part.seconds, subcommand.SECONDS - 10)
            assert one.began + one.seconds <= subcommand.SECONDS + 0.1


@pytest.mark.slow
@IN_BASH
@pytest.mark.parametrize("name", ["alive", "measure", "learn"])
def test_the_whole_subcommand_on_a_cpu(name, tmp_path):
    done = gpu_sh(name, "--smoke", "--output-dir", tmp_path, "--data", tmp_path / "none", "--seconds", 1200)
    assert done.returncode == 0, done.stdout
    found = results(tmp_path, name)
    states = {one["state"] for one in found.values()}
    assert states <= {"ok", "not run"}
    if name == "alive":
        assert found["vae, eager"]["figures"]["resumed_at"] == 6
    if name == "learn":
        assert all("evaluations" in one["figures"] for one in found.values())
    if name == "measure":
        assert found["graphs, vocoder standard, 16 x 48"]["figures"]["summary"].endswith(", no prediction")


# --------------------------------------------------------------------------------------------------------- the checks


def test_tf32_has_ten_bits_of_mantissa():
    x = torch.tensor([1.0, 1 + 2**-10, 1 + 2**-11, 1 + 2**-12, -3.0000002, 0.0])
    assert precision.to_tf32(x).tolist() == [1, 1 + 2**-10, 1 + 2**-10, 1, -3, 0]
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    assert float(((precision.to_tf32(values) - values) / values).abs().max()) <= 2**-11
    with precision.Tf32Products():
        made = torch.full((1, 1), 1 + 2**-12) @ torch.ones(1, 1)
    assert made.item() == 1


@pytest.mark.slow
def test_an_error_beyond_the_rounding_of_its_precision_fails(context, monkeypatch):
    make_step = checks.make_step

    def on_device(case, weights, name, runtime=None):
        step = make_step(case, weights, name, runtime=runtime)
        if runtime is not None:
            step.gradients = {
                phase: {n: 1.001 * g for n, g in named.items()} for phase, named in step.gradients.items()
            }
        return step

    assert "fp32 recogniser" in checks.numerics("asr", context)
    monkeypatch.setattr(checks, "make_step", on_device)
    with pytest.raises(AssertionError, match=r"fp32 recogniser: 0\.00\d+ instead of"):
        checks.numerics("asr", context)


def waiting(*steps):
    """Returns a step that waits for the device in the steps of these numbers, and the graphs that it captures in
    the fifth step."""
    graphs = SimpleNamespace(graphs={}, eager=set(), is_off=False)
    made = []

    def step():
        made.append(None)
        if len(made) == 5:
            graphs.graphs["a"] = "a graph"
        if len(made) in steps:
            import warnings

            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)

    return step, graphs


def test_waits_in_the_step_that_captures_are_none_and_replays_are_checked():
    cpu = torch.device("cpu")
    assert checks.waits_of(*waiting(1, 2, 5), cpu) == ([], 8)
    (place,), _ = checks.waits_of(*waiting(7), cpu)
    assert place.startswith("tests/test_benchmarks_gpu.py:")
    assert len(checks.waits_of(*waiting(6, 7, 8), cpu)[0]) == 3


@pytest.mark.skipif(bool(UNAVAILABLE), reason=UNAVAILABLE)
@pytest.mark.slow
@pytest.mark.parametrize("graphs", [False, True])
def test_steps_of_the_vae_on_a_card_wait_only_where_a_graph_is_captured(graphs, context):
    gpu = dataclasses.replace(context, smoke=False)
    with fake_cuda(), few_layers():
        found = checks.no_waits("vae", graphs, gpu)
    assert found["waits"] == 0
    assert (found["graphs"] > 0) == graphs
    assert found["steps"] >= 6


@pytest.mark.slow
@pytest.mark.skipif(bool(UNAVAILABLE), reason=UNAVAILABLE)
def test_a_wait_in_a_step_on_a_card_is_found(context, monkeypatch):
    from gputrain.vae.recipe import VaeRecipe

    average = VaeRecipe.average

    def reads(self, step):
        average(self, step)
        next(iter(self.autoencoder.parameters())).sum().item()

    monkeypatch.setattr(VaeRecipe, "average", reads)
    with fake_cuda(), few_layers(), pytest.raises(AssertionError, match="3 waits in 3 steps"):
        checks.no_waits("vae", False, dataclasses.replace(context, smoke=False))


@pytest.mark.slow
def test_memory_that_runs_out_is_survived_and_a_wrong_split_is_not(context, monkeypatch):
    found = checks.out_of_memory("vae", context)
    assert found["micro_batch"] == "2 of 8"
    assert found["difference"] < 1e-9
    monkeypatch.setattr(checks, "little_memory", lambda runtime, limit: contextlib.nullcontext())
    with pytest.raises(AssertionError, match="micro-batches of 8 of 8"):
        checks.out_of_memory("vae", context)


# ------------------------------------------------------------------------------------------------------- measurements


class Planned(Exception):
    """Holds the plan that a benchmark would have used."""


@pytest.mark.parametrize(("kind", "options"), [("tts", {"clip_seconds": 1.0}), ("vocoder", {})])
def test_a_benchmark_has_the_plan_of_its_training(kind, options, monkeypatch):
    """The shapes of a voice change, so that cuDNN does not search; a vocoder is trained in fp32."""

    def begin(work, train, runtime, folder, **named):
        raise Planned(runtime.plan)

    monkeypatch.setattr(step_bench, "begin_bench", begin)
    monkeypatch.setattr(step_bench, "probe", lambda: H100)
    monkeypatch.setattr(step_bench, "apply", lambda plan: SimpleNamespace(plan=plan, device=torch.device("cuda")))
    request = {"train": {"data_path": "."}, "switch": "", "warmup_steps": 1, "steps": 1, "options": options}
    with pytest.raises(Planned) as raised:
        step_bench.measure_bench_row(kinds()[kind], request)
    (plan,) = raised.value.args
    voice = kind == "tts"
    assert plan.cudnn_benchmark.value is not voice
    assert plan.precision.value == ("bf16" if voice else "fp32")


@pytest.mark.slow
@pytest.mark.skipif(bool(UNAVAILABLE), reason=UNAVAILABLE)
def test_a_training_is_measured_on_a_card(context, monkeypatch):
    """Of times and memory, only the calls are tried: the card always tells the same."""
    gpu = dataclasses.replace(context, smoke=False)
    trained = dataclasses.replace(trainings.SMALL["vae"], values={**trainings.SMALL["vae"].values, "batch_size": 2})
    monkeypatch.setattr(measure, "TRAININGS", {"small": trained})
    monkeypatch.setattr(measure, "CELLS", {"small": (16, trained)})
    monkeypatch.setattr(measure, "launches_of", lambda step, device: {"launches": 7, "busy_ms": 2.0})
    predicted = {"predicted_seconds": 0.01, "predicted_gb": 0.5, "predicted_launches": 14, "budget_gb": 16.0}
    monkeypatch.setattr(measure, "prediction", lambda folder, mode, name: dict(predicted))
    for mode in measure.MODES:
        with fake_cuda(compiled=True), few_layers():
            found = measure.step_of("small", mode, gpu)
        assert (found["seconds"], found["seconds_ratio"]) == (0.005, 2.0)
        assert (found["peak_gb"], found["reserved_gb"], found["peak_gb_ratio"]) == (1.0, 1.25, 0.5)
        assert (found["graphs"] > 0, found["compiled"]) == ("graphs" in mode, "compiled" in mode)
        assert "7 launches (predicted 14), 2 ms busy, 0.6 idle" in found["summary"]
    with fake_cuda() as card, few_layers():
        found = measure.memory_cell("small", gpu)
        assert card.memory_fraction[0] == pytest.approx(16 / 80)
    assert (found["peak_gb"], found["reserved_gb"], found["peak_gb_ratio"]) == (1.0, 1.25, 0.5)


@pytest.mark.slow
@pytest.mark.skipif(bool(UNAVAILABLE), reason=UNAVAILABLE)
def test_a_command_with_graphs_on_a_card(context, photographs, monkeypatch):
    alive = importlib.import_module("gpu.alive")
    small = ("--preset", "fast", "--channels", "16,16", "--image-size", 24, "--batch-size", 2, "--num-workers", 0)
    monkeypatch.setitem(alive.TRAININGS, "vae", small)
    context.data.mkdir()
    shutil.copytree(photographs, context.data / "vae")
    gpu = dataclasses.replace(context, smoke=False)
    with fake_cuda(compiled=True), few_layers():
        found = alive.train("vae", alive.GRAPHS, alive.GRAPH_STEPS, gpu)
    assert (found["graphs"], found["precision"]) == (True, "bf16")
    with fake_cuda(compiled=True), few_layers(), pytest.raises(AssertionError, match="nothing was captured"):
        alive.train("vae", alive.GRAPHS, 3, dataclasses.replace(gpu, scratch=context.scratch / "few"))


def test_predictions_are_read_for_the_card_of_this_machine(tmp_path, monkeypatch):
    assert "predictions.json is missing" in measure.prediction(tmp_path, "eager", "small")["no_prediction"]
    (tmp_path / measure.PREDICTIONS).write_text(json.dumps({"h200": {"eager, small": {"predicted_gb": 1}}}))
    assert measure.prediction(tmp_path, "eager", "small") == {"no_prediction": "for this machine, only for h200"}
    monkeypatch.setattr(measure, "probe", lambda: SimpleNamespace(gpu="NVIDIA H200"))
    assert measure.prediction(tmp_path, "eager", "small") == {"predicted_gb": 1}


def test_a_command_that_ends_with_a_code_has_failed(tmp_path):
    """Without its standalone mode, click returns the code instead of raising it."""
    (tmp_path / "broken.png").write_bytes(b"no picture")
    commands.gputrain("validate", "--input-dir", tmp_path, "--num-workers", 0)
    with pytest.raises(SystemExit, match="gputrain validate ended with exit code 3"):
        commands.gputrain("validate", "--input-dir", tmp_path, "--num-workers", 0, "--strict")


def test_data_are_prepared_from_a_folder_of_photographs(photographs, tmp_path, monkeypatch):
    (tmp_path / "source").mkdir()
    shutil.copytree(photographs, tmp_path / "source" / "photos")
    monkeypatch.setattr(data, "KINDS", ("vae",))
    assert data.prepare(tmp_path / "made", tmp_path / "source") == {}
    pictures = list((tmp_path / "made" / "vae").rglob("*.png"))
    assert len(pictures) == len(list(photographs.iterdir()))
    assert max(Image.open(path).size[0] for path in pictures) <= 400
    assert data.prepare(tmp_path / "made", tmp_path / "source") == {}


def test_recordings_are_copied_with_their_transcripts(tmp_path, monkeypatch):
    speech = tmp_path / "speech"
    (speech / "wavs").mkdir(parents=True)
    for name in "abcd":
        (speech / "wavs" / f"{name}.wav").write_bytes(bytes(100))
    (speech / "metadata.csv").write_text("a|One.\nb|Two.\nc|Three.\n")
    monkeypatch.setattr(data, "MOST_BYTES", {"tts": 200, "vocoder": 400})
    assert data.copy_speech("tts", speech, tmp_path / "to") == ["--kind", "tts", "--language", "en"]
    assert sorted(path.name for path in (tmp_path / "to" / "wavs").iterdir()) == ["a.wav", "c.wav"]
    assert (tmp_path / "to" / "metadata.csv").read_text() == "a|One.\nc|Three.\n"
    assert data.copy_speech("vocoder", speech, tmp_path / "sound")[:2] == ["--kind", "vocoder"]
    assert not (tmp_path / "sound" / "metadata.csv").exists()
