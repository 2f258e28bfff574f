"""Parsers by the names that the options tool_call_parser and reasoning_parser have for them."""

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

from enginecore.config import EngineConfig
from enginecore.errors import ConfigError
from enginecore.frontend.parsing.events import Content, Event, Parser, ReasoningParser, ToolParser
from enginecore.frontend.parsing.hermes import HermesParser
from enginecore.frontend.parsing.llama3_json import Llama3JsonParser
from enginecore.frontend.parsing.mistral import MistralParser
from enginecore.frontend.parsing.pythonic import PythonicParser
from enginecore.frontend.parsing.reasoning import DeepSeekR1Reasoning, MistralReasoning, Qwen3Reasoning
from enginecore.plugins import load

TOOL_PARSERS: Mapping[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "llama4_json": Llama3JsonParser,
    "mistral": MistralParser,
    "pythonic": PythonicParser,
}
REASONING_PARSERS: Mapping[str, type[ReasoningParser]] = {
    "deepseek_r1": DeepSeekR1Reasoning,
    "mistral": MistralReasoning,
    "qwen3": Qwen3Reasoning,
}

AnyParser = TypeVar("AnyParser", bound=Parser)


class AnswerParser:
    """Reads one sample: its reasoning, and what comes after it for content and calls."""

    def __init__(self, reasoning: Parser | None, tools: Parser | None) -> None:
        self._reasoning = reasoning
        self._tools = tools

    def push(self, text: str) -> list[Event]:
        """Take more text; return what is certain now."""
        if self._reasoning is None:
            return self._after_reasoning([Content(text)])
        return self._after_reasoning(self._reasoning.push(text))

    def finish(self) -> list[Event]:
        """Return what was held back; nothing may follow."""
        events = [] if self._reasoning is None else self._after_reasoning(self._reasoning.finish())
        return events if self._tools is None else [*events, *self._tools.finish()]

    def _after_reasoning(self, events: list[Event]) -> list[Event]:
        if self._tools is None:
            return events
        found: list[Event] = []
        for event in events:
            found += self._tools.push(event.text) if isinstance(event, Content) else [event]
        return found


class Parsers(NamedTuple):
    """Parsers of an engine's answers, or of one answer; None for what is not looked for."""

    tools: type[ToolParser] | None = None
    reasoning: type[ReasoningParser] | None = None

    @property
    def special_tokens(self) -> list[str]:
        """Special tokens that the text must show."""
        return [token for parser in self if parser is not None for token in parser.special_tokens]

    def start(self, prompt: str) -> AnswerParser:
        """Return the parser of a sample that continues `prompt`."""
        return AnswerParser(
            None if self.reasoning is None else self.reasoning(prompt),
            None if self.tools is None else self.tools(prompt),
        )


NO_PARSERS = Parsers()


def load_parsers(config: EngineConfig) -> Parsers:
    """Return the parsers that the options name.

    Raises:
        ConfigError: one names a class that cannot be loaded or is no parser.
    """
    return Parsers(
        _load(config.tool_call_parser, TOOL_PARSERS, ToolParser, config.plugin_path),
        _load(config.reasoning_parser, REASONING_PARSERS, ReasoningParser, config.plugin_path),
    )


def _load(
    name: str | None, known: Mapping[str, type[AnyParser]], kind: type[AnyParser], plugin_path: str
) -> type[AnyParser] | None:
    if name is None or name in known:
        return None if name is None else known[name]
    found = load(name, plugin_path)
    if not isinstance(found, type) or not issubclass(found, kind):
        raise ConfigError(
            f"{name} is no parser: name a class that inherits from {kind.__module__}.{kind.__name__}"
        )
    try:
        found("").finish()
    except Exception as error:  # whatever somebody else's class raises
        said = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{name}: reading an empty answer after an empty prompt failed: {said}") from error
    return found
