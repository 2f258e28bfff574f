"""A reader that is slower than the engine: nothing is lost, and what waits for it does not grow."""

import asyncio
import json
from typing import Any

import pytest
from caller import Caller

import successor_model
from enginecore import AsyncEngine
from enginecore.config import make_config
from octavo_serve.app import create_app
from octavo_serve.config import ServeConfig

TOKENS = 2000
PATIENCE_S = 240


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return successor_model.write(tmp_path_factory.mktemp("successor") / "model")


def chunks(caller: Caller) -> list[dict[str, Any]]:
    events = caller.body.decode().removesuffix("\n\n").split("\n\n")
    assert events[-1] == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events[:-1]]


@pytest.mark.slow
def test_a_reader_of_one_event_per_thousand_tokens(model):
    """It takes the first event, and the next only when all 2,000 tokens have been generated."""
    body = {"prompt": "z", "stream": True, "max_tokens": TOKENS, "temperature": 0, "logprobs": 0}
    body |= {"stream_options": {"include_usage": True}}

    async def scenario():
        engine = AsyncEngine(make_config({"model": str(model), "dtype": "float32", "device": "cpu"}))
        app = create_app(engine, ServeConfig())
        try:
            await engine.ready()
            caller = Caller(app, body)
            async with asyncio.timeout(PATIENCE_S):
                await caller.received(2)  # the response's start and the first event
                caller.reading.clear()
                while engine.num_unfinished:
                    await asyncio.sleep(0.01)
                [stream] = app.state.server.streams
                waiting = len(stream._changed)
                caller.reading.set()
                await caller.task
            return caller, waiting
        finally:
            await engine.shutdown()

    caller, waiting = asyncio.run(scenario())
    assert waiting <= 1
    *generated, last = chunks(caller)
    assert len(generated) <= 4
    assert "".join(chunk["choices"][0]["text"] for chunk in generated) == "z" * TOKENS
    logprobs = [chunk["choices"][0]["logprobs"]["token_logprobs"] for chunk in generated]
    assert sum(map(len, logprobs)) == TOKENS
    offsets = [offset for chunk in generated for offset in chunk["choices"][0]["logprobs"]["text_offset"]]
    assert offsets == list(range(TOKENS))
    assert generated[-1]["choices"][0]["finish_reason"] == "length"
    assert last["usage"]["completion_tokens"] == TOKENS
