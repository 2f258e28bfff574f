"""An engine whose core runs in a process of its own, for asyncio programs. Needs no torch."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence

from enginecore.config import EngineConfig
from enginecore.core.client import CoreClient, CoreProcess
from enginecore.errors import EngineDeadError, OctavoError, RequestAbortedError
from enginecore.forks import MadeHere
from enginecore.frontend.frontend import Frontend
from enginecore.frontend.output_processor import RequestState
from enginecore.frontend.request import Request
from enginecore.frontend.stream import RequestStream
from enginecore.frontend.text.loading import load_tokenizer
from enginecore.frontend.text.prompts import PromptInput
from enginecore.messages import AbortRequests, EngineLimits, EngineStats, Failed, Outputs, ResetPrefixCache
from enginecore.metrics import PREFIX, Metrics
from enginecore.model_files import locate
from enginecore.outputs import RequestOutput
from enginecore.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

_SHUT_DOWN = "the engine was shut down"


class AsyncEngine:
    """An engine whose core runs in a process of its own.

    The constructor returns at once, while the core loads the model; `ready` waits for it. Everything else is
    to be called from one event loop, in the process that made it: after a fork, calls in the child raise
    ForkError.
    """

    def __init__(
        self, config: EngineConfig, *, name: str | None = None, metrics_prefix: str = PREFIX
    ) -> None:
        """`name` is what metrics call the model; its path or id when left out.

        Raises:
            ConfigError: a metric's name cannot begin with `metrics_prefix`.
        """
        self._made_here = MadeHere()
        self.config = config
        self.metrics = Metrics(name or config.model, metrics_prefix)
        self.stats = EngineStats()
        self.error: str | None = None
        self.frontend: Frontend | None = None
        self.streams: set[RequestStream] = set()
        """Streams of which some request has not finished."""
        self._unfinished: dict[str, tuple[RequestState, RequestStream]] = {}
        self._process = CoreProcess(config)
        self._client: CoreClient | None = None
        self._starting: asyncio.Task[EngineLimits] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._stopping = False

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken."""
        return self._client is not None and self.error is None and not self._stopping

    @property
    def core_pid(self) -> int:
        """Process id of the engine core."""
        return self._process.pid

    async def ready(self) -> EngineLimits:
        """Wait until the model is loaded and return its limits.

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
        client, frontend = self._running()
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
                for message in taken.messages:
                    client.send(message)
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
        client, _ = self._running()
        client.send(ResetPrefixCache())

    @property
    def num_unfinished(self) -> int:
        """Requests submitted and not finished."""
        return len(self._unfinished)

    async def shutdown(self) -> None:
        """End the core; unfinished streams fail. In a fork, whose core it is not, do nothing."""
        if not self._made_here:
            return
        self._stopping = True
        self._fail_all(_SHUT_DOWN)
        for task in (self._reading, self._starting):
            if task is not None:
                task.cancel()
        await asyncio.to_thread(self._process.stop)
        if self._client is not None:
            self._client.close()
            self._client = None
        self.metrics.stopped()

    async def _start(self) -> EngineLimits:
        try:
            frontend, limits = await asyncio.gather(
                asyncio.to_thread(self._load_frontend), asyncio.to_thread(self._process.wait_ready)
            )
        except OctavoError as error:
            self.error = str(error)
            await asyncio.to_thread(self._process.stop)
            raise
        frontend.limits = limits
        self.frontend = frontend
        self.metrics.loaded(self.config, limits)
        self._client = CoreClient(self._process.address)
        self._reading = asyncio.create_task(self._read())
        self._reading.add_done_callback(self._on_reading_end)
        loop = asyncio.get_running_loop()
        self._process.watch(lambda reason: _call_soon(loop, self._on_end, reason))
        return limits

    def _load_frontend(self) -> Frontend:
        files = locate(self.config.model, self.config.revision, self.config.hf_overrides)
        return Frontend(self.config, files, load_tokenizer(files, self.config.tokenizer))

    async def _read(self) -> None:
        client, frontend = self._running()
        while True:
            message = await client.receive()
            if isinstance(message, Outputs):
                self._deliver(message, client, frontend)
            elif isinstance(message, Failed):
                self._on_end(message.message)

    def _deliver(self, outputs: Outputs, client: CoreClient, frontend: Frontend) -> None:
        if outputs.stats is not None:
            self.stats = outputs.stats
        processed = frontend.process(outputs)
        if processed.stopped:
            client.send(AbortRequests(processed.stopped))
        self.metrics.record(outputs, processed.changed)
        for state in processed.changed:
            _, stream = self._unfinished[state.request.request_id]
            if state.has_output:
                stream.notify(state)
            if state.finished:
                del self._unfinished[state.request.request_id]
            if stream.num_unfinished == 0:
                self.streams.discard(stream)

    def _abort_stream(self, stream: RequestStream) -> None:
        """Tell the core to drop what has not finished of a stream, without waiting."""
        self.streams.discard(stream)
        for state in stream.states:
            request_id = state.request.request_id
            if self._unfinished.get(request_id) != (state, stream):
                continue
            del self._unfinished[request_id]
            self.metrics.ended_early(state, "abort")
            numbers = [] if self.frontend is None else self.frontend.abort(request_id)
            if numbers and self._client is not None and self.error is None:
                self._client.send(AbortRequests(numbers))

    def _running(self) -> tuple[CoreClient, Frontend]:
        self._made_here.check()
        if self.error is not None:
            raise EngineDeadError(self.error)
        if self._stopping:
            raise EngineDeadError(_SHUT_DOWN)
        if self._client is None or self.frontend is None:
            raise EngineDeadError("the engine is not ready")
        return self._client, self.frontend

    def _on_reading_end(self, reading: asyncio.Task[None]) -> None:
        if not reading.cancelled() and reading.exception() is not None:
            logger.error("reading from the engine failed", exc_info=reading.exception())
            self._on_end(f"reading from the engine failed: {reading.exception()}")

    def _on_end(self, reason: str) -> None:
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
        streams, self.streams = self.streams, set()
        for stream in streams:
            stream.fail(EngineDeadError(reason))


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[str], None], argument: str) -> None:
    # The process is watched from a thread, which may outlive the loop.
    if not loop.is_closed():
        loop.call_soon_threadsafe(callback, argument)
