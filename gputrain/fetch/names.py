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
    # Reading says which adapters a folder has.
    if os.path.exists(path) or (ADAPTER_FILE.fullmatch(path.name) and path.parent.is_dir()):
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


def no_such(name: str | Path, *wanted: PublishedFiles) -> UserError:
    """Returns the error for what is neither a path nor a name."""
    if PREFIXES.fullmatch(str(name)):
        hint = "name a model of the Hub as org/name, or by the address of its page, https://huggingface.co/org/name"
        return UserError(f"{name}: names no model", hint=hint)
    if close := close_names(str(name)):
        hint = f"short names like it: {', '.join(close)}"
    elif re.match(r"[\w-]+(\.[\w-]+)*\.[a-z]{2,}/.+/", str(name)):
        hint = f"an address begins with https://: https://{name}"
    else:
        example = f", such as {wanted[0].example}" if len(wanted) == 1 and wanted[0].example else ""
        published = f"or a published one{example or ' of `gputrain fetch --list`'}"
        hint = f"name a run folder, a checkpoint, a model's folder or file, {published}"
    return UserError(f"{name}: no such file or folder", hint=hint)
