"""The notebooks of examples/: as they are committed, and as a reader runs them."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nbclient", reason="the notebooks need nbclient and ipykernel, of the development tools")
EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))
import nbformat  # noqa: E402
import run_notebooks  # noqa: E402
from IPython.core.inputtransformer2 import TransformerManager  # noqa: E402

from gputrain.engine import checkpoint  # noqa: E402
from gputrain.report.records import evaluated  # noqa: E402
from tests.tables import each_row  # noqa: E402
from tests.test_docs import commands_of, parsed, without_code  # noqa: E402
from tests.waiting import HANG_SECONDS, wait_until  # noqa: E402

PATHS = {path.stem: path for path in run_notebooks.NOTEBOOKS}
LARGEST_BYTES = 300_000
# A path from the root of a system, or a file of a Python installation.
OF_A_MACHINE = re.compile(r"""(?:^|[\s"'(=])(?:/[\w.-]+){2}|[A-Z]:\\|site-packages|ipykernel_\d""", re.MULTILINE)


def texts_of(notebook: Any, kind: str) -> list[str]:
    return [cell.source for cell in notebook.cells if cell.cell_type == kind]


def outputs_of(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def printed_by(notebook: Any) -> str:
    return "".join(output.text for output in outputs_of(notebook) if output.output_type == "stream")


def helper() -> str:
    """Return the cell that defines the function `gputrain`, which is the same in all notebooks."""
    cells = [text for path in PATHS.values() for text in texts_of(run_notebooks.read(path), "code")]
    (cell,) = {text for text in cells if "def gputrain" in text}
    return cell


def test_there_is_one_for_pictures_and_one_for_a_voice() -> None:
    assert set(PATHS) == {"first_vae", "first_voice"}


@each_row(*PATHS)
def test_a_committed_notebook_was_run_from_top_to_bottom_and_names_no_machine(name: str) -> None:
    text = PATHS[name].read_text(encoding="utf-8")
    notebook = run_notebooks.read(PATHS[name])
    assert text == run_notebooks.text_of(run_notebooks.read(PATHS[name]))
    assert len(text.encode()) <= LARGEST_BYTES
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    outputs = outputs_of(notebook)
    assert {output.output_type for output in outputs} <= {"stream", "display_data", "execute_result"}
    shown = json.dumps([output.get("data", {}).get("text/plain", "") for output in outputs]) + printed_by(notebook)
    assert not OF_A_MACHINE.findall(shown)
    assert "\x1b" not in re.sub(r"\x1b\[[\d;]*m", "", shown)  # Colours, but no bars that were drawn again and again.


@each_row(*PATHS)
def test_its_commands_are_understood_and_its_links_lead_somewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    page = "\n\n".join(texts_of(run_notebooks.read(PATHS[name]), "markdown"))
    commands = commands_of(page)
    assert [parsed(line)[0].split("-")[0] for line in commands][-3:] in (
        ["train", "evaluate", "export"], ["prepare", "train", "export"]
    )  # fmt: skip
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page)) if "://" not in link]
    assert [link for link in links if not (EXAMPLES / link).exists()] == []
    assert len(links) == 3


INSTALLED = {"pip": "26.0", "piper_tts": "1.4.0", "torch": "2.11.0+cu128"}  # As on a machine of Colab.


@pytest.mark.skipif(sys.platform == "win32", reason="the interpreter under test is a shell script")
@each_row(
    ("first_vae", "notebooks", "", "gputrain @ file://{}/a%20checkout|diffusers|matplotlib"),
    ("first_voice", "notebooks", "https://a.example/b", "gputrain[onnx] @ git+https://a.example/b|matplotlib"),
    ("first_voice", "a checkout/examples", "https://a.example/b", "gputrain[onnx] @ file://{}/a%20checkout|matplotlib"),
    ("first_vae", "cloned", "", "gputrain @ file://{}/cloned/gputrain|diffusers|matplotlib"),
)
def test_it_installs_from_a_checkout_or_an_address_and_keeps_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, place: str, address: str, wanted: str
) -> None:
    for checkout in ("a checkout", "cloned/gputrain"):
        (tmp_path / checkout / "gputrain").mkdir(parents=True, exist_ok=True)
        (tmp_path / checkout / "gputrain" / "kinds.py").touch()
    for folder in ("notebooks", "a checkout/examples"):
        (tmp_path / folder).mkdir(exist_ok=True)
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nprintf '%s|' \"$@\" >'{tmp_path}/log'\n")
    python.chmod(0o755)
    for package, version in INSTALLED.items():
        (tmp_path / "site" / f"{package}-{version}.dist-info").mkdir(parents=True, exist_ok=True)
        (tmp_path / "site" / f"{package}-{version}.dist-info" / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
        )
    monkeypatch.chdir(tmp_path / place)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    parameters, install = texts_of(run_notebooks.read(PATHS[name]), "code")[:2]
    names: dict[str, Any] = {}
    exec(parameters, names)
    assert names["ADDRESS"] == ""
    if place == "notebooks" and not address:
        with pytest.raises(RuntimeError, match="write the address of the repository"):
            exec(install, dict(names))
        monkeypatch.chdir(tmp_path / "a checkout")
    exec(install, {**names, "ADDRESS": address})
    line = f"-m|pip|install|--quiet|{wanted.format(tmp_path)}|torch==2.11.0+cu128|"
    assert (tmp_path / "log").read_text() == line


def test_a_command_that_fails_stops_the_notebook(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    names: dict[str, Any] = {"shlex": shlex}
    exec(helper(), names)
    with pytest.raises(RuntimeError, match=r"^gputrain evaluate ended with exit code 2$"):
        names["gputrain"](f"evaluate --model '{tmp_path}/a run' --data-path data")
    assert "a run" in capsys.readouterr().out


# -------------------------------------------------------------------------------------------------- as a reader runs it


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_vae_learns_and_diffusers_loads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # The notebooks are run beside each other.
    notebook = run_notebooks.with_parameters(run_notebooks.read(PATHS["first_vae"]), {"STEPS": 20})
    printed = printed_by(run_notebooks.execute(notebook, tmp_path))
    psnr = evaluated(tmp_path / "first_vae" / "run", "psnr_db")
    assert max(psnr[1:]) > psnr[0] > 30
    assert [path.name for path in tmp_path.iterdir()] == ["first_vae"]
    assert "198,912 numbers of the picture became 16,576 of the latent" in printed
    found = re.search(r"PSNR of the cat: ([\d.]+) dB", printed)
    assert found
    assert float(found[1]) > 28
    pictures = [output for output in outputs_of(notebook) if {"image/png", "image/jpeg"} & {*output.get("data", {})}]
    assert len(pictures) == 4


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_voice_learns_and_piper_speaks_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = run_notebooks.with_parameters(run_notebooks.read(PATHS["first_voice"]), {"STEPS": 12})
    printed = printed_by(run_notebooks.execute(notebook, tmp_path))
    distortion = evaluated(tmp_path / "first_voice" / "run", "mcd_db")
    assert min(distortion[1:]) < distortion[0] - 1
    assert [path.name for path in tmp_path.iterdir()] == ["first_voice"]
    for who in ("the voice:", "Piper spoke for"):
        found = re.search(rf"{who} ([\d.]+) s", printed)
        assert found, who
        assert 0.3 < float(found[1]) < 10
    sounds = [output for output in outputs_of(notebook) if "<audio" in output.get("data", {}).get("text/html", "")]
    assert len(sounds) == 3


@pytest.mark.slow
def test_the_cells_for_colab_and_kaggle_train_and_show_the_report(tmp_path: Path) -> None:
    from PIL import Image

    page = (EXAMPLES.parent / "docs" / "colab_kaggle.md").read_text(encoding="utf-8")
    cells = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    for cell in cells:
        compile(TransformerManager().transform_cell(cell), "cell", "exec")
    (train,) = (cell for cell in cells if "training = " in cell)
    (watch,) = (cell for cell in cells if "srcdoc" in cell)
    for number in range(4):
        Image.new("RGB", (64, 64), (60 * number, 90, 30)).save(tmp_path / f"{number}.png")
    tiny = "--data-path . --preset fast --channels 8,8 --image-size 32 --batch-size 2 --num-epochs 0 --num-steps 4"
    train, count = re.subn(r"--data-path \S+ (.*) --image-size \d+", rf"{tiny} --num-workers 0 \1", train)
    assert count == 1
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in (train, watch)])
    notebook.cells[1].source = watch.replace("time.sleep(60)", "time.sleep(0.5)")
    run_notebooks.execute(notebook, tmp_path)
    assert "4 steps" in (tmp_path / "training.log").read_text()
    (shown,) = notebook.cells[1].outputs
    assert shown.data["text/html"].startswith("<div><iframe srcdoc=")
    assert "outputs/vae" in shown.data["text/html"]


@pytest.mark.slow
def test_the_stop_button_ends_a_training_with_a_checkpoint(tmp_path: Path) -> None:
    from PIL import Image

    for number in range(4):
        Image.new("RGB", (64, 64), (60 * number, 90, 30)).save(tmp_path / f"{number}.png")
    training = (
        f"train-vae --data-path '{tmp_path}' --output-dir '{tmp_path}/run' --preset fast --channels 8,8 --image-size 32"
        " --batch-size 2 --num-epochs 0 --num-steps 100000 --log-every-steps 1 --num-workers 0 --held-out-share 0"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", f"import shlex\n{helper()}\n\n\ngputrain({training!r})"], stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_until(
        lambda: metrics.exists() and '"step": 2' in metrics.read_text(), "a step", lambda: process.poll() is not None
    )
    os.killpg(process.pid, signal.SIGINT)  # As Jupyter interrupts a kernel: the command gets the signal too.
    printed, _ = process.communicate(timeout=HANG_SECONDS)
    assert "everything is saved" in printed
    assert "KeyboardInterrupt" in printed
    assert checkpoint.find("auto", tmp_path / "run", "vae") is not None
