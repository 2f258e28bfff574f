"""Offline throughput of the demo model: together, one after another, and transformers' static batches.

    uv run python tools/bench/throughput.py [--dtype float32] [--threads 2] [--json PATH]

All three run the same ragged requests (prompts of 32 to 256 tokens, outputs of 16 to 128, random ids) on the
same weights with the same number of threads, in one process, one after the other. transformers gets its
requests sorted by length, in batches of each size in turn, each batch running to its longest output; only the
wanted tokens count. Its best size is the one compared with.
"""

import argparse
import json
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple


class Ask(NamedTuple):
    """A prompt by ids, and how many tokens to generate."""

    prompt: list[int]
    max_tokens: int


def ragged(count: int, seed: int) -> list[Ask]:
    """The same shapes for every seed, with other ids."""
    shapes, ids = random.Random(1001), random.Random(seed)
    return [
        Ask([ids.randrange(3, 32000) for _ in range(shapes.randint(32, 256))], shapes.randint(16, 128))
        for _ in range(count)
    ]


class Octavo:
    """The engine in this process."""

    def __init__(self, dtype: Literal["float32", "bfloat16"]) -> None:
        from enginecore import LLM

        self._llm = LLM("demo", dtype=dtype, max_model_len=1024, max_num_seqs=64, device="cpu")

    def together(self, asks: Sequence[Ask]) -> None:
        from enginecore import SamplingParams

        params = [
            SamplingParams(temperature=0, max_tokens=ask.max_tokens, ignore_eos=True, detokenize=False)
            for ask in asks
        ]
        outputs = self._llm.generate([{"prompt_token_ids": ask.prompt} for ask in asks], params)
        assert [len(o.outputs[0].token_ids) for o in outputs] == [ask.max_tokens for ask in asks]

    def one_by_one(self, asks: Sequence[Ask]) -> None:
        for ask in asks:
            self.together([ask])


class Transformers:
    """transformers' `generate` on left-padded batches."""

    def __init__(self, dtype: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        from enginecore.model_files import locate

        path = locate("demo").path
        self._model = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=getattr(torch, dtype)
        ).eval()

    def static(self, asks: Sequence[Ask], batch: int) -> None:
        by_length = sorted(asks, key=lambda ask: len(ask.prompt))
        for start in range(0, len(by_length), batch):
            self._generate(by_length[start : start + batch])

    def _generate(self, asks: Sequence[Ask]) -> None:
        import torch

        width = max(len(ask.prompt) for ask in asks)
        count = max(ask.max_tokens for ask in asks)
        ids = torch.zeros(len(asks), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, ask in enumerate(asks):
            ids[row, width - len(ask.prompt) :] = torch.tensor(ask.prompt)
            mask[row, width - len(ask.prompt) :] = 1
        with torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                min_new_tokens=count,
                max_new_tokens=count,
                eos_token_id=None,
                pad_token_id=0,
            )


def timed(work: Any, *arguments: Any) -> float:
    """Return the seconds that a call takes."""
    start = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - start


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return output tokens a second of each way, and their ratios."""
    asks = ragged(options.requests, seed=0)
    wanted = sum(ask.max_tokens for ask in asks)
    octavo, peer = Octavo(options.dtype), Transformers(options.dtype)
    warm = [ask._replace(max_tokens=4) for ask in ragged(8, seed=1)]
    octavo.together(warm)
    peer.static(warm, 8)
    together = wanted / timed(octavo.together, asks)
    # Other ids, so that nothing is found in the prefix cache.
    single = wanted / timed(octavo.one_by_one, ragged(options.requests, seed=2))
    static = {size: wanted / timed(peer.static, asks, size) for size in options.batches}
    best = max(static, key=lambda size: static[size])
    return {
        "dtype": options.dtype,
        "threads": options.threads,
        "requests": options.requests,
        "together_tok_s": round(together, 1),
        "one_by_one_tok_s": round(single, 1),
        "transformers_tok_s": {size: round(rate, 1) for size, rate in static.items()},
        "together_over_one_by_one": round(together / single, 2),
        "together_over_transformers": round(together / static[best], 2),
        "transformers_best_batch": best,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--json", type=Path, help="write the figures there too")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    figures = measure(options)
    print(json.dumps(figures, indent=2))
    if options.json:
        options.json.write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
