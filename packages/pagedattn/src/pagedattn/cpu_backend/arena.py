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
    """Give each tensor its place, the largest first (Pisarchyk and Lee, https://arxiv.org/abs/2001.03288).

    No two overlap that are both in use, from the first call that uses one to the last.
    """
    uses: dict[int, list[int]] = {}
    for index, call in enumerate(arguments):
        for argument in call:
            if argument.place is not None and argument.place.made is not None:
                uses.setdefault(argument.place.made, []).append(index)
    sizes = {made: -(-per_token(first, second, made) // ALIGNMENT) * ALIGNMENT for made in uses}
    offsets: dict[int, int] = {}
    for made in sorted(uses.keys() - returned.keys(), key=lambda made: (-sizes[made], made)):
        begin = 0
        for other in sorted(offsets, key=offsets.__getitem__):
            if uses[other][-1] < uses[made][0] or uses[made][-1] < uses[other][0]:
                continue
            if offsets[other] - begin >= sizes[made]:
                break
            begin = max(begin, offsets[other] + sizes[other])
        offsets[made] = begin
    return _Layout(offsets, max((offset + sizes[made] for made, offset in offsets.items()), default=0))
