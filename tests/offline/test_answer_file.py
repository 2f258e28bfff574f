"""The file of a batch's answers, and what is found in it again."""

import json
import os
from typing import Any

import pytest

from enginecore.errors import ConfigError
from octavo_offline.answer_file import AnswerFile, OutputError, read_earlier


def answer(custom_id: Any, status: int | None = 200, line: int | None = None) -> bytes:
    response = None if status is None else {"status_code": status, "request_id": "r", "body": {}}
    error = None if line is None else {"code": "invalid_request", "message": "", "param": None, "line": line}
    fields = {"id": "b", "custom_id": custom_id, "response": response, "error": error}
    return json.dumps(fields).encode() + b"\n"


def test_nothing_is_touched_before_the_first_answer(tmp_path):
    path = tmp_path / "out.jsonl"
    with AnswerFile(str(path)):
        assert not path.exists()
    path.write_bytes(b"earlier")
    with AnswerFile(str(path)) as file:
        assert path.read_bytes() == b"earlier"
        file.write(b"new\n")
        assert path.read_bytes() == b"new\n"  # and at once: a killed run leaves what it answered


def test_a_run_without_answers_leaves_an_empty_file(tmp_path):
    with AnswerFile(str(tmp_path / "out.jsonl")) as file:
        file.finish()
    assert (tmp_path / "out.jsonl").read_bytes() == b""


def test_what_is_kept_is_kept_and_half_a_line_is_not(tmp_path):
    path = tmp_path / "out.jsonl"
    whole = answer("a") + answer("b", 400) + answer(None, None, line=7)
    path.write_bytes(whole + answer("c")[:-9])
    earlier = read_earlier(path)
    assert (earlier.ids, earlier.lines, earlier.failed) == ({"a", "b"}, {7}, 2)
    assert earlier.size == len(whole)
    with AnswerFile(str(path), earlier.size) as file:
        file.write(answer("c"))
    assert path.read_bytes() == whole + answer("c")


@pytest.mark.parametrize("torn", [answer("c")[:-1], b"\0" * 20, b"{", b"\xff\n"])
def test_a_torn_last_line_counts_as_not_written(tmp_path, torn):
    path = tmp_path / "out.jsonl"
    path.write_bytes(answer("a") + torn)
    assert (read_earlier(path).ids, read_earlier(path).size) == ({"a"}, len(answer("a")))


def test_a_file_of_something_else_is_not_resumed(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_bytes(answer("a") + b"notes\n" + answer("b"))
    with pytest.raises(ConfigError, match="line 2 is no answer"):
        read_earlier(path)


def test_a_full_disk_names_the_file():
    with AnswerFile("/dev/full") as file, pytest.raises(OutputError, match="/dev/full: No space left on"):
        file.write(b"line\n")


def test_a_pipe_without_a_reader_is_named(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with AnswerFile(str(path)) as file:
        file.write(b"line\n")
        os.close(reader)
        with pytest.raises(OutputError, match="pipe: Broken pipe"):
            file.write(b"line\n")


def test_half_a_line_is_taken_back_when_the_disk_is_full(tmp_path):
    path = tmp_path / "out.jsonl"
    # Writes beyond a file-size limit end like those on a full disk: as much as fits, then an error.
    child = os.fork()
    if child == 0:
        import resource
        import signal

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (15, 15))
        status = 1
        with AnswerFile(str(path)) as file:
            file.write(b"0123456789\n")
            try:
                file.write(b"0123456789\n")
            except OutputError:
                status = 0
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert path.read_bytes() == b"0123456789\n"


@pytest.mark.parametrize("name, said", [("", "Is a directory"), ("no/out.jsonl", "there is no folder")])
def test_a_hopeless_target_is_known_at_once(tmp_path, name, said):
    with pytest.raises(ConfigError, match=said):
        AnswerFile(str(tmp_path / name))
