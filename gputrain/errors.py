"""The errors that the command line shows without a traceback."""


class UserError(Exception):
    """An error in the user's input.

    `message` says what is wrong and where (`photo.jpg: truncated`), `hint` what to do next (`delete it, or run gputrain
    validate`). The command line prints both without a traceback and exits with 2.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class Stopped(Exception):
    """A signal ended the run early. Everything is saved; `hint` says how to resume. The exit code is 75."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
