"""Sampled ids become text: split characters, stop strings, EOS ids."""

from pathlib import Path
from typing import Any

import pytest

from byte_tokenizer import ROLES, backend
from enginecore.frontend.frontend import Frontend
from enginecore.frontend.request import Prompt
from enginecore.frontend.text.loading import load_tokenizer
from enginecore.frontend.text.tokenizer import Tokenizer
from enginecore.messages import EngineLimits
from enginecore.model_files import ModelFiles
from enginecore.sampling_params import RequestOutputKind
from front_ends import (
    CUMULATIVE,
    DELTA,
    EOS,
    EOT,
    FINAL_ONLY,
    KINDS,
    Received,
    add,
    core,
    front,
    greedy,
    ids,
    receive,
    run,
    step,
)


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
