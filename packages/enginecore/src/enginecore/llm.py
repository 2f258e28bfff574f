"""`LLM`: a model to call from a script, with as many prompts at once as there are."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import msgspec
import numpy as np

from enginecore.config import make_config
from enginecore.engine import LLMEngine
from enginecore.errors import RequestError
from enginecore.frontend.text.prompts import Prompt, PromptInput
from enginecore.outputs import RequestOutput
from enginecore.sampling_params import RequestOutputKind, SamplingParams

Message = Mapping[str, Any]


class LLM:
    """A loaded model. Options are those of `EngineConfig`, by name.

    Raises:
        ConfigError: an option is unknown or out of range.
        ModelError: the model cannot be loaded.
    """

    def __init__(self, model: str = "demo", **options: Any) -> None:
        self.engine = LLMEngine(make_config({"model": model, **options}))
        self._counter = 0

    def generate(
        self,
        prompts: PromptInput | Iterable[PromptInput],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt; the results are in the order of the prompts.

        Without `params` the model's own recommendations hold, from its generation_config.json.

        A prompt is text, a mapping with `prompt` or `prompt_token_ids`, or (in a list of prompts) token ids.

        Raises:
            RequestError: a prompt or its parameters cannot be run as asked; none of them was run.
        """
        many = _as_prompts(prompts)
        return self._run([self.engine.frontend.prepare_prompt(prompt) for prompt in many], params)

    def chat(
        self,
        messages: Iterable[Message] | Iterable[Sequence[Message]],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several; `template_options` reach the chat template.

        Raises:
            RequestError: as `generate`, or the template refuses a conversation.
        """
        prepare = self.engine.frontend.prepare_chat
        return self._run(
            [prepare(turns, **template_options) for turns in _as_conversations(messages)], params
        )

    def _add(self, request_id: str, prompt: Prompt, params: SamplingParams, index: int, count: int) -> None:
        try:
            self.engine.add_request(request_id, prompt, params)
        except RequestError as error:
            if count == 1:
                raise
            raise RequestError(f"prompt {index}: {error}", error.param) from error

    def expert_loads(self) -> np.ndarray | None:
        """Return how many tokens went to each expert since the start, int64 [layers with experts, experts].

        None for a model without experts. `tools/expert_placement.py` makes a placement of these counts.
        """
        return self.engine.core.expert_loads()

    def shutdown(self) -> None:
        """Give the model's memory back."""
        self.engine.shutdown()

    def _run(
        self, prompts: list[Prompt], params: SamplingParams | Iterable[SamplingParams] | None
    ) -> list[RequestOutput]:
        if params is None:
            params = SamplingParams(**self.engine.frontend.sampling_defaults)
        each = _one_for_each(params, len(prompts))
        ids = [str(self._counter + i) for i in range(len(prompts))]
        self._counter += len(prompts)
        added: list[str] = []
        try:
            for request_id, prompt, wanted in zip(ids, prompts, each, strict=True):
                self._add(request_id, prompt, wanted, len(added), len(prompts))
                added.append(request_id)
            finished: dict[str, RequestOutput] = {}
            while self.engine.has_unfinished_requests():
                for output in self.engine.step():
                    if output.finished:
                        finished[output.request_id] = output
        except BaseException:
            # A refused prompt or Ctrl-C must leave nothing running behind.
            for request_id in added:
                self.engine.abort_request(request_id)
            raise
        return [finished[request_id] for request_id in ids]


def _as_prompts(prompts: PromptInput | Iterable[PromptInput]) -> list[PromptInput]:
    if isinstance(prompts, str | Mapping | Prompt):
        return [cast(PromptInput, prompts)]
    if not isinstance(prompts, Iterable):
        raise RequestError(f"prompts must be a prompt or a list of them, got {prompts!r:.80}", "prompts")
    many = list(prompts)
    if many and all(hasattr(entry, "__index__") for entry in many):
        return [cast(Sequence[int], many)]
    return cast(list[PromptInput], many)


def _as_conversations(messages: Iterable[Message] | Iterable[Sequence[Message]]) -> list[Sequence[Message]]:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Iterable):
        raise RequestError(f"messages must be a list of messages, got {messages!r:.80}", "messages")
    many = list(messages)
    if not many or isinstance(many[0], Mapping):
        return [cast(list[Message], many)]
    return cast(list[Sequence[Message]], many)


def _one_for_each(params: SamplingParams | Iterable[SamplingParams], count: int) -> list[SamplingParams]:
    if isinstance(params, SamplingParams):
        wanted = [params] * count
    elif isinstance(params, Iterable):
        wanted = list(params)
    else:
        raise RequestError(f"params must be SamplingParams, got {params!r:.80}", "params")
    if len(wanted) != count:
        raise RequestError(f"there are {count} prompts but {len(wanted)} sampling parameters")
    for entry in wanted:
        if not isinstance(entry, SamplingParams):
            raise RequestError(f"params must be SamplingParams, got {entry!r:.80}", "params")
    # One result a request is all the caller sees, so intermediate ones need not be built.
    return [_final_only(entry) for entry in wanted]


def _final_only(params: SamplingParams) -> SamplingParams:
    return msgspec.structs.replace(params, output_kind=RequestOutputKind.FINAL_ONLY)
