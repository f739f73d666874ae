"""Parts of an export that models of sound share: names, comparisons, and graphs of ONNX."""

import copy
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from gputrain.errors import UserError, import_package
from gputrain.kinds import Exported

ModuleT = TypeVar("ModuleT", bound=nn.Module)
LARGEST_DIFFERENCE = 1e-4  # Tolerance between two libraries for waves in [-1, 1]: 80 dB below full scale.


def check_file_name(name: str, example: str) -> None:
    """Raises UserError if a name is not that of a file, without folders."""
    if not name or Path(name).name != name:
        raise UserError(f"{name!r} is not a file name", hint=f"give a name without folders, such as {example}")


def exported(files: list[Path], source: str, compared: str, difference: float, notes: list[str]) -> Exported:
    """Returns the export of the model at `source`, whose outputs differ at most by so much from those of the files;
    `compared` says of what, such as a sample in [-1, 1]."""
    names = ", ".join(path.name for path in files)
    figures: dict[str, object] = {"of": source, "files": names, f"largest difference of a {compared}": difference}
    return Exported(files, figures, notes)


def load_line(path: Path, *inputs: str) -> str:
    """Returns a line of Python that loads a graph and runs it; each input stands for an array of its name."""
    fed = ", ".join(f'"{name}": {name}' for name in inputs)
    return f'Load it: onnxruntime.InferenceSession("{path}").run(None, {{{fed}}})'


def cpu_copy(model: ModuleT) -> ModuleT:
    """Returns a copy of a model in fp32 on the CPU. Raises UserError if a weight is not finite."""
    for name, tensor in model.state_dict().items():
        if not tensor.isfinite().all():
            raise UserError(f"{name}: not all weights are finite", hint="export an older checkpoint of the run")
    return copy.deepcopy(model).to("cpu").float()


def write_onnx(module: nn.Module, inputs: tuple[Tensor, ...], path: Path, **options: Any) -> None:
    """Writes the traced graph of a module; `options` are those of torch.onnx.export.

    The exporter of torch.export writes opset 18 at least, which is too new for the users of our graphs.
    """
    import_package("onnx")
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        # A graph of more than 2 GB has weights in files of their own, which takes a name rather than a Path.
        torch.onnx.export(module.eval(), inputs, str(path), dynamo=False, **options)


def add_metadata(path: Path, facts: Mapping[str, object]) -> None:
    """Adds metadata to a graph, as text by name."""
    onnx = import_package("onnx")
    graph = onnx.load(path)
    onnx.helper.set_model_props(graph, {name: str(value) for name, value in facts.items()})
    onnx.save_model(graph, path)


def load_checked_onnx(path: Path) -> Any:
    onnx = import_package("onnx")
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    return model


def run_onnx(model: Any) -> Any:
    onnxruntime = import_package("onnxruntime")
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def wave_difference(path: Path, graph_wave: Tensor, wave: Tensor) -> float:
    """Returns the largest difference of two waves; inf for NaN. Raises RuntimeError if their shapes differ."""
    if graph_wave.shape != wave.shape:
        raise RuntimeError(f"{path}: a wave of shape {tuple(graph_wave.shape)}, expected {tuple(wave.shape)}")
    return (graph_wave - wave).abs().nan_to_num(math.inf).max().item()
