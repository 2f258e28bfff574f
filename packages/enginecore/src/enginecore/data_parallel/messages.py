"""Messages between the coordinator, the ranks and the front-ends, sent as msgpack by `enginecore.codec`."""

import msgspec
import numpy as np
from numpy.typing import NDArray

SIGN_OF_LIFE = 1.0
"""Most seconds between two messages of a rank, a front-end or the coordinator, though nothing has changed."""


class RankPlace(msgspec.Struct, frozen=True):
    """A core's place among those that share the requests."""

    rank: int = 0
    """Among all."""
    local_index: int = 0
    """Among those of this host, which share its devices, cores and memory."""
    local_count: int = 1
    incarnation: int = 0
    """Counts the starts of this rank."""
    group: int = 0
    """Counts the starts of all ranks together, where they share experts."""


ALONE = RankPlace()
"""The only rank."""


class CoordinatorAddress(msgspec.Struct, frozen=True):
    """Where the coordinator is reached."""

    reports: str
    """ZMQ endpoint that ranks and front-ends connect to."""
    snapshots: str
    """ZMQ endpoint that sends every front-end the loads of all ranks."""
    key: str | None = None
    """CURVE secret key, in Z85, that the coordinator and all who may speak to it share; None: no CURVE."""


class RegisterRank(msgspec.Struct, tag="rank", array_like=True):
    """Rank to coordinator: first message after each connection, and again every second, as a sign of life."""

    rank: int
    num_ranks: int
    """Ranks that share the requests; those in lockstep wait until all are registered."""
    incarnation: int
    """Counts the starts of this rank."""
    num_blocks: int
    """0 while its model loads: it is in no snapshot then, and no wave waits for it."""
    max_num_seqs: int
    group: int = 0
    """Counts the starts of the whole group; what an earlier one left behind is forgotten."""
    wave: int | None = None
    """Number of waves that it has seen end; None: it does not run in lockstep with others."""
    again: bool = False
    """Whether it was registered before, maybe with a coordinator that has started a wave since and died."""


class LoadReport(msgspec.Struct, tag="load", array_like=True):
    """Rank to coordinator: its load after a step, on change and at most every 20 ms."""

    rank: int
    at: float
    """Seconds of the rank's clock, when it had last taken in requests; see `ClockOffset`."""
    waiting: int
    running: int
    free_blocks: int
    tokens: int
    """Tokens, of prompts and generated, that its requests hold or have yet to run."""
    step_seconds: float
    """Duration of the last step."""
    steps: int
    """Steps since its start."""


class NeedWave(msgspec.Struct, tag="need_wave", array_like=True):
    """Rank to coordinator: it has requests while its group idles after wave number `wave`."""

    rank: int
    wave: int


class WaveEnded(msgspec.Struct, tag="wave_ended", array_like=True):
    """Rank to coordinator: the group has agreed that wave number `wave` has ended."""

    rank: int
    wave: int
    steps: int
    """Steps that it lasted, of which `empty` ran no request of this rank."""
    empty: int


class GroupAddress(msgspec.Struct, tag="group_address", array_like=True):
    """Rank 0 to coordinator, and that to the ranks of the group that load: where the workers of all meet."""

    rank: int
    """The sender's."""
    group: int
    """Counts the starts of the whole group."""
    address: str
    """host:port."""


class RegisterFrontend(msgspec.Struct, tag="frontend", array_like=True):
    """Front-end to coordinator: it listens to the snapshots; sent again every second, as a sign of life."""

    index: int


class AskStatus(msgspec.Struct, tag="ask_status", array_like=True):
    """Anybody to coordinator: answered with `Status`."""


class StartWave(msgspec.Struct, tag="start_wave", array_like=True):
    """Coordinator to ranks in lockstep: run steps from now on; the wave gets number `wave`.

    One that is not above the number of the last wave begun is passed over. During a wave, the next number is
    kept until that has ended: another rank was faster to see its end. A greater one renumbers the wave.
    """

    wave: int


class RegisterAgain(msgspec.Struct, tag="register_again", array_like=True):
    """Coordinator to a rank that it does not know, such as after its own restart: register."""


class Snapshot(msgspec.Struct, tag="snapshot", array_like=True):
    """Coordinator to front-ends: the newest loads, a column an attribute, ranks ascending; [ranks] each."""

    at: float
    """Seconds of the coordinator's clock; see `ClockOffset`."""
    ranks: NDArray[np.int32]
    incarnations: NDArray[np.int32]
    ages: NDArray[np.float32]
    """Seconds from `LoadReport.at` to `at`; -1: the rank has not reported yet, its loads are 0."""
    waiting: NDArray[np.int32]
    running: NDArray[np.int32]
    free_blocks: NDArray[np.int32]
    num_blocks: NDArray[np.int32]


class RankStatus(msgspec.Struct):
    """A rank as `Status` tells of it."""

    rank: int
    incarnation: int
    """Times that it was started again."""
    ready: bool
    """Whether its model is loaded."""
    age: float
    """Seconds since its last message."""
    waiting: int = 0
    running: int = 0
    free_blocks: int = 0
    num_blocks: int = 0
    tokens: int = 0
    step_seconds: float = 0.0
    steps: int = 0
    wave: int | None = None


class WaveStatus(msgspec.Struct):
    """The waves of the ranks that run in lockstep."""

    group: int
    """Times that the whole group was started again."""
    ended: int
    running: bool
    steps: int
    """Steps of the waves that ended, and of those the ones that ran no request of the reporting rank."""
    empty: int


class Status(msgspec.Struct, tag="status"):
    """Coordinator to whoever asks."""

    uptime: float
    """Seconds."""
    messages: int
    """Messages that it has taken."""
    snapshots: int
    """Snapshots that it has sent."""
    frontends: list[int]
    """Indices of the front-ends; those of several servers may be equal."""
    ranks: list[RankStatus]
    waves: WaveStatus | None = None
    """None where no ranks run in lockstep."""


RankMessage = RegisterRank | LoadReport | NeedWave | WaveEnded | GroupAddress
ToCoordinator = RankMessage | RegisterFrontend | AskStatus
ToRank = StartWave | GroupAddress | RegisterAgain
"""What a rank is sent."""


class ClockOffset:
    """Translates times of another process's clock, from the delays of its messages.

    The offset is the least delay seen, so a message that waited counts from when it was sent. It grows by
    10 µs a message, so that clocks of two hosts may drift.
    """

    def __init__(self) -> None:
        self._offset = float("inf")

    def local(self, at: float, now: float) -> float:
        """Return `at`, the time in a message that arrives `now`, as a time of this process's clock."""
        self._offset = min(self._offset + 1e-5, now - at)
        return at + self._offset
