"""Answers as models write them in each format, and what parsers make of a text, in a form to compare."""

import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from enginecore.frontend.parsing import Arguments, CallEnd, CallStart, Content, Parser, Reasoning


class Call(NamedTuple):
    name: str
    arguments: str
    complete: bool = True


class Answer(NamedTuple):
    content: str = ""
    calls: tuple[Call, ...] = ()
    reasoning: str = ""


def read(parser: Parser, pieces: Iterable[str]) -> Answer:
    """Return what `parser` makes of a text in pieces; check the order of events."""
    content, reasoning = "", ""
    calls: list[Call] = []
    is_open = False
    events = [event for piece in pieces for event in parser.push(piece)]
    for event in [*events, *parser.finish()]:
        match event:
            case Content(text):
                assert text
                assert not is_open
                content += text
            case Reasoning(text):
                assert text
                assert not content
                assert not calls
                reasoning += text
            case CallStart(name):
                assert not is_open
                calls.append(Call(name, "", complete=False))
                is_open = True
            case Arguments(text):
                assert text
                assert is_open
                calls[-1] = calls[-1]._replace(arguments=calls[-1].arguments + text)
            case CallEnd():
                assert is_open
                calls[-1] = calls[-1]._replace(complete=True)
                is_open = False
    return Answer(content, tuple(calls), reasoning)


def cut(text: str, places: Sequence[int]) -> list[str]:
    """Return `text` in pieces that end at `places`."""
    ends = sorted({min(place, len(text)) for place in places} | {0, len(text)})
    return [text[start:end] for start, end in itertools.pairwise(ends)]


def as_objects(calls: Iterable[Call]) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in calls]


Asked = Sequence[tuple[str, dict[str, Any]]]


def hermes(text: str, calls: Asked) -> str:
    return text + "\n".join(
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"
        for name, arguments in calls
    )


def mistral_list(text: str, calls: Asked) -> str:
    listed = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return text + ("[TOOL_CALLS] " + json.dumps(listed) if calls else "")


def mistral(text: str, calls: Asked) -> str:
    return text + "".join(
        f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments, ensure_ascii=False)}" for name, arguments in calls
    )


def llama3(text: str, calls: Asked) -> str:
    written = [json.dumps({"name": name, "parameters": arguments}) for name, arguments in calls]
    return text + ("<|python_tag|>" + "; ".join(written) if calls else "")


def llama3_alone(text: str, calls: Asked) -> str:
    """Without the tag; then there is no text beside calls."""
    if not calls:
        return text
    return "; ".join(json.dumps({"name": name, "parameters": arguments}) for name, arguments in calls)


def pythonic(text: str, calls: Asked) -> str:
    """There is no text beside calls."""
    if not calls:
        return text
    written = [
        f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        for name, arguments in calls
    ]
    return f"[{', '.join(written)}]"


FORMATS: dict[str, tuple[str, Callable[[str, Asked], str]]] = {
    "hermes": ("hermes", hermes),
    "mistral": ("mistral", mistral),
    "mistral, a list": ("mistral", mistral_list),
    "llama3_json": ("llama3_json", llama3),
    "llama3_json, no tag": ("llama3_json", llama3_alone),
    "pythonic": ("pythonic", pythonic),
}
"""The parser and the writer of each format."""

ALONE = ("llama3_json, no tag", "pythonic")
"""Formats whose calls are the whole text."""
