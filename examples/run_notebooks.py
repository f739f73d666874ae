"""Runs the notebooks of this folder and keeps their outputs in them: `make notebooks`, some minutes for each.

Each notebook runs in an empty temporary folder, as a reader's first run does. What differs from run to run without
telling anything, such as times of cells and numbers of kernels, is not kept; nor are warnings that name this machine.
"""

import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

HERE = Path(__file__).parent
NOTEBOOKS = tuple(sorted(HERE.glob("*.ipynb")))
SECONDS = 3600  # Of one cell.


def read(path: Path) -> NotebookNode:
    notebook: NotebookNode = nbformat.read(path, as_version=4)
    return notebook


def with_parameters(notebook: NotebookNode, values: Mapping[str, object]) -> NotebookNode:
    """Replaces values in the cell with the tag `parameters`. Raises KeyError if it assigns no such name."""
    (cell,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ()))
    for name, value in values.items():
        cell.source, count = re.subn(rf"(?m)^{name} = .*?(?=  #|$)", f"{name} = {value!r}", cell.source)
        if count != 1:
            raise KeyError(name)
    return notebook


def execute(notebook: NotebookNode, folder: Path) -> NotebookNode:
    """Runs all cells with `folder` as the working directory. Raises CellExecutionError at the first that fails."""
    client = NotebookClient(
        notebook, timeout=SECONDS, coalesce_streams=True, resources={"metadata": {"path": str(folder)}}
    )
    executed: NotebookNode = client.execute()
    return executed


def text_of(notebook: NotebookNode) -> str:
    """Returns the file of a notebook: what it says and shows, and nothing of the machine that ran it."""
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number:02}"
        cell.metadata = nbformat.from_dict({"tags": cell.metadata.tags} if "tags" in cell.metadata else {})
        if cell.cell_type == "code":
            # Only libraries write to stderr here: warnings that name files of this machine.
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
            for output in cell.outputs:
                if "image/jpeg" in output.get("data", {}):
                    output.data.pop("image/png", None)  # The same picture, in ten times the bytes.
    nbformat.validate(notebook)
    return str(nbformat.writes(notebook)) + "\n"


def main() -> None:
    for path in [Path(name) for name in sys.argv[1:]] or NOTEBOOKS:
        with tempfile.TemporaryDirectory() as folder:
            notebook = execute(read(path), Path(folder))
        text = text_of(notebook)
        path.write_text(text, encoding="utf-8")
        print(f"{path.name}: {len(text.encode()) / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
