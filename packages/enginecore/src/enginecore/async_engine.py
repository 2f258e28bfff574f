"""An engine whose cores run in processes of their own, for asyncio programs. Needs no torch."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from functools import reduce
from operator import add
from pathlib import Path
from typing import Protocol

from enginecore.config import EngineConfig
from enginecore.core.board import Board
from enginecore.core.supervisor import RankSupervisor
from enginecore.data_parallel.dispatch import Dispatcher
from enginecore.data_parallel.messages import CoordinatorAddress
from enginecore.errors import EngineDeadError, ModelError, OctavoError, RequestAbortedError
from enginecore.forks import MadeHere
from enginecore.frontend.frontend import Frontend
from enginecore.frontend.output_processor import RequestState
from enginecore.frontend.request import Request
from enginecore.frontend.stream import RequestStream
from enginecore.frontend.text.loading import load_tokenizer
from enginecore.frontend.text.prompts import PromptInput
from enginecore.messages import EngineLimits, EngineStats, Outputs, RankEvent, ResetPrefixCache
from enginecore.metrics import PREFIX, Metrics
from enginecore.model_files import locate
from enginecore.outputs import RequestOutput
from enginecore.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

_SHUT_DOWN = "the engine was shut down"


class RankSource(Protocol):
    """Who keeps the ranks alive, as an engine sees it: `RankSupervisor`, or a pipe from its process."""

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
        ranks: RankSource | None = None,
        number: int = 0,
    ) -> None:
        """`name` is what metrics call the model; its path or id when left out.

        `ranks` are started and kept alive elsewhere; without them the engine does so itself. `number` is this
        front-end's among those that share them.

        Raises:
            ConfigError: a metric's name cannot begin with `metrics_prefix`.
        """
        self._made_here = MadeHere()
        self.config = config
        self.metrics = Metrics(name or config.model, metrics_prefix)
        self.error: str | None = None
        """Why the engine has ended; None while it runs."""
        self.frontend: Frontend | None = None
        self.streams: set[RequestStream] = set()
        """Streams of which some request has not finished."""
        self._unfinished: dict[str, tuple[RequestState, RequestStream]] = {}
        self._number = number
        self._ranks: RankSource = ranks or RankSupervisor(config)
        self._boards: dict[int, Board] = {}
        self._dispatcher: Dispatcher | None = None
        self._starting: asyncio.Task[EngineLimits] | None = None
        self._stopping = False

    @property
    def is_ready(self) -> bool:
        """Whether some rank runs requests now."""
        return self._dispatcher is not None and bool(self._dispatcher.up) and not self._stopping

    @property
    def takes_requests(self) -> bool:
        """Whether requests are taken; while no rank is up they wait for one."""
        return self.frontend is not None and self.error is None and not self._stopping

    @property
    def ranks_down(self) -> dict[int, str]:
        """Ranks that have ended, and why: they are being started again, or are given up."""
        return {} if self._dispatcher is None else self._dispatcher.down

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

    def submit(self, requests: Sequence[Request]) -> RequestStream:
        """Submit all requests, or none, and return the stream of their outputs.

        Raises:
            RequestError: one of them cannot be run as asked.
            EngineDeadError: the engine has ended or is not ready yet.
        """
        dispatcher, frontend = self._running()
        added = []
        try:
            for request in requests:
                added.append(frontend.add(request))
        except BaseException:
            for taken in added:
                frontend.abort(taken.state.request.request_id)
            raise
        stream = RequestStream([taken.state for taken in added], self._abort_stream)
        self.streams.add(stream)
        self._unfinished |= {taken.state.request.request_id: (taken.state, stream) for taken in added}
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
        request = Request(request_id, frontend.prepare_prompt(prompt), sampling_params, priority)
        async with self.submit([request]) as stream:
            async for _, output in stream:
                yield output

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
        try:
            frontend = await asyncio.to_thread(self._load_frontend)
            dispatcher = Dispatcher(self.config, frontend, self._ranks, self._number)
            dispatcher.on_outputs = self._deliver
            self._ranks.listen(lambda event: _call_soon(loop, dispatcher.take, event))
            limits = await dispatcher.ready()
        except OctavoError as error:
            self.error = str(error)
            await asyncio.to_thread(self._ranks.stop)
            raise
        self.frontend = frontend
        self._dispatcher = dispatcher
        self.metrics.loaded(self.config, limits)
        dispatcher.on_end = self._on_end
        return limits

    def _load_frontend(self) -> Frontend:
        files = locate(self.config.model, self.config.revision, self.config.hf_overrides)
        return Frontend(self.config, files, load_tokenizer(files, self.config.tokenizer), number=self._number)
