"""Events of a streamed message of Anthropic's Messages API.

Reference: https://docs.anthropic.com/en/api/messages-streaming
"""

from typing import Annotated, Literal

import msgspec

from octavo_serve.schemas.anthropic import AnthropicErrorFields, ContentBlock, MessageUsage, StopReason


class BegunMessage(msgspec.Struct):
    """A message of which nothing is generated yet."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: Annotated[list[ContentBlock], msgspec.Meta(max_length=0)]
    stop_reason: None
    stop_sequence: None
    usage: MessageUsage


class MessageStart(msgspec.Struct, tag="message_start"):
    """The first event."""

    message: BegunMessage


class ContentBlockStart(msgspec.Struct, tag="content_block_start"):
    """A block begins, still empty."""

    index: int
    content_block: ContentBlock


class TextDelta(msgspec.Struct, tag="text_delta"):
    """The next piece of a text."""

    text: str


class ThinkingDelta(msgspec.Struct, tag="thinking_delta"):
    """The next piece of the reasoning."""

    thinking: str


class InputJsonDelta(msgspec.Struct, tag="input_json_delta"):
    """The next piece of the JSON text of a call's input."""

    partial_json: str


class ContentBlockDelta(msgspec.Struct, tag="content_block_delta"):
    """The next piece of the open block."""

    index: int
    delta: TextDelta | ThinkingDelta | InputJsonDelta


class ContentBlockStop(msgspec.Struct, tag="content_block_stop"):
    """The open block has ended."""

    index: int


class MessageEnding(msgspec.Struct):
    """Why a message has ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, tag="message_delta"):
    """The end of a message, with its tokens."""

    delta: MessageEnding
    usage: MessageUsage


class MessageStop(msgspec.Struct, tag="message_stop"):
    """The last event."""


class MessageErrorEvent(msgspec.Struct, tag="error"):
    """The last event of a message that the server gave up."""

    error: AnthropicErrorFields


MESSAGE_EVENTS = (
    MessageStart,
    ContentBlockStart,
    ContentBlockDelta,
    ContentBlockStop,
    MessageDelta,
    MessageStop,
    MessageErrorEvent,
)
