"""Memory of a program's results between its kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from pagedattn.cpu_backend.recording import Argument, Recording, TensorKind, per_token

ALIGNMENT = 64


class Arena:
    """One piece of memory, in which a tensor has a place from the first call that uses it to the last.

    Places are multiples of the number of tokens, which a run decides.
    """

    def __init__(
        self,
        first: Recording,
        second: Recording,
        arguments: Sequence[Sequence[Argument]],
        returned: dict[int, int],
        max_tokens: int,
    ) -> None:
        """`arguments` are those of all calls; tensors that are `returned` lie elsewhere."""
        layout = _lay_out(first, second, arguments, returned)
        self.offsets = layout.offsets
        """By made tensor: where it begins, in bytes per token."""
        self._memory = torch.empty(
            layout.bytes_per_token * max_tokens + ALIGNMENT, dtype=torch.uint8, device="cpu"
        )
        self._storage = self._memory.untyped_storage()
        self.address = -(-self._memory.data_ptr() // ALIGNMENT) * ALIGNMENT
        self._start = self.address - self._storage.data_ptr()

    @property
    def nbytes(self) -> int:
        """Bytes of the memory."""
        return self._memory.nbytes

    def tensor(self, made: int, offset: int, kind: TensorKind, tokens: int) -> torch.Tensor:
        """Return the tensor [tokens, …] that begins `offset` bytes after the beginning of a made one."""
        begin = self._start + self.offsets[made] * tokens + offset
        return tensor_in(self._storage, begin, kind, tokens)


def tensor_in(storage: torch.UntypedStorage, begin: int, kind: TensorKind, tokens: int) -> torch.Tensor:
    """Return a tensor [tokens, …] over memory, from `begin` bytes on."""
    empty = torch.empty(0, dtype=kind.dtype, device="cpu")
    return empty.set_(storage, begin // kind.dtype.itemsize, (tokens, *kind.shape), kind.stride)


class _Layout(NamedTuple):
    offsets: dict[int, int]
    bytes_per_token: int


def _lay_out(
    first: Recording,
    second: Recording,
    arguments: Sequence[Sequence[Argument]],
    returned: dict[int, int],
) -> _Layout:
    """Give each tensor the first gap that is free from the first call that uses it to the last."""
    uses: dict[int, list[int]] = {}
    for index, call in enumerate(arguments):
        for argument in call:
            if argument.place is not None and argument.place.made is not None:
                uses.setdefault(argument.place.made, []).append(index)
    offsets: dict[int, int] = {}
    live: list[tuple[int, int, int]] = []  # begin, end, last use
    most = 0
    for made, indices in sorted(uses.items(), key=lambda item: item[1][0]):
        size = -(-per_token(first, second, made) // ALIGNMENT) * ALIGNMENT
        if made in returned:
            continue
        live = sorted(span for span in live if span[2] >= indices[0])
        begin = 0
        for taken, end, _ in live:
            if taken - begin >= size:
                break
            begin = max(begin, end)
        offsets[made] = begin
        live.append((begin, begin + size, indices[-1]))
        most = max(most, begin + size)
    return _Layout(offsets, most)
