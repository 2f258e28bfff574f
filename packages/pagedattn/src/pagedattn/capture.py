"""Programs: what a model does in a step, recorded once and run by one call."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

import numpy as np
import torch

from pagedattn.backends import backend_name
from pagedattn.batch import AttentionBatch

Inputs = tuple[torch.Tensor, ...]
HostFunction = Callable[..., object]


class CaptureError(ValueError):
    """A function cannot be recorded as a program; the message says what is in the way."""


class Program(Protocol):
    """A recorded function, for any number of tokens up to `max_tokens`.

    On a CPU, kernels that run one after another by one team of threads; on a CUDA device, graphs of decode
    steps, while the function runs all other steps.

    One thread may call it at a time. It keeps the function that it was recorded from. What that has besides
    its inputs (weights, caches, tables) must stay where it was: changed in place, not replaced. Host calls
    cut it into segments, each of which one C call runs.
    """

    max_tokens: int

    @property
    def num_operations(self) -> int:
        """Kernels in a run; on a CUDA device graphs, of which a run replays one."""
        ...

    @property
    def num_host_calls(self) -> int:
        """Calls of `host_call` in a run; there is one more segment."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes that results between kernels take, and graphs."""
        ...

    def __call__(self, inputs: Inputs, batch: AttentionBatch) -> Inputs:
        """Run it; return new tensors [tokens, …].

        Raises ValueError for more tokens than `max_tokens` and for inputs that differ in type or width from
        the recorded ones, and what the kernels raise when a batch does not fit its cache: then nothing has
        run. What a host call raises is passed on, and what follows it does not run; the program can be called
        again.
        """
        ...


def capture(
    run: Callable[[Inputs, AttentionBatch], Inputs],
    example: Callable[[int], Inputs],
    *,
    block_size: int,
    max_tokens: int,
    max_seqs: int = 256,
    max_length: int = 4096,
    backend: str | None = None,
) -> Program:
    """Record what `run(inputs, batch)` does, as a program that is called likewise.

    `run` takes contiguous tensors `[tokens, …]` and returns new ones. It may call this package's `embedding`,
    `linear`, norms, `rotary`, `write_kv`, `attend`, activations and `host_call`, and take views; any other
    operation of torch is an error, since a run of the program would leave it out. `example(tokens)` makes
    inputs. `run` is called with two of them and batches of `block_size`, but no kernel runs; from what
    differs the program knows what to set anew in each run.

    On a CUDA device steps of up to `max_seqs` decodes, 256 at most, of up to `max_length` tokens each replay
    a CUDA graph, and all others call `run`. There it may call any operation that does not wait for the
    device, and what it does may depend on no number of the host's but those of the batch. Of a host call the
    graph has what it launched when captured. See `pagedattn.cuda_graphs`.

    Raises CaptureError where `run` cannot be recorded, or the back end has no programs.
    """
    name = backend_name(example(1)[0].device, backend)
    if name == "triton":
        graphs = importlib.import_module("pagedattn.cuda_graphs")
        return graphs.record(
            run,
            example,
            block_size=block_size,
            max_tokens=max_tokens,
            max_seqs=max_seqs,
            max_length=max_length,
        )
    if name != "cpu":
        raise CaptureError(f"the back end {name} has no programs")
    examples = [(example(batch.num_tokens), batch) for batch in _batches(block_size)]
    program = importlib.import_module("pagedattn.cpu_backend.program")
    return program.record(run, examples, max_tokens)


def host_call(function: HostFunction, *tensors: torch.Tensor) -> None:
    """Call `function(*tensors)`, which changes tensors in place; a program calls it in each of its runs.

    It is for what kernels cannot do, such as exchanging results with other processes. While `capture`
    records, the function is not called: each run of the program runs the kernels before it, calls it with the
    run's own tensors, and goes on. It must not keep these beyond the call.

    Raises CaptureError while recording, unless each tensor is `[tokens, …]` and was made by the recorded
    function, or is a view of one that was.
    """
    active = recorder.get()
    if active is None:
        function(*tensors)
    else:
        active.record_host_call(function, tensors)


class Recorder(Protocol):
    """Records what a thread runs."""

    def record_kernel(self, kernel: Any, values: tuple[float, ...]) -> None:
        """Take a kernel of the back end and its arguments."""
        ...

    def record_host_call(self, function: HostFunction, tensors: Sequence[torch.Tensor]) -> None:
        """Take the arguments of `host_call`."""
        ...


recorder: ContextVar[Recorder | None] = ContextVar("recorder", default=None)
"""What records this thread now."""


def _batches(block_size: int) -> list[AttentionBatch]:
    """Return two batches, no two of whose numbers are in the same proportion."""
    return [
        _batch(block_size, queries=[1, 1, 5], shared_blocks=1, columns=16, stride=36),
        _batch(block_size, queries=[1, 1, 1, 4, 4], shared_blocks=3, columns=40, stride=81),
    ]


def _batch(
    block_size: int, *, queries: list[int], shared_blocks: int, columns: int, stride: int
) -> AttentionBatch:
    # From numpy, which knows nothing of a default device.
    counts = np.array(queries, np.int32)
    lengths = counts + shared_blocks * block_size
    return AttentionBatch(
        query_starts=torch.from_numpy(np.concatenate([[0], counts.cumsum()]).astype(np.int32)),
        lengths=torch.from_numpy(lengths.astype(np.int32)),
        block_table=torch.from_numpy(np.zeros((len(queries), stride), np.int32))[:, :columns],
        slots=torch.from_numpy(np.full(sum(queries), -1, np.int64)),
        max_query=max(queries),
        max_length=int(lengths.max()),
        num_decodes=queries.count(1),
        shared_prefix=shared_blocks * block_size,
    )
