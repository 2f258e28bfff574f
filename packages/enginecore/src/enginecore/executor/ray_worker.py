"""A worker as an actor of a Ray cluster; `ray_cluster` starts it. Torch is imported when it serves."""

import os
from typing import NamedTuple

import msgspec

from enginecore.executor.link import LinkError, serve_link
from enginecore.executor.placement import free_address
from enginecore.executor.wire import WorkerSettings, encode_message


class Home(NamedTuple):
    """Where an actor runs."""

    node: str
    """Ray's id of the node."""
    host: str
    """The node's address."""
    pid: int


class RankActor:
    """What each actor is. Settings and failures cross as bytes, so that Ray pickles nothing of ours."""

    def home(self) -> Home:
        """Say where this is."""
        import ray

        return Home(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), os.getpid())

    def free_address(self) -> str:
        """Return an address of this node, host:port, on which nobody listens."""
        import ray

        return free_address(ray.util.get_node_ip_address())

    def serve(self, settings: bytes, environment: dict[str, str | None]) -> bytes:
        """Serve until the core is gone, and end this process.

        `environment` is set before, where None removes a variable. Returns only when the core cannot be
        reached: the failure, encoded.
        """
        for name, value in environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        try:
            status = serve_link(msgspec.json.decode(settings, type=WorkerSettings))
        except LinkError as error:
            from enginecore.worker.loop import failure

            return encode_message(failure(error))
        # At once, without waiting for the threads of torch and gloo, of which some may wait for other ranks.
        os._exit(status)
