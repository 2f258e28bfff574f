"""Weights of linear layers, laid out for the kernels that multiply by them."""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from pagedattn.quantized import Codes, Quantization, pack_nibbles, unpack_nibbles


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A weight `[outputs, inputs]` in a back end's layout; made by `pack_linear`.

    Where `panel` is 0, `data` is the plain weight, or its codes, with `scales` `[outputs, groups]`. Otherwise
    it is `[panels, words, panel, n]`, with zeros beyond the last column and input: n elements of a column are
    a word, two in bfloat16, four in int8, four bytes of two codes each in int4, else one. Scales are then
    `[panels, groups, panel]` and `column_sums`, of the codes of int8-dynamic, `[panels, panel]`.
    """

    data: torch.Tensor
    outputs: int
    inputs: int
    panel: int
    quantization: Quantization | None = None
    group: int = 0
    scales: torch.Tensor | None = None
    column_sums: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)."""
        return self.outputs, self.inputs

    @property
    def dtype(self) -> torch.dtype:
        """Type of what is stored: int8 or, for two int4 in a byte, uint8 where the weight is quantised."""
        return self.data.dtype

    @property
    def device(self) -> torch.device:
        """Device that the weight is on."""
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weight, with its scales and what fills up its last panel."""
        parts = (self.data, self.scales, self.column_sums)
        return sum(part.nbytes for part in parts if part is not None)

    def unpack(self) -> torch.Tensor:
        """Return the plain weight `[outputs, inputs]`, of the stored dtype, or float32 if it is quantised.

        It is a copy if it is packed or quantised.
        """
        return self._stored(None) if self.scales is None else self.codes().values()

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the weight's rows `ids` (int64, any shape) as `[..., inputs]`, as for tied embeddings.

        Raises IndexError for an id outside of `[0, outputs)`.
        """
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.outputs:
            raise IndexError(f"ids must be in [0, {self.outputs}), not {int(ids.min())} to {int(ids.max())}")
        return self._stored(ids) if self.scales is None else self.codes(ids).values()

    def codes(self, ids: torch.Tensor | None = None) -> Codes:
        """Return the codes and scales of a quantised weight, or of some of its rows."""
        if self.scales is None:
            raise ValueError(f"a weight of {self.dtype} has no codes")
        return Codes(self._stored(ids), self._outputs(self.scales, ids), self.group)

    def _stored(self, ids: torch.Tensor | None) -> torch.Tensor:
        """Return rows `ids`, or all, of what is stored, as `[..., inputs]`."""
        rows = self._outputs(self.data, ids)
        if not self.panel:
            return rows
        rows = rows.flatten(-2)
        if self.quantization == "int4":
            rows = unpack_nibbles(rows).unflatten(-1, (-1, 8))[..., _NIBBLE_OF].flatten(-2)
        return rows[..., : self.inputs]

    def _outputs(self, stored: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
        """Return what outputs `ids`, or all, have of `[outputs, ...]`, or of `[panels, size, panel, ...]`."""
        if not self.panel:
            return stored if ids is None else stored[ids]
        columns = stored.transpose(1, 2)
        if ids is None:
            return columns.flatten(0, 1)[: self.outputs]
        return columns[ids // self.panel, ids % self.panel]


@dataclass(frozen=True, slots=True, eq=False)
class PackedExperts:
    """Weights `[experts, outputs, inputs]` in a back end's layout; made by `pack_experts`.

    `data`, `scales` and `column_sums` have those of each expert, as in `PackedWeight`, one after another.
    """

    data: torch.Tensor
    outputs: int
    inputs: int
    panel: int
    quantization: Quantization | None = None
    group: int = 0
    scales: torch.Tensor | None = None
    column_sums: torch.Tensor | None = None

    @property
    def count(self) -> int:
        """The number of experts."""
        return len(self.data)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(experts, outputs, inputs)."""
        return self.count, self.outputs, self.inputs

    @property
    def dtype(self) -> torch.dtype:
        """Type of what is stored: int8 or, for two int4 in a byte, uint8 where the weights are quantised."""
        return self.data.dtype

    @property
    def device(self) -> torch.device:
        """Device that the weights are on."""
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights, with their scales and what fills up the last panel of each."""
        parts = (self.data, self.scales, self.column_sums)
        return sum(part.nbytes for part in parts if part is not None)

    def expert(self, index: int) -> PackedWeight:
        """Return the weight of one expert, which shares its memory with all."""
        return PackedWeight(
            self.data[index],
            self.outputs,
            self.inputs,
            self.panel,
            self.quantization,
            self.group,
            None if self.scales is None else self.scales[index],
            None if self.column_sums is None else self.column_sums[index],
        )

    def unpack(self) -> torch.Tensor:
        """Return the plain weights `[experts, outputs, inputs]`, in float32 if they are quantised.

        It is a copy if they are packed or quantised.
        """
        if not self.panel and self.quantization is None:
            return self.data
        dtype = self.dtype if self.quantization is None else torch.float32
        plain = torch.empty(self.shape, dtype=dtype, device=self.device)
        for index in range(self.count):
            plain[index] = self.expert(index).unpack()
        return plain


def pack_stacked(weight: torch.Tensor, dtype: torch.dtype, panel: int) -> PackedExperts:
    """Lay weights `[experts, outputs, inputs]` out in panels of so many columns; 0 leaves them plain."""
    count, outputs, inputs = weight.shape
    if not panel or not weight.numel():
        return PackedExperts(weight.to(dtype), outputs, inputs, 0)
    n = _word_elements(dtype)
    data = _empty((count, *_panel_shape(outputs, inputs, panel, n)), dtype)
    for target, expert in zip(data, weight, strict=True):
        _fill_panels(target, expert)
    return PackedExperts(data, outputs, inputs, panel)


def stack_experts(weights: Iterable[PackedWeight], count: int) -> PackedExperts:
    """Put the weights of `count` experts, at least one, that are packed alike one after another."""
    stacked: PackedExperts | None = None
    for index, weight in enumerate(weights):
        if stacked is None:
            stacked = PackedExperts(
                _empty((count, *weight.data.shape), weight.data.dtype),
                weight.outputs,
                weight.inputs,
                weight.panel,
                weight.quantization,
                weight.group,
                None if weight.scales is None else weight.scales.new_empty((count, *weight.scales.shape)),
                None
                if weight.column_sums is None
                else weight.column_sums.new_empty((count, *weight.column_sums.shape)),
            )
        own = stacked.expert(index)
        for to, part in (
            (own.data, weight.data),
            (own.scales, weight.scales),
            (own.column_sums, weight.column_sums),
        ):
            if to is not None and part is not None:
                to.copy_(part)
    assert stacked is not None
    return stacked


def pack(weight: torch.Tensor, dtype: torch.dtype, panel: int) -> PackedWeight:
    """Lay a weight `[outputs, inputs]` out in panels of so many columns; 0 leaves it plain."""
    outputs, inputs = weight.shape
    if not panel or not weight.numel():
        return PackedWeight(weight.to(dtype), outputs, inputs, 0)
    data = _in_panels(weight, dtype, panel, _word_elements(dtype))
    return PackedWeight(data, outputs, inputs, panel)


def pack_codes(weight: Codes, quantization: Quantization, panel: int) -> PackedWeight:
    """Lay a quantised weight out in panels of so many columns; 0 leaves its codes plain."""
    codes, scales, group = weight
    outputs, inputs = codes.shape
    if not panel or not codes.numel():
        return PackedWeight(codes, outputs, inputs, 0, quantization, group, scales)
    sums = None
    if quantization == "int8-dynamic":
        sums = _in_panels(codes.sum(1, keepdim=True), torch.int32, panel, 1).view(-1, panel)
    elements = codes
    if quantization == "int4":
        words = F.pad(codes, (0, -inputs % 8)).unflatten(1, (-1, 8))
        elements = pack_nibbles(words[..., _NIBBLES]).flatten(1)
    data = _in_panels(elements, elements.dtype, panel, 4)
    scales = _in_panels(scales, scales.dtype, panel, 1).squeeze(-1)
    return PackedWeight(data, outputs, inputs, panel, quantization, group, scales, sums)


_NIBBLES = [0, 2, 4, 6, 1, 3, 5, 7]
"""The input of each code in a word of int4: a pair of inputs is a shift apart in both halves of the word."""

_NIBBLE_OF = [0, 4, 1, 5, 2, 6, 3, 7]
"""The code of each input in a word of int4."""

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
"""By bytes, the type that a word of several elements is copied as."""


def _in_panels(rows: torch.Tensor, dtype: torch.dtype, panel: int, n: int) -> torch.Tensor:
    """Lay rows `[outputs, elements]` out as `[panels, elements / n, panel, n]`, filled up with zeros."""
    data = _empty(_panel_shape(*rows.shape, panel, n), dtype)
    _fill_panels(data, rows)
    return data


def _word_elements(dtype: torch.dtype) -> int:
    """Return the elements of a column that stand side by side, where they are no codes."""
    return 2 if dtype == torch.bfloat16 else 1


def _panel_shape(outputs: int, elements: int, panel: int, n: int) -> tuple[int, int, int, int]:
    return -(-outputs // panel), -(-elements // n), panel, n


def _fill_panels(data: torch.Tensor, rows: torch.Tensor) -> None:
    """Write rows `[outputs, elements]` to `[panels, elements / n, panel, n]`, filled up with zeros."""
    outputs, elements = rows.shape
    _, _, panel, n = data.shape
    rows = rows.to(data.dtype).contiguous()
    if elements % n:
        rows = F.pad(rows, (0, -elements % n))
    word = _WORDS[n * data.dtype.itemsize]
    words, columns = rows.view(word), data.view(word).squeeze(-1).transpose(1, 2)
    full, left = divmod(outputs, panel)
    columns[:full] = words[: full * panel].view(full, panel, words.shape[1])
    if left:
        columns[full] = F.pad(words[full * panel :], (0, 0, 0, panel - left))


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
