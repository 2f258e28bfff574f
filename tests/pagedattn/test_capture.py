"""Programs against the functions that they were recorded from."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedattn import (
    CaptureError,
    activation,
    attend,
    build_batch,
    capture,
    host_call,
    layer_norm,
    linear,
    pack_linear,
    rms_norm,
    rotary,
    silu_and_mul,
    write_kv,
)

HIDDEN, HEADS, KV_HEADS, DIM, BLOCK_SIZE, BLOCKS = 32, 4, 2, 8, 4, 40

WIDE, ONES = pack_linear(torch.zeros(2 * HIDDEN, HIDDEN)), torch.ones(HIDDEN)


class Layer:
    """A transformer's layer over a cache of its own, with every kind of kernel."""

    def __init__(self, dtype=torch.float32, seed=0):
        random = torch.Generator().manual_seed(seed)

        def weight(*shape):
            return torch.randn(shape, generator=random) / 4

        self.qkv = pack_linear(weight((HEADS + 2 * KV_HEADS) * DIM, HIDDEN))
        self.o = pack_linear(weight(HIDDEN, HEADS * DIM))
        self.up, self.down = pack_linear(weight(2 * 24, HIDDEN)), pack_linear(weight(HIDDEN, 24))
        self.bias = weight(HIDDEN).to(dtype)
        self.norms = [(1 + weight(HIDDEN)).to(dtype) for _ in range(3)]
        self.head_norm = (1 + weight(DIM)).to(dtype)
        self.table = torch.cat([weight(64, DIM // 2), weight(64, DIM // 2)], dim=-1)
        self.cache = torch.zeros(BLOCKS, 2, KV_HEADS, BLOCK_SIZE, DIM, dtype=dtype)

    def __call__(self, inputs, batch):
        x, positions = inputs
        normed = rms_norm(x, self.norms[0], 1e-5)
        widths = (HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM)
        parts = linear(normed, self.qkv).split(widths, dim=-1)
        query, key, value = (part.unflatten(-1, (-1, DIM)) for part in parts)
        query, key = rotary(rms_norm(query, self.head_norm, 1e-5), key, positions, self.table)
        write_kv(key, value, self.cache, batch.slots)
        mixed = attend(query, self.cache, batch, scale=0.4, window=11)
        normed, residual = rms_norm(linear(mixed.flatten(1), self.o, self.bias), self.norms[1], 1e-5, x)
        inner = activation(silu_and_mul(linear(normed, self.up)), "gelu_tanh")
        return layer_norm(linear(inner, self.down), self.norms[2], self.bias, 1e-5, residual)


def example(dtype):
    return lambda tokens: (torch.zeros(tokens, HIDDEN, dtype=dtype), torch.zeros(tokens, dtype=torch.int64))


def program_of(layer, dtype=torch.float32, max_tokens=64):
    return capture(layer, example(dtype), block_size=BLOCK_SIZE, max_tokens=max_tokens)


def step(counts, before, seed=0, dtype=torch.float32):
    """Inputs and a batch of sequences with `before` tokens each in the cache, and `counts` new ones."""
    counts = sorted(counts, key=lambda count: count > 1)
    lengths = [count + old for count, old in zip(counts, before)]
    rng = np.random.default_rng(seed)
    blocks = iter(rng.permutation(BLOCKS).tolist())
    tables = [[next(blocks) for _ in range(-(-length // BLOCK_SIZE))] for length in lengths]
    batch = build_batch(counts, lengths, tables, block_size=BLOCK_SIZE)
    x = torch.from_numpy(rng.standard_normal((sum(counts), HIDDEN))).to(dtype)
    positions = np.concatenate([np.arange(end - count, end) for count, end in zip(counts, lengths)])
    return (x, torch.from_numpy(positions)), batch


def check_bits(program, layer, again, dtype):
    """A program of `layer` does what `again`, another like it, does."""

    @settings(deadline=None, max_examples=40)
    @given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 12)), min_size=1, max_size=7), st.integers())
    def check(rows, seed):
        inputs, batch = step(*zip(*rows, strict=True), seed=abs(seed), dtype=dtype)
        expected = again(inputs, batch)
        for got, right in zip(program(inputs, batch), expected, strict=True):
            assert torch.equal(got, right)
        assert torch.equal(layer.cache, again.cache)

    check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_program_gives_the_bits_of_its_function(dtype):
    layer, again = Layer(dtype), Layer(dtype)
    program = program_of(layer, dtype)
    assert not layer.cache.any()

    check_bits(program, layer, again, dtype)


def test_results_stay_as_they_are_when_it_runs_again():
    program = program_of(Layer())
    one, _ = program(*step([3], [0], seed=1))
    kept = one.clone()
    program(*step([3], [0], seed=2))
    assert torch.equal(one, kept)


def test_memory_is_used_again_once_its_content_has_been_read():
    weights = [pack_linear(torch.eye(HIDDEN)) for _ in range(20)]

    def deep(inputs, batch):
        (x,) = inputs
        for weight in weights:
            x = linear(x, weight)
        return (x,)

    program = capture(deep, lambda n: (torch.zeros(n, HIDDEN),), block_size=4, max_tokens=10)
    assert program.num_operations == 20
    # Two results at a time, and the rows as the kernel packs them.
    assert program.nbytes <= 10 * 4 * (2 * HIDDEN + HIDDEN + 16) + 64
    x = torch.randn(10, HIDDEN)
    assert torch.equal(program((x,), step([10], [0])[1])[0], x)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda x: x + 1, "aten.add.Tensor is no kernel"),
        (lambda x: rms_norm(x.double(), ONES.double(), 1e-5), "is no kernel"),
        (lambda x: rms_norm(x[-1:], ONES, 1e-5), "moves with the number of tokens"),
        (lambda x: x, "it returns something that it did not make"),
        (lambda x: rms_norm(x, ONES, len(x) / 1e5), "a kernel's argument is 7e-05 for"),
        (lambda x: activation(x, "relu") if len(x) > 8 else silu_and_mul(linear(x, WIDE)), "other kernels"),
    ],
)
def test_what_cannot_be_recorded_is_refused(function, said):
    with pytest.raises(CaptureError, match=said):
        capture(
            lambda inputs, _: (function(inputs[0]),),
            lambda n: (torch.zeros(n, HIDDEN),),
            block_size=4,
            max_tokens=8,
        )


class Exchanging(Layer):
    """Two layers with host calls, like those of tensor parallelism."""

    def __init__(self, exchange, dtype=torch.float32):
        super().__init__(dtype)
        self.exchange = exchange

    def __call__(self, inputs, batch):
        x, positions = inputs
        for _ in range(2):  # both layers have one cache, so that attention's schedule is shared over segments
            mixed, residual = super().__call__((x, positions), batch)
            host_call(self.exchange, mixed)
            x, out = rms_norm(mixed, self.norms[2], 1e-5, residual)
            host_call(self.exchange, out[:, :8])
        return x, out


def halve_and_shift(tensor):
    tensor.mul_(0.5).add_(torch.arange(len(tensor), dtype=tensor.dtype)[:, None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_host_calls_between_segments(dtype):
    layer, again = Exchanging(halve_and_shift, dtype), Exchanging(halve_and_shift, dtype)
    program = program_of(layer, dtype)
    assert program.num_host_calls == 4

    check_bits(program, layer, again, dtype)


def test_host_calls_come_in_order_with_the_tensors_of_a_run():
    seen = []

    def run(inputs, batch):
        (x,) = inputs
        out, y = torch.empty_like(x), rms_norm(x, ONES, 1e-5)
        host_call(lambda: seen.append("first"))
        host_call(lambda a, b: seen.append((tuple(a.shape), a.stride(), b.shape[0])) or b.copy_(-a), y, out)
        return activation(out, "relu"), out, y

    def program_input(tokens):
        return torch.randn(tokens, HIDDEN)

    program = capture(run, lambda n: (program_input(n),), block_size=4, max_tokens=9)
    assert (program.num_operations, program.num_host_calls, seen) == (2, 2, [])
    for tokens in (9, 1, 4):
        x = program_input(tokens)
        relu, out, y = program((x,), step([tokens], [0])[1])
        assert torch.equal(y, rms_norm(x, ONES, 1e-5))
        assert torch.equal(out, -y)
        assert torch.equal(relu, out.relu())
        assert seen == ["first", ((tokens, HIDDEN), (HIDDEN, 1), tokens)]
        seen.clear()


def test_what_a_host_function_runs_is_not_recorded():
    weight = pack_linear(torch.eye(HIDDEN))

    def run(inputs, batch):
        y = rms_norm(inputs[0], ONES, 1e-5)
        host_call(lambda y: y.copy_(linear(y + 1, weight)), y)
        return (linear(y, weight),)

    program = capture(run, lambda n: (torch.zeros(n, HIDDEN),), block_size=4, max_tokens=9)
    assert program.num_operations == 2
    x = torch.randn(3, HIDDEN)
    assert torch.equal(program((x,), step([3], [0])[1])[0], rms_norm(x, ONES, 1e-5) + 1)


def test_an_error_of_a_host_function_leaves_the_program_as_it_was():
    fails = [False]

    def exchange(tensor):
        if fails[0]:
            raise ConnectionError("a rank is gone")
        halve_and_shift(tensor)

    layer, again = Exchanging(exchange), Exchanging(halve_and_shift)
    program = program_of(layer)
    inputs, batch = step([3, 4], [2, 5])
    for failing in (False, True, True, False):
        fails[0] = failing
        if failing:
            with pytest.raises(ConnectionError, match="a rank is gone"):
                program(inputs, batch)
            continue
        for got, right in zip(program(inputs, batch), again(inputs, batch), strict=True):
            assert torch.equal(got, right)


@pytest.mark.parametrize(
    ("pick", "said"),
    [
        (lambda x, y: x, r"not \[7, 32\] from elsewhere"),
        (lambda x, y: ONES, r"not \[32\] from elsewhere"),
        (lambda x, y: y[1:], r"takes tensors \[7 tokens, …\] that were made on the way, not \[6, 32\]"),
        (lambda x, y: y.T, r"not \[32, 7\]"),
    ],
)
def test_host_calls_take_what_was_made_on_the_way(pick, said):
    def run(inputs, batch):
        y = rms_norm(inputs[0], ONES, 1e-5)
        host_call(print, pick(inputs[0], y))
        return (y,)

    with pytest.raises(CaptureError, match=said):
        capture(run, lambda n: (torch.zeros(n, HIDDEN),), block_size=4, max_tokens=9)


def test_without_a_recording_a_host_call_is_a_call():
    x = torch.ones(2, 3)
    host_call(torch.Tensor.add_, x, torch.ones(3))
    assert x.tolist() == [[2.0] * 3] * 2


def test_other_back_ends_have_no_programs():
    with pytest.raises(CaptureError, match="the back end torch has no programs"):
        capture(Layer(), example(torch.float32), block_size=4, max_tokens=8, backend="torch")


def test_more_tokens_than_it_was_made_for():
    program = program_of(Layer(), max_tokens=4)
    program(*step([4], [0]))
    with pytest.raises(ValueError, match="5 tokens are more than the program's 4"):
        program(*step([5], [0]))


def test_inputs_of_another_kind():
    program = program_of(Layer())
    (x, positions), batch = step([4], [0])
    for wrong in (x.double(), x[:, :16], x[:3], x.T.contiguous().T):
        with pytest.raises(ValueError, match="4 tokens need inputs of"):
            program((wrong, positions), batch)


def test_a_batch_that_does_not_fit_is_refused_before_anything_runs():
    layer = Layer()
    program = program_of(layer)
    (x, positions), batch = step([3, 2], [0, 0])
    batch.block_table[1, 0] = BLOCKS
    with pytest.raises(IndexError, match="sequence 1 of the batch: a block that a query sees"):
        program((x, positions), batch)
    (x, positions), batch = step([3], [0])
    with pytest.raises(IndexError, match="token 1 has position 64; cos_sin has rows for 0 to 63"):
        program((x, torch.tensor([0, 64, 2])), batch)
    batch.slots[2] = BLOCKS * BLOCK_SIZE
    with pytest.raises(IndexError, match=rf"slot {BLOCKS * BLOCK_SIZE} of token 2 is not in the cache"):
        program((x, positions), batch)
    assert not layer.cache.any()


def test_any_number_of_threads():
    inputs, batch = step([1, 1, 7, 9], [8, 3, 0, 2])
    found = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(program_of(Layer())(inputs, batch))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            torch.testing.assert_close(one, two)
