"""What each parser makes of answers, right and wrong."""

import json

import pytest
from answers import Answer, Call, read

from enginecore.frontend.parsing import TOOL_PARSERS, Arguments, CallEnd, CallStart, Content


def answer(name: str, text: str) -> Answer:
    return read(TOOL_PARSERS[name](), [text])


def hermes(text: str) -> Answer:
    return answer("hermes", text)


F = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
CALL = Call("f", '{"a": 1}')


def test_arguments_are_told_as_they_come():
    parser = TOOL_PARSERS["hermes"]()
    assert parser.push('Hi <tool_call>\n{"name": "f", "argu') == [Content("Hi ")]
    assert parser.push('ments": {"a": ') == [CallStart("f"), Arguments('{"a": ')]
    assert parser.push('"}') == [Arguments('"}')]
    assert parser.push('"} ') == [Arguments('"}')]
    assert parser.push("}\n</tool_call>") == [CallEnd()]
    assert parser.finish() == []


def test_text_before_and_between_calls_is_kept_exactly():
    assert hermes(f" Hi. \n{F}\n{F} and \n") == Answer(" Hi. \n and \n", (CALL, CALL))


def test_blanks_alone_beside_calls_are_no_content():
    assert hermes(f"\n\n{F}\n\n{F}\n") == Answer("", (CALL, CALL))
    assert hermes(" \n") == Answer(" \n")


@pytest.mark.parametrize(
    "text",
    [
        "if a < b, write <tool_cal or <tool> here",
        "<tool_call",
        "the tag <tool_call> begins a call",
        "<tool_call></tool_call>",
        "<tool_call>f(1)</tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "city=Rome"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": 7}</tool_call>',
        '<tool_call>{"name": "f" "arguments": {}}</tool_call>',
        '<tool_call>{"name": "' + "f" * 2000 + '", "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {"a": 1</tool_call>',
        '<tool_call>{"name": "f"',
        '<tool_call>{"name',
    ],
    ids=lambda text: text[:60],
)
def test_what_is_no_call_is_content_in_full(text):
    if text.endswith('"name": "f"'):  # a name alone, cut
        assert hermes(text) == Answer("", (Call("f", "", complete=False),))
    else:
        assert hermes(text) == Answer(text)


def test_a_call_is_found_after_something_that_was_none():
    assert hermes(f"<tool_call>no{F}") == Answer("<tool_call>no", (CALL,))
    assert hermes('<tool_call>{"name": <tool_call>' + F[11:]) == Answer('<tool_call>{"name": ', (CALL,))


@pytest.mark.parametrize(
    ("said", "arguments"),
    [
        ('"arguments": {"a": 1}, "name": "f"', '{"a": 1}'),
        ('"name": "f", "parameters": {"a": 1}', '{"a": 1}'),
        ('"id": 5, "x": [{"name": "g"}], "s": "}", "name": "f", "n": null, "arguments": {}', "{}"),
        ('"name": "f", "arguments": {}, "more": {"arguments": {"b": 2}}, "z": true', "{}"),
        ('"name": "f"', "{}"),
        ('"name": "f", "arguments": null', "{}"),
        ('"name": "f", "arguments": "{\\"a\\": \\"é\\"}"', '{"a": "é"}'),
        ('"name": "f", "arguments": {"t": "</tool_call>"}', '{"t": "</tool_call>"}'),
        ('"name":\n"f",\n"arguments" :\n{ }\n', "{ }"),
    ],
)
def test_ways_to_write_a_call(said, arguments):
    assert hermes(f"<tool_call>{{{said}}}</tool_call>!") == Answer("!", (Call("f", arguments),))


@pytest.mark.parametrize(
    ("said", "arguments"),
    [
        ('{"a": 1}', '{"a": 1}'),  # the object's own bracket was forgotten
        ('{"a": [1', '{"a": [1'),
        ("{'a': 1}}", "{'a': 1}"),
        ('{"a": }}', '{"a": }'),
        ('{"a": 1}}}', '{"a": 1}'),
    ],
)
def test_a_call_that_has_begun_is_told_as_the_model_wrote_it(said, arguments):
    """It was streamed: nothing can be taken back."""
    text = f'<tool_call>{{"name": "f", "arguments": {said}</tool_call>{F}'
    assert hermes(text) == Answer("", (Call("f", arguments), CALL))


def test_a_call_without_its_closing_tag():
    assert hermes(F.removesuffix("</tool_call>") + "\nSo.") == Answer("So.", (CALL,))
    assert hermes(F.removesuffix("</tool_call>") + F) == Answer("", (CALL, CALL))
    assert hermes(F.removesuffix("call>")) == Answer("", (CALL,))


@pytest.mark.parametrize("end", range(len(F) + 1))
def test_a_cut_call_holds_what_there_was_of_it(end):
    found = hermes(F[:end])
    begun = F.index("{", 12)
    if end <= F.index('"f"') + 2:
        assert found == Answer(F[:end])
    else:
        [call] = found.calls
        assert found.content == ""
        assert call.arguments == '{"a": 1}'[: max(0, end - begun)]
        assert call.complete == (end >= F.index("</"))


def test_llama3():
    one, two = '{"name": "f", "parameters": {"a": 1}}', '{"name": "g", "arguments": {}}'
    calls = (CALL, Call("g", "{}"))
    for text in (f"{one}; {two}", f"{one}\n{two}", f"<|python_tag|>{one};{two}", f" {one};;{two};"):
        assert answer("llama3_json", text) == Answer("", calls)
    assert answer("llama3_json", f"Well: <|python_tag|>{one} done") == Answer("Well: done", (CALL,))


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Bob", "age": 5}',
        '{"name": "Bob"}',
        '{"name": "Bob", ',
        'so {"name": "f", "parameters": {}}',
        '<|python_tag|>brave_search.call(query="x")',
        "[1, 2]",
        "<|python_tag",
    ],
)
def test_llama3_text(text):
    assert answer("llama3_json", text) == Answer(text)


def test_mistral():
    listed = '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}, "id": "x"}]'
    for text in (
        listed,
        '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}',
        '[TOOL_CALLS]f{"a": 1}[TOOL_CALLS] g {}',
        '[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"a": 1}\n[TOOL_CALLS]g[ARGS]{}',
    ):
        assert answer("mistral", "Yes. " + text) == Answer("Yes. ", (CALL, Call("g", "{}")))
    assert answer("mistral", listed[:-20]).calls[0] == CALL


@pytest.mark.parametrize(
    "text",
    ["[TOOL_CALL", "[TOOL_CALLS]", "[TOOL_CALLS] []", "[TOOL_CALLS]f", "[TOOL_CALLS]f[X]{}", "[ARGS]{}"],
)
def test_mistral_text(text):
    assert answer("mistral", text) == Answer(text)


def test_mistral_s_ids_are_nine_letters_and_digits():
    ids = {TOOL_PARSERS["mistral"].new_call_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(len(each) == 9 and each.isalnum() and each.isascii() for each in ids)
    assert len({TOOL_PARSERS["hermes"].new_call_id() for _ in range(100)}) == 100


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("", {}),
        ("a=1, b=-2.5, c='it''s', d=None, e=True, f=false, g=null", {
            "a": 1, "b": -2.5, "c": "its", "d": None, "e": True, "f": False, "g": None,
        }),
        ("x=[1, (2, 3)], y={'k': ['é🌶']}", {"x": [1, [2, 3]], "y": {"k": ["é🌶"]}}),
        ('s="a, b) [c] \\" \'"', {"s": "a, b) [c] \" '"}),
        ('s="""two\nlines "quoted" \\""""', {"s": 'two\nlines "quoted" "'}),
        ("s='', t=\"\"", {"s": "", "t": ""}),
        ("s='\\d'", {"s": "\\d"}),
    ],
)  # fmt: skip
def test_pythonic(written, arguments):
    found = answer("pythonic", f"\n[f({written}), tools.g(a=1)]\n")
    assert found.content == ""
    assert [(call.name, json.loads(call.arguments)) for call in found.calls] == [
        ("f", arguments),
        ("tools.g", {"a": 1}),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "[1] According to (a)",
        "[link](url)",
        "[]",
        "[f(1)]",
        "[f(a=b)]",
        "[f(**{})]",
        "[f(a=1, a=2)]",
        "[f(a={1: 2})]",
        "[f(a=1e999)]",
        "[f(a=b'x')]",
        "[f(a=f'{x}')]",
        "[f(a=" + "[" * 500 + "]" * 500 + ")]",
        "Well, [f(a=1)]",
        "[f",
    ],
    ids=lambda text: text[:40],
)
def test_pythonic_text(text):
    assert answer("pythonic", text) == Answer(text)


def test_a_pythonic_call_that_is_none_ends_the_list():
    assert answer("pythonic", "[f(a=1), g(2)] x") == Answer(", g(2)] x", (CALL,))
    assert answer("pythonic", "[f(a=1)(b=2)]") == Answer("(b=2)]", (CALL,))


def test_a_pythonic_call_that_was_cut_has_its_whole_arguments():
    for end in ("b='un", "b=[1, 2", "", " "):
        assert answer("pythonic", f"[f(a=1,{end}") == Answer("", (Call("f", '{"a": 1', complete=False),))
    assert answer("pythonic", "[f(a=1") == Answer("", (Call("f", "", complete=False),))


def test_halves_of_surrogate_pairs_stay_escapes():
    assert answer("pythonic", "[f(a='\\ud800')]").calls == (Call("f", '{"a": "\\ud800"}'),)
