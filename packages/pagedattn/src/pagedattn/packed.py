"""Weights of linear layers, laid out for the kernels that multiply by them."""

from __future__ import annotations

import math
import mmap
import threading
from dataclasses import dataclass

import torch
from torch.nn import functional as F


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A weight `[outputs, inputs]` in a back end's layout; made by `pack_linear`.

    Where `panel` is 0, `data` is the plain weight. Otherwise it is `[panels, inputs / n, panel, n]`, with
    zeros beyond the last column and input: n inputs of a column make a word, two in bfloat16 and else one.
    """

    data: torch.Tensor
    outputs: int
    inputs: int
    panel: int

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)."""
        return self.outputs, self.inputs

    @property
    def dtype(self) -> torch.dtype:
        """Type that the weight is stored in."""
        return self.data.dtype

    @property
    def device(self) -> torch.device:
        """Device that the weight is on."""
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weight, with those that fill up its last panel."""
        return self.data.nbytes

    def unpack(self) -> torch.Tensor:
        """Return the plain weight `[outputs, inputs]`, of the stored dtype; a copy if it is packed."""
        if not self.panel:
            return self.data
        return self._columns().flatten(2).flatten(0, 1)[: self.outputs, : self.inputs]

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the weight's rows `ids` (int64, any shape) as `[..., inputs]`, as for tied embeddings.

        Raises IndexError for an id outside of `[0, outputs)`.
        """
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.outputs:
            raise IndexError(f"ids must be in [0, {self.outputs}), not {int(ids.min())} to {int(ids.max())}")
        if not self.panel:
            return self.data[ids]
        return self._columns()[ids // self.panel, ids % self.panel].flatten(-2)[..., : self.inputs]

    def _columns(self) -> torch.Tensor:
        """View the packed data as `[panels, columns, words, inputs of a word]`."""
        return self.data.transpose(1, 2)


def pack(weight: torch.Tensor, dtype: torch.dtype, panel: int) -> PackedWeight:
    """Lay a weight `[outputs, inputs]` out in panels of so many columns; 0 leaves it plain."""
    outputs, inputs = weight.shape
    if not panel or not weight.numel():
        return PackedWeight(weight.to(dtype), outputs, inputs, 0)
    full, left = divmod(outputs, panel)
    n = 2 if dtype == torch.bfloat16 else 1
    words = -(-inputs // n)
    packed = PackedWeight(_empty((full + (left > 0), words, panel, n), dtype), outputs, inputs, panel)
    columns = packed._columns()
    if words * n > inputs:
        weight = F.pad(weight, (0, words * n - inputs))
    columns[:full] = weight[: full * panel].reshape(full, *columns.shape[1:])
    if left:
        columns[full] = F.pad(weight[full * panel :], (0, 0, 0, panel - left)).view(columns.shape[1:])
    return packed


class _HugePages(threading.local):
    """Memory in pages of 2 MiB, given out from one end to the other and freed with the last tensor in it.

    Weights that are read from one end to the other in every step wait for address translation otherwise: see
    docs/performance.md.
    """

    region_bytes = 64 << 20
    line = 64

    def __init__(self) -> None:
        self.region: mmap.mmap | None = None
        self.used = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        count = math.prod(shape)
        size = -(-count * dtype.itemsize // self.line) * self.line
        if self.region is None or self.used + size > len(self.region):
            self.region, self.used = mmap.mmap(-1, max(size, self.region_bytes), mmap.MAP_PRIVATE), 0
            self.region.madvise(mmap.MADV_HUGEPAGE)
        offset, self.used = self.used, self.used + size
        return torch.frombuffer(self.region, dtype=dtype, count=count, offset=offset).view(shape)


_huge_pages = _HugePages()


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised tensor on the CPU, in huge pages where the system has them."""
    if hasattr(mmap, "MADV_HUGEPAGE") and math.prod(shape):
        return _huge_pages.empty(shape, dtype)
    return torch.empty(shape, dtype=dtype)
