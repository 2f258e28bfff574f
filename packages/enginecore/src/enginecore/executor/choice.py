"""Which executor a configuration asks for."""

import sys

from collectives import attention_shards
from enginecore.config import EngineConfig
from enginecore.errors import ConfigError
from enginecore.executor.executor import Executor
from enginecore.model_files import ModelFiles
from enginecore.worker.models.families import decoder_spec


def make_executor(config: EngineConfig, files: ModelFiles) -> Executor:
    """Start the workers and return once they are ready.

    Raises:
        ConfigError: a device is not there, the cache does not fit, the system is not Linux, Ray is asked for
            and not installed, or its cluster does not answer or has too few devices.
        ModelError: the checkpoint cannot be loaded.
        EngineDeadError: a worker process ended while it started.
    """
    backend = config.distributed_executor_backend or ("inproc" if config.world_size == 1 else "mp")
    if backend == "inproc":
        from enginecore.executor.inproc import InprocExecutor

        return InprocExecutor(config, files)
    if sys.platform != "linux":
        raise ConfigError(f"worker processes need Linux, this is {sys.platform}: use one rank, inproc")
    _check_cuts(config, files)
    from enginecore.executor.distributed import DistributedExecutor

    if backend == "ray":
        from enginecore.executor.ray_cluster import RayWorkers

        workers = RayWorkers(config)
        try:
            return DistributedExecutor(workers.config, files, workers.launch, workers.placement)
        except BaseException:
            workers.close()
            raise
    from enginecore.executor.processes import start_processes

    return DistributedExecutor(config, files, start_processes)


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
