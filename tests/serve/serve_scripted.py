"""A server process over the scripted engine, which is told what to do on standard input.

Each line is `load` (the model is loaded), `percent N` (so much of it is), `fail` (it cannot be), `allow N`
(let N outputs pass), `die`, or `modules` (print the names of all that is imported).
"""

import asyncio
import json
import sys
import threading
import time
from typing import Any, cast
from unittest.mock import patch

from scripted_engine import ScriptedEngine, say

from enginecore.config import EngineConfig
from enginecore.errors import ModelError
from enginecore.messages import Loading, RankLoading
from enginecore.options import OptionParser
from octavo_serve import cli
from octavo_serve.config import ServeConfig
from octavo_serve.listening import open_listener
from octavo_serve.server import run
from octavo_serve.supervisor import announce


class ToldEngine(ScriptedEngine):
    def __init__(self) -> None:
        super().__init__(script=lambda prompt, params: say("abc"))
        self.is_ready = False
        self.allowed = 0

    async def ready(self):
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._listen, args=(loop,), daemon=True).start()
        return await super().ready()

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(self._obey, line.split())

    def _obey(self, words: list[str]) -> None:
        match words:
            case ["load"]:
                self.ranks_loading.clear()
                self.loading.set()
            case ["percent", done]:
                progress = Loading("reading weights", int(done), 100)
                self.ranks_loading[0] = RankLoading(0, 0, time.monotonic(), progress)
            case ["fail"]:
                self.failure = ModelError("there is no folder\nor file tiny")
                self.loading.set()
            case ["allow", count]:
                self.allow(int(count))
            case ["modules"]:
                print("modules", json.dumps(sorted(sys.modules)), file=sys.stderr)
            case ["die"]:
                self.die("killed by signal 9")

    async def shutdown(self) -> None:
        print("engine shut down", file=sys.stderr)


def serve() -> int:
    parser = OptionParser("octavo-serve", "", "0", {"engine": EngineConfig, "server": ServeConfig})
    engine, options = parser.read()
    listener = open_listener(options)
    announce(listener, engine, options)
    return run(listener, cast(Any, ToldEngine), options)


with patch.object(cli, "_serve", serve):
    sys.exit(cli.main())
