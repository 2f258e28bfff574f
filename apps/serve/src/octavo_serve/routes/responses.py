"""OpenAI's Responses API: /v1/responses, and what was stored of it."""

import asyncio
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from enginecore import RequestOutput
from enginecore.frontend import openai
from octavo_serve.errors import ApiError
from octavo_serve.formats import responses_answer
from octavo_serve.formats.responses_answer import Asked, ResponseEvents
from octavo_serve.formats.responses_body import Item, ResponsesBody, chat_fields, check, input_items
from octavo_serve.response_store import ResponseStore, StoredResponse
from octavo_serve.routes.generate import Names, client_of, prepare_chat, renaming
from octavo_serve.routes.requests import read_body, server_of

_NAMES = Names(
    {
        "messages": "input",
        "prompt": "input",
        "max_tokens": "max_output_tokens",
        "response_format": "text.format",
    },
    {"json_schema.": "", ".function.": ".", "tool_choice.allowed_tools.": "tool_choice."},
)


async def create_response(http: HttpRequest) -> Response:
    """Answer an input, as the next turn after the response that it names if it names one."""
    server = server_of(http)
    server.require_ready()
    raw = await read_body(http)
    fields = openai.decode(raw)
    name = openai.model_name(fields, server.names)
    body = openai.convert(fields, ResponsesBody)
    check(body)
    items = await _history(server.stored, body.previous_response_id) + input_items(body)
    with renaming(_NAMES):
        chat_body = {"model": name, **chat_fields(body, items)}
        chat = await prepare_chat(server, chat_body, len(raw), client_of(http, "resp"))
    asked = Asked(chat.head, body, chat.body, chat.prompt, chat.parsers, server.vocabulary)

    def keep(response: Mapping[str, Any]) -> None:
        if body.store is not False:
            server.stored.put(StoredResponse(dict(response), items))

    def answer(output: RequestOutput) -> dict[str, Any]:
        response = responses_answer.response(asked, output)
        keep(response)
        return response

    return chat.job(lambda framing: ResponseEvents(asked, keep), answer, _NAMES).response()


async def show_response(http: HttpRequest) -> Response:
    """Return a stored response."""
    return JSONResponse((await _stored(http)).response)


async def delete_response(http: HttpRequest) -> Response:
    """Forget a stored response."""
    response_id = http.path_params["response_id"]
    if not server_of(http).stored.remove(response_id):
        raise _missing(response_id)
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


async def list_input_items(http: HttpRequest) -> Response:
    """Return the items before a stored response's own."""
    items = (await _stored(http)).items
    data = [{"id": f"item_{place}", "type": "message", **item} for place, item in enumerate(items)]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]}
    return JSONResponse({"object": "list", "data": data, "has_more": False, **ends})


async def _history(stored: ResponseStore, previous: str | None) -> list[Item]:
    if previous is None:
        return []
    found = await asyncio.to_thread(stored.get, previous)
    if found is None:
        message = f"there is no response {previous!r:.200}: it was not stored here, or is forgotten"
        raise ApiError(404, message, "previous_response_id", "previous_response_not_found")
    return found.items + found.response["output"]


async def _stored(http: HttpRequest) -> StoredResponse:
    response_id = http.path_params["response_id"]
    found = await asyncio.to_thread(server_of(http).stored.get, response_id)
    if found is None:
        raise _missing(response_id)
    return found


def _missing(response_id: str) -> ApiError:
    return ApiError(404, f"there is no response {response_id!r:.200}", "response_id", "not_found")
