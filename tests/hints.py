"""What the program advises, read back: the commands and options in its hints, and what is wrong with them.

A hint may name a command alone (`gputrain validate lists them`), or an option of the command that prints it. What
stands behind `gputrain NAME` with options is to be pasted, and must be complete.
"""

import re
import shlex
from collections.abc import Iterator
from functools import cache
from typing import Any

from gputrain.cli.app import app, command_line
from gputrain.cli.options import settings_of
from gputrain.config import Leaf, leaves
from gputrain.errors import UserError
from gputrain.hw.plan import PRECISION_SWITCHES
from tests.cli import options_page

# What a user puts in the place of these words, as far as a command line is checked before its work begins.
PLACEHOLDERS = {
    "LANGUAGE": "uz", "FOLDER": "folder", "NEW_FOLDER": "new", "RUN": "run", "MODEL": "model", "NAME": "name",
    "EXPORT": "export", "DATA": "data", "PICTURES": "pictures", "RECORDINGS": "recordings", "PREPARED": "prepared",
    "YOUR_PICTURES": "pictures", "YOUR_RECORDINGS": "recordings",
}  # fmt: skip
OF_ALL = {
    "--help",
    "--help-all",
    "--config",
    "--version",
    *(f"--{name.replace('_', '-')}" for name in PRECISION_SWITCHES),
}
# Other programs whose options are named. Of a sentence that names one, options that no command has are theirs.
OTHER_OPTIONS = {"--torch": "setup.sh", "--index-url": "pip"}
# Words behind `gputrain` in sentences about the program.
PROSE = {"trains", "contains", "writes", "does", "optimal"}
OTHERS = re.compile(r"\b(torchrun|docker|Docker|container|nvidia-smi|piper|Piper|python|pip|setup|tensorboard)\b")
WORD = re.compile(r"""\s+((?:'[^']*'|"[^"]*"|[^\s'"`])+)""")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
END = ",.;:)"


@cache
def known() -> dict[str, dict[str, Leaf]]:
    """Returns the options of every command, by all their flags."""
    return {
        name: {flag: leaf for leaf in leaves(settings).values() for flag in leaf.flags}
        for name, settings in options_page.commands(app).items()
    }


def has(command: str, flag: str) -> bool:
    return any(name in known()[command] or name in OF_ALL for name in (flag, flag.replace("--no-", "--", 1)))


def commands_in(text: str) -> Iterator[list[str]]:
    """Yields the words of each `gputrain ...` in a text, as far as they are of the command: its name, then options with
    their values, and words in capitals or quotation marks."""
    for found in re.finditer(r"(?<![\w/.-])gputrain(?= )", text):
        name, at = "", found.end()
        words: list[str] = []
        while match := WORD.match(text, at):
            word = match[1].rstrip(END)
            at = match.end()
            before = known().get(name, {}).get(words[-1].replace("--no-", "--", 1)) if words else None
            takes_value = words[-1:] == ["--config"] or (before is not None and before.plain_type is not bool)
            if name not in known():
                name = f"{name} {word}".strip()
                words = [name]
            elif OPTION.match(word) or takes_value or word.isupper() or match[1][0] in "'\"":
                words.append(word)
            else:
                break
            if match[1][-1] in END:
                break
        yield words


def faults_of_command(words: list[str]) -> list[str]:
    """Returns what is wrong with a command that a hint names: there is none such, or it lacks options."""
    if "VALUE" in words[0] or words[0].split()[0] in PROSE:
        return []
    if words[0] not in known():
        return [f"no command {words[0]}"]
    wrong = [f"{words[0]} has no {word}" for word in words if OPTION.fullmatch(word) and not has(words[0], word)]
    if not wrong and len(words) > 1 and "VALUE" not in " ".join(words):
        wrong += faults_of_line(words)
    return wrong


def faults_of_line(words: list[str]) -> list[str]:
    """Returns why the real command line refuses a command."""
    command: Any = command_line()
    name, *rest = words
    for part in name.split():
        command = command.commands[part]
    line = [PLACEHOLDERS.get(word, word) for word in shlex.split(" ".join(rest))]
    try:
        context = command.make_context(name, line)
        settings_of(options_page.commands(app)[name], context, dict(context.params))
    except UserError as error:
        return [f"{name} {' '.join(rest)}: {error.message}"]
    except Exception as error:
        return [f"{name} {' '.join(rest)}: {getattr(error, 'format_message', error.__str__)()}"]
    return []


def faults(text: str, printed_by: set[str]) -> list[str]:
    """Returns what is wrong with a hint: a command that does not exist or is not complete, and an option that none of
    the commands has that may print it, or that it names."""
    found = list(commands_in(text))
    wrong = [fault for words in found if words for fault in faults_of_command(words)]
    named = printed_by | {name for name in known() if re.search(rf"(?<![\w-]){name.split()[-1]}(?![\w-])", text)}
    within = {word for words in found for word in words}
    for flag in OPTION.findall(text):
        if (
            flag not in within
            and flag not in OTHER_OPTIONS
            and not any(has(name, flag) for name in named)
            and not OTHERS.search(text)
        ):
            wrong.append(f"no command that prints it has {flag}")
    return wrong


def check_printed(words: list[str], stdout: str, stderr: str) -> None:
    """Asserts that what a command has advised can be followed: its hints and warnings, and the commands that it prints
    to be pasted."""
    ran = next((name for size in (2, 1) if (name := " ".join(words[:size])) in known()), "")
    advice = [line for line in stderr.splitlines() if re.match("(hint|warning): ", line)]
    pasted = [line.strip().removeprefix("Next:").strip() for line in stdout.splitlines()]
    if ran and "-h" not in " ".join(words):
        advice += [line for line in pasted if line.startswith("gputrain ")]
        wrong = {line: found for line in advice if (found := faults(line, {ran}))}
        assert not wrong, wrong
