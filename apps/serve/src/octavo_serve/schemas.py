"""Types that only the OpenAPI document names: answers, and parts of bodies that handlers read as plain dicts.

Handlers make their answers as dicts, so tests compare these with what is really answered. A field that is
UNSET is there for some requests only.
"""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

FinishReason = Literal["stop", "length", "tool_calls", "abort"]


class ErrorFields(msgspec.Struct):
    """What went wrong."""

    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: str | None
    code: str | None


class Error(msgspec.Struct):
    """An error in OpenAI's shape."""

    error: ErrorFields


class AnthropicErrorFields(msgspec.Struct):
    """What went wrong."""

    type: str
    message: str


class AnthropicError(msgspec.Struct):
    """An error in Anthropic's shape."""

    type: Literal["error"]
    error: AnthropicErrorFields


class CachedTokens(msgspec.Struct):
    """Prompt tokens that were found in the prefix cache."""

    cached_tokens: int


class Usage(msgspec.Struct):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class PromptLogprob(msgspec.Struct):
    """A candidate at a position of the prompt."""

    logprob: float
    rank: int | None
    decoded_token: str | None


class CompletionLogprobs(msgspec.Struct):
    """Parallel lists, one entry a token."""

    tokens: list[str]
    text_offset: list[int]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(msgspec.Struct):
    """A continuation of a prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType = UNSET


class Completion(msgspec.Struct):
    """The answer of /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunkChoice(msgspec.Struct):
    """The next piece of a continuation."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class CompletionChunk(msgspec.Struct):
    """The data of one event of a streamed completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class Candidate(msgspec.Struct):
    """A token with its log probability."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct):
    """A token of the answer, with the likeliest candidates in its place."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[Candidate]


class ChatLogprobs(msgspec.Struct):
    """An entry a token."""

    content: list[TokenLogprob]


class CalledFunction(msgspec.Struct):
    """A function and its arguments, as the model wrote them."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(msgspec.Struct):
    """What the model says."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | UnsetType | None = UNSET
    reasoning: str | UnsetType | None = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    """One answer to a conversation."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType = UNSET


class FunctionDelta(msgspec.Struct):
    """The next piece of a call's arguments; the first has the function's name."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct):
    """The next piece of a call; its first has the id."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(msgspec.Struct):
    """The next piece of a message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    """The next piece of an answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct):
    """The data of one event of a streamed chat completion."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class TextPart(msgspec.Struct):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class ChatMessage(msgspec.Struct):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class PoolingUsage(msgspec.Struct):
    """Tokens of texts that were embedded."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class EmbeddingEntry(msgspec.Struct):
    """An embedding: numbers, or the base64 of little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(msgspec.Struct):
    """The answer of /v1/embeddings."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[EmbeddingEntry]
    usage: PoolingUsage


class ScoreEntry(msgspec.Struct):
    """How alike the texts of a pair are."""

    index: int
    object: Literal["score"]
    score: float


class Scores(msgspec.Struct):
    """The answer of /score."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ScoreEntry]
    usage: PoolingUsage


class RankedText(msgspec.Struct):
    """A document's text."""

    text: str


class RankedDocument(msgspec.Struct):
    """A document by its index in the body, with its score."""

    index: int
    relevance_score: float
    document: RankedText | UnsetType = UNSET


class Ranking(msgspec.Struct):
    """The answer of /rerank: documents by falling score."""

    id: str
    model: str
    usage: PoolingUsage
    results: list[RankedDocument]


class OutputText(msgspec.Struct, tag="output_text"):
    """A text of an output message."""

    text: str
    annotations: list[dict[str, Any]]
    logprobs: list[TokenLogprob]


class OutputMessage(msgspec.Struct, tag="message"):
    """What the model says."""

    id: str
    role: Literal["assistant"]
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputText]


class ReasoningText(msgspec.Struct, tag="reasoning_text"):
    """A text of the model's reasoning."""

    text: str


class OutputReasoning(msgspec.Struct, tag="reasoning"):
    """What the model thinks."""

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


class Response(msgspec.Struct):
    """The answer of /v1/responses."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["completed", "incomplete"]
    output: list[OutputMessage | OutputReasoning | OutputCall]
    usage: ResponseUsage
    background: bool
    error: None
    incomplete_details: IncompleteDetails | None
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


class TextBlock(msgspec.Struct, tag="text"):
    """What the model says."""

    text: str


class ThinkingBlock(msgspec.Struct, tag="thinking"):
    """What the model thinks."""

    thinking: str
    signature: str


class ToolUseBlock(msgspec.Struct, tag="tool_use"):
    """A call of a tool; arguments that were cut are the text that they are."""

    id: str
    name: str
    input: Any


class MessageUsage(msgspec.Struct):
    """Tokens of a message."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class Message(msgspec.Struct):
    """The answer of /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage


class InputMessage(msgspec.Struct):
    """A message to /v1/messages."""

    role: Literal["user", "assistant"]
    content: str | list[dict[str, Any]]


class TokenCount(msgspec.Struct):
    """The answer of /v1/messages/count_tokens."""

    input_tokens: int


class Model(msgspec.Struct):
    """The served model under one of its names."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int


class Models(msgspec.Struct):
    """The answer of /v1/models."""

    object: Literal["list"]
    data: list[Model]


class Tokens(msgspec.Struct):
    """The answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class DetokenizedText(msgspec.Struct):
    """The answer of /detokenize."""

    prompt: str


class Health(msgspec.Struct):
    """Requests are run; `ranks_down` has the reasons for ranks that are not up."""

    status: Literal["ok", "degraded"]
    ranks_down: dict[str, str] | UnsetType = UNSET


class Version(msgspec.Struct):
    """The server's version."""

    version: str


class Load(msgspec.Struct):
    """How busy the server is."""

    server_load: int
    num_requests_running: int
    num_requests_waiting: int
    kv_cache_usage: float


class Reloading(msgspec.Struct):
    """Ranks start again."""

    status: Literal["reloading"]
