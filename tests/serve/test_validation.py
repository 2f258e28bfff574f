"""What the server says to requests that are wrong, and to odd ones that are right."""

from typing import Any, cast

import httpx
import pytest
from fastapi.routing import APIRoute

from octavo_serve.app import create_app
from octavo_serve.config import ServeConfig

pytestmark = pytest.mark.anyio

MESSAGES = [{"role": "user", "content": "hi"}]
JSON = {"content-type": "application/json"}
ROUTES = ("/v1/completions", "/v1/chat/completions")


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error, after a look at its shape."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    content = response.json()
    assert list(content) == ["error"]
    assert set(content["error"]) == {"message", "type", "param", "code"}
    assert content["error"]["type"] == ("invalid_request_error" if status < 500 else "server_error")
    assert content["error"]["code"] is None or isinstance(content["error"]["code"], str)
    assert "Traceback" not in response.text
    return content["error"]


async def complete(client: httpx.AsyncClient, **body: Any) -> httpx.Response:
    return await client.post("/v1/completions", json={"prompt": "hi", **body})


async def chat(client: httpx.AsyncClient, **body: Any) -> httpx.Response:
    return await client.post("/v1/chat/completions", json={"messages": MESSAGES, **body})


NO_REQUESTS = [
    b"",
    b"{",
    b"[]",
    b'"x"',
    b"null",
    b"7",
    b"{} x",
    b'{"prompt": "\xff"}',
    b'{"prompt": "\\ud800"}',
    b'{"temperature": NaN}',
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b'{"prompt":' + b"[" * 100_000,
]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    "content",
    NO_REQUESTS,
    ids=lambda content: content[:20].decode(errors="replace"),
)
async def test_bodies_that_are_no_request(client, route, content):
    error_of(await client.post(route, content=content, headers=JSON))


HALVES = [
    (rb'{"prompt": "\ud800"}', "prompt", r"\ud800", 12),
    (rb'{"prompt": "hi", "stop": ["ok", "a\uDFFFb"]}', "stop", r"\uDFFF", 34),
    (rb'{"prompt": "\ud83d\ude00 \ude00\ud83d"}', "prompt", r"\ude00", 25),
    (rb'{"prompt": "\\ud800 \\\ud800"}', "prompt", r"\ud800", 22),
    (rb'{"messages": [{"role": "user", "content": "\ud83d\u0041"}]}', "messages", r"\ud83d", 43),
    (rb'{"prompt": "hi", "\udc00": 1}', None, r"\udc00", 18),
]


@pytest.mark.parametrize(("content", "param", "half", "byte"), HALVES, ids=str)
async def test_half_of_a_surrogate_pair_is_named(client, content, param, half, byte):
    for route in (*ROUTES, "/v1/responses", "/tokenize"):
        error = error_of(await client.post(route, content=content, headers=JSON))
        assert error["param"] == param
        where = f"{param or 'the body'}: {half} at byte {byte} is half of a surrogate pair"
        assert error["message"].startswith(where)


@pytest.mark.parametrize(
    "content", [rb'{"prompt": "\ud83d\ude00"}', rb'{"prompt": "\\ud800"}', rb'{"prompt": "\uFFFD"}'], ids=str
)
async def test_whole_characters_are_taken(client, content):
    assert (await client.post(ROUTES[0], content=content, headers=JSON)).status_code == 200


@pytest.mark.parametrize(
    "content", [b'{"a": "\\ud800"', b'{"a": "\\ud800', b'{"a": \\ud800}', b'["\\ud800"]']
)
async def test_what_is_wrong_otherwise_too_is_no_matter_of_surrogates(client, content):
    error = error_of(await client.post(ROUTES[0], content=content, headers=JSON))
    assert "surrogate pair at" not in error["message"]
    assert "half of" not in error["message"]


@pytest.mark.parametrize("route", ROUTES)
async def test_content_type(client, route):
    content = b'{"prompt": "hi", "messages": [{"role": "user", "content": "hi"}]}'
    for wrong in ({}, {"content-type": "text/plain"}, {"content-type": "application/x-www-form-urlencoded"}):
        error_of(await client.post(route, content=content, headers=wrong), 415)
    for right in ("application/json; charset=utf-8", "Application/JSON"):
        assert (await client.post(route, content=content, headers={"content-type": right})).status_code == 200


async def test_methods_and_paths(client):
    response = await client.get("/v1/completions")
    assert error_of(response, 405)["message"] == "GET is not allowed on /v1/completions"
    assert (response.headers["allow"], response.json()["error"]["code"]) == ("POST", "method_not_supported")
    assert (await client.head("/v1/completions")).headers["allow"] == "POST"
    assert (await client.delete("/v1/models/tiny")).headers["allow"] == "GET, HEAD"
    upgrade = await client.get("/v1/stream")
    assert "is a WebSocket" in error_of(upgrade, 426)["message"]
    assert upgrade.headers["upgrade"] == "websocket"
    assert (
        error_of(await client.post("/v1/nothing", json={}), 404)["message"] == "there is no route /v1/nothing"
    )


@pytest.mark.parametrize("root_path", ["", "/llm"])
async def test_405_lists_every_method_of_the_path(engine, root_path):
    """RFC 9110, section 15.5.6."""
    app = create_app(cast(Any, engine), ServeConfig(admin_routes=True, root_path=root_path))
    methods: dict[str, set[str]] = {}
    for route in app.routes:
        if isinstance(route, APIRoute):
            methods.setdefault(route.path, set()).update(route.methods)
    assert methods["/v1/responses/{response_id}"] == {"GET", "HEAD", "DELETE"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        for path, known in methods.items():
            concrete = path.replace("{response_id}", "resp-1").replace("{name:path}", "tiny")
            for method in {"GET", "POST", "PUT", "PATCH", "DELETE"} - known:
                response = await client.request(method, root_path + concrete)
                assert response.status_code == 405, (method, path)
                assert response.headers["allow"] == ", ".join(sorted(known)), (method, path)


async def test_the_root_path_itself_leads_to_the_page(engine):
    app = create_app(cast(Any, engine), ServeConfig(root_path="/llm"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        response = await client.get("/llm?key=a")
        assert (response.status_code, response.headers["location"]) == (307, "/llm/")
        assert (await client.get("/llm/")).status_code == 200


async def test_a_duplicate_key_is_no_fault_of_the_server(client):
    content = b'{"prompt": "hi", "max_tokens": 1, "max_tokens": 2}'
    response = await client.post("/v1/completions", content=content, headers=JSON)
    assert response.json()["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("extra", [{}, {"stream": True}, {"temperature": "hot", "messages": 5, "n": -1}])
async def test_wrong_model(client, route, extra):
    error = error_of(await client.post(route, json={"model": "other", **extra}), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")


async def test_model_names(client):
    for name in ("tiny", "alias"):
        assert (await complete(client, model=name)).json()["model"] == name
    for body in ({}, {"model": None}):
        assert (await chat(client, **body)).json()["model"] == "tiny"
    error_of(await complete(client, model=""), 404)
    assert error_of(await complete(client, model=5))["param"] == "model"


async def test_unknown_fields_are_ignored(client):
    assert (await complete(client, temperator=0, user="me", metadata={"a": 1})).status_code == 200
    assert (await chat(client, store=True, parallel_tool_calls=False, user="me")).status_code == 200


async def test_null_is_absent(client):
    from enginecore.frontend.openai.bodies import ChatBody, CompletionBody

    nulls = dict.fromkeys(CompletionBody.__struct_fields__)
    assert (await complete(client, **{**nulls, "prompt": "hi"})).json()["usage"]["completion_tokens"] == 3
    nulls = dict.fromkeys(ChatBody.__struct_fields__)
    assert (await chat(client, **{**nulls, "messages": MESSAGES})).status_code == 200


@pytest.mark.parametrize(
    "field, value",
    [
        ("temperature", "0.5"),
        ("temperature", True),
        ("temperature", [1]),
        ("stream", "yes"),
        ("stream", 1),
        ("max_tokens", True),
        ("max_tokens", 1.5),
        ("max_tokens", "5"),
        ("max_tokens", 10**30),
        ("top_k", 10**30),
        ("n", 1.0),
        ("stop", [1]),
        ("stop", {"a": "b"}),
        ("logit_bias", {"65": "x"}),
        ("logit_bias", [65]),
        ("seed", "s"),
        ("stop_token_ids", ["a"]),
        ("stream_options", True),
        ("ignore_eos", "true"),
        ("cache_salt", 5),
        ("priority", "high"),
    ],
)
async def test_wrong_types_name_the_field(client, field, value):
    for send in (complete, chat):
        error = error_of(await send(client, **{field: value}))
        assert error["param"] == field
        assert field in error["message"]


@pytest.mark.parametrize(
    "field, value",
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("temperature", -0.1),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 2),
        ("n", 0),
        ("n", -1),
        ("n", 10**6),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1),
        ("stop", [""]),
        ("min_tokens", -1),
        ("logit_bias", {"abc": 1}),
        ("logit_bias", {"-1": 1}),
        ("allowed_token_ids", []),
        ("cache_salt", ""),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", 21),
    ],
)
async def test_out_of_range_names_the_field(client, field, value):
    for send in (complete, chat):
        assert error_of(await send(client, **{field: value}))["param"] == field


@pytest.mark.parametrize("n", [0, -1, 129, 10**6])
async def test_n_has_the_routes_own_limit(client, n):
    for send in (complete, chat):
        error = error_of(await send(client, n=n))
        assert (error["message"], error["param"]) == (f"n must be between 1 and 128, got {n}", "n")
        beams = error_of(await send(client, n=n, use_beam_search=True))
        assert beams["message"] == error["message"]


@pytest.mark.parametrize(
    "extra", [{"temperature": 1e-45}, {"temperature": 2.5}, {"logit_bias": {"65": 1e9}}, {"top_k": -1}]
)
async def test_edges_that_are_allowed(client, extra):
    assert (await complete(client, **extra)).status_code == 200


async def test_combinations_that_contradict(client):
    error_of(await complete(client, min_tokens=7, max_tokens=6))
    error_of(await complete(client, n=2, temperature=0))
    for options in ({}, {"include_usage": True}, {"include_usage": False}):
        for stream in (None, False):
            error = error_of(await chat(client, stream_options=options, stream=stream))
            assert error["param"] == "stream_options"


@pytest.mark.parametrize(
    "prompt, count", [("a", 1), (["a", "b"], 2), ([1, 2], 1), ([[1], [2, 3]], 2), (["a"] * 1000, 1000)]
)
async def test_prompts_and_their_choices(client, engine, prompt, count):
    answer = (await complete(client, prompt=prompt)).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(count))
    tokens = sum(len(request.prompt.token_ids) for request in engine.requests)
    assert answer["usage"]["prompt_tokens"] == tokens
    assert answer["usage"]["completion_tokens"] == 3 * count


NO_PROMPTS = [
    *("", [""], [], [[]], ["a", ""], None, [None], 5, {"a": 1}),
    *([1, "a"], [[1], ["a"]], [[[1]]], [1.0], [True]),
    *([-1], [[-1]], [[320]], [[9223372036854775808]]),
]


@pytest.mark.parametrize("prompt", NO_PROMPTS, ids=str)
async def test_prompts_that_are_none(client, engine, prompt):
    assert error_of(await complete(client, prompt=prompt))["param"] == "prompt"
    assert [stream for stream in engine.streams if not stream.ended] == []
    assert (await complete(client)).status_code == 200


async def test_prompt_missing(client):
    assert error_of(await client.post("/v1/completions", json={}))["param"] == "prompt"


async def test_more_choices_than_one_request_may_have(client, engine):
    assert "4096" in error_of(await complete(client, prompt=["a"] * 1000, n=5))["message"]
    assert engine.requests == []


@pytest.mark.parametrize(
    "messages",
    [
        [],
        {},
        "hi",
        [5],
        [{}],
        [{"role": "wizard", "content": "hi"}],
        [{"role": 5, "content": "hi"}],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "assistant", "content": "hi", "tool_calls": [{"id": "1"}]}],
        [{"role": "assistant", "content": "hi", "tool_calls": "f"}],
        [{"role": "assistant", "tool_calls": [{"type": "x", "function": {"name": "f"}}]}],
        [{"role": "assistant", "tool_calls": []}],
        [{"role": "assistant", "content": "hi", "function_call": {"name": "f", "arguments": ""}}],
        [{"role": "user", "content": "hi", "tool_calls": [{"function": {"name": "f"}}]}],
        [{"role": "tool", "tool_call_id": "1"}],
        [{"role": "function", "name": "f", "content": "hi"}],
    ],
    ids=str,
)
async def test_messages_that_are_none(client, messages):
    assert error_of(await chat(client, messages=messages))["param"] == "messages"


async def test_messages_missing(client):
    assert error_of(await client.post("/v1/chat/completions", json={}))["param"] == "messages"


NOT_SUPPORTED = [
    ("tools", [{"type": "function", "function": {"name": "f"}}]),
    ("tool_choice", "required"),
    ("tool_choice", {"type": "function", "function": {"name": "f"}}),
    ("functions", [{"name": "f"}]),
    ("function_call", {"name": "f"}),
    ("response_format", "json"),
    ("logits_processors", ["a"]),
    ("prompt_embeds", "AAAA"),
    ("modalities", ["audio"]),
    ("chat_template", "{{ messages }}"),
    ("echo", True),
    ("chat_template_kwargs", {"chat_template": "{{ messages }}"}),
    ("chat_template_kwargs", {"tools": []}),
    ("chat_template_kwargs", {"cache_salt": "x"}),
    ("truncate_prompt_tokens", 5),
    ("n_predict", 5),
    ("repeat_penalty", 1.1),
    ("grammar", "root ::= x"),
    ("json_schema", {}),
]


@pytest.mark.parametrize("field, value", NOT_SUPPORTED)
async def test_what_is_not_supported_is_refused_by_name(client, field, value):
    error = error_of(await chat(client, **{field: value}))
    assert error["param"] == field
    assert field in error["message"]


@pytest.mark.parametrize(
    "extra",
    [
        {"tools": []},
        {"tools": [], "tool_choice": "auto"},
        {"tool_choice": "none"},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
        {"functions": []},
        {"function_call": "none"},
        {"response_format": {"type": "text"}},
        {"modalities": ["text"]},
        {"use_beam_search": False},
        {"add_special_tokens": False},
        {"add_special_tokens": True},
        {"echo": False},
        {"stop": ""},
        {"repeat_penalty": 1.0},
    ],
    ids=str,
)
async def test_forms_that_ask_for_nothing_pass(client, extra):
    assert (await chat(client, **extra)).status_code == 200


async def test_best_of(client):
    assert (await complete(client, best_of=1)).status_code == 200
    assert (await complete(client, best_of=2, n=2)).status_code == 200
    assert error_of(await complete(client, best_of=1, n=2))["param"] == "best_of"
    assert "not supported" in error_of(await complete(client, best_of=3))["message"]
    assert error_of(await complete(client, suffix="end"))["param"] == "suffix"


async def test_completions_logprobs_limits(client):
    for good in (None, 0, 1, 20):
        assert (await complete(client, logprobs=good)).status_code == 200
    for bad in (-1, 21, 10**6, True):
        assert error_of(await complete(client, logprobs=bad))["param"] == "logprobs"


async def test_chat_logprobs_limits(client):
    for good in (None, 0, 2, 20):
        assert (await chat(client, logprobs=True, top_logprobs=good)).status_code == 200
    for bad in (-1, 21, 10**6):
        assert error_of(await chat(client, logprobs=True, top_logprobs=bad))["param"] == "top_logprobs"
    for logprobs in (None, False):
        assert error_of(await chat(client, logprobs=logprobs, top_logprobs=2))["param"] == "top_logprobs"
    assert error_of(await chat(client, logprobs=5))["param"] == "logprobs"


async def test_a_body_beyond_the_limit(engine):
    app = create_app(cast(Any, engine), ServeConfig(max_body_bytes=100))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        assert "larger than 100 bytes" in error_of(await complete(client, prompt="a" * 200), 413)["message"]
        headers = {"content-type": "application/json"}

        async def pieces():
            for _ in range(3):
                yield b"a" * 50

        unannounced = await client.post("/v1/completions", content=pieces(), headers=headers)
        assert unannounced.status_code == 413
        assert (await complete(client, prompt="hi")).status_code == 200


async def test_a_fault_of_the_server_is_told_without_details(client, engine, caplog):
    def broken(prompt, params):
        raise KeyError("secret")

    engine.script = broken
    error = error_of(await complete(client), 500)
    assert "secret" not in error["message"]
