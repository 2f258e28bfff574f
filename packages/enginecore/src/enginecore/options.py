"""Options of a command: the command line beats the environment beats a file beats the default.

A command describes its options as frozen dataclasses (`EngineConfig`, and one of its own). Each field is one
option: `--max-num-seqs 8` on the command line, `OCTAVO_MAX_NUM_SEQS=8` in the environment and
`max_num_seqs: 8` (or `max-num-seqs`) in the YAML file that `--config` names.
"""

import argparse
import dataclasses
import os
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, Union, get_args, get_origin, get_type_hints

import msgspec

from enginecore.errors import ConfigError, OctavoError

PREFIX = "OCTAVO_"

NOT_OPTIONS = frozenset({"OCTAVO_ATTENTION_BACKEND"})
"""Variables that a library reads by itself; no option has their name."""

_SERVER_NAMES = (
    "host",
    "port",
    "api_key",
    "served_model_name",
    "shutdown_timeout",
    "cors_origins",
    "log_level",
)
SERVER_OPTIONS = frozenset(PREFIX + name.upper() for name in _SERVER_NAMES)
"""Variables of the HTTP server's own options: other commands pass over them: one environment serves all."""


class _Once(argparse.Action):
    """An option that may be given once: a second one would hide the first."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if getattr(namespace, self.dest) is not None:
            parser.error(f"{option_string} is given twice")
        setattr(namespace, self.dest, values)


class Option(NamedTuple):
    """One option, as a dataclass field declares it."""

    name: str
    kind: Any
    """The field's type: str, int, float, bool, Literal, tuple[str, ...], or one of these or None."""
    default: Any
    help: str
    repeat: bool
    """A list whose flag takes one value and may be given again; other lists take several values at once."""


class Given(NamedTuple):
    """A value that somebody gave for an option, and where."""

    value: Any
    source: str


def options_of(record: type[Any]) -> list[Option]:
    """Return the options that the dataclass `record` declares, in order."""
    kinds = get_type_hints(record)
    return [
        Option(
            entry.name,
            _without_none(kinds[entry.name]),
            entry.default,
            entry.metadata["help"],
            entry.metadata.get("repeat", False),
        )
        for entry in dataclasses.fields(record)
    ]


class OptionParser(argparse.ArgumentParser):
    """A parser with MODEL, `--config` and `--version`, and a flag for each field of the given dataclasses.

    Wrong usage is one line on stderr and exit status 2.
    """

    def __init__(
        self, program: str, description: str, version: str, records: Mapping[str, type[Any]]
    ) -> None:
        """`records` maps a heading of the help page to a dataclass."""
        super().__init__(prog=program, description=description, allow_abbrev=False)
        self.records = records
        self.add_argument("--version", action="version", version=f"{program} {version}")
        self.add_argument("--config", metavar="FILE", action=_Once, help="YAML file of options")
        self.add_argument("positional_model", nargs="?", metavar="MODEL", help="the same as --model")
        for heading, record in records.items():
            group = self.add_argument_group(heading)
            for option in options_of(record):
                group.add_argument(
                    "--" + option.name.replace("_", "-"), dest=option.name, **_flag_arguments(option)
                )

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")

    def read(
        self, arguments: Sequence[str] | None = None, environment: Mapping[str, str] | None = None
    ) -> list[Any]:
        """Return an instance of each dataclass, in order.

        Raises:
            ConfigError: an option is unknown, of the wrong type, out of range or contradicts another.
        """
        environment = os.environ if environment is None else environment
        flags = vars(self.parse_args(arguments))
        known = {option.name for record in self.records.values() for option in options_of(record)}
        file = flags.pop("config") or environment.get(PREFIX + "CONFIG")
        given = _from_file(Path(file).expanduser(), known) if file else {}
        given |= _from_environment(environment, known)
        given |= _from_flags(flags)
        return [build(record, given) for record in self.records.values()]


def build(record: type[Any], given: Mapping[str, Given]) -> Any:
    """Return `record` with the values of `given` that are its own; texts are read as the option's type.

    Raises:
        ConfigError: a value is of the wrong type, or `record` refuses it.
    """
    options = {option.name: option for option in options_of(record)}
    return record(**{name: _read(options[name], entry) for name, entry in given.items() if name in options})


def run_command(program: str, command: Callable[[], int]) -> int:
    """Run `command` and return its exit status; an error that a user can mend is one line and status 2."""
    try:
        return command()
    except OctavoError as error:
        print(f"{program}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read the output has gone. What is still buffered must not fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _from_flags(flags: dict[str, Any]) -> dict[str, Given]:
    positional = flags.pop("positional_model")
    if positional is not None:
        if flags.get("model", positional) != positional:
            raise ConfigError(f"the model is named twice: {positional} and --model {flags['model']}")
        flags["model"] = positional
    return {name: Given(value, "--" + name.replace("_", "-")) for name, value in flags.items()}


def _from_environment(environment: Mapping[str, str], known: set[str]) -> dict[str, Given]:
    given = {}
    for variable, value in environment.items():
        name = variable.removeprefix(PREFIX).lower()
        if not variable.startswith(PREFIX) or name == "config":
            continue
        if name in known:
            given[name] = Given(value, variable)
        elif variable not in NOT_OPTIONS | SERVER_OPTIONS:
            raise ConfigError(f"environment variable {variable} names no option {name!r}")
    return given


def _from_file(path: Path, known: set[str]) -> dict[str, Given]:
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
        if name not in known:
            raise ConfigError(f"config file {path}: unknown option {key!r}")
        if name in given:
            raise ConfigError(f"config file {path}: {name} is given twice")
        given[name] = Given(value, str(path))
    return given


def _without_repeats(root: Any, path: Path) -> Any:
    """Return what the YAML node `root` stands for; of two lines for one key, YAML itself drops the first."""
    import yaml

    if isinstance(root, yaml.MappingNode):
        keys = [key.value for key, _ in root.value]
        for key in keys:
            if keys.count(key) > 1:
                raise ConfigError(f"config file {path}: {key} is given twice")
    return None if root is None else yaml.SafeLoader("").construct_document(root)


def _flag_arguments(option: Option) -> dict[str, Any]:
    shown = "" if option.default in (None, ()) else f" [{option.default}]"
    arguments: dict[str, Any] = {
        "default": argparse.SUPPRESS,
        "help": f"{option.help}{shown}".replace("%", "%%"),
    }
    if option.kind is bool:
        arguments["action"] = argparse.BooleanOptionalAction
    elif get_origin(option.kind) is Literal:
        arguments["choices"] = get_args(option.kind)
    elif get_origin(option.kind) is tuple:
        arguments |= {"action": "append"} if option.repeat else {"action": "extend", "nargs": "+"}
        arguments["metavar"] = "TEXT"
    else:
        arguments["metavar"] = {int: "N", float: "X"}.get(option.kind, "TEXT")
    return arguments


def _read(option: Option, given: Given) -> Any:
    value = given.value
    if value is None and option.default is None:
        return None
    try:
        if get_origin(option.kind) is tuple and isinstance(value, str):
            value = msgspec.json.decode(value) if value.startswith("[") else [value]
        return msgspec.convert(value, option.kind, strict=False)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"{option.name} must be {_in_words(option.kind)}, got {given.value!r} (from {given.source})"
        ) from error


def _in_words(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, get_args(kind)))
    if get_origin(kind) is tuple:
        return "a list of texts"
    return {bool: "true or false", int: "an integer", float: "a number", str: "text"}[kind]


def _without_none(kind: Any) -> Any:
    """`int | None` is read as an integer: an option that is left out is None."""
    if get_origin(kind) in (Union, types.UnionType):
        return next(part for part in get_args(kind) if part is not type(None))
    return kind
