"""Recorded kernels as a program that one call runs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from struct import Struct
from typing import NamedTuple

import numpy as np
import torch

from pagedattn.batch import AttentionBatch
from pagedattn.capture import CaptureError, Inputs
from pagedattn.cpu_backend import attend_error, write_error
from pagedattn.cpu_backend.arguments import ATTEND, WRITE, function
from pagedattn.cpu_backend.ops import rotary_error
from pagedattn.cpu_backend.recording import Argument, Recording, compare, fields, per_token

Function = Callable[[Inputs, AttentionBatch], Inputs]

_ALIGNMENT = 64

_OPERATION = np.dtype([("kernel", np.int32), ("arguments", np.int32)])
"""`Operation` of program.c."""

_PATCH = np.dtype(
    [
        *[(name, np.int64) for name in ("constant", "factor")],
        *[(name, np.int32) for name in ("at", "bytes", "base", "count")],
    ]
)
"""`Patch` of program.c."""

_PROGRAM = Struct("3P 3q")
"""`Program` of program.c."""

_NO_BASE, _ARENA, _FIRST_GIVEN = 0, 1, 2
"""Addresses that a run is told: none, the arena's, and from the third on those of the tensors it is given."""


def record(run: Function, examples: Sequence[tuple[Inputs, AttentionBatch]], max_tokens: int) -> Program:
    """Return the program of what `run` does with two examples, which differ in all their counts.

    Raises:
        CaptureError: it does more than run kernels, or what it does depends on more than counts.
    """
    recordings, outputs = [], []
    for inputs, batch in examples:
        recording = Recording(_given(inputs, batch), _counts(batch))
        with recording.running():
            outputs.append(run(inputs, batch))
        recordings.append(recording)
    return Program(run, *recordings, examples[0][0], outputs[0], max_tokens)


class Program:
    """See `pagedattn.capture.Program`."""

    def __init__(
        self,
        run: Function,
        first: Recording,
        second: Recording,
        inputs: Inputs,
        outputs: Inputs,
        max_tokens: int,
    ) -> None:
        self.max_tokens = max_tokens
        self._run = run  # keeps the weights whose addresses the program has
        self._calls = first.calls
        self._arguments = compare(first, second)
        self._inputs = [_kind(tensor) for tensor in inputs]
        self._outputs = [(tuple(output.shape[1:]), output.dtype) for output in outputs]
        places = first.places([output.data_ptr() for output in outputs])
        if any(place.made is None or place.offset for place in places):
            raise CaptureError("it returns something that it did not make")
        num_given = len(inputs) + 4
        returned = {place.made: _FIRST_GIVEN + num_given + number for number, place in enumerate(places)}
        self._bases = np.zeros(_FIRST_GIVEN + num_given + len(outputs), np.int64)
        layout = _lay_out(first, second, self._arguments, returned)
        size = layout.bytes_per_token * max_tokens + _ALIGNMENT
        self._arena = torch.empty(size, dtype=torch.uint8, device="cpu")
        self._bases[_ARENA] = -(-self._arena.data_ptr() // _ALIGNMENT) * _ALIGNMENT
        self._compile(layout.offsets, returned)

    @property
    def num_operations(self) -> int:
        """See `pagedattn.capture.Program`."""
        return len(self._calls)

    @property
    def nbytes(self) -> int:
        """See `pagedattn.capture.Program`."""
        return self._arena.nbytes

    def __call__(self, inputs: Inputs, batch: AttentionBatch) -> Inputs:
        """See `pagedattn.capture.Program`."""
        tokens = batch.num_tokens
        found = [_kind(tensor) for tensor in inputs]
        if found != self._inputs or any(len(tensor) != tokens for tensor in inputs):
            shapes = [tuple(tensor.shape) for tensor in inputs]
            raise ValueError(f"{tokens} tokens need inputs of {self._inputs}, not {found} of {shapes}")
        if tokens > self.max_tokens:
            raise ValueError(f"{tokens} tokens are more than the program's {self.max_tokens}")
        outputs = tuple(
            torch.empty((tokens, *shape), dtype=dtype, device="cpu") for shape, dtype in self._outputs
        )
        given = _given(inputs, batch)
        self._bases[_FIRST_GIVEN:] = [tensor.data_ptr() for tensor in (*given, *outputs)]
        counts = np.array(_counts(batch), np.int64)
        failed = np.zeros(1, np.int64)
        error = _octavo_replay()(
            self._packed, self._bases.ctypes.data, counts.ctypes.data, failed.ctypes.data
        )
        if error:
            raise self._error(int(failed[0]), error, given)
        return outputs

    def _compile(self, offsets: dict[int, int], returned: dict[int | None, int]) -> None:
        memory, operations, patches = bytearray(), [], []
        for (kernel, values), arguments in zip(self._calls, self._arguments, strict=True):
            start = -(-len(memory) // _ALIGNMENT) * _ALIGNMENT
            memory += bytes(start - len(memory)) + kernel.arguments.pack(*values)
            operations.append((kernel.number, start))
            for field, argument in zip(fields(kernel.arguments), arguments, strict=True):
                value = _patch(argument, offsets, returned)
                if value is not None:
                    patches.append(
                        (*value[:2], start + field.at, 4 if field.letter == "i" else 8, *value[2:])
                    )
        self._memory = np.frombuffer(memory, np.uint8)
        self._operations = np.array(operations, _OPERATION)
        self._patches = np.array(patches, _PATCH)
        self._packed = _PROGRAM.pack(
            self._operations.ctypes.data,
            self._patches.ctypes.data,
            self._memory.ctypes.data,
            len(self._operations),
            len(self._patches),
            torch.get_num_threads(),
        )

    def _error(self, index: int, error: int, given: Sequence[torch.Tensor]) -> Exception:
        kernel, values = self._calls[index]
        if kernel is ATTEND:
            return attend_error(error)
        if kernel is WRITE:
            return write_error(error, given[-1], int(values[9]))
        place = self._arguments[index][5].place
        assert place is not None and place.given is not None
        return rotary_error(error, given[place.given], int(values[12]))


class _Patch(NamedTuple):
    """An argument that a run decides: bases[base] + factor * counts[count] + constant."""

    constant: int
    factor: int
    base: int
    count: int


def _patch(argument: Argument, offsets: dict[int, int], returned: dict[int | None, int]) -> _Patch | None:
    place = argument.place
    if place is None:
        return _Patch(0, int(argument.factor), _NO_BASE, argument.count) if argument.count else None
    if place.given is not None:
        return _Patch(place.offset, 0, _FIRST_GIVEN + place.given, 0)
    if place.made is None:
        return None
    if place.made in returned:
        return _Patch(place.offset, 0, returned[place.made], 0)
    return _Patch(place.offset, offsets[place.made], _ARENA, 1)


class _Kind(NamedTuple):
    """Shape, type and layout that inputs share with the recorded ones."""

    shape: tuple[int, ...]
    """Without the tokens."""
    dtype: torch.dtype
    contiguous: bool


def _kind(tensor: torch.Tensor) -> _Kind:
    return _Kind(tuple(tensor.shape[1:]), tensor.dtype, tensor.is_contiguous())


class _Layout(NamedTuple):
    offsets: dict[int, int]
    """By made tensor: where it begins in the arena, in bytes per token."""
    bytes_per_token: int


def _lay_out(
    first: Recording,
    second: Recording,
    arguments: Sequence[Sequence[Argument]],
    returned: dict[int | None, int],
) -> _Layout:
    """Give each tensor its place in the arena, the largest first (Pisarchyk & Lee, arXiv:2001.03288).

    No two overlap that are both in use between one's first kernel and its last.
    """
    uses: dict[int, list[int]] = {}
    for index, call in enumerate(arguments):
        for argument in call:
            if argument.place is not None and argument.place.made is not None:
                uses.setdefault(argument.place.made, []).append(index)
    sizes = {made: -(-per_token(first, second, made) // _ALIGNMENT) * _ALIGNMENT for made in uses}
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


def _given(inputs: Inputs, batch: AttentionBatch) -> list[torch.Tensor]:
    return [*inputs, batch.query_starts, batch.lengths, batch.block_table, batch.slots]


def _counts(batch: AttentionBatch) -> list[int]:
    """Return 1, for constants, the number of tokens, and the batch's other numbers."""
    table = batch.block_table
    return [
        1,
        batch.num_tokens,
        batch.num_seqs,
        batch.num_decodes,
        table.stride(0),
        table.shape[1],
        batch.shared_prefix,
    ]


@cache
def _octavo_replay() -> Callable[..., int]:
    pointer = ctypes.c_void_p
    return function("octavo_replay", ctypes.c_int64, ctypes.c_char_p, pointer, pointer, pointer)
