"""The WebSocket /v1/stream of a real server with a real engine."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from websockets.sync.client import ClientConnection, connect

import successor_model
from server_process import Server

FLAGS = ("--device", "cpu", "--max-model-len", "2048", "--num-blocks-override", "512", "--max-num-seqs", "4")
LONG = {"prompt": "z", "max_tokens": 2000, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model: Path = successor_model.write(tmp_path_factory.mktemp("model") / "tiny")
    started = Server(model, *FLAGS)
    yield started
    started.stop()


@pytest.fixture
def socket(server: Server) -> Iterator[ClientConnection]:
    with connect(server.url.replace("http", "ws") + "/v1/stream", max_queue=None) as found:
        yield found
    server.wait_until_idle()


def send(socket: ClientConnection, **frame: object) -> None:
    socket.send(json.dumps(frame))


def collect(socket: ClientConnection, count: int) -> dict[str, list[dict]]:
    """The frames of each request, until so many have ended."""
    found: dict[str, list[dict]] = {}
    while count:
        frame = json.loads(socket.recv(60))
        found.setdefault(frame["id"], []).append(frame)
        count -= frame["type"] in ("done", "error")
    return found


def test_requests_at_once_say_what_each_says_alone(server, socket):
    prompts = [f"{number} {letter}" for number in range(10) for letter in "aqeu"]
    alone = {}
    for prompt in prompts[:4]:
        answer = server.client.completions.create(model=server.client.models.list().data[0].id, prompt=prompt)
        alone[prompt] = answer.choices[0].text
    for index, prompt in enumerate(prompts):
        send(socket, type="completion", id=str(index), prompt=prompt, temperature=0)
    found = collect(socket, len(prompts))
    for index, prompt in enumerate(prompts):
        *chunks, done = found[str(index)]
        text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
        # The last letter alone decides.
        assert text == next(other for key, other in alone.items() if key[-1] == prompt[-1])
        assert done["usage"]["prompt_tokens"] == len(prompt)


def test_running_and_waiting_requests_are_cancelled(server, socket):
    for index in range(8):  # of which four run
        send(socket, type="completion", id=str(index), **LONG)
    while json.loads(socket.recv(60))["type"] != "chunk":
        pass
    for index in range(7):
        send(socket, type="cancel", id=str(index))
    found = collect(socket, 8)
    for index in range(7):
        abort, done = found[str(index)][-2:]
        assert abort["choices"][0]["finish_reason"] == "abort"
        assert done["usage"]["completion_tokens"] < 2000
    assert found["7"][-1]["usage"]["completion_tokens"] == 2000


@pytest.mark.parametrize("abruptly", [False, True])
def test_a_client_that_leaves_frees_everything(server, abruptly):
    with connect(server.url.replace("http", "ws") + "/v1/stream") as socket:
        for index in range(12):
            send(socket, type="completion", id=str(index), **LONG)
        for _ in range(3):
            socket.recv(60)
        if abruptly:
            socket.socket.close()
    server.wait_until_idle()
    assert [line for line in server.lines if "Traceback" in line or " ERROR " in line] == []
