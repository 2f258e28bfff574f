"""What the scheduler needs of the memory that holds keys and values."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class Memory(Protocol):
    """Blocks of `block_size` tokens each, held by rows and possibly shared between rows.

    A row is opened, grown ahead of every step by what the step will write, told what was computed, and
    closed. All arrays are int [n], one element a row, rows distinct.
    """

    @property
    def block_size(self) -> int:
        """Tokens a block holds."""
        ...

    @property
    def num_blocks(self) -> int:
        """All blocks, held or free. A request that needs more is refused."""
        ...

    @property
    def num_free(self) -> int:
        """Blocks that a row could be given now."""
        ...

    def prefix(self, tokens: NDArray[np.int32], extra: Sequence[tuple[str, bytes]], *, reuse: bool) -> Any:
        """What the memory wants to know of a request with these tokens (int32 [n]); made once, opaque here.

        It goes with the request through preemption. Unless `reuse`, `open` must find nothing cached for it.
        """
        ...

    def fits(self, prefix: Any, length: int, reserve: int) -> bool:
        """Whether a row opened now can grow to `length` tokens and leave `reserve` blocks free.

        A `reserve` below zero counts on as many more blocks coming free.
        """
        ...

    def open(self, row: int, prefix: Any) -> int:
        """Begin a row, and return how many leading tokens need no computing: fewer than the request has.

        If the prefix has a copy in the host tier, that comes back.
        """
        ...

    def needed(self, rows: NDArray[np.intp], lengths: NDArray[np.int32]) -> int:
        """How many free blocks `grow` would take.

        A row that stays inside the last block it has takes none, and leaving rows out never takes more.
        """
        ...

    def grow(self, rows: NDArray[np.intp], lengths: NDArray[np.int32]) -> None:
        """Give each row blocks for `lengths` tokens in all. Called only when they are free."""
        ...

    def computed(self, rows: NDArray[np.intp], lengths: NDArray[np.int32], tokens: NDArray[np.int32]) -> None:
        """Keys and values of `tokens[row, :length]` exist now.

        `tokens` is int32 [max_num_seqs, max_model_len], each row good up to its length.
        """
        ...

    def close(self, row: int) -> None:
        """Take the row's blocks back. No step in flight reads or writes them any more."""
        ...

    def swap_out(self, row: int) -> bool:
        """Close the row and keep what it has computed in the host tier, for its prefix to open with.

        False, with nothing changed, if there is no room. Called by `Swap` only.
        """
        ...

    def forget(self, prefix: Any) -> None:
        """Drop the prefix's copy in the host tier, if it has one. Called by `Swap` only."""
        ...
