"""Run the same requests over executors of several processes and over one process, and compare."""

import random
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from cores import Answer, Ask
from enginecore import SamplingParams
from enginecore.config import EngineConfig, make_config
from enginecore.executor.executor import Executor

VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8},
    {"temperature": 1.2, "top_p": 0.9, "top_k": 40, "logprobs": 2},
    {"repetition_penalty": 1.2, "prompt_logprobs": 1},
    {"temperature": 0.9, "presence_penalty": 0.7, "frequency_penalty": 0.4, "logit_bias": {65: 3.0}},
)


class Smaller:
    """An executor of which a core uses only some of the blocks: cheaper than to start another."""

    def __init__(self, executor: Executor, *, depth: int | None = None, **changes: Any) -> None:
        """`changes` are limits of the executor that a core is to see otherwise."""
        self._executor = executor
        self.limits = replace(executor.limits, **changes)
        self.depth = depth or executor.depth

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)


def options(model: Path, **more: Any) -> EngineConfig:
    """Return a configuration for `model` in float32 on the CPU."""
    base = {"model": str(model), "dtype": "float32", "device": "cpu", "num_blocks_override": 128}
    return make_config({**base, **more})


def ragged_asks() -> list[Ask]:
    """Ragged requests with a prefix in common, each of the variants in turn."""
    rng = random.Random(0)
    prefix = [rng.randrange(256) for _ in range(20)]
    return [
        Ask(
            prefix + [rng.randrange(256) for _ in range(rng.randint(1, 40))],
            rng.randint(12, 20),
            SamplingParams(**{"temperature": 0, **VARIANTS[number % len(VARIANTS)]}),
            seed=number,
        )
        for number in range(6)
    ]


def assert_same(got: list[Answer], expected: list[Answer]) -> None:
    """Tokens are equal, and so are log probabilities but for rounding."""
    for mine, theirs in zip(got, expected, strict=True):
        assert (mine.tokens, mine.finish) == (theirs.tokens, theirs.finish)
        for name in ("logprobs", "prompt_logprobs"):
            ours, others = getattr(mine, name), getattr(theirs, name)
            assert [(ids, rank) for ids, _, rank in ours] == [(ids, rank) for ids, _, rank in others]
            for (_, values, _), (_, other_values, _) in zip(ours, others, strict=True):
                assert values == pytest.approx(other_values, abs=1e-3)
