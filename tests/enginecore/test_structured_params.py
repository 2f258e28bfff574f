"""StructuredOutputsParams: vLLM's fields, exactly one kind, errors that name the field."""

import json

import pytest

from enginecore import SamplingParams, StructuredOutputsParams
from enginecore.codec import Decoder, Encoder
from enginecore.structured_outputs import KINDS, MAX_GUIDE_BYTES

RIGHT = {
    "json": {"type": "object"},
    "regex": "[0-9]+",
    "choice": ["a", "b"],
    "grammar": 'root ::= "a"',
    "json_object": True,
    "structural_tag": {"structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}], "triggers": ["<f"]},
}


def test_every_kind_is_here():
    assert set(RIGHT) == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_mapping_is_taken_as_the_parameters_themselves(kind):
    params = SamplingParams(structured_outputs={kind: RIGHT[kind]})
    assert params.structured_outputs == StructuredOutputsParams(**{kind: RIGHT[kind]})
    assert params.structured_outputs.kind == kind
    assert params.clone() == params


def test_vllms_fields_that_ask_for_nothing_are_taken():
    given = {"json_object": True, "regex": None, "disable_fallback": False, "backend": None}
    assert StructuredOutputsParams.of(given) == StructuredOutputsParams(json_object=True)


def test_a_schema_keeps_the_order_of_its_keys():
    schema = {"properties": {"z": {}, "a": {}, "é": {"const": 1.5}}}
    for given in (schema, json.dumps(schema)):
        assert json.loads(StructuredOutputsParams(json=given).json) == schema
        assert list(json.loads(StructuredOutputsParams(json=given).json)["properties"]) == ["z", "a", "é"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("a", "structured_outputs: must be StructuredOutputsParams or a mapping"),
        ({}, "exactly one of json, regex, .* must be given, got none"),
        ({"json_object": False}, "got none"),
        ({"regex": "a", "choice": ["a"]}, "got regex, choice"),
        ({"regexp": "a"}, "there is no field 'regexp', only json, "),
        (
            {"json_object": True, "disable_additional_properties": True},
            "disable_additional_properties is not",
        ),
        ({"json": 3}, "json: must be an object or its text, got 3"),
        ({"json": "3"}, "json must be an object, got 3"),
        ({"json": "{"}, "json: Expecting property name"),
        ({"json": {"const": float("nan")}}, "json: Out of range float"),
        ({"json": {"const": {1, 2}}}, "json: Object of type set"),
        ({"json": '{"const": "\\ud800"}'}, "json holds half a surrogate pair"),
        ({"json": '{"not":' * 100_000 + "{}" + "}" * 100_000}, "json may have at most 65536 bytes"),
        ({"json": '{"a":' * 10_000 + "{}" + "}" * 10_000}, "json is nested too deeply"),
        ({"regex": 3}, "regex must be a text, got 3"),
        ({"regex": "a" * (MAX_GUIDE_BYTES + 1)}, "regex may have at most 65536 bytes, got 65537"),
        ({"choice": []}, r"choice must be a list of texts, at least one, got \[\]"),
        ({"choice": "ab"}, "choice must be a list of texts"),
        ({"choice": ["a", 3]}, "choice must be a text, got 3"),
        ({"choice": ["a", ""]}, "choice holds an empty text"),
        ({"choice": ["é" * 400] * 100}, "choice may have at most 65536 bytes, got 80000"),
        ({"json_object": "yes"}, "json_object must be true or false"),
        ({"structural_tag": []}, "structural_tag: must be an object or its text"),
        ({"regex": "a", "whitespace_pattern": " "}, "whitespace_pattern is for JSON, not for regex"),
        (
            {"json_object": True, "whitespace_pattern": " ", "disable_any_whitespace": True},
            "contradict each other",
        ),
    ],
    ids=lambda value: str(value)[:50],
)
def test_refused(given, message):
    with pytest.raises(ValueError, match=message) as caught:
        SamplingParams(structured_outputs=given)
    assert str(caught.value).startswith("structured_outputs: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_they_cross_to_another_process(kind):
    params = SamplingParams(structured_outputs={kind: RIGHT[kind]})
    assert Decoder(SamplingParams).decode(Encoder().encode(params)) == params
