"""Rendezvous of the processes of a grid, and creation of their communicators."""

import socket
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist

from collectives.communicator import Communicator, LocalCommunicator
from collectives.deadline import call_within
from collectives.gloo import GlooCommunicator
from collectives.grid import Grid
from collectives.interfaces import gloo_interface
from collectives.nccl import NcclCommunicator
from collectives.shared_memory import SharedMemoryCommunicator

Backend = Literal["gloo", "nccl"]

_RETRY_S = 0.05


class RendezvousError(RuntimeError):
    """The ranks did not all arrive in time, or came for different grids or backends."""


class Communicators(NamedTuple):
    """A rank's communicators: with all ranks, and with its group along three axes of a grid.

    A group of one rank is a LocalCommunicator. Groups of the same ranks are one communicator.
    """

    world: Communicator
    tp: Communicator
    pp: Communicator
    ep: Communicator

    def close(self) -> None:
        """Close all of them, the world last. Other ranks are not waited for; nothing may be in flight."""
        groups = {id(comm): comm for comm in (self.tp, self.pp, self.ep) if comm is not self.world}
        for comm in (*groups.values(), self.world):
            comm.close()


def make_communicators(
    grid: Grid,
    rank: int,
    *,
    address: str,
    backend: Backend,
    timeout: float,
    listener: socket.socket | None = None,
) -> Communicators:
    """Meet the other ranks of `grid` at `address`, and return the communicators of `rank`.

    Every rank calls this with the same grid, address and backend. `address` is "host:port" ("[host]:port" for
    IPv6): rank 0 listens there, on that host's address only, and the others may come first. `listener` is a
    socket of rank 0 that listens at `address` already, such as on a free port, and is used up. "gloo" carries
    CPU tensors: groups on one host use memory that they share, others gloo's over the interface that leads to
    `address` unless GLOO_SOCKET_IFNAME names one; these are groups of torch.distributed, which nobody else
    may have initialised. "nccl" carries tensors of the CUDA device that is current on this thread.

    `timeout` is in seconds: for the rendezvous, for the creation of each group, and later for each operation
    of "gloo". A grid of one rank ignores the address.

    Raises ValueError for arguments that cannot be, and RendezvousError when a rank does not arrive in time
    (the error names it), when the address cannot be reached or listened on, or when the ranks disagree.
    """
    grid.coordinates(rank)
    if backend not in ("gloo", "nccl"):
        raise ValueError(f"backend must be gloo or nccl, got {backend!r}")
    if grid.size == 1:
        alone = LocalCommunicator()
        return Communicators(alone, alone, alone, alone)
    if backend == "gloo" and dist.is_initialized():
        raise RendezvousError("torch.distributed is initialised in this process already; destroy that first")

    store = connect(rank, grid.size, address, timeout, f"{grid} over {backend}", listener)
    try:
        if backend == "nccl":
            return _nccl_groups(store, grid, rank, timeout)
        # Gloo keeps its own time limits, and says more; this one is for what they do not cover.
        return call_within(
            2 * timeout, "making groups of gloo", lambda: _gloo_groups(store, grid, rank, address, timeout)
        )
    except (RuntimeError, OSError, LookupError) as error:
        raise RendezvousError(
            f"rank {rank} met the others at {address}, but could not make its {backend} groups "
            f"within {timeout:g} s: {error}"
        ) from error


def connect(
    rank: int,
    size: int,
    address: str,
    timeout: float,
    purpose: str = "",
    listener: socket.socket | None = None,
) -> dist.Store:
    """Meet `size` ranks at `address`, where rank 0 listens, and return the store that they share.

    The store lives in the process of rank 0, for as long as that holds on to it. `purpose` is what the ranks
    must agree on. `listener` and errors are those of `make_communicators`.
    """
    host, port = _split(address)
    end = time.monotonic() + timeout
    if rank == 0:
        listener = listener or _listen(host, port)
    else:
        _await_listener(rank, host, port, timeout)

    def open_store() -> dist.Store:
        return dist.TCPStore(
            host,
            port,
            size,
            is_master=rank == 0,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
            master_listen_fd=None if listener is None else listener.detach(),
        )

    try:
        # TCPStore itself waits without end for a listener that takes the connection and says nothing.
        store = call_within(timeout, f"a greeting from {address}", open_store)
    except (dist.DistError, TimeoutError) as error:
        raise RendezvousError(
            f"rank {rank} reached {address}, but it is no rendezvous of rank 0: {error}"
        ) from error
    _check_in(store, rank, size, address, max(end - time.monotonic(), 1.0), timeout, purpose)
    return store


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(place[:2], family=family)
    except OSError as error:
        raise RendezvousError(f"rank 0 cannot listen at {host}:{port}: {error}") from error


def _await_listener(rank: int, host: str, port: int, timeout: float) -> None:
    end = time.monotonic() + timeout
    while True:
        left = end - time.monotonic()
        try:
            socket.create_connection((host, port), timeout=max(left, _RETRY_S)).close()
            return
        except OSError as error:  # rank 0 may not be there yet
            if left < _RETRY_S:
                raise RendezvousError(
                    f"rank {rank} could not reach rank 0 at {host}:{port} within {timeout:g} s: {error}"
                ) from error
            time.sleep(_RETRY_S)


def _check_in(
    store: dist.Store, rank: int, size: int, address: str, left: float, timeout: float, purpose: str
) -> None:
    """Wait until every rank has arrived, and check that all came for the same purpose."""
    keys = [f"arrived/{other}" for other in range(size)]
    try:
        store.set(keys[rank], purpose)
        store.wait(keys, timedelta(seconds=left))
        purposes = [value.decode() for value in store.multi_get(keys)]
    except dist.DistError as error:
        raise RendezvousError(_who_is_missing(store, rank, size, address, timeout)) from error
    for other, theirs in enumerate(purposes):
        if theirs != purpose:
            raise RendezvousError(f"rank {rank} came to {address} for {purpose}, rank {other} for {theirs}")


def _who_is_missing(store: dist.Store, rank: int, size: int, address: str, timeout: float) -> str:
    try:
        missing = [other for other in range(size) if not store.check([f"arrived/{other}"])]
    except dist.DistError:
        return f"rank {rank} lost rank 0 while it waited at {address} for all {size} ranks"
    ranks = ", ".join(map(str, missing))
    return f"of {size} ranks these did not arrive at {address} within {timeout:g} s: {ranks}"


def _gloo_groups(store: dist.Store, grid: Grid, rank: int, address: str, timeout: float) -> Communicators:
    limit = timedelta(seconds=timeout)

    def share(ranks: Sequence[int]) -> Communicator | None:
        name = ",".join(map(str, ranks))
        return SharedMemoryCommunicator.join(store, ranks.index(rank), len(ranks), name=name, timeout=timeout)

    def make(ranks: Sequence[int]) -> Communicator:
        if len(ranks) == grid.size:
            return GlooCommunicator() if world is None else world
        return share(ranks) or GlooCommunicator(
            dist.new_group(list(ranks), limit, "gloo", use_local_synchronization=True)
        )

    try:
        world = share(range(grid.size))
        with gloo_interface(*_split(address)) if world is None else nullcontext():
            if world is None:
                dist.init_process_group("gloo", store=store, rank=rank, world_size=grid.size, timeout=limit)
            made = _groups(grid, rank, make)
        made.world.barrier()  # from here on nobody needs the store, and rank 0 may leave
    except BaseException:
        if dist.is_initialized():
            dist.destroy_process_group()
        raise
    return made


def _nccl_groups(store: dist.Store, grid: Grid, rank: int, timeout: float) -> Communicators:
    device = torch.device("cuda", torch.cuda.current_device())

    def make(ranks: Sequence[int]) -> Communicator:
        name = ",".join(map(str, ranks))
        return NcclCommunicator(
            store, ranks.index(rank), len(ranks), device=device, name=name, timeout=timeout
        )

    return _groups(grid, rank, make)


def _groups(grid: Grid, rank: int, make: Callable[[Sequence[int]], Communicator]) -> Communicators:
    made: dict[tuple[int, ...], Communicator] = {}

    def group(ranks: Sequence[int]) -> Communicator:
        key = tuple(ranks)
        if key not in made:
            made[key] = make(key) if len(key) > 1 else LocalCommunicator()
        return made[key]

    tp, pp, ep = (group(grid.group(axis, rank)) for axis in ("tp", "pp", "ep"))
    return Communicators(group(range(grid.size)), tp, pp, ep)


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(
            f"address must be host:port or [host]:port with a port from 1 to 65535, got {address!r}"
        )
    return host, int(port)
