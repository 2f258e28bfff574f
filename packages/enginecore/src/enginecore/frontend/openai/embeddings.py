"""Bodies and answers of /v1/embeddings (OpenAI's), /score (vLLM's) and /rerank (Jina's and Cohere's)."""

import base64
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from enginecore.errors import RequestError
from enginecore.frontend.openai.answers import Head
from enginecore.frontend.openai.bodies import Integer, convert
from enginecore.frontend.openai.conversion import completion_prompts
from enginecore.frontend.pooling import pair, score_outputs
from enginecore.outputs import RequestOutput
from enginecore.pooling_params import PoolingParams

MAX_INPUTS = 4096
"""Most texts of one request."""

_SCORE_NAMES = (("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2"))
"""What the two lists of /score may be called."""

_REFUSED: dict[str, tuple[Any, ...]] = {
    "messages": (),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "padding": ("do_not_pad",),
    "instruction": (),
    "max_tokens_per_query": (0,),
    "max_tokens_per_doc": (0,),
}
"""Fields that are refused, unless they are null or have one of these values."""


class PoolingBody(msgspec.Struct, kw_only=True):
    """The fields that the three routes share."""

    model: str | None = None
    user: str | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Integer | None = None
    truncation_side: Literal["left", "right"] | None = None
    use_activation: bool | None = None
    priority: Integer | None = None
    cache_salt: str | None = None

    def params(self) -> PoolingParams:
        """Return how to pool for this body."""
        return PoolingParams(use_activation=self.use_activation)


class EmbeddingBody(PoolingBody, kw_only=True):
    """A body of /v1/embeddings."""

    input: Any = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Integer | None = None

    def params(self) -> PoolingParams:
        """Return how to pool for this body.

        Raises:
            RequestError: there are no so many dimensions.
        """
        try:
            return PoolingParams(dimensions=self.dimensions, use_activation=self.use_activation)
        except ValueError as error:
            raise RequestError(str(error), "dimensions") from error


class ScoreBody(PoolingBody, kw_only=True):
    """A body of /score: two lists of texts, of which one may be one text."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    data_1: str | list[str] | None = None
    data_2: str | list[str] | None = None


class DocumentText(msgspec.Struct):
    """A document as an object."""

    text: str


class RerankBody(PoolingBody, kw_only=True):
    """A body of /rerank."""

    query: str
    documents: list[str | DocumentText]
    top_n: Integer | None = None
    """0 for all."""
    return_documents: bool | None = None

    @property
    def texts(self) -> list[str]:
        return [entry if isinstance(entry, str) else entry.text for entry in self.documents]


def read_embedding(fields: Mapping[str, Any]) -> EmbeddingBody:
    """Return a checked body of /v1/embeddings. Raises RequestError with the field at fault as its `param`."""
    body = convert(fields, EmbeddingBody)
    _check(fields, body)
    return body


def read_score(fields: Mapping[str, Any]) -> ScoreBody:
    """Return a checked body of /score. Raises RequestError with the field at fault as its `param`."""
    body = convert(fields, ScoreBody)
    _check(fields, body)
    return body


def read_rerank(fields: Mapping[str, Any]) -> RerankBody:
    """Return a checked body of /rerank. Raises RequestError with the field at fault as its `param`."""
    body = convert(fields, RerankBody)
    _check(fields, body)
    if body.top_n is not None and body.top_n < 0:
        raise RequestError(f"top_n must be at least 0 (0: all documents), got {body.top_n}", "top_n")
    if not body.documents:
        raise RequestError("documents is empty: give at least one text", "documents")
    return body


def embedding_inputs(body: EmbeddingBody) -> list[str | list[int]]:
    """Return the inputs of a body: one text or list of token ids each.

    Raises:
        RequestError: `input` is none of a text, a list of texts, a list of ids, a list of lists of ids.
    """
    try:
        inputs = completion_prompts(body.input)
    except RequestError as error:
        raise RequestError(str(error).replace("prompt", "input", 1), "input", error.code) from error
    check_inputs(len(inputs), "input")
    return inputs


def score_inputs(body: ScoreBody) -> tuple[list[str], list[str], tuple[str, str]]:
    """Return the two lists of texts to be compared, and their names.

    Raises:
        RequestError: they are missing, or cannot be paired.
    """
    for names in _SCORE_NAMES:
        first, second = (getattr(body, name) for name in names)
        if first is None and second is None:
            continue
        for value, name in zip((first, second), names):
            if value is None:
                raise RequestError(f"{name} is missing: {names[0]} and {names[1]} are compared", name)
        lists = [[value] if isinstance(value, str) else value for value in (first, second)]
        pair(len(lists[0]), len(lists[1]), names)
        check_inputs(len(lists[0]) + len(lists[1]), names[1])
        return lists[0], lists[1], names
    raise RequestError("give text_1 and text_2, a text or a list of texts each", "text_1")


def check_inputs(count: int, param: str) -> None:
    """Raise RequestError when a request has more texts than one request may have."""
    if count > MAX_INPUTS:
        raise RequestError(f"{param}: {count} texts; one request has at most {MAX_INPUTS}", param)


@contextmanager
def naming(param: str) -> Generator[None]:
    """Let a RequestError that blames the prompt name the field `param` that a body has in its place."""
    try:
        yield
    except RequestError as error:
        if error.param != "prompt":
            raise
        raise RequestError(str(error).replace("the prompt", param, 1), param, error.code) from error


def embedding_entry(index: int, vector: NDArray[np.float32], encoding: str | None) -> dict[str, Any]:
    """Return one embedding [n] of an answer, as numbers or as the base64 of little-endian float32."""
    if encoding == "base64":
        shown: Any = base64.b64encode(vector.astype("<f4").tobytes()).decode()
    else:
        shown = vector.tolist()
    return {"object": "embedding", "index": index, "embedding": shown}


def embedding_answer(head: Head, outputs: Sequence[RequestOutput], entries: Sequence[Any]) -> dict[str, Any]:
    """Return the answer to a body whose outputs are shown as `entries`, see `embedding_entry`."""
    return {**_list_head(head), "data": entries, "usage": pooling_usage(outputs)}


def score_answer(
    head: Head, first: Sequence[RequestOutput], second: Sequence[RequestOutput]
) -> dict[str, Any]:
    """Return the answer of /score to finished outputs: 1 and 1, 1 and N, or N and N."""
    data = [
        {"index": index, "object": "score", "score": score}
        for index, score in enumerate(_scores(first, second))
    ]
    return {**_list_head(head), "data": data, "usage": pooling_usage([*first, *second])}


def rerank_answer(
    head: Head, body: RerankBody, query: RequestOutput, documents: Sequence[RequestOutput]
) -> dict[str, Any]:
    """Return the answer of /rerank: documents by falling score, equal ones in the order of the body."""
    scores = _scores([query], documents)
    ranked = sorted(range(len(scores)), key=lambda index: -scores[index])
    results = []
    for index in ranked[: body.top_n or None]:
        result: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
        if body.return_documents is not False:
            result["document"] = {"text": body.texts[index]}
        results.append(result)
    usage = pooling_usage([query, *documents])
    return {"id": head.id, "model": head.model, "usage": usage, "results": results}


def pooling_usage(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Return the usage of pooled requests, each of which counts once."""
    tokens = sum(len(output.prompt_token_ids) for output in outputs)
    cached = sum(output.num_cached_tokens or 0 for output in outputs)
    return {
        "prompt_tokens": tokens,
        "total_tokens": tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _scores(first: Sequence[RequestOutput], second: Sequence[RequestOutput]) -> list[float]:
    pairs = pair(len(first), len(second), ("text_1", "text_2"))
    return [found.outputs.score for found in score_outputs(first, second, pairs)]


def _list_head(head: Head) -> dict[str, Any]:
    return {"id": head.id, "object": "list", "created": head.created, "model": head.model}


def _check(fields: Mapping[str, Any], body: PoolingBody) -> None:
    if body.cache_salt == "":
        raise RequestError("cache_salt must not be empty", "cache_salt")
    for name, harmless in _REFUSED.items():
        value = fields.get(name)
        if value is not None and value not in harmless:
            raise RequestError(f"{name} is not supported by this version", name)
