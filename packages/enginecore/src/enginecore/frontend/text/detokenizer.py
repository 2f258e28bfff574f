"""Token ids to text as they arrive, equal at the end to decoding all of them at once.

`tokenizers.DecodeStream` is not used: it raises once bytes that it has shown turn out to belong to an invalid
run, holds invalid bytes back for ever, and has no way to ask for what it still holds.
"""

import codecs
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol, cast

from enginecore.frontend.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"


class _Stream(Protocol):
    def push(self, ids: Sequence[int]) -> str: ...

    def flush(self) -> str: ...


class IncrementalDetokenizer:
    """Turns one sequence's tokens into text, piece by piece.

    All that `push` and `flush` return, joined, is `tokenizer.decode` of all ids. Text that later tokens may
    still change is held back: the bytes of an unfinished character and, in vocabularies with byte fallback, a
    whole run of byte tokens, since one bad byte turns all of its run into U+FFFD.

    Args:
        tokenizer: The vocabulary.
        skip_special_tokens: Show nothing for special tokens.
        prompt: Ids of the text that this one continues. They are not shown; only, where there is such text,
            the first word keeps the space before it that decoding would strip.
        shown: Special tokens that are shown all the same, as the vocabulary spells them.
    """

    __slots__ = ("flush", "push")

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        prompt: Sequence[int] = (),
        shown: Collection[str] = (),
    ) -> None:
        stream: _Stream
        hidden = tokenizer.hidden_ids(skip_special_tokens, shown)
        if tokenizer.decoding.kind == "bytes":
            stream = _ByteStream(tokenizer, hidden)
        elif tokenizer.decoding.kind == "byte_fallback":
            stream = _ByteFallbackStream(tokenizer, hidden, prompt)
        else:
            stream = _WindowStream(tokenizer, hidden, prompt)
        self.push = stream.push
        """push(ids) -> str: the text that these tokens complete."""
        self.flush = stream.flush
        """flush() -> str: what is still held, with U+FFFD for what is no character. Nothing may follow."""


class _ByteStream:
    """Byte-level vocabularies: the text is the UTF-8 decoding of the tokens' bytes."""

    __slots__ = ("_held", "_pieces")

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int]) -> None:
        self._pieces = cast("Mapping[int, bytes]", tokenizer.pieces(hidden))
        self._held = b""

    def push(self, ids: Sequence[int]) -> str:
        pieces = self._pieces
        data = self._held + b"".join([pieces[token] for token in ids])
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._held = data[used:]
        return text

    def flush(self) -> str:
        return self._held.decode("utf-8", "replace")


class _ByteFallbackStream:
    """SentencePiece vocabularies: tokens are text, or single bytes that count only as a run."""

    __slots__ = ("_pieces", "_run", "_strip")

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int], prompt: Sequence[int]) -> None:
        self._pieces = tokenizer.pieces(hidden)
        self._run = b""
        continues = any(self._pieces[token] for token in reversed(prompt))
        self._strip = 0 if continues else tokenizer.decoding.strip

    def push(self, ids: Sequence[int]) -> str:
        text = ""
        for token in ids:
            piece = self._pieces[token]
            if isinstance(piece, bytes):
                self._run += piece
                continue
            if self._run:
                text += self._end_run()
            text += piece
        return self._stripped(text) if self._strip and text else text

    def flush(self) -> str:
        return self._stripped(self._end_run())

    def _end_run(self) -> str:
        run, self._run = self._run, b""
        try:
            return run.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)

    def _stripped(self, text: str) -> str:
        """Drop the spaces that open the whole text, `_strip` at most."""
        while self._strip and text.startswith(" "):
            text = text[1:]
            self._strip -= 1
        if text:
            self._strip = 0
        return text


class _WindowStream:
    """Any other decoder: decode the last few tokens with and without the new ones; show the difference."""

    _CONTEXT = 8
    """Tokens kept before the new ones, so that spaces and word ends come out as in the whole."""
    _LONGEST_CHARACTER = 4
    """Tokens, at one byte each, that the end of a text may wait for."""

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int], prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._window = list(prompt[-self._CONTEXT :])
        self._shown = len(self._decode())
        self._waiting = 0

    def push(self, ids: Sequence[int]) -> str:
        self._window += ids
        self._waiting += len(ids)
        text = self._decode()
        if text.endswith(REPLACEMENT) and self._waiting < self._LONGEST_CHARACTER:
            return ""
        return self._show(text)

    def flush(self) -> str:
        return self._show(self._decode())

    def _show(self, text: str) -> str:
        new = text[self._shown :]
        self._window = self._window[-self._CONTEXT :]
        self._shown = len(self._decode())
        self._waiting = 0
        return new

    def _decode(self) -> str:
        shown = [token for token in self._window if token not in self._hidden]
        return self._tokenizer.decode(shown, skip_special_tokens=False)
