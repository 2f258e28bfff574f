"""Events that parsers make of a model's text, and what every parser offers."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple
from uuid import uuid4


class Content(NamedTuple):
    """More of the answer's text."""

    text: str


class Reasoning(NamedTuple):
    """More of what the model thought before it answered."""

    text: str


class CallStart(NamedTuple):
    """A call of the tool `name` begins."""

    name: str


class Arguments(NamedTuple):
    """More of the JSON text of the arguments of the call that began last."""

    text: str


class CallEnd(NamedTuple):
    """The call that began last is complete; one that was cut off has no such event."""


Event = Content | Reasoning | CallStart | Arguments | CallEnd


class Parser(ABC):
    """Reads one sample's text as it comes.

    How the text is cut into pieces makes no difference to the events but for how their texts are cut. What
    has been told stands: an answer that is not streamed is made from the same events.
    """

    special_tokens: ClassVar[Sequence[str]] = ()
    """Tokens that the text must show even where special tokens are left out."""

    def __init__(self, prompt: str = "") -> None:
        """`prompt` is the text that the sample continues."""
        self.prompt = prompt

    @abstractmethod
    def push(self, text: str) -> list[Event]:
        """Take more text; return what is certain now."""

    @abstractmethod
    def finish(self) -> list[Event]:
        """Return what was held back: the text has ended, or was cut. Nothing may follow."""


class Thinking(NamedTuple):
    """Reasoning that may come before a text's content: between which tags, and whether it has begun."""

    opening: str
    closing: str
    begun: bool
    """The text begins within it; the opening tag may be repeated. Otherwise it may be left out."""


class ReasoningParser(Parser):
    """Tells `Reasoning` from `Content`, in which a tool parser then looks for calls."""

    def thinking(self) -> Thinking | None:
        """Return what reasoning may come before the content; None where there is none, or nobody knows.

        It is asked before the first text. An output whose form is given has that form after it.
        """
        return None


class ToolParser(Parser):
    """Finds calls of tools in a text, and leaves the rest as `Content`."""

    @staticmethod
    def new_call_id() -> str:
        """Return an id for a call, in the form that the model's chat template expects."""
        return f"call_{uuid4().hex[:24]}"
