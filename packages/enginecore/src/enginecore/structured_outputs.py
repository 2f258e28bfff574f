"""Structured-output parameters of a request: vLLM's names and rules."""

import json
from collections.abc import Mapping
from typing import Any, Self

import msgspec

MAX_GUIDE_BYTES = 65_536
"""Most bytes of a schema, regex, grammar, structural tag or all choices together, in UTF-8."""

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""Fields of which exactly one is set."""

_ABSENT = {"disable_fallback": False, "disable_additional_properties": False, "backend": None}
"""vLLM's fields that are not here, and the value of each that asks for nothing."""


class StructuredOutputsParams(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The form of an output: exactly one of `KINDS`. Validated on construction, but for what compiling finds.

    Raises:
        ValueError: none or several kinds are given, or a field is of the wrong type or too long.
    """

    json: str | dict[str, Any] | None = None
    """A JSON Schema, as an object or as its text. Kept as text."""
    regex: str | None = None
    """A regular expression (Rust's syntax) for the whole output."""
    choice: list[str] | None = None
    grammar: str | None = None
    """A grammar in Lark's or GBNF's notation; it begins at `start` or `root`."""
    json_object: bool | None = None
    """True: any JSON object."""
    disable_any_whitespace: bool = False
    """Whether JSON has no space or line break outside of strings."""
    whitespace_pattern: str | None = None
    """Regular expression for what may stand between JSON's tokens."""
    structural_tag: str | dict[str, Any] | None = None
    """`{"structures": [{"begin", "schema", "end"}], "triggers": [...]}`, as an object or its text: free
    text in which each trigger opens one of the structures that begin with it. Kept as text."""

    @classmethod
    def of(cls, given: Any) -> Self:
        """Return `given`, or the parameters that it names if it is a mapping of fields.

        Raises:
            ValueError: it is neither, or names an unknown field; or as the constructor.
        """
        if isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            raise ValueError(f"must be StructuredOutputsParams or a mapping of its fields, got {given!r:.80}")
        fields = dict(given)
        for name, harmless in _ABSENT.items():
            if fields.pop(name, None) not in (None, harmless):
                raise ValueError(f"{name} is not supported")
        unknown = [name for name in fields if name not in cls.__struct_fields__]
        if unknown:
            known = ", ".join(cls.__struct_fields__)
            raise ValueError(f"there is no field {unknown[0]!r:.80}, only {known}")
        return cls(**{name: value for name, value in fields.items() if value is not None})

    @property
    def kind(self) -> str:
        """The one of `KINDS` that is set."""
        return _kinds(self)[0]

    def __post_init__(self) -> None:
        if self.json_object is not None and not isinstance(self.json_object, bool):
            raise ValueError(f"json_object must be true or false, got {self.json_object!r:.80}")
        if not isinstance(self.disable_any_whitespace, bool):
            raise ValueError(
                f"disable_any_whitespace must be true or false, got {self.disable_any_whitespace!r:.80}"
            )
        kinds = _kinds(self)
        if len(kinds) != 1:
            raise ValueError(
                f"exactly one of {', '.join(KINDS)} must be given, got {', '.join(kinds) or 'none'}"
            )
        for name in ("json", "structural_tag"):
            setattr(self, name, _json_text(name, getattr(self, name)))
        for name in ("regex", "grammar", "whitespace_pattern"):
            _check_text(name, getattr(self, name))
        if self.choice is not None:
            self.choice = _choices(self.choice)
        if self.whitespace_pattern is not None:
            if kinds[0] not in ("json", "json_object"):
                raise ValueError(f"whitespace_pattern is for JSON, not for {kinds[0]}")
            if self.disable_any_whitespace:
                raise ValueError("whitespace_pattern and disable_any_whitespace contradict each other")


def _kinds(params: StructuredOutputsParams) -> list[str]:
    return [
        name for name in KINDS if getattr(params, name) is not None and getattr(params, name) is not False
    ]


def _json_text(name: str, value: Any) -> str | None:
    if value is None:
        return None
    try:
        if isinstance(value, str):
            _check_text(name, value)
            value = json.loads(value)
        elif not isinstance(value, Mapping):
            raise ValueError(f"must be an object or its text, got {value!r:.80}")
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except RecursionError:
        raise ValueError(f"{name} is nested too deeply") from None
    except (TypeError, ValueError) as error:
        message = str(error)
        raise ValueError(message if message.startswith(name) else f"{name}: {message}") from None
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be an object, got {text:.80}")
    _check_text(name, text)
    return text


def _check_text(name: str, text: Any) -> None:
    if text is None:
        return
    if not isinstance(text, str):
        raise ValueError(f"{name} must be a text, got {text!r:.80}")
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise ValueError(f"{name} holds half a surrogate pair, which is no character") from None
    if size > MAX_GUIDE_BYTES:
        raise ValueError(f"{name} may have at most {MAX_GUIDE_BYTES} bytes, got {size}")


def _choices(choices: Any) -> list[str]:
    if not isinstance(choices, list | tuple) or not choices:
        raise ValueError(f"choice must be a list of texts, at least one, got {choices!r:.80}")
    for text in choices:
        _check_text("choice", text)
        if not text:
            raise ValueError("choice holds an empty text")
    _check_text("choice", "".join(choices))
    return list(choices)
