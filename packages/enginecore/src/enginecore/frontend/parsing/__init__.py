"""Parsers of reasoning and of tool calls: text in pieces of any size in, events out. No torch.

A parser of your own inherits from `ToolParser` or `ReasoningParser`, and options name it as module:Class.
"""

from enginecore.frontend.parsing.events import (
    Arguments,
    CallEnd,
    CallStart,
    Content,
    Event,
    Parser,
    Reasoning,
    ReasoningParser,
    Thinking,
    ToolParser,
)
from enginecore.frontend.parsing.forced import forced_parser
from enginecore.frontend.parsing.registry import (
    NO_PARSERS,
    REASONING_PARSERS,
    TOOL_PARSERS,
    AnswerParser,
    Parsers,
    load_parsers,
)

__all__ = [
    "NO_PARSERS",
    "REASONING_PARSERS",
    "TOOL_PARSERS",
    "AnswerParser",
    "Arguments",
    "CallEnd",
    "CallStart",
    "Content",
    "Event",
    "Parser",
    "Parsers",
    "Reasoning",
    "ReasoningParser",
    "Thinking",
    "ToolParser",
    "forced_parser",
    "load_parsers",
]
