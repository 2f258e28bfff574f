"""The tools are scripts, not installed packages: they are found where they lie."""

import sys
from pathlib import Path

TOOLS = Path(__file__).resolve().parents[2] / "tools"
sys.path.insert(0, str(TOOLS))
sys.path.append(str(TOOLS / "bench"))
