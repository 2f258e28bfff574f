"""The log: a line for each request, and nothing in it that a client wrote."""

import asyncio
import json
import logging
import re
import signal
import socket
from typing import Any, cast

import pytest
from caller import Caller
from scripted_engine import say
from test_process import Server, server

from enginecore.messages import EngineStats
from octavo_serve.app import create_app
from octavo_serve.config import ServeConfig
from octavo_serve.server import Throughput

LINE = re.compile(
    r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (?P<level>[A-Z]+) (?P<logger>[\w.]+): (?P<message>.*)"
)
OURS = ("engine shut down", "modules ")
"""What the scripted engine prints itself."""


def parsed(served: Server) -> list[dict[str, str]]:
    """Every line of the log, each of which must have time, level and logger, or be indented under one."""
    lines = [line for line in served.lines if not line.startswith(OURS)]
    found = [LINE.fullmatch(line) for line in lines if not line.startswith("    ")]
    assert None not in found, lines
    return [match.groupdict() for match in found if match]


def requests(served: Server) -> list[str]:
    return [line["message"] for line in parsed(served) if line["logger"] == "octavo_serve.access"]


def records(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [vars(record)["fields"] for record in caplog.records if record.name == "octavo_serve.access"]


@pytest.mark.anyio
@pytest.mark.parametrize("stream", [False, True])
async def test_a_line_tells_what_a_request_took(client, engine, caplog, stream):
    caplog.set_level(logging.INFO, "octavo_serve")
    engine.cached = 3
    engine.script = lambda prompt, params: say("abcd", "length")
    body = {"prompt": ["hi", "you"], "n": 2, "stream": stream}
    await client.post("/v1/completions", json=body, headers={"x-request-id": "mine"})
    [fields] = records(caplog)
    assert fields.pop("total") >= 0
    assert fields == {
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "id": "cmpl-mine",
        "prompt_tokens": 5,
        "output_tokens": 16,
        "cached_tokens": 6,
        "finish": "length",
    }


@pytest.mark.anyio
async def test_probes_are_left_out_and_failures_are_not(client, engine, caplog):
    caplog.set_level(logging.INFO, "octavo_serve")
    for route in ("/health", "/ping", "/load", "/metrics", "/version"):
        assert (await client.get(route)).status_code == 200
    assert records(caplog) == []
    await client.post("/v1/completions", json={"prompt": ""})
    await client.get("/nothing")
    engine.die("killed")
    await client.get("/health")
    await client.post("/v1/chat/completions", json={})
    assert [(line["path"], line["status"]) for line in records(caplog)] == [
        ("/v1/completions", 400),
        ("/nothing", 404),
        ("/v1/chat/completions", 503),
    ]


@pytest.mark.anyio
async def test_a_client_who_leaves(engine, caplog):
    caplog.set_level(logging.INFO, "octavo_serve")
    engine.allowed = 0
    caller = Caller(create_app(cast(Any, engine), ServeConfig()), {"prompt": "hi"})
    while not engine.streams:
        await asyncio.sleep(0)
    caller.leave()
    await caller.task
    [fields] = records(caplog)
    assert (fields["status"], fields["output_tokens"], fields["finish"]) == (499, 0, "abort")


def test_every_line_has_time_and_level_and_every_request_one_line():
    with server() as served:
        served.load()
        served.tell("allow 100")
        for _ in range(5):
            answer = served.client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 2})
            assert answer.status_code == 200
        served.client.get("/health")
        served.process.send_signal(signal.SIGTERM)
        assert served.finish() == 0
    lines = requests(served)
    assert len(lines) == 5
    form = (
        "request method=POST path=/v1/completions status=200 id=cmpl-[0-9a-f]{32} prompt_tokens=2 "
        r"output_tokens=2 cached_tokens=0 finish=length total=\d+\.\d{3}"
    )
    assert all(re.fullmatch(form, line) for line in lines)


def test_json():
    with server("--log-format", "json", "--host", "0.0.0.0") as served:
        served.load()
        served.tell("allow 1")
        served.client.post("/v1/completions", json={"prompt": "hi"})
        served.process.send_signal(signal.SIGTERM)
        assert served.finish() == 0
    lines = [json.loads(line) for line in served.lines if not line.startswith(OURS)]
    assert {"time", "level", "rank", "logger", "message"} <= set.intersection(*map(set, lines))
    assert [line["message"] for line in lines if line["level"] == "WARNING"] == [
        "listening on every network without an API key: anybody there may use this server"
    ]
    [request] = [line for line in lines if line["logger"] == "octavo_serve.access"]
    assert (request["status"], request["prompt_tokens"], request["finish"]) == (200, 2, "stop")


def test_a_key_or_one_network_needs_no_warning():
    for flags in (["--host", "0.0.0.0", "--api-key", "secret"], ["--host", "127.0.0.1"]):
        with server(*flags) as served:
            served.process.send_signal(signal.SIGTERM)
            assert served.finish() == 0
        assert [line for line in parsed(served) if line["level"] == "WARNING"] == []


MARK = "wombat"
KEY = "a-key-to-keep"
FORGED = "2026-01-01T00:00:00.000Z ERROR forged"


def raw_request(served: Server, head: str) -> bytes:
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as client:
        client.sendall(f"{head}\r\nHost: s\r\nConnection: close\r\n\r\n".encode("latin-1"))
        return client.makefile("rb").read()


def test_neither_prompts_nor_keys_nor_forged_lines():
    """HC-136."""
    marked = {"prompt": f"the {MARK} sleeps"}
    wrong: list[dict[str, Any]] = [
        {**marked, "prompt": MARK * 10},
        {**marked, "max_tokens": MARK},
        {**marked, "model": MARK},
        {**marked, "stop": [[MARK]]},
        {"messages": [{"role": MARK, "content": MARK}]},
    ]
    with server("--api-key", KEY, "--log-level", "debug") as served:
        served.load()
        served.tell("allow 1000")
        served.client.headers["authorization"] = f"Bearer {KEY}"
        forged = {"request_id": f"x\r\nSet-Cookie: {MARK}=1\n{FORGED}", **marked}
        assert served.client.post("/v1/completions", json=forged).status_code == 200
        for body in wrong:
            for route in ("completions", "chat/completions"):
                assert served.client.post(f"/v1/{route}", json=body).status_code in (200, 400, 404)
        broken = served.client.post(
            "/v1/completions", content=f'{{"prompt": "{MARK}', headers={"content-type": "application/json"}
        )
        assert broken.status_code == 400
        for header in ("authorization", "x-api-key"):
            headers = {"authorization": "", header: f"Bearer {MARK}"}
            assert served.client.get("/v1/models", headers=headers).status_code == 401
        for given in ("\xff\xfe", f"a\tb\x1b[31m{FORGED}", "i" * 60_000, "%0a"):
            answer = raw_request(served, f"GET /v1/models HTTP/1.1\r\nX-Request-Id: {given}")
            assert b" 500 " not in answer.partition(b"\r\n")[0]
        answer = raw_request(served, f"GET /%0d%0a{FORGED.replace(' ', '%20')}%1b[31m HTTP/1.1")
        assert answer.startswith(b"HTTP/1.1 401")
        served.process.send_signal(signal.SIGTERM)
        assert served.finish() == 0
    log = "\n".join(served.lines)
    assert MARK not in log
    assert KEY not in log
    assert "\x1b" not in log
    assert not any(line.startswith(FORGED) for line in served.lines)
    assert all(len(line) < 1000 for line in served.lines)
    # 1 good, 10 wrong, 1 broken, 2 keys, and the path; HTTP that does not parse is no request.
    assert len(requests(served)) >= 15


def test_throughput_is_told_while_there_is_work():
    throughput = Throughput()
    assert throughput.line(EngineStats(), 10) is None
    busy = EngineStats(
        running=3,
        waiting=1,
        free_blocks=48,
        num_blocks=64,
        prefix_queries=200,
        prefix_hits=50,
        prompt_tokens=1200,
        generation_tokens=345,
    )
    line = "prompt 120.0 tokens/s, generation 34.5 tokens/s, running 3, waiting 1, KV cache 25.0%, "
    assert throughput.line(busy, 10) == line + "prefix cache hits 25.0%"
    line = "prompt 0.0 tokens/s, generation 0.0 tokens/s, running 3, waiting 1, KV cache 25.0%, "
    assert throughput.line(busy, 10) == line + "prefix cache hits 0.0%"
    idle = EngineStats(prefix_queries=200, prefix_hits=50, prompt_tokens=1200, generation_tokens=345)
    assert throughput.line(idle, 10) is None
