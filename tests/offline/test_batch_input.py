"""The file of a batch's requests, before anything runs."""

import io
import os
from contextlib import ExitStack

import pytest

from enginecore.errors import ConfigError
from octavo_offline.answer_file import Earlier
from octavo_offline.batch_input import count_requests, numbered, open_requests, unanswered


def test_lines_are_numbered_as_an_editor_does():
    source = io.BytesIO(b"\xef\xbb\xbf{}\n\n  \nx")
    assert list(numbered(source)) == [(1, b"{}\n"), (4, b"x")]


def test_requests_are_counted_and_can_be_read_again():
    source = io.BytesIO(b'{"custom_id": "a"}\n\nnonsense\n{"custom_id": "b"}\n{"custom_id": 5}\n[]\n{}')
    assert count_requests(source, "in.jsonl") == 6
    assert len(list(numbered(source))) == 6


def test_a_pipe_is_read_to_its_end_first():
    reader, writer = os.pipe()
    with os.fdopen(writer, "wb") as file:
        file.write(b'{"custom_id": "a"}\n{"custom_id": "b"}\n')
    with ExitStack() as stack:
        source = open_requests(stack, f"/dev/fd/{reader}")
        assert count_requests(source, "in.jsonl") == 2
        assert len(list(numbered(source))) == 2
    os.close(reader)


def test_a_custom_id_that_is_there_twice_is_an_error():
    source = io.BytesIO(b'{"custom_id": "a"}\n{"custom_id": "b"}\n\n{"x": 1, "custom_id": "\\u0061"}\n')
    with pytest.raises(ConfigError, match=r"in\.jsonl: lines 1 and 4 have the same custom_id 'a'"):
        count_requests(source, "in.jsonl")


def test_what_is_answered_is_left_out():
    source = io.BytesIO(b'{"custom_id": "a"}\nnonsense\n{"custom_id": "b"}\nnonsense\n')
    earlier = Earlier(ids=frozenset("b"), lines=frozenset([2]))
    assert [entry.number for entry in unanswered(source, earlier)] == [1, 4]
