"""POST /v1/messages and /v1/messages/count_tokens, Anthropic's API."""

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from enginecore.frontend import openai
from octavo_serve.formats import anthropic_answer
from octavo_serve.formats.anthropic_body import CountBody, MessagesBody, chat_fields
from octavo_serve.routes.generate import Names, client_of, prepare_chat, renaming
from octavo_serve.routes.requests import off_loop, read_body, server_of

_NAMES = Names(
    {"prompt": "messages", "stop": "stop_sequences", "response_format": "output_config.format"},
    {"json_schema.": "", ".function.parameters": ".input_schema", ".function.": "."},
)


async def create_message(http: HttpRequest) -> Response:
    """Answer a conversation."""
    server = server_of(http)
    server.require_ready()
    raw = await read_body(http)
    fields = openai.decode(raw)
    name = openai.model_name(fields, server.names)
    body = openai.convert(fields, MessagesBody)
    with renaming(_NAMES):
        chat_body = {"model": name, **chat_fields(body)}
        chat = await prepare_chat(server, chat_body, len(raw), client_of(http, "msg"))
    return chat.job(
        lambda framing: anthropic_answer.MessageEvents(chat.head, chat.body, chat.prompt, chat.parsers),
        lambda output: anthropic_answer.message(chat.head, chat.body, output, chat.parsers),
        _NAMES,
    ).response()


async def count_tokens(http: HttpRequest) -> Response:
    """Return how many tokens a conversation has as a prompt."""
    server = server_of(http)
    frontend = server.frontend
    raw = await read_body(http)
    fields = openai.decode(raw)
    openai.model_name(fields, server.names)
    with renaming(_NAMES):
        chat = openai.read_chat(chat_fields(openai.convert(fields, CountBody)), -1)
        options = openai.template_options(chat)
        prompt = await off_loop(len(raw), lambda: frontend.prepare_chat(chat.messages, **options))
    return JSONResponse({"input_tokens": len(prompt.token_ids)})
