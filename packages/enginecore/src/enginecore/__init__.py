"""Octavo's engine: load a model, run requests through a paged KV cache, get tokens back.

    from enginecore import LLM, SamplingParams

Names are imported when first used, so that a front-end process never loads torch. Public beside these are the
modules `enginecore.errors`, `enginecore.metrics`, `enginecore.options`, `enginecore.frontend.openai`, and
`enginecore.frontend.parsing` for parsers of one's own.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from enginecore.async_engine import AsyncEngine
    from enginecore.beam_search import BeamSearch, BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from enginecore.config import EngineConfig
    from enginecore.core.piped_ranks import PipedRanks
    from enginecore.core.supervisor import RankSupervisor
    from enginecore.data_parallel.views import EngineWatch
    from enginecore.engine import Engine, LLMEngine, make_engine
    from enginecore.frontend.frontend import Frontend
    from enginecore.frontend.request import Prompt, Request
    from enginecore.frontend.stream import RequestStream
    from enginecore.llm import LLM
    from enginecore.logits_processors import LogitsProcessor, Positions
    from enginecore.messages import RankDown, RankEvent, RankLoading, RankOut, RankUp
    from enginecore.outputs import (
        CompletionOutput,
        EmbeddingRequestOutput,
        RequestOutput,
        ScoringRequestOutput,
    )
    from enginecore.pooling_params import PoolingParams
    from enginecore.sampling_params import RequestOutputKind, SamplingParams
    from enginecore.structured_outputs import StructuredOutputsParams

__version__ = "0.1.0"

_HOMES = {
    "AsyncEngine": "async_engine",
    "BeamSearch": "beam_search",
    "BeamSearchOutput": "beam_search",
    "BeamSearchParams": "beam_search",
    "BeamSearchSequence": "beam_search",
    "CompletionOutput": "outputs",
    "EmbeddingRequestOutput": "outputs",
    "Engine": "engine",
    "EngineConfig": "config",
    "EngineWatch": "data_parallel.views",
    "Frontend": "frontend.frontend",
    "LLM": "llm",
    "LLMEngine": "engine",
    "LogitsProcessor": "logits_processors",
    "PipedRanks": "core.piped_ranks",
    "PoolingParams": "pooling_params",
    "Positions": "logits_processors",
    "Prompt": "frontend.request",
    "RankDown": "messages",
    "RankEvent": "messages",
    "RankLoading": "messages",
    "RankOut": "messages",
    "RankSupervisor": "core.supervisor",
    "RankUp": "messages",
    "Request": "frontend.request",
    "RequestOutput": "outputs",
    "RequestOutputKind": "sampling_params",
    "RequestStream": "frontend.stream",
    "SamplingParams": "sampling_params",
    "ScoringRequestOutput": "outputs",
    "StructuredOutputsParams": "structured_outputs",
    "make_engine": "engine",
}

__all__ = [
    "LLM",
    "AsyncEngine",
    "BeamSearch",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "Engine",
    "EngineConfig",
    "EngineWatch",
    "Frontend",
    "LLMEngine",
    "LogitsProcessor",
    "PipedRanks",
    "PoolingParams",
    "Positions",
    "Prompt",
    "RankDown",
    "RankEvent",
    "RankLoading",
    "RankOut",
    "RankSupervisor",
    "RankUp",
    "Request",
    "RequestOutput",
    "RequestOutputKind",
    "RequestStream",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "make_engine",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
