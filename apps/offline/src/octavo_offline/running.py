"""Run jobs through an engine: many at once, without reading all of them first."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from enginecore import Request, RequestOutput, SamplingParams
from enginecore.errors import RequestError
from enginecore.frontend.openai import Thinking
from octavo_offline.progress import Watcher

if TYPE_CHECKING:
    from enginecore import Engine, Prompt

_QUEUED = 2
"""Requests in the engine for each that may run: enough that it never waits for one to be read."""


class Job(NamedTuple):
    """Prompts whose answers are wanted together."""

    key: Any
    """What the caller knows the job by."""
    prompts: Sequence["Prompt"]
    params: Sequence[SamplingParams]
    """Those of each prompt; they ask for FINAL_ONLY."""
    priority: int = 0
    shown_tokens: Sequence[str] = ()
    """Special tokens that the answers' text must show."""
    thinking: Thinking | None = None
    """Reasoning after which the answers have the form that the parameters ask for."""


class Result(NamedTuple):
    """A job's outcome."""

    job: Job
    outputs: list[RequestOutput]
    """The final output of each prompt, in order; empty after an error."""
    error: RequestError | None = None


class _Running(NamedTuple):
    job: Job
    ids: list[str]
    outputs: dict[str, RequestOutput]
    """By request id, of the prompts that have finished."""


def run_jobs(engine: "Engine", jobs: Iterable[Job], watcher: Watcher) -> Iterator[Result]:
    """Yield a result for each job as it ends."""
    run = _Run(engine)
    source = iter(jobs)
    exhausted = False
    while run.unfinished or not exhausted:
        results = run.step() if run.unfinished else []
        while not exhausted and run.has_room:
            job = next(source, None)
            exhausted = job is None
            if job is not None:
                results += run.add(job)
        watcher.stepped(engine.stats().generation_tokens)
        for result in results:
            watcher.ended()
            yield result


class _Run:
    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self._numbers = itertools.count()
        self._running: dict[str, _Running] = {}
        self._most = _QUEUED * engine.config.max_num_seqs * engine.config.data_parallel_size

    @property
    def unfinished(self) -> int:
        """Requests in the engine."""
        return len(self._running)

    @property
    def has_room(self) -> bool:
        return self.unfinished < self._most

    def add(self, job: Job) -> list[Result]:
        """Submit all prompts of a job, or none: then the result says why."""
        running = _Running(job, [f"{next(self._numbers)}" for _ in job.prompts], {})
        try:
            for request_id, prompt, params in zip(running.ids, job.prompts, job.params, strict=True):
                shown, thinking = job.shown_tokens, job.thinking
                request = Request(
                    request_id, prompt, params, job.priority, shown_tokens=shown, thinking=thinking
                )
                self._engine.add(request)
                self._running[request_id] = running
        except RequestError as error:
            return [self._give_up(running, error)]
        return []

    def step(self) -> list[Result]:
        """Run one step; return the results of jobs that it ended."""
        results = []
        for output in self._engine.step():
            running = self._running.get(output.request_id)
            if running is None or not output.finished:
                continue
            failures = [sample for sample in output.outputs if sample.finish_reason == "error"]
            if failures:
                results.append(self._give_up(running, RequestError(str(failures[0].stop_reason))))
                continue
            del self._running[output.request_id]
            running.outputs[output.request_id] = output
            if len(running.outputs) == len(running.ids):
                ordered = [running.outputs[request_id] for request_id in running.ids]
                results.append(Result(running.job, ordered))
        return results

    def _give_up(self, running: _Running, error: RequestError) -> Result:
        for request_id in running.ids:
            if self._running.pop(request_id, None) is not None:
                self._engine.abort_request(request_id)
        return Result(running.job, [], error)
