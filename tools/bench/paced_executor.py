"""Plug-in for `streams.py`: an executor without a model, whose steps give each row a token at a set pace.

The environment variable PACED_STEPS is steps a second; 0 is as fast as the core goes. Tokens are those of the
file PACED_IDS, int32, one a step, in turns. The time at which each step ends, in seconds of the monotonic
clock that a host's processes share, and its number go to the file PACED_LOG, as float64.
"""

import os
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

import enginecore.core.start
from enginecore.executor.step import StepInput, StepOutput
from enginecore.messages import EngineLimits


class PacedExecutor:
    """See the module."""

    descriptors = ()
    local_pids: list[int] = []  # noqa: RUF012 - nobody changes it
    depth = 1

    def __init__(self, config: Any, *args: Any, **more: Any) -> None:
        self.limits = EngineLimits(
            max_model_len=config.max_model_len or 8192,
            vocab_size=49152,
            num_blocks=config.num_blocks_override or 1 << 17,
            block_size=config.block_size,
        )
        rate = float(os.environ["PACED_STEPS"])
        self._seconds = 1 / rate if rate else 0.0
        self._ids = np.fromfile(os.environ["PACED_IDS"], np.int32)
        self._log = Path(os.environ["PACED_LOG"]).open("ab", buffering=0)  # noqa: SIM115 - until shutdown
        self._steps: deque[StepInput] = deque()
        self._next = 0.0

    def check(self) -> None:
        """Nothing can end."""

    def submit(self, step: StepInput) -> None:
        """Take a step."""
        self._steps.append(step)

    def collect(self) -> StepOutput:
        """Return the oldest step's tokens when its time has come."""
        step = self._steps.popleft()
        self._next = max(self._next + self._seconds, time.monotonic())
        while (left := self._next - time.monotonic()) > 0:
            time.sleep(left)
        count = int(step.plan.samples.sum())
        token = self._ids[step.plan.step % len(self._ids)]
        self._log.write(np.array([time.monotonic(), step.plan.step]).tobytes())
        return StepOutput(step.plan.step, np.full(count, token, np.int32), {}, {})

    def expert_loads(self) -> None:
        """There are no experts."""

    def shutdown(self) -> None:
        """Close the log."""
        self._log.close()


enginecore.core.start.make_executor = PacedExecutor  # ty: ignore[invalid-assignment]
