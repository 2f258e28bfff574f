"""Prompts from the command line."""

import io
import sys
from typing import Any, cast

import pytest
from msgspec.structs import replace

from enginecore.errors import RequestError
from octavo_offline.config import RunConfig, SamplingConfig
from octavo_offline.progress import NoProgress, ProgressBar, show_progress
from octavo_offline.prompts import run_prompts


def run(engine, sampling: SamplingConfig | None = None, **options: Any) -> str:
    out = io.StringIO()
    run_prompts(cast(Any, engine), RunConfig(**options), sampling or SamplingConfig(), out)
    return out.getvalue()


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
    engine.limits = replace(engine.limits, max_model_len=1000)
    run(engine, prompt=("hi",))
    assert [request.params.max_tokens for request in engine.requests] == [62, 9, 128]


def test_a_prompt_that_does_not_fit_is_an_error(engine):
    with pytest.raises(RequestError, match="64 tokens"):
        run(engine, prompt=("a", "b" * 64))


def test_progress_is_for_terminals(monkeypatch):
    assert isinstance(show_progress(3), NoProgress)
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stderr", terminal)
    bar = show_progress(3)
    assert isinstance(bar, ProgressBar)
    with bar:
        bar.stepped(10)
        bar.ended()
    assert "1/3" in terminal.getvalue()
    assert "tok/s" in terminal.getvalue()
