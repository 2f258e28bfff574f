"""One worker in the core's own process."""

from collections import deque

import numpy as np

from enginecore.config import EngineConfig
from enginecore.executor.executor import depth
from enginecore.executor.step import StepInput, StepOutput
from enginecore.model_files import ModelFiles
from enginecore.worker.runner.runner import PendingOutput
from enginecore.worker.worker import Worker


class InprocExecutor:
    """Runs steps on one device; on a GPU the next step is prepared while one runs."""

    descriptors = ()

    def __init__(self, config: EngineConfig, files: ModelFiles) -> None:
        self._worker = Worker(config, files)
        self._pending: deque[PendingOutput] = deque()
        self.num_blocks = self._worker.size.num_blocks
        self.host_blocks = self._worker.size.host_blocks
        self.window = self._worker.window
        self.max_model_len = self._worker.size.max_model_len
        self.vocab_size = self._worker.vocab_size
        self.depth = depth(config, on_cpu=self._worker.device.type == "cpu")

    def check(self) -> None:
        """There is no other process that could end."""

    def submit(self, step: StepInput) -> None:
        """Run a step, or on a GPU start it."""
        self._pending.append(self._worker.run(step))

    def collect(self) -> StepOutput:
        """Return the oldest step's results."""
        return self._pending.popleft().result()

    def expert_loads(self) -> np.ndarray | None:
        """Read the counters on the device."""
        return self._worker.expert_loads()

    def shutdown(self) -> None:
        """Drop the model and its cache."""
        self._pending.clear()
        del self._worker
