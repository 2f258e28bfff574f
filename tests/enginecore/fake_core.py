"""A core's process without a model: it says and does what its script says.

`fake_core.py FOLDER`: the first of the files FOLDER/RANK-INCARNATION, FOLDER/RANK and FOLDER/all that exists
is run as Python, with `settings`, `board` and the functions of this file.
"""

import os
import signal
import sys
from pathlib import Path

import msgspec
import numpy as np

from enginecore.core.board import Board
from enginecore.core.settings import CoreSettings
from enginecore.messages import EngineLimits, Failed, Loading, Ready

settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=CoreSettings)
board = Board(Path(settings.board))


def report(message: Loading | Ready | Failed) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


def ready(num_blocks: int = 8, *, lockstep: bool = False, pids: tuple[int, ...] = ()) -> None:
    """Report that the model is loaded."""
    config = settings.config
    limits = EngineLimits(
        max_model_len=config.max_model_len or 64,
        vocab_size=320,
        num_blocks=config.num_blocks_override or num_blocks,
        block_size=16,
        lockstep=lockstep,
    )
    report(Ready(limits, list(pids)))


def load(phase: str, done: int, total: int) -> None:
    """Report how far its start is."""
    report(Loading(phase, done, total))


def steps(count: int) -> None:
    """Have done so many steps."""
    for _ in range(count):
        board.begin_step([np.array([1])], 1, alone=False)
        board.end_step([], 1, 0.0)


def fail(message: str, *, in_scheduling: bool = False) -> None:
    report(Failed(message, in_scheduling))
    sys.exit(3)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def serve() -> None:
    """Go round, as an idle core does, until the parent lets it end."""
    import select

    while not select.select([sys.stdin], [], [], 0.02)[0]:
        board.beat()


def hang() -> None:
    signal.pause()


place = settings.place
folder = Path(sys.argv[1])
names = (f"{place.rank}-{place.incarnation}", f"{place.rank}", "all")
script = next(folder / name for name in names if (folder / name).exists())
exec(script.read_text())
