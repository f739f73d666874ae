"""--notify: messages to a server on this machine, of trainings that end in every way."""

import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from gputrain.config import assemble
from gputrain.engine import checkpoint
from gputrain.engine.callbacks.reports import log_evaluation
from gputrain.engine.schedule import Saving
from gputrain.errors import UserError
from gputrain.kinds import kinds
from gputrain.report import notify
from gputrain.vae.recipe import VaeRecipe
from tests.chaos.tiny import TinyRun, differences, make_data, words
from tests.command import gputrain_here
from tests.waiting import Clock, wait_until

PASSWORD, TOKEN = "pAssW0rd", "t0keN"
Told = list[tuple[str, str, str]]


class Phone(ThreadingHTTPServer):
    """A server that takes messages as JSON. `told` has them: the path, the title without the command, and the text."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.told: Told = []
        self.address = f"json://ann:{PASSWORD}@127.0.0.1:{self.server_port}/{TOKEN}"

    @property
    def titles(self) -> list[str]:
        return [title for _, title, _ in self.told]


class _Handler(BaseHTTPRequestHandler):
    server: Phone

    def do_POST(self) -> None:
        row = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.told.append((self.path, row["title"].removeprefix("gputrain train-vae, "), row["message"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        """Print nothing."""


@pytest.fixture
def phone() -> Iterator[Phone]:
    with Phone() as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data("vae", tmp_path_factory.mktemp("notify") / "data")


def test_a_run_tells_its_end_and_is_the_same_whatever_becomes_of_its_messages(phone, data, tmp_path, monkeypatch):
    """Beside the server that answers, one address refuses connections and one never answers."""
    length: dict[str, Any] = {"num_epochs": 0, "num_steps": 6, "evaluate_every_steps": 3, "learning_rate": 1e-3}
    plain = gputrain_here(*words("vae", data, tmp_path / "plain", 6, **length))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(notify, "END_SECONDS", 1.0)
        monkeypatch.setenv(notify.VARIABLE, f"json://127.0.0.1:9 json://127.0.0.1:{silent.getsockname()[1]}?rto=60")
        done = gputrain_here(*words("vae", data, tmp_path / "run", 6, **length), "--notify", phone.address)
    assert (plain.returncode, done.returncode) == (0, 0)
    assert differences(tmp_path / "run", tmp_path / "plain") == []
    assert phone.titles == ["run: better than before", "run: finished"]
    assert "the best so far (before: " in phone.told[0][2]
    scores = [json.loads(line).get("eval/psnr_db") for line in (tmp_path / "run/metrics.jsonl").open()]
    path, _, body = phone.told[1]
    assert path == f"/{TOKEN}"
    assert body.splitlines()[0].startswith("step 6 after ")
    assert f"{max(filter(None, scores)):.3g} dB" in body.splitlines()[1]
    assert "warning: --notify: address 2 has not taken a message" in done.stderr
    assert "warning: --notify: address 3 has not taken the last message, and is not waited for" in done.stderr
    said = [done.stdout + done.stderr, *(path.read_bytes().decode("latin-1") for path in files(tmp_path / "run"))]
    assert len(said) > 6
    assert not [text[:80] for text in said if PASSWORD in text or TOKEN in text]
    assert "notify" not in checkpoint.read(tmp_path / "run" / checkpoint.LAST, "vae")["config"]


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_a_run_that_fails_is_told_with_its_reason(phone, data, tmp_path, monkeypatch, capsys):
    line = words("vae", data, tmp_path / "run", 9, evaluate_every_steps=3)
    missing = gputrain_here(*words("vae", tmp_path / "none", tmp_path / "run", 9), "--notify", phone.address)
    assert missing.returncode == 2
    assert phone.titles == ["run: failed"]
    assert phone.told[0][2].startswith(f"{tmp_path / 'none'}: no such folder or file\nname the folder that holds")

    def fail(self: object) -> None:
        raise ValueError(f"no figures of https://ann:{PASSWORD}@example.org")

    monkeypatch.setattr(VaeRecipe, "evaluate", fail)
    monkeypatch.setattr("gputrain.cli.ui.traceback.print_exc", lambda: None)
    assert gputrain_here(*line, "--notify", phone.address).returncode == 1
    assert phone.titles == ["run: failed"] * 2
    reason, step, *_, resume = phone.told[1][2].splitlines()
    assert reason == "no figures of https://example.org"
    assert step.startswith("step 3 after ")
    assert resume.endswith("--resume-from auto")


def stopped(folder: Path, steps: int) -> str:
    return f"go on with: gputrain train-vae --config {folder / 'config.yaml'} --resume-from auto --max-steps {steps}"


def test_a_stop_is_told_with_the_command_that_goes_on(phone, data, tmp_path, monkeypatch):
    line = words("vae", data, tmp_path / "run", 1000, evaluate_every_steps=0)
    monkeypatch.setattr(VaeRecipe, "average", lambda self, step: os.kill(os.getpid(), signal.SIGTERM))
    assert gputrain_here(*line, "--notify", phone.address).returncode == 75
    assert phone.titles == ["run: stopped"]
    reason, step, *_, resume = phone.told[0][2].splitlines()
    assert reason == "asked to terminate after step 1; everything is saved"
    assert step.startswith("step 1 after ")
    assert resume == stopped(tmp_path / "run", 1000)


@pytest.mark.slow
def test_a_signal_is_told_and_a_kill_is_not(phone, data, tmp_path):
    line = [*words("vae", data, tmp_path / "run", 100_000, evaluate_every_steps=0), "--notify", phone.address]
    for number, code in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 75)):
        run = TinyRun(line, tmp_path / f"{code}.log")
        wait_until(lambda log=run.log: "step 3/" in log.read_text(), "a step", lambda run=run: run.is_over)
        run.send(number)
        assert run.wait()[0] == code
        assert phone.titles == ["run: stopped"] * (code == 75)
    assert phone.told[0][2].splitlines()[-1] == stopped(tmp_path / "run", 100_000)


def test_better_evaluations_are_told_once_in_half_an_hour(phone, tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    clock = Clock(monkeypatch, notify)
    messages = notify.Messages(kinds()["vae"], Saving(output_dir=tmp_path / "run", notify=(phone.address,)))
    told = []
    with messages:
        for minutes, score, before in ((0, 1, -float("inf")), (0, 3, 2), (29, 4, 3), (1, 2, 4), (0, 5, 4)):
            clock.sleep(60 * minutes)
            log_evaluation(7, {"psnr_db": score, "score": score}, before)
            told += [score] * (messages.quiet_until == clock.now + notify.QUIET_SECONDS and score not in told)
        wait_until(lambda: len(phone.told) == 2, "two messages")
    assert told == [3, 5]
    assert sorted(text.partition(";")[0] for *_, text in phone.told) == [
        "held-out at step 7: psnr_db 3", "held-out at step 7: psnr_db 5"
    ]  # fmt: skip
    assert len(phone.told) == 2  # Nothing was trained, and there is no end to tell.


def test_what_cannot_be_told_is_refused_at_the_start_without_the_address(tmp_path, monkeypatch):
    words = ("train-vae", "--data-path", tmp_path, "--output-dir", tmp_path / "run", "--notify")
    for address in (f"nothing://{TOKEN}", TOKEN, ""):
        done = gputrain_here(*words, address)
        assert done.returncode == 2
        assert "error: notify: address 1 of 1 is none that apprise knows" in done.stderr
        assert "ntfy://TOPIC" in done.stderr
        assert TOKEN not in done.stdout + done.stderr
    with pytest.raises(UserError, match="notify is not shown, expected a list of texts"):
        assemble(Saving, {"notify": {"to": TOKEN}})
    monkeypatch.setitem(sys.modules, "apprise", None)
    done = gputrain_here(*words, f"json://{TOKEN}")
    assert done.returncode == 2
    assert "--notify: the package apprise is not installed" in done.stderr
    assert not (tmp_path / "run").exists()


def test_of_several_ranks_the_leader_tells(phone, monkeypatch):
    saving = Saving(notify=(phone.address,))
    assert notify.Messages(kinds()["vae"], saving).addresses == [phone.address]
    for name, value in {
        "TORCHELASTIC_RUN_ID": "1",
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }.items():
        monkeypatch.setenv(name, value)
    assert notify.Messages(kinds()["vae"], saving).addresses == []
