"""Two machines train together: network namespaces with an address each, which only root may create."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from gputrain.hw.ranks import interface_towards
from tests.cli.test_torchrun import losses, options
from tests.command import gputrain_here

ADDRESSES = ("10.77.0.1", "10.77.0.2")
STEPS = 6


def ip(*words: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["ip", *words], capture_output=True, timeout=200, check=True)


def can_make_namespaces() -> bool:
    name = f"gputrain-{os.getpid()}"
    try:
        ip("netns", "add", name)
        ip("netns", "del", name)
    except (OSError, subprocess.SubprocessError):
        return False
    return True


@contextlib.contextmanager
def machines() -> Iterator[list[str]]:
    """Yields the names of two network namespaces that are connected with each other and with nothing else."""
    names = [f"gputrain-{os.getpid()}-{index}" for index in range(2)]
    links = [f"gpt{os.getpid()}{end}" for end in "ab"]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", links[0], "type", "veth", "peer", "name", links[1])
        for name, link, address in zip(names, links, ADDRESSES, strict=True):
            ip("link", "set", link, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", link, "up")
        yield names
    finally:
        for name in names:
            with contextlib.suppress(subprocess.SubprocessError):
                ip("netns", "del", name)


@pytest.mark.slow
@pytest.mark.skipif(not can_make_namespaces(), reason="needs the right to make network namespaces (root and ip)")
@pytest.mark.parametrize("rendezvous", ["c10d", "static"])
def test_two_machines_train_as_one_process(photographs, tmp_path, rendezvous):
    """The name of each machine has the address of a loopback here, as on many Linux systems."""
    meetings = {
        "c10d": [
            ["--rdzv-backend=c10d", f"--rdzv-endpoint={ADDRESSES[0]}:29500", f"--rdzv-conf=is_host={host}",
             f"--local-addr={address}"] for host, address in zip((1, 0), ADDRESSES, strict=True)
        ],
        "static": [
            [f"--master-addr={ADDRESSES[0]}", "--master-port=29500", f"--node-rank={index}"] for index in range(2)
        ],
    }  # fmt: skip
    together, alone = tmp_path / "together", tmp_path / "alone"
    with machines() as names, contextlib.ExitStack() as ending:
        nodes = []
        for name, meeting in zip(names, meetings[rendezvous], strict=True):
            command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", *meeting]
            command += ["-m", "gputrain", *options(photographs, together, **{"max-steps": STEPS})]
            said = ending.enter_context((tmp_path / name).open("w+"))
            node = subprocess.Popen(["ip", "netns", "exec", name, *command], stdout=said, stderr=said)
            ending.callback(node.kill)
            nodes.append((node, said))
        for node, said in nodes:
            code = node.wait(180)
            said.seek(0)
            assert code == 0, said.read()
    assert gputrain_here(*options(photographs, alone, **{"max-steps": STEPS})).returncode == 0
    assert losses(together).keys() == losses(alone).keys() == set(range(1, STEPS + 1))
    for step, loss in losses(alone).items():
        assert losses(together)[step] == pytest.approx(loss, rel=1e-5)


@pytest.mark.skipif(not can_make_namespaces(), reason="needs the right to make network namespaces (root and ip)")
def test_the_interface_is_the_one_that_leads_to_the_other_machine():
    asked = f"print([interface_towards(host) for host in {[*ADDRESSES, 'localhost']}])"
    asked = f"from gputrain.hw.ranks import interface_towards; {asked}"
    with machines() as names:
        for name, end in zip(names, "ab", strict=True):
            done = subprocess.run(
                ["ip", "netns", "exec", name, sys.executable, "-c", asked], capture_output=True, text=True, timeout=200
            )
            link = f"gpt{os.getpid()}{end}"
            assert done.stdout == f"{[link, link, '']}\n", done.stderr  # There is no default route.


def test_a_name_that_leads_nowhere_has_the_interface_of_the_default_route():
    assert interface_towards("no-such-host.invalid") == interface_towards("127.0.0.1")
