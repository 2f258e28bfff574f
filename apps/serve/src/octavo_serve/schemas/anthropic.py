"""Errors, messages and counts in the format of Anthropic's Messages API."""

from typing import Any, Literal

import msgspec


class AnthropicErrorFields(msgspec.Struct):
    """Kind and message of an error."""

    type: str
    message: str


class AnthropicError(msgspec.Struct):
    """An error in Anthropic's shape."""

    type: Literal["error"]
    error: AnthropicErrorFields


class TextBlock(msgspec.Struct, tag="text"):
    """Text of the answer."""

    text: str


class ThinkingBlock(msgspec.Struct, tag="thinking"):
    """Reasoning before the answer."""

    thinking: str
    signature: str


class ToolUseBlock(msgspec.Struct, tag="tool_use"):
    """A call of a tool; `input` is {} where the arguments were cut, and in streams, whose deltas bring it."""

    id: str
    name: str
    input: dict[str, Any]


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock
"""Discriminated by `type`."""

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


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
    content: list[ContentBlock]
    stop_reason: StopReason
    stop_sequence: str | None
    usage: MessageUsage


class InputMessage(msgspec.Struct):
    """A message to /v1/messages."""

    role: Literal["user", "assistant"]
    content: str | list[dict[str, Any]]


class TokenCount(msgspec.Struct):
    """The answer of /v1/messages/count_tokens."""

    input_tokens: int
