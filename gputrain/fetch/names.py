"""Turns what a user names, a path, a short name of catalogue.yaml or a name on the Hub, into a local path, and says
which checkpoint and which kind of model that is.
"""

import contextlib
import difflib
import functools
import hashlib
import json
import logging
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from pickle import UnpicklingError
from typing import Literal
from urllib.parse import unquote, urlsplit

from gputrain.caches import cache_folder
from gputrain.config import ModelName, config, opt, read_file
from gputrain.errors import UserError
from gputrain.fetch import hub
from gputrain.fetch.archives import content_of, stem_of, unpack
from gputrain.fetch.hub import ADAPTER_FILE, PREFIXES, Faults, HubName, fault_of_download, is_offline, parse_hub_name
from gputrain.fetch.published import fetch_model
from gputrain.formatting import format_bytes, shell_command
from gputrain.kinds import ModelKind, PublishedFiles, default_kind, kinds
from gputrain.serialization import from_json, read_yaml

log = logging.getLogger(__name__)

FILE = re.compile(r"\.(pt|pth|ckpt|safetensors|bin|onnx|json|yaml|zip)$", re.IGNORECASE)  # No repository is named so.
RETRIES = 1  # pooch counts another SHA-256 as a failure, too, so that each one loads the whole file again.
TIMEOUTS = (10.0, 60.0)  # Seconds for a connection, and between two blocks.
# Statuses of answers of other servers than the Hub; what is said of them, and what to do.
LISTED_FAULTS: Faults = (
    ({401, 403, 407}, "{server} refuses it without a login (status {status})",
     "download it in a browser and name its path, or write the login into ~/.netrc{more}"),
    ({404, 410}, "there is no such file (status {status})",
     "check the address; gputrain fetch --list shows the known ones{more}"),
)  # fmt: skip


# ------------------------------------------------------------------------------------------------- short names


@dataclass(frozen=True)
class CatalogueEntry:
    """A published file, archive or repository. It is either on the Hub (`hub`) or at an address (`url`)."""

    name: str
    # "measure" is LPIPS, Inception, and predictors of opinion scores.
    kind: Literal["vae", "vocoder", "tts", "asr", "measure"]
    about: str  # One sentence.
    licence: str  # The SPDX identifier where there is one, otherwise the name on its page.
    page: str  # The public page that confirms the address, the size and the licence.
    use: str  # The option that takes it, such as "--init-from".
    options: str = ""  # Further options that fit it, such as "--preset sd".
    hub: str = ""  # org/name[:subfolder/file][@revision], with datasets/ before it for a repository of data
    url: str = ""
    # Total of what is downloaded: of a url to the byte, of the Hub, which tells its own, as far as a page confirms it.
    bytes: int = 0
    gated: bool = False  # The Hub gives it only to users who have accepted its licence.
    files: tuple[str, ...] = ()  # Patterns of the files that are downloaded from the Hub, in their folder.
    sha256: dict[str, str] = field(default_factory=dict)  # By file name, where a public page confirms it.

    @property
    def file_name(self) -> str:
        """The name of the file at the address; empty for an entry of the Hub."""
        return unquote(urlsplit(self.url).path.rpartition("/")[2])


@functools.cache
def catalogue() -> Mapping[str, CatalogueEntry]:
    """Returns the entries by name, in the order of the list."""
    listed = read_yaml(files("gputrain.fetch").joinpath("catalogue.yaml").read_text(encoding="utf-8"))
    return {name: from_json(CatalogueEntry, {"name": name, **facts}, name) for name, facts in listed.items()}


def close_names(name: str) -> list[str]:
    """Returns the names of the list that a misspelt one may mean, the closest first."""
    plain = re.sub(r"[\s_]+", "-", name.strip().lower())
    words = set(plain.split("-"))
    parts = [known for known in catalogue() if len(plain) > 2 and (plain in known or words <= set(known.split("-")))]
    close = difflib.get_close_matches(plain, catalogue(), n=3, cutoff=0.6)
    return list(dict.fromkeys([*close, *parts]))[:5]


def fetch_listed(entry: CatalogueEntry) -> Path:
    """Returns the file of an entry that is not on the Hub, or the folder of its unpacked archive, in the cache that all
    runs share; it is downloaded if it is not there, or has another SHA-256 than the published one.

    It appears in `fetched/NAME-HASH` of the cache, where HASH stands for the address, when it is complete and verified.
    Raises UserError with the remedy.
    """
    import pooch

    name, digest = entry.file_name, entry.sha256.get(entry.file_name)
    place = cache_folder() / "fetched" / f"{name}-{hashlib.sha256(entry.url.encode()).hexdigest()[:12]}"
    found = _content(place)
    if found is not None and (found.is_dir() or not digest or pooch.file_hash(found) == digest):
        return found
    if is_offline():
        raise UserError(
            f"{entry.name}: is {'damaged in' if found else 'not in'} the cache, and nothing may be downloaded",
            hint=f"load it ahead of time, without HF_HUB_OFFLINE: gputrain fetch {entry.name}",
        )
    if found is not None:
        log.warning("%s: has another SHA-256 than the published one; downloading it again", found)
    server = urlsplit(entry.url).netloc
    log.info("downloading %s (%s) from %s, licence %s", entry.name, format_bytes(entry.bytes), server, entry.licence)
    pooch.get_logger().setLevel(logging.ERROR)  # It would say the same again.
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        hub.refuse_silence(entry.url)
        with tempfile.TemporaryDirectory(dir=place.parent) as aside:
            store = pooch.create(aside, "", registry={name: digest}, urls={name: entry.url}, retry_if_failed=RETRIES)
            download = pooch.HTTPDownloader(progressbar=sys.stderr.isatty(), timeout=TIMEOUTS)
            file, content = Path(store.fetch(name, downloader=download)), Path(aside, "content")
            if file.stat().st_size != entry.bytes:  # Not every publisher states a digest.
                raise ValueError(f"{file.stat().st_size:,} bytes, and {entry.bytes:,} are published")
            content.mkdir()
            unpack(file, content / stem_of(name)) if stem_of(name) else file.rename(content / name)
            if found is not None:
                shutil.rmtree(place, ignore_errors=True)
            try:
                os.replace(content, place)
            except OSError:
                if not place.is_dir():  # Otherwise another process was faster.
                    raise
    except (OSError, ValueError) as error:  # The errors of requests are OSErrors.
        more = f"; its page is {entry.page}"
        raise fault_of_download(
            error,
            entry.name,
            LISTED_FAULTS,
            cache_folder(),
            "set XDG_CACHE_HOME to another disk",
            more=more,
            server=server,
        ) from None
    return _content(place) or place


def _content(place: Path) -> Path | None:
    """Returns the file in a place of the cache, or the folder of an archive's content; None if nothing is there."""
    only = next(place.glob("*"), None)
    return content_of(only) if only and only.is_dir() else only


# ------------------------------------------------------------------------------------------------- local paths


def local_path(name: str | Path, *wanted: PublishedFiles, weights: bool = True) -> Path:
    """Returns the local file or folder of a model that is named by its path, or by a published name.

    That is a short name of `gputrain fetch --list`, or a name on the Hugging Face Hub. `wanted` says which files the
    kinds of model have that it may be of. Without `weights`, only what describes the model need be there. Raises
    UserError if there is no such model, or it cannot be fetched.
    """
    path = Path(name)
    # Reading says which adapters a folder has.
    if os.path.exists(path) or (ADAPTER_FILE.fullmatch(path.name) and path.parent.is_dir()):
        return path
    place, listed = find_published(name), catalogue().get(str(name))
    if place is None:
        raise no_such(name, *wanted)
    if listed and wanted and listed.kind not in (allowed := [published.kind for published in wanted if published.kind]):
        raise UserError(
            f"{name}: is listed as {listed.kind}, expected {' or '.join(allowed)}",
            hint=f"gputrain fetch --list --kind {allowed[0]}" if allowed else "name the path of what you have",
        )
    if isinstance(place, CatalogueEntry):
        return fetch_listed(place)
    try:
        return fetch_model(place, wanted, weights=weights, sha256=listed.sha256 if listed else None)[0]
    except UserError as error:
        if listed:
            raise by_short_name(error, place, str(name)) from None
        if ":" in str(name) or "@" in str(name):
            raise
        fault = error.message.removeprefix(f"{name}: ")  # It may as well be a path with a mistake in it.
        message = f"{name}: no such file or folder; as a name on the Hub: {fault}"
        raise UserError(message, hint=error.hint) from None


def by_short_name(error: UserError, place: HubName, name: str) -> UserError:
    """Returns an error of the Hub with the short name of the list that was given for a place there."""
    return UserError(f"{name}: {error.message}", hint=error.hint.replace(f"fetch {place}", f"fetch {name}"))


def find_published(name: str | Path) -> HubName | CatalogueEntry | None:
    """Returns where a model is published that is named by a short name or as on the Hub; None if the text can only be
    a path."""
    text = name.as_posix() if isinstance(name, Path) else name.strip()
    text = re.sub(r"^(https?|hf):/(?=[^/])", r"\1://", text)  # A path has joined its slashes.
    if entry := catalogue().get(text):
        return parse_hub_name(entry.hub) if entry.hub else entry
    if FILE.search(text) and ":" not in text and not ADAPTER_FILE.fullmatch(text.rpartition("/")[2]):
        return None
    return parse_hub_name(text)


def no_such(name: str | Path, *wanted: PublishedFiles) -> UserError:
    """Returns the error for what is neither a path nor a name."""
    if PREFIXES.fullmatch(str(name)):
        hint = "name a model of the Hub as org/name, or by the address of its page, https://huggingface.co/org/name"
        return UserError(f"{name}: names no model", hint=hint)
    if re.match(r"https?:/", str(name)):
        hint = "load it with curl or a browser, and name the file"
        return UserError(f"{name}: nothing is loaded from other addresses than the Hub's", hint=hint)
    if close := close_names(str(name)):
        hint = f"short names like it: {', '.join(close)}"
    else:
        example = f", such as {wanted[0].example}" if len(wanted) == 1 and wanted[0].example else ""
        published = f"or a published one{example or ' of `gputrain fetch --list`'}"
        hint = f"name a run folder, a checkpoint, a model's folder or file, {published}"
    return UserError(f"{name}: no such file or folder", hint=hint)


# ------------------------------------------------------------------------------------------------- trained models


TRAINED_HELP = "Run folder, checkpoint or published name."


@config()
class TrainedModel:
    """The options that name a trained model."""

    model: ModelName = opt(help=TRAINED_HELP + " Or a model in another program's format.")
    checkpoint: str = opt(
        default="auto",
        help="best, last, auto or a file of the run. auto: the best, if one was chosen on held-out data, otherwise the "
        "last.",
    )

    @functools.cached_property
    def path(self) -> Path:
        """The model's local file or folder; one that is named by a published name is fetched.

        Raises UserError if there is none.
        """
        listed = catalogue().get(str(self.model))
        named = listed.kind if listed and not Path(self.model).exists() else None
        for kind in kinds().values():
            if kind.published and kind.published.only_to_start and kind.published.kind == named:
                raise UserError(
                    f"{self.model}: begins a training, and is no model that this command reads",
                    hint="train with it, then name the run: "
                    + shell_command("gputrain", kind.command, "--init-from", self.model, "--data-path", "FOLDER"),
                )
        return local_path(self.model, *(kind.published for kind in kinds().values() if kind.published))

    @property
    def weights(self) -> Path:
        """The model's file, or its folder if there is nothing to choose: `engine.checkpoint.find_named` then decides.

        Raises UserError if there is no such model or checkpoint.
        """
        if self.checkpoint == "auto":
            return self.path
        held = sorted(path.name for path in self.path.glob("checkpoint_*.pt")) if self.path.is_dir() else []
        if not held:
            raise UserError(
                f"checkpoint {self.checkpoint} does nothing with {self.model}, which is no run folder",
                hint="drop --checkpoint, or name the run folder with --model",
            )
        name = f"checkpoint_{self.checkpoint}.pt" if self.checkpoint in ("best", "last") else self.checkpoint
        for path in (self.path / name, Path(name)):
            if path.is_file():
                return path
        raise UserError(f"{self.model}: holds no {name}", hint=f"it holds {', '.join(held)}")


WEIGHTS = frozenset({".pt", ".pth", ".ckpt", ".bin", ".safetensors"})
GRAPHS = frozenset({".onnx", ".oudep"})  # What is exported for ONNX Runtime and OpenUtau.


def refuse_graph(path: Path) -> None:
    """Raises UserError if a path leads to a model that was exported for ONNX Runtime, and to no other weights."""
    files = [path] if path.is_file() else [*path.glob("*"), *path.glob("*/*")]
    endings = {file.suffix for file in files if file.is_file()}
    if endings & GRAPHS and not endings & WEIGHTS:
        raise UserError(
            f"{path}: an export in ONNX, which gputrain writes and does not read",
            hint="name the run, or the checkpoint, that it was exported from",
        )


def kind_of(model: Path) -> ModelKind:
    """Returns the kind of a run, a checkpoint, or a model in another program's format.

    The `kind` of the run's config.yaml or of the checkpoint decides. If there is none, the keys of the configuration
    do. Anything else is treated as the first kind, whose loader reports what is wrong. Raises UserError if there is
    nothing at the path.
    """
    folder = model if model.is_dir() else model.parent
    if not model.exists():
        hint = "--model takes a run folder, a checkpoint or an export"
        raise UserError(f"{model}: no such file or folder", hint=hint)
    refuse_graph(model)
    for kind in kinds().values():
        ending = kind.checkpoint_suffix
        named = model.suffix == ending and not (model / "config.yaml").is_file()  # A run folder may have any name.
        if ending and (named or (model.is_dir() and (model / f"model{ending}").is_file())):
            return kind
    stated: object = None
    content: dict[str, object] = {}
    if (folder / "config.yaml").is_file():
        content = read_file(folder / "config.yaml")
        stated = content.get("kind")
    elif model.is_file() and model.suffix == ".pt":
        stated = _saved_kind(model)
    else:
        with contextlib.suppress(OSError, TypeError, ValueError):  # Its loader reports it.
            content = dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    by_keys = (kind for kind in kinds().values() if stated is None and kind.keys & content.keys())
    return kinds().get(str(stated)) or next(by_keys, default_kind())


def _saved_kind(checkpoint: Path) -> str:
    """Returns the kind that a checkpoint states; nothing if it is unreadable, which its loader reports."""
    import torch

    try:
        content = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, ValueError, EOFError, UnpicklingError):
        return ""
    return str(content.get("kind", "")) if isinstance(content, dict) else ""
