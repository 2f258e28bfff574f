"""Spans of a whole server: two HTTP processes and a model that runs."""

import itertools
import json
import re
from collections.abc import Iterator

import httpx
import openai
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from websockets.sync.client import connect

import byte_tokenizer
from checkpoints import llama_config, save_random
from parallel_server import FLAGS, ParallelServer
from span_collector import Collector, Received, collecting

pytestmark = pytest.mark.slow

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HI = [{"role": "user", "content": "hi"}]
TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as found:
        yield found


@pytest.fixture(scope="module")
def spans(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Received]:
    """The spans of all requests of a server's life, by the ends of their ids."""
    model = save_random(llama_config(), tmp_path_factory.mktemp("model") / "tiny")
    byte_tokenizer.save(model, chat_template=TEMPLATE)
    flags = ("--api-server-count", "2", "--served-model-name", "tiny")
    with ParallelServer(model, *FLAGS, *flags, "--otlp-traces-endpoint", collector.url) as server:
        for name, path, body in REQUESTS:
            headers = {"x-request-id": name, "traceparent": f"00-{TRACE}-{PARENT}-01"}
            answer = httpx.post(f"{server.url}{path}", json=body, headers=headers, timeout=60)
            assert answer.status_code == 200, answer.text
        with connect(server.url.replace("http", "ws") + "/v1/stream") as socket:
            socket.send(json.dumps({"type": "chat", "id": "socket", "messages": HI, "max_tokens": 5}))
            while json.loads(socket.recv(60))["type"] != "done":
                pass
        for number in range(40):  # each on a connection of its own, so that both processes get some
            answer = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none").completions.create(
                model="tiny", prompt="x", max_tokens=1, extra_headers={"x-request-id": f"many{number}"}
            )
            assert answer.choices[0].finish_reason == "length"
        assert server.terminate() == 0
        lines = server.lines
    assert not [line for line in lines if "spans" in line]
    logged = [re.search(r" id=(\S+)", line) for line in lines]
    found = {received.attributes["gen_ai.response.id"]: received for received in collector.requests}
    assert set(found) == {match[1] for match in logged if match}
    return {name.rpartition("-")[2]: received for name, received in found.items()}


REQUESTS = [
    ("whole", "/v1/completions", {"prompt": "hello", "max_tokens": 7, "temperature": 0, "ignore_eos": True}),
    ("stream", "/v1/chat/completions", {"messages": HI, "max_tokens": 9, "ignore_eos": True, "stream": True}),
    ("response", "/v1/responses", {"input": "hi", "max_output_tokens": 5}),
    ("message", "/v1/messages", {"model": "tiny", "messages": HI, "max_tokens": 5}),
    ("vector", "/v1/embeddings", {"input": ["one", "three"]}),
    ("scored", "/score", {"text_1": "a", "text_2": ["b", "c"]}),
    ("ranked", "/rerank", {"query": "a", "documents": ["b", "c"]}),
]
NAMES = {
    "whole": "text_completion tiny",
    "stream": "chat tiny",
    "response": "chat tiny",
    "message": "chat tiny",
    "vector": "embeddings tiny",
    "scored": "score tiny",
    "ranked": "rerank tiny",
    "socket": "chat tiny",
}


@pytest.mark.parametrize("request_id", NAMES)
def test_phases_fill_the_time_in_the_engine(spans, collector, request_id):
    received = spans[request_id]
    span, attributes = received.span, received.attributes
    assert span.name == NAMES[request_id]
    assert "error.type" not in attributes
    phases = list(collector.phases(received).values())
    pools = request_id in ("vector", "scored", "ranked")
    assert [phase.name for phase in phases] == ["queue", "prefill", "decode"][: 2 if pools else 3]
    assert all(phase.kind == Span.SPAN_KIND_INTERNAL for phase in phases)
    edges = [phases[0].start_time_unix_nano, *(phase.end_time_unix_nano for phase in phases)]
    assert [phase.start_time_unix_nano for phase in phases] == edges[:-1]
    assert span.start_time_unix_nano <= edges[0] < edges[1] < edges[2] <= edges[-1] <= span.end_time_unix_nano
    lengths = [(end - start) / 1e9 for start, end in itertools.pairwise(edges)]
    told = [attributes[f"gen_ai.latency.time_in_{part}"] for part in ("queue", "model_prefill")]
    assert lengths[:2] == pytest.approx(told, abs=1e-6)
    assert attributes["gen_ai.latency.e2e"] == pytest.approx(sum(lengths), abs=1e-3 if pools else 1e-6)


def test_usage_and_sampling(spans):
    whole, stream = spans["whole"].attributes, spans["stream"].attributes
    assert (whole["gen_ai.usage.input_tokens"], whole["gen_ai.usage.output_tokens"]) == (5, 7)
    assert (whole["gen_ai.request.temperature"], whole["gen_ai.request.max_tokens"]) == (0.0, 7)
    assert (stream["gen_ai.request.stream"], stream["gen_ai.usage.output_tokens"]) == (True, 9)
    vector = spans["vector"].attributes
    assert (vector["gen_ai.usage.input_tokens"], vector["gen_ai.usage.output_tokens"]) == (8, 0)
    assert "gen_ai.request.temperature" not in vector


def test_they_continue_the_client_s_trace(spans):
    for name, _, _ in REQUESTS:
        span = spans[name].span
        assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert spans["many0"].span.parent_span_id == b""


def test_both_processes_export(spans):
    processes = {received.resource["service.instance.id"] for received in spans.values()}
    assert len(processes) == 2
