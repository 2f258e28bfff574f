"""The file of a batch's requests: read before the model loads, and again as there is room in the engine."""

import codecs
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import msgspec

from enginecore.errors import ConfigError
from octavo_offline.answer_file import Earlier

STANDARD_INPUT = "-"

_IN_MEMORY = 64 * 2**20
"""Bytes of a stream that are held in memory; a longer one goes to a temporary file."""


class Numbered(NamedTuple):
    """A line that is not blank, and its number, from 1."""

    number: int
    line: bytes


class _Id(msgspec.Struct):
    custom_id: Any = None


def open_requests(stack: ExitStack, source: str) -> BinaryIO:
    """Return the file `source`, or a copy of it where it can be read only once, as a pipe.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        if source == STANDARD_INPUT:
            given: BinaryIO = sys.stdin.buffer
        else:
            given = stack.enter_context(Path(source).expanduser().open("rb"))
        if given.seekable():
            return given
        copy = stack.enter_context(tempfile.SpooledTemporaryFile(_IN_MEMORY))  # noqa: SIM115
        shutil.copyfileobj(given, copy)
        copy.seek(0)
    except OSError as error:
        raise ConfigError(f"{error.filename or source}: {error.strerror}") from error
    return cast(BinaryIO, copy)


def numbered(source: BinaryIO) -> Iterator[Numbered]:
    """Yield the lines of `source` that are not blank."""
    for number, line in enumerate(source, 1):
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if line.strip():
            yield Numbered(number, line)


def unanswered(source: BinaryIO, earlier: Earlier) -> Iterator[Numbered]:
    """Yield the lines of `source` that have no answer yet."""
    for entry in numbered(source):
        if entry.number not in earlier.lines and custom_id(entry.line) not in earlier.ids:
            yield entry


def count_requests(source: BinaryIO, name: str) -> int:
    """Return the number of requests in `source`, and go back to where it began.

    Raises:
        ConfigError: two have the same custom id.
    """
    start = source.tell()
    first: dict[str, int] = {}
    count = 0
    for number, line in numbered(source):
        count += 1
        found = custom_id(line)
        if found is not None and first.setdefault(found, number) != number:
            raise ConfigError(
                f"{name}: lines {first[found]} and {number} have the same custom_id {found!r:.80}: "
                "their answers could not be told apart"
            )
    source.seek(start)
    return count


def custom_id(line: bytes) -> str | None:
    """Return the custom id of a request; None if the line has none."""
    try:
        found = _DECODER.decode(line).custom_id
    except (msgspec.DecodeError, RecursionError):
        return None
    return found if isinstance(found, str) else None


_DECODER = msgspec.json.Decoder(_Id)
