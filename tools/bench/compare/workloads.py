"""The four workloads. Lengths are the same in every round and token ids differ.

So rounds do equal work, and none finds the prompts of another in a prefix cache.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

FIRST_ID, LAST_ID = 3, 31999
"""Ids of prompts: in the vocabulary of every model, and none of its special tokens."""

WARM_UP = 9000
"""The round whose prompts are those of the warm-up; measured rounds are lower."""


class Request(NamedTuple):
    """A prompt by ids, and how many tokens to generate."""

    prompt: list[int]
    max_tokens: int


class Size(NamedTuple):
    """How much work a workload is."""

    requests: int
    prefix: int
    output: int
    """Tokens of the single stream, and most of any other request."""


FULL, SHORT = Size(requests=64, prefix=512, output=128), Size(requests=8, prefix=128, output=16)


@dataclass(frozen=True)
class Workload:
    """Requests and when they arrive."""

    name: str
    title: str
    make: Callable[[str, Size], list[Request]]
    online: bool = False
    """Whether the requests go to a server one by one, and their tokens are streamed."""
    rate: float | None = None
    """Requests a second; None: all at once."""

    def requests(self, round: int, size: Size = FULL) -> list[Request]:
        """The requests of a round, from 0 on."""
        return self.make(f"{self.name} {round}", size)


def ragged(seed: str, size: Size) -> list[Request]:
    """Prompts of 32 to 256 tokens, outputs of 16 to 128."""
    shapes, ids = random.Random(1001), random.Random(seed)
    lengths = [(shapes.randint(32, 256), shapes.randint(16, 128)) for _ in range(size.requests)]
    return [Request(_ids(ids, prompt), min(output, size.output)) for prompt, output in lengths]


def shared_prefix(seed: str, size: Size) -> list[Request]:
    """A prefix that all requests share (512 tokens), 32 tokens of their own, 32 of output."""
    ids = random.Random(seed)
    prefix = _ids(ids, size.prefix)
    return [Request(prefix + _ids(ids, 32), min(32, size.output)) for _ in range(size.requests)]


def single(seed: str, size: Size) -> list[Request]:
    """One request of 128 tokens, with 128 of output."""
    return [Request(_ids(random.Random(seed), 128), size.output)]


def arrivals(count: int, rate: float | None) -> list[float]:
    """Seconds at which requests arrive: a Poisson process, the same in every round; without a rate all 0."""
    if rate is None:
        return [0.0] * count
    gaps = random.Random(7)
    moments = [0.0]
    while len(moments) < count:
        moments.append(moments[-1] + gaps.expovariate(rate))
    return moments


def percentile(values: Sequence[float], percent: float) -> float:
    """The percentile of `values`, interpolated linearly between the two nearest."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def throughput(requests: Sequence[Request], seconds: float) -> dict[str, float]:
    """Rates of a workload that took `seconds`; output tokens are those asked for."""
    output = sum(request.max_tokens for request in requests)
    prompt = sum(len(request.prompt) for request in requests)
    return {
        "seconds": seconds,
        "output_tok_s": output / seconds,
        "total_tok_s": (output + prompt) / seconds,
    }


def _ids(draw: random.Random, count: int) -> list[int]:
    return [draw.randint(FIRST_ID, LAST_ID) for _ in range(count)]


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("W1", "64 ragged requests", ragged),
        Workload("W2", "64 requests with one prefix", shared_prefix),
        Workload("W3", "one request", single),
        Workload("W4-burst", "64 streams, all at once", ragged, online=True),
        Workload("W4-poisson", "64 streams, 2 a second", ragged, online=True, rate=2.0),
    )
}
