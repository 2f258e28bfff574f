"""Schedules and requests that make a core do all it can do with the cache."""

from cores import Ask

SCHEDULES = {
    "whole prompts": {},
    "chunks, prefix hits and preemptions": {
        "max_num_batched_tokens": 16,
        "max_num_seqs": 5,
        "block_size": 4,
        "num_blocks_override": 30,
        "max_model_len": 100,
    },
}


def asks() -> list[Ask]:
    """Prompts of many lengths, some with a prefix in common."""
    prefix = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    return [Ask(prefix[: 4 * (number % 3)] + [7 + number] * (1 + 9 * number % 40), 12) for number in range(8)]
