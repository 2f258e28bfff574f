"""Workers as actors of a Ray cluster, on one node or several.

Ray finds devices and starts processes; it carries no step and no result. It ends the actors of a core that
is gone; the link tells them sooner.
"""

import concurrent.futures
import contextlib
import logging
import os
import select
import socket
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from enginecore.config import EngineConfig
from enginecore.errors import ConfigError, EngineDeadError
from enginecore.executor.distributed import Ending, WorkerHandle
from enginecore.executor.link import CoreEnd
from enginecore.executor.placement import Placement, Seat
from enginecore.executor.ray_worker import Home, RankActor
from enginecore.executor.wire import WorkerMessage, WorkerSettings, decode_message

try:
    import ray
    from ray.exceptions import GetTimeoutError, RayError
    from ray.util.placement_group import (
        PlacementGroup,
        placement_group,
        placement_group_table,
        remove_placement_group,
    )
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as error:
    raise ConfigError(
        f"distributed_executor_backend=ray needs Ray ({error}): install enginecore[ray] on every node"
    ) from error

logger = logging.getLogger(__name__)

_CARRIED = "OCTAVO_"
"""Variables of the core's environment with this beginning are set for the workers too."""
_GRACE = 0.5
"""Seconds in which Ray tells why an actor has ended."""


class RayWorkers:
    """A bundle of the cluster for each rank, and an actor in each, that wait for their settings."""

    def __init__(self, config: EngineConfig) -> None:
        """Connect to the cluster and wait for what is asked of it.

        Raises:
            ConfigError: there is no cluster, or it does not give the devices within the timeout.
            EngineDeadError: an actor cannot start.
        """
        self._timeout = config.distributed_timeout_seconds
        _connect(self._timeout)
        kind = _device_kind(config)
        self.config = replace(config, device="cuda" if kind == "GPU" else "cpu")
        """With the kind of device that every worker has."""
        self._group = _reserve(config.world_size, kind, self._timeout)
        self._remove = weakref.finalize(self, _remove, self._group)
        nodes = placement_group_table(self._group)["bundles_to_node_id"]
        own = ray.get_runtime_context().get_node_id()
        order = rank_order([nodes[i] for i in range(config.world_size)], config.tensor_parallel_size, own)
        self._actors = [self._actor(bundle, kind) for bundle in order]
        self._homes: list[Home] = self._answers("home")
        (rendezvous,) = self._answers("free_address", ranks=1)
        self.placement = Placement([self._seat(rank, own, kind) for rank in range(len(order))], rendezvous)

    def launch(self, settings: Sequence[WorkerSettings]) -> list[WorkerHandle]:
        """Give each actor its settings; see `Launch`."""
        environment = _environment()
        return [
            RayWorker(
                each.rank,
                self._homes[each.rank],
                actor,
                actor.serve.remote(msgspec.json.encode(each), environment),
                seat.link,
                self.close,
            )
            for each, actor, seat in zip(settings, self._actors, self.placement.seats, strict=True)
            if seat.link is not None
        ]

    def close(self) -> None:
        """Give the bundles back, which ends what runs in them, and drop the links."""
        self._remove()
        for seat in self.placement.seats:
            if seat.link is not None:
                seat.link.close()

    def _actor(self, bundle: int, kind: str) -> Any:
        return (
            ray.remote(RankActor)
            .options(
                num_cpus=1 if kind == "CPU" else 0,
                num_gpus=1 if kind == "GPU" else 0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=bundle
                ),
            )
            .remote()
        )

    def _answers(self, method: str, ranks: int | None = None) -> list[Any]:
        """Call `method` of the first `ranks` actors, or of all."""
        calls = [getattr(actor, method).remote() for actor in self._actors[:ranks]]
        try:
            return ray.get(calls, timeout=self._timeout)
        except GetTimeoutError as error:
            raise EngineDeadError(
                f"the {len(calls)} actors did not all start within {self._timeout:g} s"
            ) from error
        except RayError as error:
            raise EngineDeadError(f"an actor could not start: {_reason(error)}") from error

    def _seat(self, rank: int, own: str, kind: str) -> Seat:
        node = self._homes[rank].node
        return Seat(
            # Ray lets a process see no other GPU than its own.
            local_rank=0 if kind == "GPU" else sum(home.node == node for home in self._homes[:rank]),
            local_size=sum(home.node == node for home in self._homes),
            near=node == own,
            link=CoreEnd(ray.util.get_node_ip_address(), self._timeout),
        )


class RayWorker:
    """A worker in an actor; see `WorkerHandle`."""

    def __init__(
        self,
        rank: int,
        home: Home,
        actor: Any,
        served: Any,
        link: CoreEnd,
        close: Callable[[], None],
    ) -> None:
        """`served` is the actor's call that lasts as long as the worker; `close` ends all workers."""
        self.rank = rank
        self.pid = home.pid
        self.ended = False
        self._host = home.host
        self._actor = actor
        self._link = link
        self._close = close
        self._outcome: concurrent.futures.Future[bytes] = served.future()
        over = self._over = _Flag()
        self._outcome.add_done_callback(lambda _: over.raise_())
        self._readable = select.epoll()
        self._readable.register(link, select.EPOLLIN)
        self._readable.register(over, select.EPOLLIN)

    def fileno(self) -> int:
        """A descriptor that is readable when its link or Ray has something to say."""
        return self._readable.fileno()

    def receive(self) -> list[WorkerMessage]:
        """Return its messages since the last call."""
        said = self._link.receive()
        self._over.lower()
        # Where there was a link, its end is the worker's: Ray's word may overtake the last messages.
        self.ended = self._link.ended
        if not self._link.connected and self._outcome.done():
            self.ended = True
            if self._outcome.exception() is None:
                said.append(decode_message(self._outcome.result()))
        return said

    def ending(self) -> Ending:
        """Wait a little for what Ray knows of it."""
        concurrent.futures.wait([self._outcome], _GRACE)
        where = f"on {self._host}"
        if not self._outcome.done():
            return Ending(f"{where} is not heard of any more", [])
        error = self._outcome.exception()
        return Ending(f"{where} has ended: {'it' if error is None else _reason(error)}", [])

    def release(self) -> None:
        """End it: a worker has nothing to put in order."""
        if ray.is_initialized():
            ray.kill(self._actor)

    def end(self, timeout: float) -> None:
        """Wait for its end, then for that of all."""
        if ray.is_initialized():
            concurrent.futures.wait([self._outcome], timeout)
        self._close()


class _Flag:
    """A descriptor that any thread can make readable; closed when nobody holds it."""

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)

    def fileno(self) -> int:
        return self._descriptor

    def raise_(self) -> None:
        os.eventfd_write(self._descriptor, 1)

    def lower(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._descriptor)


def rank_order(nodes: Sequence[str], tp: int, first: str) -> list[int]:
    """Return the bundles in the order of their ranks, where `nodes` has each bundle's node.

    The `tp` ranks of a stage sit on one node as far as nodes have room for whole stages; what nodes have left
    makes up the other stages. Node `first` comes first in both.
    """
    counts = Counter(nodes)
    whole: list[int] = []
    rest: list[int] = []
    for node in sorted(counts, key=lambda node: (node != first, -counts[node], node)):
        bundles = [i for i, other in enumerate(nodes) if other == node]
        fitting = len(bundles) // tp * tp
        whole += bundles[:fitting]
        rest += bundles[fitting:]
    return whole + rest


def _connect(timeout: float) -> None:
    if ray.is_initialized():
        return
    address = os.environ.get("RAY_ADDRESS", "")
    if address.startswith("ray://"):
        raise ConfigError(f"RAY_ADDRESS={address}: the engine runs on a node of the cluster, not as a client")
    host, _, port = address.rpartition(":")
    try:
        if port.isdecimal():
            # Ray itself tries for minutes, whatever the timeout.
            socket.create_connection((host.strip("[]"), int(port)), timeout).close()
        ray.init(address="auto", logging_level=logging.WARNING)
    except (OSError, RuntimeError, RayError) as error:
        where = f"at RAY_ADDRESS={address}" if address else "on this host"
        raise ConfigError(
            f"no Ray cluster answers {where}: start one with `ray start --head`, or join one with "
            f"`ray start --address=HEAD:6379` ({_reason(error)})"
        ) from error


def _device_kind(config: EngineConfig) -> str:
    if config.device.startswith("cuda:"):
        raise ConfigError(f"device={config.device}: Ray picks the devices, use device=cuda")
    if config.device != "auto":
        return "GPU" if config.device == "cuda" else "CPU"
    return "GPU" if ray.cluster_resources().get("GPU", 0) >= config.world_size else "CPU"


def _reserve(ranks: int, kind: str, timeout: float) -> PlacementGroup:
    group = placement_group([{kind: 1}] * ranks, strategy="PACK")
    try:
        if (there := ray.cluster_resources().get(kind, 0)) < ranks:
            logger.warning("waiting for %d × %s; the cluster has %g", ranks, kind, there)
        if group.wait(timeout):
            return group
        there, free = (found().get(kind, 0) for found in (ray.cluster_resources, ray.available_resources))
        raise ConfigError(
            f"asked for {ranks} × {kind}, one a rank: the cluster has {there:g} on {_alive()} nodes, "
            f"{free:g} of them free, and did not give {ranks} within {timeout:g} s"
        )
    except BaseException:
        _remove(group)
        raise


def _alive() -> int:
    return sum(node["Alive"] for node in ray.nodes())


def _remove(group: PlacementGroup) -> None:
    if ray.is_initialized():
        remove_placement_group(group)


def _environment() -> dict[str, str | None]:
    """What to set for the workers: Ray's default is one compute thread each, ours a share of the cores."""
    carried = {name: value for name, value in os.environ.items() if name.startswith(_CARRIED)}
    return {**carried, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS")}


def _reason(error: BaseException) -> str:
    """Return the last and most telling line of Ray's account."""
    lines = str(error).strip().splitlines()
    return lines[-1].strip()[:250] if lines else type(error).__name__
