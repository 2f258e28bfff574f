"""The reading path of docs/architecture.md exists, and its counts are true within a tenth."""

import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "tools"))
import reading_path

DOCUMENT = Path(__file__).parents[2] / "docs" / "architecture.md"
ROW = re.compile(r"^\| (.+) \| ([0-9,]+) \|$", re.MULTILINE)


def rows(text):
    return {what: int(count.replace(",", "")) for what, count in ROW.findall(text)}


def test_the_document_counts_what_is_there():
    written, counted = rows(DOCUMENT.read_text()), rows(reading_path.table())
    assert list(written) == list(counted)
    for what, count in counted.items():
        assert written[what] == pytest.approx(count, rel=0.1), what


def test_only_code_is_counted():
    function = 'def f():\n    """Say."""\n    # nothing\n    return """a\nb"""\n'
    assert reading_path.code_lines('"""A module."""\n\nx = 1  # one\n\n\n' + function) == 4
