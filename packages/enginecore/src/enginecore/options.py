"""Options of a command: the command line beats the environment beats a file beats the default.

A command describes its options as frozen dataclasses (`EngineConfig`, and one of its own). Each field is one
option: `--max-num-seqs 8` on the command line, `OCTAVO_MAX_NUM_SEQS=8` in the environment and
`max_num_seqs: 8` (or `max-num-seqs`) in the YAML file that `--config` names.

Commands may share an environment and a file: an app declares the dataclasses of its options as entry points
of the group `octavo.options`, and other commands pass over what is declared there and not their own.
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
from enginecore.option_sources import PREFIX, Given, from_environment, from_file
from enginecore.vllm_options import VLLMOptions


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
    """The field's type: str, int, float, bool, Literal, tuple[str, ...], dict[str, Any] (a JSON object), or
    one of these or None."""
    default: Any
    help: str
    repeat: bool
    """A list whose flag takes one value and may be given again; other lists take several values at once."""


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
    """A parser with `--config` and `--version`, and a flag for each field of the given dataclasses.

    A command of a model has MODEL too, and the options of vLLM's command lines that have no effect.

    Wrong usage is one line on stderr and exit status 2.
    """

    def __init__(
        self,
        program: str,
        description: str,
        version: str,
        records: Mapping[str, type[Any]],
        *,
        model: bool = True,
    ) -> None:
        """`records` maps a heading of the help page to a dataclass; `model`: whether the command has one."""
        super().__init__(prog=program, description=description, allow_abbrev=False)
        self.records = dict(records)
        if model:
            self.records["without effect, for vLLM's command lines"] = VLLMOptions
        self.given: Mapping[str, Given] = {}
        """After `read`: the options that were given, by name."""
        self.add_argument("--version", action="version", version=f"{program} {version}")
        self.add_argument("--config", metavar="FILE", action=_Once, help="YAML file of options")
        if model:
            self.add_argument("positional_model", nargs="?", metavar="MODEL", help="the same as --model")
        for heading, record in self.records.items():
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
        """Return an instance of each given dataclass, in order; what has no effect is checked and logged.

        Raises:
            ConfigError: an option is unknown, of the wrong type, out of range or contradicts another.
        """
        environment = os.environ if environment is None else environment
        flags = vars(self.parse_args(arguments))
        known = {option.name for record in self.records.values() for option in options_of(record)}
        file = flags.pop("config") or environment.get(PREFIX + "CONFIG")
        given = from_file(Path(file).expanduser(), known) if file else {}
        from_variables, warnings = from_environment(environment, known)
        for warning in warnings:
            print(f"{self.prog}: warning: {warning}", file=sys.stderr)
        given |= from_variables
        given |= _from_flags(flags)
        self.given = given
        built = [build(record, given) for record in self.records.values()]
        return [options for options in built if not isinstance(options, VLLMOptions)]


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
    positional = flags.pop("positional_model", None)
    if positional is not None:
        if flags.get("model", positional) != positional:
            raise ConfigError(f"the model is named twice: {positional} and --model {flags['model']}")
        flags["model"] = positional
    return {name: Given(value, "--" + name.replace("_", "-")) for name, value in flags.items()}


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
    elif get_origin(option.kind) is dict:
        arguments["metavar"] = "JSON"
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
        if get_origin(option.kind) is dict and isinstance(value, str):
            value = msgspec.json.decode(value)
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
    if get_origin(kind) is dict:
        return "a JSON object"
    return {bool: "true or false", int: "an integer", float: "a number", str: "text"}[kind]


def _without_none(kind: Any) -> Any:
    """`int | None` is read as an integer: an option that is left out is None."""
    if get_origin(kind) in (Union, types.UnionType):
        return next(part for part in get_args(kind) if part is not type(None))
    return kind
