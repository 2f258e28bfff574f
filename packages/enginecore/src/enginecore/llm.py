"""`LLM`: a model to call from a script, with as many prompts at once as there are."""

import itertools
import threading
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Unpack, cast

import msgspec
import numpy as np

from enginecore.config import EngineOptions, make_config
from enginecore.engine import LLMEngine, interrupts_wait
from enginecore.errors import RequestError
from enginecore.forks import MadeHere
from enginecore.frontend.request import Prompt, Request
from enginecore.frontend.text.prompts import PromptInput
from enginecore.outputs import RequestOutput
from enginecore.sampling_params import RequestOutputKind, SamplingParams

Message = Mapping[str, Any]


class LLM:
    """A loaded model. Options are those of `EngineConfig`, by name.

    Threads may share it: their prompts run in the same batches, and each gets its own outputs.

    Raises:
        ConfigError: an option is unknown or out of range.
        ModelError: the model cannot be loaded.

    In a process that was forked after this one made it, calls raise ForkError.
    """

    def __init__(self, model: str = "demo", **options: Unpack[EngineOptions]) -> None:
        self.engine = LLMEngine(make_config({"model": model, **options}))
        self._made_here = MadeHere()
        self._calls = _ConcurrentCalls(self.engine)

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
        self._made_here.check()
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
        self._made_here.check()
        prepare = self.engine.frontend.prepare_chat
        return self._run(
            [prepare(turns, **template_options) for turns in _as_conversations(messages)], params
        )

    def expert_loads(self) -> np.ndarray | None:
        """Return how many tokens went to each expert since the start, int64 [layers with experts, experts].

        None for a model without experts. `tools/expert_placement.py` makes a placement of these counts.
        """
        self._made_here.check()
        with self._calls.between_steps():
            return self.engine.expert_loads()

    def shutdown(self) -> None:
        """Give the model's memory back; in a fork, where it is another process's, do nothing."""
        if self._made_here:
            with self._calls.between_steps():
                self.engine.shutdown()

    def _run(
        self, prompts: list[Prompt], params: SamplingParams | Iterable[SamplingParams] | None
    ) -> list[RequestOutput]:
        if params is None:
            params = SamplingParams(**self.engine.frontend.sampling_defaults)
        each = _one_for_each(params, len(prompts))
        return self._calls.run(prompts, each)


class _ConcurrentCalls:
    """Lets threads share an engine: one of those that wait for outputs steps, for all of them.

    State is changed under one lock, and never while a step runs: who wants to add requests waits for the
    step's end, and the next step waits for everybody who does.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._lock = threading.Condition()
        self._stepping = False
        self._changing = 0
        """Threads that wait for a step's end to add or abort requests."""
        self._numbers = itertools.count()
        self._finished: dict[str, RequestOutput] = {}

    def run(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[RequestOutput]:
        """Run all prompts, or none if one cannot be run, and return their final outputs in order."""
        ids: list[str] = []
        try:
            with self.between_steps():
                self._add(ids, prompts, params)
            while self._step_or_wait(ids):
                pass
            return [self._finished[request_id] for request_id in ids]
        except BaseException:
            # An error or Ctrl-C must leave nothing running behind.
            with self.between_steps():
                self._abort(ids)
            raise
        finally:
            for request_id in ids:
                self._finished.pop(request_id, None)

    @contextmanager
    def between_steps(self) -> Generator[None]:
        """Keep steps from running: the only time in which the engine may be changed."""
        with self._lock:
            self._changing += 1
            try:
                self._lock.wait_for(lambda: not self._stepping)
                yield
            finally:
                self._changing -= 1
                self._lock.notify_all()

    def _add(self, ids: list[str], prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> None:
        """Add all prompts, or none if one is refused; note each in `ids` before it is added."""
        try:
            for prompt, wanted in zip(prompts, params, strict=True):
                ids.append(str(next(self._numbers)))
                self._engine.add(Request(ids[-1], prompt, wanted))
        except RequestError as error:
            self._abort(ids)
            if len(prompts) == 1:
                raise
            raise RequestError(f"prompt {len(ids) - 1}: {error}", error.param) from error

    def _abort(self, ids: Sequence[str]) -> None:
        for request_id in ids:
            self._engine.abort_request(request_id)

    def _step_or_wait(self, ids: Sequence[str]) -> bool:
        """Run one step, or wait for another thread's; return whether some of `ids` are unfinished.

        Raises:
            EngineDeadError: the engine has ended, in whichever thread.
        """
        with self._lock:
            self._lock.wait_for(lambda: not (self._stepping or self._changing) or self._all_finished(ids))
            if self._all_finished(ids):
                return False
        # Ctrl-C must not keep from other threads what a step has for them.
        with interrupts_wait():
            self._step()
        return True

    def _step(self) -> None:
        """Run one step and keep what has finished, unless another thread was faster."""
        with self._lock:
            if self._stepping or self._changing:
                return
            self._stepping = True
        outputs: list[RequestOutput] = []
        try:
            outputs = self._engine.step()
        finally:
            with self._lock:
                self._finished |= {output.request_id: output for output in outputs if output.finished}
                self._stepping = False
                self._lock.notify_all()

    def _all_finished(self, ids: Sequence[str]) -> bool:
        return all(request_id in self._finished for request_id in ids)


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
