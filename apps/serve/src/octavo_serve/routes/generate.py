"""POST /v1/completions and /v1/chat/completions."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from enginecore.frontend.openai import answers, conversion, validation
from enginecore.frontend.openai.bodies import ChatBody, CompletionBody
from octavo_serve.chunks import ChatChunks, Chunks, CompletionChunks, error_event
from octavo_serve.errors import as_api_error
from octavo_serve.generation import Generation, Interrupted
from octavo_serve.responses import EventStream, JsonAnswer
from octavo_serve.routes.requests import answer_id, off_loop, read_body, server_of

if TYPE_CHECKING:
    from enginecore.frontend.frontend import Prompt


async def create_completion(request: Request) -> Response:
    """Continue one or several prompts."""
    server = server_of(request)
    frontend = server.frontend
    raw = await read_body(request)
    name = validation.model_name(raw, server.names)
    body = validation.read_completion(raw, server.engine.config.max_logprobs)
    params = conversion.completion_params(body, frontend.sampling_defaults)
    texts = conversion.completion_prompts(body.prompt)
    conversion.check_choices(len(texts), body.samples)
    special = body.add_special_tokens is not False
    prompts = await off_loop(
        sum(map(len, texts)),
        lambda: [frontend.prepare_prompt(text, add_special_tokens=special) for text in texts],
    )
    head = answers.Head(answer_id(request, "cmpl"), int(time.time()), name)
    limit = server.max_model_len
    each = [conversion.fit_default(body, params, len(prompt.token_ids), limit) for prompt in prompts]
    generation = Generation(server, head.id, prompts, each, body)
    if body.stream:
        chunks = CompletionChunks(head, body, _total_length(prompts), len(prompts), server.vocabulary)
        return EventStream(_events(generation, chunks))
    return JsonAnswer(_completion(generation, head, body, server.vocabulary))


async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    server = server_of(request)
    frontend = server.frontend
    raw = await read_body(request)
    name = validation.model_name(raw, server.names)
    body = validation.read_chat(raw, server.engine.config.max_logprobs)
    params = conversion.chat_params(body, frontend.sampling_defaults)
    options = conversion.template_options(body)
    prompt = await off_loop(len(raw), lambda: frontend.prepare_chat(body.messages, **options))
    head = answers.Head(answer_id(request, "chatcmpl"), int(time.time()), name)
    generation = Generation(server, head.id, [prompt], [params], body)
    if body.stream:
        chunks = ChatChunks(head, body, _total_length([prompt]), server.vocabulary)
        return EventStream(_events(generation, chunks))
    return JsonAnswer(_chat(generation, head, body, server.vocabulary))


async def _completion(
    generation: Generation, head: answers.Head, body: CompletionBody, vocabulary: answers.Vocabulary
) -> bytes:
    async with generation:
        outputs = await generation.finished()
    return msgspec.json.encode(answers.completion_answer(head, body, outputs, vocabulary))


async def _chat(
    generation: Generation, head: answers.Head, body: ChatBody, vocabulary: answers.Vocabulary
) -> bytes:
    async with generation:
        (output,) = await generation.finished()
    return msgspec.json.encode(answers.chat_answer(head, body, output, vocabulary))


async def _events(generation: Generation, chunks: Chunks) -> AsyncGenerator[bytes, None]:
    """Yield a stream's events; an error is raised while none was yielded, and is an event later."""
    started = False
    try:
        async with generation, aclosing(generation.outputs()) as outputs:
            async for prompt, output in outputs:
                events = chunks.encode(prompt, output)
                if events:
                    started = True
                    yield events
    except Interrupted:
        if not started:
            raise
        yield chunks.abort()
    except Exception as error:
        if not started:
            raise
        yield error_event(as_api_error(error))
        return
    yield chunks.end()


def _total_length(prompts: list["Prompt"]) -> int:
    return sum(len(prompt.token_ids) for prompt in prompts)
