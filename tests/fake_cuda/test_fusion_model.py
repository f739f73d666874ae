"""The planner's model of compiled regions beside inductor's real kernels for an H100, over the same steps."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch

from gputrain.hw.gpus import find_gpu
from gputrain.hw.plan import Hardware, decide
from gputrain.hw.probe import Machine
from gputrain.planner.kind_work import PlanTarget
from gputrain.planner.memory.predict import predict_step
from tests.fake_cuda.test_compiled_kernels import compiled

pytestmark = [
    pytest.mark.skipif(bool(torch.version.cuda), reason="a build of torch with CUDA asks its driver"),
    pytest.mark.slow,
    pytest.mark.timeout(1800),
]


def modelled(case: str, patch: pytest.MonkeyPatch) -> dict[str, list[float]]:
    """Returns launches and MB of the step by compiled function, without products, convolutions and transforms."""
    from tests.fake_cuda import compiled_steps  # This imports inductor, in every run that collects the tests.

    found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def run_step(target: PlanTarget, items: int, card: str, requested: Hardware) -> None:
        plan = decide(find_gpu(card).installed_in(Machine(system="Linux", cpu_cores=8)), requested)
        for kernel in predict_step(target, plan, micro_batch_size=items).micro_batch:
            found[kernel.name][0] += kernel.launches
            found[kernel.name][1] += kernel.bytes / 1e6

    patch.setattr(compiled_steps.inductor_target, "run_step", run_step)
    compiled_steps.CASES[case]("h100")
    return found


@pytest.mark.parametrize("case", ["vae", "vae-plain", "vocoder", "voice"])
def test_bytes_and_launches_are_near_those_of_the_compiler(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over all compiled functions of a step, bytes are within 20 %, of audio within 55 %, and launches within a factor
    of 2.8: the model knows neither the compiler's limits on the size of a kernel nor what it computes twice."""
    functions: dict[str, Any] = compiled(case, "9.0", tmp_path)["functions"]
    ours = modelled(case, monkeypatch)
    real, found = [0.0, 0.0], [0.0, 0.0]
    for name, row in functions.items():
        function, direction = name.rsplit(" ", 1)
        owner = function.removesuffix(".forward").rsplit(".", 1)[-1] if "." in function else function
        launches, mb = ours[f"{owner}, backward" if direction == "backward" else owner]
        print(
            f"{name}: inductor {row['step_launches']} launches, {row['step_mb']:.0f} MB; model {launches:.0f}, {mb:.0f}"
        )
        real = [real[0] + row["step_launches"], real[1] + row["step_mb"]]
        found = [found[0] + launches, found[1] + mb]
    print(f"{case}: inductor {real}, model {found}")
    assert found[1] == pytest.approx(real[1], rel=0.2 if case.startswith("vae") else 0.55)
    assert real[0] / 2.8 < found[0] < real[0] * 2.8
