"""Workers as actors of a Ray cluster, on one node or several.

Ray finds devices and starts processes; settings, steps and results go over links. It ends the actors of a
core that is gone; the link tells them sooner.
"""

import concurrent.futures
import functools
import logging
import os
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec

from enginecore.config import EngineConfig
from enginecore.errors import ConfigError, EngineDeadError
from enginecore.executor.distributed import Ending, RankLocation, WorkerHandle
from enginecore.executor.link import CoreEnd, LinkError
from enginecore.executor.messages import LinkSettings
from enginecore.threads import THREAD_VARIABLES, user_environment

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


class ActorHome(NamedTuple):
    """The node and process of an actor."""

    node: str
    """Ray's id of the node."""
    host: str
    """The node's address."""
    pid: int


class RankActor:
    """The class of each actor. Torch is imported when it serves."""

    def home(self) -> ActorHome:
        """Return where this actor runs."""
        return ActorHome(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), os.getpid())

    def serve(self, address: bytes, environment: dict[str, str | None]) -> str:
        """Serve the core at the other end of a link, and end this process when the core is gone.

        `environment` is set before, where None removes a variable. Returns only when the core cannot be
        reached: the error.
        """
        for name, value in environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        from enginecore.worker.process import serve_link

        try:
            serve_link(msgspec.json.decode(address, type=LinkSettings))
        except LinkError as error:
            return str(error)
        # At once, without waiting for the threads of torch and gloo, of which some may wait for other ranks.
        os._exit(0)


def join_cluster(config: EngineConfig) -> EngineConfig:
    """Join the cluster at RAY_ADDRESS or of this host; return `config` with the kind of device of all ranks.

    Raises:
        ConfigError: there is no cluster, or `config` names one device.
    """
    _connect(config.distributed_timeout_seconds)
    if config.device.startswith("cuda:"):
        raise ConfigError(f"device={config.device}: Ray picks the devices, use device=cuda")
    if config.device != "auto":
        return config
    ranks = config.world_size * config.data_parallel_size
    on_gpus = ray.cluster_resources().get("GPU", 0) >= ranks
    return replace(config, device="cuda" if on_gpus else "cpu")


def start_actors(config: EngineConfig) -> list[WorkerHandle]:
    """Start an actor for each rank on a device of the cluster, and a worker in each; wait for no worker.

    Raises:
        ConfigError: the cluster does not give the devices within the timeout.
        EngineDeadError: an actor cannot start.
    """
    timeout = config.distributed_timeout_seconds
    kind = "GPU" if config.device == "cuda" else "CPU"
    group = _reserve(config.world_size, kind, timeout)
    try:
        nodes = placement_group_table(group)["bundles_to_node_id"]
        own = ray.get_runtime_context().get_node_id()
        order = rank_order([nodes[i] for i in range(config.world_size)], config.tensor_parallel_size, own)
        actors = [_start_actor(group, bundle, kind) for bundle in order]
        homes = _homes(actors, timeout)
        sharing = _ranks_by_node([home.node for home in homes], config, kind)
        return [
            RayWorker(
                rank,
                homes[rank].pid,
                _location(homes, rank, own, kind, sharing),
                CoreEnd(ray.util.get_node_ip_address(), timeout),
                actor,
                functools.partial(_remove, group),
            )
            for rank, actor in enumerate(actors)
        ]
    except BaseException:
        _remove(group)
        raise


class RayWorker:
    """A worker in an actor; see `WorkerHandle`."""

    def __init__(
        self,
        rank: int,
        pid: int,
        location: RankLocation,
        link: CoreEnd,
        actor: Any,
        remove: Callable[[], None],
    ) -> None:
        """Have `actor` serve the other end of `link`; `remove` ends the actors of all ranks."""
        self.rank = rank
        self.pid = pid
        self.location = location
        self.link = link
        self._actor = actor
        self._remove = remove
        served = actor.serve.remote(msgspec.json.encode(link.settings), _environment())
        self._outcome: concurrent.futures.Future[str] = served.future()
        # Closed by the future, or with it, whereupon the other end is readable.
        self._over, over = socket.socketpair()
        self._outcome.add_done_callback(lambda _: over.close())
        link.watch(self._over.fileno())

    def ending(self) -> Ending:
        """Wait a little for what Ray knows of it."""
        concurrent.futures.wait([self._outcome], _GRACE)
        where = f"on {self.location.host}"
        if not self._outcome.done():
            return Ending(f"{where} is not heard of any more", [])
        error = self._outcome.exception()
        return Ending(f"{where} has ended: {self._outcome.result() if error is None else _reason(error)}", [])

    def release(self) -> None:
        """End it: a worker has nothing to put in order."""
        if ray.is_initialized():
            ray.kill(self._actor)
        self.link.close()

    def end(self, timeout: float) -> None:
        """Wait for its end, then for that of all."""
        if ray.is_initialized():
            concurrent.futures.wait([self._outcome], timeout)
        self._remove()
        self._over.close()


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


def _start_actor(group: PlacementGroup, bundle: int, kind: str) -> Any:
    return (
        ray.remote(RankActor)
        .options(
            num_cpus=1 if kind == "CPU" else 0,
            num_gpus=1 if kind == "GPU" else 0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
        )
        .remote()
    )


def _homes(actors: Sequence[Any], timeout: float) -> list[ActorHome]:
    try:
        return ray.get([actor.home.remote() for actor in actors], timeout=timeout)
    except GetTimeoutError as error:
        raise EngineDeadError(f"the {len(actors)} actors did not all start within {timeout:g} s") from error
    except RayError as error:
        raise EngineDeadError(f"an actor could not start: {_reason(error)}") from error


def _location(
    homes: Sequence[ActorHome], rank: int, own: str, kind: str, sharing: Mapping[str, int]
) -> RankLocation:
    """Return where `rank` runs; `own` is the node of this process, `sharing` as `_ranks_by_node` returns."""
    node = homes[rank].node
    return RankLocation(
        homes[rank].host,
        # Ray lets a process see no other GPU than its own.
        local_rank=0 if kind == "GPU" else sum(home.node == node for home in homes[:rank]),
        local_size=sharing[node],
        on_core_host=node == own,
    )


def _ranks_by_node(nodes: Sequence[str], config: EngineConfig, kind: str) -> dict[str, int]:
    """Return how many ranks may share each of `nodes`, on which this engine's are.

    Those of other engines that share the requests come to any node that has room for them.
    """
    room = {node["NodeID"]: int(node["Resources"].get(kind, 0)) for node in ray.nodes()}
    others = (config.data_parallel_size - 1) * config.world_size
    return {node: count + min(others, max(0, room[node] - count)) for node, count in Counter(nodes).items()}


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
    """Variables to set for workers: Ray defaults to one compute thread each, we to a share of the cores."""
    own = user_environment()
    carried = {name: value for name, value in own.items() if name.startswith(_CARRIED)}
    return {**carried, **{name: own.get(name) for name in THREAD_VARIABLES}}


def _reason(error: BaseException) -> str:
    """Return the last and most telling line of Ray's account."""
    lines = str(error).strip().splitlines()
    return lines[-1].strip()[:250] if lines else type(error).__name__
