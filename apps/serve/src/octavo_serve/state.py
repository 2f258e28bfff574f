"""What all routes share: the engine, the names it goes by, and the requests it runs for clients."""

import itertools
import time
from typing import TYPE_CHECKING

from enginecore.frontend.openai.answers import NoVocabulary, Vocabulary
from octavo_serve.config import ServeConfig
from octavo_serve.errors import ApiError

if TYPE_CHECKING:
    from enginecore.async_engine import AsyncEngine
    from enginecore.frontend.frontend import Frontend
    from octavo_serve.generation import Generation


class ServerState:
    """One server: an engine that may still be loading, and what is going on in it."""

    def __init__(self, engine: "AsyncEngine", options: ServeConfig) -> None:
        self.engine = engine
        self.names = options.served_model_name or (engine.config.model,)
        self.created = int(time.time())
        self.draining = False
        """The server is going to end: nothing new is taken."""
        self.generations: set[Generation] = set()
        self.numbers = itertools.count()
        """Tell requests apart inside: two clients may choose the same id."""

    @property
    def trouble(self) -> str | None:
        """Why no request can be taken now; None when one can."""
        if self.engine.error is not None:
            return f"the engine has ended: {self.engine.error}"
        if self.draining:
            return "the server is shutting down"
        if not self.engine.is_ready:
            return "the model is loading"
        return None

    @property
    def frontend(self) -> "Frontend":
        """The ready engine's front half.

        Raises:
            ApiError: 503, no request can be taken now.
        """
        frontend = self.engine.frontend
        if self.trouble is not None or frontend is None:
            raise ApiError(503, self.trouble or "the model is loading")
        return frontend

    @property
    def vocabulary(self) -> Vocabulary:
        """What turns token ids into text. Raises ApiError (503) as `frontend` does."""
        tokenizer = self.frontend.tokenizer
        return NoVocabulary() if tokenizer is None else tokenizer

    @property
    def max_model_len(self) -> int:
        """The longest prompt plus output, in tokens. Raises ApiError (503) as `frontend` does."""
        limits = self.frontend.limits
        if limits is None:
            raise ApiError(503, "the model is loading")
        return limits.max_model_len
