"""The errors that the command line shows without a traceback, one of them for packages that are not installed."""

import re
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any


class UserError(Exception):
    """An error in the user's input.

    `message` says what is wrong and where (`photo.jpg: truncated`), `hint` what to do next (`copy it again, or run
    gputrain validate`). The command line prints both without a traceback and exits with 2.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


# Names under which pip knows modules that have another name.
DISTRIBUTIONS = {
    "PIL": "pillow", "parselmouth": "praat-parselmouth", "piper": "piper-tts",
    "pynvml": "nvidia-ml-py",
    "pyworld": "pyworld-prebuilt", "skimage": "scikit-image", "yaml": "pyyaml",
}  # fmt: skip


def missing_package(*modules: str, needed_by: str = "", otherwise: str = "") -> UserError:
    """Return the error for packages that are not installed, by the names of their modules.

    `needed_by` is what needs them, `otherwise` what does without them. The hint installs them by their own names: an
    extra of gputrain would have pip look for that name in an index, where it may be anyone's.
    """
    names = [_distribution(module) for module in modules]
    is_missing = f"the package {names[0]} is" if len(names) == 1 else f"the packages {', '.join(names)} are"
    message = f"{needed_by}: {is_missing} not installed" if needed_by else f"{is_missing} not installed"
    return UserError(message, hint=_either(f"pip install {' '.join(names)}", otherwise))


def require(*modules: str, needed_by: str = "", otherwise: str = "") -> None:
    """Raise UserError, as `missing_package` words it, unless all modules are installed. Imports none of them.

    Commands call it at their start, so that no work is lost where a module is imported at their end.
    """
    if missing := [module for module in modules if not is_installed(module)]:
        raise missing_package(*missing, needed_by=needed_by, otherwise=otherwise)


def is_installed(module: str) -> bool:
    """Return True if a module at the top of a package can be found."""
    return sys.modules.get(module) is not None or find_spec(module) is not None


def import_package(module: str, *beside: str, needed_by: str = "", otherwise: str = "") -> Any:
    """Import a module, or raise UserError if its package, or one `beside` it, is missing or does not work here."""
    require(module, *beside, needed_by=needed_by, otherwise=otherwise)
    try:
        return import_module(module)
    except (ImportError, OSError, RuntimeError) as error:
        # pybind11 makes an ImportError of Ctrl-C that arrives while a compiled module initialises.
        if isinstance(error.__cause__, KeyboardInterrupt) or str(error).startswith("KeyboardInterrupt"):
            raise KeyboardInterrupt from error
        name = _distribution(module)
        raise UserError(
            f"the package {name} cannot be imported: {first_line(error)}",
            hint=_either(f"pip install --force-reinstall {name}", otherwise),
        ) from None


def _distribution(module: str) -> str:
    return DISTRIBUTIONS.get(module, module.replace("_", "-"))


def _either(remedy: str, other: str) -> str:
    return f"{remedy}, or {other}" if other else remedy


SECRETS = (
    re.compile(r"(\b(?:https?|ftp|s3|gs):/{1,2})[^\s/@'\"]*@()"),  # The user and the password.
    re.compile(r"(\b[a-z][a-z0-9+.-]+://)[^\s/@:'\"]*:[^\s/@'\"]*@()"),
    re.compile(r"(\b(?:https?|ftp|s3|gs):/{1,2}[^\s?'\"]*)\?[^\s'\"]*?([:,;.)\]]*(?=[\s'\"]|$))"),
    re.compile(r"(\bhf_)\w{20,}()"),
)


def without_secrets(text: str) -> str:
    """Returns a text without tokens of the Hub, and its addresses without their queries and passwords."""
    for secret in SECRETS:
        text = secret.sub(r"\1\2", text)
    return text


def settings_without_secrets(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings as others may see them: init_from may be an address with a password."""
    return {name: without_secrets(value) if isinstance(value, str) else value for name, value in settings.items()}


def first_line(error: object) -> str:
    """Return the first line of an error's message, or the name of its type if it has none.

    A line that ends with a colon goes on in the next one: torch names the weights that don't fit below such a line.
    """
    lines = str(error).splitlines() or [type(error).__name__]
    return " ".join(line.strip() for line in lines[: 2 if lines[0].endswith(":") else 1])


class Stopped(Exception):
    """A signal ended the run early. Everything is saved; `hint` says how to resume. The exit code is 75."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
