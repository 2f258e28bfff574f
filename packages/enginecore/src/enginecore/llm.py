"""`LLM`: a model to call from a script, with as many prompts at once as there are."""

import itertools
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Unpack

import numpy as np

from enginecore.beam_search import BeamSearch, BeamSearchOutput, BeamSearchParams, decode_beams
from enginecore.concurrent_calls import CallRequest, ConcurrentCalls
from enginecore.config import EngineOptions, make_config
from enginecore.engine import make_engine
from enginecore.errors import RequestError
from enginecore.forks import MadeHere
from enginecore.frontend.pooling import embedding_output, pair, score_outputs
from enginecore.frontend.request import Prompt
from enginecore.frontend.text.hf_tokenizer import HFTokenizer
from enginecore.frontend.text.prompts import PromptInput, as_prompts, is_token_id
from enginecore.metrics import Metric
from enginecore.outputs import EmbeddingRequestOutput, RequestOutput, ScoringRequestOutput
from enginecore.per_prompt import (
    Message,
    as_conversations,
    pooling_params_of_each,
    priority_of_each,
    sampling_params_of_each,
)
from enginecore.pooling_params import PoolingParams
from enginecore.sampling_params import SamplingParams

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
        self._calls = ConcurrentCalls(self.llm_engine)

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
        prepared = [prepare(turns, **options) for turns in as_conversations(messages)]
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
                requests = [
                    CallRequest(prompt, params, 0, counted=False)
                    for search in running
                    for prompt in search.prompts
                ]
                outputs = iter(self._calls.run(requests, lambda _: None))
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
        params = self.get_default_sampling_params() if params is None else params
        each = sampling_params_of_each(params, len(prompts))
        priorities = priority_of_each(priority, len(prompts))
        requests = [CallRequest(*entry) for entry in zip(prompts, each, priorities, strict=True)]
        return self._run_all(requests, use_tqdm)

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
        plans = [make_plan(entry) for entry in pooling_params_of_each(params, len(prompts))]
        priorities = priority_of_each(priority, len(prompts))
        columns = prompts, [plan.sampling for plan in plans], priorities, plans
        return self._run_all([CallRequest(*entry) for entry in zip(*columns, strict=True)], use_tqdm)

    def _run_all(self, requests: Sequence[CallRequest], use_tqdm: UseTqdm) -> list[RequestOutput]:
        with _progress(use_tqdm, len(requests)) as advance:
            return self._calls.run(requests, advance)


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
