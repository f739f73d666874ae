"""Who gets which answer from the server: routes, headers, tokens, and requests that no browser sends."""

import gzip
import logging

import pytest

from gputrain.errors import UserError
from gputrain.watch.app import MOST_RUNS
from gputrain.watch.runs import Runs, id_of
from tests.report.runs import metric_rows, write_rows
from tests.tables import each_row
from tests.watch.serving import PAGE, POLICY, serving

TOKEN = "a-token-of-24-characters"
SECRET = "a secret outside the runs"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    (folder / "secret.txt").write_text(SECRET)
    for name in ("one", "two"):
        (folder / "runs" / name).mkdir(parents=True)
        write_rows(folder / "runs" / name / "metrics.jsonl", metric_rows("vae", 3))
    found = Runs([folder / "runs"])
    found.look()
    return found


@pytest.fixture(scope="module")
def ids(runs):
    return [id_of(runs.folders[0] / name) for name in ("one", "two")]


@pytest.fixture(scope="module")
def site(runs):
    with serving(runs) as served:
        yield served


@pytest.fixture(scope="module")
def guarded(runs):
    def act(content):
        if content == {"action": "fail"}:
            raise UserError("not now", hint="later")
        return f"done: {content['action']}"

    with serving(runs, token=TOKEN, act=act) as served:
        yield served


def bearer(token=TOKEN):
    return f"Authorization: Bearer {token}"


def test_a_page_and_its_updates(site, ids):
    one, two = ids
    page = site.ask(f"/?run={one}&run={two}&run={one}")
    assert page.status == 200
    assert page.body.decode() == f"{PAGE}{one},{two}"
    assert page.headers["content-security-policy"] == POLICY
    update = site.ask(f"/update?run={one}&have=ab,cd")
    assert update.json == {"ids": [one], "have": ["ab", "cd"]}
    assert site.ask("/update").json == {"ids": [], "have": [""]}
    head = site.ask("/", method="HEAD")
    assert (head.status, head.body, int(head.headers["content-length"])) == (200, b"", len(PAGE.encode()))


def test_long_texts_are_compressed_for_those_who_can_read_that(site):
    plain = site.ask("/", "Accept-Encoding: br, gzip;q=0")
    packed = site.ask("/", "Accept-Encoding: br, gzip;q=0.5")
    assert gzip.decompress(packed.body) == plain.body == PAGE.encode()
    assert int(packed.headers["content-length"]) == len(packed.body) < 300
    assert "content-encoding" not in site.ask("/update", "Accept-Encoding: gzip").headers


@each_row("/", "/update", "/nothing", "/media/x", "/?run=x", "GET / HTTP/1.1\r\nHost: evil\r\n\r\n", "\x00\r\n\r\n")
def test_every_answer_has_the_headers(site, request_or_target):
    sent = request_or_target
    answer = site.send(sent) if "\r\n" in sent else site.ask(sent)
    wanted = {
        "x-content-type-options": "nosniff", "x-frame-options": "DENY", "referrer-policy": "no-referrer",
        "cross-origin-resource-policy": "same-origin", "cache-control": "no-store", "server": "gputrain",
    }  # fmt: skip
    assert {name: answer.headers.get(name) for name in wanted} == wanted
    assert "default-src 'none'" in answer.headers["content-security-policy"]


def test_media_and_their_ranges(site):
    name = site.app.media.uri("audio/wav", bytes(range(100))).removeprefix("media/")
    whole = site.ask(f"/media/{name}", "Accept-Encoding: gzip")
    assert (whole.status, whole.body, whole.headers["content-type"]) == (200, bytes(range(100)), "audio/wav")
    assert whole.headers["cache-control"] == "private, max-age=31536000, immutable"
    for asked, status, body in (
        ("bytes=10-19", 206, bytes(range(10, 20))), ("bytes=-5", 206, bytes(range(95, 100))),
        ("bytes=90-1000", 206, bytes(range(90, 100))), ("bytes=100-", 416, None), ("bytes=5-2", 416, None),
        ("bytes=x", 416, None), ("pigs=1-2", 416, None), ("bytes=0-1,5-6", 416, None),
        ("bytes=" + "9" * 5000 + "-", 416, None), ("bytes=--1", 416, None),
    ):  # fmt: skip
        answer = site.ask(f"/media/{name}", f"Range: {asked}")
        assert (asked[:20], answer.status) == (asked[:20], status)
        assert body is None or answer.body == body, asked
    assert site.ask(f"/media/{name}", f"If-None-Match: {whole.headers['etag']}").status == 304
    assert site.ask(f"/media/{name}", method="HEAD").headers["content-length"] == "100"


# ----------------------------------------------------------------------------------------------------------- attacks


@each_row(
    "/../secret.txt", "/media/../../secret.txt", "/media/..%2f..%2fsecret.txt", "/media/%2e%2e/%2e%2e/secret.txt",
    "/media/..%252f..%252fsecret.txt", "/media/..%c0%af..%c0%afsecret.txt", "/media/..\\..\\secret.txt",
    "/media/%00", "/media/a%00.jpg", "/media//etc/passwd", "//etc/passwd", "/%", "/%ff%fe", "/update/", "/act/x",
    "/media/%0d%0aSet-Cookie:%20a=b", "/media/", "/media", "/run/metrics.jsonl", "/metrics.jsonl", "/watch.js/..",
    "/?run=../secret.txt", "/?run=/etc/passwd", "/?run=%00", "/?run=%0d%0aX:%20y", "/update?run=..%2fsecret.txt",
    "/?run=", "/update?run=aaaaaaaaaa", "/?run=" + "a" * 50_000,
)  # fmt: skip
def test_no_path_leads_out(site, target):
    answer = site.ask(target)
    assert (answer.status, answer.count) == (404, 1)
    assert SECRET.encode() not in answer.body
    assert "set-cookie" not in answer.headers
    assert "x" not in answer.headers


@each_row(
    (lambda ids: "/?" + "&".join(f"run={number:010}" for number in range(MOST_RUNS + 1)), 400),
    (lambda ids: "/?" + "&".join([f"run={ids[0]}"] * 1000), 200),
    (lambda ids: f"/?run={ids[0].upper()}&x=[]", 404),
    (lambda ids: "/?run[]=1&have=%ff", 200),
    (lambda ids: "/update?have=" + "a:b," * 1500, 200),
    (lambda ids: "/" + "a" * 70_000, 414),
    (lambda ids: "http://localhost/", 200),
    (lambda ids: "http://evil.example/", 403),
    (lambda ids: "http://[/", 400),
    (lambda ids: "*", 404),
    (lambda ids: "", 404),
    (lambda ids: "///", 200),
)
def test_odd_addresses(site, ids, target, status):
    assert site.ask(target(ids)).status == status


@each_row(
    ("localhost", 200), ("LOCALHOST:9", 200), ("127.0.0.1:8765", 200), ("127.8.9.1", 200), ("[::1]:8765", 200),
    ("evil.example", 403), ("localhost.evil.example", 403), ("evil@localhost", 403), ("localhost:80@evil", 403),
    ("127.0.0.1.nip.io", 403), ("0.0.0.0", 403), ("[::1", 403), ("localhost:", 403), ("localhost:x", 403), (None, 403),
    ("localhost, evil", 403), ("localhost\r\nHost: evil", 403), ("localhost/..", 403),
    ("evil\r\nX-Forwarded-Host: localhost", 403), ("evil\r\nForwarded: host=localhost", 403),
    ("١٢٧.0.0.1".encode().decode("latin-1"), 403),
)  # fmt: skip
def test_without_a_token_the_host_must_be_this_machine(site, host, status):
    answer = site.ask("/", host=host)
    assert answer.status == status
    assert status == 200 or b"GPUTRAIN_WATCH_TOKEN" in answer.body


@each_row(
    ("POST", "/"), ("PUT", "/"), ("TRACE", "/"), ("OPTIONS", "/"), ("OPTIONS", "/act"), ("DELETE", "/media/x"),
    ("GET", "/act"), ("POST", "/update"), ("CONNECT", "/"), ("FOO", "/"),
)  # fmt: skip
def test_other_methods_are_refused(site, method, target):
    answer = site.ask(target, method=method)
    assert answer.status == 405
    assert answer.headers["allow"] == ("POST" if target == "/act" else "GET, HEAD")


def test_an_internal_error_is_printed_once_and_shows_nothing(site, caplog, monkeypatch):
    for fault in (KeyError, OSError):
        monkeypatch.setattr(site.app.pages, "fault", fault)
        caplog.clear()
        with caplog.at_level(logging.ERROR):
            answers = [site.ask("/") for _ in range(3)]
        assert {answer.status for answer in answers} == {500}
        assert b"defect" not in answers[0].body
        assert b"Traceback" not in answers[0].body
        assert ["a defect" in record.message for record in caplog.records] == [True]


# ------------------------------------------------------------------------------------------------------------ tokens


def test_the_token_becomes_a_cookie_and_leaves_the_address(guarded, ids):
    assert guarded.ask("/").status == 403
    answer = guarded.ask(f"/?token={TOKEN}&run={ids[0]}&run=%0d%0aX")
    assert (answer.status, answer.headers["refresh"]) == (200, f"0; url=./?run={ids[0]}&run=%0D%0AX")
    cookie, *attributes = [part.strip() for part in answer.headers["set-cookie"].split(";")]
    assert cookie == f"gputrain_{guarded.port}={TOKEN}"
    assert sorted(attributes) == ["HttpOnly", "SameSite=Strict"]
    assert guarded.ask("/", f"Cookie: other=1; {cookie}", host="any.example").status == 200
    assert guarded.ask("/update", bearer()).status == 200
    with_https = guarded.ask(f"/?token={TOKEN}", "X-Forwarded-Proto: https", host="a.example")
    assert with_https.headers["set-cookie"] == f"{cookie}; Secure; HttpOnly; SameSite=Strict"


def test_servers_behind_several_tunnels_of_one_host_keep_their_cookies(guarded):
    """All of them listen at the same port of their own machine, and a browser sends all cookies to each."""
    name = f"gputrain_{guarded.port}"
    sent = [guarded.ask(f"/?token={TOKEN}", host=f"localhost:{port}").headers["set-cookie"] for port in (8765, 8766)]
    assert [cookie.partition(";")[0] for cookie in sent] == [f"{name}_8765={TOKEN}", f"{name}_8766={TOKEN}"]
    both = f"Cookie: {name}_8765={TOKEN}; {name}_8766=that-of-the-other-machine"
    assert [guarded.ask("/", both, host=f"[::1]:{port}").status for port in (8765, 8766)] == [200, 403]


@each_row(
    ("/?token=", ""), ("/?token=wrong", ""), (f"/?token={TOKEN}x", ""), (f"/?token={TOKEN[:-1]}", ""), ("/", ""),
    (f"/?token=wrong&token={TOKEN}", ""), ("/?token=%C3%A9%F0%9F%98%80", ""), ("/?token=%00", ""),
    (f"/update?token={TOKEN}", ""), (f"/media/x?token={TOKEN}", ""), (f"/{TOKEN}", ""), ("/", f"X-Token: {TOKEN}"),
    ("/", f"Authorization: Basic {TOKEN}"), ("/", "Authorization: Bearer"), ("/", "Authorization: Bearer "),
    ("/", "Authorization: Bearer \xe9"), ("/", f"Cookie: gputrain_1={TOKEN}"), ("/", f"Cookie: gputrain={TOKEN}"),
    ("/", "Cookie: gputrain_PORT="), ("/", f"Cookie: gputrain_PORT={TOKEN}x"), ("/", f"Referer: /?token={TOKEN}"),
    ("/nothing", ""), ("/media/x", ""), (f"/?token=wrong&run={TOKEN}", ""),
)  # fmt: skip
def test_wrong_tokens_are_refused(guarded, target, header):
    answer = guarded.ask(target, *([header.replace("PORT", str(guarded.port))] if header else []))
    assert answer.status == 403
    assert "set-cookie" not in answer.headers
    assert TOKEN.encode() not in answer.body


# ----------------------------------------------------------------------------------------------------------- actions


def test_an_action_of_the_page(guarded, site):
    assert guarded.act({"action": "save"}, bearer()).json == {"message": "done: save"}
    refused = guarded.act({"action": "fail"}, bearer())
    assert (refused.status, refused.json) == (409, {"message": "not now", "hint": "later"})
    assert guarded.act({"action": "save"}).status == 403
    without = site.act({"action": "save"})
    assert (without.status, without.json) == (403, {"message": "gputrain watch was started without --allow-control"})


@each_row(
    ("{}", ["Content-Type: application/x-www-form-urlencoded", "X-Gputrain: 1"], 415),
    ("{}", ["Content-Type: text/plain; application/json", "X-Gputrain: 1"], 415),
    ("{}", ["X-Gputrain: 1"], 415),
    ("{}", ["Content-Type: application/json"], 403),
    ("{}", ["Content-Type: application/json", "X-Gputrain: 1", "X-Gputrain: 1"], 403),
    ("{}", ["Content-Type: application/json", "X-Gputrain: 1", "Sec-Fetch-Site: cross-site"], 403),
    ("{}", ["Content-Type: application/json", "X-Gputrain: 1", "Sec-Fetch-Site: same-site"], 403),
    ("{}", ["Content-Type: application/json", "X-Gputrain: 1", "Sec-Fetch-Site: none"], 403),
)
def test_actions_that_the_page_did_not_send(guarded, body, headers, status):
    assert guarded.ask("/act", bearer(), *headers, method="POST", body=body).status == status


@each_row(
    "", "{", "[]", "1", "null", '"save"', "[" * 60_000,
    '{"a":' * 12_000, '{"steps": ' + "9" * 5000 + "}", "\xff\xfe", "action=save", "{} {}",
)  # fmt: skip
def test_bodies_that_are_no_action(guarded, body):
    answer = guarded.act(body, bearer(), *(["Content-Length: 0"] if not body else []))
    assert answer.status == 400
    assert "JSON" in answer.json["message"]


USUAL = f"POST /act HTTP/1.1\r\nHost: x\r\n{bearer()}\r\nContent-Type: application/json\r\nX-Gputrain: 1\r\n"


@each_row(
    ("Content-Length: 1000000000\r\n\r\n{", 413),
    ("Content-Length: 65537\r\n\r\n" + " " * 65537, 413),
    ("Transfer-Encoding: chunked\r\n\r\n" + "fffff\r\n" + " " * 0xFFFFF + "\r\n0\r\n\r\n", 400),
    ("Content-Length: 100\r\n\r\n{}", 400),
    ("Content-Length: -5\r\n\r\n{}", 400),
    ("Content-Length: x\r\n\r\n{}", 400),
    ("Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n", 400),
    ('Transfer-Encoding: chunked\r\n\r\n12\r\n{"action": "save"}\r\n0\r\n\r\n', 200),
    ("X: " + "a" * 70_000 + "\r\n\r\n", 431),
    ("X: a\r\n" * 200 + "\r\n", 431),
    ("Content-Length: 2\r\n\r\n{}GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", 500),
)
def test_bodies_that_are_too_long_or_not_whole(guarded, rest, status):
    answer = guarded.send(USUAL + rest)
    assert (answer.status, answer.count) == (status, 1)
