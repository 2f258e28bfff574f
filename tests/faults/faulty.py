"""A step that fails: the model, the memory, or a bug in the scheduler.

As a program, `faulty.py FAULT MODULE` runs `MODULE.main()`, a process of an engine, with that fault.
"""

import importlib
import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

FAULTS = {
    "model": ("enginecore.worker.runner.runner", "Runner", "run", ValueError("two tensors\ndo not match")),
    "memory": ("enginecore.worker.runner.runner", "Runner", "run", MemoryError("no 7 GiB left")),
    "scheduler": ("batchsched.scheduler", "Scheduler", "commit", KeyError("row 7")),
}
"""By name: the method that fails, and what it raises."""

SAID = {
    "model": "ValueError: two tensors do not match",
    "memory": "MemoryError: no 7 GiB left",
    "scheduler": "KeyError: 'row 7'",
}
"""What callers are told."""

GOOD_STEPS = 3


def faulty(fault: str, applies: Callable[[Any], bool] = lambda self: True) -> Any:
    """Return a patch under which the method fails from its fourth call on, if `applies` to the object."""
    module, cls, method, error = FAULTS[fault]
    owner = getattr(importlib.import_module(module), cls)
    whole = getattr(owner, method)
    calls = 0

    def fail(self, *args):
        nonlocal calls
        calls += applies(self)
        if calls > GOOD_STEPS:
            raise error
        return whole(self, *args)

    return patch.object(owner, method, fail)


def main(fault: str, module: str, *arguments: str) -> int:
    sys.argv[1:] = arguments
    in_worker = module == "enginecore.worker.process"
    with faulty(fault, lambda self: not in_worker or self._tp.rank == 1):
        return importlib.import_module(module).main()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
