"""The end of a JSON value in text that comes in pieces."""

import re

_INSIDE = re.compile(r'["\\]')


class JsonSpan:
    """Finds where an object, array or string ends; feed it from its first character on.

    Only quotes and brackets are looked at: a model's JSON may be wrong, and is then still its own.

    Args:
        closing: A tag that ends the value early where it stands outside strings, as when a bracket was
            forgotten.
    """

    __slots__ = ("_closing", "_depth", "_escaped", "_in_string", "_outside", "closed", "done")

    def __init__(self, closing: str | None = None) -> None:
        self._closing = closing
        self._outside = re.compile(r'["{}\[\]' + re.escape(closing[0] if closing else "") + "]")
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self.done = False
        """The value has ended."""
        self.closed = False
        """The closing tag comes where the last scan ended."""

    def scan(self, text: str) -> int:
        """Return how many characters of `text` belong to the value, or certainly do so far.

        The others, if any, are to be given again with more text.
        """
        place = 1 if self._escaped and text else 0
        self._escaped = self._escaped and not text
        while found := (_INSIDE if self._in_string else self._outside).search(text, place):
            at, place = found.span()
            character = found[0]
            if character == "\\":
                self._escaped = place == len(text)
                place += 1
            elif character == '"':
                self._in_string = not self._in_string
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
            elif self._closing is not None:
                if text.startswith(self._closing, at):
                    self.closed = True
                    return at
                if self._closing.startswith(text[at:]):
                    return at
                continue
            if self._depth <= 0 and not self._in_string:
                self.done = True
                return place
        return len(text)
