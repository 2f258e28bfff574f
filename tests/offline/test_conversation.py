"""Conversations; the engine answers with its prompt, which shows all messages it was given."""

import io
import os
import signal
import sys
from typing import Any, cast

import pytest
from msgspec.structs import replace

from enginecore.errors import RequestError
from octavo_offline.config import SamplingConfig
from octavo_offline.conversation import Conversation, converse


class Talk:
    def __init__(self, engine: Any, system: str | None = None, **sampling: Any) -> None:
        self.out = io.StringIO()
        self.notes = io.StringIO()
        self.conversation = Conversation(
            cast(Any, engine), SamplingConfig(**sampling), system, self.out, self.notes
        )

    def say(self, line: str) -> str:
        """The answer to a line."""
        before = len(self.out.getvalue())
        assert self.conversation.take(line)
        return self.out.getvalue()[before:]


def test_what_was_said_is_kept(engine):
    talk = Talk(engine)
    assert talk.say("a") == "user:a\n"
    assert talk.say("b") == "user:a|assistant:user:a|user:b\n"


def test_reset_forgets_all_but_the_system_message(engine):
    talk = Talk(engine, system="be")
    talk.say("a")
    assert talk.say("/reset") == ""
    assert talk.say("b") == "system:be|user:b\n"


def test_the_system_message_can_change(engine):
    talk = Talk(engine)
    talk.say("/system  be brief ")
    assert talk.say("a") == "system:be brief|user:a\n"
    talk.say("/system")
    talk.say("/reset")
    assert talk.say("a") == "user:a\n"


def test_commands_and_messages_with_a_slash(engine):
    talk = Talk(engine)
    assert talk.say("//a") == "user:/a\n"
    assert talk.say("/help") == ""
    assert "/system TEXT" in talk.notes.getvalue()
    talk.say("/rest")
    assert talk.notes.getvalue().endswith("there is no command /rest; /help shows those there are\n")
    assert talk.say("  ") == ""
    assert len(engine.requests) == 1
    assert not talk.conversation.take("/exit")


def test_ctrl_c_stops_the_answer_and_keeps_the_conversation(engine):
    talk = Talk(engine)
    steps = 0

    def interrupt_in_third_step() -> None:
        nonlocal steps
        steps += 1
        if steps == 3:
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    engine.after_step = interrupt_in_third_step
    assert talk.say("abc") == "use\n"
    assert talk.notes.getvalue() == "stopped\n"
    assert engine.aborted == ["turn-1"]
    assert talk.say("d") == "user:abc|assistant:use|user:d\n"
    assert signal.getsignal(signal.SIGINT) is before


def test_an_answer_that_was_cut_says_so(engine):
    talk = Talk(engine, max_tokens=3)
    assert talk.say("abc") == "use\n"
    assert "stopped at --max-tokens 3" in talk.notes.getvalue()


def test_the_oldest_messages_give_way_when_the_context_is_full(engine):
    engine.limits = replace(engine.limits, max_model_len=48)  # prompts of at most 36 tokens
    talk = Talk(engine, system="s", max_tokens=4)
    talk.say("a" * 10)
    talk.say("b")
    assert "forgotten" in talk.notes.getvalue()
    assert [request.prompt.text for request in engine.requests] == [
        "system:s|user:aaaaaaaaaa",
        "system:s|user:b",
    ]


def test_a_message_that_does_not_fit_is_forgotten(engine):
    talk = Talk(engine)
    with pytest.raises(RequestError, match="tokens of at most 63"):
        talk.say("a" * 70)
    assert talk.say("b") == "user:b\n"


def test_lines_of_a_stream_are_a_conversation(engine, monkeypatch):
    talk = Talk(engine)
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\n/reset\nb"))
    converse(talk.conversation, interactive=False)
    assert talk.out.getvalue() == "user:a\nuser:b\n"


def test_without_a_person_a_refused_message_ends_it(engine, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("a" * 70 + "\nb"))
    with pytest.raises(RequestError):
        converse(Talk(engine).conversation, interactive=False)
    monkeypatch.setattr(sys, "stdin", io.StringIO("a" * 70 + "\nb"))
    talk = Talk(engine)
    converse(talk.conversation, interactive=True)
    assert talk.out.getvalue() == "user:b\n"
