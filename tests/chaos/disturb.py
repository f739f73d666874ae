"""What happens to a run at a random moment, and what it must answer."""

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gputrain.engine.checkpoint import COMMENT_BYTES, _is_intact
from tests.chaos.tiny import LAST, PARTIAL, TinyRun

RESUMABLE = 75


@dataclass(frozen=True)
class Disturbance:
    """`act` disturbs a run after `seconds`. `codes` are the exit codes that it may then have."""

    name: str
    act: Callable[[TinyRun, float, Path, random.Random], None]
    codes: frozenset[int]
    workers: int = 0  # Data workers of the run.


def _killed(run: TinyRun, seconds: float, folder: Path, rng: random.Random) -> None:
    run.wait_until(seconds)
    run.send(signal.SIGKILL)


def _killed_in_a_save(run: TinyRun, seconds: float, folder: Path, rng: random.Random) -> None:
    run.wait_until(seconds, also=(folder / PARTIAL).exists)
    run.send(signal.SIGKILL)


def _signal(number: int, *, group: bool = False, times: int = 1) -> Callable[..., None]:
    def act(run: TinyRun, seconds: float, folder: Path, rng: random.Random) -> None:
        run.wait_until(seconds)
        for _ in range(times):
            run.send(number, group=group)
            time.sleep(rng.uniform(0, 0.05))

    return act


def _worker_killed(run: TinyRun, seconds: float, folder: Path, rng: random.Random) -> None:
    run.wait_until(seconds, also=lambda: bool(run.workers()))
    for pid in run.workers()[:1]:
        _send(pid, signal.SIGKILL)


def _helper_killed(run: TinyRun, seconds: float, folder: Path, rng: random.Random) -> None:
    run.wait_until(rng.uniform(0, 0.2), also=lambda: bool(run.children()))
    time.sleep(rng.uniform(0, 0.1))
    for pid in rng.sample(children := sorted(run.children()), k=min(1, len(children))):
        _send(pid, signal.SIGKILL)


def _worker_held(run: TinyRun, seconds: float, folder: Path, rng: random.Random) -> None:
    run.wait_until(seconds, also=lambda: bool(run.workers()))
    held = run.workers()
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in held:
            _send(pid, number)
        time.sleep(rng.uniform(0.1, 1.0))


def _held(run: TinyRun, seconds: float, folder: Path, rng: random.Random) -> None:
    run.wait_until(seconds)
    run.send(signal.SIGSTOP, group=True)
    time.sleep(rng.uniform(0.1, 0.5))
    run.send(signal.SIGCONT, group=True)


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


KILLED, STOPPED, FINISHED = frozenset({-signal.SIGKILL, 0}), frozenset({RESUMABLE, 0}), frozenset({0})
KILLS = (
    Disturbance("SIGKILL", _killed, KILLED),
    Disturbance("SIGKILL in a save", _killed_in_a_save, KILLED),
    Disturbance("SIGKILL with a data worker", _killed, KILLED, workers=1),
)
TERMS = (
    Disturbance("SIGTERM to the group", _signal(signal.SIGTERM, group=True), STOPPED, workers=1),
    Disturbance("SIGTERM", _signal(signal.SIGTERM), STOPPED),
    Disturbance("SIGINT to the group", _signal(signal.SIGINT, group=True), STOPPED, workers=1),
    Disturbance("SIGTERM twice to the group", _signal(signal.SIGTERM, group=True, times=2), STOPPED, workers=1),
    Disturbance("SIGINT twice", _signal(signal.SIGINT, times=2), STOPPED),
    Disturbance("SIGHUP", _signal(signal.SIGHUP), STOPPED),
    Disturbance("SIGUSR1 to the group", _signal(signal.SIGUSR1, group=True), STOPPED, workers=1),
)
STARVED = (
    Disturbance("data worker killed", _worker_killed, FINISHED, workers=1),
    Disturbance("helper process killed while the workers start", _helper_killed, FINISHED, workers=1),
    Disturbance("data worker held for a while", _worker_held, FINISHED, workers=1),
    Disturbance("all processes held for a while", _held, FINISHED, workers=1),
)


def damage(folder: Path, rng: random.Random) -> str:
    """Flips a bit of the newest checkpoint or cuts it off, if there is an older one. Returns what was done."""
    path, previous = folder / LAST, folder / "checkpoint_previous.pt"
    # A save after a resumed run has moved the damaged checkpoint to the place of the previous one.
    if not path.exists() or not previous.exists() or not _is_intact(previous):
        return ""
    content = bytearray(path.read_bytes())
    path.unlink()  # Other names of the file keep their content.
    if rng.random() < 0.5:
        content = content[: rng.randrange(len(content))]
        done = f"cut off at byte {len(content)}"
    else:
        # The comment only holds the checksum: without its mark, the checksums of the members decide.
        at, bit = rng.randrange(len(content) - COMMENT_BYTES), rng.randrange(8)
        content[at] ^= 1 << bit
        done = f"bit {bit} of byte {at} flipped"
    path.write_bytes(content)
    return done
