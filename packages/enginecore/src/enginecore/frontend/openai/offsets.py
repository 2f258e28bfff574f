"""Places of tokens in a text, in characters."""

import codecs
from dataclasses import replace
from typing import TYPE_CHECKING

from enginecore.outputs import CompletionOutput, Logprob

if TYPE_CHECKING:
    from enginecore.frontend.openai.answers import Vocabulary


class TextOffsets:
    """Places of a choice's tokens in its text, in characters.

    A token that goes on with a character has that character's place, and one that is not shown the next's.
    """

    def __init__(self, vocabulary: "Vocabulary", skip_special_tokens: bool = True, start: int = 0) -> None:
        """`start` is the place of the first token: behind a prompt that the text begins with."""
        self._vocabulary = vocabulary
        self._hidden = vocabulary.special_ids if skip_special_tokens else ()
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self.end = start
        """Whole characters so far: the place of the next token."""

    def place(self, token: int) -> int:
        """Return the place of the next token."""
        start = self.end
        if token not in self._hidden:
            self.end += len(self._decode(self._vocabulary.token_bytes(token)))
        return start


class PlacedTokens:
    """Holds the tokens of a streamed choice back until their places in its text are certain.

    A stop string cuts off text that no chunk has shown, and all tokens that begin in that text then stand at
    its end. So a token is certain once it begins no later than where the text that was sent ends.
    """

    def __init__(self, offsets: TextOffsets) -> None:
        """`offsets` is its own: that of the choice's logprobs has not seen what is held."""
        self._offsets = offsets
        self._ids: list[int] = []
        self._rows: list[dict[int, Logprob]] = []

    def certain(self, sample: CompletionOutput, length: int) -> CompletionOutput:
        """Return `sample`, a delta, with the tokens that are certain in the place of its own.

        `length` is that of the choice's text up to and with the delta. At a choice's end all are certain.
        """
        self._ids += sample.token_ids
        self._rows += sample.logprobs or []
        count = 0
        while count < len(self._ids) and (sample.finish_reason is not None or self._offsets.end <= length):
            self._offsets.place(self._ids[count])
            count += 1
        ids, self._ids = self._ids[:count], self._ids[count:]
        rows, self._rows = self._rows[:count], self._rows[count:]
        return replace(sample, token_ids=ids, logprobs=rows)
