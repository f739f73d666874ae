"""Answers the requests of browsers to `gputrain watch`, and decides who may ask. No text of a request becomes a path:
runs and media are looked up by their names."""

import gzip
import hmac
import io
import json
import logging
import re
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from werkzeug.exceptions import HTTPException
from werkzeug.utils import send_file
from werkzeug.wrappers import Request, Response

from gputrain.errors import UserError

if TYPE_CHECKING:
    from gputrain.report.media import LiveMedia
    from gputrain.watch.pages import Pages
    from gputrain.watch.runs import Runs

log = logging.getLogger(__name__)

T = TypeVar("T")
Act = Callable[[Mapping[str, object]], str]

LOOPBACK_HOST = re.compile(r"(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d{1,5})?", re.IGNORECASE | re.ASCII)
MOST_RUNS = 12  # Runs that one page compares.
MOST_BYTES = 65_536  # Of a body.
WRONG_TOKEN_SECONDS = 0.3  # After a wrong token, only its sender waits.
COMPRESSED_BYTES = 1024  # Longer texts are compressed.
BLOCK = 1 << 16  # Bytes that are sent at once: a slow connection has its time for each block.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Refusal(Exception):
    """A request that is not answered as it wishes: the status, and a sentence that says why and what next."""

    def __init__(self, status: int, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status, self.message, self.headers = status, message, headers


class WatchApp:
    """The pages of runs as a WSGI application.

    Without a `token`, whoever reaches the port may look, under a name of this machine alone: otherwise any site could
    read the page through its visitors, by a name of its own that leads to 127.0.0.1. `act` is None without
    --allow-control.
    """

    def __init__(
        self, runs: "Runs", media: "LiveMedia", pages: "Pages", *, token: str, port: int, act: Act | None
    ) -> None:
        self.runs, self.media, self.pages, self.token, self.act = runs, media, pages, token, act
        self.cookie = f"gputrain_{port}"  # Cookies of one host are shared by all its ports.
        self.routes = {"/": self._page, "/update": self._update, "/act": self._act}
        self._faults: set[str] = set()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        request = Request(environ)
        request.max_content_length = MOST_BYTES
        try:
            response = self._answer(request)
        except Refusal as refused:
            response = self._refusal(request, refused.status, refused.message)
            response.headers.extend(refused.headers)
        except HTTPException as error:  # What werkzeug refuses: a range, or a body that is too long or not whole.
            response = self._refusal(request, error.code or 400, error.name)
        except Exception as error:
            self._note(error)
            response = self._refusal(request, 500, "an internal error, which the terminal of gputrain watch shows")
        return finished(response, request)(environ, start_response)

    def _answer(self, request: Request) -> Response:
        answer: Callable[[Request], Response] | None = self.routes.get(request.path)
        if request.path.startswith("/media/"):
            answer = self._medium
        allowed = "POST" if request.path == "/act" else "GET, HEAD"
        if (entered := self._enter(request)) is not None:
            return entered
        if answer is None:
            raise Refusal(404, "there is nothing at this address")
        if request.method not in allowed.split(", "):
            raise Refusal(405, f"only {allowed} is possible here", Allow=allowed)
        return answer(request)

    # ------------------------------------------------------------------------------------------------------- access

    def _enter(self, request: Request) -> Response | None:
        """Raise Refusal for whoever may not look. Returns the answer to the address with the token."""
        if not self.token:
            if not LOOPBACK_HOST.fullmatch(request.headers.get("Host", "")):
                raise Refusal(
                    403, "this page is served as localhost or 127.0.0.1 only; behind a proxy with another name, set "
                    "GPUTRAIN_WATCH_TOKEN for gputrain watch"
                )  # fmt: skip
            return None
        given = request.args.getlist("token")
        if given and request.path == "/" and request.method in ("GET", "HEAD"):
            if len(given) == 1 and self._is_token(given[0]):
                return self._welcome(request)
        elif not given:
            bearer = request.headers.get("Authorization", "")
            given = [bearer[7:]] if bearer[:7].lower() == "bearer " else request.cookies.getlist(self.cookie)
            if any(self._is_token(one) for one in given):
                return None
        if given:
            time.sleep(WRONG_TOKEN_SECONDS)
        raise Refusal(403, "this page needs its token: open the address that gputrain watch has printed, ?token=...")

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode("utf-8", "replace"), self.token.encode())

    def _welcome(self, request: Request) -> Response:
        """Returns an answer that keeps the token in a cookie, and leads to the address without it."""
        runs = [id for id in request.args.getlist("run") if re.fullmatch("[0-9a-f]{10}", id)]
        address = "./" + ("?" + "&".join(f"run={id}" for id in runs) if runs else "")
        response = Response("The page is at the address without the token.\n", 303, {"Location": address})
        if request.headers.get("Sec-Fetch-Site") == "cross-site":
            # After a link on another site, a browser would follow a redirection without the cookie.
            response = Response("The page opens.\n", 200, {"Refresh": f"0; url={address}"})
        response.set_cookie(self.cookie, self.token, path=None, httponly=True, samesite="Strict")
        return response

    # ------------------------------------------------------------------------------------------------------ answers

    def _made(self, request: Request, make: Callable[[list[str]], T]) -> T:
        """Returns what is made of the runs that a request names, after they have been read. Raises Refusal for unknown
        ones."""
        ids = list(dict.fromkeys(request.args.getlist("run")))
        if len(ids) > MOST_RUNS:
            raise Refusal(400, f"{len(ids)} runs, but at most {MOST_RUNS} are compared")
        self.runs.touch(ids)
        try:
            return make(ids)
        except KeyError:
            if set(ids) <= set(self.runs.ids()):
                raise
            raise Refusal(404, "there is no such run in the folders that are watched (any more)") from None

    def _page(self, request: Request) -> Response:
        html, policy = self._made(request, self.pages.page)
        return Response(encoded(html), mimetype="text/html", headers={"Content-Security-Policy": policy})

    def _update(self, request: Request) -> Response:
        have = set(request.args.get("have", "").split(","))
        return in_json(self._made(request, lambda ids: self.pages.update(ids, have)))

    def _medium(self, request: Request) -> Response:
        name = request.path.removeprefix("/media/")
        if (found := self.media.get(name)) is None:
            raise Refusal(404, "there is no such picture or sound (any more)")
        response = send_file(io.BytesIO(found[1]), request.environ, found[0], etag=name)
        response.headers["Cache-Control"] = "private, max-age=31536000, immutable"
        return response

    def _act(self, request: Request) -> Response:
        if self.act is None:
            raise Refusal(403, "gputrain watch was started without --allow-control")
        if request.headers.get("X-Gputrain") != "1" or request.headers.get("Origin") == "null":
            raise Refusal(403, "only the page itself may ask for actions")
        if request.headers.get("Sec-Fetch-Site", "same-origin") != "same-origin":
            raise Refusal(403, "another site may not ask for actions")
        if request.mimetype != "application/json":
            raise Refusal(415, "expected JSON")
        if request.content_length is None:  # werkzeug cuts off a longer body that comes in chunks.
            raise Refusal(411, "the length of the body is missing")
        try:
            content = json.loads(request.get_data(), parse_constant=no_number)
        except (ValueError, RecursionError):
            raise Refusal(400, "this is not JSON") from None
        if not isinstance(content, dict):
            raise Refusal(400, "expected a JSON object")
        try:
            return in_json({"message": self.act(content)})
        except UserError as error:
            return in_json({"message": error.message, "hint": error.hint}, 409)

    # ----------------------------------------------------------------------------------------------------- refusals

    def _refusal(self, request: Request, status: int, message: str) -> Response:
        if request.path in ("/update", "/act"):
            return in_json({"message": message}, status)
        return Response(f"{message}\n", status)

    def _note(self, error: Exception) -> None:
        """Print an internal error with its traceback, each one once."""
        text = "".join(traceback.format_exception(error)).rstrip()
        if text not in self._faults and len(self._faults) < 100:
            self._faults.add(text)
            log.error("internal error of gputrain, please report it:\n  %s", text.replace("\n", "\n  "))


def no_number(text: str) -> None:
    """Raises ValueError for NaN and infinities, which are not JSON."""
    raise ValueError(text)


def encoded(text: str) -> bytes:
    return text.encode("utf-8", "replace")  # Names of files may contain bytes that are no UTF-8.


def in_json(content: object, status: int = 200) -> Response:
    return Response(encoded(json.dumps(content, ensure_ascii=False)), status, mimetype="application/json")


def finished(response: Response, request: Request) -> Response:
    """Returns an answer with the headers of every answer, compressed if the browser can read that and it is a long
    text, and in blocks."""
    for name, value in HEADERS.items():
        response.headers.setdefault(name, value)
    if not response.direct_passthrough:
        content = response.get_data()
        if len(content) > COMPRESSED_BYTES:
            response.headers["Vary"] = "Accept-Encoding"
            if request.accept_encodings.quality("gzip") > 0:
                content = gzip.compress(content, 5, mtime=0)
                response.headers["Content-Encoding"] = "gzip"
        response.response = blocks(content)
        response.content_length = len(content)
    return response


def blocks(content: bytes) -> Iterator[bytes]:
    for start in range(0, len(content), BLOCK):
        yield content[start : start + BLOCK]
