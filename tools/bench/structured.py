"""Structured outputs at a large vocabulary: compiling, masks, and what guided rows add to a step.

    uv run python tools/bench/structured.py [--vocabulary FILE.gguf] [--threads N]

Without a vocabulary given one of 152,000 tokens is made: the demo model's, with pairs of them. The figures of
a step are of `Guides` and the sampler on the CPU, medians of many steps; the model itself is not run, so that
nothing hides the masks. Processor time is that of all threads together.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from enginecore import SamplingParams, StructuredOutputsParams
from enginecore.frontend.guides import GuideReader
from enginecore.frontend.text.gguf_tokenizer import tokenizer_from_gguf
from enginecore.frontend.text.loading import load_tokenizer
from enginecore.frontend.text.tokenizer import Tokenizer
from enginecore.grammars import Grammars
from enginecore.messages import Guide, RowSampling
from enginecore.model_files import locate
from enginecore.worker.sampling.guides import Guides
from enginecore.worker.sampling.sampler import SamplingRows, sample
from enginecore.worker.sampling.state import SamplingState

SIZE = 152_000
STEPS = 40

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 3, "maxLength": 40},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 10},
        "score": {"type": "number", "minimum": -10, "maximum": 300},
    },
    "required": ["name", "tags", "score"],
}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "v": {"type": "integer"},
                "kids": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["v", "kids"],
        }
    },
    "$ref": "#/$defs/node",
}
WIDE = {
    "type": "object",
    "properties": {f"field_{number}": {"type": ["string", "null"]} for number in range(1000)},
    "required": [f"field_{number}" for number in range(0, 1000, 2)],
}
ASKED: dict[str, tuple[dict[str, Any], str]] = {
    "json_object": (
        {"json_object": True},
        '{"a": [1, 2.5, null, {"b": "a longer text, here and there"}], "c": true}',
    ),
    "person": ({"json": PERSON}, '{"name": "Ann of Green Gables", "tags": ["a","b","c"], "score": -3.25}'),
    "tree": ({"json": TREE}, '{"v": 1, "kids": [{"v": 2, "kids": []}, {"v": 3, "kids": []}]}'),
    "wide": (
        {"json": WIDE},
        "{" + "".join(f'"field_{number}": "some words", ' for number in range(0, 40, 2)),
    ),
    "regex": ({"regex": "[a-z ]{1,400}"}, "some words that are no more than letters and blanks"),
    "choice": ({"choice": [f"option number {number}" for number in range(1000)]}, "option number 917"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--vocabulary", type=Path, help="a GGUF file with a tokenizer")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    tokenizer, name = _tokenizer(arguments.vocabulary)
    began = time.perf_counter()
    grammars = Grammars(tokenizer, tokenizer.vocab_size, [tokenizer.eos_token_id or 0])
    print(f"{name}: {tokenizer.vocab_size} tokens, ready in {time.perf_counter() - began:.2f} s, ", end="")
    print(f"{arguments.threads} threads")
    reader = GuideReader(tokenizer, lambda: grammars)
    sources = {}
    print(f"{'':14}{'compile ms':>12}{'hit: front-end ms':>20}{'worker ms':>12}{'mask µs':>10}{'p99 µs':>10}")
    for label, (fields, text) in ASKED.items():
        wanted = StructuredOutputsParams(**fields)
        compiled = _timed(lambda wanted=wanted: reader.read(wanted), 1)
        sources[label] = grammar = reader.read(wanted)
        hit = _timed(lambda wanted=wanted: reader.read(wanted), 200)
        grammars.matcher(grammar)
        row = _timed(lambda grammar=grammar: grammars.matcher(grammar), 200)
        masks = _mask_times(grammars, grammar, tokenizer.encode(text, add_special_tokens=False))
        p99 = sorted(masks)[int(0.99 * len(masks))]
        print(f"{label:14}{1e3 * compiled:12.2f}{1e3 * hit:20.4f}{1e3 * row:12.4f}", end="")
        print(f"{1e6 * statistics.median(masks):10.1f}{1e6 * p99:10.1f}")
    print(f"\n{'a step, ms':40}{'masks':>14}{'their CPU':>14}{'applying':>14}{'plain sampling':>16}")
    texts = {label: tokenizer.encode(text, add_special_tokens=False) for label, (_, text) in ASKED.items()}
    for dtype in (torch.float32, torch.bfloat16):
        for guided in (1, 64, 384):
            figures = _step(grammars, sources, texts, guided, max(64, guided), dtype, arguments.threads)
            shape = f"{guided} of {max(64, guided)} rows {str(dtype).removeprefix('torch.')}"
            print(f"{shape:40}" + "".join(f"{1e3 * each:14.3f}" for each in figures))


def _tokenizer(path: Path | None) -> tuple[Tokenizer, str]:
    if path is not None:
        found = tokenizer_from_gguf(path)
        if found is None:
            raise SystemExit(f"{path} has no tokenizer")
        return found, path.name
    demo = load_tokenizer(locate("demo"))
    assert demo is not None
    return _Widened(demo, SIZE), "the demo model's, widened"


class _Widened(Tokenizer):
    """A vocabulary with pairs of another's tokens behind its own; texts are cut as the other cuts them."""

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        self.__dict__.update(tokenizer.__dict__)
        self._narrow = tokenizer
        self.vocab_size = size

    def token_bytes(self, token_id: int) -> bytes:
        own = self._narrow.vocab_size
        if token_id < own:
            return self._narrow.token_bytes(token_id)
        first, second = divmod(token_id - own, 400)
        return self._narrow.token_bytes(1000 + first) + self._narrow.token_bytes(1000 + second)


def _timed(call: Callable[[], object], times: int) -> float:
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def _mask_times(grammars: Grammars, grammar: str, ids: list[int]) -> list[float]:
    taken = []
    for _ in range(3):
        matcher = grammars.matcher(grammar)
        mask = np.zeros(-(-grammars.vocab_size // 32), np.int32)
        for token in ids:
            began = time.perf_counter()
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            taken.append(time.perf_counter() - began)
            if not matcher.consume_token(token):
                raise SystemExit(f"the text of a case does not follow its grammar: {matcher.get_error()}")
    return taken


def _step(
    grammars: Grammars,
    sources: dict[str, str],
    texts: dict[str, list[int]],
    guided: int,
    rows: int,
    dtype: torch.dtype,
    threads: int,
) -> list[float]:
    """Return median seconds of making masks, of all threads for that, of applying them, and of sampling."""
    guides = Guides(rows, lambda: grammars, threads=threads)
    state = SamplingState(rows)
    tokens = torch.zeros(rows, 2 * STEPS, dtype=torch.int32)
    labels = list(sources)
    for row in range(rows):
        label = labels[row % len(labels)]
        guide = Guide(sources[label], True) if row < guided else None
        sampling = RowSampling(SamplingParams(temperature=0.8, top_p=0.95), [0], [], row, guide=guide)
        state.set(row, 1, sampling)
        guides.set(row, 1, sampling)
        ids = texts[label][:STEPS]
        tokens[row, 1 : 1 + len(ids)] = torch.tensor(ids, dtype=torch.int32)
    every = np.arange(rows, dtype=np.int64)
    logits = torch.randn(rows, grammars.vocab_size).to(dtype)
    made, busy, applied, plain = [], [], [], []
    shortest = min(len(texts[label]) for label in labels)
    for length in range(1, 1 + min(STEPS, shortest)):
        lengths = np.full(rows, length, np.int64)
        batch = SamplingRows.upload(every, lengths, torch.device("cpu"))
        began, spent = time.perf_counter(), time.process_time()
        pending = guides.start(every, lengths, tokens)
        assert pending is not None
        masks = pending.result()
        made.append(time.perf_counter() - began)
        busy.append(time.process_time() - spent)
        scratch = logits.clone()
        began = time.perf_counter()
        masks.apply(scratch)
        applied.append(time.perf_counter() - began)
        scratch = logits.clone()
        began = time.perf_counter()
        sample(scratch, batch, tokens, state)
        plain.append(time.perf_counter() - began)
    return [statistics.median(each) for each in (made, busy, applied, plain)]


if __name__ == "__main__":
    main()
