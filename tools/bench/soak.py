"""Send a server very many requests and look at the memory of its processes.

uv run python tools/bench/soak.py --requests 100000

Everything is the real server, but for the executor, which has no model. Of ten requests five are answered
whole, four are streamed, and one client hangs up within its stream. After each tenth of the requests the
resident memory of every process is printed, in MiB, and at the end how many bytes each process has grown by
for a request of the second half.
"""

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import uvloop
from streams import address_of, plain_pieces, wait_until_ready

_PROCESSES = ("octavo_serve.process", "core.process")
_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)


class Client:
    """Sends requests over one connection, one after the other."""

    def __init__(self, host: str, port: int) -> None:
        self._address = host, port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def send(self, number: int) -> None:
        """Send request `number` and read its answer, or the beginning of it."""
        streamed, leaves = number % 10 >= 5, number % 10 == 9
        tokens = 2000 if leaves else 4
        body = {"prompt": [5, 6, number % 4000], "max_tokens": tokens, "ignore_eos": True, "stream": streamed}
        reader, writer = await self._connection()
        content = json.dumps(body).encode()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: soak\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(content), content)
        )
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"request {number} was refused: {head!r}")
        if leaves:
            await reader.readuntil(b"\n\n")
            self.close()
        elif streamed:
            await reader.readuntil(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        else:
            length = _LENGTH.search(head)
            assert length is not None, "a whole answer has a length"
            answer = json.loads(await reader.readexactly(int(length[1])))
            assert answer["usage"]["completion_tokens"] == tokens, answer

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._reader is None or self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(*self._address)
        return self._reader, self._writer


async def send_all(host: str, port: int, numbers: range, clients: int) -> None:
    """Send the requests, so many at once."""
    unsent = iter(numbers)

    async def send_some(client: Client) -> None:
        for number in unsent:
            await client.send(number)
        client.close()

    await asyncio.gather(*(send_some(Client(host, port)) for _ in range(clients)))


def resident(pid: int) -> dict[str, int]:
    """Return the resident bytes of a server's processes, by what they run."""
    found: dict[str, int] = {}
    for process in psutil.Process(pid).children(recursive=True):
        line = " ".join(process.cmdline())
        name = next((part for part in _PROCESSES if part in line), None)
        if name is not None:
            found[name] = found.get(name, 0) + process.memory_info().rss
    return found


def soak(requests: int, clients: int) -> dict[str, float]:
    """Run the server; return how many bytes its processes grew by for a request of the second half."""
    with tempfile.TemporaryDirectory() as folder:
        log, names = Path(folder) / "steps", Path(folder) / "ids"
        plain_pieces(4000)[0].tofile(names)
        command = [str(Path(sys.executable).parent / "octavo-serve"), "demo", "--port", "0"]
        command += ["--plugins", "paced_executor", "--plugin-path", str(Path(__file__).parent)]
        command += ["--max-num-seqs", str(clients), "--log-level", "warning", "--max-model-len", "8192"]
        # So few that the prefix cache, which may grow up to them, is full within the first tenth.
        command += ["--num-blocks-override", str(130 * clients)]
        environment = os.environ | {"PACED_STEPS": "0", "PACED_LOG": str(log), "PACED_IDS": str(names)}
        server = subprocess.Popen(command, env=environment)
        try:
            host, port = address_of(server)
            wait_until_ready(host, port)
            sizes = []
            for tenth in range(10):
                numbers = range(requests * tenth // 10, requests * (tenth + 1) // 10)
                uvloop.run(send_all(host, port, numbers, clients))
                sizes.append(resident(server.pid))
                print(numbers.stop, {name: round(size / 2**20, 1) for name, size in sizes[-1].items()})
        finally:
            server.terminate()
            server.wait()
    return {name: (sizes[-1][name] - sizes[4][name]) / (requests / 2) for name in sizes[-1]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--clients", type=int, default=64, help="requests at once")
    options = parser.parse_args()
    print(json.dumps({"bytes_a_request": soak(options.requests, options.clients)}))


if __name__ == "__main__":
    main()
