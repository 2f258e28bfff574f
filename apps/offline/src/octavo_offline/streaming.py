"""Answers as they come: requests run together, and each answer's text goes out in its turn."""

import signal
import threading
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple, TextIO

from enginecore import CompletionOutput, Request, RequestOutput
from enginecore.errors import RequestError
from octavo_offline.answer_file import OutputError
from octavo_offline.config import DEFAULT_CHAT_TOKENS, DEFAULT_MAX_TOKENS, SamplingConfig

if TYPE_CHECKING:
    from enginecore import Engine, Prompt, SamplingParams


class Limited(NamedTuple):
    """Sampling parameters, and what an answer says when it reached their length."""

    params: "SamplingParams"
    ending: str


def limit_answer(engine: "Engine", sampling: SamplingConfig, prompt: "Prompt", *, chat: bool) -> Limited:
    """Return the sampling parameters for `prompt`, no longer than the model has room for."""
    defaults = engine.frontend.sampling_defaults
    own = DEFAULT_CHAT_TOKENS if chat else DEFAULT_MAX_TOKENS
    wanted = sampling.max_tokens or defaults.get("max_tokens") or own
    context = engine.limits.max_model_len
    room = context - len(prompt.token_ids)
    if wanted <= room:
        return Limited(sampling.params(wanted, defaults), f"stopped at --max-tokens {wanted}")
    # Without any room the engine refuses the prompt, and says why.
    return Limited(
        sampling.params(max(1, room, sampling.min_tokens), defaults),
        f"stopped at the model's longest context, {context} tokens",
    )


def stream(engine: "Engine", requests: Iterable[Request]) -> Generator[RequestOutput]:
    """Run requests, all or none, and yield what is new of each after each step.

    Leaving early aborts what has not finished.

    Raises:
        RequestError: one of them cannot be run.
    """
    running: set[str] = set()
    try:
        for request in requests:
            engine.add(request)
            running.add(request.request_id)
        while running:
            for output in engine.step():
                failed = next((sample for sample in output.outputs if sample.finish_reason == "error"), None)
                if failed is not None:
                    raise RequestError(str(failed.stop_reason))
                if output.finished:
                    running.discard(output.request_id)
                yield output
    finally:
        for request_id in running:
            engine.abort_request(request_id)


class Answer:
    """One answer's place on the page, and the text that waits for its turn."""

    __slots__ = ("ending", "finish_reason", "heading", "text")

    def __init__(self, heading: str, ending: str) -> None:
        """`heading` goes before the answer; `ending` is said when it reached its length."""
        self.heading = heading
        self.ending = ending
        self.text = ""
        self.finish_reason: str | None = None


class AnswerPrinter:
    """Writes answers one below the other: the first that has not ended as it comes, later ones in turn."""

    def __init__(self, answers: Sequence[Answer], out: TextIO, notes: TextIO) -> None:
        """Answers go to `out`; that one was cut off is said in `notes`."""
        self._answers = answers
        self._out = out
        self._notes = notes
        self._flushes_pieces = out.isatty()
        self._turn = 0
        self._begun = False

    def push(self, number: int, sample: CompletionOutput) -> None:
        """Take what is new of answer `number`.

        Raises:
            OutputError: `out` cannot be written.
        """
        answer = self._answers[number]
        answer.text += sample.text
        answer.finish_reason = sample.finish_reason
        while self._turn < len(self._answers) and self._show(self._answers[self._turn]):
            self._turn += 1
            self._begun = False

    def _show(self, answer: Answer) -> bool:
        """Write what there is of the answer whose turn it is; return whether that was its end."""
        text, answer.text = answer.text, ""
        if not self._begun:
            text = answer.heading + text
            self._begun = True
        ended = answer.finish_reason is not None
        if ended:
            text += "\n"
        with writing():
            self._out.write(text)
            if ended or self._flushes_pieces or "\n" in text:
                self._out.flush()
        if answer.finish_reason == "length":
            print(f"octavo-offline: {answer.ending}", file=self._notes, flush=True)
        return ended


@contextmanager
def writing() -> Generator[None]:
    """Turn a full disk under standard output into an OutputError; a reader that has gone stays as it is."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"standard output: {error.strerror}") from error


@contextmanager
def interrupts() -> Generator[threading.Event]:
    """Have SIGINT set the event that is yielded, so that a step in progress comes to its end."""
    interrupted = threading.Event()

    def note(number: int, frame: FrameType | None) -> None:
        interrupted.set()

    handler = signal.signal(signal.SIGINT, note)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, handler)
