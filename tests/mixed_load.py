"""Many different requests at once over HTTP, and their answers in a form that can be compared.

What a stream says adds up to what the whole answer says. Prompts differ, and each run has a cache salt of its
own, so that nothing is found in the prefix cache.
"""

import asyncio
import itertools
import json
import math
import random
import string
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

import byte_tokenizer
from checkpoints import llama_config, save_random

TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
TOLERANCE = 1e-4
"""Of a log probability."""
PATIENCE_S = 240
"""Seconds after which an answer is given up, on the slowest machine."""

Body = dict[str, Any]
Answer = dict[str, Any]
"""`choices` and `usage`; or `error` (of the server) or `cut` (the connection ended), each a text."""

_salts = itertools.count()


def write_model(path: Path) -> Path:
    """Write a checkpoint with logits far apart, and a tokenizer with a chat template."""
    save_random(llama_config(hidden_size=32, intermediate_size=48, max_position_embeddings=1024), path)
    byte_tokenizer.save(path, chat_template=TEMPLATE)
    return path


def mixed(count: int, *, least: int = 40, most: int = 90) -> list[Body]:
    """Return bodies of `count` requests, which generate `least` to `most` tokens if nothing stops them."""
    return [_mixed(number, least, most) for number in range(count)]


def equal(count: int, *, tokens: int) -> list[Body]:
    """Return bodies of `count` requests that differ in nothing but what the prompt says."""
    return [
        {"prompt": _text(random.Random(number), 24), "temperature": 0, "ignore_eos": True, "stream": True}
        | {"max_tokens": tokens, "stream_options": {"include_usage": True}}
        for number in range(count)
    ]


def _mixed(number: int, least: int, most: int) -> Body:
    draw = random.Random(number)
    text = _text(draw, draw.randint(3, 60))
    body: Body = {"prompt": text, "max_tokens": draw.randint(least, most), "ignore_eos": True}
    body |= {"temperature": 0} if number % 2 else {"temperature": 1.0, "seed": number, "top_p": 0.95}
    match number % 8:
        case 0:
            body |= {"stream": True, "n": 2, "presence_penalty": 0.5, "frequency_penalty": 0.3}
        case 1:
            body |= {"stream": True, "logprobs": 3}
        case 2:
            body |= {"n": 2, "logprobs": 2, "min_tokens": 20, "ignore_eos": False}
        case 3:
            body |= {"prompt_logprobs": 2, "logprobs": 1}
        case 4:
            body |= {"stream": True, "messages": _chat(text), "logprobs": True, "top_logprobs": 2}
        case 5:
            body |= {"stream": True, "stop": ["e", "Q", "t"], "min_tokens": 25, "repetition_penalty": 1.2}
        case 6:
            body |= {"stream": True, "top_k": 20, "min_p": 0.01, "logprobs": 0}
        case 7:
            body |= {"messages": _chat(text), "bad_words": ["a", "the"], "logprobs": True}
    if body.get("stream"):
        body["stream_options"] = {"include_usage": True}
    if "messages" in body:
        del body["prompt"]
    return body


def _text(draw: random.Random, length: int) -> str:
    return "".join(draw.choices(string.ascii_letters + " ", k=length))


def _chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}, {"role": "user", "content": "and?"}]


class Load:
    """Requests that run at once."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._salt = f"run {next(_salts)}"
        self.on_chunk: Callable[[int], None] = lambda count: None
        """Called with the number of pieces of streams that have come so far."""
        self._chunks = 0
        self.ports: dict[int, int] = {}
        """Of the client's end of the connection, by the request's index."""

    async def run(self, bodies: Sequence[Body]) -> list[Answer]:
        """Send all requests at once; return their answers, in order."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=self._url, timeout=PATIENCE_S, limits=limits) as client:
            return await asyncio.gather(*(self.ask(client, *item) for item in enumerate(bodies)))

    async def ask(self, client: httpx.AsyncClient, index: int, body: Body) -> Answer:
        """Return the answer to one request."""
        route = "/v1/chat/completions" if "messages" in body else "/v1/completions"

        async def trace(event: str, info: dict[str, Any]) -> None:
            if event == "connection.connect_tcp.complete":
                _, self.ports[index] = info["return_value"].get_extra_info("client_addr")

        sent = {"json": body | {"cache_salt": self._salt}, "extensions": {"trace": trace}}
        try:
            async with client.stream("POST", route, **sent) as response:
                if response.status_code != 200:
                    return {"error": f"{response.status_code} {(await response.aread()).decode()}"}
                if body.get("stream"):
                    return await self._stream(response)
                return _comparable(json.loads(await response.aread()))
        except httpx.TransportError as error:
            return {"cut": repr(error)}

    async def _stream(self, response: httpx.Response) -> Answer:
        choices: dict[int, Answer] = {}
        usage = None
        async for line in _lines(response):
            if line == "data: [DONE]":
                return {"choices": [choices[index] for index in sorted(choices)], "usage": usage}
            if not line.startswith("data: "):
                continue
            self._chunks += 1
            self.on_chunk(self._chunks)
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                return {"error": str(chunk["error"])}
            usage = chunk.get("usage") or usage
            for piece in chunk["choices"]:
                _join(choices.setdefault(piece["index"], {"text": ""}), _plain(piece))
        return {"cut": "the stream ended without [DONE]"}


async def _lines(response: httpx.Response) -> AsyncIterator[str]:
    """Yield lines that end in a line feed: to httpx other characters, which a text may hold, end one too."""
    rest = b""
    async for data in response.aiter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line.decode()


def _comparable(answer: Answer) -> Answer:
    return {"choices": [_plain(choice) for choice in answer["choices"]], "usage": answer["usage"]}


def _plain(choice: Answer) -> Answer:
    """Return what a choice says, in the form that is the same for chat, completions and pieces of them."""
    said = choice.get("message") or choice.get("delta") or choice
    text = said.get("text") or said.get("content") or ""
    kept = {key: choice[key] for key in ("finish_reason", "stop_reason", "prompt_logprobs") if key in choice}
    logprobs = {key: value for key, value in (choice.get("logprobs") or {}).items() if value is not None}
    return {"text": text, "logprobs": logprobs} | {key: kept[key] for key in kept if kept[key] is not None}


def _join(whole: Answer, piece: Answer) -> None:
    whole["text"] += piece.pop("text")
    joined = whole.setdefault("logprobs", {})
    for key, values in piece.pop("logprobs").items():
        joined[key] = joined.get(key, []) + values
    whole.update(piece)


def difference(ours: Any, right: Any, where: str = "") -> str | None:
    """Return where two answers differ first, None if they are the same; numbers may be TOLERANCE apart."""
    if isinstance(ours, float) and isinstance(right, float):
        return None if math.isclose(ours, right, rel_tol=0, abs_tol=TOLERANCE) else _said(ours, right, where)
    if isinstance(ours, dict) and isinstance(right, dict) and ours.keys() == right.keys():
        found = (difference(ours[key], right[key], f"{where}.{key}") for key in right)
    elif isinstance(ours, list) and isinstance(right, list) and len(ours) == len(right):
        found = (difference(*pair, f"{where}[{place}]") for place, pair in enumerate(zip(ours, right)))
    else:
        return None if ours == right else _said(ours, right, where)
    return next((text for text in found if text is not None), None)


def _said(ours: Any, right: Any, where: str) -> str:
    return f"{where}: {str(ours)[:400]} instead of {str(right)[:400]}"


def differences(ours: Sequence[Answer], right: Sequence[Answer]) -> dict[int, str]:
    """Return where answers differ, by the index of the request."""
    found = {index: difference(*pair) for index, pair in enumerate(zip(ours, right, strict=True))}
    return {index: text for index, text in found.items() if text is not None}


def tokens_of(answers: Sequence[Answer]) -> tuple[int, int]:
    """Return the prompt and the generated tokens of the answers; a prompt runs once for each sample."""
    prompts = sum(answer["usage"]["prompt_tokens"] * len(answer["choices"]) for answer in answers)
    return prompts, sum(answer["usage"]["completion_tokens"] for answer in answers)
