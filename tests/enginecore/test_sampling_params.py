"""What SamplingParams refuses, and what it makes of the rest."""

import msgspec
import numpy as np
import pytest
import torch

from enginecore.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n": 0}, "n must be"),
        ({"n": 10**6}, "n must be"),
        ({"n": 2, "temperature": 0}, "n must be 1 with temperature 0"),
        ({"temperature": -1}, "temperature must be finite and at least 0"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": True}, "temperature must be a number"),
        ({"top_p": 0}, "top_p must be finite and in"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty must be finite and greater than 0"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"max_tokens": 1.5}, "max_tokens must be an integer"),
        ({"max_tokens": 6, "min_tokens": 7}, "min_tokens must be at most max_tokens=6"),
        ({"stop": 5}, "stop must be a list"),
        ({"stop": [""]}, "non-empty"),
        ({"stop": ["a"], "detokenize": False}, "need detokenize"),
        ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
        ({"logit_bias": {"abc": 1}}, "logit_bias keys must be token ids"),
        ({"logit_bias": {"6_5": 1}}, "logit_bias keys must be token ids"),
        ({"logit_bias": {" 65": 1}}, "logit_bias keys must be token ids"),
        ({"logit_bias": {"\u0666\u0665": 1}}, "logit_bias keys must be token ids"),
        ({"logit_bias": {"-1": 1}}, "logit_bias key must be at least 0"),
        ({"logit_bias": {"1": float("nan")}}, "must be a number"),
        ({"structured_outputs": {}}, "structured_outputs: exactly one of"),
        ({"stop": ["a"] * 257}, "stop may hold at most 256 strings, got 257"),
        ({"stop": ["a", "\ud800"]}, "^stop holds '.ud800': half a surrogate pair is no character"),
        ({"bad_words": ["\udfff"]}, "^bad_words holds '.udfff': half a surrogate pair"),
        ({"extra_args": {"a": "\ud800"}}, "^extra_args must hold plain values"),
        ({"stop": ["a" * 257]}, "stop may hold strings of at most 256 characters, got one of 257"),
        ({"bad_words": ["a"] * 1025}, "bad_words may hold at most 1024 strings, got 1025"),
        ({"bad_words": ["a" * 257]}, "bad_words may hold strings of at most 256 characters"),
        ({"stop_token_ids": [1] * 4097}, "stop_token_ids may hold at most 4096 token ids, got 4097"),
        ({"allowed_token_ids": range(262_145)}, "allowed_token_ids must be a list"),
        ({"allowed_token_ids": [1] * 262_145}, "allowed_token_ids may hold at most 262144 token ids"),
        ({"logit_bias": dict.fromkeys(range(16_385), 1)}, "logit_bias may hold at most 16384 token ids"),
        ({"logit_bias": [1]}, "logit_bias must map token ids to numbers"),
        ({"ignore_eos": "yes"}, "ignore_eos must be true or false"),
        ({"extra_args": {"a": 1j}}, "extra_args must hold plain values"),
        ({"extra_args": {1: 2}}, "extra_args must map names"),
        (
            {"skip_reading_prefix_cache": False, "prompt_logprobs": 1},
            "must not be False with prompt_logprobs",
        ),
        ({"max_tokens": np.float64(3)}, "max_tokens must be an integer, got 3.0"),
        ({"max_tokens": torch.tensor([1, 2])}, "max_tokens must be an integer"),
        ({"temperature": np.array([1.0, 2.0])}, "temperature must be a number"),
        ({"stop_token_ids": np.array([1.5])}, "stop_token_ids must be an integer"),
        ({"stop_token_ids": torch.tensor([[1]])}, "stop_token_ids must be an integer"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**settings)


def test_normalised():
    params = SamplingParams(stop="x", top_k=-1, temperature=1e-9, logit_bias={"65": 1e9, 66: -1e9})
    assert (params.stop, params.top_k, params.temperature) == (["x"], 0, 0.01)
    assert params.logit_bias == {65: 100.0, 66: -100.0}


def test_positional_arguments_stand_in_vllms_order():
    params = SamplingParams(2, 0.1, 0.2, 1.1, 0.9, 0.8, 5, 0.05, 7, ["x"], [3], True, 20, 4, 1, 0)
    assert params == SamplingParams(
        n=2,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        repetition_penalty=1.1,
        temperature=0.9,
        top_p=0.8,
        top_k=5,
        min_p=0.05,
        seed=7,
        stop=["x"],
        stop_token_ids=[3],
        ignore_eos=True,
        max_tokens=20,
        min_tokens=4,
        logprobs=1,
        prompt_logprobs=0,
    )


def test_from_optional_takes_none_for_the_default():
    params = SamplingParams.from_optional(n=None, temperature=None, top_p=0.5, stop=None, max_tokens=None)
    assert (params.n, params.temperature, params.top_p, params.stop) == (1, 1.0, 0.5, [])
    assert params.max_tokens is None


def test_a_clone_shares_nothing():
    params = SamplingParams(stop=["a"], logit_bias={1: 2}, extra_args={"a": [1]})
    clone = params.clone()
    assert clone == params
    clone.stop.append("b")
    clone.extra_args["a"].append(2)
    assert (params.stop, params.extra_args) == (["a"], {"a": [1]})


def test_values_of_numpy_and_torch_are_plain_and_travel():
    params = SamplingParams(
        temperature=np.float32(0.5),
        top_p=torch.tensor(0.5),
        top_k=np.int64(3),
        max_tokens=torch.tensor(4),
        seed=np.uint64(9),
        ignore_eos=np.True_,
        stop=np.array(["a", "b"]),
        stop_token_ids=np.array([1, 2]),
        allowed_token_ids=torch.tensor([3, 4]),
        logit_bias={np.int64(4): np.float32(1)},
    )
    plain = SamplingParams(
        temperature=0.5,
        top_p=0.5,
        top_k=3,
        max_tokens=4,
        seed=9,
        ignore_eos=True,
        stop=["a", "b"],
        stop_token_ids=[1, 2],
        allowed_token_ids=[3, 4],
        logit_bias={4: 1.0},
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == plain
