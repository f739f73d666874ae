"""Training on a card that is not there: each recipe's real steps, the train commands from their command line on, and
every statement that only CUDA reaches."""

import contextlib
import functools
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml

from gputrain.bench import step_bench
from gputrain.engine.recipe import phases_of
from gputrain.engine.saving import HostSnapshot
from gputrain.errors import UserError
from gputrain.hw.monitor import Monitor, Reading
from gputrain.hw.plan import Hardware, decide
from gputrain.hw.probe import machine_facts, probe
from gputrain.hw.ranks import Ranks
from gputrain.hw.runtime import apply, random_state, set_random_state
from gputrain.planner.memory import predict
from gputrain.planner.memory.fake_runtime import on_fake_tensors
from gputrain.planner.memory.predict import MemoryEstimate
from gputrain.planner.memory.torch_model import measure_training_memory
from gputrain.planner.model_planner import memory_budget
from gputrain.planner.time.roofline import KernelCost
from gputrain.tts import align
from gputrain.vae import architecture
from gputrain.vae import data as vae_data
from gputrain.vocoder import recipe as vocoder_recipe
from tests.fake_cuda import commands, lines
from tests.fake_cuda.device import UNAVAILABLE, fake_cuda
from tests.fake_cuda.steps import Build, Watched, recogniser, take_steps, vae, vocoder
from tests.fake_cuda.tensors import TO_DEVICE, TO_HOST
from tests.tables import slow
from tests.tts.test_train import TINY as TINY_VOICE
from tests.tts.test_train import small_presets, spoken
from tests.vocoder.conftest import TINY as TINY_VOCODER
from tests.vocoder.conftest import flags, hummed

pytestmark = pytest.mark.skipif(bool(UNAVAILABLE), reason=UNAVAILABLE)
REACHED = lines.Reached()
LISTED = Path(__file__).parent / "cuda_only_lines.yaml"
EAGER = Hardware(use_torch_compile=False)
ALL_DISCRIMINATORS = ["msd", "mpd", "mrd", "fast_mpd", "fast_mrd"]
AUGMENTED = {"pc_aug": True, "volume_aug": True, "noise_sigma": 0.1}
LPIPS = {"perceptual_loss": "lpips", "lpips_weights": ["unused"]}
ADVERSARY = {"adversarial_weight": 0.5}

# A recipe, its hardware, items at once, and copies to the device in a step. A step copies its batch, tensor by tensor,
# and nothing else: one of pictures; waves and pitches; the seven tensors of a bucket of clips, of which a recogniser
# needs waves, lengths and labels.
Case = tuple[Build, Hardware, int, int]
QUICK: dict[str, Case] = {
    "vae": (vae(**ADVERSARY, lecam_weight=0.1), EAGER, 4, 1),
    "vae, checkpointing, lpips, fp16": (
        vae(gradient_checkpointing=True, **LPIPS), Hardware(use_torch_compile=False, precision="fp16"), 4, 1
    ),
    "recogniser": (recogniser(ema_decay=0.9, layer_drop=0.1), EAGER, 2, 3),
    "vocoder": (vocoder(mini_nsf=True, **AUGMENTED, generator_optimizer="muon", batch_size=2), EAGER, 2, 2),
}  # fmt: skip


@contextlib.contextmanager
def few_layers() -> Iterator[None]:
    """A test takes as long as its step has operators, so the presets have as few layers as they can."""
    fast = replace(architecture.PRESETS["fast"], layers_per_block=1)
    with small_presets(), mock.patch.dict(architecture.PRESETS, fast=fast):
        yield


@functools.cache
def steps_of(name: str) -> Watched:
    return steps(QUICK[name])


def steps(case: Case) -> Watched:
    build, hardware, items, _ = case
    with fake_cuda(compiled=bool(hardware.use_torch_compile)) as card, few_layers():
        return take_steps(card, build, hardware, items)


def check_steps(seen: Watched, case: Case) -> None:
    assert not seen.to_host
    assert len(seen.to_device) == case[3]
    assert not seen.update.made, "all of the batch is on the device when a step begins"
    runtime = seen.state.runtime
    assert {value.device for value in seen.scalars.values()} == {torch.device("cuda", 0)}
    assert runtime.memory_format == torch.channels_last
    assert seen.switches == {name: getattr(runtime.plan, name).value for name in seen.switches}
    for phase in phases_of(seen.recipe):
        state = [value for values in phase.optimizer.state.values() for value in values.values()]
        assert state
        assert all(value.device.type == "cuda" for value in state if isinstance(value, torch.Tensor))


@pytest.fixture(scope="module", autouse=True)
def reached():
    """Notes the statements that are reached by the tests of this file."""
    REACHED.begin()
    try:
        yield REACHED
    finally:
        REACHED.end()


@pytest.mark.parametrize("name", [slow(name) if "," in name or name == "vocoder" else name for name in QUICK])
def test_a_step_copies_its_batch_and_nothing_else(name):
    check_steps(steps_of(name), QUICK[name])


# ------------------------------------------------------------------------------------------------------ commands


def predicted(target: Any, plan: Any, sizes: Sequence[int], checkpointing: bool) -> list[MemoryEstimate]:
    """In place of predictions on shapes, which need no GPU and have tests of their own."""
    return list(map(of_size, sizes))


def of_size(micro_batch_size: int) -> MemoryEstimate:
    parts = {"parameters": 0.2, "gradients": 0.2, "optimizer": 0.4, "activations": 0.2 * micro_batch_size}
    total, kernel = sum(parts.values()), KernelCost("all", 100, 1e6, 1e9 * micro_batch_size, 0.0, 1.0, True)
    return MemoryEstimate(total, total, {**parts, "workspace": 0.0}, 10**9 * micro_batch_size, (kernel,))


def words_of(name: str, folder: Path, photographs: Path, planned: bool) -> list[str]:
    gpu = {"device": "auto", "num_workers": 0, "log_every_steps": 1, "plan": planned}
    if name == "train-vae":
        small = {
            "data_path": str(photographs), "preset": "fast", "channels": [16, 16], "image_size": 24, "batch_size": 1,
            "evaluate_every_epochs": 0,
        }  # fmt: skip
        return ["train-vae", *flags({**small, **gpu})]
    if name == "train-vocoder":
        data = {"data_path": str(hummed(folder / "store")), "batch_size": 1, "evaluate_every_steps": 0}
        return ["train-vocoder", *flags({**TINY_VOCODER, **gpu, **data})]
    data = {
        "data_path": str(spoken(folder / "store")),
        "batch_size": 1,
        "evaluate_every_steps": 0,
        "num_audio_samples": 0,
    }
    return ["train-tts", *flags({**TINY_VOICE, **gpu, **data})]


@functools.cache
def command(name: str, folder: Path, photographs: Path, planned: bool) -> commands.Ran:
    """One step; where it is planned, predicted by `predicted`."""
    words = [*words_of(name, folder, photographs, planned), "--max-steps", "1", "--use-torch-compile"]
    with few_layers(), counted_elsewhere():
        return commands.train(folder, *words, compiled=True)


@contextlib.contextmanager
def counted_elsewhere() -> Iterator[None]:
    """Leaves out what runs on shapes without the card: predictions of memory and counts of operations."""
    with (
        mock.patch.object(predict, "predict_steps", predicted),
        mock.patch.object(vae_data, "step_flops", return_value=10**9),
        mock.patch.object(vocoder_recipe, "step_flops", return_value=10**9),
    ):
        yield


def check_command(ran: commands.Ran) -> None:
    assert ran.code == 0, ran.messages.getvalue()
    assert ran.card.memory_fraction == {0: pytest.approx(0.93)}
    assert ran.card.allocator_settings == "expandable_segments:True"
    assert ran.plan["settings"]["expandable_segments"]["value"]
    assert ran.plan["settings"]["tf32"]["value"]
    assert ran.switches == {name: ran.plan["settings"][name]["value"] for name in ran.switches}
    assert (ran.folder / "checkpoint_last.pt").exists()
    assert not any(copies.to_host for copies in ran.steps)
    assert all(copy.pinned for copy in ran.card.copies if copy.direction == TO_DEVICE and "prepare" in copy.where)
    (row, *_) = [row for row in ran.metrics if "memory/device_gb" in row]
    assert row["memory/allocated_gb"] == 1.0
    assert row["gpu/power_w"] == 350


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("commands")


@pytest.mark.parametrize("name", ["train-vocoder", slow("train-tts")])
def test_a_command_makes_a_step_and_saves(name, folder, photographs):
    check_command(command(name, folder / name, photographs, False))


# Predicted is 1 GB for a picture, and so much are the tensors of this card beside what a pass takes for a moment. The
# values are options, what the dry runs and the steps take, the number of the measured step, and its peak.
CHECKED = {
    "train-vae": ([], (30.0, 0.024, 20.0), 2, 1.024),
    "train-vae, more than planned": ([], (0.0, 0.4, 20.0), 2, 1.4),
    "train-vae, a discriminator later": (
        ["--adversarial-weight", 0.5, "--discriminator-start", 2, "--discriminator-warmup-steps", 0],
        (30.0, 0.024, 20.0, 20.0, 20.0), 3, 1.024,
    ),
}  # fmt: skip


@functools.cache
def checked(name: str, folder: Path, photographs: Path) -> commands.Ran:
    """Three steps, planned with a prediction of 1 GB."""
    options, passes_gb, *_ = CHECKED[name]
    words = [*words_of("train-vae", folder, photographs, True), *options, "--max-steps", "3"]
    with few_layers(), counted_elsewhere():
        return commands.train(folder, *words, passes_gb=passes_gb, compiled=True)


@pytest.mark.parametrize("name", [pytest.param(one, marks=pytest.mark.slow if "," in one else ()) for one in CHECKED])
def test_a_step_is_measured_beside_the_prediction(name, folder, photographs):
    ran, (_, _, step, peak_gb) = checked(name, folder / name, photographs), CHECKED[name]
    check_command(ran)
    assert ran.plan["prediction"]["predicted_peak_gb"] == pytest.approx(1.0)
    measured = {name: value for name, value in ran.plan["measured"].items() if name != "seconds_per_step"}
    assert measured == {
        "peak_gb": pytest.approx(peak_gb), "peak_reserved_gb": pytest.approx(peak_gb + 0.25), "step": step,
        "ratio": pytest.approx(peak_gb),
    }  # fmt: skip
    printed = ran.messages.getvalue()
    line = f"measured {peak_gb:.2f} GB ({peak_gb + 0.25:.2f} GB reserved), measured / predicted {peak_gb:.3f}"
    assert printed.count(f"memory of step {step}: predicted peak 1.00 GB, {line}\n") == 1
    assert printed.count("measured / predicted") == 1
    is_over = peak_gb > 1.05
    assert [(event["step"], event["check"]) for event in ran.plan["events"]] == [(step, "memory")] * is_over
    assert printed.count("40% more memory than predicted, beyond the plan's margin of 5%") == is_over


# ----------------------------------------------------------------------------------- what else only CUDA reaches


def align_on_the_card() -> None:
    """The search in Triton up to the launch of its kernels, which have tests of their own."""
    launched: list[tuple[Any, ...]] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *arguments, **named: launched.append(arguments)

    with (
        fake_cuda(),
        triton_without_a_driver() as module,
        mock.patch.multiple(module, SWEEP=Kernel(), FOLLOW_BACK=Kernel()),
    ):
        REACHED.include_new_modules()
        scores_BTS = torch.zeros(2, 40, 8, device="cuda")
        counts = (torch.tensor([8, 5]).to("cuda"), torch.tensor([40, 31]).to("cuda"))
        durations_BS = align._search._init_fn(scores_BTS, *counts)
    assert durations_BS.device.type == "cuda"
    assert len(launched) == 4, "two kernels for the known path, two for the scores"
    for arguments in launched:
        tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
        assert all(tensor.is_cuda and tensor.is_contiguous() for tensor in tensors)


@contextlib.contextmanager
def triton_without_a_driver() -> Iterator[Any]:
    """The module of the kernels; where Triton is not installed, with what it takes of Triton stood in for."""
    name = "gputrain.tts.align_triton"
    if importlib.util.find_spec("triton"):
        yield importlib.import_module(name)
        return
    torch.cuda.init()  # It registers kernels of Triton if it finds Triton, so it comes before the stand-in.
    stand_in = mock.MagicMock(cdiv=lambda a, b: -(-a // b), next_power_of_2=lambda n: 1 << (n - 1).bit_length())
    errors = mock.MagicMock(TritonError=type("TritonError", (Exception,), {}))
    modules = {"triton": stand_in, "triton.language": stand_in.language, "triton.errors": errors}
    with mock.patch.dict(sys.modules, modules):
        yield importlib.import_module(name)
        del sys.modules[name]


def measure_a_model_of_the_user() -> None:
    """`create_optimal_config` on a model that needs values."""
    with fake_cuda() as card:
        batch = torch.randn(4, 8)
        step = measure_training_memory(
            torch.nn.Linear(8, 8), lambda model, x: model(x).sum(), batch, torch.device("cuda", 0),
            precision="bf16", optimizer="adamw",
        )  # fmt: skip
    assert step.flops == 3 * 2 * 4 * 8 * 8 - 2 * 4 * 8 * 8, "no gradient of the input is asked for"
    assert card.calls["_cuda_resetPeakMemoryStats"] == 1


def time_some_steps() -> None:
    with fake_cuda():
        figures = step_bench.time_steps(lambda: None, torch.device("cuda", 0), warmup=1, steps=3)
        facts = machine_facts("cuda")
    assert figures["seconds_per_step"] == pytest.approx(0.005)
    assert facts["device"] == "NVIDIA H100 80GB HBM3"


def ask_the_card() -> None:
    """Where NVML tells nothing, torch is asked for the memory in use; random numbers are kept; a prediction begins."""
    device = torch.device("cuda", 0)
    with fake_cuda(memory_gb=10) as card:
        torch.cuda.init()
        assert Monitor(device, look=Reading).pressure() == ""
        before = random_state(device)
        set_random_state(before, device)
        assert torch.equal(random_state(device)["cuda"], before["cuda"])
        with on_fake_tensors():
            assert torch.ones(3).sum().device.type == "cpu"
        assert not card.copies


def start_ranks() -> None:
    """The second rank of a machine with one card is refused before it touches the card of the first, and takes no other
    than its own; the exchange of gradients takes memory from the budget."""
    with fake_cuda() as card:
        with pytest.raises(UserError, match="rank 1 of this machine has no GPU: torch sees 1"):
            probe(1)
        machine = probe()
        plan = decide(machine, Hardware())
        with pytest.raises(RuntimeError, match="Invalid device argument 1"):
            apply(plan, Ranks(1, 2, 1, 2))
        alone, shared = (
            memory_budget(replace(machine, gpus=count), plan, Hardware(), None).budget_gb for count in (1, 2)
        )
        assert alone - shared == pytest.approx(1.0)
    assert not card.copies


def copy_a_checkpoint() -> None:
    """Tensors of the card are copied into pinned memory, in one transfer each."""
    with fake_cuda() as card:
        module = torch.nn.Conv2d(3, 8, 3).to("cuda")
        copied = HostSnapshot().copy({"module": module.state_dict(), "step": 7}, torch.device("cuda"))
        assert copied is not None
        assert {name: (found.device.type, found.shape) for name, found in copied["module"].items()} == {
            "weight": ("cpu", (8, 3, 3, 3)), "bias": ("cpu", (8,))
        }  # fmt: skip
        assert copied["step"] == 7
        assert [copy.pinned for copy in card.copies if copy.direction == TO_HOST] == [True, True]
        assert card.calls["_cuda_synchronize"] == 1


FURTHER = [
    align_on_the_card, measure_a_model_of_the_user, time_some_steps, ask_the_card, start_ranks, copy_a_checkpoint,
]  # fmt: skip


@pytest.mark.parametrize("run", FURTHER, ids=lambda run: run.__name__)
def test_what_else_only_cuda_reaches(run):
    run()


@pytest.mark.slow
def test_every_statement_that_only_cuda_reaches_is_executed_or_listed(reached, folder, photographs):
    """What is listed has a reason, is in the package, and is not executed by this file."""
    for name in QUICK:
        steps_of(name)
    for name in ("train-vocoder", "train-tts"):
        command(name, folder / name, photographs, False)
    for name in CHECKED:
        checked(name, folder / name, photographs)
    for run in FURTHER:
        run()
    found = set(lines.of_package())
    listed = set(_listed(found))
    assert not _shown(found - reached.seen - listed), "executed by no test here: execute it, or list it with a reason"
    assert not _shown(listed - found), "no longer in the package: take it off the list"
    assert not _shown(listed & reached.seen), "executed by now: take it off the list"


def _listed(found: set[lines.Statement]) -> Iterator[lines.Statement]:
    for group in yaml.safe_load(LISTED.read_text(encoding="utf-8")):
        assert group["reason"]
        for function, texts in group["statements"].items():
            place = (group["file"], function)
            if texts == "all":
                texts = [text for *where, text in found if tuple(where) == place] or ["(all)"]
            yield from (lines.Statement(*place, text) for text in texts)


def _shown(statements: set[lines.Statement]) -> str:
    return "\n".join(f"{file}, {function}: {text}" for file, function, text in sorted(statements))
