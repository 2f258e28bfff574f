"""Embeddings, scores and ranks over HTTP: HC-131 against transformers' hidden states."""

import base64
import concurrent.futures
import random
import struct
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
import torch

import byte_tokenizer
from checkpoints import Oracle, llama_config, save_random
from server_process import Server, wait_until

LENGTH = 128
FLAGS = ("--device", "cpu", "--dtype", "float32", "--max-model-len", str(LENGTH))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_random(llama_config(), tmp_path_factory.mktemp("model") / "tiny")
    byte_tokenizer.save(path)
    return path


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    started = Server(model, *FLAGS, "--served-model-name", "tiny")
    yield started
    started.stop()


@pytest.fixture(scope="module")
def expected(model: Path):
    """Return the last hidden state of a text, of length 1, as transformers has it."""
    oracle = Oracle(model)

    @torch.inference_mode()
    def of(text: str) -> np.ndarray:
        ids = torch.tensor([list(text.encode())])
        state = oracle.model(ids, output_hidden_states=True).hidden_states[-1][0, -1].double().numpy()
        return state / np.linalg.norm(state)

    return of


def texts_of(seed: int) -> list[str]:
    """Twelve texts of 1 to 128 tokens, twins and a lone line feed among them."""
    draw = random.Random(seed)
    lengths = [1, 2, 3, 17, 31, 64, 100, 127, 128]
    texts = ["".join(draw.choices("abcdefgh XYZ.", k=length)) for length in lengths]
    return [*texts[:4], "\n", *texts[4:], texts[5], texts[1]]


def post(server: Server, path: str = "/v1/embeddings", **body) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json={"model": "tiny", **body}, timeout=60)


def vectors(answer: httpx.Response) -> list[np.ndarray]:
    assert answer.status_code == 200, answer.text
    return [np.array(entry["embedding"]) for entry in answer.json()["data"]]


def test_openai_s_client_gets_transformers_vectors_in_order(server, expected):
    texts = texts_of(1)
    answer = server.client.embeddings.create(model="tiny", input=texts)
    assert [entry.index for entry in answer.data] == list(range(12))
    assert {entry.object for entry in answer.data} == {"embedding"}
    for text, entry in zip(texts, answer.data, strict=True):
        found = np.array(entry.embedding)
        assert found @ expected(text) > 1 - 1e-5
        assert abs(np.linalg.norm(found) - 1) < 1e-5
    tokens = sum(len(text) for text in texts)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (tokens, tokens)
    assert (answer.object, answer.model) == ("list", "tiny")


def test_every_form_and_encoding_of_the_same_texts(server, expected):
    texts = texts_of(2)
    floats = vectors(post(server, input=texts))
    packed = post(server, input=texts, encoding_format="base64").json()["data"]
    for vector, entry in zip(floats, packed, strict=True):
        # 64 numbers of four bytes, the least significant first; the second time prefixes were cached.
        decoded = struct.unpack("<64f", base64.b64decode(entry["embedding"]))
        np.testing.assert_allclose(decoded, vector, rtol=0, atol=1e-6)
    ids = [list(text.encode()) for text in texts]
    for together, alone in zip(vectors(post(server, input=ids)), ids, strict=True):
        single = vectors(post(server, input=alone, encoding_format="float"))
        assert len(single) == 1
        assert single[0] @ together > 1 - 1e-6
        assert single[0] @ expected(bytes(alone).decode()) > 1 - 1e-5
    assert vectors(post(server, input=texts[0]))[0] @ floats[0] > 1 - 1e-6


TOO_LONG = [
    {"input": "x" * 129},
    {"input": ["ok", "x" * 129, "ok"]},
    {"input": [1] * 129},
    {"input": ["ok", "x" * 10**6]},
]
BAD = [
    *((body, "input") for body in TOO_LONG),
    ({"input": []}, "input"),
    ({"input": [[]]}, "input"),
    ({"input": ["ok", ""]}, "input"),
    ({"input": None}, "input"),
    ({}, "input"),
    ({"input": 7}, "input"),
    ({"input": [320]}, "input"),
    ({"input": [-1]}, "input"),
    ({"input": [[1, 2], [2**40]]}, "input"),
    ({"input": [True]}, "input"),
    ({"input": ["a", 1]}, "input"),
    ({"input": [[1], "a"]}, "input"),
    ({"input": [1.5]}, "input"),
    ({"input": {"text": "a"}}, "input"),
    ({"input": ["a"] * 4097}, "input"),
    ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
    ({"input": "a", "dimensions": 0}, "dimensions"),
    ({"input": "a", "dimensions": -1}, "dimensions"),
    ({"input": "a", "dimensions": 129}, "dimensions"),
    ({"input": "a", "dimensions": "wide"}, "dimensions"),
    ({"input": "a", "dimensions": 32}, "dimensions"),
    ({"input": "a", "truncate_prompt_tokens": 129}, "truncate_prompt_tokens"),
    ({"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"input": "a", "truncation_side": "middle"}, "truncation_side"),
    ({"input": "a", "cache_salt": ""}, "cache_salt"),
    ({"input": "a", "priority": 3}, "priority"),
    ({"input": "a", "user": 3}, "user"),
    ({"messages": [{"role": "user", "content": "a"}]}, "messages"),
]


@pytest.mark.parametrize(("body", "param"), BAD, ids=[f"{body!s:.50}" for body, _ in BAD])
def test_what_is_wrong_is_a_400_for_the_whole_request(server, body, param):
    answer = post(server, **body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert error["code"] == ("context_length_exceeded" if body in TOO_LONG else None)


def test_an_unknown_model_is_a_404(server):
    with pytest.raises(openai.NotFoundError):
        server.client.embeddings.create(model="other", input="a")


def test_sixteen_requests_of_two_at_once(server, expected):
    def ask(number: int) -> list[np.ndarray]:
        return vectors(post(server, input=[f"text number {number}", "the same for all"]))

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        found = list(pool.map(ask, range(16)))
    for number, (own, shared) in enumerate(found):
        assert own @ expected(f"text number {number}") > 1 - 1e-5
        assert shared @ expected("the same for all") > 1 - 1e-5


def test_truncation_keeps_the_start_or_the_end(server, expected):
    text = "".join(chr(97 + place % 26) for place in range(300))
    for extra, kept in (
        ({"truncate_prompt_tokens": 5}, "abcde"),
        ({"truncate_prompt_tokens": -1}, text[:128]),
        ({"truncate_prompt_tokens": 5, "truncation_side": "left"}, text[-5:]),
    ):
        answer = post(server, input=text, **extra)
        assert vectors(answer)[0] @ expected(kept) > 1 - 1e-5
        assert answer.json()["usage"]["total_tokens"] == len(kept)


def test_generation_beside_embeddings_says_what_it_says_alone(server):
    def generate() -> str:
        answer = server.client.completions.create(
            model="tiny", prompt="abc", max_tokens=60, temperature=0, extra_body={"ignore_eos": True}
        )
        return answer.choices[0].text

    alone = generate()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        embedding = [pool.submit(post, server, input=texts_of(seed)) for seed in range(4)]
        texts = [pool.submit(generate) for _ in range(4)]
        assert [found.result() for found in texts] == [alone] * 4
        assert all(found.result().status_code == 200 for found in embedding)
    server.wait_until_idle()


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_scores(server, expected, path):
    documents = ["abc", "abd", "zz zz"]
    query, others = expected("abc"), [expected(text) for text in documents]
    answer = post(server, path, text_1="abc", text_2=documents).json()
    assert [entry["index"] for entry in answer["data"]] == [0, 1, 2]
    assert [entry["object"] for entry in answer["data"]] == ["score"] * 3
    scores = [entry["score"] for entry in answer["data"]]
    assert scores == pytest.approx([query @ other for other in others], abs=1e-5)
    # The first text is embedded once.
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == 3 + 3 + 3 + 5
    each = post(server, path, queries=documents, documents=documents[::-1]).json()["data"]
    right = [one @ other for one, other in zip(others, others[::-1], strict=True)]
    assert [entry["score"] for entry in each] == pytest.approx(right, abs=1e-5)
    one = post(server, path, text_1="abc", text_2="abd").json()["data"]
    assert [entry["score"] for entry in one] == pytest.approx([query @ others[1]], abs=1e-5)
    for body, param in (
        ({"text_1": "", "text_2": "a"}, "text_1"),
        ({"text_1": "a", "text_2": ""}, "text_2"),
        ({"text_1": "x" * 129, "text_2": "a"}, "text_1"),
        ({"queries": "a", "documents": ["b", ""]}, "documents"),
        ({"queries": ["a", ""], "documents": ["b", "c"]}, "queries"),
        ({"data_1": "x" * 10**6, "data_2": "a"}, "data_1"),
    ):
        error = post(server, path, **body).json()["error"]
        assert error["param"] == param
        if "" in [
            text for value in body.values() for text in (value if isinstance(value, list) else [value])
        ]:
            assert error["message"] == f"{param} is empty: it must hold at least one token"
    for body in (
        {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]},
        {"text_1": ["a", "b"], "text_2": "c"},
        {"text_1": [], "text_2": "c"},
        {"text_1": "a"},
        {"text_1": "a", "text_2": 7},
        {"text_1": "a", "text_2": ["b", ""]},
        {"text_1": "a", "text_2": "x" * 129},
        {},
    ):
        refused = post(server, path, **body)
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["param"].startswith("text_")


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_ranks(server, expected, path):
    documents = ["abd", "abc", "zz zz", "abc"]
    right = [float(expected("abc") @ expected(text)) for text in documents]
    order = sorted(range(4), key=lambda index: -right[index])
    answer = post(server, path, query="abc", documents=documents).json()
    found = answer["results"]
    assert [entry["relevance_score"] for entry in found] == pytest.approx(
        [right[index] for index in order], abs=1e-5
    )
    assert sorted(entry["index"] for entry in found) == [0, 1, 2, 3]
    assert [entry["index"] for entry in found[:2]] == [1, 3]
    assert all(entry["document"] == {"text": documents[entry["index"]]} for entry in found)
    assert answer["usage"]["total_tokens"] == 3 + 3 + 3 + 5 + 3
    best = post(
        server,
        path,
        query="abc",
        documents=[{"text": text} for text in documents],
        top_n=1,
        return_documents=False,
    )
    assert [set(entry) for entry in best.json()["results"]] == [{"index", "relevance_score"}]
    for body, param in (
        ({"query": "a", "documents": []}, "documents"),
        ({"query": "a"}, "documents"),
        ({"documents": ["a"]}, "query"),
        ({"query": "a", "documents": ["a"], "top_n": -1}, "top_n"),
        ({"query": "a", "documents": [7]}, "documents"),
        ({"query": "a", "documents": ["a", ""]}, "documents"),
        ({"query": "", "documents": ["a"]}, "query"),
        ({"query": "x" * 129, "documents": ["a"]}, "query"),
        ({"query": "a", "documents": ["a"], "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"query": "a", "documents": ["a"], "max_tokens_per_doc": 4}, "max_tokens_per_doc"),
    ):
        refused = post(server, path, **body)
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["param"] == param


def test_metrics_and_log_count_them(server):
    def line() -> list[str]:
        return [line for line in server.lines if "id=embd-counted" in line]

    names = ("prompt_tokens_total", "generation_tokens_total", "request_success_total")
    before = [server.gauge(name) for name in names[:2]] + [server.gauge(names[2], finished_reason="stop")]
    httpx.post(
        f"{server.url}/v1/embeddings",
        json={"input": ["abcd", "ef"]},
        headers={"x-request-id": "counted"},
        timeout=60,
    ).raise_for_status()
    after = [server.gauge(name) for name in names[:2]] + [server.gauge(names[2], finished_reason="stop")]
    assert [b - a for a, b in zip(before, after, strict=True)] == [6, 0, 2]
    wait_until(lambda: len(line()) == 1)
    assert "status=200 id=embd-counted prompt_tokens=6 output_tokens=0 cached_tokens=0" in line()[0]
    assert "finish=stop" in line()[0]


def test_a_model_with_sentence_transformers_files_and_a_pooler_config(model, tmp_path):
    """The mean, not normalised, of a model whose config allows fewer dimensions."""
    for file in model.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    (tmp_path / "modules.json").write_text(
        '[{"path": "", "type": "sentence_transformers.models.Transformer"},'
        ' {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]'
    )
    flags = ("--hf-overrides", '{"is_matryoshka": true}')
    oracle = Oracle(model)
    with torch.inference_mode():
        states = oracle.model(torch.tensor([list(b"some words")]), output_hidden_states=True)
    mean = states.hidden_states[-1][0].double().mean(0).numpy()
    server = Server(tmp_path, *FLAGS, *flags, "--served-model-name", "tiny")
    try:
        found = vectors(post(server, input="some words"))[0]
        np.testing.assert_allclose(found, mean, rtol=0, atol=1e-4)
        cut = vectors(post(server, input="some words", dimensions=32, use_activation=True))[0]
        np.testing.assert_allclose(cut, mean[:32] / np.linalg.norm(mean[:32]), rtol=0, atol=1e-5)
        assert post(server, input="some words", dimensions=65).status_code == 400
    finally:
        server.stop()
