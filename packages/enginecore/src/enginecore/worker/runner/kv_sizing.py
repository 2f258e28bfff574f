"""KV cache sizing: the number of blocks that fit."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from collectives import Communicator
from enginecore.cgroups import ROOT, groups, read_number
from enginecore.config import EngineConfig
from enginecore.errors import ConfigError
from enginecore.worker.models.decoder import Decoder
from pagedattn import KVLayout

_GROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.high", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Files of a control group's limit and use, and the line of its `memory.stat` that is not in use.

At `memory.high` the kernel slows a group's processes down and takes back what it can.
"""

_CPU_SHARE = 0.4
"""Part of what is free beside weights and activations that the cache takes if nothing else is asked for.

A host has other programs, and maybe another engine; the cache takes memory only as its blocks are first used.
"""


@dataclass(frozen=True)
class CacheSize:
    """The cache's blocks and the longest request that they can hold."""

    num_blocks: int
    max_model_len: int
    host_blocks: int = 0
    """Blocks of host memory for what is swapped or evicted."""


def cache_size(config: EngineConfig, layout: KVLayout, model_limit: int, available: int) -> CacheSize:
    """Decide the number of blocks and the length limit, given `available` bytes for the cache.

    A length that was asked for must fit; the model's own is lowered to what fits.

    Raises:
        ConfigError: nothing fits, or not what was asked for; the message holds the numbers.
    """
    asked = config.max_model_len
    if asked is not None and asked > model_limit:
        raise ConfigError(f"max_model_len={asked} is more than the {model_limit} positions the model has")
    blocks = config.num_blocks_override
    if blocks is None:
        most_used = config.max_num_seqs * -(-(asked or model_limit) // layout.block_size)
        blocks = min(available // layout.bytes_per_block, most_used)
    elif blocks * layout.bytes_per_block > available:
        raise ConfigError(
            f"num_blocks_override={blocks} needs {_size(blocks * layout.bytes_per_block)} of memory, "
            f"and {_size(available)} is available"
        )
    # The last token of a request is never read back, so it needs no slot.
    capacity = blocks * layout.block_size + 1
    if blocks < 1:
        raise ConfigError(
            f"the KV cache has no block: one of {layout.block_size} tokens needs "
            f"{_size(layout.bytes_per_block)}, and {_size(available)} are available; "
            "raise kv_cache_memory_bytes or gpu_memory_utilization"
        )
    if asked is not None and asked > capacity:
        needed = -(-(asked - 1) // layout.block_size)
        raise ConfigError(
            f"max_model_len={asked} needs {needed} KV cache blocks "
            f"({_size(needed * layout.bytes_per_block)}), but there are {blocks} "
            f"({_size(blocks * layout.bytes_per_block)}): the longest that fits is {capacity}"
        )
    host_blocks = int(config.swap_space * 2**30) // layout.bytes_per_block
    return CacheSize(blocks, asked or min(model_limit, capacity), host_blocks)


class CacheSizing:
    """The decision of how many blocks the KV cache has, the same on every rank."""

    def __init__(
        self,
        config: EngineConfig,
        layout: KVLayout,
        model_limit: int,
        world: Communicator,
        device: torch.device,
    ) -> None:
        self._config = config
        self._layout = layout
        self._model_limit = model_limit
        self._world = world
        self._device = device
        self.reason = ""
        """Why the cache has its size."""

    def agree(self, available: int) -> CacheSize:
        """Return the size that every rank has room for, where this one has `available` bytes for it.

        Block ids mean the same on all of them. Raises ConfigError as `cache_size` does.
        """
        own = cache_size(self._config, self._layout, self._model_limit, available)
        self.reason = _reason(self._config, self._layout, self._model_limit, available, self._device.type)
        fewest = torch.tensor([own.num_blocks, own.host_blocks], dtype=torch.int64, device=self._device)
        num_blocks, host_blocks = self._world.all_reduce(fewest, "min").tolist()
        least = num_blocks * self._layout.bytes_per_block
        size = cache_size(self._config, self._layout, self._model_limit, least)
        return replace(size, host_blocks=host_blocks)


class HostMemory(NamedTuple):
    """One worker's share of a host's memory in bytes, before it loads the model."""

    free: int
    weights: int
    step: int
    """Activations of the largest step, and the logits of all rows and drafts."""

    def __str__(self) -> str:
        parts = (self.weights, "weights"), (self.step, "activations and logits of the largest step")
        taken = ", ".join(f"{_size(size)} {name}" for size, name in parts)
        return f"{_size(self.free)} free, of it {taken}"


def host_memory(
    model: Decoder, config: EngineConfig, dtype: torch.dtype, weights: int, ranks: int
) -> HostMemory:
    """Return the memory of one of a host's `ranks` workers, which has yet to load `weights` bytes."""
    rows = config.max_sampled("cpu") if model.last else 0
    # Kernels that sample work in float32.
    logits = rows * model.spec.vocab_size * (dtype.itemsize + 4)
    step = config.max_num_batched_tokens * model.step_width * dtype.itemsize + logits
    return HostMemory(free_memory() // ranks, weights, step)


def cpu_bytes(config: EngineConfig, memory: HostMemory) -> int:
    """Return how many bytes the cache may take.

    Raises:
        ConfigError: more was asked for than is free.
    """
    free = memory.free - memory.weights - memory.step
    if free < 0:
        raise ConfigError(f"the model does not fit in memory: {memory}")
    swap = int(config.swap_space * 2**30)
    if free < swap:
        raise ConfigError(
            f"swap_space={config.swap_space} is more than the {_size(free)} that are left: {memory}"
        )
    free -= swap
    asked = config.kv_cache_memory_bytes
    if asked is not None:
        if asked > free:
            raise ConfigError(
                f"kv_cache_memory_bytes={asked} ({_size(asked)}) is more than the {_size(free)} that are "
                f"left: {memory}"
            )
        return asked
    if config.num_blocks_override is not None:
        return free
    return int(free * _CPU_SHARE)


def cuda_bytes(config: EngineConfig, device: torch.device, peak: int) -> int:
    """Return how many bytes the cache may take, when the model and a full step need `peak` of them."""
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    return max(0, int(total * config.gpu_memory_utilization) - others - peak)


def _reason(config: EngineConfig, layout: KVLayout, model_limit: int, available: int, device: str) -> str:
    """Say why the cache has the size that `cache_size` gave it, for the log."""
    longest = config.max_model_len or model_limit
    needed = config.max_num_seqs * -(-longest // layout.block_size) * layout.bytes_per_block
    if config.num_blocks_override is not None:
        return f"asked for by num_blocks_override, of {_size(available)} available"
    if needed <= available:
        return (
            f"{_size(needed)}, all that max_num_seqs={config.max_num_seqs} requests of {longest} tokens use"
        )
    if config.kv_cache_memory_bytes is not None:
        return f"{_size(available)}, asked for by kv_cache_memory_bytes"
    if device != "cpu":
        return (
            f"{_size(available)}, left by the model of gpu_memory_utilization={config.gpu_memory_utilization}"
        )
    return f"{_size(available)}, {_CPU_SHARE:.0%} of what is left (kv_cache_memory_bytes sets it)"


def free_memory(root: Path = ROOT) -> int:
    """Return the bytes that this process may still take, by the machine and by each of its control groups.

    Cached pages of files that nobody has used of late count as free: the kernel drops them when memory is
    wanted. `root` is where proc and sys are mounted.
    """
    free = psutil.virtual_memory().available
    for group in groups("memory", root):
        for limit_name, used_name, reclaimable_name in _GROUP_FILES:
            limit, used = read_number(group / limit_name), read_number(group / used_name)
            if limit is not None and used is not None:
                kept = max(0, used - _statistic(group / "memory.stat", reclaimable_name))
                free = min(free, max(0, limit - kept))
    return free


def _statistic(path: Path, name: str) -> int:
    """Return a value of a group's `memory.stat`, 0 where it is not there."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(value) for key, _, value in (line.partition(" ") for line in lines) if key == name), 0)


def _size(count: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} bytes"
