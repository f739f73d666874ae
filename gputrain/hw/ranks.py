"""The processes that train together, one for each GPU: ranks, as torchrun starts them."""

import contextlib
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace

import psutil

from gputrain.errors import UserError
from gputrain.hw.probe import Machine


@dataclass(frozen=True)
class Ranks:
    """The position of this process among the ranks that train together; by default it trains alone."""

    index: int = 0  # Number of this rank. Rank 0, the leader, writes the run folder.
    count: int = 1
    local_index: int = 0  # Number of this rank on its machine, and of its GPU.
    local_count: int = 1
    under_torchrun: bool = False
    restarts: int = 0  # How often torchrun has restarted the ranks after a failure.
    restarts_left: int = 0

    @classmethod
    def launched(cls, environment: Mapping[str, str]) -> "Ranks":
        """Returns the ranks that torchrun describes in the environment of each process that it starts."""
        if "TORCHELASTIC_RUN_ID" not in environment:
            return cls()
        restarts = int(environment.get("TORCHELASTIC_RESTART_COUNT", "0"))
        return cls(
            index=int(environment["RANK"]),
            count=int(environment["WORLD_SIZE"]),
            local_index=int(environment["LOCAL_RANK"]),
            local_count=int(environment["LOCAL_WORLD_SIZE"]),
            under_torchrun=True,
            restarts=restarts,
            restarts_left=int(environment.get("TORCHELASTIC_MAX_RESTARTS", "0")) - restarts,
        )

    @property
    def leads(self) -> bool:
        return self.index == 0

    def rows(self, items: int) -> slice:
        """Returns the part of a batch of `items` that this rank computes; sizes of parts differ by at most one."""
        first, stop = (-(-items * index // self.count) for index in (self.index, self.index + 1))
        return slice(first, stop)

    def largest_part(self, items: int) -> int:
        """Returns the largest number of items of a batch that a rank computes."""
        return -(-items // self.count)


SINGLE = Ranks()  # A process that trains alone.

ANYWHERE = "192.0.2.1"  # An address that no machine has (RFC 5737).


def interface_towards(host: str) -> str:
    """Returns the name of the network interface through which this machine reaches another one, or an empty string if
    it is not known.

    The `host` may be this machine itself under a name whose address is a loopback; the interface is then that of the
    default route. Nothing is sent.
    """
    for target in (host, ANYWHERE):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route, contextlib.suppress(OSError):
            route.connect((target, 9))
            own = route.getsockname()[0]
            for name, addresses in psutil.net_if_addrs().items():
                if not own.startswith("127.") and own in {found.address for found in addresses}:
                    return str(name)
    return ""


def share_of(machine: Machine, ranks: Ranks) -> Machine:
    """Returns the part of this machine that one rank can use."""
    sharing = ranks.local_count
    if sharing == 1:
        return replace(machine, gpus=ranks.count)
    return replace(
        machine,
        gpus=ranks.count,
        cpu_cores=max(1, machine.cpu_cores // sharing),
        ram_gb=machine.ram_gb / sharing,
        ram_free_gb=machine.ram_free_gb / sharing,
        shared_memory_gb=machine.shared_memory_gb / sharing,
    )


def weakest_of(machines: list[Machine], own: Machine) -> Machine:
    """Returns the facts of `own` with the GPU that all ranks can rely on: the least memory and the least capability,
    so that every rank makes the same plan. Raises UserError if some ranks have a GPU and others have none."""
    if len({bool(machine.gpu) for machine in machines}) > 1:
        raise UserError(
            "some ranks have a GPU and others have none",
            hint="start one rank for each GPU: torchrun --nproc-per-node takes the number of GPUs of the machine",
        )
    weakest = min(machines, key=lambda machine: (machine.compute_capability, machine.has_tensor_cores))
    return replace(
        own,
        gpu=weakest.gpu,
        compute_capability=weakest.compute_capability,
        compiled_capabilities=weakest.compiled_capabilities,
        triton=all(machine.triton for machine in machines),
        gpu_memory_gb=min(machine.gpu_memory_gb for machine in machines),
        gpu_free_gb=min(machine.gpu_free_gb for machine in machines),
        cpu_cores=min(machine.cpu_cores for machine in machines),
        ram_gb=min(machine.ram_gb for machine in machines),
        ram_free_gb=min(machine.ram_free_gb for machine in machines),
    )
