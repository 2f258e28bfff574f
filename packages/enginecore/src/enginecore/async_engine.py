"""An engine whose cores run in processes of their own, for asyncio programs. Needs no torch."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from contextlib import contextmanager
from functools import reduce
from operator import add
from pathlib import Path
from typing import Protocol
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from enginecore.config import EngineConfig
from enginecore.core.board import Board
from enginecore.core.supervisor import RankSupervisor
from enginecore.data_parallel.dispatcher import Dispatcher
from enginecore.data_parallel.messages import CoordinatorAddress
from enginecore.data_parallel.views import EngineWatch
from enginecore.errors import EngineDeadError, OctavoError, RequestAbortedError
from enginecore.forks import MadeHere
from enginecore.frontend.frontend import Frontend
from enginecore.frontend.pooling import embedding_output, pair, score_outputs
from enginecore.frontend.request import Request
from enginecore.frontend.request_state import RequestState
from enginecore.frontend.stream import RequestStream
from enginecore.frontend.text.loading import load_tokenizer
from enginecore.frontend.text.prompts import PromptInput, as_prompts
from enginecore.messages import (
    EngineLimits,
    EngineStats,
    Outputs,
    RankChange,
    RankEvent,
    RankLoading,
    ResetPrefixCache,
)
from enginecore.metrics import PREFIX, Metrics
from enginecore.model_files import locate
from enginecore.outputs import EmbeddingRequestOutput, RequestOutput, ScoringRequestOutput
from enginecore.pooling_params import PoolingParams
from enginecore.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

_SHUT_DOWN = "the engine was shut down"


class RankSource(Protocol):
    """Source of ranks and of news of them: `RankSupervisor`, or a pipe from its process."""

    boards: dict[int, Path]
    """Path of each rank's board."""
    coordinator: CoordinatorAddress | None
    """Where to learn the ranks' loads; None with one rank."""

    def listen(self, listener: Callable[[RankEvent], None]) -> None:
        """Call `listener`, from another thread, with each event, those so far included."""
        ...

    def stop(self) -> None:
        """Need the ranks no more; who started them ends them."""
        ...


class AsyncEngine:
    """An engine whose cores, one for each data-parallel rank, run in processes of their own.

    The constructor returns at once, while the cores load the model; `ready` waits for it. A rank that ends is
    started again, and its requests go on where they were, there or on another rank. Everything else is to be
    called from one event loop, in the process that made it: after a fork, calls in the child raise ForkError.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        name: str | None = None,
        metrics_prefix: str = PREFIX,
        metrics_folder: str | None = None,
        ranks: RankSource | None = None,
        number: int = 0,
    ) -> None:
        """Start the ranks.

        Args:
            name: What metrics call the model; its path or id when left out.
            metrics_prefix: Beginning of the metrics' names.
            metrics_folder: Where several processes count together; see `Metrics`.
            ranks: Those that somebody else has started and keeps alive.
            number: This front-end's among those that share the ranks.

        Raises:
            ConfigError: a metric's name cannot begin with `metrics_prefix`.
        """
        self._made_here = MadeHere()
        self.config = config
        self.metrics = Metrics(
            name or config.model,
            metrics_prefix,
            stats=self.rank_stats,
            ranks=config.local_ranks,
            folder=metrics_folder,
        )
        self.error: str | None = None
        """Why the engine has ended; None while it runs."""
        self.frontend: Frontend | None = None
        self.streams: set[RequestStream] = set()
        """Streams of which some request has not finished."""
        self.on_load: Callable[[int, int], None] = lambda waiting, unfinished: None
        """Told how many requests of this front-end wait for their first step, and how many have not finished,
        whenever that has changed."""
        self.queue_seconds = 0.0
        """How long the request that last got its first step had waited for it."""
        self._waiting: set[str] = set()
        """Ids of requests that wait for their first step."""
        self._unfinished: dict[str, tuple[RequestState, RequestStream]] = {}
        self._changed: dict[RequestState, None] = {}
        """Requests that have changed and whose callers have not heard of it."""
        self._watch = EngineWatch()
        self._number = number
        self._ranks: RankSource = ranks or RankSupervisor(config)
        self._boards: dict[int, Board] = {}
        self._dispatcher: Dispatcher | None = None
        self.ranks_loading: dict[int, RankLoading] = {}
        """Progress of the ranks that start, or start again."""
        self._early: list[RankChange] = []
        """What has become of ranks while there is no dispatcher yet."""
        self._starting: asyncio.Task[EngineLimits] | None = None
        self._stopping = False

    @property
    def is_ready(self) -> bool:
        """Whether some rank runs requests now."""
        return self.takes_requests and self._dispatcher is not None and bool(self._dispatcher.up)

    @property
    def takes_requests(self) -> bool:
        """Whether requests are taken; while no rank is up they wait for one."""
        return self.frontend is not None and self.error is None and not self._stopping

    @property
    def ranks_down(self) -> dict[int, str]:
        """Ranks that have ended, and why: they are being started again, or are given up."""
        return {} if self._dispatcher is None else self._dispatcher.down | self._dispatcher.out

    @property
    def core_pids(self) -> list[int]:
        """Process ids of the cores that this engine runs, by rank."""
        return self._ranks.pids if isinstance(self._ranks, RankSupervisor) else []

    @property
    def stats(self) -> EngineStats:
        """The state of all ranks of this host together."""
        return reduce(add, self.rank_stats().values(), EngineStats())

    def rank_stats(self) -> dict[int, EngineStats]:
        """Return the state of each rank of this host; counters count from the first start of each."""
        for rank, path in self._ranks.boards.items():
            if rank not in self._boards and path.exists():
                self._boards[rank] = Board(path)
        return {rank: board.stats() for rank, board in self._boards.items()}

    async def ready(self) -> EngineLimits:
        """Wait until the model is loaded, on all ranks, and return its limits.

        Raises:
            OctavoError: it could not be loaded; the message says why in one line.
            EngineDeadError: the engine was shut down, before or meanwhile.
        """
        self._made_here.check()
        if self._stopping:
            raise EngineDeadError(_SHUT_DOWN)
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        await asyncio.wait({self._starting})
        if self._starting.cancelled():
            raise EngineDeadError(_SHUT_DOWN)
        return self._starting.result()

    def submit(self, requests: Sequence[Request], *, shorten: bool = False) -> RequestStream:
        """Submit all requests, or none, and return the stream of their outputs.

        With `shorten`, a `max_tokens` that there is no room for is lowered to the room.

        Raises:
            RequestError: one of them cannot be run as asked.
            EngineDeadError: the engine has ended or is not ready yet.
        """
        dispatcher, frontend = self._running()
        added = []
        try:
            for request in requests:
                added.append(frontend.add(request, shorten=shorten))
        except BaseException:
            for taken in added:
                frontend.abort(taken.state.request.request_id)
            raise
        stream = RequestStream([taken.state for taken in added], self._abort_stream)
        self.streams.add(stream)
        self._unfinished |= {taken.state.request.request_id: (taken.state, stream) for taken in added}
        self._waiting.update(taken.state.request.request_id for taken in added)
        self._tell_load()
        try:
            for taken in added:
                dispatcher.send(taken.messages)
        except BaseException:
            self._abort_stream(stream)
            raise
        return stream

    async def generate(
        self, prompt: PromptInput, sampling_params: SamplingParams, request_id: str, *, priority: int = 0
    ) -> AsyncIterator[RequestOutput]:
        """Yield a request's outputs; leaving the loop early aborts it. Raises as `submit` does."""
        await self.ready()
        _, frontend = self._running()
        grammar = None
        if sampling_params.structured_outputs is not None:
            grammar = await asyncio.to_thread(frontend.grammar, sampling_params)
        prepared = frontend.prepare_prompt(prompt)
        request = Request(request_id, prepared, sampling_params, priority, grammar=grammar)
        async with self.submit([request]) as stream:
            async for _, output in stream:
                yield output

    async def embed(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        pooling_params: PoolingParams | None = None,
        *,
        priority: int = 0,
    ) -> list[EmbeddingRequestOutput]:
        """Return the embedding of each prompt, in order; cancelling it aborts them.

        Raises as `submit` does.
        """
        await self.ready()
        outputs = await self._pooled(as_prompts(prompts), pooling_params, priority)
        return [embedding_output(output) for output in outputs]

    async def score(
        self,
        text_1: PromptInput | Sequence[PromptInput],
        text_2: PromptInput | Sequence[PromptInput],
        pooling_params: PoolingParams | None = None,
        *,
        priority: int = 0,
    ) -> list[ScoringRequestOutput]:
        """Return the cosine of the embeddings of pairs of texts: 1 with 1, 1 with each of N, N with N."""
        await self.ready()
        first, second = as_prompts(text_1), as_prompts(text_2)
        pairs = pair(len(first), len(second), ("text_1", "text_2"))
        outputs = await self._pooled([*first, *second], pooling_params, priority)
        return score_outputs(outputs[: len(first)], outputs[len(first) :], pairs)

    async def _pooled(
        self, prompts: Sequence[PromptInput], params: PoolingParams | None, priority: int
    ) -> list[RequestOutput]:
        _, frontend = self._running()
        if not prompts:
            return []
        plan, name = frontend.pooling_plan(params), uuid4().hex
        requests = [
            Request.to_pool(f"embd-{name}-{index}", frontend.prepare_text(prompt), plan, priority)
            for index, prompt in enumerate(prompts)
        ]
        async with self.submit(requests) as stream:
            outputs = {index: output async for index, output in stream}
        return [outputs[index] for index in range(len(requests))]

    async def abort(self, request_id: str) -> None:
        """Forget a request; its stream raises RequestAbortedError. One that has ended is passed over."""
        self._made_here.check()
        if request_id in self._unfinished:
            _, stream = self._unfinished[request_id]
            self.interrupt(stream, RequestAbortedError(f"request {request_id!r} was aborted"))

    def interrupt(self, stream: RequestStream, error: OctavoError) -> None:
        """Abort a stream's requests; its reader gets `error` after what it has not read yet."""
        self._abort_stream(stream)
        stream.fail(error)

    async def reset_prefix_cache(self) -> None:
        """Forget cached prefixes that no request uses."""
        dispatcher, _ = self._running()
        dispatcher.broadcast(ResetPrefixCache())

    async def expert_loads(self) -> NDArray[np.int64] | None:
        """Return how many tokens went to each expert on the ranks that are up, since each was started.

        int64 [layers with experts, experts]; None for a model without experts.
        """
        dispatcher, _ = self._running()
        return await dispatcher.expert_loads()

    @contextmanager
    def watch(self) -> Generator[EngineWatch]:
        """Have the ranks tell of their steps and blocks, until the last one leaves this context.

        Nothing of that is recorded or sent while nobody watches.
        """
        watch = self._watch
        watch.watchers += 1
        if watch.watchers == 1 and self._dispatcher is not None:
            self._dispatcher.watch(True)
        try:
            yield watch
        finally:
            watch.watchers -= 1
            if not watch.watchers:
                watch.ranks.clear()
                if self._dispatcher is not None:
                    self._dispatcher.watch(False)

    @property
    def num_unfinished(self) -> int:
        """Requests submitted and not finished."""
        return len(self._unfinished)

    async def shutdown(self) -> None:
        """End the cores; unfinished streams fail. In a fork, whose cores they are not, do nothing."""
        if not self._made_here:
            return
        self._stopping = True
        self._fail_all(_SHUT_DOWN)
        if self._starting is not None:
            self._starting.cancel()
        await asyncio.to_thread(self._ranks.stop)
        if self._dispatcher is not None:
            self._dispatcher.close()
        self.metrics.stopped()

    async def _start(self) -> EngineLimits:
        loop = asyncio.get_running_loop()
        # Before the tokenizer is read, so that progress shows meanwhile.
        self._ranks.listen(lambda event: _call_soon(loop, self._take, event))
        try:
            frontend = await asyncio.to_thread(self._load_frontend)
            dispatcher = Dispatcher(
                list(self._ranks.boards),
                frontend,
                self._number,
                self._ranks.coordinator,
                follow_prefixes=self.config.follows_prefixes,
            )
            self._dispatcher = dispatcher
            dispatcher.on_outputs = self._take_outputs
            dispatcher.on_caught_up = self._deliver
            dispatcher.on_view = self._watch.update
            if self._watch.watchers:
                dispatcher.watch(True)
            dispatcher.on_change = self._on_change
            dispatcher.on_failure = self._end
            early, self._early = self._early, []
            for event in early:
                dispatcher.take(event)
            limits = await dispatcher.ready()
        except OctavoError as error:
            self.error = str(error)
            await asyncio.to_thread(self._ranks.stop)
            raise
        self.metrics.loaded(self.config, limits)
        self.frontend = frontend
        return limits

    def _take(self, event: RankEvent) -> None:
        if isinstance(event, RankLoading):
            self.ranks_loading[event.rank] = event
            return
        self.ranks_loading.pop(event.rank, None)
        if self._dispatcher is None:
            self._early.append(event)
        else:
            self._dispatcher.take(event)

    def _load_frontend(self) -> Frontend:
        files = locate(self.config.model, self.config.revision, self.config.hf_overrides)
        tokenizer = load_tokenizer(files, self.config.tokenizer)
        return Frontend(self.config, files, tokenizer, number=self._number)

    def _take_outputs(self, rank: int, outputs: Outputs) -> None:
        dispatcher, frontend = self._running()
        processed = frontend.process(outputs)
        if processed.stopped:
            dispatcher.abort(processed.stopped)
        self.metrics.record(outputs, processed, rank)
        self._changed.update(dict.fromkeys(processed.changed))
        if outputs.scheduled:
            self.queue_seconds = max(waited for _, waited in outputs.scheduled.values())
            self._waiting.difference_update(state.request.request_id for state in processed.scheduled)

    def _deliver(self) -> None:
        """Let callers have what has changed, however many steps it took: one output for all of them."""
        changed, self._changed = self._changed, {}
        for state in changed:
            request_id = state.request.request_id
            unfinished = self._unfinished.get(request_id)
            if unfinished is None or unfinished[0] is not state:
                continue  # aborted meanwhile
            stream = unfinished[1]
            if state.unfinished == 0:
                del self._unfinished[request_id]
                self._waiting.discard(request_id)
                if stream.num_unfinished == 1:
                    self.streams.discard(stream)
            if state.has_output:
                stream.notify(state)
        self._tell_load()

    def _abort_stream(self, stream: RequestStream) -> None:
        """Tell the cores to drop what has not finished of a stream, without waiting."""
        self.streams.discard(stream)
        for state in stream.states:
            request_id = state.request.request_id
            if self._unfinished.get(request_id) != (state, stream):
                continue
            del self._unfinished[request_id]
            self._waiting.discard(request_id)
            self.metrics.ended_early(state, "abort")
            numbers = [] if self.frontend is None else self.frontend.abort(request_id)
            if numbers and self._dispatcher is not None and self.error is None:
                self._dispatcher.abort(numbers)
        self._tell_load()

    def _tell_load(self) -> None:
        self.on_load(len(self._waiting), len(self._unfinished))

    def _running(self) -> tuple[Dispatcher, Frontend]:
        self._made_here.check()
        if self.error is not None:
            raise EngineDeadError(self.error)
        if self._stopping:
            raise EngineDeadError(_SHUT_DOWN)
        if self._dispatcher is None or self.frontend is None:
            raise EngineDeadError("the engine is not ready")
        return self._dispatcher, self.frontend

    def _on_change(self) -> None:
        """Take note of ranks that are up, down or out."""
        dispatcher = self._dispatcher
        if dispatcher is None or self._stopping:
            return
        for rank in self._ranks.boards:
            (self.metrics.rank_up if rank in dispatcher.up else self.metrics.rank_down)(rank)
        if self.frontend is not None and self.error is None and dispatcher.failure is not None:
            self._end(dispatcher.failure)

    def _end(self, reason: str) -> None:
        if self._stopping or self.error is not None:
            return
        logger.error("%s", reason)
        self.error = reason
        self.metrics.stopped()
        self._fail_all(reason)

    def _fail_all(self, reason: str) -> None:
        for request_id, (state, _) in self._unfinished.items():
            if self.frontend is not None:
                self.frontend.abort(request_id)
            self.metrics.ended_early(state, "abort" if self._stopping else "error")
        self._unfinished.clear()
        self._waiting.clear()
        self._tell_load()
        streams, self.streams = self.streams, set()
        for stream in streams:
            stream.fail(EngineDeadError(reason))


def _call_soon(
    loop: asyncio.AbstractEventLoop, callback: Callable[[RankEvent], None], event: RankEvent
) -> None:
    # Events come from a thread, which may outlive the loop.
    if not loop.is_closed():
        loop.call_soon_threadsafe(callback, event)
