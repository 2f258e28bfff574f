"""Recorded kernels as a program, whose segments one C call each runs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from struct import Struct
from typing import NamedTuple

import numpy as np
import torch

from pagedattn.batch import AttentionBatch
from pagedattn.capture import CaptureError, Inputs
from pagedattn.cpu_backend import attend_error, write_error
from pagedattn.cpu_backend.arena import ALIGNMENT, Arena, tensor_in
from pagedattn.cpu_backend.arguments import ATTEND, EMBEDDING, WRITE, function
from pagedattn.cpu_backend.embedding import embedding_error
from pagedattn.cpu_backend.ops import rotary_error
from pagedattn.cpu_backend.recording import (
    Argument,
    HostCall,
    KernelCall,
    Place,
    Recording,
    TensorKind,
    compare,
    fields,
)

Function = Callable[[Inputs, AttentionBatch], Inputs]

_OPERATION = np.dtype([("kernel", np.int32), ("arguments", np.int32)])
"""`Operation` of program.c."""

_PATCH = np.dtype(
    [
        *[(name, np.int64) for name in ("constant", "factor")],
        *[(name, np.int32) for name in ("at", "bytes", "base", "count")],
    ]
)
"""`Patch` of program.c."""

_PROGRAM = Struct("3P 3q 3P")
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
        self._inputs = [_kind(tensor) for tensor in inputs]
        self._outputs = [(tuple(output.shape[1:]), output.dtype) for output in outputs]
        arguments = compare(first, second)
        self._returned = _returned(first, outputs)
        self._arena = Arena(first, second, arguments, self._returned, max_tokens)
        self._bases = np.zeros(_FIRST_GIVEN + len(inputs) + 4 + len(outputs), np.int64)
        self._bases[_ARENA] = self._arena.address
        self._kernels: list[tuple[KernelCall, list[Argument]]] = []
        self._segments: list[_Segment] = []
        self._cut(zip(first.calls, arguments, strict=True))
        self._compile()

    @property
    def num_operations(self) -> int:
        """See `pagedattn.capture.Program`."""
        return len(self._kernels)

    @property
    def num_host_calls(self) -> int:
        """See `pagedattn.capture.Program`."""
        return len(self._segments) - 1

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
        calls = _calls()
        error = calls.begin(self._packed, self._bases.ctypes.data, counts.ctypes.data, failed.ctypes.data)
        if error:
            raise self._error(int(failed[0]), error, given)
        try:
            for segment in self._segments:
                calls.run(self._packed, segment.first, segment.end)
                if segment.host_call is not None:
                    tensors = [self._tensor(operand, outputs, tokens) for operand in segment.operands]
                    segment.host_call.function(*tensors)
        finally:
            calls.finish(self._packed)
        return outputs

    def _cut(self, calls: Iterable[tuple[KernelCall | HostCall, list[Argument]]]) -> None:
        """Cut calls into segments, which host calls end."""
        first = 0
        for call, arguments in calls:
            if isinstance(call, KernelCall):
                self._kernels.append((call, arguments))
                continue
            places = [argument.place for argument in arguments]
            operands = [_Operand(*pair) for pair in zip(places, call.kinds, strict=True)]
            self._segments.append(_Segment(first, len(self._kernels), call, operands))
            first = len(self._kernels)
        self._segments.append(_Segment(first, len(self._kernels), None, []))

    def _tensor(self, operand: _Operand, outputs: Inputs, tokens: int) -> torch.Tensor:
        """Return this run's tensor of a host call."""
        place = operand.place
        assert place is not None and place.made is not None
        if place.made in self._returned:
            storage = outputs[self._returned[place.made]].untyped_storage()
            return tensor_in(storage, place.offset, operand.kind, tokens)
        return self._arena.tensor(place.made, place.offset, operand.kind, tokens)

    def _compile(self) -> None:
        """Lay out the arguments of all kernels, and say which of them a run decides."""
        memory, operations, patches = bytearray(), [], []
        for (kernel, values), arguments in self._kernels:
            start = -(-len(memory) // ALIGNMENT) * ALIGNMENT
            memory += bytes(start - len(memory)) + kernel.arguments.pack(*values)
            operations.append((kernel.number, start))
            for field, argument in zip(fields(kernel.arguments), arguments, strict=True):
                value = self._patch(argument)
                if value is not None:
                    patches.append(
                        (*value[:2], start + field.at, 4 if field.letter == "i" else 8, *value[2:])
                    )
        self._memory = np.frombuffer(memory, np.uint8)
        self._operations = np.array(operations, _OPERATION)
        self._patches = np.array(patches, _PATCH)
        self._packed = ctypes.create_string_buffer(
            _PROGRAM.pack(
                self._operations.ctypes.data,
                self._patches.ctypes.data,
                self._memory.ctypes.data,
                len(self._operations),
                len(self._patches),
                torch.get_num_threads(),
                0,
                0,
                0,
            )
        )

    def _patch(self, argument: Argument) -> _Patch | None:
        place = argument.place
        if place is None:
            return _Patch(0, int(argument.factor), _NO_BASE, argument.count) if argument.count else None
        if place.given is not None:
            return _Patch(place.offset, 0, _FIRST_GIVEN + place.given, 0)
        if place.made is None:
            return None
        if place.made in self._returned:
            first = len(self._bases) - len(self._outputs)
            return _Patch(place.offset, 0, first + self._returned[place.made], 0)
        offset = self._arena.offsets[place.made]
        return _Patch(place.offset + offset.constant, offset.per_token, _ARENA, 1)

    def _error(self, index: int, error: int, given: Sequence[torch.Tensor]) -> Exception:
        if error < 0:
            return MemoryError("the program found no memory for its scratch space")
        (kernel, values), arguments = self._kernels[index]
        if kernel is ATTEND:
            return attend_error(error)
        if kernel is WRITE:
            return write_error(error, given[-1], int(values[9]))
        if kernel is EMBEDDING:
            return embedding_error(error, int(values[8]), int(values[9]))
        place = arguments[5].place
        assert place is not None and place.given is not None
        return rotary_error(error, given[place.given], int(values[12]))


class _Operand(NamedTuple):
    """A tensor of a host call."""

    place: Place | None
    kind: TensorKind


class _Segment(NamedTuple):
    """Kernels that one C call runs, by number from `first` to `end`, and the host call after them."""

    first: int
    end: int
    host_call: HostCall | None
    operands: list[_Operand]


def _returned(recording: Recording, outputs: Inputs) -> dict[int, int]:
    """Return by made tensor which of the outputs it is."""
    returned: dict[int, int] = {}
    for number, place in enumerate(recording.places([output.data_ptr() for output in outputs])):
        if place.made is None or place.offset:
            raise CaptureError("it returns something that it did not make")
        returned[place.made] = number
    return returned


class _Patch(NamedTuple):
    """An argument that a run decides: bases[base] + factor * counts[count] + constant."""

    constant: int
    factor: int
    base: int
    count: int


class _Kind(NamedTuple):
    """Shape, type and layout that inputs share with the recorded ones."""

    shape: tuple[int, ...]
    """Without the tokens."""
    dtype: torch.dtype
    contiguous: bool


def _kind(tensor: torch.Tensor) -> _Kind:
    return _Kind(tuple(tensor.shape[1:]), tensor.dtype, tensor.is_contiguous())


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


class _Calls(NamedTuple):
    """The functions of program.c."""

    begin: Callable[..., int]
    run: Callable[..., None]
    finish: Callable[..., None]


@cache
def _calls() -> _Calls:
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    return _Calls(
        function("octavo_begin", number, pointer, pointer, pointer, pointer),
        function("octavo_run_segment", None, pointer, number, number),
        function("octavo_finish", None, pointer),
    )
