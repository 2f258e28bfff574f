"""Read GGUF headers (format: ggml's docs/gguf.md, versions 2 and 3) as Hugging Face configurations. No torch.

The package `gguf` has a reader too, which makes several arrays for each of a vocabulary's strings and so
takes seconds where this takes tens of milliseconds; every process of an engine reads the header.
"""

import mmap
import re
import struct
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from enginecore.errors import ModelError

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

ROPE_FACTORS = "rope_freqs.weight"

_PART_NUMBER, _PART_COUNT, _PART_TENSORS = "split.no", "split.count", "split.tensors.count"
"""Metadata of a model that llama.cpp's gguf-split has put into several files; numbers begin at 0."""

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


class Contents(NamedTuple):
    """An opened file: its metadata as Python values, and its tensors where they lie."""

    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]

    def get(self, key: str, default: Any = None) -> Any:
        """Return metadata `key`, written without the architecture's prefix where it has one."""
        architecture = self.metadata.get("general.architecture")
        return self.metadata.get(f"{architecture}.{key}", self.metadata.get(key, default))


@lru_cache(maxsize=4)
def read(path: Path) -> Contents:
    """Open a GGUF file, and the other parts if it is the first of several; tensors stay on disk until used.

    Raises:
        ModelError: it is not a GGUF file, is cut short or a later part, or other parts are not beside it.
    """
    first = Contents(*read_header(path))
    count = first.metadata.get(_PART_COUNT, 1)
    number = first.metadata.get(_PART_NUMBER, 0)
    if number > 0:
        raise ModelError(
            f"{path} is part {number + 1} of a model in {count} GGUF files: give the first, "
            f"{_part(path, 0, count).name}"
        )
    tensors = dict(first.tensors)
    for index in range(1, count):
        tensors |= _read_part(_part(path, index, count), index, count)
    expected = first.metadata.get(_PART_TENSORS, len(tensors))
    if count > 1 and len(tensors) != expected:
        raise ModelError(
            f"{path}: its {count} parts hold {len(tensors)} tensors, not the {expected} it names"
        )
    return Contents(first.metadata, tensors)


def _read_part(path: Path, index: int, count: int) -> dict[str, StoredTensor]:
    """Return the tensors of a part after the first."""
    if not path.is_file():
        raise ModelError(f"{path} is missing: it is part {index + 1} of a model in {count} GGUF files")
    metadata, tensors = read_header(path)
    if (metadata.get(_PART_NUMBER), metadata.get(_PART_COUNT)) != (index, count):
        raise ModelError(f"{path} is not part {index + 1} of {count}, which its name says it is")
    return tensors


def _part(path: Path, index: int, count: int) -> Path:
    """Return the path of another part of the model that `path` is a part of.

    Raises:
        ModelError: the name of `path` does not say how the others are called.
    """
    stem, found = re.subn(r"-\d{5}-of-\d{5}$", f"-{index + 1:05d}-of-{count:05d}", path.stem)
    if not found:
        raise ModelError(
            f"{path} is one of {count} GGUF files of a model: they must be called "
            f"NAME-00001-of-{count:05d}.gguf and so on, as llama.cpp calls them"
        )
    return path.with_name(stem + path.suffix)


def hf_config(path: Path) -> dict[str, Any]:
    """Return the model's configuration with config.json's keys.

    Raises:
        ModelError: the architecture is not one of those read here, or a size is missing.
    """
    file = read(path)
    name = file.get("general.architecture")
    if name not in _ARCHITECTURES:
        known = ", ".join(sorted(_ARCHITECTURES))
        raise ModelError(f"{path}: GGUF architecture {name!r} is not supported (supported: {known})")
    heads = _required(file, path, "attention.head_count")
    hidden_size = _required(file, path, "embedding_length")
    head_dim = file.get("attention.key_length") or hidden_size // heads
    return {
        "architectures": [_ARCHITECTURES[name]],
        "model_type": name,
        "vocab_size": len(file.metadata["tokenizer.ggml.tokens"]),
        "hidden_size": hidden_size,
        "intermediate_size": _required(file, path, "feed_forward_length"),
        "num_hidden_layers": _required(file, path, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": round(_required(file, path, "attention.layer_norm_rms_epsilon"), 12),
        "max_position_embeddings": _required(file, path, "context_length"),
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_parameters": _rope_parameters(file, path),
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
    }


def generation_config(path: Path) -> dict[str, Any]:
    """Return the end-of-turn ids, as generation_config.json would name them."""
    metadata = read(path).metadata
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
    found = [metadata[key] for key in keys if metadata.get(key) is not None]
    return {"eos_token_id": list(dict.fromkeys(found))} if found else {}


def _required(file: Contents, path: Path, key: str) -> Any:
    value = file.get(key)
    if value is None:
        raise ModelError(f"{path}: metadata key {key} is missing")
    return value


def _rope_parameters(file: Contents, path: Path) -> dict[str, Any]:
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": file.get("rope.freq_base", 10000.0)}
    if ROPE_FACTORS in file.tensors:
        factors = np.asarray(file.tensors[ROPE_FACTORS].data, np.float32)
        parameters |= {"rope_type": "factors", "factors": factors.tolist()}
    kind = file.get("rope.scaling.type")
    if kind == "linear":
        parameters |= {"rope_type": "linear", "factor": file.get("rope.scaling.factor", 1.0)}
    elif kind == "yarn":
        parameters |= {
            "rope_type": "yarn",
            "factor": file.get("rope.scaling.factor", 1.0),
            "original_max_position_embeddings": file.get("rope.scaling.original_context_length"),
        }
    elif kind not in (None, "none"):
        raise ModelError(f"{path}: rope scaling {kind!r} is not supported (supported: linear, yarn)")
    return parameters


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
