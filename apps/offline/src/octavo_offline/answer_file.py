"""The file of a batch's answers: found again after a stop, and never emptied before there is an answer."""

import os
import stat
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import msgspec

from enginecore.errors import ConfigError, OctavoError

STANDARD_OUTPUT = "-"


class OutputError(OctavoError):
    """Answers cannot be written any more: the disk is full, or the reader of a pipe has gone."""


class Earlier(NamedTuple):
    """Answers that a file holds already."""

    ids: frozenset[str] = frozenset()
    """Custom ids of the requests answered."""
    lines: frozenset[int] = frozenset()
    """Numbers of the input's lines that were answered and have no custom id."""
    failed: int = 0
    """Number of the answers that are errors."""
    size: int = 0
    """Bytes of the whole lines; behind them may be part of one."""


class _Error(msgspec.Struct):
    line: int | None = None


class _Response(msgspec.Struct):
    status_code: int


class _Answer(msgspec.Struct):
    custom_id: Any
    response: _Response | None
    error: _Error | None


def read_earlier(path: Path) -> Earlier:
    """Return the answers in `path`; a last line that is not whole counts as not written.

    Raises:
        ConfigError: a line before the last is no answer.
        OSError: the file cannot be read.
    """
    decoder = msgspec.json.Decoder(_Answer)
    ids: set[str] = set()
    lines: set[int] = set()
    failed = size = broken = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if broken:
                raise ConfigError(f"{path}: line {broken} is no answer: this is not a file to resume")
            try:
                answer = decoder.decode(line)
            except msgspec.DecodeError:
                broken = number
                continue
            if not line.endswith(b"\n"):
                break
            size += len(line)
            failed += answer.response is None or answer.response.status_code != 200
            if isinstance(answer.custom_id, str):
                ids.add(answer.custom_id)
            elif answer.error is not None and answer.error.line is not None:
                lines.add(answer.error.line)
    return Earlier(frozenset(ids), frozenset(lines), failed, size)


class AnswerFile:
    """A file of lines that is opened when the first is written.

    Args:
        target: A path, or - for standard output.
        keep: How many bytes of what the file holds are kept; what follows is replaced.

    Raises:
        ConfigError: it is plain before the start that nothing could be written there.
    """

    def __init__(self, target: str, keep: int = 0) -> None:
        self.name = "standard output" if target == STANDARD_OUTPUT else target
        self._path = None if target == STANDARD_OUTPUT else Path(target).expanduser()
        self._keep = keep
        self._file: FileIO | None = None
        if self._path is not None:
            _check_writable(self._path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def write(self, line: bytes) -> None:
        """Write a whole line, or none of it where there is no space for it.

        Raises:
            OutputError: it cannot be written.
        """
        try:
            file = self._opened()
            left = memoryview(line)
            while left:
                left = left[self._write_some(file, left, len(line) - len(left)) :]
        except OSError as error:
            raise OutputError(f"{self.name}: {error.strerror}") from error

    def finish(self) -> None:
        """Leave an empty file where there was nothing to write.

        Raises:
            OutputError: it cannot be written.
        """
        self.write(b"")

    def _opened(self) -> FileIO:
        if self._file is None:
            if self._path is None:
                self._file = FileIO(1, "w", closefd=False)
            else:
                self._file = FileIO(os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o666), "w")
                if stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
                    self._file.truncate(self._keep)
                    self._file.seek(self._keep)
        return self._file

    def _write_some(self, file: FileIO, left: memoryview, written: int) -> int:
        try:
            count = file.write(left)
        except OSError:
            if written and self._path is not None and file.seekable():
                file.truncate(file.tell() - written)
            raise
        if count is None:
            raise BlockingIOError(0, "it takes no more at present, and does not wait")
        return count


def _check_writable(path: Path) -> None:
    folder = path.parent
    if path.is_dir():
        raise ConfigError(f"{path}: Is a directory")
    if not folder.is_dir():
        raise ConfigError(f"{path}: there is no folder {folder}")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"{path}: Permission denied")
