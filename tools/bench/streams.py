"""Measure the server's own work: many streams of tokens from an engine without a model, to clients of HTTP.

uv run python tools/bench/streams.py --streams 1000 --tokens 200 --steps 30

Everything is the real server, but for the executor, whose steps give each stream a token `--steps` times a
second, or as fast as the core goes with 0. The clients, in this process, look at bytes as they come: how many
tokens a second arrive, how long after its step each does, and whether one is lost or out of order.
"""

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import psutil
import uvloop

from enginecore.frontend.text.loading import load_tokenizer
from enginecore.model_files import locate

_PIECE = re.compile(rb'"text":"((?:[^"\\]|\\.)*)"')


class Stream(asyncio.Protocol):
    """One client: notes when bytes came, and what text they held."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.arrivals: list[tuple[float, int]] = []
        """When bytes came, and how many there were before and with them."""
        self.received = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.received += data
        self.arrivals.append((time.monotonic(), len(self.received)))
        if b"data: [DONE]" in data[-64:]:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)


async def read_streams(host: str, port: int, streams: int, tokens: int) -> list[Stream]:
    """Open all streams and read them to their ends."""
    body = json.dumps(
        {"prompt": [5, 6, 7], "max_tokens": tokens, "ignore_eos": True, "stream": True, "temperature": 0}
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode()
    loop = asyncio.get_running_loop()
    opened = [loop.create_connection(lambda: Stream(head + body), host, port) for _ in range(streams)]
    protocols = [protocol for _, protocol in await asyncio.gather(*opened)]
    await asyncio.gather(*(protocol.done for protocol in protocols))
    for protocol in protocols:
        if not protocol.received.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"a stream was refused: {bytes(protocol.received[:400])!r}")
    return protocols


class Steps(NamedTuple):
    """Steps of the engine: every stream's text is that of some neighbouring ones."""

    text: str
    offsets: np.ndarray
    """int64 [n + 1]: where each step's piece begins."""
    times: np.ndarray
    """float64 [n]: when it was there."""

    @classmethod
    def read(cls, log: Path, pieces: list[str]) -> "Steps":
        """Read the executor's log; `pieces` are the texts of its tokens."""
        rows = np.fromfile(log).reshape(-1, 2)
        texts = [pieces[int(number) % len(pieces)] for number in rows[:, 1]]
        return cls("".join(texts), np.cumsum([0, *map(len, texts)]), rows[:, 0])

    def delays(self, stream: Stream, tokens: int) -> np.ndarray:
        """Return how long after its step each of a stream's tokens came, in seconds.

        Raises:
            AssertionError: a token is missing, or out of order.
        """
        arrivals = iter(stream.arrivals)
        when, upto = next(arrivals)
        lengths, times, texts = [], [], []
        for event in _PIECE.finditer(stream.received):
            while event.end() > upto:
                when, upto = next(arrivals)
            texts.append(json.loads(b'"' + event[1] + b'"'))
            lengths.append(len(texts[-1]))
            times.append(when)
        text = "".join(texts)
        start = self.text.find(text)
        first = int(np.searchsorted(self.offsets, start))
        assert start >= 0 and self.offsets[first] == start, "the text is not that of neighbouring steps"
        assert self.offsets[first + tokens] == start + len(text), "tokens are missing"
        came = np.searchsorted(np.cumsum(lengths), self.offsets[first + 1 : first + tokens + 1] - start)
        return np.array(times)[came] - self.times[first : first + tokens]


def plain_pieces(count: int) -> tuple[np.ndarray, list[str]]:
    """Return ids of the demo's vocabulary, int32 [count], and the text of each: a blank and letters."""
    tokenizer = load_tokenizer(locate("demo"), None)
    assert tokenizer is not None, "the demo has a tokenizer"
    found = ((number, tokenizer.token_text(number)) for number in range(tokenizer.vocab_size))
    plain = [(number, text) for number, text in found if re.fullmatch(" [a-zA-Z]{3,}", text)][:count]
    return np.array([number for number, _ in plain], np.int32), [text for _, text in plain]


def measure(streams: int, tokens: int, steps: float, processes: int) -> dict[str, float]:
    """Run the server and the clients once."""
    with tempfile.TemporaryDirectory() as folder:
        log, names = Path(folder) / "steps", Path(folder) / "ids"
        ids, pieces = plain_pieces(4000)
        ids.tofile(names)
        command = [str(Path(sys.executable).parent / "octavo-serve"), "demo", "--port", "0"]
        command += ["--plugins", "paced_executor", "--plugin-path", str(Path(__file__).parent)]
        command += ["--max-num-seqs", str(streams), "--max-num-batched-tokens", str(16 * streams)]
        command += ["--api-server-count", str(processes), "--log-level", "warning", "--max-model-len", "8192"]
        environment = os.environ | {"PACED_STEPS": str(steps), "PACED_LOG": str(log), "PACED_IDS": str(names)}
        server = subprocess.Popen(command, env=environment)
        try:
            host, port = address_of(server)
            wait_until_ready(host, port)
            uvloop.run(read_streams(host, port, min(streams, 20), 10))
            before = _cpu_seconds(server.pid)
            began, own = time.monotonic(), time.process_time()
            done = uvloop.run(read_streams(host, port, streams, tokens))
            seconds, own = time.monotonic() - began, time.process_time() - own
            used = {name: value - before.get(name, 0.0) for name, value in _cpu_seconds(server.pid).items()}
            steps_sent = Steps.read(log, pieces)
        finally:
            server.terminate()
            server.wait()
    waited = np.concatenate([steps_sent.delays(stream, tokens) for stream in done])
    return {
        "tokens_per_s": streams * tokens / seconds,
        "events_per_token": sum(len(_PIECE.findall(stream.received)) for stream in done) / waited.size,
        **{f"ms_after_step p{share}": float(np.percentile(waited, share) * 1e3) for share in (50, 90, 99)},
        **{f"cpu_s {name}": value for name, value in used.items()},
        "cpu_s clients": own,
        "seconds": seconds,
    }


def _cpu_seconds(pid: int) -> dict[str, float]:
    found: dict[str, float] = {}
    for process in psutil.Process(pid).children(recursive=True):
        line = " ".join(process.cmdline())
        name = next((part for part in ("octavo_serve.process", "core.process") if part in line), "other")
        times = process.cpu_times()
        found[name] = found.get(name, 0.0) + times.user + times.system
    return found


def address_of(server: subprocess.Popen) -> tuple[str, int]:
    while True:
        for connection in psutil.Process(server.pid).net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN:
                return "127.0.0.1", connection.laddr.port
        time.sleep(0.05)


def wait_until_ready(host: str, port: int) -> None:
    import httpx

    while httpx.get(f"http://{host}:{port}/health", timeout=60).status_code != 200:
        time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=200, help="of each stream")
    parser.add_argument("--steps", type=float, default=0, help="a second; 0: as fast as the core goes")
    parser.add_argument("--processes", type=int, default=1, help="that speak HTTP")
    options = parser.parse_args()
    print(json.dumps(measure(options.streams, options.tokens, options.steps, options.processes), indent=1))


if __name__ == "__main__":
    main()
