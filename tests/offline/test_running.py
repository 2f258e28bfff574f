"""How jobs go through the engine."""

from collections.abc import Iterator
from typing import Any, cast

import pytest
from stepping_engine import SteppingEngine

from enginecore import Prompt, RequestOutputKind, SamplingParams
from octavo_offline.progress import NoProgress
from octavo_offline.running import Job, run_jobs

PARAMS = SamplingParams(max_tokens=None, output_kind=RequestOutputKind.FINAL_ONLY)


def job(*texts: str) -> Job:
    prompts = [Prompt(text, list(text.encode())) for text in texts]
    return Job(",".join(texts), prompts, [PARAMS] * len(texts))


def run(engine: SteppingEngine, *jobs: Job) -> list[tuple[str, list[str], str]]:
    """Each result, as it comes: the job's key, the texts, the error."""
    results = run_jobs(cast(Any, engine), iter(jobs), NoProgress())
    return [
        (result.job.key, [output.outputs[0].text for output in result.outputs], str(result.error or ""))
        for result in results
    ]


def test_results_come_as_jobs_end(engine):
    assert run(engine, job("long"), job("a"), job("bc")) == [
        ("a", ["a"], ""),
        ("bc", ["bc"], ""),
        ("long", ["long"], ""),
    ]


def test_a_job_of_several_prompts_keeps_their_order(engine):
    assert run(engine, job("long", "a", "bc")) == [("long,a,bc", ["long", "a", "bc"], "")]


def test_a_refused_job_takes_its_prompts_along_and_no_other(engine):
    results = run(engine, job("a", "bb", ""), job("ccc"))
    assert results == [("a,bb,", [], "the prompt is empty"), ("ccc", ["ccc"], "")]
    assert len(engine.aborted) == 2


def test_a_job_that_the_engine_gives_up(engine):
    engine.failing = {"bad"}
    results = run(engine, job("bad", "longer"), job("fine"))
    assert results == [("bad,longer", [], "it never fits"), ("fine", ["fine"], "")]
    assert len(engine.aborted) == 1


def test_jobs_are_read_as_there_is_room():
    engine = SteppingEngine(max_num_seqs=2)
    read = 0

    def jobs() -> Iterator[Job]:
        nonlocal read
        for _ in range(100):
            read += 1
            yield job("abc")

    results = run_jobs(cast(Any, engine), jobs(), NoProgress())
    next(results)
    assert read <= 12
    assert len(list(results)) == 99
    assert engine.most_at_once == 4


def test_the_watcher_hears_of_tokens_and_jobs(engine):
    heard: list[int] = []

    class Watcher:
        ended_jobs = 0

        def stepped(self, generated: int) -> None:
            heard.append(generated)

        def ended(self) -> None:
            self.ended_jobs += 1

    watcher = Watcher()
    list(run_jobs(cast(Any, engine), [job("ab"), job("")], watcher))
    assert heard[-1] == 3
    assert watcher.ended_jobs == 2


@pytest.mark.parametrize("count", [0, 1])
def test_few_jobs(engine, count):
    assert len(run(engine, *[job("a")] * count)) == count
