"""The scheduling policy that the options name: one of batchsched's, or a class of somebody else."""

from batchsched import Fcfs, Policy, Priority, ShortestFirst, TimeSlice
from enginecore.config import EngineConfig
from enginecore.errors import ConfigError
from enginecore.plugins import load


def make_policy(config: EngineConfig) -> Policy:
    """Return the policy that `scheduling_policy` names.

    Raises:
        ConfigError: it names a class that cannot be loaded or is no policy.
    """
    match config.scheduling_policy:
        case "fcfs":
            return Fcfs()
        case "priority":
            return Priority()
        case "time_slice":
            return TimeSlice(config.time_slice_tokens)
        case "shortest_first":
            return ShortestFirst()
    return load_policy(config.scheduling_policy, config.plugin_path)


def load_policy(reference: str, plugin_path: str = ".") -> Policy:
    """Return an instance of the policy class that `module:Class` names, made without arguments.

    Raises:
        ConfigError: there is no such class, it is no policy, or its constructor raises; the message has
            `reference`.
    """
    found = load(reference, plugin_path)
    if not isinstance(found, type):
        raise ConfigError(f"{reference} is a {type(found).__name__}, not a class: name a policy's class")
    try:
        policy = found()
    except Exception as error:  # whatever somebody else's class raises
        said = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{reference}: making the policy, without arguments, failed: {said}") from error
    lacking = [name for name in ("rank", "victim") if not callable(getattr(policy, name, None))]
    lacking += [name for name in ("quantum", "margin") if not hasattr(policy, name)]
    if lacking:
        raise ConfigError(
            f"{reference} is no policy, as it has no {', '.join(lacking)}: inherit from batchsched.Fcfs"
        )
    return policy
