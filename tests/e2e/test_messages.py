"""Anthropic's client, and raw requests of its API, to a real server with a scripted model."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import anthropic
import httpx
import pytest

import scripted_model
from scripted_model import Script
from server_process import Server

CALL = '<tool_call>{"name": "lookup", "arguments": {"q": "né 🌶", "n": [1]}}</tool_call>'
TEXTS = {
    "letters": "cdefghij",
    "call": "One moment.\n" + CALL,
    "thought": "<think>Hm.</think>yes",
}
LOOKUP: Any = {
    "name": "lookup",
    "description": "Look something up.",
    "input_schema": {"type": "object", "properties": {"q": {"type": "string"}}},
}


class Served(NamedTuple):
    server: Server
    client: anthropic.Anthropic
    scripts: dict[str, Script]

    def ask(self, name: str, **more: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": self.scripts[name].prompt}]
        return {"model": "tiny", "max_tokens": 100, "messages": messages, "temperature": 0, **more}

    def create(self, body: dict[str, Any], **more: Any) -> Any:
        return self.client.messages.create(**for_client(body), **more)

    def final(self, body: dict[str, Any]) -> Any:
        """The message that the client puts together of a stream."""
        with self.client.messages.stream(**for_client(body)) as stream:
            return stream.get_final_message()


def for_client(body: dict[str, Any]) -> dict[str, Any]:
    """Fields that newer versions of the client do not name go beside those that they do."""
    other = {name: body[name] for name in ("temperature", "top_k", "top_p") if name in body}
    return {name: value for name, value in body.items() if name not in other} | {"extra_body": other}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    scripts = scripted_model.write(folder, list(TEXTS.values()))
    flags = ("--device", "cpu", "--num-blocks-override", "128", "--served-model-name", "tiny")
    parsers = ("--tool-call-parser", "hermes", "--reasoning-parser", "qwen3", "--api-key", "k")
    server = Server(folder, *flags, *parsers)
    client = anthropic.Anthropic(base_url=server.url, api_key="k", max_retries=0, timeout=60)
    yield Served(server, client, dict(zip(TEXTS, scripts, strict=True)))
    server.stop()


@pytest.mark.parametrize(
    ("more", "text", "reason", "sequence"),
    [
        ({}, "cdefghij", "end_turn", None),
        ({"stop_sequences": ["fg"]}, "cde", "stop_sequence", "fg"),
        ({"stop_sequences": ["xy", "hi"]}, "cdefg", "stop_sequence", "hi"),
        ({"max_tokens": 3}, "cde", "max_tokens", None),
    ],
)
def test_text_and_how_it_ended(served, more, text, reason, sequence):
    asked = served.ask("letters", **more)
    prompt_tokens = served.scripts["letters"].start
    whole = served.create(asked)
    assert [block.text for block in whole.content] == [text]
    assert (whole.stop_reason, whole.stop_sequence) == (reason, sequence)
    assert whole.usage.input_tokens == prompt_tokens
    final = served.final(asked)
    assert [block.text for block in final.content] == [text]
    assert (final.stop_reason, final.stop_sequence) == (reason, sequence)
    assert final.usage.input_tokens == prompt_tokens
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_the_events_of_a_stream(served):
    headers = {"x-api-key": "k"}
    body = served.ask("letters", stream=True, max_tokens=2)
    answer = httpx.post(f"{served.server.url}/v1/messages", json=body, headers=headers, timeout=60)
    events = [part.split("\n") for part in answer.text.split("\n\n") if part and not part.startswith(":")]
    contents = [json.loads(data.removeprefix("data: ")) for _, data in events]
    assert [name.removeprefix("event: ") for name, _ in events] == [content["type"] for content in contents]
    kinds = [content["type"] for content in contents]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert contents[0]["message"]["content"] == []
    assert contents[-2]["usage"]["output_tokens"] == 2


def test_tools(served):
    asked = served.ask("call", tools=[LOOKUP])
    whole = served.create(asked)
    assert whole.stop_reason == "tool_use"
    assert [block.type for block in whole.content] == ["text", "tool_use"]
    assert whole.content[0].text.strip() == "One moment."
    call = whole.content[1]
    assert (call.name, call.input) == ("lookup", {"q": "né 🌶", "n": [1]})
    final = served.final(asked)
    assert [block.type for block in final.content] == ["text", "tool_use"]
    assert final.content[1].input == call.input
    assert final.stop_reason == "tool_use"
    # The result goes back beside more text.
    turns = asked["messages"] + [
        {"role": "assistant", "content": [block.model_dump() for block in whole.content]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "42"}]},
                {"type": "text", "text": "and?"},
            ],
        },
    ]
    assert served.create(asked | {"messages": turns, "max_tokens": 1}).content


def test_a_call_that_was_asked_for_by_name_or_cut(served):
    """The grammar bends whatever the model wants to say into a call."""
    forced = served.ask("letters", tools=[LOOKUP], tool_choice={"type": "tool", "name": "lookup"})
    whole = served.create(forced | {"max_tokens": 3})
    (call,) = whole.content
    assert (whole.stop_reason, call.type, call.input) == ("max_tokens", "tool_use", {})
    (streamed,) = served.final(forced | {"max_tokens": 3}).content
    assert streamed.input == call.input


def test_reasoning_is_a_block_of_its_own(served):
    asked = served.ask("thought")
    whole = served.create(asked)
    assert [(block.type, getattr(block, block.type)) for block in whole.content] == [
        ("thinking", "Hm."),
        ("text", "yes"),
    ]
    assert [block.type for block in served.final(asked).content] == ["thinking", "text"]


def test_forms_of_the_same_conversation(served):
    prompt = served.scripts["letters"].prompt
    half = len(prompt) // 2
    forms = [
        {"messages": [{"role": "user", "content": [{"type": "text", "text": prompt}]}]},
        {"system": prompt[:half], "messages": [{"role": "user", "content": prompt[half:]}]} if half else {},
        {
            "system": [{"type": "text", "text": prompt, "cache_control": {"type": "ephemeral"}}],
            "messages": [{"role": "user", "content": ""}],
        },
        {"metadata": {"user_id": "u"}, "top_k": 5, "thinking": {"type": "disabled"}},
    ]
    for form in forms:
        assert served.create(served.ask("letters", **form)).content[0].text == "cdefghij"


def test_tokens_are_counted(served):
    asked = {name: served.ask("call", tools=[LOOKUP])[name] for name in ("model", "messages", "tools")}
    counted = served.client.messages.count_tokens(**asked).input_tokens
    assert counted == served.create(served.ask("call", tools=[LOOKUP])).usage.input_tokens


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "system", "content": "x"}]}, "role must be user or assistant"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "only text is"),
        ({"messages": [{"role": "user", "content": "q" * 2000}]}, "maximum context length"),
        (
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "id": "c", "name": "f", "input": "x"}],
                    },
                ]
            },
            "messages[1].content[0].input must be an object",
        ),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "only custom is"),
        ({"tools": [LOOKUP], "tool_choice": {"type": "some"}}, "tool_choice.type must be"),
        ({"thinking": {"type": 5}}, "thinking.type"),
        ({"model": "other"}, "there is no model"),
        ({"temperature": "hot"}, "temperature"),
    ],
)
def test_errors_have_anthropics_shape(served, change, said):
    body = {name: value for name, value in served.ask("letters", **change).items() if value is not None}
    for stream in (False, True):
        url, headers = f"{served.server.url}/v1/messages", {"x-api-key": "k"}
        answer = httpx.post(url, json=body | {"stream": stream}, headers=headers, timeout=60)
        content = answer.json()
        assert content["type"] == "error"
        assert set(content["error"]) == {"type", "message"}
        assert said in content["error"]["message"]
        assert 400 <= answer.status_code < 500


def test_the_client_raises_its_own_errors(served):
    with pytest.raises(anthropic.BadRequestError, match="messages is empty"):
        served.create(served.ask("letters", messages=[]))
    with pytest.raises(anthropic.NotFoundError, match="there is no model"):
        served.create(served.ask("letters", model="other"))


def test_a_wrong_key_and_a_key_of_either_header(served):
    for headers, status in (({"x-api-key": "k"}, 200), ({"authorization": "Bearer k"}, 200), ({}, 401)):
        url = f"{served.server.url}/v1/messages"
        answer = httpx.post(url, json=served.ask("letters"), headers=headers, timeout=60)
        assert answer.status_code == status
    assert answer.json()["error"]["type"] == "authentication_error"


def test_the_asynchronous_client(served):
    async def run():
        async with anthropic.AsyncAnthropic(base_url=served.server.url, api_key="k") as client:
            asked = for_client(served.ask("letters"))
            answers = await asyncio.gather(*(client.messages.create(**asked) for _ in range(4)))
            return [answer.content[0].text for answer in answers]

    assert asyncio.run(run()) == ["cdefghij"] * 4
