"""Record the kernels that a function runs, and resolve the memory that their arguments point into."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import cache
from struct import Struct, calcsize
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pagedattn.capture import CaptureError
from pagedattn.cpu_backend.arguments import Kernel, recording

_ALLOCATIONS = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
}


class Place(NamedTuple):
    """A tensor that a run is given (`given`, its number) or makes (`made`), and a distance in it in bytes.

    Neither means an address of what stays where it is.
    """

    given: int | None
    made: int | None
    offset: int


class Argument(NamedTuple):
    """A place, a multiple of one of the run's counts, or a constant; `count` 0 is always 1."""

    place: Place | None
    count: int
    factor: float


class Recording(TorchDispatchMode):
    """Records the kernels that a function runs, and the tensors that it makes for them.

    Views are free: they are pointers and strides among the arguments of kernels.
    """

    def __init__(self, given: Sequence[torch.Tensor], counts: Sequence[int]) -> None:
        """`given` are the tensors that another run has others for, `counts` the numbers that differ."""
        super().__init__()
        self.calls: list[tuple[Kernel, tuple[float, ...]]] = []
        self.made: list[torch.Tensor] = []
        self.counts = counts
        self._given = given

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _ALLOCATIONS:
            self.made.append(result)
            return result
        given = {_storage(tensor) for tensor in _tensors((args, kwargs))}
        is_view = not func._schema.is_mutable and {_storage(tensor) for tensor in _tensors(result)} <= given
        if not is_view:
            raise CaptureError(f"{func} is no kernel of pagedattn")
        return result

    @contextmanager
    def running(self) -> Generator[None]:
        """Record what this thread runs."""
        token = recording.set(lambda kernel, values: self.calls.append((kernel, values)))
        try:
            with self:
                yield
        finally:
            recording.reset(token)

    def places(self, addresses: Sequence[int]) -> list[Place]:
        """Return where addresses lie."""
        spans = [(tensor, Place(None, index, 0)) for index, tensor in enumerate(self.made)]
        spans += [(tensor, Place(index, None, 0)) for index, tensor in enumerate(self._given)]
        spans = sorted((span for span in spans if span[0].numel()), key=lambda span: span[0].data_ptr())
        starts = [tensor.data_ptr() for tensor, _ in spans]
        found = []
        for address in addresses:
            index = bisect_right(starts, address) - 1
            inside = index >= 0 and address < starts[index] + _span(spans[index][0])
            found.append(
                spans[index][1]._replace(offset=address - starts[index])
                if inside
                else Place(None, None, address)
            )
        return found


def compare(first: Recording, second: Recording) -> list[list[Argument]]:
    """Return the arguments of each call, as two recordings with different counts tell them.

    Raises:
        CaptureError: the recordings differ in more than their counts.
    """
    if [kernel for kernel, _ in first.calls] != [kernel for kernel, _ in second.calls]:
        raise CaptureError("it runs other kernels for another number of tokens")
    places = [
        iter(
            recording.places(
                [
                    int(value)
                    for kernel, values in recording.calls
                    for field, value in zip(fields(kernel.arguments), values, strict=True)
                    if field.letter == "P"
                ]
            )
        )
        for recording in (first, second)
    ]
    found = []
    for (kernel, one), (_, other) in zip(first.calls, second.calls, strict=True):
        arguments = []
        for field, left, right in zip(fields(kernel.arguments), one, other, strict=True):
            if field.letter == "P":
                place, same = (next(side) for side in places)
                if place != same:
                    raise CaptureError("a kernel's argument moves with the number of tokens")
                arguments.append(Argument(place, 0, 0))
            else:
                arguments.append(_multiple(left, right, first.counts, second.counts))
        found.append(arguments)
    return found


def per_token(first: Recording, second: Recording, made: int) -> int:
    """Return the bytes per token of a tensor that both recordings made.

    Raises:
        CaptureError: its size is no multiple of the number of tokens.
    """
    sizes = [recording.made[made].nbytes for recording in (first, second)]
    tokens = [recording.counts[1] for recording in (first, second)]
    size, rest = divmod(sizes[0], tokens[0])
    if rest or sizes[1] != size * tokens[1]:
        raise CaptureError(f"a tensor of {sizes[0]} bytes is not made of the {tokens[0]} tokens'")
    return size


class Field(NamedTuple):
    """A member of a structure: its letter, and its distance from the start in bytes."""

    letter: str
    at: int


@cache
def fields(structure: Struct) -> tuple[Field, ...]:
    """Return the members of a structure."""
    letters = "".join(
        letter * int(count or 1) for count, letter in re.findall(r"(\d*)([a-zA-Z])", structure.format)
    )
    # "0q" adds the padding that comes before a member.
    return tuple(
        Field(letter, calcsize(f"{letters[:index]}0{letter}")) for index, letter in enumerate(letters)
    )


def _multiple(left: float, right: float, first: Sequence[int], second: Sequence[int]) -> Argument:
    if left == right:
        return Argument(None, 0, left)
    for count in range(1, len(first)):
        factor, rest = divmod(left, first[count])
        if not rest and right == factor * second[count]:
            return Argument(None, count, factor)
    raise CaptureError(f"a kernel's argument is {left} for counts {first} and {right} for {second}")


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    """Return a number of the memory that a tensor shares with its views."""
    if tensor.layout != torch.strided:  # opaque, as oneDNN's are
        return id(tensor)
    return tensor.untyped_storage()._cdata


def _span(tensor: torch.Tensor) -> int:
    """Return the bytes from a tensor's first element to the end of its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return (last + 1) * tensor.element_size()
