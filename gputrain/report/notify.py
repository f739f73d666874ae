"""Sends messages about a run by apprise: when it ends, however it ends, and when an evaluation is better than before.

Addresses hold tokens, and are never logged or stored. Only the last message is waited for, some seconds, and a failure
of one causes a warning and nothing else.
"""

import contextlib
import logging
import os
import threading
import time

from gputrain.engine.run_folder import history_size
from gputrain.engine.schedule import Saving
from gputrain.engine.stop import format_duration
from gputrain.errors import Stopped, UserError, first_line, import_package, without_secrets
from gputrain.hw.ranks import Ranks
from gputrain.kinds import ModelKind
from gputrain.report.media import MediaBudget
from gputrain.report.page import RunView, next_commands, seconds_left
from gputrain.report.records import read_run

log = logging.getLogger(__name__)

VARIABLE = "GPUTRAIN_NOTIFY"
QUIET_SECONDS = 1800.0  # Least time between two messages about evaluations.
END_SECONDS = 5.0  # Time that the end of a command waits for the last message to be taken.


class Messages(logging.Handler):
    """Sends the messages of the run that the `with` block trains, if there are addresses and this rank leads."""

    def __init__(self, kind: ModelKind, saving: Saving) -> None:
        """Raises UserError for an address that apprise does not know, and without that package."""
        super().__init__()
        self.saving, self.quiet_until, self.before = saving, 0.0, history_size(saving.output_dir)
        self.title = f"gputrain {kind.command}, {os.path.basename(os.path.realpath(saving.output_dir))}"
        given = [*saving.notify, *os.environ.get(VARIABLE, "").split()]
        self.addresses = given if Ranks.launched(os.environ).leads else []
        if self.addresses:
            self.apprise = import_package("apprise", needed_by="--notify")
            logging.getLogger("apprise").disabled = True  # It logs addresses.
        for number, address in enumerate(self.addresses, start=1):
            if not self.apprise.Apprise().add(address):
                raise UserError(
                    f"notify: address {number} of {len(given)} is none that apprise knows",
                    hint="such as ntfy://TOPIC or mailto://USER:PASSWORD@gmail.com; https://appriseit.com lists all",
                )

    def __enter__(self) -> None:
        logging.getLogger("gputrain").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "is_better", False) and time.monotonic() >= self.quiet_until:
            self.quiet_until = time.monotonic() + QUIET_SECONDS
            with contextlib.suppress(RuntimeError):  # No thread can be started; the training goes on.
                self.send("better than before", record.getMessage())

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        logging.getLogger("gputrain").removeHandler(self)
        if not self.addresses or (error is None and history_size(self.saving.output_dir) == self.before):
            return  # Of a run without a step to make, there is nothing to tell.
        until = time.monotonic() + min(END_SECONDS, seconds_left(self.saving) / 2)
        try:
            for thread in self.send(*self.outcome(error)):
                thread.join(max(0.0, until - time.monotonic()))
                if thread.is_alive():
                    log.warning("--notify: %s has not taken the last message, and is not waited for", thread.name)
        except (Exception, KeyboardInterrupt) as failure:  # The outcome of the run stays as it is.
            log.warning("--notify: the last message is not sent (%s)", type(failure).__name__)

    def send(self, what: str, body: str) -> list[threading.Thread]:
        """Begins to send a message to every address, each in a thread of its own."""

        def deliver(address: str) -> None:
            try:
                done = self.apprise.Apprise(address).notify(body, title=f"{self.title}: {what}")
            except Exception:  # Its text may hold the address.
                done = False
            if not done:
                log.warning("--notify: %s has not taken a message", threading.current_thread().name)

        threads = [
            threading.Thread(target=deliver, args=(address,), name=f"address {number}", daemon=True)
            for number, address in enumerate(self.addresses, start=1)
        ]
        for thread in threads:
            thread.start()
        return threads

    def outcome(self, error: BaseException | None) -> tuple[str, str]:
        """Returns how the run has ended, and in lines what a user wants to know then."""
        hint = str(getattr(error, "hint", ""))
        if history_size(self.saving.output_dir) == self.before:  # It has not begun.
            state = "stopped" if isinstance(error, (Stopped, KeyboardInterrupt)) else "failed"
            return state, without_secrets(f"{first_line(error)}\n{hint}")
        view = RunView(record := read_run(self.saving.output_dir), 0, MediaBudget.of(0.0))
        lines = [view.status.detail, f"step {record.last_step:,} after {format_duration(record.seconds)}"]
        lines += [f"{best.title} {best.value}, {best.detail}"] if (best := view.headline) else []
        lines += [hint or next_commands(record)[0].line] if view.status.state != "finished" else []
        return view.status.state, without_secrets("\n".join(filter(None, lines)))
