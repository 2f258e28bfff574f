"""Tools and reasoning in chats: what is refused, what reaches the engine, and the bytes that come back."""

import json
from typing import Any

import httpx
import pytest
from scripted_engine import LOGPROB, ByteTokenizer, ScriptedEngine, Step, say
from test_streams import chunks, start_of
from test_validation import error_of

from enginecore import CompletionOutput, Prompt, RequestOutput
from enginecore.frontend import openai
from enginecore.frontend.parsing import REASONING_PARSERS, TOOL_PARSERS, Parsers, Thinking
from octavo_serve.chunks import DONE, EVENT, ChatChunks

pytestmark = pytest.mark.anyio

ROUTE = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


F = tool("f", parameters={"type": "object", "properties": {"a": {"type": "integer"}}})
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


@pytest.fixture
def hermes(engine: ScriptedEngine) -> ScriptedEngine:
    engine.frontend.parsers = Parsers(TOOL_PARSERS["hermes"], REASONING_PARSERS["qwen3"])
    engine.script = lambda prompt, params: say(CALL)
    return engine


async def chat(client: httpx.AsyncClient, **body: Any) -> httpx.Response:
    return await client.post(ROUTE, json={"messages": MESSAGES, **body})


async def choice_of(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await chat(client, **body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


async def stream(client: httpx.AsyncClient, **body: Any) -> list[dict[str, Any]]:
    response = await chat(client, stream=True, **body)
    assert response.status_code == 200
    return [chunk["choices"][0] for chunk in chunks(response.text)]


@pytest.mark.parametrize("choice", ["absent", None, "none"])
@pytest.mark.parametrize("tools", ["absent", None, [], [F], [F, F], [tool("g")]], ids=str)
@pytest.mark.parametrize("parser", [True, False])
async def test_no_choice_never_fails(client, engine, tools, choice, parser):
    """HC-75. Without a parser, tools that may be called are refused; see below."""
    engine.frontend.parsers = Parsers(TOOL_PARSERS["hermes"] if parser else None)
    body = {"tools": tools, "tool_choice": choice}
    body = {name: value for name, value in body.items() if value != "absent"}
    may_call = tools not in ("absent", None, []) and choice != "none"
    response = await chat(client, **body)
    if may_call and not parser:
        error = error_of(response)
        assert error["param"] == "tools"
        assert "tool_call_parser" in error["message"]
        return
    message = response.json()["choices"][0]
    assert message["message"] == {"role": "assistant", "content": "ab", "refusal": None}
    assert message["finish_reason"] == "stop"


async def test_auto_without_a_parser_says_so(client):
    error = error_of(await chat(client, tools=[F], tool_choice="auto"))
    assert error["param"] == "tool_choice"
    assert "tool_call_parser" in error["message"]
    assert (await chat(client, tools=[], tool_choice="auto")).status_code == 200
    assert (await chat(client, tool_choice="auto")).status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": tool("f")}, "tool_choice"),
        ({"tool_choice": tool("g"), "tools": [F]}, "tool_choice"),
        ({"tool_choice": {"type": "function"}, "tools": [F]}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}, "tools": [F]}, "tool_choice"),
        ({"tool_choice": "any", "tools": [F]}, "tool_choice"),
        ({"tool_choice": 5, "tools": [F]}, "tool_choice"),
        ({"tools": {}}, "tools"),
        ({"tools": [5]}, "tools"),
        ({"tools": [{}]}, "tools"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": 5}}]}, "tools"),
        ({"tools": [tool("f", parameters="x")]}, "tools"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"include_reasoning": 1}, "include_reasoning"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
    ],
    ids=str,
)
async def test_what_is_wrong_is_told_by_name(client, hermes, body, param):
    error = error_of(await chat(client, **body))
    assert error["param"] == param
    assert param in error["message"]
    assert hermes.requests == []


REQUIRED = ' [{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {}}]'


@pytest.mark.parametrize("parser", [True, False])
async def test_required_calls(client, engine, parser):
    """HC-75. No parser of the model's own format is needed: the text is constrained to a list of calls."""
    if parser:
        engine.frontend.parsers = Parsers(TOOL_PARSERS["mistral"], REASONING_PARSERS["qwen3"])
    engine.script = lambda prompt, params: say(REQUIRED)
    body = {"tools": [F, tool("g")], "tool_choice": "required"}
    choice = await choice_of(client, **body)
    calls = [call["function"] for call in choice["message"]["tool_calls"]]
    assert calls == [{"name": "f", "arguments": '{"a": 1}'}, {"name": "g", "arguments": "{}"}]
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
    assert len(choice["message"]["tool_calls"][0]["id"]) == (9 if parser else 29)
    streamed = await stream(client, **body)
    pieces = [piece for each in streamed for piece in each["delta"].get("tool_calls", [])]
    assert [piece["function"]["name"] for piece in pieces if "id" in piece] == ["f", "g"]
    assert "".join(piece["function"]["arguments"] for piece in pieces) == '{"a": 1}{}'
    assert streamed[-1]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("most", range(1, len(REQUIRED)))
async def test_required_calls_that_are_cut(client, engine, most):
    """Whatever there is of them is a call, or nothing."""
    engine.script = lambda prompt, params: say(REQUIRED)
    body = {"tools": [F, tool("g")], "tool_choice": "required", "max_tokens": most}
    choice = await choice_of(client, **body)
    message = choice["message"]
    first, second = REQUIRED.index('"f"') + 3, REQUIRED.index('"g"') + 3
    assert len(message.get("tool_calls", [])) == (most >= first) + (most >= second)
    assert (message["content"], choice["finish_reason"]) == (None if most >= first else "", "length")
    streamed = await stream(client, **body)
    assert "".join(each["delta"].get("content", "") for each in streamed) == ""
    pieces = [piece for each in streamed for piece in each["delta"].get("tool_calls", [])]
    told = ["", ""]
    for piece in pieces:
        told[piece["index"]] += piece["function"]["arguments"]
    assert told[: len(message.get("tool_calls", []))] == [
        call["function"]["arguments"] for call in message.get("tool_calls", [])
    ]
    assert streamed[-1]["finish_reason"] == "length"


def allowed(mode: Any, *names: Any) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


G, H = tool("g"), tool("h")


@pytest.mark.parametrize("names", [["f"], ["g", "f"], ["h", "f", "g"]], ids=str)
async def test_allowed_tools_with_auto(client, hermes, names):
    """It is a request with those tools alone, which is all that the model then sees of them."""
    choice = await choice_of(client, tools=[F, G, H], tool_choice=allowed("auto", *names))
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    await chat(client, tools=[each for each in (F, G, H) if each["function"]["name"] in names])
    narrowed, plain = hermes.requests
    assert narrowed.prompt.text == plain.prompt.text
    assert narrowed.grammar is None


async def test_allowed_tools_with_required(client, hermes):
    hermes.script = lambda prompt, params: say(REQUIRED)
    choice = await choice_of(client, tools=[F, G, H], tool_choice=allowed("required", "g", "f"))
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["f", "g"]
    await chat(client, tools=[F, G], tool_choice="required")
    narrowed, plain = hermes.requests
    assert narrowed.grammar == plain.grammar
    assert '"h"' not in narrowed.grammar
    assert narrowed.prompt.text == plain.prompt.text


async def test_allowed_tools_of_responses(client, hermes):
    hermes.script = lambda prompt, params: say(REQUIRED)
    tools = [{"type": "function", "name": name} for name in "fgh"]
    choice = {"type": "allowed_tools", "mode": "required", "tools": [tools[0], tools[1]]}
    body = {"input": "hi", "tools": tools, "tool_choice": choice}
    response = (await client.post("/v1/responses", json=body)).json()
    assert [item["name"] for item in response["output"]] == ["f", "g"]
    assert (response["tool_choice"], response["tools"]) == (choice, tools)
    for wrong, said in (
        ({**choice, "mode": "any"}, 'tool_choice.mode must be "auto" or "required", got \'any\''),
        ({**choice, "tools": []}, "tool_choice.tools must be a list of tools, at least one, got []"),
        ({**choice, "tools": "f"}, "tool_choice.tools must be a list of tools, at least one, got 'f'"),
        ({**choice, "tools": [{"type": "mcp"}]}, "tool_choice.tools[0].type must be function, got 'mcp'"),
        ({**choice, "tools": [tools[0], {"type": "function"}]}, "tool_choice.tools[1].name must be a text"),
        (
            {**choice, "tools": [{"type": "function", "name": "x"}]},
            "tool_choice names 'x', and the tools are f, ",
        ),
    ):
        error = error_of(await client.post("/v1/responses", json={**body, "tool_choice": wrong}))
        assert error["param"] == "tool_choice"
        assert error["message"].startswith(said)


WRONG_ALLOWED = [
    (allowed("any", "f"), 'tool_choice.allowed_tools.mode must be "auto" or "required", got \'any\''),
    (allowed(["auto"], "f"), "tool_choice.allowed_tools.mode must be"),
    (allowed("auto"), "tool_choice.allowed_tools.tools must be a list of tools, at least one, got []"),
    (allowed("auto", "f", "x"), "tool_choice names 'x', and the tools are f, g"),
    (allowed("auto", 5), "tool_choice.allowed_tools.tools[0].function.name must be a text, got 5"),
    ({"type": "allowed_tools"}, "tool_choice.allowed_tools must be an object, got None"),
    (
        {"type": "allowed_tools", "allowed_tools": ["f"]},
        "tool_choice.allowed_tools must be an object, got ['f']",
    ),
    (
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "custom"}]}},
        "tool_choice.allowed_tools.tools[0].type must be function, got 'custom'",
    ),
    (
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": ["f"]}},
        "tool_choice.allowed_tools.tools[0] must be a tool, got 'f'",
    ),
]


@pytest.mark.parametrize(("choice", "said"), WRONG_ALLOWED, ids=str)
async def test_allowed_tools_that_are_none(client, hermes, choice, said):
    error = error_of(await chat(client, tools=[F, G], tool_choice=choice))
    assert error["param"] == "tool_choice"
    assert error["message"].startswith(said)
    assert "there are no tools" in error_of(await chat(client, tool_choice=allowed("auto", "f")))["message"]


async def test_allowed_tools_need_a_parser_where_the_model_may_choose(client, engine):
    error = error_of(await chat(client, tools=[F], tool_choice=allowed("auto", "f")))
    assert error["param"] == "tool_choice"
    assert "tool_call_parser" in error["message"]


QWEN, R1 = (
    ("qwen3", Thinking("<think>", "</think>", False)),
    ("deepseek_r1", Thinking("<think>", "</think>", True)),
)
OFF = {"chat_template_kwargs": {"enable_thinking": False}}
CONTINUED = {
    "messages": [*MESSAGES, {"role": "assistant", "content": "a"}],
    "continue_final_message": True,
}
FORMS = [
    {"tools": [F], "tool_choice": "required"},
    {"tools": [F, G], "tool_choice": tool("f")},
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"regex": "a"}},
    {"guided_choice": ["a"]},
]


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize(
    ("parser", "more", "expected"),
    [
        (None, {}, None),
        (QWEN[0], {}, QWEN[1]),
        (QWEN[0], {"include_reasoning": False}, QWEN[1]),
        (QWEN[0], {"chat_template_kwargs": {"enable_thinking": True}}, QWEN[1]),
        (QWEN[0], OFF, None),
        (QWEN[0], {"chat_template_kwargs": {"thinking": False}}, None),
        (QWEN[0], CONTINUED, None),
        (R1[0], {}, R1[1]),
        (R1[0], OFF, R1[1]),
    ],
    ids=str,
)
async def test_forms_leave_room_for_reasoning(client, engine, form, parser, more, expected):
    """R1 thinks whatever it is told; its parser takes all for reasoning until a tag closes it."""
    engine.frontend.parsers = Parsers(None, REASONING_PARSERS[parser] if parser else None)
    assert (await chat(client, **form, **more)).status_code == 200
    assert engine.frontend.thinking == expected


async def test_a_prompt_decides_about_reasoning(client, engine):
    engine.frontend.parsers = Parsers(None, REASONING_PARSERS["qwen3"])
    for end, expected in (("<think>", R1[1]), ("</think>", None)):
        prepared = Prompt("…" + end, [1])
        engine.frontend.prepare_chat = lambda messages, prepared=prepared, **options: prepared
        await chat(client, response_format={"type": "json_object"})
        assert engine.frontend.thinking == expected


@pytest.mark.parametrize("parser", ["qwen3", "deepseek_r1"])
@pytest.mark.parametrize("form", FORMS[:2], ids=["required", "named"])
async def test_forced_calls_after_reasoning(client, engine, parser, form):
    engine.frontend.parsers = Parsers(TOOL_PARSERS["hermes"], REASONING_PARSERS[parser])
    named = "f" in str(form["tool_choice"])
    call = '{"a": 1}' if named else '[{"name": "f", "parameters": {"a": 1}}]'
    engine.script = lambda prompt, params: say(f'<think>[{{"name": "</think>\n\n{call}')
    choice = await choice_of(client, **form)
    assert choice["message"]["reasoning_content"] == '[{"name": "'
    [made] = choice["message"]["tool_calls"]
    assert (made["function"], choice["message"]["content"]) == ({"name": "f", "arguments": '{"a": 1}'}, None)
    assert choice["finish_reason"] == ("stop" if named else "tool_calls")
    streamed = await stream(client, **form)
    assert "".join(each["delta"].get("reasoning", "") for each in streamed) == '[{"name": "'
    assert not any("content" in each["delta"] and each["delta"]["content"] for each in streamed)
    pieces = [piece for each in streamed for piece in each["delta"].get("tool_calls", [])]
    assert "".join(piece["function"]["arguments"] for piece in pieces) == '{"a": 1}'
    hidden = await choice_of(client, **form, include_reasoning=False)
    assert "reasoning_content" not in hidden["message"]
    assert hidden["message"]["tool_calls"][0]["function"] == made["function"]
    cut = await choice_of(client, **form, max_tokens=12)
    assert "tool_calls" not in cut["message"]
    assert (cut["message"]["content"], cut["message"]["reasoning"], cut["finish_reason"]) == (
        None,
        '[{"na',
        "length",
    )


async def test_a_named_call(client, hermes):
    """Its finish reason is "stop", as in OpenAI's API."""
    hermes.script = lambda prompt, params: say('\n{"a": {"b": "}"}}\n')
    body = {"tools": [F, tool("g")], "tool_choice": tool("g")}
    choice = await choice_of(client, **body)
    [call] = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "g", "arguments": '{"a": {"b": "}"}}'}
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "stop")
    streamed = await stream(client, **body)
    pieces = [piece for each in streamed for piece in each["delta"].get("tool_calls", [])]
    assert [piece["function"].get("name") for piece in pieces][:2] == ["g", None]
    assert "".join(piece["function"]["arguments"] for piece in pieces) == '{"a": {"b": "}"}}'
    assert streamed[-1]["finish_reason"] == "stop"
    cut = await choice_of(client, **body, max_tokens=1)
    assert cut["message"]["tool_calls"][0]["function"] == {"name": "g", "arguments": ""}
    assert cut["finish_reason"] == "length"


def call_schema(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"type": "string", "enum": [name]}, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


async def test_forced_calls_constrain_the_output(client, hermes):
    shared = {"$defs": {"x": {"type": "integer"}}, "properties": {"x": {"$ref": "#/$defs/x"}}}
    tools = [F, tool("g"), tool("h", parameters=shared), tool("i", parameters=shared)]
    parameters = {"type": "object", "properties": shared["properties"]}
    required = {
        "type": "array",
        "minItems": 1,
        "items": {
            "anyOf": [
                call_schema("f", F["function"]["parameters"]),
                call_schema("g", {"type": "object", "properties": {}}),
                call_schema("h", parameters),
                call_schema("i", parameters),
            ]
        },
        "$defs": shared["$defs"],
    }
    for choice, more, schema in (
        ("required", {}, required),
        ("required", {"parallel_tool_calls": False}, {**required, "maxItems": 1}),
        ("required", {"response_format": {"type": "json_object"}}, required),
        (tool("h"), {}, {"type": "object", **shared}),
    ):
        await chat(client, tools=tools, tool_choice=choice, **more)
        wanted = hermes.requests[-1].params.structured_outputs
        assert json.loads(wanted.json) == schema
    await chat(client, tools=tools)
    assert hermes.requests[-1].params.structured_outputs is None
    beside = {"tools": tools, "tool_choice": "required", "guided_regex": "a"}
    assert error_of(await chat(client, **beside))["param"] == "guided_regex"


async def test_definitions_that_contradict_are_refused(client, hermes):
    tools = [tool("f", parameters={"$defs": {"x": {"type": kind}}}) for kind in ("integer", "string")]
    error = error_of(await chat(client, tools=tools, tool_choice="required"))
    assert error["param"] == "tools"
    assert "$defs/x" in error["message"]


async def test_a_schema_that_is_too_long_names_the_tools(client, hermes):
    long = tool("f", parameters={"properties": {"x" * 70_000: {}}})
    for choice in ("required", tool("f")):
        error = error_of(await chat(client, tools=[long], tool_choice=choice))
        assert error["param"] == "tools"
        assert error["message"].startswith("tools: json may have at most")


async def test_tools_reach_the_template_whether_they_may_be_called_or_not(client, hermes):
    for choice in ({}, {"tool_choice": "none"}):
        await chat(client, tools=[F], **choice)
        assert f"tools={[F]}" in hermes.requests[-1].prompt.text
    await chat(client, tools=[])
    assert "tools=" not in hermes.requests[-1].prompt.text
    answer = await client.post("/tokenize", json={"messages": MESSAGES, "tools": [F]})
    prompt = hermes.frontend.prepare_chat(MESSAGES, tools=[F])
    assert answer.json()["count"] == len(prompt.token_ids)
    assert (
        error_of(await client.post("/tokenize", json={"messages": MESSAGES, "tools": [{}]}))["param"]
        == "tools"
    )


async def test_tags_are_shown_where_they_are_looked_for(client, hermes):
    await chat(client, tools=[F])
    assert list(hermes.requests[-1].shown_tokens) == ["<tool_call>", "</tool_call>", "<think>", "</think>"]
    await chat(client, tools=[F], tool_choice="none")
    assert list(hermes.requests[-1].shown_tokens) == ["<think>", "</think>"]
    await client.post("/v1/completions", json={"prompt": "hi"})
    assert list(hermes.requests[-1].shown_tokens) == []


async def test_a_whole_answer(client, hermes):
    hermes.script = lambda prompt, params: say(f"<think>Hm.</think>So:\n{CALL}\n{CALL}")
    choice = await choice_of(client, tools=[F])
    calls = choice["message"].pop("tool_calls")
    assert len({call.pop("id") for call in calls}) == 2
    assert calls == [{"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}] * 2
    assert choice["message"] == {
        "role": "assistant",
        "content": "So:\n",
        "refusal": None,
        "reasoning_content": "Hm.",
        "reasoning": "Hm.",
    }
    assert (choice["finish_reason"], choice["stop_reason"]) == ("tool_calls", None)


async def test_content_is_null_only_beside_something_else(client, hermes):
    assert (await choice_of(client, tools=[F]))["message"]["content"] is None
    hermes.script = lambda prompt, params: say("<think>Hm.")
    assert (await choice_of(client))["message"]["content"] is None
    hermes.script = lambda prompt, params: say("")
    message = (await choice_of(client, tools=[F]))["message"]
    assert (message["content"], message["reasoning"]) == ("", None)
    assert "tool_calls" not in message


async def test_calls_are_text_where_none_may_be_made(client, hermes):
    for body in ({}, {"tools": []}, {"tools": [F], "tool_choice": "none"}):
        choice = await choice_of(client, **body)
        assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")


async def test_one_call_where_several_are_not_wanted(client, hermes):
    hermes.script = lambda prompt, params: say(CALL * 3)
    for value, count in ((None, 3), (True, 3), (False, 1)):
        body = {"tools": [F], "parallel_tool_calls": value}
        assert len((await choice_of(client, **body))["message"]["tool_calls"]) == count
        deltas = [choice["delta"] for choice in await stream(client, **body)]
        ids = [piece["id"] for delta in deltas for piece in delta.get("tool_calls", []) if "id" in piece]
        assert len(ids) == count


async def test_reasoning_is_left_out_on_demand(client, hermes):
    hermes.script = lambda prompt, params: say("<think>Hm.</think>So.")
    message = (await choice_of(client, include_reasoning=False))["message"]
    assert message == {"role": "assistant", "content": "So.", "refusal": None}
    deltas = [choice["delta"] for choice in await stream(client, include_reasoning=False)]
    assert all(set(delta) <= {"role", "content"} for delta in deltas)


async def test_a_prompt_that_opens_the_reasoning(client, hermes):
    hermes.frontend.prepare_chat = lambda *_, **__: hermes.frontend.prepare_prompt("hi<think>\n")
    hermes.script = lambda prompt, params: say("Hm.</think>So.")
    message = (await choice_of(client))["message"]
    assert (message["reasoning"], message["content"]) == ("Hm.", "So.")
    deltas = [choice["delta"] for choice in await stream(client)]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "Hm."


async def test_a_stream_is_exactly_this(client, hermes):
    pieces = [
        "<think>H",
        "m.</think>",
        "So ",
        '<tool_call>{"name": "f", "arguments": {"a": ',
        "1}}</tool_call>",
    ]
    hermes.script = lambda prompt, params: [*(Step(piece) for piece in pieces), Step("", [257], "stop")]
    text = (await chat(client, stream=True, tools=[F])).text
    start = start_of(text, "chatcmpl", "chat.completion.chunk", "tiny")
    [call_id] = {
        piece["id"]
        for chunk in chunks(text)
        for piece in chunk["choices"][0]["delta"].get("tool_calls", [])
        if "id" in piece
    }
    assert call_id.startswith("call_")
    begin = f'"index":0,"id":"{call_id}","type":"function","function":{{"name":"f","arguments":""}}'
    deltas = [
        '{"role":"assistant","content":""}',
        '{"reasoning_content":"H","reasoning":"H"}',
        '{"reasoning_content":"m.","reasoning":"m."}',
        '{"content":"So "}',
        f'{{"tool_calls":[{{{begin}}}]}}',
        '{"tool_calls":[{"index":0,"function":{"arguments":"{\\"a\\": "}}]}',
        '{"tool_calls":[{"index":0,"function":{"arguments":"1}"}}]}',
    ]
    choices = [f'{{"index":0,"delta":{delta},"logprobs":null,"finish_reason":null}}' for delta in deltas]
    choices.append('{"index":0,"delta":{},"logprobs":null,"finish_reason":"tool_calls","stop_reason":null}')
    assert text == "".join(f"data: {start}{choice}]}}\n\n" for choice in choices) + "data: [DONE]\n\n"


@pytest.mark.parametrize("end", range(0, len(CALL), 7))
async def test_an_answer_that_was_cut(client, hermes, end):
    whole = await choice_of(client, tools=[F], max_tokens=end + 1)
    streamed = await stream(client, tools=[F], max_tokens=end + 1)
    assert whole["finish_reason"] == streamed[-1]["finish_reason"] == "length"
    content = "".join(choice["delta"].get("content") or "" for choice in streamed)
    assert content == (whole["message"]["content"] or "")
    pieces = [piece for choice in streamed for piece in choice["delta"].get("tool_calls", [])]
    arguments = "".join(piece["function"]["arguments"] for piece in pieces)
    if "tool_calls" in whole["message"]:
        assert arguments == whole["message"]["tool_calls"][0]["function"]["arguments"]
        assert '{"a": 1}'.startswith(arguments)
    else:
        assert (content, arguments) == (CALL[: end + 1], "")


async def test_text_that_is_held_comes_before_an_abort():
    parsers = Parsers(TOOL_PARSERS["hermes"])
    body = openai.convert({"messages": MESSAGES, "tools": [F]}, openai.ChatBody)
    head = openai.Head("x", 1, "m")
    encoder = ChatChunks(head, body, Prompt("hi", [1]), ByteTokenizer(), parsers, EVENT)
    output = RequestOutput("r", "hi", [1], [CompletionOutput(0, "a <tool", [1])], False)
    events = [*encoder.encode(0, output), *encoder.abort(), *encoder.end(), DONE]
    text = b"".join(events).decode()
    choices = [chunk["choices"][0] for chunk in chunks(text)]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "a <tool"
    assert [choice["finish_reason"] for choice in choices][-2:] == [None, "abort"]


async def test_logprobs_of_every_token_are_told_once(client, hermes):
    hermes.script = lambda prompt, params: say(f"ab{CALL}c")
    body = {"tools": [F], "logprobs": True}
    whole = (await choice_of(client, **body))["logprobs"]["content"]
    streamed = [choice["logprobs"] for choice in await stream(client, **body)]
    told = [entry for logprobs in streamed if logprobs is not None for entry in logprobs["content"]]
    assert told == whole
    assert b"".join(bytes(entry["bytes"]) for entry in whole[:-1]) == f"ab{CALL}c".encode()
    assert whole[0]["logprob"] == LOGPROB


async def test_each_sample_has_calls_of_its_own(client, hermes):
    body = {"tools": [F], "n": 2, "temperature": 1}
    whole = (await chat(client, **body)).json()["choices"]
    assert len({choice["message"]["tool_calls"][0]["id"] for choice in whole}) == 2
    arguments = {0: "", 1: ""}
    for choice in await stream(client, **body):
        for piece in choice["delta"].get("tool_calls", []):
            assert piece["index"] == 0
            arguments[choice["index"]] += piece["function"]["arguments"]
    assert arguments == {0: '{"a": 1}', 1: '{"a": 1}'}


async def test_an_answer_comes_back_in_the_history(client, hermes):
    """The message as a client dumps it, with the result after it."""
    message = (await choice_of(client, tools=[F]))["message"]
    dumped = {**message, "function_call": None, "audio": None, "annotations": []}
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "1"}
    assert (await chat(client, messages=[*MESSAGES, dumped, result], tools=[F])).status_code == 200
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"a": 1}
