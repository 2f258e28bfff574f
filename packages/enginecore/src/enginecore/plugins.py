"""Code of others that options name: policies, model families."""

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from enginecore.errors import ConfigError


def load(reference: str, plugin_path: str = ".") -> Any:
    """Return the object that `module:name` names.

    The module is looked for in the folder `plugin_path` after everything that is installed.

    Raises:
        ConfigError: there is no such module or name, or the module raises; the message has `reference`.
    """
    module, colon, name = reference.partition(":")
    if not colon or not name.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        raise ConfigError(f"{reference}: write it as module:Name, with the module's dots and no path")
    found = import_module(module, plugin_path, reference)
    if not hasattr(found, name):
        raise ConfigError(f"{reference}: module {module} ({found.__file__}) has no {name}")
    return getattr(found, name)


def import_all(modules: Sequence[str], plugin_path: str = ".") -> None:
    """Import each module, in order. Raises ConfigError as `load` does."""
    for module in modules:
        import_module(module, plugin_path, module)


def import_module(module: str, plugin_path: str, reference: str) -> Any:
    """Import `module`, for which `reference` asks. Raises ConfigError as `load` does."""
    folder = str(Path(plugin_path).expanduser().resolve())
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"{reference}: there is no module {error.name}, installed or in {folder}"
            ) from error
        raise ConfigError(
            f"{reference}: {module} needs the module {error.name}, which is not there"
        ) from error
    except Exception as error:  # whatever somebody else's module raises
        raise ConfigError(
            f"{reference}: importing {module} failed: {type(error).__name__}: {error}"
        ) from error
