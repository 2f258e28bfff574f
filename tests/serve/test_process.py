"""The server as a process: ports, signals, exit codes, and what it never imports."""

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from pathlib import Path

import httpx
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

HERE = Path(__file__).parent
HEAVY = ("torch", "triton", "transformers", "fastapi", "uvicorn", "tokenizers", "zmq")
"""Modules that are slow to import."""


class Server:
    """A server over the scripted engine; `tell` gives the engine its orders."""

    def __init__(self, *flags: str, port: int = 0) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "serve_scripted.py"), "--port", str(port), *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self.url = self.wait_for(r"listening on ((?:https?://|unix:)\S+),")[1]
        self.client = httpx.Client(base_url=self.url, timeout=10)

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Read standard error up to a line that holds `pattern`."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))
            found = re.search(pattern, line)
            if found:
                return found
        raise AssertionError(f"the server ended without {pattern!r}: {self.lines}")

    def tell(self, order: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(order + "\n")
        self.process.stdin.flush()

    def load(self) -> None:
        self.tell("load")
        self.wait_for("ready on")

    def finish(self) -> int:
        """Wait for the end; return the exit status."""
        self.lines += self.process.communicate(timeout=10)[1].splitlines()
        return self.process.returncode


@contextlib.contextmanager
def server(*flags: str, port: int = 0) -> Generator[Server]:
    started = Server(*flags, port=port)
    try:
        yield started
    finally:
        started.process.kill()
        started.process.communicate()
        started.client.close()


class Stream:
    """A streaming request, read in a thread; `first` is set once something came."""

    def __init__(self, served: Server) -> None:
        self.text = ""
        self.first = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(served.url,))
        self._thread.start()

    def _read(self, url: str) -> None:
        body = {"prompt": "hi", "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=10) as response:
            for piece in response.iter_text():
                self.text += piece
                self.first.set()

    def finish(self) -> list[str | None]:
        """Wait for the end; return the finish reasons of the chunks."""
        self._thread.join()
        events = self.text.removesuffix("\n\n").split("\n\n")
        assert events[-1] == "data: [DONE]"
        return [json.loads(event[6:])["choices"][0]["finish_reason"] for event in events[:-1]]


def test_the_server_answers_while_the_model_loads_and_has_imported_little():
    with server() as served:  # whose engine is held back until it is told to load
        assert served.client.get("/health").status_code == 503
        served.tell("modules")
        imported = json.loads(served.wait_for(r"modules (\[.*\])")[1])
    assert {"torch", "triton", "transformers", "tokenizers"}.isdisjoint(imported)
    # The time to the first answer grows with them; there were 649 when this was written.
    assert len(imported) < 800


def test_the_port_listens_before_anything_heavy_is_imported():
    """Connections wait in its backlog from then on: nothing of the web stack, numpy or torch came before."""
    code = (
        "import sys\n"
        "from octavo_serve import cli, listening\n"
        "listen = listening.open_listener\n"
        "def spy(options):\n"
        "    listener = listen(options)\n"
        f"    print(len(sys.modules), [m for m in (*{HEAVY}, 'numpy', 'starlette') if m in sys.modules])\n"
        "    print(listener.getsockname()[1] > 0)\n"
        "    sys.exit(0)\n"
        "listening.open_listener = spy\n"
        "sys.exit(cli.main())\n"
    )
    done = python(code, "--port", "0")
    assert done.returncode == 0, done.stderr
    count, heavy, listens = re.match(r"(\d+) (\[.*\])\n(True)\n", done.stdout).groups()
    assert (heavy, listens) == ("[]", "True")
    assert int(count) < 250  # 192 when this was written


def test_progress_shows_until_the_model_is_loaded():
    with server() as served:
        served.tell("percent 30")
        while "loading" not in (told := served.client.get("/health").json()):
            pass
        assert (told["loading"]["phase"], told["loading"]["percent"]) == ("reading weights", 30)
        served.tell("percent 60")
        while (told := served.client.get("/health").json())["loading"]["percent"] != 60:
            assert told["loading"]["percent"] == 30
        refused = served.client.post("/v1/completions", json={"prompt": "hi"})
        assert refused.status_code == 503
        assert "reading weights, 60 %" in refused.json()["error"]["message"]
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        served.load()
        assert served.client.get("/health").status_code == 200
        served.tell("allow 1")
        assert served.client.post("/v1/completions", json={"prompt": "hi"}).status_code == 200


def test_life_from_start_to_sigterm():
    with server() as served:
        for route, status in (("/health", 503), ("/v1/models", 503), ("/version", 200)):
            assert served.client.get(route).status_code == status
        assert served.client.post("/v1/completions", json={"prompt": "hi"}).status_code == 503
        served.load()
        assert served.client.get("/health").status_code == 200
        served.tell("allow 1")
        answer = served.client.post("/v1/completions", json={"prompt": "hi"}).json()
        assert answer["choices"][0]["text"] == "abc"
        served.process.send_signal(signal.SIGTERM)
        assert served.finish() == 0
        assert "engine shut down" in served.lines
        assert "drain over: every request has finished" in served.lines[-2]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_model_loads(number):
    with server() as served:
        served.process.send_signal(number)
        assert served.finish() == 0
        assert [line for line in served.lines if "Traceback" in line] == []
        assert "engine shut down" in served.lines


def test_requests_are_aborted_at_once_when_no_time_is_given():
    with server("--shutdown-timeout", "0") as served:
        served.load()
        stream = Stream(served)
        served.tell("allow 1")
        assert stream.first.wait(10)
        served.process.send_signal(signal.SIGTERM)
        assert stream.finish() == [None, "abort"]
        assert served.finish() == 0


def test_requests_finish_while_the_server_drains():
    with server() as served:
        served.load()
        stream = Stream(served)
        served.tell("allow 1")
        assert stream.first.wait(10)
        served.process.send_signal(signal.SIGTERM)
        while served.client.get("/health").status_code == 200:
            time.sleep(0.01)
        refused = served.client.post("/v1/completions", json={"prompt": "hi"})
        assert refused.status_code == 503
        assert "shutting down" in refused.json()["error"]["message"]
        served.tell("allow 100")
        assert stream.finish() == [None, None, None, "stop"]
        assert served.finish() == 0
        logged = " / ".join(served.lines)
        assert re.search("SIGTERM received .*draining: 1 requests .*drain over: every request has", logged)


def test_a_websocket_gets_its_last_frames_when_no_time_is_given():
    with server("--shutdown-timeout", "0") as served:
        served.load()
        with connect(served.url.replace("http", "ws") + "/v1/stream") as socket:
            socket.send('{"type": "completion", "id": "a", "prompt": "hi"}')
            served.tell("allow 1")
            frames = [json.loads(socket.recv(10))]
            served.process.send_signal(signal.SIGTERM)
            with pytest.raises(ConnectionClosed) as closed:
                while True:
                    frames.append(json.loads(socket.recv(10)))
        assert [frame["type"] for frame in frames] == ["chunk", "chunk", "done"]
        assert frames[1]["choices"][0]["finish_reason"] == "abort"
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1012
        assert served.finish() == 0


def test_a_websocket_goes_on_while_the_server_drains():
    with server() as served:
        served.load()
        with connect(served.url.replace("http", "ws") + "/v1/stream") as socket:
            socket.send('{"type": "completion", "id": "a", "prompt": "hi"}')
            served.tell("allow 1")
            socket.recv(10)
            served.process.send_signal(signal.SIGTERM)
            while served.client.get("/health").status_code == 200:
                time.sleep(0.01)
            socket.send('{"type": "completion", "id": "b", "prompt": "hi"}')
            refused = json.loads(socket.recv(10))
            assert (refused["type"], refused["id"]) == ("error", "b")
            assert "shutting down" in refused["error"]["message"]
            served.tell("allow 100")
            frames = [json.loads(socket.recv(10)) for _ in range(4)]
            assert [frame["type"] for frame in frames] == ["chunk", "chunk", "chunk", "done"]
        assert served.finish() == 0


def test_an_engine_that_dies_while_the_server_drains_is_no_clean_end():
    with server("--shutdown-timeout", "300") as served:
        served.load()
        stream = Stream(served)
        served.tell("allow 1")
        assert stream.first.wait(10)
        served.process.send_signal(signal.SIGTERM)
        while served.client.get("/health").status_code == 200:
            time.sleep(0.01)
        served.tell("die")
        assert served.finish() == 1
        assert any("ending with exit status 1: killed by signal 9" in line for line in served.lines)
        assert not any("drain over" in line for line in served.lines)


def test_a_second_signal_ends_the_drain():
    with server("--shutdown-timeout", "300") as served:
        served.load()
        stream = Stream(served)
        served.tell("allow 1")
        assert stream.first.wait(10)
        served.process.send_signal(signal.SIGINT)
        while served.client.get("/health").status_code == 200:
            time.sleep(0.01)
        served.process.send_signal(signal.SIGINT)
        assert stream.finish() == [None, "abort"]
        assert served.finish() == 0
        assert any("drain over: aborting 1 requests" in line for line in served.lines)


def test_a_model_that_cannot_be_loaded():
    with server() as served:
        served.tell("fail")
        assert served.finish() == 2
        assert served.lines[-1] == "octavo-serve: there is no folder or file tiny"


def test_engine_death_ends_the_server_with_an_error():
    with server() as served:
        served.load()
        stream = Stream(served)
        served.tell("allow 1")
        assert stream.first.wait(10)
        served.tell("die")
        stream._thread.join()
        assert '"error":{"message":"killed by signal 9"' in stream.text
        assert served.finish() == 1
        reasons = [line for line in served.lines if "ERROR" in line]
        assert len(reasons) == 1
        assert reasons[0].endswith("octavo_serve.server: ending with exit status 1: killed by signal 9")


def test_a_client_that_hangs_up_leaves_no_trace_in_the_log():
    with server() as served:
        served.load()
        host, port = served.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as client:
            body = b'{"prompt": "hi", "stream": true}'
            head = "POST /v1/completions HTTP/1.1\r\nHost: s\r\nContent-Type: application/json\r\n"
            client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            while served.client.get("/load").json()["server_load"] == 0:
                time.sleep(0.01)
        while served.client.get("/load").json()["server_load"] == 1:
            time.sleep(0.01)
        served.process.send_signal(signal.SIGTERM)
        assert served.finish() == 0
        assert [line for line in served.lines if "rror" in line or "Traceback" in line] == []


def test_a_port_can_be_taken_again_at_once():
    port = 0  # the first server takes a free one
    for _ in range(2):
        with server(port=port) as served:
            assert served.client.get("/health").status_code == 503
            port = int(served.url.rpartition(":")[2])
            served.process.send_signal(signal.SIGTERM)
            assert served.finish() == 0


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    run = [sys.executable, "-c", code, *arguments]
    return subprocess.run(run, capture_output=True, text=True, timeout=30, check=False)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return python("import sys; from octavo_serve.cli import main; sys.exit(main())", *arguments)


def test_a_port_in_use():
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        code = (
            "import sys; from octavo_serve.cli import main\n"
            "try: sys.exit(main())\n"
            f"finally: print([m for m in {HEAVY} if m in sys.modules])"
        )
        done = python(code, "--port", str(port))
    assert done.returncode == 2
    assert done.stdout == "[]\n"
    assert done.stderr == f"octavo-serve: cannot listen on 127.0.0.1, port {port}: Address already in use\n"


def test_a_signal_before_the_server_starts_is_not_lost():
    """It comes where Python drops exceptions: in a weak reference's callback, of which imports have many."""
    code = (
        "import signal, sys, weakref\n"
        "from octavo_serve import cli\n"
        "def serve():\n"
        "    thing = type('Thing', (), {})()\n"
        "    weak = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGTERM))\n"
        "    del thing\n"
        "    print('went on')\n"
        "cli._serve = serve\n"
        "sys.exit(cli.main())"
    )
    done = python(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--host", "no.such.host.invalid"], "cannot listen on no.such.host.invalid, port 8000"),
        (["--port", "70000"], "port must be between 0 and 65535, got 70000"),
        (["--port", "x"], "port must be an integer, got 'x' (from --port)"),
        (["--shutdown-timeout", "nan"], "shutdown_timeout must be finite"),
        (["--api-key", ""], "api_key is empty"),
        (["--api-key", "two words"], "api_key: a key may hold visible ASCII characters only"),
        (["--api-key-file", "/no/such"], "api_key_file /no/such: No such file"),
        (["--max-requests-per-key", "2"], "max_requests_per_key needs api_key"),
        (["--max-queue", "0"], "max_queue must be at least 1"),
        (["--root-path", "llm/"], "root_path must be like /llm"),
        (["--ssl-keyfile", "k"], "ssl_keyfile and ssl_ca_certs need ssl_certfile"),
        (["--ssl-certfile", "/no/such"], "ssl_certfile /no/such: No such file"),
        (["--uds", ""], "uds is empty"),
        (["--cors-origins", "example.com"], "cors_origins must hold origins like https://example.com"),
        (["--cors-origins", "https://example.com/"], "cors_origins must hold origins like"),
        (["--uds", "/no/such/folder/s"], "cannot listen on /no/such/folder/s: No such file"),
        (["--uds", __file__], f"cannot listen on {__file__}: a file is in the way"),
        (["--max-num-seqs", "0"], "max_num_seqs must be at least 1"),
        (["serve", "one", "--model", "other"], "the model is named twice: one and --model other"),
        (["serve", "m", "--trust-remote-code"], "trust_remote_code=true is not supported: no code"),
        (["--max-num"], "unrecognized arguments: --max-num"),
        (["--dtype", "int3"], "argument --dtype: invalid choice: 'int3'"),
    ],
)
def test_wrong_usage_is_one_line(arguments, said):
    done = command(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(f"octavo-serve: {said}")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_the_server_process_never_imports_torch():
    code = (
        "import sys; sys.argv = ['octavo-serve', '--port', '0']\n"
        "import enginecore.async_engine, enginecore.options, octavo_serve.cli, octavo_serve.server\n"
        "print([m for m in ('torch', 'triton', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_help_and_version_load_nothing_heavy():
    code = (
        "import sys; from octavo_serve.cli import main\n"
        "try: main()\n"
        "except SystemExit as exit: assert exit.code == 0\n"
        f"print('heavy:', [m for m in {HEAVY} if m in sys.modules])"
    )
    for flag, shown in (("--help", "--max-num-seqs N"), ("--version", "octavo-serve 0.1.0")):
        done = python(code, flag)
        assert shown in done.stdout
        assert done.stdout.endswith("heavy: []\n")
