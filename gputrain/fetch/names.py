"""Turns what a user names, a path, a short name of the list, an address or a name on the Hub, into a local path."""

import os
import re
from pathlib import Path

from gputrain.errors import UserError
from gputrain.fetch.addresses import Address, address_of, address_of_url, fetch_address
from gputrain.fetch.catalogue import catalogue, close_names
from gputrain.fetch.hub import ADAPTER_FILE, PREFIXES, HubName, parse_hub_name
from gputrain.fetch.published import PublishedFiles, fetch_model

FILE = re.compile(r"\.(pt|pth|ckpt|safetensors|bin|onnx|json|yaml|zip)$", re.IGNORECASE)  # No repository is named so.


def local_path(name: str | Path, *wanted: PublishedFiles, weights: bool = True) -> Path:
    """Returns the local file or folder of a model that is named by its path, or by a published name.

    That is a short name of `gputrain fetch --list`, an https address, or a name on the Hugging Face Hub. `wanted` says
    which files the kinds of model have that it may be of. Without `weights`, only what describes the model need be
    there. Raises UserError if there is no such model, or it cannot be fetched.
    """
    path = Path(name)
    if os.path.exists(path) or (
        ADAPTER_FILE.fullmatch(path.name) and path.parent.is_dir()
    ):  # Reading says which adapters it has.
        return path
    place, listed = find_published(name), catalogue().get(str(name))
    if place is None:
        raise no_such(name, *wanted)
    if listed and wanted and listed.kind not in (allowed := [one.kind for one in wanted if one.kind]):
        raise UserError(
            f"{name}: is listed as {listed.kind}, expected {' or '.join(allowed)}",
            hint=f"gputrain fetch --list --kind {allowed[0]}" if allowed else "name the path of what you have",
        )
    if isinstance(place, Address):
        return fetch_address(place)
    try:
        return fetch_model(place, wanted, weights=weights, sha256=listed.sha256 if listed else None).path
    except UserError as error:
        if listed:
            raise by_short_name(error, place, str(name)) from None
        if looks_like_path(name):
            raise UserError(
                f"{name}: no such file or folder; as a name on the Hub: {error.message.removeprefix(f'{name}: ')}",
                hint=error.hint,
            ) from None
        raise


def by_short_name(error: UserError, place: HubName, name: str) -> UserError:
    """Returns an error of the Hub with the short name of the list that was given for a place there."""
    return UserError(f"{name}: {error.message}", hint=error.hint.replace(f"fetch {place}", f"fetch {name}"))


def find_published(name: str | Path) -> HubName | Address | None:
    """Returns where a model is published that is named by a short name, an address or as on the Hub; None if the text
    can only be a path."""
    text = name.as_posix() if isinstance(name, Path) else name.strip()
    text = re.sub(r"^(https?|hf):/(?=[^/])", r"\1://", text)  # A path has joined its slashes.
    if entry := catalogue().get(text):
        return parse_hub_name(entry.hub) if entry.hub else address_of(entry)
    if FILE.search(text) and ":" not in text and not ADAPTER_FILE.fullmatch(text.rpartition("/")[2]):
        return None
    if found := parse_hub_name(text):
        return found
    is_address = text.startswith(("https://", "http://")) and not PREFIXES.fullmatch(text)
    return address_of_url(text) if is_address else None


def looks_like_path(name: str | Path) -> bool:
    """Returns True for org/name and similar texts, which may as well be a path with a mistake in it."""
    return ":" not in str(name) and "@" not in str(name) and str(name) not in catalogue()


def no_such(name: str | Path, *wanted: PublishedFiles) -> UserError:
    """Returns the error for what is neither a path nor a name."""
    close = close_names(str(name))
    if close:
        return UserError(f"{name}: no such file or folder", hint=f"short names like it: {', '.join(close)}")
    if PREFIXES.fullmatch(str(name)):
        hint = "name a model of the Hub as org/name, or by the address of its page, https://huggingface.co/org/name"
        return UserError(f"{name}: names no model", hint=hint)
    if re.match(r"[\w-]+(\.[\w-]+)*\.[a-z]{2,}/.+/", str(name)):
        return UserError(f"{name}: no such file or folder", hint=f"an address begins with https://: https://{name}")
    published = "or a published one of `gputrain fetch --list`"
    if len(wanted) == 1 and wanted[0].example:
        published = f"or a published one, such as {wanted[0].example}"
    return UserError(
        f"{name}: no such file or folder",
        hint=f"name a run folder, a checkpoint, a model's folder or file, {published}",
    )
