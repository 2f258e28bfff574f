"""OpenAI's client of the Responses API, to a real server with a scripted model and two HTTP processes."""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import openai
import pytest

import scripted_model
from octavo_serve.response_store import ResponseStore, StoredResponse
from scripted_model import Script
from server_process import Server

TEXTS = {
    "letters": "cdefg",
    "call": 'See.<tool_call>{"name": "lookup", "arguments": {"q": "a"}}</tool_call>',
    "thought": "<think>Hm.</think>yes",
    "later": "klm",
}
LOOKUP: Any = {
    "type": "function",
    "name": "lookup",
    "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
}


class Served(NamedTuple):
    server: Server
    scripts: dict[str, Script]

    @property
    def client(self) -> Any:
        return self.server.client.responses

    def ask(self, name: str, **more: Any) -> dict[str, Any]:
        return {"model": "tiny", "input": self.scripts[name].prompt, "temperature": 0, **more}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    scripts = scripted_model.write(folder, list(TEXTS.values()))
    flags = ("--device", "cpu", "--num-blocks-override", "128", "--served-model-name", "tiny")
    parsers = ("--tool-call-parser", "hermes", "--reasoning-parser", "qwen3", "--api-server-count", "2")
    server = Server(folder, *flags, *parsers)
    yield Served(server, dict(zip(TEXTS, scripts, strict=True)))
    server.stop()


def final(stream) -> Any:
    """The response of the last event, after a look at all."""
    events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    response = events[-1].response
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == response.output_text
    for item in response.output:
        at = [event for event in events if getattr(event, "item_id", None) == item.id]
        if item.type == "function_call":
            pieces = [event.delta for event in at if event.type.endswith("arguments.delta")]
            assert "".join(pieces) == item.arguments
    added = [event.item.type for event in events if event.type == "response.output_item.added"]
    assert added == [item.type for item in response.output]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == response.output
    return response


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("most", "cut"), [(3, True), (50, False), (6, False)])
def test_text_usage_and_status(served, stream, most, cut):
    made = served.client.create(**served.ask("letters", max_output_tokens=most), stream=stream)
    response = final(made) if stream else made
    assert response.output_text == ("cde" if cut else "cdefg")
    assert response.status == ("incomplete" if cut else "completed")
    details = response.incomplete_details
    assert (details and details.reason) == ("max_output_tokens" if cut else None)
    assert [item.status for item in response.output] == [response.status]
    usage = response.usage
    prompt_tokens = served.scripts["letters"].start
    assert (usage.input_tokens, usage.output_tokens) == (prompt_tokens, 3 if cut else 6)
    assert usage.total_tokens == prompt_tokens + usage.output_tokens
    assert usage.input_tokens_details.cached_tokens >= 0
    assert usage.output_tokens_details.reasoning_tokens == 0


@pytest.mark.parametrize("stream", [False, True])
def test_calls_and_reasoning(served, stream):
    made = served.client.create(**served.ask("call", tools=[LOOKUP]), stream=stream)
    response = final(made) if stream else made
    assert [item.type for item in response.output] == ["message", "function_call"]
    call = response.output[1]
    assert (call.name, json.loads(call.arguments)) == ("lookup", {"q": "a"})
    made = served.client.create(**served.ask("thought"), stream=stream)
    response = final(made) if stream else made
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.output[0].content[0].text == "Hm."
    assert response.output_text == "yes"


def test_a_conversation_goes_on_in_every_process(served):
    """The template joins what was said, so that the number of characters before chooses what is said next."""
    first = served.client.create(**served.ask("letters"))
    said = len(served.scripts["letters"].prompt) + len("cdefg")
    more = "q" * (served.scripts["later"].start - said)
    for _ in range(8):  # each on a connection of its own, to any process
        with httpx.Client(base_url=served.server.url, timeout=60) as client:
            body = {"model": "tiny", "input": more, "previous_response_id": first.id, "temperature": 0}
            answer = client.post("/v1/responses", json=body).json()
            assert answer["output"][0]["content"][0]["text"] == "klm"
            assert client.get(f"/v1/responses/{first.id}").json()["id"] == first.id
            items = client.get(f"/v1/responses/{answer['id']}/input_items").json()["data"]
            assert [item.get("content") for item in items][::2] == [served.scripts["letters"].prompt, more]
    assert served.client.retrieve(first.id).output_text == "cdefg"
    served.client.delete(first.id)
    for attempt in (lambda: served.client.retrieve(first.id), lambda: served.client.delete(first.id)):
        with pytest.raises(openai.NotFoundError):
            attempt()
    with pytest.raises(openai.NotFoundError, match="there is no response"):
        served.client.create(**served.ask("letters", previous_response_id=first.id))
    unstored = served.client.create(**served.ask("letters", store=False))
    with pytest.raises(openai.NotFoundError):
        served.client.retrieve(unstored.id)


def test_results_of_tools_go_back(served):
    first = served.client.create(**served.ask("call", tools=[LOOKUP]))
    call = first.output[1]
    items = [{"type": "function_call_output", "call_id": call.call_id, "output": "42"}]
    second = served.client.create(
        model="tiny", input=items, previous_response_id=first.id, max_output_tokens=1, tools=[LOOKUP]
    )
    assert second.previous_response_id == first.id
    history = [
        {"role": "user", "content": [{"type": "input_text", "text": served.scripts["call"].prompt}]},
        {"type": "reasoning", "summary": []},
        *(item.model_dump() for item in first.output),
        *items,
    ]
    third = served.client.create(model="tiny", input=history, max_output_tokens=1, tools=[LOOKUP])
    assert third.usage.input_tokens == second.usage.input_tokens


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 7}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"input": [{"role": "cook", "content": "x"}]}, "input"),
        ({"input": "q" * 2000}, "input"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"previous_response_id": "../../etc/passwd"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
    ],
)
def test_what_is_refused(served, change, param):
    for stream in (False, True):
        body = served.ask("letters", **change, stream=stream)
        answer = httpx.post(f"{served.server.url}/v1/responses", json=body, timeout=60)
        assert 400 <= answer.status_code < 500, answer.text
        assert answer.json()["error"]["param"] == param


def test_old_responses_are_forgotten(tmp_path):
    store = ResponseStore(tmp_path, most=3)
    names = [f"resp-{number}" for number in range(7)]
    for name in names:
        store.put(StoredResponse({"id": name, "output": []}, []))
        store.settle()
        if name != "resp-0":
            store.get("resp-1")  # read again and again, it stays
    left = [name for name in names if store.get(name)]
    assert left == ["resp-1", "resp-4", "resp-5", "resp-6"]  # looked at after every third
    small = ResponseStore(tmp_path, most=1, max_bytes=10)
    small.put(StoredResponse({"id": "resp-a", "output": []}, []))
    small.settle()
    assert small.get("resp-a") is None
