"""docs/from-vllm.md: names it calls the same exist, those it calls missing do not."""

from dataclasses import fields
from pathlib import Path

import pytest

from enginecore import LLM, EngineConfig, PoolingParams, SamplingParams
from enginecore.vllm_options import VLLMOptions

DOCUMENT = Path(__file__).parents[2] / "docs" / "from-vllm.md"
ENGINE = {field.name for field in fields(EngineConfig)}
TAKEN = {field.name for field in fields(VLLMOptions)}


def rows() -> list[tuple[str, str, str]]:
    """Return (section, name, verdict) of each row of the document's tables."""
    section, found = "", []
    for line in DOCUMENT.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            section = line.split("`")[1]
        elif line.startswith("| `"):
            name, verdict = (cell.strip(" `") for cell in line.split("|")[1:3])
            found.append((section, name, verdict))
    return found


def here(section: str, name: str) -> bool:
    if section == "LLM":
        return name == "llm_engine" or hasattr(LLM, name)
    if section == "SamplingParams":
        return hasattr(SamplingParams, name)
    if section == "PoolingParams":
        return hasattr(PoolingParams, name)
    return name in ENGINE


def test_every_table_is_read():
    assert {section for section, _, _ in rows()} == {"LLM", "SamplingParams", "PoolingParams", "EngineArgs"}
    assert {verdict for _, _, verdict in rows()} == {"same", "other", "missing", "taken"}


@pytest.mark.parametrize(("section", "name", "verdict"), rows())
def test_a_name_is_what_the_document_says(section, name, verdict):
    if verdict == "same":
        assert here(section, name)
    elif verdict == "missing":
        assert not here(section, name)
    elif verdict == "taken":
        assert name in TAKEN


def test_every_option_and_parameter_of_vllm_s_name_is_listed():
    listed = {(section, name) for section, name, _ in rows()}
    assert all(("SamplingParams", name) in listed for name in SamplingParams.__struct_fields__)
    assert all(("PoolingParams", name) in listed for name in PoolingParams.__struct_fields__)
    assert all(("EngineArgs", name) in listed for name in TAKEN)
