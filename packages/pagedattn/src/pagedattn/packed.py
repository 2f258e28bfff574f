"""Weights of linear layers, laid out for the kernels that multiply by them."""

from __future__ import annotations

import math
import mmap
import threading
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A weight `[outputs, inputs]` in a back end's layout; made by `pack_linear`.

    Where `panel` is 0, `data` is the plain weight. Otherwise it is `[panels, inputs, panel]`, with zeros in
    the columns beyond the last. In bfloat16, columns c and c + panel / 2 of a panel are neighbours, the low
    and the high half of a 32-bit word.
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
        columns = _columns(self.data, self.inputs, self.panel)
        return columns.reshape(-1, self.inputs)[: self.outputs]

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the weight's rows `ids` (int64, any shape) as `[..., inputs]`, as for tied embeddings.

        Raises IndexError for an id outside of `[0, outputs)`.
        """
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.outputs:
            raise IndexError(f"ids must be in [0, {self.outputs}), not {int(ids.min())} to {int(ids.max())}")
        if not self.panel:
            return self.data[ids]
        columns = _columns(self.data, self.inputs, self.panel)
        panel, column = ids // self.panel, ids % self.panel
        return columns[panel, column // columns.shape[2], column % columns.shape[2]]


def pack(weight: torch.Tensor, dtype: torch.dtype, panel: int) -> PackedWeight:
    """Lay a weight `[outputs, inputs]` out in panels of so many columns; 0 leaves it plain."""
    outputs, inputs = weight.shape
    if not panel or not weight.numel():
        return PackedWeight(weight.to(dtype), outputs, inputs, 0)
    full, left = divmod(outputs, panel)
    data = _empty((full + (left > 0), inputs, panel), dtype)
    columns = _columns(data, inputs, panel)
    columns[:full] = weight[: full * panel].reshape(full, *columns.shape[1:])
    if left:
        last = weight.new_zeros((panel, inputs))
        last[:left] = weight[full * panel :]
        columns[full] = last.view(columns.shape[1:])
    return PackedWeight(data, outputs, inputs, panel)


def _columns(data: torch.Tensor, inputs: int, panel: int) -> torch.Tensor:
    """View packed data as `[panels, runs of columns, columns of a run, inputs]`."""
    if data.dtype == torch.bfloat16:
        return data.view(-1, inputs, panel // 2, 2).permute(0, 3, 2, 1)
    return data.view(-1, inputs, 1, panel).permute(0, 2, 3, 1)


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
