"""Files of weights: what they are by their first bytes, and the wrappers around the tensors that they hold."""

import gzip
import logging
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save, save_file

from gputrain.engine import checkpoint
from gputrain.errors import UserError
from gputrain.weights import log_unused, read_foreign, read_weights_file
from tests.tables import check_rows

WEIGHTS = {"encoder.weight": torch.arange(6.0).reshape(2, 3), "encoder.bias": torch.ones(2)}


def test_files_of_other_kinds_are_named_by_their_content(tmp_path: Path) -> None:
    """Whatever their ending says, by every reader of weights and of checkpoints; none is said to be damaged."""
    with zipfile.ZipFile(tmp_path / "packed.zip", "w") as archive:
        archive.writestr("vae/model.safetensors", save(WEIGHTS))
    with zipfile.ZipFile(tmp_path / "program.zip", "w") as archive:
        for name in ("data.pkl", "code/model.py", "constants.pkl"):
            archive.writestr(f"program/{name}", b"\x80\x02.")
    contents = [
        ((tmp_path / "program.zip").read_bytes(), "a program of TorchScript", "take the .safetensors"),
        (b"GGUF\3\0\0\0" + bytes(80), "weights in GGUF", "take the .safetensors"),
        (b"\x89HDF\r\n\x1a\n" + bytes(80), "weights in HDF5", "take the .safetensors"),
        (b"\x08\x01\x12\x04none" + bytes(80), "a graph of TensorFlow", "take the .safetensors"),
        (b"\x08\x0a\x12\x07pytorch" + bytes(80), "a graph of ONNX", "exported from"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:12\n", "a pointer of Git LFS", "git lfs pull"),
        (b"<!DOCTYPE html><html>404</html>", "a web page", "download"),
        (gzip.compress(save(WEIGHTS)), "an archive", "unpack it"),
        ((tmp_path / "packed.zip").read_bytes(), "a zip archive of vae/model.safetensors", "unpack it"),
        (pickle.dumps({"a": [1, 2]}), "a pickle that torch did not write", "torch.save"),
        (b"", "an empty file", "copy or download it again"),
    ]

    def check(content: bytes, what: str, hint: str) -> None:
        for ending in (".pt", ".ckpt", ".safetensors"):
            path = tmp_path / f"file{ending}"
            path.write_bytes(content)
            for read in (
                read_weights_file,
                lambda path: read_foreign(path, instead=""),
                lambda path: checkpoint.read(path, "vae"),
            ):
                with pytest.raises(UserError) as caught:
                    read(path)
                assert caught.value.message.startswith(f"{path}: {what}"), caught.value.message
                assert hint in caught.value.hint, caught.value.hint

    check_rows(contents, check)


def test_wrappers_are_removed_whatever_the_ending(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What stands beside the model is named."""
    caplog.set_level(logging.INFO)
    wrapped = {f"module._orig_mod.{name}": one for name, one in WEIGHTS.items()}
    rows = [
        ("plain.ckpt", lambda path: save_file(WEIGHTS, path), None),
        ("compiled.pt", lambda path: save_file(wrapped, path), None),
        ("torch.safetensors", lambda path: torch.save(WEIGHTS, path), None),
        ("old.bin", lambda path: torch.save(wrapped, path, _use_new_zipfile_serialization=False), None),
        ("deep.pth", lambda path: torch.save({"model": {"state_dict": wrapped}, "epoch": 3}, path), None),
        ("run.pt", lambda path: torch.save({"model": wrapped, "ema": WEIGHTS}, path), "not used: ema (1)"),
        ("average.pt", lambda path: torch.save({"ema": wrapped, "step": 5}, path), None),
        ("tuned.pt", lambda path: torch.save({"model": WEIGHTS, "config": {"rate": 1}}, path), None),
        ("optimized.pt", lambda path: torch.save({"model": WEIGHTS, "optim": [{0: WEIGHTS}]}, path), "not used: optim"),
    ]

    def check(name: str, write, unused: str | None) -> None:
        caplog.clear()
        write(tmp_path / name)
        read = read_weights_file(tmp_path / name)
        assert sorted(read.names) == sorted(WEIGHTS)
        assert all(torch.equal(read.tensors[key], one) for key, one in WEIGHTS.items())
        assert (unused or "") in caplog.text
        assert bool(unused) == bool(caplog.text)

    check_rows(rows, check)
    caplog.clear()
    log_unused("a.ckpt", [])
    log_unused("a.ckpt", ["loss.x", "unet.1", "unet.2"])
    assert caplog.messages == ["a.ckpt: not used: unet (2), loss (1)"]
