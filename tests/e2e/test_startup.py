"""A real server while it loads a model, which a plug-in holds open until the test lets it go on."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from websockets.sync.client import connect

import successor_model
from browser import PROGRAM, Browser
from server_process import Server, wait_until

pytestmark = pytest.mark.slow

HOLD = """
from pathlib import Path
from enginecore.worker.weights import checkpoint

read = checkpoint.tensors

def tensors(*arguments):
    for number, found in enumerate(read(*arguments)):
        if number == 4:
            Path({gate!r}).read_bytes()  # a pipe: until somebody has written and closed it
        yield found

checkpoint.tensors = tensors
"""


class Held:
    """A server whose model stops loading at its fifth tensor."""

    def __init__(self, folder: Path) -> None:
        self.gate = folder / "gate"
        os.mkfifo(self.gate)
        (folder / "hold.py").write_text(HOLD.format(gate=str(self.gate)))
        model = successor_model.write(folder / "tiny")
        flags = ("--device", "cpu", "--num-blocks-override", "64", "--served-model-name", "tiny")
        plugin = ("--plugins", "hold", "--plugin-path", str(folder))
        self.server = Server(model, *flags, *plugin, wait=False)
        self.opened = False

    def health(self) -> httpx.Response:
        return httpx.get(f"{self.server.url}/health")

    def wait_for_weights(self) -> None:
        """Wait until its progress is that of the tensors before the gate."""
        wait_until(lambda: bool(self.health().json().get("loading", {}).get("percent")))

    def open(self) -> None:
        if not self.opened:
            self.opened = True
            self.gate.write_bytes(b"go")


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Held]:
    started = Held(tmp_path)
    yield started
    started.server.stop()


def test_progress_shows_from_the_worker_to_the_client(held):
    held.wait_for_weights()
    response = held.health()
    assert response.status_code == 503
    told = response.json()["loading"]
    assert told["phase"] == "reading weights"
    assert 0 < told["percent"] < 100
    assert response.json()["error"]["message"].startswith("the model is loading: reading weights, ")
    for route in ("completions", "chat/completions", "responses"):
        refused = httpx.post(f"{held.server.url}/v1/{route}", json={})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_loading")
        assert 1 <= int(refused.headers["retry-after"]) <= 60
    metrics = httpx.get(f"{held.server.url}/metrics")
    assert metrics.status_code == 200
    assert re.search(r'^octavo_engine_up{engine="0",model_name="tiny"} 0.0$', metrics.text, re.MULTILINE)
    held.open()
    wait_until(lambda: held.health().status_code == 200)
    assert held.health().json() == {"status": "ok"}
    answer = held.server.client.completions.create(model="tiny", prompt="a", max_tokens=1, temperature=0)
    assert answer.choices[0].text == "b"


def test_the_processes_that_listen_have_no_torch(held):
    held.wait_for_weights()
    supervisor = psutil.Process(held.server.process.pid)
    listening = [supervisor, *(one for one in supervisor.children() if "octavo_serve" in str(one.cmdline()))]
    assert len(listening) == 2
    for process in listening:
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        assert "/torch/" not in maps, process.cmdline()
        assert "triton" not in maps, process.cmdline()


@pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium")
def test_the_page_shows_the_progress(held):
    held.wait_for_weights()
    percent = held.health().json()["loading"]["percent"]
    with Browser() as browser, browser.page() as page:
        page.show(1280, 900)
        page.open(f"{held.server.url}/")
        page.wait_for("document.querySelector('#state').dataset.state === 'waiting'")
        page.wait_for("document.querySelector('#state').textContent.startsWith('loading: reading weights')")
        page.wait_for(f"document.querySelector('#load').value === {percent}")
        assert page.eval("document.querySelector('#load').hidden") is False
        assert re.fullmatch(rf"{percent} %, \d+ s", page.text("#load-facts"))
        held.open()
        page.wait_for("document.querySelector('#state').dataset.state === 'ready'")
        assert page.eval("document.querySelector('#load').hidden") is True
        assert page.eval("document.querySelector('#load-facts').hidden") is True
        assert page.errors == []


def test_an_http_process_that_starts_later_shows_it_too(held):
    held.wait_for_weights()
    supervisor = psutil.Process(held.server.process.pid)
    [http] = [one for one in supervisor.children() if "octavo_serve.process" in one.cmdline()]
    http.kill()
    wait_until(lambda: not http.is_running() or http.status() == psutil.STATUS_ZOMBIE)
    held.wait_for_weights()  # which the next process answers, that was told of it when it started
    with connect(f"{held.server.url.replace('http', 'ws')}/v1/stream") as socket:
        socket.send('{"type": "completion", "id": "a", "prompt": "a"}')
        assert "reading weights" in str(socket.recv(60))
