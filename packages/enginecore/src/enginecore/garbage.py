"""Garbage collection in a process that serves: pauses kept short."""

import gc

_THRESHOLDS = 5_000, 10, 20
"""Objects made beyond those freed until the young are looked at, and how often the next older are: a full
collection comes after a million, where Python's own comes after 70,000."""


def freeze_start() -> None:
    """Leave all that the start has made out of collections from now on, and make full ones rare.

    A full collection walks every object: some hundred thousand after the imports and two or three hundred
    for each request that runs, which is 0.1 to 0.2 s for a thousand of them, in which no token moves.
    Reference counts free nearly everything without it.
    """
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
