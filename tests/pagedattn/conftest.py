import sys
from pathlib import Path

import pytest
import torch

# The reference is shared with programs that tests start, so it is a module of its own beside them.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def threads():
    """Sets torch's number of threads, for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
