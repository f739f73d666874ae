"""A web server on the loopback interface whose files can be slow, cut off, changed, redirected and refused.

with serving() as server:
    file = server.add("/model.pth", content)
    file.answers = [Answer(cut_after=1000)]  # The first request is cut off, later ones are answered as usual.
    ...  # server.url("/model.pth")
    assert server.asked("/model.pth") == ["", "bytes=1000-"]
"""

import contextlib
import re
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote


@dataclass
class Answer:
    """How one request is answered: by default with the file, or with the part of it that is asked for."""

    status: int = 0  # 0: 200, 206 or 416, as follows from the request.
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | None = None  # Instead of the file's content.
    cut_after: int | None = None  # The connection ends after so many bytes of the body.
    stated_length: int | None = None  # A false Content-Length.
    is_chunked: bool = False  # No length is stated.
    delay: float = 0.0  # Seconds before it begins.
    block: int = 1 << 20  # Bytes that are sent at once,
    pause: float = 0.0  # and the seconds between them.


@dataclass
class ServedFile:
    content: bytes
    etag: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    answers: list[Answer] = field(default_factory=list)  # Those to the next requests, each used once.
    always: Answer = field(default_factory=Answer)  # That to all others.


@dataclass
class Asked:
    """A request that has arrived, and how it was answered."""

    method: str
    path: str
    headers: dict[str, str]  # By lower-case names.
    status: int = 0
    sent: int = 0  # Bytes of the body.


class WebServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, ServedFile] = {}
        self.log: list[Asked] = []

    def add(self, path: str, content: bytes = b"", **facts: object) -> ServedFile:
        """Serve a file, or an answer that is always the same: add("/x", status=404)."""
        of_answer = {
            name: facts.pop(name) for name in list(facts) if name in Answer.__dataclass_fields__ and name != "headers"
        }
        self.files[path] = ServedFile(content, **facts)  # type: ignore[arg-type]
        if of_answer:
            self.files[path].always = Answer(**of_answer)  # type: ignore[arg-type]
        return self.files[path]

    def url(self, path: str = "") -> str:
        return f"http://127.0.0.1:{self.server_port}{path}"

    def asked(self, path: str) -> list[str]:
        """Return the ranges that GET requests of a file have asked for, "" for the whole file."""
        return [one.headers.get("range", "") for one in self.log if (one.method, one.path) == ("GET", path)]

    def sent(self, path: str) -> int:
        """Return how many bytes of a file have been sent in all."""
        return sum(one.sent for one in self.log if one.path == path)

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing: clients of these tests go away in the middle of an answer."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # Otherwise a body waits 40 ms for the acknowledgement of its headers.
    server: WebServer

    def do_GET(self) -> None:
        path = unquote(self.path)
        path = path if path in self.server.files else path.partition("?")[0]
        asked = Asked(self.command, path, {name.lower(): value for name, value in self.headers.items()})
        self.server.log.append(asked)
        file = self.server.files.get(path) or ServedFile(b"no such file", always=Answer(404))
        answer = file.answers.pop(0) if file.answers else file.always
        threading.Event().wait(answer.delay)  # Tests that try again have no time.sleep.
        self.answer(asked, file, answer)

    do_HEAD = do_GET

    def answer(self, asked: Asked, file: ServedFile, answer: Answer) -> None:
        content = file.content if answer.body is None else answer.body
        headers = {"Accept-Ranges": "bytes", **({"ETag": file.etag} if file.etag else {}), **file.headers}
        status, start = answer.status or 200, 0
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", asked.headers.get("range", ""))
        if_range = asked.headers.get("if-range", file.etag)
        if found and not answer.status and if_range in (file.etag, headers.get("Last-Modified")):
            start, end = int(found[1]), int(found[2] or len(content) - 1) + 1
            status, whole = (206, len(content)) if start < len(content) else (416, len(content))
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{whole}" if status == 206 else f"bytes */{whole}"
            content = content[start:end] if status == 206 else b""
        asked.status = status
        self.send_response(status)
        if answer.is_chunked:
            headers["Transfer-Encoding"] = "chunked"
        else:
            headers["Content-Length"] = str(len(content) if answer.stated_length is None else answer.stated_length)
        for name, value in {**headers, **answer.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.send(asked, content, answer)

    def send(self, asked: Asked, content: bytes, answer: Answer) -> None:
        kept = content if answer.cut_after is None else content[: answer.cut_after]
        for place in range(0, len(kept), answer.block):
            block = kept[place : place + answer.block]
            self.wfile.write(b"%x\r\n%s\r\n" % (len(block), block) if answer.is_chunked else block)
            asked.sent += len(block)
            time.sleep(answer.pause)
        if answer.cut_after is not None:
            self.close_connection = True
        elif answer.is_chunked:
            self.wfile.write(b"0\r\n\r\n")
        if answer.stated_length is not None:
            self.close_connection = True

    def log_message(self, *arguments: object) -> None:
        """Print nothing."""


@contextlib.contextmanager
def serving() -> Iterator[WebServer]:
    """Serve on a free port of 127.0.0.1 until the block ends."""
    server = WebServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextlib.contextmanager
def silent_server(*, accepts: bool) -> Iterator[str]:
    """Give the address of a server that never says anything, and takes connections or lets them wait."""
    with socket.create_server(("127.0.0.1", 0), backlog=50 if accepts else 0) as server, contextlib.ExitStack() as held:
        for _ in range(0 if accepts else 3):  # Those that wait fill the queue; what comes then is not even refused.
            one = held.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(server.getsockname())
        yield f"127.0.0.1:{server.getsockname()[1]}"
