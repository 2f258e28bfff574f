"""Linear layers against one unsharded torch linear.

What one rank holds is tested here without processes, by making the layer of every rank in turn; what ranks
work out together is in the functions `ranks_…`, which conftest.py runs in real processes.
"""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from collectives import (
    ColumnParallelLinear,
    Communicator,
    LocalCommunicator,
    RowParallelLinear,
    Shard,
    attention_shards,
)

pytestmark = pytest.mark.xdist_group("ranks")


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_close(result: Tensor, expected: Tensor) -> None:
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2}[result.dtype]
    torch.testing.assert_close(result.float(), expected, rtol=tolerance, atol=tolerance)


def test_on_every_rank(check, ranks):
    ranks.assert_passed(check)


def ranks_column_then_row_is_an_unsharded_mlp(comm: Communicator):
    # 3 hidden features leave a rank of four with none; 37 come uneven; no tokens at all must work too.
    for hidden in (32, 37, 3):
        up, down, up_bias, down_bias = (
            draw(hidden, 16),
            draw(16, hidden, seed=1),
            draw(hidden, seed=2),
            draw(16, seed=3),
        )
        for tokens in (5, 1, 0):
            x = draw(2, tokens, 16, seed=4) / 4
            expected = F.linear(F.silu(F.linear(x, up, up_bias)), down / 4, down_bias)
            for dtype in (torch.float32, torch.bfloat16):
                column = ColumnParallelLinear(16, hidden, bias=True, comm=comm, dtype=dtype)
                row = RowParallelLinear(hidden, 16, bias=True, comm=comm, dtype=dtype)
                column.load_weight(up)
                column.load_bias(up_bias)
                row.load_weight(down / 4)
                row.load_bias(down_bias)
                assert_close(row(F.silu(column(x.to(dtype)))), expected)


def attention(x: Tensor, qkv: Tensor, out: Tensor, kv_heads: int, head_dim: int) -> Tensor:
    """Grouped-query attention of every token to every token, by torch."""
    tokens, kv = x.shape[0], kv_heads * head_dim
    parts = (x @ qkv.T).split([qkv.shape[0] - 2 * kv, kv, kv], -1)
    query, key, value = (part.view(tokens, -1, head_dim).transpose(0, 1) for part in parts)
    mixed = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    return mixed.transpose(0, 1).reshape(tokens, -1) @ out.T


def ranks_merged_parts_are_cut_each_by_itself(comm: Communicator):
    x, gate, up = draw(2, 3, 16, seed=9), draw(13, 16), draw(6, 16, seed=1)
    for dtype in (torch.float32, torch.bfloat16):
        layer = ColumnParallelLinear(16, [13, 6], bias=False, comm=comm, dtype=dtype)
        layer.load_weight(gate / 4, 0)
        layer.load_weight(up / 4, 1)
        for y, weight in zip(layer(x.to(dtype)).split(layer.local_parts, -1), (gate, up)):
            expected = F.linear(x, weight / 4).tensor_split(comm.size, -1)[comm.rank]
            assert_close(y, expected)


def ranks_attention_with_uneven_heads_is_that_of_one_rank(comm: Communicator):
    heads = {
        2: [(9, 3), (6, 3), (6, 2), (5, 1), (3, 1), (4, 4)],
        3: [(8, 4), (6, 2), (10, 2), (7, 1), (5, 5), (6, 3)],
        4: [(6, 2), (9, 3), (18, 6), (5, 1), (15, 3), (8, 4)],
    }[comm.size]
    dim, width = 4, 10
    for query_heads, kv_heads in heads:
        x = draw(5, width) / 4
        weights = [draw(n * dim, width, seed=i) for i, n in enumerate((query_heads, kv_heads, kv_heads))]
        out = draw(width, query_heads * dim, seed=7) / 8
        shards = attention_shards(query_heads, kv_heads, comm.size)
        qkv = ColumnParallelLinear(
            width, [len(w) for w in weights], bias=False, comm=comm, cuts=[s.qkv(dim) for s in shards]
        )
        o = RowParallelLinear(
            query_heads * dim, width, bias=False, comm=comm, cuts=[s.query.scaled(dim) for s in shards]
        )
        for part, weight in enumerate(weights):
            qkv.load_weight(weight, part)
        o.load_weight(out)
        mine = attention(x, qkv.weight, o.weight, shards[comm.rank].kv.size, dim)
        assert_close(comm.all_reduce(mine), attention(x, torch.cat(weights), out, kv_heads, dim))


def test_cuts_must_cover_the_features_in_order(seat):
    def column(*ranges):
        cuts = [[Shard(*of_rank)] for of_rank in ranges]
        return ColumnParallelLinear(3, 8, bias=False, comm=seat(1, 3), cuts=cuts)

    def row(*ranges):
        return RowParallelLinear(8, 3, bias=False, comm=seat(1, 3), cuts=[Shard(*r) for r in ranges])

    assert column((0, 3), (3, 3), (3, 8)).local_parts == (0,)
    assert column((0, 3), (3, 8), (3, 8)).local_parts == (5,)
    assert row((0, 1), (1, 7), (7, 8)).weight.shape == (3, 6)
    for ranges in ([(0, 3), (4, 8), (4, 8)], [(0, 3), (3, 6), (6, 7)], [(0, 3), (2, 6), (6, 8)]):
        with pytest.raises(ValueError, match="do not cover the 8 features of part 0 in the order of ranks"):
            column(*ranges)
        with pytest.raises(ValueError, match="do not cover the 8 features of part 0 in the order of ranks"):
            row(*ranges)
    with pytest.raises(ValueError, match="in the order of ranks, each once"):
        row((0, 3), (3, 8), (3, 8))  # would be summed twice
    with pytest.raises(ValueError, match="1 ranges for each of 3 ranks"):
        column((0, 8))


def test_each_part_is_cut_by_itself(seat):
    gate, up = torch.arange(6.0).view(6, 1), torch.arange(10.0, 15.0).view(5, 1)
    held = []
    for rank in range(2):
        layer = ColumnParallelLinear(1, [6, 5], bias=False, comm=seat(rank, 2))
        layer.load_weight(gate, part=0)
        layer.load_weight(up, part=1)
        held.append((layer.local_parts, layer.weight.flatten().tolist()))
    assert held == [((3, 3), [0, 1, 2, 10, 11, 12]), ((3, 2), [3, 4, 5, 13, 14])]


def test_row_shards_are_columns(seat):
    weight = torch.arange(10.0).view(2, 5)
    held = []
    for rank in range(2):
        layer = RowParallelLinear(5, 2, bias=False, comm=seat(rank, 2))
        layer.load_weight(weight)
        held.append(layer.weight.tolist())
    assert held == [[[0, 1, 2], [5, 6, 7]], [[3, 4], [8, 9]]]


@pytest.mark.parametrize("bias", [True, False])
def test_alone_forward_is_one_matmul_and_nothing_else(bias):
    comm = LocalCommunicator()
    layers = [
        ColumnParallelLinear(4, [3, 2], bias=bias, comm=comm),
        RowParallelLinear(4, 5, bias=bias, comm=comm),
    ]
    for layer in layers:
        calls, x, y = [], draw(2, 4), draw(2, 5)

        def record(*arguments, calls=calls, y=y):
            calls.append(arguments)
            return y

        layer.matmul = record
        assert layer(x) is y
        assert len(calls) == 1
        assert calls[0][0] is x and calls[0][1] is layer.weight and calls[0][2] is layer.bias
        assert (layer.bias is not None) == bias


def test_a_kernel_can_take_the_place_of_the_matrix_product():
    layer = RowParallelLinear(4, 3, bias=False, comm=LocalCommunicator())
    weight, x = draw(3, 4), draw(2, 4, seed=2)
    layer.load_weight(weight)
    layer.weight = nn.Parameter(layer.weight.t().contiguous(), requires_grad=False)
    layer.matmul = lambda x, weight, bias: x @ weight
    assert_close(layer(x), F.linear(x, weight))


def test_another_function_can_sum_over_the_ranks():
    layer = RowParallelLinear(4, 3, bias=False, comm=LocalCommunicator(), reduce=lambda y: y.mul_(2))
    weight, x = draw(3, 4), draw(2, 4, seed=2)
    layer.load_weight(weight)
    assert_close(layer(x), 2 * F.linear(x, weight))


def test_wrong_shapes_are_refused_with_both_shapes(seat):
    column = ColumnParallelLinear(4, [6, 2], bias=True, comm=seat(1, 2))
    with pytest.raises(
        ValueError, match=r"ColumnParallelLinear weight\[1\]: expected shape \[2, 4\], got \[6, 4\]"
    ):
        column.load_weight(draw(6, 4), part=1)
    with pytest.raises(ValueError, match=r"bias\[0\]: expected shape \[6\], got \[3\]"):
        column.load_bias(draw(3))
    with pytest.raises(ValueError, match=r"part must be in \[0, 2\) for parts \(6, 2\), got 2"):
        column.load_weight(draw(6, 4), part=2)

    row = RowParallelLinear(6, 4, bias=False, comm=seat(1, 2))
    with pytest.raises(ValueError, match=r"RowParallelLinear weight: expected shape \[4, 6\], got \[4, 3\]"):
        row.load_weight(draw(4, 3))
    with pytest.raises(ValueError, match="RowParallelLinear was made without a bias"):
        row.load_bias(draw(4))


def test_parameters_follow_the_default_dtype_and_device_or_those_given():
    with torch.device("meta"):
        layer = ColumnParallelLinear(4, 3, bias=True, comm=LocalCommunicator(), dtype=torch.bfloat16)
    assert [p.device.type for p in layer.parameters()] == ["meta", "meta"]
    assert [p.dtype for p in layer.parameters()] == [torch.bfloat16, torch.bfloat16]
    assert not any(p.requires_grad for p in layer.parameters())
    assert RowParallelLinear(4, 3, bias=False, comm=LocalCommunicator()).weight.dtype == torch.float32
    given = RowParallelLinear(4, 3, bias=False, comm=LocalCommunicator(), device="meta")
    assert given.weight.device.type == "meta"


def test_loading_converts_to_the_dtype_of_the_layer_and_records_no_gradient():
    layer = ColumnParallelLinear(4, 3, bias=False, comm=LocalCommunicator(), dtype=torch.bfloat16)
    full = draw(3, 4).requires_grad_()
    layer.load_weight(full)
    assert torch.equal(layer.weight, full.detach().to(torch.bfloat16))
    assert not layer.weight.requires_grad
