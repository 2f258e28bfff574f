"""Time per token with and without prompt lookup, on a text that is copied and on texts that are not.

    uv run python tools/bench/speculative.py [--model demo] [--rounds 5] [--rows 1 4]
        [--tokens 64] [--drafts 5]

Two engines in one process, one of which speculates, run the same greedy and seeded requests in turns; the
answers are compared. The time per token is that of a request after its first token, its mean over a round's
requests. Ratios are those of a round, of these times and of the process's CPU time with prompts, which other
work on the machine disturbs less (with OMP_NUM_THREADS=1: waiting threads take CPU time too). All are medians
over the rounds, without the first.

Copied: lines of an order book, which the prompt asks to repeat. Unrelated: sampled answers to open questions,
whose n-grams hardly ever come twice. Last, the time that the proposals alone take a step.
"""

import argparse
import random
import statistics
import time
from typing import Any, NamedTuple

from enginecore import threads

threads.prepare()

import numpy as np  # noqa: E402  (torch reads its threads' settings when loaded)

from enginecore import LLM, SamplingParams  # noqa: E402
from enginecore.core.ngram import NgramProposer  # noqa: E402
from enginecore.outputs import RequestOutput  # noqa: E402
from enginecore.speculation import Speculation, read_speculation  # noqa: E402

GOODS = ("pears", "nails", "ropes", "candles", "barrels", "lamps", "carpets", "tiles", "books", "bells")
TOWNS = ("Lima", "Oslo", "Cairo", "Hanoi", "Quito", "Turin", "Perth", "Accra", "Delhi", "Lyon")
QUESTIONS = (
    "Why is the sky blue?",
    "Invent a story about a lighthouse.",
    "How does bread rise?",
    "What should one see in Italy?",
    "Describe a walk through a forest.",
    "How do bees find flowers?",
    "Write a letter to an old friend.",
    "What makes a good teacher?",
)


class Workload(NamedTuple):
    """Chats, and the settings of each."""

    chats: list[list[dict[str, str]]]
    params: list[SamplingParams]


def copied(rows: int, tokens: int) -> Workload:
    """Return requests to repeat a list."""
    rng = random.Random(rows)
    chats = []
    for _ in range(rows):
        lines = [
            f"Order {rng.randrange(1000, 9999)}: {rng.randrange(2, 90)} {rng.choice(GOODS)} to "
            f"{rng.choice(TOWNS)}, paid in {rng.choice(('gold', 'silver', 'paper'))}."
            for _ in range(8)
        ]
        chats.append(_chat("Repeat this list exactly as it is:\n\n" + "\n".join(lines)))
    return Workload(chats, [_params(tokens, temperature=0.0)] * rows)


def unrelated(rows: int, tokens: int) -> Workload:
    """Return open questions, to be answered at temperature 1."""
    chats = [_chat(QUESTIONS[row % len(QUESTIONS)]) for row in range(rows)]
    return Workload(chats, [_params(tokens, temperature=1.0, seed=row) for row in range(rows)])


def _chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _params(tokens: int, **settings: Any) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, ignore_eos=True, **settings)


class Round(NamedTuple):
    """Figures of one engine in one round."""

    milliseconds: float
    """A token."""
    cpu_seconds: float
    drafted: int
    accepted: int
    answers: list[list[int]]


def run(llm: LLM, work: Workload) -> Round:
    """Run all requests of a workload together."""
    start = time.process_time()
    outputs = llm.chat(work.chats, work.params, use_tqdm=False)
    cpu_seconds = time.process_time() - start
    metrics = [output.metrics for output in outputs if output.metrics is not None]
    return Round(
        statistics.mean(map(_time_per_token, outputs)),
        cpu_seconds,
        sum(entry.num_draft_tokens for entry in metrics),
        sum(entry.num_accepted_tokens for entry in metrics),
        [output.outputs[0].token_ids for output in outputs],
    )


def _time_per_token(output: RequestOutput) -> float:
    metrics = output.metrics
    assert metrics is not None
    assert metrics.first_token_time is not None
    assert metrics.finished_time is not None
    seconds = metrics.finished_time - metrics.first_token_time
    return 1000 * seconds / (len(output.outputs[0].token_ids) - 1)


def compare(plain: LLM, drafting: LLM, work: Workload, rounds: int) -> str:
    """Return a line on a workload, run by each engine in turn."""
    pairs = []
    for number in range(rounds + 1):
        order = (plain, drafting) if number % 2 else (drafting, plain)
        found = {llm: run(llm, work) for llm in order}
        pairs.append((found[plain], found[drafting]))
        assert found[plain].answers == found[drafting].answers, "drafts have changed an answer"
    pairs = pairs[1:]
    without, with_drafts = (statistics.median(pair[side].milliseconds for pair in pairs) for side in (0, 1))
    ratio = statistics.median(a.milliseconds / b.milliseconds for a, b in pairs)
    cpu_ratio = statistics.median(a.cpu_seconds / b.cpu_seconds for a, b in pairs)
    drafted, accepted = pairs[-1][1].drafted, pairs[-1][1].accepted
    tokens = sum(map(len, pairs[-1][1].answers))
    return (
        f"{len(work.chats):5} {without:10.2f} {with_drafts:10.2f} {ratio:6.2f} {cpu_ratio:6.2f} "
        f"{drafted / tokens:8.2f} {accepted / max(drafted, 1):9.0%}"
    )


def proposal_milliseconds(speculation: Speculation, rows: int = 256, length: int = 4096) -> float:
    """Return the median time of `propose` for as many rows with so many tokens, of which each gets two."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 5000, (rows, length + 100), np.int32)
    proposer = NgramProposer(speculation, rows, length + 100)
    every = np.arange(rows)
    times = []
    for step in range(40):
        start = time.perf_counter()
        proposer.propose(every, tokens, np.full(rows, length + 2 * step, np.int32))
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times[1:])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--drafts", type=int, default=5)
    options = parser.parse_args()
    asked = {"method": "ngram", "num_speculative_tokens": options.drafts}
    settings: dict[str, Any] = {"max_model_len": 1024, "enable_prefix_caching": False, "device": "cpu"}
    plain = LLM(options.model, **settings)
    drafting = LLM(options.model, speculative_config=asked, **settings)
    print("             ms a token         ratio of         drafts")
    print(" rows    without       with   time    CPU  a token  accepted")
    for name, make in (("copied", copied), ("unrelated", unrelated)):
        print(name)
        for rows in options.rows:
            print(compare(plain, drafting, make(rows, options.tokens), options.rounds), flush=True)
    print(f"proposals: {proposal_milliseconds(read_speculation(asked)):.2f} ms for 256 rows of 4096 tokens")


if __name__ == "__main__":
    main()
