"""How a row that is preempted gives its memory up, and how it comes back."""

from typing import Any, Protocol

from batchsched.memory import Memory


class Preemption(Protocol):
    """What becomes of a preempted row's keys and values."""

    def suspend(self, memory: Memory, row: int) -> None:
        """Free the row's blocks."""
        ...

    def resume(self, memory: Memory, row: int, prefix: Any) -> int:
        """Begin a row, maybe another, for the request again, and return how many tokens need no computing."""
        ...

    def forget(self, memory: Memory, prefix: Any) -> None:
        """A request that was suspended ends without coming back."""
        ...


class Recompute:
    """Keys and values are dropped and computed again, but for those still found in the prefix cache."""

    def suspend(self, memory: Memory, row: int) -> None:
        memory.close(row)

    def resume(self, memory: Memory, row: int, prefix: Any) -> int:
        return memory.open(row, prefix)

    def forget(self, memory: Memory, prefix: Any) -> None:
        """Nothing was kept."""


class Swap:
    """Keys and values are kept in the memory's host tier. When that is full they are dropped."""

    def suspend(self, memory: Memory, row: int) -> None:
        if not memory.swap_out(row):
            memory.close(row)

    def resume(self, memory: Memory, row: int, prefix: Any) -> int:
        return memory.open(row, prefix)

    def forget(self, memory: Memory, prefix: Any) -> None:
        memory.forget(prefix)
