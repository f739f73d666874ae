"""Finds and reads the published weights of measures, such as LPIPS."""

import logging
from collections.abc import Sequence
from pathlib import Path

import pooch
from torch import Tensor

from gputrain.errors import UserError
from gputrain.fetch.names import catalogue, close_names, find_published, local_path
from gputrain.vae.config import MEASURES
from gputrain.weights import read_weights_file

log = logging.getLogger(__name__)


def named_files(names: Sequence[str | Path], known: Sequence[str]) -> tuple[Path, ...]:
    """Returns the files of paths and published names, of which `known` are those with a short name that fit.

    Raises UserError, before anything is downloaded, if one of them is neither a file nor a name.
    """
    for name in names:
        if not Path(name).exists() and find_published(name) is None:
            close = close_names(str(name))
            hint = f"short names like it: {', '.join(close)}" if close else how_to_fetch(known)
            raise UserError(f"{name}: no such file", hint=hint)
    return tuple(local_path(name, MEASURES) for name in names)


def read_published(path: Path, known: Sequence[str]) -> dict[str, Tensor]:
    """Returns the tensors of a file, with a warning if it is none of those with a short name in `known`: figures of
    other weights are not comparable with published ones. Raises UserError as `read_weights_file` does."""
    tensors = read_weights_file(path).tensors
    published = {digest for name in known for digest in catalogue()[name].sha256.values()}
    if (found := pooch.file_hash(path)) not in published:
        log.warning(
            "%s: not the published weights (its SHA-256 is %s, theirs %s): figures of it compare with no others; %s",
            path, found, " or ".join(sorted(published)), how_to_fetch(known),
        )  # fmt: skip
    return tensors


def how_to_fetch(known: Sequence[str]) -> str:
    """Returns the command that loads the files with these short names."""
    files = " and ".join(catalogue()[name].file_name for name in known)
    return f"gputrain fetch {' '.join(known)} loads {files}"
