"""Values that a field may have, shared by the bodies of several APIs."""

from collections.abc import Mapping, Sequence
from typing import Any

from enginecore.errors import RequestError

EFFORTS = ("low", "medium", "high", "xhigh", "max")
"""How much a model may be asked to think; both APIs have them."""


def one_of(
    fields: Mapping[str, Any], name: str, where: str, known: Sequence[str], refused: Sequence[str] = ()
) -> str | None:
    """Return `fields[name]`, a field of the object `where`; None if it is absent.

    Raises:
        RequestError: it is none of `known`, or one of `refused`: the API's values that are not here.
    """
    value = fields.get(name)
    if value is None or (isinstance(value, str) and value in known):
        return value
    field = f"{where}.{name}"
    if isinstance(value, str) and value in refused:
        raise RequestError(f"{field} {value!r} is not supported, only {', '.join(known)}", field)
    raise RequestError(f"{field} must be one of {', '.join((*known, *refused))}, got {value!r:.80}", field)
