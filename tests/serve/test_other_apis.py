"""/v1/responses and /v1/messages: their own names in errors, and values that they take and refuse."""

from typing import Any

import httpx
import pytest
from scripted_engine import ScriptedEngine
from test_validation import error_of

from enginecore.errors import ContextLengthError, RequestError
from enginecore.frontend.parsing import REASONING_PARSERS, TOOL_PARSERS, Parsers

pytestmark = pytest.mark.anyio

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "name": "f", "parameters": SCHEMA}
CUSTOM = {"name": "f", "input_schema": SCHEMA}


async def respond(client: httpx.AsyncClient, **body: Any) -> httpx.Response:
    return await client.post("/v1/responses", json={"input": "hi", **body})


async def message(client: httpx.AsyncClient, **body: Any) -> httpx.Response:
    turns = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    return await client.post("/v1/messages", json={**turns, **body})


def said(response: httpx.Response) -> str:
    """The message of a refusal by /v1/messages, which has no param."""
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"
    return response.json()["error"]["message"]


@pytest.fixture
def parsed(engine: ScriptedEngine) -> ScriptedEngine:
    engine.frontend.parsers = Parsers(TOOL_PARSERS["hermes"], REASONING_PARSERS["qwen3"])
    return engine


@pytest.mark.parametrize(
    ("body", "param", "start"),
    [
        ({"text": {"format": {"type": "xml"}}}, "text.format", "text.format: type must be one of"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format", "text.format: schema must be a JSON"),
        (
            {"text": {"format": {"type": "json_schema", "name": 3, "schema": SCHEMA}}},
            "text.format",
            "text.format: name must be",
        ),
        (
            {"text": {"format": {"type": "json_schema", "schema": SCHEMA, "strict": "y"}}},
            "text.format",
            "text.format: strict must be",
        ),
        ({"text": {"format": 5}}, "text.format", "text.format must be an object"),
        ({"input": [{"role": "cook", "content": "x"}]}, "input", "input[0].role must be one of"),
        (
            {"instructions": "y", "input": [{"role": "user", "content": "x"}, {"role": 5, "content": "x"}]},
            "input",
            "input[1].role must be one of",
        ),
        ({"input": [{"role": "tool", "content": "x"}]}, "input", "input[0].role must be one of"),
        ({"tools": [{"type": "function"}]}, "tools", "tools[0].name must be a text"),
        ({"tools": [{**TOOL, "parameters": 5}]}, "tools", "tools[0].parameters must be a JSON schema"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice", "tool_choice.name must be"),
        ({"top_p": 3}, "top_p", "top_p must be"),
    ],
    ids=str,
)
async def test_responses_name_their_own_fields(client, parsed, body, param, start):
    error = error_of(await respond(client, **body))
    assert error["param"] == param
    assert error["message"].startswith(start)
    assert parsed.requests == []


async def test_a_schema_that_does_not_compile_is_the_text_format(client, engine):
    def refuse(params):
        raise RequestError("structured_outputs: json: it allows no text", "structured_outputs")

    engine.frontend.grammar = refuse
    shape = {"type": "json_schema", "name": "x", "schema": SCHEMA}
    for stream in (False, True):
        error = error_of(await respond(client, text={"format": shape}, stream=stream))
        assert error["param"] == "text.format"
        assert error["message"] == "text.format: json: it allows no text"
        refused = await message(client, output_config={"format": shape}, stream=stream)
        assert said(refused) == "output_config.format: json: it allows no text"


async def test_items_are_numbered_as_the_input_has_them(client, engine):
    first = (await respond(client)).json()["id"]
    items = [{"role": "user", "content": "x"}, {"role": "user", "content": 5}]
    error = error_of(await respond(client, previous_response_id=first, input=items))
    assert error["message"].startswith("input[1] needs a text")


@pytest.mark.parametrize(
    ("body", "start"),
    [
        ({"output_config": {"format": {"type": "json_schema", "schema": 5}}}, "output_config.format: schema"),
        ({"stop_sequences": [""]}, "stop_sequences "),
        ({"tools": [CUSTOM], "tool_choice": {"type": "tool"}}, "tool_choice.name must be"),
        ({"tools": [{"name": "", "input_schema": SCHEMA}]}, "tools[0].name must be"),
    ],
    ids=str,
)
async def test_messages_name_their_own_fields(client, parsed, body, start):
    assert said(await message(client, **body)).startswith(start)
    assert parsed.requests == []


async def test_all_say_that_the_prompt_is_too_long(client, engine):
    """Client libraries look for these words, see `ContextLengthError`."""

    def refuse(messages, **options):
        raise ContextLengthError(64, "it has 65 tokens")

    engine.frontend.prepare_chat = refuse
    error = error_of(await respond(client))
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")
    assert "prompt is too long" in error["message"]
    assert "prompt is too long" in said(await message(client))
