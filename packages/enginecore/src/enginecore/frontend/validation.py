"""Validation of a request against the loaded model, before an engine core sees it."""

from collections.abc import Sequence

from enginecore.errors import ContextLengthError, RequestError
from enginecore.frontend.text.tokenizer import Tokenizer
from enginecore.messages import EngineLimits
from enginecore.sampling_params import SamplingParams, check_vocabulary


def check_prompt(ids: Sequence[int], limits: EngineLimits) -> None:
    """Raise RequestError when a prompt is empty or holds an id that is not one of the model's."""
    if not ids:
        raise RequestError("the prompt is empty: it must hold at least one token", "prompt")
    outside = min(ids) if min(ids) < 0 else max(ids)
    if not 0 <= outside < limits.vocab_size:
        raise RequestError(
            f"the prompt holds token id {outside}, but the vocabulary ends at {limits.vocab_size - 1}",
            "prompt",
        )


def check_salt(salt: str | None) -> None:
    """Raise RequestError when a cache salt cannot be sent to a core."""
    try:
        (salt or "").encode()
    except UnicodeEncodeError:
        raise RequestError(
            f"cache_salt is {salt!r:.80}: half a surrogate pair is no character", "cache_salt"
        ) from None


def output_limit(
    num_prompt: int, params: SamplingParams, limits: EngineLimits, *, shorten: bool = False
) -> int:
    """Return how many tokens a request may generate: `params.max_tokens`, or all there is room for.

    With `shorten`, a `max_tokens` beyond that room is lowered to it rather than refused.

    Raises:
        ContextLengthError: prompt and output would be longer than the model allows.
    """
    room = limits.max_model_len - num_prompt
    if room <= 0:
        raise ContextLengthError(limits.max_model_len, f"its {num_prompt} tokens leave no room for output")
    if shorten:
        return room if params.max_tokens is None else min(params.max_tokens, room)
    if params.max_tokens is not None and params.max_tokens > room:
        raise ContextLengthError(
            limits.max_model_len,
            f"its {num_prompt} tokens and max_tokens={params.max_tokens} are {num_prompt + params.max_tokens}"
            f" tokens together, so max_tokens can be up to {room}",
            "max_tokens",
        )
    if params.min_tokens > room:
        raise ContextLengthError(
            limits.max_model_len,
            f"it leaves room for {room} tokens, fewer than min_tokens={params.min_tokens}",
            "min_tokens",
        )
    return room if params.max_tokens is None else params.max_tokens


def check_fits(num_prompt: int, limits: EngineLimits) -> None:
    """Raise ContextLengthError when a prompt to be pooled is longer than the context, which it may fill."""
    if num_prompt > limits.max_model_len:
        raise ContextLengthError(limits.max_model_len, f"it has {num_prompt} tokens")


def check_params(
    params: SamplingParams, limits: EngineLimits, *, max_logprobs: int, tokenizer: Tokenizer | None
) -> None:
    """Raise RequestError when parameters name ids the model lacks, too many logprobs, or text without a
    tokenizer. A `max_logprobs` of -1 is no limit."""
    try:
        check_vocabulary(params, limits.vocab_size)
    except ValueError as error:
        raise RequestError(str(error), str(error).partition(" ")[0]) from error
    for name in ("logprobs", "prompt_logprobs"):
        asked = getattr(params, name)
        wanted = limits.vocab_size if asked == -1 else asked or 0
        if max_logprobs != -1 and wanted > max_logprobs:
            raise RequestError(f"{name} must be at most max_logprobs={max_logprobs}, got {asked}", name)
    for name in ("stop", "bad_words"):
        if tokenizer is None and getattr(params, name):
            raise RequestError(f"{name} needs text, and this model has no tokenizer", name)


def check_choice(
    params: SamplingParams, stop_ids: Sequence[int], bad_words: Sequence[Sequence[int]], vocab_size: int
) -> None:
    """Raise RequestError when parameters together leave no token that could be chosen."""
    banned = {word[0] for word in bad_words if len(word) == 1}
    if params.min_tokens:
        banned |= set(stop_ids)
    allowed = range(vocab_size) if params.allowed_token_ids is None else params.allowed_token_ids
    if banned.issuperset(allowed):
        named = "stop ids (up to min_tokens) and bad_words" if params.min_tokens else "bad_words"
        raise RequestError(f"no token could be chosen: {named} leave none of those allowed")


def bad_word_ids(word: str, tokenizer: Tokenizer) -> list[list[int]]:
    """Return a word's tokens as they stand at the start of a text, and after a space.

    Raises:
        RequestError: it has none.
    """
    ids = tokenizer.encode(word.lstrip() or word, add_special_tokens=False)
    if not ids:
        raise RequestError(f"bad_words holds {word!r}, which is no token", "bad_words")
    spaced = tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
    # Where the space is a token of its own, the plain spelling covers the word after a space too.
    differs_in_first = len(spaced) == len(ids) and spaced[0] != ids[0]
    return [ids, spaced] if differs_in_first else [ids]
