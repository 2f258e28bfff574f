"""Garbage collection in processes that serve."""

import subprocess
import sys

PROGRAM = """
import gc

from enginecore.garbage import freeze_start

{freeze}
before = gc.get_stats()[2]["collections"]
# As many objects as a thousand requests have, each a list that refers to itself: only a collection frees it.
running = []
for _ in range(300_000):
    running.append([])
    running[-1].append(running[-1])
print(gc.get_freeze_count() > 0, gc.get_stats()[2]["collections"] - before)
# And they are still freed when they have ended.
running.clear()
gc.collect()
print(sum(type(found) is list and len(found) == 1 and found[0] is found for found in gc.get_objects()))
"""


def run(freeze: str) -> list[str]:
    program = PROGRAM.replace("{freeze}", freeze)
    return subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    ).stdout.split()


def test_a_thousand_requests_start_without_a_full_collection():
    assert run("freeze_start()") == ["True", "0", "0"]
    frozen, full, _ = run("")
    assert (frozen, int(full) > 0) == ("False", True)  # as it is without
