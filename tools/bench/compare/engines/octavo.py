"""Octavo, from the environment that this tool runs in."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compare.peers import PEERS
from compare.server import Command
from compare.tasks import CACHE_GIB, MAX_BATCHED_TOKENS, MAX_MODEL_LEN, MAX_NUM_SEQS, Task
from compare.workloads import Request


class Offline:
    """`LLM` in this process."""

    def __init__(self, task: Task) -> None:
        os.environ["OMP_NUM_THREADS"] = str(task.threads)
        from enginecore import LLM

        self._llm = LLM(str(task.checkpoint), device="cpu", **_options(task))

    def generate(self, requests: Sequence[Request]) -> list[list[int]]:
        from enginecore import SamplingParams

        params = [
            SamplingParams(temperature=0, max_tokens=each.max_tokens, ignore_eos=True, detokenize=False)
            for each in requests
        ]
        prompts = [{"prompt_token_ids": each.prompt} for each in requests]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


def serve(task: Task, port: int) -> Command:
    arguments = [str(Path(sys.executable).parent / "octavo-serve"), str(task.checkpoint)]
    arguments += ["--device", "cpu", "--port", str(port), "--served-model-name", "model"]
    arguments += ["--log-level", "warning"]
    for name, value in _options(task).items():
        if value is not None:
            arguments += ["--" + name.replace("_", "-"), str(value)]
    return Command(arguments, {"OMP_NUM_THREADS": str(task.threads)})


def _options(task: Task) -> dict[str, Any]:
    return {
        "dtype": task.torch_dtype,
        "quantization": PEERS[task.peer].quantization,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": MAX_BATCHED_TOKENS,
        "kv_cache_memory_bytes": CACHE_GIB << 30,
    }
