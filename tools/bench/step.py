"""Compare a step's layers run as a program with the same layers run operation by operation.

    uv run python tools/bench/step.py [MODEL] [--dtype float32] [--rows 1 8 64] [--context 256] [--seconds 5]
        [--tensor-parallel 1]

Decode steps of so many rows, each with so many tokens in the cache, alternating in one process on random
cached keys. Times are medians of one step in milliseconds, and the ratio is that of a round; the head is
timed by itself. Tensor-parallel ranks are processes, which share memory and step together; the first reports.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from collectives import Communicator, LocalCommunicator, SharedMemoryCommunicator
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


def alternate(
    runs: dict[str, Callable[[], object]], seconds: float, comm: Communicator
) -> dict[str, list[float]]:
    """Return the milliseconds of each, run in turns for as many rounds as the first rank has time for."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    until = time.perf_counter() + seconds
    rounds = 0
    while comm.broadcast(torch.tensor([int(time.perf_counter() < until or rounds < 5)])):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append(1000 * (time.perf_counter() - start))
        rounds += 1
    return {name: found[1:] for name, found in times.items()}


def run_modules(
    model: Decoder, given: tuple[torch.Tensor, ...], cache: torch.Tensor, batch: AttentionBatch
) -> None:
    """Run the layers as a step does, which has a batch of its own."""
    batch.memo.clear()
    model.run_layers(given, cache, batch)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=5.0, help="for each number of rows")
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="RANKS")
    parser.add_argument("--join", nargs=2, metavar=("STORE", "RANK"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.join is not None:
        join(options, options.join[0], int(options.join[1]))
    elif options.tensor_parallel == 1:
        compare(options, LocalCommunicator())
    else:
        with tempfile.TemporaryDirectory() as folder:
            store = str(Path(folder, "store"))
            command = [sys.executable, *sys.argv, "--join", store]
            ranks = range(1, options.tensor_parallel)
            others = [subprocess.Popen([*command, str(rank)]) for rank in ranks]
            join(options, store, 0)
            for other in others:
                other.wait(60)


def join(options: argparse.Namespace, store_file: str, rank: int) -> None:
    """Compare as one of the ranks that meet at a file."""
    ranks = options.tensor_parallel
    torch.set_num_threads(max(1, torch.get_num_threads() // ranks))
    store = dist.FileStore(store_file, ranks)
    comm = SharedMemoryCommunicator.join(store, rank, ranks, name="tp", timeout=60)
    if comm is None:
        raise SystemExit("the ranks of this host share no memory")
    compare(options, comm)
    comm.close()


@torch.inference_mode()
def compare(options: argparse.Namespace, comm: Communicator) -> None:
    """Time steps, and print the times if this is the first rank."""
    say = print if comm.rank == 0 else lambda *_: None
    files, device = locate(options.model), torch.device("cpu")
    dtype = pick_dtype(options.dtype, files, device)
    keep_freed_memory()
    model = load_decoder(files, comm, dtype=dtype, device=device, max_positions=options.context + 1)
    layout = KVLayout(len(model.layers), model.kv_heads, model.spec.head_dim, BLOCK_SIZE, dtype)
    cache = allocate(layout, max(options.rows) * -(-options.context // BLOCK_SIZE), device)
    cache.normal_()
    limits = StepLimits(max(64, *options.rows), max(options.rows), options.context)
    program = layer_program(model, cache, dtype, limits)
    if program is None:
        raise SystemExit("the layers of this model are no program")
    say(
        f"{options.model} in {dtype}, {comm.size} ranks of {torch.get_num_threads()} threads, "
        f"{program.num_operations} operations, {program.num_host_calls + 1} segments"
    )
    say(f"{'rows':>5} {'modules':>9} {'program':>9} {'ratio':>6} {'head':>7}")
    for rows in options.rows:
        ids, positions, batch = decode_batch(rows, options.context)
        given = model.layer_inputs(ids, positions)

        hidden = model.hidden(program(given, batch))
        times = alternate(
            {
                "modules": partial(run_modules, model, given, cache, batch),
                "program": partial(program, given, batch),
                "head": partial(model.logits, hidden),
            },
            options.seconds,
            comm,
        )
        found = {name: statistics.median(each) for name, each in times.items()}
        rounds = zip(times["modules"], times["program"], strict=True)
        ratio = statistics.median(modules / program for modules, program in rounds)
        say(f"{rows:5} {found['modules']:9.2f} {found['program']:9.2f} {ratio:6.2f} {found['head']:7.2f}")


if __name__ == "__main__":
    main()
