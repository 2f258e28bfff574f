"""The life of a request in a front-end, with a tokenizer and without."""

from pathlib import Path

import pytest

from enginecore.config import EngineConfig
from enginecore.errors import RequestError
from enginecore.frontend.frontend import Frontend
from enginecore.frontend.request import Prompt, Request
from enginecore.frontend.text.tokenizer import Tokenizer
from enginecore.model_files import ModelFiles
from enginecore.sampling_params import SamplingParams
from front_ends import DELTA, EOS, add, front, greedy, ids, logprobs_of, receive, step

# The life of a request


def test_one_id_for_one_request_at_a_time(frontend: Frontend) -> None:
    prompt = Prompt(None, [1])
    [first] = add(frontend, "r", prompt, greedy())
    with pytest.raises(RequestError, match="'r' belongs to an unfinished request"):
        add(frontend, "r", prompt, greedy())
    assert frontend.abort("r") == [first.number]
    [second] = add(frontend, "r", prompt, greedy())
    # What the core had already sent for the first is not the second's.
    assert receive(frontend, step((first.number, 97, 2))).outputs == []
    [output] = receive(frontend, step((second.number, 98, 2))).outputs
    assert output.outputs[0].text == "b"


def test_aborting_names_only_what_still_runs(frontend: Frontend) -> None:
    params = SamplingParams(n=3, max_tokens=4)
    numbers = [request.number for request in add(frontend, "r", Prompt(None, [1]), params)]
    receive(frontend, step((numbers[1], EOS, 1)))
    assert frontend.abort("r") == [numbers[0], numbers[2]]
    assert frontend.abort("r") == []
    assert frontend.unfinished == 0


def test_a_request_the_core_gives_up(frontend: Frontend) -> None:
    [request] = add(frontend, "r", Prompt(None, [1]), greedy())
    [other] = add(frontend, "s", Prompt(None, [1]), greedy())
    receive(frontend, step((request.number, 97, 0)))
    received = receive(frontend, step((other.number, 97, 0), errors={request.number: "it never fits"}))
    failed = next(output for output in received.outputs if output.request_id == "r")
    assert failed.finished
    sample = failed.outputs[0]
    assert (sample.text, sample.finish_reason, sample.stop_reason) == ("a", "error", "it never fits")
    assert frontend.unfinished == 1


def test_a_slow_reader_gets_all_of_it_at_once(frontend: Frontend) -> None:
    params = SamplingParams(n=2, logprobs=0, output_kind=DELTA)
    added = frontend.add(Request("r", Prompt(None, [1]), params))
    one, two = (message.number for message in added.messages)
    for token in ids("🌶abc"):
        entries = [logprobs_of(number, [[(token, -1.0)]], [1]) for number in (one, two)]
        frontend.process(step((one, token, 0), (two, token, 0), logprobs=entries))
    first = added.state.output()
    assert [(sample.text, len(sample.token_ids)) for sample in first.outputs] == [("🌶abc", 7)] * 2
    assert [len(sample.logprobs or []) for sample in first.outputs] == [7, 7]
    entries = [logprobs_of(two, [[(EOS, -1.0)]], [1])]
    frontend.process(step((two, EOS, 1), logprobs=entries))
    [second] = added.state.output().outputs
    assert (second.index, second.text, second.token_ids, second.finish_reason) == (1, "", [EOS], "stop")


def test_no_request_is_taken_before_the_core_is_ready(byte_tokenizer: Tokenizer) -> None:
    frontend = Frontend(EngineConfig(model="m"), ModelFiles("m", Path("m"), {}), byte_tokenizer)
    with pytest.raises(RequestError, match="still loading"):
        add(frontend, "r", Prompt(None, [1]), greedy())


# Without a tokenizer


def test_without_a_tokenizer_ids_go_in_and_come_out() -> None:
    frontend = front(None)
    [request] = add(frontend, "r", frontend.prepare_prompt([1, 2]), greedy(logprobs=0))
    entry = logprobs_of(request.number, [[(EOS, -1.0)]], [1])
    [output] = receive(frontend, step((request.number, EOS, 1), logprobs=[entry])).outputs
    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("", [EOS])


def test_without_a_tokenizer_text_is_refused() -> None:
    frontend = front(None)
    for attempt in (
        lambda: frontend.prepare_prompt("hi"),
        lambda: frontend.prepare_prompt({"prompt": "hi"}),
        lambda: frontend.prepare_chat([{"role": "user", "content": "hi"}]),
        lambda: add(frontend, "r", Prompt(None, [1]), greedy(stop=["x"])),
        lambda: add(frontend, "r", Prompt(None, [1]), greedy(bad_words=["x"])),
    ):
        with pytest.raises(RequestError, match="no tokenizer"):
            attempt()
