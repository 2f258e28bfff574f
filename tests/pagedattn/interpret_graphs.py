"""Captures decode steps of the Triton back end in stand-ins for CUDA graphs; differences as JSON.

A program of its own, since TRITON_INTERPRET must be set before Triton is imported. The stand-ins write down
the launches of Triton's kernels, with their arguments, beside torch's operations.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode

sys.path.insert(0, str(Path(__file__).parents[1]))
from pytest import MonkeyPatch

import graph_stand_ins
from pagedattn import (
    attend,
    build_batch,
    layer_norm,
    linear,
    pack_linear,
    rms_norm,
    rotary,
    silu_and_mul,
    write_kv,
)
from pagedattn.cuda_graphs import CudaRecorder, GraphProgram, Shape, graph_shapes

HIDDEN, HEADS, KV_HEADS, DIM, BLOCK_SIZE, BLOCKS = 32, 4, 2, 16, 16, 12
MAX_LENGTH = 9000  # graphs for up to 4096, one piece a context, and up to that, three
COLUMNS = -(-MAX_LENGTH // BLOCK_SIZE)


class Layers:
    """Two layers, the first with a sliding window, over a float32 or float8 cache of their own."""

    def __init__(self, cache_dtype, device="cpu"):
        random = torch.Generator().manual_seed(0)

        def weight(*shape):
            return (torch.randn(shape, generator=random) / 4).to(device)

        self.qkv = pack_linear(weight((HEADS + 2 * KV_HEADS) * DIM, HIDDEN))
        self.o = pack_linear(weight(HIDDEN, HEADS * DIM))
        self.up, self.down = pack_linear(weight(48, HIDDEN)), pack_linear(weight(HIDDEN, 24))
        self.norm, self.bias = 1 + weight(HIDDEN), weight(HIDDEN)
        self.table = weight(64, DIM)
        self.sinks = weight(HEADS)
        shape = (2, BLOCKS, 2, KV_HEADS, BLOCK_SIZE, DIM)
        self.cache = torch.zeros(shape, device=device).to(cache_dtype)
        self.calls = 0

    def __call__(self, inputs, batch):
        self.calls += 1
        x, positions = inputs
        residual = None
        for cache, window in zip(self.cache, (11, None), strict=True):
            if residual is None:
                normed, residual = rms_norm(x, self.norm, 1e-5), x
            else:
                normed, residual = rms_norm(x, self.norm, 1e-5, residual)
            widths = (HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM)
            parts = linear(normed, self.qkv).split(widths, dim=-1)
            query, key, value = (part.unflatten(-1, (-1, DIM)) for part in parts)
            query, key = rotary(query, key, positions, self.table)
            write_kv(key, value, cache, batch.slots)
            mixed = attend(query, cache, batch, scale=0.3, window=window, soft_cap=5.0, sinks=self.sinks)
            mixed = linear(mixed.flatten(1), self.o)
            normed, residual = layer_norm(mixed, self.norm, self.bias, 1e-5, residual)
            x = linear(silu_and_mul(linear(normed, self.up)), self.down)
        return x, residual


def example(tokens):
    return torch.zeros(tokens, HIDDEN), torch.zeros(tokens, dtype=torch.int64)


def step(counts, before, seed, max_length=None, device="cpu"):
    """`max_length` is a bound on lengths, by default exact."""
    rng = np.random.default_rng(seed)
    lengths = [count + old for count, old in zip(counts, before, strict=True)]
    order = rng.permutation(BLOCKS).tolist()
    tables = [[order.pop() for _ in range(-(-length // BLOCK_SIZE))] + [-1] * COLUMNS for length in lengths]
    batch = build_batch(
        counts, lengths, [table[:COLUMNS] for table in tables], block_size=BLOCK_SIZE, device=device
    )
    ranges = [np.arange(end - count, end) for count, end in zip(counts, lengths, strict=True)]
    x = rng.standard_normal((sum(counts), HIDDEN)).astype(np.float32)
    if max_length is not None:
        batch = replace(batch, max_length=max_length)
    return (torch.from_numpy(x).to(device), torch.from_numpy(np.concatenate(ranges)).to(device)), batch


STEPS = {
    "prompts": (([5, 20, 9], [0, 0, 0], 1), None),
    "decodes": (([1, 1, 1], [5, 20, 9], 1), Shape(4096, 4)),
    "other blocks, lengths and size": (([1, 1, 1, 1], [33, 0, 17, 40], 2), Shape(4096, 4)),
    "one decode": (([1], [9], 3), Shape(4096, 1)),
    "contexts in pieces": (([1, 1], [30, 3], 4, 5000), Shape(9000, 2)),
    "contexts in pieces, padded": (([1, 1, 1], [2, 47, 3], 5, 5000), Shape(9000, 4)),
    "a mixed step": (([1, 1, 4], [3, 5, 6], 6), None),
    "decodes after it": (([1, 1], [8, 15], 7), Shape(4096, 2)),
}


def write_down_launches(patch):
    """Have a stand-in's tape take the launches of Triton's kernels."""
    from triton.runtime.interpreter import GridExecutor

    launch = GridExecutor.__call__

    def launch_on_tape(executor, *args, **kwargs):
        tape = _get_current_dispatch_mode()

        def again():
            with _disable_current_modes():
                launch(executor, *args, **kwargs)

        if isinstance(tape, graph_stand_ins.Tape):
            tape.add_launch(again)
        again()

    patch.setattr(GridExecutor, "__call__", launch_on_tape)


def difference(one, other):
    one, other = one.double(), other.double()
    return float((one - other).abs().max()) if torch.isfinite(one).all() else float("inf")


def main():
    reports = {}
    with MonkeyPatch.context() as patch:
        graph_stand_ins.put_in_place(patch)
        write_down_launches(patch)
        for dtype in (torch.float32, torch.float8_e4m3fn):
            captured, plain = Layers(dtype), Layers(dtype)
            shapes = graph_shapes(4, MAX_LENGTH)
            recorder = CudaRecorder(torch.device("cpu"))
            program = GraphProgram(captured, example, shapes, recorder, block_size=BLOCK_SIZE, max_tokens=64)
            for name, (given, shape) in STEPS.items():
                inputs, batch = step(*given)
                calls, replays = captured.calls, graph_stand_ins.TapeGraph.replays
                results, expected = program(inputs, batch), plain(inputs, batch)
                pairs = [*zip(results, expected, strict=True), (captured.cache.float(), plain.cache.float())]
                reports[f"{name}, {dtype}"] = {
                    "difference": max(difference(*pair) for pair in pairs),
                    "calls": captured.calls - calls,
                    "replays": graph_stand_ins.TapeGraph.replays - replays,
                    "as_expected": program._shape(batch) == shape,
                }
    print(json.dumps(reports))


if __name__ == "__main__":
    main()
