"""Answers the requests of browsers to `gputrain watch`, and decides who may ask. No text of a request becomes a path:
runs and media are looked up by their names."""

import functools
import gzip
import hmac
import io
import json
import logging
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from werkzeug.exceptions import HTTPException, InternalServerError, MethodNotAllowed, abort
from werkzeug.utils import send_file
from werkzeug.wrappers import Request, Response

from gputrain.errors import UserError

if TYPE_CHECKING:
    from gputrain.report.media import LiveMedia
    from gputrain.watch.pages import Pages
    from gputrain.watch.runs import Runs

log = logging.getLogger(__name__)

Act = Callable[[Mapping[str, object]], str]

LOOPBACK_HOST = re.compile(r"(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d{1,5})?", re.IGNORECASE | re.ASCII)
OTHER_NAME = (
    "this page is served as localhost or 127.0.0.1 only; behind a proxy with another name, set "
    "GPUTRAIN_WATCH_TOKEN for gputrain watch"
)
MOST_RUNS = 12  # Runs that one page compares.
MOST_BYTES = 65_536  # Of a body.
COMPRESSED_BYTES = 1024  # Longer texts are compressed.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class WatchApp:
    """The pages of runs as a WSGI application.

    Without a `token`, whoever reaches the port may look, under a name of this machine alone: otherwise any site could
    read the page through its visitors, by a name of its own that leads to 127.0.0.1. `act` is None without
    --allow-control.
    """

    def __init__(self, runs: "Runs", media: "LiveMedia", pages: "Pages", *, token: str, act: Act | None) -> None:
        self.runs, self.media, self.pages, self.token, self.act = runs, media, pages, token, act
        self.routes = {"/": self._page, "/update": self._update, "/act": self._act}

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        request = Request(environ)
        request.max_content_length = MOST_BYTES
        try:
            response = self._welcome(request) or self._answer(request)
        except HTTPException as error:
            response = refusal(request, error)
        except Exception as error:
            report("".join(traceback.format_exception(error)).rstrip())
            response = refusal(request, InternalServerError("an error, which the terminal of gputrain watch shows"))
        for name, value in HEADERS.items():
            response.headers.setdefault(name, value)
        compress(response, request)
        return response(environ, start_response)

    def _welcome(self, request: Request) -> Response | None:
        """Refuse whoever may not look. Returns the answer to the address with the token, which keeps it in a cookie and
        leads to the address without it."""
        if not self.token:
            if not LOOPBACK_HOST.fullmatch(request.headers.get("Host", "")):
                abort(403, OTHER_NAME)
            return None
        # All ports of a host share their cookies: the name has our port, and the one that a browser sees of a tunnel.
        seen = re.findall(r":(\d{1,5})$", request.headers.get("Host", ""))
        cookie = "_".join(["gputrain", request.environ["SERVER_PORT"], *seen])
        if request.path == "/" and self._is_token(request.args.get("token", "")):
            runs = urlencode([("run", id) for id in request.args.getlist("run")])
            # After a link on another site, a browser would follow a redirection without the cookie.
            response = Response("The page opens.\n", 200, {"Refresh": f"0; url=./?{runs}".rstrip("?")})
            is_secure = request.headers.get("X-Forwarded-Proto") == "https"
            response.set_cookie(cookie, self.token, path=None, secure=is_secure, httponly=True, samesite="Strict")
            return response
        scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
        given = [bearer] if scheme.lower() == "bearer" else request.cookies.getlist(cookie)
        if not any(map(self._is_token, given)):
            abort(403, "this page needs its token: open the address that gputrain watch has printed, ?token=...")
        return None

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode("utf-8", "replace"), self.token.encode())

    def _answer(self, request: Request) -> Response:
        if not (make := self._medium if request.path.startswith("/media/") else self.routes.get(request.path)):
            abort(404, "there is nothing at this address")
        methods = ["POST"] if make == self._act else ["GET", "HEAD"]
        if request.method not in methods:
            raise MethodNotAllowed(methods)
        return make(request)

    @contextmanager
    def _asked(self, request: Request) -> Iterator[list[str]]:
        """Yields the names of the runs that a request asks for, after they have been read."""
        ids = list(dict.fromkeys(request.args.getlist("run")))
        if len(ids) > MOST_RUNS:
            abort(400, f"{len(ids)} runs, but at most {MOST_RUNS} are compared")
        try:
            self.runs.touch(ids)
        except TimeoutError:
            abort(503, "the disk with this run does not answer; the other runs are shown")
        with self.runs.lock:
            if not set(ids) <= set(self.runs.ids()):
                abort(404, "there is no such run in the folders that are watched (any more)")
            yield ids

    def _page(self, request: Request) -> Response:
        with self._asked(request) as ids:
            html, policy = self.pages.page(ids)
        content = html.encode("utf-8", "replace")  # Names of files may contain bytes that are no UTF-8.
        return Response(content, mimetype="text/html", headers={"Content-Security-Policy": policy})

    def _update(self, request: Request) -> Response:
        with self._asked(request) as ids:
            return in_json(self.pages.update(ids, set(request.args.get("have", "").split(","))))

    def _medium(self, request: Request) -> Response:
        name = request.path.removeprefix("/media/")
        if (found := self.media.get(name)) is None:
            abort(404, "there is no such picture or sound (any more)")
        response = send_file(io.BytesIO(found[1]), request.environ, found[0], etag=name)
        response.headers["Cache-Control"] = "private, max-age=31536000, immutable"
        return response

    def _act(self, request: Request) -> Response:
        if self.act is None:
            abort(403, "gputrain watch was started without --allow-control")
        # No other site can send the header. Browsers say where a request comes from; other programs need not.
        origin = request.headers.get("Sec-Fetch-Site", "same-origin")
        if request.headers.get("X-Gputrain") != "1" or origin != "same-origin":
            abort(403, "only the page itself may ask for actions")
        content = None
        with suppress(RecursionError):
            content = request.get_json()
        if not isinstance(content, dict):
            abort(400, "expected a JSON object")
        try:
            return in_json({"message": self.act(content)})
        except UserError as error:
            return in_json({"message": error.message, "hint": error.hint}, 409)


@functools.lru_cache(100)
def report(text: str) -> None:
    """Print an internal error with its traceback, each one once."""
    log.error("internal error of gputrain, please report it:\n  %s", text.replace("\n", "\n  "))


def in_json(content: object, status: int = 200) -> Response:
    return Response(json.dumps(content), status, mimetype="application/json")


def refusal(request: Request, error: HTTPException) -> Response:
    """Returns an answer that says why there is none, in the form that is expected at its address."""
    message, status = error.description or error.name, error.code or 500
    response = Response(f"{message}\n", status)
    if request.path in ("/update", "/act"):
        response = in_json({"message": message}, status)
    response.headers.extend(header for header in error.get_headers() if header[0] != "Content-Type")
    return response


def compress(response: Response, request: Request) -> None:
    """Compress an answer if it is a long text, and the browser can read that."""
    if not response.direct_passthrough and len(content := response.get_data()) > COMPRESSED_BYTES:
        response.vary.add("Accept-Encoding")
        if request.accept_encodings.quality("gzip") > 0:
            response.set_data(gzip.compress(content, 5, mtime=0))
            response.content_encoding = "gzip"
