"""Parsers by name."""

from pathlib import Path

import pytest

from enginecore import config
from enginecore.config import EngineConfig
from enginecore.errors import ConfigError
from enginecore.frontend.parsing import REASONING_PARSERS, TOOL_PARSERS, Content, load_parsers


def test_the_options_know_the_parsers_that_are_here():
    assert tuple(TOOL_PARSERS) == config.TOOL_CALL_PARSERS
    assert tuple(REASONING_PARSERS) == config.REASONING_PARSERS


@pytest.mark.parametrize("option", ["tool_call_parser", "reasoning_parser"])
def test_an_unknown_name_is_told_with_those_there_are(option):
    with pytest.raises(ConfigError, match=rf"{option} must be one of .*, or module:Class, got 'hermse'"):
        EngineConfig(model="m", **{option: "hermse"})


def test_names():
    found = load_parsers(EngineConfig(model="m", tool_call_parser="hermes", reasoning_parser="qwen3"))
    assert found == (TOOL_PARSERS["hermes"], REASONING_PARSERS["qwen3"])
    assert found.special_tokens == ["<tool_call>", "</tool_call>", "<think>", "</think>"]
    assert not any(load_parsers(EngineConfig(model="m")))


PLUGIN = """
from enginecore.frontend.parsing import Content, ToolParser

class Loud(ToolParser):
    special_tokens = ("<loud>",)

    def push(self, text):
        return [Content(text.upper())]

    def finish(self):
        return [Content("!" + self.prompt)]

class Broken(Loud):
    def finish(self):
        raise KeyError("x")

class Other:
    pass
"""


def test_a_parser_of_somebody_else(tmp_path: Path):
    (tmp_path / "loud_parsers.py").write_text(PLUGIN)
    where = {"model": "m", "plugin_path": str(tmp_path)}
    found = load_parsers(EngineConfig(tool_call_parser="loud_parsers:Loud", **where))
    assert found.special_tokens == ["<loud>"]
    parser = found.start("p")
    assert [*parser.push("a"), *parser.finish()] == [Content("A"), Content("!p")]
    for name, reason in (
        ("loud_parsers:Other", "is no parser: name a class that inherits from .*ToolParser"),
        ("loud_parsers:Broken", "failed: KeyError"),
        ("loud_parsers:Missing", "has no Missing"),
        ("nowhere:X", "no module nowhere"),
    ):
        with pytest.raises(ConfigError, match=reason):
            load_parsers(EngineConfig(tool_call_parser=name, **where))
    with pytest.raises(ConfigError, match="ReasoningParser"):
        load_parsers(EngineConfig(reasoning_parser="loud_parsers:Loud", **where))
