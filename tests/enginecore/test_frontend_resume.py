"""A front-end whose core has ended resumes its samples on another one."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginecore.config import EngineConfig
from enginecore.frontend.frontend import Added, Frontend
from enginecore.frontend.request import Prompt, Request
from enginecore.frontend.text.tokenizer import Tokenizer
from enginecore.messages import LENGTH, RUNNING, EngineLimits, Outputs, PositionLogprobs
from enginecore.model_files import ModelFiles
from enginecore.sampling_params import RequestOutputKind, SamplingParams

EOS = 257
DELTA, CUMULATIVE, FINAL_ONLY = (
    RequestOutputKind.DELTA,
    RequestOutputKind.CUMULATIVE,
    RequestOutputKind.FINAL_ONLY,
)


class Clock:
    """Seconds since the epoch, moved by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def frontend(byte_tokenizer: Tokenizer, clock: Clock) -> Iterator[Frontend]:
    files = ModelFiles("m", Path("m"), {"eos_token_id": EOS})
    frontend = Frontend(EngineConfig(model="m", seed=100), files, byte_tokenizer, clock)
    frontend.limits = EngineLimits(max_model_len=64, vocab_size=320, num_blocks=8, block_size=16)
    yield frontend
    assert frontend.unfinished == 0


def add(frontend: Frontend, name: str = "r", prompt: Sequence[int] = (113, 113, 113), **fields: Any) -> Added:
    params = SamplingParams(**{"max_tokens": 8, **fields})
    return frontend.add(Request(name, Prompt(None, list(prompt)), params))


def step(*rows: tuple[int, int] | tuple[int, int, int], **more: Any) -> Outputs:
    """Return a step's message from (number, token) or (number, token, finish code)."""
    numbers, tokens, codes = zip(*((*row, RUNNING)[:3] for row in rows)) if rows else ((), (), ())
    columns = np.array(numbers, np.int64), np.array(tokens, np.int32), np.array(codes, np.int8)
    return Outputs(*columns, **more)


def positions(*tokens: int) -> PositionLogprobs:
    """Return the log probabilities of some prompt tokens, each -0.01 times its token."""
    ids = np.array(tokens, np.int32)[:, None]
    return PositionLogprobs(ids, np.float32(-0.01) * ids, np.ones(len(tokens), np.int32))


@pytest.mark.parametrize("kind", [DELTA, CUMULATIVE, FINAL_ONLY])
def test_the_tokens_so_far_go_along_and_late_outputs_are_dropped(frontend: Frontend, kind) -> None:
    state, [first] = add(frontend, output_kind=kind, stop=["xyz"], bad_words=["q"], logit_bias={65: 1.0})
    shown = ""
    for token in b"abx":
        frontend.process(step((first.number, token)))
        if state.has_output:
            shown = state.output().outputs[0].text
    assert list(frontend.resume([first.number, 12345])) == [first.number]
    second = state.samples[0].message
    assert second.number != first.number
    assert second.generated.tolist() == list(b"abx")
    assert (second.prompt.tolist(), second.max_tokens) == ([113, 113, 113], 8)
    assert second.sampling == first.sampling
    assert first.generated.size == 0

    frontend.process(step((first.number, ord("Q"))))
    processed = frontend.process(step((second.number, ord("y"))))
    assert processed.stopped == []
    processed = frontend.process(step((second.number, ord("z"))))
    assert processed.stopped == [second.number]
    [output] = state.output().outputs
    assert (output.finish_reason, output.stop_reason) == ("stop", "xyz")
    if kind is DELTA:
        assert (shown, output.token_ids, output.text) == ("", list(b"yz"), "")
    else:
        assert (output.token_ids, output.text) == (list(b"abxyz"), "ab")


def test_a_resumed_sample_is_resumed_again(frontend: Frontend) -> None:
    state, [first] = add(frontend, output_kind=DELTA)
    numbers = [first.number]
    generated = []
    for token in b"abc":
        frontend.process(step((numbers[-1], token)))
        assert state.output().outputs[0].token_ids == [token]
        generated.append(token)
        [message] = frontend.resume(numbers[-1:]).values()
        assert message.generated.tolist() == generated
        numbers.append(message.number)
    assert len(set(numbers)) == 4
    assert frontend.resume(numbers[:-1]) == {}
    assert frontend.abort("r") == numbers[-1:]
    assert frontend.resume(numbers) == {}


def test_each_of_several_samples_by_itself(frontend: Frontend) -> None:
    state, messages = add(frontend, n=3, seed=7)
    a, b, c = (message.number for message in messages)
    frontend.process(step((a, 97), (b, 98, LENGTH)))
    resumed = frontend.resume([c, b], alone=[c])
    assert list(resumed) == [c]
    assert (resumed[c].sampling.seed, resumed[c].alone, resumed[c].generated.size) == (9, True, 0)
    frontend.process(step((a, 100, LENGTH), (resumed[c].number, 99, LENGTH)))
    assert [sample.token_ids for sample in state.output().outputs] == [[97, 100], [98], [99]]


def test_a_seed_is_drawn_once(frontend: Frontend) -> None:
    _, [first] = add(frontend)
    _, [other] = add(frontend, "other")
    assert (first.sampling.seed, other.sampling.seed) == (100, 101)
    assert frontend.resume([other.number])[other.number].sampling.seed == 101
    frontend.abort("r")
    frontend.abort("other")


def test_one_whose_end_is_known_here_alone_is_finished(frontend: Frontend) -> None:
    state, [first] = add(frontend, stop=["ab"])
    frontend.process(step((first.number, 97)))
    assert frontend.process(step((first.number, 98))).stopped == [first.number]
    assert frontend.resume([first.number]) == {}
    assert state.finished


def test_times_and_cached_tokens_are_those_of_the_first_attempt(frontend: Frontend, clock: Clock) -> None:
    state, [first] = add(frontend)
    clock.now += 2.5
    [second] = frontend.resume([first.number]).values()
    assert (second.age, second.counted) == (2.5, False)
    clock.now += 1.0
    frontend.process(step((second.number, 97), scheduled={second.number: (2, 3.25)}))
    clock.now += 1.0
    [third] = frontend.resume([second.number]).values()
    assert (third.age, third.counted) == (4.5, True)
    frontend.process(step((third.number, 98, LENGTH), scheduled={third.number: (0, 4.5)}))
    metrics = state.metrics
    assert (metrics.arrival_time, metrics.first_token_time, metrics.finished_time) == (1000, 1003.5, 1004.5)
    assert (metrics.time_in_queue, state.num_cached_tokens) == (3.25, 2)


def test_they_are_resumed_in_the_order_of_their_arrival(frontend: Frontend, clock: Clock) -> None:
    names = ["c", "a", "b"]
    numbers = []
    for name in names:
        numbers += [message.number for message in add(frontend, name, n=2).messages]
        clock.now += 1.0
    # One of them has the highest number and is still the first.
    [moved] = frontend.resume(numbers[:1]).values()
    assert list(frontend.resume([numbers[4], *numbers[1:3], moved.number])) == [
        numbers[1],
        moved.number,
        numbers[2],
        numbers[4],
    ]
    for name in names:
        frontend.abort(name)


@pytest.mark.parametrize("kind", [DELTA, CUMULATIVE, FINAL_ONLY])
def test_prompt_logprobs_go_on_where_they_were(frontend: Frontend, kind) -> None:
    state, messages = add(
        frontend, prompt=[5, 6, 7, 8], n=2, temperature=1, prompt_logprobs=0, output_kind=kind
    )
    first, other = (message.number for message in messages)
    frontend.process(step(prompt_logprobs=[(first, positions(6))]))
    resumed = frontend.resume([first, other])
    assert [resumed[number].sampling.prompt_logprobs_done for number in (first, other)] == [1, 0]
    assert [message.sampling.prompt_logprobs_done for message in messages] == [0, 0]
    late = step(prompt_logprobs=[(first, positions(7))])
    frontend.process(late)
    number, other = (message.number for message in resumed.values())
    frontend.process(step((number, 97), (other, 98), prompt_logprobs=[(number, positions(7, 8))]))
    taken = state.output().prompt_logprobs
    assert taken is not None
    assert [list(row or ()) for row in taken] == [[], [6], [7], [8]]
    # All of them were taken, and none is asked for again.
    [message] = frontend.resume([number]).values()
    assert message.sampling.prompt_logprobs_done == 3
    frontend.process(step((message.number, 99, LENGTH), (other, 99, LENGTH)))
