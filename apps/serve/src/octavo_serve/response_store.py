"""Responses that conversations go on from, in files that all HTTP processes of a server share.

The folder is the server's own and goes with it: nothing is kept beyond its end.
"""

import itertools
import logging
import os
import re
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

MAX_RESPONSES = 10_000
MAX_BYTES = 256 << 20
"""Beyond either, those that were stored or read longest ago are forgotten."""

_ID = re.compile(r"resp-[A-Za-z0-9._-]{1,128}")
_LOOK_EVERY = 64
"""Files that are written between two looks at how much there is."""

logger = logging.getLogger(__name__)


class StoredResponse(msgspec.Struct):
    """A response, and the conversation that it ends."""

    response: dict[str, Any]
    items: list[dict[str, Any]]
    """All items before the response's own output, as they came in."""


class ResponseStore:
    """Files by id in one folder."""

    def __init__(self, folder: Path, *, most: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._folder = folder
        self._most = most
        self._max_bytes = max_bytes
        self._written = itertools.count(1)
        # A look at thousands of files takes tens of milliseconds, which streams must not wait for.
        self._looking = ThreadPoolExecutor(1, "response-store")

    def put(self, stored: StoredResponse) -> None:
        """Keep a response, and soon forget old ones if there are too many."""
        path = self._path(stored.response["id"])
        assert path is not None, "our own ids are names of files"
        # Whole or not at all, for other processes that read it.
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.write_bytes(msgspec.msgpack.encode(stored))
        partial.rename(path)
        if next(self._written) % min(_LOOK_EVERY, self._most) == 0:
            self._looking.submit(self._forget_old).add_done_callback(_log_failure)

    def settle(self) -> None:
        """Wait until what is too much has been forgotten."""
        self._looking.submit(lambda: None).result()

    def get(self, response_id: str) -> StoredResponse | None:
        """Return a response, None if there is none."""
        path = self._path(response_id)
        if path is None:
            return None
        try:
            content = path.read_bytes()
            os.utime(path)
        except FileNotFoundError:
            return None
        return msgspec.msgpack.decode(content, type=StoredResponse)

    def remove(self, response_id: str) -> bool:
        """Forget a response; return whether there was one."""
        path = self._path(response_id)
        if path is None:
            return False
        try:
            path.unlink()
        except FileNotFoundError:
            return False
        return True

    def _path(self, response_id: str) -> Path | None:
        return self._folder / response_id if _ID.fullmatch(response_id) else None

    def _forget_old(self) -> None:
        found = []
        for path in self._folder.iterdir():
            try:
                state = path.stat()
            except FileNotFoundError:
                continue  # another process has just forgotten it
            found.append((state.st_mtime_ns, state.st_size, path))
        found.sort(reverse=True)
        total = 0
        for place, (_, size, path) in enumerate(found):
            total += size
            if place >= self._most or total > self._max_bytes:
                path.unlink(missing_ok=True)


def _log_failure(look: Future[None]) -> None:
    error = look.exception()
    if error is not None:
        logger.error("old responses could not be forgotten: %s", error)
