"""A server of run folders on a free port, and raw requests to it, which no client has put in order."""

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from gputrain.report.media import LiveMedia
from gputrain.watch.app import WatchApp
from gputrain.watch.runs import Runs
from gputrain.watch.server import PageServer, listen

PAGE = "<p>run ä" + "x" * 3000
POLICY = "default-src 'none'; img-src 'self'"


class PlainPages:
    """Pages that say what they were asked for."""

    def __init__(self, runs: Runs) -> None:
        self.runs = runs
        self.fault: type[Exception] | None = None

    def page(self, ids):
        if self.fault:
            raise self.fault("a defect")
        return PAGE + ",".join(id for id in ids if self.runs.record(id)), POLICY

    def update(self, ids, have):
        return {"ids": [id for id in ids if self.runs.record(id)], "have": sorted(have)}


@dataclass
class Answered:
    status: int
    headers: dict[str, str] = field(default_factory=dict)  # By lower-case names.
    body: bytes = b""
    count: int = 1  # Of the answers on the connection.

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Served:
    server: PageServer
    app: WatchApp

    @property
    def port(self) -> int:
        return self.server.port

    def send(self, request: bytes | str, timeout: float = 10.0) -> Answered:
        """Send bytes as they are, and return the answer to them."""
        with socket.create_connection(("127.0.0.1", self.port), timeout) as connection:
            connection.sendall(request if isinstance(request, bytes) else request.encode("latin-1"))
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
            received = b""
            with contextlib.suppress(ConnectionError):
                while block := connection.recv(1 << 16):
                    received += block
        head, _, body = received.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        return Answered(int(first.split()[1]), headers, body, received.count(b"HTTP/1.1 "))

    def ask(
        self, target: str = "/", *headers: str, method: str = "GET", host: str | None = "", body: str = ""
    ) -> Answered:
        """Send a request with a usual head and further headers."""
        lines = [f"{method} {target} HTTP/1.1", *([] if host is None else [f"Host: {host or 'localhost'}"]), *headers]
        if body:
            lines.append(f"Content-Length: {len(body)}")
        return self.send("\r\n".join(lines) + "\r\n\r\n" + body)

    def act(self, content: object, *headers: str, **others: Any) -> Answered:
        text = content if isinstance(content, str) else json.dumps(content)
        usual = ("Content-Type: application/json", "X-Gputrain: 1", "Sec-Fetch-Site: same-origin")
        return self.ask("/act", *usual, *headers, method="POST", body=text, **others)


@contextlib.contextmanager
def serving(runs: Runs, *, token: str = "", act: Any = None) -> Iterator[Served]:
    listening = listen("127.0.0.1", 0)
    app = WatchApp(runs, LiveMedia(), PlainPages(runs), token=token, act=act)
    server = PageServer(listening, app)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield Served(server, app)
    finally:
        server.shutdown()
        thread.join()
