"""Memory of a program's results between its kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from pagedattn.cpu_backend.recording import Argument, Recording, Size, TensorKind, size_of

ALIGNMENT = 64


class Offset(NamedTuple):
    """Bytes from the beginning of the arena: so many for each token of a run, and a constant."""

    per_token: int
    constant: int


class Arena:
    """One piece of memory, in which a tensor has a place from the first call that uses it to the last.

    Tensors of a constant size keep theirs.
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
        size = layout.size
        self.offsets = layout.offsets
        """By made tensor: where it begins."""
        count = size.per_token * max_tokens + size.constant + ALIGNMENT
        self._memory = torch.empty(count, dtype=torch.uint8, device="cpu")
        self._storage = self._memory.untyped_storage()
        self.address = -(-self._memory.data_ptr() // ALIGNMENT) * ALIGNMENT
        self._start = self.address - self._storage.data_ptr()

    @property
    def nbytes(self) -> int:
        """Bytes of the memory."""
        return self._memory.nbytes

    def tensor(self, made: int, offset: int, kind: TensorKind, tokens: int) -> torch.Tensor:
        """Return the tensor [tokens, …] that begins `offset` bytes after the beginning of a made one."""
        place = self.offsets[made]
        begin = self._start + place.per_token * tokens + place.constant + offset
        return tensor_in(self._storage, begin, kind, tokens)


def tensor_in(storage: torch.UntypedStorage, begin: int, kind: TensorKind, tokens: int) -> torch.Tensor:
    """Return a tensor [tokens, …] over memory, from `begin` bytes on."""
    empty = torch.empty(0, dtype=kind.dtype, device="cpu")
    return empty.set_(storage, begin // kind.dtype.itemsize, (tokens, *kind.shape), kind.stride)


class _Layout(NamedTuple):
    offsets: dict[int, Offset]
    size: Size


def _lay_out(
    first: Recording,
    second: Recording,
    arguments: Sequence[Sequence[Argument]],
    returned: dict[int, int],
) -> _Layout:
    """Give each tensor a place: first those of a constant size, then the others."""
    uses: dict[int, list[int]] = {}
    for index, call in enumerate(arguments):
        for argument in call:
            if argument.place is not None and argument.place.made is not None:
                uses.setdefault(argument.place.made, []).append(index)
    sizes = {made: size_of(first, second, made) for made in uses}
    kept = [made for made in uses if made not in returned]
    offsets: dict[int, Offset] = {}
    constant = 0
    for made in kept:
        if not sizes[made].per_token:
            offsets[made] = Offset(0, constant)
            constant += _aligned(sizes[made].constant)
    scaled = {made: _aligned(sizes[made].per_token) for made in kept if sizes[made].per_token}
    starts, per_token = _largest_first(scaled, uses)
    offsets |= {made: Offset(start, constant) for made, start in starts.items()}
    return _Layout(offsets, Size(per_token, constant))


def _largest_first(sizes: dict[int, int], uses: dict[int, list[int]]) -> tuple[dict[int, int], int]:
    """Give each tensor its place, the largest first (Pisarchyk and Lee, https://arxiv.org/abs/2001.03288).

    No two overlap that are both in use, from the first call that uses one to the last. Returns starts and the
    end of all.
    """
    starts: dict[int, int] = {}
    for made in sorted(sizes, key=lambda made: (-sizes[made], made)):
        begin = 0
        for other in sorted(starts, key=starts.__getitem__):
            if uses[other][-1] < uses[made][0] or uses[made][-1] < uses[other][0]:
                continue
            if starts[other] - begin >= sizes[made]:
                break
            begin = max(begin, starts[other] + sizes[other])
        starts[made] = begin
    return starts, max((start + sizes[made] for made, start in starts.items()), default=0)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
