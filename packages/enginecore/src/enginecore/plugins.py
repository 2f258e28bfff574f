"""Code of the user's own, loaded by name: `module:name`."""

import importlib
import sys
from pathlib import Path
from typing import Any

from enginecore.errors import ConfigError


def load(reference: str, plugin_path: str) -> Any:
    """Return what `reference` names, such as `my_policies:Longest`.

    Its module is installed, or lies in the folder `plugin_path`, which is put last on the search path: a file
    there hides no installed module.

    Raises:
        ConfigError: there is no such module or name, or the module cannot be imported.
    """
    module_name, separator, name = reference.partition(":")
    if not (module_name and separator and name):
        raise ConfigError(f"{reference!r} must be module:name, such as my_policies:Longest")
    folder = str(Path(plugin_path).absolute())
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        found = importlib.import_module(module_name)
        for part in name.split("."):
            found = getattr(found, part)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{reference}: {error}; plugin_path is {folder}") from error
    except Exception as error:
        raise ConfigError(f"{reference} cannot be loaded: {type(error).__name__}: {error}") from error
    return found
