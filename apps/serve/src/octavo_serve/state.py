"""State that all routes share: the engine, the names it goes by, and the streams of clients."""

import asyncio
import itertools
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from enginecore.frontend.openai import NoVocabulary, Vocabulary
from octavo_serve.auth import Keys
from octavo_serve.config import ServeConfig
from octavo_serve.errors import ApiError
from octavo_serve.limits import Limits
from octavo_serve.loading import UNKNOWN_RETRY_SECONDS, LoadProgress, load_progress
from octavo_serve.messages import HttpMessage
from octavo_serve.response_store import ResponseStore

if TYPE_CHECKING:
    from enginecore import AsyncEngine, Frontend, Request, RequestStream
    from octavo_serve.span_export import Traces

_LOADING = "the model is loading"


class ServerState:
    """One server: an engine that may still be loading, and what is going on in it."""

    def __init__(
        self,
        engine: "AsyncEngine",
        options: ServeConfig,
        report: Callable[[HttpMessage], None] = lambda message: None,
        limits: Limits | None = None,
        stored: ResponseStore | None = None,
        traces: "Traces | None" = None,
    ) -> None:
        """`limits` and `stored` are those of all HTTP processes; by default this one's own."""
        self.engine = engine
        self.options = options
        self.limits = limits or Limits(options, list(options.keys()))
        engine.on_load = self.limits.note_load
        self._own_folder = tempfile.TemporaryDirectory(prefix="octavo-") if stored is None else None
        self.stored = stored or ResponseStore(Path(self._own_folder.name if self._own_folder else ""))
        """Responses that conversations go on from."""
        self.traces = traces
        """Takes the spans of requests; None where none are wanted."""
        self.report = report
        """Tells the supervisor."""
        self.names = options.served_model_name or (engine.config.model,)
        self.created = int(time.time())
        self.draining = False
        """The server is going to end: nothing new is taken."""
        self.streams: set[RequestStream] = set()
        """Of each HTTP request that generates and whose answer is not complete."""
        self.frames: set[asyncio.Task[None]] = set()
        """Requests on WebSockets whose last frame is not sent."""
        self.keys = Keys(options.keys())
        self.numbers = itertools.count()
        """Makes request ids unique."""

    @property
    def trouble(self) -> str | None:
        """The reason why no request can be run now; None when one can."""
        if self.refusal is not None:
            return self.refusal
        if not self.engine.is_ready:
            down = next(iter(self.engine.ranks_down.values()), "no rank is up")
            progress = "" if self.progress is None else f"; {self.progress}"
            return f"the engine is being started again: {down}{progress}"
        return None

    @property
    def is_loading(self) -> bool:
        """Whether the model has not been loaded yet, and is going to be."""
        return self.engine.error is None and not self.draining and not self.engine.takes_requests

    @property
    def progress(self) -> LoadProgress | None:
        """Progress of ranks that load the model, None if none does."""
        return load_progress(self.engine.ranks_loading)

    def unavailable(self, reason: str) -> ApiError:
        """Return the error (503) of a request that cannot be taken for `reason`, and when to try again."""
        if not self.is_loading:
            return ApiError(503, reason)
        seconds = UNKNOWN_RETRY_SECONDS if self.progress is None else self.progress.retry_after()
        return ApiError(503, reason, code="model_loading", headers={"Retry-After": str(seconds)})

    @property
    def refusal(self) -> str | None:
        """The reason why no request is taken now; None when one is, though it may have to wait."""
        if self.engine.error is not None:
            return self.engine.error
        if self.draining:
            return "the server is shutting down"
        if not self.engine.takes_requests:
            return _LOADING if self.progress is None else f"{_LOADING}: {self.progress}"
        return None

    def require_ready(self) -> None:
        """Raise ApiError (503) if no request can be taken now."""
        if self.refusal is not None:
            raise self.unavailable(self.refusal)

    @property
    def frontend(self) -> "Frontend":
        """The ready engine's front-end.

        Raises:
            ApiError: 503, no request can be taken now.
        """
        frontend = self.engine.frontend
        if self.refusal is not None or frontend is None:
            raise self.unavailable(self.refusal or _LOADING)
        return frontend

    @property
    def vocabulary(self) -> Vocabulary:
        """Turns token ids into text. Raises ApiError (503) as `frontend` does."""
        tokenizer = self.frontend.tokenizer
        return NoVocabulary() if tokenizer is None else tokenizer

    @property
    def max_model_len(self) -> int:
        """The longest prompt plus output, in tokens. Raises ApiError (503) as `frontend` does."""
        limits = self.frontend.limits
        if limits is None:
            raise self.unavailable(_LOADING)
        return limits.max_model_len

    @asynccontextmanager
    async def open_stream(
        self, requests: Sequence["Request"], key: str | None = None, *, goes_on: bool = False
    ) -> AsyncGenerator["RequestStream"]:
        """Submit all requests, or none; what has not finished when the context is left is aborted.

        `key` is the name of the client's key. What goes on with a request that was let in already is refused
        neither for a full queue nor because the server drains.

        Raises:
            RequestError: a request cannot be run as asked.
            ApiError: 503, no request can be taken now; 429, too many wait, or this client has too many.
        """
        if not goes_on:
            self.require_ready()
            config, stats = self.engine.config, self.engine.stats
            seats = 0 if stats.waiting else config.max_num_seqs * len(config.local_ranks)
            self.limits.check_queue(len(requests), seats, self.engine.queue_seconds)
        with self.limits.one_more(key):
            async with self._submitted(requests) as stream:
                yield stream

    @asynccontextmanager
    async def _submitted(self, requests: Sequence["Request"]) -> AsyncGenerator["RequestStream"]:
        async with self.engine.submit(requests) as stream:
            self.streams.add(stream)
            try:
                with self.engine.metrics.in_progress.track_inprogress():
                    yield stream
            finally:
                self.streams.discard(stream)
