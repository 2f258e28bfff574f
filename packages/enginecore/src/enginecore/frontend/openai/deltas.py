"""A sample's text as deltas of a chat message, and as the message that they make together."""

from collections.abc import Iterable
from typing import Any

from enginecore.errors import RequestError
from enginecore.frontend.openai.bodies import ChatBody
from enginecore.frontend.openai.tools import NO_PARSER
from enginecore.frontend.parsing import (
    Arguments,
    CallStart,
    Content,
    Event,
    Parsers,
    Reasoning,
    Thinking,
    ToolParser,
    forced_parser,
)

Delta = dict[str, Any]
"""Content, reasoning, or a piece of one tool call, as in a chunk of a stream."""

_REASONING = ("reasoning_content", "reasoning")
"""Both names that clients know: vLLM's first one, and the one that took its place."""

_SWITCHES = ("enable_thinking", "thinking")
"""Variables by which models' templates turn thinking off: Qwen 3's, and DeepSeek V3.1's."""


def parsers_of(body: ChatBody, parsers: Parsers) -> Parsers:
    """Return those of an engine's parsers that the answer to `body` needs.

    Raises:
        RequestError: it may call tools, and there is no parser of calls.
    """
    if not body.may_call:
        return parsers._replace(tools=None)
    if body.forces_call:
        return parsers._replace(tools=forced_parser(body.forced_tool, parsers.tools or ToolParser))
    if parsers.tools is None:
        raise RequestError(NO_PARSER, "tools" if body.tool_choice is None else "tool_choice")
    return parsers


def thinking_of(body: ChatBody, parsers: Parsers, prompt: str) -> Thinking | None:
    """Return the reasoning after which the answer to `prompt` has the form that `body` asks for.

    Where the prompt has opened it, it comes in any case. Where it has not, the model may begin it, unless the
    body turns thinking off, or has the model go on with what it has said.
    """
    thinking = None if parsers.reasoning is None else parsers.reasoning(prompt).thinking()
    if thinking is None or thinking.begun:
        return thinking
    variables = body.chat_template_kwargs or {}
    is_off = any(variables.get(name) is False for name in _SWITCHES)
    return None if is_off or body.continue_final_message else thinking


class Deltas:
    """Makes deltas of one sample's text as it comes."""

    def __init__(self, body: ChatBody, parsers: Parsers, prompt: str) -> None:
        """`parsers` as `parsers_of` returns them; `prompt` is the text that the sample continues."""
        if body.forces_call and thinking_of(body, parsers, prompt) is None:
            parsers = parsers._replace(reasoning=None)  # the text is nothing but calls
        self._parser = parsers.start(prompt)
        self._new_id = (parsers.tools or ToolParser).new_call_id
        self._parallel = body.parallel_tool_calls is not False
        self._with_reasoning = body.include_reasoning is not False and parsers.reasoning is not None
        self._is_named = body.forced_tool is not None
        self._num_calls = 0

    def push(self, text: str) -> list[Delta]:
        """Take more text; return the deltas that are certain now."""
        return self._deltas(self._parser.push(text))

    def finish(self) -> list[Delta]:
        """Return the deltas of what was held back; nothing may follow."""
        return self._deltas(self._parser.finish())

    def finish_reason(self, reason: str | None) -> str | None:
        """Return how the choice ended, once all is told: one that calls tools and was not cut, for these.

        Where the request has named the tool it is "stop", as in OpenAI's API.
        """
        return "tool_calls" if self._num_calls and reason == "stop" and not self._is_named else reason

    def message(self, text: str) -> dict[str, Any]:
        """Return the message of a whole text: what its deltas make together."""
        said: dict[str, str] = {}
        calls: list[dict[str, Any]] = []
        for delta in [*self.push(text), *self.finish()]:
            for piece in delta.pop("tool_calls", ()):
                index = piece.pop("index")
                if index == len(calls):
                    calls.append(piece)
                else:
                    calls[index]["function"]["arguments"] += piece["function"]["arguments"]
            for name, more in delta.items():
                said[name] = said.get(name, "") + more
        silent = None if calls or said else ""  # null only where there is something else
        message = {"role": "assistant", "content": said.get("content", silent), "refusal": None}
        if self._with_reasoning:
            message |= dict.fromkeys(_REASONING, said.get(_REASONING[0]))
        return {**message, "tool_calls": calls} if calls else message

    def _deltas(self, events: Iterable[Event]) -> list[Delta]:
        return [delta for event in events for delta in self._delta(event)]

    def _delta(self, event: Event) -> list[Delta]:
        match event:
            case Content(text):
                return [{"content": text}]
            case Reasoning(text) if self._with_reasoning:
                return [dict.fromkeys(_REASONING, text)]
            case CallStart(name):
                self._num_calls += 1
                function = {"name": name, "arguments": ""}
                return self._call({"id": self._new_id(), "type": "function", "function": function})
            case Arguments(text):
                return self._call({"function": {"arguments": text}})
        return []

    def _call(self, piece: dict[str, Any]) -> list[Delta]:
        """Return a piece of the call that began last; none where only the first call was asked for."""
        if self._num_calls > 1 and not self._parallel:
            return []
        return [{"tool_calls": [{"index": self._num_calls - 1, **piece}]}]
