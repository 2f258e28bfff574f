import random
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from enginecore.frontend.text.stop import StopMatcher, stop_automaton

ALPHABET = "ab"


def run(stops: list[str], deltas: list[str], include: bool = False) -> tuple[list[str], str | None]:
    """Return what each delta let through, with what was left at the end, and the match."""
    matcher = StopMatcher(stops, include)
    shown = []
    for delta in deltas:
        safe, stop = matcher.push(delta)
        shown.append(safe)
        if stop is not None:
            return shown, stop
    return [*shown, matcher.flush()], None


def naive(stops: list[str], text: str, include: bool) -> tuple[str, str | None]:
    """Look at every beginning of the text, shortest first, for one that ends in a stop string."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            longest = max(ended, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


def test_a_stop_string_across_tokens_never_shows() -> None:
    assert run(["STOP"], list("abcSTOPzz")) == (["a", "b", "c", "", "", "", ""], "STOP")


def test_included_stop_string_shows_once_complete() -> None:
    assert run(["STOP"], list("abcSTOPzz"), include=True) == (["a", "b", "c", "", "", "", "STOP"], "STOP")


def test_what_looked_like_a_stop_string_shows_once_it_is_not() -> None:
    assert run(["STOP"], list("aSTx")) == (["a", "", "", "STx", ""], None)
    assert run(["STOP"], ["aST"]) == (["a", "ST"], None)


def test_the_order_of_stop_strings_does_not_matter() -> None:
    assert run(["zzz", "STOP"], list("abcSTOPzz"))[1] == "STOP"


def test_the_match_that_ends_first_wins_and_then_the_longest() -> None:
    assert run(["abcd", "bc"], ["xabcd"]) == (["xa"], "bc")
    assert run(["c", "abc"], ["xabc"]) == (["x"], "abc")


def test_an_overlapping_beginning_is_kept() -> None:
    assert run(["aab"], list("aaab")) == (["", "", "a", ""], "aab")


def test_a_match_needs_to_end_in_armed_text() -> None:
    matcher = StopMatcher(["\n"])
    assert matcher.push("a\nb", armed=False) == ("a\nb", None)
    assert matcher.push("\n") == ("", "\n")


def test_a_match_may_begin_in_unarmed_text() -> None:
    matcher = StopMatcher(["ab", "abab"])
    assert matcher.push("ab", armed=False) == ("", None)
    assert matcher.push("ab") == ("", "abab")


@given(
    stops=st.lists(st.text(ALPHABET, min_size=1, max_size=5), min_size=1, max_size=4),
    deltas=st.lists(st.text(ALPHABET, max_size=4), max_size=12),
    include=st.booleans(),
)
@example(stops=["b", "ab", "aab"], deltas=["", "a", "aaab"], include=False)
def test_the_same_as_looking_at_the_whole_text(stops: list[str], deltas: list[str], include: bool) -> None:
    shown, stop = run(stops, deltas, include)
    assert ("".join(shown), stop) == naive(stops, "".join(deltas), include)


@given(
    stops=st.lists(st.text(ALPHABET, min_size=1, max_size=5), min_size=1, max_size=4),
    deltas=st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=12),
)
def test_no_more_is_held_back_than_may_become_a_stop_string(stops: list[str], deltas: list[str]) -> None:
    matcher = StopMatcher(stops)
    text = shown = ""
    for delta in deltas:
        text += delta
        safe, stop = matcher.push(delta)
        shown += safe
        if stop is not None:
            break
        begins = [stop[:k] for stop in stops for k in range(1, len(stop)) if text.endswith(stop[:k])]
        assert text == shown + max(begins, key=len, default="")


class CountingDict(dict[str, int]):
    """Counts how often it is asked."""

    asked = 0

    def get(self, key: str, default: Any = None) -> Any:
        CountingDict.asked += 1
        return super().get(key, default)


@pytest.mark.parametrize("count", [1, 4, 64, 256])
def test_the_work_grows_with_the_text_and_not_with_the_number_of_strings(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Strings that nearly match everywhere, in a text that never completes one: the worst case."""
    rng = random.Random(7)
    stops = ["".join(rng.choices(ALPHABET, k=200)) + "c" for _ in range(count)]
    automaton = stop_automaton(tuple(stops))
    monkeypatch.setattr(automaton, "children", [CountingDict(each) for each in automaton.children])
    text = "".join(stop[:-1] for stop in stops)[:3000] + "ab" * 100
    CountingDict.asked = 0
    assert run(stops, [text[place : place + 3] for place in range(0, len(text), 3)])[1] is None
    assert len(text) <= CountingDict.asked <= 2 * len(text)
