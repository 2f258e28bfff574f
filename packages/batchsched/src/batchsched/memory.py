"""The memory that holds keys and values, as a protocol."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class Memory(Protocol):
    """Blocks of `block_size` tokens each, held by rows and possibly shared between rows.

    A row is allocated on admission, grown before every step by the tokens the step will write, committed
    after it with the tokens that are computed, and freed at the end. All arrays are int [n], one element a
    row, rows distinct.

    A row may be allocated on blocks that another one was grown for, even in the same plan: steps are run in
    the order of their plans, and a step writes all its tokens before it reads any.
    """

    @property
    def block_size(self) -> int:
        """Tokens a block holds."""
        ...

    @property
    def num_blocks(self) -> int:
        """All blocks, held or free."""
        ...

    @property
    def num_free(self) -> int:
        """Blocks that a row could be given now."""
        ...

    def blocks_for(self, length: int) -> int:
        """Return the most blocks a lone request of `length` tokens ever holds at once, over all layer groups.

        A request for which that is more than `num_blocks` is refused.
        """
        ...

    def prefix(self, tokens: NDArray[np.int32], extra: Sequence[tuple[str, bytes]], *, reuse: bool) -> Any:
        """Return the memory's own state of a request with these tokens (int32 [n]): hashes, cached blocks.

        Made once, opaque to the scheduler, and kept through preemption. Unless `reuse`, `allocate` must find
        nothing cached for it.
        """
        ...

    def fits(self, prefix: Any, length: int, reserve: int) -> bool:
        """Whether a row allocated now can grow to `length` tokens and leave `reserve` blocks free.

        A negative `reserve` counts on as many more blocks to be freed.
        """
        ...

    def allocate(self, row: int, prefix: Any) -> int:
        """Allocate a row, and return how many leading tokens need no computing: fewer than the request has.

        If the prefix has a copy in the host tier, that is restored.
        """
        ...

    def needed(self, rows: NDArray[np.intp], lengths: NDArray[np.int32]) -> int:
        """Return how many free blocks `grow` would take.

        A row that stays inside its last block takes none, and leaving rows out never takes more.
        """
        ...

    def grow(self, rows: NDArray[np.intp], lengths: NDArray[np.int32]) -> None:
        """Give each row blocks for `lengths` tokens in all. Called only when that many are free.

        The step that is being planned runs each row up to there. The last of those tokens may be drafts, or
        yet to be sampled by a step in flight.
        """
        ...

    def commit(self, rows: NDArray[np.intp], lengths: NDArray[np.int32], tokens: NDArray[np.int32]) -> None:
        """Record that keys and values of `tokens[row, :length]` are computed.

        `tokens` is int32 [max_num_seqs, max_model_len], each row valid up to its length.
        """
        ...

    def free(self, row: int) -> None:
        """Release the row's blocks. No step in flight reads or writes them any more."""
        ...


class SwapMemory(Memory, Protocol):
    """Memory with a host tier, which the preemption mode `Swap` needs."""

    def swap_out(self, row: int) -> bool:
        """Free the row and keep its computed blocks in the host tier, to be restored by `allocate`.

        Returns False, with nothing changed, if there is no room.
        """
        ...

    def discard(self, prefix: Any) -> None:
        """Drop the prefix's copy in the host tier, if it has one."""
        ...
