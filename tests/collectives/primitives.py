"""What each operation of a communicator of two, three or four ranks must give, against numpy.

Inputs are small whole numbers, so sums are exact in every dtype and in any order.
"""

import numpy as np
import pytest
import torch

from collectives import Communicator

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32)
SIZES = {2: [3, 0], 3: [0, 4, 1], 4: [2, 0, 5, 1]}  # rows of each rank, uneven


def data(rank: int, *shape: int) -> np.ndarray:
    """What a rank brings along; any rank can work it out."""
    return np.random.default_rng(rank).integers(-8, 9, shape)


def assert_equal(result: torch.Tensor, expected: np.ndarray, dtype: torch.dtype = torch.float32) -> None:
    assert result.dtype == dtype
    np.testing.assert_array_equal(result.to(torch.float64).numpy(), expected)


def ranks_all_reduce_sum_max_min_in_place(comm: Communicator):
    everyones = np.stack([data(rank, 5, 3) for rank in range(comm.size)])
    for dtype in DTYPES:
        for op, expected in (("sum", everyones.sum(0)), ("max", everyones.max(0)), ("min", everyones.min(0))):
            x = torch.tensor(everyones[comm.rank], dtype=dtype)
            assert comm.all_reduce(x, op) is x
            assert_equal(x, expected, dtype)


def ranks_all_reduce_gives_every_rank_the_same_bits(comm: Communicator):
    x = torch.randn(10_007, generator=torch.Generator().manual_seed(comm.rank)).to(torch.bfloat16)
    of_all = comm.all_gather(comm.all_reduce(x).view(1, -1))
    assert all(torch.equal(of_all[0], of_rank) for of_rank in of_all)


def ranks_all_gather_along_each_dim(comm: Communicator):
    for dtype in (*DTYPES, torch.bool, torch.uint8):
        everyones = [np.abs(data(rank, 2, 3, 4)) for rank in range(comm.size)]
        if dtype == torch.bool:
            everyones = [x > 3 for x in everyones]
        x = torch.tensor(everyones[comm.rank], dtype=dtype)
        for dim in (0, 1, 2, -1):
            result = comm.all_gather(x, dim)
            assert result.is_contiguous()
            assert_equal(result, np.concatenate(everyones, dim), dtype)


def ranks_all_gather_uneven(comm: Communicator):
    sizes = SIZES[comm.size]
    for dtype in DTYPES:
        rows = [data(rank, n, 3) for rank, n in enumerate(sizes)]
        x = torch.tensor(rows[comm.rank], dtype=dtype)
        assert_equal(comm.all_gather(x, sizes=sizes), np.concatenate(rows), dtype)
        assert_equal(comm.all_gather(x.t(), -1, sizes), np.concatenate(rows).T, dtype)


def ranks_all_gather_into_a_given_tensor(comm: Communicator):
    for sizes in (SIZES[comm.size], [2] * comm.size, [0] * comm.size):
        rows = [data(rank, n, 3) for rank, n in enumerate(sizes)]
        for dtype in DTYPES:
            x = torch.tensor(rows[comm.rank], dtype=dtype).view(sizes[comm.rank], 3)
            out = torch.full((sum(sizes), 3), 99, dtype=dtype)
            assert comm.all_gather(x, 0, sizes, out) is out
            assert_equal(out, np.concatenate(rows), dtype)
            out = torch.full((3, sum(sizes)), 99, dtype=dtype)
            assert comm.all_gather(x.t(), -1, sizes, out) is out
            assert_equal(out, np.concatenate(rows).T, dtype)


def ranks_reduce_scatter_even_and_uneven(comm: Communicator):
    for sizes in (None, SIZES[comm.size]):
        cut = sizes or [2] * comm.size
        start = sum(cut[: comm.rank])
        total = np.stack([data(rank, sum(cut), 3) for rank in range(comm.size)]).sum(0)
        for dtype in DTYPES:
            x = torch.tensor(data(comm.rank, sum(cut), 3), dtype=dtype)
            assert_equal(comm.reduce_scatter(x, sizes), total[start : start + cut[comm.rank]], dtype)


def ranks_broadcast_from_any_rank(comm: Communicator):
    for src in range(comm.size):
        for dtype in DTYPES:
            x = torch.tensor(data(comm.rank, 4, 2), dtype=dtype)
            assert comm.broadcast(x, src) is x
            assert_equal(x, data(src, 4, 2), dtype)


def ranks_all_to_all_even(comm: Communicator):
    for dtype in DTYPES:
        x = torch.tensor(data(comm.rank, 2 * comm.size, 3), dtype=dtype)
        mine = slice(2 * comm.rank, 2 * comm.rank + 2)
        expected = np.concatenate([data(rank, 2 * comm.size, 3)[mine] for rank in range(comm.size)])
        assert_equal(comm.all_to_all(x), expected, dtype)


def ranks_all_to_all_uneven(comm: Communicator):
    # Some pairs exchange nothing, and the last rank gets nothing from anyone.
    counts = {
        2: [[3, 0], [1, 0]],
        3: [[0, 2, 0], [1, 1, 0], [4, 0, 0]],
        4: [[1, 2, 0, 0], [0, 0, 3, 0], [4, 1, 1, 0], [0, 5, 0, 0]],
    }[comm.size]
    send, receive = counts[comm.rank], [of_rank[comm.rank] for of_rank in counts]
    expected = np.zeros((0, 3))
    for rank, of_rank in enumerate(counts):
        start = sum(of_rank[: comm.rank])
        rows = data(rank, sum(of_rank), 3)[start : start + of_rank[comm.rank]]
        expected = np.concatenate([expected, rows])
    for dtype in DTYPES:
        x = torch.tensor(data(comm.rank, sum(send), 3), dtype=dtype)
        assert_equal(comm.all_to_all(x, send, receive), expected, dtype)


def ranks_send_and_recv_around_a_ring(comm: Communicator):
    following, preceding = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for dtype in DTYPES:
        x = torch.tensor(data(comm.rank, 2, 3), dtype=dtype).t()  # what is sent need not be contiguous
        buffer = torch.empty(3, 2, dtype=dtype)
        if comm.rank == 0:
            comm.send(x, following)
            assert comm.recv(buffer, preceding) is buffer
        else:
            comm.recv(buffer, preceding)
            comm.send(x, following)
        assert_equal(buffer, data(preceding, 2, 3).T, dtype)


def ranks_nothing_can_be_sent(comm: Communicator):
    none = [0] * comm.size
    for empty in (torch.empty(0, 3), torch.empty(0, 3, dtype=torch.bfloat16)):
        assert comm.all_reduce(empty.clone()).shape == (0, 3)
        assert comm.broadcast(empty.clone(), comm.size - 1).shape == (0, 3)
        assert comm.all_gather(empty).shape == (0, 3)
        assert comm.all_gather(empty, 1).shape == (0, 3 * comm.size)
        assert comm.all_gather(empty, 0, none).shape == (0, 3)
        assert comm.reduce_scatter(empty).shape == (0, 3)
        assert comm.reduce_scatter(empty, none).shape == (0, 3)
        assert comm.all_to_all(empty).shape == (0, 3)
        assert comm.all_to_all(empty, none, none).shape == (0, 3)
        if comm.rank == 0:
            comm.send(empty, 1)
        elif comm.rank == 1:
            comm.recv(empty.clone(), 0)


def ranks_bad_arguments_are_refused_before_anything_is_sent(comm: Communicator):
    size, x = comm.size, torch.zeros(2 * comm.size + 1, 2)
    with pytest.raises(ValueError, match=rf"{2 * size + 1} rows cannot be cut evenly for {size} ranks"):
        comm.reduce_scatter(x)
    with pytest.raises(ValueError, match="both send_sizes and recv_sizes"):
        comm.all_to_all(x, send_sizes=[1] * size)
    with pytest.raises(ValueError, match=rf"do not add up to the {2 * size + 1} rows given"):
        comm.all_to_all(x, [1] * size, [1] * size)
    with pytest.raises(ValueError, match=f"sizes must be {size} numbers"):
        comm.all_gather(x, sizes=[1])
    with pytest.raises(ValueError, match=f"recv_sizes must be {size} numbers"):
        comm.all_to_all(x[:size], [1] * size, [-1] * size)
    with pytest.raises(ValueError, match=rf"gives {2 * size + 1}, not sizes\[{comm.rank}\] = 1"):
        comm.all_gather(x, sizes=[1] * size)
    with pytest.raises(ValueError, match="contiguous"):
        comm.all_reduce(x.t())
    with pytest.raises(ValueError, match=rf"rank must be in \[0, {size}\), got {size}"):
        comm.broadcast(x, size)
    with pytest.raises(ValueError, match="op must be one of sum, max, min, got 'avg'"):
        comm.all_reduce(x, "avg")  # ty: ignore[invalid-argument-type]
    with pytest.raises(ValueError, match="itself"):
        comm.send(x, comm.rank)
    for wrong in (torch.zeros(size + 1, 2), torch.zeros(size, 2, dtype=torch.int64)):
        with pytest.raises(ValueError, match="out must be of shape, dtype and device"):
            comm.all_gather(x[:1], out=wrong)
    with pytest.raises(ValueError, match="contiguous"):
        comm.all_gather(x[:1], out=torch.zeros(2, size).t())
    with pytest.raises(ValueError, match=rf"do not add up to the {2 * size + 1} rows given"):
        comm.reduce_scatter(x, [1] * size)
