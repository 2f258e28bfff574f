"""An engine in the caller's own process, stepped by hand."""

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

import numpy as np

from enginecore.config import EngineConfig
from enginecore.core.engine_core import EngineCore
from enginecore.executor.executor import make_executor
from enginecore.frontend.frontend import Frontend
from enginecore.frontend.request import Request
from enginecore.frontend.text.loading import load_tokenizer
from enginecore.frontend.text.prompts import PromptInput
from enginecore.messages import EngineLimits, EngineStats
from enginecore.model_files import locate
from enginecore.outputs import RequestOutput
from enginecore.sampling_params import SamplingParams


class LLMEngine:
    """An engine in this process: add requests, call `step` until none is unfinished.

    One thread at a time may call it; `LLM` may be shared by threads.

    Raises:
        OctavoError: the model cannot be loaded or the options contradict each other.
    """

    def __init__(self, config: EngineConfig) -> None:
        files = locate(config.model, config.revision, config.hf_overrides)
        self.config = config
        self.frontend = Frontend(config, files, load_tokenizer(files, config.tokenizer))
        self._core = EngineCore(config, make_executor(config, files))
        self.frontend.limits = self._core.limits

    @property
    def limits(self) -> EngineLimits:
        """Limits of the loaded model and its cache."""
        return self._core.limits

    def add_request(
        self, request_id: str, prompt: PromptInput, params: SamplingParams, *, priority: int = 0
    ) -> None:
        """Queue a request; it ends at the length limit at the latest, whatever its `max_tokens` is.

        Raises:
            RequestError: it cannot be run as asked; nothing was queued.
            EngineDeadError: the engine has ended.
        """
        self.add(Request(request_id, self.frontend.prepare_prompt(prompt), params, priority))

    def add(self, request: Request) -> None:
        """Queue a request whose prompt has been prepared. Raises as `add_request` does."""
        if self._core.error is not None:
            raise self._core.error
        for message in self.frontend.add(request, shorten=True).messages:
            self._core.add(0, message)

    def step(self) -> list[RequestOutput]:
        """Run one step and return what changed for the requests in it; Ctrl-C waits for its end.

        Raises:
            EngineDeadError: the step failed, which ends the engine; `__cause__` is what it failed with.
        """
        found: list[RequestOutput] = []
        with _interrupts_wait():
            stepped = self._core.step()
        for outputs in stepped.values():
            processed = self.frontend.process(outputs)
            found += [state.output() for state in processed.changed if state.has_output]
            if processed.stopped:
                self._core.abort(0, processed.stopped)
        return found

    def abort_request(self, request_id: str) -> None:
        """Forget a request; one that has ended already is passed over."""
        self._core.abort(0, self.frontend.abort(request_id))

    def has_unfinished_requests(self) -> bool:
        """Whether some request is still to finish."""
        return self.frontend.unfinished > 0

    def stats(self) -> EngineStats:
        """Return the state after the last step."""
        return self._core.stats()

    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes that no request uses."""
        self._core.reset_prefix_cache()

    def expert_loads(self) -> np.ndarray | None:
        """Return how many tokens went to each expert since the start, int64 [layers with experts, experts].

        None for a model without experts.
        """
        return self._core.expert_loads()

    def shutdown(self) -> None:
        """Give the model's memory back."""
        self._core.shutdown()


@contextmanager
def _interrupts_wait() -> Generator[None]:
    """Handle SIGINT afterwards, since a step that is cut short ends the engine; a second one at once."""
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
