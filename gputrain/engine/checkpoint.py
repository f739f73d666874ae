"""Checkpoints that cannot be lost: written aside, synced, read back and renamed; verified when read; the one before
kept.

A run folder holds

    checkpoint_last.pt      the newest
    checkpoint_previous.pt  the one before it
    checkpoint_best.pt      the one with the best score on held-out data
    checkpoint_epoch_25.pt  kept every checkpoint_every_epochs epochs
    checkpoint_step_800.pt  kept every checkpoint_every_steps steps

All but the first two are names (hard links, where the file system has them) of what was saved as checkpoint_last.pt.
A checkpoint is a file of torch.save. The checksum of all its bytes stands in the comment that a zip archive may end
with, so that torch.load and unzip read it as they read any other. `load_weights` loads weights into modules.
"""

import contextlib
import errno
import heapq
import logging
import os
import pickle
import re
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard, TypeVar

import torch
from torch import Tensor, nn

from gputrain.config import assemble, check_stored
from gputrain.engine.schedule import RunProgress
from gputrain.errors import UserError
from gputrain.fetch.names import refuse_graph
from gputrain.former_options import left_out, with_current_options
from gputrain.kinds import refuse_other_model
from gputrain.serialization import TRAIN_AGAIN, unreadable
from gputrain.weights import log_unused, other_file

T = TypeVar("T")
log = logging.getLogger(__name__)
ANOTHER = "copy or download it again, as {} holds no intact one; or train anew, in another folder"

LAST, PREVIOUS, BEST = "checkpoint_last.pt", "checkpoint_previous.pt", "checkpoint_best.pt"
WHY_CHOSEN = {
    BEST: f", the best on held-out data; {LAST} there is the newest", LAST: ", the newest; none was the best",
}  # fmt: skip
KEPT_NAME = re.compile(r"checkpoint_(epoch|step)_(\d+)\.pt")
# CRC-32 detects every flipped bit and every burst of up to 32 flipped bits. It is several times faster than a
# cryptographic hash on processors without instructions for the hash.
MARK = b"gputrain crc32 "  # Start of the archive's comment; eight hexadecimal digits follow.
COMMENT_BYTES = len(MARK) + 8
READ_BYTES = 1 << 20  # Number of bytes that are read at once to compute the checksum.
SPACE_FACTOR = 1.05  # Free space that a save requires, as a multiple of the size of its tensors.
NO_SPACE = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}

SHOWN = 6  # Number of items shown of a longer list.
OTHER_ARCHITECTURE = "use the preset and sizes that it was trained with; they stand in its run's config.yaml"
FORMAT = 1
FORMER_PROGRESS = {"stage", "stages"}  # Parts of the progress in checkpoints of earlier versions.
# The types of a checkpoint's parts.
PARTS = {"kind": str, "modules": dict, "optimizers": dict, "loss_scales": dict, "random": dict, "progress": dict,
         "config": dict, "facts": dict, "data": dict, "names": list, "nonfinite_in_a_row": dict}  # fmt: skip

Content = dict[str, Any]
Ordered = Callable[[Path], list[Path]]  # Returns the checkpoints of a folder in some order.
_shown: set[Path] = set()  # Checkpoints of models that are in use; each is reported once.
_not_synced: set[Path] = set()  # Folders whose renames cannot be made durable; each is reported once.


class Damaged(UserError):
    """A checkpoint is damaged or cannot be read; another one may be usable."""


class SaveFailed(Exception):
    """A checkpoint could not be written. Earlier checkpoints are intact. `hint` says what helps."""

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


class _Summed:
    """A file for torch.save that computes the checksum of its bytes and keeps the error that torch does not pass on."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.crc32 = file, 0
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            written = self.file.write(data)
        except OSError as error:
            self.error = error
            raise
        self.crc32 = zlib.crc32(data, self.crc32)
        return written

    def flush(self) -> None:
        self.file.flush()


def save(folder: Path, content: Content, *, last_is_damaged: bool = False) -> Path:
    """Write `content` as checkpoint_last.pt, so that the disk holds a complete checkpoint at every moment. A damaged
    one is overwritten; otherwise it would take the place of the intact checkpoint_previous.pt.

    The file is read back and compared with what was written before it replaces another one. Raises SaveFailed if it
    cannot be written; the folder is then as it was.
    """
    last, partial = folder / LAST, folder / (LAST + ".partial")
    try:
        _check_space(last, tensor_bytes(content))
        with _deleted_unless_renamed(partial):
            with partial.open("wb") as file:
                crc32 = _write({"format": FORMAT, **content}, file)
                os.fsync(file.fileno())
            _read_back(partial, crc32)
            if last.exists() and not last_is_damaged:
                os.replace(last, folder / PREVIOUS)
            os.replace(partial, last)
    except OSError as error:
        raise SaveFailed(f"{last}: cannot be written: {error.strerror or error}", hint=_remedy(error, folder)) from None
    _sync_folder(folder)
    return last


def _check_space(last: Path, size: int) -> None:
    """Raise SaveFailed if the disk has no room for a further checkpoint of this size. Raises OSError."""
    disk, needed = shutil.disk_usage(last.parent), SPACE_FACTOR * size
    if disk.total and disk.free < needed:  # Some network drives report 0 of 0 bytes.
        raise SaveFailed(
            f"{last}: cannot be written: it takes {needed / 1e9:.2f} GB, and {disk.free / 1e9:.2f} GB are free",
            hint="free some space, or keep fewer checkpoints with --keep-checkpoints",
        )


def _read_back(path: Path, crc32: int) -> None:
    """Raise OSError if the file is not what was written, by its checksum."""
    with path.open("rb") as file:
        if hasattr(os, "posix_fadvise"):  # Otherwise the kernel may answer from its memory instead of the disk.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(-COMMENT_BYTES, os.SEEK_END)
        comment = file.read()
    if comment != _comment(crc32) or not _is_intact(path):
        raise OSError(errno.EIO, "what the disk holds differs from what was written")


@contextlib.contextmanager
def _deleted_unless_renamed(partial: Path) -> Iterator[None]:
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def _write(content: Content, file: BinaryIO) -> int:
    """Write the zip archive of torch.save with its checksum as the archive's comment. Returns the checksum.

    Raises OSError.
    """
    summed: Any = _Summed(file)
    try:
        torch.save(content, summed)
    except RuntimeError:
        if summed.error is not None:
            raise summed.error from None
        raise
    file.seek(-2, os.SEEK_END)  # The length of the comment was 0 when the checksum was computed.
    file.write(struct.pack("<H", COMMENT_BYTES) + _comment(summed.crc32))
    file.flush()
    return int(summed.crc32)


def _comment(crc32: int) -> bytes:
    return MARK + b"%08x" % crc32


def keep(folder: Path, name: str, source: str = LAST) -> None:
    """Give a checkpoint, by default the one that was just saved, a further name, which later saves don't change.

    Raises OSError; the name then still refers to its former file.
    """
    target = folder / name
    partial = target.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    with _deleted_unless_renamed(partial):
        try:
            os.link(folder / source, partial)
        except OSError:  # The file system has no hard links.
            shutil.copy2(folder / source, partial)  # The copy keeps the time, by which `_is_same` recognises it.
            with partial.open("rb+") as file:
                os.fsync(file.fileno())
        os.replace(partial, target)
    _sync_folder(folder)


def restore_names(path: Path, names: Iterable[str]) -> None:
    """Give the newest checkpoint the names that it was saved with, if the run ended before it had them.

    An older checkpoint gets back only missing names, because existing names may belong to later checkpoints.
    """
    for name in names:
        target = path.with_name(name)
        if target.exists() and (path.name != LAST or _is_same(path, target)):
            continue
        try:
            keep(path.parent, name, path.name)
        except OSError as error:
            log.warning("%s: cannot be written (%s)", target, error.strerror or error)


def _is_same(path: Path, other: Path) -> bool:
    """Returns True if both are the same file, or one is the copy that `keep` made of the other."""
    mine, theirs = path.stat(), other.stat()
    return os.path.samestat(mine, theirs) or (mine.st_size, mine.st_mtime_ns) == (theirs.st_size, theirs.st_mtime_ns)


def prune(folder: Path, newest: int, is_permanent: Callable[[int], bool] = lambda step: False) -> None:
    """Delete all but the `newest` checkpoint_epoch_*.pt, and all but the `newest` checkpoint_step_*.pt and those of
    steps that are permanent. 0 keeps all. Raises OSError.

    The newest are those that were saved last, whatever their numbers: a run that resumed an older checkpoint repeats
    numbers.
    """
    for kind in ("epoch", "step"):
        kept = [
            (path.stat().st_mtime_ns, number, path)
            for number, path in _kept(folder, kind)
            if kind == "epoch" or not is_permanent(number)
        ]
        for _, _, path in sorted(kept)[:-newest] if newest else []:
            path.unlink(missing_ok=True)


def _kept(folder: Path, kind: str) -> list[tuple[int, Path]]:
    """Returns the checkpoints that were kept by epoch or by step, with their numbers."""
    named = ((KEPT_NAME.fullmatch(path.name), path) for path in folder.iterdir())
    return [(int(match[2]), path) for match, path in named if match and match[1] == kind]


def newest_first(folder: Path) -> list[Path]:
    """Returns the checkpoints of a run folder in the order in which a resumed run tries them: last, previous, the kept
    ones from the newest on, best."""
    if not folder.is_dir():
        return []
    by_number = [[path for _, path in sorted(_kept(folder, kind), reverse=True)] for kind in ("epoch", "step")]
    # Times only decide between the two kinds, because copying a folder may change them.
    kept = heapq.merge(*by_number, key=lambda path: path.stat().st_mtime_ns, reverse=True)
    return [path for path in (folder / LAST, folder / PREVIOUS, *kept, folder / BEST) if path.is_file()]


def find(resume_from: str, folder: Path, kind: str) -> tuple[Path, Content] | None:
    """Returns the checkpoint that `--resume-from` names: a file, a run folder, or `auto`, which may find nothing."""
    if resume_from != "auto":
        return _find_in_order(Path(resume_from), kind, newest_first)
    choices = newest_first(folder)
    return _first_intact(choices, kind) if choices else None


def find_named(path: Path, kind: str, modules: Sequence[str] | None = None) -> tuple[Path, Content]:
    """Returns the checkpoint of a trained model at `path`, and logs which one it is: a file, or of a run folder the
    best one, if one was chosen, otherwise the newest (`best_first`). Raises UserError if there is none of this kind.

    A damaged one is replaced by the next one of its folder, with a warning. With `modules`, only what `read` says is
    read.
    """
    source, content = _find_in_order(path, kind, best_first, modules)
    if source.resolve() not in _shown:
        _shown.add(source.resolve())
        why = WHY_CHOSEN.get(source.name, "") if path.is_dir() else ""
        log.info("using %s (step %d%s)", source, content["progress"]["step"], why)
    return source, content


def best_first(folder: Path) -> list[Path]:
    """Returns the checkpoints of a run folder in the order in which its model is taken from them."""
    return sorted(newest_first(folder), key=lambda path: path.name != BEST)


def _find_in_order(
    path: Path, kind: str, ordered: Ordered, modules: Sequence[str] | None = None
) -> tuple[Path, Content]:
    if not (path.is_file() or path.is_dir()):  # Reading a FIFO or a device might never end.
        raise UserError(f"{path}: no such checkpoint", hint=_nearby(path))
    refuse_graph(path)
    choices = ordered(path if path.is_dir() else path.parent)
    if path.is_file():
        choices = [path, *(other for other in choices if other.name != path.name)]
    if not choices:
        raise UserError(f"{path}: holds no checkpoint", hint="name a run folder, or a checkpoint in it")
    return _first_intact(choices, kind, modules)


def _first_intact(choices: Sequence[Path], kind: str, modules: Sequence[str] | None = None) -> tuple[Path, Content]:
    for path, fallback in pairwise(choices):
        try:
            return path, read(path, kind, modules)
        except Damaged as error:
            log.warning("%s; %s is used instead", error.message, fallback.name)
    return choices[-1], read(choices[-1], kind, modules)


def saved_settings(settings: type[T], content: Content, source: Path) -> T:
    """Returns the settings of the training that wrote a checkpoint, for the use of its model: options that were left
    out changed how it was trained, and not its sizes. Raises UserError if they are damaged."""
    values = {name: value for name, value in content["config"].items() if name not in left_out(content["kind"])}
    check_stored(settings, values, source)
    return assemble(settings, values, source=str(source))


def intact_checkpoints(folder: Path, kind: str) -> Iterator[Content]:
    """Yields the checkpoints of a run folder that can be read, in the order of `newest_first`."""
    for path in newest_first(folder):
        try:
            yield read(path, kind)
        except Damaged as error:
            log.warning("%s", error.message)


def read(path: Path, kind: str, modules: Sequence[str] | None = None) -> Content:
    """Returns the verified content of a checkpoint of a `kind` of model, on the CPU.

    With `modules`, which may be none, it has the weights of these alone, of the first the moving average if there is
    one, and no optimizer's state. Raises Damaged if what is read is truncated, changed or
    unreadable, UserError if it is missing or not a checkpoint.
    """
    content = _read(path, mapped=modules is not None)
    refuse_other_model(path, content["kind"], kind)
    stored = content["config"]
    content["config"] = with_current_options(stored, kind, is_stored=True)
    for name in FORMER_PROGRESS:
        content["progress"].pop(name, None)
    if modules is None:
        if stored.get("track"):
            log.warning("%s: its run went on in %s, which is no longer written to", path, " and ".join(stored["track"]))
        return content
    states = content["modules"]
    wanted = ["ema" if "ema" in states else name for name in modules[:1]] + [*modules[1:]]
    # Copies let go of the file, which a training may be about to replace, and Windows would not let it.
    kept = map_tensors({name: states[name] for name in wanted if name in states}, torch.clone)
    return {**content, **{name: {} for name in ("optimizers", "loss_scales", "random")}, "modules": kept}


def _read(path: Path, *, mapped: bool) -> Content:
    """Returns the verified content of a checkpoint. If it is `mapped`, the tensors stay in the file, which costs no
    RAM. Raises as `read`."""
    try:
        intact = _is_intact(path)
    except FileNotFoundError:
        raise UserError(f"{path}: no such checkpoint", hint=_nearby(path)) from None
    except OSError as error:
        raise Damaged(f"{path}: cannot be read: {error.strerror or error}", hint="check its permissions") from None
    if not intact:
        raise _fault(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError:
        content = None
    except Exception:  # Damaged headers of a file without a checksum can cause any error.
        raise _fault(path) from None
    if not is_content(content):
        raise unreadable(path, f"{TRAIN_AGAIN}; {_nearby(path)}", "not a checkpoint")
    return content


def step_of(path: Path) -> int:
    """Returns the step of a checkpoint, of which no weights are read. Raises any error if it is damaged."""
    return int(torch.load(path, map_location="cpu", weights_only=True, mmap=True)["progress"]["step"])


def _fault(path: Path) -> UserError:
    """Returns the error for a file that is a damaged checkpoint or, unless a run named it, one of another kind."""
    other = None if path.name.startswith("checkpoint_") else other_file(path, "a checkpoint")
    return other or Damaged(f"{path}: truncated or damaged", hint=ANOTHER.format(path.parent))


def _is_intact(path: Path) -> bool:
    """Returns True if a checkpoint is as it was written. Files without a checksum are verified by the checksums of the
    archive's members, which don't protect its headers. Raises OSError."""
    with path.open("rb") as file:
        body = max(0, os.fstat(file.fileno()).st_size - COMMENT_BYTES)
        file.seek(body)
        comment = file.read()
        if MARK in comment:  # Elsewhere than at its start, bytes of the file are missing.
            file.seek(0)
            crc32, left = 0, body - 2
            while left > 0 and (data := file.read(min(READ_BYTES, left))):
                crc32, left = zlib.crc32(data, crc32), left - len(data)
            length = file.read(2)
            return (length, comment) == (struct.pack("<H", COMMENT_BYTES), _comment(zlib.crc32(b"\0\0", crc32)))
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except OSError:
        raise
    except Exception:  # Damaged headers can cause any error.
        return False


def _nearby(path: Path) -> str:
    folder = path.parent
    names = sorted(other.name for other in folder.glob("*.pt") if other != path) if folder.is_dir() else []
    return f"{folder} holds {', '.join(names) or 'no checkpoint: name a run folder, or a checkpoint in it'}"


def _remedy(error: OSError, folder: Path) -> str:
    """Returns the hint for an error of writing."""
    if not folder.is_dir():
        return "the folder no longer exists: create it again, or mount its disk"
    if error.errno in NO_SPACE:
        return f"free some space ({shutil.disk_usage(folder).free / 1e9:.1f} GB are free)"
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return "make the folder writable again"
    return "see to the disk"


def _sync_folder(folder: Path) -> None:
    """Make the renames durable, if the system supports it; Windows and some network drives don't."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    try:
        handle = os.open(folder, os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        if folder not in _not_synced:
            _not_synced.add(folder)
            log.warning(
                "%s: this file system cannot confirm that a rename is on the disk (%s); "
                "a power failure may cost the newest checkpoint",
                folder,
                error.strerror or error,
            )


def is_content(content: object) -> TypeGuard[dict[str, Any]]:
    """Returns True if an object has the parts of a checkpoint, each of the right type."""
    if not isinstance(content, dict) or content.get("format") != FORMAT or content.keys() != {"format", *PARTS}:
        return False
    has_parts = all(isinstance(content[name], kind) for name, kind in PARTS.items())
    if not has_parts or content["progress"].keys() - FORMER_PROGRESS != {field.name for field in fields(RunProgress)}:
        return False
    return all(
        isinstance(state, dict) and all(isinstance(value, Tensor) for value in state.values())
        for state in content["modules"].values()
    )


# ------------------------------------------------------------------------------------------------------ loading weights


def load_modules(modules: dict[str, nn.Module], states: dict[str, Content]) -> None:
    """Load the weights of a checkpoint, to go on training. Raises UserError if they belong to other modules."""
    log_unused("the checkpoint", states.keys() - modules.keys())
    for name, module in modules.items():
        if name not in states:
            raise UserError(
                f"the checkpoint holds no {name}",
                hint="resume with the losses and averaging that it was trained with",
            )
        load_weights(module, states[name], f"the checkpoint's {name}", finite=False)


def load_trained(model: nn.Module, content: Content, name: str, source: str) -> None:
    """Load the weights of a checkpoint into a model for inference. Raises UserError if they belong to another model or
    are not finite."""
    load_weights(model, trained_weights(content, name), f"{source}: the checkpoint's {name}")


def trained_weights(content: Content, name: str) -> dict[str, Tensor]:
    """Return the weights of a checkpoint's module; those of its moving average, if the run has one."""
    states = content["modules"]
    if "ema" not in states:
        return dict(states[name])
    return {key.removeprefix("average."): tensor for key, tensor in states["ema"].items()}


def load_weights(
    module: nn.Module,
    given: Mapping[str, Tensor],
    owner: str,
    *,
    hint: str = OTHER_ARCHITECTURE,
    left_out: Callable[[str], bool] = lambda name: False,
    strict: bool = True,
    finite: bool = True,
    assign: bool = False,
) -> list[str]:
    """Load tensors into a module by their names, except for those that are left out. Returns the names of the tensors
    that the module keeps: those that are left out and, unless `strict`, those that are not given or have another shape.

    Raises UserError, with a list of the differences, if tensors differ that must not or nothing fits, and if a number
    is not `finite`; nothing is loaded then. `owner` is the beginning of its message. With `assign`, the given tensors
    take the place of the module's own, as those of a module on the meta device must.
    """
    mine = module.state_dict()
    wanted, offered = ({name: tensor for name, tensor in side.items() if not left_out(name)} for side in (mine, given))
    fitting = {name: offered[name] for name in wanted if name in offered and offered[name].shape == wanted[name].shape}
    if (apart := differences(wanted, offered)) and (strict or not fitting):
        count = f"{len(apart)} tensor{'s' * (len(apart) != 1)}"
        raise UserError(f"{owner} differs in {count}: {format_list(apart)}", hint=hint)
    if finite:
        refuse_nonfinite(fitting, owner)
    module.load_state_dict({**mine, **fitting}, assign=assign)
    return [name for name in mine if name not in fitting]


def differences(wanted: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> list[str]:
    """Return the differences in names and shapes, each as text."""
    found = []
    for name, tensor in wanted.items():
        if name not in given:
            found.append(f"{name} is missing")
        elif given[name].shape != tensor.shape:
            found.append(f"{name} is {tuple(given[name].shape)}, expected {tuple(tensor.shape)}")
    return found + [f"{name} is unknown" for name in given if name not in wanted]


def format_list(names: Sequence[str]) -> str:
    """Join the first SHOWN names, and count the rest."""
    more = f"; and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return "; ".join(names[:SHOWN]) + more


def refuse_nonfinite(weights: Mapping[str, Tensor], owner: str) -> None:
    """Raise UserError if a number of these weights is not finite."""
    for name, tensor in weights.items():
        if not tensor.isfinite().all():
            raise UserError(f"{owner}: {name}: not all weights are finite", hint="take an older checkpoint of the run")


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of nested dicts, lists and tuples in which `change` has replaced the tensors, in their order.

    Other values are passed on, and a dict keeps its class and its attributes, such as the versions in a state_dict.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        mapped = type(value)((key, map_tensors(item, change)) for key, item in value.items())
        if hasattr(value, "__dict__"):
            mapped.__dict__.update(value.__dict__)
        return mapped
    if isinstance(value, (list, tuple)):
        return type(value)([map_tensors(item, change) for item in value])
    return value


def distinct_tensors(content: Any) -> dict[Any, Tensor]:
    """Return the tensors in nested containers by what identifies their values. The same tensor appears once."""
    found: dict[Any, Tensor] = {}

    def look(tensor: Tensor) -> Tensor:
        return found.setdefault(tensor_identity(tensor), tensor)

    map_tensors(content, look)
    return found


def tensor_bytes(content: Any) -> int:
    """Return the size of all tensors in nested containers. The same tensor counts once."""
    return sum(tensor.numel() * tensor.element_size() for tensor in distinct_tensors(content).values())


def tensor_identity(tensor: Tensor) -> tuple[Any, ...]:
    storage = tensor.untyped_storage()._cdata
    return (storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
