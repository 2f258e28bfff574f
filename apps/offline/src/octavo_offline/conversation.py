"""A conversation: messages from a terminal or a stream, each answered with those before it."""

import sys
from collections.abc import Callable
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from enginecore import Request
from enginecore.errors import RequestError
from octavo_offline.config import SamplingConfig
from octavo_offline.streaming import Answer, AnswerPrinter, interrupts, limit_answer, stream, writing

if TYPE_CHECKING:
    from enginecore import Engine, Prompt

HELP = """\
/reset         forget what was said
/system TEXT   set the system message; without TEXT there is none
/help          show this
/exit          leave, as Ctrl-D does
Ctrl-C stops an answer. A message that begins with / is sent with a second one before it."""

_LEAST_ROOM = 4
"""An answer has room for at least this part of the model's context: history gives way to it."""


class Message(NamedTuple):
    """One turn."""

    role: str
    content: str


class Conversation:
    """Messages so far, and an engine that answers them.

    Args:
        engine: Runs one request at a time.
        sampling: How answers are sampled.
        system: The system message, if there is one.
        out: Takes the answers.
        notes: Takes what is said about them.
    """

    def __init__(
        self, engine: "Engine", sampling: SamplingConfig, system: str | None, out: TextIO, notes: TextIO
    ) -> None:
        self._engine = engine
        self._sampling = sampling
        self._system = system
        self._out = out
        self._notes = notes
        self._history: list[Message] = []
        self._turns = 0

    def take(self, line: str) -> bool:
        """Answer a message or do what a command says; return False when it was to leave.

        Raises:
            RequestError: the message cannot be answered; it is forgotten.
            OutputError: the answer cannot be written.
        """
        if not line.strip():
            return True
        if not line.startswith("/") or line.startswith("//"):
            self._answer(line.removeprefix("/"))
            return True
        command, _, rest = line.strip().partition(" ")
        if command == "/exit":
            return False
        if command == "/reset":
            self._history.clear()
        elif command == "/system":
            self._system = rest.strip() or None
        elif command == "/help":
            self._note(HELP)
        else:
            self._note(f"there is no command {command}; /help shows those there are")
        return True

    def _answer(self, text: str) -> None:
        message = Message("user", text)
        prompt = self._fit(message)
        limited = limit_answer(self._engine, self._sampling, prompt, chat=True)
        answer = Answer("", f"{limited.ending}; say “go on” for more")
        printer = AnswerPrinter([answer], self._out, self._notes)
        self._turns += 1
        request = Request(f"turn-{self._turns}", prompt, limited.params, 0)
        said = ""
        with interrupts() as interrupted, closing(stream(self._engine, [request])) as outputs:
            for output in outputs:
                for sample in output.outputs:
                    said += sample.text
                    printer.push(0, sample)
                if interrupted.is_set() and not output.finished:
                    break
        if answer.finish_reason is None:
            with writing():
                self._out.write("\n")
                self._out.flush()
            self._note("stopped")
        if said or answer.finish_reason is not None:
            self._history += [message, Message("assistant", said)]

    def _fit(self, message: Message) -> "Prompt":
        """Return the prompt for all messages and `message`; the oldest are forgotten if there is no room."""
        limits = self._engine.limits
        most = limits.max_model_len - max(1, limits.max_model_len // _LEAST_ROOM)
        prompt = self._prepare([*self._history, message])
        forgotten = 0
        while len(prompt.token_ids) > most and self._history:
            del self._history[:2]
            forgotten += 2
            prompt = self._prepare([*self._history, message])
        if forgotten:
            self._note(
                f"the context of {limits.max_model_len} tokens is full: "
                f"the oldest {forgotten} messages are forgotten"
            )
        return prompt

    def _prepare(self, messages: list[Message]) -> "Prompt":
        turns = list(messages) if self._system is None else [Message("system", self._system), *messages]
        as_dicts: list[dict[str, Any]] = [turn._asdict() for turn in turns]
        return self._engine.frontend.prepare_chat(as_dicts)

    def _note(self, text: str) -> None:
        print(text, file=self._notes, flush=True)


def converse(conversation: Conversation, *, interactive: bool) -> None:
    """Answer each line of standard input until it ends.

    With `interactive` there is a prompt, and a message that cannot be answered does not end the conversation.

    Raises:
        RequestError: a line cannot be answered, and nobody is there to send another.
    """
    if interactive:
        print("/help shows what there is beside messages; Ctrl-D ends.", file=sys.stderr, flush=True)
    read = _reader(interactive)
    while True:
        try:
            if not conversation.take(read()):
                return
        except EOFError:
            break
        except KeyboardInterrupt:
            if not interactive:
                raise
            print("\n(Ctrl-D ends)", file=sys.stderr, flush=True)
        except RequestError as error:
            if not interactive:
                raise
            print(f"octavo-offline: {error}", file=sys.stderr, flush=True)
    if interactive:
        print()


def _reader(interactive: bool) -> Callable[[], str]:
    if not interactive:
        return input
    with suppress(ImportError):  # a Python without readline still reads lines
        import readline  # noqa: F401  # input() edits lines and remembers them once it is imported
    return lambda: input("> ")
