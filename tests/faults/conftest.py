"""Real engines, started and killed: every test here is of the slow tier."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.slow)
