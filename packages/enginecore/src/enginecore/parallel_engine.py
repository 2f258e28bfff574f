"""Data-parallel ranks, stepped by hand: cores in processes of their own, for a program without asyncio."""

import asyncio
import threading
import weakref
from collections.abc import Coroutine
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import numpy as np

from enginecore.async_engine import AsyncEngine
from enginecore.config import EngineConfig
from enginecore.errors import EngineDeadError, OctavoError, RequestAbortedError
from enginecore.forks import MadeHere
from enginecore.frontend.frontend import Frontend
from enginecore.frontend.request import Request
from enginecore.frontend.stream import RequestStream
from enginecore.frontend.text.prompts import PromptInput
from enginecore.messages import EngineLimits, EngineStats
from enginecore.metrics import Metric, Metrics
from enginecore.outputs import RequestOutput
from enginecore.sampling_params import SamplingParams

_LONGEST_STEP = 0.1
"""Seconds that `step` waits for an output, so that Ctrl-C is heard."""

Result = TypeVar("Result")


class ParallelEngine:
    """Several engines behind the methods of `LLMEngine`.

    Raises:
        OctavoError: the model cannot be loaded or the options contradict each other.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._made_here = MadeHere()
        self.config = config
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="parallel-engine")
        self._thread.start()
        self._engine = engine = AsyncEngine(config)
        self._streams: dict[str, RequestStream] = {}
        self._found: SimpleQueue[RequestOutput | OctavoError] = SimpleQueue()
        self._end = weakref.finalize(self, _shut_down, self._made_here, engine, self._loop, self._thread)
        try:
            self.limits: EngineLimits = self._run(engine.ready())
        except BaseException:
            self._end()
            raise
        assert engine.frontend is not None, "an engine that is ready has a front-end"
        self.frontend: Frontend = engine.frontend

    def add_request(
        self, request_id: str, prompt: PromptInput, params: SamplingParams, *, priority: int = 0
    ) -> None:
        """Queue a request; see `LLMEngine.add_request`."""
        self.add(Request(request_id, self.frontend.prepare_prompt(prompt), params, priority))

    def add(self, request: Request) -> None:
        """Queue a request whose prompt has been prepared. Raises as `LLMEngine.add_request` does."""

        async def submit() -> None:
            stream = self._engine.submit([request], shorten=True)
            self._streams[request.request_id] = stream
            task = asyncio.create_task(_read(stream, self._streams, request.request_id, self._found))
            task.add_done_callback(_raise_failure)

        self._run(submit())

    def step(self) -> list[RequestOutput]:
        """Return what has changed for requests, after waiting a moment for something.

        Raises:
            EngineDeadError: no rank runs any more.
        """
        self._made_here.check()
        found = []
        try:
            found.append(self._found.get(timeout=_LONGEST_STEP))
            while True:
                found.append(self._found.get_nowait())
        except Empty:
            pass
        outputs = []
        for entry in found:
            if isinstance(entry, OctavoError):
                raise entry
            outputs.append(entry)
        return outputs

    def abort_request(self, request_id: str) -> None:
        """Forget a request; one that has ended already is passed over."""

        async def abort() -> None:
            stream = self._streams.pop(request_id, None)
            if stream is not None:
                await stream.aclose()

        self._run(abort())

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has something to wait for or to return."""
        return bool(self._streams) or not self._found.empty()

    def stats(self) -> EngineStats:
        """Return the state of all ranks together."""
        return self._engine.stats

    @property
    def metrics(self) -> Metrics:
        """Counters and histograms of requests, of all ranks."""
        return self._engine.metrics

    def get_metrics(self) -> list[Metric]:
        """Return counters, gauges and histograms of each rank."""
        return self._engine.metrics.values()

    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes that no request uses."""
        self._run(self._engine.reset_prefix_cache())

    def expert_loads(self) -> np.ndarray | None:
        """Return how many tokens went to each expert since the start; see `LLMEngine.expert_loads`."""
        return self._run(self._engine.expert_loads())

    def shutdown(self) -> None:
        """End all ranks; in a fork, whose they are not, do nothing."""
        self._end()

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine in the engine's loop and return its result."""
        if not self._end.alive:
            work.close()
            raise EngineDeadError("the engine was shut down")
        try:
            self._made_here.check()
        except BaseException:
            work.close()
            raise
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


async def _read(
    stream: RequestStream,
    streams: dict[str, RequestStream],
    request_id: str,
    found: SimpleQueue[RequestOutput | OctavoError],
) -> None:
    """Pass on a request's outputs, and its failure."""
    try:
        async for _, output in stream:
            if output.finished:
                streams.pop(request_id, None)
            found.put(output)
    except RequestAbortedError:
        return
    except OctavoError as error:
        streams.pop(request_id, None)
        found.put(error)


def _raise_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.result()


def _shut_down(
    made_here: MadeHere, engine: AsyncEngine, loop: asyncio.AbstractEventLoop, thread: threading.Thread
) -> None:
    if not made_here:
        return
    asyncio.run_coroutine_threadsafe(engine.shutdown(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
