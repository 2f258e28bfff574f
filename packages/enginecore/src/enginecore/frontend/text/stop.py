"""Stop strings in text that arrives piece by piece."""

from collections import deque
from collections.abc import Sequence
from functools import lru_cache


class StopMatcher:
    """Finds the first of several strings to be completed, and never lets part of it through before.

    The result does not depend on how the text is cut into pieces: the match that ends first wins, and of
    those that end together the longest. The work is linear in the text, however many strings there are.

    Args:
        stops: Non-empty strings.
        include: Whether the text that is let through ends with the match, or before it.
    """

    __slots__ = ("_automaton", "_held", "_include", "_node")

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._automaton = stop_automaton(tuple(stops))
        self._include = include
        self._node = 0
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
        automaton, node = self._automaton, self._node
        for place, character in enumerate(delta, len(self._held) + 1):
            node = automaton.next(node, character)
            stop = automaton.match[node]
            if armed and stop is not None:
                self._held = ""
                return text[: place if self._include else place - len(stop)], stop
        self._node = node
        safe = len(text) - automaton.open_length[node]
        self._held = text[safe:]
        return text[:safe], None

    def flush(self) -> str:
        """Return what is held back: the text has ended, so it is no stop string."""
        held, self._held = self._held, ""
        return held


class StopAutomaton:
    """An Aho-Corasick automaton (Aho and Corasick, 1975): a trie of strings with links for what does not fit.

    A node stands for the longest end of a text that begins one of the strings; node 0 for none.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.children: list[dict[str, int]] = [{}]
        self.match: list[str | None] = [None]
        """The longest string that ends at a node."""
        self.open_length = [0]
        """Length of the longest end of the text at a node that begins a string and is not all of it."""
        self._fall = [0]
        """The node of the longest proper end of a node's text."""
        for stop in stops:
            self._add(stop)
        self._link()

    def next(self, node: int, character: str) -> int:
        """Return the node after one more character; over a whole text, at most two look-ups a character."""
        while True:
            following = self.children[node].get(character)
            if following is not None:
                return following
            if node == 0:
                return 0
            node = self._fall[node]

    def _add(self, stop: str) -> None:
        node = 0
        for depth, character in enumerate(stop, 1):
            following = self.children[node].get(character)
            if following is None:
                following = self.children[node][character] = len(self.children)
                self.children.append({})
                self.match.append(None)
                self.open_length.append(depth)
                self._fall.append(0)
            node = following
        self.match[node] = stop

    def _link(self) -> None:
        """Set what a node takes over from the node it falls to, shorter texts first."""
        waiting = deque(self.children[0].values())
        while waiting:
            node = waiting.popleft()
            fall = self._fall[node]
            self.match[node] = self.match[node] or self.match[fall]
            if not self.children[node]:
                self.open_length[node] = self.open_length[fall]
            for character, child in self.children[node].items():
                self._fall[child] = self.next(fall, character)
                waiting.append(child)


@lru_cache(maxsize=64)
def stop_automaton(stops: tuple[str, ...]) -> StopAutomaton:
    """Return the automaton of some strings; the samples of a request and its like share one."""
    return StopAutomaton(stops)
