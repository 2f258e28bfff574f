"""Token masks against numpy's unpacked bits."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedattn import apply_token_bitmask

DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64])


def allowed_of(bitmask, vocab):
    """bool [masks, vocab] of int32 words, lowest bit first."""
    return np.unpackbits(bitmask.view(np.uint8), axis=1, bitorder="little")[:, :vocab].astype(bool)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), dtype=DTYPES, backend=st.sampled_from(["cpu", "torch"]))
def test_forbidden_tokens_become_minus_infinity_and_nothing_else_changes(data, dtype, backend):
    vocab = data.draw(st.sampled_from([1, 31, 32, 33, 64, 257, 1000]))
    n = data.draw(st.integers(1, 6))
    listed = data.draw(st.booleans())
    rows = data.draw(st.permutations(range(n)).map(lambda p: p[: data.draw(st.integers(0, n))]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    masks = len(rows) if listed else n
    words = -(-vocab // 32)
    bitmask = rng.integers(-(2**31), 2**31, (masks, words), dtype=np.int64).astype(np.int32)
    if masks:  # whole words of both kinds are worked on by themselves
        bitmask[rng.random(bitmask.shape) < 0.3] = -1
        bitmask[rng.random(bitmask.shape) < 0.3] = 0
    wide = torch.from_numpy(rng.normal(size=(n, vocab + 5))).to(dtype)
    wide[0, 0] = torch.nan
    wide[-1, -6] = torch.inf
    before = wide.clone()
    logits = wide[:, :vocab]
    apply_token_bitmask(
        logits,
        torch.from_numpy(bitmask),
        torch.tensor(rows, dtype=torch.int64) if listed else None,
        backend=backend,
    )
    expected = before.clone()
    allowed = allowed_of(bitmask, vocab)
    for number, row in enumerate(rows if listed else range(n)):
        expected[row, :vocab][torch.from_numpy(~allowed[number])] = -torch.inf
    assert torch.equal(wide.nan_to_num(nan=7.5), expected.nan_to_num(nan=7.5))
    assert torch.equal(wide.isnan(), expected.isnan())


def test_many_rows_of_a_large_vocabulary_on_every_back_end():
    rng = np.random.default_rng(5)
    logits = torch.from_numpy(rng.normal(size=(70, 151_937)).astype(np.float32))
    bitmask = torch.from_numpy(rng.integers(-(2**31), 2**31, (64, 4749), dtype=np.int64).astype(np.int32))
    rows = torch.from_numpy(rng.permutation(70)[:64])
    expected = logits.clone()
    apply_token_bitmask(expected, bitmask, rows, backend="torch")
    apply_token_bitmask(logits, bitmask, rows, backend="cpu")
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("row", [-1, 3])
def test_a_row_outside_is_refused_and_nothing_changes(backend, row):
    logits = torch.zeros(3, 40)
    bitmask, rows = torch.zeros(2, 2, dtype=torch.int32), torch.tensor([0, row])
    with pytest.raises(IndexError, match="outside of the 3"):
        apply_token_bitmask(logits, bitmask, rows, backend=backend)
    assert not logits.any()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"bitmask": torch.zeros(3, 1, dtype=torch.int32)}, r"int32 \[m, 2\] for a vocabulary of 40"),
        ({"bitmask": torch.zeros(3, 2, dtype=torch.int64)}, "torch.int64"),
        ({"bitmask": torch.zeros(2, 2, dtype=torch.int32)}, "2 masks for 3 rows"),
        ({"rows": torch.zeros(2, dtype=torch.int64)}, r"int64 \[3\]"),
        ({"rows": torch.zeros(3, dtype=torch.int32)}, "torch.int32"),
        ({"logits": torch.zeros(40, 3).T}, "contiguous rows"),
        ({"logits": torch.zeros(3, 40, dtype=torch.int32)}, "floating-point"),
    ],
)
def test_what_does_not_fit_together_is_refused(change, says):
    given_ = {"logits": torch.zeros(3, 40), "bitmask": torch.zeros(3, 2, dtype=torch.int32)} | change
    with pytest.raises(ValueError, match=says):
        apply_token_bitmask(**given_)
