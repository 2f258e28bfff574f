"""Executors: the interface that the core steps over, and the choice of one."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from enginecore.config import EngineConfig
from enginecore.executor.step import StepInput, StepOutput
from enginecore.messages import EngineLimits


class Executor(Protocol):
    """Runs steps in the order in which they are submitted.

    An executor of several processes raises WorkerDied from every call once one of them has ended.
    """

    limits: EngineLimits
    depth: int
    """Steps worth having under way at once: 1 when `submit` does the work itself."""

    @property
    def descriptors(self) -> Sequence[int]:
        """File descriptors of which one becomes readable when `check` may have something to say."""
        ...

    def check(self) -> None:
        """Raise if the workers cannot go on, without waiting; for a core that has no step under way."""
        ...

    def submit(self, step: StepInput) -> None:
        """Start a step."""
        ...

    def collect(self) -> StepOutput:
        """Wait for the oldest step under way and return its results."""
        ...

    def expert_loads(self) -> np.ndarray | None:
        """Return how many tokens went to each expert in the steps submitted since the start.

        int64 [layers with experts, experts]; None for a model without experts.
        """
        ...

    def shutdown(self) -> None:
        """Give up devices and processes."""
        ...


def depth(config: EngineConfig, limits: EngineLimits) -> int:
    """Return how many steps to have under way: one a stage, if there are several stages.

    Otherwise, on devices, planning one hides behind the other by default.
    """
    if config.pipeline_parallel_size > 1:
        return config.pipeline_parallel_size
    overlap = limits.device != "cpu" if config.async_scheduling is None else config.async_scheduling
    return 2 if overlap else 1
