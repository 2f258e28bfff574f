"""Replay a trace of requests through the scheduler and the allocator: see simulate/ and simulate.md.

uv run python tools/simulate.py azure-conv --rate 4 --policy fcfs time-slice --png runs.png
"""

import sys

# The package of the same name beside this file; it goes before a module.
from simulate.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
