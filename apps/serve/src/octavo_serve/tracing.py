"""Sets up spans of requests for a collector; imports nothing of OpenTelemetry until one is given."""

import importlib.util
import os
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from enginecore.errors import ConfigError

if TYPE_CHECKING:
    from octavo_serve.span_export import Traces

DEFAULT_PATH = "/v1/traces"
"""Where collectors take spans by OTLP over HTTP; for an endpoint that names no path."""

_PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PROTOCOL = "http/protobuf"
_NEEDED = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


def check() -> None:
    """Find out whether spans can be exported, without importing what does it.

    Raises:
        ConfigError: the extra is not installed, or the environment asks for another protocol.
    """
    if not all(map(_is_installed, _NEEDED)):
        raise ConfigError(
            "otlp_traces_endpoint needs OpenTelemetry, which is not installed: "
            "`pip install 'octavo-serve[otel]'`, or `uv add 'octavo-serve[otel]'`"
        )
    for variable in _PROTOCOL_VARIABLES:
        protocol = os.environ.get(variable)
        if protocol:
            if protocol != _PROTOCOL:
                raise ConfigError(
                    f"{variable}={protocol} is not supported: spans are sent by {_PROTOCOL}; "
                    f"set {_PROTOCOL_VARIABLES[0]}={_PROTOCOL} and the endpoint's port for it, usually 4318"
                )
            return


def open_traces(endpoint: str) -> "Traces":
    """Return what takes the spans for the collector at a URL, as the OTEL_* variables say.

    Raises:
        ConfigError: as `check`; or a variable has a value that OpenTelemetry refuses.
    """
    check()
    try:
        from octavo_serve.span_export import Traces

        return Traces.to_collector(with_path(endpoint))
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"otlp_traces_endpoint: OpenTelemetry cannot be set up: {error}") from error


def with_path(endpoint: str) -> str:
    """Return a collector's URL with the usual path if it has none."""
    parts = urlsplit(endpoint)
    return endpoint if parts.path else parts._replace(path=DEFAULT_PATH).geturl()


def without_secrets(endpoint: str) -> str:
    """Return a collector's URL for the log: without a user, a password and a query."""
    parts = urlsplit(endpoint)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a package around it
        return False
