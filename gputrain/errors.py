"""The only errors that a user is meant to see."""


class UserError(Exception):
    """Something in the user's input, named, with what to do about it.

    `message` says what and where (`photo.jpg: truncated`), `hint` what next (`delete it, or run gputrain
    validate`). The command line prints both without a traceback and exits with 2.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class Stopped(Exception):
    """A signal ended the run early. Everything is saved and `hint` resumes it; the exit code is 75."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
