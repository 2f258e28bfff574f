"""Events of a streamed response of OpenAI's Responses API.

Reference: https://platform.openai.com/docs/api-reference/responses-streaming
"""

from typing import Literal

import msgspec

from octavo_serve.schemas.openai import TokenLogprob
from octavo_serve.schemas.responses import (
    BegunResponse,
    FailedResponse,
    OutputItem,
    OutputText,
    Response,
)


class _Event(msgspec.Struct):
    sequence_number: int
    """Counts the events of a stream from 0."""


class ResponseCreated(_Event, tag="response.created"):
    """The first event."""

    response: BegunResponse


class ResponseInProgress(_Event, tag="response.in_progress"):
    """The second event: the request runs."""

    response: BegunResponse


class ResponseCompleted(_Event, tag="response.completed"):
    """The last event of a response that ended by itself."""

    response: Response


class ResponseIncomplete(_Event, tag="response.incomplete"):
    """The last event of a response that was cut; `incomplete_details` says why."""

    response: Response


class ResponseFailed(_Event, tag="response.failed"):
    """The last event of a response that the server gave up, after `error`."""

    response: FailedResponse


class ResponseErrorEvent(_Event, tag="error"):
    """Why the response fails."""

    code: str
    message: str
    param: str | None


class OutputItemAdded(_Event, tag="response.output_item.added"):
    """An item begins, still empty."""

    output_index: int
    item: OutputItem


class OutputItemDone(_Event, tag="response.output_item.done"):
    """An item is complete, or cut."""

    output_index: int
    item: OutputItem


class _ItemEvent(_Event):
    output_index: int
    item_id: str


class ContentPartAdded(_ItemEvent, tag="response.content_part.added"):
    """The text of a message begins."""

    content_index: Literal[0]
    part: OutputText


class ContentPartDone(_ItemEvent, tag="response.content_part.done"):
    """The text of a message has ended."""

    content_index: Literal[0]
    part: OutputText


class OutputTextDelta(_ItemEvent, tag="response.output_text.delta"):
    """The next piece of a message's text."""

    content_index: Literal[0]
    delta: str
    logprobs: list[TokenLogprob]


class OutputTextDone(_ItemEvent, tag="response.output_text.done"):
    """The whole text of a message."""

    content_index: Literal[0]
    text: str
    logprobs: list[TokenLogprob]


class ReasoningTextDelta(_ItemEvent, tag="response.reasoning_text.delta"):
    """The next piece of the reasoning."""

    content_index: Literal[0]
    delta: str


class ReasoningTextDone(_ItemEvent, tag="response.reasoning_text.done"):
    """The whole reasoning."""

    content_index: Literal[0]
    text: str


class CallArgumentsDelta(_ItemEvent, tag="response.function_call_arguments.delta"):
    """The next piece of a call's arguments."""

    delta: str


class CallArgumentsDone(_ItemEvent, tag="response.function_call_arguments.done"):
    """The whole arguments of a call."""

    name: str
    arguments: str


RESPONSE_EVENTS = (
    ResponseCreated,
    ResponseInProgress,
    OutputItemAdded,
    ContentPartAdded,
    OutputTextDelta,
    OutputTextDone,
    ContentPartDone,
    ReasoningTextDelta,
    ReasoningTextDone,
    CallArgumentsDelta,
    CallArgumentsDone,
    OutputItemDone,
    ResponseCompleted,
    ResponseIncomplete,
    ResponseErrorEvent,
    ResponseFailed,
)
