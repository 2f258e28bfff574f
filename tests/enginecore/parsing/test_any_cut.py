"""Random answers in random pieces: the calls that were written come out, and pieces make no difference."""

import json
import keyword
from typing import Any

import pytest
from answers import ALONE, FORMATS, Answer, as_objects, cut, read
from hypothesis import given, settings
from hypothesis import strategies as st

from enginecore.frontend.parsing import REASONING_PARSERS, TOOL_PARSERS, AnswerParser, forced_parser

fewer = settings(max_examples=40)
"""Each test runs for several parsers."""

TEXT = st.text(st.characters(codec="utf-8"), max_size=12) | st.sampled_from(
    ["{", "}", '"', "\\", "</tool_call>", "<tool_call>", "[TOOL_CALLS]", "né 🌶", "'''", '"""', "a, b)", "]"]
)
NUMBER = st.integers(-(10**6), 10**6) | st.floats(allow_nan=False, allow_infinity=False)
VALUE: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | NUMBER | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
NAME = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True).filter(lambda name: not keyword.iskeyword(name))
CALLS = st.lists(st.tuples(NAME, st.dictionaries(NAME, VALUE, max_size=3)), max_size=3)
WORDS = st.text("abc é🌶\n.,<([", max_size=20).filter(lambda text: text[:1] not in ("[", "{"))
PLACES = st.lists(st.integers(0, 400), max_size=40)

PARTS = [
    *("<tool_call>", "</tool_call>", "<tool_call", "</tool", "<", "\n", " ", "text", "{", "}", "[", "]"),
    *(
        '"name"',
        '"arguments"',
        '"parameters"',
        ": ",
        ", ",
        '"f"',
        '{"a": 1}',
        "{}",
        '"{}"',
        "null",
        '"',
        "\\",
    ),
    *('{"name": "f", "arguments": {', '{"name": "f", ', '{"arguments": {"x": "<tool_call>"}, '),
    *("[TOOL_CALLS]", "[TOOL", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<|py", ";", "f"),
    *("g(", ")", "a=1"),
    *(
        "a='x'",
        "'",
        '"""',
        "[f(",
        "(",
        "x.y(a=",
        "True",
        "<think>",
        "</think>",
        "<thi",
        "[THINK]",
        "[/THINK]",
    ),
]
"""Random sequences of these get far into every state, and break off anywhere."""


@pytest.mark.parametrize("form", FORMATS)
@fewer
@given(text=WORDS, calls=CALLS, places=PLACES)
def test_what_was_written_is_read_however_it_is_cut(form, text, calls, places):
    name, write = FORMATS[form]
    found = read(TOOL_PARSERS[name](), cut(write(text, calls), places))
    assert as_objects(found.calls) == calls
    assert all(call.complete for call in found.calls)
    if not calls:
        assert found.content == text
    elif form in ALONE or not text.strip():
        assert found.content == ""
    else:
        assert found.content == text


@pytest.mark.parametrize("name", TOOL_PARSERS)
@fewer
@given(parts=st.lists(st.sampled_from(PARTS), max_size=14), places=PLACES)
def test_pieces_make_no_difference_to_tool_calls(name, parts, places):
    text = "".join(parts)
    whole = read(TOOL_PARSERS[name](), [text])
    assert read(TOOL_PARSERS[name](), cut(text, places)) == whole
    assert read(TOOL_PARSERS[name](), text) == whole
    if not whole.calls:
        assert whole.content == text


@pytest.mark.parametrize("name", [None, "f"])
@fewer
@given(parts=st.lists(st.sampled_from(PARTS), max_size=14), calls=CALLS, places=PLACES)
def test_pieces_make_no_difference_to_forced_calls(name, parts, calls, places):
    kind = forced_parser(name, TOOL_PARSERS["hermes"])
    listed = json.dumps([{"name": called, "parameters": arguments} for called, arguments in calls])
    for text in ("".join(parts), listed, json.dumps(dict(calls))):
        whole = read(kind(), [text])
        assert read(kind(), cut(text, places)) == whole
        assert read(kind(), text) == whole
        if text == listed and name is None and calls:
            assert (whole.content, as_objects(whole.calls)) == ("", calls)
        if name is not None and text.startswith("{"):
            assert text.startswith(whole.calls[0].arguments)


@pytest.mark.parametrize("name", REASONING_PARSERS)
@pytest.mark.parametrize("prompt", ["", "<think>\n", "[THINK]", "<think>\n\n</think>\n\n"])
@fewer
@given(parts=st.lists(st.sampled_from(PARTS), max_size=14), places=PLACES)
def test_pieces_make_no_difference_to_reasoning(name, prompt, parts, places):
    text = "".join(parts)
    whole = read(REASONING_PARSERS[name](prompt), [text])
    assert read(REASONING_PARSERS[name](prompt), cut(text, places)) == whole
    assert read(REASONING_PARSERS[name](prompt), text) == whole


@fewer
@given(thought=WORDS, text=WORDS, calls=CALLS, places=PLACES)
def test_calls_come_after_reasoning(thought, text, calls, places):
    _, write = FORMATS["hermes"]
    parser = AnswerParser(REASONING_PARSERS["deepseek_r1"](), TOOL_PARSERS["hermes"]())
    found = read(parser, cut(f"<think>{thought}<tool_call></think>{write(text, calls)}", places))
    assert found.reasoning == f"{thought}<tool_call>"
    assert as_objects(found.calls) == calls
    assert found.content == (text if text.strip() or not calls else "")


@pytest.mark.parametrize("form", FORMATS)
@fewer
@given(text=WORDS, calls=CALLS, places=PLACES, end=st.integers(0, 200))
def test_a_call_that_was_cut_is_told_as_far_as_it_came(form, text, calls, places, end):
    """Complete calls are those that were written; of the one that was cut, nothing is made up."""
    name, write = FORMATS[form]
    whole = read(TOOL_PARSERS[name](), [write(text, calls)])
    found = read(TOOL_PARSERS[name](), cut(write(text, calls)[:end], places))
    done = tuple(call for call in found.calls if call.complete)
    assert done == whole.calls[: len(done)]
    assert len(found.calls) <= len(done) + 1
    if len(found.calls) > len(done):
        begun, full = found.calls[-1], whole.calls[len(done)]
        assert begun.name == full.name
        assert full.arguments.startswith(begun.arguments)


def test_an_answer_in_one_piece_is_told_in_one_piece():
    parser = TOOL_PARSERS["hermes"]()
    assert [*parser.push("some words"), *parser.finish()] == [*TOOL_PARSERS["pythonic"]().push("some words")]
    assert read(parser, []) == Answer()


@fewer
@given(calls=CALLS.filter(bool), end=st.integers(0, 400), places=PLACES)
def test_required_calls_that_are_cut_anywhere_leave_no_fragments(calls, end, places):
    """A call is there once its name is; what there is of one before that is nothing."""
    written = [json.dumps({"name": name, "parameters": arguments}) for name, arguments in calls]
    text = f"[{', '.join(written)}]"[:end]
    found = read(forced_parser(None, TOOL_PARSERS["hermes"])(), cut(text, places))
    assert found.content == ""
    begun, place = [], 1
    for call, (name, arguments) in zip(written, calls, strict=True):
        told = call.partition(f'"{name}"')
        at = place + len(told[0]) + len(told[1])
        if len(text) >= at:
            begun.append(name)
            whole = len(text) >= place + len(call)
            assert found.calls[len(begun) - 1].complete == whole
            if whole:
                assert json.loads(found.calls[len(begun) - 1].arguments) == arguments
            else:
                assert json.dumps(arguments).startswith(found.calls[len(begun) - 1].arguments)
        place += len(call) + 2
    assert [call.name for call in found.calls] == begun
