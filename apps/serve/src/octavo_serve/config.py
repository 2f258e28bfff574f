"""The HTTP server's own options; those of the engine are in `enginecore.config`."""

from dataclasses import dataclass, field
from typing import Any, Literal

from enginecore.errors import ConfigError


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Options of the HTTP server. Raises ConfigError when one is out of range."""

    host: str = _option("127.0.0.1", "address to listen on; 0.0.0.0 or :: for every network")
    port: int = _option(8000, "port to listen on; 0: any free one")
    api_key: str | None = _option(None, "key that clients must send as a bearer token; default: none needed")
    served_model_name: tuple[str, ...] = _option(
        (), "names by which clients may call the model; default: MODEL as given"
    )
    api_server_count: int | None = _option(
        None, "processes that speak HTTP, on one port; default: one for each data-parallel rank"
    )
    shutdown_timeout: float = _option(
        30.0, "seconds that running requests get to finish after SIGTERM or Ctrl-C before they are aborted"
    )
    cors_origins: tuple[str, ...] = _option((), "web origins whose pages may call the server, * for all")
    log_level: Literal["debug", "info", "warning", "error"] = _option(
        "info", "least serious messages to log; info has a line for each request, debug for each probe too"
    )
    log_format: Literal["text", "json"] = _option("text", "format of the log on standard error")
    metrics_prefix: str = _option("octavo_", "beginning of the metrics' names; vllm: gives vLLM's own names")

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be between 0 and 65535, got {self.port}")
        if not 0 <= self.shutdown_timeout < float("inf"):
            raise ConfigError(
                f"shutdown_timeout must be finite and at least 0 seconds, got {self.shutdown_timeout}"
            )
        if self.api_server_count is not None and self.api_server_count < 1:
            raise ConfigError(f"api_server_count must be at least 1, got {self.api_server_count}")
        if self.api_key == "":
            raise ConfigError("api_key is empty: give a key, or leave the option out")
        if "" in self.served_model_name:
            raise ConfigError("served_model_name holds an empty name")
