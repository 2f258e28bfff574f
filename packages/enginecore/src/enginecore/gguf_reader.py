"""Read a GGUF file's header and find its tensors (format: ggml's docs/gguf.md, versions 2 and 3).

The package `gguf` has a reader too, which makes several arrays for each of a vocabulary's strings and so
takes seconds where this takes tens of milliseconds; every process of an engine reads the header.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from enginecore.errors import ModelError

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_NUMBERS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd"))
"""By value type, `struct`'s letter for numbers and truth values."""
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class StoredTensor:
    """A tensor where it lies."""

    path: Path
    name: str
    shape: tuple[int, ...]
    """In ggml's order: the dimension whose elements lie next to each other comes first."""
    type_code: int
    offset: int
    """Bytes from the start of the file."""

    @property
    def tensor_type(self) -> "GGMLQuantizationType":
        from gguf import GGMLQuantizationType

        return GGMLQuantizationType(self.type_code)

    @property
    def data(self) -> np.ndarray:
        """The values, mapped from the file: [*reversed(shape)], or with rows of bytes where quantised.

        Raises:
            ModelError: the file ends before the tensor does.
        """
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        block, block_bytes = GGML_QUANT_SIZES[self.tensor_type]
        row_bytes = self.shape[0] // block * block_bytes
        rows = self.shape[:0:-1]
        plain = {GGMLQuantizationType.F32: np.float32, GGMLQuantizationType.F16: np.float16}
        try:
            stored = np.memmap(self.path, np.uint8, "r", self.offset, (*rows, row_bytes))
        except ValueError as error:
            raise ModelError(f"{self.path} is cut short: tensor {self.name} is not all there") from error
        return np.asarray(stored).view(plain.get(self.tensor_type, np.uint8))


def read_header(path: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """Return a file's metadata as Python values, and its tensors by name.

    Raises:
        ModelError: it is not a GGUF file of a version read here, or its header is broken.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _Header(path, content).parse()
    except (ValueError, KeyError, OSError, struct.error) as error:
        raise ModelError(f"{path} is not a readable GGUF file: {error}") from error


class _Header:
    """A position in the file, and what can be read there."""

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self._path = path
        self._content = content
        self._at = 0

    def parse(self) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
        if self._content[:4] != _MAGIC:
            raise ValueError(f"it begins with {self._content[:4]!r}")
        self._at = 4
        version, num_tensors, num_entries = self._numbers("IQQ")
        if version not in _VERSIONS:
            raise ValueError(f"its version is {version}, not one of {_VERSIONS}")
        metadata = {self._string(): self._value(*self._numbers("I")) for _ in range(num_entries)}
        found = [self._tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        start = -(-self._at // alignment) * alignment
        return metadata, {entry[0]: self._placed(*entry, start) for entry in found}

    def _numbers(self, letters: str) -> tuple[Any, ...]:
        form = "<" + letters
        values = struct.unpack_from(form, self._content, self._at)
        self._at += struct.calcsize(form)
        return values

    def _string(self) -> str:
        (size,) = struct.unpack_from("<Q", self._content, self._at)
        begin = self._at + 8
        self._at = begin + size
        if self._at > len(self._content):
            raise ValueError("it ends within its header")
        return self._content[begin : self._at].decode()

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._numbers(_NUMBERS[kind])[0]
        kind, count = self._numbers("IQ")
        if kind in _NUMBERS:
            return list(self._numbers(f"{count}{_NUMBERS[kind]}"))
        return [self._value(kind) for _ in range(count)]

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        (num_dims,) = self._numbers("I")
        shape = self._numbers(f"{num_dims}Q")
        return name, shape, *self._numbers("IQ")

    def _placed(
        self, name: str, shape: tuple[int, ...], type_code: int, offset: int, start: int
    ) -> StoredTensor:
        if start + offset >= len(self._content):
            raise ValueError(f"it is cut short: tensor {name} is not there")
        return StoredTensor(self._path, name, shape, type_code, start + offset)
