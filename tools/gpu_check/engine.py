"""The built-in demo model through the engine."""

from __future__ import annotations

import time
from typing import Any

from enginecore import LLM, SamplingParams
from enginecore.config import EngineOptions

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
PROMPTS = 128
TOKENS = 128


def check_engine(interpret: bool) -> dict[str, Any]:
    """A greedy answer that is known, then, on a GPU, many prompts at once for tokens a second."""
    options: EngineOptions = {"max_model_len": 512, "device": "cpu" if interpret else "cuda"}
    if interpret:
        options["num_blocks_override"] = 64
    llm = LLM("demo", **options)
    try:
        answer = llm.chat(QUESTION, SamplingParams(temperature=0, max_tokens=16))[0].outputs[0].text
        found: dict[str, Any] = {"checks": {"answer": {"passed": "Paris" in answer, "answer": answer}}}
        if not interpret:
            found["figures"] = {
                "greedy_tokens_per_s": _throughput(
                    llm, SamplingParams(temperature=0, ignore_eos=True, max_tokens=TOKENS)
                ),
                "sampled_tokens_per_s": _throughput(
                    llm,
                    SamplingParams(temperature=0.8, top_p=0.95, ignore_eos=True, max_tokens=TOKENS, seed=0),
                ),
            }
        return found
    finally:
        llm.shutdown()


def _throughput(llm: LLM, params: SamplingParams) -> float:
    prompts = [f"Story number {number}: once upon a time" for number in range(PROMPTS)]
    llm.generate(prompts[:2], params)
    began = time.perf_counter()
    results = llm.generate(prompts, params)
    seconds = time.perf_counter() - began
    return round(sum(len(result.outputs[0].token_ids) for result in results) / seconds, 1)
