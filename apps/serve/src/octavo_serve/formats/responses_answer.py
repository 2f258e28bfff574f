"""Answers in the format of OpenAI's Responses API, whole and as events.

Reference: https://platform.openai.com/docs/api-reference/responses-streaming
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from enginecore import CompletionOutput, Prompt, RequestOutput
from enginecore.frontend.openai import ChatBody, Deltas, Head, Parsers, Vocabulary, chat_logprobs
from octavo_serve.chunks import line_safe
from octavo_serve.errors import ApiError
from octavo_serve.formats.blocks import Block, Blocks, Change, Closed, Grew, Opened
from octavo_serve.formats.responses_body import ResponsesBody

_CUT = ("length", "abort")
"""Finish reasons of answers that might have gone on."""
_encode = msgspec.json.Encoder().encode


class Asked(NamedTuple):
    """A request to the Responses API, converted: head, bodies, prompt and parsers."""

    head: Head
    body: ResponsesBody
    chat: ChatBody
    prompt: Prompt
    parsers: Parsers
    vocabulary: Vocabulary


def response(asked: Asked, output: RequestOutput) -> dict[str, Any]:
    """Return the whole answer."""
    sample = output.outputs[0]
    deltas, blocks = Deltas(asked.chat, asked.parsers, asked.prompt.text or ""), Blocks()
    blocks.push(deltas.push(sample.text))
    blocks.push(deltas.finish())
    logprobs = _logprobs(asked, sample)
    items = [_item(asked, block, "completed", logprobs) for block in blocks.blocks]
    usage = _usage(len(output.prompt_token_ids), len(sample.token_ids), output.num_cached_tokens or 0)
    return {**_shell(asked), **_ending(sample.finish_reason, items), "output": items, "usage": usage}


class ResponseEvents:
    """Encodes the outputs of a request, which come with DELTA, as events of a stream."""

    closing = b""

    def __init__(self, asked: Asked, keep: Callable[[Mapping[str, Any]], None]) -> None:
        """`keep` is given the whole response once it is complete."""
        self._asked = asked
        self._keep = keep
        self._deltas = Deltas(asked.chat, asked.parsers, asked.prompt.text or "")
        self._blocks = Blocks()
        self._number = 0
        self._output_tokens = self._cached_tokens = 0
        self._logprobs: list[dict[str, Any]] = []
        self._items: list[dict[str, Any]] = []
        self._item_status = "completed"
        """Of an item that ends."""
        self._started = False
        self._ended = False

    def encode(self, prompt: int, output: RequestOutput) -> list[bytes]:
        """Return the events for an output."""
        events = self._start()
        self._cached_tokens = output.num_cached_tokens or self._cached_tokens
        for sample in output.outputs:
            self._output_tokens += len(sample.token_ids)
            new = _logprobs(self._asked, sample)
            self._logprobs += new
            events += self._told(self._blocks.push(self._deltas.push(sample.text)), new)
            if sample.finish_reason is not None:
                events += self._finish(sample)
        return events

    def end(self) -> list[bytes]:
        """Return what follows the last output: nothing."""
        return []

    def abort(self) -> list[bytes]:
        """Return the last events of an answer that the server gives up."""
        return [*self._start(), *self._finish(CompletionOutput(0, finish_reason="abort"))]

    def usage(self) -> dict[str, Any]:
        """Return the usage of what has been encoded."""
        return _usage(len(self._asked.prompt.token_ids), self._output_tokens, self._cached_tokens)

    def error(self, error: ApiError) -> bytes:
        """Return the events that end a stream which has begun."""
        told = {"code": error.code or "server_error", "message": str(error)}
        failed = {**_shell(self._asked), "status": "failed", "error": told, "output": self._items}
        first = self._event("error", **told, param=error.param)
        return first + self._event("response.failed", response={**failed, "usage": None})

    def _start(self) -> list[bytes]:
        if self._started:
            return []
        self._started = True
        begun = {**_shell(self._asked), "status": "in_progress", "output": [], "usage": None}
        return [self._event(f"response.{name}", response=begun) for name in ("created", "in_progress")]

    def _finish(self, sample: CompletionOutput) -> list[bytes]:
        if self._ended:
            return []
        self._ended = True
        events = self._told(self._blocks.push(self._deltas.finish()), [])
        # Only the item that is still open can have been cut.
        self._item_status = "incomplete" if sample.finish_reason in _CUT else "completed"
        events += self._told(self._blocks.finish(), [])
        ending = _ending(sample.finish_reason, self._items)
        whole = {**_shell(self._asked), **ending, "output": self._items, "usage": self.usage()}
        self._keep(whole)
        return [*events, self._event(f"response.{whole['status']}", response=whole)]

    def _told(self, changes: Iterable[Change], logprobs: list[dict[str, Any]]) -> list[bytes]:
        events: list[bytes] = []
        for change in changes:
            block = change.block
            match change:
                case Opened():
                    events += self._opened(block)
                case Grew(piece=piece):
                    kind, told = _delta(block, piece, logprobs)
                    events.append(self._event(kind, **self._place(block), **told))
                    logprobs = []
                case Closed():
                    events += self._closed(block)
        return events

    def _opened(self, block: Block) -> list[bytes]:
        empty = Block(block.kind, block.index, call_id=block.call_id, name=block.name)
        item = _item(self._asked, empty, "in_progress", [])
        events = [self._event("response.output_item.added", output_index=block.index, item=item)]
        if block.kind == "text":
            part = {"content_index": 0, "part": _text_part("", [])}
            events.append(self._event("response.content_part.added", **self._place(block), **part))
        return events

    def _closed(self, block: Block) -> list[bytes]:
        item, at = _item(self._asked, block, self._item_status, self._logprobs), self._place(block)
        self._items.append(item)
        if block.kind == "text":
            part = item["content"][0]
            told = {"content_index": 0, "text": block.text, "logprobs": part["logprobs"]}
            events = [
                self._event("response.output_text.done", **at, **told),
                self._event("response.content_part.done", **at, content_index=0, part=part),
            ]
        elif block.kind == "call":
            done = {"name": block.name, "arguments": block.text}
            events = [self._event("response.function_call_arguments.done", **at, **done)]
        else:
            events = [self._event("response.reasoning_text.done", **at, content_index=0, text=block.text)]
        return [*events, self._event("response.output_item.done", output_index=block.index, item=item)]

    def _place(self, block: Block) -> dict[str, Any]:
        return {"output_index": block.index, "item_id": _item_id(self._asked, block)}

    def _event(self, kind: str, **fields: Any) -> bytes:
        content = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + line_safe(_encode(content)) + b"\n\n"


def _delta(block: Block, piece: str, logprobs: list[dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    if block.kind == "text":
        return "response.output_text.delta", {"content_index": 0, "delta": piece, "logprobs": logprobs}
    if block.kind == "reasoning":
        return "response.reasoning_text.delta", {"content_index": 0, "delta": piece}
    return "response.function_call_arguments.delta", {"delta": piece}


def _item_id(asked: Asked, block: Block) -> str:
    kind = {"text": "msg", "reasoning": "rs", "call": "fc"}[block.kind]
    return f"{kind}_{asked.head.id.partition('-')[2]}_{block.index}"


def _item(asked: Asked, block: Block, status: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a block as an item of the response's output."""
    own = {"id": _item_id(asked, block)}
    if block.kind == "text":
        content = [] if status == "in_progress" else [_text_part(block.text, logprobs)]
        return {**own, "type": "message", "role": "assistant", "status": status, "content": content}
    if block.kind == "reasoning":
        content = [{"type": "reasoning_text", "text": block.text}] if block.text else []
        return {**own, "type": "reasoning", "summary": [], "content": content}
    called = {"call_id": block.call_id, "name": block.name, "arguments": block.text}
    return {**own, "type": "function_call", "status": status, **called}


def _text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _logprobs(asked: Asked, sample: CompletionOutput) -> list[dict[str, Any]]:
    if not asked.chat.logprobs or not sample.logprobs:
        return []
    top = asked.chat.top_logprobs or 0
    return chat_logprobs(sample.token_ids, sample.logprobs, top, asked.vocabulary)["content"]


def _ending(finish_reason: str | None, items: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the status; an answer that was cut says so, and so does its last item."""
    if finish_reason not in _CUT:
        return {"status": "completed"}
    if items and "status" in items[-1]:
        items[-1]["status"] = "incomplete"
    reason = "max_output_tokens" if finish_reason == "length" else "server_shutdown"
    return {"status": "incomplete", "incomplete_details": {"reason": reason}}


def _usage(prompt_tokens: int, output_tokens: int, cached_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": prompt_tokens,
        "input_tokens_details": {"cached_tokens": cached_tokens},
        "output_tokens": output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt_tokens + output_tokens,
    }


def _shell(asked: Asked) -> dict[str, Any]:
    """Return a response's fields that do not depend on the answer."""
    body = asked.body
    return {
        "id": asked.head.id,
        "object": "response",
        "created_at": asked.head.created,
        "model": asked.head.model,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": (body.reasoning or {}).get("effort"), "summary": None},
        "store": body.store is not False,
        "temperature": body.temperature,
        "text": {"format": (body.text or {}).get("format") or {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_p": body.top_p,
        "truncation": "disabled",
        "user": body.user,
    }
