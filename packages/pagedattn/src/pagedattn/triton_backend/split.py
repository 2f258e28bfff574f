# ruff: noqa: ANN001, ANN201 (Triton infers the types of kernel arguments)
"""Contexts cut into pieces that run side by side, and merged (Dao et al., "Flash-Decoding",
https://pytorch.org/blog/flash-decoding/)."""

from __future__ import annotations

import triton
import triton.language as tl

from pagedattn.triton_backend.softmax import LOG2_E

# A piece of context shorter than this is not worth a program of its own and a share of the merge.
MIN_PIECE = 256
# A piece as long as this costs a merge of under 1 % of its own reading, so that none need be longer and keep
# a batch waiting that has filled the device with shorter contexts.
LONG_PIECE = 4096
MAX_SPLITS = 64


def choose_splits(programs: int, context: int, processors: int) -> int:
    """Into how many pieces a context of up to `context` is cut, when `programs` go through whole contexts.

    Enough for two programs a processor, and for no piece to be longer than LONG_PIECE; at most MAX_SPLITS.
    """
    fill = min(2 * processors // programs, context // MIN_PIECE)
    return max(1, min(max(fill, -(-context // LONG_PIECE)), MAX_SPLITS))


@triton.jit(do_not_specialize=["parts"])
def merge_kernel(
    out, partials, sinks, parts, HEAD_DIM: tl.constexpr, TILE_PARTS: tl.constexpr, TILE_DIM: tl.constexpr
):
    """Grid (tokens, q_heads): merge a query head's `parts` by their softmax denominators; add sinks once."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dims = tl.arange(0, TILE_DIM)
    first_row = (token * tl.num_programs(1) + head) * parts
    maximum = -float("inf")
    total = 0.0
    if sinks is not None:
        maximum = tl.load(sinks + head) * LOG2_E
        total = 1.0
    weighted = tl.zeros([TILE_DIM], tl.float32)
    for first in range(0, parts, TILE_PARTS):
        part = first + tl.arange(0, TILE_PARTS)
        log = tl.load(partials.logs + first_row + part, mask=part < parts, other=-float("inf"))
        seen = log > -float("inf")
        highest = tl.maximum(maximum, tl.max(log, axis=0))
        shift = tl.where(highest == -float("inf"), 0.0, highest)
        weights = tl.exp2(log - shift)
        decay = tl.exp2(maximum - shift)
        values = tl.load(
            partials.means + ((first_row + part) * HEAD_DIM)[:, None] + dims[None, :],
            mask=seen[:, None] & (dims < HEAD_DIM)[None, :],
            other=0.0,
        )
        total = total * decay + tl.sum(weights, axis=0)
        weighted = weighted * decay + tl.sum(values * weights[:, None], axis=0)
        maximum = highest
    result = weighted / tl.where(total == 0.0, 1.0, total)
    target = out.data + token * out.token_stride + head * out.head_stride + dims
    tl.store(target, result.to(out.data.dtype.element_ty), mask=dims < HEAD_DIM)
