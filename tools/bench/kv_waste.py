"""Share of allocated KV slots that hold nothing: in blocks, and with a contiguous reservation a request.

    uv run python tools/bench/kv_waste.py [--live 256] [--block-size 16] [--max-model-len 4096] [--json PATH]

Sequences with the lengths of the Azure conversation trace run, 256 at a time; each that ends is replaced by
the next of the trace. Every step gives each of them a token. For blocks, `kvblocks.PagedMemory` reports its
waste. A contiguous reservation sets `--max-model-len` slots aside for each sequence, as engines did before
paged attention; requests longer than that are left out of both.
"""

import argparse
import csv
import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvblocks import PagedMemory

TRACE = Path(__file__).resolve().parents[3] / "shared" / "data" / "traces" / "AzureLLMInferenceTrace_conv.csv"
"""Default of `--trace`."""


def read_lengths(trace: Path) -> NDArray[np.int64]:
    """Prompt and answer tokens of each request, int64 [n, 2]."""
    with trace.open(newline="") as file:
        rows = [(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in csv.DictReader(file)]
    return np.array(rows, np.int64)


def run(lengths: NDArray[np.int64], *, live: int, block_size: int, steps: int) -> tuple[float, float]:
    """The mean share of wasted slots in blocks, and the mean number of tokens held."""
    longest = int(lengths.sum(axis=1).max())
    blocks_per_row = -(-longest // block_size)
    memory = PagedMemory(
        num_blocks=live * blocks_per_row,
        block_size=block_size,
        max_rows=live,
        max_blocks_per_row=blocks_per_row,
        prefix_caching=False,
    )
    tokens = np.zeros((1, longest), np.int32)
    rows = np.arange(live)
    held = np.zeros(live, np.int64)
    ends = np.zeros(live, np.int64)
    arrivals = iter(lengths[np.arange(steps * live) % len(lengths)].tolist())
    wasted, used = [], []
    for step in range(steps):
        for row in np.flatnonzero(held == ends).tolist():
            if step:
                memory.free(row)
            prompt, answer = next(arrivals)
            memory.allocate(row, memory.prefix(tokens[0, :prompt]))
            # Those that begin the run are at any point of their answer, as they would be in the midst of one.
            held[row] = prompt + (row * answer // live if step == 0 else 0)
            ends[row] = prompt + max(answer, 1)
        held += 1
        memory.grow(rows, held)
        memory.commit(rows, held, tokens)
        wasted.append(memory.waste)
        used.append(held.sum())
    return float(np.mean(wasted)), float(np.mean(used))


def main() -> None:
    parser = argparse.ArgumentParser(description="Share of allocated KV slots that hold nothing.")
    parser.add_argument("--trace", type=Path, default=TRACE, help="an Azure LLM inference trace (CSV)")
    parser.add_argument("--live", type=int, default=256, help="sequences at a time (%(default)s)")
    parser.add_argument("--block-size", type=int, default=16, help="tokens a block (%(default)s)")
    parser.add_argument("--steps", type=int, default=2000, help="tokens each row gets (%(default)s)")
    parser.add_argument(
        "--max-model-len", type=int, default=4096, help="tokens a reservation sets aside (%(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures there as well")
    args = parser.parse_args()
    lengths = read_lengths(args.trace)
    admitted = lengths[lengths.sum(axis=1) <= args.max_model_len]
    if not len(admitted):
        parser.error(f"no request of the trace has {args.max_model_len} tokens or less")
    paged, used = run(admitted, live=args.live, block_size=args.block_size, steps=args.steps)
    contiguous = 1 - used / (args.live * args.max_model_len)
    print(f"{len(admitted)} of {len(lengths)} requests, {args.live} live, {used / args.live:.0f} tokens each")
    print(f"allocated slots that hold nothing, in blocks of {args.block_size} tokens: {paged:.2%}")
    print(f"allocated slots that hold nothing, {args.max_model_len} reserved for each: {contiguous:.2%}")
    if args.json:
        figures = {"live": args.live, "block_size": args.block_size, "max_model_len": args.max_model_len}
        figures |= {"blocks_waste": paged, "contiguous_waste": contiguous}
        args.json.write_text(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
