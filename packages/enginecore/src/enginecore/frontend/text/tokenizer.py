"""Text to token ids and back, on Hugging Face's `tokenizers`."""

import json
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from enginecore.errors import RequestError

if TYPE_CHECKING:
    import tokenizers

NO_TOKENIZER = "this model has no tokenizer: send token ids"


class Decoding(NamedTuple):
    """Rules by which a vocabulary's tokens join into text."""

    kind: Literal["bytes", "byte_fallback", "other"]
    """bytes: each token stands for bytes (byte-level BPE); byte_fallback: tokens are text, but for 256 that
    are one byte each (SentencePiece); other: whatever `tokenizers` makes of it."""
    replacements: tuple[tuple[str, str], ...] = ()
    """Of "byte_fallback": what is replaced in each token, such as the visible space by a space."""
    strip: int = 0
    """Of "byte_fallback": how many spaces to drop at the start of the whole text, at most."""


_LONG_TEXT = 65536
_NORMALISING = 4


class Tokenizer:
    """A model's vocabulary. Safe to share between threads once made.

    Args:
        backend: What encodes and decodes; its truncation and padding are turned off.
        special_tokens: Tokens with a role, by the role's name: bos_token, eos_token, unk_token, …
        chat_template: The model's own Jinja chat template, or several by name.
    """

    def __init__(
        self,
        backend: "tokenizers.Tokenizer",
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | dict[str, str] | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens: dict[str, str] = dict(special_tokens or {})
        self.chat_template = chat_template
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token for token, entry in added.items() if entry.special)
        self.vocab_size = max(backend.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)
        """One above the highest id; vocabularies have no gaps."""
        self.decoding = _decoding(backend)
        self._pieces: dict[frozenset[int], _Pieces] = {}

    @cached_property
    def longest_token(self) -> int:
        """Most characters of a text that one token can stand for."""
        longest = max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)
        # A normaliser may make a text shorter before it is cut into tokens.
        return longest if self._backend.normalizer is None else _NORMALISING * longest

    @property
    def bos_token_id(self) -> int | None:
        return self._role("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._role("eos_token")

    def _role(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.token_id(token)

    def token_id(self, spelling: str) -> int | None:
        """Return the id of a token as the vocabulary spells it; None for an unknown one."""
        return self._backend.token_to_id(spelling)

    def spelling(self, token_id: int) -> str | None:
        """Return a token as the vocabulary spells it; None for an unknown id."""
        return self._backend.id_to_token(token_id) if token_id >= 0 else None

    def vocabulary(self) -> dict[str, int]:
        """Return every token's id by its spelling."""
        return self._backend.get_vocab(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`; special tokens written in it become their ids.

        Raises:
            RequestError: the text holds half of a surrogate pair, which no encoding can express.
        """
        if len(text) > _LONG_TEXT:
            # The backend lets other threads run only while it encodes a batch.
            return self.encode_batch([text], add_special_tokens)[0]
        _check_encodable(text)
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Return the ids of each text, as `encode` does, on several threads."""
        for text in texts:
            _check_encodable(text)
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`; bytes that are no character become U+FFFD, unknown ids nothing."""
        known = [token for token in ids if 0 <= token < self.vocab_size]
        return self._backend.decode(known, skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """Return one token's text as it stands within a text: with its leading space, and U+FFFD for bytes
        that are no whole character. Special tokens are written out."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that one token adds to a text; none for an unknown id."""
        piece = self.pieces()[token_id]
        return piece.encode() if isinstance(piece, str) else piece

    def hidden_ids(self, skip_special_tokens: bool, shown: Collection[str] = ()) -> frozenset[int]:
        """Return the ids that a text leaves out: none, or all special tokens but those spelled in `shown`."""
        if not skip_special_tokens:
            return frozenset()
        return self.special_ids.difference(self.token_id(spelling) for spelling in shown)

    def pieces(self, hidden: frozenset[int] = frozenset()) -> Mapping[int, bytes | str]:
        """Return what each id adds to a text, looked up on first use.

        Bytes, always so in a "bytes" vocabulary; text, for other tokens than single bytes; b"" for an unknown
        id or one in `hidden`.
        """
        found = self._pieces.get(hidden)
        if found is None:
            found = self._pieces.setdefault(hidden, _Pieces(self._backend, self.decoding, hidden))
        return found


class _Pieces(dict[int, bytes | str]):
    """Id to piece. A plain dict lookup for every token but the first of its kind."""

    def __init__(self, backend: "tokenizers.Tokenizer", decoding: Decoding, hidden: frozenset[int]) -> None:
        super().__init__()
        self._backend = backend
        self._decoding = decoding
        self._hidden = hidden

    def __missing__(self, token: int) -> bytes | str:
        text = None if token in self._hidden or token < 0 else self._backend.id_to_token(token)
        piece = b"" if text is None else self._piece(token, text)
        self[token] = piece
        return piece

    def _piece(self, token: int, text: str) -> bytes | str:
        if self._decoding.kind == "bytes":
            return _byte_level(text)
        if self._decoding.kind == "other":
            return self._backend.decode([token], skip_special_tokens=False)
        for old, new in self._decoding.replacements:
            text = text.replace(old, new)
        return _fallback_byte(text) or text


def _check_encodable(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise RequestError(
            f"the text holds U+{code:04X} at character {error.start}: half a surrogate pair is no character"
        ) from None


def _decoding(backend: "tokenizers.Tokenizer") -> Decoding:
    """Read how tokens become text from the decoder's own description."""
    if backend.decoder is None:
        return Decoding("other")
    described = json.loads(backend.decoder.__getstate__())
    steps: list[dict[str, Any]] = described["decoders"] if described["type"] == "Sequence" else [described]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return Decoding("bytes")
    replaces = [step for step in steps if step["type"] == "Replace" and "String" in step["pattern"]]
    rest = steps[len(replaces) :]
    strip = 0
    if rest and rest[-1]["type"] == "Strip" and rest[-1]["content"] == " " and rest[-1]["stop"] == 0:
        strip = rest.pop()["start"]
    if steps[: len(replaces)] == replaces and [step["type"] for step in rest] == ["ByteFallback", "Fuse"]:
        pairs = tuple((step["pattern"]["String"], step["content"]) for step in replaces)
        return Decoding("byte_fallback", pairs, strip)
    return Decoding("other")


def _fallback_byte(text: str) -> bytes | None:
    """Return the byte that `<0xE2>` stands for; None for any other token."""
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        try:
            return bytes.fromhex(text[3:5])
        except ValueError:
            return None
    return None


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's spelling of bytes: printable ones as themselves, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    spelled = {chr(byte): byte for byte in printable}
    return spelled | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTES = _byte_alphabet()


def _byte_level(text: str) -> bytes:
    """Return a byte-level token's bytes. One that is not spelled in bytes, as added ones may be, is text."""
    try:
        return bytes([_BYTES[character] for character in text])
    except KeyError:
        return text.encode()
