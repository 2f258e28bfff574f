import os
import subprocess
import sys


def modules_after(script: str) -> set[str]:
    """The top-level modules that `script` leaves loaded and that were not there at its start."""
    new = "print(*{name.split('.')[0] for name in set(sys.modules) - before})"
    result = subprocess.run(
        [sys.executable, "-c", f"import sys; before = set(sys.modules); {script}; {new}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env=os.environ | {"OCTAVO_NCCL_LIBRARY": "/nowhere"},  # not looked for before it is needed
    )
    return set(result.stdout.split())


def test_ring_grid_and_placements_need_no_torch():
    names = "RingBroadcast, RingReader, PeerDied, Grid, ExpertPlacement, load_placements, shard"
    assert not {"torch", "numpy"} & modules_after(f"from collectives import {names}")


def test_everything_needs_torch_and_nothing_else_that_is_heavy():
    import_torch = "import torch, torch.distributed; before |= set(sys.modules)"
    assert modules_after(f"{import_torch}; from collectives import *") == {"collectives"}


def test_every_public_name_is_there():
    import collectives

    assert sorted(collectives._MODULE_OF) == collectives.__all__
    assert all(getattr(collectives, name) is not None for name in collectives.__all__)
    assert set(collectives.__all__) <= set(dir(collectives))
    assert not hasattr(collectives, "Nonsense")
