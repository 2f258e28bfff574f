"""GET /v1/models, and the routes on text: POST /tokenize and /detokenize."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from enginecore.errors import RequestError
from enginecore.frontend import openai
from octavo_serve.routes.requests import off_loop, read_body, server_of

if TYPE_CHECKING:
    from enginecore import Frontend


class TokenizeBody(msgspec.Struct):
    """A text, or the messages of a chat, with all that the chat's route makes a prompt of."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct):
    """Token ids."""

    tokens: list[openai.Integer]


async def list_models(request: Request) -> Response:
    """List the served model under each of its names."""
    server = server_of(request)
    return JSONResponse({"object": "list", "data": [_card(request, name) for name in server.names]})


async def show_model(request: Request) -> Response:
    """Describe the served model under one of its names."""
    name = request.path_params["name"]
    if name not in server_of(request).names:
        raise openai.ModelNotFound(f"there is no model {name!r:.200} here")
    return JSONResponse(_card(request, name))


async def tokenize(request: Request) -> Response:
    """Return the token ids of a text or of a chat."""
    server = server_of(request)
    frontend = server.frontend
    tokenizer = frontend.require_tokenizer()
    raw = await read_body(request)
    fields = openai.decode(raw)
    openai.model_name(fields, server.names)
    body = openai.convert(fields, TokenizeBody)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give either prompt or messages", "prompt")
    if body.prompt is not None:
        text, special = body.prompt, body.add_special_tokens is not False
        ids = await off_loop(len(text), lambda: tokenizer.encode(text, add_special_tokens=special))
    else:
        chat = openai.read_chat(fields, -1)
        options = openai.template_options(chat)
        prompt = await off_loop(len(raw), lambda: frontend.prepare_chat(chat.messages, **options))
        ids = list(prompt.token_ids)
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": server.max_model_len, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = [tokenizer.token_text(token) for token in ids]
    return JSONResponse(answer)


async def detokenize(request: Request) -> Response:
    """Return the text of token ids."""
    server = server_of(request)
    frontend = server.frontend
    frontend.require_tokenizer()
    raw = await read_body(request)
    return await off_loop(len(raw), lambda: _detokenized(raw, frontend, server.names))


def _detokenized(raw: bytes, frontend: "Frontend", names: Sequence[str]) -> Response:
    fields = openai.decode(raw)
    openai.model_name(fields, names)
    tokens = openai.convert(fields, DetokenizeBody).tokens
    # A model may have more ids than its tokenizer; those stand for no text.
    limits = frontend.limits
    size = max(frontend.require_tokenizer().vocab_size, 0 if limits is None else limits.vocab_size)
    beyond = next((token for token in tokens if not 0 <= token < size), None)
    if beyond is not None:
        raise RequestError(f"tokens holds {beyond}, but the vocabulary ends at {size - 1}", "tokens")
    return JSONResponse({"prompt": frontend.detokenize(tokens)})


def _card(request: Request, name: str) -> dict[str, Any]:
    server = server_of(request)
    return {
        "id": name,
        "object": "model",
        "created": server.created,
        "owned_by": "octavo",
        "root": server.engine.config.model,
        "parent": None,
        "max_model_len": server.max_model_len,
    }
