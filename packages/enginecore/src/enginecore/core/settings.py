"""Settings of a core's process."""

import msgspec

from enginecore.config import EngineConfig
from enginecore.data_parallel.messages import ALONE, CoordinatorAddress, RankPlace
from enginecore.logs import LogSettings


class CoreSettings(msgspec.Struct):
    """Settings of the process: one line of JSON on its standard input."""

    config: EngineConfig
    address: str
    """ZMQ endpoint to bind."""
    board: str
    """Path of the board; see `enginecore.core.board`."""
    place: RankPlace = ALONE
    coordinator: CoordinatorAddress | None = None
    log: LogSettings = LogSettings()
    """Those of who started it: what that logs of this package, this process does too."""
