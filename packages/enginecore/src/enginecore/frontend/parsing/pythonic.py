"""Calls written as a list of Python calls: `[f(a=1, b="x"), g()]`, as Llama 3.2 and ToolACE write them."""

import ast
import json
import re
import warnings
from typing import Any

from enginecore.frontend.parsing.call_text import CallTextParser, NeedMore, NoCall, overlap

_NAME = re.compile(r"[A-Za-z_][\w.]*")
_OUTSIDE = re.compile(r"""["'(){}\[\],]""")
_INSIDE = {quote: re.compile(rf"\\|{quote}") for quote in ('"', "'", '"""', "'''")}
_WORDS = {"null": None, "true": True, "false": False}


class PythonicParser(CallTextParser):
    """The list is the start of the text. Each call is told once it is complete, for only then is it certain.

    Arguments are keywords with literal values; a call with others is content, as is all that follows it.
    """

    def __init__(self, prompt: str = "") -> None:
        super().__init__(prompt)
        self._state = self._start
        self._span = PythonSpan()
        self._name = ""
        self._written: list[str] = []

    def _start(self) -> None:
        self._keep()
        if self._skip_blanks() == "[":
            self._read(1)
            self._state = self._before_call
            return
        self._unkeep()
        self._state = self._content

    def _content(self) -> None:
        self._show(self._unread)
        self._unread = ""
        raise NeedMore

    def _before_call(self) -> None:
        if self._skip_blanks() == "]" and self._has_calls:
            self._read(1)
            self._state = self._content
            return
        self._name = self._token(_name_end)
        self._span, self._written = PythonSpan(), []
        self._state = self._call

    def _call(self) -> None:
        self._peek()
        self._written.append(self._read(self._span.scan(self._unread)))
        if not self._span.done:
            raise NeedMore
        arguments = _as_json("".join(self._written))
        self._begin_call(self._name)
        self._argue(arguments)
        self._end_call()
        self._state = self._after_call

    def _after_call(self) -> None:
        following = self._skip_blanks()
        if following == ",":
            self._keep()
            self._read(1)
            self._state = self._before_call
            return
        if following == "]":
            self._read(1)
        self._state = self._content

    def _broken_call(self) -> None:
        raise AssertionError("a call is told once it is complete")

    def _cut(self) -> None:
        """Of a call that was cut, tell the name and the arguments before the last comma."""
        if self._state == self._call:
            written = "".join(self._written)[: self._span.last_comma]
            try:
                arguments = _as_json(written + ")") if written else ""
            except NoCall:
                pass
            else:
                self._begin_call(self._name)
                self._argue(arguments.removesuffix("}"))
                return
        if self._state != self._after_call:
            super()._cut()


class PythonSpan:
    """Finds the bracket that closes a call's arguments; feed it from the opening one on."""

    __slots__ = ("_depth", "_escaped", "_length", "_quote", "done", "last_comma")

    def __init__(self) -> None:
        self._depth = 0
        self._quote = ""
        self._escaped = False
        self._length = 0
        self.done = False
        self.last_comma = 0
        """Characters before the last comma between arguments; 0 without one."""

    def scan(self, text: str) -> int:
        """Return how many characters of `text` were read; the others are to be given again with more."""
        place = 0
        while place < len(text) and not self.done:
            step = self._string(text, place) if self._quote else self._code(text, place)
            if step == place:
                break
            place = step
        self._length += place
        return place

    def _code(self, text: str, start: int) -> int:
        found = _OUTSIDE.search(text, start)
        if found is None:
            return len(text)
        at, place = found.span()
        character = found[0]
        if character in "\"'":
            return self._open_string(text, at, character)
        if character == ",":
            if self._depth == 1:
                self.last_comma = self._length + at
        elif character in "([{":
            self._depth += 1
        else:
            self._depth -= 1
            self.done = self._depth == 0
        return place

    def _open_string(self, text: str, at: int, quote: str) -> int:
        following = text[at : at + 3]
        if following == quote * 3:
            self._quote = following
        elif following == quote * len(following):
            if len(text) < at + 3:
                return at  # it may be one quotation mark, two or three
        elif following.startswith(quote * 2):
            return at + 2
        else:
            self._quote = quote
        return at + len(self._quote)

    def _string(self, text: str, start: int) -> int:
        if self._escaped:
            self._escaped = False
            return start + 1
        found = _INSIDE[self._quote].search(text, start)
        if found is None:
            return len(text) - overlap(text[start:], self._quote)
        if found[0] == "\\":
            self._escaped = True
        else:
            self._quote = ""
        return found.end()


def _name_end(text: str) -> int:
    found = _NAME.match(text)
    if found is None or (found.end() < len(text) and text[found.end()] != "("):
        raise NoCall
    return found.end() if found.end() < len(text) else -1


def _as_json(arguments: str) -> str:
    """Return the arguments of a call, `(a=1, …)`, as a JSON object.

    Raises:
        NoCall: they are no Python, not all keywords, or no literals.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not know
            call = ast.parse(f"f{arguments}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise NoCall
        values = {_keyword(entry): _literal(entry.value) for entry in call.keywords}
        if len(values) < len(call.keywords):
            raise NoCall
        text = json.dumps(values, ensure_ascii=False, allow_nan=False)
        if any("\ud800" <= character <= "\udfff" for character in text):
            text = json.dumps(values)
        return text
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise NoCall from None


def _keyword(entry: ast.keyword) -> str:
    if entry.arg is None:
        raise NoCall
    return entry.arg


def _literal(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.Name(id=word) if word in _WORDS:
            return _WORDS[word]
        case ast.List(elts=entries) | ast.Tuple(elts=entries):
            return [_literal(entry) for entry in entries]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _literal(value) for key, value in zip(keys, values)}
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
    raise NoCall


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise NoCall
