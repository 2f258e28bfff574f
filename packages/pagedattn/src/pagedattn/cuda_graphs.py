"""Decode steps as CUDA graphs, by padded batch size and by length of the longest sequence.

The host's numbers are constants of a graph: the number of sequences, and the bound on their lengths, by which
attention cuts contexts into pieces (`triton_backend.split.choose_splits`). A graph is right for any shorter
sequences, with pieces that are empty. One for all lengths would be slow: of 256 sequences, each would have 32
pieces because one might have 128 Ki tokens. So there are graphs for lengths up to LENGTH, up to LENGTH_FACTOR
times that, and so on. Up to LENGTH, contexts are cut only as far as the device has processors for the pieces.

A shared prefix is read by each sequence: its length would be another constant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from pagedattn.backends import backend_name
from pagedattn.batch import AttentionBatch
from pagedattn.capture import CaptureError, Inputs

Function = Callable[[Inputs, AttentionBatch], Inputs]

MOST_SEQS = 256
"""A step of more sequences keeps a device busy for longer than the host needs to launch it."""
LENGTH, LENGTH_FACTOR = 4096, 4
SHARED_POSITIONS = 1 << 17
"""Positions of a shared prefix whose repeated reading costs more than the launches that a graph saves.

With 8 KV heads of 128 in bfloat16 they are 512 MiB a layer, some 150 µs at 3.35 TB/s.
"""


class Shape(NamedTuple):
    """A graph is for up to `seqs` decodes, each of up to `length` tokens of context."""

    length: int
    seqs: int


class Graph(Protocol):
    """A captured function, as torch.cuda.CUDAGraph."""

    def replay(self) -> None: ...


class Recorder(Protocol):
    """Captures functions, one after another; see `CudaRecorder`."""

    def record(self, function: Callable[[], None]) -> Graph: ...

    def used_bytes(self) -> int: ...


def graph_shapes(max_seqs: int, max_length: int) -> list[Shape]:
    """Return the shapes of graphs for up to `max_seqs` decodes of up to `max_length` tokens, ascending.

    Batches are padded to 1, 2, 4 and multiples of 8; those with contexts beyond LENGTH to powers of two,
    since attention takes most of their time, and rows that fill up a batch cost it nothing.
    """
    most = min(max_seqs, MOST_SEQS)
    powers = [1 << exponent for exponent in range(most.bit_length())]
    lengths = [min(LENGTH, max_length)]
    while lengths[-1] < max_length:
        lengths.append(min(LENGTH_FACTOR * lengths[-1], max_length))
    return sorted(
        Shape(length, seqs)
        for length in lengths
        for seqs in {*powers, most} | ({*range(8, most, 8)} if length <= LENGTH else set())
    )


class GraphProgram:
    """A `pagedattn.capture.Program` whose decode steps replay a graph; other steps call the function.

    Call it on one stream: there the fixed tensors that graphs read are filled, and their results are copied.
    In a graph each sequence has one query and a block table of full width, and rows of length 0 are padding.
    """

    def __init__(
        self,
        run: Function,
        example: Callable[[int], Inputs],
        shapes: Sequence[Shape],
        recorder: Recorder,
        *,
        block_size: int,
        max_tokens: int,
    ) -> None:
        """Capture graphs of ascending `shapes`, largest first, so that the others fit in its memory."""
        self.max_tokens = max_tokens
        self._run = run
        longest, most = shapes[-1]
        self._buffers = _Buffers(example(most), -(-longest // block_size))
        self._outputs = run(self._buffers.inputs, self._buffers.batch(shapes[-1]))
        self._graphs: dict[Shape, Graph] = {}
        self.graph_bytes: list[int] = []
        """Bytes of device memory that each graph took, in order of capture."""
        used = recorder.used_bytes()
        for shape in reversed(shapes):
            self._graphs[shape] = self._record(recorder, shape)
            before, used = used, recorder.used_bytes()
            self.graph_bytes.append(max(0, used - before))
        self._shapes = shapes

    @property
    def num_operations(self) -> int:
        """See `pagedattn.capture.Program`."""
        return len(self._graphs)

    @property
    def num_host_calls(self) -> int:
        """0: a graph calls the host's functions once, when it is captured."""
        return 0

    @property
    def nbytes(self) -> int:
        """See `pagedattn.capture.Program`."""
        return sum(self.graph_bytes) + self._buffers.nbytes + sum(output.nbytes for output in self._outputs)

    def __call__(self, inputs: Inputs, batch: AttentionBatch) -> Inputs:
        """See `pagedattn.capture.Program`."""
        self._check(inputs, batch)
        shape = self._shape(batch)
        if shape is None:
            return self._run(inputs, batch)
        self._buffers.fill(inputs, batch, shape.seqs)
        self._graphs[shape].replay()
        return tuple(output[: batch.num_tokens].clone() for output in self._outputs)

    def _record(self, recorder: Recorder, shape: Shape) -> Graph:
        inputs = tuple(tensor[: shape.seqs] for tensor in self._buffers.inputs)

        def step() -> None:
            results = self._run(inputs, self._buffers.batch(shape))
            for output, result in zip(self._outputs, results, strict=True):
                output[: shape.seqs].copy_(result)

        try:
            return recorder.record(step)
        except CaptureError as error:
            raise CaptureError(
                f"no CUDA graph of {shape.seqs} decodes of up to {shape.length} tokens: {error}"
            ) from error

    def _shape(self, batch: AttentionBatch) -> Shape | None:
        """Return the smallest shape that has room for `batch`; None where there is none."""
        seqs = batch.num_seqs
        if batch.num_decodes != seqs or (seqs - 1) * batch.shared_prefix >= SHARED_POSITIONS:
            return None
        return next(
            (shape for shape in self._shapes if seqs <= shape.seqs and batch.max_length <= shape.length), None
        )

    def _check(self, inputs: Inputs, batch: AttentionBatch) -> None:
        tokens = batch.num_tokens
        if tokens > self.max_tokens:
            raise ValueError(f"{tokens} tokens are more than the program's {self.max_tokens}")
        expected = [(tokens, *tensor.shape[1:], tensor.dtype) for tensor in self._buffers.inputs]
        found = [(*tensor.shape, tensor.dtype) for tensor in inputs]
        if found != expected:
            raise ValueError(f"{tokens} tokens need inputs of {expected}, not {found}")


class _Buffers:
    """The fixed tensors that graphs read; a graph of n sequences reads the first n rows of each."""

    def __init__(self, inputs: Inputs, columns: int) -> None:
        """`inputs` are examples `[seqs, …]`; the block table gets `columns`."""
        seqs, device = inputs[0].shape[0], inputs[0].device
        self.inputs = tuple(tensor.clone() for tensor in inputs)
        self._query_starts = torch.arange(seqs + 1, dtype=torch.int32, device=device)
        self._lengths = torch.zeros(seqs, dtype=torch.int32, device=device)
        self._block_table = torch.zeros(seqs, columns, dtype=torch.int32, device=device)
        self._slots = torch.full((seqs,), -1, dtype=torch.int64, device=device)

    @property
    def nbytes(self) -> int:
        fixed = (self._query_starts, self._lengths, self._block_table, self._slots)
        return sum(tensor.nbytes for tensor in (*self.inputs, *fixed))

    def batch(self, shape: Shape) -> AttentionBatch:
        """Return a batch of the first rows."""
        return AttentionBatch(
            query_starts=self._query_starts[: shape.seqs + 1],
            lengths=self._lengths[: shape.seqs],
            block_table=self._block_table[: shape.seqs],
            slots=self._slots[: shape.seqs],
            max_query=1,
            max_length=shape.length,
            num_decodes=shape.seqs,
        )

    def fill(self, inputs: Inputs, batch: AttentionBatch, seqs: int) -> None:
        """Set the first `seqs` rows: those of `batch`, then rows that store nothing and attend to nothing.

        Inputs and block tables of the latter stay what they were, of an earlier step or of the example.
        """
        count = batch.num_seqs
        for target, source in zip(self.inputs, inputs, strict=True):
            target[:count].copy_(source)
        table = batch.block_table[:, : self._block_table.shape[1]]
        self._block_table[:count, : table.shape[1]].copy_(table)
        self._lengths[:count].copy_(batch.lengths)
        self._slots[:count].copy_(batch.slots)
        if count < seqs:
            self._lengths[count:seqs].zero_()
            self._slots[count:seqs].fill_(-1)


class CudaRecorder:
    """Captures functions in CUDA graphs that share one pool of memory: one may run at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, function: Callable[[], None]) -> Graph:
        """Run `function`, so that kernels are compiled and loaded, then capture it.

        Raises CaptureError for what cannot be captured, such as waiting for the device, or lack of memory.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        # Of its own accord torch.cuda.graph leaves its stream the current one when a capture fails.
        with torch.cuda.stream(self._stream):
            function()
            graph = torch.cuda.CUDAGraph()
            try:
                # Other threads of the process may do with the device what they like.
                with torch.cuda.graph(
                    graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
                ):
                    function()
            except RuntimeError as error:
                # Where the function failed, ending the capture failed after it.
                raise CaptureError(str(error.__context__ or error)) from error
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return graph

    def used_bytes(self) -> int:
        """Return the device's memory that is in use, by any process; torch keeps none that is free."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free


def record(
    run: Function,
    example: Callable[[int], Inputs],
    *,
    block_size: int,
    max_tokens: int,
    max_seqs: int,
    max_length: int,
) -> GraphProgram:
    """Capture the graphs of `run`; see `pagedattn.capture`."""
    recorder = CudaRecorder(_cuda_device(example))
    shapes = graph_shapes(max_seqs, max_length)
    return GraphProgram(run, example, shapes, recorder, block_size=block_size, max_tokens=max_tokens)


def estimate_graph_bytes(
    run: Function, example: Callable[[int], Inputs], *, block_size: int, max_seqs: int, max_length: int
) -> int:
    """Return about how many bytes the graphs of `pagedattn.capture` will take.

    The two largest graphs are captured and dropped again: the first takes the memory that all share, each of
    the others about as much as the second. Raises CaptureError as `pagedattn.capture` does.
    """
    recorder = CudaRecorder(_cuda_device(example))
    shapes = graph_shapes(max_seqs, max_length)
    program = GraphProgram(run, example, shapes[-2:], recorder, block_size=block_size, max_tokens=max_seqs)
    return program.nbytes + (len(shapes) - len(program.graph_bytes)) * program.graph_bytes[-1]


def _cuda_device(example: Callable[[int], Inputs]) -> torch.device:
    device = example(1)[0].device
    if device.type != "cuda":
        raise CaptureError(f"CUDA graphs run on CUDA devices, and the inputs are on {device}")
    if backend_name(device) == "torch":
        raise CaptureError("the back end torch reads lengths on the host, which a CUDA graph cannot")
    return device
