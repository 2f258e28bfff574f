"""CUDA graphs without a device: what torch.cuda offers for them, on the CPU.

`TapeGraph` keeps to what a real graph can do. While it is captured, the operations that reach torch's
dispatcher are written down with the very tensors they used; a replay runs them again on these and puts the
results where the captured ones were. No Python of the captured function runs again, and what would wait for a
device is an error.

`RerunGraph` calls the captured function again, for back ends that cannot be captured.
"""

from contextlib import contextmanager, nullcontext
from typing import ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique")


class Tape(TorchDispatchMode):
    """Writes down operations and the tensors that they returned."""

    def __init__(self):
        super().__init__()
        self.entries = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if name in WAITS or (
            name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])
        ):
            raise RuntimeError(f"{name} is not permitted when a stream is capturing")
        result = func(*args, **kwargs)
        self.entries.append((func, args, kwargs, result))
        return result

    def add_launch(self, launch):
        """Write down a call that is no operation of torch, such as a Triton kernel's launch."""
        self.entries.append((launch, (), {}, None))


class TapeGraph:
    """In the place of torch.cuda.CUDAGraph."""

    replays = 0
    """Of all graphs."""

    def __init__(self):
        self.tape = None

    def replay(self):
        TapeGraph.replays += 1
        for func, args, kwargs, old in self.tape.entries:
            new = func(*args, **kwargs)
            if isinstance(func, torch._ops.OpOverload) and not func._schema.name.startswith("aten::empty"):
                for schema, target, source in zip(func._schema.returns, _tensors(old), _tensors(new)):
                    if schema.alias_info is None:
                        target.copy_(source)


def _tensors(result):
    return result if isinstance(result, (tuple, list)) else (result,)


class Stream:
    """In the place of torch.cuda.Stream."""

    current = None

    def __init__(self, device=None):
        self.waited_for = []

    def wait_stream(self, other):
        self.waited_for.append(other)


@contextmanager
def stream(new):
    """In the place of torch.cuda.stream."""
    before, Stream.current = Stream.current, new
    try:
        yield
    finally:
        Stream.current = before


class graph:
    """In the place of torch.cuda.graph; as there, its stream stays current when ending a capture fails."""

    captures: ClassVar = []
    """Pool, stream and error mode of each capture."""

    def __init__(self, cuda_graph, pool=None, stream=None, capture_error_mode="global"):
        self.graph, self.given, self.tape = cuda_graph, (pool, stream, capture_error_mode), Tape()

    def __enter__(self):
        self.before, Stream.current = Stream.current, self.given[1]
        graph.captures.append(self.given)
        self.tape.__enter__()

    def __exit__(self, kind, error, trace):
        self.tape.__exit__(kind, error, trace)
        if error is not None:
            raise RuntimeError("operation failed due to a previous error during capture")
        Stream.current = self.before
        self.graph.tape = self.tape


def put_in_place(monkeypatch):
    """Have torch.cuda capture on the CPU, each graph taking 1 MiB of 1 GiB."""
    TapeGraph.replays = 0
    graph.captures = []
    Stream.current = Stream()
    for name, stand_in in {
        "CUDAGraph": TapeGraph,
        "Stream": Stream,
        "stream": stream,
        "graph": graph,
        "current_stream": lambda device=None: Stream.current,
        "graph_pool_handle": object,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda device=None: ((1 << 30) - (len(graph.captures) << 20), 1 << 30),
        "device_of": lambda tensor: nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)


class RerunGraph:
    """A graph that calls its function again."""

    def __init__(self, function, count):
        self._function, self._count = function, count

    def replay(self):
        self._count()
        self._function()


class RerunRecorder:
    """In the place of `pagedattn.cuda_graphs.CudaRecorder`."""

    def __init__(self):
        self.records = self.replays = 0

    def record(self, function):
        function()
        self.records += 1
        return RerunGraph(function, self._count)

    def used_bytes(self):
        return self.records << 20

    def _count(self):
        self.replays += 1
