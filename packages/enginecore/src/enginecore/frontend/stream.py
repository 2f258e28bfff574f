"""The stream that a caller of an asynchronous engine reads: outputs of one or several requests."""

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, Self

from enginecore.frontend.request_state import RequestState
from enginecore.outputs import RequestMetrics, RequestOutput


class StreamOutput(NamedTuple):
    """One item of a stream."""

    index: int
    """Place of the request among those of the stream."""
    output: RequestOutput


class OutputSink(Protocol):
    """Takes outputs the moment they are there, in place of a reader that is woken for each."""

    @property
    def is_open(self) -> bool:
        """Whether an output can be taken now, without waiting."""
        ...

    def take(self, index: int, output: RequestOutput) -> None:
        """Take an output of the request at place `index`.

        What it raises is raised to the reader, and aborts what has not finished.
        """
        ...


class RequestStream:
    """Outputs of requests that were submitted together, as they come.

    An output is made when it is read, of all that came since the last one: a slow reader gets few long
    deltas, and what waits for it is never more than the requests' tokens. Leaving the stream early, by
    `aclose`, the end of `async with` or a cancelled read, aborts what has not finished.
    """

    def __init__(self, states: Sequence[RequestState], abort: Callable[["RequestStream"], None]) -> None:
        """`abort` is called once, if the stream is left before its requests have finished."""
        self._abort = abort
        self._index = {state: index for index, state in enumerate(states)}
        self._changed: dict[RequestState, None] = {}
        self._arrived = asyncio.Event()
        self._failure: Exception | None = None
        self.num_unfinished = len(states)
        self._unread = len(states)
        """Requests whose last output was not read."""
        self._closed = False
        self._sink: OutputSink | None = None

    @property
    def states(self) -> Sequence[RequestState]:
        """The stream's requests, in order."""
        return list(self._index)

    @property
    def metrics(self) -> Sequence[RequestMetrics]:
        """Times of the stream's requests, in order; they go on changing until the requests have finished."""
        return [state.metrics for state in self._index]

    def pass_to(self, sink: OutputSink) -> None:
        """Pass outputs to `sink` from now on, while it is open and the reader has none before them.

        The last output of a request is always the reader's, and so is what comes while the sink is closed.
        """
        self._sink = sink

    def notify(self, state: RequestState) -> None:
        """Let the reader have an output of a request that has changed; the last time when it has finished."""
        if state.unfinished == 0:
            self.num_unfinished -= 1
        elif self._sink is not None and not self._changed and self._failure is None and self._sink.is_open:
            try:
                self._sink.take(self._index[state], state.output())
            except Exception as error:
                self._abort(self)
                self.fail(error)
            return
        self._changed[state] = None
        self._arrived.set()

    def fail(self, error: Exception) -> None:
        """Raise `error` to the reader after what it has not read yet."""
        self._failure = error
        self._arrived.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StreamOutput:
        while not self._changed:
            if self._unread == 0 or self._closed:
                raise StopAsyncIteration
            if self._failure is not None:
                self._closed = True
                raise self._failure
            self._arrived.clear()
            try:
                await self._arrived.wait()
            except asyncio.CancelledError:
                await self.aclose()
                raise
        state = next(iter(self._changed))
        del self._changed[state]
        self._unread -= state.finished
        return StreamOutput(self._index[state], state.output())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Abort the requests that have not finished."""
        # It holds what answers, which holds this stream: they would wait for the garbage collector.
        self._sink = None
        if not self._closed:
            self._closed = True
            self._changed.clear()
            self._abort(self)
