"""Requests made up from the OpenAPI document: no server error, and nothing that it does not describe."""

from collections.abc import Callable
from typing import Any, cast

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pooling_engine import PoolingEngine
from scripted_engine import ScriptedEngine

from octavo_serve.app import create_app
from octavo_serve.config import ServeConfig

BODIES = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/embeddings",
    "/score",
    "/rerank",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
)
"""Routes that take one; of those with several paths, one."""

UNKNOWN = {"response_id": "resp-1", "name": "other"}


def app_of(engine: ScriptedEngine, **options: Any) -> Any:
    return create_app(cast(Any, engine), ServeConfig(admin_routes=True, **options))


@pytest.fixture(scope="module")
def schema() -> Any:
    import schemathesis

    return schemathesis.openapi.from_asgi("/openapi.json", app_of(PoolingEngine()))


def body_schema(operation: Any) -> dict[str, Any]:
    reference = operation.definition.raw["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    return operation.schema.raw_schema["components"]["schemas"][reference.rpartition("/")[2]]


def few(case: Any, names: list[str]) -> Any:
    """Leave a body only what it needs and `names`: many fields together mostly contradict each other."""
    schema = body_schema(case.operation)
    groups = [set(group["required"]) for group in schema.get("anyOf", ())]
    given = {key for key, value in case.body.items() if value is not None}
    needed = next((group for group in groups if group <= given), set()).union(schema["required"], names)
    case.body = {key: value for key, value in case.body.items() if key in needed}
    return case


def valid(operation: Any, path: str) -> st.SearchStrategy[Any]:
    """Requests with a right body of few fields, and no model's name: most would be wrong."""
    from schemathesis import GenerationMode

    cases = operation.as_strategy(generation_mode=GenerationMode.POSITIVE)
    if path not in BODIES:
        return cases
    fields = sorted(set(body_schema(operation)["properties"]) - {"model"})
    return st.builds(few, cases, st.lists(st.sampled_from(fields), max_size=4))


def invalid(operation: Any, path: str) -> st.SearchStrategy[Any]:
    """Requests whose body is wrong somewhere; what only a chat template would refuse passes here."""
    from schemathesis import GenerationMode

    return operation.as_strategy(generation_mode=GenerationMode.NEGATIVE)


def send(
    schema: Any, method: str, path: str, make: Callable[[Any, str], st.SearchStrategy[Any]], examples: int
) -> set[int]:
    """Check the answers of a route to so many requests; return their statuses."""
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    statuses: set[int] = set()

    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=make(schema[path][method], path))
    def check(case: Any) -> None:
        response = case.call()
        statuses.add(response.status_code)
        case.validate_response(
            response,
            checks=[
                not_a_server_error,
                checks.status_code_conformance,
                checks.content_type_conformance,
                checks.response_headers_conformance,
                checks.response_schema_conformance,
            ],
        )

    check()
    return statuses


def test_routes_without_a_body(schema):
    for path, methods in schema.raw_schema["paths"].items():
        for method, operation in methods.items():
            if "requestBody" not in operation:
                assert send(schema, method, path, valid, 5) <= {200, 400, 404}


@pytest.mark.parametrize("path", BODIES)
def test_a_few_bodies(schema, path):
    assert 200 in send(schema, "post", path, valid, 20)
    assert 400 in send(schema, "post", path, invalid, 10)


@pytest.mark.slow
@pytest.mark.parametrize("path", BODIES)
def test_many_bodies(schema, path):
    assert 200 in send(schema, "post", path, valid, 150)
    assert 400 in send(schema, "post", path, invalid, 80)


def break_nothing(engine: ScriptedEngine) -> None:
    pass


def load(engine: ScriptedEngine) -> None:
    engine.is_ready = False


def die(engine: ScriptedEngine) -> None:
    engine.die("a worker died")


JSON = {"content-type": "application/json"}


@pytest.mark.anyio
@pytest.mark.parametrize("trouble", [break_nothing, load, die])
@pytest.mark.parametrize(
    ("content", "headers", "expected"),
    [
        (b"{}", {}, 415),
        (b"{}", {"content-type": "text/plain"}, 415),
        (b"{" + b" " * 1000, JSON, 413),
        (b"", JSON, 400),
        (b"[]", JSON, 400),
        (b"\xff", JSON, 400),
        (b'{"model": "other"}', JSON, 404),
    ],
)
async def test_refusals_are_described(trouble, content, headers, expected):
    engine = PoolingEngine()
    trouble(engine)
    transport = httpx.ASGITransport(app_of(engine, max_body_bytes=500), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        document = (await client.get("/openapi.json")).json()
        for path, methods in document["paths"].items():
            for method, operation in methods.items():
                response = await client.request(
                    method, path.format(**UNKNOWN), content=content, headers=headers
                )
                assert str(response.status_code) in operation["responses"], (method, path)
                if "requestBody" in operation:
                    assert response.status_code == (expected if trouble is break_nothing else 503), path
