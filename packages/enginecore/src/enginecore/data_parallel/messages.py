"""Messages between the coordinator, the ranks and the front-ends, sent as msgpack by `enginecore.codec`."""

import msgspec
import numpy as np
from numpy.typing import NDArray


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
    """The CURVE secret key, in Z85, that the coordinator and all who may speak to it share; None over ipc."""


class RegisterRank(msgspec.Struct, tag="rank", array_like=True):
    """Rank to coordinator: first message after each connection, and again when it is asked for."""

    rank: int
    incarnation: int
    """Counts the starts of this rank."""
    num_blocks: int
    max_num_seqs: int
    wave: int | None = None
    """Number of waves it has seen end; None: it does not run in lockstep with others."""


class LoadReport(msgspec.Struct, tag="load", array_like=True):
    """Rank to coordinator: its load after a step, on change and at most every 20 ms."""

    rank: int
    at: float
    """Seconds of the rank's monotonic clock, which processes of a host share."""
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
    """Rank 0 to coordinator, and that to the other ranks: where the workers of all ranks meet."""

    group: int
    """Counts the starts of the whole group."""
    address: str
    """host:port."""


class RegisterFrontend(msgspec.Struct, tag="frontend", array_like=True):
    """Front-end to coordinator: it listens to the snapshots; answered with a `Snapshot` at once."""

    index: int


class AskStatus(msgspec.Struct, tag="ask_status", array_like=True):
    """Anybody to coordinator: answered with `Status`."""


class StartWave(msgspec.Struct, tag="start_wave", array_like=True):
    """Coordinator to ranks in lockstep: run steps from now on; the wave gets number `wave`."""

    wave: int


class RegisterAgain(msgspec.Struct, tag="register_again", array_like=True):
    """Coordinator to whoever it does not know, such as after its own restart: register."""


class Snapshot(msgspec.Struct, tag="snapshot", array_like=True):
    """Coordinator to front-ends: the newest loads, a column an attribute, ranks ascending; [ranks] each."""

    ranks: NDArray[np.int64]
    incarnations: NDArray[np.int64]
    ages: NDArray[np.float32]
    """Seconds between the rank's report and this snapshot, as far as the coordinator can tell."""
    waiting: NDArray[np.int64]
    running: NDArray[np.int64]
    free_blocks: NDArray[np.int64]
    num_blocks: NDArray[np.int64]
    tokens: NDArray[np.int64]
    step_seconds: NDArray[np.float32]


RankMessage = RegisterRank | LoadReport | NeedWave | WaveEnded | GroupAddress
ToCoordinator = RankMessage | RegisterFrontend | AskStatus
ToRank = StartWave | GroupAddress | RegisterAgain
ToFrontend = Snapshot | RegisterAgain
