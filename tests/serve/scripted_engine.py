"""An engine that answers from a script: what the server needs of `AsyncEngine`, and a record of its use."""

import asyncio
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from enginecore.config import EngineConfig
from enginecore.data_parallel.views import EngineWatch
from enginecore.errors import EngineDeadError, OctavoError, RequestError
from enginecore.frontend.parsing import Parsers, Thinking
from enginecore.frontend.request import Prompt, Request
from enginecore.frontend.stream import OutputSink, StreamOutput
from enginecore.messages import EngineLimits, EngineStats, RankLoading
from enginecore.metrics import Metrics
from enginecore.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from enginecore.sampling_params import RequestOutputKind, SamplingParams

LIMITS = EngineLimits(max_model_len=64, vocab_size=320, num_blocks=64, block_size=16)
LOGPROB = math.log(0.5)


@dataclass
class Step:
    """What one token adds to a sample."""

    text: str
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def __post_init__(self) -> None:
        self.tokens = self.tokens or list(self.text.encode())


def say(text: str, finish_reason: str = "stop") -> list[Step]:
    """A script of one token a character, ended by an EOS token, or cut at the last character."""
    steps = [Step(character) for character in text]
    if finish_reason == "stop":
        return [*steps, Step("", [257], "stop")]
    return [*steps[:-1], replace(steps[-1], finish_reason=finish_reason)]


class ByteTokenizer:
    vocab_size = 260
    special_ids = frozenset(range(256, 260))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [256] * add_special_tokens + list(text.encode())

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return bytes(token for token in ids if token < 256).decode(errors="replace")

    def token_text(self, token: int) -> str:
        return self.token_bytes(token).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b"<%d>" % token


class ScriptedFrontend:
    def __init__(self) -> None:
        self.tokenizer = ByteTokenizer()
        self.limits = LIMITS
        self.added_special_tokens = False
        self.parsers = Parsers()
        self.sampling_defaults: dict[str, Any] = {}
        self.eos_ids = [257]
        self.detokenized_in: threading.Thread | None = None
        self.tokenized_in: threading.Thread | None = None
        self.compiled_in: threading.Thread | None = None
        self.thinking: Thinking | None = None

    def require_tokenizer(self) -> ByteTokenizer:
        return self.tokenizer

    def detokenize(self, ids: Sequence[int]) -> str:
        self.detokenized_in = threading.current_thread()
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def bad_word_ids(self, params: SamplingParams) -> list[list[int]]:
        self.tokenized_in = threading.current_thread()
        return [self.tokenizer.encode(word, add_special_tokens=False) for word in params.bad_words]

    def grammar(self, params: SamplingParams, thinking: Thinking | None = None) -> str:
        """A grammar that names what was asked for; the regex "(" does not compile."""
        self.thinking = thinking
        self.compiled_in = threading.current_thread()
        wanted = params.structured_outputs
        assert wanted is not None
        if wanted.regex == "(":
            raise RequestError("structured_outputs: regex: unclosed group", "structured_outputs")
        return f"{wanted.kind}: {getattr(wanted, wanted.kind)}"

    def prepare_prompt(
        self,
        prompt: str | list[int],
        add_special_tokens: bool = True,
        *,
        cache_salt: str | None = None,
    ) -> Prompt:
        self.added_special_tokens = add_special_tokens
        if isinstance(prompt, str):
            return Prompt(prompt, self.tokenizer.encode(prompt, add_special_tokens=False), cache_salt)
        return Prompt(None, prompt, cache_salt)

    def prepare_chat(
        self, messages: list[dict[str, Any]], /, *, cache_salt: str | None = None, **options: Any
    ) -> Prompt:
        text = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
        text += "".join(f"{key}={value}\n" for key, value in options.items())
        return self.prepare_prompt(text, cache_salt=cache_salt)


class ScriptedStream:
    """Yields the outputs of each request in turn, one by one, as far as the engine's gate is open."""

    def __init__(self, engine: "ScriptedEngine", outputs: dict[str, list[RequestOutput]]) -> None:
        """`outputs` are those of each request, by its id."""
        self._engine = engine
        turns = max(map(len, outputs.values()))
        self._outputs = [
            StreamOutput(index, mine[turn])
            for turn in range(turns)
            for index, mine in enumerate(outputs.values())
            if turn < len(mine)
        ]
        self.unfinished = list(outputs)
        self.metrics = [engine.course() for _ in outputs]
        self._failure: OctavoError | None = None
        self._wake = asyncio.Event()
        self._closed = False
        self._sink: OutputSink | None = None

    @property
    def ended(self) -> bool:
        return self._closed or not self.unfinished

    def __aiter__(self) -> "ScriptedStream":
        return self

    def pass_to(self, sink: OutputSink) -> None:
        self._sink = sink

    async def __anext__(self) -> StreamOutput:
        while True:
            while self._failure is None and not self.ended and self._engine.allowed <= self._engine.given:
                self._wake.clear()
                await self._wake.wait()
            if self._failure is not None and not self.ended:
                self._closed = True
                raise self._failure
            if self.ended:
                raise StopAsyncIteration
            self._engine.given += 1
            item = self._outputs.pop(0)
            if item.output.finished:
                self.unfinished.remove(item.output.request_id)
            elif self._sink is not None and self._sink.is_open:
                self._sink.take(*item)
                continue
            return item

    async def __aenter__(self) -> "ScriptedStream":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if not self.ended:
            self._engine.aborted += self.unfinished
        self._closed = True

    def wake(self) -> None:
        self._wake.set()

    def fail(self, error: OctavoError) -> None:
        self._failure = error
        self._wake.set()


class ScriptedEngine:
    def __init__(
        self,
        config: EngineConfig | None = None,
        script: Callable[[Prompt, SamplingParams], list[Step]] = lambda prompt, params: say("ab"),
    ) -> None:
        self.config = config or EngineConfig(model="models/tiny")
        self.frontend = ScriptedFrontend()
        self.metrics = Metrics("tiny")
        self.stats = EngineStats()
        self.ranks_down: dict[int, str] = {}
        self.ranks_loading: dict[int, RankLoading] = {}
        self.error: str | None = None
        self.on_load: Callable[[int, int], None] = lambda waiting, unfinished: None
        self.queue_seconds = 0.0
        self.prefix_cache_resets = 0
        self.is_ready = True
        self.failure: OctavoError | None = None
        self.loading = asyncio.Event()
        self.script = script
        self.cached = 0
        self.course = lambda: RequestMetrics(arrival_time=time.time())
        """Makes the times of a request."""
        self.allowed: float = math.inf
        self.given = 0
        self.streams: list[ScriptedStream] = []
        self.requests: list[Request] = []
        self.aborted: list[str] = []
        self.was_shut_down = False
        self.watch_state = EngineWatch()

    @property
    def takes_requests(self) -> bool:
        return self.is_ready

    async def ready(self) -> EngineLimits:
        await self.loading.wait()
        if self.failure is not None:
            raise self.failure
        self.is_ready = True
        return LIMITS

    def submit(self, requests: Sequence[Request]) -> ScriptedStream:
        if self.error is not None:
            raise EngineDeadError(self.error)
        for request in requests:
            if not request.prompt.token_ids:
                raise RequestError("the prompt is empty", "prompt")
            if max(request.prompt.token_ids) >= LIMITS.vocab_size:
                raise RequestError(f"prompt holds token id {max(request.prompt.token_ids)}", "prompt")
        names = [request.request_id for request in [*self.requests, *requests]]
        assert len(set(names)) == len(names), "an id was given twice"
        self.requests += requests
        stream = ScriptedStream(self, {request.request_id: self._script(request) for request in requests})
        self.streams.append(stream)
        return stream

    def _script(self, request: Request) -> list[RequestOutput]:
        prompt, params = request.prompt, request.params
        steps = self.script(prompt, params)
        if params.max_tokens is not None and len(steps) > params.max_tokens:
            steps = steps[: params.max_tokens]
            steps[-1] = replace(steps[-1], finish_reason="length")
        samples = [
            _outputs(request.request_id, prompt, params, steps, index, self.cached)
            for index in range(params.n)
        ]
        outputs = [output for step in zip(*samples, strict=True) for output in step]
        outputs[1:] = [replace(output, prompt_logprobs=None) for output in outputs[1:]]
        if params.output_kind == RequestOutputKind.FINAL_ONLY:
            return [_joined(outputs, params)]
        return [*(replace(output, finished=False) for output in outputs[:-1]), outputs[-1]]

    async def reset_prefix_cache(self) -> None:
        self.prefix_cache_resets += 1

    def interrupt(self, stream: ScriptedStream, error: OctavoError) -> None:
        if not stream.ended:
            self.aborted += stream.unfinished
            stream.fail(error)

    def allow(self, outputs: float) -> None:
        """Let so many more outputs pass."""
        self.allowed = self.given + outputs
        for stream in self.streams:
            stream.wake()

    def die(self, message: str) -> None:
        self.error = message
        for stream in self.streams:
            if not stream.ended:
                stream.fail(EngineDeadError(message))

    def rank_stats(self) -> dict[int, EngineStats]:
        return {0: self.stats}

    @contextmanager
    def watch(self):
        self.watch_state.watchers += 1
        try:
            yield self.watch_state
        finally:
            self.watch_state.watchers -= 1

    async def shutdown(self) -> None:
        self.was_shut_down = True


def _outputs(
    request_id: str, prompt: Prompt, params: SamplingParams, steps: list[Step], index: int, cached: int
) -> list[RequestOutput]:
    scored = params.prompt_logprobs is not None
    return [
        RequestOutput(
            request_id,
            prompt.text,
            prompt.token_ids,
            [
                CompletionOutput(
                    index,
                    step.text,
                    step.tokens,
                    logprobs=_rows(step.tokens, params),
                    finish_reason=step.finish_reason,
                    stop_reason=step.stop_reason,
                )
            ],
            finished=step.finish_reason is not None,
            num_cached_tokens=cached,
            prompt_logprobs=[None, *(_row(token, 0) for token in prompt.token_ids[1:])] if scored else None,
        )
        for step in steps
    ]


def _rows(tokens: list[int], params: SamplingParams) -> list[dict[int, Logprob]] | None:
    if params.logprob_token_ids is not None:
        return [
            {token: Logprob(LOGPROB, 1)}
            | {other: Logprob(-other, None) for other in params.logprob_token_ids}
            for token in tokens
        ]
    return None if params.logprobs is None else [_row(token, params.logprobs) for token in tokens]


def _row(token: int, count: int) -> dict[int, Logprob]:
    """The chosen token at one half; where asked for, token 90 ("Z") is a likelier one."""
    row = {token: Logprob(LOGPROB, 2 if count else 1, None)}
    return row | {90: Logprob(-0.25, 1, "Z")} if count else row


def _joined(outputs: list[RequestOutput], params: SamplingParams) -> RequestOutput:
    samples = []
    for index in range(params.n):
        parts = [part for output in outputs for part in output.outputs if part.index == index]
        samples.append(
            replace(
                parts[-1],
                text="".join(part.text for part in parts),
                token_ids=[token for part in parts for token in part.token_ids],
                logprobs=[row for part in parts for row in part.logprobs or []]
                if params.wants_logprobs
                else None,
            )
        )
    prompt_logprobs = outputs[0].prompt_logprobs
    return replace(outputs[-1], outputs=samples, finished=True, prompt_logprobs=prompt_logprobs)
