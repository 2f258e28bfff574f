"""The place where the workers of all engines that share experts meet, told through the coordinator."""

import math
import time

import zmq

from enginecore.data_parallel.link import RankLink
from enginecore.data_parallel.messages import GroupAddress, RankPlace
from enginecore.errors import EngineDeadError


class Meeting:
    """Tells the engines of a group the address at which the first worker of the first of them listens.

    It serves the link while an engine starts. No wave can be announced meanwhile, as that takes all engines.
    """

    def __init__(self, link: RankLink, place: RankPlace, timeout: float) -> None:
        """`timeout` is how many seconds an engine waits for the address."""
        self._link = link
        self._place = place
        self._timeout = timeout
        self._told = False

    @property
    def is_first(self) -> bool:
        """Whether the workers of this engine listen for those of the others."""
        return self._place.rank == 0

    def address(self) -> str:
        """Wait until the first engine has told the address, and return it.

        Raises:
            EngineDeadError: it has not within the timeout.
        """
        poller = zmq.Poller()
        poller.register(self._link.socket, zmq.POLLIN)
        until = time.monotonic() + self._timeout
        while True:
            for message in self._link.receive():
                if isinstance(message, GroupAddress) and message.group == self._place.group:
                    return message.address
            left = until - time.monotonic()
            if left <= 0:
                raise EngineDeadError(
                    f"rank 0 has not told within {self._timeout:g} s where workers that share experts meet"
                )
            poller.poll(math.ceil(1000 * min(left, self._link.due())))

    def tell(self, address: str) -> None:
        """Tell the other engines, and keep the link alive; for the first engine, which calls this often."""
        if address and self.is_first and not self._told:
            self._told = True
            self._link.send(GroupAddress(self._place.rank, self._place.group, address))
        self._link.receive()

    def due(self) -> float:
        """Return within how many seconds `tell` is to be called again."""
        return self._link.due()
