"""Far more clients at once than there is room for: each gets an answer or a refusal."""

import asyncio
import contextlib
import random

import httpx
import pytest

import successor_model
from server_process import Server

CLIENTS = 1000
SEATS, QUEUE = 16, 84
TIMEOUT = httpx.Timeout(240)


async def ask(client: httpx.AsyncClient, number: int) -> int:
    """The status that a client got, 0 if it hung up; streams are read to their end."""
    body = {"model": "tiny", "prompt": "a", "max_tokens": 12, "temperature": 0, "stream": number % 2 == 0}
    if number % 10 == 9:
        with contextlib.suppress(TimeoutError):
            seconds = random.Random(number).random() / 50
            await asyncio.wait_for(client.post("/v1/completions", json=body), seconds)
        return 0
    if not body["stream"]:
        response = await client.post("/v1/completions", json=body)
        return response.status_code
    async with client.stream("POST", "/v1/completions", json=body) as response:
        content = await response.aread()
        assert response.status_code != 200 or content.endswith(b"data: [DONE]\n\n")
        if response.status_code == 429:
            assert int(response.headers["retry-after"]) >= 1
        return response.status_code


async def burst(url: str) -> list[int]:
    limits = httpx.Limits(max_connections=CLIENTS, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=TIMEOUT) as client:
        return await asyncio.gather(*(ask(client, number) for number in range(CLIENTS)))


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_every_client_of_a_burst_has_an_answer(processes, tmp_path):
    model = successor_model.write(tmp_path / "tiny")
    flags = ("--max-num-seqs", str(SEATS), "--max-queue", str(QUEUE), "--served-model-name", "tiny")
    server = Server(model, *flags, "--api-server-count", str(processes), "--max-model-len", "64")
    try:
        statuses = asyncio.run(burst(server.url))
        assert set(statuses) <= {0, 200, 429}
        # Those who hang up have had places too.
        assert statuses.count(200) >= QUEUE // 2
        assert statuses.count(429) > 0
        server.wait_until_idle()
        # All places are free again.
        assert set(asyncio.run(burst_of(server.url, QUEUE))) == {200}
    finally:
        server.process.terminate()
        server.process.wait(60)


async def burst_of(url: str, count: int) -> list[int]:
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT) as client:
        return await asyncio.gather(*(ask(client, 10 * number) for number in range(count)))
