"""Measure sampling a batch and detokenising its tokens on a CPU, beside torch's argmax and softmax.

    uv run python tools/bench/sampling.py [--rows N] [--vocab N] [--threads N] [--rounds N]

Each round times every case once, in turn; a figure is the median over rounds, a ratio the median of its
ratios within a round. Detokenising is measured in CPU time.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch

from enginecore.config import EngineConfig
from enginecore.frontend.text.detokenizer import IncrementalDetokenizer
from enginecore.frontend.text.loading import load_tokenizer
from enginecore.messages import RowSampling
from enginecore.model_files import locate
from enginecore.sampling_params import SamplingParams
from enginecore.worker.sampling.sampler import SamplingRows, sample
from enginecore.worker.sampling.state import SamplingState

GENERATED = 256
"""Tokens that each row holds, of which the first is the prompt."""

PENALTIES = {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.1}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "top-p 0.95": {"top_p": 0.95},
    "top-k 50": {"top_k": 50},
    "top-k 50, top-p 0.95": {"top_k": 50, "top_p": 0.95},
    "min-p 0.05": {"min_p": 0.05},
    "penalties, greedy": {"temperature": 0.0, **PENALTIES},
    "penalties, top-p 0.95": {"top_p": 0.95, **PENALTIES},
}
RATIOS = (
    ("greedy", "argmax", 1.2),
    ("top-p 0.95", "softmax", 2.5),
    ("penalties, top-p 0.95", "top-p 0.95", 2.0),
)
"""Case, what it is measured by, and the most that it should take."""

STREAMS, TOKENS = 256, 64
"""Texts that are detokenised side by side, and tokens of each."""

LONGEST_TOKEN = 3.0
"""µs a token and stream that detokenising should take at most."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=152_064)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--deviation", type=float, default=2.0, help="standard deviation of the logits")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(given.rows, given.vocab, generator=generator) * given.deviation
    tokens = torch.randint(given.vocab, (given.rows, GENERATED + 1), generator=generator, dtype=torch.int32)
    spare = torch.empty_like(logits)
    runs: dict[str, Callable[[], object]] = {
        "argmax": partial(logits.argmax, -1),
        "argmax, numpy": partial(logits.numpy().argmax, -1),
        "softmax": partial(logits.softmax, -1),
    }
    runs |= {name: _sampling(settings, logits, spare, tokens) for name, settings in CASES.items()}
    with torch.inference_mode():
        seconds = _times(runs, given.rounds)
    print(
        f"{given.rows} rows of {given.vocab} float32 logits; threads: {given.threads}, "
        f"torch {torch.__version__}"
    )
    print(f"{'':24}      ms  x argmax  x softmax")
    for name, taken in seconds.items():
        by = [_ratio(taken, seconds[other]) for other in ("argmax", "softmax")]
        print(f"{name:24}{median(taken) * 1e3:8.1f}{by[0]:10.2f}{by[1]:11.2f}")
    for name, other, most in RATIOS:
        print(_verdict(f"{name} by {other}", _ratio(seconds[name], seconds[other]), most))
    each = _detokenising(given.rounds)
    print(_verdict(f"detokenising {STREAMS} streams, µs a token and stream", each * 1e6, LONGEST_TOKEN))


def _sampling(
    settings: dict[str, Any], logits: torch.Tensor, spare: torch.Tensor, tokens: torch.Tensor
) -> Callable[[], object]:
    """Return a decode step's sampling of all rows by some settings.

    What changes the logits has `spare` to do it in, each time further, which costs as much each time.
    """
    count = len(logits)
    state = SamplingState(count)
    for row in range(count):
        state.set(row, 1, RowSampling(SamplingParams(**settings), [], [], row))
    rows = np.arange(count, dtype=np.int32)
    batch = SamplingRows.upload(rows, np.full(count, GENERATED), logits.device)
    changes = bool(PENALTIES.keys() & settings.keys())
    return partial(sample, spare.copy_(logits) if changes else logits, batch, tokens, state)


def _times(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each run in each round; the first one, which makes columns, does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            if number:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def _ratio(taken: list[float], other: list[float]) -> float:
    return median(one / two for one, two in zip(taken, other, strict=True))


def _verdict(what: str, value: float, most: float) -> str:
    return f"{what}: {value:.2f}, {'at most' if value <= most else 'ABOVE'} {most:.2f}"


def _detokenising(rounds: int) -> float:
    """Return the seconds that a token of one of many streams takes, each stream a token in turn."""
    config = EngineConfig()
    tokenizer = load_tokenizer(locate(config.model, None, None), None)
    assert tokenizer is not None, "the built-in model has a tokenizer"
    text = "The keeper of the lighthouse, Zoë, climbed 199 steps each night; 灯台守 it says on her door. 🌶 "
    ids = tokenizer.encode(text * 8, add_special_tokens=False)
    found = []
    for _ in range(rounds):
        streams = [IncrementalDetokenizer(tokenizer).push for _ in range(STREAMS)]
        columns = [[ids[(7 * row + place) % len(ids)] for row in range(STREAMS)] for place in range(TOKENS)]
        started = time.thread_time()
        for column in columns:
            for push, token in zip(streams, column, strict=True):
                push((token,))
        found.append((time.thread_time() - started) / (STREAMS * TOKENS))
    return median(found)


if __name__ == "__main__":
    main()
