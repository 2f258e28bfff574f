"""Check that a chat template shows the instructions and tool results that it is given."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from enginecore.errors import RequestError

_ROLES = ("system", "developer", "tool")
"""Roles that must be shown. Of an assistant's, templates may leave out reasoning, and text beside calls."""

_MARK = "\ufdd1"
"""Begins and ends a stand-in for a message's text; a code point that is no character of any text."""


def require_shown(
    messages: Sequence[Mapping[str, Any]],
    text: str,
    render: Callable[[Sequence[Mapping[str, Any]]], str],
    renamed: Collection[int],
) -> None:
    """Raise RequestError if a template left out a message: no instruction is lost unseen.

    A text that the prompt does not hold as it is may have been escaped, changed, or read as a switch. So the
    messages are rendered once more, with marks in the place of such texts: who reads them shows the marks, or
    gives another prompt.

    Args:
        messages: As the template got them.
        text: What it made of them.
        render: Renders messages otherwise the same.
        renamed: Places of messages whose role was developer.
    """
    unseen = _unseen(messages, text)
    if not unseen:
        return
    marked = _rendered(render, messages, unseen)
    for place in unseen:
        if marked is None or _mark(place) in marked or _rendered(render, messages, [place]) != text:
            continue
        role = "developer, as such or as system" if place in renamed else messages[place]["role"]
        raise RequestError(
            f"messages[{place}]: the chat template shows no message of role {role}: leave it out, or put "
            "the text into the user's message",
            "messages",
        )


def _unseen(messages: Sequence[Mapping[str, Any]], text: str) -> list[int]:
    """Return the places of messages whose texts the prompt does not hold as they are."""
    unseen, end = [], 0
    for place, message in enumerate(messages):
        if message["role"] not in _ROLES:
            continue
        content = message.get("content") or ""
        for part in [content] if isinstance(content, str) else [part["text"] for part in content]:
            wanted = part.strip()
            # Texts mostly stand in the order of their messages.
            start = text.find(wanted, end)
            start = text.find(wanted) if start < 0 else start
            if start < 0:
                unseen.append(place)
                break
            end = start + len(wanted)
    return unseen


def _rendered(
    render: Callable[[Sequence[Mapping[str, Any]]], str],
    messages: Sequence[Mapping[str, Any]],
    places: Collection[int],
) -> str | None:
    """Render with marks for the texts of the messages at `places`; None if the template refuses that."""
    changed = list(messages)
    for place in places:
        whole = isinstance(messages[place]["content"], str)
        mark = _mark(place)
        changed[place] = {
            **messages[place],
            "content": mark if whole else [{"type": "text", "text": mark}],
        }
    try:
        return render(changed)
    except Exception:
        return None  # a template is a program: one that refuses the marks has read them


def _mark(place: int) -> str:
    return f"{_MARK}{place}{_MARK}"
