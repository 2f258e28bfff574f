"""Calls that a request forces: the text is constrained to their JSON, whatever the model's own format is."""

from typing import ClassVar

from enginecore.frontend.parsing.call_text import NoCall
from enginecore.frontend.parsing.events import Arguments, CallEnd, CallStart, Event, ToolParser
from enginecore.frontend.parsing.json_calls import JsonCallParser
from enginecore.frontend.parsing.json_span import JsonSpan


class RequiredCallsParser(JsonCallParser):
    """A list of at least one call: `[{"name": "f", "parameters": {}}]`."""

    def __init__(self, prompt: str = "") -> None:
        super().__init__(prompt)
        self._state = self._start

    def _start(self) -> None:
        self._keep()
        if self._skip_blanks() != "[":
            raise NoCall
        self._read(1)
        self._state = self._object

    def _content(self) -> None:
        self._peek()
        self._show(self._read(len(self._unread)))

    def _cut(self) -> None:
        """Drop what may still have become a call: the text was to be calls and nothing else."""
        if self._in_call or self._name is not None or self._state == self._content:
            super()._cut()

    def _after_call(self) -> None:
        if self._skip_blanks() == ",":
            self._keep()
            self._read(1)
            self._state = self._object
        else:
            if self._peek() == "]":
                self._read(1)
            self._state = self._content


class NamedCallParser(ToolParser):
    """The arguments of the one tool that was asked for, and nothing else."""

    name: ClassVar[str]

    def __init__(self, prompt: str = "") -> None:
        super().__init__(prompt)
        self._span = JsonSpan()
        self._begun = False
        self._may_begin = False
        """Whether there was text."""
        self._is_other = False

    def push(self, text: str) -> list[Event]:
        if not self._begun:
            self._may_begin |= bool(text)
            text = text.lstrip()
            self._is_other |= text[:1] not in ("", "{")
        if not text or self._span.done or self._is_other:
            return []
        events: list[Event] = [] if self._begun else [CallStart(self.name)]
        self._begun = True
        events.append(Arguments(text[: self._span.scan(text)]))
        return [*events, CallEnd()] if self._span.done else events

    def finish(self) -> list[Event]:
        """Return a call that was cut before its arguments; none if that was in the reasoning before it."""
        begins = self._may_begin and not self._begun and not self._is_other
        return [CallStart(self.name)] if begins else []


def forced_parser(name: str | None, own: type[ToolParser]) -> type[ToolParser]:
    """Return the parser of a call of the tool `name`, or of calls of any if None.

    Call ids are those of `own`, the parser of the model's own format.
    """
    kind = RequiredCallsParser if name is None else NamedCallParser
    return type(kind.__name__, (kind,), {"name": name, "new_call_id": staticmethod(own.new_call_id)})
