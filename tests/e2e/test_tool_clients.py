"""Tool calls and reasoning through clients' own code, from a real server with a scripted model."""

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest

import scripted_model
from scripted_model import Script
from server_process import Server

LOOKUP = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look something up.",
        "parameters": {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]},
    },
}
NOW = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
NESTED = {"q": 'a "b" {c} \\ é🌶', "in": {"deep": [1, {"x": None}]}}

TEXTS = {
    "one": "<tool_call>\n"
    + json.dumps({"name": "lookup", "arguments": NESTED}, ensure_ascii=False)
    + "\n</tool_call>",
    "three": "Let me see.\n"
    + "\n".join(
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
        for name, arguments in (("lookup", {"q": "a"}), ("now", {}), ("lookup", {"q": "b"}))
    ),
    "tag-like": "if a < b, write <tool_cal or <tool> here",
    "required": '[{"name": "lookup", "parameters": {"q": "a"}}, {"name": "now", "parameters": {}}]',
    "unknown tool": '[{"name": "xxx", "parameters": {"q": "a"}}]',
    "named": '{"q": "a"}',
    "thought": '<think>\nHm.\n</think>\n\n<tool_call>{"name": "now", "arguments": {}}</tool_call>',
    "thought required": '<think>[{"</think>\n\n[{"name": "now", "parameters": {}}]',
    "thought named": '<think>Hm.</think>{"q": "a"}',
    "thought choice": "<think>blue</think>red",
}


class Served(NamedTuple):
    server: Server
    scripts: dict[str, Script]

    def ask(self, name: str, **more: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": self.scripts[name].prompt}]
        return {"model": "tiny", "messages": messages, "temperature": 0, "tools": [LOOKUP, NOW], **more}


@pytest.fixture(scope="module", params=["text", "special tokens"])
def served(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Served]:
    """Tags are plain text, or special tokens, which are not shown otherwise."""
    folder: Path = tmp_path_factory.mktemp("model") / "tiny"
    tags = ("<tool_call>", "</tool_call>", "<think>", "</think>") if request.param != "text" else ()
    scripts = scripted_model.write(folder, list(TEXTS.values()), tags)
    flags = ("--device", "cpu", "--num-blocks-override", "128", "--served-model-name", "tiny")
    parsers = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")
    server = Server(folder, *flags, *parsers)
    yield Served(server, dict(zip(TEXTS, scripts, strict=True)))
    server.stop()


def joined(chunks: list[Any]) -> tuple[str, list[dict[str, Any]], str | None]:
    """Content, calls and finish reason of a stream, as OpenAI's documentation has clients join them."""
    content, reason = "", None
    calls: list[dict[str, Any]] = []
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        content += choice.delta.content or ""
        reason = choice.finish_reason or reason
        for piece in choice.delta.tool_calls or []:
            if piece.id is not None:
                assert piece.index == len(calls)
                assert piece.type == "function"
                calls.append({"id": piece.id, "name": piece.function.name, "arguments": ""})
            else:
                assert piece.function.name is None
            calls[piece.index]["arguments"] += piece.function.arguments
    return content, calls, reason


EXPECTED = {
    "one": (None, [("lookup", NESTED)], "tool_calls"),
    "three": ("Let me see.\n", [("lookup", {"q": "a"}), ("now", {}), ("lookup", {"q": "b"})], "tool_calls"),
    "tag-like": (TEXTS["tag-like"], [], "stop"),
    "thought": (None, [("now", {})], "tool_calls"),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_openai_whole_and_streamed(served, name):
    content, calls, reason = EXPECTED[name]
    whole = served.server.client.chat.completions.create(**served.ask(name)).choices[0]
    called = whole.message.tool_calls or []
    assert whole.message.content == content
    assert [(call.function.name, json.loads(call.function.arguments)) for call in called] == calls
    assert whole.finish_reason == reason
    assert len({call.id for call in called}) == len(called)
    assert whole.message.reasoning_content == ("\nHm.\n" if name == "thought" else None)
    streamed = joined(list(served.server.client.chat.completions.create(**served.ask(name), stream=True)))
    assert streamed[0] == (content or "")
    assert [(call["name"], call["arguments"]) for call in streamed[1]] == [
        (call.function.name, call.function.arguments) for call in called
    ]
    assert streamed[2] == reason


def test_reasoning_is_streamed_under_both_names(served):
    chunks = served.server.client.chat.completions.create(**served.ask("thought"), stream=True)
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    for field in ("reasoning_content", "reasoning"):
        assert "".join(getattr(delta, field, None) or "" for delta in deltas) == "\nHm.\n"


def test_several_streams_at_once_by_the_async_client(served):
    async def run() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{served.server.url}/v1", api_key="none") as client:

            async def one(name: str) -> Any:
                stream = await client.chat.completions.create(**served.ask(name), stream=True)
                return joined([chunk async for chunk in stream])

            return await asyncio.gather(*(one(name) for name in EXPECTED))

    for found, (content, calls, reason) in zip(asyncio.run(run()), EXPECTED.values(), strict=True):
        assert found[0] == (content or "")
        assert [(call["name"], json.loads(call["arguments"])) for call in found[1]] == calls
        assert found[2] == reason


def test_openais_stream_helper_joins_the_calls(served):
    asked = served.ask("three", tools=[{**LOOKUP, "function": {**LOOKUP["function"], "strict": True}}])
    with served.server.client.chat.completions.stream(**asked) as stream:
        message = stream.get_final_completion().choices[0].message
    assert [call.function.name for call in message.tool_calls] == ["lookup", "now", "lookup"]


def test_a_call_that_was_cut(served):
    """Nothing is made up: what there is of the arguments, and the finish reason says why."""
    asked = served.ask("one", max_tokens=52)
    whole = served.server.client.chat.completions.create(**asked).choices[0]
    streamed = joined(list(served.server.client.chat.completions.create(**asked, stream=True)))
    assert whole.finish_reason == streamed[2] == "length"
    [call] = whole.message.tool_calls
    assert call.function.name == "lookup"
    assert call.function.arguments == streamed[1][0]["arguments"]
    full = json.dumps(NESTED, ensure_ascii=False)
    assert full.startswith(call.function.arguments)
    assert 0 < len(call.function.arguments) < len(full)


def test_forced_calls(served):
    """HC-75: the text of a forced call is constrained, and the model's own format has no part in it."""
    create = served.server.client.chat.completions.create
    asked = served.ask("required", tool_choice="required")
    whole = create(**asked).choices[0]
    called = [(call.function.name, call.function.arguments) for call in whole.message.tool_calls]
    assert called == [("lookup", '{"q": "a"}'), ("now", "{}")]
    assert (whole.message.content, whole.finish_reason) == (None, "tool_calls")
    streamed = joined(list(create(**asked, stream=True)))
    assert [(call["name"], call["arguments"]) for call in streamed[1]] == called
    assert (streamed[0], streamed[2]) == ("", "tool_calls")
    asked = served.ask("named", tool_choice={"type": "function", "function": {"name": "lookup"}})
    whole = create(**asked).choices[0]
    [call] = whole.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("lookup", '{"q": "a"}')
    assert whole.finish_reason == "stop"
    [call] = (
        create(**served.ask("unknown tool", tool_choice="required", max_tokens=30))
        .choices[0]
        .message.tool_calls
    )
    assert call.function.name in ("lookup", "now")


NAMED = {"type": "function", "function": {"name": "lookup"}}
LOOKUP_SCHEMA = {
    "type": "json_schema",
    "json_schema": {"name": "x", "schema": LOOKUP["function"]["parameters"]},
}
AFTER_REASONING = [
    ("thought required", {"tool_choice": "required"}, '[{"', None, [("now", {})], "tool_calls"),
    ("thought named", {"tool_choice": NAMED}, "Hm.", None, [("lookup", {"q": "a"})], "stop"),
    ("thought named", {"response_format": LOOKUP_SCHEMA}, "Hm.", '{"q": "a"}', [], "stop"),
    ("thought choice", {"extra_body": {"guided_choice": ["red", "blue"]}}, "blue", "red", [], "stop"),
]


@pytest.mark.parametrize(("name", "more", "thought", "content", "calls", "reason"), AFTER_REASONING)
def test_what_is_forced_comes_after_reasoning(served, name, more, thought, content, calls, reason):
    create = served.server.client.chat.completions.create
    whole = create(**served.ask(name, **more)).choices[0]
    assert whole.message.reasoning_content == thought
    assert whole.message.content == content
    found = [
        (call.function.name, json.loads(call.function.arguments)) for call in whole.message.tool_calls or []
    ]
    assert (found, whole.finish_reason) == (calls, reason)
    chunks = list(create(**served.ask(name, **more), stream=True))
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == thought
    said, streamed, ended = joined(chunks)
    assert (said, ended) == (content or "", reason)
    assert [(call["name"], json.loads(call["arguments"])) for call in streamed] == calls


@pytest.mark.parametrize("more", [{"tool_choice": "required"}, {"tool_choice": NAMED}])
def test_a_forced_call_that_is_cut_in_its_reasoning_is_none(served, more):
    most = served.scripts["thought named"].tokens.index(ord("m"))
    cut = served.server.client.chat.completions.create(**served.ask("thought named", **more), max_tokens=most)
    message = cut.choices[0].message
    assert message.reasoning_content == "H"
    assert (message.content, message.tool_calls, cut.choices[0].finish_reason) == (None, None, "length")


def test_reasoning_that_is_turned_off_leaves_the_form_alone(served):
    asked = served.ask("thought choice", max_tokens=20)
    off = {"guided_choice": ["red", "blue"], "chat_template_kwargs": {"enable_thinking": False}}
    choice = served.server.client.chat.completions.create(**asked, extra_body=off).choices[0]
    assert choice.message.reasoning_content is None
    assert choice.message.content in ("red", "blue")


def test_a_schema_that_does_not_compile_names_the_tools(served):
    wrong = {
        "type": "function",
        "function": {"name": "f", "parameters": {"properties": {"x": {"type": "strin"}}}},
    }
    for stream in (False, True):
        asked = served.ask("one", tools=[wrong], tool_choice="required", stream=stream)
        with pytest.raises(openai.BadRequestError) as refused:
            served.server.client.chat.completions.create(**asked)
        assert refused.value.param == "tools"


@pytest.mark.slow
def test_langchain_binds_tools(served):
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(
        model="tiny", base_url=f"{served.server.url}/v1", api_key="none", max_retries=0, temperature=0
    ).bind_tools([LOOKUP, NOW])
    prompt = served.scripts["three"].prompt
    expected = [("lookup", {"q": "a"}), ("now", {}), ("lookup", {"q": "b"})]
    answer = model.invoke(prompt)
    assert [(call["name"], call["args"]) for call in answer.tool_calls] == expected
    total = None
    for chunk in model.stream(prompt):
        total = chunk if total is None else total + chunk
    assert [(call["name"], call["args"]) for call in total.tool_calls] == expected
    assert total.content == answer.content == "Let me see.\n"


@pytest.mark.slow
def test_litellm(served):
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm

    asked = {
        **served.ask("three"),
        "model": "hosted_vllm/tiny",
        "api_base": f"{served.server.url}/v1",
        "api_key": "none",
    }
    whole = litellm.completion(**asked).choices[0]
    assert [call.function.name for call in whole.message.tool_calls] == ["lookup", "now", "lookup"]
    assert whole.finish_reason == "tool_calls"
    rebuilt = litellm.stream_chunk_builder(list(litellm.completion(**asked, stream=True))).choices[0]
    assert [(call.function.name, call.function.arguments) for call in rebuilt.message.tool_calls] == [
        (call.function.name, call.function.arguments) for call in whole.message.tool_calls
    ]
