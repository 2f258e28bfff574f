import os
import subprocess
import sys


def test_import_brings_torch_and_nothing_else_heavy():
    script = (
        "import sys, torch, torch.distributed; before = set(sys.modules); import collectives;"
        "print(sorted({name.split('.')[0] for name in set(sys.modules) - before}))"
    )
    result = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env=os.environ | {"OCTAVO_NCCL_LIBRARY": "/nowhere"},  # not looked for before it is needed
    )
    assert result.stdout.strip() == "['collectives']"
