import sys
from pathlib import Path

# The reference is shared with programs that tests start, so it is a module of its own beside them.
sys.path.insert(0, str(Path(__file__).parent))
