"""The format of the log's lines."""

import json
import logging
import re
import sys

from enginecore.logs import LineFormatter, LogSettings, current, is_formatted

STAMP = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


def line(message: str, *arguments: object, form="text", rank=None, fields=None, failure=None) -> str:
    record = logging.LogRecord("enginecore.core", logging.WARNING, "file", 1, message, arguments, failure)
    if fields is not None:
        record.fields = fields
    return LineFormatter(form, rank).format(record)


def test_time_level_and_rank():
    assert re.fullmatch(STAMP + r" WARNING enginecore\.core: 5 of them", line("%d of them", 5))
    assert re.fullmatch(STAMP + r" WARNING \[rank 2\] enginecore\.core: so", line("so", rank=2))


def test_json_has_the_same():
    found = json.loads(line("%d of them", 5, form="json", rank=1, fields={"status": 200, "total": 0.25}))
    assert re.fullmatch(STAMP, found.pop("time"))
    assert found == {
        "level": "WARNING",
        "rank": 1,
        "logger": "enginecore.core",
        "message": "5 of them",
        "status": 200,
        "total": 0.25,
    }


def test_fields_are_quoted_where_they_hold_more_than_a_word():
    found = line("request", fields={"path": "/a b", "id": "x", "total": 1.23456, "odd": 'a="\n', "none": ""})
    assert found.endswith(r'request path="/a b" id=x total=1.235 odd="a=\"\n" none=""')


def test_what_a_client_wrote_begins_no_line_and_moves_no_cursor():
    found = line("%s", "a\r\n2026-01-01T00:00:00.000Z ERROR forged \x1b[31m\u2028\u202e\ud800")
    first, second = found.split("\n")
    assert first.endswith(r": a\r")
    assert second == r"    2026-01-01T00:00:00.000Z ERROR forged \x1b[31m\u2028\u202e\ud800"
    assert found.encode().decode().isascii()


def test_lines_are_bounded():
    found = line("%s", "x" * 60_000)
    assert found.endswith("x… (60000 characters)")
    assert len(found) < 5000


def test_a_traceback_is_indented():
    try:
        raise ValueError("a\n2026-01-01T00:00:00.000Z ERROR forged")
    except ValueError:
        found = line("it failed", failure=sys.exc_info())
        details = json.loads(line("it failed", form="json", failure=sys.exc_info()))["details"]
    first, *rest = found.split("\n")
    assert first.endswith(": it failed")
    assert rest[0] == "    Traceback (most recent call last):"
    assert all(entry.startswith("    ") for entry in rest)
    assert details[-2:] == ["ValueError: a", "2026-01-01T00:00:00.000Z ERROR forged"]


def test_lines_of_a_child_are_known():
    assert is_formatted(line("so", rank=1))
    assert is_formatted(line("so", form="json"))
    assert not is_formatted("terminate called after throwing an instance")


def test_a_program_that_set_up_nothing_has_warnings_in_text(monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(logging.getLogger(), "level", logging.WARNING)
    assert current() == LogSettings(logging.WARNING, "text")
