"""The published files that have a short name, from catalogue.yaml: their origin, licence and size."""

import difflib
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatch
from importlib.resources import files
from typing import Any, Literal, get_args
from urllib.parse import unquote, urlsplit

from gputrain.fetch.hub import parse_hub_name
from gputrain.stored import converted, read_yaml

CatalogueKind = Literal["vae", "vocoder", "tts", "asr", "measure"]
NAME = re.compile(r"[a-z0-9]+([-.][a-z0-9]+)*")
SHA256 = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class CatalogueEntry:
    """A published file, archive or repository. It is either on the Hub (`hub`) or at an address (`url`)."""

    name: str
    kind: CatalogueKind  # "measure" is LPIPS, Inception, and predictors of opinion scores.
    about: str  # One sentence.
    licence: str  # The SPDX identifier where there is one, otherwise the name on its page.
    page: str  # The public page that confirms the address, the size and the licence.
    use: str  # The option that takes it, such as "--init-from".
    options: str = ""  # Further options that fit it, such as "--preset sd".
    hub: str = ""  # org/name[:subfolder/file][@revision], with datasets/ before it for a repository of data
    url: str = ""
    # Total of what is downloaded: of a url to the byte, of the Hub, which tells its own, as far as a page confirms it.
    bytes: int = 0
    unpack: bool = False  # The url is an archive, which is used unpacked.
    gated: bool = False  # The Hub gives it only to users who have accepted its licence.
    files: tuple[str, ...] = ()  # Patterns of the files that are downloaded from the Hub, in their folder.
    # By file name, where a public page confirms it.
    sha256: Mapping[str, str] = field(default_factory=dict)

    @property
    def file_name(self) -> str:
        """The name of the file at the address; empty for an entry of the Hub."""
        return unquote(urlsplit(self.url).path.rpartition("/")[2])


@functools.cache
def catalogue() -> Mapping[str, CatalogueEntry]:
    """Returns the entries by name, in the order of the list."""
    return read_catalogue(files("gputrain.fetch").joinpath("catalogue.yaml").read_text(encoding="utf-8"))


def close_names(name: str) -> list[str]:
    """Returns the names of the list that a misspelt one may mean, the closest first."""
    plain = re.sub(r"[\s_]+", "-", name.strip().lower())
    words = set(plain.split("-"))
    parts = [known for known in catalogue() if len(plain) > 2 and (plain in known or words <= set(known.split("-")))]
    close = difflib.get_close_matches(plain, catalogue(), n=3, cutoff=0.6)
    return list(dict.fromkeys([*close, *parts]))[:5]


def read_catalogue(text: str) -> dict[str, CatalogueEntry]:
    """Returns the entries of a list in YAML. Raises ValueError, with the entry's name, for unknown and missing keys,
    values of another type, and facts that contradict each other."""
    content = read_yaml(text)
    if not isinstance(content, dict):
        raise ValueError("the list is no mapping of names to entries")
    return {name: _entry(name, facts) for name, facts in content.items()}


def _entry(name: Any, facts: Any) -> CatalogueEntry:
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(f"{name!r}: a name is lower case, with hyphens or dots between its words")
    if not isinstance(facts, dict):
        raise ValueError(f"{name}: is no mapping of keys to values")
    known = {one.name for one in fields(CatalogueEntry)} - {"name"}
    required = {"kind", "about", "licence", "page", "use"}
    if unknown := sorted(map(str, facts.keys() - known)):
        raise ValueError(f"{name}: unknown key {', '.join(unknown)}")
    if missing := sorted(required - facts.keys()):
        raise ValueError(f"{name}: {', '.join(missing)} is missing")
    hints = {"kind": CatalogueKind, "bytes": int, "unpack": bool, "gated": bool, "files": tuple[str, ...]}
    hints["sha256"] = dict[str, str]
    entry = CatalogueEntry(
        name=name, **{key: converted(hints.get(key, str), facts[key], f"{name}: {key}") for key in facts}
    )
    if fault := _fault(entry):
        raise ValueError(f"{name}: {fault}")
    return entry


def _fault(entry: CatalogueEntry) -> str:
    """Returns what is wrong with the facts of an entry; nothing if they agree."""
    if bool(entry.hub) == bool(entry.url):
        return "needs either hub or url"
    texts = {"about": entry.about, "licence": entry.licence}
    faults = {
        f"{', '.join(key for key, value in texts.items() if not value.strip())} is empty": all(
            map(str.strip, texts.values())
        ),
        f"hub is {entry.hub!r}, expected org/name[:subfolder/file][@revision]": not entry.hub
        or str(parse_hub_name(entry.hub)) == entry.hub,
        "url is not https, or names no file": not entry.url or (entry.url.startswith("https://") and entry.file_name),
        "page is not https": entry.page.startswith("https://"),
        "bytes is missing: only the Hub tells them": entry.bytes or entry.hub,
        "bytes is not positive": entry.bytes >= 0,
        "use is no option": re.fullmatch("--[a-z0-9-]+", entry.use),
        "options does not begin with an option": not entry.options or entry.options.startswith("--"),
        "unpack belongs to url": entry.url or not entry.unpack,
        "files and gated belong to hub": entry.hub or not (entry.files or entry.gated),
        "files is missing: it says what is downloaded from the Hub": not entry.hub or entry.files,
        "sha256 is not 64 hexadecimal digits": all(map(SHA256.fullmatch, entry.sha256.values())),
        "sha256 is of a file that is not downloaded": all(
            any(fnmatch(name, pattern) for pattern in entry.files or (entry.file_name,)) for name in entry.sha256
        ),
    }
    return next((fault for fault, holds in faults.items() if not holds), "")


KINDS: tuple[str, ...] = get_args(CatalogueKind)
