"""The OpenAPI document: it is valid and whole, /docs shows it, and it says what is really answered."""

import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any, cast

import httpx
import jsonschema
import msgspec
import pytest
from documented import check
from fastapi.routing import APIRoute
from pooling_engine import PoolingEngine
from scripted_engine import ScriptedEngine, say

from enginecore import EngineConfig
from enginecore.frontend.parsing import REASONING_PARSERS, TOOL_PARSERS, Parsers
from octavo_serve.app import create_app
from octavo_serve.config import ServeConfig

pytestmark = pytest.mark.anyio

NOT_DESCRIBED = re.compile(r"/|/page/.*|/docs|/openapi.json|/v1/stream")
"""The live page, and the description itself."""


def app_of(engine: ScriptedEngine, **options: Any):
    return create_app(cast(Any, engine), ServeConfig(**options))


def client_of(engine: ScriptedEngine, **options: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app_of(engine, **options), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://server")


async def document_of(engine: ScriptedEngine, **options: Any) -> dict[str, Any]:
    async with client_of(engine, **options) as client:
        response = await client.get("/openapi.json")
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    return response.json()


@pytest.fixture
async def document(engine: ScriptedEngine) -> dict[str, Any]:
    return await document_of(engine, admin_routes=True, api_key=("k",))


def operations_of(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "$ref":
                yield inner
            else:
                yield from references(inner)
        yield from value.get("discriminator", {}).get("mapping", {}).values()
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)


@pytest.mark.parametrize("options", [{}, {"admin_routes": True, "api_key": ("k",)}], ids=str)
async def test_the_document_is_valid(engine, options):
    import schemathesis

    document = await document_of(engine, **options)
    assert document["openapi"] == "3.1.0"
    schemathesis.openapi.from_dict(document).validate()  # against the schema of OpenAPI 3.1
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    names = [operation["operationId"] for _, _, operation in operations_of(document)]
    assert len(set(names)) == len(names)


async def test_every_reference_resolves(document):
    found = list(references(document))
    assert "#/components/schemas/ChatBody" in found
    for reference in found:
        place: Any = document
        for part in reference.removeprefix("#/").split("/"):
            place = place[part]
        assert isinstance(place, dict)


@pytest.mark.parametrize("admin", [True, False])
async def test_every_route_is_described(engine, admin):
    described = {
        (method, path) for method, path, _ in operations_of(await document_of(engine, admin_routes=admin))
    }
    routes = {
        (method, route.path.replace(":path", ""))
        for route in app_of(engine, admin_routes=admin).routes
        if isinstance(route, APIRoute) and not NOT_DESCRIBED.fullmatch(route.path)
        for method in route.methods - {"HEAD"}
    }
    assert described == routes
    assert ("POST", "/v1/completions") in described
    assert (("POST", "/reset_prefix_cache") in described) is admin


async def test_a_key_is_asked_for_where_the_document_says_so(engine, document):
    asks = set()
    async with client_of(engine, api_key=("k",), admin_routes=True) as client:
        for method, path, operation in operations_of(document):
            response = await client.request(method, re.sub("{.*}", "x", path))
            assert (response.status_code == 401) is ("security" in operation), path
            assert ("401" in operation["responses"]) is ("security" in operation), path
            asks.add(response.status_code == 401)
    assert asks == {True, False}
    assert set(document["components"]["securitySchemes"]) == {"bearer", "apiKey"}
    assert "securitySchemes" not in (await document_of(engine))["components"]


async def test_errors_are_described_in_the_shape_of_their_api(document):
    for method, path, operation in operations_of(document):
        shapes = {
            answer["$ref"].rpartition("/")[2].rstrip("0123456789")
            for answer in operation["responses"].values()
            if "$ref" in answer
        }
        anthropic = path.startswith("/v1/messages")
        assert shapes == {"AnthropicError" if anthropic else "Error"}, (method, path)


async def test_a_proxys_path_is_the_servers(engine):
    assert (await document_of(engine, root_path="/llm"))["servers"] == [{"url": "/llm"}]


def test_nothing_is_described_before_it_is_asked_for():
    code = "import sys, octavo_serve.app; print([n for n in sys.modules if n.startswith('octavo_serve.')])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "octavo_serve.app" in loaded
    for name in ("openapi", "schemas", "docs_page"):
        assert f"'octavo_serve.{name}'" not in loaded


class Page(HTMLParser):
    """Ids, links and tags of a page; tags that are opened must be closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: set[str] = set()
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in ("meta", "br"):
            self._open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("href", "src"):
                self.links.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag


@pytest.mark.parametrize("options", [{}, {"api_key": ("k",), "live_page": False}], ids=str)
async def test_the_docs_need_no_key_and_nothing_from_elsewhere(engine, options):
    async with client_of(engine, **options) as client:
        response = await client.get("/docs")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.headers["content-security-policy"].startswith("default-src 'none'; style-src 'sha256-")
    page = Page(response.text)
    assert "script" not in page.tags
    assert "<b>WS</b> <code>/v1/stream</code>" in response.text
    assert {"#ServerFrame", "#ClientFrame", "#ResponseCreated"} <= set(page.links)
    assert len(set(page.ids)) == len(page.ids)
    assert {link for link in page.links if not link.startswith("#")} == {"openapi.json"}
    assert {link[1:] for link in page.links if link.startswith("#")} <= set(page.ids)
    for _, path, _ in operations_of(await document_of(engine, **options)):
        assert f"<code>{path}</code>" in response.text


async def test_the_docs_escape_what_they_show():
    from octavo_serve.docs_page import docs_page

    shown = docs_page(
        {
            "info": {"title": "<a>", "version": "1", "description": "<b>"},
            "paths": {"/<c>": {"get": {"tags": ["<d>"], "summary": "<e>", "responses": {}}}},
            "components": {
                "schemas": {"F": {"properties": {"<f>": {"enum": ["<g>"], "description": "<h>"}}}}
            },
        }
    )
    assert not re.search("<[acdefgh]>", shown)
    assert shown.count("&lt;") == 9


HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
THOUGHT_AND_CALL = '<think>hm</think>ok<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


@pytest.fixture
def talkative(engine: ScriptedEngine) -> ScriptedEngine:
    """It thinks, says something and calls a tool."""
    engine.frontend.parsers = Parsers(TOOL_PARSERS["hermes"], REASONING_PARSERS["qwen3"])
    engine.script = lambda prompt, params: say(THOUGHT_AND_CALL)
    return engine


ANSWERS = [
    ("/v1/completions", "Completion", {"prompt": ["a", "bc"]}),
    ("/v1/completions", "Completion", {"prompt": "ab", "logprobs": 1, "echo": True, "max_tokens": 3}),
    ("/v1/completions", "Completion", {"prompt": [1, 2], "prompt_logprobs": 1, "return_token_ids": True}),
    ("/v1/chat/completions", "ChatCompletion", {"messages": HI, "tools": [TOOL]}),
    ("/v1/chat/completions", "ChatCompletion", {"messages": HI, "logprobs": True, "top_logprobs": 2}),
    (
        "/v1/chat/completions",
        "ChatCompletion",
        {"messages": HI, "prompt_logprobs": 0, "return_token_ids": True, "max_tokens": 2},
    ),
    ("/v1/responses", "Response", {"input": "hi", "top_logprobs": 1}),
    (
        "/v1/responses",
        "Response",
        {
            "input": "hi",
            "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
            "max_output_tokens": 40,
        },
    ),
    ("/v1/messages", "Message", {"messages": HI, "max_tokens": 90}),
    (
        "/v1/messages",
        "Message",
        {
            "messages": HI,
            "max_tokens": 90,
            "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        },
    ),
    ("/v1/messages/count_tokens", "TokenCount", {"messages": HI}),
    ("/tokenize", "Tokens", {"prompt": "hi", "return_token_strs": True}),
    ("/detokenize", "DetokenizedText", {"tokens": [104, 105]}),
    ("/v1/completions", "Error", {"prompt": "a", "n": "b"}),
    ("/v1/messages", "AnthropicError", {"messages": HI}),
    ("/v1/models", "Models", None),
    ("/v1/models/models/tiny", "Model", None),
    ("/health", "Health", None),
    ("/load", "Load", None),
    ("/version", "Version", None),
]


POOLED = [
    ("/v1/embeddings", "Embeddings", {"input": ["a", "b"]}),
    ("/v1/embeddings", "Embeddings", {"input": "a", "encoding_format": "base64"}),
    ("/v1/score", "Scores", {"text_1": "a", "text_2": ["b", "c"]}),
    ("/v1/rerank", "Ranking", {"query": "a", "documents": ["b", "c"]}),
    ("/v1/rerank", "Ranking", {"query": "a", "documents": ["b"], "return_documents": False}),
    ("/v1/embeddings", "Error", {"input": []}),
]
STORED = {"Response", "InputItems", "DeletedResponse"}


async def test_every_answer_is_compared(document):
    """Here, those of servers that load in test_loading."""
    answers = set()
    for _, _, operation in operations_of(document):
        for answer in operation["responses"].values():
            for media in answer.get("content", {}).values():
                if "$ref" in media.get("schema", {}):
                    answers.add(media["schema"]["$ref"].rpartition("/")[2])
    compared = {name for _, name, _ in (*ANSWERS, *POOLED)} | STORED
    assert answers == compared - {"Error", "AnthropicError"} | {"Reloading", "Unhealthy"}


async def test_reloading_has_the_fields_that_are_described(document):
    engine = ScriptedEngine(EngineConfig(model="m", expert_placement="p.json", enable_expert_parallel=True))
    async with client_of(engine) as client:
        response = await client.post("/expert_placement/reload")
    assert response.status_code == 202, response.text
    check(document, "Reloading", response.json())


@pytest.mark.parametrize(("path", "name", "body"), POOLED)
async def test_answers_of_pooling_have_the_fields_that_are_described(document, path, name, body):
    async with client_of(PoolingEngine()) as client:
        response = await client.post(path, json=body)
    assert (response.status_code == 200) is (name != "Error"), response.text
    check(document, name, response.json())
    for key in response.json():
        without = {other: value for other, value in response.json().items() if other != key}
        with pytest.raises(jsonschema.ValidationError):
            check(document, name, without)


@pytest.mark.parametrize(("path", "name", "body"), ANSWERS)
async def test_answers_have_the_fields_that_are_described(talkative, document, path, name, body):
    async with client_of(talkative) as client:
        response = await client.request("GET" if body is None else "POST", path, json=body)
    assert (response.status_code == 200) is ("Error" not in name), response.text
    check(document, name, response.json())


async def test_stored_responses_have_the_fields_that_are_described(talkative, document):
    async with client_of(talkative) as client:
        made = (await client.post("/v1/responses", json={"input": "hi"})).json()
        path = f"/v1/responses/{made['id']}"
        check(document, "Response", (await client.get(path)).json())
        check(document, "InputItems", (await client.get(f"{path}/input_items")).json())
        check(document, "DeletedResponse", (await client.delete(path)).json())


async def test_a_documented_body_is_what_is_read(document):
    """The fields of the structs that handlers decode are those of the document."""
    from enginecore.frontend.openai import ChatBody

    fields = {field.encode_name for field in msgspec.structs.fields(ChatBody)}
    assert set(document["components"]["schemas"]["ChatBody"]["properties"]) == fields
