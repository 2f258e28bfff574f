"""Calls of several threads, whose requests run in the same batches of one engine."""

import itertools
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from enginecore.engine import Engine, interrupts_wait
from enginecore.errors import RequestError
from enginecore.frontend.pooling import PoolingPlan
from enginecore.frontend.request import Prompt, Request
from enginecore.outputs import RequestOutput
from enginecore.sampling_params import SamplingParams


class CallRequest(NamedTuple):
    """One request of a call, as its caller has it."""

    prompt: Prompt
    params: SamplingParams
    priority: int
    pooling: PoolingPlan | None = None
    """Of a prompt that is embedded."""
    counted: bool = True
    """Whether metrics count it as a request."""


class _Call:
    """One caller's requests."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.outputs: dict[str, RequestOutput] = {}
        """Final outputs by request id."""

    @property
    def finished(self) -> bool:
        return len(self.outputs) == len(self.ids)


class ConcurrentCalls:
    """Lets threads share an engine: one of those that wait for outputs steps, for all of them.

    State is changed under one lock, and never while a step runs: who wants to add requests waits for the
    step's end, and the next step waits for everybody who does.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Condition()
        self._stepping = False
        self._changing = 0
        """Threads that wait for a step's end to add or abort requests."""
        self._numbers = itertools.count()
        self._calls: dict[str, _Call] = {}
        """By id of an unfinished request."""

    def run(self, requests: Sequence[CallRequest], advance: Callable[[int], object]) -> list[RequestOutput]:
        """Run all requests, or none if one cannot be run, and return their final outputs in order.

        `advance` is told how many more have finished, after steps in which some have.
        """
        call = _Call()
        try:
            with self.between_steps():
                self._add(call, requests)
            told = 0
            while self._step_or_wait(call):
                if len(call.outputs) > told:
                    advance(len(call.outputs) - told)
                    told = len(call.outputs)
            advance(len(call.outputs) - told)
            return [call.outputs[request_id] for request_id in call.ids]
        except BaseException:
            # An error or Ctrl-C must leave nothing running behind.
            with self.between_steps():
                self._abort(call)
            raise

    @contextmanager
    def between_steps(self) -> Generator[None]:
        """Keep steps from running: the only time in which the engine may be changed."""
        with self._lock:
            self._changing += 1
            try:
                self._lock.wait_for(lambda: not self._stepping)
                yield
            finally:
                self._changing -= 1
                self._lock.notify_all()

    def _add(self, call: _Call, requests: Sequence[CallRequest]) -> None:
        """Add all requests, or none if one is refused; note each in `call` before it is added."""
        try:
            for entry in requests:
                request_id = str(next(self._numbers))
                call.ids.append(request_id)
                self._calls[request_id] = call
                prompt, params, priority, pooling, counted = entry
                request = Request(request_id, prompt, params, priority, pooling=pooling, counted=counted)
                self._engine.add(request)
        except RequestError as error:
            self._abort(call)
            if len(requests) == 1:
                raise
            raise RequestError(f"prompt {len(call.ids) - 1}: {error}", error.param, error.code) from error

    def _abort(self, call: _Call) -> None:
        for request_id in call.ids:
            if self._calls.pop(request_id, None) is not None:
                self._engine.abort_request(request_id)

    def _step_or_wait(self, call: _Call) -> bool:
        """Run one step, or wait for another thread's; return whether some request of `call` is unfinished.

        Raises:
            EngineDeadError: the engine has ended, in whichever thread.
        """
        with self._lock:
            self._lock.wait_for(lambda: not (self._stepping or self._changing) or call.finished)
            if call.finished:
                return False
        # Ctrl-C must not keep from other threads what a step has for them.
        with interrupts_wait():
            self._step()
        return True

    def _step(self) -> None:
        """Run one step and keep what has finished, unless another thread was faster."""
        with self._lock:
            if self._stepping or self._changing:
                return
            self._stepping = True
        outputs: list[RequestOutput] = []
        try:
            outputs = self._engine.step()
        finally:
            with self._lock:
                for output in outputs:
                    self._keep(output)
                self._stepping = False
                self._lock.notify_all()

    def _keep(self, output: RequestOutput) -> None:
        call = self._calls.pop(output.request_id, None) if output.finished else None
        if call is not None:
            call.outputs[output.request_id] = output
