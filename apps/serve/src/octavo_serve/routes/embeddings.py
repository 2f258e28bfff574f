"""POST /v1/embeddings, /score and /rerank."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from enginecore import Prompt, Request, RequestOutput
from enginecore.frontend import openai
from octavo_serve.access import record_of
from octavo_serve.answers import JsonAnswer
from octavo_serve.auth import key_name
from octavo_serve.records import RequestRecord
from octavo_serve.routes.requests import answer_id, off_loop, raise_failure, read_body, server_of
from octavo_serve.state import ServerState

_NUMBERS_AT_ONCE = 65_536
"""Numbers of embeddings that are written out before other clients are looked after again."""


class _Job(NamedTuple):
    """Texts, ready to be embedded."""

    server: ServerState
    head: openai.Head
    requests: Sequence[Request]
    param: str
    """The field that the last of the texts came in."""
    record: RequestRecord
    key: str | None
    """Name of the client's key."""

    async def run(self) -> list[RequestOutput]:
        """Return the output of each text, in order."""
        outputs: dict[int, RequestOutput] = {}
        with openai.naming(self.param):
            async with self.server.open_stream(self.requests, self.key) as stream:
                self.record.follow(stream)
                async for index, output in stream:
                    self.record.add(index, output)
                    raise_failure(output)
                    outputs[index] = output
        return [outputs[index] for index in range(len(self.requests))]


async def create_embeddings(http: HttpRequest) -> Response:
    """Return the embedding of each input, in order."""
    fields, name = await _read(http)
    body = openai.read_embedding(fields)
    job = await _job(http, name, body, [("input", openai.embedding_inputs(body))], "embd")
    return JsonAnswer(_embeddings(job, body.encoding_format))


async def score(http: HttpRequest) -> Response:
    """Return how alike pairs of texts are: 1 with 1, 1 with each of N, or N with N."""
    fields, name = await _read(http)
    body = openai.read_score(fields)
    first, second, names = openai.score_inputs(body)
    job = await _job(http, name, body, list(zip(names, (first, second))), "score")

    def answer(outputs: list[RequestOutput]) -> dict[str, Any]:
        return openai.score_answer(job.head, outputs[: len(first)], outputs[len(first) :])

    return JsonAnswer(_encoded(job.run(), answer))


async def rerank(http: HttpRequest) -> Response:
    """Order documents by how alike they are to a query."""
    fields, name = await _read(http)
    body = openai.read_rerank(fields)
    openai.check_inputs(1 + len(body.documents), "documents")
    texts = [("query", [body.query]), ("documents", body.texts)]
    job = await _job(http, name, body, texts, "rerank")

    def answer(outputs: list[RequestOutput]) -> dict[str, Any]:
        return openai.rerank_answer(job.head, body, outputs[0], outputs[1:])

    return JsonAnswer(_encoded(job.run(), answer))


async def _read(http: HttpRequest) -> tuple[dict[str, Any], str]:
    """Return a body's fields, and the model's name in the answer."""
    server = server_of(http)
    _ = server.frontend  # requests are refused before their bodies are read
    fields = openai.decode(await read_body(http))
    return fields, openai.model_name(fields, server.names)


async def _job(
    http: HttpRequest,
    name: str,
    body: openai.PoolingBody,
    texts: Sequence[tuple[str, Sequence[str | list[int]]]],
    prefix: str,
) -> _Job:
    """Return the job of the texts of some fields, by the fields' names."""
    server = server_of(http)
    frontend = server.frontend
    plan = frontend.pooling_plan(body.params())

    def prepare(param: str, text: str | list[int]) -> Prompt:
        with openai.naming(param):
            return frontend.prepare_text(
                text,
                add_special_tokens=body.add_special_tokens is not False,
                truncate=body.truncate_prompt_tokens,
                truncation_side=body.truncation_side or "right",
                cache_salt=body.cache_salt,
            )

    prompts = await off_loop(
        sum(len(text) for _, listed in texts for text in listed),
        lambda: [prepare(param, text) for param, listed in texts for text in listed],
    )
    head = openai.Head(answer_id(http, prefix), int(time.time()), name)
    requests = [
        Request.to_pool(f"{head.id}-{next(server.numbers)}", prompt, plan, body.priority or 0)
        for prompt in prompts
    ]
    record = record_of(http)
    record.begin(head, [len(prompt.token_ids) for prompt in prompts])
    return _Job(server, head, requests, texts[-1][0], record, key_name(http.scope))


async def _embeddings(job: _Job, encoding: str | None) -> bytes:
    outputs = await job.run()
    entries, written = [], 0
    for index, output in enumerate(outputs):
        assert output.embedding is not None, "a request that has not failed has its embedding"
        entry = openai.embedding_entry(index, output.embedding, encoding)
        entries.append(msgspec.Raw(msgspec.json.encode(entry)))
        written += len(output.embedding)
        if written >= _NUMBERS_AT_ONCE:
            written = 0
            await asyncio.sleep(0)
    return msgspec.json.encode(openai.embedding_answer(job.head, outputs, entries))


async def _encoded(
    work: Coroutine[Any, Any, list[RequestOutput]], answer: Callable[[list[RequestOutput]], dict[str, Any]]
) -> bytes:
    return msgspec.json.encode(answer(await work))
