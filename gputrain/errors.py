"""The errors that the command line shows without a traceback."""


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
    "PIL": "pillow", "parselmouth": "praat-parselmouth", "pynvml": "nvidia-ml-py", "pyworld": "pyworld-prebuilt",
    "skimage": "scikit-image", "yaml": "pyyaml",
}  # fmt: skip


def missing_package(*modules: str) -> UserError:
    """Return the error for packages that are not installed, by the names of their modules."""
    names = [DISTRIBUTIONS.get(module, module.replace("_", "-")) for module in modules]
    is_missing = f"the package {names[0]} is" if len(names) == 1 else f"the packages {', '.join(names)} are"
    return UserError(f"{is_missing} not installed", hint=f"pip install {' '.join(names)}")


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
