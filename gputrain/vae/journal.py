"""Journal of a preparation of pictures: the results of earlier runs, and the conditions under which they still hold."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gputrain.engine.data import MANIFEST, write_rows, writing
from gputrain.errors import UserError
from gputrain.vae.config import VaePrepareConfig
from gputrain.vae.pictures import JOURNAL, PictureFile

LOOKS = ("target_size", "resize_mode", "format", "image_channels")  # Settings that change the pictures themselves.
JournalRow = dict[str, Any]  # A source with its picture, or with the reason for leaving it out.


@dataclass(frozen=True)
class PictureJob:
    """A source to prepare; `name` is the relative path of the prepared picture."""

    input_dir: Path
    output_dir: Path
    source: PictureFile
    name: str
    config: VaePrepareConfig

    def conditions(self) -> JournalRow:
        """Returns the values on which a result depends; an earlier one with other values is outdated."""
        return {
            "source": self.source.path,
            "source_bytes": self.source.bytes,
            "source_mtime_ns": self.source.mtime_ns,
            "recipe": recipe_of(self.config),
        }

    def is_done(self, row: JournalRow, sums: set[str]) -> bool:
        """Returns True if an earlier result still holds; `sums` has the SHA-256 of the pictures before it.

        A picture with one of these was a duplicate, whose file has been removed. Unreadable sources are tried again.
        """
        if any(row.get(key) != value for key, value in self.conditions().items()):
            return False
        if "reason" in row:
            return bool(row["reason"] != "unreadable")
        file = self.output_dir / self.name
        is_there = file.is_file() and file.stat().st_size == row["bytes"]
        return row["path"] == self.name and (is_there or row["sha256"] in sums)


def recipe_of(config: VaePrepareConfig) -> JournalRow:
    """Returns the settings on which a prepared picture depends."""
    recipe = {**vars(config), "max_pixels": config.max_pixels}
    del recipe["max_megapixels"]  # Journals have held the limit in pixels from the first version on.
    if config.image_channels == VaePrepareConfig.image_channels:  # The first journals had no other.
        del recipe["image_channels"]
    return recipe


@dataclass
class Journal:
    """Results of earlier runs: a row for each source, after a head with the folder of the sources."""

    path: Path
    head: JournalRow
    rows: dict[str, JournalRow]

    @classmethod
    def open(cls, input_dir: Path, output_dir: Path) -> "Journal":
        """Reads the journal of an output folder. Raises UserError if the folder contains anything else."""
        path, head = output_dir / JOURNAL, {"input_dir": str(input_dir.resolve())}
        try:
            lines = path.read_text(encoding="ascii", errors="replace").splitlines()
        except (FileNotFoundError, NotADirectoryError):
            if output_dir.is_dir() and any(not file.name.startswith(".") for file in output_dir.iterdir()):
                raise UserError(
                    f"{output_dir}: holds files that were not prepared here", hint="choose an empty or a new folder"
                ) from None
            return cls(path, head, {})
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})", hint="choose another folder") from None
        found, *rows = [row for row in map(_parsed, lines) if row] or [{}]
        if found != head:
            raise UserError(
                f"{output_dir}: was prepared from {found.get('input_dir', 'an unknown folder')}, not from {input_dir}",
                hint="choose another output folder, or delete this one first",
            )
        return cls(path, head, {row["source"]: row for row in rows})

    def check_recipe(self, recipe: JournalRow) -> None:
        """Raises UserError if the folder has pictures of other settings, which would be replaced."""
        default = vars(VaePrepareConfig())
        for row in self.rows.values():
            before = row.get("recipe", {}) if "path" in row else recipe
            was = [
                f"{name} {before.get(name, default[name])}, not {recipe.get(name, default[name])}"
                for name in LOOKS
                if before.get(name) != recipe.get(name)
            ]
            if was:
                raise UserError(
                    f"{self.path.parent}: its pictures were prepared with other settings: {'; '.join(was)}",
                    hint="choose another --output-dir; --overwrite replaces these pictures",
                )

    def keep(self, jobs: Sequence["PictureJob"]) -> set[str]:
        """Returns the sources of the jobs whose earlier result still holds; removes all other rows and their pictures.

        If jobs remain, it also removes the manifest, which is written when all jobs are done.
        """
        rows: dict[str, JournalRow] = {}
        sums: set[str] = set()
        for job in jobs:
            row = self.rows.get(job.source.path)
            if row is not None and job.is_done(row, sums):
                rows[job.source.path] = row
                sums.add(row.get("sha256", ""))
        outdated = [row["path"] for source, row in self.rows.items() if source not in rows and "path" in row]
        folder = self.path.parent
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            if outdated or len(rows) < len(jobs):
                (folder / MANIFEST).unlink(missing_ok=True)
            for path in outdated:
                (folder / path).unlink(missing_ok=True)
        self.write(rows.values())
        return set(rows)

    def write(self, rows: Iterable[JournalRow]) -> None:
        self.rows = {row["source"]: row for row in rows}
        write_rows(self.path, [self.head, *self.rows.values()])

    def append(self, row: JournalRow) -> None:
        self.rows[row["source"]] = row
        with writing(self.path), self.path.open("a", encoding="ascii") as file:
            file.write(json.dumps(row) + "\n")


def _parsed(line: str) -> JournalRow | None:
    """Parses a line of the journal. Returns None for an incomplete line, which a killed run may leave."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
