"""What the live page is sent of the engine: percentiles, steps, maps, and when."""

import asyncio
import math
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from listening_app import client, serving
from scripted_engine import ScriptedEngine

from enginecore.messages import EngineStats, StepsView
from octavo_serve.app import create_app
from octavo_serve.config import ServeConfig
from octavo_serve.engine_feed import Latencies, percentile

BOUNDS = [0.1, 0.2, 0.5, 1.0, math.inf]


@given(st.lists(st.floats(0.001, 3), min_size=1, max_size=200), st.sampled_from([50, 90, 99]))
def test_a_percentile_lies_in_the_bucket_of_the_true_one(values, percent):
    edges = [0.0, *BOUNDS]
    counts = [sum(low < value <= high for value in values) for low, high in zip(edges, BOUNDS)]
    found = percentile(list(zip(BOUNDS, counts)), percent)
    true = float(np.percentile(values, percent, method="inverted_cdf"))
    bucket = next(index for index, bound in enumerate(BOUNDS) if true <= bound)
    assert edges[bucket] <= found <= min(BOUNDS[bucket], 1.0) + 1e-9


def test_a_percentile_is_interpolated():
    assert percentile([(0.1, 0), (0.2, 10), (math.inf, 0)], 50) == pytest.approx(0.15)
    assert percentile([(0.1, 0), (math.inf, 0)], 50) is None
    assert percentile([(0.1, 0), (0.4, 1), (math.inf, 9)], 90) == 0.4


def test_only_the_last_minute_counts():
    latencies = Latencies()

    def add(now: float, count: int) -> None:
        latencies.add(now, {"itl": [(0.1, count), (math.inf, 0)]})

    add(0, 1000)
    assert latencies.summary()["itl"]["count"] == 0
    add(30, 1010)
    add(59, 1011)
    assert latencies.summary()["itl"]["count"] == 11
    add(95, 1013)
    assert latencies.summary()["itl"]["count"] == 3
    assert (latencies.is_due(96), latencies.is_due(97)) == (False, True)


@pytest.fixture
def anyio_backend():
    return "asyncio"


def view(first: int, count: int, blocks: list[int] | None = None) -> StepsView:
    steps = np.array([[first + index, 1, 1, 0, 0, 0, 0] for index in range(count)], np.float32)
    if blocks is None:
        return StepsView(steps)
    return StepsView(steps, np.array(blocks, np.int8), [blocks.count(state) for state in range(4)])


@pytest.mark.anyio
async def test_a_watcher_is_told_what_is_new_until_it_cancels():
    engine = ScriptedEngine()
    engine.stats = EngineStats(running=3, waiting=2, num_blocks=4, free_blocks=1)
    app = create_app(cast(Any, engine), ServeConfig())
    async with serving(app) as address, client(address) as socket:
        await socket.send("watch", "w")
        frame = await socket.receive()
        assert (frame["type"], frame["id"], frame["trouble"]) == ("engine", "w", None)
        [rank] = frame["ranks"]
        assert (rank["running"], rank["waiting"], rank["free_blocks"]) == (3, 2, 1)
        assert "steps" not in rank
        engine.watch_state.update(0, view(0, 300, [0, 3, 2, 1]))
        [rank] = (await socket.receive())["ranks"]
        assert [step[0] for step in rank["steps"]] == list(range(100, 300))
        assert (rank["num_steps"], rank["blocks"], rank["block_totals"]) == (300, "0321", [1, 1, 1, 1])
        engine.watch_state.update(0, view(300, 2))
        [rank] = (await socket.receive())["ranks"]
        assert [step[0] for step in rank["steps"]] == [300, 301]
        assert "blocks" not in rank
        # A second page begins with all that is kept; the first is not told again.
        async with client(address) as other:
            await other.send("watch", "w")
            [rank] = (await other.receive())["ranks"]
            assert (len(rank["steps"]), rank["blocks"]) == (200, "0321")
            assert engine.watch_state.watchers == 2
        await socket.send("cancel", "w")
        while (frame := await socket.receive())["type"] == "engine":
            pass
        assert frame == {"type": "done", "id": "w", "usage": None}
        while engine.watch_state.watchers:
            await asyncio.sleep(0.001)


@pytest.mark.anyio
async def test_a_page_that_is_switched_off():
    engine = ScriptedEngine()
    app = create_app(cast(Any, engine), ServeConfig(live_page=False))
    async with serving(app) as address, client(address) as socket:
        await socket.send("watch", "w")
        frame = await socket.receive()
        assert (frame["type"], "switched off" in frame["error"]["message"]) == ("error", True)
    assert engine.watch_state.watchers == 0
