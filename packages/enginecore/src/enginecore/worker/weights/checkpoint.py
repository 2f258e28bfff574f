"""Iterate over the tensors of a checkpoint, with every fault named before the model is used."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from enginecore.errors import ModelError
from enginecore.model_files import ModelFiles
from enginecore.worker.weights import gguf

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def tensors(
    files: ModelFiles, on_file: Callable[[int, int], object] = lambda number, count: None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) for every tensor of the checkpoint, on the CPU, in the type it is stored in.

    `on_file` is told the number of each file, from 1, and how many there are, before it is read.

    Raises:
        ModelError: a file or tensor is missing, cut short or not readable; the message names it.
    """
    if files.is_gguf:
        for name, values in gguf.weights(files.path):
            yield name, torch.from_numpy(values)
        return
    expected = _shards(files.path)
    for number, (shard, names) in enumerate(expected.items(), 1):
        on_file(number, len(expected))
        yield from _read(shard, names)


def _shards(folder: Path) -> dict[Path, set[str] | None]:
    """Return the files to read; with an index, each with the tensors that it must hold."""
    index = folder / _INDEX
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
            raise ModelError(f"{index} is not a valid index: {error}") from error
        shards: dict[Path, set[str] | None] = {}
        for name, file in weight_map.items():
            names = shards.setdefault(folder / file, set())
            if names is not None:
                names.add(name)
        absent = sorted(shard.name for shard in shards if not shard.is_file())
        if absent:
            raise ModelError(f"{folder} lacks {absent[0]}, which {_INDEX} names")
        return shards
    if (folder / _SINGLE).is_file():
        return {folder / _SINGLE: None}
    found = sorted(path for path in folder.glob("*.safetensors") if path.is_file())
    if len(found) == 1:
        return {found[0]: None}
    if found:
        raise ModelError(
            f"{folder} has {len(found)} .safetensors files but no {_INDEX} that says which to read"
        )
    if list(folder.glob("*.bin")):
        raise ModelError(f"{folder} has only .bin weights: convert them to safetensors")
    raise ModelError(f"{folder} has no .safetensors weights")


def _read(shard: Path, names: set[str] | None) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        with safe_open(shard, framework="pt") as file:
            held = set(file.keys())
            absent = sorted((names or set()) - held)
            if absent:
                raise ModelError(f"{shard} lacks tensor {absent[0]}, which {_INDEX} places there")
            for name in sorted(held if names is None else names):
                yield name, file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{shard} is not a readable safetensors file: {error}") from error
