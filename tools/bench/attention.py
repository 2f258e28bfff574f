"""Attention on the CPU: the C kernels beside the torch back end, torch's attention and the memory's speed.

    uv run python tools/bench/attention.py [--threads N] [--quick]

Every line is one problem. Its alternatives are timed in turn, over and over, so that a busy moment hits all
of them, and each figure is the best of its times. Decode: one layer, `length` tokens of context for each
sequence, in blocks of 16 in random order; layers are taken in turn, so that none stays in the CPU's cache.
"In order" is how fast memory is read from one end to the other, "by block" the same blocks in the same order
with nothing computed.
Prefill: one prompt; torch gets keys and values contiguous, which a paged cache would first have to gather.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import time
from collections.abc import Callable
from functools import partial

import torch
from machine_limits import compile_limits
from torch.nn.functional import scaled_dot_product_attention

from pagedattn import AttentionBatch, KVLayout, allocate, attend, build_batch

BLOCK_SIZE = 16
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Layers are taken in turn, so that no cache stays in the CPU's from one call to the next.
COLD_BYTES = 256 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--quick", action="store_true", help="a few problems, for a first look")
    parser.add_argument("--dtype", choices=DTYPES, action="append", help="both when not given")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    dtypes = arguments.dtype or list(DTYPES)
    print(f"{arguments.threads} threads, torch {torch.__version__}")
    decode(dtypes, arguments.threads, arguments.quick)
    prefill(dtypes, arguments.quick)


@torch.inference_mode()
def decode(dtypes: list[str], threads: int, quick: bool) -> None:
    print(
        "\ndecode  batch  length  dim  heads   torch ms      C ms   ratio   C GB/s   "
        "in order   share   by block   share"
    )
    problems = (
        [(16, 4096, 64, 4)] if quick else itertools.product((1, 16, 64), (512, 4096), (64, 128), (3, 4))
    )
    memory = Memory(threads)
    for batch, length, head_dim, group in problems:
        for dtype in dtypes:
            case = DecodeCase(batch, length, head_dim, group, DTYPES[dtype])
            plain, fast, ordered, blocked = best_times(
                partial(case.run, "torch"),
                partial(case.run, "cpu"),
                memory.read_in_order,
                partial(memory.read_by_block, case),
                seconds=0.4 if quick else 0.8,
            )
            rate = case.bytes_read / fast / 1e9
            most, paged = memory.bytes / ordered / 1e9, case.bytes_read / blocked / 1e9
            print(
                f"{dtype:7} {batch:5} {length:7} {head_dim:4} {case.heads:>6} {plain * 1e3:10.3f} "
                f"{fast * 1e3:9.3f} {plain / fast:6.1f}x {rate:8.1f} {most:10.1f} {rate / most:7.0%} "
                f"{paged:10.1f} {rate / paged:7.0%}"
            )


@torch.inference_mode()
def prefill(dtypes: list[str], quick: bool) -> None:
    print("\nprefill       length  dim  heads   torch SDPA ms    C ms   ratio   C GFLOP/s")
    problems = [(512, 64, 3)] if quick else itertools.product((512, 4096), (64, 128), (3, 4))
    for length, head_dim, group in problems:
        for dtype in dtypes:
            case = PrefillCase(length, head_dim, group, DTYPES[dtype])
            contiguous, fast = best_times(case.contiguous, case.paged, seconds=0.4 if quick else 1.5)
            print(
                f"{dtype:13} {length:6} {head_dim:4} {case.heads:>6} {contiguous * 1e3:15.3f} "
                f"{fast * 1e3:7.3f} {contiguous / fast:6.2f}x {case.flops / fast / 1e9:11.1f}"
            )


class DecodeCase:
    """`batch` sequences of `length` tokens, over three KV heads."""

    kv_heads = 3

    def __init__(self, batch: int, length: int, head_dim: int, group: int, dtype: torch.dtype) -> None:
        blocks = -(-length // BLOCK_SIZE)
        layer_bytes = KVLayout(1, self.kv_heads, head_dim, BLOCK_SIZE, dtype).bytes_per_block * batch * blocks
        layers = max(1, -(-COLD_BYTES // layer_bytes))
        layout = KVLayout(layers, self.kv_heads, head_dim, BLOCK_SIZE, dtype)
        self.caches = list(allocate(layout, batch * blocks).normal_().unbind(0))
        self.table = torch.randperm(batch * blocks).view(batch, blocks).numpy()
        self.heads = f"{self.kv_heads * group}/{self.kv_heads}"
        self.query = torch.randn(batch, self.kv_heads * group, head_dim).to(dtype)
        self.out = torch.empty_like(self.query)
        self.lengths = [length] * batch
        self.bytes_read = layer_bytes
        self.batches = {name: self.new_batch() for name in ("torch", "cpu")}
        self.layer = 0

    def new_batch(self) -> AttentionBatch:
        return build_batch([1] * len(self.lengths), self.lengths, self.table, block_size=BLOCK_SIZE)

    def next_layer(self) -> torch.Tensor:
        self.layer = (self.layer + 1) % len(self.caches)
        return self.caches[self.layer]

    def run(self, backend: str) -> None:
        batch = self.batches[backend]
        attend(self.query, self.next_layer(), batch, scale=0.1, out=self.out, backend=backend)


class PrefillCase:
    """One prompt of `length` tokens over three KV heads, paged and contiguous."""

    kv_heads = 3

    def __init__(self, length: int, head_dim: int, group: int, dtype: torch.dtype) -> None:
        blocks = -(-length // BLOCK_SIZE)
        layout = KVLayout(1, self.kv_heads, head_dim, BLOCK_SIZE, dtype)
        self.cache = allocate(layout, blocks).normal_()[0]
        table = [torch.randperm(blocks).tolist()]
        self.batch = build_batch([length], [length], table, block_size=BLOCK_SIZE)
        self.heads = f"{self.kv_heads * group}/{self.kv_heads}"
        self.query = torch.randn(length, self.kv_heads * group, head_dim).to(dtype)
        self.out = torch.empty_like(self.query)
        heads_first = self.query.transpose(0, 1).contiguous()
        self.queries = heads_first[None]
        gathered = self.cache[torch.tensor(table[0])].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]
        self.keys, self.values = gathered.repeat_interleave(group, dim=1).contiguous()[:, None]
        self.flops = 2 * 2 * self.kv_heads * group * head_dim * length * (length + 1) / 2

    def paged(self) -> None:
        attend(self.query, self.cache, self.batch, scale=0.1, out=self.out, backend="cpu")

    def contiguous(self) -> None:
        scaled_dot_product_attention(self.queries, self.keys, self.values, is_causal=True, scale=0.1)


class Memory:
    """Reads in two ways: a large buffer, and the blocks of a case."""

    bytes = 256 << 20

    def __init__(self, threads: int) -> None:
        self.library = compile_limits()
        self.data = torch.ones(self.bytes // 4)
        self.threads = threads

    def read_in_order(self) -> None:
        data, count = ctypes.c_void_p(self.data.data_ptr()), ctypes.c_long(self.data.numel())
        self.library.read_all(data, count, self.threads)

    def read_by_block(self, case: DecodeCase) -> None:
        cache = case.next_layer()
        self.library.read_blocks(
            ctypes.c_void_p(cache.data_ptr()),
            ctypes.c_void_p(case.table.ctypes.data),
            ctypes.c_long(case.table.size),
            ctypes.c_long(cache[0].nbytes),
            self.threads,
        )


def best_times(*runs: Callable[[], None], seconds: float) -> list[float]:
    """The shortest time of each, in seconds, of as many rounds as `seconds` holds and at least five."""
    for run in runs:
        run()
    best = [float("inf")] * len(runs)
    rounds, end = 0, time.perf_counter() + seconds
    while rounds < 5 or time.perf_counter() < end:
        for index, run in enumerate(runs):
            start = time.perf_counter()
            run()
            best[index] = min(best[index], time.perf_counter() - start)
        rounds += 1
    return best


if __name__ == "__main__":
    main()
