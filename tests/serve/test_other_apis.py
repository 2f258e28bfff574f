"""/v1/responses and /v1/messages: their own names in errors, and values that they take and refuse."""

from typing import Any

import httpx
import pytest
from scripted_engine import ScriptedEngine, say
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
    def refuse(params, thinking):
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


@pytest.mark.parametrize(
    ("body", "param", "start"),
    [
        ({"include": "reasoning.encrypted_content"}, "include", "include: Expected `array"),
        ({"include": [5]}, "include", "include"),
        ({"include": ["reasoning"]}, "include", "include: there is no 'reasoning', only "),
        ({"reasoning": "low"}, "reasoning", "reasoning: Expected `object"),
        ({"reasoning": {"effort": 5}}, "reasoning.effort", "reasoning.effort must be one of none, minimal, "),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "reasoning.effort must be one of none, "),
        ({"reasoning": {"effort": ["low"]}}, "reasoning.effort", "reasoning.effort must be one of none, "),
        ({"reasoning": {"summary": "long"}}, "reasoning.summary", "reasoning.summary must be one of auto"),
        (
            {"reasoning": {"generate_summary": 1}},
            "reasoning.generate_summary",
            "reasoning.generate_summary must be one of auto",
        ),
        (
            {"reasoning": {"context": "all_turns"}},
            "reasoning.context",
            "reasoning.context 'all_turns' is not",
        ),
        ({"reasoning": {"context": 5}}, "reasoning.context", "reasoning.context must be one of"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode", "reasoning.mode 'pro' is not supported"),
        ({"text": "json"}, "text", "text: Expected `object"),
        ({"text": {"type": "json_object"}}, "text", "text has no field 'type', only format and verbosity"),
        ({"text": {"verbosity": 5}}, "text.verbosity", "text.verbosity must be one of medium, low, high"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "text.verbosity 'low' is not supported"),
        ({"text": {"format": {"type": 5}}}, "text.format", "text.format: type must be one of"),
        ({"text": {"format": {}}}, "text.format", "text.format: type must be one of"),
    ],
    ids=str,
)
async def test_responses_refuse_values_that_are_none(client, engine, body, param, start):
    error = error_of(await respond(client, **body))
    assert error["param"] == param
    assert error["message"].startswith(start)
    assert engine.requests == []


@pytest.mark.parametrize(
    "body",
    [
        {"include": ["reasoning.encrypted_content"], "store": False},
        {"include": ["file_search_call.results", "code_interpreter_call.outputs"]},
        {"include": []},
        {"reasoning": {}},
        {"reasoning": {"effort": None, "summary": "auto", "context": "current_turn", "mode": "standard"}},
        {"text": {"format": {"type": "text"}, "verbosity": "medium"}},
        {"text": {"format": None, "verbosity": None}},
    ],
    ids=str,
)
async def test_responses_take_what_clients_send(client, body):
    response = await respond(client, **body)
    assert response.status_code == 200, response.text
    assert response.json()["output"][0]["content"][0]["text"] == "ab"


async def test_responses_may_include_logprobs(client):
    asked = {"include": ["message.output_text.logprobs"]}
    part = (await respond(client, **asked)).json()["output"][0]["content"][0]
    assert [(entry["token"], entry["top_logprobs"]) for entry in part["logprobs"][:2]] == [
        ("a", []),
        ("b", []),
    ]
    part = (await respond(client, **asked, top_logprobs=1)).json()["output"][0]["content"][0]
    assert [len(entry["top_logprobs"]) for entry in part["logprobs"][:2]] == [1, 1]
    assert (await respond(client)).json()["output"][0]["content"][0]["logprobs"] == []


@pytest.mark.parametrize(
    ("effort", "variables"),
    [
        (None, None),
        ("none", {"enable_thinking": False, "reasoning_effort": "none"}),
        ("low", {"enable_thinking": True, "reasoning_effort": "low"}),
        ("xhigh", {"enable_thinking": True, "reasoning_effort": "xhigh"}),
    ],
)
async def test_effort_comes_to_the_template(client, engine, effort, variables):
    asked = (
        await respond(client, reasoning={"effort": effort}),
        *([await message(client, output_config={"effort": effort})] if effort != "none" else []),
    )
    assert [response.status_code for response in asked] == [200] * len(asked)
    assert asked[0].json()["reasoning"]["effort"] == effort
    for name in ("enable_thinking", "reasoning_effort"):
        for request, whole in zip(engine.requests, (True, False), strict=False):
            shown = f"{name}={(variables or {}).get(name)}\n" in request.prompt.text
            assert shown == (variables is not None and (whole or name == "reasoning_effort"))


@pytest.mark.parametrize(
    ("body", "start"),
    [
        ({"thinking": "enabled"}, "thinking: Expected `object"),
        ({"thinking": {}}, "thinking.type must be one of enabled, disabled, adaptive, got None"),
        (
            {"thinking": {"type": 5}},
            "thinking.type must be one of enabled, disabled, adaptive, between_tools, got 5",
        ),
        (
            {"thinking": {"type": "on"}},
            "thinking.type must be one of enabled, disabled, adaptive, between_tools, got 'on'",
        ),
        ({"thinking": {"type": ["enabled"]}}, "thinking.type must be one of"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type 'between_tools' is not supported"),
        (
            {"thinking": {"type": "enabled", "budget_tokens": "many"}},
            "thinking.budget_tokens must be an integer of at least 1, got 'many'",
        ),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens must be"),
        ({"thinking": {"type": "enabled", "budget_tokens": True}}, "thinking.budget_tokens must be"),
        (
            {"thinking": {"type": "enabled", "display": "full"}},
            "thinking.display must be one of summarized, ",
        ),
        ({"output_config": {"effort": "none"}}, "output_config.effort must be one of low, medium, "),
        ({"output_config": {"effort": 3}}, "output_config.effort must be one of low, medium, "),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type must be json_schema"),
    ],
    ids=str,
)
async def test_messages_refuse_values_that_are_none(client, engine, body, start):
    assert said(await message(client, **body)).startswith(start)
    assert engine.requests == []


@pytest.mark.parametrize(
    ("thinking", "thinks", "shown"),
    [
        (None, None, True),
        ({"type": "disabled"}, False, True),
        ({"type": "enabled", "budget_tokens": 1024}, True, True),
        ({"type": "enabled"}, True, True),
        ({"type": "adaptive"}, True, True),
        ({"type": "adaptive", "display": "summarized"}, True, True),
        ({"type": "adaptive", "display": "omitted"}, True, False),
        ({"type": "enabled", "budget_tokens": 2048, "display": "omitted"}, True, False),
    ],
    ids=str,
)
async def test_thinking(client, parsed, thinking, thinks, shown):
    parsed.script = lambda prompt, params: say("<think>Hm.</think>yes")
    answer = (await message(client, thinking=thinking, max_tokens=60)).json()
    kinds = ["thinking", "text"] if shown else ["text"]
    assert [block["type"] for block in answer["content"]] == kinds
    (request,) = parsed.requests
    assert ("enable_thinking=" in request.prompt.text) == (thinks is not None)
    if thinks is not None:
        assert f"enable_thinking={thinks}\n" in request.prompt.text
    turns = {"messages": [{"role": "user", "content": "hi"}], "thinking": thinking}
    counted = (await client.post("/v1/messages/count_tokens", json=turns)).json()
    assert counted == {"input_tokens": len(request.prompt.token_ids)}
