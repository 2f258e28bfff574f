"""Start an engine core as a process of its own and talk to it. Needs no torch."""

import asyncio
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable

import msgspec
import zmq
import zmq.asyncio

from enginecore import logs
from enginecore.codec import Decoder, Encoder
from enginecore.config import EngineConfig
from enginecore.errors import EngineDeadError, ModelError
from enginecore.messages import CoreMessage, EngineLimits, Failed, FrontendMessage
from enginecore.private_folder import private_folder
from enginecore.threads import user_environment

_START = msgspec.json.Decoder(EngineLimits | Failed)
_SECONDS_TO_END = 5.0
_COMMAND = (sys.executable, "-P", "-m", "enginecore.core.process")
"""-P: files in the working folder are not taken for libraries of their names."""


class CoreProcess:
    """An engine core and the private folder in which its socket lies."""

    def __init__(self, config: EngineConfig) -> None:
        self._folder = private_folder()
        self.address = f"ipc://{self._folder}/core"
        self._serving = False
        settings = {"config": config, "address": self.address, "log": logs.current()}
        # A session of its own, so that Ctrl-C in a terminal reaches the front-end alone, which then decides.
        self._process = subprocess.Popen(
            _COMMAND,
            env=user_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(settings) + b"\n")
        self._process.stdin.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self) -> EngineLimits:
        """Block until the model is loaded.

        Raises:
            ModelError: the core refused to start; the message is its own.
            EngineDeadError: the process ended without a word.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise EngineDeadError(f"the engine process ended while starting, {self._ending()}")
        message = _START.decode(line)
        if isinstance(message, Failed):
            raise ModelError(message.message)
        self._serving = True
        return message

    def watch(self, on_end: Callable[[str], None]) -> None:
        """Call `on_end`, from another thread, with a description when the process has ended."""
        threading.Thread(target=lambda: on_end(self._wait_end()), daemon=True, name="core-watch").start()

    def stop(self) -> None:
        """End the process, by force if it loads a model or does not go by itself, and remove its socket."""
        if not self._serving:
            self._process.kill()
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _wait_end(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        ending = f"the engine process ended, {self._ending()}"
        if not line:
            return ending
        last = _START.decode(line)
        return last.message if isinstance(last, Failed) else ending

    def _ending(self) -> str:
        code = self._process.wait()
        return f"killed by signal {-code}" if code < 0 else f"exit code {code}"


class CoreClient:
    """One front-end's connection to a core."""

    def __init__(self, address: str) -> None:
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, os.urandom(8))
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            self._socket.setsockopt(option, 0)
        self._socket.connect(address)
        self._encoder = Encoder()
        self._decoder: Decoder[CoreMessage] = Decoder(CoreMessage)

    def send(self, message: FrontendMessage) -> None:
        """Queue a message; it leaves in the background, in order."""
        sent = self._socket.send(self._encoder.encode(message))
        if isinstance(sent, asyncio.Future):
            sent.add_done_callback(_raise_failure)

    async def receive(self) -> CoreMessage:
        """Return the next message."""
        return self._decoder.decode(await self._socket.recv())

    def close(self) -> None:
        """Close the connection; what was not sent is dropped."""
        self._socket.close()


def _raise_failure(sent: asyncio.Future) -> None:
    if not sent.cancelled() and sent.exception() is not None:
        raise EngineDeadError("a message to the engine could not be sent") from sent.exception()
