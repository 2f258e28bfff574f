"""One `LLM`, several threads (HC-95): every answer is the caller's own, and nobody hangs."""

import random
import subprocess
import sys
import threading

import pytest

from checkpoints import Oracle, llama_config, save_random
from enginecore import LLM, SamplingParams
from enginecore.errors import RequestError

PATIENCE_S = 120
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_random(llama_config(), tmp_path_factory.mktemp("m-rand"))


def in_threads(*jobs):
    """Run each job in a thread of its own, all starting at once; return what each returned or raised."""
    found = [None] * len(jobs)
    barrier = threading.Barrier(len(jobs))

    def run(place, job):
        barrier.wait()
        try:
            found[place] = job()
        except Exception as error:
            found[place] = error

    threads = [threading.Thread(target=run, args=entry, daemon=True) for entry in enumerate(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads), "a caller hangs"
    return found


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def test_four_threads_four_calls_each(model):
    rng = random.Random(3)
    oracle = Oracle(model)
    prompts = [[rng.randrange(256) for _ in range(rng.randint(1, 20))] for _ in range(4)]
    expected = [oracle.greedy(prompt, 24)[0] for prompt in prompts]
    llm = LLM(str(model), dtype="float32", device="cpu", max_model_len=64)

    def job(prompt):
        return lambda: [tokens(llm.generate([{"prompt_token_ids": prompt}], GREEDY)) for _ in range(4)]

    found = in_threads(*map(job, prompts))
    assert found == [[[answer]] * 4 for answer in expected]
    assert tokens(llm.generate([{"prompt_token_ids": prompts[0]}], GREEDY)) == expected[:1]
    stats = llm.llm_engine.stats()
    assert (stats.running, stats.waiting, stats.kv_cache_usage) == (0, 0, 0)


def test_calls_of_several_threads_share_batches(model):
    """Fewer steps than each call would take alone: the callers' requests run together."""
    llm = LLM(str(model), dtype="float32", device="cpu", max_model_len=64)
    steps = 0
    step = llm.llm_engine.step

    def counted():
        nonlocal steps
        steps += 1
        return step()

    llm.llm_engine.step = counted
    asked = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    in_threads(*[lambda: llm.generate([{"prompt_token_ids": [7]}], asked)] * 4)
    assert steps < 3 * 40


def test_a_refused_call_hurts_no_other(model):
    llm = LLM(str(model), dtype="float32", device="cpu", max_model_len=64)
    good = {"prompt_token_ids": [5, 6]}
    bad = {"prompt_token_ids": [1] * 70}
    found = in_threads(
        lambda: tokens(llm.generate([good], GREEDY)),
        lambda: llm.generate([good, bad], GREEDY),
        lambda: tokens(llm.generate([good, good], GREEDY)),
    )
    assert isinstance(found[1], RequestError)
    assert found[0] * 2 == found[2]
    assert llm.llm_engine.has_unfinished_requests() is False


INTERRUPTED = """
import signal, sys, threading
from enginecore import LLM, SamplingParams

# A shell starts what it runs in the background with SIGINT ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
llm = LLM(sys.argv[1], dtype="float32", device="cpu", max_model_len=64)
params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
expected = llm.generate([{"prompt_token_ids": [7]}], params)[0].outputs[0].token_ids
main, interrupted = threading.main_thread(), threading.Event()
step, collect = llm.llm_engine.step, llm.llm_engine._core._executor.collect
answers = []

def step_in_main():
    # The other thread's turn is over at once, so that the main thread runs the step of both.
    return step() if interrupted.is_set() or threading.current_thread() is main else []

def interrupt():
    if not interrupted.is_set():
        interrupted.set()
        signal.raise_signal(signal.SIGINT)
    return collect()

llm.llm_engine.step, llm.llm_engine._core._executor.collect = step_in_main, interrupt
other = threading.Thread(
    target=lambda: answers.extend(llm.generate([{"prompt_token_ids": [7]}], params)), daemon=True
)
other.start()
while not llm.llm_engine.has_unfinished_requests():
    pass
try:
    llm.generate([{"prompt_token_ids": [9]}], params)
except KeyboardInterrupt:
    other.join(60)
    print([answer.outputs[0].token_ids for answer in answers] == [expected])
    print(llm.llm_engine.has_unfinished_requests(), llm._calls._calls)
"""


def test_ctrl_c_takes_nothing_from_other_threads(model):
    """The step that the main thread is interrupted in is the last one of another thread's request."""
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(model)], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.splitlines() == ["True", "False {}"], done.stderr


def test_ctrl_c_while_requests_are_added_leaves_nothing(model):
    llm = LLM(str(model), dtype="float32", device="cpu", max_model_len=64)
    add = llm.llm_engine.add

    def interrupted(request):
        add(request)
        raise KeyboardInterrupt

    llm.llm_engine.add = interrupted
    with pytest.raises(KeyboardInterrupt):
        llm.generate([{"prompt_token_ids": [7]}] * 2, GREEDY)
    assert not llm.llm_engine.has_unfinished_requests()
    assert llm.llm_engine.stats().waiting == 0
