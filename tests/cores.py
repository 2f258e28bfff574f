"""Run an engine core on token ids, without text."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from enginecore.config import make_config
from enginecore.core.engine_core import EngineCore
from enginecore.executor.inproc import InprocExecutor
from enginecore.messages import AddRequest, RowSampling
from enginecore.model_files import locate
from enginecore.sampling_params import SamplingParams


def start_core(model: Path | str, *, depth: int = 1, **options: Any) -> EngineCore:
    """Load `model` in float32 on the CPU, with `depth` steps planned before the first one's tokens are known.

    Devices overlap steps that way; here each runs at once, but its results come as late.
    """
    config = make_config({"model": str(model), "dtype": "float32", "device": "cpu", **options})
    executor = InprocExecutor(config, locate(config.model))
    executor.depth = depth
    return EngineCore(config, executor)


@dataclass
class Answer:
    """What one request got."""

    tokens: list[int] = field(default_factory=list)
    finish: int = 0
    cached: int = 0
    logprobs: list[tuple[list[int], list[float], int]] = field(default_factory=list)
    """Per token: candidate ids with the chosen one first, their log probabilities, the chosen one's rank."""
    prompt_logprobs: list[tuple[list[int], list[float], int]] = field(default_factory=list)


@dataclass
class Ask:
    """A request by token ids."""

    prompt: Sequence[int]
    max_tokens: int = 16
    params: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0))
    stop_ids: Sequence[int] = ()
    seed: int = 0


def run(core: EngineCore, asks: Sequence[Ask]) -> list[Answer]:
    """Run all requests together and return their answers in order; nothing is left behind."""
    for number, ask in enumerate(asks):
        core.add(0, message(number, ask))
    answers = collect(core, len(asks))
    core.check()
    assert core.stats().kv_cache_usage == 0
    return answers


def message(number: int, ask: Ask) -> AddRequest:
    """Return the request as the core takes it."""
    return AddRequest(
        number=number,
        prompt=np.array(ask.prompt, np.int32),
        max_tokens=ask.max_tokens,
        sampling=RowSampling(ask.params, list(ask.stop_ids), [], ask.seed),
    )


def collect(core: EngineCore, count: int) -> list[Answer]:
    """Step until there is no work, and return the answers of requests 0 to count - 1."""
    answers = [Answer() for _ in range(count)]
    while core.has_work:
        for outputs in core.step().values():
            assert not outputs.errors, outputs.errors
            columns = outputs.numbers.tolist(), outputs.tokens.tolist(), outputs.finished.tolist()
            for number, token, finished in zip(*columns, strict=True):
                assert answers[number].finish == 0, "a token after the end"
                answers[number].tokens.append(token)
                answers[number].finish = finished
            for number, (cached, _) in outputs.scheduled.items():
                answers[number].cached = cached
            for entries, name in (
                (outputs.logprobs, "logprobs"),
                (outputs.prompt_logprobs, "prompt_logprobs"),
            ):
                for number, entry in entries:
                    found = zip(*(part.tolist() for part in entry), strict=True)
                    getattr(answers[number], name).extend(found)
    return answers
