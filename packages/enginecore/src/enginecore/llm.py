"""`LLM`: a model to call from a script, with as many prompts at once as there are."""

import itertools
import operator
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Unpack, cast

import msgspec
import numpy as np

from enginecore.beam_search import BeamSearch, BeamSearchOutput, BeamSearchParams, decode_beams
from enginecore.config import EngineOptions, make_config
from enginecore.engine import Engine, interrupts_wait, make_engine
from enginecore.errors import RequestError
from enginecore.forks import MadeHere
from enginecore.frontend.pooling import PoolingPlan, embedding_output, pair, score_outputs
from enginecore.frontend.request import Prompt, Request
from enginecore.frontend.text.hf_tokenizer import HFTokenizer
from enginecore.frontend.text.prompts import PromptInput, as_prompts, is_token_id, without_arrays
from enginecore.metrics import Metric
from enginecore.outputs import EmbeddingRequestOutput, RequestOutput, ScoringRequestOutput
from enginecore.pooling_params import PoolingParams
from enginecore.sampling_params import RequestOutputKind, SamplingParams

Message = Mapping[str, Any]
UseTqdm = bool | Callable[..., Any]


class LLM:
    """A loaded model. Options are those of `EngineConfig`, by name.

    Threads may share it: their prompts run in the same batches, and each gets its own outputs.

    Raises:
        ConfigError: an option is unknown or out of range.
        ModelError: the model cannot be loaded.

    In a process that was forked after this one made it, calls raise ForkError.
    """

    def __init__(self, model: str = "demo", **options: Unpack[EngineOptions]) -> None:
        self.llm_engine = make_engine(make_config({"model": model, **options}))
        self._made_here = MadeHere()
        self._calls = _ConcurrentCalls(self.llm_engine)

    def generate(
        self,
        prompts: PromptInput | Iterable[PromptInput],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        priority: int | Iterable[int] | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt; the results are in the order of the prompts.

        Args:
            prompts: Each is text, a mapping with `prompt` or `prompt_token_ids`, or (in a list of prompts)
                token ids: a list or a one-dimensional array. A single prompt may stand alone.
            sampling_params: Those of all prompts, or of each. Without them the model's own recommendations
                hold, see `get_default_sampling_params`. A `max_tokens` beyond the length limit ends there.
            use_tqdm: Whether a terminal shows a bar; or what makes it, called as `tqdm.tqdm` is.
            priority: That of all prompts, or of each: lower runs first, under the priority policy.

        Raises:
            RequestError: a prompt or its parameters cannot be run as asked; none of them was run.
        """
        self._made_here.check()
        prepare = self.llm_engine.frontend.prepare_prompt
        prepared = [prepare(prompt) for prompt in as_prompts(prompts)]
        return self._run(prepared, sampling_params, use_tqdm, priority)

    def chat(
        self,
        messages: Iterable[Message] | Iterable[Sequence[Message]],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        use_tqdm: UseTqdm = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several.

        Args:
            messages: Mappings with "role" and "content"; or a list of such lists.
            sampling_params: As for `generate`, as is `use_tqdm`.
            chat_template: A Jinja template to use in place of the model's.
            add_generation_prompt: Open the assistant's answer.
            continue_final_message: Go on with the last message instead; needs add_generation_prompt=False.
            tools: Descriptions of tools, for templates that know them; calls are not parsed.
            chat_template_kwargs: Further variables for the template.

        Raises:
            RequestError: as `generate`, or the template refuses a conversation.
        """
        self._made_here.check()
        options: dict[str, Any] = {
            "chat_template": chat_template,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            **(chat_template_kwargs or {}),
        }
        prepare = self.llm_engine.frontend.prepare_chat
        prepared = [prepare(turns, **options) for turns in _as_conversations(messages)]
        return self._run(prepared, sampling_params, use_tqdm, None)

    def embed(
        self,
        prompts: PromptInput | Iterable[PromptInput],
        *,
        use_tqdm: UseTqdm = True,
        pooling_params: PoolingParams | Iterable[PoolingParams] | None = None,
        truncate_prompt_tokens: int | None = None,
        priority: int | Iterable[int] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return the embedding of each prompt, in the order of the prompts.

        Args:
            prompts: As for `generate`, as are `use_tqdm` and `priority`. They may fill the context.
            pooling_params: Those of all prompts, or of each; without them the model's own pooling holds.
            truncate_prompt_tokens: Most tokens to keep of each, from its start; -1 for what the model takes.

        Raises:
            RequestError: a prompt cannot be embedded as asked; none of them was.
        """
        self._made_here.check()
        prepared = self._prepare_texts(prompts, truncate_prompt_tokens)
        outputs = self._embed(prepared, pooling_params, use_tqdm, priority)
        return [embedding_output(output) for output in outputs]

    def score(
        self,
        text_1: PromptInput | Iterable[PromptInput],
        text_2: PromptInput | Iterable[PromptInput],
        /,
        *,
        use_tqdm: UseTqdm = True,
        pooling_params: PoolingParams | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[ScoringRequestOutput]:
        """Return the cosine of the embeddings of pairs of texts: 1 with 1, 1 with each of N, N with N.

        Arguments are those of `embed`; each text is embedded once. Raises RequestError as `embed` does, or
        for other numbers of texts.
        """
        self._made_here.check()
        first = self._prepare_texts(text_1, truncate_prompt_tokens)
        second = self._prepare_texts(text_2, truncate_prompt_tokens)
        pairs = pair(len(first), len(second), ("text_1", "text_2"))
        outputs = self._embed([*first, *second], pooling_params, use_tqdm, None)
        return score_outputs(outputs[: len(first)], outputs[len(first) :], pairs)

    def beam_search(
        self,
        prompts: PromptInput | Iterable[PromptInput],
        params: BeamSearchParams,
        *,
        use_tqdm: UseTqdm = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Return the best continuations of each prompt, those with the highest probability as a whole.

        Args:
            prompts: As for `generate`.
            params: Of all prompts. A `max_tokens` beyond the length limit ends there.
            use_tqdm: As for `generate`.
            concurrency_limit: Most prompts that are searched at once; all of them when None.

        Raises:
            RequestError: a prompt cannot be run, or 2 × beam_width is more than the option max_logprobs.
        """
        self._made_here.check()
        if not isinstance(params, BeamSearchParams):
            raise RequestError(f"params must be BeamSearchParams, got {params!r:.80}", "params")
        if concurrency_limit is not None and (not is_token_id(concurrency_limit) or concurrency_limit < 1):
            raise RequestError(
                f"concurrency_limit must be at least 1, got {concurrency_limit!r:.80}", "concurrency_limit"
            )
        frontend, config = self.llm_engine.frontend, self.llm_engine.config
        prepared = [frontend.prepare_prompt(prompt) for prompt in as_prompts(prompts)]
        searches = [
            BeamSearch(
                prompt,
                params,
                frontend.eos_ids,
                max_model_len=self.llm_engine.limits.max_model_len,
                max_logprobs=config.max_logprobs,
            )
            for prompt in prepared
        ]
        at_once = concurrency_limit or max(1, len(searches))
        with _progress(use_tqdm, len(searches)) as advance:
            for start in range(0, len(searches), at_once):
                part = searches[start : start + at_once]
                self._search(part, params.step_params())
                advance(len(part))
        outputs = [BeamSearchOutput(search.best()) for search in searches]
        for output in outputs:
            decode_beams(output.sequences, frontend.tokenizer)
        return outputs

    def get_tokenizer(self) -> HFTokenizer:
        """Return the model's tokenizer, with the methods that transformers' tokenizers have.

        Raises:
            RequestError: the model has none.
        """
        return self.llm_engine.frontend.hf_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters that hold where a call gives none: the model's recommendations."""
        return SamplingParams(**self.llm_engine.frontend.sampling_defaults)

    def get_metrics(self) -> list[Metric]:
        """Return the engine's counters, gauges and histograms, by their names in the server's /metrics."""
        self._made_here.check()
        with self._calls.between_steps():
            return self.llm_engine.get_metrics()

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes that no running request uses, and return True."""
        with self._calls.between_steps():
            self.llm_engine.reset_prefix_cache()
        return True

    def expert_loads(self) -> np.ndarray | None:
        """Return how many tokens went to each expert since the start, int64 [layers with experts, experts].

        None for a model without experts. `tools/expert_placement.py` makes a placement of these counts.
        """
        self._made_here.check()
        with self._calls.between_steps():
            return self.llm_engine.expert_loads()

    def shutdown(self) -> None:
        """Give the model's memory back; in a fork, where it is another process's, do nothing."""
        if self._made_here:
            with self._calls.between_steps():
                self.llm_engine.shutdown()

    def _search(self, searches: Sequence[BeamSearch], params: SamplingParams) -> None:
        """Run some beam searches to their end, all of them one token a round."""
        metrics, begun = self.llm_engine.metrics, list[BeamSearch]()
        with BeamSearch.counting(begun, metrics):
            while running := [search for search in searches if search.prompts]:
                wanted = [
                    _Wanted(prompt, params, 0, counted=False)
                    for search in running
                    for prompt in search.prompts
                ]
                outputs = iter(self._calls.run(wanted, lambda _: None))
                begun[:] = running
                for search in running:
                    search.advance(list(itertools.islice(outputs, len(search.prompts))))
                    if not search.prompts:
                        search.count(metrics)
                        begun.remove(search)

    def _run(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None,
        use_tqdm: UseTqdm,
        priority: int | Iterable[int] | None,
    ) -> list[RequestOutput]:
        each = _one_for_each(self.get_default_sampling_params() if params is None else params, len(prompts))
        priorities = _priorities(priority, len(prompts))
        wanted = [_Wanted(*entry) for entry in zip(prompts, each, priorities, strict=True)]
        return self._run_all(wanted, use_tqdm)

    def _prepare_texts(
        self, prompts: PromptInput | Iterable[PromptInput], truncate: int | None
    ) -> list[Prompt]:
        prepare = self.llm_engine.frontend.prepare_text
        return [prepare(prompt, truncate=truncate) for prompt in as_prompts(prompts)]

    def _embed(
        self,
        prompts: Sequence[Prompt],
        params: PoolingParams | Iterable[PoolingParams] | None,
        use_tqdm: UseTqdm,
        priority: int | Iterable[int] | None,
    ) -> list[RequestOutput]:
        make_plan = self.llm_engine.frontend.pooling_plan
        plans = [make_plan(entry) for entry in _pooling_params(params, len(prompts))]
        priorities = _priorities(priority, len(prompts))
        columns = prompts, [plan.sampling for plan in plans], priorities, plans
        return self._run_all([_Wanted(*entry) for entry in zip(*columns, strict=True)], use_tqdm)

    def _run_all(self, wanted: Sequence["_Wanted"], use_tqdm: UseTqdm) -> list[RequestOutput]:
        with _progress(use_tqdm, len(wanted)) as advance:
            return self._calls.run(wanted, advance)


class _Wanted(NamedTuple):
    prompt: Prompt
    params: SamplingParams
    priority: int
    pooling: PoolingPlan | None = None
    counted: bool = True


class _Call:
    """One caller's requests."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.outputs: dict[str, RequestOutput] = {}
        """Final outputs by request id."""

    @property
    def finished(self) -> bool:
        return len(self.outputs) == len(self.ids)


class _ConcurrentCalls:
    """Lets threads share an engine: one of those that wait for outputs steps, for all of them.

    State is changed under one lock, and never while a step runs: who wants to add requests waits for the
    step's end, and the next step waits for everybody who does.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Condition()
        self._stepping = False
        self._changing = 0
        """Threads that wait for a step's end to add or abort requests."""
        self._numbers = itertools.count()
        self._calls: dict[str, _Call] = {}
        """By id of an unfinished request."""

    def run(self, wanted: Sequence[_Wanted], advance: Callable[[int], object]) -> list[RequestOutput]:
        """Run all requests, or none if one cannot be run, and return their final outputs in order.

        `advance` is told how many more have finished, after steps in which some have.
        """
        call = _Call()
        try:
            with self.between_steps():
                self._add(call, wanted)
            told = 0
            while self._step_or_wait(call):
                if len(call.outputs) > told:
                    advance(len(call.outputs) - told)
                    told = len(call.outputs)
            advance(len(call.outputs) - told)
            return [call.outputs[request_id] for request_id in call.ids]
        except BaseException:
            # An error or Ctrl-C must leave nothing running behind.
            with self.between_steps():
                self._abort(call)
            raise

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

    def _add(self, call: _Call, wanted: Sequence[_Wanted]) -> None:
        """Add all requests, or none if one is refused; note each in `call` before it is added."""
        try:
            for entry in wanted:
                request_id = str(next(self._numbers))
                call.ids.append(request_id)
                self._calls[request_id] = call
                prompt, params, priority, pooling, counted = entry
                request = Request(request_id, prompt, params, priority, pooling=pooling, counted=counted)
                self._engine.add(request)
        except RequestError as error:
            self._abort(call)
            if len(wanted) == 1:
                raise
            raise RequestError(f"prompt {len(call.ids) - 1}: {error}", error.param, error.code) from error

    def _abort(self, call: _Call) -> None:
        for request_id in call.ids:
            if self._calls.pop(request_id, None) is not None:
                self._engine.abort_request(request_id)

    def _step_or_wait(self, call: _Call) -> bool:
        """Run one step, or wait for another thread's; return whether some request of `call` is unfinished.

        Raises:
            EngineDeadError: the engine has ended, in whichever thread.
        """
        with self._lock:
            self._lock.wait_for(lambda: not (self._stepping or self._changing) or call.finished)
            if call.finished:
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
                for output in outputs:
                    self._keep(output)
                self._stepping = False
                self._lock.notify_all()

    def _keep(self, output: RequestOutput) -> None:
        call = self._calls.pop(output.request_id, None) if output.finished else None
        if call is not None:
            call.outputs[output.request_id] = output


@contextmanager
def _progress(use_tqdm: UseTqdm, total: int) -> Generator[Callable[[int], object]]:
    """Show how many of `total` prompts are done; `use_tqdm=True` does so only on a terminal."""
    if not use_tqdm:
        yield lambda _: None
        return
    text = "Processed prompts"
    if use_tqdm is True:
        from tqdm.auto import tqdm

        bar = tqdm(total=total, desc=text, dynamic_ncols=True, disable=None)
    else:
        bar = use_tqdm(total=total, desc=text)
    try:
        yield bar.update
    finally:
        bar.close()


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
        raise RequestError(f"sampling_params must be SamplingParams, got {params!r:.80}", "sampling_params")
    if len(wanted) != count:
        raise RequestError(f"there are {count} prompts but {len(wanted)} sampling parameters")
    for entry in wanted:
        if not isinstance(entry, SamplingParams):
            raise RequestError(
                f"sampling_params must be SamplingParams, got {entry!r:.80}", "sampling_params"
            )
    # One result a request is all the caller sees, so intermediate ones need not be built.
    return [_final_only(entry) for entry in wanted]


def _pooling_params(
    params: PoolingParams | Iterable[PoolingParams] | None, count: int
) -> list[PoolingParams]:
    if params is None or isinstance(params, PoolingParams):
        return [params or PoolingParams()] * count
    wanted = list(params) if isinstance(params, Iterable) else [params]
    for entry in wanted:
        if not isinstance(entry, PoolingParams):
            raise RequestError(f"pooling_params must be PoolingParams, got {entry!r:.80}", "pooling_params")
    if len(wanted) != count:
        raise RequestError(f"there are {count} prompts but {len(wanted)} pooling parameters")
    return wanted


def _priorities(priority: int | Iterable[int] | None, count: int) -> list[int]:
    listed = without_arrays(priority)
    wanted = list(listed) if isinstance(listed, Iterable) else [0 if listed is None else listed] * count
    if len(wanted) != count:
        raise RequestError(f"there are {count} prompts but {len(wanted)} priorities", "priority")
    for entry in wanted:
        if not is_token_id(entry):
            raise RequestError(f"priority must be an integer, got {entry!r:.80}", "priority")
    return [operator.index(entry) for entry in wanted]


def _final_only(params: SamplingParams) -> SamplingParams:
    return msgspec.structs.replace(params, output_kind=RequestOutputKind.FINAL_ONLY)
