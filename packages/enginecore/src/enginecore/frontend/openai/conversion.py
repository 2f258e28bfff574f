"""Conversion of bodies to prompts, sampling parameters and options of the chat template."""

import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from enginecore.beam_search import BeamSearchParams
from enginecore.errors import ContextLengthError, RequestError
from enginecore.frontend.openai.bodies import Body, ChatBody, CompletionBody
from enginecore.frontend.openai.forced_calls import calls_schema
from enginecore.frontend.openai.structured import guide_field, structured_outputs
from enginecore.sampling_params import RequestOutputKind, SamplingParams

MAX_CHOICES = 4096
"""Most choices (prompts × n) of one request."""

_SAMPLING_FIELDS = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "prompt_logprobs",
    "logprob_token_ids",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
)
"""Fields that mean the same, under the same name, in a body and in SamplingParams."""

_BODY_NAMES = {"extra_args": "vllm_xargs", "beam_width": "n"}
"""What parameters are called in a body, where that is something else."""


def completion_prompts(prompt: Any) -> list[str | list[int]]:
    """Return the prompts of a completions body: one text or list of token ids each.

    Raises:
        RequestError: `prompt` is none of a text, a list of texts, a list of ids, a list of lists of ids.
    """
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        kinds = set(map(type, prompt))
        if kinds == {str}:
            return prompt
        if kinds == {int}:
            return [_token_ids(prompt)]
        if kinds == {list}:
            return [_token_ids(ids) for ids in prompt]
    if prompt is None or prompt == []:
        raise RequestError("prompt is empty: give a text or token ids", "prompt")
    raise RequestError(
        "prompt must be a text, a list of texts, a list of token ids, or a list of such lists", "prompt"
    )


def completion_params(body: CompletionBody, defaults: Mapping[str, Any]) -> SamplingParams:
    """Return how to sample for `body`; see `fit_default` for a body without max_tokens.

    `defaults` are the model's own, for fields that the body leaves open.

    Raises:
        RequestError: a field is out of range or contradicts another.
    """
    fields = {**defaults, **_sampling_fields(body)}
    if body.max_tokens is not None:
        fields["max_tokens"] = 1 if body.prompt_alone else body.max_tokens
    fields["logprobs"] = body.logprobs
    if body.echo and body.prompt_logprobs is None:
        fields["prompt_logprobs"] = 0 if body.logprobs is None and body.logprob_token_ids else body.logprobs
    return _params(fields)


def beam_params(body: Body, prompt_tokens: int, max_model_len: int) -> BeamSearchParams:
    """Return the search for the `n` best continuations, for a body with `use_beam_search`.

    Without a limit in the body they may have 16 tokens, or in a chat as many as there is room for.

    Raises:
        RequestError: a field is out of range, or prompt and output are too long.
    """
    room = max_model_len - prompt_tokens
    asked = body.asked_tokens
    if asked is not None and asked > room:
        excess = f"its {prompt_tokens} tokens and max_tokens={asked} are {prompt_tokens + asked} together"
        raise ContextLengthError(max_model_len, excess, "max_tokens")
    default = room if isinstance(body, ChatBody) else min(room, 16)
    try:
        return BeamSearchParams(
            beam_width=body.samples,
            max_tokens=max(1, default) if asked is None else asked,
            ignore_eos=bool(body.ignore_eos),
            temperature=body.temperature or 0.0,
            length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
            include_stop_str_in_output=bool(body.include_stop_str_in_output),
        )
    except ValueError as error:
        field = str(error).partition(" ")[0]
        raise RequestError(str(error), _BODY_NAMES.get(field, field)) from error


def fit_default(body: Body, params: SamplingParams, prompt_tokens: int, max_model_len: int) -> SamplingParams:
    """Return `params`, with the default of max_tokens lowered to what a prompt leaves room for."""
    room = max_model_len - prompt_tokens
    default = params.max_tokens
    if body.asked_tokens is not None or default is None or not max(1, params.min_tokens) <= room < default:
        return params
    return msgspec.structs.replace(params, max_tokens=room)


def chat_params(body: ChatBody, defaults: Mapping[str, Any]) -> SamplingParams:
    """Return how to sample for `body`; `defaults` and `fit_default` as for completions.

    Without a limit of the body's or of the model's, the answer may be as long as there is room.

    Raises:
        RequestError: a field is out of range or contradicts another.
    """
    fields = {**defaults, **_sampling_fields(body)}
    asked = body.asked_tokens
    fields["max_tokens"] = defaults.get("max_tokens") if asked is None else asked
    if body.logprobs and not body.logprob_token_ids:
        fields["logprobs"] = body.top_logprobs or 0
    schema = calls_schema(body)
    with blaming(body):
        if schema is not None:
            name = guide_field(body)
            if name not in (None, "response_format"):
                # A response_format is of answers that call nothing, and may stand beside tools.
                raise RequestError(f"{name} has no use where tool_choice forces a call", name)
            fields["structured_outputs"] = {"json": schema}
        return _params(fields)


@contextmanager
def blaming(body: Body) -> Generator[None]:
    """Let a RequestError name the field that `body` has in place of the one it names."""
    try:
        yield
    except RequestError as error:
        blamed = blame(body, error)
        if blamed is error:
            raise
        raise blamed from error


def blame(body: Body, error: RequestError) -> RequestError:
    """Return `error` with the field that `body` has in place of the one it names."""
    guide = None
    if error.param == "structured_outputs":
        guide = "tools" if _forces_call(body) else guide_field(body)
    named = guide or _BODY_NAMES.get(error.param or "")
    if named is not None and error.param is not None:
        return RequestError(str(error).replace(error.param, named, 1), named, error.code)
    if not isinstance(body, ChatBody):
        return error
    if error.param == "prompt":
        return RequestError(str(error), "messages", error.code)
    if error.param == "max_tokens" and body.max_completion_tokens is not None:
        named = "max_completion_tokens"
        return RequestError(str(error).replace("max_tokens", named), named, error.code)
    return error


def _forces_call(body: Body) -> bool:
    return isinstance(body, ChatBody) and body.forces_call


def template_options(body: ChatBody) -> dict[str, Any]:
    """Return the keyword arguments that `body` gives the chat template."""
    options = dict(body.chat_template_kwargs or {})
    for name in ("add_generation_prompt", "continue_final_message", "documents"):
        value = getattr(body, name)
        if value is not None:
            options[name] = value
    if body.tools:
        options["tools"] = body.tools
    if options.get("continue_final_message") and "add_generation_prompt" not in options:
        options["add_generation_prompt"] = False
    if body.add_special_tokens:
        options["add_special_tokens"] = True
    return options


def check_choices(prompts: int, samples: int) -> None:
    """Raise RequestError when a request asks for more choices than one request may have."""
    if prompts * samples > MAX_CHOICES:
        raise RequestError(
            f"{prompts} prompts with n={samples} make {prompts * samples} choices;"
            f" one request has at most {MAX_CHOICES}",
            "prompt",
        )


def _sampling_fields(body: Body) -> dict[str, Any]:
    fields = {name: getattr(body, name) for name in _SAMPLING_FIELDS}
    fields["structured_outputs"] = structured_outputs(body)
    if fields["stop"] == "":
        fields["stop"] = None
    kind = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
    # A client that asks for several samples need not know that the model's own temperature is 0.
    equal = body.temperature is None and body.samples > 1
    others = {"output_kind": kind, "extra_args": body.vllm_xargs, "equal_samples": equal}
    return {name: value for name, value in fields.items() if value is not None} | others


def _params(fields: dict[str, Any]) -> SamplingParams:
    try:
        return SamplingParams(**fields)
    except ValueError as error:
        found = re.match(r"[a-z_]+", str(error))
        known = found is not None and found[0] in SamplingParams.__struct_fields__
        message = str(error).replace("extra_args", "vllm_xargs")
        param = found[0] if found and known else None
        raise RequestError(message, _BODY_NAMES.get(param or "", param)) from error


def _token_ids(ids: list[Any]) -> list[int]:
    if not ids:
        raise RequestError("prompt holds an empty list: give at least one token id", "prompt")
    if set(map(type, ids)) != {int}:
        raise RequestError("prompt lists must hold token ids (integers), one list a prompt", "prompt")
    for token in (min(ids), max(ids)):
        if not 0 <= token < 2**31:
            raise RequestError(f"prompt holds {token}, which is no token id", "prompt")
    return ids
