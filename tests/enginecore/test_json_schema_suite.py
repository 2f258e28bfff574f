"""JSON-Schema-Test-Suite, draft 2020-12: nothing invalid is allowed, and outputs are valid.

The schemas are those that compile; the rest are refused by name, which `test_grammars` shows.
"""

import json

import jsonschema
import pytest

import byte_tokenizer
from byte_tokenizer import EOS
from checkpoints import llama_config, save_random
from data_files import JSON_SCHEMA_SUITE
from enginecore import LLM, SamplingParams
from enginecore.frontend.guides import GuideReader
from enginecore.grammars import Grammars
from enginecore.structured_outputs import StructuredOutputsParams

SUITE = json.loads(JSON_SCHEMA_SUITE.read_text(encoding="utf-8"))
CASES = [case for cases in SUITE.values() for case in cases]

ORDER = {"allOf.json: allOf", "allOf.json: allOf with base schema", "const.json: const with object"}
"""Valid values are refused whose keys come in another order than the schema names them."""

FORMS = ("const.json", "enum.json", "type.json")
"""Files with integers written as floats (1.0 for 1), which a constant or an integer does not allow."""

FORMATS = "format.json"
"""Formats are asserted, where the draft only annotates."""


def test_the_excerpt_is_whole():
    assert len(CASES) == 163
    assert sum(len(case["tests"]) for case in CASES) > 500


@pytest.fixture
def grammars(byte_tokenizer):
    return Grammars(byte_tokenizer, 320, [EOS])


@pytest.mark.parametrize("name", SUITE)
def test_grammars_allow_valid_values_and_no_other(byte_tokenizer, grammars, name):
    reader = GuideReader(byte_tokenizer, lambda: grammars)
    for case in SUITE[name]:
        grammar = reader.read(StructuredOutputsParams(json=case["schema"]))
        for value, valid in case["tests"]:
            matcher = grammars.matcher(grammar)
            ids = list(json.dumps(value, ensure_ascii=False).encode())
            allowed = matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
            where = f"{name}: {case['description']}"
            if not valid:
                assert not allowed, (where, value)
            elif not allowed:
                floats = name in FORMS and ".0" in json.dumps(value)
                assert floats or name == FORMATS or where in ORDER, (where, value)


@pytest.mark.slow
def test_outputs_are_valid(tmp_path):
    path = save_random(llama_config(), tmp_path)
    byte_tokenizer.save(path)
    llm = LLM(str(path), device="cpu", max_num_seqs=64, max_model_len=512)
    params = [
        SamplingParams(
            temperature=1.0,
            seed=number,
            max_tokens=150,
            # Strings and numbers without bounds would seldom end in a random model.
            logit_bias=dict.fromkeys((*b'"}],', EOS), 9.0),
            structured_outputs={"json": case["schema"], "disable_any_whitespace": True},
        )
        for number, case in enumerate(CASES)
    ]
    outputs = llm.generate([f"case {number}:" for number in range(len(CASES))], params, use_tqdm=False)
    llm.shutdown()
    ended = 0
    for case, output in zip(CASES, outputs, strict=True):
        answer = output.outputs[0]
        if answer.finish_reason == "length":
            continue
        ended += 1
        jsonschema.Draft202012Validator(case["schema"]).validate(json.loads(answer.text))
    assert ended >= 120
