"""Options given by environment variables and by a YAML file."""

import difflib
import re
from collections.abc import Collection, Mapping
from dataclasses import fields
from functools import lru_cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple

from enginecore.errors import ConfigError

PREFIX = "OCTAVO_"

LIBRARY_VARIABLES = frozenset(
    {"OCTAVO_ATTENTION_BACKEND", "OCTAVO_CACHE", "OCTAVO_CPU_INSTRUCTIONS", "OCTAVO_NCCL_LIBRARY"}
)
"""Variables that pagedattn and collectives read themselves."""

_SERVICE_NAMES = re.compile(
    r"(.+_)?(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://")


class Given(NamedTuple):
    """A value that somebody gave for an option, and where."""

    value: Any
    source: str


def from_environment(
    environment: Mapping[str, str], known: Collection[str]
) -> tuple[dict[str, Given], list[str]]:
    """Return the options in `known` that variables give, and a warning for each unknown variable.

    Passed over are options of other commands, variables of libraries, and those that Kubernetes sets in every
    pod for a service whose name begins with "octavo".
    """
    given, warnings = {}, []
    for variable, value in environment.items():
        name = variable.removeprefix(PREFIX).lower()
        if not variable.startswith(PREFIX) or name == "config" or _is_service_variable(variable, value):
            continue
        if name in known:
            given[name] = Given(value, variable)
        elif variable not in LIBRARY_VARIABLES and name not in _options_of_other_apps():
            warnings.append(f"environment variable {variable} names no option{_nearest(name, known)}")
    return given, warnings


def from_file(path: Path, known: Collection[str]) -> dict[str, Given]:
    """Return the options in `known` that a YAML file gives; those of other commands are passed over.

    Raises:
        ConfigError: the file cannot be read, or a key is unknown or given twice.
    """
    import yaml

    try:
        content = _without_repeats(yaml.compose(path.read_text(encoding="utf-8"), yaml.SafeLoader), path)
    except OSError as error:
        raise ConfigError(f"config file {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} is not valid YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"config file {path} must hold `option: value` lines")
    given: dict[str, Given] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name in given:
            raise ConfigError(f"config file {path}: {name} is given twice")
        if name in known:
            given[name] = Given(value, str(path))
        elif name not in _options_of_other_apps():
            raise ConfigError(f"config file {path}: unknown option {key!r}{_nearest(name, known)}")
    return given


def _is_service_variable(variable: str, value: str) -> bool:
    """Whether Kubernetes set a variable for a service: `NAME_SERVICE_HOST`, `NAME_PORT=tcp://…`, …"""
    name = variable.removeprefix(PREFIX)
    return bool(_SERVICE_NAMES.fullmatch(name) or (name.endswith("PORT") and _SERVICE_URL.match(value)))


@lru_cache(maxsize=1)
def _options_of_other_apps() -> frozenset[str]:
    """Return the names of all options that installed apps declare."""
    records = [entry.load() for entry in entry_points(group="octavo.options")]
    return frozenset(field.name for record in records for field in fields(record))


def _nearest(name: str, known: Collection[str]) -> str:
    found = difflib.get_close_matches(name, known, n=1)
    return f"; the nearest is {found[0]}" if found else ""


def _without_repeats(root: Any, path: Path) -> Any:
    """Return the value of the YAML node `root`; of two lines for one key, YAML itself drops the first."""
    import yaml

    if isinstance(root, yaml.MappingNode):
        keys = [key.value for key, _ in root.value]
        for key in keys:
            if keys.count(key) > 1:
                raise ConfigError(f"config file {path}: {key} is given twice")
    return None if root is None else yaml.SafeLoader("").construct_document(root)
