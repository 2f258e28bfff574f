"""Forced calls and structured answers through clients' own code, from a real server with a scripted model."""

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import anthropic
import openai
import pytest
from pydantic import BaseModel

import scripted_model
from scripted_model import Script
from server_process import Server

pytestmark = pytest.mark.slow


class Weather(BaseModel):
    """The weather of a city."""

    city: str
    degrees: int
    sky: Literal["clear", "grey"]


class Now(BaseModel):
    """The time."""


ROME = Weather(city="Rome", degrees=21, sky="clear")
ARGUMENTS = '{"city": "Rome", "degrees": 21, "sky": "clear"}'
CALLS = f'[{{"name": "Weather", "parameters": {ARGUMENTS}}}, {{"name": "Now", "parameters": {{}}}}]'
EXPECTED = [("Weather", ROME.model_dump()), ("Now", {})]
TEXTS = {"one": ARGUMENTS, "calls": CALLS, "long": "z" * 400}


class Served(NamedTuple):
    server: Server
    scripts: dict[str, Script]

    @property
    def v1(self) -> str:
        return f"{self.server.url}/v1"

    def prompt(self, name: str) -> str:
        return self.scripts[name].prompt

    def messages(self, name: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.prompt(name)}]

    def chat(self, name: str, **more: Any) -> dict[str, Any]:
        return {"model": "tiny", "messages": self.messages(name), "temperature": 0, **more}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder: Path = tmp_path_factory.mktemp("model") / "tiny"
    scripts = scripted_model.write(folder, list(TEXTS.values()))
    flags = ("--device", "cpu", "--num-blocks-override", "128", "--served-model-name", "tiny")
    server = Server(folder, *flags, "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")
    yield Served(server, dict(zip(TEXTS, scripts, strict=True)))
    server.stop()


def called(calls: list[Any]) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls]


class TestOpenAI:
    """openai's helpers, which read answers into pydantic models."""

    @pytest.fixture
    def client(self, served: Served) -> Any:
        return served.server.client

    def test_a_chat_is_parsed(self, served, client):
        asked = served.chat("one", response_format=Weather)
        choice = client.chat.completions.parse(**asked).choices[0]
        assert (choice.message.parsed, choice.finish_reason) == (ROME, "stop")
        assert client.beta.chat.completions.parse(**asked).choices[0].message.parsed == ROME

    def test_a_chat_s_calls_are_parsed(self, served, client):
        tools = [openai.pydantic_function_tool(kind) for kind in (Weather, Now)]
        asked = served.chat("calls", tools=tools, tool_choice="required")
        message = client.chat.completions.parse(**asked).choices[0].message
        assert [call.function.parsed_arguments for call in message.tool_calls] == [ROME, Now()]
        with client.chat.completions.stream(**asked) as stream:
            events = list(stream)
            message = stream.get_final_completion().choices[0].message
        assert [call.function.parsed_arguments for call in message.tool_calls] == [ROME, Now()]
        done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
        assert [(event.name, event.parsed_arguments) for event in done] == [("Weather", ROME), ("Now", Now())]

    def test_a_named_call_is_parsed(self, served, client):
        choice = {"type": "function", "function": {"name": "Weather"}}
        tools = [openai.pydantic_function_tool(kind) for kind in (Weather, Now)]
        asked = served.chat("one", tools=tools, tool_choice=choice)
        [call] = client.chat.completions.parse(**asked).choices[0].message.tool_calls
        assert call.function.parsed_arguments == ROME

    def test_the_chat_stream_helper_parses(self, served, client):
        with client.chat.completions.stream(**served.chat("one", response_format=Weather)) as stream:
            events = list(stream)
            final = stream.get_final_completion()
        assert final.choices[0].message.parsed == ROME
        [done] = [event for event in events if event.type == "content.done"]
        assert done.parsed == ROME
        assert "".join(event.delta for event in events if event.type == "content.delta") == ARGUMENTS

    def test_an_answer_that_was_cut_is_not_parsed(self, served, client):
        with pytest.raises(openai.LengthFinishReasonError):
            client.chat.completions.parse(**served.chat("one", response_format=Weather, max_tokens=9))

    def test_a_response_is_parsed(self, served, client):
        asked = {"model": "tiny", "input": served.prompt("one"), "temperature": 0}
        response = client.responses.parse(**asked, text_format=Weather)
        assert (response.output_parsed, response.status) == (ROME, "completed")
        with client.responses.stream(**asked, text_format=Weather) as stream:
            events = list(stream)
            final = stream.get_final_response()
        assert final.output_parsed == ROME
        texts = [event for event in events if event.type == "response.output_text.delta"]
        assert "".join(event.delta for event in texts) == texts[-1].snapshot == ARGUMENTS

    @pytest.mark.parametrize(
        ("script", "choice", "expected"),
        [
            ("calls", "required", [ROME, Now()]),
            ("one", {"type": "function", "name": "Weather"}, [ROME]),
        ],
    )
    def test_a_response_s_calls_are_parsed(self, served, client, script, choice, expected):
        asked: dict[str, Any] = {
            "model": "tiny",
            "input": served.prompt(script),
            "temperature": 0,
            "tools": [openai.pydantic_function_tool(kind) for kind in (Weather, Now)],
            "tool_choice": choice,
        }
        response = client.responses.parse(**asked)
        assert [item.type for item in response.output] == ["function_call"] * len(expected)
        assert [item.parsed_arguments for item in response.output] == expected
        with client.responses.stream(**asked) as stream:
            events = list(stream)
            final = stream.get_final_response()
        assert [item.parsed_arguments for item in final.output] == expected
        deltas = [event for event in events if event.type == "response.function_call_arguments.delta"]
        for item in final.output:
            pieces = [event for event in deltas if event.item_id == item.id]
            assert "".join(event.delta for event in pieces) == pieces[-1].snapshot == item.arguments

    def test_cancelled_tasks_free_everything(self, served):
        async def run() -> str:
            async with openai.AsyncOpenAI(base_url=served.v1, api_key="none", max_retries=0) as client:
                began = asyncio.Event()

                async def streaming(create: Any, **asked: Any) -> None:
                    async for _ in await create(**asked, stream=True):
                        began.set()

                long = served.chat("long", max_tokens=400)
                whole = asyncio.create_task(client.chat.completions.create(**long))
                response = {"model": "tiny", "input": served.prompt("long"), "temperature": 0}
                tasks = [
                    asyncio.create_task(streaming(client.chat.completions.create, **long)),
                    asyncio.create_task(streaming(client.responses.create, **response)),
                    whole,
                ]
                await began.wait()
                for task in tasks:
                    task.cancel()
                for task in tasks:
                    with pytest.raises(asyncio.CancelledError):
                        await task
                async with client.chat.completions.stream(**long) as stream:
                    async for _ in stream:
                        break  # and leaves
                again = await client.chat.completions.create(**served.chat("one", max_tokens=5))
                return again.choices[0].message.content or ""

        assert asyncio.run(run()) == ARGUMENTS[:5]
        served.server.wait_until_idle()


def responses_tool(kind: type[BaseModel]) -> dict[str, Any]:
    function: Any = openai.pydantic_function_tool(kind)["function"]
    return {"type": "function", **function}


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """One event loop for all tests, as langchain keeps connections for all of a process."""
    with asyncio.Runner() as started:
        yield started


class TestLangchain:
    """langchain-openai over both of OpenAI's APIs."""

    @pytest.fixture(params=[False, True], ids=["chat", "responses"])
    def model(self, served: Served, request: pytest.FixtureRequest) -> Any:
        from langchain_openai import ChatOpenAI

        options: dict[str, Any] = {"use_responses_api": request.param, "max_retries": 0, "temperature": 0}
        return ChatOpenAI(model="tiny", base_url=served.v1, api_key="none", **options)

    @pytest.mark.parametrize(
        ("script", "choice", "expected"),
        [
            ("calls", "any", EXPECTED),
            ("calls", "required", EXPECTED),
            ("calls", True, EXPECTED),
            ("one", "Weather", EXPECTED[:1]),
            ("one", {"type": "function", "function": {"name": "Weather"}}, EXPECTED[:1]),
        ],
        ids=str,
    )
    def test_bound_tools_are_called(self, served, model, script, choice, expected):
        bound = model.bind_tools([Weather, Now], tool_choice=choice)
        answer = bound.invoke(served.prompt(script))
        assert [(call["name"], call["args"]) for call in answer.tool_calls] == expected
        assert len({call["id"] for call in answer.tool_calls}) == len(expected)
        total = None
        for chunk in bound.stream(served.prompt(script)):
            total = chunk if total is None else total + chunk
        assert [(call["name"], call["args"]) for call in total.tool_calls] == expected
        assert answer.usage_metadata == total.usage_metadata or total.usage_metadata is None

    @pytest.mark.parametrize("method", ["function_calling", "json_schema", "json_mode"])
    def test_structured_output(self, served, runner, model, method):
        structured = model.with_structured_output(Weather, method=method)
        assert structured.invoke(served.prompt("one")) == ROME
        assert runner.run(structured.ainvoke(served.prompt("one"))) == ROME
        assert list(structured.stream(served.prompt("one")))[-1] == ROME
        raw = model.with_structured_output(Weather, method=method, include_raw=True)
        found = raw.invoke(served.prompt("one"))
        assert (found["parsed"], found["parsing_error"]) == (ROME, None)

    @pytest.mark.parametrize("method", ["function_calling", "json_schema"])
    def test_strict_structured_output_as_a_dict(self, served, model, method):
        schema = {"title": "Weather", "description": "Weather.", **Weather.model_json_schema()}
        structured = model.with_structured_output(
            {**schema, "additionalProperties": False}, method=method, strict=True
        )
        assert structured.invoke(served.prompt("one")) == ROME.model_dump()


class TestLitellm:
    """litellm, which speaks all three APIs."""

    @pytest.fixture
    def litellm(self) -> Any:
        os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        import litellm

        return litellm

    @pytest.fixture(params=["hosted_vllm", "openai"])
    def ours(self, served: Served, request: pytest.FixtureRequest) -> dict[str, Any]:
        return {"model": f"{request.param}/tiny", "api_base": served.v1, "api_key": "none", "num_retries": 0}

    @pytest.mark.parametrize(
        ("script", "choice", "expected"),
        [
            ("calls", "required", EXPECTED),
            ("one", {"type": "function", "function": {"name": "Weather"}}, EXPECTED[:1]),
        ],
        ids=str,
    )
    def test_forced_calls(self, served, litellm, ours, script, choice, expected):
        tools = [openai.pydantic_function_tool(kind) for kind in (Weather, Now)]
        asked = {**served.chat(script, tools=tools, tool_choice=choice), **ours}
        whole = litellm.completion(**asked).choices[0]
        assert called(whole.message.tool_calls) == expected
        rebuilt = litellm.stream_chunk_builder(list(litellm.completion(**asked, stream=True))).choices[0]
        assert called(rebuilt.message.tool_calls) == expected

    def test_structured_answers(self, served, litellm, ours):
        asked = {**served.chat("one"), **ours, "response_format": Weather}
        assert Weather.model_validate_json(litellm.completion(**asked).choices[0].message.content) == ROME

        async def streamed() -> str:
            stream = await litellm.acompletion(**asked, stream=True, stream_options={"include_usage": True})
            chunks = [chunk async for chunk in stream]
            assert chunks[-1].usage.completion_tokens == len(ARGUMENTS) + 1
            return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)

        assert asyncio.run(streamed()) == ARGUMENTS

    def test_responses(self, served, litellm, ours):
        asked = {**ours, "input": served.prompt("calls"), "temperature": 0, "tool_choice": "required"}
        asked["tools"] = [responses_tool(kind) for kind in (Weather, Now)]
        whole = litellm.responses(**asked)
        found = [(item.name, json.loads(item.arguments)) for item in whole.output]
        assert found == EXPECTED
        events = list(litellm.responses(**asked, stream=True))
        final = events[-1].response
        assert [(item.name, json.loads(item.arguments)) for item in final.output] == EXPECTED
        assert final.usage.output_tokens == whole.usage.output_tokens == len(CALLS) + 1

    @pytest.mark.parametrize("provider", ["anthropic", "hosted_vllm"])
    def test_messages(self, served, litellm, provider):
        """Through our own /v1/messages, and translated to chats by litellm."""
        base = served.server.url if provider == "anthropic" else served.v1
        asked: dict[str, Any] = {
            "model": f"{provider}/tiny",
            "api_base": base,
            "api_key": "none",
            "messages": served.messages("one"),
            "max_tokens": 200,
            "temperature": 0,
            "tools": [anthropic_tool(kind) for kind in (Weather, Now)],
            "tool_choice": {"type": "tool", "name": "Weather"},
        }
        whole = asyncio.run(litellm.anthropic_messages(**asked))
        [block] = whole["content"]
        assert (block["type"], block["name"], block["input"]) == ("tool_use", "Weather", ROME.model_dump())
        assert whole["stop_reason"] == "tool_use"

        if provider == "anthropic":
            return  # streams of this one need what litellm installs with its proxy only

        async def streamed() -> str:
            stream = await litellm.anthropic_messages(**asked, stream=True)
            return "".join([piece.decode() if isinstance(piece, bytes) else piece async for piece in stream])

        text = asyncio.run(streamed())
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        pieces = [event["delta"].get("partial_json", "") for event in events if "delta" in event]
        assert json.loads("".join(pieces)) == ROME.model_dump()
        assert events[-1]["type"] == "message_stop"


def anthropic_tool(kind: type[BaseModel]) -> Any:
    return {"name": kind.__name__, "input_schema": kind.model_json_schema()}


class TestAnthropic:
    """anthropic's stream helper with tools."""

    CHOICES = (
        ("calls", {"type": "any"}, EXPECTED),
        ("one", {"type": "tool", "name": "Weather"}, EXPECTED[:1]),
    )

    def asked(self, served: Served, script: str, choice: Any) -> dict[str, Any]:
        return {
            "model": "tiny",
            "max_tokens": 300,
            "messages": served.messages(script),
            "tools": [anthropic_tool(kind) for kind in (Weather, Now)],
            "tool_choice": choice,
            "extra_body": {"temperature": 0},
        }

    @pytest.mark.parametrize(("script", "choice", "expected"), CHOICES, ids=["any", "tool"])
    def test_the_stream_helper_joins_forced_calls(self, served, script, choice, expected):
        client = anthropic.Anthropic(base_url=served.server.url, api_key="none", max_retries=0)
        asked = self.asked(served, script, choice)
        whole = client.messages.create(**asked)
        assert [(block.name, block.input) for block in whole.content] == expected
        with client.messages.stream(**asked) as stream:
            events = list(stream)
            final = stream.get_final_message()
        assert [(block.name, block.input) for block in final.content] == expected
        assert final.stop_reason == whole.stop_reason == "tool_use"
        assert final.usage.output_tokens == whole.usage.output_tokens
        inputs = [event for event in events if event.type == "input_json"]
        assert inputs[-1].snapshot == expected[-1][1]
        stops = [event.content_block for event in events if event.type == "content_block_stop"]
        assert [(block.name, block.input) for block in stops] == expected

    def test_leaving_an_async_stream_frees_everything(self, served):
        async def run() -> None:
            async with anthropic.AsyncAnthropic(base_url=served.server.url, api_key="none") as client:
                asked = {"model": "tiny", "max_tokens": 400, "messages": served.messages("long")}
                async with client.messages.stream(**asked, extra_body={"temperature": 0}) as stream:
                    async for text in stream.text_stream:
                        assert set(text) == {"z"}
                        break

        asyncio.run(run())
        served.server.wait_until_idle()
