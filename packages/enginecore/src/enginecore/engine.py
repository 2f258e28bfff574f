"""An engine in the caller's own process, stepped by hand."""

import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

import numpy as np

from enginecore.config import EngineConfig
from enginecore.core.start import start_core
from enginecore.errors import ConfigError
from enginecore.executor.executor import runs_in_process
from enginecore.forks import MadeHere
from enginecore.frontend.frontend import Frontend
from enginecore.frontend.request import Request
from enginecore.frontend.text.loading import load_tokenizer
from enginecore.frontend.text.prompts import PromptInput
from enginecore.messages import EngineLimits, EngineStats, Outputs
from enginecore.metrics import Metric, Metrics
from enginecore.model_files import locate
from enginecore.outputs import RequestOutput
from enginecore.sampling_params import SamplingParams


class Engine(Protocol):
    """An engine that is stepped by hand: `LLMEngine`, or several that share the requests."""

    config: EngineConfig
    frontend: Frontend
    limits: EngineLimits

    @property
    def metrics(self) -> Metrics:
        """Counters and histograms of requests."""
        ...

    def add_request(
        self, request_id: str, prompt: PromptInput, params: SamplingParams, *, priority: int = 0
    ) -> None:
        """Queue a request."""
        ...

    def add(self, request: Request) -> None:
        """Queue a request whose prompt has been prepared."""
        ...

    def step(self) -> list[RequestOutput]:
        """Return what has changed for requests."""
        ...

    def abort_request(self, request_id: str) -> None:
        """Forget a request."""
        ...

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has something to run or to return."""
        ...

    def stats(self) -> EngineStats:
        """Return the state after the last step."""
        ...

    def get_metrics(self) -> list[Metric]:
        """Return counters, gauges and histograms as they are now."""
        ...

    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes that no request uses."""
        ...

    def expert_loads(self) -> np.ndarray | None:
        """Return how many tokens went to each expert."""
        ...

    def shutdown(self) -> None:
        """Give the model's memory back."""
        ...


def make_engine(config: EngineConfig, *, on_loaded: Callable[[int, int], object] | None = None) -> Engine:
    """Return an engine in this process, or with data parallel one whose ranks are processes.

    `on_loaded` is told, while weights are read in this process, how many tensors there are and of how many.

    Raises:
        OctavoError: the model cannot be loaded or the options contradict each other.
    """
    if config.data_parallel_size == 1:
        return LLMEngine(config, on_loaded=on_loaded)
    from enginecore.parallel_engine import ParallelEngine

    return ParallelEngine(config)


class LLMEngine:
    """An engine in this process: add requests, call `step` until none is unfinished.

    One thread at a time may call it; `LLM` may be shared by threads. In a process that was forked after this
    one made it, calls raise ForkError.

    Raises:
        OctavoError: the model cannot be loaded or the options contradict each other.
    """

    def __init__(
        self, config: EngineConfig, *, on_loaded: Callable[[int, int], object] | None = None
    ) -> None:
        """`on_loaded` is told, while weights are read, how many tensors there are and of how many."""
        if config.data_parallel_size > 1:
            raise ConfigError(
                f"data_parallel_size={config.data_parallel_size}: LLMEngine is one engine in this process; "
                "LLM, AsyncEngine and the commands run several"
            )
        files = locate(config.model, config.revision, config.hf_overrides)
        self._made_here = MadeHere()
        self.config = config
        tokenizer = load_tokenizer(files, config.tokenizer)
        self.frontend = Frontend(config, files, tokenizer, takes_callables=runs_in_process(config))
        self._core = start_core(config, files, on_loaded=on_loaded)
        self.limits: EngineLimits = self._core.limits
        """Limits of the loaded model and its cache."""
        self.frontend.limits = self.limits
        self.metrics = Metrics(config.model, stats=lambda: {0: self._core.stats()})
        self.metrics.loaded(config, self._core.limits)
        self.metrics.rank_up(0)
        self._unreturned: list[RequestOutput] = []
        """Outputs of a step that Ctrl-C kept from returning them."""

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
        self._made_here.check()
        self._core.require_alive()
        messages = self.frontend.add(request, shorten=True).messages
        try:
            for message in messages:
                self._core.add(0, message)
        except BaseException:
            self.abort_request(request.request_id)
            raise

    def step(self) -> list[RequestOutput]:
        """Run one step and return what changed for the requests in it.

        Ctrl-C waits for the step's end; the next call returns the outputs that it held up.

        Raises:
            EngineDeadError: the step failed, which ends the engine; `__cause__` is what it failed with.
        """
        self._made_here.check()
        with interrupts_wait():
            try:
                self._step()
            finally:
                if self._core.error is not None:
                    self._forget_all()
        found, self._unreturned = self._unreturned, []
        return found

    def _step(self) -> None:
        stepped = self._core.step()
        try:
            for outputs in stepped.values():
                self._process(outputs)
        except BaseException as error:
            # Tokens of any request may be lost.
            self._core.fail(error)

    def _forget_all(self) -> None:
        """Forget the requests of an engine that has died."""
        for request_id, state in list(self.frontend.requests.items()):
            self.metrics.ended_early(state, "error")
            self.frontend.abort(request_id)
        self.metrics.stopped()

    def _process(self, outputs: Outputs) -> None:
        processed = self.frontend.process(outputs)
        self.metrics.record(outputs, processed)
        self._unreturned += [state.output() for state in processed.changed if state.has_output]
        if processed.stopped:
            self._core.abort(0, processed.stopped)

    def abort_request(self, request_id: str) -> None:
        """Forget a request; one that has ended already is passed over."""
        self._made_here.check()
        state = self.frontend.requests.get(request_id)
        if state is not None:
            self.metrics.ended_early(state, "abort")
            self._core.abort(0, self.frontend.abort(request_id))
        self._unreturned = [output for output in self._unreturned if output.request_id != request_id]

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has something to run or to return."""
        return self.frontend.unfinished > 0 or bool(self._unreturned)

    def stats(self) -> EngineStats:
        """Return the state after the last step."""
        return self._core.stats()

    def get_metrics(self) -> list[Metric]:
        """Return counters, gauges and histograms as they are now."""
        return self.metrics.values()

    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes that no request uses."""
        self._core.reset_prefix_cache()

    def expert_loads(self) -> np.ndarray | None:
        """Return how many tokens went to each expert since the start, int64 [layers with experts, experts].

        None for a model without experts.
        """
        self._made_here.check()
        return self._core.expert_loads()

    def shutdown(self) -> None:
        """Give the model's memory back; in a fork, where it is another process's, do nothing."""
        if self._made_here:
            for request_id in list(self.frontend.requests):
                self.abort_request(request_id)
            self._core.shutdown()
            self.metrics.stopped()


@contextmanager
def interrupts_wait() -> Generator[None]:
    """Handle SIGINT at the end, since a step that is cut short ends the engine; a second one at once.

    Within another `interrupts_wait` the end of the outer one counts.
    """
    handler = signal.getsignal(signal.SIGINT)
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or not callable(handler) or isinstance(handler, _WaitingInterrupt):
        yield
        return
    waiting = _WaitingInterrupt(handler)
    signal.signal(signal.SIGINT, waiting)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if waiting.came:
        handler(signal.SIGINT, waiting.frame)


class _WaitingInterrupt:
    """Handler of SIGINT that notes the first one and hands a second to the handler it stands in for."""

    def __init__(self, handler: Callable[[int, FrameType | None], object]) -> None:
        self.came = False
        self.frame: FrameType | None = None
        self._handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.came:
            self._handler(number, frame)
        self.came, self.frame = True, frame
