"""Compare a step's layers run as a program with the same layers run operation by operation.

    uv run python tools/bench/step.py [MODEL] [--dtype float32] [--rows 1 8 64] [--context 256] [--seconds 5]

Decode steps of so many rows, each with so many tokens in the cache, alternating in one process on random
cached keys. Times are medians of one step in milliseconds; the head is timed by itself.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from collectives import LocalCommunicator
from enginecore import threads

threads.prepare()

from enginecore.model_files import locate  # noqa: E402  (torch reads its threads' settings when loaded)
from enginecore.worker.models.decoder import Decoder  # noqa: E402
from enginecore.worker.runner.program import StepLimits, layer_program  # noqa: E402
from enginecore.worker.weights.loading import load_decoder  # noqa: E402
from enginecore.worker.worker import keep_freed_memory, pick_dtype  # noqa: E402
from pagedattn import AttentionBatch, KVLayout, allocate  # noqa: E402

BLOCK_SIZE = 16


def decode_batch(rows: int, context: int) -> tuple[torch.Tensor, torch.Tensor, AttentionBatch]:
    """Return ids, positions and a batch of `rows` sequences of `context` tokens, in blocks of their own."""
    blocks = -(-context // BLOCK_SIZE)
    table = torch.arange(rows * blocks, dtype=torch.int32).view(rows, blocks)
    last = table[:, (context - 1) // BLOCK_SIZE].long() * BLOCK_SIZE + (context - 1) % BLOCK_SIZE
    batch = AttentionBatch(
        query_starts=torch.arange(rows + 1, dtype=torch.int32),
        lengths=torch.full((rows,), context, dtype=torch.int32),
        block_table=table,
        slots=last,
        max_query=1,
        max_length=context,
        num_decodes=rows,
    )
    return torch.arange(rows) % 100 + 300, torch.full((rows,), context - 1), batch


def alternate(runs: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Return the median milliseconds of each, run in turns."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(next(iter(times.values()))) < 5:
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append(1000 * (time.perf_counter() - start))
    return {name: statistics.median(found[1:]) for name, found in times.items()}


def run_modules(
    model: Decoder, given: tuple[torch.Tensor, ...], cache: torch.Tensor, batch: AttentionBatch
) -> None:
    """Run the layers as a step does, which has a batch of its own."""
    batch.memo.clear()
    model.run_layers(given, cache, batch)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=5.0, help="for each number of rows")
    options = parser.parse_args()
    files, device = locate(options.model), torch.device("cpu")
    dtype = pick_dtype(options.dtype, files, device)
    keep_freed_memory()
    model = load_decoder(
        files, LocalCommunicator(), dtype=dtype, device=device, max_positions=options.context + 1
    )
    layout = KVLayout(len(model.layers), model.kv_heads, model.spec.head_dim, BLOCK_SIZE, dtype)
    cache = allocate(layout, max(options.rows) * -(-options.context // BLOCK_SIZE), device)
    cache.normal_()
    limits = StepLimits(max(64, *options.rows), max(options.rows), options.context)
    program = layer_program(model, cache, dtype, limits)
    if program is None:
        raise SystemExit("the layers of this model are no program")
    print(
        f"{options.model} in {dtype}, {torch.get_num_threads()} threads, {program.num_operations} operations"
    )
    print(f"{'rows':>5} {'modules':>9} {'program':>9} {'ratio':>6} {'head':>7}")
    for rows in options.rows:
        ids, positions, batch = decode_batch(rows, options.context)
        given = model.layer_inputs(ids, positions)

        hidden = model.hidden(program(given, batch))
        found = alternate(
            {
                "modules": partial(run_modules, model, given, cache, batch),
                "program": partial(program, given, batch),
                "head": partial(model.logits, hidden),
            },
            options.seconds,
        )
        ratio = found["modules"] / found["program"]
        print(f"{rows:5} {found['modules']:9.2f} {found['program']:9.2f} {ratio:6.2f} {found['head']:7.2f}")


if __name__ == "__main__":
    main()
