"""Measure launch shapes of the Triton attention kernels on this machine's GPU and record the fastest.

    uv run python tools/tune_attention.py

Serving never measures: it reads `tuned_tiles.json` in `pagedattn.triton_backend` for its device, else follows
the rule in `tiles` there. This extends that file.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from triton.runtime.errors import OutOfResources

from pagedattn.backends import ScoreOptions
from pagedattn.batch import AttentionBatch, build_batch
from pagedattn.layout import FP8, KVLayout, allocate
from pagedattn.triton_backend.attention import attend_by_plan, describe_device
from pagedattn.triton_backend.kernels import attend_kernel
from pagedattn.triton_backend.plan import Device, Plan, make_plan
from pagedattn.triton_backend.tiles import RECORD, Kind, LaunchShape, fit, next_power_of_2, rule_of_thumb

# name: (query dtype, cache dtype)
DTYPES = {
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "float8_e4m3fn": (torch.bfloat16, FP8),
    "float32": (torch.float32, torch.float32),
}
KV_HEADS, GROUP, BLOCK_SIZE = 8, 4, 16
# (queries, context) of each sequence: far more keys and values than any cache holds, or products enough.
SEQUENCES: dict[Kind, list[tuple[int, int]]] = {
    "decode": [(1, 4096)] * 64,
    "prefill": [(4096, 4096)] * 2,
}


class Problem(NamedTuple):
    """Problem that a launch shape is chosen for; `dtype` is a name in DTYPES."""

    kind: Kind
    head_dim: int
    dtype: str

    @property
    def padded_dim(self) -> int:
        return max(16, next_power_of_2(self.head_dim))

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype][1].itemsize


class Measurement(NamedTuple):
    """Median time of a launch, and the registers that its kernel spills; 0 is what is wanted."""

    microseconds: float
    spills: int


# None where the shape asks for more than the device has.
Measure = Callable[[LaunchShape], Measurement | None]


def candidates(problem: Problem, capability: tuple[int, int]) -> list[LaunchShape]:
    """Launch shapes worth measuring, the rule's own first."""
    rows = (32, 64, 128) if problem.kind == "prefill" else (64,)
    if problem.itemsize == 4:
        rows = (16, 32)
    grid = product(rows, (16, 32, 64, 128), (4, 8), (2, 3, 5, 7))
    rule = rule_of_thumb(problem.kind, problem.padded_dim, problem.itemsize, capability)
    return list(dict.fromkeys([rule, *(LaunchShape(*sizes) for sizes in grid)]))


def fastest(shapes: Iterable[LaunchShape], measure: Measure) -> tuple[LaunchShape, Measurement]:
    """The fastest of the shapes that fit the device without spilling registers.

    Raises ValueError when none does.
    """
    best: tuple[LaunchShape, Measurement] | None = None
    for shape in shapes:
        measured = measure(shape)
        if measured is None or measured.spills:
            continue
        if best is None or measured.microseconds < best[1].microseconds:
            best = shape, measured
    if best is None:
        raise ValueError("no launch shape fits the device without spilling registers")
    return best


def tune(
    problems: Iterable[Problem],
    device: Device,
    device_name: str,
    measure_for: Callable[[Problem], Measure],
) -> Iterator[dict[str, Any]]:
    """An entry of the record for each problem."""
    for problem in problems:
        shape, measured = fastest(candidates(problem, device.capability), measure_for(problem))
        yield {
            "capability": list(device.capability),
            "kind": problem.kind,
            "head_dim": problem.padded_dim,
            "itemsize": problem.itemsize,
            **shape._asdict(),
            "device": device_name,
            "microseconds": round(measured.microseconds, 1),
        }


def merge_record(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`old` with the entries that `new` has anew replaced, in order of device, kind and sizes."""

    def key(entry: dict[str, Any]) -> tuple[list[int], str, int, int]:
        return entry["capability"], entry["kind"], entry["head_dim"], entry["itemsize"]

    replaced = [key(entry) for entry in new]
    return sorted([entry for entry in old if key(entry) not in replaced] + new, key=key)


def measure_on_device(problem: Problem) -> Measure:
    """Measures launches of `problem` by CUDA events."""
    query, cache, batch = make_problem(problem, torch.device("cuda"))
    out = torch.empty_like(query)
    options = ScoreOptions(problem.head_dim**-0.5, None, None, None, None)
    device = describe_device(query.device)
    plan = make_plan(query, cache, batch, None, device)

    def measure(shape: LaunchShape) -> Measurement | None:
        shaped = with_shape(plan, problem, shape)

        def launch() -> None:
            attend_by_plan(query, cache, batch, options, out, shaped)

        attend_kernel.device_caches.clear()
        try:
            launch()
        except OutOfResources:
            return None
        (compiled,) = attend_kernel.device_caches[query.device.index or 0][0].values()
        return Measurement(median_microseconds(launch), compiled.n_spills)

    return measure


def make_problem(problem: Problem, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, AttentionBatch]:
    """Random queries, a cache of zeros and the batch of `problem`."""
    query_dtype, cache_dtype = DTYPES[problem.dtype]
    sequences = SEQUENCES[problem.kind]
    blocks = -(-sequences[0][1] // BLOCK_SIZE)
    order = torch.randperm(len(sequences) * blocks).view(len(sequences), blocks).tolist()
    queries, lengths = zip(*sequences)
    batch = build_batch(queries, lengths, order, block_size=BLOCK_SIZE, device=device)
    layout = KVLayout(1, KV_HEADS, problem.head_dim, BLOCK_SIZE, cache_dtype)
    cache = allocate(layout, len(sequences) * blocks, device)[0]
    query = torch.randn(sum(queries), KV_HEADS * GROUP, problem.head_dim, device=device).to(query_dtype)
    return query, cache, batch


def with_shape(plan: Plan, problem: Problem, shape: LaunchShape) -> Plan:
    """`plan` with launches of `shape`."""
    max_query = max(queries for queries, _ in SEQUENCES[problem.kind])
    tiles = fit(problem.kind, shape, max_query=max_query, group=GROUP, padded_dim=problem.padded_dim)
    return plan._replace(short=tiles) if problem.kind == "decode" else plan._replace(long=tiles)


def median_microseconds(launch: Callable[[], None], repeats: int = 20) -> float:
    """Median time on the device of `repeats` launches, after one that is not counted."""
    launch()
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)
    ]
    for begin, end in events:
        begin.record()
        launch()
        end.record()
    torch.cuda.synchronize()
    times = sorted(begin.elapsed_time(end) for begin, end in events)
    return times[repeats // 2] * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure launch shapes of attention and record the fastest.")
    parser.add_argument(
        "--output", type=Path, default=RECORD, help="the record to extend; default: the one in use"
    )
    parser.add_argument("--head-dims", type=int, nargs="+", default=[32, 64, 128, 256])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("tuning measures on a CUDA device, and there is none")
    problems = [Problem(*sizes) for sizes in product(SEQUENCES, arguments.head_dims, arguments.dtypes)]
    device = torch.device("cuda", torch.cuda.current_device())
    record = json.loads(arguments.output.read_text()) if arguments.output.exists() else []
    name = torch.cuda.get_device_name(device)
    for entry in tune(problems, describe_device(device), name, measure_on_device):
        print(json.dumps(entry), flush=True)
        # After each, so that an interrupted run keeps what it measured.
        record = merge_record(record, [entry])
        arguments.output.write_text("[\n" + ",\n".join(map(json.dumps, record)) + "\n]\n")


if __name__ == "__main__":
    main()
