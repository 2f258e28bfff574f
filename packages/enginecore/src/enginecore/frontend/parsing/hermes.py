"""Hermes' format, which Qwen 2.5 and 3 have too: `<tool_call>{"name": "f", "arguments": {}}</tool_call>`."""

from enginecore.frontend.parsing.json_calls import JsonCallParser

_OPENING, _CLOSING = "<tool_call>", "</tool_call>"


class HermesParser(JsonCallParser):
    """Calls stand anywhere in the text, each between its tags."""

    special_tokens = (_OPENING, _CLOSING)
    closing = _CLOSING

    def _content(self) -> None:
        self._read_to(_OPENING)
        self._keep()
        self._read(len(_OPENING))
        self._state = self._object

    def _after_call(self) -> None:
        while self._skip_blanks() in "}]":  # one bracket too many
            self._read(1)
        if self._starts_with(_CLOSING):
            self._read(len(_CLOSING))
        self._state = self._content
