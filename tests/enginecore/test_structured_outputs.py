"""Structured outputs of whole engines, on a random model: what it says is of the form asked for."""

import json
import re
import string
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest

import byte_tokenizer
from byte_tokenizer import EOS, EOT
from checkpoints import llama_config, save_random
from enginecore import LLM, SamplingParams
from enginecore.errors import RequestError
from enginecore.outputs import CompletionOutput

CHUNKS = {
    "max_num_batched_tokens": 24,
    "max_num_seqs": 9,
    "block_size": 4,
    "num_blocks_override": 52,
    "max_model_len": 200,
}
"""Prompts run in chunks, and rows are preempted, since the cache does not hold them all."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = save_random(llama_config(), tmp_path_factory.mktemp("m-rand"))
    byte_tokenizer.save(path)
    return str(path)


@pytest.fixture(scope="module")
def llm(model) -> Iterator[LLM]:
    llm = LLM(model, device="cpu", max_num_seqs=64, max_model_len=512)
    yield llm
    llm.shutdown()


def ask(llm: LLM, given: dict[str, Any] | None, prompt: str = "say:", **params: Any) -> CompletionOutput:
    settings = {"temperature": 1.0, "seed": 3, "max_tokens": 100} | params
    (output,) = llm.generate(prompt, SamplingParams(structured_outputs=given, **settings), use_tqdm=False)
    return output.outputs[0]


class RandomSchemas:
    """Schemas of small texts, in draft 2020-12, of the keywords that are compiled."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def make(self) -> dict[str, Any]:
        schema = self._schema(3)
        if self._rng.random() < 0.3:
            schema = {"$defs": {"x": self._schema(1)}, "anyOf": [schema, {"$ref": "#/$defs/x"}]}
        return schema

    def _schema(self, depth: int) -> dict[str, Any]:
        kinds = [self._text, self._integer, self._number, self._fixed]
        if depth:
            kinds += [self._array, self._object, self._any_of] * 2
        return kinds[int(self._rng.integers(len(kinds)))](depth - 1)

    def _text(self, _: int) -> dict[str, Any]:
        low = int(self._rng.integers(4))
        forms = [
            {"type": "string", "minLength": low, "maxLength": low + 3},
            {"type": "string", "pattern": "^[a-f]{2}[0-9]?$"},
            {"type": "string", "format": "date"},
            {"type": ["string", "null"], "maxLength": 3},
        ]
        return forms[int(self._rng.integers(len(forms)))]

    def _integer(self, _: int) -> dict[str, Any]:
        low, high = sorted(self._rng.integers(-2000, 2000, 2).tolist())
        return {"type": "integer", "minimum": low, "maximum": high}

    def _number(self, _: int) -> dict[str, Any]:
        low = int(self._rng.integers(-50, 50))
        return {"type": "number", "minimum": low, "exclusiveMaximum": low + 7}

    def _fixed(self, _: int) -> dict[str, Any]:
        values = [None, True, False, 7, -1.5, 'é"\\', "", {"k": [1]}, []]
        picked = [values[i] for i in self._rng.permutation(len(values))[:3].tolist()]
        return {"enum": picked} if self._rng.random() < 0.5 else {"const": picked[0]}

    def _array(self, depth: int) -> dict[str, Any]:
        low = int(self._rng.integers(3))
        schema = {"type": "array", "items": self._schema(depth), "minItems": low, "maxItems": low + 2}
        if self._rng.random() < 0.3:
            schema["prefixItems"] = [self._schema(0)]
        return schema

    def _object(self, depth: int) -> dict[str, Any]:
        names = ["a", "b", "long name", "é"][: int(self._rng.integers(1, 5))]
        return {
            "type": "object",
            "properties": {name: self._schema(depth) for name in names},
            "required": [name for name in names if self._rng.random() < 0.5],
            "additionalProperties": False,
        }

    def _any_of(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self._schema(depth) for _ in range(2)]}


@pytest.mark.slow
def test_outputs_of_random_schemas_are_valid(llm):
    schemas = [RandomSchemas(seed).make() for seed in range(200)]
    params = [
        SamplingParams(
            temperature=1.0,
            seed=number,
            max_tokens=200,
            structured_outputs={"json": schema, "disable_any_whitespace": number % 2 == 0},
        )
        for number, schema in enumerate(schemas)
    ]
    outputs = llm.generate([f"json {i}:" for i in range(len(schemas))], params, use_tqdm=False)
    ended = 0
    for schema, output in zip(schemas, outputs, strict=True):
        answer = output.outputs[0]
        if answer.finish_reason == "length":
            continue
        assert (answer.finish_reason, answer.stop_reason) == ("stop", None)
        value = json.loads(answer.text)
        jsonschema.Draft202012Validator(schema).validate(value)
        ended += 1
    assert ended >= 150


MIXED: list[dict[str, Any]] = [
    {"structured_outputs": {"json": RandomSchemas(5).make(), "disable_any_whitespace": True}},
    {},
    {"structured_outputs": {"regex": "[a-z]{3,40}"}, "temperature": 0},
    {"structured_outputs": {"choice": ["red", "green", "greenish"]}, "seed": 8},
    {"structured_outputs": {"json_object": True}, "max_tokens": 40, "seed": 12},
    {"temperature": 0, "logprobs": 2},
    {"structured_outputs": {"grammar": 'root ::= "(" root? ")"'}, "min_tokens": 9},
    {"structured_outputs": {"regex": "[0-9]{1,30}"}, "repetition_penalty": 1.4, "logprobs": 3},
    {"structured_outputs": {"regex": "(ab|cd)*"}, "logit_bias": {EOS: -8.0}, "seed": 5},
    {"structured_outputs": {"json": RandomSchemas(9).make()}, "temperature": 0, "ignore_eos": True},
    {"temperature": 1.0, "seed": 77, "min_tokens": 20},
    {"structured_outputs": {"regex": "[ -~]{0,60}"}, "stop": ["q"], "seed": 21},
]
"""Requests of every kind, with guides and without."""


@pytest.mark.parametrize(
    "options",
    [{"max_num_seqs": 12}, CHUNKS, {**CHUNKS, "async_scheduling": True}],
    ids=["whole", "chunks", "async"],
)
def test_a_row_alone_is_the_row_in_a_batch(llm, model, options):
    params = [SamplingParams(**({"temperature": 1.0, "seed": 3, "max_tokens": 60} | each)) for each in MIXED]
    prompts = [
        f"{number}: a long prompt, of some chunks " + "x" * (7 * number) for number in range(len(params))
    ]
    alone = [
        llm.generate(prompt, each, use_tqdm=False)[0].outputs[0]
        for prompt, each in zip(prompts, params, strict=True)
    ]
    batched = LLM(model, device="cpu", **options)
    together = [output.outputs[0] for output in batched.generate(prompts, params, use_tqdm=False)]
    if "num_blocks_override" in options:
        assert batched.llm_engine.stats().preemptions > 0
    batched.shutdown()
    for one, other in zip(alone, together, strict=True):
        assert other.token_ids == one.token_ids
        assert (other.text, other.finish_reason, other.stop_reason) == (
            one.text,
            one.finish_reason,
            one.stop_reason,
        )


def test_drafts_change_nothing(llm, model):
    """Prompts that hold the answers, so that drafts are many, and some are refused by the grammar."""
    settings = [
        {"structured_outputs": {"regex": "(12345678 |abc!)*"}, "temperature": 0, "max_tokens": 50},
        {"structured_outputs": {"json": RandomSchemas(5).make(), "disable_any_whitespace": True}, "seed": 4},
        {"structured_outputs": {"regex": "(yes, no, )*"}, "ignore_eos": True, "max_tokens": 60, "seed": 2},
        {"temperature": 0, "max_tokens": 40},
        {"structured_outputs": {"choice": ["12345678 12345679", "12345678 1"]}, "seed": 9},
    ]
    params = [SamplingParams(**({"temperature": 1.0, "max_tokens": 60} | each)) for each in settings]
    prompts = [
        "12345678 12345678 abc!abc!9 yes, no, yes, maybe, " + str(number) for number in range(len(params))
    ]
    plain = llm.generate(prompts, params, use_tqdm=False)
    config = {"method": "ngram", "num_speculative_tokens": 5}
    drafting = LLM(model, device="cpu", max_num_seqs=8, max_model_len=512, speculative_config=config)
    drafted = drafting.generate(prompts, params, use_tqdm=False)
    drafting.shutdown()
    for one, other in zip(plain, drafted, strict=True):
        assert other.outputs[0].token_ids == one.outputs[0].token_ids
        assert other.outputs[0].finish_reason == one.outputs[0].finish_reason


def test_samples_of_one_request_differ_and_all_have_the_form(llm):
    params = SamplingParams(
        n=8, temperature=1.5, seed=1, max_tokens=50, structured_outputs={"choice": ["ab", "abc", "abcd", "b"]}
    )
    (output,) = llm.generate("pick:", params, use_tqdm=False)
    texts = [sample.text for sample in output.outputs]
    assert len(texts) == 8
    assert set(texts) <= {"ab", "abc", "abcd", "b"}
    assert len(set(texts)) > 1
    assert {sample.finish_reason for sample in output.outputs} == {"stop"}


def test_the_end_of_a_grammar_beats_ignored_eos_and_minimum_length(llm):
    answer = ask(llm, {"regex": "[0-9]{4}"}, ignore_eos=True, min_tokens=50)
    assert re.fullmatch("[0-9]{4}", answer.text)
    assert (answer.finish_reason, answer.stop_reason) == ("stop", None)


def test_ignored_eos_keeps_an_output_going_to_its_limit(llm):
    answer = ask(llm, {"regex": "[0-9]+"}, ignore_eos=True, max_tokens=30)
    assert re.fullmatch("[0-9]{30}", answer.text)
    assert answer.finish_reason == "length"


def test_a_callers_stop_id_ends_where_the_grammar_may_end(llm):
    answer = ask(llm, {"regex": "[0-9]{1,60}"}, stop_token_ids=[EOT], logit_bias={EOT: 100.0})
    assert re.fullmatch("[0-9]", answer.text)
    assert (answer.finish_reason, answer.stop_reason) == ("stop", EOT)
    answer = ask(llm, {"regex": "[0-9]{2}"}, stop_token_ids=[EOT], ignore_eos=True)
    assert (answer.finish_reason, answer.stop_reason) == ("stop", EOT)


def test_stop_strings_and_limits_cut_as_without_a_grammar(llm):
    answer = ask(llm, {"regex": "[0-9]{60}"}, stop=["0", "1", "2"])
    assert answer.finish_reason == "stop" and answer.stop_reason in ("0", "1", "2")
    assert not set(answer.text) & set("012")
    assert ask(llm, {"regex": "[a-z]{60}"}, max_tokens=7).finish_reason == "length"


def test_allowed_ids_and_bad_words_narrow_a_grammar_further(llm):
    for seed in range(5):
        answer = ask(llm, {"regex": "[0-9]{5,9}"}, allowed_token_ids=list(b"127x"), seed=seed)
        assert re.fullmatch("[127]{5,9}", answer.text)
        assert answer.finish_reason == "stop"
        answer = ask(llm, {"choice": ["yes", "no", "yeah"]}, bad_words=["yes", "n"], seed=seed)
        assert answer.text == "yeah"


def test_rules_that_leave_no_token_end_that_request_alone(model, llm):
    engine = LLM(model, device="cpu", max_num_seqs=8).llm_engine
    settings = [
        {"structured_outputs": {"choice": ["yes"]}, "bad_words": ["e"]},
        {"structured_outputs": {"regex": "[a-c]{4}"}},
    ]
    for number, setting in enumerate(settings):
        engine.add_request(str(number), "say:", SamplingParams(temperature=0, **setting))
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output.outputs[0] for output in engine.step() if output.finished}
    assert outputs["0"].finish_reason == "error"
    assert "no token could be chosen" in str(outputs["0"].stop_reason)
    assert re.fullmatch("[a-c]{4}", outputs["1"].text)
    engine.shutdown()


def test_a_grammar_that_does_not_compile_is_refused_beside_one_that_does(llm):
    good = SamplingParams(temperature=0, structured_outputs={"choice": ["fine"]})
    with pytest.raises(
        RequestError, match=r"prompt 1: structured_outputs: regex: .*unclosed group"
    ) as caught:
        bad = SamplingParams(structured_outputs={"regex": "("})
        llm.generate(["a", "b"], [good, bad], use_tqdm=False)
    assert caught.value.param == "structured_outputs"
    assert ask(llm, {"choice": ["fine"]}).text == "fine"


def test_a_model_without_a_tokenizer_refuses(tmp_path):
    path = save_random(llama_config(num_hidden_layers=1), tmp_path)
    llm = LLM(str(path), device="cpu")
    with pytest.raises(RequestError, match="structured_outputs needs text, and this model has no tokenizer"):
        llm.generate([[1, 2]], SamplingParams(structured_outputs={"regex": "a"}), use_tqdm=False)


def test_the_grammar_begins_with_what_is_generated(llm):
    """A prompt that opens the answer, as a chat template may, is no part of it."""
    answer = ask(llm, {"json": {"const": {"a": 1}}, "disable_any_whitespace": True}, prompt='Answer: {"a":')
    assert answer.text == '{"a":1}'


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=["tp", "pp"]
)
def test_several_ranks_give_the_tokens_of_one(llm, model, ranks):
    params = [SamplingParams(**({"temperature": 0, "max_tokens": 40} | each)) for each in MIXED[:9]]
    params = [each for each in params if each.temperature == 0 or each.structured_outputs is not None]
    prompts = [f"prompt {number}" for number in range(len(params))]
    one = llm.generate(prompts, params, use_tqdm=False)
    spread = LLM(model, device="cpu", max_num_seqs=5, **ranks)
    many = spread.generate(prompts, params, use_tqdm=False)
    spread.shutdown()
    assert [each.outputs[0].text for each in many] == [each.outputs[0].text for each in one]


def test_the_letters_used_here_are_the_tokens(llm):
    """The tests above read texts as tokens."""
    tokenizer = llm.get_tokenizer()
    assert tokenizer.encode(string.digits) == list(string.digits.encode())
