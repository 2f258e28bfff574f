"""transformers' `generate` on left-padded batches of requests sorted by length."""

import os
from collections.abc import Sequence

from compare.tasks import Task
from compare.workloads import Request

BATCH = 32
"""Its best of 16, 32 and 64 on the ragged requests."""


class Offline:
    """The model in this process. A batch runs to its longest output; only the wanted tokens count."""

    def __init__(self, task: Task) -> None:
        os.environ["OMP_NUM_THREADS"] = str(task.threads)
        import torch
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(
            task.checkpoint, dtype=getattr(torch, task.torch_dtype)
        ).eval()

    def generate(self, requests: Sequence[Request]) -> list[list[int]]:
        outputs: list[list[int]] = [[]] * len(requests)
        by_length = sorted(range(len(requests)), key=lambda row: len(requests[row].prompt))
        for start in range(0, len(by_length), BATCH):
            rows = by_length[start : start + BATCH]
            for row, output in zip(rows, self._batch([requests[row] for row in rows])):
                outputs[row] = output[: requests[row].max_tokens]
        return outputs

    def _batch(self, requests: Sequence[Request]) -> list[list[int]]:
        import torch

        width = max(len(request.prompt) for request in requests)
        count = max(request.max_tokens for request in requests)
        ids = torch.zeros(len(requests), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(requests):
            ids[row, width - len(request.prompt) :] = torch.tensor(request.prompt)
            mask[row, width - len(request.prompt) :] = 1
        with torch.inference_mode():
            output = self._model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                min_new_tokens=count,
                max_new_tokens=count,
                eos_token_id=None,
                pad_token_id=0,
            )
        return output[:, width:].tolist()
