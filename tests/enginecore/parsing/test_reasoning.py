"""Where reasoning begins and ends."""

import pytest
from answers import Answer, read

from enginecore.frontend.parsing import REASONING_PARSERS, ReasoningParser, Thinking


def answer(name: str, text: str, prompt: str = "") -> Answer:
    return read(REASONING_PARSERS[name](prompt), [text])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", Answer("\n\nYes.", reasoning="\nHm.\n")),
        (" <think>Hm.</think>", Answer("", reasoning="Hm.")),
        ("<think></think>Yes.", Answer("Yes.")),
        ("<think>Hm. </thi", Answer("", reasoning="Hm. </thi")),
        ("<think>a</think>b</think><think>c", Answer("b</think><think>c", reasoning="a")),
    ],
)
@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1"])
def test_between_tags(name, text, expected):
    assert answer(name, text) == expected
    assert answer(name, text, "…<think>\n") == expected


def test_without_an_opening_tag():
    assert answer("deepseek_r1", "Hm.</think>Yes.") == Answer("Yes.", reasoning="Hm.")
    assert answer("qwen3", "Hm.</think>Yes.") == Answer("Hm.</think>Yes.")
    assert answer("qwen3", "Hm.</think>Yes.", "…<think>\n") == Answer("Yes.", reasoning="Hm.")
    assert answer("qwen3", "<thinking> aloud") == Answer("<thinking> aloud")
    assert answer("qwen3", "<th") == Answer("<th")


@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1"])
def test_a_prompt_that_has_turned_thinking_off(name):
    assert answer(name, "Yes.", "…<think>\n\n</think>\n\n") == Answer("Yes.")


@pytest.mark.parametrize(
    ("name", "prompt", "expected"),
    [
        ("qwen3", "…<think>\n", Thinking("<think>", "</think>", begun=True)),
        ("qwen3", "…", Thinking("<think>", "</think>", begun=False)),
        ("qwen3", "…<think>\n\n</think>\n\n", None),
        ("deepseek_r1", "…", Thinking("<think>", "</think>", begun=True)),
        ("deepseek_r1", "…<think>\n", Thinking("<think>", "</think>", begun=True)),
        ("deepseek_r1", "…</think>", None),
        ("mistral", "…", Thinking("[THINK]", "[/THINK]", begun=False)),
        ("mistral", "…[THINK]", Thinking("[THINK]", "[/THINK]", begun=True)),
    ],
)
def test_what_a_prompt_leaves_to_think(name, prompt, expected):
    assert REASONING_PARSERS[name](prompt).thinking() == expected


def test_a_parser_of_ones_own_need_not_know():
    class Own(ReasoningParser):
        def push(self, text):
            return []

        def finish(self):
            return []

    assert Own("…").thinking() is None


def test_mistral():
    assert answer("mistral", "[THINK]Hm.[/THINK]Yes.") == Answer("Yes.", reasoning="Hm.")
