"""HTTP client that times the tokens of completions, on asyncio alone.

It shares the machine with the server, so it does as little as it can: no connection is used twice, and an
event is parsed once.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from compare.workloads import Request, arrivals, percentile

_LIMIT = 1 << 24  # of a line in a response


@dataclass
class Answer:
    """A response, with moments in seconds of `time.perf_counter`."""

    sent: float
    ended: float = 0.0
    pieces: list[float] = field(default_factory=list)
    """When each piece of text came, of a streamed response."""
    tokens: int = 0


def complete(
    port: int,
    requests: Sequence[Request],
    *,
    stream: bool,
    rate: float | None = None,
    extra: dict[str, Any] | None = None,
) -> tuple[list[Answer], float]:
    """Send each request at its arrival; return the answers and the seconds to the end of the last one.

    Raises:
        RuntimeError: the server refused a request, or generated fewer tokens than asked for.
    """
    return asyncio.run(_complete(port, requests, stream, arrivals(len(requests), rate), extra or {}))


async def _complete(
    port: int, requests: Sequence[Request], stream: bool, moments: Sequence[float], extra: dict[str, Any]
) -> tuple[list[Answer], float]:
    start = time.perf_counter()

    async def one(request: Request, moment: float) -> Answer:
        await asyncio.sleep(start + moment - time.perf_counter())
        return await _one(port, request, stream, extra)

    answers = await asyncio.gather(*map(one, requests, moments))
    return answers, max(answer.ended for answer in answers) - start


async def _one(port: int, request: Request, stream: bool, extra: dict[str, Any]) -> Answer:
    body: dict[str, Any] = {
        "model": "model",
        "prompt": request.prompt,
        "max_tokens": request.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
        **extra,
    }
    if stream:
        body["stream_options"] = {"include_usage": True}
    answer = Answer(time.perf_counter())
    usage: dict[str, Any] = {}
    async for line in post(port, "/v1/completions", body):
        if not stream:
            usage = json.loads(line)["usage"]
        elif line.startswith(b"data:") and not line.endswith(b"[DONE]"):
            now = time.perf_counter()
            event = json.loads(line[5:])
            usage = event.get("usage") or usage
            # The last event of a choice may have no token, those before it always have one.
            if any(choice["text"] or not choice.get("finish_reason") for choice in event["choices"]):
                answer.pieces.append(now)
    answer.ended = time.perf_counter()
    answer.tokens = usage.get("completion_tokens", 0)
    if answer.tokens != request.max_tokens:
        raise RuntimeError(f"the server generated {answer.tokens} tokens, not {request.max_tokens}")
    return answer


async def post(port: int, path: str, body: Any) -> AsyncIterator[bytes]:
    """Yield the lines of the response, as they come; its last one is whatever comes after the last newline.

    Raises:
        RuntimeError: the status is not 200.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=_LIMIT)
    try:
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + content)
        await writer.drain()
        status = int((await reader.readline()).split()[1])
        headers = await _headers(reader)
        rest = b""
        async for part in _body(reader, headers):
            *lines, rest = (rest + part).split(b"\n")
            if status == 200:
                for line in lines:
                    if line := line.strip():
                        yield line
        if status != 200:
            raise RuntimeError(f"the server answered {status} to {path}: {rest[:300]!r}")
        if rest := rest.strip():
            yield rest
    finally:
        writer.close()


async def _headers(reader: asyncio.StreamReader) -> dict[bytes, bytes]:
    headers = {}
    while line := (await reader.readline()).strip():
        name, _, value = line.partition(b":")
        headers[name.strip().lower()] = value.strip().lower()
    return headers


async def _body(reader: asyncio.StreamReader, headers: dict[bytes, bytes]) -> AsyncIterator[bytes]:
    """Yield the parts of a body: chunks, or what comes until its length or the connection's end."""
    if headers.get(b"transfer-encoding") == b"chunked":
        while length := int((await reader.readline()).split(b";")[0], 16):
            yield await reader.readexactly(length)
            await reader.readline()
    elif b"content-length" in headers:
        yield await reader.readexactly(int(headers[b"content-length"]))
    else:
        while part := await reader.read(1 << 16):
            yield part


def latencies(answers: Sequence[Answer]) -> dict[str, float]:
    """Percentiles over streamed answers: TTFT, TPOT, and ITL over all gaps between pieces, in ms."""
    spans = {
        "ttft": [answer.pieces[0] - answer.sent for answer in answers],
        "tpot": [
            (answer.pieces[-1] - answer.pieces[0]) / (answer.tokens - 1)
            for answer in answers
            if answer.tokens > 1
        ],
        "itl": [later - sooner for a in answers for sooner, later in zip(a.pieces, a.pieces[1:])],
    }
    return {
        f"{name}_p{percent}_ms": 1000 * percentile(values, percent)
        for name, values in spans.items()
        if values
        for percent in (50, 99)
    }
