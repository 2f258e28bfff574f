"""A model without a tokenizer says so at its start, takes token ids, and answers conversations with 400."""

import asyncio

import httpx
import pytest

from checkpoints import llama_config, save_random
from enginecore import AsyncEngine
from enginecore.config import make_config
from octavo_serve.app import create_app
from octavo_serve.config import ServeConfig

IDS = [20, 30, 41, 57]


@pytest.mark.slow
def test_over_http(tmp_path, caplog):
    path = save_random(llama_config(), tmp_path)
    config = make_config({"model": str(path), "dtype": "float32", "device": "cpu", "num_blocks_override": 16})

    async def scenario():
        engine = AsyncEngine(config)
        transport = httpx.ASGITransport(create_app(engine, ServeConfig()))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            try:
                await engine.ready()
                messages = [{"role": "user", "content": "Hello"}]
                chat = await http.post("/v1/chat/completions", json={"messages": messages})
                text = await http.post("/v1/completions", json={"prompt": "Hello"})
                body = {"prompt": IDS, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
                return chat, text, await http.post("/v1/completions", json=body)
            finally:
                await engine.shutdown()

    chat, text, ids = asyncio.run(scenario())
    assert (chat.status_code, text.status_code, ids.status_code) == (400, 400, 200)
    assert "tokenizer" in chat.json()["error"]["message"]
    assert ids.json()["usage"]["completion_tokens"] == 5
    assert [record.levelname for record in caplog.records if "has no tokenizer" in record.message] == [
        "WARNING"
    ]
