"""The server's port and address, clients that are slow or silent, and its end."""

import contextlib
import os
import signal
import socket
import threading
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from click.testing import CliRunner

from gputrain.cli.app import command_line
from gputrain.errors import UserError
from gputrain.watch import server as module
from gputrain.watch.options import WatchSettings
from gputrain.watch.runs import Runs
from gputrain.watch.server import address, introduction, listen, token_of
from tests.tables import each_row
from tests.watch.serving import serving


@pytest.fixture
def site(monkeypatch, tmp_path):
    runs = Runs([tmp_path])
    runs.look()
    with serving(runs) as served:
        yield served


def connected(served):
    return socket.create_connection(("127.0.0.1", served.port), 10)


def is_closed(connection):
    with contextlib.suppress(ConnectionError):
        return connection.recv(1000) == b""
    return True


def test_silent_and_slow_clients_lose_their_connection_and_stop_nobody(site, monkeypatch):
    monkeypatch.setattr(module.Handler, "timeout", 0.3)
    silent, slow, body = connected(site), connected(site), connected(site)
    slow.sendall(b"GET / HT")
    body.sendall(b"POST /act HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
    assert site.ask("/").status == 200
    assert is_closed(silent)
    assert is_closed(slow)
    assert body.recv(1000).startswith(b"HTTP/1.1 403")


def test_a_port_that_is_taken_is_named():
    with listen("localhost", 0) as taken:
        host, port = taken.getsockname()
        assert host == "127.0.0.1"
        with pytest.raises(UserError, match=f"port {port} is taken"):
            listen("127.0.0.1", port)
    listen("127.0.0.1", port).close()


@each_row("", "no.such.host.invalid", "http://127.0.0.1", "x" * 300, "192.0.2.1", "127.0.0.1:80", "a\x00b")
def test_hosts_that_are_none_of_this_machine(host):
    with pytest.raises(UserError, match=r"is no address") as refused:
        listen(host, 0)
    assert "--host 127.0.0.1" in refused.value.hint


@pytest.mark.skipif(not socket.has_ipv6, reason="without IPv6")
@each_row(("::1", "http://[::1]:{}/"), ("[::1]", "http://[::1]:{}/"), ("::", "http://["), ("0.0.0.0", "http://"))
def test_addresses_of_ipv6_and_of_all_networks(host, shown):
    with listen(host, 0) as made:
        where, port = made.getsockname()[:2]
        assert address(where, port, "").startswith(shown.format(port))
        assert "0.0.0.0" not in address(where, port, "")
        socket.create_connection(("::1" if ":" in host else "127.0.0.1", port), 5).close()


@each_row("short", "fifteen-letters", "with a space in it", "ünïcode-of-16-letters", "control\ncharacter-16")
def test_tokens_that_are_refused(given):
    with pytest.raises(UserError, match="at least 16"):
        token_of(True, given)


def test_who_needs_a_token():
    assert token_of(True, "") == ""
    assert token_of(True, "0123456789abcdef") == "0123456789abcdef"
    made = {token_of(False, "") for _ in range(3)}
    assert len(made) == 3
    assert all(len(one) >= 40 for one in made)
    assert address("127.0.0.1", 80, "a&b/c+d=e#f 16") == "http://127.0.0.1:80/?token=a%26b%2Fc%2Bd%3De%23f%2016"


def test_what_is_said_at_the_start(tmp_path):
    (tmp_path / "runs").mkdir()
    text = introduction(WatchSettings(folders=(tmp_path / "runs", tmp_path / "later"), wait=True), 99, True)
    assert f"{tmp_path / 'runs'}, {tmp_path / 'later'} (cannot be read yet) until Ctrl-C" in text
    assert "ssh -L 99:localhost:99 " in text
    assert "ssh" not in introduction(WatchSettings(), 99, False)


def test_the_page_and_its_end(tmp_path, monkeypatch):
    """A signal ends the command with 0; beside a training, the end of standard input does, and a port that is taken is
    no error."""
    answers = []

    def ask_and_end(line):
        def work():
            where = urlsplit(line.strip())
            with socket.create_connection((where.hostname, where.port)) as connection:
                connection.sendall(b"GET /update HTTP/1.1\r\nHost: localhost\r\n\r\n")
                answers.append(connection.recv(12))
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=work, daemon=True).start()

    monkeypatch.setattr("gputrain.cli.ui.out.print", lambda line, **options: ask_and_end(line))
    ended = CliRunner().invoke(command_line(), ["watch", str(tmp_path), "--port", "0"])
    assert ended.exit_code == 0, ended.output
    assert answers == [b"HTTP/1.1 200"]


def test_a_folder_that_does_not_exist_is_refused_unless_it_is_waited_for(typed):
    code, said = typed("watch", "outptus")
    assert (code, "outptus: no such folder hint: --wait shows" in said) == (2, True)
    assert WatchSettings(folders=(Path("outptus"),), wait=True).watched == (Path("outptus"),)


def test_buttons_without_a_page_are_refused(typed):
    code, said = typed("train-vae", "--data-path", "photos", "--allow-control")
    assert (code, "--watch --allow-control serves one" in said) == (2, True)
