"""Files of weights: what they are by their first bytes, and the wrappers around the tensors that they hold."""

import gzip
import logging
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
    contents = [
        (b"GGUF\3\0\0\0" + bytes(80), "begins with b'GGUF", "a file of torch or safetensors"),
        (b"\x08\x0a\x12\x07pytorch" + bytes(80), "begins with b", "a file of torch or safetensors"),
        (b"version https://git-lfs.github.com/spec/v1\n", "begins with b'version https://", "git lfs pull"),
        (b"<!DOCTYPE html><html>404</html>", "begins with b'<!DOCTYPE html>", "download"),
        (gzip.compress(save(WEIGHTS)), "begins with b", "unpack"),
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
