"""How one step reaches every worker: a ring in shared memory on the core's host, links to others."""

from collections.abc import Sequence

from collectives.ring import RingBroadcast, RingError
from enginecore.errors import OctavoError
from enginecore.executor.link import CoreEnd, LinkError

_RING = 16 << 20
"""Bytes: some hundred steps in which rows only decode, or a step with millions of prompt tokens."""


class StepsStuck(OctavoError):
    """A worker takes no steps."""


class StepWriter:
    """Sends steps to `readers` workers of this host and to those at the far end of `links`."""

    def __init__(self, readers: int, links: Sequence[CoreEnd], timeout: float) -> None:
        """`timeout` is how many seconds a step waits for room at a worker."""
        self._ring = RingBroadcast(readers, _RING) if readers else None
        self._links = links
        self._timeout = timeout

    @property
    def ring(self) -> str | None:
        """Address of the ring; None where it would have no readers."""
        return None if self._ring is None else self._ring.address

    def write(self, step: bytes) -> None:
        """Send a step, whole and in order; StepsStuck when a worker makes no room for it in time."""
        try:
            for link in self._links:
                link.write(step)
            if self._ring is not None:
                self._ring.write(step, self._timeout)
        except (LinkError, RingError) as error:
            raise StepsStuck(str(error)) from error

    def close(self) -> None:
        """Let workers of this host have what was sent; links are closed by those that hold them."""
        if self._ring is not None:
            self._ring.close()
