"""HC-123: calls that come back in the history, as templates see them."""

from typing import Any

import pytest

from enginecore.errors import RequestError
from enginecore.frontend.text.chat import ChatTemplate

WALKER = (
    "{% for m in messages %}{{ m.role }}:{{ m['content'] }}"
    "{% for c in m.tool_calls or [] %}({{ c.type }} {{ c.function.name }}"
    "{% for key, value in c.function.arguments.items() %} {{ key }}={{ value | tojson }}{% endfor %})"
    "{% endfor %};{% endfor %}"
)


def render(*messages: dict[str, Any], template: str = WALKER, **options: Any) -> str:
    return ChatTemplate(template, None).render(messages, **options)


def call(arguments: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": arguments}}],
    }


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"a": 1, "s": "né 🌶"}', ' a=1 s="né 🌶"'),
        (' \n{"a": 1} ', " a=1"),
        ("{}", ""),
        ("", ""),
        (" ", ""),
        (None, ""),
        ("null", ""),
        ({"a": {"b": [1, None]}}, ' a={"b": [1, null]}'),
        ('{"a": {"b": [1, null]}}', ' a={"b": [1, null]}'),
        ('{"a": NaN}', " a=NaN"),
        ('{"a": "unfin', ' arguments="{\\"a\\": \\"unfin"'),
        ('"Beijing"', ' arguments="Beijing"'),
        ("[1, 2]", " arguments=[1, 2]"),
        ([1, 2], " arguments=[1, 2]"),
        ("city=Rome", ' arguments="city=Rome"'),
        ("7", " arguments=7"),
        ("[" * 100_000, f' arguments="{"[" * 100_000}"'),
    ],
    ids=lambda value: str(value)[:30],
)
def test_arguments_become_a_mapping(arguments: Any, shown: str) -> None:
    assert render(call(arguments)) == f"assistant:(function f{shown});"


def test_arguments_may_be_left_out() -> None:
    message = {"role": "assistant", "content": "so", "tool_calls": [{"function": {"name": "f"}}]}
    assert render(message) == "assistant:so(function f);"


def test_results_in_any_form_and_order() -> None:
    results = [
        {"role": "tool", "tool_call_id": "2", "content": [{"type": "text", "text": "b"}]},
        {"role": "tool", "tool_call_id": "1", "content": ""},
    ]
    assert render(call("{}"), *results) == "assistant:(function f);tool:b;tool:;"


def test_the_callers_messages_stay_as_they_were() -> None:
    message = call('{"a": 1}')
    render(message)
    assert message == call('{"a": 1}')


def test_tools_reach_the_template() -> None:
    template = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert render({"role": "user", "content": "x"}, template=template, tools=tools) == "f"
    assert render({"role": "user", "content": "x"}, template=template, tools=[]) == ""


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_goes_by_both_names(name: str) -> None:
    message = {"role": "assistant", "content": "x", name: "hm"}
    assert render(message, template="{{ messages[0].reasoning ~ messages[0].reasoning_content }}") == "hmhm"


@pytest.mark.parametrize(
    "calls",
    [
        "f",
        [5],
        [{}],
        [{"function": {}}],
        [{"function": {"name": ""}}],
        [{"type": "x", "function": {"name": "f"}}],
    ],
    ids=str,
)
def test_what_is_no_call_is_refused(calls: Any) -> None:
    with pytest.raises(RequestError, match=r"messages\[0\].tool_calls") as refused:
        render({"role": "assistant", "content": "x", "tool_calls": calls})
    assert refused.value.param == "messages"
