"""The fields of a body that give the form of the output, on both routes."""

import threading
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.anyio

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TAG = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}
ROUTES = ("/v1/completions", "/v1/chat/completions")


async def post(client: httpx.AsyncClient, route: str, body: dict[str, Any]) -> httpx.Response:
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    return await client.post(route, json={**(chat if "chat" in route else {"prompt": "hi"}), **body})


def error_of(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 400, response.text
    return response.json()["error"]


JSON = 'json: {"type": "object", "properties": {"a": {"type": "integer"}}}'

ASKED = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": None, "guided_json": None}, None),
    ({"response_format": {"type": "json_object"}}, "json_object: True"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, JSON),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": SCHEMA, "strict": True, "description": "y"},
            }
        },
        JSON,
    ),
    ({"structured_outputs": {"json": SCHEMA}}, JSON),
    ({"structured_outputs": {"regex": "[0-9]"}}, "regex: [0-9]"),
    (
        {"structured_outputs": {"choice": ["a", "b"]}, "response_format": {"type": "text"}},
        "choice: ['a', 'b']",
    ),
    ({"guided_json": SCHEMA}, JSON),
    ({"guided_json": '{"type": "object"}', "guided_whitespace_pattern": " "}, 'json: {"type": "object"}'),
    ({"guided_regex": "a"}, "regex: a"),
    ({"guided_choice": ["a"]}, "choice: ['a']"),
    ({"guided_grammar": 'root ::= "a"'}, 'grammar: root ::= "a"'),
]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("body", "grammar"), ASKED, ids=lambda value: str(value)[:60])
async def test_each_field_comes_to_the_engine_as_a_grammar(client, engine, route, body, grammar):
    response = await post(client, route, body)
    assert response.status_code == 200, response.text
    (request,) = engine.requests
    assert request.grammar == grammar
    assert (request.params.structured_outputs is None) == (grammar is None)


@pytest.mark.parametrize("route", ROUTES)
async def test_a_structural_tag_is_a_response_format_too(client, engine, route):
    response = await post(client, route, {"response_format": {"type": "structural_tag", **TAG}})
    assert response.status_code == 200, response.text
    assert engine.requests[0].grammar.startswith("structural_tag: ")


async def test_a_grammar_is_compiled_off_the_event_loop(client, engine):
    await post(client, ROUTES[0], {"structured_outputs": {"regex": "a"}})
    assert engine.frontend.compiled_in not in (None, threading.current_thread())


WRONG = [
    ({"response_format": {"type": "jsonl"}}, "response_format", "type must be one of text, json_object"),
    ({"response_format": {}}, "response_format", "type must be one of"),
    ({"response_format": "json"}, "response_format", "response_format"),
    ({"response_format": {"type": ["text"]}}, "response_format", "type must be one of"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema must be an object"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format",
        "json_schema.schema must be a JSON Schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": 3, "schema": {}}}},
        "response_format",
        "json_schema.name",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": "yes"}}},
        "response_format",
        "json_schema.strict",
    ),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one of"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "got regex, choice"),
    (
        {"structured_outputs": {"regex": "("}},
        "structured_outputs",
        "structured_outputs: regex: unclosed group",
    ),
    ({"guided_regex": "("}, "guided_regex", "guided_regex: regex: unclosed group"),
    ({"guided_choice": []}, "guided_choice", "at least one"),
    ({"guided_choice": "a"}, "guided_choice", "guided_choice"),
    ({"guided_json": "{"}, "guided_json", "guided_json: json: "),
    ({"guided_json": 3}, "guided_json", "guided_json"),
    ({"guided_regex": "a" * 70_000}, "guided_regex", "at most 65536 bytes"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "needs guided_json"),
    ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex", "guided_json and guided_regex both"),
    (
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        "structured_outputs",
        "response_format and structured_outputs both",
    ),
]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("body", "param", "message"), WRONG, ids=lambda value: str(value)[:50])
async def test_what_is_wrong_is_refused_by_the_fields_name(client, engine, route, body, param, message):
    error = error_of(await post(client, route, body))
    assert error["param"] == param
    assert message in error["message"]
    assert engine.requests == []
