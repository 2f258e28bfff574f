"""Arguments that a call of `LLM` gives once for all its prompts, or for each."""

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import msgspec

from enginecore.errors import RequestError
from enginecore.frontend.text.prompts import is_token_id, without_arrays
from enginecore.pooling_params import PoolingParams
from enginecore.sampling_params import RequestOutputKind, SamplingParams

Message = Mapping[str, Any]


def sampling_params_of_each(
    params: SamplingParams | Iterable[SamplingParams], count: int
) -> list[SamplingParams]:
    """Return the parameters of each of `count` prompts, with final outputs only.

    Raises:
        RequestError: they are of another type, or not as many as prompts.
    """
    if isinstance(params, SamplingParams):
        wanted = [params] * count
    elif isinstance(params, Iterable):
        wanted = list(params)
    else:
        raise RequestError(f"sampling_params must be SamplingParams, got {params!r:.80}", "sampling_params")
    if len(wanted) != count:
        raise RequestError(f"there are {count} prompts but {len(wanted)} sampling parameters")
    for entry in wanted:
        if not isinstance(entry, SamplingParams):
            raise RequestError(
                f"sampling_params must be SamplingParams, got {entry!r:.80}", "sampling_params"
            )
    # One result a request is all the caller sees, so intermediate ones need not be built.
    final = RequestOutputKind.FINAL_ONLY
    return [msgspec.structs.replace(entry, output_kind=final) for entry in wanted]


def pooling_params_of_each(
    params: PoolingParams | Iterable[PoolingParams] | None, count: int
) -> list[PoolingParams]:
    """Return the pooling parameters of each of `count` prompts, by default those of the model.

    Raises:
        RequestError: they are of another type, or not as many as prompts.
    """
    if params is None or isinstance(params, PoolingParams):
        return [params or PoolingParams()] * count
    wanted = list(params) if isinstance(params, Iterable) else [params]
    for entry in wanted:
        if not isinstance(entry, PoolingParams):
            raise RequestError(f"pooling_params must be PoolingParams, got {entry!r:.80}", "pooling_params")
    if len(wanted) != count:
        raise RequestError(f"there are {count} prompts but {len(wanted)} pooling parameters")
    return wanted


def priority_of_each(priority: int | Iterable[int] | None, count: int) -> list[int]:
    """Return the priority of each of `count` prompts, by default 0.

    Raises:
        RequestError: they are no integers, or not as many as prompts.
    """
    listed = without_arrays(priority)
    wanted = list(listed) if isinstance(listed, Iterable) else [0 if listed is None else listed] * count
    if len(wanted) != count:
        raise RequestError(f"there are {count} prompts but {len(wanted)} priorities", "priority")
    for entry in wanted:
        if not is_token_id(entry):
            raise RequestError(f"priority must be an integer, got {entry!r:.80}", "priority")
    return [operator.index(entry) for entry in wanted]


def as_conversations(messages: Iterable[Message] | Iterable[Sequence[Message]]) -> list[Sequence[Message]]:
    """Return one conversation, or each of several, as a list of conversations.

    Raises:
        RequestError: `messages` is no list.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Iterable):
        raise RequestError(f"messages must be a list of messages, got {messages!r:.80}", "messages")
    many = list(messages)
    if not many or isinstance(many[0], Mapping):
        return [cast(list[Message], many)]
    return cast(list[Sequence[Message]], many)
