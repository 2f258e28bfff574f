"""The interface of what runs the core's steps, and the choice among its implementations."""

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from collectives import attention_shards
from enginecore.config import EngineConfig
from enginecore.data_parallel.meeting import Meeting
from enginecore.data_parallel.messages import ALONE, RankPlace
from enginecore.errors import ConfigError
from enginecore.executor.step import StepInput, StepOutput
from enginecore.messages import EngineLimits
from enginecore.model_files import ModelFiles
from enginecore.threads import prepare as prepare_threads
from enginecore.worker.models.families import decoder_spec

if TYPE_CHECKING:
    from enginecore.executor.distributed import WorkerHandle

OnLoaded = Callable[[int, int], object]
"""Is told how many of a rank's tensors are loaded, and of how many."""
OnPhase = Callable[[str], object]
"""Is told, in a few words, which part of starting begins."""


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

    @property
    def local_pids(self) -> list[int]:
        """Process ids of workers on this host that are processes of their own."""
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
        """Return how many tokens of this engine went to each expert in the steps submitted since the start.

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


def make_executor(
    config: EngineConfig,
    files: ModelFiles,
    *,
    place: RankPlace = ALONE,
    meeting: Meeting | None = None,
    on_loaded: OnLoaded | None = None,
    on_phase: OnPhase = lambda phase: None,
) -> Executor:
    """Start the workers and return once they are ready.

    The ranks of a host divide its devices, cores and memory by `place`. `meeting` is for ranks that share
    experts. `on_loaded` is told of the first worker's weights as they are read, `on_phase` how far it is.

    Raises:
        ConfigError: a device is not there, the cache does not fit, the system is not Linux, Ray is asked for
            and not installed, or its cluster does not answer or has too few devices.
        ModelError: the checkpoint cannot be loaded.
        EngineDeadError: a worker process ended while it started, or no word came from the first rank.
    """
    backend = _backend(config)
    if backend == "inproc":
        prepare_threads(place.local_count)
        on_phase("importing torch")
        from enginecore.executor.inproc import InprocExecutor

        return InprocExecutor(config, files, place, on_loaded, on_phase)
    if sys.platform != "linux":
        raise ConfigError(f"worker processes need Linux, this is {sys.platform}: use one rank, inproc")
    _check_cuts(config, files)
    rendezvous = ""
    if config.shares_experts:
        if meeting is None:
            raise ConfigError(
                f"enable_expert_parallel with data_parallel_size={config.data_parallel_size}: ranks share "
                "experts, and this engine was started by itself"
            )
        rendezvous = "" if meeting.is_first else meeting.address()
    from enginecore.executor.distributed import DistributedExecutor

    on_phase("starting the workers")
    if backend == "ray":
        from enginecore.executor.ray_cluster import join_cluster, start_actors

        config = join_cluster(config)
        workers: Sequence[WorkerHandle] = start_actors(config)
    else:
        from enginecore.executor.processes import start_processes

        workers = start_processes(config, place)
    return DistributedExecutor(
        workers,
        config,
        files,
        place=place,
        meeting=meeting,
        rendezvous=rendezvous,
        on_loaded=on_loaded,
        on_phase=on_phase,
    )


def runs_in_process(config: EngineConfig) -> bool:
    """Return whether the worker of such an engine runs in its core's process."""
    return _backend(config) == "inproc"


def _backend(config: EngineConfig) -> str:
    in_process = config.world_size == 1 and not config.shares_experts
    return config.distributed_executor_backend or ("inproc" if in_process else "mp")


def _check_cuts(config: EngineConfig, files: ModelFiles) -> None:
    """Refuse what no rank could load, before there is a process for each."""
    spec = decoder_spec(files.config)
    stages, ranks = config.pipeline_parallel_size, config.tensor_parallel_size
    if stages > spec.num_layers:
        raise ConfigError(
            f"pipeline_parallel_size={stages} is more than the {spec.num_layers} layers the model has"
        )
    try:
        attention_shards(spec.num_heads, spec.num_kv_heads, ranks)
    except ValueError as error:
        raise ConfigError(f"tensor_parallel_size={ranks}: {error}") from error
    if config.enable_expert_parallel and spec.experts is None:
        raise ConfigError("enable_expert_parallel: the model has no experts")
