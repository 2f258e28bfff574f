from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from byte_tokenizer import ROLES, backend
from data_files import STORIES
from enginecore.config import EngineConfig
from enginecore.errors import ConfigError, RequestError
from enginecore.frontend.frontend import Frontend
from enginecore.frontend.request import Prompt, Request
from enginecore.frontend.text.loading import load_tokenizer
from enginecore.frontend.text.tokenizer import Tokenizer
from enginecore.messages import AddRequest, EngineLimits, Outputs, PositionLogprobs
from enginecore.model_files import ModelFiles
from enginecore.outputs import Logprob, RequestOutput
from enginecore.sampling_params import RequestOutputKind, SamplingParams

EOS, EOT = 257, 258
DELTA, CUMULATIVE, FINAL_ONLY = (
    RequestOutputKind.DELTA,
    RequestOutputKind.CUMULATIVE,
    RequestOutputKind.FINAL_ONLY,
)
KINDS = [DELTA, CUMULATIVE, FINAL_ONLY]


def front(tokenizer: Tokenizer | None, files: ModelFiles | None = None, **options: Any) -> Frontend:
    """Return a front-end of a model with 320 ids and room for 64 tokens."""
    files = files or ModelFiles("m", Path("m"), {"eos_token_id": EOS})
    frontend = Frontend(EngineConfig(model="m", **options), files, tokenizer)
    frontend.limits = EngineLimits(max_model_len=64, vocab_size=320, num_blocks=8, block_size=16)
    return frontend


@pytest.fixture
def frontend(byte_tokenizer: Tokenizer) -> Frontend:
    return front(byte_tokenizer)


def step(*rows: tuple[int, int, int], **more: Any) -> Outputs:
    """Return a step's message from (number, token, finish code) rows."""
    numbers, tokens, codes = zip(*rows) if rows else ((), (), ())
    return Outputs(
        numbers=np.array(numbers, np.int64),
        tokens=np.array(tokens, np.int32),
        finished=np.array(codes, np.int8),
        **more,
    )


class Received(NamedTuple):
    outputs: list[RequestOutput]
    stopped: list[int]


def add(
    frontend: Frontend, request_id: str, prompt: Prompt, params: SamplingParams, priority: int = 0
) -> list[AddRequest]:
    """Return what a core is sent for a request."""
    return frontend.add(Request(request_id, prompt, params, priority)).messages


def receive(frontend: Frontend, outputs: Outputs) -> Received:
    """Return what callers get of a step, as an engine that is stepped by hand gives it to them."""
    processed = frontend.process(outputs)
    return Received([state.output() for state in processed.changed if state.has_output], processed.stopped)


def core(frontend: Frontend, request: AddRequest, script: Sequence[int]) -> Iterator[Received]:
    """Say the script as an engine core would: a token a step, up to a stop id, max_tokens, or an abort."""
    for count, token in enumerate(script, 1):
        code = 0
        if token in request.sampling.stop_ids and count > request.sampling.params.min_tokens:
            code = 1
        elif count == request.max_tokens:
            code = 2
        received = receive(frontend, step((request.number, token, code)))
        yield received
        if code or request.number in received.stopped:
            return


def run(
    frontend: Frontend, script: Sequence[int], params: SamplingParams
) -> tuple[list[str], list[RequestOutput]]:
    """Return the texts shown, one an output, and the outputs."""
    [request] = add(frontend, "r", Prompt("qqq", [113] * 3), params)
    outputs = [output for received in core(frontend, request, script) for output in received.outputs]
    assert frontend.unfinished == 0
    assert outputs[-1].finished
    return [output.outputs[0].text for output in outputs], outputs


def ids(text: str) -> list[int]:
    return list(text.encode())


def greedy(kind: RequestOutputKind = CUMULATIVE, **fields: Any) -> SamplingParams:
    fields = {"temperature": 0, "max_tokens": 40, "output_kind": kind, **fields}
    return SamplingParams(**fields)


# Text


def test_characters_split_across_tokens(frontend: Frontend) -> None:
    script = [*ids("🌶é语👨‍👩‍👧"), EOS]
    texts, outputs = run(frontend, script, greedy(DELTA))
    assert [text for text in texts if text] == list("🌶é语👨‍👩‍👧")
    assert sum(len(output.outputs[0].token_ids) for output in outputs) == 28
    for kind in (CUMULATIVE, FINAL_ONLY):
        texts, outputs = run(frontend, script, greedy(kind))
        assert texts[-1] == "🌶é语👨‍👩‍👧"
        assert outputs[-1].outputs[0].token_ids == script
        assert (outputs[-1].outputs[0].finish_reason, outputs[-1].outputs[0].stop_reason) == ("stop", None)


@pytest.mark.parametrize("kind", KINDS)
def test_output_that_ends_within_a_character(frontend: Frontend, kind: RequestOutputKind) -> None:
    texts, outputs = run(frontend, [0xF0, 0x9F, 0x8C, 0xB6], greedy(kind, max_tokens=2))
    assert (texts if kind is DELTA else texts[-1:])[-1] == "\ufffd"
    assert outputs[-1].outputs[0].finish_reason == "length"


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_that_are_no_character(frontend: Frontend, kind: RequestOutputKind) -> None:
    texts, _ = run(frontend, [0xF0, 0x9F, 0x61, 0x62, 0xFF, 0x63, EOS], greedy(kind))
    assert ("".join(texts) if kind is DELTA else texts[-1]) == "\ufffdab\ufffdc"


@pytest.mark.parametrize("stop", [["STOP"], ["zzz", "STOP"]])
@pytest.mark.parametrize(("include", "text"), [(False, "abc"), (True, "abcSTOP")])
@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_string_across_tokens(
    frontend: Frontend, kind: RequestOutputKind, include: bool, text: str, stop: list[str]
) -> None:
    params = greedy(kind, stop=stop, include_stop_str_in_output=include)
    [request] = add(frontend, "r", Prompt("qqq", [113] * 3), params)
    steps = list(core(frontend, request, ids("abcSTOPzz")))
    assert [received.stopped for received in steps] == [[]] * 6 + [[request.number]]
    outputs = [output for received in steps for output in received.outputs]
    texts = [output.outputs[0].text for output in outputs]
    shown = "".join(texts) if kind is DELTA else texts[-1]
    assert shown == text
    assert all(not given.endswith(("S", "ST", "STO")) for given in texts)
    last = outputs[-1].outputs[0]
    assert (last.finish_reason, last.stop_reason) == ("stop", "STOP")
    assert frontend.unfinished == 0


def test_a_stop_string_on_the_last_token_is_no_abort(frontend: Frontend) -> None:
    [request] = add(frontend, "r", Prompt(None, [1]), greedy(stop=["c"], max_tokens=3))
    *_, last = core(frontend, request, ids("abc"))
    assert last.stopped == []
    assert last.outputs[0].outputs[0].stop_reason == "c"


def test_tokens_after_a_stop_string_are_dropped(frontend: Frontend) -> None:
    [request] = add(frontend, "r", Prompt(None, [1]), greedy(DELTA, stop=["b"]))
    number = request.number
    received = receive(frontend, step(*[(number, token, 0) for token in ids("abcd")]))
    [output] = received.outputs
    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("a", ids("ab"))
    assert received.stopped == [number]
    assert receive(frontend, step((number, 101, 1))) == Received([], [])


def test_no_stop_string_ends_before_min_tokens(frontend: Frontend) -> None:
    texts, outputs = run(frontend, ids("a\nb\nc\n"), greedy(stop=["\n"], min_tokens=3))
    assert texts[-1] == "a\nb"
    assert len(outputs[-1].outputs[0].token_ids) == 4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("fields", "text", "count", "finish"),
    [
        ({}, "ab", 3, ("stop", None)),
        ({"ignore_eos": True, "max_tokens": 8}, "abcdef", 8, ("length", None)),
        ({"ignore_eos": True, "stop_token_ids": [99]}, "ab", 4, ("stop", 99)),
        ({"stop_token_ids": [98]}, "a", 2, ("stop", 98)),
        ({"stop_token_ids": [98], "include_stop_str_in_output": True}, "ab", 2, ("stop", 98)),
        ({"stop_token_ids": [EOT]}, "ab", 3, ("stop", None)),
        ({"skip_special_tokens": False}, "ab", 3, ("stop", None)),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, "ab<eot>", 3, ("stop", None)),
        ({"detokenize": False}, "", 3, ("stop", None)),
    ],
)
def test_several_eos_ids_and_stop_token_ids(
    byte_tokenizer: Tokenizer,
    kind: RequestOutputKind,
    fields: dict[str, Any],
    text: str,
    count: int,
    finish: tuple[str, int | None],
) -> None:
    files = ModelFiles("m", Path("m"), {"eos_token_id": 257}, {"eos_token_id": [257, 258]})
    frontend = front(byte_tokenizer, files)
    script = [*ids("ab"), EOT, *ids("cd"), EOS, *ids("ef")]
    texts, outputs = run(frontend, script, greedy(kind, **fields))
    last = outputs[-1].outputs[0]
    assert ("".join(texts) if kind is DELTA else texts[-1]) == text
    assert (last.finish_reason, last.stop_reason) == finish
    total = (
        sum(len(output.outputs[0].token_ids) for output in outputs) if kind is DELTA else len(last.token_ids)
    )
    assert total == count


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({}, {}, [257]),
        ({"eos_token_id": [258]}, {}, [257, 258]),
        ({"eos_token_id": 257}, {"eos_token_id": [258, 257]}, [257, 258]),
        ({"eos_token_id": 5000}, {}, [257]),
    ],
)
def test_where_eos_ids_come_from(
    byte_tokenizer: Tokenizer, config: dict[str, Any], generation: dict[str, Any], expected: list[int]
) -> None:
    frontend = front(byte_tokenizer, ModelFiles("m", Path("m"), config, generation))
    [request] = add(frontend, "r", Prompt(None, [1]), greedy(stop_token_ids=[7, 258]))
    assert request.sampling.stop_ids == list(dict.fromkeys([*expected, 7, 258]))
    [request] = add(frontend, "s", Prompt(None, [1]), greedy(ignore_eos=True))
    assert request.sampling.stop_ids == []


@pytest.mark.parametrize("script", ["ab<eot>cd<eos>", "ab<eos>cd<eot>"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_tokenizer_s_eos_ends_a_request_as_the_config_s_does(
    kind: RequestOutputKind, script: str
) -> None:
    """HC-87: a base model tuned for chat, whose config.json still names the base model's EOS."""
    tokenizer = Tokenizer(backend(), special_tokens={**ROLES, "eos_token": "<eot>"})
    files = ModelFiles("m", Path("m"), {"eos_token_id": EOS}, {"eos_token_id": EOS})
    texts, outputs = run(front(tokenizer, files), tokenizer.encode(script), greedy(kind))
    last = outputs[-1].outputs[0]
    assert ("".join(texts) if kind is DELTA else texts[-1]) == "ab"
    assert (last.finish_reason, last.stop_reason) == ("stop", None)
    texts, _ = run(
        front(tokenizer, files), tokenizer.encode(script), greedy(kind, ignore_eos=True, max_tokens=6)
    )
    assert ("".join(texts) if kind is DELTA else texts[-1]) == "abcd"


def test_sampling_defaults_are_the_model_s_or_vllm_s(byte_tokenizer: Tokenizer) -> None:
    given = {"temperature": 0.3, "max_new_tokens": 50, "top_k": None}
    files = ModelFiles("m", Path("m"), {}, given)
    assert front(byte_tokenizer, files).sampling_defaults == {"temperature": 0.3, "max_tokens": 50}
    assert front(byte_tokenizer, files, generation_config="vllm").sampling_defaults == {}


def test_output_keeps_the_space_that_joins_it_to_its_prompt(tokenizer_folders: dict[str, Path]) -> None:
    tokenizer = load_tokenizer(ModelFiles("", tokenizer_folders["byte-fallback"], {}))
    assert tokenizer is not None
    frontend = front(tokenizer)
    frontend.limits = EngineLimits(512, tokenizer.vocab_size, 8, 16)
    script = tokenizer.encode("time", add_special_tokens=False)
    for kind in KINDS:
        for prompt, text in (("Once upon a", " time"), ("", "time")):
            params = greedy(kind, max_tokens=len(script))
            [request] = add(frontend, "r", frontend.prepare_prompt(prompt), params)
            outputs = [out for got in core(frontend, request, script) for out in got.outputs]
            texts = [output.outputs[0].text for output in outputs]
            assert ("".join(texts) if kind is DELTA else texts[-1]) == text


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


def logprobs_of(
    number: int, rows: list[list[tuple[int, float]]], ranks: list[int]
) -> tuple[int, PositionLogprobs]:
    return number, PositionLogprobs(
        np.array([[token for token, _ in row] for row in rows], np.int32),
        np.array([[value for _, value in row] for row in rows], np.float32),
        np.array(ranks, np.int32),
    )


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


# What goes to the core


def test_messages_to_the_core(frontend: Frontend) -> None:
    params = greedy(max_tokens=5, seed=9)
    prompt = frontend.prepare_prompt({"prompt": "hi", "cache_salt": "s"})
    with pytest.raises(RequestError, match="priority has no effect"):
        add(frontend, "r", prompt, params, priority=3)
    [request] = add(frontend, "r", prompt, params)
    assert request.prompt.tolist() == ids("hi")
    assert (request.max_tokens, request.sampling.seed) == (5, 9)
    assert (request.priority, request.cache_salt) == (0, "s")
    [other] = add(frontend, "q", frontend.prepare_prompt("hi", cache_salt="t"), params)
    assert (other.cache_salt, other.number) == ("t", request.number + 1)


def test_seeds(byte_tokenizer: Tokenizer) -> None:
    def seeds(frontend: Frontend, request_id: str, **fields: Any) -> list[int]:
        return [
            request.sampling.seed
            for request in add(frontend, request_id, Prompt(None, [1]), SamplingParams(**fields))
        ]

    one, two = front(byte_tokenizer, seed=7), front(byte_tokenizer, seed=7)
    assert seeds(one, "a", seed=5, n=3) == seeds(two, "a", seed=5, n=3)
    assert len(set(seeds(one, "b", seed=5, n=3))) == 3
    unseeded = [*seeds(one, "c", n=2), *seeds(one, "d")]
    assert len(set(unseeded)) == 3
    assert unseeded == [*seeds(two, "c", n=2), *seeds(two, "d")]
    assert all(-(2**63) <= seed < 2**63 for seed in seeds(one, "e", seed=2**63 - 1, n=3))


def test_bad_words_stand_alone_and_after_a_space(frontend: Frontend) -> None:
    [request] = add(frontend, "r", Prompt(None, [1]), greedy(bad_words=["ab", " c"]))
    assert request.sampling.bad_words == [ids("ab"), ids("c")]
    tokenizer = load_tokenizer(ModelFiles("", STORIES, {}))
    assert tokenizer is not None
    words = front(tokenizer)
    words.limits = EngineLimits(64, tokenizer.vocab_size, 8, 16)
    [request] = add(words, "r", Prompt(None, [1]), greedy(bad_words=["red"]))
    assert [tokenizer.decode(word) for word in request.sampling.bad_words] == ["red", " red"]


# Prompts


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", Prompt("ab", [97, 98])),
        ([97, 319], Prompt(None, [97, 319])),
        ((1, 2), Prompt(None, [1, 2])),
        ({"prompt": "ab"}, Prompt("ab", [97, 98])),
        ({"prompt_token_ids": [5], "cache_salt": "x"}, Prompt(None, [5], "x")),
        ({"prompt": "shown", "prompt_token_ids": [5]}, Prompt("shown", [5])),
        (Prompt("z", [3]), Prompt("z", [3])),
    ],
)
def test_forms_of_a_prompt(frontend: Frontend, prompt: Any, expected: Prompt) -> None:
    assert frontend.prepare_prompt(prompt) == expected


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        5,
        [1, "a"],
        [[1]],
        [1.0],
        [True],
        b"ab",
        {},
        {"prompt": None},
        {"prompt": [1]},
        {"prompt_token_ids": "ab"},
        {"prompt": "a", "multi_modal_data": {}},
        {"prompt": "a", "cache_salt": 3},
        "\ud800",
    ],
)
def test_other_prompts_are_refused(frontend: Frontend, prompt: Any) -> None:
    with pytest.raises(RequestError):
        frontend.prepare_prompt(prompt)


@pytest.mark.parametrize("prompt", ["", [], {"prompt": ""}, {"prompt_token_ids": []}])
def test_prompts_without_a_token_are_refused(frontend: Frontend, prompt: Any) -> None:
    with pytest.raises(RequestError, match="the prompt is empty"):
        add(frontend, "r", frontend.prepare_prompt(prompt), greedy())
    run(frontend, [EOS], greedy())


def test_an_empty_text_is_a_prompt_where_bos_is_added(tokenizer_folders: dict[str, Path]) -> None:
    tokenizer = load_tokenizer(ModelFiles("", tokenizer_folders["byte-fallback"], {}))
    frontend = front(tokenizer)
    assert frontend.prepare_prompt("").token_ids == [1]
    assert frontend.prepare_prompt("", add_special_tokens=False).token_ids == []


@pytest.mark.parametrize("token", [-1, 320, 2**63])
def test_ids_outside_the_vocabulary_are_refused(frontend: Frontend, token: int) -> None:
    with pytest.raises(RequestError, match=f"token id {token}, but the vocabulary ends at 319"):
        add(frontend, "r", Prompt(None, [5, token, 6]), greedy())
    add(frontend, "r", Prompt(None, [319, 0]), greedy())


@pytest.mark.parametrize(
    ("length", "max_tokens", "expected"),
    [
        (62, None, 2),
        (62, 1, 1),
        (62, 2, 2),
        (63, None, 1),
        (63, 1, 1),
    ],
)
def test_prompts_that_just_fit(
    frontend: Frontend, length: int, max_tokens: int | None, expected: int
) -> None:
    [request] = add(frontend, "r", Prompt(None, [1] * length), greedy(max_tokens=max_tokens))
    assert request.max_tokens == expected


@pytest.mark.parametrize(
    ("length", "max_tokens", "param"),
    [
        (62, 100, "max_tokens"),
        (63, 2, "max_tokens"),
        (64, None, "prompt"),
        (64, 1, "prompt"),
        (65, 1, "prompt"),
    ],
)
def test_prompts_that_do_not_fit(frontend: Frontend, length: int, max_tokens: int | None, param: str) -> None:
    with pytest.raises(RequestError, match=f"context length is 64 tokens. However, .*{length}.*") as refusal:
        add(frontend, "r", Prompt(None, [1] * length), greedy(max_tokens=max_tokens))
    assert refusal.value.param == param
    assert refusal.value.code == "context_length_exceeded"
    assert isinstance(refusal.value, ValueError)
    assert frontend.unfinished == 0


# Parameters


@pytest.mark.parametrize(
    ("fields", "message", "param"),
    [
        ({"logprobs": 21}, "at most max_logprobs=20", "logprobs"),
        ({"prompt_logprobs": 10**6}, "at most max_logprobs=20", "prompt_logprobs"),
        ({"logprobs": -1}, "at most max_logprobs=20", "logprobs"),
        ({"stop_token_ids": [320]}, "vocabulary ends at 319", "stop_token_ids"),
        ({"allowed_token_ids": [320]}, "vocabulary ends at 319", "allowed_token_ids"),
        ({"logit_bias": {320: 1.0}}, "vocabulary ends at 319", "logit_bias"),
        (
            {"max_tokens": None, "min_tokens": 64},
            "leaves room for 63 tokens, fewer than min_tokens=64",
            "min_tokens",
        ),
    ],
)
def test_parameters_the_model_cannot_meet(
    frontend: Frontend, fields: dict[str, Any], message: str, param: str
) -> None:
    with pytest.raises(RequestError, match=message) as refusal:
        add(frontend, "r", Prompt(None, [1]), SamplingParams(**fields))
    assert refusal.value.param == param
    assert frontend.unfinished == 0


def test_no_limit_on_logprobs(byte_tokenizer: Tokenizer) -> None:
    frontend = front(byte_tokenizer, max_logprobs=-1)
    assert len(add(frontend, "r", Prompt(None, [1]), SamplingParams(logprobs=-1))) == 1


# Chat


@pytest.mark.parametrize(("template", "count"), [("{{ bos_token }}", 1), ("", 0)])
def test_a_chat_holds_the_special_tokens_of_its_template_alone(
    byte_folder: Path, template: str, count: int
) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers.processors import TemplateProcessing

    backend = Backend.from_file(str(byte_folder / "tokenizer.json"))
    backend.post_processor = TemplateProcessing("<bos> $A", special_tokens=[("<bos>", 256)])
    tokenizer = Tokenizer(
        backend,
        special_tokens={"bos_token": "<bos>"},
        chat_template=template + "{% for m in messages %}{{ m.content }}{% endfor %}",
    )
    frontend = front(tokenizer)
    prompt = frontend.prepare_chat([{"role": "user", "content": "hi"}])
    assert prompt == Prompt("<bos>" * count + "hi", [256] * count + ids("hi"))
    assert frontend.prepare_prompt("<bos>hi").token_ids == [256, 256, *ids("hi")]
    assert frontend.prepare_prompt("<bos>hi", add_special_tokens=False).token_ids == [256, *ids("hi")]


def test_a_chat_may_ask_for_the_tokenizer_s_own_special_tokens(tokenizer_folders: dict[str, Path]) -> None:
    tokenizer = load_tokenizer(ModelFiles("", tokenizer_folders["byte-fallback"], {}))
    assert tokenizer is not None
    frontend = front(tokenizer, chat_template="{{ messages[0]['content'] }}")
    messages = [{"role": "user", "content": "hi"}]
    plain = frontend.prepare_chat(messages).token_ids
    assert frontend.prepare_chat(messages, add_special_tokens=True).token_ids == tokenizer.encode("hi")
    assert plain == tokenizer.encode("hi", add_special_tokens=False) != tokenizer.encode("hi")


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback", "stories"])
def test_a_long_list_of_ids_becomes_the_text_of_all_of_them(
    tokenizer_folders: dict[str, Path], kind: str
) -> None:
    tokenizer = load_tokenizer(ModelFiles("", tokenizer_folders[kind], {}))
    assert tokenizer is not None
    ids = tokenizer.encode("Once upon é a time 语 <s>" * 2000)
    assert len(ids) > 3 * 4096
    assert front(tokenizer).detokenize(ids) == tokenizer.decode(ids, skip_special_tokens=False)


def test_a_model_without_template_still_completes(frontend: Frontend) -> None:
    with pytest.raises(RequestError, match="no chat template"):
        frontend.prepare_chat([{"role": "user", "content": "hi"}])
    run(frontend, [EOS], greedy())


def test_a_broken_template_of_the_model_fails_chats_alone(byte_folder: Path) -> None:
    (byte_folder / "chat_template.jinja").write_text("{% if %}")
    frontend = front(load_tokenizer(ModelFiles("", byte_folder, {})))
    with pytest.raises(RequestError, match="line 1"):
        frontend.prepare_chat([{"role": "user", "content": "hi"}])
    run(frontend, [EOS], greedy())


def test_a_broken_template_option_is_an_error_at_once(byte_tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="line 1"):
        front(byte_tokenizer, chat_template="{% if %}")


def test_a_given_template_comes_before_the_option_and_the_model_s(byte_tokenizer: Tokenizer) -> None:
    frontend = front(byte_tokenizer, chat_template="{{ 'o' }}")
    messages = [{"role": "user", "content": "hi"}]
    assert frontend.prepare_chat(messages).text == "o"
    assert frontend.prepare_chat(messages, chat_template="{{ x }}", x="r").text == "r"
    with pytest.raises(RequestError) as refusal:
        frontend.prepare_chat(messages, chat_template="{% if %}")
    assert refusal.value.param == "chat_template"


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
