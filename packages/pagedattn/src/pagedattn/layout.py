"""Memory layout of a paged KV cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

FP8 = torch.float8_e4m3fn
CACHE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, FP8)
CACHE_DTYPE_NAMES = "float32, float16, bfloat16 or float8_e4m3fn"


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The shape of a KV cache, all but its number of blocks.

    One layer's cache is a tensor `[num_blocks, 2, kv_heads, block_size, head_dim]`: keys at `[:, 0]`,
    values at `[:, 1]`. A block of one head is a contiguous `[block_size, head_dim]` tile, so that
    attention over one KV head streams whole tiles.

    Raises ValueError for sizes below 1 and for dtypes other than float32, float16, bfloat16 and
    float8_e4m3fn.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.dtype not in CACHE_DTYPES:
            raise ValueError(f"a KV cache holds {CACHE_DTYPE_NAMES}, not {self.dtype}")

    @property
    def block_shape(self) -> tuple[int, int, int, int]:
        """One block of one layer: `[2, kv_heads, block_size, head_dim]`."""
        return (2, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block takes over all layers, keys and values together."""
        elements = 2 * self.num_kv_heads * self.block_size * self.head_dim
        return self.num_layers * elements * self.dtype.itemsize


def allocate(layout: KVLayout, num_blocks: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """A zeroed cache `[layers, num_blocks, 2, kv_heads, block_size, head_dim]` of `layout.dtype`.

    `cache[layer]` is what `write_kv` and `attend` take.
    """
    if num_blocks < 1:
        raise ValueError(f"a cache needs at least one block, not {num_blocks}")
    shape = (layout.num_layers, num_blocks, *layout.block_shape)
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=layout.dtype, device=device)
    # numpy asks the system for zeroed memory, which takes none until a block is first written; torch.zeros
    # would touch all of it now.
    raw = np.zeros(num_blocks * layout.bytes_per_block, dtype=np.uint8)
    return torch.from_numpy(raw).view(layout.dtype).view(shape)
