"""Exceptions of the package. A mistake of the caller is a ValueError instead."""


class OutOfBlocks(Exception):
    """More blocks were requested than are free. Nothing was taken or changed.

    `requested` and `free` are numbers of blocks.
    """

    def __init__(self, requested: int, free: int) -> None:
        super().__init__(requested, free)
        self.requested = requested
        self.free = free

    def __str__(self) -> str:
        return f"{self.requested} blocks were requested and {self.free} are free"


class IntegrityError(AssertionError):
    """The bookkeeping contradicts itself; raised by the `check` methods with the numbers that disagree."""


def require(holds: bool, broken: str) -> None:
    """Raise `IntegrityError(broken)` unless the invariant holds."""
    if not holds:
        raise IntegrityError(broken)
