"""A request that kills its rank each time that it runs: only it fails, and all others go on."""

from pathlib import Path

import httpx
import pytest
from deadly_prompts import KILLS
from recovery import assert_nothing_lost

from parallel_server import FLAGS, ParallelServer, total

HERE = str(Path(__file__).parent)
PLUGIN = ("--plugins", "deadly", "--plugin-path", HERE)


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_request_kills_its_rank(small_model, requests, right, ranks, record_property):
    said = []

    def fault(load):
        body = {"prompt": [4, KILLS, 5], "max_tokens": 20, "temperature": 0}
        said.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=240))

    flags = (*PLUGIN, "--data-parallel-size", str(ranks), "--max-rank-restarts", "3")
    with ParallelServer(small_model, *FLAGS, *flags) as server:
        record_property("recovery", assert_nothing_lost(server, requests, right, fault, failures=1))
        [answer] = said
        assert answer.status_code == 500
        assert "ended each time that it ran this request" in answer.text
        assert server.health().status_code == 200
        assert total(server.counts(), "octavo_engine_up") == ranks
        assert server.terminate() == 0
