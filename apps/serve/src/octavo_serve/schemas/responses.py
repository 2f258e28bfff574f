"""Answers of OpenAI's Responses API."""

from typing import Annotated, Any, Literal

import msgspec

from octavo_serve.schemas.openai import CachedTokens, TokenLogprob


class OutputText(msgspec.Struct, tag="output_text"):
    """A text of an output message."""

    text: str
    annotations: list[dict[str, Any]]
    logprobs: list[TokenLogprob]


class OutputMessage(msgspec.Struct, tag="message"):
    """Text of the answer."""

    id: str
    role: Literal["assistant"]
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputText]


class ReasoningText(msgspec.Struct, tag="reasoning_text"):
    """A text of the model's reasoning."""

    text: str


class OutputReasoning(msgspec.Struct, tag="reasoning"):
    """Reasoning before the answer."""

    id: str
    summary: list[dict[str, Any]]
    content: list[ReasoningText]


class OutputCall(msgspec.Struct, tag="function_call"):
    """A call of a function."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: Literal["in_progress", "completed", "incomplete"]


class OutputTokens(msgspec.Struct):
    """Kinds of output tokens."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: OutputTokens
    total_tokens: int


class IncompleteDetails(msgspec.Struct):
    """Why a response was cut."""

    reason: Literal["max_output_tokens", "server_shutdown"]


OutputItem = OutputMessage | OutputReasoning | OutputCall
"""Discriminated by `type`."""


class ResponseError(msgspec.Struct):
    """Why a response failed."""

    code: str
    message: str


class ResponseFields(msgspec.Struct, kw_only=True):
    """Fields of a response at every stage."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    background: bool
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    store: bool
    temperature: float | None
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float | None
    truncation: Literal["disabled"]
    user: str | None


class Response(ResponseFields, kw_only=True):
    """The answer of /v1/responses."""

    status: Literal["completed", "incomplete"]
    output: list[OutputItem]
    usage: ResponseUsage
    error: None
    incomplete_details: IncompleteDetails | None


class BegunResponse(ResponseFields, kw_only=True):
    """A response of which nothing is generated yet."""

    status: Literal["in_progress"]
    output: Annotated[list[OutputItem], msgspec.Meta(max_length=0)]
    usage: None
    error: None
    incomplete_details: None


class FailedResponse(ResponseFields, kw_only=True):
    """A response that the server gave up, with the items that were complete."""

    status: Literal["failed"]
    output: list[OutputItem]
    usage: None
    error: ResponseError
    incomplete_details: None


class DeletedResponse(msgspec.Struct):
    """A response that is forgotten."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItems(msgspec.Struct):
    """Items of a conversation before a response's own."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    has_more: bool
    first_id: str
    last_id: str
