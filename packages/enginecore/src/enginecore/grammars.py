"""Grammars compiled against a model's vocabulary, by llguidance.

Used by the front-end, to refuse what does not compile, and by the worker that samples. llguidance is imported
when the first grammar comes.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from enginecore.model_files import ModelFiles, eos_token_ids

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from enginecore.frontend.text.tokenizer import Tokenizer

MAX_COMPILED = 128
"""Compiled grammars that are kept."""

MAX_LEXER_STATES = 50_000
"""Most states of a grammar's automata, of some kilobytes each; a request that needs more fails."""

MAX_ITEMS = 20_000
"""Most ways in which a grammar may go on at one place: a choice's texts, an object's optional keys."""


class GrammarError(ValueError):
    """A grammar cannot be compiled, or not for this vocabulary; the message says why in one line."""


class Grammars:
    """Compiles grammars for one model. Safe to share between threads.

    Raises:
        GrammarError: the model's tokens do not join into text by their bytes, or it has no EOS token.
    """

    def __init__(self, tokenizer: "Tokenizer", vocab_size: int, eos_ids: Sequence[int]) -> None:
        """`vocab_size` is the model's; ids that the tokenizer does not have can never come.

        Each id of `eos_ids` ends an output; where a grammar may end, the first stands for all in its masks.
        """
        from llguidance import LLParserLimits, LLTokenizer, TokenizerWrapper

        self._limits: LLParserLimits = LLParserLimits(
            max_lexer_states=MAX_LEXER_STATES, max_items_in_row=MAX_ITEMS, verbose_errors=False
        )
        vocabulary = _Vocabulary(tokenizer, vocab_size, eos_ids)
        self.eos_id = vocabulary.eos_token_id
        """The id whose bit in a mask says that the grammar may end."""
        self._eos_ids = [token for token in eos_ids if token < vocab_size]
        self.vocab_size = vocab_size
        self._tokenizer: LLTokenizer = LLTokenizer(TokenizerWrapper(vocabulary))
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def matcher(self, grammar: str) -> "LLMatcher":
        """Return a matcher at the beginning of `grammar`, in llguidance's Lark or JSON form.

        Raises:
            GrammarError: it does not compile.
        """
        with self._lock:
            found = self._compiled.get(grammar)
            if found is not None:
                self._compiled.move_to_end(grammar)
        if found is None:
            found = self._compile(grammar)
            with self._lock:
                self._compiled[grammar] = found
                while len(self._compiled) > MAX_COMPILED:
                    self._compiled.popitem(last=False)
        return found.deep_copy()

    def check(self, grammar: str) -> None:
        """Compile a grammar and keep nothing of it. Raises as `matcher` does."""
        self._compile(grammar)

    def find_end(self, tokens: Sequence[str]) -> str | None:
        """Return one of `tokens` that may end an output; None if none may.

        They are expressions of Lark such as `<|im_end|>` or `<[5-7]>`, of a grammar that compiles.
        """
        if not tokens or not self._may_end(tokens):
            return None
        while len(tokens) > 1:
            half = tokens[: len(tokens) // 2]
            tokens = half if self._may_end(half) else tokens[len(half) :]
        return tokens[0]

    def _may_end(self, tokens: Sequence[str]) -> bool:
        mask = self._compile(f"start: {' | '.join(tokens)}").compute_bitmask()
        return any(mask[token // 8] >> token % 8 & 1 for token in self._eos_ids)

    def _compile(self, grammar: str) -> "LLMatcher":
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        # Limits on a grammar's size are met, and one that no text fits is seen, at the first token.
        allowed = b"" if matcher.is_error() else matcher.compute_bitmask()
        reason = matcher.get_error() if matcher.is_error() else ""
        if "NoExtension" in reason or not (reason or any(allowed)):
            raise GrammarError("it allows no text, not even an empty one")
        if reason:
            raise GrammarError(one_line(reason))
        return matcher


def all_eos_ids(tokenizer: "Tokenizer | None", files: ModelFiles) -> list[int]:
    """Return the ids that end an output: the tokenizer's EOS and those of the model's configuration."""
    eos = None if tokenizer is None else tokenizer.eos_token_id
    return list(dict.fromkeys(([] if eos is None else [eos]) + eos_token_ids(files)))


def one_line(message: str) -> str:
    """Return a message of llguidance's, which quotes the grammar over several lines, as one line."""
    return " ".join(message.split())[:500]


class _Vocabulary:
    """A tokenizer as llguidance's TokenizerWrapper takes one."""

    def __init__(self, tokenizer: "Tokenizer", vocab_size: int, eos_ids: Sequence[int]) -> None:
        if tokenizer.decoding.kind == "other":
            raise GrammarError(
                "this model's tokenizer joins tokens by rules of its own: grammars need byte-level "
                "tokens, or text with bytes to fall back to"
            )
        inside = [token for token in eos_ids if token < vocab_size]
        if not inside:
            raise GrammarError("this model has no EOS token, and nothing could end an output")
        known = min(vocab_size, tokenizer.vocab_size)
        self.tokens = [tokenizer.token_bytes(token) for token in range(known)]
        self.tokens += [b""] * (vocab_size - known)
        self.eos_token_id = inside[0]
        self.bos_token_id = tokenizer.bos_token_id
        special = {token for token in tokenizer.special_ids if token < vocab_size}
        self.special_token_ids = sorted(special | set(inside))
        self._hidden = hidden = set(self.special_token_ids)
        self._ids: dict[bytes, int] = {}
        for token, piece in enumerate(self.tokens):
            if piece and token not in hidden:
                self._ids.setdefault(piece, token)
        self._longest = max(map(len, self._ids), default=1)
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        """Return tokens whose bytes are `text`: those that `encode` gives, if it puts nothing before them.

        None is a special token: where the text spells one, it is meant as text.
        """
        wanted = text.encode() if isinstance(text, str) else text
        ids = self._tokenizer.encode(wanted.decode("utf-8", "replace"), add_special_tokens=False)
        known = all(token < len(self.tokens) and token not in self._hidden for token in ids)
        if known and b"".join([self.tokens[token] for token in ids]) == wanted:
            return ids
        return self._longest_first(wanted)

    def _longest_first(self, wanted: bytes) -> list[int]:
        """Return the tokens of `wanted`, each the longest that fits, up to a byte that begins none."""
        found, place = [], 0
        while place < len(wanted):
            for length in range(min(self._longest, len(wanted) - place), 0, -1):
                token = self._ids.get(wanted[place : place + length])
                if token is not None:
                    found.append(token)
                    place += length
                    break
            else:
                break
        return found
