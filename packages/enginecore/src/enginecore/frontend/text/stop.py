"""Stop strings in text that arrives piece by piece."""

from collections.abc import Sequence


class StopMatcher:
    """Finds the first of several strings to be completed, and never lets part of it through before.

    The result does not depend on how the text is cut into pieces: the match that ends first wins, and of
    those that end together the longest.

    Args:
        stops: Non-empty strings.
        include: Whether the text that is let through ends with the match, or before it.
    """

    __slots__ = ("_held", "_include", "_longest", "_stops")

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = sorted(stops, key=len, reverse=True)
        self._include = include
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        """The end of the text so far: always the beginning of a stop string, or empty."""

    def push(self, delta: str, armed: bool = True) -> tuple[str, str | None]:
        """Take more text; return what is now safe to show, and the stop string that was completed, if any.

        Nothing may be pushed after a match. While not `armed`, no match may end in `delta`, though one that
        ends later may begin there.
        """
        if not delta:
            return "", None
        text = self._held + delta
        if armed:
            end, stop = self._first_match(text)
            if stop is not None:
                self._held = ""
                return text[: end if self._include else end - len(stop)], stop
        safe = len(text) - self._possible_start(text)
        self._held = text[safe:]
        return text[:safe], None

    def flush(self) -> str:
        """Return what is held back: the text has ended, so it is no stop string."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str | None]:
        old = len(self._held)
        first_end, first = len(text) + 1, None
        for stop in self._stops:
            # What ended within the held text was let pass, so the match must reach into what is new.
            start = text.find(stop, max(0, old - len(stop) + 1), first_end - 1)
            if start >= 0:
                first_end, first = start + len(stop), stop
        return first_end, first

    def _possible_start(self, text: str) -> int:
        """Return the length of the longest end of `text` that begins a stop string."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            for stop in self._stops:
                if len(stop) > len(text) - start and stop.startswith(text[start:]):
                    return len(text) - start
        return 0
