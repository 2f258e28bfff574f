"""Base of tool parsers: unread text, text that may turn out to be a call, and blanks around calls."""

from collections.abc import Callable

from enginecore.frontend.parsing.events import Arguments, CallEnd, CallStart, Content, Event, ToolParser

_LONGEST_TOKEN = 1024
"""Characters that a name, key or number may have: what waits for its end is read again each time."""


class NeedMore(Exception):
    """The text so far does not say how to go on."""


class NoCall(Exception):
    """The text read so far is no call after all."""


class CallTextParser(ToolParser):
    """A state machine over text.

    A state is a method that reads some of the text and may choose the next state. It raises `NeedMore` where
    the text so far does not say enough, and is then called again with more; what it has read by then stays
    read. Text of what may become a call is kept until a call begins: where it turns out to be none, all of it
    comes out as content (`NoCall`).
    """

    def __init__(self, prompt: str = "") -> None:
        super().__init__(prompt)
        self._state: Callable[[], None] = self._content
        self._unread = ""
        self._kept: list[str] = []
        """Text that was read since the last call or content, and would be content if no call begins."""
        self._keeps = False
        self._blanks = ""
        """Blanks before the first text, or after a call: content only if text follows."""
        self._at_edge = True
        self._has_calls = False
        self._in_call = False
        self._events: list[Event] = []

    def push(self, text: str) -> list[Event]:
        self._unread += text
        if self._unread:
            self._run()
        return self._take()

    def finish(self) -> list[Event]:
        self._cut()
        if self._blanks and not self._has_calls:
            self._events.append(Content(self._blanks))
        self._blanks = ""
        return self._take()

    def _content(self) -> None:
        """Read text outside calls."""
        raise NotImplementedError

    def _broken_call(self) -> None:
        """Go on after a call that has begun and then breaks the format."""
        raise NotImplementedError

    def _cut(self) -> None:
        """Tell what is left at the end of the text, which may have been cut anywhere."""
        text = "".join(self._kept) + self._unread
        if not (self._has_calls and text.strip() == ","):  # between calls of a list
            self._show(text)

    def _run(self) -> None:
        while True:
            try:
                self._state()
            except NeedMore:
                return
            except NoCall:
                if self._in_call:
                    self._broken_call()
                else:
                    self._reread()

    def _reread(self) -> None:
        """Show the first character of what is kept as content, and read the rest again."""
        self._unkeep()
        self._show(self._unread[:1])
        self._unread = self._unread[1:]
        self._state = self._content

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    # What states read with.

    def _peek(self) -> str:
        """Return the next character."""
        if not self._unread:
            raise NeedMore
        return self._unread[0]

    def _read(self, length: int) -> str:
        """Take the next `length` characters."""
        text, self._unread = self._unread[:length], self._unread[length:]
        if self._keeps:
            self._kept.append(text)
        return text

    def _skip_blanks(self) -> str:
        """Pass over blanks; return the next character."""
        blanks = len(self._unread) - len(self._unread.lstrip())
        if blanks:
            self._read(blanks)
        return self._peek()

    def _token(self, find: Callable[[str], int]) -> str:
        """Take a short token, whose end `find` gives, or -1 where the text does not hold it yet.

        Raises:
            NoCall: it has no end within `_LONGEST_TOKEN` characters.
        """
        end = find(self._unread[:_LONGEST_TOKEN])
        if end >= 0:
            return self._read(end)
        if len(self._unread) >= _LONGEST_TOKEN:
            raise NoCall
        raise NeedMore

    def _starts_with(self, tag: str) -> bool:
        """Return whether `tag` comes next; raise NeedMore while that is open."""
        if self._unread.startswith(tag):
            return True
        if tag.startswith(self._unread):
            raise NeedMore
        return False

    def _read_to(self, tag: str) -> None:
        """Show all text before `tag` as content and stop before it; raise NeedMore where it does not come."""
        found = self._unread.find(tag)
        place = found if found >= 0 else len(self._unread) - overlap(self._unread, tag)
        self._show(self._unread[:place])
        self._unread = self._unread[place:]
        if found < 0:
            raise NeedMore

    # What states tell.

    def _show(self, text: str) -> None:
        if not text:
            return
        if self._at_edge:
            text = self._blanks + text
            if text.isspace():
                self._blanks = text
                return
            self._blanks, self._at_edge = "", False
        self._events.append(Content(text))

    def _keep(self) -> None:
        """From here on the text may be a call."""
        self._keeps = True

    def _unkeep(self) -> None:
        """Read again what was kept."""
        self._unread = "".join(self._kept) + self._unread
        self._kept, self._keeps = [], False

    def _begin_call(self, name: str) -> None:
        self._kept, self._keeps, self._blanks = [], False, ""
        self._in_call = self._has_calls = self._at_edge = True
        self._events.append(CallStart(name))

    def _argue(self, text: str) -> None:
        if text:
            self._events.append(Arguments(text))

    def _end_call(self) -> None:
        self._in_call = False
        self._events.append(CallEnd())


def overlap(text: str, tag: str) -> int:
    """Return the length of the longest end of `text` that begins `tag` without being all of it."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
