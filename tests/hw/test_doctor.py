"""The verdict on nine machines, line by line, and the trials on this one.

tests/data/machines holds what `gputrain check-compatibility --json` gives under "machine", written by hand from the
documents of vendors and torch, as no such machines were there.
"""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from gputrain.cli import tables
from gputrain.cli.app import app
from gputrain.config import assemble, flatten
from gputrain.errors import UserError
from gputrain.hw import doctor
from gputrain.hw.doctor import Check, advise, check_machine, check_rules, numbers, smaller_command, train_command
from gputrain.hw.driver import Driver
from gputrain.hw.plan import Hardware, decide
from gputrain.hw.probe import Machine
from gputrain.kinds import default_kind, kinds
from gputrain.serialization import from_json
from gputrain.vae.config import TrainVae
from tests.tables import each_row
from tests.test_docs import parsed

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "tests" / "data" / "machines"

# Every line that is not ok, with its status, a part of what was found and a part of the remedy.
VERDICTS = {
    "rtx5090_cu126": {
        "torch": ("failed", "no code for compute capability 12.0", "./setup.sh --torch auto;"),
    },
    "t4": {
        "compiler": ("note", "older than those that Triton is sure to support", "training runs without torch.compile"),
        "cpu": ("note", "2 cores, few", "gputrain prepare-data"),
    },
    "gtx1080_cu130": {
        "torch": ("failed", "has no code for compute capability 6.1", "./setup.sh --torch cu126, or in your own"),
    },
    "no_driver": {
        "driver": ("note", "none", "for an NVIDIA card, install driver 580 or later"),
        "gpu": ("note", "none: the CPU trains, slowly", "an NVIDIA card"),
    },
    "windows_without_triton": {
        "compiler": ("note", "install triton-windows", "training runs without torch.compile"),
    },
    "h100": {},
    "mac": {
        "gpu": ("note", "none: the CPU trains, slowly", "an NVIDIA card"),
    },
    "driver_too_old": {
        "driver": (
            "failed",
            "570.133.07 is too old for this torch: CUDA 13.0 needs 580 or later",
            "install NVIDIA driver 580 or later and run ./setup.sh --torch auto;",
        ),
    },
    "cpu_build": {
        "torch": ("failed", "2.13.0+cpu cannot use NVIDIA GeForce RTX 5090", "./setup.sh --torch auto;"),
    },
}
# The precision that training on them would use.
ADVISED = {
    "rtx5090_cu126": "--device cpu --preset fast",
    "t4": "--device cuda --precision fp16 --no-use-torch-compile --channels-last",
    "gtx1080_cu130": "--device cpu --preset fast",
    "no_driver": "--device cpu --preset fast",
    "windows_without_triton": "--device cuda --precision bf16 --no-use-torch-compile --channels-last",
    "h100": "--device cuda --precision bf16 --channels-last",
    "mac": "--device cpu --preset fast",
    "driver_too_old": "--device cpu --preset fast",
    "cpu_build": "--device cpu --preset fast",
}


def recorded(name: str, **others) -> Machine:
    return replace(from_json(Machine, json.loads((RECORDED / f"{name}.json").read_text(encoding="utf-8"))), **others)


def line(machine: Machine, name: str) -> Check:
    (found,) = [check for check in check_rules(machine) if check.name == name]
    return found


@each_row(*VERDICTS)
def test_verdicts_by_line(name):
    checks = check_rules(recorded(name))
    assert {check.name: check.status for check in checks if check.status != "ok"} == {
        line: status for line, (status, _, _) in VERDICTS[name].items()
    }
    for each in checks:
        _, found, remedy = VERDICTS[name].get(each.name, ("ok", "", ""))
        assert found in each.found
        assert remedy in each.remedy
        assert bool(each.remedy) is (each.status != "ok")
        if each.status == "failed":
            assert each.remedy.endswith("until then train with --device cpu")
    assert {"python", "torch", "cpu", "ram"} <= {each.name for each in checks}


@each_row(*VERDICTS)
def test_advice_is_a_command_that_gives_the_plan(name):
    machine = recorded(name)
    plan = advise(machine, check_rules(machine))
    command = train_command(plan, default_kind(), ["--data-path", "my pictures"])
    assert ADVISED[name] in command
    words = shlex.split(command)
    assert words[:4] == ["gputrain", "train-vae", "--data-path", "my pictures"]
    values = {}
    for flag, value in zip(words[2:], [*words[3:], "--"], strict=True):
        if flag.startswith("--"):
            switch = value.startswith("--")
            key = flag.removeprefix("--no-" if switch else "--").removeprefix("--").replace("-", "_")
            values[key] = not flag.startswith("--no-") if switch else value
    again = decide(machine, assemble(TrainVae, values).hardware)
    for key, setting in plan.settings.items():
        assert getattr(again, key).value == setting.value, key
    on_cpu = plan.device.value == "cpu"
    assert (values.get("preset"), values.get("image_size")) == (("fast", "128") if on_cpu else (None, None))


@each_row(("3.9.18", "failed"), ("3.10.0", "ok"), ("3.14.2", "ok"), ("3.15.0a1", "failed"), ("", "failed"))
def test_python(version, status):
    assert line(recorded("h100", python=version), "python").status == status


def test_a_torch_that_cannot_be_imported():
    machine = recorded("h100", torch="", torch_error="libcudart.so.13: cannot open shared object file")
    assert line(machine, "torch").status == "failed"
    assert "libcudart.so.13" in line(machine, "torch").found
    assert line(machine, "torch").remedy == "./setup.sh --torch auto"


@each_row(
    ("Linux", "525.60.13", "12.6", "ok"),
    ("Linux", "520.61.05", "12.6", "failed"),
    ("Windows", "528.33", "12.6", "ok"),
    ("Windows", "527.41", "12.6", "failed"),
    ("Linux", "580.65.06", "13.2", "ok"),
    ("Linux", "575.57.08", "13.0", "failed"),
    ("Linux", "470.256.02", "", "ok"),  # A build without CUDA needs no driver.
)
def test_drivers_for_each_cuda(system, driver, cuda, status):
    assert (
        line(Machine(system=system, cpu_cores=4, cuda=cuda, driver=Driver(driver, "12.0")), "driver").status == status
    )


def test_a_driver_older_than_every_build():
    found = line(recorded("driver_too_old", driver=Driver("470.256.02", "11.4")), "driver")
    assert (
        found.remedy
        == "install NVIDIA driver 580 or later and run ./setup.sh --torch auto; until then train with --device cpu"
    )


@each_row(
    ("RM has detected an NVML/RM version mismatch.", "failed", "restart the machine; until then"),
    ("Driver Not Loaded", "failed", "or install NVIDIA driver 580 or later again"),
    ("no devices were found", "note", "docker run --gpus all"),
)
def test_what_nvml_complains_of(error, status, remedy):
    found = line(recorded("driver_too_old", driver=Driver(error=error)), "driver")
    assert found.status == status
    assert error in found.found
    assert remedy in found.remedy


def test_machines_without_a_card():
    plain = recorded("no_driver", gpu_error="")
    assert [check.status for check in check_rules(plain) if check.name in ("driver", "gpu")] == ["note", "note"]
    plain = replace(plain, torch="2.13.0+cpu", cuda="")
    assert {check.name: check.status for check in check_rules(plain) if check.status != "ok"} == {"gpu": "note"}


@each_row(("", "note"), ("-1", "note"), ("3", "note"), ("0", "failed"), (None, "failed"))
def test_a_card_that_torch_does_not_see(visible, status):
    """A GPU that the user has hidden counts as none; otherwise something is broken."""
    seen = Driver("580.95.05", "13.0", recorded("driver_too_old").driver.cards)
    machine = recorded("driver_too_old", driver=seen, gpu_error="CUDA unknown error", visible_devices=visible)
    found = line(machine, "gpu")
    assert found.status == status
    assert ("CUDA_VISIBLE_DEVICES" in found.found) is (status == "note")
    assert ("CUDA unknown error" in found.found) is (status == "failed")
    assert line(recorded("cpu_build", visible_devices=visible), "torch").status == {"note": "ok"}.get(status, status)


@each_row(
    ({"gpu_free_gb": 40.0}, "gpu memory", "40.0 of 84.9 GB free"),
    ({"ram_free_gb": 2.5}, "ram", "2.5 of 236.0 GB free"),
    ({"triton": False}, "compiler", "needs Triton"),
    ({"compiler": ""}, "compiler", "none is on PATH: install gcc"),
    ({"compute_capability": (7, 5)}, "compiler", "older than those"),
)
def test_notes(facts, name, found):
    machine = recorded("h100", **facts)
    (check,) = [check for check in check_rules(machine) if check.status == "note"]
    assert check.name == name
    assert found in check.found
    assert check.remedy


@pytest.mark.parametrize(("free_gb", "status"), [(0.067, "note"), (8.0, "ok")])
def test_shared_memory(free_gb, status):
    found = line(recorded("h100", shared_memory_gb=free_gb), "shared memory")
    assert (found.status, f"{free_gb:.3g} GB free in /dev/shm" in found.found) == (status, True)
    assert ("docker run --shm-size" in found.remedy) is (status == "note")
    assert not [
        check for check in check_rules(recorded("h100")) if check.name == "shared memory"
    ]  # The size is unknown.


def test_windows_has_its_own_script():
    machine = recorded("cpu_build", system="Windows")
    assert line(machine, "torch").remedy.startswith("setup_windows.bat --torch auto;")
    assert line(recorded("gtx1080_cu130", system="Windows"), "torch").remedy.startswith(
        "setup_windows.bat --torch cu126, or"
    )


def test_numbers_of_versions():
    assert numbers("2.13.0+cu130") == (2, 13, 0)
    assert numbers("3.15.0a1") == (3, 15, 0)
    assert numbers("") == ()


def test_a_product_on_this_machine():
    found = doctor.try_product(Machine(system="Linux", cpu_cores=1), "cpu", "fp32")
    assert found.status == "ok"
    assert re.fullmatch(r"(\d+ GFLOPS|\d+\.\d TFLOPS) in fp32, error \de-0[678]", found.found)


def test_the_share_of_the_published_rate():
    rtx4090 = recorded("windows_without_triton")
    assert doctor._published(rtx4090, "bf16", 132.16e12) == ", 80% of the 165.2 published"
    assert doctor._published(replace(rtx4090, gpu="Some GPU"), "bf16", 132.16e12) == ""
    assert doctor._published(replace(rtx4090, gpu=""), "fp32", 1e12) == ""


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_a_convolution_on_this_machine(precision, monkeypatch):
    machine = Machine(system="Linux", cpu_cores=1)
    assert doctor.try_convolution(machine, "cpu", precision).status == "ok"
    # The bound is no wider than a format needs: the next coarser format would fail.
    monkeypatch.setitem(doctor.LARGEST_ERROR, precision, doctor.LARGEST_ERROR[precision] / 100)
    if precision != "fp32":
        found = doctor.try_convolution(machine, "cpu", precision)
        assert found.status == "failed"
        assert "wrong: error" in found.found


def test_a_device_that_refuses(monkeypatch):
    machine = recorded("h100")  # This machine has no such card.
    monkeypatch.setattr(torch, "randn", refusing)
    for found in doctor.run_trials(machine, [], lambda what: None):
        assert (found.status, found.found) == ("failed", "no kernel image is available")
        assert found.remedy.endswith("until then train with --device cpu")


def refusing(*words, **named):
    raise RuntimeError("no kernel image is available\nmore")


def test_a_missing_folder(tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        check_machine(tmp_path / "missing")


@pytest.mark.slow
def test_the_command(tmp_path):
    result = CliRunner().invoke(app, ["check-compatibility", "--json", "--data-path", str(tmp_path)])
    report = json.loads(result.stdout)
    assert result.exit_code == any(line["status"] == "failed" for line in report["checks"])
    names = [line["name"] for line in report["checks"]]
    assert {"python", "torch", "matrix product", "convolution"} <= set(names)
    assert str(tmp_path) in report["advised"]["command"]
    assert from_json(Machine, report["machine"]).torch == torch.__version__
    assert report["advised"]["settings"]["device"]["value"] == ("cuda" if torch.cuda.is_available() else "cpu")


def test_the_table(capsys):
    checks = [
        Check("python", "ok", "3.12.11"),
        Check("torch", "failed", "[no code]" + " for this card," * 20, "./setup.sh --torch cu130"),
    ]
    tables.print_checks(checks)
    assert capsys.readouterr().out.splitlines() == [  # Piped output is not wrapped.
        "ok      python  3.12.11",
        "failed  torch   " + checks[1].found,
        "                remedy: ./setup.sh --torch cu130",
    ]


def test_hardware_without_wishes_is_what_is_advised():
    machine = recorded("h100")
    assert advise(machine, check_rules(machine)) == decide(machine, Hardware())


def test_several_gpus_train_together():
    machine = recorded("h100", gpu_count=3)
    words = shlex.split(train_command(advise(machine, []), default_kind(), [], ranks=machine.gpu_count))
    assert words[:6] == ["torchrun", "--nproc-per-node", "3", "-m", "gputrain", "train-vae"]


@each_row("vae", "vocoder", "tts", "asr")
def test_a_training_that_a_cpu_finishes_is_the_same_with_smaller_settings(kind):
    """The command has what the user gave, and what is smaller; given as it is, it is not answered with itself."""
    train, on_cpu, on_gpu = kinds()[kind].train, *(advise(recorded(name), []) for name in ("no_driver", "h100"))
    given = {"data_path": "my data", "output_dir": "it's", "batch_size": 77, "init_from": "else", "memory_budget": 3.0}
    command = smaller_command(on_cpu, assemble(train, given))
    assert command == smaller_command(on_cpu, assemble(train, {**given, "num_epochs": 7}))  # Which says --yes, too.
    name, read = parsed(command)
    assert name == f"train-{kind}"
    flat = flatten(read)
    assert (flat["data_path"], flat["output_dir"], flat["memory_budget"]) == (["my data"], "it's", 3.0)
    assert flat["batch_size"] < 77
    assert "init_from" not in flat or not flat["init_from"]
    assert flat["finish_by"]
    assert flat["yes"]
    assert smaller_command(on_cpu, read) == ""
    assert smaller_command(on_gpu, assemble(train, given)) == ""
