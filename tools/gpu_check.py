"""Check and measure everything that runs on a GPU, on this machine's: see gpu_check/.

uv run python tools/gpu_check.py --output report.json
"""

import sys

# The package of the same name beside this file; it goes before a module.
from gpu_check.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
