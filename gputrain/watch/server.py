"""The server of `gputrain watch`: its port and address, and its end; and --watch of the train commands, which starts it
beside a training.

Beside a training it is a process of its own, in a session of its own, so that a Ctrl-C in the terminal only reaches the
training. Its standard input is a pipe that closes when the training ends, however that comes about: then it ends, too.
"""

import contextlib
import errno
import ipaddress
import logging
import os
import platform
import re
import secrets
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from werkzeug.serving import ThreadedWSGIServer, WSGIRequestHandler, get_interface_ip

from gputrain.engine.data import describe_exit
from gputrain.engine.run_folder import history_size
from gputrain.engine.schedule import Saving
from gputrain.errors import UserError
from gputrain.hw.ranks import Ranks
from gputrain.watch.app import HEADERS, WatchApp
from gputrain.watch.options import PARENT, PORT, WatchSettings

log = logging.getLogger(__name__)

TOKEN = "GPUTRAIN_WATCH_TOKEN"  # Keeps the token over restarts.
SILENT_SECONDS = 60.0  # A client that sends or takes nothing for so long loses its connection.
PARENT_SECONDS = 10.0  # Time in which a page shows that its training has ended.


class Handler(WSGIRequestHandler):
    """Reads one request and sends its answer."""

    timeout = SILENT_SECONDS
    default_request_version = "HTTP/1.1"  # Otherwise an answer to what is no request would have no headers.

    def version_string(self) -> str:
        return "gputrain"

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Print nothing: a page asks every two seconds."""

    def log_error(self, format: str, *args: Any) -> None:
        """Print nothing, whatever a client sends."""

    def run_wsgi(self) -> None:
        try:
            super().run_wsgi()
        except ValueError:  # An address that is none.
            self.send_error(400)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a request that is not HTTP as it should be, without any of its words."""
        self.send_response(code)
        for header in {**HEADERS, "Content-Length": "0", "Connection": "close"}.items():
            self.send_header(*header)
        self.end_headers()


class PageServer(ThreadedWSGIServer):
    """A server with a thread for each connection."""

    def __init__(self, listening: socket.socket, app: Any) -> None:
        host, port = listening.getsockname()[:2]
        super().__init__(host, port, app, Handler, passthrough_errors=True, fd=listening.fileno())
        listening.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):  # The client has gone away.
            log.error("a request failed: %r", error)


def serve(settings: WatchSettings, say: Callable[[str], None]) -> None:
    """Serve the page until a signal ends it. `say` prints its address. Raises UserError if the address or the port is
    not to be had."""
    has_parent = bool(os.environ.get(PARENT))
    with (
        contextlib.suppress(KeyboardInterrupt),
        listen(settings.host, settings.port, or_next=has_parent) as listening,
    ):
        host, port = listening.getsockname()[:2]
        is_local = ipaddress.ip_address(host.partition("%")[0]).is_loopback
        token = token_of(is_local and not settings.allow_control, os.environ.get(TOKEN, ""))
        # After the port is known to be free: importing torch takes a second.
        from gputrain.report.media import LiveMedia
        from gputrain.watch.pages import Pages, act
        from gputrain.watch.runs import Runs

        controls, runs, media = settings.allow_control, Runs(settings.watched), LiveMedia()
        pages = Pages(runs, media, controls=controls)
        app = WatchApp(runs, media, pages, token=token, act=partial(act, runs) if controls else None)
        server = PageServer(listening, app)
        runs.start()
        say(address(host, port, token))
        log.info("%s", introduction(settings, port, is_local))
        if has_parent:
            threading.Thread(target=end_after_parent, args=(server,), daemon=True).start()
        server.serve_forever()


HOSTS = "--host 127.0.0.1 is for this machine alone, --host 0.0.0.0 for others too"
FAULTS = {
    errno.EADDRINUSE: (
        "port {} is taken by another program",
        "--port 0 takes any free one; is another gputrain watch open in a browser?",
    ),
    errno.EACCES: ("port {} may not be used", f"--port {PORT}; those below 1024 are for the administrator"),
}


def listen(host: str, port: int, *, or_next: bool = False) -> socket.socket:
    """Returns a socket that listens at an address of this machine. Raises UserError if it can't."""
    try:
        found = socket.getaddrinfo(host.strip("[]") or "?", port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        raise UserError(f"{host!r} is no address", hint=HOSTS) from None
    family, _, _, _, place = min(found, key=lambda place_found: place_found[0] != socket.AF_INET)
    is_dual = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    try:
        return socket.create_server(place, family=family, backlog=128, dualstack_ipv6=is_dual)
    except OSError as error:
        if error.errno == errno.EADDRINUSE and or_next and port < 65535:
            return listen(host, port + 1, or_next=True)
        fault, hint = FAULTS.get(error.errno or 0, (f"{host} is no address of this machine", HOSTS))
        raise UserError(fault.format(port), hint=hint) from None


def token_of(is_open: bool, given: str) -> str:
    """Returns the token that a page needs, the given one or a new one; "" if it `is_open`, unless one is given. Raises
    UserError for one that is easily guessed."""
    if given and not re.fullmatch("[!-~]{16,}", given):
        hint = f"export {TOKEN}=$(python3 -c 'import secrets; print(secrets.token_urlsafe())')"
        raise UserError(f"{TOKEN} needs at least 16 letters and digits", hint=hint)
    return given or ("" if is_open else secrets.token_urlsafe())


def address(host: str, port: int, token: str) -> str:
    """Returns the address of the page for a browser, with the token if it needs one."""
    if ipaddress.ip_address(host.partition("%")[0]).is_unspecified:
        host = get_interface_ip(socket.AF_INET6 if ":" in host else socket.AF_INET)
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}/" + (f"?token={quote(token, safe='')}" if token else "")


def introduction(settings: WatchSettings, port: int, is_local: bool) -> str:
    """Returns what is shown, how to end it, and how to reach it from elsewhere."""
    faults = ["" if os.access(folder, os.R_OK | os.X_OK) else " (cannot be read yet)" for folder in settings.watched]
    folders = ", ".join(f"{folder}{fault}" for folder, fault in zip(settings.watched, faults, strict=True))
    text = f"The page shows the runs in {folders} until Ctrl-C."
    if is_local:
        text += f" From another machine: ssh -L {port}:localhost:{port} {platform.node() or 'HOST'}"
    return text


def end_after_parent(server: PageServer) -> None:
    """End the server some time after its standard input has ended, which is a pipe from the training."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        while sys.stdin.buffer.read(1024):
            pass
    time.sleep(PARENT_SECONDS)
    server.shutdown()


PROGRAM = (sys.executable, "-m", "gputrain", "watch")


@contextlib.contextmanager
def watched_beside(saving: Saving) -> Iterator[None]:
    """With --watch, serve the page of a run while the block trains, and for some seconds after it, in which open pages
    get the last state. The training waits for nothing of it, and an error of the page is a warning."""
    left, before = threading.Event(), history_size(saving.output_dir)
    page = _start(saving, left) if saving.watch and Ranks.launched(os.environ).leads else None
    try:
        yield
    finally:
        left.set()
        if page and history_size(saving.output_dir) == before:  # It has not begun: there is nothing to show.
            page.kill()
        if page and page.stdin:
            page.stdin.close()


def _start(saving: Saving, left: threading.Event) -> "subprocess.Popen[str] | None":
    # The child finds this package also where the working directory has a folder of its name.
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    words = [os.path.abspath(saving.output_dir), "--wait", *["--allow-control"] * saving.allow_control]
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", PARENT: "1"}
    try:
        page = subprocess.Popen(
            [*PROGRAM, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", env=environment, start_new_session=True,
            creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
        )  # fmt: skip
    except OSError as error:
        log.warning("--watch: the page of the run cannot be served (%s); the training goes on", error)
        return None
    threading.Thread(target=_forward, args=(page, left), name="watch", daemon=True).start()
    return page


def _forward(page: "subprocess.Popen[str]", left: threading.Event) -> None:
    """Log the address that the page's process prints, and a warning if it ends before the training."""
    assert page.stdout is not None
    fault = ""
    for line in page.stdout:
        if line.startswith("http"):
            port = urllib.parse.urlsplit(line).port
            shown, token = "the page of the run, elsewhere after ssh -L %d:localhost:%d HOST: %s", {"has_token": True}
            log.info(shown, port, port, line.strip(), extra=token)
        fault = fault or (line.strip() if line.startswith("error") else "")
    code = page.wait()
    if not left.is_set():
        reason = fault or describe_exit(code)
        log.warning("--watch: the page of the run is not served (%s); the training goes on", reason)
