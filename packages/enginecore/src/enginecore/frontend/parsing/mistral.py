"""Mistral's formats: `[TOOL_CALLS] [{"name": "f", "arguments": {}}]`, later `[TOOL_CALLS]f[ARGS]{}`."""

import re
import secrets
import string

from enginecore.frontend.parsing.call_text import NoCall
from enginecore.frontend.parsing.json_calls import JsonCallParser, speakable
from enginecore.frontend.parsing.json_span import JsonSpan

_TAG, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NAME = re.compile(r"[^\[{]+(?=[\[{])")


class MistralParser(JsonCallParser):
    """Calls follow the tag: a list of them, or one of which each has a tag of its own.

    In the newer format `[ARGS]` may be missing, and an id may stand before it; the id is passed over.
    """

    special_tokens = (_TAG, _ID, _ARGUMENTS)

    def __init__(self, prompt: str = "") -> None:
        super().__init__(prompt)
        self._in_list = False

    @staticmethod
    def new_call_id() -> str:
        """Return nine letters and digits: Mistral's templates refuse other ids."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))

    def _content(self) -> None:
        self._read_to(_TAG)
        self._keep()
        self._read(len(_TAG))
        self._state = self._after_tag

    def _after_tag(self) -> None:
        self._in_list = self._skip_blanks() == "["
        if self._in_list:
            self._read(1)
            self._state = self._object
        else:
            self._state = self._bare_name

    def _bare_name(self) -> None:
        self._name = speakable(self._token(_name_end).strip())
        self._state = self._before_arguments

    def _before_arguments(self) -> None:
        if self._skip_blanks() == "{":
            self._span = JsonSpan()
            self._begin_call(self._name or "")
            self._state = self._streamed
        elif self._starts_with(_ARGUMENTS):
            self._read(len(_ARGUMENTS))
        elif self._starts_with(_ID):
            self._read(len(_ID))
            self._token(_name_end)
        else:
            raise NoCall

    def _after_value(self) -> None:
        if self._in_list:
            super()._after_value()
        else:
            self._end_call()
            self._state = self._content

    def _after_call(self) -> None:
        following = self._skip_blanks()
        if following == ",":
            self._keep()
            self._read(1)
            self._state = self._object
        else:
            if following == "]":
                self._read(1)
            self._state = self._content


def _name_end(text: str) -> int:
    found = _NAME.match(text)
    if found is None and text[:1] in ("[", "{"):
        raise NoCall
    return -1 if found is None else found.end()
