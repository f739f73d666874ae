"""The published files that have a short name, from catalogue.yaml: their origin, licence and size."""

import difflib
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Literal
from urllib.parse import unquote, urlsplit

from gputrain.serialization import from_json, read_yaml


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
