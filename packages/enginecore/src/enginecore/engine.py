"""An engine in the caller's own process, stepped by hand."""

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

from enginecore.config import EngineConfig
from enginecore.core.engine_core import EngineCore
from enginecore.executor.executor import make_executor
from enginecore.frontend.frontend import Frontend
from enginecore.frontend.text.loading import load_tokenizer
from enginecore.frontend.text.prompts import PromptInput
from enginecore.messages import EngineStats
from enginecore.model_files import locate
from enginecore.outputs import RequestOutput
from enginecore.sampling_params import SamplingParams


class LLMEngine:
    """An engine in this process: add requests, call `step` until none is unfinished.

    Raises:
        OctavoError: the model cannot be loaded or the options contradict each other.
    """

    def __init__(self, config: EngineConfig) -> None:
        files = locate(config.model, config.revision)
        self.config = config
        self.frontend = Frontend(config, files, load_tokenizer(files, config.tokenizer))
        self.core = EngineCore(config, make_executor(config, files))
        self.frontend.limits = self.core.ready

    def add_request(
        self,
        request_id: str,
        prompt: PromptInput,
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> None:
        """Queue a request.

        Raises:
            RequestError: it cannot be run as asked; nothing was queued.
        """
        prepared = self.frontend.prepare_prompt(prompt)
        for message in self.frontend.add(
            request_id, prepared, params, priority=priority, cache_salt=cache_salt
        ):
            self.core.add(0, message)

    def step(self) -> list[RequestOutput]:
        """Run one step and return what changed for the requests in it; Ctrl-C waits for its end."""
        found: list[RequestOutput] = []
        with _interrupts_wait():
            stepped = self.core.step()
        for outputs in stepped.values():
            received = self.frontend.receive(outputs)
            found += received.outputs
            if received.abort:
                self.core.abort(0, received.abort)
        return found

    def abort_request(self, request_id: str) -> None:
        """Forget a request; one that has ended already is passed over."""
        self.core.abort(0, self.frontend.abort(request_id))

    def has_unfinished_requests(self) -> bool:
        """Whether some request is still to finish."""
        return self.frontend.unfinished > 0

    def stats(self) -> EngineStats:
        """Return the state after the last step."""
        return self.core.stats()

    def shutdown(self) -> None:
        """Give the model's memory back."""
        self.core.shutdown()


@contextmanager
def _interrupts_wait() -> Generator[None]:
    """Handle SIGINT afterwards, since a step cut short cannot be gone on with; a second one at once."""
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[FrameType | None] = []

    def wait(number: int, frame: FrameType | None) -> None:
        if waiting:
            handler(number, frame)
        waiting.append(frame)

    signal.signal(signal.SIGINT, wait)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if waiting:
        handler(signal.SIGINT, waiting[0])
