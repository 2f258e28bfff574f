"""The forms in which a caller may give a prompt."""

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from enginecore.errors import RequestError
from enginecore.frontend.request import Prompt
from enginecore.frontend.text.tokenizer import NO_TOKENIZER, Tokenizer

_FORMS = 'text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}'
_KEYS = {"prompt", "prompt_token_ids", "cache_salt"}


PromptInput = str | Sequence[int] | Mapping[str, Any] | Prompt
"""Every form in which a caller may give a prompt."""


def read_prompt(prompt: Any, tokenizer: Tokenizer | None, add_special_tokens: bool) -> Prompt:
    """Return `prompt`, in any of its forms, as token ids.

    Raises:
        RequestError: it has none of the forms, or it is text and there is no tokenizer.
    """
    if isinstance(prompt, Prompt):
        return prompt
    if isinstance(prompt, str):
        return Prompt(prompt, encode_text(prompt, tokenizer, add_special_tokens))
    if isinstance(prompt, Mapping):
        return _read_mapping(prompt, tokenizer, add_special_tokens)
    return Prompt(None, _token_ids(prompt))


def encode_text(text: str, tokenizer: Tokenizer | None, add_special_tokens: bool) -> list[int]:
    """Return the token ids of `text`.

    Raises:
        RequestError: there is no tokenizer, or the text cannot be encoded.
    """
    if tokenizer is None:
        raise RequestError(NO_TOKENIZER, "prompt")
    return tokenizer.encode(text, add_special_tokens)


def _read_mapping(prompt: Mapping[str, Any], tokenizer: Tokenizer | None, add_special_tokens: bool) -> Prompt:
    if prompt.get("prompt_embeds") is not None:
        raise RequestError(f"prompt_embeds is not supported: give {_FORMS}", "prompt_embeds")
    unknown = sorted(set(prompt) - _KEYS - {"prompt_embeds"})
    if unknown:
        raise RequestError(f"a prompt has no {unknown[0]!r}: give {_FORMS}", "prompt")
    text, ids, salt = prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("cache_salt")
    if text is not None and not isinstance(text, str):
        raise RequestError(f"prompt must be text, got {text!r:.80}", "prompt")
    if salt is not None and not isinstance(salt, str):
        raise RequestError(f"cache_salt must be text, got {salt!r:.80}", "cache_salt")
    if ids is not None:
        return Prompt(text, _token_ids(ids), salt)
    if text is None:
        raise RequestError(f"a prompt must be {_FORMS}", "prompt")
    return Prompt(text, encode_text(text, tokenizer, add_special_tokens), salt)


def as_prompts(prompts: PromptInput | Iterable[PromptInput]) -> list[PromptInput]:
    """Return one prompt, or each of several, as a list; a list of integers is one prompt.

    Raises:
        RequestError: it is neither.
    """
    if isinstance(prompts, str | Mapping | Prompt):
        return [cast(PromptInput, prompts)]
    listed = without_arrays(prompts)
    if not isinstance(listed, Iterable):
        raise RequestError(f"prompts must be a prompt or a list of them, got {prompts!r:.80}", "prompts")
    many = list(listed)
    if many and all(is_token_id(entry) for entry in many):
        return [cast(Sequence[int], many)]
    return cast(list[PromptInput], many)


def truncated(prompt: Prompt, plain: list[int] | None, most: int, side: str) -> list[int]:
    """Return the ids of a prompt, `most` of them at most, cut off at its `side` (left or right).

    `plain` are the ids of its text by themselves: what is put around them, such as BOS and EOS, stays.
    """
    ids = prompt.token_ids
    excess = len(ids) - most
    if excess <= 0:
        return ids
    room = most if plain is None else most - (len(ids) - len(plain))
    around = range(0 if plain is None else len(ids) - len(plain) + 1)
    before = next((start for start in around if ids[start : start + len(plain or ())] == plain), None)
    if plain is None or before is None or room < 0:
        return ids[:most] if side == "right" else ids[excess:]
    kept = plain[:room] if side == "right" else plain[len(plain) - room :]
    return ids[:before] + kept + ids[before + len(plain) :]


def without_arrays(value: Any) -> Any:
    """Return an array or tensor as a list (a number without dimensions), and anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def is_token_id(value: Any) -> bool:
    """Whether a value is an integer: Python's, numpy's, or in an array or tensor without dimensions."""
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        value = value.item()
    return isinstance(value, int) and not isinstance(value, bool)


def _token_ids(ids: Any) -> list[int]:
    ids = without_arrays(ids)
    if isinstance(ids, Sequence) and not isinstance(ids, str | bytes):
        if set(map(type, ids)) <= {int}:
            return list(ids)
        if all(is_token_id(token) for token in ids):
            return [operator.index(token) for token in ids]  # numpy's integers, for one
    raise RequestError(f"a prompt must be {_FORMS}, got {ids!r:.80}", "prompt")
