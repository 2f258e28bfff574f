"""Which host each rank runs on, and what follows from it."""

import socket
from collections.abc import Sequence
from typing import NamedTuple

from enginecore.executor.link import CoreEnd


class Seat(NamedTuple):
    """Where a rank runs."""

    local_rank: int
    """Place among the ranks of its host that see the same devices."""
    local_size: int
    """Ranks on its host."""
    near: bool = True
    """Whether it is on the core's host, where the ring brings the steps."""
    link: CoreEnd | None = None
    """The core's end of its link; None: it has a pipe to the core, and is near."""


class Placement(NamedTuple):
    """Where all ranks run and meet."""

    seats: Sequence[Seat]
    """By rank."""
    rendezvous: str
    """host:port, of rank 0's host."""


def on_this_host(ranks: int) -> Placement:
    """Return the placement of all ranks on the core's host, each with a pipe to the core."""
    return Placement([Seat(rank, ranks) for rank in range(ranks)], free_address("127.0.0.1"))


def free_address(host: str) -> str:
    """Return an address, host:port, on which nobody listens; `host` is an address of this host."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        port = listener.getsockname()[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
