"""Translates openvpi's configuration files: each key becomes an option of ours, has no effect, or is refused.

`translate` follows the table of openvpi_keys.yaml, and so does docs/vocoder_keys.md, which
`python -m gputrain.vocoder.openvpi` writes. Imports no torch.
"""

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gputrain.audio.config import Sound
from gputrain.config import convert, leaves, read_file, retired, unknown_key
from gputrain.errors import UserError
from gputrain.vocoder.config import PlanVocoder
from gputrain.vocoder.openvpi_keys import BOTH, NOTHING, Command, Ignored, Key, known_keys

log = logging.getLogger(__name__)

PAGE = Path(__file__).parents[2] / "docs" / "vocoder_keys.md"
PROFILES = Path(__file__).parent / "profiles"

TRAINING, RETIRED = leaves(PlanVocoder), retired(PlanVocoder)
PREPARATION = {**leaves(Sound), "num_workers": TRAINING["num_workers"]}
# Our options, by all their names.
OURS = {
    command: {name: leaf for leaf in known.values() for name in leaf.names}
    for command, known in {"train": TRAINING, "prepare": PREPARATION}.items()
}


@functools.cache
def blocks() -> set[str]:
    """Returns model_args, generater_optimizer_args, generater_optimizer_args.muon_args, ..."""
    return {name[:end] for name in known_keys() for end, letter in enumerate(name) if letter == "."}


def translate(content: dict[str, object], source: Path, *, of: Command) -> dict[str, object]:
    """Returns our keys and values for the content of a file of openvpi's; our keys in it are kept.

    One file serves both commands: keys of the other one are ignored. With `of="prepare"`, `kind` becomes vocoder. A
    file without keys of openvpi's is returned unchanged. Raises UserError that lists all refused keys.
    """
    file = read_with_bases(content, source)
    theirs = known_keys().keys() - TRAINING.keys() - PREPARATION.keys()
    if "base_config" not in content and not any("." in name or name in theirs for name in file.values):
        return content
    made: dict[str, object] = {"kind": "vocoder"} if of == "prepare" else {}
    written: dict[str, str] = {}
    problems: list[tuple[Path, UserError]] = []
    for name in file.values:
        try:
            for option, value in file.options(name, of).items():
                if option in written:
                    raise UserError(
                        f"{written[option]} and {name} are the same option, {option}", hint="keep one of them"
                    )
                written[option], made[option] = name, value
        except UserError as error:
            problems.append((file.origins[name], error))
    if problems:
        raise _together(problems, source)
    if of == "train":
        made.setdefault("use_stftloss", False)  # openvpi's default.
    return shared_where_equal(made)


def shared_where_equal(made: dict[str, object]) -> dict[str, object]:
    """Returns options whose discriminators follow the generator where both networks are given the same value, so that
    --learning-rate sets both."""
    own = {f"discriminator_{name}": name for name in ("learning_rate", "beta1", "beta2")}
    return {name: value for name, value in made.items() if name not in own or value != made.get(own[name])}


def _together(problems: list[tuple[Path, UserError]], source: Path) -> UserError:
    if len(problems) == 1:
        path, error = problems[0]
        return UserError(f"{path}: {error.message}", hint=error.hint)
    lines = [f"{source}: {len(problems)} keys cannot be translated"]
    for path, error in problems:
        where = "" if path == source else f"{path}: "
        lines.append(f"  {where}{error.message}" + (f" ({error.hint})" if error.hint else ""))
    return UserError("\n".join(lines), hint="docs/vocoder_keys.md explains each key")


@dataclass(frozen=True)
class File:
    """All keys of a file and of its base files, nested ones joined by dots, with the file of each."""

    values: dict[str, object]
    origins: dict[str, Path]

    def options(self, name: str, of: Command) -> dict[str, object]:
        """Returns the options that one key becomes, converted."""
        key = known_keys().get(name)
        if key is None:
            return self._own(name, of)
        if of not in key.of:
            return {}
        value = self.values[name]
        if value is None and key.null_is is NOTHING:
            raise UserError(f"{name} is null", hint="leave the key out for its default; off is 0 or false")
        value = key.null_is if value is None else value
        try:
            outcome = key.turn(value, self.values)
        except UserError as error:
            raise UserError(f"{name} is {value!r}: {error.message}", hint=error.hint) from None
        if isinstance(outcome, Ignored):
            log.warning("%s: %s is ignored: %s", self.origins[name], name, outcome.why)
            return {}
        return {option: convert(OURS[of][option], given, name=name) for option, given in outcome.items()}

    def _own(self, name: str, of: Command) -> dict[str, object]:
        """Returns the option of a key that is not openvpi's."""
        if name in OURS[of]:
            leaf = OURS[of][name]
            return {leaf.name: convert(leaf, self.values[name], name=name)}
        if name in RETIRED and of == "train":
            return {name: self.values[name]}  # It is reported with our other keys.
        if name in OURS["train"] or name in OURS["prepare"] or name in RETIRED:
            return {}
        if of == "prepare" and name.partition(".")[0] not in blocks():
            return {name: self.values[name]}  # prepare-data has more options and checks them.
        raise unknown_key(name, {**known_keys(), **OURS["train"], **dict.fromkeys(blocks())})

    def over(self, base: "File") -> "File":
        """Returns this file's keys and those of its base that it does not set. A key outside of a block overrides the
        base's keys in blocks that become the same option, such as `lr` and `generater_optimizer_args.lr`."""
        given = {one for name in self.values if "." not in name for one in options_of_key(name)}
        left = {
            name: value
            for name, value in base.values.items()
            if name in self.values or not given & options_of_key(name, with_weak=False)
        }
        return File({**left, **self.values}, {**base.origins, **self.origins})


def options_of_key(name: str, *, with_weak: bool = True) -> set[tuple[Command, str]]:
    """Returns the commands and options that a key may become, with or without its weak ones."""
    if key := known_keys().get(name):
        options = set(key.options) - (set() if with_weak else set(key.weak))
        return {(command, option) for command in key.of for option in options}
    return {(command, OURS[command][name].name) for command in BOTH if name in OURS[command]}


def read_with_bases(content: Mapping[str, object], source: Path, chain: tuple[Path, ...] = ()) -> File:
    """Reads a file's content with that of its base files; `chain` are the files that refer to it.

    Raises UserError if a base is missing or refers back, or a block has no keys.
    """
    chain = (*chain, source.resolve())
    bases = content.get("base_config", [])
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise UserError(f"{source}: base_config is {bases!r}, expected a list of paths")
    below = File({}, {})
    for base in bases:
        path = _find_base(base, source)
        if path.resolve() in chain:
            raise UserError(f"{source}: base_config {base} refers back to this file", hint="remove it from one of them")
        below = read_with_bases(read_file(path), path, chain).over(below)
    values = _joined({name: value for name, value in content.items() if name != "base_config"}, source)
    return File(values, dict.fromkeys(values, source)).over(below)


def _find_base(base: str, source: Path) -> Path:
    """Looks next to the file, in its parent, in a checkout with a folder `configs` above it, and among our profiles."""
    folder = source.resolve().parent
    checkouts = [above.parent for above in (folder, *folder.parents) if above.name == "configs"]
    for place in (folder, folder.parent, *checkouts, PROFILES):
        if (place / base).is_file():
            return place / base
    raise UserError(
        f"{source}: base_config {base} does not exist",
        hint="put it next to this file, or omit base_config: every key has a default",
    )


def _joined(content: Mapping[str, object], source: Path, prefix: str = "") -> dict[str, object]:
    """Returns the keys with those of blocks joined to the block's name by a dot, which files may use too."""
    made: dict[str, object] = {}
    for key, value in content.items():
        name = f"{prefix}{key}"
        if name in blocks() and not isinstance(value, dict):
            found = "null" if value is None else repr(value)
            raise UserError(f"{source}: {name} is {found}, expected keys and values", hint="indent them below it")
        inner = _joined(value, source, f"{name}.") if name in blocks() and isinstance(value, dict) else {name: value}
        for twice in sorted(made.keys() & inner.keys()):
            raise UserError(f"{source}: {twice} occurs twice, in its block and with a dot", hint="keep one of them")
        made |= inner
    return made


HEAD = """# Keys of openvpi's configurations

This page lists every key of openvpi/SingingVocoders' NSF-HiFiGAN configurations and its meaning in
`gputrain train-vocoder --config` and `gputrain prepare-data --config`. A key may be in its block or written with a dot,
`binarization_args.num_workers: 16`; a file may also contain keys of gputrain. The files of `base_config` are searched
next to the file, in its parent folder, in the folder above `configs`, and among those that come with gputrain. null is
an error unless the remark says otherwise.

<!-- Written by `python -m gputrain.vocoder.openvpi`; a test fails when it is stale. -->
"""


def render_keys_page() -> str:
    titles = {"honoured": "Supported", "met": "Without effect", "refused": "Refused"}
    text = HEAD
    for fate, title in titles.items():
        rows = "".join(render_key_row(key) for key in known_keys().values() if key.fate == fate)
        text += f"\n## {title}\n\n| key | command | becomes | remark |\n|---|---|---|---|\n{rows}"
    return text


def render_key_row(key: Key) -> str:
    commands = {"train": "train-vocoder", "prepare": "prepare-data"}
    flags = ", ".join(f"`--{option.replace('_', '-')}`" for option in key.options)
    where = ", ".join(commands[command] for command in key.of)
    null = "" if key.null_is is NOTHING else f"null is {'0' if key.null_is == 0 else 'none'}."
    return f"| `{key.name}` | {where} | {key.words or flags} | {' '.join(filter(None, (key.remark, null)))} |\n"


if __name__ == "__main__":
    PAGE.write_text(render_keys_page(), encoding="utf-8")
