"""Outputs show what their kind promises: deltas, samples, times, log probabilities."""

from pathlib import Path

import pytest

from enginecore.config import EngineConfig
from enginecore.frontend.frontend import Frontend
from enginecore.frontend.request import Prompt
from enginecore.frontend.text.tokenizer import Tokenizer
from enginecore.messages import EngineLimits
from enginecore.model_files import ModelFiles
from enginecore.outputs import Logprob
from enginecore.sampling_params import RequestOutputKind, SamplingParams
from front_ends import (
    CUMULATIVE,
    DELTA,
    EOS,
    FINAL_ONLY,
    KINDS,
    add,
    greedy,
    ids,
    logprobs_of,
    receive,
    run,
    step,
)

# What each output kind shows


def test_deltas_hold_what_is_new_and_cumulative_outputs_everything(frontend: Frontend) -> None:
    texts, outputs = run(frontend, ids("abc"), greedy(DELTA, max_tokens=3))
    assert texts == ["a", "b", "c"]
    assert [output.outputs[0].token_ids for output in outputs] == [[97], [98], [99]]
    texts, outputs = run(frontend, ids("abc"), greedy(CUMULATIVE, max_tokens=3))
    assert texts == ["a", "ab", "abc"]
    assert [output.outputs[0].token_ids for output in outputs] == [[97], [97, 98], [97, 98, 99]]
    assert [output.finished for output in outputs] == [False, False, True]
    texts, _ = run(frontend, ids("abc"), greedy(FINAL_ONLY, max_tokens=3))
    assert texts == ["abc"]


def test_outputs_name_the_request(frontend: Frontend) -> None:
    _, outputs = run(frontend, [EOS], greedy())
    assert (outputs[0].request_id, outputs[0].prompt, outputs[0].prompt_token_ids) == ("r", "qqq", [113] * 3)


def test_samples_of_one_request(frontend: Frontend) -> None:
    params = SamplingParams(n=3, max_tokens=2, output_kind=DELTA)
    numbers = [request.number for request in add(frontend, "r", Prompt(None, [1]), params)]
    assert len(set(numbers)) == 3
    [output] = receive(frontend, step((numbers[2], 97, 0), (numbers[0], 98, 2))).outputs
    assert [(sample.index, sample.text) for sample in output.outputs] == [(0, "b"), (2, "a")]
    assert not output.finished
    received = receive(frontend, step((numbers[1], 97, 2), (numbers[2], EOS, 1)))
    [output] = received.outputs
    assert output.finished
    assert [sample.finish_reason for sample in output.outputs] == ["length", "stop"]


def test_samples_are_all_in_the_final_output(frontend: Frontend) -> None:
    params = SamplingParams(n=2, max_tokens=1, output_kind=FINAL_ONLY)
    first, second = add(frontend, "r", Prompt(None, [1]), params)
    assert receive(frontend, step((second.number, 98, 2))).outputs == []
    [output] = receive(frontend, step((first.number, 97, 2))).outputs
    assert [(sample.index, sample.text) for sample in output.outputs] == [(0, "a"), (1, "b")]


def test_times_and_cached_tokens(byte_tokenizer: Tokenizer) -> None:
    now = 100.0
    files = ModelFiles("m", Path("m"), {})
    frontend = Frontend(EngineConfig(model="m"), files, byte_tokenizer, clock=lambda: now)
    frontend.limits = EngineLimits(64, 320, 8, 16)
    first, second = add(frontend, "r", Prompt(None, [1] * 40), SamplingParams(n=2, max_tokens=1))
    now = 101.0
    scheduled = {first.number: (16, 0.5), second.number: (32, 0.75)}
    receive(frontend, step((first.number, 97, 2), (second.number, 97, 0), scheduled=scheduled))
    now = 102.0
    received = receive(frontend, step((second.number, 97, 2)))
    [output] = received.outputs
    assert output.num_cached_tokens == 16
    assert output.metrics is not None
    assert (output.metrics.arrival_time, output.metrics.first_token_time) == (100.0, 101.0)
    assert output.metrics.finished_time == 102.0


# Log probabilities


def test_logprobs_come_with_their_tokens(frontend: Frontend) -> None:
    [request] = add(frontend, "r", Prompt(None, [1]), SamplingParams(logprobs=1, max_tokens=2))
    number = request.number
    [output] = receive(
        frontend, step((number, 97, 0), logprobs=[logprobs_of(number, [[(97, -0.5), (97, -0.5)]], [1])])
    ).outputs
    assert output.outputs[0].logprobs == [{97: Logprob(-0.5, 1, "a")}]
    [output] = receive(
        frontend, step((number, 98, 2), logprobs=[logprobs_of(number, [[(98, -2.0), (99, -0.25)]], [5])])
    ).outputs
    assert output.outputs[0].logprobs == [
        {97: Logprob(-0.5, 1, "a")},
        {98: Logprob(-2.0, 5, "b"), 99: Logprob(-0.25, 1, "c")},
    ]
    assert output.outputs[0].cumulative_logprob == -2.5


def test_logprobs_of_tokens_after_a_stop_string_are_dropped(frontend: Frontend) -> None:
    params = SamplingParams(logprobs=0, stop=["a"], output_kind=DELTA)
    [request] = add(frontend, "r", Prompt(None, [1]), params)
    number = request.number
    entries = [logprobs_of(number, [[(token, -1.0)]], [1]) for token in (97, 98)]
    [output] = receive(frontend, step((number, 97, 0), (number, 98, 0), logprobs=entries)).outputs
    assert output.outputs[0].logprobs == [{97: Logprob(-1.0, 1, "a")}]
    assert output.outputs[0].cumulative_logprob == -1.0


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_logprobs_arrive_once_and_start_with_none(frontend: Frontend, kind: RequestOutputKind) -> None:
    params = SamplingParams(prompt_logprobs=0, n=2, max_tokens=2, output_kind=kind)
    first, second = add(frontend, "r", Prompt(None, [1, 2, 3]), params)
    assert (first.sampling.params.prompt_logprobs, second.sampling.params.prompt_logprobs) == (0, None)
    pieces = [logprobs_of(first.number, [[(token, -1.0)]], [4]) for token in (2, 3)]
    outputs = receive(frontend, step(prompt_logprobs=pieces[:1])).outputs
    assert outputs == []
    outputs += receive(
        frontend, step((first.number, 97, 0), (second.number, 97, 0), prompt_logprobs=pieces[1:])
    ).outputs
    outputs += receive(frontend, step((first.number, 97, 2), (second.number, 97, 2))).outputs
    rows = [None, {2: Logprob(-1.0, 4, "\x02")}, {3: Logprob(-1.0, 4, "\x03")}]
    seen = [output.prompt_logprobs for output in outputs]
    assert seen == ([rows, None] if kind is DELTA else [rows] * len(outputs))


def test_prompt_logprobs_come_whole_when_another_sample_is_faster(frontend: Frontend) -> None:
    """The second sample may start from cached blocks, the first one may not."""
    params = SamplingParams(prompt_logprobs=0, n=2, max_tokens=2, output_kind=DELTA)
    first, second = add(frontend, "r", Prompt(None, [1, 2, 3]), params)
    pieces = [logprobs_of(first.number, [[(token, -1.0)]], [4]) for token in (2, 3)]
    early = receive(frontend, step((second.number, 97, 0), prompt_logprobs=pieces[:1])).outputs
    assert early == []
    [output] = receive(frontend, step((first.number, 98, 0), prompt_logprobs=pieces[1:])).outputs
    assert output.prompt_logprobs == [None, {2: Logprob(-1.0, 4, "\x02")}, {3: Logprob(-1.0, 4, "\x03")}]
    assert [(sample.index, sample.token_ids) for sample in output.outputs] == [(0, [98]), (1, [97])]


def test_the_only_token_of_a_prompt_has_no_logprobs(frontend: Frontend) -> None:
    [request] = add(frontend, "r", Prompt(None, [1]), SamplingParams(prompt_logprobs=3, max_tokens=1))
    [output] = receive(frontend, step((request.number, 97, 2))).outputs
    assert output.prompt_logprobs == [None]


def test_without_detokenizing_logprobs_hold_no_text(frontend: Frontend) -> None:
    params = SamplingParams(logprobs=0, detokenize=False, max_tokens=1)
    [request] = add(frontend, "r", Prompt(None, [1]), params)
    entry = logprobs_of(request.number, [[(97, -1.0)]], [1])
    [output] = receive(frontend, step((request.number, 97, 2), logprobs=[entry])).outputs
    assert output.outputs[0].logprobs == [{97: Logprob(-1.0, 1, None)}]
