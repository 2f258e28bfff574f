"""Decode steps as CUDA graphs against the function that was captured; the graphs are stand-ins on the CPU."""

import numpy as np
import pytest
import torch

import graph_stand_ins
from graph_stand_ins import RerunRecorder, Stream, TapeGraph
from pagedattn import AttentionBatch, CaptureError, build_batch, capture, cuda_graphs, estimate_graph_bytes
from pagedattn.cuda_graphs import SHARED_POSITIONS, CudaRecorder, GraphProgram, Shape, graph_shapes

HIDDEN, BLOCK_SIZE, BLOCKS = 6, 4, 64
SHAPES = graph_shapes(6, 40)


class Layer:
    """Attention over a cache `[slots + 1, hidden]`, in operations that a graph can hold.

    The last row takes what is stored nowhere. Notes the bound on lengths of each call.
    """

    def __init__(self):
        self.cache = torch.zeros(BLOCKS * BLOCK_SIZE + 1, HIDDEN)
        self.weight = torch.randn(HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(0))
        self.called_with = []

    def __call__(self, inputs, batch):
        x, positions = inputs
        self.called_with.append(batch.max_length)
        turned = x * torch.cos(positions.float())[:, None]
        self.cache.index_put_((batch.slots,), turned)
        sequences = (
            torch.searchsorted(batch.query_starts, torch.arange(len(x), dtype=torch.int32), right=True) - 1
        )
        offsets = torch.arange(BLOCK_SIZE)
        slots = (batch.block_table[sequences].long()[:, :, None] * BLOCK_SIZE + offsets).flatten(1)
        ends = batch.lengths[sequences] - batch.query_starts[sequences + 1] + torch.arange(len(x)) + 1
        hidden = torch.arange(slots.shape[1]) >= ends[:, None]
        keys = self.cache[slots.masked_fill(hidden, 0)]
        scores = torch.einsum("th,tkh->tk", turned, keys).masked_fill(hidden, -torch.inf)
        mixed = torch.einsum("tk,tkh->th", scores.softmax(-1).nan_to_num(0), keys)
        return mixed @ self.weight + x, mixed


def example(tokens):
    return torch.zeros(tokens, HIDDEN), torch.zeros(tokens, dtype=torch.int64)


def step(counts, before, seed=0, shared=0):
    """Inputs and a batch of sequences with `before` tokens each in the cache, and `counts` new ones."""
    rng = np.random.default_rng(seed)
    lengths = [count + old for count, old in zip(counts, before, strict=True)]
    order = rng.permutation(BLOCKS).tolist()
    first = [order.pop() for _ in range(shared)]
    tables = [first + [order.pop() for _ in range(-(-length // BLOCK_SIZE) - shared)] for length in lengths]
    batch = build_batch(counts, lengths, tables, block_size=BLOCK_SIZE)
    positions = np.concatenate(
        [np.arange(end - count, end) for count, end in zip(counts, lengths, strict=True)]
    )
    x = rng.standard_normal((sum(counts), HIDDEN)).astype(np.float32)
    return (torch.from_numpy(x), torch.from_numpy(positions)), batch


def decodes(*before, seed=0, shared=0):
    return step([1] * len(before), before, seed, shared)


def assert_like_the_function(program, layer, plain, steps):
    for inputs, batch in steps:
        expected = plain(inputs, batch)
        for got, right in zip(program(inputs, batch), expected, strict=True):
            torch.testing.assert_close(got, right)
        torch.testing.assert_close(layer.cache[:-1], plain.cache[:-1])


@pytest.fixture
def on_tape(monkeypatch):
    graph_stand_ins.put_in_place(monkeypatch)
    monkeypatch.setattr(cuda_graphs, "LENGTH", 8)


@pytest.fixture
def program(on_tape):
    layer = Layer()
    recorder = CudaRecorder(torch.device("cpu"))
    shapes = graph_shapes(6, 40)
    return GraphProgram(layer, example, shapes, recorder, block_size=BLOCK_SIZE, max_tokens=64), layer


def test_batches_are_padded_to_1_2_4_and_multiples_of_8():
    assert [seqs for _, seqs in graph_shapes(30, 4096)] == [1, 2, 4, 8, 16, 24, 30]
    sizes = [seqs for _, seqs in graph_shapes(1000, 100)]
    assert sizes == [1, 2, 4, *range(8, 257, 8)]
    assert graph_shapes(1, 5) == [Shape(length=5, seqs=1)]


def test_long_contexts_have_graphs_of_their_own_for_powers_of_two():
    shapes = graph_shapes(20, 131_072)
    assert sorted({length for length, _ in shapes}) == [4096, 16_384, 65_536, 131_072]
    assert [seqs for length, seqs in shapes if length == 4096] == [1, 2, 4, 8, 16, 20]
    assert [seqs for length, seqs in shapes if length == 65_536] == [1, 2, 4, 8, 16, 20]
    assert len(graph_shapes(256, 131_072)) == 35 + 3 * 9


def test_steps_give_what_the_function_gives(program):
    program, layer = program
    assert not layer.cache[:-1].any(), "capture stored something"
    plain = Layer()
    layer.called_with.clear()
    steps = [
        step([7, 9], [0, 0], 1),
        decodes(7, 9, seed=1),
        decodes(3, 0, 39, 17, 5, 8, seed=2),
        decodes(30, seed=3),
        decodes(1, 2, 3, seed=4),
        step([1, 1, 4], [3, 5, 6], 5),
        decodes(*[2] * 5, seed=6),
    ]
    assert_like_the_function(program, layer, plain, steps)
    assert TapeGraph.replays == 5
    assert layer.called_with == [9, 10], "only the steps with prompts call the function"


def test_rows_that_are_left_over_store_and_read_nothing(program):
    program, layer = program
    program(*decodes(3, 4, 5, 6, seed=1))
    layer.cache.zero_()
    program(*decodes(9, 10, 11, seed=2))
    assert int(layer.cache[:-1].any(dim=1).sum()) == 3
    assert program._buffers.batch(Shape(8, 4)).lengths.tolist() == [10, 11, 12, 0]


def test_results_stay_as_they_are_when_it_runs_again(program):
    program, _ = program
    one, other = program(*decodes(3, 4, seed=1))
    kept = one.clone(), other.clone()
    program(*decodes(6, 7, seed=2))
    assert torch.equal(one, kept[0])
    assert torch.equal(other, kept[1])


@pytest.mark.parametrize(
    ("before", "shape"),
    [
        ([3], Shape(8, 1)),
        ([7], Shape(8, 1)),
        ([8], Shape(32, 1)),
        ([7, 1, 1], Shape(8, 4)),
        ([1, 2, 3, 4, 5], Shape(8, 6)),
        ([31, 0, 0], Shape(32, 4)),
        ([32], Shape(40, 1)),
        ([39] * 6, Shape(40, 6)),
    ],
)
def test_the_smallest_graph_that_has_room_is_replayed(program, before, shape):
    program, _ = program
    assert program._shape(decodes(*before)[1]) == shape


def test_other_steps_call_the_function(program):
    program, layer = program
    shared_by_two = decodes(9, 10, shared=2)
    many = AttentionBatch(
        query_starts=torch.arange(3, dtype=torch.int32),
        lengths=torch.tensor([40, 40], dtype=torch.int32),
        block_table=torch.zeros(2, 10, dtype=torch.int32),
        slots=torch.tensor([-1, -1]),
        max_query=1,
        max_length=40,
        num_decodes=2,
        shared_prefix=SHARED_POSITIONS,
    )
    assert program._shape(shared_by_two[1]) is not None
    assert program._shape(many) is None
    layer.called_with.clear()
    for inputs, batch in (step([2], [3]), step([1, 3], [4, 0]), decodes(*[1] * 7), decodes(40)):
        program(inputs, batch)
    assert layer.called_with == [5, 5, 2, 41]
    assert TapeGraph.replays == 0


def test_graphs_share_a_pool_and_a_stream_and_the_largest_is_first(on_tape):
    layer = Layer()
    outside = Stream.current
    GraphProgram(layer, example, graph_shapes(2, 9), CudaRecorder("cpu"), block_size=BLOCK_SIZE, max_tokens=8)
    captures = graph_stand_ins.graph.captures
    assert len(captures) == 4
    assert len({id(pool) for pool, _, _ in captures}) == len({id(stream) for _, stream, _ in captures}) == 1
    assert {mode for _, _, mode in captures} == {"thread_local"}
    # The first makes the outputs, then each graph's function runs once and is captured once.
    assert layer.called_with == [9, 9, 9, 9, 9, 8, 8, 8, 8]
    (side,) = {stream for _, stream, _ in captures}
    assert side.waited_for == [outside] * 4
    assert outside.waited_for == [side] * 4
    assert Stream.current is outside


def test_a_function_that_waits_for_the_device_is_refused(on_tape):
    outside = Stream.current

    def waits(inputs, batch):
        return (inputs[0] * int(batch.lengths.max()),)

    with pytest.raises(CaptureError, match=r"no CUDA graph of 6 decodes of up to 40 tokens: .*not permitted"):
        GraphProgram(waits, example, SHAPES, CudaRecorder("cpu"), block_size=4, max_tokens=8)
    assert Stream.current is outside


def test_what_the_function_raises_before_capture_is_not_hidden(on_tape):
    def broken(inputs, batch):
        raise RuntimeError("out of order")

    with pytest.raises(RuntimeError, match="out of order") as raised:
        GraphProgram(broken, example, SHAPES, CudaRecorder("cpu"), block_size=4, max_tokens=8)
    assert not isinstance(raised.value, CaptureError)


def test_memory_is_that_of_the_graphs_and_of_the_fixed_tensors(on_tape, monkeypatch):
    shapes = graph_shapes(6, 40)
    made = GraphProgram(Layer(), example, shapes, CudaRecorder("cpu"), block_size=BLOCK_SIZE, max_tokens=64)
    assert made.num_operations == len(shapes) == 12
    assert made.graph_bytes == [1 << 20] * 12
    rows = 4 * HIDDEN + 8 + 4 + 4 * 10 + 8  # x, position, length, block table of 10 columns, slot
    assert made.nbytes == (12 << 20) + 6 * rows + 4 * 7 + 2 * 6 * 4 * HIDDEN
    monkeypatch.setattr(cuda_graphs, "_cuda_device", lambda example: torch.device("cpu"))
    graph_stand_ins.graph.captures.clear()
    estimated = estimate_graph_bytes(Layer(), example, block_size=BLOCK_SIZE, max_seqs=6, max_length=40)
    assert estimated == made.nbytes
    assert len(graph_stand_ins.graph.captures) == 2


def test_inputs_of_another_kind(program):
    program, _ = program
    (x, positions), batch = decodes(3, 4)
    for wrong in (x.double(), x[:, :3], x[:1]):
        with pytest.raises(ValueError, match="2 tokens need inputs of"):
            program((wrong, positions), batch)
    with pytest.raises(ValueError, match="65 tokens are more than the program's 64"):
        program(*step([65], [0]))


def test_there_are_none_on_a_cpu(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(CaptureError, match="run on CUDA devices, and the inputs are on cpu"):
        capture(Layer(), example, block_size=4, max_tokens=8, backend="triton")
    with pytest.raises(CaptureError, match="the inputs are on cpu"):
        estimate_graph_bytes(Layer(), example, block_size=4, max_seqs=8, max_length=40)


def test_a_stand_in_that_calls_the_function_again():
    layer, plain, recorder = Layer(), Layer(), RerunRecorder()
    program = GraphProgram(layer, example, SHAPES, recorder, block_size=BLOCK_SIZE, max_tokens=64)
    assert_like_the_function(program, layer, plain, [decodes(3, 4, 5, seed=1), decodes(9, seed=2)])
    assert recorder.replays == 2
