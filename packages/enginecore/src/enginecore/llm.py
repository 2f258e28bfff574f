"""`LLM`: a model to call from a script, with as many prompts at once as there are."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from enginecore.config import make_config
from enginecore.engine import LLMEngine
from enginecore.errors import RequestError
from enginecore.outputs import RequestOutput
from enginecore.sampling.params import RequestOutputKind, SamplingParams
from enginecore.text.prompts import Prompt, PromptInput

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
        prompts: PromptInput | Sequence[PromptInput],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
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
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
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

    def shutdown(self) -> None:
        """Give the model's memory back."""
        self.engine.shutdown()

    def _run(
        self, prompts: list[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[RequestOutput]:
        if params is None:
            params = SamplingParams(**self.engine.frontend.sampling_defaults)
        each = _one_for_each(params, len(prompts))
        ids = [str(self._counter + i) for i in range(len(prompts))]
        self._counter += len(prompts)
        added: list[str] = []
        try:
            for request_id, prompt, wanted in zip(ids, prompts, each, strict=True):
                self.engine.add_request(request_id, prompt, wanted)
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


def _as_prompts(prompts: PromptInput | Sequence[PromptInput]) -> list[PromptInput]:
    if isinstance(prompts, str | Mapping | Prompt):
        return [prompts]
    if prompts and all(isinstance(entry, int) for entry in prompts):
        return [cast(Sequence[int], prompts)]
    return list(cast(Sequence[PromptInput], prompts))


def _as_conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Sequence[Message]]:
    if not messages or isinstance(messages[0], Mapping):
        return [cast(Sequence[Message], messages)]
    return list(cast(Sequence[Sequence[Message]], messages))


def _one_for_each(params: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    if isinstance(params, SamplingParams):
        wanted = [params] * count
    else:
        wanted = list(params)
    if len(wanted) != count:
        raise RequestError(f"there are {count} prompts but {len(wanted)} sampling parameters")
    # One result a request is all the caller sees, so intermediate ones need not be built.
    return [_final_only(entry) for entry in wanted]


def _final_only(params: SamplingParams) -> SamplingParams:
    return msgspec.structs.replace(params, output_kind=RequestOutputKind.FINAL_ONLY)
