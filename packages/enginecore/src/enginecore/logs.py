"""Set-up of logging: one format, text or JSON, for the server, the engine core and the workers.

Every record is one line that begins with its time, followed by indented lines if its message has several or
there is a traceback. Control characters are escaped and lines are bounded, so that what a client wrote can
neither begin a line nor move a terminal's cursor.
"""

import json
import logging
import re
import sys
import time
from typing import Any, Literal, NamedTuple

LogFormat = Literal["text", "json"]

_LONGEST = 4000
"""Characters of a line of a message or traceback."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, line separators, marks that reorder text, and lone surrogates."""
_FORMATTED = re.compile(r'\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d|\{"time"')


class LogSettings(NamedTuple):
    """How this process logs, for its children to do the same."""

    level: int = logging.WARNING
    """Of this package and of the apps."""
    format: LogFormat = "text"


class LineFormatter(logging.Formatter):
    """Formats a record as one line of text or JSON.

    A record may have `fields`, a mapping that becomes ` name=value` in text and members in JSON.
    """

    def __init__(self, form: LogFormat, rank: int | None = None) -> None:
        """`rank` is that of a worker."""
        super().__init__()
        self.form: LogFormat = form
        self._rank = rank

    def format(self, record: logging.LogRecord) -> str:
        message, *details = map(printable, record.getMessage().split("\n"))
        if record.exc_info:
            details += map(printable, self.formatException(record.exc_info).split("\n"))
        fields: dict[str, Any] = getattr(record, "fields", {})
        if self.form == "json":
            return self._json(record, message, fields, details)
        rank = "" if self._rank is None else f" [rank {self._rank}]"
        line = f"{_time_of(record)} {record.levelname}{rank} {record.name}: {message}"
        line += "".join(f" {name}={_value(value)}" for name, value in fields.items())
        return "\n".join([line, *(f"    {detail}" for detail in details)])

    def _json(
        self, record: logging.LogRecord, message: str, fields: dict[str, Any], details: list[str]
    ) -> str:
        entry: dict[str, Any] = {
            "time": _time_of(record),
            "level": record.levelname,
            "rank": self._rank,
            "logger": record.name,
            "message": message,
            **fields,
        }
        if details:
            entry["details"] = details
        return json.dumps(entry)


def configure(settings: LogSettings, *, rank: int | None = None) -> None:
    """Log to standard error from now on, as `settings` say; other packages only warn."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(settings.format, rank))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(settings.level, logging.WARNING))
    for name in ("enginecore", "pagedattn", "octavo_serve", "octavo_coordinator"):
        logging.getLogger(name).setLevel(settings.level)


def current() -> LogSettings:
    """Return how this process logs, whoever set it up."""
    formatters = (handler.formatter for handler in logging.getLogger().handlers)
    ours = next((found for found in formatters if isinstance(found, LineFormatter)), None)
    level = logging.getLogger("enginecore").getEffectiveLevel()
    return LogSettings(level, "text" if ours is None else ours.form)


def is_formatted(line: str) -> bool:
    """Return whether another process wrote `line` by this module, rather than printing it."""
    return _FORMATTED.match(line) is not None


def printable(text: str) -> str:
    """Return `text` on one line: control characters escaped, what is beyond a few thousand left out."""
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]}… ({len(text)} characters)"
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def _time_of(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    text = str(value)
    return printable(text) if re.fullmatch(r'[^\s"=]+', text) else json.dumps(text)
