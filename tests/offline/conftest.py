import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from stepping_engine import SteppingEngine


@pytest.fixture
def engine() -> SteppingEngine:
    return SteppingEngine()
