"""Answers in the format of Anthropic's Messages API, whole and as events.

Reference: https://docs.anthropic.com/en/api/messages-streaming
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from enginecore import CompletionOutput, Prompt, RequestOutput
from enginecore.frontend.openai import ChatBody, Deltas, Head, Parsers
from octavo_serve.chunks import line_safe
from octavo_serve.errors import ApiError
from octavo_serve.formats.blocks import Block, Blocks, Change, Closed, Grew, Opened

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}
_ABORTED = "the server is shutting down: the answer is not complete"
_encode = msgspec.json.Encoder().encode


def message(head: Head, body: ChatBody, output: RequestOutput, parsers: Parsers) -> dict[str, Any]:
    """Return the whole answer."""
    sample = output.outputs[0]
    deltas, blocks = Deltas(body, parsers, output.prompt or ""), Blocks()
    blocks.push(deltas.push(sample.text))
    blocks.push(deltas.finish())
    usage = _usage(len(output.prompt_token_ids), len(sample.token_ids))
    ending = _ending(sample, deltas, blocks)
    return {
        **_heading(head),
        "content": [_content(block) for block in blocks.blocks],
        **ending,
        "usage": usage,
    }


class MessageEvents:
    """Encodes the outputs of a request, which come with DELTA, as events of a stream."""

    closing = b""

    def __init__(self, head: Head, body: ChatBody, prompt: Prompt, parsers: Parsers) -> None:
        self._head = head
        self._prompt_tokens = len(prompt.token_ids)
        self._output_tokens = 0
        self._deltas = Deltas(body, parsers, prompt.text or "")
        self._blocks = Blocks()
        self._started = False
        self._ended = False

    def encode(self, prompt: int, output: RequestOutput) -> list[bytes]:
        """Return the events for an output."""
        events = self._start()
        for sample in output.outputs:
            self._output_tokens += len(sample.token_ids)
            events += self._told(self._blocks.push(self._deltas.push(sample.text)))
            if sample.finish_reason is not None:
                events += self._finish(sample)
        return events

    def end(self) -> list[bytes]:
        """Return what follows the last output."""
        return [_event({"type": "message_stop"})] if self._ended else []

    def abort(self) -> list[bytes]:
        """Return the error that ends an answer which the server gives up: no stop reason says so."""
        return [] if self._ended else [self.error(ApiError(503, _ABORTED))]

    def usage(self) -> dict[str, Any]:
        """Return the usage of what has been encoded."""
        return _usage(self._prompt_tokens, self._output_tokens)

    def error(self, error: ApiError) -> bytes:
        """Return the event that ends a stream which has begun."""
        return b"event: error\ndata: " + line_safe(error.anthropic_body()) + b"\n\n"

    def _start(self) -> list[bytes]:
        if self._started:
            return []
        self._started = True
        empty = {"content": [], "stop_reason": None, "stop_sequence": None}
        usage = _usage(self._prompt_tokens, 0)
        return [
            _event({"type": "message_start", "message": {**_heading(self._head), **empty, "usage": usage}})
        ]

    def _finish(self, sample: CompletionOutput) -> list[bytes]:
        if self._ended:
            return []
        self._ended = True
        events = self._told([*self._blocks.push(self._deltas.finish()), *self._blocks.finish()])
        ending = _ending(sample, self._deltas, self._blocks)
        usage = _usage(self._prompt_tokens, self._output_tokens)
        return [*events, _event({"type": "message_delta", "delta": ending, "usage": usage})]

    def _told(self, changes: Iterable[Change]) -> list[bytes]:
        return [_event(_change(change)) for change in changes]


def _change(change: Change) -> dict[str, Any]:
    index = change.block.index
    match change:
        case Opened(block):
            empty = Block(block.kind, index, call_id=block.call_id, name=block.name)
            return {"type": "content_block_start", "index": index, "content_block": _content(empty)}
        case Grew(block, piece):
            kind, name = _DELTAS[block.kind]
            return {"type": "content_block_delta", "index": index, "delta": {"type": kind, name: piece}}
        case Closed():
            return {"type": "content_block_stop", "index": index}


def _content(block: Block) -> dict[str, Any]:
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": _input(block.text)}


def _input(arguments: str) -> Any:
    """Return a call's arguments, an object in this API; {} for those that were cut, as in streams."""
    try:
        found = msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def _ending(sample: CompletionOutput, deltas: Deltas, blocks: Blocks) -> dict[str, Any]:
    text = sample.stop_reason if isinstance(sample.stop_reason, str) else None
    reason = deltas.finish_reason(sample.finish_reason) or "stop"
    if reason == "stop" and any(block.kind == "call" for block in blocks.blocks):
        reason = "tool_calls"  # also of a call that was asked for by name
    stopped = reason == "stop" and text is not None
    return {
        "stop_reason": "stop_sequence" if stopped else _STOP_REASONS[reason],
        "stop_sequence": text if stopped else None,
    }


def _usage(prompt_tokens: int, output_tokens: int) -> dict[str, int]:
    # Nothing is cheaper for being cached: prompt tokens are all counted in one place.
    return {
        "input_tokens": prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": output_tokens,
    }


def _heading(head: Head) -> dict[str, Any]:
    return {"id": head.id, "type": "message", "role": "assistant", "model": head.model}


def _event(content: dict[str, Any]) -> bytes:
    return b"event: " + content["type"].encode() + b"\ndata: " + line_safe(_encode(content)) + b"\n\n"
