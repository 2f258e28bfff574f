"""Record the kernels and host calls of a function, and resolve the memory that their arguments point into."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from struct import Struct, calcsize
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pagedattn.capture import CaptureError, HostFunction, recorder
from pagedattn.cpu_backend.arguments import Kernel

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


class KernelCall(NamedTuple):
    """A kernel and the values of its arguments."""

    kernel: Kernel
    values: tuple[float, ...]

    def matches(self, other: KernelCall | HostCall) -> bool:
        """Whether the other is the same but for its values."""
        return isinstance(other, KernelCall) and other.kernel == self.kernel

    @property
    def addresses(self) -> list[int]:
        """Values of the arguments that are pointers."""
        found = zip(fields(self.kernel.arguments), self.values, strict=True)
        return [int(value) for field, value in found if field.letter == "P"]


class HostCall(NamedTuple):
    """A function and the tensors [tokens, …] that it is called with."""

    function: HostFunction
    tensors: tuple[torch.Tensor, ...]

    def matches(self, other: KernelCall | HostCall) -> bool:
        """Whether the other has tensors of the same kind."""
        return isinstance(other, HostCall) and self.kinds == other.kinds

    @property
    def kinds(self) -> list[TensorKind]:
        """Of each tensor what all runs have in common."""
        return [TensorKind(tensor.dtype, tuple(tensor.shape[1:]), tensor.stride()) for tensor in self.tensors]

    @property
    def addresses(self) -> list[int]:
        """Where the tensors begin."""
        return [tensor.data_ptr() for tensor in self.tensors]


class TensorKind(NamedTuple):
    """Type and layout of a tensor [tokens, *shape]."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Recording(TorchDispatchMode):
    """Records the kernels and host calls of a function, and the tensors that it makes for them.

    Views are free: they are pointers and strides among the arguments of kernels.
    """

    def __init__(self, given: Sequence[torch.Tensor], counts: Sequence[int]) -> None:
        """`given` are the tensors that another run has others for, `counts` the numbers that differ."""
        super().__init__()
        self.calls: list[KernelCall | HostCall] = []
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
        token = recorder.set(self)
        try:
            with self:
                yield
        finally:
            recorder.reset(token)

    def record_kernel(self, kernel: Kernel, values: tuple[float, ...]) -> None:
        """Take a kernel that has run."""
        self.calls.append(KernelCall(kernel, values))

    def record_host_call(self, function: HostFunction, tensors: Sequence[torch.Tensor]) -> None:
        """Take a host call in the place of calling the function.

        Raises CaptureError for tensors that are not [tokens, …] of what was made on the way.
        """
        call = HostCall(function, tuple(tensors))
        for tensor, place in zip(tensors, self.places(call.addresses), strict=True):
            if place.made is None or not tensor.ndim or len(tensor) != self.counts[1]:
                raise CaptureError(
                    f"a host call takes tensors [{self.counts[1]} tokens, …] that were made on the way, "
                    f"not {list(tensor.shape)} {'from elsewhere' if place.made is None else ''}".rstrip()
                )
        self.calls.append(call)

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

    Of a host call they are the places of its tensors.

    Raises:
        CaptureError: the recordings differ in more than their counts.
    """
    calls = list(zip(first.calls, second.calls))
    if len(first.calls) != len(second.calls) or not all(one.matches(other) for one, other in calls):
        raise CaptureError("it runs other kernels for another number of tokens")
    places = [
        iter(recording.places([address for call in recording.calls for address in call.addresses]))
        for recording in (first, second)
    ]
    return [_arguments(one, other, places, first.counts, second.counts) for one, other in calls]


def _arguments(
    one: KernelCall | HostCall,
    other: KernelCall | HostCall,
    places: Sequence[Iterator[Place]],
    first: Sequence[int],
    second: Sequence[int],
) -> list[Argument]:
    """Return the arguments of two calls that match; their `places` come next."""
    if not isinstance(one, KernelCall) or not isinstance(other, KernelCall):
        return [_place(places) for _ in one.addresses]
    values = zip(fields(one.kernel.arguments), one.values, other.values, strict=True)
    return [
        _place(places) if field.letter == "P" else _multiple(left, right, first, second)
        for field, left, right in values
    ]


def _place(places: Sequence[Iterator[Place]]) -> Argument:
    place, same = (next(side) for side in places)
    if place != same:
        raise CaptureError("a kernel's argument moves with the number of tokens")
    return Argument(place, 0, 0)


class Size(NamedTuple):
    """Bytes of a tensor: so many per token, or a number that is the same in each run."""

    per_token: int
    constant: int


def size_of(first: Recording, second: Recording, made: int) -> Size:
    """Return the size of a tensor that both recordings made.

    Raises:
        CaptureError: it is neither a multiple of the number of tokens nor constant.
    """
    sizes = [recording.made[made].nbytes for recording in (first, second)]
    tokens = [recording.counts[1] for recording in (first, second)]
    if sizes[0] == sizes[1]:
        return Size(0, sizes[0])
    size, rest = divmod(sizes[0], tokens[0])
    if rest or sizes[1] != size * tokens[1]:
        raise CaptureError(f"a tensor of {sizes[0]} bytes is not made of the {tokens[0]} tokens'")
    return Size(size, 0)


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
