"""OpenVINO GenAI's continuous batching, which has no server of its own.

Its graph is made from a GGUF file in float16 by `python -m compare.engines.openvino FOLDER MODEL …`.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

from compare.tasks import CACHE_GIB, MAX_BATCHED_TOKENS, MAX_NUM_SEQS, Task, gguf_file, openvino_folder
from compare.workloads import Request


class Offline:
    """`ContinuousBatchingPipeline`, stepped by this process."""

    def __init__(self, task: Task) -> None:
        self._openvino, self._genai = import_module("openvino"), import_module("openvino_genai")
        config = self._genai.SchedulerConfig()
        config.cache_size = CACHE_GIB
        config.max_num_seqs = MAX_NUM_SEQS
        config.max_num_batched_tokens = MAX_BATCHED_TOKENS
        config.dynamic_split_fuse = True
        config.enable_prefix_caching = True
        dtype = {"bf16": "bf16", "fp32": "f32"}[task.dtype]
        properties: dict[str, Any] = {
            "INFERENCE_NUM_THREADS": task.threads,
            "INFERENCE_PRECISION_HINT": dtype,
            "KV_CACHE_PRECISION": dtype,
        }
        graph = openvino_folder(Path(task.folder), task.model)
        self._pipeline = self._genai.ContinuousBatchingPipeline(graph, config, "CPU", properties)
        self._numbers = count()

    def generate(self, requests: Sequence[Request]) -> list[list[int]]:
        handles = [self._add(request) for request in requests]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        return [[token for part in handle.read_all() for token in part.generated_ids] for handle in handles]

    def _add(self, request: Request) -> Any:
        import numpy as np

        config = self._genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = request.max_tokens, True, False
        prompt = self._openvino.Tensor(np.array([request.prompt], np.int64))
        return self._pipeline.add_request(next(self._numbers), prompt, config)


def convert(folder: Path, model: str) -> None:
    """Make the graph, unless it is there; the library saves it beside the GGUF file that it reads."""
    graph = openvino_folder(folder, model)
    if (graph / "openvino_model.xml").exists():
        return
    graph.mkdir(exist_ok=True)
    source = graph / "model.gguf"
    source.unlink(missing_ok=True)
    source.hardlink_to(gguf_file(folder, model, "f16"))
    import_module("openvino_genai").LLMPipeline(source, "CPU", enable_save_ov_model=True)


if __name__ == "__main__":
    for name in sys.argv[2:]:
        convert(Path(sys.argv[1]), name)
