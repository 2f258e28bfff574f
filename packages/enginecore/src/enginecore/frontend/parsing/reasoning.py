"""Reasoning between two tags, before the answer."""

from typing import ClassVar

from enginecore.frontend.parsing.call_text import overlap
from enginecore.frontend.parsing.events import Content, Event, Reasoning, ReasoningParser, Thinking


class TaggedReasoningParser(ReasoningParser):
    """Reasoning from an opening tag, at the start of the text or the end of the prompt, to the closing one.

    A prompt that ends with the closing tag, as templates write it where thinking is turned off, leaves none.
    Only blanks may come before an opening tag; elsewhere tags are text.
    """

    opening: ClassVar[str] = "<think>"
    closing: ClassVar[str] = "</think>"
    always: ClassVar[bool] = False
    """Whether the text begins with reasoning though no tag has opened it."""

    special_tokens = ("<think>", "</think>")

    def __init__(self, prompt: str = "") -> None:
        super().__init__(prompt)
        before = prompt.rstrip()
        self._thinks = not before.endswith(self.closing) and (self.always or before.endswith(self.opening))
        self._done = before.endswith(self.closing)
        self._at_start = not self._done
        self._unread = ""

    def thinking(self) -> Thinking | None:
        return None if self._done else Thinking(self.opening, self.closing, self._thinks)

    def push(self, text: str) -> list[Event]:
        if self._done:
            return [Content(text)] if text else []
        self._unread += text
        if self._at_start and not self._pass_opening():
            return []
        return self._told()

    def finish(self) -> list[Event]:
        left, self._unread = self._unread, ""
        return [self._event(left)] if left else []

    def _pass_opening(self) -> bool:
        """Look for the opening tag; return whether it is known if there is one."""
        start = self._unread.lstrip()
        if start.startswith(self.opening):
            self._unread = start.removeprefix(self.opening)
            self._thinks = True
        elif self.opening.startswith(start):
            return False
        self._at_start = False
        return True

    def _told(self) -> list[Event]:
        text, self._unread = self._unread, ""
        if self._thinks:
            reasoning, closing, content = text.partition(self.closing)
            self._done = bool(closing)
            if not closing:
                held = overlap(text, self.closing)
                reasoning, self._unread = text[: len(text) - held], text[len(text) - held :]
            self._thinks = not self._done
            events: list[Event] = [Reasoning(reasoning)] if reasoning else []
            return [*events, Content(content)] if content else events
        self._done = True
        return [Content(text)] if text else []

    def _event(self, text: str) -> Event:
        return Reasoning(text) if self._thinks else Content(text)


class Qwen3Reasoning(TaggedReasoningParser):
    """Qwen 3: thinks where it, or its template, opens the tag."""


class DeepSeekR1Reasoning(TaggedReasoningParser):
    """DeepSeek R1 and models made from it: the opening tag may be missing."""

    always = True


class MistralReasoning(TaggedReasoningParser):
    """Magistral."""

    opening, closing = "[THINK]", "[/THINK]"
    special_tokens = ("[THINK]", "[/THINK]")
