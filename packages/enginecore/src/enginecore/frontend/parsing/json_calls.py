"""Calls written as JSON objects: `{"name": "f", "arguments": {"a": 1}}`."""

import json
import re
from typing import Any, ClassVar

from enginecore.frontend.parsing.call_text import CallTextParser, NeedMore, NoCall
from enginecore.frontend.parsing.json_span import JsonSpan

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_ATOM = re.compile(r"[^\s,{}\[\]\":]+(?=[\s,}\]])")
_ARGUMENTS = ("arguments", "parameters")


class JsonCallParser(CallTextParser):
    """Reads such an object: its keys in any order, others than name and arguments passed over.

    A call begins once its name and the first character of its arguments, an object, are known. From then on
    the arguments are told as the model writes them, be they valid or not. Without a name, or with arguments
    that are neither an object nor the text of one, there is no call.
    """

    closing: ClassVar[str | None] = None
    """The tag that ends a call, even one whose brackets do not match."""
    needs_arguments: ClassVar[bool] = False
    """Whether an object without arguments is no call."""

    def __init__(self, prompt: str = "") -> None:
        super().__init__(prompt)
        self._span = JsonSpan()
        self._key = ""
        self._name: str | None = None
        self._arguments: str | None = None
        self._collected: list[str] = []

    def _after_call(self) -> None:
        """Go on after an object that was a call."""
        raise NotImplementedError

    def _keep(self) -> None:
        super()._keep()
        self._name = self._arguments = None

    def _cut(self) -> None:
        """A call that has a name is one: its arguments are what there is of them."""
        if self._in_call:
            if self._state == self._streamed:
                self._argue(self._unread)
        elif self._name is not None and self._keeps and not self.needs_arguments:
            self._begin_call(self._name)
        elif self._state != self._after_call:
            super()._cut()

    def _object(self) -> None:
        if self._skip_blanks() != "{":
            raise NoCall
        self._read(1)
        self._state = self._before_key

    def _before_key(self) -> None:
        if self._skip_blanks() == "}":
            self._end_object()
            return
        self._key = self._string()
        self._state = self._before_value

    def _before_value(self) -> None:
        if self._skip_blanks() != ":":
            raise NoCall
        self._read(1)
        self._state = self._value

    def _value(self) -> None:
        first = self._skip_blanks()
        if not self._in_call and self._key == "name":
            self._name = speakable(self._string())
            self._state = self._after_value
            self._begin_if_known()
        elif not self._in_call and self._key in _ARGUMENTS:
            self._begin_arguments(first)
        elif first in '{["':
            self._span = JsonSpan(self.closing)
            self._state = self._passed_over
        else:
            self._token(_atom_end)
            self._state = self._after_value

    def _begin_arguments(self, first: str) -> None:
        self._span = JsonSpan(self.closing)
        if first == "{" and self._name is not None:
            self._begin_call(self._name)
            self._state = self._streamed
        elif first in '{"':
            self._collected = []
            self._state = self._collecting
        elif self._token(_atom_end) == "null":
            self._arguments = "{}"
            self._state = self._after_value
            self._begin_if_known()
        else:
            raise NoCall

    def _streamed(self) -> None:
        self._peek()
        self._argue(self._read(self._span.scan(self._unread)))
        self._end_span()

    def _collecting(self) -> None:
        """Keep arguments that come before the name, or as the text of an object."""
        self._peek()
        self._collected.append(self._read(self._span.scan(self._unread)))
        self._end_span()
        text = "".join(self._collected)
        self._arguments = text if text.startswith("{") else _object_text(text)
        self._begin_if_known()

    def _passed_over(self) -> None:
        self._peek()
        self._read(self._span.scan(self._unread))
        self._end_span()

    def _end_span(self) -> None:
        if self._span.closed:
            raise NoCall
        if not self._span.done:
            raise NeedMore
        self._state = self._after_value

    def _after_value(self) -> None:
        following = self._skip_blanks()
        if following == ",":
            self._read(1)
            self._state = self._before_key
        elif following == "}":
            self._end_object()
        else:
            raise NoCall

    def _begin_if_known(self) -> None:
        if self._name is not None and self._arguments is not None:
            self._begin_call(self._name)
            self._argue(self._arguments)

    def _end_object(self) -> None:
        if not self._in_call:
            if self._name is None or self.needs_arguments:
                raise NoCall
            self._arguments = "{}"
            self._begin_if_known()
        self._read(1)
        self._end_call()
        self._state = self._after_call

    def _broken_call(self) -> None:
        self._end_call()
        self._state = self._after_call

    def _string(self) -> str:
        """Take a JSON string; return what it says."""
        if self._peek() != '"':
            raise NoCall
        return _decoded(self._token(_string_end))


def _string_end(text: str) -> int:
    found = _STRING.match(text)
    return -1 if found is None else found.end()


def _atom_end(text: str) -> int:
    """Return the end of a number, true, false or null, once what follows is there."""
    found = _ATOM.match(text)
    if found is None and text[:1] in ",{}[]:":
        raise NoCall
    return -1 if found is None else found.end()


def _decoded(text: str) -> Any:
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        raise NoCall from None


def speakable(name: str) -> str:
    """Return a tool's name; raise NoCall where it is empty, or no text."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raise NoCall from None
    if not name:
        raise NoCall
    return name


def _object_text(text: str) -> str:
    """Return the JSON object that a JSON string holds; raise NoCall where it holds none."""
    said = _decoded(text)
    if not isinstance(_decoded(said), dict):
        raise NoCall
    return speakable(said)
