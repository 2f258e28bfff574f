"""Compare quantised weights with the checkpoint's own: greedy tokens, perplexity, memory of the layers.

    uv run python tools/bench/quantization.py [MODEL] [--text FILE] [--tokens 32] [KIND …]

The unquantised model in float32 answers 50 prompts greedily. `agreement` is the share of those tokens that
the quantised model would have chosen too after the same tokens before, `free` the share of places where its
own greedy answer has the same token. Perplexity is of the text's first 4,000 tokens, in windows of 500.
"""

import argparse
import itertools
import math
from collections.abc import Sequence
from pathlib import Path

from enginecore import LLM, SamplingParams
from enginecore.outputs import RequestOutput

ROOT = Path(__file__).resolve().parents[2]
SUBJECTS = (
    "the sea",
    "bread",
    "Paris",
    "a computer",
    "gravity",
    "moons",
    "music",
    "a cat",
    "winter",
    "chess",
)
FORMS = ("What is {}?", "Tell me a story of {}.", "Once upon a time, {}", "The history of {} begins", "{} is")
WINDOW, TEXT_TOKENS = 500, 4000


def prompts() -> list[str]:
    """Return 50 prompts."""
    return [form.format(subject) for form in FORMS for subject in SUBJECTS]


def continued(llm: LLM, ids: Sequence[Sequence[int]]) -> list[RequestOutput]:
    """Run token ids through the model, with the log probability and rank of each."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    return llm.generate([{"prompt_token_ids": list(each)} for each in ids], params)


def ranked(output: RequestOutput, start: int) -> list[tuple[int, float]]:
    """Return rank and log probability of the prompt tokens from `start` on."""
    assert output.prompt_logprobs is not None and output.prompt_token_ids is not None
    found = []
    for place in range(start, len(output.prompt_token_ids)):
        entries = output.prompt_logprobs[place]
        assert entries is not None
        entry = entries[int(output.prompt_token_ids[place])]
        assert entry.rank is not None
        found.append((entry.rank, entry.logprob))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("kinds", nargs="*", default=["int8", "int8-dynamic", "int4"], metavar="KIND")
    parser.add_argument("--text", type=Path, default=ROOT / "docs/architecture.md")
    parser.add_argument("--tokens", type=int, default=32)
    options = parser.parse_args()
    greedy = SamplingParams(temperature=0, max_tokens=options.tokens, ignore_eos=True)
    truth: list[list[int]] = []
    print(f"{'weights':>13} {'agreement':>9} {'free':>6} {'perplexity':>10} {'more':>6}")
    first = 0.0
    for kind in (None, *options.kinds):
        llm = LLM(options.model, device="cpu", dtype="float32", quantization=kind, max_model_len=1024)
        outputs = llm.generate(prompts(), greedy)
        answers = [list(output.outputs[0].token_ids) for output in outputs]
        truth = truth or answers
        starts = [list(output.prompt_token_ids or ()) for output in outputs]
        forced = continued(llm, [start + answer for start, answer in zip(starts, truth, strict=True)])
        ranks: list[int] = []
        for start, output in zip(starts, forced, strict=True):
            ranks += (rank for rank, _ in ranked(output, len(start)))
        text = llm.get_tokenizer().encode(options.text.read_text(encoding="utf-8"))[:TEXT_TOKENS]
        windows = continued(llm, [text[place : place + WINDOW] for place in range(0, len(text), WINDOW)])
        logprobs = [logprob for output in windows for _, logprob in ranked(output, 1)]
        perplexity = math.exp(-sum(logprobs) / len(logprobs))
        first = first or perplexity
        pairs = zip(itertools.chain(*truth), itertools.chain(*answers), strict=True)
        same = [token == own for token, own in pairs]
        print(
            f"{kind or 'as stored':>13} {ranks.count(1) / len(ranks):9.1%} {sum(same) / len(same):6.1%} "
            f"{perplexity:10.3f} {perplexity / first - 1:6.1%}",
            flush=True,
        )
        llm.shutdown()


if __name__ == "__main__":
    main()
