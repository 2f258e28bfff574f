"""One worker in the core's own process."""

from collections import deque

import numpy as np
import torch

from enginecore.config import EngineConfig
from enginecore.data_parallel.messages import ALONE, RankPlace
from enginecore.errors import EngineDeadError
from enginecore.executor.executor import OnLoaded, OnPhase, depth
from enginecore.executor.step import StepInput, StepOutput
from enginecore.model_files import ModelFiles
from enginecore.worker.runner.runner import PendingOutput
from enginecore.worker.worker import Worker, pick_device


class InprocExecutor:
    """Runs steps on one device; on a GPU the next step is prepared while one runs."""

    descriptors = ()
    local_pids: list[int] = []  # noqa: RUF012 - nobody changes it

    def __init__(
        self,
        config: EngineConfig,
        files: ModelFiles,
        place: RankPlace = ALONE,
        on_loaded: OnLoaded | None = None,
        on_phase: OnPhase = lambda phase: None,
    ) -> None:
        device = pick_device(config.device, place.local_index)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self._worker: Worker | None = Worker(
            config,
            files,
            device=device,
            local_size=place.local_count,
            on_phase=on_phase,
            on_loaded=on_loaded,
        )
        self._pending: deque[PendingOutput] = deque()
        self.limits = self._worker.limits
        self.depth = depth(config, self.limits)

    def check(self) -> None:
        """There is no other process that could end."""

    def submit(self, step: StepInput) -> None:
        """Run a step, or on a GPU start it."""
        self._pending.append(self._loaded().run(step))

    def collect(self) -> StepOutput:
        """Return the oldest step's results."""
        return self._pending.popleft().result()

    def expert_loads(self) -> np.ndarray | None:
        """Read the counters on the device."""
        return self._loaded().expert_loads()

    def shutdown(self) -> None:
        """Drop the model and its cache; a second call does nothing."""
        self._pending.clear()
        self._worker = None

    def _loaded(self) -> Worker:
        if self._worker is None:
            raise EngineDeadError("the engine was shut down")
        return self._worker
