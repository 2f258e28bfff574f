"""Rows of a table, plain or packed for a head, against torch's own lookup."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from pagedattn import embedding, pack_linear

DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
BACKENDS = st.sampled_from(["cpu", "torch"])


def expected(ids, table, dtype, scale, positions=None, position_table=None):
    x = (F.embedding(ids, table).float() * scale).to(dtype)
    if positions is None:
        return x
    return (x.float() + F.embedding(positions, position_table).float()).to(dtype)


@settings(deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 1000),
    tokens=st.sampled_from([0, 1, 3, 200]),
    rows=st.sampled_from([1, 31, 32, 70, 129]),
    width=st.sampled_from([1, 8, 15, 33, 64, 1000]),
    stored=DTYPES,
    dtype=DTYPES,
    scale=st.sampled_from([1.0, 8.0, 3.7]),
    packed=st.booleans(),
    with_positions=st.booleans(),
    ranks=st.sampled_from([1, 3]),
    backend=BACKENDS,
)
def test_rows(seed, tokens, rows, width, stored, dtype, scale, packed, with_positions, ranks, backend):
    draw = torch.Generator().manual_seed(seed)
    table = torch.randn(rows, width, generator=draw).to(stored)
    ids = torch.randint(rows, (tokens,), generator=draw)
    more = {}
    if with_positions:
        more["positions"] = torch.randint(5, (tokens,), generator=draw)
        more["position_table"] = torch.randn(5, width, generator=draw).to(dtype)
    parts, first = [], 0
    for part in table.tensor_split(ranks):
        held = pack_linear(part, backend=backend) if packed and part.numel() else part
        cut = {} if ranks == 1 else {"first": first}
        parts.append(embedding(ids, held, dtype, scale=scale, backend=backend, **cut, **more))
        first += len(part)
    assert parts[0].dtype == dtype
    assert torch.equal(torch.stack(parts).sum(0), expected(ids, table, dtype, scale, *more.values()))


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("bad", [-1, 7])
def test_an_id_without_a_row_is_an_error(backend, bad):
    with pytest.raises(IndexError):
        embedding(torch.tensor([3, bad]), torch.zeros(7, 8), torch.float32, backend=backend)


def test_the_kernel_names_the_token():
    with pytest.raises(IndexError, match="the id of token 1 has no row: table has rows for 0 to 6"):
        embedding(torch.tensor([3, 7]), torch.zeros(7, 8), torch.float32, backend="cpu")
    with pytest.raises(IndexError, match="the position of token 0 has no row: position_table has rows for 0"):
        ids, table = torch.tensor([3]), torch.zeros(7, 8)
        embedding(ids, table, torch.float32, positions=ids, position_table=table[:2], backend="cpu")


def test_what_does_not_fit_is_refused():
    table, ids = torch.zeros(7, 8), torch.tensor([1])
    with pytest.raises(ValueError, match="not quantised"):
        embedding(ids, pack_linear(table, quantization="int8"), torch.float32)
    with pytest.raises(ValueError, match="ids must be int64"):
        embedding(ids.int(), table, torch.float32)
    with pytest.raises(ValueError, match="positions must be int64"):
        embedding(ids, table, torch.float32, positions=torch.tensor([1, 2]), position_table=table)
    with pytest.raises(ValueError, match="go together"):
        embedding(ids, table, torch.float32, positions=ids)
    with pytest.raises(ValueError, match=r"position_table must be \[positions, 8\]"):
        embedding(ids, table, torch.float32, positions=ids, position_table=table[:, :4])
