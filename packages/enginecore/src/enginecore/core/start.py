"""Start an engine core: plug-ins, policy, workers."""

from enginecore.config import EngineConfig
from enginecore.core.board import Board
from enginecore.core.engine_core import EngineCore
from enginecore.core.lockstep import Lockstep
from enginecore.core.policies import make_policy
from enginecore.data_parallel.meeting import Meeting
from enginecore.data_parallel.messages import ALONE, RankPlace
from enginecore.executor.executor import OnLoaded, OnPhase, make_executor
from enginecore.model_files import ModelFiles
from enginecore.plugins import import_all


def start_core(
    config: EngineConfig,
    files: ModelFiles,
    *,
    place: RankPlace = ALONE,
    meeting: Meeting | None = None,
    board: Board | None = None,
    on_loaded: OnLoaded | None = None,
    on_phase: OnPhase = lambda phase: None,
) -> EngineCore:
    """Import plug-ins, start the workers, and return a core once they are ready.

    `on_loaded` is told of weights as they are read, `on_phase` which part of starting begins. `board` is
    where other processes see what it does.

    Raises:
        ConfigError: a plug-in or the policy cannot be had, before anything is started; or as `make_executor`.
        ModelError, EngineDeadError: as `make_executor`.
    """
    import_all(config.plugins, config.plugin_path)
    policy = make_policy(config)
    lockstep = Lockstep(place.rank) if config.shares_experts else None
    executor = make_executor(
        config, files, place=place, meeting=meeting, on_loaded=on_loaded, on_phase=on_phase
    )
    return EngineCore(config, executor, policy, board=board, lockstep=lockstep)
