"""Prompts from the command line."""

import errno
import io
import sys
from typing import Any, cast

import pytest
from msgspec.structs import replace
from stepping_engine import ByteFrontend

from enginecore.errors import RequestError
from octavo_offline.answer_file import OutputError
from octavo_offline.config import RunConfig, SamplingConfig
from octavo_offline.progress import PlainProgress, show_loading, show_progress
from octavo_offline.prompts import run_prompts


def run(engine, sampling: SamplingConfig | None = None, *, notes: Any = None, **options: Any) -> str:
    out = io.StringIO()
    config = RunConfig(**options)
    sampling = sampling or SamplingConfig()
    run_prompts(cast(Any, engine), config.prompt, config, sampling, out, notes or io.StringIO())
    return out.getvalue()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_one_answer_is_written_as_it_is(engine):
    assert run(engine, prompt=("hi",)) == "hi\n"


def test_several_answers_have_headings(engine):
    assert run(engine, SamplingConfig(n=2), prompt=("long", "a")) == (
        "==> prompt 1, answer 1 <==\nlong\n\n"
        "==> prompt 1, answer 2 <==\nlong\n\n"
        "==> prompt 2, answer 1 <==\na\n\n"
        "==> prompt 2, answer 2 <==\na\n"
    )


def test_chat(engine):
    assert run(engine, prompt=("hi",), chat=True) == "user:hi\n"
    assert run(engine, prompt=("hi",), chat=True, system="be") == "system:be|user:hi\n"


def test_max_tokens(engine):
    run(engine, prompt=("hi",))
    run(engine, SamplingConfig(max_tokens=9), prompt=("hi",))
    run(engine, SamplingConfig(max_tokens=900), prompt=("hi",))
    engine.limits = replace(engine.limits, max_model_len=10_000)
    run(engine, prompt=("hi",))
    run(engine, prompt=("hi",), chat=True)
    engine.frontend = ByteFrontend()
    engine.frontend.sampling_defaults = {"max_tokens": 77}
    run(engine, prompt=("hi",))
    assert [request.params.max_tokens for request in engine.requests] == [62, 9, 62, 128, 1024, 77]


def test_a_cut_answer_says_so(engine):
    notes = io.StringIO()
    assert run(engine, SamplingConfig(max_tokens=2), prompt=("hello",), notes=notes) == "he\n"
    assert notes.getvalue() == "octavo-offline: stopped at --max-tokens 2\n"
    notes = io.StringIO()
    run(engine, SamplingConfig(max_tokens=2), prompt=("a", "hello"), notes=notes)
    assert notes.getvalue() == "octavo-offline: prompt 2, answer 1 stopped at --max-tokens 2\n"
    notes = io.StringIO()
    assert run(engine, prompt=("x" * 40,), notes=notes) == "x" * 24 + "\n"
    assert "the model's longest context, 64 tokens" in notes.getvalue()


def test_a_whole_answer_says_nothing(engine):
    notes = io.StringIO()
    run(engine, prompt=("hi",), notes=notes)
    assert notes.getvalue() == ""


def test_tokens_are_written_as_they_come(engine):
    out = Terminal()
    seen: list[str] = []
    engine.after_step = lambda: seen.append(out.getvalue())
    run_prompts(cast(Any, engine), ("abc",), RunConfig(), SamplingConfig(), out, io.StringIO())
    assert seen == ["", "a", "ab", "abc"]
    assert out.getvalue() == "abc\n"


def test_later_answers_wait_for_their_turn(engine):
    out = Terminal()
    seen: list[str] = []
    engine.after_step = lambda: seen.append(out.getvalue())
    run_prompts(cast(Any, engine), ("abc", "d"), RunConfig(), SamplingConfig(), out, io.StringIO())
    first = "==> prompt 1, answer 1 <==\n"
    assert seen == ["", first + "a", first + "ab", first + "abc"]
    assert out.getvalue() == first + "abc\n\n==> prompt 2, answer 1 <==\nd\n"


def test_a_full_disk_is_an_output_error(engine):
    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OutputError, match="standard output: No space"):
        run_prompts(cast(Any, engine), ("hi",), RunConfig(), SamplingConfig(), Full(), io.StringIO())


def test_an_error_aborts_the_others(engine):
    engine.failing = {"bad"}
    with pytest.raises(RequestError, match="never fits"):
        run(engine, prompt=("bad", "longer"))
    assert engine.aborted == ["1"]


def test_a_prompt_that_does_not_fit_is_an_error(engine):
    with pytest.raises(RequestError, match="64 tokens"):
        run(engine, prompt=("a", "b" * 64))


def test_a_terminal_gets_a_bar(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    bar = show_progress(3)
    with bar:
        bar.stepped(10)
        bar.ended()
    assert "1/3" in terminal.getvalue()
    assert "tok/s" in terminal.getvalue()
    with show_loading("tiny") as on_loaded:
        on_loaded(2, 7)
    assert "loading tiny" in terminal.getvalue()
    assert "2/7" in terminal.getvalue()


def test_elsewhere_there_are_plain_lines_every_few_seconds(capsys):
    now = 100.0
    progress = PlainProgress(9, clock=lambda: now)
    for seconds, generated in ((104.0, 10), (106.0, 30), (109.0, 60), (111.0, 110)):
        now = seconds
        progress.ended()
        progress.stepped(generated)
    assert capsys.readouterr().err.splitlines() == [
        "octavo-offline: 2 of 9 requests, 30 tokens, 5 tok/s",
        "octavo-offline: 4 of 9 requests, 110 tokens, 10 tok/s",
    ]
    assert isinstance(show_progress(3), PlainProgress)


def test_loading_in_plain_lines(capsys):
    now = 100.0
    with show_loading("tiny", clock=lambda: now) as on_loaded:
        for seconds, done in ((101.0, 1), (105.0, 2), (109.0, 3), (110.5, 4)):
            now = seconds
            on_loaded(done, 7)
    assert capsys.readouterr().err.splitlines() == [
        "octavo-offline: loading tiny",
        "octavo-offline: 2 of 7 tensors loaded",
        "octavo-offline: 4 of 7 tensors loaded",
        "octavo-offline: loaded in 10.5 s",
    ]
