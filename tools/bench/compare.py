"""Measure Octavo beside vLLM, OpenVINO GenAI, llama.cpp and transformers on this machine: see compare/.

uv run python tools/bench/compare.py setup ../peers                    # environments and models
uv run python tools/bench/compare.py run ../peers --json figures.json  # hours; with --short less
uv run python tools/bench/compare.py report figures.json --png figures.png
"""

import sys

# The package of the same name beside this file; it goes before a module.
from compare.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
