"""Whether everything that a training does works on this GPU: at most two minutes.

Every train command makes six steps at a small size, all side by side from the beginning: with its default switches,
and compiled if these do not compile, which takes one to several minutes unless --caches has the result. Meanwhile each
runs kernel by kernel and is resumed. If time is left: memory that runs out, waits for the device in a step, graphs,
losses and gradients against float64 on the CPU, and check-compatibility. What has found no time is listed.
"""

import logging
import platform
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpu import checks
from gpu.commands import gputrain, log_of_package, plan_of, steps_of
from gpu.data import KINDS
from gpu.runner import Context, Figures, Part, Subcommand, main
from gpu.trainings import SMALL
from gputrain.bench.runner import NotMeasured
from gputrain.errors import first_line

SECONDS = 120  # Of all parts together.
STEPS, RESUMED_STEPS, GRAPH_STEPS = 6, 9, 10  # A graph is captured after some steps.
PACKAGES = ("torch", "triton", "numpy", "numba", "transformers", "onnxruntime", "scipy", "skimage", "PIL", "jinja2")
NEEDED = {
    "vae": (), "vocoder": ("soundfile",), "tts": ("soundfile",), "asr": ("transformers", "rapidfuzz", "soundfile"),
}  # fmt: skip
MAYBE = (
    "librosa",
    "soxr",
    "soundfile",
    "rapidfuzz",
    "pyworld",
    "parselmouth",
    "diffusers",
    "jiwer",
    "pynvml",
    "psutil",
)
FEW = ("--log-every-steps", 1, "--warmup-steps", 2, "--sample-every-steps", STEPS, "--checkpoint-every-minutes", 0)
HERE = Path(__file__).parent
TRAININGS: dict[str, tuple[object, ...]] = {
    "vae": ("--preset", "fast", "--channels", "32,64", "--image-size", 64, "--batch-size", 8,
            "--adversarial-weight", 0.1, "--discriminator-start", 2, "--discriminator-channels", 16),
    "vocoder": ("--config", "base_hifi_rtx5090_optimized.yaml", "--batch-size", 4, "--crop-mel-frames", 32,
                "--upsample-initial-channel", 128, "--discriminator-periods", "2,3", "--config", HERE / "alive.yaml",
                "--num-workers", 2, "--val-num", 2),
    "tts": ("--preset", "fast", "--batch-size", 4, "--discriminator-channels", 8, "--num-audio-samples", 1),
    "asr": ("--preset", "tiny", "--batch-size", 4),
}  # fmt: skip
TINY: dict[str, tuple[object, ...]] = {  # On a CPU, in addition.
    "vae": ("--channels", "32,32", "--image-size", 32, "--batch-size", 2),
    "vocoder": ("--upsample-initial-channel", 64, "--batch-size", 1, "--crop-mel-frames", 16, "--precision", "tf32",
                "--config", HERE / "alive_on_cpu.yaml"),
    "tts": ("--batch-size", 2),
    "asr": ("--batch-size", 2),
}  # fmt: skip
EAGER = ("--no-use-torch-compile", "--no-use-cuda-graphs")
COMPILED = ("--use-torch-compile", "--no-use-cuda-graphs")
GRAPHS = ("--no-use-torch-compile", "--no-plan", "--use-cuda-graphs")
Ask = Callable[[str, Context], Figures]


def imports(context: Context) -> Figures:
    """Returns the versions of what is there, and the names of what is not."""
    import torch

    found: Figures = {"python": platform.python_version()}
    if not context.smoke:
        found["driver_memory_gb"] = torch.cuda.mem_get_info()[1] / 1e9
        found |= {"cuda": str(torch.version.cuda), "cudnn": torch.backends.cudnn.version()}
    found["missing"] = " ".join(name for name in (*PACKAGES, *MAYBE) if find_spec(name) is None) or "nothing"
    broken = {}
    for name in (*PACKAGES, *MAYBE):
        if find_spec(name):
            try:
                import_module(name)
            except Exception as error:  # A package of another CUDA or numpy ends in any error.
                broken[name] = first_line(error)
        try:
            found[name] = version({"skimage": "scikit-image", "PIL": "pillow"}.get(name, name))
        except PackageNotFoundError:
            continue
    if broken:
        context.note(found)
        raise ImportError("; ".join(f"{name}: {why}" for name, why in broken.items()))
    return found


def train(kind: str, switches: tuple[object, ...], steps: int, context: Context) -> Figures:
    """Runs a train command. Returns its times and what it has warned of."""
    run = context.scratch / "run"
    with log_of_package() as records:
        gputrain(*training(kind, switches, context), "--output-dir", run, "--max-steps", steps)
    check_steps(run, steps)
    made, plan = steps_of(run), plan_of(run)
    settings = plan["settings"]
    figures: Figures = {
        "seconds_a_step": made[-1]["seconds"] - made[-2]["seconds"], "first_step": made[0]["speed/seconds_per_step"],
        "peak_gb": made[-1].get("memory/peak_gb"),
        "measured_to_predicted_gb": plan["measured"].get("ratio"), "precision": settings["precision"]["value"],
        "compiled": settings["compile"]["value"], "graphs": settings["cuda_graphs"]["value"],
        "warnings": [one.getMessage() for one in records if one.levelno >= logging.WARNING],
    }  # fmt: skip
    context.note(figures)
    check_switches(settings, switches, [one.getMessage() for one in records], context)
    if failures := [line for line in figures["warnings"] if "failed" in line or " are off" in line]:
        raise AssertionError("; ".join(failures))
    if not (run / "samples").is_dir() or not any((run / "samples").iterdir()):
        raise AssertionError("there are no samples")
    if not (run / "report.html").is_file():
        raise AssertionError("there is no report")
    return figures


def train_and_resume(kind: str, context: Context) -> Figures:
    """Runs a train command kernel by kernel, and resumes it from its checkpoint."""
    switches = (*EAGER, "--no-plan", "--num-workers", 0)
    figures, run = train(kind, switches, STEPS, context), context.scratch / "run"
    words = training(kind, switches, context)
    gputrain(*words, "--output-dir", run, "--max-steps", RESUMED_STEPS, "--resume-from", "auto")
    check_steps(run, RESUMED_STEPS)
    return {**figures, "resumed_at": steps_of(run)[STEPS]["step"] - 1}


def compiled(kind: str, context: Context) -> Figures:
    """Runs a train command with compilation, unless its default switches have done so."""
    training_of_kind = SMALL[kind]
    if training_of_kind.decide(training_of_kind.settings(context.device)).compile.value:
        raise NotMeasured("its default switches compile")
    return train(kind, COMPILED, STEPS, context)


def check_steps(run: Path, steps: int) -> None:
    """Raises AssertionError if not every step up to this one was made once, with finite gradients."""
    made = steps_of(run)
    numbers = [int(row["step"]) for row in made]
    if numbers != [*range(1, steps + 1)]:
        raise AssertionError(f"the logged steps are {numbers}")
    if bad := [key for row in made for key, value in row.items() if key.startswith("nonfinite") and value]:
        raise AssertionError(f"non-finite gradients: {sorted(set(bad))}")


def training(kind: str, switches: tuple[object, ...], context: Context) -> list[object]:
    """Returns the words of a train command. Raises NotMeasured if its data could not be prepared."""
    data = context.data / kind
    if not data.is_dir():
        raise NotMeasured("there are no prepared data of this kind (gpu.sh prepare)")
    tiny = TINY[kind] if context.smoke else ()
    return [f"train-{kind}", "--data-path", data, "--device", context.device, *TRAININGS[kind], *FEW, *switches, *tiny]


def check_switches(
    settings: dict[str, dict[str, Any]], switches: tuple[object, ...], said: list[str], context: Context
) -> None:
    """Raises AssertionError if something that was asked for is not in effect at the end."""
    if context.smoke:
        return
    if "--use-torch-compile" in switches and not settings["compile"]["value"]:
        raise AssertionError(f"not compiled: {settings['compile']['reason']}")
    if "--use-cuda-graphs" in switches:
        if not settings["cuda_graphs"]["value"]:
            raise AssertionError(f"no CUDA graphs: {settings['cuda_graphs']['reason']}")
        if not any("CUDA graph from now on" in line for line in said):
            raise AssertionError("nothing was captured")


def compatibility(context: Context) -> Figures:
    """Runs check-compatibility, which exits with 1 if training is not possible."""
    gputrain("check-compatibility", "--data-path", context.scratch)
    return {"can_train": True}


def parts(smoke: bool) -> Sequence[Part]:
    def trainings(name: str, ask: Ask, seconds: Sequence[float], kinds: Sequence[str] = KINDS) -> list[Part]:
        """`seconds` of each kind; one that is as long as the whole compiles beside the others."""
        return [
            Part(f"{kind}, {name}", limit, partial(ask, kind), NEEDED[kind], name == "eager", limit == SECONDS)
            for kind, limit in zip(kinds, seconds, strict=True)
        ]

    graphed = ("vae", "vocoder")  # The clips of the others have any length.
    return [
        Part("imports", 7.5, imports),
        Part("aligner", 2, checks.aligner),
        Part("allocator", 1.5, checks.allocator),
        *trainings("default switches", lambda kind, context: train(kind, (), STEPS, context), 4 * [SECONDS]),
        *trainings("compiled", compiled, 4 * [SECONDS]),
        *trainings("eager", train_and_resume, (24, 32, 28, 15)),
        # These find time if others were fast.
        *(Part(f"out of memory, {kind}", 20, partial(checks.out_of_memory, kind)) for kind in checks.LARGER),
        *(Part(f"no waits, {kind}", 20, partial(checks.no_waits, kind, False)) for kind in KINDS),
        *trainings("graphs", lambda kind, context: train(kind, GRAPHS, GRAPH_STEPS, context), (25, 25), graphed),
        *(Part(f"no waits, graphs, {kind}", 20, partial(checks.no_waits, kind, True)) for kind in graphed),
        *(Part(f"numerics, {kind}", 40, partial(checks.numerics, kind)) for kind in KINDS),
        *(
            Part(f"numerics, compiled, {kind}", 60, partial(checks.compiled_numerics, kind), in_smoke=False)
            for kind in ("vae", "vocoder", "tts")
        ),
        Part("check-compatibility", 30, compatibility),
    ]


if __name__ == "__main__":
    main(Subcommand("alive", __doc__, SECONDS, parts, needs_data=True))
