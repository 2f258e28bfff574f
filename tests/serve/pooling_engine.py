"""The scripted engine of a model that embeds too, and that has experts."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from scripted_engine import ScriptedEngine

from enginecore import CompletionOutput, RequestOutput, SamplingParams
from enginecore.frontend.parsing import TOOL_PARSERS, Parsers


class PoolingEngine(ScriptedEngine):
    """It embeds too, gives tokens of every prompt the same vector, and has experts."""

    def __init__(self) -> None:
        super().__init__()
        self.frontend.parsers = Parsers(TOOL_PARSERS["hermes"])
        frontend = cast(Any, self.frontend)
        frontend.pooling_plan = lambda params: SimpleNamespace(sampling=SamplingParams())
        frontend.prepare_text = lambda text, **options: self.frontend.prepare_prompt(text)

    def _script(self, request: Any) -> list[RequestOutput]:
        if request.pooling is None:
            return super()._script(request)
        ended = [CompletionOutput(0, finish_reason="stop")]
        prompt, vector = request.prompt, np.full(4, 0.5, np.float32)
        return [
            RequestOutput(
                request.request_id, prompt.text, prompt.token_ids, ended, finished=True, embedding=vector
            )
        ]

    async def expert_loads(self) -> np.ndarray:
        return np.ones((2, 3), np.int64)
