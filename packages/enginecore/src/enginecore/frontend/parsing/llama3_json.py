"""Llama 3's JSON format: `{"name": "f", "parameters": {}}`, alone or after `<|python_tag|>`."""

from enginecore.frontend.parsing.json_calls import JsonCallParser

_TAG = "<|python_tag|>"


class Llama3JsonParser(JsonCallParser):
    """Calls stand at the start of the text or after the tag; further ones follow, mostly after a semicolon.

    An object without arguments is text: an answer may be JSON that names something.
    """

    special_tokens = (_TAG,)
    needs_arguments = True

    def __init__(self, prompt: str = "") -> None:
        super().__init__(prompt)
        self._state = self._start

    def _start(self) -> None:
        self._keep()
        if self._skip_blanks() == "{":
            self._state = self._object
            return
        self._unkeep()
        self._state = self._content

    def _content(self) -> None:
        self._read_to(_TAG)
        self._keep()
        self._read(len(_TAG))
        self._state = self._object

    def _after_call(self) -> None:
        following = self._skip_blanks()
        if following == "{":
            self._keep()
            self._state = self._object
        elif following == ";":
            self._read(1)
        else:
            self._state = self._content
