"""An engine whose core runs in a process of its own, for asyncio programs. Needs no torch."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Self

from enginecore.config import EngineConfig
from enginecore.core.client import CoreClient, CoreProcess
from enginecore.errors import EngineDeadError, OctavoError, RequestAbortedError
from enginecore.frontend.frontend import Frontend
from enginecore.frontend.text.loading import load_tokenizer
from enginecore.frontend.text.prompts import PromptInput
from enginecore.messages import AbortRequests, EngineStats, Failed, Outputs, Ready, ResetPrefixCache
from enginecore.metrics import Metrics
from enginecore.model_files import locate
from enginecore.outputs import RequestOutput
from enginecore.sampling_params import SamplingParams

logger = logging.getLogger(__name__)


class RequestStream:
    """The outputs of one request as they come; closing it early, or being cancelled in it, aborts it."""

    def __init__(self, engine: "AsyncEngine", request_id: str) -> None:
        self.request_id = request_id
        self.arrival = time.time()
        self.last_token: float | None = None
        self._engine = engine
        self._outputs: deque[RequestOutput] = deque()
        self._arrived = asyncio.Event()
        self._failure: OctavoError | None = None
        self._ended = False

    def put(self, output: RequestOutput) -> None:
        """Hand over an output."""
        self._outputs.append(output)
        self._arrived.set()

    def fail(self, error: OctavoError) -> None:
        """Let the reader see an error after what it has not read yet."""
        self._failure = error
        self._arrived.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        while not self._outputs:
            if self._ended:
                raise StopAsyncIteration
            if self._failure is not None:
                self._ended = True
                raise self._failure
            self._arrived.clear()
            try:
                await self._arrived.wait()
            except asyncio.CancelledError:
                self._engine.abort_now(self.request_id)
                raise
        output = self._outputs.popleft()
        self._ended = output.finished
        return output

    async def aclose(self) -> None:
        """Abort the request unless it has finished."""
        if not self._ended:
            self._ended = True
            self._engine.abort_now(self.request_id)


class AsyncEngine:
    """An engine whose core runs in a process of its own.

    The constructor returns at once, while the core loads the model; `ready` waits for it. Everything else is
    to be called from one event loop.
    """

    def __init__(self, config: EngineConfig, *, name: str | None = None) -> None:
        """`name` is what metrics call the model; its path or id when left out."""
        self.config = config
        self.metrics = Metrics(name or config.model)
        self.stats = EngineStats()
        self.error: str | None = None
        self.frontend: Frontend | None = None
        self._process = CoreProcess(config)
        self._client: CoreClient | None = None
        self._streams: dict[str, RequestStream] = {}
        self._starting: asyncio.Task[Ready] | None = None
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

    async def ready(self) -> Ready:
        """Wait until the model is loaded and return its limits.

        Raises:
            OctavoError: it could not be loaded; the message says why in one line.
        """
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        return await asyncio.shield(self._starting)

    def add_request(
        self,
        request_id: str,
        prompt: PromptInput,
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> RequestStream:
        """Submit a request and return its outputs as they come.

        Raises:
            RequestError: it cannot be run as asked; nothing was submitted.
            EngineDeadError: the engine has ended or is not ready yet.
        """
        client, frontend = self._running()
        prepared = frontend.prepare_prompt(prompt)
        messages = frontend.add(request_id, prepared, params, priority=priority, cache_salt=cache_salt)
        stream = self._streams[request_id] = RequestStream(self, request_id)
        for message in messages:
            client.send(message)
        return stream

    async def generate(
        self,
        prompt: PromptInput,
        params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yield a request's outputs; leaving the loop early aborts it. Raises as `add_request` does."""
        await self.ready()
        stream = self.add_request(request_id, prompt, params, priority=priority, cache_salt=cache_salt)
        try:
            async for output in stream:
                yield output
        finally:
            await stream.aclose()

    async def abort(self, request_id: str) -> None:
        """Forget a request; its stream raises RequestAbortedError. One that has ended is passed over."""
        stream = self._streams.get(request_id)
        self.abort_now(request_id)
        if stream is not None:
            stream.fail(RequestAbortedError(f"request {request_id!r} was aborted"))

    def abort_now(self, request_id: str) -> None:
        """Tell the core to drop a request, without waiting."""
        stream = self._streams.pop(request_id, None)
        if stream is None or self.frontend is None:
            return
        numbers = self.frontend.abort(request_id)
        self.metrics.finished(stream.arrival, "abort")
        if numbers and self._client is not None and self.error is None:
            self._client.send(AbortRequests(numbers))

    async def reset_prefix_cache(self) -> None:
        """Forget cached prefixes that no request uses."""
        client, _ = self._running()
        client.send(ResetPrefixCache())

    @property
    def num_unfinished(self) -> int:
        """Requests submitted and not finished."""
        return len(self._streams)

    async def shutdown(self) -> None:
        """End the core; unfinished streams fail."""
        self._stopping = True
        self._fail_all("the engine was shut down")
        for task in (self._reading, self._starting):
            if task is not None:
                task.cancel()
        await asyncio.to_thread(self._process.stop)
        if self._client is not None:
            self._client.close()
            self._client = None
        self.metrics.stopped()

    async def _start(self) -> Ready:
        try:
            frontend, ready = await asyncio.gather(
                asyncio.to_thread(self._load_frontend), asyncio.to_thread(self._process.wait_ready)
            )
        except OctavoError as error:
            self.error = str(error)
            await asyncio.to_thread(self._process.stop)
            raise
        frontend.limits = ready
        self.frontend = frontend
        self._client = CoreClient(self._process.address)
        self._reading = asyncio.create_task(self._read())
        self._reading.add_done_callback(self._on_reading_end)
        loop = asyncio.get_running_loop()
        self._process.watch(lambda reason: _call_soon(loop, self._on_end, reason))
        return ready

    def _load_frontend(self) -> Frontend:
        files = locate(self.config.model, self.config.revision)
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
            self.metrics.observe(outputs.stats)
        for _, waited in outputs.scheduled.values():
            self.metrics.queue_time.observe(waited)
        received = frontend.receive(outputs)
        if received.abort:
            client.send(AbortRequests(received.abort))
        now = time.time()
        for output in received.outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                self._measure(stream, output, now)
                stream.put(output)

    def _measure(self, stream: RequestStream, output: RequestOutput, now: float) -> None:
        if stream.last_token is None:
            self.metrics.first_token(stream.arrival)
        else:
            self.metrics.itl.observe(now - stream.last_token)
        stream.last_token = now
        if output.finished:
            del self._streams[stream.request_id]
            reasons = [sample.finish_reason or "stop" for sample in output.outputs]
            self.metrics.finished(stream.arrival, "error" if "error" in reasons else reasons[-1])

    def _running(self) -> tuple[CoreClient, Frontend]:
        if self.error is not None:
            raise EngineDeadError(self.error)
        if self._client is None or self.frontend is None or self._stopping:
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
        for request_id in list(self._streams):
            stream = self._streams.pop(request_id)
            self.metrics.finished(stream.arrival, "abort" if self._stopping else "error")
            stream.fail(EngineDeadError(reason))


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[str], None], argument: str) -> None:
    # The process is watched from a thread, which may outlive the loop.
    if not loop.is_closed():
        loop.call_soon_threadsafe(callback, argument)
