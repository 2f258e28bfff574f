"""The features of attention, to be tried pair by pair on every back end."""

import torch
from pagedattn_reference import Case, make_case

# Decodes first; then prompts, chunks that start mid-context and mid-block, an idle sequence, a late query.
MIXED = [(1, 1), (1, 70), (1, 16), (1, 17), (33, 33), (20, 61), (1, 1), (1, 50), (0, 7), (5, 5), (40, 300)]
VERIFY = [(5, 300), (1, 64), (8, 8), (2, 70)]

FEATURES = {
    "sequences": ["mixed", "verify", "one prefix"],
    "dtype": [torch.float32, torch.bfloat16, torch.float16],
    "fp8": {"": False, "fp8": True},
    "window": [None, 1, 20],
    "soft_cap": {"": None, "cap": 2.0},
    "alibi": {"": False, "alibi": True},
    "sinks": {"": None, "sinks": torch.float32, "half sinks": torch.float16},
}
"""Values of each parameter of `make_features`, but for head size, block size and heads."""


def make_features(
    sequences, dtype, fp8, window, soft_cap, alibi, sinks, *, head_dim, block_size, heads, device="cpu"
) -> tuple[Case, dict]:
    """A case, and the options that `attend` and `reference` take.

    `sequences` are a name of FEATURES or (query length, length) pairs; `heads` are query and KV heads.
    """
    prefix = 0
    if isinstance(sequences, list):
        lengths = sequences
    elif sequences == "one prefix":
        prefix = -(-96 // block_size) * block_size
        queries = [1] * 14 + [33, 9]
        lengths = [(count, prefix + count + 7 * number) for number, count in enumerate(queries)]
    else:
        lengths = {"mixed": MIXED, "verify": VERIFY}[sequences]
    case = make_case(
        lengths,
        q_heads=heads[0],
        kv_heads=heads[1],
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        fp8=fp8,
        forget_before=window or 0,
        shared_prefix=prefix,
        device=device,
    )
    options = {"window": window, "soft_cap": soft_cap}
    if alibi:
        options["alibi_slopes"] = torch.logspace(-1, -6, heads[0], 2.0, device=device)
    if sinks:
        options["sinks"] = torch.linspace(-1, 3, heads[0], device=device).to(sinks)
    return case, options
